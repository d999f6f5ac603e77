//! Telemetries merged for one proxy: providers of logs, metrics and traces, with their settings.
//!
//! The rows are ordered from lowest to highest precedence. Note: providers are inherited from one entry to the next,
//! and the last entry that names providers decides which of them are in scope.

use std::collections::{BTreeMap, BTreeSet};

use super::proxy_view::ListenerClass;
use crate::{
    base::{ObjectKey, Shared},
    generate::BuildContext,
    proto::istio::{
        mesh::v1alpha1::{MeshConfig, mesh_config::ExtensionProvider},
        telemetry::v1alpha1::{
            AccessLogging, Metrics, MetricsOverrides, ProviderRef, Telemetry, Tracing, WorkloadMode, access_logging,
            metric_selector::{IstioMetric, MetricMatch},
            metrics_overrides::{TagOverride, tag_override::Operation},
            tracing::CustomTag,
        },
    },
};

/// Telemetries that apply to a proxy, with the mesh's providers.
pub struct Telemetries<'a> {
    mesh: &'a MeshConfig,
    specs: Vec<&'a Telemetry>,
}

/// Access log of a provider.
pub struct Logging<'a> {
    /// Provider.
    pub provider: &'a ExtensionProvider,
    /// True if it is enabled. If it is named but disabled, the mesh config's own log is disabled too.
    pub enabled: bool,
    /// CEL expression that selects logged requests.
    pub filter: Option<&'a access_logging::Filter>,
}

/// Metrics of a provider in one direction.
pub struct MetricsConfig<'a> {
    /// Provider.
    pub provider: &'a ExtensionProvider,
    /// Interval of reports of open TCP connections.
    pub reporting_interval: Option<prost_types::Duration>,
    /// Overrides by Istio metric or custom name, sorted.
    pub overrides: BTreeMap<String, MetricOverride>,
}

/// Override of one metric.
#[derive(Clone, Default)]
pub struct MetricOverride {
    /// True if the metric is disabled.
    pub disabled: bool,
    /// Tags that are set (to an expression) or removed.
    pub tags: BTreeMap<String, Option<String>>,
}

/// Tracing of requests in one direction.
pub struct TracingSpec<'a> {
    /// Provider. `None` disables tracing, because no provider is named or its name is unknown.
    pub provider: Option<&'a ExtensionProvider>,
    /// `disableSpanReporting`.
    pub disabled: bool,
    /// `randomSamplingPercentage`.
    pub random_sampling: Option<f64>,
    /// `customTags`.
    pub custom_tags: Option<&'a BTreeMap<String, CustomTag>>,
    /// `useRequestIdForTraceSampling`.
    pub use_request_id: bool,
    /// `enableIstioTags`.
    pub istio_tags: bool,
    /// `disableContextPropagation`.
    pub no_context_propagation: bool,
}

impl<'a> Telemetries<'a> {
    /// Reads the rows.
    pub fn of(ctx: &BuildContext<'a>, keys: &[ObjectKey]) -> Self {
        let rows = keys.iter().filter_map(|key| ctx.mesh.telemetries.get(ctx.cx, key));
        Self {
            mesh: ctx.mesh_config(),
            specs: rows.map(|row: &'a Shared<_>| &row.spec).collect(),
        }
    }

    /// Returns the access logs of a direction by provider name. Without any, the mesh config applies.
    pub fn logging(&self, class: ListenerClass) -> Vec<Logging<'a>> {
        let mut logs: Vec<_> = self
            .merged_logs(mode_of(class))
            .into_iter()
            .filter_map(|(name, (enabled, filter))| {
                Some(Logging {
                    provider: self.provider(name)?,
                    enabled,
                    filter,
                })
            })
            .collect();
        logs.sort_by(|a, b| a.provider.name.cmp(&b.provider.name));
        logs
    }

