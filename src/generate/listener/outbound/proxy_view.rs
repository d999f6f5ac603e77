//! What outbound listeners depend on of a sidecar, beyond its filters.

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

/// The part of a sidecar that its outbound listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundProxyView {
    /// What filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// How it sees addresses of services.
    pub vips: VipView,
    /// Its labels, as far as routes and rules ask about them.
    pub labels: Shared<Labels>,
    /// Its DNS domain, for short names of hosts.
    pub dns_domain: SmolStr,
    /// Its first address, if that is an endpoint of a headless service: it gets no listener for itself.
    pub own_address: Option<SmolStr>,
    /// How traffic comes to it.
    pub interception: InterceptionMode,
    /// It cannot bind ports below 1024.
    pub unprivileged: bool,
    /// Ports that Envoy itself serves: status and Prometheus; 0: none.
    pub own_ports: [u32; 2],
    /// Connections are spread evenly over worker threads.
    pub exact_balance: bool,
    /// The port of the HTTP proxy listener, if the node names one.
    pub http_proxy_port: Option<u32>,
}

impl OutboundProxyView {
    /// What outbound listeners depend on of a selected sidecar.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Hashed<Self> {
        let proxy = selected.proxy;
        Hashed::new(Self {
            filters: filters.clone(),
            vips: VipView::of(proxy, &ctx.mesh.installation.features),
            labels: labels::asked(ctx, selected),
            dns_domain: proxy.dns_domain.clone(),
            own_address: selected.profile.headless_address.clone(),
            interception: proxy.interception_mode,
            unprivileged: proxy.has(MetadataKey::UnprivilegedPod),
            own_ports: own_ports(proxy),
            exact_balance: proxy.has(MetadataKey::OutboundExactBalance),
            http_proxy_port: proxy.setting(MetadataKey::HttpProxyPort).parse().ok(),
        })
    }

    /// What listeners depend on that have no connection manager.
    pub fn without_http(&self) -> Self {
        Self {
            filters: Hashed::new(self.filters.without_http()),
            ..self.clone()
        }
    }

    /// What listeners depend on that have neither a connection manager nor routes for some clients only.
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

    /// True if a listener may stand there: the port is not privileged for a pod without privileges, and the wildcard
    /// address with this port is not one of the proxy's own listeners.
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

/// The ports of Envoy's own listeners as the node states them.
pub fn own_ports(proxy: &NodeMetadata) -> [u32; 2] {
    [MetadataKey::EnvoyStatusPort, MetadataKey::EnvoyPrometheusPort]
        .map(|key| proxy.setting(key).parse().unwrap_or_default())
}

/// True if the port is among them.
pub fn is_own_port(own: [u32; 2], port: u32) -> bool {
    port != 0 && own.contains(&port)
}
