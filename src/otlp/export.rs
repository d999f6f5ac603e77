//! Export of spans: a bounded queue with counted drops in front of the SDK's batches.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use opentelemetry::Context;
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor},
};
use prometheus::{IntCounter, Registry};
use tokio::{runtime::Handle, sync::oneshot};

use crate::{metrics, task::Tasks};

/// The number of spans that wait or are being sent: the default of `OTEL_BSP_MAX_QUEUE_SIZE`.
const CAPACITY: usize = 2048;

/// State that all parts of the export share.
#[derive(Clone, Debug)]
pub(super) struct Exporting {
    /// The number of spans that wait or are being sent.
    held: Arc<AtomicUsize>,
    exported: IntCounter,
    failed: IntCounter,
    dropped: IntCounter,
    tasks: Tasks,
    runtime: Handle,
}

impl Exporting {
    /// Registers the metric. Spans are sent on the runtime.
    pub(super) fn new(registry: &Registry, tasks: Tasks, runtime: Handle) -> Result<Self, prometheus::Error> {
        let spans = metrics::counters(
            registry,
            "istiod_trace_spans_total",
            "Spans of own traces, by result of the export.",
            &["result"],
        )?;
        let counter = |result| spans.with_label_values(&[result]);
        Ok(Self {
            held: Arc::default(),
            exported: counter("exported"),
            failed: counter("failed"),
            dropped: counter("dropped"),
            tasks,
            runtime,
        })
    }

    /// Returns the processor of ended spans, which never blocks.
    pub(super) fn processor<E: SpanExporter + 'static>(self, exporter: E) -> impl SpanProcessor + 'static {
        let exporter = Exporter {
            exporter: Arc::new(exporter),
            exporting: self.clone(),
            is_failing: AtomicBool::new(false),
        };
        // The queue of the SDK holds all that is admitted here, so that it drops nothing itself.
        let config = BatchConfigBuilder::default().with_max_queue_size(CAPACITY).build();
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        Processor {
            batches,
            exporting: self,
        }
    }
}

/// A processor that drops spans beyond [`CAPACITY`].
#[derive(Debug)]
struct Processor {
    batches: BatchSpanProcessor,
    exporting: Exporting,
}

impl SpanProcessor for Processor {
    fn on_start(&self, span: &mut Span, cx: &Context) {
        self.batches.on_start(span, cx);
    }

    fn on_end(&self, span: SpanData) {
        if self.exporting.held.fetch_add(1, Ordering::Relaxed) >= CAPACITY {
            self.exporting.held.fetch_sub(1, Ordering::Relaxed);
            self.exporting.dropped.inc();
            return;
        }
        self.batches.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// An exporter whose work runs on a tokio runtime: the thread of batches has none, and clients need its timers.
#[derive(Debug)]
struct Exporter<E> {
    exporter: Arc<E>,
    exporting: Exporting,
    is_failing: AtomicBool,
}

impl<E: SpanExporter + 'static> SpanExporter for Exporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let number = batch.len();
        let exporter = self.exporter.clone();
        let (answer, answered) = oneshot::channel();
        let Exporting { tasks, runtime, .. } = &self.exporting;
        tasks.spawn_on(runtime, "trace export", async move {
            let result = exporter.export(batch).await;
            // The thread of batches waits unless the process ends.
            let _ = answer.send(result);
        });
        let result = answered
            .await
            .unwrap_or_else(|_| Err(OTelSdkError::InternalFailure("the export ended early".into())));
        self.exporting.held.fetch_sub(number, Ordering::Relaxed);
        match &result {
            Ok(()) => {
                self.exporting.exported.inc_by(number as u64);
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("trace export works again");
                }
            }
            Err(error) => {
                self.exporting.failed.inc_by(number as u64);
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "trace export failed, spans are lost; this is logged once until it works");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use opentelemetry::trace::{Span as _, Tracer, TracerProvider};
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tokio::sync::watch;

    use super::*;

    /// A collector that answers nothing until it is opened.
    #[derive(Debug)]
    struct Stuck {
        is_open: watch::Receiver<bool>,
        received: Arc<Mutex<usize>>,
    }

    impl SpanExporter for Stuck {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            let mut is_open = self.is_open.clone();
            let _ = is_open.wait_for(|is_open| *is_open).await;
            *self.received.lock().expect("no panic") += batch.len();
            Ok(())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_stuck_collector_delays_nothing_and_drops_are_counted() {
        let registry = Registry::new();
        let exporting = Exporting::new(&registry, Tasks::default(), Handle::current()).expect("no name is taken");
        let (open, is_open) = watch::channel(false);
        let received = Arc::new(Mutex::new(0));
        let exporter = Stuck {
            is_open,
            received: received.clone(),
        };
        let provider = SdkTracerProvider::builder()
            .with_span_processor(exporting.clone().processor(exporter))
            .build();
        let tracer = provider.tracer("test");
        // The call would hang here if a full queue blocked.
        for _ in 0..CAPACITY + 500 {
            tracer.start("span").end();
        }
        assert_eq!(exporting.dropped.get(), 500);
        assert_eq!(exporting.held.load(Ordering::Relaxed), CAPACITY);
        open.send_replace(true);
        let flushed = tokio::task::spawn_blocking(move || provider.force_flush()).await;
        flushed.expect("no panic").expect("an open collector");
        assert_eq!(
            (*received.lock().expect("no panic"), exporting.exported.get()),
            (CAPACITY, CAPACITY as u64)
        );
        assert_eq!(exporting.held.load(Ordering::Relaxed), 0);
    }
}
