//! What clusters and endpoints depend on of a client.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    BuildContext,
    constant::{ALPN_FILTER, METADATA_EXCHANGE},
    patch::PatchRef,
    proxy::{MetadataKey, NodeMetadata, ProxyType},
    selected::Selected,
};
use crate::base::{ClusterId, Hashed, Labels, Namespace, NetworkId, Shared, cidr::IpMode};

/// What sockets, filters and protocols of every outbound cluster depend on; part of cluster keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SocketProxyView {
    /// A gateway: headless services use EDS, undeclared protocols are not followed.
    pub is_router: bool,
    /// It runs the TCP metadata exchange, and so offers the ALPN of it.
    pub metadata_exchange: bool,
    /// It runs the HTTP filter that sets the ALPN of each request; without it the TLS context has to.
    pub alpn_filter: bool,
    /// Certificates in files that take the place of the workload's own.
    pub certificates: Option<ClientCertificates>,
    /// It has the socket of an SDS provider of its own.
    pub credential_socket: bool,
    /// Somebody else than its agent serves it secrets from files.
    pub file_socket: bool,
    /// HTTP/1.1 header names stay as clients write them.
    pub keeps_header_case: bool,
    /// It reaches endpoints that take tunnels through these.
    pub sends_tunnels: bool,
}

/// `TLS_CLIENT_CERT_CHAIN`, `TLS_CLIENT_KEY` and `TLS_CLIENT_ROOT_CERT` of the node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientCertificates {
    /// Path of the certificate chain.
    pub chain: SmolStr,
    /// Path of the private key.
    pub key: SmolStr,
    /// Path of the certificate authorities.
    pub root: SmolStr,
}

/// What the outbound part of a client depends on, besides the scope.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundProxyView {
    /// Goes into every cluster key.
    pub socket: Hashed<SocketProxyView>,
    /// The address families; matter to DNS clusters and network gateways.
    pub ip_mode: IpMode,
    /// The network; matters when gateways lead into networks.
    pub network: NetworkId,
    /// The networks that it asked to see; empty: all.
    pub network_view: Shared<BTreeSet<NetworkId>>,
    /// The cluster; matters to cluster-local services.
    pub cluster: ClusterId,
    /// The labels that some DestinationRule of the namespace selects clients by.
    pub rule_labels: Labels,
    /// It never sends by HBONE: `DISABLE_HBONE_SEND` of the node.
    pub no_tunnels: bool,
    /// EnvoyFilter patches of clusters that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

impl OutboundProxyView {
    /// The projection of a proxy.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Hashed<Self> {
        let proxy = selected.proxy;
        Hashed::new(Self {
            socket: Hashed::new(SocketProxyView::of(ctx, selected)),
            ip_mode: proxy.ip_mode,
            network: selected.network.clone(),
            network_view: proxy.network_view.clone(),
            cluster: proxy.cluster.clone(),
            no_tunnels: proxy.has(MetadataKey::DisableHboneSend),
            rule_labels: rule_labels(ctx, selected.scope.namespace(), &selected.labels),
            patches: selected.patches.clusters.clone(),
        })
    }
}

impl SocketProxyView {
    fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let proxy = selected.proxy;
        let features = &ctx.mesh.installation.features;
        let chain = proxy.setting(MetadataKey::TlsClientCertChain);
        Self {
            is_router: proxy.proxy_type == ProxyType::Router,
            metadata_exchange: features.pilot_enable_metadata_exchange && proxy.extensions.has(METADATA_EXCHANGE),
            alpn_filter: proxy.extensions.has(ALPN_FILTER),
            certificates: (!chain.is_empty()).then(|| ClientCertificates {
                chain,
                key: proxy.setting(MetadataKey::TlsClientKey),
                root: proxy.setting(MetadataKey::TlsClientRootCert),
            }),
            credential_socket: has_credential_socket(proxy),
            file_socket: has_file_socket(proxy),
            keeps_header_case: keeps_header_case(selected),
            sends_tunnels: features.pilot_enable_sending_hbone && !proxy.has(MetadataKey::DisableHboneSend),
        }
    }
}

/// True if the node says that an SDS provider listens beside it.
pub fn has_credential_socket(proxy: &NodeMetadata) -> bool {
    proxy.setting(MetadataKey::Credential) == "true"
}

/// `proxyHeaders.preserveHttp1HeaderCase` of the effective ProxyConfig.
pub fn keeps_header_case(selected: &Selected) -> bool {
    let headers = selected.proxy_config.proxy_headers.as_ref();
    headers
        .and_then(|headers| headers.preserve_http1_header_case)
        .unwrap_or(false)
}

/// True if the node says that somebody else than its agent serves secrets from files.
pub fn has_file_socket(proxy: &NodeMetadata) -> bool {
    proxy.setting(MetadataKey::FileCredential) == "true"
}

/// The client's labels, as far as DestinationRules of the namespace look at them.
fn rule_labels(ctx: &BuildContext, namespace: &Namespace, labels: &Labels) -> Labels {
    let index = &ctx.mesh.rules_by_selector_label;
    let asked = labels
        .iter()
        .filter(|(key, _)| index.contains(ctx.cx, &(namespace.clone(), (*key).clone())));
    asked.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What only some endpoints depend on: those of node-local services, and those with locality load balancing. It has
/// parts of its own, so that everything else is shared by clients wherever they run.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Place {
    /// The node; empty unless some service is node-local.
    pub node: SmolStr,
    /// `region/zone/subzone`; empty unless locality matters to some service.
    pub locality: SmolStr,
    /// The labels that some failover priority compares; `None` if the client has no labels at all.
    pub labels: Option<Labels>,
}

impl Place {
    /// Where a client is, if that matters to anything.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Option<Self> {
        let needs = ctx.mesh.place_needs.get(ctx.cx, &())?;
        let labels = needs.labels.iter().filter_map(|key| selected.labels.get_key_value(key));
        let labels = labels.map(|(key, value)| (key.clone(), value.clone())).collect();
        let where_needed = |needed: bool, value: &SmolStr| if needed { value.clone() } else { SmolStr::default() };
        (needs.node || needs.locality).then(|| Self {
            node: where_needed(needs.node, &selected.profile.node),
            locality: where_needed(needs.locality, &selected.profile.locality),
            labels: (!selected.labels.is_empty()).then_some(labels),
        })
    }
}
