//! Locality load balancing: the setting of a service, and its effect on groups of endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use smol_str::SmolStr;

use super::lb_endpoint::{LbEndpoint, LocalityEndpoints};
use crate::{
    base::Labels,
    generate::{BuildContext, traffic_policy::EffectivePolicy},
    model::{
        Service,
        locality_dependencies::{NODE_LABELS, ZONE_LABELS},
        service::TrafficDistribution,
    },
    proto::istio::networking::v1alpha3::{
        LocalityLoadBalancerSetting,
        locality_load_balancer_setting::{Distribute, Failover},
    },
};

/// Settings of traffic distributions.
static SAME_ZONE: LazyLock<LocalityLoadBalancerSetting> = LazyLock::new(|| preferring(&[ZONE_LABELS]));
static SAME_NODE: LazyLock<LocalityLoadBalancerSetting> = LazyLock::new(|| preferring(&[ZONE_LABELS, NODE_LABELS]));

fn preferring(labels: &[&[&str]]) -> LocalityLoadBalancerSetting {
    let labels = labels.iter().copied().flatten();
    LocalityLoadBalancerSetting {
        failover_priority: labels.map(|label| (*label).to_owned()).collect(),
        ..Default::default()
    }
}

/// Locality setting of a service.
pub struct LocalityLb<'a> {
    setting: &'a LocalityLoadBalancerSetting,
    /// True if failover is enabled. It needs outlier detection, without which Envoy never leaves the first priority;
    /// traffic distribution of a service does not.
    failover: bool,
}

/// Attributes of a proxy's location that the endpoints of a service depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LocationDependencies<'a> {
    /// True if it depends on the node.
    pub node: bool,
    /// True if it depends on the locality.
    pub locality: bool,
    /// Labels as `failoverPriority` has them, which may repeat some.
    labels: &'a [String],
}

impl LocationDependencies<'_> {
    /// Returns true if any attribute is needed.
    pub fn any(&self) -> bool {
        self.node || self.locality
    }

    /// Returns those of a proxy's labels that are needed; `None` if none can be.
    pub(super) fn compared(&self, labels: &Labels) -> Option<Labels> {
        let places = self.labels.iter().map(|label| labels.find_index(label_key(label).0));
        let compared = places.filter_map(|place| labels.get_indexed(place.ok()?));
        let compared = compared.map(|(key, value)| (key.clone(), value.clone()));
        (!self.labels.is_empty()).then(|| compared.collect())
    }
}

/// Returns the location attributes that the endpoints of a service with a policy depend on.
pub fn needs<'a>(
    ctx: &BuildContext<'a>,
    service: &Service,
    policy: Option<EffectivePolicy<'a>>,
) -> LocationDependencies<'a> {
    let mut needs = LocationDependencies {
        node: service.node_local,
        ..LocationDependencies::default()
    };
    if let Some(LocalityLb { setting, failover }) = locality_setting(ctx, service, policy) {
        needs.locality = failover || !setting.distribute.is_empty();
        if setting.distribute.is_empty() && failover {
            needs.labels = &setting.failover_priority;
        }
    }
    needs
}

/// Returns the setting of the rule, or else the service's traffic distribution, or else the mesh's setting; `None` if
/// disabled.
pub fn locality_setting<'a>(
    ctx: &BuildContext<'a>,
    service: &Service,
    policy: Option<EffectivePolicy<'a>>,
) -> Option<LocalityLb<'a>> {
    let detects_outliers = policy.is_some_and(|policy| policy.outlier_detection.is_some());
    let enabled = |setting: &'a LocalityLoadBalancerSetting| {
        (setting.enabled != Some(false)).then_some(LocalityLb {
            setting,
            failover: detects_outliers,
        })
    };
    let load_balancer = policy.and_then(|policy| policy.load_balancer);
    if let Some(setting) = load_balancer.and_then(|settings| settings.locality_lb_setting.as_ref()) {
        return enabled(setting);
    }
    let setting = match service.traffic_distribution {
        TrafficDistribution::Any => {
            return ctx.mesh_config().locality_lb_setting.as_ref().and_then(enabled);
        }
        TrafficDistribution::PreferSameZone => &*SAME_ZONE,
        TrafficDistribution::PreferSameNode => &*SAME_NODE,
    };
    Some(LocalityLb {
        setting,
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
        let setting = self.setting;
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
        let setting = self.setting;
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

/// Splits `region/zone/subzone`; missing parts are empty, and further ones do not count.
fn parts(locality: &str) -> [&str; 3] {
    let mut parts = locality.split('/');
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
    let rule = rules.iter().find(|rule| rule.from == region);
    for group in groups.iter_mut() {
        let [other_region, other_zone, other_subzone] = parts(&group.locality);
        let distance = if region == other_region {
            match (zone == other_zone, subzone == other_subzone) {
                (true, true) => 0,
                (true, false) => 1,
                (false, _) => 2,
            }
        } else if rule.is_some_and(|rule| rule.to != other_region) {
            4
        } else {
            3
        };
        group.priority = group.priority * DISTANCES + distance;
    }
    compact(groups);
}

/// Labels that failover compares, each once, at the position of its first occurrence.
struct ComparedLabels<'a> {
    /// Labels that endpoints should have, in order: position, key and value.
    wanted: Vec<(usize, &'a str, &'a str)>,
    /// Positions of labels that endpoints should not have, by key.
    unwanted: BTreeMap<&'a str, usize>,
}

impl<'a> ComparedLabels<'a> {
    /// Returns the labels of `failoverPriority` for a proxy with these labels. The last value that the list gives for a
    /// label counts.
    fn of(list: &'a [String], client: &'a Labels) -> Self {
        let mut keys: BTreeMap<&str, (usize, Option<&str>)> = BTreeMap::new();
        for (position, label) in list.iter().enumerate() {
            let (key, value) = label_key(label);
            let (_, known) = keys.entry(key).or_insert((position, None));
            *known = value.or(*known);
        }
        let (mut wanted, mut unwanted) = (Vec::new(), BTreeMap::new());
        for (key, (position, value)) in keys {
            match value.unwrap_or_else(|| value_of(client, key)) {
                "" => {
                    unwanted.insert(key, position);
                }
                value => wanted.push((position, key, value)),
            }
        }
        wanted.sort_unstable();
        Self { wanted, unwanted }
    }

    /// Returns the position of the first label in which an endpoint differs. The time depends on the labels of the
    /// endpoint, and not on the length of the list, which a tenant chooses.
    fn first_difference(&self, labels: &Labels) -> Option<usize> {
        let mut wanted = self.wanted.iter();
        let missing = wanted.find(|(_, key, value)| value_of(labels, key) != *value);
        let surplus = if self.unwanted.len() < labels.len() {
            let present = self
                .unwanted
                .iter()
                .filter(|(key, _)| !value_of(labels, key).is_empty());
            present.map(|(_, position)| *position).min()
        } else {
            let present = labels.iter().filter(|(_, value)| !value.is_empty());
            present
                .filter_map(|(key, _)| self.unwanted.get(key.as_str()).copied())
                .min()
        };
        missing.map(|(position, ..)| *position).into_iter().chain(surplus).min()
    }
}

/// Returns the value of a label, empty if it is missing.
fn value_of<'a>(labels: &'a Labels, key: &str) -> &'a str {
    labels.get(key).map_or("", SmolStr::as_str)
}

