//! Outbound listeners that do not depend on services: that of intercepted connections, and the HTTP proxy.

use smol_str::SmolStr;

use super::{
    listener::{OutboundListenerBuilder, OutboundListenerKey, additional_addresses},
    proxy_view::OutboundListenerProxyView,
};
use crate::{
    base::{Hashed, cidr::IpMode},
    generate::{
        BuildContext,
        constant::{self, loopbacks, wildcards},
        filter::{
            chain_fields::{EncodedListener, NetworkFilters},
            hcm::{HttpConnection, HttpRoutes},
            proxy_view::ListenerClass,
            stack::{FilterStack, LogPosition},
            tcp::{add_black_hole, plain_proxy},
        },
        listener::filter_chain::{Chain, max_connections_per_event},
        name,
        patch::PatchContext,
        proxy::InterceptionMode,
        resource::{Built, HTTP_PROXY},
    },
    model::service::Protocol,
    proto::{
        envoy::config::{
            core::v3::TrafficDirection,
            listener::v3::{FilterChainMatch, Listener},
        },
        field::filter_chain,
    },
};

/// Name of the listener of intercepted outbound connections.
pub const VIRTUAL_OUTBOUND: &str = "virtualOutbound";

/// Inputs of the listener of intercepted connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VirtualOutboundKey {
    /// Attributes of the sidecar.
    pub client: Hashed<OutboundListenerProxyView>,
    /// Cluster of traffic to unknown destinations.
    pub catch_all: SmolStr,
}

impl VirtualOutboundKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let stack = FilterStack::new(ctx, &self.client.filters, ListenerClass::SidecarOutbound);
        let features = stack.features();
        let port = stack.mesh.proxy_listen_port as u32;
        let mode = self.client.vips.ip_mode;
        let binds = wildcards(mode);
        let further: &[&str] = match mode {
            _ if features.istio_dual_stack && binds.len() > 1 => &binds[1..],
            IpMode::V6 if features.istio_enable_ipv4_outbound_listener_for_ipv6_clusters => wildcards(IpMode::V4),
            _ => &[],
        };
        let mut to_itself = NetworkFilters::new();
        stack.add_stats(&mut to_itself);
        let mut catch_all = to_itself.clone();
        add_black_hole(&mut to_itself);
        stack.add_tcp_proxy(&mut catch_all, plain_proxy(&self.catch_all));
        let mut listener = EncodedListener::default();
        // Connections to the listener's own port would loop.
        listener.add_chain(|out| {
            let chain_match = FilterChainMatch {
                destination_port: Some(port),
                ..Default::default()
            };
            out.message(filter_chain::FILTER_CHAIN_MATCH, &chain_match);
            out.fields(to_itself.fields());
            out.text(filter_chain::NAME, "virtualOutbound-blackhole");
        });
        listener.add_chain(|out| {
            out.fields(catch_all.fields());
            out.text(filter_chain::NAME, "virtualOutbound-catchall-tcp");
        });
        listener.rest = Listener {
            name: VIRTUAL_OUTBOUND.to_owned(),
            address: Some(constant::address(binds[0], port)),
            additional_addresses: additional_addresses(further, port),
            transparent: (self.client.interception == InterceptionMode::Tproxy).then_some(true),
            use_original_dst: Some(true),
            traffic_direction: TrafficDirection::Outbound as i32,
            max_connections_to_accept_per_socket_event: max_connections_per_event(features),
            access_log: stack.access_logs(LogPosition::Listener),
            ..Default::default()
        };
        listener.finish(ctx, stack, PatchContext::SidecarOutbound)
    }
}

/// Inputs of the HTTP proxy listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpProxyKey {
    /// Attributes of the sidecar.
    pub client: Hashed<OutboundListenerProxyView>,
    /// Port.
    pub port: u32,
}

impl HttpProxyKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let stack = FilterStack::new(ctx, &self.client.filters, ListenerClass::SidecarOutbound);
        let binds = loopbacks(self.client.vips.ip_mode).iter();
        let key = OutboundListenerKey {
            client: self.client.clone(),
            binds: binds.map(|bind| SmolStr::new_static(bind)).collect(),
            bind_to_port: true,
            port: self.port,
            services: Vec::new(),
            catch_all: SmolStr::default(),
        };
        let builder = OutboundListenerBuilder { stack, key: &key };
        let stat_prefix = name::delimited_stat(&format!("outbound_{}", key.name()));
        let routes = HttpRoutes::Rds(HTTP_PROXY.to_owned());
        let mut http = HttpConnection::new(stat_prefix, routes, Protocol::HttpProxy, self.port);
        let client = &self.client.filters;
        client.apply_headers(ListenerClass::SidecarOutbound, &mut http.base);
        let mut options = client
            .http10_options(builder.stack.features().pilot_http10)
            .unwrap_or_default();
        options.allow_absolute_url = Some(true);
        http.base.http_protocol_options = Some(options);
        let mut filters = builder.stack.filters_before_http(self.port, false);
        builder.stack.add_http_connection(&mut filters, &http);
        let chain = Chain {
            filters,
            ..Default::default()
        };
        let listener = builder.listener(vec![chain], |_| {});
        listener.finish(ctx, builder.stack, PatchContext::SidecarOutbound)
    }
}
