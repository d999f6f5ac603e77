//! Clients of API servers: credentials and rate limits.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use ::kube::{
    Client, Config,
    client::ClientBuilder,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use futures::{FutureExt, future::BoxFuture};
use http::{HeaderValue, Uri, header::USER_AGENT};
use tokio::time::{Instant, timeout};
use tower::{Layer, Service};

use super::{
    kubeconfig::client_config,
    requests::{ClusterRequests, CountLayer},
};

/// The longest wait for the response to a request. API servers end slower requests, except watches, after a minute.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(65);

/// Credentials of a cluster.
#[derive(Clone, Debug)]
pub enum Access {
    /// Service account of istiod's pod. The library reads its token and the roots of the API server again every minute
    /// (`Config::root_cert_file`), and keeps the last ones if that fails.
    InCluster,
    /// Current context of a kubeconfig file.
    Kubeconfig(PathBuf),
    /// Current context of these kubeconfig files, merged.
    Files(Vec<PathBuf>, Box<Kubeconfig>),
    /// The API server that client-go assumes without any configuration: port 8080 of this machine.
    Local,
    /// A given configuration, such as from a remote-cluster Secret.
    Given(Box<Config>),
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InCluster => f.write_str("service account"),
            Self::Kubeconfig(path) => write!(f, "{}", path.display()),
            Self::Files(paths, _) => {
                let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
                f.write_str(&paths.join(":"))
            }
            Self::Local => f.write_str("http://localhost:8080"),
            Self::Given(_) => f.write_str("remote cluster Secret"),
        }
    }
}

/// Request rate of a client: `per_second` on average, `burst` at once. No limit without a positive rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// `--kubernetesApiQPS`.
    pub per_second: f64,
    /// `--kubernetesApiBurst`.
    pub burst: u32,
}

impl Rate {
    /// No limit, for commands that a user waits for.
    pub const UNLIMITED: Self = Self {
        per_second: 0.0,
        burst: 0,
    };
}

/// Reason why there is no client. Not retryable with the same settings.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Not in a pod, or the service account is not mounted.
    #[error(
        "cannot access the cluster that istiod runs in: {0}; hint: outside a cluster set --kubeconfig or --configDir"
    )]
    InCluster(#[from] InClusterError),
    /// The file is invalid.
    #[error("cannot use the kubeconfig {path}: {error}")]
    Kubeconfig {
        /// File.
        path: PathBuf,
        /// Error.
        error: Box<KubeconfigError>,
    },
    /// Certificates or credentials are invalid.
    #[error("cannot create API server client: {0}")]
    Client(#[from] Box<::kube::Error>),
}

/// Installs the process's cryptography provider. Must be called before the first TLS client or server; later calls do
/// nothing.
pub fn install_cryptography() {
    // An error means that one is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Reads the credentials.
pub async fn config(access: &Access) -> Result<Config, ClientError> {
    match access {
        Access::InCluster => Ok(Config::incluster()?),
        Access::Given(config) => Ok((**config).clone()),
        Access::Kubeconfig(path) => {
            let failed = |error| ClientError::Kubeconfig {
                path: path.clone(),
                error: Box::new(error),
            };
            let file = Kubeconfig::read_from(path).map_err(failed)?;
            let options = KubeConfigOptions::default();
            client_config(file, &options).await.map_err(failed)
        }
        Access::Files(paths, merged) => {
            let loaded = client_config((**merged).clone(), &KubeConfigOptions::default()).await;
            loaded.map_err(|error| ClientError::Kubeconfig {
                path: paths.first().cloned().unwrap_or_default(),
                error: Box::new(error),
            })
        }
        Access::Local => Ok(Config::new(Uri::from_static("http://localhost:8080"))),
    }
}

/// Returns a client. Requests above the rate wait and do not fail. The client does not retry failed requests, because
/// only callers know their urgency.
pub async fn client(access: &Access, rate: Rate) -> Result<Client, ClientError> {
    counted_client(access, rate, ClusterRequests::default()).await
}

/// Returns a client, as [`client`] does, whose requests are counted.
pub async fn counted_client(access: &Access, rate: Rate, requests: ClusterRequests) -> Result<Client, ClientError> {
    let mut config = config(access).await?;
    config.default_retry = false;
    let agent = HeaderValue::from_static(concat!("istiod/", env!("CARGO_PKG_VERSION")));
    config.headers.push((USER_AGENT, agent));
    let builder = ClientBuilder::try_from(config).map_err(Box::new)?;
    let builder = builder.with_layer(&CountLayer(requests));
    Ok(builder.with_layer(&RateLayer(Limiter::new(rate))).build())
}

/// Returns why a request failed: the message of the API server, or the reason why there is no response.
pub fn message(error: &::kube::Error) -> String {
    match error {
        ::kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// Waits for a request that is not a watch, but not for ever: the library has no time limit, and a machine that
/// vanished sends no response. A write that took too long may have succeeded.
pub fn limited<'a, T>(
    request: impl Future<Output = Result<T, ::kube::Error>> + Send + 'a,
) -> BoxFuture<'a, Result<T, ::kube::Error>> {
    limited_to(REQUEST_TIMEOUT, request)
}

fn limited_to<'a, T>(
    limit: Duration,
    request: impl Future<Output = Result<T, ::kube::Error>> + Send + 'a,
) -> BoxFuture<'a, Result<T, ::kube::Error>> {
    let late = |_| Err(::kube::Error::Service("no response of the API server in time".into()));
    timeout(limit, request)
        .map(move |response| response.unwrap_or_else(late))
        .boxed()
}

