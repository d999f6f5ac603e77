//! Object metadata: kind, name, labels, age.

use serde_json::Value;
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    Kind,
    field::{FieldError, FieldErrors, Fields},
};
use crate::base::{ClusterId, Labels, Namespace, ObjectKey, Shared};

/// The creation time of objects without a timestamp: 2024-01-01T00:00:00Z in seconds since 1970.
pub const DEFAULT_CREATION: i64 = 1_704_067_200;

/// Metadata of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Meta {
    /// The kind.
    pub kind: Kind,
    /// Cluster, namespace and name.
    pub key: ObjectKey,
    /// `metadata.labels`.
    pub labels: Shared<Labels>,
    /// `metadata.annotations`.
    pub annotations: Labels,
    /// `metadata.creationTimestamp` in seconds since 1970, or [`DEFAULT_CREATION`]. The older object wins conflicts.
    pub creation: i64,
    /// `metadata.generation`, which counts changes of `spec`; 0 if absent. Statuses name the one that they describe.
    pub generation: i64,
    /// `metadata.resourceVersion`, else `1`. Proxies get that of Wasm plugins, which for objects of clusters does not
    /// change with their status. That of a WorkloadGroup reveals that the group was created again.
    pub resource_version: SmolStr,
}

impl Meta {
    /// Parses `metadata` of a manifest. Missing fields take the defaults of a mesh folder: namespace `default`,
    /// creation [`DEFAULT_CREATION`], resource version `1`.
    pub fn parse(kind: Kind, cluster: &ClusterId, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let meta = Fields::root(object, &errors).object("metadata");
        let name = meta.text("name");
        if name.is_empty() {
            meta.error("name", "is required");
        }
        let namespace = match meta.text("namespace") {
            _ if kind.is_cluster_scoped() => SmolStr::default(),
            namespace if namespace.is_empty() => SmolStr::new_static("default"),
            namespace => namespace,
        };
        let creation = match meta.optional_text("creationTimestamp") {
            None => DEFAULT_CREATION,
            Some(text) => OffsetDateTime::parse(&text, &Rfc3339).map_or_else(
                |_| {
                    meta.error(
                        "creationTimestamp",
                        format!("{text:?} is not a valid RFC 3339 time such as 2024-01-01T00:00:00Z"),
                    );
                    DEFAULT_CREATION
                },
                OffsetDateTime::unix_timestamp,
            ),
        };
        let resource_version = meta.optional_text("resourceVersion").filter(|text| !text.is_empty());
        let parsed = Self {
            kind,
            key: ObjectKey::new(cluster, namespace, name),
            labels: Shared::new(meta.labels("labels")),
            annotations: meta.labels("annotations"),
            creation,
            generation: object["metadata"]["generation"].as_i64().unwrap_or_default(),
            resource_version: resource_version.unwrap_or(SmolStr::new_static("1")),
        };
        errors.finish(parsed)
    }

    /// The namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.key.namespace
    }

    /// The name.
    pub fn name(&self) -> &SmolStr {
        &self.key.name
    }

    /// The cluster.
    pub fn cluster(&self) -> &ClusterId {
        &self.key.cluster
    }

    /// Returns the value of `filter_metadata.istio.config`:
    /// `/apis/<group>/<version>/namespaces/<ns>/<kebab-kind>/<name>`.
    pub fn config_path(&self) -> String {
        let (namespace, kind, name) = (&self.key.namespace, self.kind.kebab(), &self.key.name);
        [
            "/apis/",
            self.kind.group(),
            "/",
            self.kind.version(),
            "/namespaces/",
            namespace,
            "/",
            kind,
            "/",
            name,
        ]
        .concat()
    }

    /// Returns the sort key that resolves conflicts: oldest first, then name, then namespace.
    ///
    /// Parity (pilot/pkg/model/config.go): the same order as `sortConfigByCreationTime`.
    pub fn age_order(&self) -> (i64, &SmolStr, &Namespace) {
        (self.creation, &self.key.name, &self.key.namespace)
    }
}

/// Returns metadata with no other annotations than these. Objects of clusters have many that nothing reads: those of an
/// injected pod take two kilobytes, and controllers change some of them all the time.
pub(super) fn with_annotations(meta: Shared<Meta>, names: &[&'static str]) -> Shared<Meta> {
    if meta.annotations.iter().all(|(name, _)| names.contains(&name.as_str())) {
        return meta;
    }
    let kept = |name: &&'static str| Some((SmolStr::new_static(name), meta.annotations.get(*name)?.clone()));
    let annotations = names.iter().filter_map(kept).collect();
    Shared::new(Meta {
        annotations,
        ..(*meta).clone()
    })
}

/// An object as metadata and specification.
#[derive(Clone, Debug, PartialEq)]
pub struct Config<T> {
    /// The metadata.
    pub meta: Shared<Meta>,
    /// The specification.
    pub spec: T,
    /// The part of `status` that the model reads ([`Kind::status_of`]).
    pub status: Option<Shared<Value>>,
}

/// A row with a key.
pub trait Keyed {
    /// The object's key.
    fn key(&self) -> &ObjectKey;
}

impl<T> Keyed for Config<T> {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