    /// Returns the metrics of a direction, by provider name.
    pub fn metrics(&self, class: ListenerClass) -> Vec<MetricsConfig<'a>> {
        let merged = self.merged_metrics(mode_of(class)).into_iter();
        let enabled = merged.filter(|(_, merged)| !merged.disabled);
        enabled
            .filter_map(|(name, merged)| {
                Some(MetricsConfig {
                    provider: self.provider(name)?,
                    reporting_interval: merged.interval,
                    overrides: merged.overrides,
                })
            })
            .collect()
    }

    /// Returns the tracing of a direction; `None` if the mesh config applies.
    pub fn tracing(&self, class: ListenerClass) -> Option<TracingSpec<'a>> {
        let entries: Vec<&'a Tracing> = self.specs.iter().flat_map(|spec| &spec.tracing).collect();
        let providers = self.mesh.default_providers.as_ref();
        let default = providers.and_then(|providers| providers.tracing.first());
        if entries.is_empty() && default.is_none() {
            return None;
        }
        let mut spec = TracingSpec {
            provider: default.and_then(|name| self.provider(name)),
            disabled: false,
            random_sampling: None,
            custom_tags: None,
            use_request_id: true,
            istio_tags: true,
            no_context_propagation: false,
        };
        let mode = mode_of(class);
        for entry in entries {
            if entry
                .r#match
                .as_ref()
                .is_none_or(|selector| covers(selector.mode, mode))
            {
                self.apply(&mut spec, entry);
            }
        }
        spec.disabled |= spec.provider.is_none();
        Some(spec)
    }

    fn apply(&self, spec: &mut TracingSpec<'a>, entry: &'a Tracing) {
        if let Some(provider) = entry.providers.first() {
            spec.provider = self.provider(&provider.name);
        }
        spec.disabled = entry.disable_span_reporting.unwrap_or(spec.disabled);
        spec.random_sampling = entry.random_sampling_percentage.or(spec.random_sampling);
        if !entry.custom_tags.is_empty() {
            spec.custom_tags = Some(&entry.custom_tags);
        }
        spec.use_request_id = entry.use_request_id_for_trace_sampling.unwrap_or(spec.use_request_id);
        spec.istio_tags = entry.enable_istio_tags.unwrap_or(spec.istio_tags);
        spec.no_context_propagation = entry.disable_context_propagation.unwrap_or(spec.no_context_propagation);
    }

    /// Merges access logs, by the names of providers.
    fn merged_logs(&self, mode: WorkloadMode) -> BTreeMap<&'a str, LogState<'a>> {
        let groups = self.specs.iter().map(|spec| spec.access_logging.as_slice());
        let groups: Vec<&'a [AccessLogging]> = groups.filter(|group| !group.is_empty()).collect();
        let providers = self.mesh.default_providers.as_ref();
        let defaults = providers.into_iter().flat_map(|providers| &providers.access_logging);
        let defaults: Vec<&'a str> = defaults.map(String::as_str).collect();
        if groups.is_empty() {
            return defaults.into_iter().map(|name| (name, (true, None))).collect();
        }
        let applies = |entry: &AccessLogging| {
            entry
                .r#match
                .as_ref()
                .is_none_or(|selector| covers(selector.mode, mode))
        };
        let mut in_scope: BTreeSet<&str> = defaults.iter().copied().collect();
        let mut filters: BTreeMap<&str, Option<&'a access_logging::Filter>> = BTreeMap::new();
        for group in &groups {
            let mut named: Option<BTreeSet<&str>> = None;
            let naming = group.iter().filter(|entry| !entry.providers.is_empty());
            for entry in naming.filter(|entry| applies(entry)) {
                let named = named.get_or_insert_default();
                for name in self.known(&entry.providers) {
                    named.insert(name);
                    filters.insert(name, entry.filter.as_ref());
                }
            }
            if let Some(named) = named {
                in_scope = named;
            }
        }
        let mut result = BTreeMap::new();
        let mut inherited = defaults;
        for entry in groups.into_iter().flatten() {
            if !entry.providers.is_empty() {
                inherited = self.known(&entry.providers);
            }
            if !applies(entry) {
                continue;
            }
            for name in inherited.iter().copied().filter(|name| in_scope.contains(name)) {
                let state = if entry.disabled.unwrap_or_default() {
                    (false, None)
                } else {
                    (true, filters.get(name).copied().flatten())
                };
                result.insert(name, state);
            }
        }
        result
    }

    /// Merges metrics, by the names of providers.
    fn merged_metrics(&self, mode: WorkloadMode) -> BTreeMap<&'a str, MergedMetrics> {
        let entries: Vec<&'a Metrics> = self.specs.iter().flat_map(|spec| &spec.metrics).collect();
        let providers = self.mesh.default_providers.as_ref();
        let defaults = providers.into_iter().flat_map(|providers| &providers.metrics);
        let defaults: Vec<&'a str> = defaults.map(String::as_str).collect();
        if entries.is_empty() {
            return defaults
                .into_iter()
                .map(|name| (name, MergedMetrics::default()))
                .collect();
        }
        let last_named = entries.iter().rev().find(|entry| !entry.providers.is_empty());
        let in_scope: BTreeSet<&str> = match last_named {
            Some(entry) => self.known(&entry.providers).into_iter().collect(),
            None => defaults.iter().copied().collect(),
        };
        let mut result: BTreeMap<&str, MergedMetrics> = BTreeMap::new();
        let mut inherited = defaults;
        for entry in entries {
            if !entry.providers.is_empty() {
                inherited = self.known(&entry.providers);
            }
            for name in inherited.iter().copied().filter(|name| in_scope.contains(name)) {
                let merged = result.entry(name).or_default();
                merged.interval = entry.reporting_interval.or(merged.interval);
                for change in &entry.overrides {
                    merged.apply(change, mode);
                }
            }
        }
        result
    }

    /// Returns the names in a list that providers have, one for each provider. There may be thousands of others, and
    /// each would be combined with thousands of overrides.
    fn known(&self, providers: &'a [ProviderRef]) -> Vec<&'a str> {
        let (mut names, mut found) = (Vec::new(), BTreeSet::new());
        for named in providers {
            let provider = self.provider(&named.name);
            if provider.is_some_and(|provider| found.insert(provider.name.as_str())) {
                names.push(named.name.as_str());
            }
        }
        names
    }

    /// Returns a provider by name, ignoring case.
    fn provider(&self, name: &str) -> Option<&'a ExtensionProvider> {
        self.mesh
            .extension_providers
            .iter()
            .find(|provider| provider.name.eq_ignore_ascii_case(name))
    }
}

