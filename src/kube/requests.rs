//! Counts the requests to API servers by their results. Conflicts, refusals and overload show there, whichever watch or
//! controller they concern.

use std::task::{Context, Poll};

use futures::{FutureExt, future::BoxFuture};
use http::{Method, Request, Response, StatusCode};
use prometheus::{IntCounterVec, Registry};
use tower::{Layer, Service};

use crate::{base::ClusterId, metrics};

/// The counter of requests to all API servers. Cheap to clone.
#[derive(Clone)]
pub struct RequestMetrics(IntCounterVec);

impl RequestMetrics {
    /// Registers the counter.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = metrics::counters(
            registry,
            "istiod_kubernetes_requests_total",
            "Requests to API servers, by method and status code; the code is none without a response.",
            &["cluster", "method", "code"],
        )?;
        Ok(Self(counter))
    }

    /// Returns the counter of a cluster's requests.
    pub fn of(&self, cluster: &ClusterId) -> ClusterRequests {
        ClusterRequests(Some((self.0.clone(), cluster.clone())))
    }
}

/// The counter of a cluster's requests. The default counts nothing.
#[derive(Clone, Default)]
pub struct ClusterRequests(Option<(IntCounterVec, ClusterId)>);

impl ClusterRequests {
    fn count(&self, method: &Method, code: Option<StatusCode>) {
        if let Some((counter, cluster)) = &self.0 {
            let code = code.as_ref().map_or("none", StatusCode::as_str);
            counter
                .with_label_values(&[cluster.as_str(), method.as_str(), code])
                .inc();
        }
    }
}

/// A request that counts when it ends, also if its caller does not wait any longer.
struct Counting {
    requests: ClusterRequests,
    method: Method,
    code: Option<StatusCode>,
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.requests.count(&self.method, self.code);
    }
}

/// Layer that counts requests.
pub(super) struct CountLayer(pub(super) ClusterRequests);

impl<S> Layer<S> for CountLayer {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted {
            inner,
            requests: self.0.clone(),
        }
    }
}

/// A service whose requests are counted.
pub(super) struct Counted<S> {
    inner: S,
    requests: ClusterRequests,
}

impl<S, A, B> Service<Request<A>> for Counted<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let counting = Counting {
            requests: self.requests.clone(),
            method: request.method().clone(),
            code: None,
        };
        let responding = self.inner.call(request);
        async move {
            // The block would capture the field alone.
            let mut counting = counting;
            let response = responding.await;
            counting.code = response.as_ref().ok().map(Response::status);
            response
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, io};

    use super::*;

    #[tokio::test]
    async fn requests_count_by_result() {
        let metrics = RequestMetrics::new(&Registry::new()).expect("a new name");
        let service = tower::service_fn(|request: Request<()>| async move {
            match request.uri().path() {
                "/busy" => Ok(Response::builder().status(429).body(()).expect("a response")),
                "/hangs" => pending().await,
                _ => Err(io::Error::other("down")),
            }
        });
        let mut counted = CountLayer(metrics.of(&ClusterId::new_static("c"))).layer(service);
        let get = |path: &str| Request::get(path).body(()).expect("a request");
        assert!(counted.call(get("/busy")).await.is_ok());
        assert!(counted.call(get("/down")).await.is_err());
        drop(counted.call(get("/hangs")));
        let count = |code: &str| metrics.0.with_label_values(&["c", "GET", code]).get();
        assert_eq!((count("429"), count("none"), count("200")), (1, 2, 0));
    }
}
