//! Metrics of the push path and of the process, under Istio's names.

mod certificates;
pub(super) mod exposition;
pub(super) mod mesh;
pub(super) mod process;

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use serde_json::{Value, json};

use self::certificates::ServedCertificates;
use crate::{
    api::{Diagnostic, Kind},
    environment,
    generate::{
        self, ResourceKey,
        filter::stack,
        patch::set,
        resource::{Built, Note},
        secret,
        store::StoreSize,
    },
    model::{output_limit, reference},
    push::{
        delivery::DeliveryObserver,
        push_loop::{Observer, PushReport},
    },
    table::{Cx, Table},
    task::Tasks,
};

/// Release of Istio whose behaviour is served, in `/version` and `istio_build`.
pub const ISTIO_VERSION: &str = "1.30.3";
/// The text of `/version` and `pilot_info`: the release, the version of this build, and its state.
///
/// Parity (pkg/version/version.go).
pub const VERSION: &str = concat!("1.30.3-", env!("CARGO_PKG_VERSION"), "-Clean");

/// Returns the facts of this build, with the members of Istio's.
pub fn build_info() -> Value {
    json!({
        "version": ISTIO_VERSION, "revision": env!("CARGO_PKG_VERSION"), "golang_version": "", "status": "Clean",
        "tag": ISTIO_VERSION,
    })
}

/// Metrics of the push path.
pub struct PushMetrics {
    debounce_time: Histogram,
    init_seconds: Histogram,
    services: IntGauge,
    virtual_services: IntGauge,
    built: prometheus::IntCounter,
    panics: prometheus::IntCounter,
    groups: IntCounterVec,
    triggers: IntCounterVec,
    updates: IntCounterVec,
    without_effect: IntGaugeVec,
    missing: IntGauge,
    oversized: IntGauge,
    pending: IntGauge,
    without_pods: IntCounter,
    queue_latency: Histogram,
    queue_duration: Histogram,
    held: SizeMetrics,
    /// Findings that were logged. Only the world's thread locks it; the lock makes the observer shareable.
    logged: Mutex<LoggedFindings>,
}

/// The duration of a search for findings that delays no push, and the rest after a longer one, as a multiple of its
/// duration. A search reads all VirtualServices, and a push may be due to one tenant alone.
const SHORT_SEARCH: Duration = Duration::from_millis(50);
const SEARCH_REST: u32 = 20;

/// Findings that were logged, and when the next search may begin.
#[derive(Default)]
struct LoggedFindings {
    findings: BTreeSet<Diagnostic>,
    earliest: Option<Instant>,
}

impl LoggedFindings {
    /// Returns true if a search may begin.
    fn is_due(&self, now: Instant) -> bool {
        self.earliest.is_none_or(|earliest| now >= earliest)
    }

    /// Records the duration of a search that has ended.
    fn searched(&mut self, now: Instant, took: Duration) {
        self.earliest = (took > SHORT_SEARCH).then(|| now + SEARCH_REST * took);
    }
}

fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, prometheus::Error> {
    let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

/// Registers a histogram of the one queue of changes.
fn queue_histogram(registry: &Registry, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
    let buckets = vec![0.01, 0.1, 0.2, 0.5, 1.0, 3.0, 5.0];
    let histograms = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), &["queueID"])?;
    registry.register(Box::new(histograms.clone()))?;
    Ok(histograms.with_label_values(&["push"]))
}

