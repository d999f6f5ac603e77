//! Results of generation: one built resource with its notes, the resources of one type, and the snapshot of a group.

use std::sync::Arc;

use imbl::OrdMap;
use smol_str::SmolStr;

use super::{
    constant,
    encoded::{EncodedResource, ResourceType},
    requested::RequestedResources,
};
use crate::{
    base::{Shared, Version},
    model::Revision,
};

/// Something noticed while a resource was built, for metrics and debug pages: a conflict, a filter left out, a missing
/// reference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Note {
    /// A stable word, where there is one the name of Istio's push metric (`pilot_duplicate_envoy_clusters`).
    pub code: &'static str,
    /// What it is about.
    pub detail: SmolStr,
}

/// The outcome of building one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Built {
    /// The resource; `None` if there is none to send after all.
    pub resource: Option<Arc<EncodedResource>>,
    /// What was noticed.
    pub notes: Vec<Note>,
}

impl Built {
    /// A resource without remarks.
    pub fn new(resource: EncodedResource) -> Self {
        Self {
            resource: Some(Arc::new(resource)),
            notes: Vec::new(),
        }
    }

    /// No resource.
    pub fn none() -> Self {
        Self {
            resource: None,
            notes: Vec::new(),
        }
    }

    /// Bytes on the wire.
    pub fn bytes(&self) -> usize {
        self.resource
            .as_ref()
            .map_or(0, |resource| resource.delta_frame().len())
    }

    /// Adds remarks.
    pub fn with_notes(mut self, notes: Vec<Note>) -> Self {
        self.notes = notes;
        self
    }
}

/// The resources of one type that one part gives, by name.
#[derive(Clone, Debug, Default)]
pub struct PartResources {
    /// The resources.
    pub resources: OrdMap<SmolStr, Arc<EncodedResource>>,
    /// Sum of the resources' versions: equal content has an equal digest, in any order.
    pub digest: u128,
}

/// All resources of one type that a group may have: one map for each part, the first that has a name wins.
#[derive(Clone, Debug, Default)]
pub struct TypeResources {
    /// Part by part.
    pub parts: Arc<[Arc<PartResources>]>,
}

impl TypeResources {
    /// A resource by name.
    pub fn get(&self, name: &str) -> Option<&Arc<EncodedResource>> {
        self.parts.iter().find_map(|part| part.resources.get(name))
    }

    /// All resources: part by part, each by name, repeated names left out.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<EncodedResource>> {
        self.parts.iter().enumerate().flat_map(|(index, part)| {
            let earlier = &self.parts[..index];
            part.resources
                .iter()
                .filter(move |(name, _)| !earlier.iter().any(|part| part.resources.contains_key(name.as_str())))
                .map(|(_, resource)| resource)
        })
    }

    /// The version of the whole view: the same for the same content on every replica.
    pub fn version(&self) -> Version {
        let digest = self
            .parts
            .iter()
            .fold(0u128, |sum, part| sum.rotate_left(1) ^ part.digest);
        Version::of(&digest.to_le_bytes())
    }

    /// True if both are made of the same allocations, so that nothing can differ.
    pub fn same(&self, other: &Self) -> bool {
        self.parts.len() == other.parts.len()
            && self
                .parts
                .iter()
                .zip(other.parts.iter())
                .all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// The resources that are new or different in `newer`, and the names that are gone. Costs little where parts or
    /// their inner nodes are shared.
    pub fn difference(&self, newer: &Self) -> Difference {
        let mut changed: OrdMap<SmolStr, Arc<EncodedResource>> = OrdMap::new();
        let mut removed: std::collections::BTreeSet<SmolStr> = std::collections::BTreeSet::new();
        let pairs = self.parts.len().max(newer.parts.len());
        let empty = Arc::new(PartResources::default());
        for index in 0..pairs {
            let old = self.parts.get(index).unwrap_or(&empty);
            let new = newer.parts.get(index).unwrap_or(&empty);
            if Arc::ptr_eq(old, new) {
                continue;
            }
            for item in old.resources.diff(&new.resources) {
                let name = match item {
                    imbl::ordmap::DiffItem::Add(name, _) | imbl::ordmap::DiffItem::Remove(name, _) => name,
                    imbl::ordmap::DiffItem::Update { new: (name, _), .. } => name,
                };
                match newer.get(name) {
                    Some(now) if self.get(name).is_none_or(|before| before.version != now.version) => {
                        changed.insert(name.clone(), now.clone());
                    }
                    Some(_) => {}
                    None => {
                        removed.insert(name.clone());
                    }
                }
            }
        }
        Difference {
            changed: changed.into_iter().map(|(_, resource)| resource).collect(),
            removed: removed.into_iter().collect(),
        }
    }
}

/// What has to be sent to get from one view to another.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// New or changed resources by name.
    pub changed: Vec<Arc<EncodedResource>>,
    /// Names that are gone, sorted.
    pub removed: Vec<SmolStr>,
}

/// Everything a group is sent, at one revision.
#[derive(Clone, Debug)]
pub struct ResourceSnapshot {
    /// The revision of the mesh that it was generated from.
    pub revision: Revision,
    views: Arc<[TypeResources]>,
    /// What an unknown route name is answered with: gateways get an empty route configuration, sidecars nothing.
    pub answers_unknown_routes: bool,
    /// What it was made for, if it holds only what its clients ask for; `None`: it holds all there is.
    pub requested: Option<Shared<RequestedResources>>,
}

impl ResourceSnapshot {
    /// Assembles a snapshot; `views` are in the order of [`ResourceType::ALL`].
    pub fn new(revision: Revision, views: Vec<TypeResources>, answers_unknown_routes: bool) -> Self {
        debug_assert_eq!(views.len(), ResourceType::ALL.len());
        Self {
            revision,
            views: views.into(),
            answers_unknown_routes,
            requested: None,
        }
    }

    /// The same, made for this demand.
    pub fn with_requested(mut self, requested: Option<Shared<RequestedResources>>) -> Self {
        self.requested = requested;
        self
    }

    /// A snapshot without resources.
    pub fn empty() -> Self {
        Self::new(
            Revision::default(),
            ResourceType::ALL.iter().map(|_| TypeResources::default()).collect(),
            false,
        )
    }

    /// The view of a type.
    pub fn resources(&self, resource_type: ResourceType) -> &TypeResources {
        &self.views[resource_type as usize]
    }

    /// True if these are just the names of the type that the snapshot was made for.
    pub fn is_made_for(&self, resource_type: ResourceType, names: &imbl::OrdSet<SmolStr>) -> bool {
        self.requested
            .as_ref()
            .is_some_and(|requested| requested.is(resource_type, names))
    }

    /// What a client gets that asks for a name which does not exist: an empty load assignment (the cluster is known,
    /// its endpoints are not), an empty route configuration for gateways, otherwise nothing.
    pub fn absent(&self, resource_type: ResourceType, name: &str) -> Option<EncodedResource> {
        use crate::proto::envoy::config::endpoint::v3::ClusterLoadAssignment;
        match resource_type {
            ResourceType::Endpoint => Some(EncodedResource::new(
                name,
                &ClusterLoadAssignment {
                    cluster_name: name.to_owned(),
                    ..Default::default()
                },
            )),
            ResourceType::Route if self.answers_unknown_routes => {
                Some(EncodedResource::new(name, &constant::empty_route_configuration(name)))
            }
            _ => None,
        }
    }
}
