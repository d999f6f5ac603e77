//! Names of resources that a client requests, for types that are generated only on request.
//!
//! Envoys subscribe to all resources that concern them. Proxyless gRPC clients request resources by name and need few
//! of a mesh. Any client may request workloads and services, as a whole or by name. Such names are part of the client's
//! group.

use std::collections::{BTreeMap, BTreeSet};

use imbl::OrdSet;
use smol_str::SmolStr;

use super::ResourceType;
use crate::base::Shared;

/// The requested names of one type.
pub type Names = Shared<BTreeSet<SmolStr>>;

/// The types that are generated on demand, in the order in which a client requests them.
pub const ON_DEMAND: [ResourceType; 4] = [
    ResourceType::Listener,
    ResourceType::Route,
    ResourceType::Cluster,
    ResourceType::Endpoint,
];

/// The types of workloads and services.
pub const ADDRESSES: [ResourceType; 2] = [ResourceType::Address, ResourceType::Workload];

/// The name for all resources of a type in [`ADDRESSES`].
pub const WILDCARD: &str = "*";

/// The maximum number of names of a client with the same content. A client needs few, and each name has a copy of it.
const MAX_COPIES: usize = 16;

/// Counts a name of a client by the content that it leads to. Returns false if too many names have this content.
pub(super) fn has_room<K: Ord>(copies: &mut BTreeMap<K, usize>, content: K) -> bool {
    let count = copies.entry(content).or_default();
    *count += 1;
    *count <= MAX_COPIES
}

/// The names that one client requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestedResources(BTreeMap<ResourceType, Names>);

impl RequestedResources {
    /// Collects the names of each type. Leaves out types without names, except those of [`ADDRESSES`]: a request
    /// without names still gets the workloads of the node.
    pub fn new(names: impl IntoIterator<Item = (ResourceType, BTreeSet<SmolStr>)>) -> Self {
        let is_kept = |(resource_type, names): &(ResourceType, BTreeSet<_>)| {
            !names.is_empty() || ADDRESSES.contains(resource_type)
        };
        let requested = names.into_iter().filter(is_kept);
        Self(
            requested
                .map(|(resource_type, names)| (resource_type, Shared::new(names)))
                .collect(),
        )
    }

    /// Returns the names of a type; `None` if the client does not request it.
    pub fn get(&self, resource_type: ResourceType) -> Option<&Names> {
        self.0.get(&resource_type)
    }

    /// Returns true if the client requests workloads or services.
    pub fn has_addresses(&self) -> bool {
        ADDRESSES.iter().any(|resource_type| self.0.contains_key(resource_type))
    }

    /// Returns true if the client requests workloads or services by name.
    pub fn has_named_addresses(&self) -> bool {
        let requested = ADDRESSES.iter().filter_map(|resource_type| self.0.get(resource_type));
        requested.into_iter().any(|names| !names.contains(WILDCARD))
    }

    /// Returns the names of each type.
    pub fn iter(&self) -> impl Iterator<Item = (ResourceType, &Names)> {
        self.0.iter().map(|(resource_type, names)| (*resource_type, names))
    }

    /// Returns the names of a type.
    pub fn names(&self, resource_type: ResourceType) -> impl Iterator<Item = &SmolStr> {
        self.0.get(&resource_type).into_iter().flat_map(|names| names.iter())
    }

    /// Returns true if the client requests exactly these names of the type.
    pub fn is(&self, resource_type: ResourceType, names: &OrdSet<SmolStr>) -> bool {
        match self.0.get(&resource_type) {
            Some(requested) => requested.len() == names.len() && requested.iter().eq(names),
            None => names.is_empty() && !ADDRESSES.contains(&resource_type),
        }
    }
}
