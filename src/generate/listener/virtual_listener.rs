//! Outbound listeners that no service asks for: the one that intercepted connections come to, and the HTTP proxy.

use smol_str::SmolStr;

use super::{
    access_log::LogPlace,
    client::ListenerClass,
    filter_chain::{Chain, max_connections_per_event},
    hcm::{HttpConnection, HttpRoutes},
    outbound_client::OutboundClient,
    outbound_listener::{OutboundKey, OutboundListener, additional_addresses, finish},
    stack::FilterStack,
    tcp::{black_hole, plain_proxy},
};
use crate::{
    base::{Hashed, cidr::IpMode},
    generate::{
        View, constant,
        constant::{loopbacks, wildcards},
        group::Built,
        name,
        proxy::InterceptionMode,
    },
    model::service::Protocol,
    proto::envoy::config::{
        core::v3::TrafficDirection,
        listener::v3::{FilterChain, FilterChainMatch, Listener},
    },
};

/// The name of the listener that intercepted outbound connections come to.
pub const VIRTUAL_OUTBOUND: &str = "virtualOutbound";

/// What the listener for intercepted connections is built from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VirtualOutboundKey {
    /// The sidecar.
    pub client: Hashed<OutboundClient>,
    /// The cluster of traffic to unknown destinations.
    pub catch_all: SmolStr,
}

impl VirtualOutboundKey {
    /// Builds the listener.
    pub fn build(&self, view: &View) -> Built {
        let stack = FilterStack::new(view, &self.client.filters, ListenerClass::SidecarOutbound);
        let features = stack.features();
        let port = stack.mesh.proxy_listen_port as u32;
        let mode = self.client.vips.ip_mode;
        let binds = wildcards(mode);
        let further: &[&str] = match mode {
            _ if features.istio_dual_stack && binds.len() > 1 => &binds[1..],
            IpMode::V6 if features.istio_enable_ipv4_outbound_listener_for_ipv6_clusters => wildcards(IpMode::V4),
            _ => &[],
        };
        let mut to_itself = stack.stats_network_filters();
        to_itself.push(black_hole());
        let mut catch_all = stack.stats_network_filters();
        catch_all.push(stack.tcp_proxy(plain_proxy(&self.catch_all)));
        let listener = Listener {
            name: VIRTUAL_OUTBOUND.to_owned(),
            address: Some(constant::address(binds[0], port)),
            additional_addresses: additional_addresses(further, port),
            transparent: (self.client.interception == InterceptionMode::Tproxy).then_some(true),
            use_original_dst: Some(true),
            traffic_direction: TrafficDirection::Outbound as i32,
            max_connections_to_accept_per_socket_event: max_connections_per_event(features),
            filter_chains: vec![
                // Connections to the port itself would come back for ever.
                FilterChain {
                    name: "virtualOutbound-blackhole".to_owned(),
                    filter_chain_match: Some(FilterChainMatch {
                        destination_port: Some(port),
                        ..Default::default()
                    }),
                    filters: to_itself,
                    ..Default::default()
                },
                FilterChain {
                    name: "virtualOutbound-catchall-tcp".to_owned(),
                    filters: catch_all,
                    ..Default::default()
                },
            ],
            access_log: stack.access_logs(LogPlace::Listener),
            ..Default::default()
        };
        finish(view, stack, listener)
    }
}

/// What the HTTP proxy listener is built from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpProxyKey {
    /// The sidecar.
    pub client: Hashed<OutboundClient>,
    /// Its port.
    pub port: u32,
}

impl HttpProxyKey {
    /// Builds the listener.
    pub fn build(&self, view: &View) -> Built {
        let stack = FilterStack::new(view, &self.client.filters, ListenerClass::SidecarOutbound);
        let binds = loopbacks(self.client.vips.ip_mode).iter();
        let key = OutboundKey {
            client: self.client.clone(),
            binds: binds.map(|bind| SmolStr::new_static(bind)).collect(),
            bind_to_port: true,
            port: self.port,
            members: Vec::new(),
            catch_all: SmolStr::default(),
        };
        let making = OutboundListener { stack, key: &key };
        let stat_prefix = name::delimited_stat(&format!("outbound_{}", key.name()));
        let routes = HttpRoutes::Rds("http_proxy".to_owned());
        let mut http = HttpConnection::new(stat_prefix, routes, Protocol::HttpProxy, self.port);
        let client = &self.client.filters;
        client.apply_headers(ListenerClass::SidecarOutbound, &mut http.base);
        let mut options = client
            .http10_options(making.stack.features().pilot_http10)
            .unwrap_or_default();
        options.allow_absolute_url = Some(true);
        http.base.http_protocol_options = Some(options);
        let mut filters = making.stack.filters_before_http(self.port, false);
        filters.push(making.stack.http_connection_filter(http));
        let chain = Chain {
            filters,
            ..Default::default()
        };
        let listener = making.listener(vec![chain], FilterChain::default);
        finish(view, making.stack, listener)
    }
}
