//! Attributes of a proxy that clusters and endpoints depend on.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    BuildContext,
    constant::{ALPN_FILTER, METADATA_EXCHANGE},
    patch::PatchRef,
    proxy::{MetadataKey, NodeMetadata, ProxyType},
    selected::Selected,
};
use crate::{
    base::{ClusterId, Hashed, Labels, Namespace, NetworkId, Shared, cidr::IpMode},
    model::{
        features::Features,
        gateway::converted_annotation,
        gateway_api::listener::BACKEND_CERTIFICATE_ANNOTATION,
        waypoint::{GATEWAY_CONTROLLER, MANAGED_LABEL, MESH_CONTROLLER, ServingRole},
    },
};

/// Attributes that sockets, filters and protocols of every outbound cluster depend on; part of cluster keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SocketProxyView {
    /// True if the proxy is a gateway, where headless services use EDS and undeclared protocols are not followed.
    pub is_router: bool,
    /// True if the proxy is a sidecar, which may not read all credentials that rules name.
    pub is_sidecar: bool,
    /// True if the proxy is a gateway between networks, which forwards tunnels.
    pub is_east_west: bool,
    /// True if it runs the TCP metadata exchange, and so offers its ALPN.
    pub metadata_exchange: bool,
    /// True if it runs the HTTP filter that sets the ALPN of each request; otherwise the TLS context sets it.
    pub alpn_filter: bool,
    /// Certificates in files that replace the workload's own.
    pub certificates: Option<ClientCertificates>,
    /// Resource name of the certificate that its Gateway has for TLS towards backends; empty without one.
    pub backend_certificate: SmolStr,
    /// True if it has the socket of its own SDS provider.
    pub credential_socket: bool,
    /// True if another server than its agent serves secrets from files.
    pub file_socket: bool,
    /// True if HTTP/1.1 header names keep their case.
    pub keeps_header_case: bool,
    /// True if it uses tunnels to endpoints that accept them.
    ///
    /// Parity (pilot/pkg/networking/core/cluster_builder.go): `DISABLE_HBONE_SEND` affects endpoints, and the cluster
    /// of tunnels itself, but not the sockets of other clusters.
    pub sends_tunnels: bool,
    /// Use of baggage in tunnels.
    pub baggage: Baggage,
}

/// Use of baggage in the tunnels of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Baggage {
    /// They carry none.
    Unused,
    /// They carry the metadata of peers.
    Exchanged,
}

impl Baggage {
    /// All values, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Unused, Self::Exchanged];

    /// Returns the use by proxies with the filters of the metadata exchange.
    pub fn enabled(features: &Features) -> Self {
        if features.ambient_enable_baggage {
            Self::Exchanged
        } else {
            Self::Unused
        }
    }

    /// Returns the use by a proxy.
    pub fn of(features: &Features, proxy: &NodeMetadata) -> Self {
        if proxy.extensions.has(METADATA_EXCHANGE) {
            Self::enabled(features)
        } else {
            Self::Unused
        }
    }

    /// Returns true if tunnels carry the metadata of peers.
    pub fn is_exchanged(self) -> bool {
        self == Self::Exchanged
    }
}

/// `TLS_CLIENT_CERT_CHAIN`, `TLS_CLIENT_KEY` and `TLS_CLIENT_ROOT_CERT` of the node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientCertificates {
    /// Path of the certificate chain.
    pub chain: SmolStr,
    /// Path of the private key.
    pub key: SmolStr,
    /// Path of the CA certificates.
    pub root: SmolStr,
}

/// Returns true if a waypoint with these labels reaches other networks, by one tunnel inside another.
///
/// Parity (pilot/pkg/model/context.go): the label decides, whatever `AMBIENT_ENABLE_MULTI_NETWORK` says.
pub fn waypoint_spans_networks(features: &Features, labels: &Labels) -> bool {
    is_waypoint(labels) && features.ambient_enable_multi_network_waypoint
}

