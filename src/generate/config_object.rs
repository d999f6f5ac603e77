//! Istio's own objects as resources, for other control planes that read them over xDS (MCP).
//!
//! Objects are encoded once for all readers. A snapshot whose table of a kind is the previous one costs a comparison of
//! pointers, and a changed object costs its own encoding.

use std::{any::Any, collections::BTreeMap, sync::Arc};

use imbl::{OrdMap, ordmap::DiffItem};
use prost::{Message, Name};
use smol_str::{SmolStr, format_smolstr};

use super::EncodedResource;
use crate::{
    api::{Config, Kind, Meta, kinds::with_kinds},
    base::{ClusterId, ObjectKey, Shared},
    model::MeshSnapshot,
    proto::{
        self,
        istio::mcp::v1alpha1::{Metadata, Resource},
    },
    table::Cx,
};

/// The type of the mesh config.
pub const MESH_CONFIG: &str = "core/v1alpha1/MeshConfig";
/// The resource version of objects without one, such as those of files. It does not change with the object.
const NO_VERSION: &str = "1";

/// The resources of one type, sorted by name.
pub type Resources = Arc<[Arc<EncodedResource>]>;

/// A type of resources: `group/version/Kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectType {
    /// The mesh config.
    MeshConfig,
    /// The objects of a kind, in any of its versions.
    Objects(Kind),
}

impl ObjectType {
    /// Returns the type of a URL; `None` if it is not served.
    pub fn of_url(url: &str) -> Option<Self> {
        if url == MESH_CONFIG {
            return Some(Self::MeshConfig);
        }
        let mut parts = url.split('/');
        let (group, version, name) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        let mut kinds = Kind::ALL.iter().copied().filter(|kind| kind.is_istio());
        let kind = kinds.find(|kind| kind.group() == group && kind.name() == name)?;
        kind.versions().contains(&version).then_some(Self::Objects(kind))
    }
}

/// The encoded objects of the latest snapshot.
#[derive(Default)]
pub struct ObjectResources {
    types: BTreeMap<ObjectType, EncodedType>,
}

/// The encoded objects of one type.
#[derive(Default)]
struct EncodedType {
    /// The table that was encoded.
    rows: Option<Box<dyn Any + Send>>,
    resources: BTreeMap<SmolStr, Arc<EncodedResource>>,
    list: Resources,
}

impl ObjectResources {
    /// Returns the resources of a type in a snapshot. An unchanged list is the same allocation.
    pub fn list(&mut self, mesh: &MeshSnapshot, object_type: ObjectType) -> Resources {
        let encoded = self.types.entry(object_type).or_default();
        match object_type {
            ObjectType::MeshConfig => mesh_config(mesh, encoded),
            ObjectType::Objects(kind) => objects(kind, mesh, encoded),
        }
        encoded.list.clone()
    }
}

/// Parity (pilot/pkg/networking/apigen/apigen.go): the mesh config is the bare message, without a name.
fn mesh_config(mesh: &MeshSnapshot, encoded: &mut EncodedType) {
    let resource = EncodedResource::new("", mesh.mesh_config(&Cx::untracked()));
    if encoded.list.first().is_none_or(|known| **known != resource) {
        encoded.list = Arc::new([Arc::new(resource)]);
    }
}

macro_rules! objects_by_kind {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { table: $table:ident, class: $class:ident, $($column:tt)* })*) => {
        fn objects(kind: Kind, mesh: &MeshSnapshot, encoded: &mut EncodedType) {
            match kind {
                $(Kind::$kind => objects_by_kind!($class $table, mesh, encoded),)*
            }
        }
    };
    (Istio $table:ident, $mesh:ident, $encoded:ident) => {
        $encoded.update(&$mesh.installation.cluster, $mesh.$table.rows(&Cx::untracked()))
    };
    ($class:ident $table:ident, $mesh:ident, $encoded:ident) => {
        {}
    };
}

with_kinds!(objects_by_kind);

impl EncodedType {
    /// Encodes the objects of the config cluster that differ from the last update.
    fn update<M>(&mut self, cluster: &ClusterId, rows: &OrdMap<ObjectKey, Shared<Config<M>>>)
    where
        M: Message + Name + PartialEq + Send + Sync + 'static,
    {
        let previous = self.rows.take();
        let previous = previous.and_then(|rows| rows.downcast::<OrdMap<ObjectKey, Shared<Config<M>>>>().ok());
        let previous = previous.map(|rows| *rows).unwrap_or_default();
        let mut changed = false;
        let counts = |key: &ObjectKey| key.cluster == *cluster;
        for item in previous.diff(rows) {
            match item {
                DiffItem::Add(key, row) | DiffItem::Update { new: (key, row), .. } if counts(key) => {
                    changed = true;
                    let name = name(key);
                    self.resources.insert(name.clone(), Arc::new(encode(name, row)));
                }
                DiffItem::Remove(key, _) if counts(key) => {
                    changed = true;
                    self.resources.remove(&name(key));
                }
                DiffItem::Add(..) | DiffItem::Update { .. } | DiffItem::Remove(..) => {}
            }
        }
        if changed {
            self.list = self.resources.values().cloned().collect();
        }
        self.rows = Some(Box::new(rows.clone()));
    }
}

