//! Names of resources that a client requests, for clients that get nothing else.
//!
//! Envoys subscribe to all resources that concern them. Proxyless gRPC clients request resources by name and need few
//! of a mesh. Their requested names are therefore part of their group.

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

/// The names that one client requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestedResources(BTreeMap<ResourceType, Names>);

impl RequestedResources {
    /// Collects the names of each type. Leaves out types without names.
    pub fn new(names: impl IntoIterator<Item = (ResourceType, BTreeSet<SmolStr>)>) -> Self {
        let requested = names.into_iter().filter(|(_, names)| !names.is_empty());
        Self(
            requested
                .map(|(resource_type, names)| (resource_type, Shared::new(names)))
                .collect(),
        )
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
            None => names.is_empty(),
        }
    }
}