/// The way of a proxy to endpoints of other networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetworkCrossing {
    /// Through gateways that pass mutual TLS.
    MutualTls,
    /// Through gateways that end the outer of two tunnels.
    Tunnels,
    /// There is none.
    Never,
}

impl NetworkCrossing {
    /// Returns the way of a proxy with these labels.
    ///
    /// Parity (pilot/pkg/xds/endpoints/ep_filters.go).
    pub fn of(features: &Features, proxy: &NodeMetadata, labels: &Labels) -> Self {
        if !features.ambient_enable_multi_network {
            return Self::MutualTls;
        }
        let may_cross = match proxy.proxy_type {
            ProxyType::Waypoint if is_waypoint(labels) => features.ambient_enable_multi_network_waypoint,
            ProxyType::Router if is_ingress(labels) => features.ambient_enable_multi_network_ingress,
            ProxyType::Waypoint | ProxyType::Router => true,
            ProxyType::Sidecar | ProxyType::Ztunnel | ProxyType::Agentgateway => return Self::MutualTls,
        };
        if may_cross { Self::Tunnels } else { Self::Never }
    }
}

/// Returns true if a gateway with these labels reaches other networks, by one tunnel inside another.
pub fn gateway_spans_networks(features: &Features, proxy: &NodeMetadata, labels: &Labels) -> bool {
    features.ambient_enable_multi_network
        && features.ambient_enable_multi_network_ingress
        && features.pilot_enable_sending_hbone
        && !proxy.has(MetadataKey::DisableHboneSend)
        && is_ingress(labels)
}

fn is_waypoint(labels: &Labels) -> bool {
    labels
        .get(MANAGED_LABEL)
        .is_some_and(|controller| controller == MESH_CONTROLLER)
}

/// Returns true for gateways of the Gateway API, and for those with the label of Istio's ingress gateway.
fn is_ingress(labels: &Labels) -> bool {
    let is_managed = labels
        .get(MANAGED_LABEL)
        .is_some_and(|controller| controller == GATEWAY_CONTROLLER);
    is_managed || labels.get("istio").is_some_and(|value| value == "ingressgateway")
}

/// Attributes that the outbound parts of a proxy depend on, besides the scope.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UpstreamProxyView {
    /// Attributes in every cluster key.
    pub socket: Hashed<SocketProxyView>,
    /// Address families, for DNS clusters and network gateways.
    pub ip_mode: IpMode,
    /// Network, if gateways lead to other networks.
    pub network: NetworkId,
    /// Way to endpoints of other networks.
    pub crossing: NetworkCrossing,
    /// Networks that the proxy requested; empty means all.
    pub network_view: Shared<BTreeSet<NetworkId>>,
    /// Cluster, for cluster-local services.
    pub cluster: ClusterId,
    /// Labels that DestinationRules of the namespace select clients by.
    pub rule_labels: Labels,
    /// True if it never sends HBONE: proxyless clients, and `DISABLE_HBONE_SEND` of the node.
    pub no_tunnels: bool,
    /// EnvoyFilter patches of clusters that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

impl UpstreamProxyView {
    /// Returns the view of a selected proxy.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Hashed<Self> {
        let proxy = selected.proxy;
        Hashed::new(Self {
            socket: Hashed::new(SocketProxyView::of(ctx, selected)),
            ip_mode: proxy.ip_mode,
            network: selected.network.clone(),
            crossing: NetworkCrossing::of(&ctx.mesh.installation.features, proxy, &selected.labels),
            network_view: proxy.network_view.clone(),
            cluster: proxy.cluster.clone(),
            // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): gRPC has no tunnels.
            no_tunnels: proxy.is_proxyless() || proxy.has(MetadataKey::DisableHboneSend),
            rule_labels: rule_labels(ctx, selected.scope.namespace(), &selected.labels),
            patches: selected.patches.clusters.clone(),
        })
    }
}