fn name(key: &ObjectKey) -> SmolStr {
    format_smolstr!("{}/{}", key.namespace.as_str(), key.name)
}

fn encode<M: Message + Name>(name: SmolStr, row: &Config<M>) -> EncodedResource {
    let resource = Resource {
        metadata: Some(metadata(&name, &row.meta)),
        body: Some(proto::Any::pack(&row.spec)),
    };
    EncodedResource::new(name, &resource)
}

/// Parity (pkg/adsc/adsc.go): an object whose version is the known one counts as unchanged, one
/// without a version never does. So objects of files have none.
fn metadata(name: &str, meta: &Meta) -> Metadata {
    let pairs = |labels: &crate::base::Labels| {
        let pairs = labels.iter();
        pairs.map(|(key, value)| (key.to_string(), value.to_string())).collect()
    };
    Metadata {
        name: name.to_owned(),
        create_time: Some(prost_types::Timestamp {
            seconds: meta.creation,
            nanos: 0,
        }),
        version: match meta.resource_version.as_str() {
            NO_VERSION => String::new(),
            version => version.to_owned(),
        },
        labels: pairs(&meta.labels),
        annotations: pairs(&meta.annotations),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Change, Installation, World,
        fixture::{CLUSTER, config, folder_world},
    };
    use crate::proto::istio::networking::v1alpha3 as networking;

    const ENTRIES: &str = "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: a, namespace: shop, labels: {team: x}, resourceVersion: '7'}
spec: {hosts: [a.example.com], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}
---
apiVersion: networking.istio.io/v1beta1
kind: ServiceEntry
metadata: {name: b, namespace: shop}
spec: {hosts: [b.example.com], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}
";

    fn names(resources: &Resources) -> Vec<&str> {
        resources.iter().map(|resource| resource.name.as_str()).collect()
    }

    #[test]
    fn a_changed_object_is_encoded_alone_and_an_unchanged_list_stays() {
        let entries = ObjectType::Objects(Kind::ServiceEntry);
        let mut world: World = folder_world(Installation::default(), &[("entries.yaml", ENTRIES)]);
        let mut objects = ObjectResources::default();
        let first = objects.list(&world.snapshot(), entries);
        assert_eq!(names(&first), ["shop/a", "shop/b"]);
        assert!(Arc::ptr_eq(&first, &objects.list(&world.snapshot(), entries)));

        let spec = networking::ServiceEntry::default();
        let other = config(Kind::ServiceEntry, "shop/b", 1, spec);
        world.commit(vec![Change::Upsert(other.into())]);
        let second = objects.list(&world.snapshot(), entries);
        assert!(
            Arc::ptr_eq(&first[0], &second[0]),
            "an unchanged object is not encoded again"
        );
        assert_ne!(first[1], second[1]);

        let key = crate::base::ObjectKey::new(&CLUSTER, "shop", "a");
        world.commit(vec![Change::Remove(Kind::ServiceEntry, key)]);
        assert_eq!(names(&objects.list(&world.snapshot(), entries)), ["shop/b"]);
    }

    #[test]
    fn objects_carry_their_metadata() {
        let world = folder_world(Installation::default(), &[("entries.yaml", ENTRIES)]);
        let mut objects = ObjectResources::default();
        let list = objects.list(&world.snapshot(), ObjectType::Objects(Kind::ServiceEntry));
        let decoded = |index: usize| {
            let any = list[index].any();
            assert_eq!(any.type_url, "type.googleapis.com/istio.mcp.v1alpha1.Resource");
            let resource: Resource = any.unpack().expect("valid bytes").expect("the type above");
            let body = resource.body.expect("a body");
            assert_eq!(
                body.type_url,
                "type.googleapis.com/istio.networking.v1alpha3.ServiceEntry"
            );
            resource.metadata.expect("metadata")
        };
        let (a, b) = (decoded(0), decoded(1));
        assert_eq!((a.name.as_str(), a.version.as_str()), ("shop/a", "7"));
        assert_eq!(a.labels["team"], "x");
        assert_eq!(b.version, "", "objects of files have no version");
    }

    #[test]
    fn types_have_every_served_version() {
        let known = |url: &str| ObjectType::of_url(url);
        let services = Some(ObjectType::Objects(Kind::ServiceEntry));
        for version in ["v1", "v1beta1", "v1alpha3"] {
            assert_eq!(known(&format!("networking.istio.io/{version}/ServiceEntry")), services);
        }
        assert_eq!(known(MESH_CONFIG), Some(ObjectType::MeshConfig));
        for unknown in [
            "networking.istio.io/v2/ServiceEntry",
            "networking.istio.io/v1/Pod",
            "/v1/Pod",
            "a/b",
            "a/b/c/d",
        ] {
            assert_eq!(known(unknown), None, "{unknown}");
        }
        assert_eq!(
            known("gateway.networking.k8s.io/v1/Gateway"),
            None,
            "only Istio's own kinds are served"
        );
    }
}
