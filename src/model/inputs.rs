//! One raw table for each kind of input.

use crate::{
    api::{
        self, Config, Kind, access_review::AccessReview, fetched_keys::FetchedKeys, gateway_api, mcs, meta::Keyed,
        resolved_host::ResolvedHost,
    },
    base::{ClusterId, ObjectKey},
    proto::istio::{
        extensions::v1alpha1 as extensions, mesh::v1alpha1 as mesh, networking::v1alpha3 as networking,
        networking::v1beta1 as networking_v1beta1, security::v1beta1 as security, telemetry::v1alpha1 as telemetry,
    },
    table::{RelationId, Table, TableWriter, Transaction},
};

pub use crate::api::Row;

macro_rules! inputs {
    ($($kind:ident, $field:ident: $row:ty;)*) => {
        /// The read side: all inputs of one revision.
        #[derive(Clone)]
        pub struct InputTables {
            $(#[doc = concat!("Every ", stringify!($kind), " by its key.")] pub $field: Table<ObjectKey, $row>,)*
        }

        /// The write side.
        pub struct Inputs {
            $(pub(super) $field: TableWriter<ObjectKey, $row>,)*
        }

        impl Default for Inputs {
            fn default() -> Self {
                Self { $($field: TableWriter::new(RelationId(Kind::$kind as u32)),)* }
            }
        }

        impl Inputs {
            /// The tables as they stand.
            pub fn tables(&self) -> InputTables {
                InputTables { $($field: self.$field.table().clone(),)* }
            }

            /// Forgets the row changes of the last transaction.
            pub fn begin(&mut self) {
                $(self.$field.begin();)*
            }

            /// Puts a row. True if it changed anything.
            pub fn put(&mut self, tx: &mut Transaction, row: Row) -> bool {
                match row { $(Row::$kind(row) => {
                    let key = Keyed::key(&*row).clone();
                    self.$field.put(tx, key, row)
                })* }
            }

            /// Removes a row. True if there was one.
            pub fn remove(&mut self, tx: &mut Transaction, kind: Kind, key: &ObjectKey) -> bool {
                match kind { $(Kind::$kind => self.$field.remove(tx, key),)* }
            }

            /// The keys of a kind that a cluster has.
            pub fn keys(&self, kind: Kind, cluster: &ClusterId) -> Vec<ObjectKey> {
                let cx = crate::table::Cx::untracked();
                match kind { $(Kind::$kind => self.$field.table().iter(&cx)
                    .map(|(key, _)| key).filter(|key| key.cluster == *cluster).cloned().collect(),)* }
            }
        }
    };
}

inputs! {
    MeshConfig, mesh_config: Config<mesh::MeshConfig>;
    MeshNetworks, mesh_networks: Config<mesh::MeshNetworks>;
    Namespace, namespaces: api::kube::Namespace;
    Node, nodes: api::kube::Node;
    Pod, pods: api::kube::Pod;
    Service, kube_services: api::kube::Service;
    EndpointSlice, endpoint_slices: api::kube::EndpointSlice;
    Secret, secrets: api::kube::Secret;
    ConfigMap, config_maps: api::kube::ConfigMap;
    DestinationRule, raw_destination_rules: Config<networking::DestinationRule>;
    EnvoyFilter, envoy_filters: Config<networking::EnvoyFilter>;
    Gateway, gateways: Config<networking::Gateway>;
    ProxyConfig, proxy_configs: Config<networking_v1beta1::ProxyConfig>;
    ServiceEntry, service_entries: Config<networking::ServiceEntry>;
    Sidecar, sidecars: Config<networking::Sidecar>;
    VirtualService, raw_virtual_services: Config<networking::VirtualService>;
    WorkloadEntry, workload_entries: Config<networking::WorkloadEntry>;
    WorkloadGroup, workload_groups: Config<networking::WorkloadGroup>;
    AuthorizationPolicy, authorization_policies: Config<security::AuthorizationPolicy>;
    PeerAuthentication, peer_authentications: Config<security::PeerAuthentication>;
    RequestAuthentication, request_authentications: Config<security::RequestAuthentication>;
    Telemetry, telemetries: Config<telemetry::Telemetry>;
    WasmPlugin, wasm_plugins: Config<extensions::WasmPlugin>;
    TrafficExtension, traffic_extensions: Config<extensions::TrafficExtension>;
    GatewayClass, gateway_classes: Config<gateway_api::GatewayClass>;
    KubeGateway, kube_gateways: Config<gateway_api::Gateway>;
    HttpRoute, http_routes: Config<gateway_api::HttpRoute>;
    GrpcRoute, grpc_routes: Config<gateway_api::GrpcRoute>;
    TlsRoute, tls_routes: Config<gateway_api::TlsRoute>;
    TcpRoute, tcp_routes: Config<gateway_api::TcpRoute>;
    UdpRoute, udp_routes: Config<gateway_api::UdpRoute>;
    BackendTlsPolicy, backend_tls_policies: Config<gateway_api::BackendTlsPolicy>;
    ListenerSet, listener_sets: Config<gateway_api::ListenerSet>;
    ReferenceGrant, reference_grants: Config<gateway_api::ReferenceGrant>;
    BackendTrafficPolicy, backend_traffic_policies: Config<gateway_api::BackendTrafficPolicy>;
    Ingress, ingresses: Config<api::kube::Ingress>;
    IngressClass, ingress_classes: Config<api::kube::IngressClass>;
    ServiceExport, service_exports: Config<mcs::ServiceExport>;
    ServiceImport, service_imports: Config<mcs::ServiceImport>;
    ResolvedHost, resolved_hosts: ResolvedHost;
    AccessReview, access_reviews: AccessReview;
    FetchedKeys, fetched_keys: FetchedKeys;
}