impl PushMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let services = IntGauge::new("pilot_services", "Services known to the control plane.")?;
        let virtual_services = IntGauge::new("pilot_virt_services", "VirtualServices known to the control plane.")?;
        let built = prometheus::IntCounter::new("istiod_resources_built_total", "Resources generated.")?;
        let panics = prometheus::IntCounter::new(
            "istiod_generation_panics_total",
            "Generators that panicked; the previous resource stays. Always a bug.",
        )?;
        let groups = IntCounterVec::new(
            Opts::new(
                "istiod_groups_published_total",
                "Snapshots published to groups of proxies.",
            ),
            &["cause"],
        )?;
        let triggers = IntCounterVec::new(
            Opts::new(
                "pilot_push_triggers",
                "Total number of times a push was triggered, labeled by reason for the push.",
            ),
            &["type"],
        )?;
        let updates = IntCounterVec::new(
            Opts::new("pilot_inbound_updates", "Total number of updates received by pilot."),
            &["type"],
        )?;
        let without_effect = IntGaugeVec::new(
            Opts::new(
                "istiod_objects_without_effect",
                "Objects that are read but not applied by this build.",
            ),
            &["kind"],
        )?;
        let missing = IntGauge::new(
            "istiod_missing_references",
            "References of VirtualServices to objects that do not exist.",
        )?;
        let oversized = IntGauge::new(
            "istiod_oversized_objects",
            "Objects that do not apply as a whole because they, or their namespace, exceed a limit.",
        )?;
        let pending = IntGauge::new(
            "pilot_k8s_endpoints_pending_pod",
            "Number of endpoints that do not currently have any corresponding pods.",
        )?;
        let without_pods = IntCounter::new(
            "pilot_k8s_endpoints_with_no_pods",
            "Endpoints that does not have any corresponding pods.",
        )?;
        registry.register(Box::new(without_pods.clone()))?;
        registry.register(Box::new(pending.clone()))?;
        registry.register(Box::new(missing.clone()))?;
        registry.register(Box::new(oversized.clone()))?;
        registry.register(Box::new(without_effect.clone()))?;
        registry.register(Box::new(triggers.clone()))?;
        registry.register(Box::new(updates.clone()))?;
        registry.register(Box::new(services.clone()))?;
        registry.register(Box::new(virtual_services.clone()))?;
        registry.register(Box::new(built.clone()))?;
        registry.register(Box::new(panics.clone()))?;
        registry.register(Box::new(groups.clone()))?;
        let debounce = [0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];
        Ok(Self {
            debounce_time: histogram(
                registry,
                "pilot_debounce_time",
                "Seconds from the first merged change until its push is passed to proxies.",
                &debounce,
            )?,
            init_seconds: histogram(
                registry,
                "pilot_pushcontext_init_seconds",
                "Seconds of the commit of a push, before generation.",
                &[0.01, 0.1, 0.5, 1.0, 3.0, 5.0],
            )?,
            services,
            virtual_services,
            built,
            panics,
            groups,
            triggers,
            updates,
            without_effect,
            missing,
            oversized,
            pending,
            without_pods,
            queue_latency: queue_histogram(
                registry,
                "pilot_worker_queue_latency",
                "Seconds from the first change of a batch to its processing.",
            )?,
            queue_duration: queue_histogram(
                registry,
                "pilot_worker_queue_duration",
                "Seconds of processing a batch of changes.",
            )?,
            held: SizeMetrics::new(registry)?,
            logged: Mutex::default(),
        })
    }
}

