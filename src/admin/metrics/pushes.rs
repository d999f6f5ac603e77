//! Metrics of pushes: their causes, steps and results, and the sizes of the data that they lead to.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use crate::{
    api::{Diagnostic, Kind},
    environment,
    generate::{self, store::StoreSize},
    metrics::{self, histogram},
    model::{output_limit, reference},
    push::{
        delivery::DeliveryObserver,
        push_loop::{Observer, PushReport},
    },
    table::{ChangeSet, Cx, ReadKey},
};

/// Metrics of the push path.
pub struct PushMetrics {
    debounce_time: Histogram,
    init_seconds: Histogram,
    services: IntGauge,
    virtual_services: IntGauge,
    built: IntCounter,
    panics: IntCounter,
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
    /// Reads of the last search.
    reads: Box<[ReadKey]>,
    /// True if nothing of that has changed since.
    is_current: bool,
    earliest: Option<Instant>,
}

impl LoggedFindings {
    /// Takes the changes of a push. Returns true if a search may have another result than the last one, and may begin.
    fn is_due(&mut self, changes: &ChangeSet, now: Instant) -> bool {
        self.is_current &= !changes.touches(&self.reads);
        !self.is_current && self.earliest.is_none_or(|earliest| now >= earliest)
    }

    /// Records the duration of a search that has ended.
    fn searched(&mut self, now: Instant, took: Duration) {
        self.earliest = (took > SHORT_SEARCH).then(|| now + SEARCH_REST * took);
    }
}

/// Registers a histogram of the one queue of changes.
fn queue_histogram(registry: &Registry, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
    let buckets = [0.01, 0.1, 0.2, 0.5, 1.0, 3.0, 5.0];
    let histograms = metrics::histograms(registry, name, help, &buckets, &["queueID"])?;
    Ok(histograms.with_label_values(&["push"]))
}

