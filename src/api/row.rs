//! `Row`: a parsed object of any kind.

use super::{
    Config, Kind, access_review::AccessReview, fetched_keys::FetchedKeys, gateway_api, kube, mcs, meta::Keyed,
    resolved_host::ResolvedHost,
};
use crate::{
    base::{ObjectKey, Shared},
    proto::istio::{
        extensions::v1alpha1 as extensions, mesh::v1alpha1 as mesh, networking::v1alpha3 as networking,
        networking::v1beta1 as networking_v1beta1, security::v1beta1 as security, telemetry::v1alpha1 as telemetry,
    },
};

macro_rules! rows {
    ($($kind:ident: $row:ty;)*) => {
        /// A row of any kind.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Row {
            $(#[doc = concat!("A ", stringify!($kind), ".")] $kind(Shared<$row>),)*
        }

        impl Row {
            /// The row's kind.
            pub fn kind(&self) -> Kind {
                match self { $(Self::$kind(_) => Kind::$kind,)* }
            }

            /// The row's key.
            pub fn key(&self) -> &ObjectKey {
                match self { $(Self::$kind(row) => Keyed::key(&**row),)* }
            }
        }

        $(impl From<$row> for Row {
            fn from(row: $row) -> Self {
                Self::$kind(Shared::new(row))
            }
        })*
    };
}

rows! {
    MeshConfig: Config<mesh::MeshConfig>;
    MeshNetworks: Config<mesh::MeshNetworks>;
    Namespace: kube::Namespace;
    Node: kube::Node;
    Pod: kube::Pod;
    Service: kube::Service;
    EndpointSlice: kube::EndpointSlice;
    Secret: kube::Secret;
    ConfigMap: kube::ConfigMap;
    DestinationRule: Config<networking::DestinationRule>;
    EnvoyFilter: Config<networking::EnvoyFilter>;
    Gateway: Config<networking::Gateway>;
    ProxyConfig: Config<networking_v1beta1::ProxyConfig>;
    ServiceEntry: Config<networking::ServiceEntry>;
    Sidecar: Config<networking::Sidecar>;
    VirtualService: Config<networking::VirtualService>;
    WorkloadEntry: Config<networking::WorkloadEntry>;
    WorkloadGroup: Config<networking::WorkloadGroup>;
    AuthorizationPolicy: Config<security::AuthorizationPolicy>;
    PeerAuthentication: Config<security::PeerAuthentication>;
    RequestAuthentication: Config<security::RequestAuthentication>;
    Telemetry: Config<telemetry::Telemetry>;
    WasmPlugin: Config<extensions::WasmPlugin>;
    TrafficExtension: Config<extensions::TrafficExtension>;
    GatewayClass: Config<gateway_api::GatewayClass>;
    KubeGateway: Config<gateway_api::Gateway>;
    HttpRoute: Config<gateway_api::HttpRoute>;
    GrpcRoute: Config<gateway_api::GrpcRoute>;
    TlsRoute: Config<gateway_api::TlsRoute>;
    TcpRoute: Config<gateway_api::TcpRoute>;
    UdpRoute: Config<gateway_api::UdpRoute>;
    BackendTlsPolicy: Config<gateway_api::BackendTlsPolicy>;
    ListenerSet: Config<gateway_api::ListenerSet>;
    ReferenceGrant: Config<gateway_api::ReferenceGrant>;
    BackendTrafficPolicy: Config<gateway_api::BackendTrafficPolicy>;
    Ingress: Config<kube::Ingress>;
    IngressClass: Config<kube::IngressClass>;
    ServiceExport: Config<mcs::ServiceExport>;
    ServiceImport: Config<mcs::ServiceImport>;
    ResolvedHost: ResolvedHost;
    AccessReview: AccessReview;
    FetchedKeys: FetchedKeys;
}