/// Registers the histogram of deliveries and returns the observer that fills it.
pub fn delivery_observer(registry: &Registry) -> Result<DeliveryObserver, prometheus::Error> {
    let buckets = vec![0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
    let opts = HistogramOpts::new(
        "istiod_distribution_seconds",
        "Seconds from the first change of a push until the last proxy has answered it, by result.",
    );
    let histogram = HistogramVec::new(opts.buckets(buckets), &["result"])?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(Box::new(move |push, took| {
        let result = if push.refused() > 0 { "refused" } else { "acknowledged" };
        histogram.with_label_values(&[result]).observe(took.as_secs_f64());
    }))
}

impl PushMetrics {
    /// Logs dangling references and exceeded limits, once while each exists. Endpoints cannot change them. After a long
    /// search, those of a push may be found only after a later one.
    fn log_findings(&self, push: &PushReport) {
        if push
            .kinds
            .keys()
            .all(|kind| matches!(kind, Kind::EndpointSlice | Kind::Pod | Kind::Node))
        {
            return;
        }
        let started = environment::now();
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if !logged.is_due(started) {
            return;
        }
        let mut found = reference::missing(&Cx::untracked(), &push.mesh);
        self.missing.set(found.len() as i64);
        let exceeded = output_limit::exceeded(&Cx::untracked(), &push.mesh);
        self.oversized.set(exceeded.len() as i64);
        found.extend(exceeded);
        for finding in found.difference(&logged.findings) {
            tracing::error!(code = %finding.code, "{finding}");
        }
        logged.findings = found;
        let now = environment::now();
        logged.searched(now, now.saturating_duration_since(started));
    }
}

impl Observer for PushMetrics {
    fn pushed(&self, push: &PushReport) {
        self.built.inc_by(push.built as u64);
        self.panics.inc_by(push.panics.len() as u64);
        self.held.set(&push.held, push.model_reads);
        for panic in &push.panics {
            tracing::error!(resource = %panic, "generator panicked, previous resource kept; this is a bug in istiod");
        }
        let cause = if push.events == 0 { "proxy" } else { "config" };
        self.groups.with_label_values(&[cause]).inc_by(push.groups as u64);
        if push.events == 0 {
            tracing::debug!(
                revision = push.mesh.revision.0,
                proxies = push.first,
                built = push.built,
                groups = push.groups,
                worked = ?push.worked,
                "first configurations generated"
            );
            return;
        }
        for (kind, number) in &push.kinds {
            // Parity (pilot/pkg/xds/discovery.go, pilot/pkg/xds/eds.go): each change counts for each proxy, and changes
            // of endpoints and services count as such and as changes of configuration.
            let triggered = number * push.held.connections;
            self.triggers
                .with_label_values(&[trigger(*kind)])
                .inc_by(triggered as u64);
            for update in std::iter::once("config").chain(update(*kind)) {
                self.updates.with_label_values(&[update]).inc_by(*number as u64);
            }
        }
        self.log_findings(push);
        let awaiting = push.mesh.services_awaiting_pods.get(&Cx::untracked(), &());
        let pending: usize = awaiting.map(|(_, endpoints)| endpoints.pending).sum();
        let before = self.pending.get();
        self.without_pods.inc_by((pending as i64 - before).max(0) as u64);
        self.pending.set(pending as i64);
        for (kind, count) in generate::without_effect(&push.mesh) {
            let gauge = self.without_effect.with_label_values(&[kind.name()]);
            if gauge.get() != count as i64 {
                gauge.set(count as i64);
                if count > 0 {
                    tracing::warn!(kind = kind.name(), count, "objects have no effect in this build");
                }
            }
        }
        // Parity (pilot/pkg/xds/discovery.go): until the push is passed to proxies, and endpoints need no new context.
        self.debounce_time.observe((push.waited + push.worked).as_secs_f64());
        if push.kinds.keys().any(|kind| update(*kind) != Some("eds")) {
            self.init_seconds.observe(push.committed.as_secs_f64());
        }
        self.queue_latency.observe(push.waited.as_secs_f64());
        self.queue_duration.observe(push.worked.as_secs_f64());
        let removed = self.services.get() - push.mesh.services.len() as i64;
        if removed > 0 {
            self.updates.with_label_values(&["svcdelete"]).inc_by(removed as u64);
        }
        self.services.set(push.mesh.services.len() as i64);
        self.virtual_services.set(push.mesh.virtual_services.len() as i64);
        tracing::info!(
            revision = push.mesh.revision.0,
            changes = push.events,
            built = push.built,
            groups = push.groups,
            waited = ?push.waited,
            worked = ?push.worked,
            "push"
        );
    }
}

/// Sizes of the data for connected proxies, as of the last push, which memory follows.
struct SizeMetrics {
    proxies: IntGauge,
    groups: IntGauge,
    parts: IntGauge,
    lists: IntGauge,
    resources: IntGauge,
    bytes: IntGauge,
    dependencies: IntGaugeVec,
}

impl SizeMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let dependencies = IntGaugeVec::new(
            Opts::new(
                "istiod_dependencies",
                "Recorded reads of the model's tables and of generation.",
            ),
            &["reader"],
        )?;
        registry.register(Box::new(dependencies.clone()))?;
        Ok(Self {
            proxies: gauge("istiod_proxies", "Connected proxies.")?,
            groups: gauge(
                "istiod_groups",
                "Groups of proxies that receive identical configuration.",
            )?,
            parts: gauge("istiod_parts", "Distinct parts that groups consist of.")?,
            lists: gauge("istiod_lists", "Distinct resource lists of parts.")?,
            resources: gauge(
                "istiod_resources",
                "Distinct resources, each held once for all proxies.",
            )?,
            bytes: gauge("istiod_resource_bytes", "Bytes of all distinct resources.")?,
            dependencies,
        })
    }

    fn set(&self, held: &StoreSize, model_reads: usize) {
        self.proxies.set(held.connections as i64);
        self.groups.set(held.groups as i64);
        self.parts.set(held.parts as i64);
        self.lists.set(held.lists as i64);
        self.resources.set(held.resources as i64);
        self.bytes.set(held.bytes as i64);
        for (reader, reads) in [("model", model_reads), ("generation", held.reads)] {
            self.dependencies.with_label_values(&[reader]).set(reads as i64);
        }
    }
}

