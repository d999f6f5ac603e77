//! What a client asks for, where what there is follows from what is asked for.
//!
//! Envoys are offered all that concerns them, and choose. Proxyless gRPC clients know the names of what they want, and a
//! mesh has far more of it than they ask for; so their demand is a result of selection like any other, and decides about
//! the group.

use std::collections::{BTreeMap, BTreeSet};

use imbl::OrdSet;
use smol_str::SmolStr;

use super::ResourceType;
use crate::base::Shared;

/// Names of one type.
pub type Names = Shared<BTreeSet<SmolStr>>;

/// The types that are made on demand, in the order in which a client comes to ask for them.
pub const ON_DEMAND: [ResourceType; 4] = [
    ResourceType::Listener,
    ResourceType::Route,
    ResourceType::Cluster,
    ResourceType::Endpoint,
];

/// The names that one client asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestedResources(BTreeMap<ResourceType, Names>);

impl RequestedResources {
    /// The names of each type; types without names are left out.
    pub fn new(names: impl IntoIterator<Item = (ResourceType, BTreeSet<SmolStr>)>) -> Self {
        let asked = names.into_iter().filter(|(_, names)| !names.is_empty());
        Self(asked.map(|(kind, names)| (kind, Shared::new(names))).collect())
    }

    /// What is asked for, type by type.
    pub fn iter(&self) -> impl Iterator<Item = (ResourceType, &Names)> {
        self.0.iter().map(|(resource_type, names)| (*resource_type, names))
    }

    /// True if just these names of the type are asked for.
    pub fn is(&self, resource_type: ResourceType, names: &OrdSet<SmolStr>) -> bool {
        match self.0.get(&resource_type) {
            Some(asked) => asked.len() == names.len() && asked.iter().eq(names),
            None => names.is_empty(),
        }
    }
}
