//! The part that all objects share: kind, name, labels, age.

use serde_json::{Value, json};
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::field::{FieldError, FieldErrors, Fields};
use crate::base::{ClusterId, Labels, Namespace, ObjectKey, Shared};

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident($kind:literal) => $group:literal, [$($version:literal),+], $kebab:literal, $plural:literal;)*) => {
        /// The kinds of input objects. The order is that of dumps.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $variant,)*
        }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The kind as in `kind:` of a manifest. Two groups have a `Gateway`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $kind,)* }
            }

            /// The API group, empty for core.
            pub fn group(self) -> &'static str {
                match self { $(Self::$variant => $group,)* }
            }

            /// The versions in which API servers may serve the kind and in which it is read, the preferred one first.
            pub fn versions(self) -> &'static [&'static str] {
                match self { $(Self::$variant => &[$($version),+],)* }
            }

            /// The kind in kebab case, as it stands in config metadata paths.
            pub fn kebab(self) -> &'static str {
                match self { $(Self::$variant => $kebab,)* }
            }

            /// The name of the resource in paths of the Kubernetes API.
            pub fn plural(self) -> &'static str {
                match self { $(Self::$variant => $plural,)* }
            }
        }
    };
}

kinds! {
    /// The mesh config as a whole (file or ConfigMap key `mesh`).
    MeshConfig("MeshConfig") => "mesh.istio.io", ["v1alpha1"], "mesh-config", "meshconfigs";
    /// The networks as a whole (file or ConfigMap key `meshNetworks`).
    MeshNetworks("MeshNetworks") => "mesh.istio.io", ["v1alpha1"], "mesh-networks", "meshnetworks";
    /// core/v1 Namespace.
    Namespace("Namespace") => "", ["v1"], "namespace", "namespaces";
    /// core/v1 Node.
    Node("Node") => "", ["v1"], "node", "nodes";
    /// core/v1 Pod.
    Pod("Pod") => "", ["v1"], "pod", "pods";
    /// core/v1 Service.
    Service("Service") => "", ["v1"], "service", "services";
    /// discovery.k8s.io EndpointSlice.
    EndpointSlice("EndpointSlice") => "discovery.k8s.io", ["v1"], "endpoint-slice", "endpointslices";
    /// core/v1 Secret.
    Secret("Secret") => "", ["v1"], "secret", "secrets";
    /// core/v1 ConfigMap.
    ConfigMap("ConfigMap") => "", ["v1"], "config-map", "configmaps";
    /// networking.istio.io DestinationRule.
    DestinationRule("DestinationRule") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "destination-rule", "destinationrules";
    /// networking.istio.io EnvoyFilter.
    EnvoyFilter("EnvoyFilter") => "networking.istio.io", ["v1alpha3"], "envoy-filter", "envoyfilters";
    /// networking.istio.io Gateway.
    Gateway("Gateway") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "gateway", "gateways";
    /// networking.istio.io ProxyConfig.
    ProxyConfig("ProxyConfig") => "networking.istio.io", ["v1beta1"], "proxy-config", "proxyconfigs";
    /// networking.istio.io ServiceEntry.
    ServiceEntry("ServiceEntry") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "service-entry", "serviceentries";
    /// networking.istio.io Sidecar.
    Sidecar("Sidecar") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "sidecar", "sidecars";
    /// networking.istio.io VirtualService.
    VirtualService("VirtualService") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "virtual-service", "virtualservices";
    /// networking.istio.io WorkloadEntry.
    WorkloadEntry("WorkloadEntry") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "workload-entry", "workloadentries";
    /// networking.istio.io WorkloadGroup.
    WorkloadGroup("WorkloadGroup") => "networking.istio.io", ["v1", "v1beta1", "v1alpha3"], "workload-group", "workloadgroups";
    /// security.istio.io AuthorizationPolicy.
    AuthorizationPolicy("AuthorizationPolicy") => "security.istio.io", ["v1", "v1beta1"], "authorization-policy", "authorizationpolicies";
    /// security.istio.io PeerAuthentication.
    PeerAuthentication("PeerAuthentication") => "security.istio.io", ["v1", "v1beta1"], "peer-authentication", "peerauthentications";
    /// security.istio.io RequestAuthentication.
    RequestAuthentication("RequestAuthentication") => "security.istio.io", ["v1", "v1beta1"], "request-authentication", "requestauthentications";
    /// telemetry.istio.io Telemetry.
    Telemetry("Telemetry") => "telemetry.istio.io", ["v1", "v1alpha1"], "telemetry", "telemetries";
    /// extensions.istio.io WasmPlugin.
    WasmPlugin("WasmPlugin") => "extensions.istio.io", ["v1alpha1"], "wasm-plugin", "wasmplugins";
    /// extensions.istio.io TrafficExtension.
    TrafficExtension("TrafficExtension") => "extensions.istio.io", ["v1alpha1"], "traffic-extension", "trafficextensions";
    /// gateway.networking.k8s.io GatewayClass.
    GatewayClass("GatewayClass") => "gateway.networking.k8s.io", ["v1", "v1beta1"], "gateway-class", "gatewayclasses";
    /// gateway.networking.k8s.io Gateway.
    KubeGateway("Gateway") => "gateway.networking.k8s.io", ["v1", "v1beta1"], "kubernetes-gateway", "gateways";
    /// gateway.networking.k8s.io HTTPRoute.
    HttpRoute("HTTPRoute") => "gateway.networking.k8s.io", ["v1", "v1beta1"], "http-route", "httproutes";
    /// gateway.networking.k8s.io GRPCRoute.
    GrpcRoute("GRPCRoute") => "gateway.networking.k8s.io", ["v1"], "grpc-route", "grpcroutes";
    /// gateway.networking.k8s.io TLSRoute.
    TlsRoute("TLSRoute") => "gateway.networking.k8s.io", ["v1", "v1alpha3", "v1alpha2"], "tls-route", "tlsroutes";
    /// gateway.networking.k8s.io TCPRoute.
    TcpRoute("TCPRoute") => "gateway.networking.k8s.io", ["v1alpha2"], "tcp-route", "tcproutes";
    /// gateway.networking.k8s.io UDPRoute.
    UdpRoute("UDPRoute") => "gateway.networking.k8s.io", ["v1alpha2"], "udp-route", "udproutes";
    /// gateway.networking.k8s.io BackendTLSPolicy.
    BackendTlsPolicy("BackendTLSPolicy") => "gateway.networking.k8s.io", ["v1", "v1alpha3"], "backend-tls-policy", "backendtlspolicies";
    /// gateway.networking.k8s.io ListenerSet.
    ListenerSet("ListenerSet") => "gateway.networking.k8s.io", ["v1"], "listener-set", "listenersets";
    /// gateway.networking.k8s.io ReferenceGrant.
    ReferenceGrant("ReferenceGrant") => "gateway.networking.k8s.io", ["v1beta1", "v1"], "reference-grant", "referencegrants";
    /// gateway.networking.x-k8s.io XBackendTrafficPolicy.
    BackendTrafficPolicy("XBackendTrafficPolicy") => "gateway.networking.x-k8s.io", ["v1alpha1"], "backend-traffic-policy", "xbackendtrafficpolicies";
    /// networking.k8s.io Ingress.
    Ingress("Ingress") => "networking.k8s.io", ["v1"], "ingress", "ingresses";
    /// networking.k8s.io IngressClass.
    IngressClass("IngressClass") => "networking.k8s.io", ["v1"], "ingress-class", "ingressclasses";
    /// multicluster.x-k8s.io ServiceExport.
    ServiceExport("ServiceExport") => "multicluster.x-k8s.io", ["v1alpha1", "v1beta1"], "service-export", "serviceexports";
    /// multicluster.x-k8s.io ServiceImport.
    ServiceImport("ServiceImport") => "multicluster.x-k8s.io", ["v1alpha1", "v1beta1"], "service-import", "serviceimports";
    /// The answer of DNS for the host name of a network gateway: an input that istiod asks for itself.
    ResolvedHost("ResolvedHost") => "mesh.istio.io", ["v1alpha1"], "resolved-host", "resolvedhosts";
    /// The answer of an API server for who may read Secrets: as above.
    AccessReview("AccessReview") => "mesh.istio.io", ["v1alpha1"], "access-review", "accessreviews";
    /// The keys of an issuer of tokens, fetched from its server: an input that istiod asks for itself.
    FetchedKeys("FetchedKeys") => "mesh.istio.io", ["v1alpha1"], "fetched-keys", "fetchedkeys";
}

