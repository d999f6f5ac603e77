//! Metrics of the push path and of the process, under Istio's names.

use std::{
    collections::BTreeSet,
    mem,
    sync::{Mutex, PoisonError},
};

use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::{
    api::{Diagnostic, Kind},
    generate::{self, patch::set, resource::Note, secret, store::StoreSize},
    model::reference,
    push::push_loop::{Observer, PushReport},
    table::Cx,
};

/// The release of Istio whose behaviour is served; `/version` and `istio_build` tell it.
pub const ISTIO_VERSION: &str = "1.30.3";

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
    pending: IntGauge,
    held: HeldMetrics,
    /// Missing references that were told. Only the world's thread locks it; the lock makes the observer shareable.
    told: Mutex<BTreeSet<Diagnostic>>,
}

fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, prometheus::Error> {
    let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

impl PushMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let services = IntGauge::new("pilot_services", "Services known to the control plane.")?;
        let virtual_services = IntGauge::new("pilot_virt_services", "VirtualServices known to the control plane.")?;
        let built = prometheus::IntCounter::new("istiod_resources_built_total", "Resources that were generated.")?;
        let panics = prometheus::IntCounter::new(
            "istiod_generation_panics_total",
            "Generators that panicked; what they generated before stays. Always a defect.",
        )?;
        let groups = IntCounterVec::new(
            Opts::new(
                "istiod_groups_published_total",
                "Groups of proxies that were given a new snapshot.",
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
                "Objects that are read but that this build does not apply.",
            ),
            &["kind"],
        )?;
        let missing = IntGauge::new(
            "istiod_missing_references",
            "References of VirtualServices that lead nowhere.",
        )?;
        let pending = IntGauge::new(
            "pilot_k8s_endpoints_pending_pod",
            "Number of endpoints that do not currently have any corresponding pods.",
        )?;
        registry.register(Box::new(pending.clone()))?;
        registry.register(Box::new(missing.clone()))?;
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
                "How long changes waited to be merged, seconds.",
                &debounce,
            )?,
            init_seconds: histogram(
                registry,
                "pilot_pushcontext_init_seconds",
                "How long commit and generation of a push took, seconds.",
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
            pending,
            held: HeldMetrics::new(registry)?,
            told: Mutex::default(),
        })
    }
}

impl PushMetrics {
    /// Tells references that lead nowhere, each once while it does. Endpoints cannot change that.
    fn tell_missing(&self, push: &PushReport) {
        if push
            .kinds
            .keys()
            .all(|kind| matches!(kind, Kind::EndpointSlice | Kind::Pod | Kind::Node))
        {
            return;
        }
        let found = reference::missing(&Cx::untracked(), &push.mesh);
        self.missing.set(found.len() as i64);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for finding in found.difference(&told) {
            tracing::error!(code = %finding.code, "{finding}");
        }
        *told = found;
    }
}

impl Observer for PushMetrics {
    fn pushed(&self, push: &PushReport) {
        self.built.inc_by(push.built as u64);
        self.panics.inc_by(push.panics.len() as u64);
        self.held.set(&push.held, push.model_reads);
        for panic in &push.panics {
            tracing::error!(resource = %panic, "a generator panicked, the last good resource stays; this is a defect of istiod");
        }
        let cause = if push.events == 0 { "proxy" } else { "config" };
        self.groups.with_label_values(&[cause]).inc_by(push.groups as u64);
        if push.events == 0 {
            tracing::debug!(revision = push.mesh.revision.0, proxies = push.first, built = push.built, groups = push.groups, worked = ?push.worked, "first configurations");
            return;
        }
        for (kind, number) in &push.kinds {
            self.triggers.with_label_values(&[trigger(*kind)]).inc();
            self.updates.with_label_values(&[update(*kind)]).inc_by(*number as u64);
        }
        self.tell_missing(push);
        let awaiting = push.mesh.services_awaiting_pods.get(&Cx::untracked(), &());
        let pending: usize = awaiting.map(|(_, endpoints)| endpoints.pending).sum();
        self.pending.set(pending as i64);
        for (kind, count) in generate::without_effect(&push.mesh) {
            let gauge = self.without_effect.with_label_values(&[kind.name()]);
            if gauge.get() != count as i64 {
                gauge.set(count as i64);
                tracing::warn!(
                    kind = kind.name(),
                    count,
                    "objects of this kind are read but not applied by this build"
                );
            }
        }
        self.debounce_time.observe(push.waited.as_secs_f64());
        self.init_seconds.observe(push.worked.as_secs_f64());
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

/// How much is held for the proxies that are connected, as of the last push. It is what memory follows.
struct HeldMetrics {
    proxies: IntGauge,
    groups: IntGauge,
    parts: IntGauge,
    lists: IntGauge,
    resources: IntGauge,
    bytes: IntGauge,
    dependencies: IntGaugeVec,
}

impl HeldMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let dependencies = IntGaugeVec::new(
            Opts::new(
                "istiod_dependencies",
                "Recorded reads, by who reads: the tables of the model, or the generation of what proxies are sent.",
            ),
            &["reader"],
        )?;
        registry.register(Box::new(dependencies.clone()))?;
        Ok(Self {
            proxies: gauge("istiod_proxies", "Proxies that configuration is generated for.")?,
            groups: gauge(
                "istiod_groups",
                "Groups of proxies; those of a group are sent the same.",
            )?,
            parts: gauge("istiod_parts", "Distinct parts that groups are made of.")?,
            lists: gauge("istiod_lists", "Distinct lists of resources that parts have.")?,
            resources: gauge(
                "istiod_resources",
                "Distinct resources, each held once for all proxies.",
            )?,
            bytes: gauge("istiod_resource_bytes", "Bytes of all distinct resources.")?,
            dependencies,
        })
    }

