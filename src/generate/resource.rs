//! Results of generation: one built resource with its notes, the resources of one type, and the snapshot of a group.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use imbl::{OrdMap, OrdSet, ordmap::DiffItem};
use prost::Message;
use smol_str::SmolStr;

use super::{
    constant,
    encoded::{EncodedResource, ResourceType},
    requested::RequestedResources,
};
use crate::{
    base::{Shared, Version},
    model::{Revision, ambient},
    proto::envoy::config::route::v3::RouteConfiguration,
};

/// Name of the route configuration of HTTP proxy listeners.
pub const HTTP_PROXY: &str = "http_proxy";

/// A finding while a resource was built, for metrics and debug pages: a conflict, an omitted filter, a missing
/// reference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Note {
    /// A stable code: the name of Istio's push metric, if there is one (`pilot_duplicate_envoy_clusters`).
    pub code: &'static str,
    /// The object or resource concerned.
    pub detail: SmolStr,
}

/// The result of building one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Built {
    /// The resource; `None` if there is nothing to send.
    pub resource: Option<Arc<EncodedResource>>,
    /// The findings.
    pub notes: Vec<Note>,
}

impl Built {
    /// Creates a result without notes.
    pub fn new(resource: EncodedResource) -> Self {
        Self {
            resource: Some(Arc::new(resource)),
            notes: Vec::new(),
        }
    }

    /// Creates a result without a resource.
    pub fn none() -> Self {
        Self {
            resource: None,
            notes: Vec::new(),
        }
    }

    /// Returns the encoded size in bytes.
    pub fn bytes(&self) -> usize {
        self.resource
            .as_ref()
            .map_or(0, |resource| resource.delta_frame().size())
    }

    /// Replaces the notes.
    pub fn with_notes(mut self, notes: Vec<Note>) -> Self {
        self.notes = notes;
        self
    }
}

/// The resources of one type in one part, by name.
#[derive(Clone, Debug, Default)]
pub struct PartResources {
    /// The resources.
    pub resources: OrdMap<SmolStr, Arc<EncodedResource>>,
    /// The sum of the resources' versions: equal content has an equal digest, in any order.
    pub digest: u128,
}

/// All resources of one type in a group: one map for each part. The first part with a name wins.
#[derive(Clone, Debug, Default)]
pub struct TypeResources {
    /// The resources of each part.
    pub parts: Arc<[Arc<PartResources>]>,
    /// True if the parts are the shards of [`ambient::shard`], so that each name belongs to one of them.
    pub is_sharded: bool,
}

impl TypeResources {
    /// Returns a resource by name.
    pub fn get(&self, name: &str) -> Option<&Arc<EncodedResource>> {
        if self.is_sharded {
            let part = self.parts.get(usize::from(ambient::shard(name)))?;
            return part.resources.get(name);
        }
        self.parts.iter().find_map(|part| part.resources.get(name))
    }

    /// Returns all resources, by part and name, without repeated names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<EncodedResource>> {
        self.parts.iter().enumerate().flat_map(|(index, part)| {
            let earlier = if self.is_sharded { &[] } else { &self.parts[..index] };
            part.resources
                .iter()
                .filter(move |(name, _)| !earlier.iter().any(|part| part.resources.contains_key(name.as_str())))
                .map(|(_, resource)| resource)
        })
    }

    /// Returns the version of all resources together: the same for the same content on every replica.
    pub fn version(&self) -> Version {
        let digest = self
            .parts
            .iter()
            .fold(0u128, |sum, part| sum.rotate_left(1) ^ part.digest);
        Version::of(&digest.to_le_bytes())
    }

    /// Returns true if both consist of the same allocations and therefore cannot differ.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.parts.len() == other.parts.len()
            && self
                .parts
                .iter()
                .zip(other.parts.iter())
                .all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Returns the resources that are new or different in `newer`, and the removed names. Skips parts and inner nodes
    /// of maps that both share.
    pub fn difference(&self, newer: &Self) -> Difference {
        let mut changed: OrdMap<SmolStr, Arc<EncodedResource>> = OrdMap::new();
        let mut removed: BTreeSet<SmolStr> = BTreeSet::new();
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
                    DiffItem::Add(name, _) | DiffItem::Remove(name, _) => name,
                    DiffItem::Update { new: (name, _), .. } => name,
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

/// The difference between two sets of resources.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// New or changed resources, by name.
    pub changed: Vec<Arc<EncodedResource>>,
    /// Removed names, sorted.
    pub removed: Vec<SmolStr>,
}

/// The answer to the name of a route configuration that does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnknownRoutes {
    /// None.
    #[default]
    Omitted,
    /// A route configuration without virtual hosts.
    Empty,
    /// One of these.
    ///
    /// Parity (pilot/pkg/networking/core/httproute.go): every name that a sidecar requests is answered. An Envoy whose
    /// listener refers to a route configuration that never arrives does not become ready.
    Sidecar(Shared<RoutePlaceholders>),
}

