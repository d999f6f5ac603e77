//! Selection of a service's endpoints by port and subset.
//!
//! A service has a cluster for each port and subset, and each selects from the same endpoints. Those of a service with
//! many are indexed once in an update, so that the time of a cluster depends on the endpoints that it has.

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
    selected: Memo<SelectionKey, PortIndex>,
}

/// The positions of endpoints with equal labels, ascending; never empty.
type LabelSet = Vec<Range<usize>>;

/// A service, and one of its subsets; none for all endpoints.
#[derive(PartialEq, Eq, Hash)]
struct SelectionKey {
    service: ServiceKey,
    subset: Option<SubsetKey>,
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
        let index = memo.selected(ctx.cx, self, endpoints);
        let positions = if serves.is_some() {
            index.of_port(self.port)
        } else {
            index.all()
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
    fn selected(&self, cx: &Cx, target: &Target, endpoints: &[Endpoint]) -> Memoized<PortIndex> {
        let service = &target.service.key;
        let subset = target.labelled_subset();
        let key = SelectionKey {
            service: service.clone(),
            subset: subset.map(|(rule, subset)| SubsetKey {
                rule: rule.clone(),
                name: SmolStr::new(&subset.name),
            }),
        };
        self.selected.get(cx, key, |cx| {
            let Some((_, subset)) = subset else {
                return PortIndex::of(endpoints, 0..endpoints.len());
            };
            let sets = self.label_sets.get(cx, service.clone(), |_| label_sets(endpoints));
            let is_selected = |set: &&LabelSet| selects(Some(subset), &endpoints[set[0].start].origin.labels);
            let selected = sets.iter().filter(is_selected).flatten();
            let mut positions: Vec<usize> = selected.cloned().flatten().collect();
            positions.sort_unstable();
            PortIndex::of(endpoints, positions)
        })
    }
}

impl PortIndex {
    fn of(endpoints: &[Endpoint], positions: impl IntoIterator<Item = usize>) -> Self {
        let mut index = Self::default();
        for position in positions {
            let endpoint = &endpoints[position];
            let of_name = index.by_name.entry(endpoint.port_name.clone());
            of_name.or_default().push(position);
            if endpoint.service_port != 0 {
                let of_number = index.by_number.entry(endpoint.service_port);
                of_number.or_default().push(position);
            }
        }
        index
    }

    /// Returns the positions of endpoints with the name or the number of a port.
    fn of_port(&self, port: &ServicePort) -> BTreeSet<usize> {
        let lists = [self.by_name.get(&port.name), self.by_number.get(&port.number)];
        lists.into_iter().flatten().flatten().copied().collect()
    }

    fn all(&self) -> BTreeSet<usize> {
        self.by_name.values().flatten().copied().collect()
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
