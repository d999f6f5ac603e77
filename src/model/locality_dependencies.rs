//! Location attributes of clients that endpoints depend on: node, locality, and labels that failover compares.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    MeshSnapshot, Service, ServiceKey, destination_rule::HostRules, destination_rule::RuleKey,
    service::TrafficDistribution,
};
use crate::{
    api::label::NETWORK,
    proto::istio::networking::v1alpha3::{
        LoadBalancerSettings, LocalityLoadBalancerSetting, OutlierDetection, TrafficPolicy,
    },
    table::Cx,
};

/// Labels that traffic distribution compares, most important first.
pub const ZONE_LABELS: &[&str] = &[NETWORK, "topology.kubernetes.io/region", "topology.kubernetes.io/zone"];
/// Additional labels that distribution to the same node compares.
pub const NODE_LABELS: &[&str] = &["topology.istio.io/subzone", "kubernetes.io/hostname"];

/// Location attributes that endpoints depend on. A superset: a client's location is part of its keys only for services
/// that need it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct LocalityDependencies {
    /// True if some service is node-local.
    pub node: bool,
    /// True if some service may have locality load balancing.
    pub locality: bool,
    /// Labels that some failover priority compares.
    pub labels: BTreeSet<SmolStr>,
}

/// Emits the index key of a service whose endpoints depend on the client's location without a DestinationRule.
pub fn service_entry(_key: &ServiceKey, service: &Service, emit: &mut dyn FnMut(())) {
    let depends = |one: &Service| one.node_local || one.traffic_distribution != TrafficDistribution::Any;
    if service.all().any(depends) {
        emit(());
    }
}

/// Emits the index key of rules by which endpoints may depend on the client's location.
pub fn rule_entry(_key: &RuleKey, row: &HostRules, emit: &mut dyn FnMut(())) {
    if policies(row).any(|part| part.outlier.is_some() || part.setting().is_some()) {
        emit(());
    }
}

/// Derives the location attributes that the mesh uses.
pub fn dependencies(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<LocalityDependencies> {
    let mut needs = LocalityDependencies::default();
    let mesh_setting = mesh.mesh_config(cx).locality_lb_setting.as_ref();
    let rows = mesh.locality_services.get(cx, &());
    for service in rows.flat_map(|(_, row)| row.all()) {
        needs.node |= service.node_local;
        let labels: &[&[&str]] = match service.traffic_distribution {
            TrafficDistribution::Any => &[],
            TrafficDistribution::PreferSameZone => &[ZONE_LABELS],
            TrafficDistribution::PreferSameNode => &[ZONE_LABELS, NODE_LABELS],
        };
        needs
            .labels
            .extend(labels.iter().copied().flatten().copied().map(SmolStr::new));
    }
    for (_, row) in mesh.locality_rules.get(cx, &()) {
        needs.locality = true;
        policies(row)
            .filter_map(|part| part.setting())
            .for_each(|setting| needs.add(setting));
    }
    if let Some(setting) = mesh_setting {
        needs.locality |= !setting.distribute.is_empty();
        needs.add(setting);
    }
    needs.locality |= !needs.labels.is_empty();
    Some(needs)
}

impl LocalityDependencies {
    fn add(&mut self, setting: &LocalityLoadBalancerSetting) {
        let keys = setting
            .failover_priority
            .iter()
            .map(|label| label.split('=').next().unwrap_or_default());
        self.labels.extend(keys.map(SmolStr::new));
    }
}

/// Locality settings of a policy.
struct Part<'a> {
    outlier: Option<&'a OutlierDetection>,
    load_balancer: Option<&'a LoadBalancerSettings>,
}

impl<'a> Part<'a> {
    fn setting(&self) -> Option<&'a LocalityLoadBalancerSetting> {
        self.load_balancer
            .and_then(|settings| settings.locality_lb_setting.as_ref())
    }
}

/// Returns every policy in a row: of rules and subsets, general and by port.
fn policies(row: &HostRules) -> impl Iterator<Item = Part<'_>> {
    let rules = row.local.iter().chain(&row.exported).chain(&row.private);
    let all = rules.flat_map(|rule| {
        let subsets = rule
            .spec
            .subsets
            .iter()
            .filter_map(|subset| subset.traffic_policy.as_deref());
        rule.spec.traffic_policy.as_deref().into_iter().chain(subsets)
    });
    all.flat_map(|policy: &TrafficPolicy| {
        let general = Part {
            outlier: policy.outlier_detection.as_ref(),
            load_balancer: policy.load_balancer.as_deref(),
        };
        let ports = policy.port_level_settings.iter().map(|entry| Part {
            outlier: entry.outlier_detection.as_ref(),
            load_balancer: entry.load_balancer.as_deref(),
        });
        std::iter::once(general).chain(ports)
    })
}
