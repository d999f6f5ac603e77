//! Kubernetes Events about objects whose configuration proxies refuse.
//!
//! The replica whose proxies refuse something writes the Event, because only it knows the reason. The name of an Event
//! follows from the object and the refused content, so replicas that see the same write one Event, and it is written
//! again only after the API server has forgotten it. Clients decide what they refuse, so the number of Events is
//! bounded, and so is the text that comes from clients.

use std::time::{Duration, Instant};

use prometheus::{IntCounterVec, Registry};
use serde_json::{Value, json};
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64;

use super::store::{Store, WriteError};
use crate::{base::ClusterId, distribution::refused::RefusedObject, environment, metrics};

/// The reason of the Events.
const REASON: &str = "ConfigRefused";
/// The name of this writer.
const COMPONENT: &str = "istiod";
/// Refusals of other proxies within this time are part of the Event.
const TOGETHER: Duration = Duration::from_secs(1);
/// The number of Events that may be written at once.
const BURST: f64 = 20.0;
/// The number of Events in a second in the long run.
const RATE: f64 = 0.2;
/// The longest message in bytes.
///
/// Parity (pkg/apis/core/validation/events.go of Kubernetes): `note` has at most 1,024 bytes.
const MAX_MESSAGE: usize = 1024;
/// The longest part of an object's name in the name of an Event, in bytes.
const MAX_NAME: usize = 200;

/// The inputs of the Events.
pub struct Inputs {
    /// The client of the config cluster.
    pub client: ::kube::Client,
    /// The config cluster. Objects of others are not in it.
    pub cluster: ClusterId,
    /// The name of this replica.
    pub instance: SmolStr,
    /// The refused objects.
    pub refused: mpsc::Receiver<RefusedObject>,
    /// The metrics.
    pub metrics: Metrics,
}

/// The metrics of Events.
#[derive(Clone)]
pub struct Metrics(IntCounterVec);

impl Metrics {
    /// Registers the metrics.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = metrics::counters(
            registry,
            "istiod_refusal_events_total",
            "Kubernetes Events about objects that proxies refuse, by result.",
            &["result"],
        )?;
        Ok(Self(counter))
    }

    fn count(&self, result: &str) {
        self.0.with_label_values(&[result]).inc();
    }
}

/// A budget of Events that refills with time.
struct Budget {
    tokens: f64,
    at: Instant,
}

impl Budget {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST, at: now }
    }

    /// Takes a token. Returns false if there is none.
    fn take(&mut self, now: Instant) -> bool {
        let refill = now.saturating_duration_since(self.at).as_secs_f64() * RATE;
        self.tokens = (self.tokens + refill).min(BURST);
        self.at = now;
        let has_one = self.tokens >= 1.0;
        if has_one {
            self.tokens -= 1.0;
        }
        has_one
    }
}

/// Writes Events until the sender is dropped.
pub async fn run(mut inputs: Inputs) {
    let mut budget = Budget::new(environment::now());
    while let Some(first) = inputs.refused.recv().await {
        tokio::time::sleep(TOGETHER).await;
        let mut next = Some(first);
        while let Some(object) = next {
            if object.key.cluster == inputs.cluster {
                let result = if budget.take(environment::now()) {
                    write(&inputs, &object).await
                } else {
                    "dropped"
                };
                inputs.metrics.count(result);
            }
            next = inputs.refused.try_recv().ok();
        }
    }
}

/// Writes an Event and returns the result for the metric.
async fn write(inputs: &Inputs, object: &RefusedObject) -> &'static str {
    let (kind, key) = (object.kind, &object.key);
    let objects = Store::new(
        inputs.client.clone(),
        kind.group(),
        kind.version(),
        kind.name(),
        kind.plural(),
    );
    let events = Store::new(inputs.client.clone(), "", "v1", "Event", "events");
    let now = OffsetDateTime::from(environment::wall_clock());
    let now = now.format(&Rfc3339).unwrap_or_default();
    let written = async {
        let Some(metadata) = objects.metadata(&key.namespace, &key.name).await? else {
            return Ok("gone");
        };
        let event = event(object, &metadata, &inputs.instance, &now);
        let namespace = event["metadata"]["namespace"].as_str().unwrap_or_default();
        match events.create(namespace, &event).await {
            Ok(_) => Ok("written"),
            // Another replica was faster, or it was written before.
            Err(WriteError::Conflict(_)) => Ok("known"),
            Err(error) => Err(error),
        }
    };
    written.await.unwrap_or_else(|error: WriteError| {
        let (namespace, name) = (&key.namespace, &key.name);
        tracing::warn!(kind = kind.name(), %namespace, %name, %error, "failed to write an Event");
        "failed"
    })
}

/// Returns the Event about an object with this metadata.
fn event(object: &RefusedObject, metadata: &Value, instance: &str, now: &str) -> Value {
    let (kind, key) = (object.kind, &object.key);
    let api_version = match kind.group() {
        "" => kind.version().to_owned(),
        group => format!("{group}/{}", kind.version()),
    };
    let identity = format!("{api_version}/{}/{}/{}", kind.name(), key.namespace, object.content());
    let name = shortened(&key.name, MAX_NAME).trim_end_matches(['.', '-']);
    // Parity (pkg/apis/core/validation/events.go of Kubernetes): Events about cluster-scoped objects are in `default`.
    let namespace: &str = if key.namespace.is_empty() {
        "default"
    } else {
        &key.namespace
    };
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "namespace": namespace,
            "name": format!("{name}.{:016x}", xxh3_64(identity.as_bytes())),
        },
        "involvedObject": {
            "apiVersion": api_version,
            "kind": kind.name(),
            "namespace": key.namespace.as_str(),
            "name": key.name.as_str(),
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": "Warning",
        "reason": REASON,
        "message": shortened(&object.message(), MAX_MESSAGE),
        "source": { "component": COMPONENT },
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    })
}

/// Returns the first bytes of a text, without a part of a character.
fn shortened(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_limited_in_the_long_run() {
        let start = environment::now();
        let mut budget = Budget::new(start);
        let mut taken = |now| (0..100).filter(|_| budget.take(now)).count();
        assert_eq!(taken(start), 20);
        assert_eq!(taken(start + Duration::from_secs(9)), 1);
        assert_eq!(taken(start + Duration::from_secs(11)), 1);
        assert_eq!(taken(start + Duration::from_hours(1)), 20);
    }

    #[test]
    fn texts_are_shortened_between_characters() {
        assert_eq!(shortened("aé", 2), "a");
        assert_eq!(shortened("aé", 3), "aé");
        assert_eq!(shortened("aé", 9), "aé");
    }
}
