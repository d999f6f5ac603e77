//! Selection of a service's endpoints by port and subset.
//!
//! A service has a cluster for each port and subset, and each selects from the same endpoints. Those of a service with
//! many are indexed once in an update. So a cluster reads those of its port, or those of its subset if they are few.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher},
    ops::Range,
};

use super::assignment::Target;
use crate::{
    base::{Labels, Shared, SmolStr, select},
    generate::BuildContext,
    model::{Endpoint, ServiceKey, destination_rule::DestinationRule, service::ServicePort},
    proto::istio::networking::v1alpha3::Subset,
    table::{Cx, Memo, Memoized},
};

/// The number of endpoints up to which a cluster reads all of them, which takes less time than an index.
const FEW: usize = 256;

/// Indexes of the endpoints of services that have many. A ServiceEntry with 4,000 workloads and 20 ports has 80,000
/// endpoints, all of which each of the 10,000 clusters of 500 subsets would read.
#[derive(Default)]
pub struct EndpointMemo {
    label_sets: Memo<ServiceKey, Vec<LabelSet>>,
    ports: Memo<ServiceKey, PortIndex>,
    subsets: Memo<(ServiceKey, SubsetKey), SubsetEndpoints>,
}

/// The positions of endpoints with equal labels, ascending; never empty.
type LabelSet = Vec<Range<usize>>;

/// The positions of the endpoints of a subset, in all ports. Each of a thousand subsets may have all endpoints of a
/// service with a hundred thousand.
#[derive(Debug, PartialEq)]
enum SubsetEndpoints {
    /// Few, ascending.
    Few(Vec<usize>),
    /// Many: a bit for each endpoint of the service.
    Many(Vec<u64>),
}

/// A subset of a rule. Rules are compared by allocation: there is a cluster for each port, and a subset may have
/// thousands of labels.
struct SubsetKey {
    rule: Shared<DestinationRule>,
    name: SmolStr,
}

impl PartialEq for SubsetKey {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.rule.ptr_eq(&other.rule)
    }
}

impl Eq for SubsetKey {}

impl Hash for SubsetKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The rules of many namespaces may have subsets of one name.
        (&self.rule.meta.key, &self.name).hash(state);
    }
}

/// The positions of endpoints, ascending, by the name and by the number of the service port that they serve. There may
/// be tens of thousands of ports, and a cluster for each.
#[derive(Default)]
struct PortIndex {
    by_name: BTreeMap<SmolStr, Vec<usize>>,
    /// Those of which the number is known.
    by_number: BTreeMap<u32, Vec<usize>>,
}

impl Target<'_> {
    /// Returns those of the service's endpoints that are in the subset, in their order. With `serves`, these are only
    /// those for which it is true; it must be false for endpoints with neither the name nor the number of the port.
    pub(super) fn select<'e>(
        &self,
        ctx: &BuildContext,
        endpoints: &'e [Endpoint],
        serves: Option<impl Fn(&Endpoint) -> bool>,
    ) -> Vec<&'e Endpoint> {
        let subset = self.rule.and_then(|rule| rule.subset(self.subset));
        let is_served = |endpoint: &&Endpoint| serves.as_ref().is_none_or(|serves| serves(endpoint));
        if endpoints.len() <= FEW || subset.is_none() && self.service.ports.len() == 1 {
            let served = endpoints.iter().filter(is_served);
            return served
                .filter(|endpoint| selects(subset, &endpoint.origin.labels))
                .collect();
        }
        let memo: &EndpointMemo = ctx.memo.get();
        let subset = memo.of_subset(ctx.cx, self, endpoints);
        let positions: Vec<usize> = match subset.as_deref() {
            Some(SubsetEndpoints::Few(positions)) => positions.clone(),
            subset => {
                let is_selected = |position: &usize| subset.is_none_or(|subset| subset.contains(*position));
                if serves.is_some() {
                    memo.of_ports(ctx.cx, self, endpoints).of_port(self.port, is_selected)
                } else {
                    (0..endpoints.len()).filter(is_selected).collect()
                }
            }
        };
        let selected = positions.into_iter().map(|position| &endpoints[position]);
        selected.filter(is_served).collect()
    }

    /// Returns the subset, if it has labels.
    fn labelled_subset(&self) -> Option<(&Shared<DestinationRule>, &Subset)> {
        let rule = self.rule?;
        let subset = rule.subset(self.subset)?;
        (!subset.labels.is_empty()).then_some((rule, subset))
    }
}

impl EndpointMemo {
    fn of_ports(&self, cx: &Cx, target: &Target, endpoints: &[Endpoint]) -> Memoized<PortIndex> {
        let service = target.service.key.clone();
        self.ports.get(cx, service, |_| PortIndex::of(endpoints))
    }