impl PushMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
        let counter = |name: &str, help: &str| metrics::counter(registry, name, help);
        let counters = |name: &str, help: &str, label: &str| metrics::counters(registry, name, help, &[label]);
        Ok(Self {
            debounce_time: histogram(
                registry,
                "pilot_debounce_time",
                "Seconds from the first merged change until its push is passed to proxies.",
                &[0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0],
            )?,
            init_seconds: histogram(
                registry,
                "pilot_pushcontext_init_seconds",
                "Seconds of the commit of a push, before generation.",
                &[0.01, 0.1, 0.5, 1.0, 3.0, 5.0],
            )?,
            services: gauge("pilot_services", "Services known to the control plane.")?,
            virtual_services: gauge("pilot_virt_services", "VirtualServices known to the control plane.")?,
            built: counter("istiod_resources_built_total", "Resources generated.")?,
            panics: counter(
                "istiod_generation_panics_total",
                "Generators that panicked; the previous resource stays. Always a bug.",
            )?,
            groups: counters(
                "istiod_groups_published_total",
                "Snapshots published to groups of proxies.",
                "cause",
            )?,
            triggers: counters(
                "pilot_push_triggers",
                "Total number of times a push was triggered, labeled by reason for the push.",
                "type",
            )?,
            updates: counters(
                "pilot_inbound_updates",
                "Total number of updates received by pilot.",
                "type",
            )?,
            without_effect: metrics::gauges(
                registry,
                "istiod_objects_without_effect",
                "Objects that are read but not applied by this build.",
                &["kind"],
            )?,
            missing: gauge(
                "istiod_missing_references",
                "References of VirtualServices to objects that do not exist.",
            )?,
            oversized: gauge(
                "istiod_oversized_objects",
                "Objects that do not apply as a whole because they, or their namespace, exceed a limit.",
            )?,
            pending: gauge(
                "pilot_k8s_endpoints_pending_pod",
                "Number of endpoints that do not currently have any corresponding pods.",
            )?,
            without_pods: counter(
                "pilot_k8s_endpoints_with_no_pods",
                "Endpoints that does not have any corresponding pods.",
            )?,
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
    let histogram = metrics::histograms(
        registry,
        "istiod_distribution_seconds",
        "Seconds from the first change of a push until the last proxy has answered it, by result.",
        &[0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0],
        &["result"],
    )?;
    Ok(Box::new(move |push, took| {
        let result = if push.refused() > 0 { "refused" } else { "acknowledged" };
        histogram.with_label_values(&[result]).observe(took.as_secs_f64());
    }))
}

impl PushMetrics {
    /// Logs dangling references and exceeded limits, once while each exists. After a long search, those of a push may
    /// be found only after a later one.
    fn log_findings(&self, push: &PushReport) {
        let started = environment::now();
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if !logged.is_due(&push.changes, started) {
            return;
        }
        let cx = Cx::recording();
        let mut found = reference::missing(&cx, &push.mesh);
        self.missing.set(found.len() as i64);
        let exceeded = output_limit::exceeded(&cx, &push.mesh);
        self.oversized.set(exceeded.len() as i64);
        found.extend(exceeded);
        for finding in found.difference(&logged.findings) {
            tracing::error!(code = %finding.code, "{finding}");
        }
        logged.findings = found;
        logged.reads = cx.into_reads();
        logged.is_current = true;
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
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
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
            dependencies: metrics::gauges(
                registry,
                "istiod_dependencies",
                "Recorded reads of the model's tables and of generation.",
                &["reader"],
            )?,
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::{Change, Installation, World, fixture};

    /// Returns the report of a push without changes.
    fn empty_push() -> PushReport {
        PushReport {
            mesh: World::new(Installation::default()).snapshot(),
            events: 0,
            kinds: BTreeMap::new(),
            changes: ChangeSet::default(),
            waited: Duration::ZERO,
            committed: Duration::ZERO,
            worked: Duration::ZERO,
            built: 0,
            groups: 0,
            first: 0,
            panics: Vec::new(),
            held: StoreSize::default(),
            model_reads: 0,
        }
    }

    #[test]
    fn r21_long_searches_for_findings_are_rare() {
        let (now, unchanged) = (environment::now(), ChangeSet::default());
        let mut logged = LoggedFindings::default();
        logged.searched(now, SHORT_SEARCH);
        assert!(logged.is_due(&unchanged, now));
        logged.searched(now, 2 * SHORT_SEARCH);
        assert!(!logged.is_due(&unchanged, now + SHORT_SEARCH));
        assert!(logged.is_due(&unchanged, now + 2 * SEARCH_REST * SHORT_SEARCH));
    }

    #[test]
    fn findings_are_searched_after_changes_that_concern_them() {
        const NO_SEARCH: i64 = -1;
        let metrics = PushMetrics::new(&Registry::new()).expect("no name is taken");
        let mut world = World::new(Installation::default());
        let mut missing_after = |object: &str| {
            let rows = fixture::folder(&Installation::default(), &[("config.yaml", object)]);
            let commit = world.commit(rows.into_iter().map(Change::Upsert).collect());
            assert!(!commit.changes.is_empty());
            metrics.missing.set(NO_SEARCH);
            metrics.pushed(&PushReport {
                mesh: commit.snapshot,
                events: 1,
                changes: commit.changes,
                ..empty_push()
            });
            // A search takes long on a busy machine.
            metrics.logged.lock().expect("no search has panicked").earliest = None;
            metrics.missing.get()
        };
        let route = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: v, namespace: shop}
spec: {hosts: [web.test], http: [{route: [{destination: {host: gone.test}}]}]}
";
        assert_eq!(missing_after(route), 1);
        let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: p, namespace: shop}
spec: {}
";
        assert_eq!(missing_after(policy), NO_SEARCH);
        let service = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: gone, namespace: shop}
spec: {hosts: [gone.test], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}
";
        assert_eq!(missing_after(service), 0);
    }

    #[test]
    fn changes_count_for_each_proxy() {
        let metrics = PushMetrics::new(&Registry::new()).expect("no name is taken");
        let push = |kinds: &[(Kind, usize)]| {
            metrics.pushed(&PushReport {
                events: 1,
                kinds: kinds.iter().copied().collect(),
                waited: Duration::from_secs(2),
                committed: Duration::from_secs(1),
                worked: Duration::from_secs(3),
                held: StoreSize {
                    connections: 10,
                    ..StoreSize::default()
                },
                ..empty_push()
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
            held,
            model_reads,
            ..empty_push()
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
