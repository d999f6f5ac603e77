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

/// A location attribute of clients that endpoints may depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LocationAttribute {
    /// The node.
    Node,
    /// The locality.
    Locality,
    /// A label that a failover priority compares.
    Label(SmolStr),
}

/// Emits the attributes that the endpoints of a service depend on without a DestinationRule.
pub fn of_service(_key: &ServiceKey, service: &Service, emit: &mut dyn FnMut(LocationAttribute)) {
    for member in service.all() {
        if member.node_local {
            emit(LocationAttribute::Node);
        }
        let labels: &[&[&str]] = match member.traffic_distribution {
            TrafficDistribution::Any => &[],
            TrafficDistribution::PreferSameZone => &[ZONE_LABELS],
            TrafficDistribution::PreferSameNode => &[ZONE_LABELS, NODE_LABELS],
        };
        for label in labels.iter().copied().flatten() {
            emit(LocationAttribute::Label(SmolStr::new(label)));
        }
    }
}

/// Emits the attributes that endpoints may depend on by the rules for a host.
pub fn of_rules(_key: &RuleKey, row: &HostRules, emit: &mut dyn FnMut(LocationAttribute)) {
    if policies(row).any(|part| part.outlier.is_some() || part.setting().is_some()) {
        emit(LocationAttribute::Locality);
    }
    for label in policies(row).filter_map(|part| part.setting()).flat_map(labels) {
        emit(LocationAttribute::Label(label));
    }
}

/// Derives the location attributes that the mesh uses. They are evaluated again when an attribute gets its first use or
/// loses its last one, and not after every change of a service or rule that uses one.
pub fn dependencies(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<LocalityDependencies> {
    let mut needs = LocalityDependencies::default();
    let (services, rules) = (mesh.service_locations.keys(cx), mesh.rule_locations.keys(cx));
    for attribute in services.chain(rules) {
        match attribute {
            LocationAttribute::Node => needs.node = true,
            LocationAttribute::Locality => needs.locality = true,
            LocationAttribute::Label(label) => _ = needs.labels.insert(label.clone()),
        }
    }
    if let Some(setting) = mesh.mesh_config(cx).locality_lb_setting.as_ref() {
        needs.locality |= !setting.distribute.is_empty();
        needs.labels.extend(labels(setting));
    }
    needs.locality |= !needs.labels.is_empty();
    Some(needs)
}

/// Returns the labels that the failover priority of a setting compares.
fn labels(setting: &LocalityLoadBalancerSetting) -> impl Iterator<Item = SmolStr> {
    let priority = setting.failover_priority.iter();
    priority.map(|label| SmolStr::new(label.split('=').next().unwrap_or_default()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Change, Installation, World, fixture};

    fn rule(name: &str, policy: &str) -> Vec<Change> {
        let text = format!(
            "{{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {{name: {name}}}, \
             spec: {{host: {name}.test, trafficPolicy: {{{policy}}}}}}}"
        );
        let rows = fixture::folder(&Installation::default(), &[("rules.yaml", &text)]);
        rows.into_iter().map(Change::Upsert).collect()
    }

    #[test]
    fn rules_concern_the_dependencies_by_the_attributes_that_they_use() {
        let mut world = World::new(Installation::default());
        let evaluate = |world: &World| {
            let cx = Cx::recording();
            let found = dependencies(&cx, &world.snapshot(), &()).expect("there is always one");
            (found, cx.into_reads())
        };
        world.commit(rule("a", "outlierDetection: {consecutive5xxErrors: 1}"));
        let (found, reads) = evaluate(&world);
        assert!(found.locality && !found.node && found.labels.is_empty());
        for other in [
            rule("a", "outlierDetection: {consecutive5xxErrors: 2}"),
            rule("b", "outlierDetection: {consecutive5xxErrors: 3}"),
        ] {
            let changes = world.commit(other).changes;
            assert!(!changes.is_empty() && !changes.touches(&reads));
        }
        let failover = "loadBalancer: {localityLbSetting: {failoverPriority: [team=a, rack]}}";
        let changes = world.commit(rule("b", failover)).changes;
        assert!(changes.touches(&reads));
        let (found, reads) = evaluate(&world);
        let labels: Vec<&str> = found.labels.iter().map(SmolStr::as_str).collect();
        assert_eq!(labels, ["rack", "team"]);
        let changes = world.commit(rule("b", "tls: {mode: DISABLE}")).changes;
        assert!(changes.touches(&reads));
        let (found, _) = evaluate(&world);
        assert!(found.locality && found.labels.is_empty());
    }
}
