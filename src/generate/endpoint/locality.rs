//! Locality load balancing: the setting of a service, and its effect on groups of endpoints.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use super::lb_endpoint::{LbEndpoint, LocalityEndpoints};
use crate::{
    base::Labels,
    generate::BuildContext,
    model::{
        Service,
        locality_dependencies::{NODE_LABELS, ZONE_LABELS},
        service::TrafficDistribution,
    },
    proto::istio::networking::v1alpha3::{
        LocalityLoadBalancerSetting, TrafficPolicy,
        locality_load_balancer_setting::{Distribute, Failover},
    },
};

/// Locality setting of a service.
pub struct LocalityLb<'a> {
    setting: Cow<'a, LocalityLoadBalancerSetting>,
    /// True if failover is enabled. It needs outlier detection, without which Envoy never leaves the first priority;
    /// traffic distribution of a service does not.
    failover: bool,
}

/// Attributes of a proxy's location that the endpoints of a service depend on.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct LocationDependencies {
    /// Node.
    pub node: bool,
    /// Locality.
    pub locality: bool,
    /// Labels.
    pub labels: BTreeSet<SmolStr>,
}

impl LocationDependencies {
    /// Returns true if any attribute is needed.
    pub fn any(&self) -> bool {
        self.node || self.locality
    }
}

/// Returns the location attributes that the endpoints of a service with a policy depend on.
pub fn needs(ctx: &BuildContext, service: &Service, policy: Option<&TrafficPolicy>) -> LocationDependencies {
    let mut needs = LocationDependencies {
        node: service.node_local,
        ..LocationDependencies::default()
    };
    if let Some(setting) = locality_setting(ctx, service, policy) {
        needs.locality = setting.failover || !setting.setting.distribute.is_empty();
        if setting.setting.distribute.is_empty() && setting.failover {
            let labels = setting.setting.failover_priority.iter();
            needs.labels = labels.map(|label| SmolStr::new(label_key(label).0)).collect();
        }
    }
    needs
}

/// Returns the setting of the rule, or else the service's traffic distribution, or else the mesh's setting; `None` if
/// disabled.
pub fn locality_setting<'a>(
    ctx: &BuildContext<'a>,
    service: &Service,
    policy: Option<&'a TrafficPolicy>,
) -> Option<LocalityLb<'a>> {
    let detects_outliers = policy.is_some_and(|policy| policy.outlier_detection.is_some());
    let enabled = |setting: &'a LocalityLoadBalancerSetting| {
        (setting.enabled != Some(false)).then_some(LocalityLb {
            setting: Cow::Borrowed(setting),
            failover: detects_outliers,
        })
    };
    let load_balancer = policy.and_then(|policy| policy.load_balancer.as_ref());
    if let Some(setting) = load_balancer.and_then(|settings| settings.locality_lb_setting.as_ref()) {
        return enabled(setting);
    }
    let labels: &[&[&str]] = match service.traffic_distribution {
        TrafficDistribution::Any => {
            return ctx.mesh_config().locality_lb_setting.as_ref().and_then(enabled);
        }
        TrafficDistribution::PreferSameZone => &[ZONE_LABELS],
        TrafficDistribution::PreferSameNode => &[ZONE_LABELS, NODE_LABELS],
    };
    Some(LocalityLb {
        setting: Cow::Owned(LocalityLoadBalancerSetting {
            failover_priority: labels
                .iter()
                .copied()
                .flatten()
                .map(|label| (*label).to_owned())
                .collect(),
            ..Default::default()
        }),
        failover: true,
    })
}

/// Splits a label of `failoverPriority` into its key and the value that replaces the proxy's. A text with several `=`
/// has no value.
fn label_key(label: &str) -> (&str, Option<&str>) {
    match label.split_once('=') {
        Some((key, value)) => (key, Some(value).filter(|value| !value.contains('='))),
        None => (label, None),
    }
}

impl LocalityLb<'_> {
    /// Returns true if the cluster must use the weights of localities.
    pub fn weighs(&self) -> bool {
        let setting = &self.setting;
        let fails_over = !setting.failover.is_empty() || !setting.failover_priority.is_empty();
        !setting.distribute.is_empty() || self.failover && fails_over
    }

    /// Applies the setting for a proxy in a locality. `labels` are the proxy's labels that failover compares, if any.
    pub(super) fn apply(
        &self,
        mut groups: Vec<LocalityEndpoints>,
        locality: &str,
        labels: Option<&Labels>,
    ) -> Vec<LocalityEndpoints> {
        let setting = &self.setting;
        if !setting.distribute.is_empty() {
            distribute(&mut groups, locality, &setting.distribute);
        } else if self.failover && setting.failover_priority.is_empty() {
            fail_over(&mut groups, locality, &setting.failover);
        } else if self.failover {
            if let Some(labels) = labels {
                groups = prioritise(groups, labels, &setting.failover_priority);
            }
            if !setting.failover.is_empty() {
                fail_over(&mut groups, locality, &setting.failover);
            }
        }
        groups
    }
}

/// Splits `region/zone/subzone`; missing parts are empty.
fn parts(locality: &str) -> [&str; 3] {
    let mut parts = locality.splitn(3, '/');
    [(); 3].map(|()| parts.next().unwrap_or_default())
}

/// Returns true if a locality matches a pattern: `*` and missing parts match any zone and subzone.
fn is_meant(locality: &str, pattern: &str) -> bool {
    let ([region, zone, subzone], [wanted_region, wanted_zone, wanted_subzone]) = (parts(locality), parts(pattern));
    let part = |have: &str, want: &str| want == "*" || want.is_empty() || have == want;
    (wanted_region == "*" || region == wanted_region) && part(zone, wanted_zone) && part(subzone, wanted_subzone)
}