impl Kind {
    /// The version that istiod stores the kind in, used in config metadata and dumps.
    pub fn version(self) -> &'static str {
        self.versions()[0]
    }

    /// What the model reads of an object's `status`, as written: addresses given to ServiceEntries and Gateways, health
    /// of WorkloadEntries. `None` for other kinds.
    pub(super) fn status_of(self, object: &Value) -> Option<Shared<Value>> {
        let status = &object["status"];
        let read = match self {
            Self::ServiceEntry | Self::WorkloadEntry => status.clone(),
            // Conditions change with every route that is attached.
            Self::KubeGateway if !status["addresses"].is_null() => json!({ "addresses": status["addresses"] }),
            _ => Value::Null,
        };
        (!read.is_null()).then(|| Shared::new(read))
    }

    /// True for kinds that are written as objects with `kind:`; false for the files of the mesh and for what istiod
    /// finds out itself.
    pub fn is_object(self) -> bool {
        !matches!(
            self,
            Self::MeshConfig | Self::MeshNetworks | Self::ResolvedHost | Self::AccessReview | Self::FetchedKeys
        )
    }

    /// True if objects of the kind belong to no namespace.
    pub fn is_cluster_scoped(self) -> bool {
        matches!(
            self,
            Self::Namespace
                | Self::Node
                | Self::GatewayClass
                | Self::IngressClass
                | Self::ResolvedHost
                | Self::FetchedKeys
        )
    }

    /// True if API servers know the kind only by a CustomResourceDefinition, which may be missing.
    pub fn is_custom(self) -> bool {
        self.is_istio() || self.is_gateway_api() || matches!(self, Self::ServiceExport | Self::ServiceImport)
    }

    /// True for the kinds of Istio's own API groups.
    pub fn is_istio(self) -> bool {
        self.is_object() && self.group().ends_with(".istio.io")
    }

    /// True for the kinds of the Gateway API.
    pub fn is_gateway_api(self) -> bool {
        matches!(
            self.group(),
            "gateway.networking.k8s.io" | "gateway.networking.x-k8s.io"
        )
    }

    /// True if the kind says how traffic is treated, false if it says what there is. Such objects count only in the
    /// config cluster, save that Gateways of the Gateway API tell of network gateways in every cluster.
    pub fn is_config(self) -> bool {
        self.is_istio() || self.is_gateway_api() || matches!(self, Self::Ingress | Self::IngressClass)
    }

    /// True if objects of the kind count in clusters other than the config cluster.
    pub fn counts_in_remote_clusters(self) -> bool {
        self.is_object() && (!self.is_config() || self == Self::KubeGateway)
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
    /// `metadata.resourceVersion`, where it counts: Wasm plugins are told it, and a WorkloadGroup that was made again
    /// shows by it. `1` otherwise.
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
    /// `status` as written, where something reads it ([`Kind::status_of`]); else `None`.
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