/// Rate limiter of requests: each moves the time at which the bucket is full again.
#[derive(Clone)]
struct Limiter {
    interval: Duration,
    tolerance: Duration,
    /// Time at which all granted requests would be due at the average rate. A lock instead of a message: it is held for
    /// a comparison, and every request passes it.
    due: Arc<Mutex<Option<Instant>>>,
}

impl Limiter {
    fn new(rate: Rate) -> Self {
        let positive = rate.per_second.is_finite() && rate.per_second > 0.0;
        let interval = if positive {
            Duration::try_from_secs_f64(rate.per_second.recip()).unwrap_or_default()
        } else {
            Duration::ZERO
        };
        Self {
            interval,
            tolerance: interval * rate.burst.saturating_sub(1),
            due: Arc::default(),
        }
    }

    /// Takes a slot and returns the delay until it.
    fn take(&self, now: Instant) -> Duration {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = due.unwrap_or(now).max(now);
        *due = Some(mine + self.interval);
        mine.saturating_duration_since(now).saturating_sub(self.tolerance)
    }
}

struct RateLayer(Limiter);

impl<S> Layer<S> for RateLayer {
    type Service = RateLimited<S>;

    fn layer(&self, inner: S) -> RateLimited<S> {
        RateLimited {
            inner,
            limiter: self.0.clone(),
            wait: None,
        }
    }
}

/// A service whose requests wait for their slot.
struct RateLimited<S> {
    inner: S,
    limiter: Limiter,
    wait: Option<BoxFuture<'static, ()>>,
}

impl<S: Service<R>, R> Service<R> for RateLimited<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        let limiter = &self.limiter;
        let wait = self.wait.get_or_insert_with(|| {
            let wait = limiter.take(Instant::now());
            async move {
                if !wait.is_zero() {
                    tokio::time::sleep(wait).await;
                }
            }
            .boxed()
        });
        if wait.poll_unpin(cx).is_pending() {
            return Poll::Pending;
        }
        // The slot is kept until it is used, however often readiness is polled.
        *wait = futures::future::ready(()).boxed();
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.wait = None;
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_further_requests_are_limited() {
        let limiter = Limiter::new(Rate {
            per_second: 10.0,
            burst: 3,
        });
        let now = Instant::now();
        let waits: Vec<_> = (0..5).map(|_| limiter.take(now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        assert_eq!(limiter.take(now + Duration::from_mins(1)), Duration::ZERO);
        let none = Limiter::new(Rate::UNLIMITED);
        assert!((0..100).all(|_| none.take(now).is_zero()));
    }

    #[tokio::test]
    async fn a_request_without_a_response_fails() {
        let response = limited_to(Duration::ZERO, std::future::pending::<Result<(), ::kube::Error>>()).await;
        assert!(matches!(response, Err(::kube::Error::Service(_))));
        let response = limited(std::future::ready(Ok::<_, ::kube::Error>(7))).await;
        assert_eq!(response.ok(), Some(7));
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_is_reported_by_name() {
        let access = Access::Kubeconfig("/nowhere/config".into());
        let error = config(&access).await.err().unwrap().to_string();
        assert!(error.contains("/nowhere/config"), "{error}");
    }
}
