//! Attributes of a sidecar that outbound listeners depend on, besides those of filters.

use smol_str::SmolStr;

use super::listener::ListenPort;
use crate::{
    base::{Hashed, Labels, Namespace, Shared},
    generate::{
        BuildContext,
        constant::wildcards,
        filter::proxy_view::FilterProxyView,
        labels,
        proxy::{InterceptionMode, MetadataKey, NodeMetadata},
        selected::Selected,
        vip::VipView,
    },
};

/// Attributes of a sidecar that its outbound listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundListenerProxyView {
    /// Attributes that filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Visibility of service addresses.
    pub vips: VipView,
    /// Labels that routes and rules select by.
    pub labels: Shared<Labels>,
    /// DNS domain, for short names of hosts.
    pub dns_domain: SmolStr,
    /// First address, if it is an endpoint of a headless service: the sidecar has no listener for itself.
    pub own_address: Option<SmolStr>,
    /// Interception mode.
    pub interception: InterceptionMode,
    /// True if it cannot bind ports below 1024.
    pub unprivileged: bool,
    /// Ports that Envoy itself serves, status and Prometheus; 0 means none.
    pub own_ports: [u32; 2],
    /// True if connections are balanced exactly over worker threads.
    pub exact_balance: bool,
    /// Port of the HTTP proxy listener, if the node sets one.
    pub http_proxy_port: Option<u32>,
}

impl OutboundListenerProxyView {
    /// Returns the view of a selected sidecar.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Hashed<Self> {
        let proxy = selected.proxy;
        Hashed::new(Self {
            filters: filters.clone(),
            vips: VipView::of(proxy, &ctx.mesh.installation.features),
            labels: labels::relevant(ctx, selected),
            dns_domain: proxy.dns_domain.clone(),
            own_address: selected.class.headless_address.clone(),
            interception: proxy.interception_mode,
            unprivileged: proxy.has(MetadataKey::UnprivilegedPod),
            own_ports: own_ports(proxy),
            exact_balance: proxy.has(MetadataKey::OutboundExactBalance),
            http_proxy_port: proxy.metadata_value(MetadataKey::HttpProxyPort).parse().ok(),
        })
    }

    /// Returns the view for listeners without a connection manager.
    pub fn without_http(&self) -> Self {
        Self {
            filters: Hashed::new(self.filters.without_http()),
            ..self.clone()
        }
    }

    /// Returns the view for listeners without a connection manager and without routes that depend on the proxy.
    pub fn without_routes(&self) -> Self {
        Self {
            filters: Hashed::new(FilterProxyView {
                namespace: Namespace::default(),
                ..(*self.filters).clone()
            }),
            labels: Shared::default(),
            dns_domain: SmolStr::default(),
            own_address: None,
            ..self.clone()
        }
    }

    /// Returns true if a listener may bind there: the port is not privileged for an unprivileged pod, and does not
    /// belong to the proxy's own listeners at the wildcard address.
    pub fn can_bind(&self, ctx: &BuildContext, bind_to_port: bool, binds: &[SmolStr], port: &ListenPort) -> bool {
        let mesh = ctx.mesh_config();
        let number = port.number;
        if bind_to_port && self.unprivileged && (1..1024).contains(&number) {
            return false;
        }
        let at_wildcard = match binds.first() {
            Some(bind) => bind == wildcards(self.vips.ip_mode)[0],
            None => port.protocol.is_http(),
        };
        let own = [mesh.proxy_listen_port as u32, mesh.proxy_inbound_listen_port as u32];
        !(at_wildcard && (own.contains(&number) || is_own_port(self.own_ports, number)))
    }
}

/// Returns the ports of Envoy's own listeners as the node declares them.
pub fn own_ports(proxy: &NodeMetadata) -> [u32; 2] {
    [MetadataKey::EnvoyStatusPort, MetadataKey::EnvoyPrometheusPort]
        .map(|key| proxy.metadata_value(key).parse().unwrap_or_default())
}

/// Returns true if the port is one of them.
pub fn is_own_port(own: [u32; 2], port: u32) -> bool {
    port != 0 && own.contains(&port)
}