/// Encoded route configurations of a sidecar, which lack their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RoutePlaceholders {
    /// That of a port, of HTTP proxies or of a Unix socket.
    pub of_port: Bytes,
    /// That of a port of one host, which sniffing listeners request.
    pub of_host: Bytes,
    /// Those of names that patches match.
    pub by_name: BTreeMap<SmolStr, Bytes>,
}

/// Meaning of the name of a sidecar's route configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteNameKind {
    /// A port, HTTP proxies or a Unix socket.
    Port,
    /// A host and a port.
    Host,
}

impl RouteNameKind {
    /// Returns the kind of a name; `None` if it means nothing.
    pub fn of(name: &str) -> Option<Self> {
        if name.starts_with("unix:") || name == HTTP_PROXY {
            return Some(Self::Port);
        }
        let (kind, port) = match name.split_once(':') {
            Some((_, port)) => (Self::Host, port),
            None => (Self::Port, name),
        };
        port.parse::<i64>().is_ok().then_some(kind)
    }
}

impl UnknownRoutes {
    fn configuration(&self, name: &str) -> Option<EncodedResource> {
        let empty = || EncodedResource::new(name, &constant::empty_route_configuration(name));
        let placeholders = match self {
            Self::Omitted => return None,
            Self::Empty => return Some(empty()),
            Self::Sidecar(placeholders) => placeholders,
        };
        let general = match RouteNameKind::of(name) {
            Some(RouteNameKind::Port) => &placeholders.of_port,
            Some(RouteNameKind::Host) => &placeholders.of_host,
            None => return Some(empty()),
        };
        let template = placeholders.by_name.get(name).unwrap_or(general);
        let mut routes = RouteConfiguration::decode(template.clone()).unwrap_or_default();
        routes.name = name.to_owned();
        Some(EncodedResource::new(name, &routes))
    }
}

/// All resources of a group at one revision.
#[derive(Clone, Debug)]
pub struct ResourceSnapshot {
    /// The revision of the mesh.
    pub revision: Revision,
    types: Arc<[TypeResources]>,
    /// The answer to unknown names of route configurations.
    pub unknown_routes: UnknownRoutes,
    /// The requested names that it was generated for; `None` if it contains all resources of the group.
    pub requested: Option<Shared<RequestedResources>>,
}

impl ResourceSnapshot {
    /// Assembles a snapshot; `types` are in the order of [`ResourceType::ALL`].
    pub fn new(revision: Revision, types: Vec<TypeResources>, unknown_routes: UnknownRoutes) -> Self {
        debug_assert_eq!(types.len(), ResourceType::ALL.len());
        Self {
            revision,
            types: types.into(),
            unknown_routes,
            requested: None,
        }
    }

    /// Sets the requested names.
    pub fn with_requested(mut self, requested: Option<Shared<RequestedResources>>) -> Self {
        self.requested = requested;
        self
    }

    /// Creates a snapshot without resources.
    pub fn empty() -> Self {
        Self::new(
            Revision::default(),
            ResourceType::ALL.iter().map(|_| TypeResources::default()).collect(),
            UnknownRoutes::Omitted,
        )
    }

    /// Returns the resources of a type.
    pub fn resources(&self, resource_type: ResourceType) -> &TypeResources {
        &self.types[resource_type as usize]
    }

    /// Returns true if the snapshot was generated for exactly these names of the type.
    pub fn is_made_for(&self, resource_type: ResourceType, names: &OrdSet<SmolStr>) -> bool {
        self.requested
            .as_ref()
            .is_some_and(|requested| requested.is(resource_type, names))
    }

    /// Returns the response for a name that does not exist: an empty load assignment, since the cluster is known but
    /// its endpoints are not; a route configuration as [`UnknownRoutes`] says; otherwise nothing.
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
            ResourceType::Route => self.unknown_routes.configuration(name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::envoy::config::route::v3::VirtualHost;

    #[test]
    fn every_route_name_of_a_sidecar_is_answered() {
        let template = |hosts: usize| {
            let routes = RouteConfiguration {
                virtual_hosts: vec![VirtualHost::default(); hosts],
                ignore_port_in_host_matching: true,
                ..Default::default()
            };
            Bytes::from(routes.encode_to_vec())
        };
        let unknown = UnknownRoutes::Sidecar(Shared::new(RoutePlaceholders {
            of_port: template(1),
            of_host: template(0),
            by_name: [("82".into(), template(2))].into(),
        }));
        for (name, hosts, ignores_port) in [
            ("81", 1, true),
            ("82", 2, true),
            ("http_proxy", 1, true),
            ("unix:///tmp/x", 1, true),
            ("a.default.svc.cluster.local:81", 0, true),
            ("a:b", 0, false),
            ("anything", 0, false),
        ] {
            let resource = unknown.configuration(name).expect("an answer");
            let routes = RouteConfiguration::decode(resource.any().value).expect("a route configuration");
            let found = (
                routes.name.as_str(),
                routes.virtual_hosts.len(),
                routes.ignore_port_in_host_matching,
            );
            assert_eq!(found, (name, hosts, ignores_port));
        }
        assert!(UnknownRoutes::Omitted.configuration("81").is_none());
    }
}
