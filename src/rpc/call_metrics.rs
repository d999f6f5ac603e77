//! Metrics of unary calls, with the names that Go's gRPC servers of Istio have.

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use prometheus::{DEFAULT_BUCKETS, HistogramVec, IntCounterVec, Registry};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::{Call, Unary, code_name};
use crate::metrics;

/// The labels of every metric.
const LABELS: [&str; 3] = ["grpc_type", "grpc_service", "grpc_method"];

/// The metrics of all methods. Cheap to clone.
#[derive(Clone)]
pub struct CallMetrics {
    started: IntCounterVec,
    received: IntCounterVec,
    sent: IntCounterVec,
    handled: IntCounterVec,
    duration: HistogramVec,
}

impl CallMetrics {
    /// Registers the metrics. Fails if a name is already registered.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str, labels: &[&str]| metrics::counters(registry, name, help, labels);
        let with_code = [&LABELS[..], &["grpc_code"]].concat();
        Ok(Self {
            started: counters("grpc_server_started_total", "Calls that have started.", &LABELS)?,
            received: counters(
                "grpc_server_msg_received_total",
                "Messages of calls that were read.",
                &LABELS,
            )?,
            sent: counters("grpc_server_msg_sent_total", "Messages that calls have sent.", &LABELS)?,
            handled: counters(
                "grpc_server_handled_total",
                "Calls that have ended, by status.",
                &with_code,
            )?,
            duration: metrics::histograms(
                registry,
                "grpc_server_handling_seconds",
                "Seconds from the start of a call to its end.",
                DEFAULT_BUCKETS,
                &LABELS,
            )?,
        })
    }
}

/// A unary method whose calls are measured.
pub struct Measured {
    method: Arc<dyn Unary>,
    metrics: CallMetrics,
    /// The values of [`LABELS`].
    labels: [&'static str; 3],
}

impl Measured {
    /// Measures the calls of a method.
    pub fn new(method: Arc<dyn Unary>, metrics: CallMetrics) -> Self {
        let path = method.path().trim_start_matches('/');
        let (service, name) = path.split_once('/').unwrap_or((path, ""));
        Self {
            labels: ["unary", service, name],
            method,
            metrics,
        }
    }

    async fn measured(&self, mut call: Call) -> Result<Bytes, Status> {
        let Self {
            method,
            metrics,
            labels,
        } = self;
        let started = Instant::now();
        metrics.started.with_label_values(labels).inc();
        call.count_message(metrics.received.with_label_values(labels));
        let answer = method.call(call).await;
        let code = match &answer {
            Ok(_) => {
                metrics.sent.with_label_values(labels).inc();
                Code::Ok
            }
            Err(status) => status.code(),
        };
        let [kind, service, name] = *labels;
        metrics
            .handled
            .with_label_values(&[kind, service, name, code_name(code)])
            .inc();
        let seconds = started.elapsed().as_secs_f64();
        metrics.duration.with_label_values(labels).observe(seconds);
        answer
    }
}

impl Unary for Measured {
    fn path(&self) -> &'static str {
        self.method.path()
    }

    fn call(&self, call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
        self.measured(call).boxed()
    }
}

#[cfg(test)]
mod tests {
    use http::Request;
    use http_body_util::Full;

    use super::*;

    /// Refuses a message other than `a`.
    struct OnlyA;

    impl Unary for OnlyA {
        fn path(&self) -> &'static str {
            "/test.Letters/OnlyA"
        }

        fn call(&self, mut call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
            async move {
                let message = call.message(8).await?;
                let is_a = message == "a";
                is_a.then_some(message).ok_or_else(|| Status::invalid_argument("not a"))
            }
            .boxed()
        }
    }

    #[tokio::test]
    async fn calls_are_counted_by_status() {
        let metrics = CallMetrics::new(&Registry::new()).expect("no name is taken");
        let method = Measured::new(Arc::new(OnlyA), metrics.clone());
        for body in [&b"\0\0\0\0\x01a"[..], b"\0\0\0\0\x01b", b"\0"] {
            let request = Request::new(Full::new(Bytes::from_static(body)));
            let _ = method.call(Call::new(request)).await;
        }
        let labels = ["unary", "test.Letters", "OnlyA"];
        let handled = |code| {
            metrics
                .handled
                .with_label_values(&[labels[0], labels[1], labels[2], code])
                .get()
        };
        assert_eq!(
            [handled("OK"), handled("InvalidArgument"), handled("Internal")],
            [1, 1, 1]
        );
        assert_eq!(metrics.started.with_label_values(&labels).get(), 3);
        assert_eq!(metrics.received.with_label_values(&labels).get(), 2);
        assert_eq!(metrics.sent.with_label_values(&labels).get(), 1);
        assert_eq!(metrics.duration.with_label_values(&labels).get_sample_count(), 3);
    }
}
