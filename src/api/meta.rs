//! The part that all objects share: kind, name, labels, age.

use serde_json::Value;
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::field::{FieldError, FieldErrors, Fields};
use crate::base::{ClusterId, Labels, Namespace, ObjectKey, Shared};

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident => $group:literal, $version:literal, $kebab:literal;)*) => {
        /// The kinds of input objects. The order is that of dumps.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $variant,)*
        }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The kind as in `kind:` of a manifest.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => stringify!($variant),)* }
            }

            /// The API group, empty for core.
            pub fn group(self) -> &'static str {
                match self { $(Self::$variant => $group,)* }
            }

            /// The version that istiod stores the kind in, used in config metadata and dumps.
            pub fn version(self) -> &'static str {
                match self { $(Self::$variant => $version,)* }
            }

            /// The kind in kebab case, as it stands in config metadata paths.
            pub fn kebab(self) -> &'static str {
                match self { $(Self::$variant => $kebab,)* }
            }
        }
    };
}

kinds! {
    /// The mesh config as a whole (file or ConfigMap key `mesh`).
    MeshConfig => "mesh.istio.io", "v1alpha1", "mesh-config";
    /// The networks as a whole (file or ConfigMap key `meshNetworks`).
    MeshNetworks => "mesh.istio.io", "v1alpha1", "mesh-networks";
    /// core/v1 Namespace.
    Namespace => "", "v1", "namespace";
    /// core/v1 Node.
    Node => "", "v1", "node";
    /// core/v1 Pod.
    Pod => "", "v1", "pod";
    /// core/v1 Service.
    Service => "", "v1", "service";
    /// discovery.k8s.io EndpointSlice.
    EndpointSlice => "discovery.k8s.io", "v1", "endpoint-slice";
    /// core/v1 Secret.
    Secret => "", "v1", "secret";
    /// core/v1 ConfigMap.
    ConfigMap => "", "v1", "config-map";
    /// networking.istio.io DestinationRule.
    DestinationRule => "networking.istio.io", "v1", "destination-rule";
    /// networking.istio.io EnvoyFilter.
    EnvoyFilter => "networking.istio.io", "v1alpha3", "envoy-filter";
    /// networking.istio.io Gateway.
    Gateway => "networking.istio.io", "v1", "gateway";
    /// networking.istio.io ProxyConfig.
    ProxyConfig => "networking.istio.io", "v1beta1", "proxy-config";
    /// networking.istio.io ServiceEntry.
    ServiceEntry => "networking.istio.io", "v1", "service-entry";
    /// networking.istio.io Sidecar.
    Sidecar => "networking.istio.io", "v1", "sidecar";
    /// networking.istio.io VirtualService.
    VirtualService => "networking.istio.io", "v1", "virtual-service";
    /// networking.istio.io WorkloadEntry.
    WorkloadEntry => "networking.istio.io", "v1", "workload-entry";
    /// networking.istio.io WorkloadGroup.
    WorkloadGroup => "networking.istio.io", "v1", "workload-group";
    /// security.istio.io AuthorizationPolicy.
    AuthorizationPolicy => "security.istio.io", "v1", "authorization-policy";
    /// security.istio.io PeerAuthentication.
    PeerAuthentication => "security.istio.io", "v1", "peer-authentication";
    /// security.istio.io RequestAuthentication.
    RequestAuthentication => "security.istio.io", "v1", "request-authentication";
    /// telemetry.istio.io Telemetry.
    Telemetry => "telemetry.istio.io", "v1", "telemetry";
    /// extensions.istio.io WasmPlugin.
    WasmPlugin => "extensions.istio.io", "v1alpha1", "wasm-plugin";
    /// extensions.istio.io TrafficExtension.
    TrafficExtension => "extensions.istio.io", "v1alpha1", "traffic-extension";
}

impl Kind {
    /// True for kinds that are written as objects with `kind:`; false for the files of the mesh.
    pub fn is_object(self) -> bool {
        !matches!(self, Self::MeshConfig | Self::MeshNetworks)
    }

    /// True if objects of the kind belong to no namespace.
    pub fn is_cluster_scoped(self) -> bool {
        matches!(self, Self::Namespace | Self::Node)
    }
}

/// The age of objects that do not tell it: 2024-01-01T00:00:00Z in seconds since 1970.
pub const DEFAULT_CREATION: i64 = 1_704_067_200;

/// Metadata of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Meta {
    /// The kind.
    pub kind: Kind,
    /// Cluster, namespace and name.
    pub key: ObjectKey,
    /// `metadata.labels`.
    pub labels: Labels,
    /// `metadata.annotations`.
    pub annotations: Labels,
    /// `metadata.creationTimestamp` in seconds since 1970; decides who is older. Files without it: 2024-01-01T00:00:00Z.
    pub creation: i64,
    /// `metadata.resourceVersion`; shows only in the environment of Wasm plugins.
    pub resource_version: SmolStr,
}

impl Meta {
    /// Parses `metadata` of a whole object (a manifest). What is left out takes the defaults of a mesh folder:
    /// namespace `default`, creation [`DEFAULT_CREATION`], resource version `1`.
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
                        format!("{text:?} is no time, want one like 2024-01-01T00:00:00Z"),
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
            labels: meta.labels("labels"),
            annotations: meta.labels("annotations"),
            creation,
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

    /// What `filter_metadata.istio.config` says: `/apis/<group>/<version>/namespaces/<ns>/<kebab-kind>/<name>`.
    pub fn config_path(&self) -> String {
        format!(
            "/apis/{}/{}/namespaces/{}/{}/{}",
            self.kind.group(),
            self.kind.version(),
            self.key.namespace,
            self.kind.kebab(),
            self.key.name
        )
    }

    /// The order in which conflicts are settled: oldest first, then name, then namespace (observed behaviour).
    pub fn age_order(&self) -> (i64, &SmolStr, &Namespace) {
        (self.creation, &self.key.name, &self.key.namespace)
    }
}

/// An Istio object: metadata and its specification as the API message.
#[derive(Clone, Debug, PartialEq)]
pub struct Config<T> {
    /// The metadata.
    pub meta: Shared<Meta>,
    /// The specification.
    pub spec: T,
    /// `status` as written, where something reads it (ServiceEntry addresses, WorkloadEntry health); else `None`.
    pub status: Option<Shared<Value>>,
}

/// A row that knows its key.
pub trait Keyed {
    /// The object's key.
    fn key(&self) -> &ObjectKey;
}

impl<T> Keyed for Config<T> {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