    fn set(&self, held: &StoreSize, model_reads: usize) {
        self.proxies.set(held.members as i64);
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

/// Istio's reason of a push for a change of this kind.
fn trigger(kind: Kind) -> &'static str {
    match kind {
        Kind::EndpointSlice | Kind::Pod | Kind::WorkloadEntry => "endpoint",
        Kind::Service => "service",
        Kind::Namespace => "namespace",
        Kind::Secret | Kind::AccessReview => "secret",
        Kind::MeshNetworks | Kind::ResolvedHost => "networks",
        Kind::MeshConfig => "global",
        _ => "config",
    }
}

/// Istio's class of an update of this kind.
fn update(kind: Kind) -> &'static str {
    match kind {
        Kind::EndpointSlice | Kind::Pod | Kind::WorkloadEntry => "eds",
        Kind::Service => "svc",
        _ => "config",
    }
}

/// What generation noticed, as Istio's push-status gauges: how many objects each remark is about.
pub struct NoteMetrics {
    gauges: Vec<(&'static str, IntGauge)>,
    patches: IntGaugeVec,
    certificate_errors: IntCounter,
    /// The remarks about certificates that were there when last looked.
    wrong_certificates: Mutex<BTreeSet<Note>>,
}

/// The remarks that have a metric of their own in Istio.
const NOTED: [&str; 3] = [
    "pilot_dns_cluster_without_endpoints",
    "pilot_vservice_dup_domain",
    "pilot_duplicate_envoy_clusters",
];

impl NoteMetrics {
    /// Registers the gauges.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let mut gauges = Vec::new();
        for code in NOTED {
            let gauge = IntGauge::new(
                code,
                "Noticed while generating what proxies hold now; see /debug/notez.",
            )?;
            registry.register(Box::new(gauge.clone()))?;
            gauges.push((code, gauge));
        }
        let others = IntGauge::new(
            "istiod_notes",
            "All that was noticed while generating; see /debug/notez.",
        )?;
        registry.register(Box::new(others.clone()))?;
        gauges.push(("", others));
        let patches = IntGaugeVec::new(
            Opts::new(
                set::STATUS,
                "Whether patches of EnvoyFilters had an effect: 1 for each result that there is.",
            ),
            &["name", "patch", "result"],
        )?;
        registry.register(Box::new(patches.clone()))?;
        let certificate_errors = IntCounter::new(
            secret::CERTIFICATE_ERROR,
            "Certificates asked for that are missing, not permitted, or cannot be read; see /debug/notez.",
        )?;
        registry.register(Box::new(certificate_errors.clone()))?;
        Ok(Self {
            gauges,
            patches,
            certificate_errors,
            wrong_certificates: Mutex::default(),
        })
    }

    /// Sets the gauges from what is noticed now; with `PILOT_ENVOY_FILTER_STATS` those of patches too.
    pub fn set(&self, notes: &BTreeSet<Note>, of_patches: bool) {
        let wrong = notes.iter().filter(|note| note.code == secret::CERTIFICATE_ERROR);
        let wrong: BTreeSet<Note> = wrong.cloned().collect();
        let mut known = self.wrong_certificates.lock().unwrap_or_else(PoisonError::into_inner);
        let before = mem::replace(&mut *known, wrong.clone());
        self.certificate_errors.inc_by(wrong.difference(&before).count() as u64);
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
}

/// Registers what tells about the process as a whole.
pub fn register_process(registry: &Registry) -> Result<Gauge, prometheus::Error> {
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
    info.with_label_values(&[ISTIO_VERSION]).set(1);
    registry.register(Box::new(info))?;
    let uptime = Gauge::new("istiod_uptime_seconds", "Current istiod server uptime in seconds")?;
    registry.register(Box::new(uptime.clone()))?;
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    Ok(uptime)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;
    use crate::model::{Installation, World};

    #[test]
    fn what_is_held_is_told_after_each_push() {
        let registry = Registry::new();
        let metrics = PushMetrics::new(&registry).expect("no name is taken");
        let push = |held: StoreSize, model_reads| PushReport {
            mesh: World::new(Installation::default()).snapshot(),
            events: 0,
            kinds: BTreeMap::new(),
            waited: Duration::ZERO,
            worked: Duration::ZERO,
            built: 0,
            groups: 0,
            first: 0,
            panics: Vec::new(),
            held,
            model_reads,
        };
        let held = StoreSize {
            members: 2000,
            profiles: 60,
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