    /// Returns the endpoints of the target's subset; `None` for all.
    fn of_subset(&self, cx: &Cx, target: &Target, endpoints: &[Endpoint]) -> Option<Memoized<SubsetEndpoints>> {
        let (rule, subset) = target.labelled_subset()?;
        let service = &target.service.key;
        let key = SubsetKey {
            rule: rule.clone(),
            name: SmolStr::new(&subset.name),
        };
        Some(self.subsets.get(cx, (service.clone(), key), |cx| {
            let sets = self.label_sets.get(cx, service.clone(), |_| label_sets(endpoints));
            let is_selected = |set: &&LabelSet| selects(Some(subset), &endpoints[set[0].start].origin.labels);
            let selected: Vec<&Range<usize>> = sets.iter().filter(is_selected).flatten().collect();
            SubsetEndpoints::of(&selected, endpoints.len())
        }))
    }
}

impl SubsetEndpoints {
    /// Returns those at these positions, of a service with `count` endpoints.
    fn of(ranges: &[&Range<usize>], count: usize) -> Self {
        let positions = || ranges.iter().flat_map(|range| range.start..range.end);
        if ranges.iter().map(|range| range.len()).sum::<usize>() <= FEW {
            let mut few: Vec<usize> = positions().collect();
            few.sort_unstable();
            return Self::Few(few);
        }
        let mut bits = vec![0_u64; count.div_ceil(64)];
        for position in positions() {
            bits[position / 64] |= 1 << (position % 64);
        }
        Self::Many(bits)
    }

    fn contains(&self, position: usize) -> bool {
        match self {
            Self::Few(positions) => positions.binary_search(&position).is_ok(),
            Self::Many(bits) => (bits[position / 64] >> (position % 64)) & 1 == 1,
        }
    }
}

impl PortIndex {
    fn of(endpoints: &[Endpoint]) -> Self {
        let mut index = Self::default();
        for (position, endpoint) in endpoints.iter().enumerate() {
            let of_name = index.by_name.entry(endpoint.port_name.clone());
            of_name.or_default().push(position);
            if endpoint.service_port != 0 {
                let of_number = index.by_number.entry(endpoint.service_port);
                of_number.or_default().push(position);
            }
        }
        index
    }

    /// Returns the positions of selected endpoints with the name or the number of a port, ascending.
    fn of_port(&self, port: &ServicePort, is_selected: impl Fn(&usize) -> bool) -> Vec<usize> {
        let lists = [self.by_name.get(&port.name), self.by_number.get(&port.number)];
        let all = lists.into_iter().flatten().flatten().copied();
        let selected: BTreeSet<usize> = all.filter(is_selected).collect();
        selected.into_iter().collect()
    }
}

fn label_sets(endpoints: &[Endpoint]) -> Vec<LabelSet> {
    let mut sets: BTreeMap<&Labels, LabelSet> = BTreeMap::new();
    let mut start = 0;
    // The endpoints of a workload are usually neighbours.
    for neighbours in endpoints.chunk_by(|one, other| one.origin.ptr_eq(&other.origin)) {
        let end = start + neighbours.len();
        sets.entry(&neighbours[0].origin.labels).or_default().push(start..end);
        start = end;
    }
    sets.into_values().collect()
}

/// Returns true if a subset has endpoints with these labels; without a subset, it does.
fn selects(subset: Option<&Subset>, labels: &Labels) -> bool {
    subset.is_none_or(|subset| {
        let pairs = subset.labels.iter();
        select::matches(pairs.map(|(k, v)| (k.as_str(), v.as_str())), labels)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_many_endpoints_of_a_subset_take_a_bit_each() {
        let all = 0..100_000;
        let SubsetEndpoints::Many(bits) = SubsetEndpoints::of(&[&all], 100_000) else {
            panic!("a list of many positions");
        };
        assert_eq!(bits.len(), 1_563);
        let (first, second) = (10..20, 5..7);
        let few = SubsetEndpoints::of(&[&first, &second], 100_000);
        assert_eq!(few, SubsetEndpoints::Few(second.clone().chain(first.clone()).collect()));
        let long = 100..400;
        let many = SubsetEndpoints::of(&[&first, &long, &second], 1_000);
        for position in 0..1_000 {
            let is_in = |range: &Range<usize>| range.contains(&position);
            assert_eq!(few.contains(position), is_in(&first) || is_in(&second), "{position}");
            let expected = few.contains(position) || is_in(&long);
            assert_eq!(many.contains(position), expected, "{position}");
        }
    }
}
