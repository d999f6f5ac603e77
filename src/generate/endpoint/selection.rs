//! Selection of a service's endpoints by port and subset.
//!
//! A service has a cluster for each port and subset, and each selects from the same endpoints. Those of a service with
//! many are indexed once in an update, so that the time of a cluster depends on the endpoints that it has.

use std::{collections::BTreeMap, ops::Range};

use super::assignment::Target;
use crate::{
    base::{ClusterId, Labels, SmolStr, select},
    generate::BuildContext,
    model::{Endpoint, ServiceKey},
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

/// Endpoints with equal labels.
struct LabelSet {
    /// The position of one of them.
    first: usize,
    /// The positions of all of them, ascending.
    positions: Vec<Range<usize>>,
}

/// A service, and the labels of a subset; none for all endpoints.
#[derive(PartialEq, Eq, Hash)]
struct SelectionKey {
    service: ServiceKey,
    labels: BTreeMap<String, String>,
}

/// The positions of endpoints, ascending, by what decides which port they serve: number and name of the service port,
/// and the cluster.
type PortIndex = BTreeMap<(u32, SmolStr, ClusterId), Vec<usize>>;

impl Target<'_> {
    /// Returns those of the service's endpoints that are in the subset and for which `serves` is true, in their order.
    /// `serves` may read only the service port and the cluster of an endpoint.
    pub(super) fn select<'e>(
        &self,
        ctx: &BuildContext,
        endpoints: &'e [Endpoint],
        serves: impl Fn(&Endpoint) -> bool,
    ) -> Vec<&'e Endpoint> {
        let subset = self.rule.and_then(|rule| rule.subset(self.subset));
        if endpoints.len() <= FEW || subset.is_none() && self.service.ports.len() == 1 {
            let served = endpoints.iter().filter(|endpoint| serves(endpoint));
            return served
                .filter(|endpoint| selects(subset, &endpoint.origin.labels))
                .collect();
        }
        let memo: &EndpointMemo = ctx.memo.get();
        let index = memo.selected(ctx.cx, &self.service.key, subset, endpoints);
        let serving = |positions: &&Vec<usize>| positions.first().is_some_and(|first| serves(&endpoints[*first]));
        let mut positions: Vec<usize> = index.values().filter(serving).flatten().copied().collect();
        positions.sort_unstable();
        positions.into_iter().map(|position| &endpoints[position]).collect()
    }
}

impl EndpointMemo {
    fn selected(
        &self,
        cx: &Cx,
        service: &ServiceKey,
        subset: Option<&Subset>,
        endpoints: &[Endpoint],
    ) -> Memoized<PortIndex> {
        let key = SelectionKey {
            service: service.clone(),
            labels: subset.map(|subset| subset.labels.clone()).unwrap_or_default(),
        };
        let all = key.labels.is_empty();
        self.selected.get(cx, key, |cx| {
            if all {
                return port_index(endpoints, 0..endpoints.len());
            }
            let sets = self.label_sets.get(cx, service.clone(), |_| label_sets(endpoints));
            let sets = sets.iter();
            let selected = sets.filter(|set| selects(subset, &endpoints[set.first].origin.labels));
            let mut positions: Vec<usize> = selected
                .flat_map(|set| set.positions.iter().cloned().flatten())
                .collect();
            positions.sort_unstable();
            port_index(endpoints, positions)
        })
    }
}

fn label_sets(endpoints: &[Endpoint]) -> Vec<LabelSet> {
    let mut sets: BTreeMap<&Labels, Vec<Range<usize>>> = BTreeMap::new();
    let mut start = 0;
    // The endpoints of a workload are usually neighbours.
    for neighbours in endpoints.chunk_by(|one, other| one.origin.ptr_eq(&other.origin)) {
        let end = start + neighbours.len();
        sets.entry(&neighbours[0].origin.labels).or_default().push(start..end);
        start = end;
    }
    let sets = sets.into_values();
    sets.map(|positions| LabelSet {
        first: positions[0].start,
        positions,
    })
    .collect()
}

fn port_index(endpoints: &[Endpoint], positions: impl IntoIterator<Item = usize>) -> PortIndex {
    let mut index = PortIndex::new();
    for position in positions {
        let endpoint = &endpoints[position];
        let port = (
            endpoint.service_port,
            endpoint.port_name.clone(),
            endpoint.origin.cluster.clone(),
        );
        index.entry(port).or_default().push(position);
    }
    index
}

/// Returns true if a subset has endpoints with these labels; without a subset, it does.
fn selects(subset: Option<&Subset>, labels: &Labels) -> bool {
    subset.is_none_or(|subset| {
        let pairs = subset.labels.iter();
        select::matches(pairs.map(|(k, v)| (k.as_str(), v.as_str())), labels)
    })
}
