//! The trace of a push: change → debounce → commit → generation → push to each proxy → ACK.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant, SystemTime},
};

use opentelemetry::{
    Array, Context, KeyValue, StringValue, Value,
    trace::{Event, SpanBuilder, Status, TraceContextExt, Tracer},
};
use opentelemetry_sdk::trace::SdkTracer;

use crate::push::delivery::{Answer, PushRecord, PushTrace, PushTracer};

/// The number of proxies with spans of their own in one trace: the first ones that answer. Refusals have the same
/// number again, and the last answer is always traced.
const MAX_PROXIES: u32 = 16;

/// The clocks of the process. Pushes are measured with the monotonic one, and spans have wall clock times.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// The monotonic clock.
    pub monotonic: fn() -> Instant,
    /// The wall clock.
    pub wall: fn() -> SystemTime,
}

impl Clocks {
    fn wall_time(&self, at: Instant) -> SystemTime {
        (self.wall)() - (self.monotonic)().saturating_duration_since(at)
    }
}

/// The tracer of pushes.
pub(super) struct Pushes {
    tracer: SdkTracer,
    clocks: Clocks,
}

impl Pushes {
    pub(super) fn new(tracer: SdkTracer, clocks: Clocks) -> Self {
        Self { tracer, clocks }
    }
}

impl PushTracer for Pushes {
    fn published(&self, push: &PushRecord) -> Option<Box<dyn PushTrace>> {
        let since = self.clocks.wall_time(push.since);
        let kinds = push.kinds.keys().map(|kind| StringValue::from(kind.name()));
        let root = self
            .tracer
            .span_builder("change")
            .with_start_time(since)
            .with_attributes([
                KeyValue::new("istiod.revision", push.revision.0 as i64),
                KeyValue::new("istiod.changes", push.events as i64),
                KeyValue::new("istiod.kinds", Value::Array(Array::String(kinds.collect()))),
                KeyValue::new("istiod.connections", push.connections as i64),
            ])
            .start_with_context(&self.tracer, &Context::new());
        let trace = Trace {
            tracer: self.tracer.clone(),
            root: Context::new().with_span(root),
            since: push.since,
            started: since,
            published: since + push.waited + push.worked,
            proxies: AtomicU32::new(0),
            refusals: AtomicU32::new(0),
        };
        if !trace.root.span().is_recording() {
            return None;
        }
        let committing = since + push.waited;
        let generating = committing + push.committed;
        let changes = push.objects.iter().map(|object| {
            let attributes = vec![
                KeyValue::new("istiod.object.kind", object.kind.name()),
                KeyValue::new("istiod.object.namespace", object.key.namespace.to_string()),
                KeyValue::new("istiod.object.name", object.key.name.to_string()),
                KeyValue::new("istiod.object.removed", object.removed),
            ];
            Event::new("changed", committing, attributes, 0)
        });
        let debounce = SpanBuilder::from_name("debounce").with_events(changes.collect());
        trace.child(debounce, &trace.root, since, committing);
        trace.child(SpanBuilder::from_name("commit"), &trace.root, committing, generating);
        let generate = SpanBuilder::from_name("generate").with_attributes([
            KeyValue::new("istiod.resources.built", push.built as i64),
            KeyValue::new("istiod.groups", push.groups as i64),
        ]);
        trace.child(generate, &trace.root, generating, trace.published);
        Some(Box::new(trace))
    }
}

/// The open trace of a push.
#[derive(Debug)]
struct Trace {
    tracer: SdkTracer,
    /// The span of the whole push.
    root: Context,
    /// The start of the root, by both clocks.
    since: Instant,
    started: SystemTime,
    published: SystemTime,
    /// The number of proxies that have spans, and of those that refused something.
    proxies: AtomicU32,
    refusals: AtomicU32,
}

impl Trace {
    fn at(&self, at: Instant) -> SystemTime {
        self.started + at.saturating_duration_since(self.since)
    }

    /// Records a span that has ended, and returns the context of its children.
    fn child(&self, span: SpanBuilder, parent: &Context, from: SystemTime, to: SystemTime) -> Context {
        let span = span.with_start_time(from).start_with_context(&self.tracer, parent);
        let context = parent.with_span(span);
        context.span().end_with_timestamp(to);
        context
    }
}

impl PushTrace for Trace {
    fn answered(&self, answer: &Answer<'_>) {
        let traced = if answer.refused { &self.refusals } else { &self.proxies };
        // Not counted beyond the limit, so that the number cannot overflow.
        let is_full = traced.load(Ordering::Relaxed) >= MAX_PROXIES;
        if is_full && !answer.is_last {
            return;
        }
        traced.fetch_add(1, Ordering::Relaxed);
        let (sent, answered) = (self.at(answer.sent), self.at(answer.answered));
        let status = if answer.refused {
            Status::error("the proxy refused a resource")
        } else {
            Status::Ok
        };
        let attributes = [
            KeyValue::new("istiod.proxy", answer.connection.to_owned()),
            KeyValue::new("istiod.last", answer.is_last),
        ];
        let push = self
            .tracer
            .span_builder("push")
            .with_start_time(self.published)
            .with_attributes(attributes)
            .start_with_context(&self.tracer, &self.root);
        let push = self.root.with_span(push);
        self.child(SpanBuilder::from_name("send"), &push, self.published, sent);
        let ack = if answer.refused { "NACK" } else { "ACK" };
        self.child(SpanBuilder::from_name(ack), &push, sent, answered);
        push.span().set_status(status);
        push.span().end_with_timestamp(answered);
    }

    fn ended(&self, push: &PushRecord, took: Duration) {
        let root = self.root.span();
        let refused = push.refused();
        root.set_attribute(KeyValue::new("istiod.refused", i64::from(refused)));
        if refused > 0 {
            root.set_status(Status::error("proxies refused resources"));
        }
        root.end_with_timestamp(self.started + took);
    }
}
