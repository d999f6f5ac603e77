//! Metrics of the notes of generation, and of served certificates.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::certificates::ServedCertificates;
use crate::{
    generate::{
        ResourceKey,
        filter::stack,
        patch::set,
        resource::{Built, Note},
        secret,
    },
    metrics,
    table::Table,
};

/// Metrics of the notes of generation, as Istio's push status: the number of objects per code, and counters.
pub struct NoteMetrics {
    gauges: Vec<(&'static str, IntGauge)>,
    patches: IntGaugeVec,
    certificate_errors: IntCounter,
    failed_lookups: IntCounterVec,
    /// Notes of the last collection that counters have counted: a note counts once while it lasts.
    counted: Mutex<BTreeSet<Note>>,
    /// Served certificates of the last collection. Locked for one collection.
    served: Mutex<ServedCertificates>,
}

/// Codes with an Istio metric of their own.
const CODES_WITH_METRIC: [&str; 5] = [
    "pilot_conflict_inbound_listener",
    "pilot_conflict_outbound_listener_tcp_over_current_tcp",
    "pilot_dns_cluster_without_endpoints",
    "pilot_vservice_dup_domain",
    "pilot_duplicate_envoy_clusters",
];

impl NoteMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
        let mut gauges = Vec::new();
        for code in CODES_WITH_METRIC {
            let help = "Notes of generation with this code; see /debug/notez.";
            gauges.push((code, gauge(code, help)?));
        }
        gauges.push(("", gauge("istiod_notes", "Notes of generation; see /debug/notez.")?));
        Ok(Self {
            gauges,
            patches: metrics::gauges(
                registry,
                set::STATUS,
                "EnvoyFilter patches by result, 1 each.",
                &["name", "patch", "result"],
            )?,
            certificate_errors: metrics::counter(
                registry,
                secret::CERTIFICATE_ERROR,
                "Requested certificates that are missing, denied, malformed, expired or not yet valid; \
                 see /debug/notez.",
            )?,
            failed_lookups: metrics::counters(
                registry,
                stack::LOOKUP_FAILURE,
                "Services of providers that do not exist, or exist in several namespaces; see /debug/notez.",
                &["type"],
            )?,
            counted: Mutex::default(),
            served: Mutex::default(),
        })
    }

    /// Counts the served certificates that are expired or not yet valid.
    pub fn count_certificates(&self, resources: &Table<ResourceKey, Built>, now: SystemTime) {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        self.certificate_errors.inc_by(served.newly_invalid(resources, now));
    }

    /// Sets the gauges from the present notes, those of patches with `PILOT_ENVOY_FILTER_STATS`, and counts new ones.
    pub fn set(&self, notes: &BTreeSet<Note>, of_patches: bool) {
        self.count(notes);
        self.patches.reset();
        for (name, patch, result) in notes.iter().filter_map(set::status).filter(|_| of_patches) {
            self.patches.with_label_values(&[name, patch, result]).set(1);
        }
        for (code, gauge) in &self.gauges {
            gauge.set(
                notes
                    .iter()
                    .filter(|note| note.code == *code || (code.is_empty() && note.code != set::STATUS))
                    .count() as i64,
            );
        }
    }

    /// Counts the notes that the last collection lacked.
    fn count(&self, notes: &BTreeSet<Note>) {
        let is_counted = |note: &&Note| matches!(note.code, secret::CERTIFICATE_ERROR | stack::LOOKUP_FAILURE);
        let present: BTreeSet<Note> = notes.iter().filter(is_counted).cloned().collect();
        let mut known = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        for note in present.difference(&known) {
            match stack::failed_lookup(note) {
                Some(kind) => self.failed_lookups.with_label_values(&[kind]).inc(),
                None => self.certificate_errors.inc(),
            }
        }
        *known = present;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_notes_are_counted() {
        let metrics = NoteMetrics::new(&Registry::new()).expect("no name is taken");
        let note = |code, detail: &str| Note {
            code,
            detail: detail.into(),
        };
        let zipkin = note(stack::LOOKUP_FAILURE, "zipkin tracing/zipkin.example.com");
        let keys = note(stack::LOOKUP_FAILURE, "jwks keys.example.com");
        let certificate = note(secret::CERTIFICATE_ERROR, "kubernetes://a");
        let others = note("jwks_unavailable", "a/b: c");
        for notes in [
            vec![zipkin.clone(), certificate, others],
            vec![zipkin.clone(), keys],
            Vec::new(),
            vec![zipkin],
        ] {
            metrics.set(&notes.into_iter().collect(), false);
        }
        let failed = |kind: &str| metrics.failed_lookups.with_label_values(&[kind]).get();
        assert_eq!((failed("zipkin"), failed("jwks")), (2, 1));
        assert_eq!(metrics.certificate_errors.get(), 1);
    }
}