/// Sets weights by the first rule for the proxy's locality. Localities that the rule does not name get none.
fn distribute(groups: &mut [LocalityEndpoints], locality: &str, rules: &[Distribute]) {
    let Some(rule) = rules.iter().find(|rule| is_meant(locality, &rule.from)) else {
        return;
    };
    let mut open: BTreeSet<usize> = (0..groups.len()).collect();
    for (pattern, percent) in &rule.to {
        let meant: Vec<usize> = open
            .iter()
            .copied()
            .filter(|index| is_meant(&groups[*index].locality, pattern))
            .collect();
        let weight_of = |group: &LocalityEndpoints| u64::from(group.weight.unwrap_or(1));
        let total: u64 = meant.iter().map(|index| weight_of(&groups[*index])).sum();
        for index in meant {
            open.remove(&index);
            let share = (weight_of(&groups[index]) * u64::from(*percent)).div_ceil(total.max(1));
            if share > 0 {
                groups[index].weight = Some(u32::try_from(share).unwrap_or(u32::MAX));
            }
        }
    }
    for index in open {
        groups[index].endpoints.clear();
    }
}

/// Sets priorities by distance. If a rule names the region to fail over to, other regions follow it. Priorities by
/// labels take precedence.
fn fail_over(groups: &mut [LocalityEndpoints], locality: &str, rules: &[Failover]) {
    const DISTANCES: u32 = 5;
    let [region, zone, subzone] = parts(locality);
    for group in groups.iter_mut() {
        let [other_region, other_zone, other_subzone] = parts(&group.locality);
        let distance = if region == other_region {
            match (zone == other_zone, subzone == other_subzone) {
                (true, true) => 0,
                (true, false) => 1,
                (false, _) => 2,
            }
        } else {
            let rule = rules.iter().find(|rule| rule.from == region);
            if rule.is_some_and(|rule| rule.to != other_region) {
                4
            } else {
                3
            }
        };
        group.priority = group.priority * DISTANCES + distance;
    }
    compact(groups);
}

/// Sets priorities by the first label in which proxy and endpoint differ. A locality is split if its endpoints differ.
fn prioritise(groups: Vec<LocalityEndpoints>, labels: &Labels, compared: &[String]) -> Vec<LocalityEndpoints> {
    let count = compared.len();
    let given = compared.iter().map(|label| label_key(label));
    let values: BTreeMap<&str, &str> = given.clone().filter_map(|(key, value)| Some((key, value?))).collect();
    let of_client = |key: &str| labels.get(key).map_or("", SmolStr::as_str);
    let wanted: Vec<(&str, &str)> = given
        .map(|(key, _)| (key, values.get(key).copied().unwrap_or_else(|| of_client(key))))
        .collect();
    let priority = |member: &LbEndpoint| {
        let differs = |(key, value): &(&str, &str)| member.labels.get(*key).map_or("", SmolStr::as_str) != *value;
        wanted.iter().position(differs).map_or(0, |index| count - index)
    };
    let mut result = Vec::new();
    for group in groups {
        let mut by_priority: BTreeMap<usize, Vec<LbEndpoint>> = BTreeMap::new();
        for member in group.endpoints {
            by_priority.entry(priority(&member)).or_default().push(member);
        }
        for (priority, endpoints) in by_priority {
            let mut part = LocalityEndpoints {
                locality: group.locality.clone(),
                endpoints,
                weight: None,
                priority: u32::try_from(priority).unwrap_or(u32::MAX),
            };
            part.refresh_weight();
            result.push(part);
        }
    }
    compact(&mut result);
    result
}

/// Removes gaps between priorities, which Envoy requires.
fn compact(groups: &mut [LocalityEndpoints]) {
    let used: BTreeSet<u32> = groups.iter().map(|group| group.priority).collect();
    for group in groups {
        let rank = used.range(..group.priority).count();
        group.priority = u32::try_from(rank).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(locality: &str) -> LocalityEndpoints {
        LocalityEndpoints {
            locality: locality.into(),
            endpoints: Vec::new(),
            weight: Some(1),
            priority: 0,
        }
    }

    fn priorities(groups: &[LocalityEndpoints]) -> Vec<u32> {
        groups.iter().map(|group| group.priority).collect()
    }

    #[test]
    fn nearer_localities_come_first() {
        let localities = ["asia/one", "eu/north", "us/east/rack1", "us/west"];
        let mut groups: Vec<LocalityEndpoints> = localities.into_iter().map(group).collect();
        fail_over(&mut groups, "us/east/rack1", &[]);
        assert_eq!(priorities(&groups), [2, 2, 0, 1]);
        let rule = Failover {
            from: "us".into(),
            to: "asia".into(),
        };
        let mut groups: Vec<LocalityEndpoints> = localities.into_iter().map(group).collect();
        fail_over(&mut groups, "us/east/rack1", &[rule]);
        assert_eq!(priorities(&groups), [2, 3, 0, 1]);
    }

    #[test]
    fn weights_follow_the_first_matching_rule() {
        let mut groups: Vec<LocalityEndpoints> = ["eu/north", "us/east", "us/west"].into_iter().map(group).collect();
        let rule = Distribute {
            from: "us/*".into(),
            to: [("us/*".to_owned(), 81), ("eu/*".to_owned(), 19)].into(),
        };
        distribute(&mut groups, "us/east/rack1", &[rule]);
        let weights: Vec<_> = groups.iter().map(|group| group.weight).collect();
        assert_eq!(weights, [Some(19), Some(41), Some(41)]);
    }
}