fn mode_of(class: ListenerClass) -> WorkloadMode {
    match class {
        ListenerClass::SidecarInbound => WorkloadMode::Server,
        ListenerClass::SidecarOutbound | ListenerClass::Gateway => WorkloadMode::Client,
    }
}

fn covers(selected: i32, mode: WorkloadMode) -> bool {
    selected == mode as i32 || selected == WorkloadMode::ClientAndServer as i32
}

/// True if a provider logs, and the filter of logged requests.
type LogState<'a> = (bool, Option<&'a access_logging::Filter>);

#[derive(Default)]
struct MergedMetrics {
    disabled: bool,
    interval: Option<prost_types::Duration>,
    overrides: BTreeMap<String, MetricOverride>,
}

impl MergedMetrics {
    fn apply(&mut self, change: &MetricsOverrides, mode: WorkloadMode) {
        let selector = change.r#match.as_ref();
        if !selector.is_none_or(|selector| covers(selector.mode, mode)) {
            return;
        }
        let matched = selector.and_then(|selector| selector.metric_match.as_ref());
        let all = match matched {
            None => true,
            Some(MetricMatch::Metric(metric)) => *metric == IstioMetric::AllMetrics as i32,
            Some(MetricMatch::CustomMetric(_)) => false,
        };
        if all && change.disabled.unwrap_or_default() {
            self.disabled = true;
            return;
        }
        // Parity (pilot/pkg/model/telemetry.go): a later override that leaves something enabled enables the provider
        // again.
        self.disabled = false;
        for metric in metric_names(matched, all) {
            let metric = self.overrides.entry(metric).or_default();
            metric.disabled = change.disabled.unwrap_or(metric.disabled);
            // Prometheus accepts no label without a name.
            let named = change.tag_overrides.iter().filter(|(tag, _)| !tag.is_empty());
            for (tag, operation) in named {
                metric.tags.insert(tag.clone(), tag_value(operation));
            }
        }
    }
}