/// Sets priorities by the first label in which proxy and endpoint differ. A locality is split if its endpoints differ.
fn prioritise(groups: Vec<LocalityEndpoints>, labels: &Labels, list: &[String]) -> Vec<LocalityEndpoints> {
    let compared = ComparedLabels::of(list, labels);
    let priority = |member: &LbEndpoint| {
        let difference = compared.first_difference(&member.labels);
        difference.map_or(0, |position| list.len() - position)
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

/// The last priority that Envoy accepts. With a later one, it refuses the endpoints of all clusters in the response.
const LAST_PRIORITY: u32 = 128;

/// Removes gaps between priorities, which Envoy requires. Groups that would have later ones share the last.
fn compact(groups: &mut [LocalityEndpoints]) {
    let mut ranks: BTreeMap<u32, u32> = groups.iter().map(|group| (group.priority, 0)).collect();
    for (rank, slot) in (0_u32..).zip(ranks.values_mut()) {
        *slot = rank.min(LAST_PRIORITY);
    }
    for group in groups {
        group.priority = ranks[&group.priority];
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
        let mut groups = ["us/east", "us/east/rack1/shelf"].map(group);
        fail_over(&mut groups, "us/east/rack1", &[]);
        assert_eq!(priorities(&groups), [1, 0]);
    }

    #[test]
    fn the_first_label_that_differs_decides() {
        let labels = |pairs: &[(&str, &str)]| -> Labels {
            let pairs = pairs.iter();
            pairs.map(|(key, value)| ((*key).into(), (*value).into())).collect()
        };
        let client = labels(&[("a", "1"), ("b", "2"), ("empty", "")]);
        let lists: [&[&str]; 6] = [
            &["a", "b"],
            // Proxies without a label prefer endpoints without it.
            &["c", "empty", "a", "d"],
            // A value of the list replaces the proxy's, the last one wherever it stands; repetitions do not count.
            &["a", "b=3", "a", "a=7", "b=4"],
            &["b=", "a"],
            &["a=1=2", "c"],
            &["c", "d", "e", "f", "g", "h"],
        ];
        let endpoints = [
            labels(&[]),
            labels(&[("a", "1"), ("b", "2")]),
            labels(&[("a", "7"), ("b", "4")]),
            labels(&[("a", "1"), ("c", "x"), ("d", "x")]),
            labels(&[("b", "2"), ("d", ""), ("g", "x"), ("f", "x")]),
        ];
        for list in lists {
            let list: Vec<String> = list.iter().map(|label| (*label).to_owned()).collect();
            let compared = ComparedLabels::of(&list, &client);
            for endpoint in &endpoints {
                let differs = |label: &String| {
                    let (key, _) = label_key(label);
                    let given = list.iter().rev().map(|label| label_key(label));
                    let mut given = given.filter_map(|(other, value)| value.filter(|_| other == key));
                    given.next().unwrap_or_else(|| value_of(&client, key)) != value_of(endpoint, key)
                };
                let want = list.iter().position(differs);
                assert_eq!(compared.first_difference(endpoint), want, "{list:?} {endpoint:?}");
            }
        }
    }

    #[test]
    fn priorities_have_no_gaps() {
        let mut groups: Vec<LocalityEndpoints> = ["a", "b", "c", "d"].into_iter().map(group).collect();
        for (group, priority) in groups.iter_mut().zip([7, 3, 7, 900]) {
            group.priority = priority;
        }
        compact(&mut groups);
        assert_eq!(priorities(&groups), [1, 0, 1, 2]);
    }

    #[test]
    fn late_priorities_share_the_last() {
        let mut groups: Vec<LocalityEndpoints> = std::iter::repeat_n("a", 200).map(group).collect();
        for (group, priority) in groups.iter_mut().zip(1..) {
            group.priority = priority;
        }
        compact(&mut groups);
        let expected: Vec<u32> = (0..200).map(|rank| std::cmp::min(rank, 128)).collect();
        assert_eq!(priorities(&groups), expected);
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