/// Returns Istio's push reason for a change of this kind.
///
/// Parity (pilot/pkg/model/push_context.go, TriggerReason).
fn trigger(kind: Kind) -> &'static str {
    match kind {
        Kind::EndpointSlice | Kind::Pod | Kind::WorkloadEntry => "endpoint",
        Kind::Service | Kind::ServiceEntry | Kind::ServiceImport | Kind::Node => "service",
        Kind::Namespace => "namespace",
        Kind::Secret | Kind::ConfigMap | Kind::AccessReview => "secret",
        Kind::FetchedKeys => "unknown",
        Kind::MeshNetworks | Kind::ResolvedHost | Kind::HiddenGateway => "networks",
        Kind::MeshConfig | Kind::TrustAnchors => "global",
        _ => "config",
    }
}

/// Returns Istio's class of updates for a change of this kind, besides that of all changes.
fn update(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::EndpointSlice | Kind::Pod | Kind::WorkloadEntry => Some("eds"),
        Kind::Service | Kind::ServiceEntry => Some("svc"),
        _ => None,
    }
}

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
        let mut gauges = Vec::new();
        for code in CODES_WITH_METRIC {
            let gauge = IntGauge::new(code, "Notes of generation with this code; see /debug/notez.")?;
            registry.register(Box::new(gauge.clone()))?;
            gauges.push((code, gauge));
        }
        let others = IntGauge::new("istiod_notes", "Notes of generation; see /debug/notez.")?;
        registry.register(Box::new(others.clone()))?;
        gauges.push(("", others));
        let patches = IntGaugeVec::new(
            Opts::new(set::STATUS, "EnvoyFilter patches by result, 1 each."),
            &["name", "patch", "result"],
        )?;
        registry.register(Box::new(patches.clone()))?;
        let certificate_errors = IntCounter::new(
            secret::CERTIFICATE_ERROR,
            "Requested certificates that are missing, denied, malformed, expired or not yet valid; see /debug/notez.",
        )?;
        registry.register(Box::new(certificate_errors.clone()))?;
        let failed_lookups = IntCounterVec::new(
            Opts::new(
                stack::LOOKUP_FAILURE,
                "Services of providers that do not exist, or exist in several namespaces; see /debug/notez.",
            ),
            &["type"],
        )?;
        registry.register(Box::new(failed_lookups.clone()))?;
        Ok(Self {
            gauges,
            patches,
            certificate_errors,
            failed_lookups,
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

/// Registers the metrics of the process.
pub fn register_process(registry: &Registry, tasks: Tasks) -> Result<Gauge, prometheus::Error> {
    let build = IntGaugeVec::new(
        Opts::new("istio_build", "Istio component build info"),
        &["component", "tag"],
    )?;
    build.with_label_values(&["pilot", ISTIO_VERSION]).set(1);
    registry.register(Box::new(build))?;
    let info = IntGaugeVec::new(
        Opts::new("pilot_info", "Pilot version and build information."),
        &["version"],
    )?;
    info.with_label_values(&[VERSION]).set(1);
    registry.register(Box::new(info))?;
    let uptime = Gauge::new("istiod_uptime_seconds", "Current istiod server uptime in seconds")?;
    registry.register(Box::new(uptime.clone()))?;
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    process::ProcessMetrics::register(registry, tasks)?;
    Ok(uptime)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;
    use crate::model::{Installation, World};

    #[test]
    fn r21_long_searches_for_findings_are_rare() {
        let now = environment::now();
        let mut logged = LoggedFindings::default();
        logged.searched(now, SHORT_SEARCH);
        assert!(logged.is_due(now));
        logged.searched(now, 2 * SHORT_SEARCH);
        assert!(!logged.is_due(now + SHORT_SEARCH));
        assert!(logged.is_due(now + 2 * SEARCH_REST * SHORT_SEARCH));
    }

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

    #[test]
    fn changes_count_for_each_proxy() {
        let metrics = PushMetrics::new(&Registry::new()).expect("no name is taken");
        let push = |kinds: &[(Kind, usize)]| {
            metrics.pushed(&PushReport {
                mesh: World::new(Installation::default()).snapshot(),
                events: 1,
                kinds: kinds.iter().copied().collect(),
                waited: Duration::from_secs(2),
                committed: Duration::from_secs(1),
                worked: Duration::from_secs(3),
                built: 0,
                groups: 0,
                first: 0,
                panics: Vec::new(),
                held: StoreSize {
                    connections: 10,
                    ..StoreSize::default()
                },
                model_reads: 0,
            });
        };
        push(&[(Kind::EndpointSlice, 2)]);
        push(&[(Kind::VirtualService, 1), (Kind::ServiceEntry, 1), (Kind::Gateway, 3)]);
        let triggers = |reason: &str| metrics.triggers.with_label_values(&[reason]).get();
        assert_eq!(
            (triggers("endpoint"), triggers("config"), triggers("service")),
            (20, 40, 10)
        );
        let updates = |class: &str| metrics.updates.with_label_values(&[class]).get();
        assert_eq!((updates("eds"), updates("config"), updates("svc")), (2, 7, 1));
        let debounced = &metrics.debounce_time;
        assert_eq!(
            (debounced.get_sample_count(), debounced.get_sample_sum() as u64),
            (2, 10)
        );
        let committed = &metrics.init_seconds;
        assert_eq!(
            (committed.get_sample_count(), committed.get_sample_sum() as u64),
            (1, 1)
        );
    }

    #[test]
    fn store_size_is_exported_after_each_push() {
        let registry = Registry::new();
        let metrics = PushMetrics::new(&registry).expect("no name is taken");
        let push = |held: StoreSize, model_reads| PushReport {
            mesh: World::new(Installation::default()).snapshot(),
            events: 0,
            kinds: BTreeMap::new(),
            waited: Duration::ZERO,
            committed: Duration::ZERO,
            worked: Duration::ZERO,
            built: 0,
            groups: 0,
            first: 0,
            panics: Vec::new(),
            held,
            model_reads,
        };
        let held = StoreSize {
            connections: 2000,
            classes: 60,
            groups: 50,
            parts: 7,
            lists: 6,
            resources: 5,
            bytes: 4,
            reads: 3,
        };
        metrics.pushed(&push(StoreSize::default(), 1));
        metrics.pushed(&push(held, 2));
        let mut seen = BTreeMap::new();
        for family in registry.gather() {
            for metric in family.get_metric() {
                let labels = metric.get_label().iter().map(|label| label.value().to_owned());
                let name: Vec<String> = [family.name().to_owned()].into_iter().chain(labels).collect();
                seen.insert(name.join(" "), metric.get_gauge().get_value());
            }
        }
        for (name, value) in [
            ("istiod_proxies", 2000.0),
            ("istiod_groups", 50.0),
            ("istiod_parts", 7.0),
            ("istiod_lists", 6.0),
            ("istiod_resources", 5.0),
            ("istiod_resource_bytes", 4.0),
            ("istiod_dependencies generation", 3.0),
            ("istiod_dependencies model", 2.0),
        ] {
            assert_eq!(seen.get(name), Some(&value), "{name}");
        }
    }
}