fn tag_value(change: &TagOverride) -> Option<String> {
    (change.operation == Operation::Upsert as i32).then(|| change.value.clone())
}

fn metric_names(matched: Option<&MetricMatch>, all: bool) -> Vec<String> {
    match matched {
        Some(MetricMatch::CustomMetric(name)) => vec![name.clone()],
        Some(MetricMatch::Metric(metric)) if !all => IstioMetric::try_from(*metric)
            .map(|metric| metric.as_str_name().to_owned())
            .into_iter()
            .collect(),
        _ => (1..=10)
            .filter_map(|metric| IstioMetric::try_from(metric).ok())
            .map(|metric| metric.as_str_name().to_owned())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::istio::mesh::v1alpha1::mesh_config::DefaultProviders;

    #[test]
    fn overrides_of_tags_without_a_name_are_left_out() {
        let tag = |name: &str| {
            let set = TagOverride {
                value: "request.host".to_owned(),
                ..Default::default()
            };
            (name.to_owned(), set)
        };
        let change = MetricsOverrides {
            tag_overrides: ["", "host"].map(tag).into(),
            ..Default::default()
        };
        let mut merged = MergedMetrics::default();
        merged.apply(&change, WorkloadMode::Client);
        let tags = merged.overrides.values().flat_map(|metric| metric.tags.keys());
        let tags: BTreeSet<&str> = tags.map(String::as_str).collect();
        assert_eq!(tags, BTreeSet::from(["host"]));
    }

    /// Returns a Telemetry that names providers for metrics with an override, and for two entries of access logs.
    fn telemetry(names: &[String]) -> Telemetry {
        let providers: Vec<_> = names.iter().map(|name| ProviderRef { name: name.clone() }).collect();
        let metrics = Metrics {
            providers: providers.clone(),
            overrides: vec![MetricsOverrides::default()],
            ..Default::default()
        };
        let logging = AccessLogging {
            providers,
            ..Default::default()
        };
        Telemetry {
            metrics: vec![metrics],
            access_logging: vec![logging, AccessLogging::default()],
            ..Default::default()
        }
    }

    #[test]
    fn r21_names_without_a_provider_are_not_combined_with_overrides() {
        let mesh = MeshConfig {
            extension_providers: vec![ExtensionProvider {
                name: "prometheus".to_owned(),
                provider: None,
            }],
            default_providers: Some(DefaultProviders {
                metrics: vec!["prometheus".to_owned()],
                access_logging: vec!["prometheus".to_owned()],
                ..Default::default()
            }),
            ..Default::default()
        };
        let merged = |names: &[String]| {
            let spec = telemetry(names);
            let telemetries = Telemetries {
                mesh: &mesh,
                specs: vec![&spec],
            };
            let mode = WorkloadMode::Client;
            let (metrics, logs) = (telemetries.merged_metrics(mode), telemetries.merged_logs(mode));
            let names = metrics.into_keys().chain(logs.into_keys());
            names.map(str::to_owned).collect::<Vec<_>>()
        };
        let unknown: Vec<String> = (0..1000).map(|number| format!("p{number}")).collect();
        let known = ["Prometheus", "prometheus", "Prometheus"].map(str::to_owned);
        assert_eq!(
            merged(&[unknown.clone(), known.to_vec()].concat()),
            ["Prometheus", "Prometheus"]
        );
        assert!(
            merged(&unknown).is_empty(),
            "they replace the default ones all the same"
        );
        assert_eq!(merged(&[]), ["prometheus", "prometheus"]);
    }
}