impl SocketProxyView {
    fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let proxy = selected.proxy;
        let features = &ctx.mesh.installation.features;
        let chain = proxy.metadata_value(MetadataKey::TlsClientCertChain);
        Self {
            is_router: proxy.proxy_type == ProxyType::Router,
            is_sidecar: proxy.proxy_type == ProxyType::Sidecar,
            is_east_west: selected.serves == ServingRole::EastWest,
            metadata_exchange: features.pilot_enable_metadata_exchange && proxy.extensions.has(METADATA_EXCHANGE),
            alpn_filter: proxy.extensions.has(ALPN_FILTER),
            certificates: (!chain.is_empty()).then(|| ClientCertificates {
                chain,
                key: proxy.metadata_value(MetadataKey::TlsClientKey),
                root: proxy.metadata_value(MetadataKey::TlsClientRootCert),
            }),
            backend_certificate: backend_certificate(ctx, selected).unwrap_or_default(),
            credential_socket: has_credential_socket(proxy),
            file_socket: has_file_socket(proxy),
            keeps_header_case: keeps_header_case(selected),
            sends_tunnels: features.pilot_enable_sending_hbone || proxy.proxy_type == ProxyType::Waypoint,
            baggage: Baggage::of(features, proxy),
        }
    }
}

/// Returns the resource name of the certificate that the oldest Gateway with one has for TLS towards backends.
pub fn backend_certificate(ctx: &BuildContext, selected: &Selected) -> Option<SmolStr> {
    selected.gateways.iter().find_map(|key| {
        let gateway = ctx.mesh.gateways.get(ctx.cx, key)?;
        converted_annotation(&gateway.meta, BACKEND_CERTIFICATE_ANNOTATION).cloned()
    })
}

/// Returns true if the node has an SDS provider next to it.
pub fn has_credential_socket(proxy: &NodeMetadata) -> bool {
    proxy.metadata_value(MetadataKey::Credential) == "true"
}

/// Returns `proxyHeaders.preserveHttp1HeaderCase` of the effective ProxyConfig.
pub fn keeps_header_case(selected: &Selected) -> bool {
    let headers = selected.proxy_config.proxy_headers.as_ref();
    headers
        .and_then(|headers| headers.preserve_http1_header_case)
        .unwrap_or(false)
}

/// Returns true if another server than the node's agent serves secrets from files.
pub fn has_file_socket(proxy: &NodeMetadata) -> bool {
    proxy.metadata_value(MetadataKey::FileCredential) == "true"
}

/// Returns the labels of the proxy that DestinationRules of the namespace select by.
fn rule_labels(ctx: &BuildContext, namespace: &Namespace, labels: &Labels) -> Labels {
    let index = &ctx.mesh.rules_by_selector_label;
    let selected = labels
        .iter()
        .filter(|(key, _)| index.contains(ctx.cx, &(namespace.clone(), (*key).clone())));
    selected.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Location of a proxy, for the endpoints that depend on it: those of node-local services and of services with locality
/// load balancing. It has parts of its own, so that proxies in all locations share everything else.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct ProxyLocation {
    /// Node; empty unless some service is node-local.
    pub node: SmolStr,
    /// `region/zone/subzone`; empty unless some service uses locality.
    pub locality: SmolStr,
    /// Labels that failover priorities compare; `None` if the proxy has no labels.
    pub labels: Option<Labels>,
}

impl ProxyLocation {
    /// Returns the location of a proxy, if anything depends on it.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Option<Self> {
        let needs = ctx.mesh.locality_dependencies.get(ctx.cx, &())?;
        // A tenant may make the mesh compare many labels; a proxy has few.
        let labels = selected.labels.iter().filter(|(key, _)| needs.labels.contains(*key));
        let labels = labels.map(|(key, value)| (key.clone(), value.clone())).collect();
        let where_needed = |needed: bool, value: &SmolStr| if needed { value.clone() } else { SmolStr::default() };
        (needs.node || needs.locality).then(|| Self {
            node: where_needed(needs.node, &selected.class.node_name),
            locality: where_needed(needs.locality, &selected.class.locality),
            labels: (!selected.labels.is_empty()).then_some(labels),
        })
    }
}
