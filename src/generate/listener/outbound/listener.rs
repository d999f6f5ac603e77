//! One outbound listener of a sidecar, built from the service ports that share it.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{listener_name, proxy_view::OutboundListenerProxyView, resolves_on_demand};
use crate::{
    base::{Hashed, ObjectKey, Shared, pool::SharedPool},
    generate::{
        BuildContext,
        constant::{self, wildcards},
        filter::{
            chain_fields::{EncodedListener, NetworkFilters},
            hcm::{HttpConnection, HttpRoutes},
            proxy_view::ListenerClass,
            stack::FilterStack,
            tcp::plain_proxy,
        },
        listener::{
            filter_chain::{
                Chain, RAW_BUFFER, Remainder, TakenMatches, max_connections_per_event, plaintext_http_alpns,
            },
            inspector::{http_inspector, tls_inspector},
        },
        name,
        patch::PatchContext,
        resource::Built,
        wire::Writer,
    },
    model::{
        Service, ServiceKey,
        destination_rule::RuleRef,
        service::{Protocol, ScopedService, ServiceRef},
    },
    proto::{
        envoy::config::{
            core::v3::TrafficDirection,
            listener::v3::{
                AdditionalAddress, FilterChain, FilterChainMatch, Listener, ListenerFilter,
                listener::{ConnectionBalanceConfig, connection_balance_config},
            },
        },
        field::filter_chain,
    },
};

/// Inputs of one outbound listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundListenerKey {
    /// Attributes of the sidecar.
    pub client: Hashed<OutboundListenerProxyView>,
    /// Addresses, the main one first.
    pub binds: Vec<SmolStr>,
    /// True if it binds a socket of its own; otherwise it gets intercepted connections.
    pub bind_to_port: bool,
    /// Port; 0 for a Unix socket.
    pub port: u32,
    /// Service ports that add chains, in order.
    pub services: Vec<ListenerService>,
    /// Cluster of connections that match no chain.
    pub catch_all: SmolStr,
}

/// A listening port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListenPort {
    /// Number.
    pub number: u32,
    /// Name, used in statistics.
    pub name: SmolStr,
    /// Protocol.
    pub protocol: Protocol,
}

/// One service port of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListenerService {
    /// Service; `None` for HTTP, where the listener does not depend on it.
    pub service: Option<ServiceRef>,
    /// Port of the service or of the egress listener.
    pub port: ListenPort,
    /// Kind of its chains.
    pub kind: ChainKind,
    /// True if its HTTP chain matches only detected HTTP.
    pub sniffs: bool,
    /// Ranges that represent the service's address.
    pub ranges: Vec<SmolStr>,
    /// DestinationRule of the service, unless the port is HTTP.
    pub rule: Option<RuleRef>,
    /// The aliases of the service that are visible, unless all are.
    pub aliases: Option<Shared<[ServiceKey]>>,
    /// VirtualServices with TCP or TLS routes for the service on this port, in order.
    pub virtual_services: Vec<Hashed<StreamRoutes>>,
    /// True if these routes exceed a limit, so that connections are closed.
    pub is_surplus: bool,
}

/// Inputs of the matches of a service port's chains, if VirtualServices have routes for it: the routes, and the
/// protocol.
type RoutedMatches<'m> = (&'m [Hashed<StreamRoutes>], Protocol);

impl ListenerService {
    /// Returns the inputs of the matches; `None` without routes, and for a service with ranges, whose routes count
    /// against the limit for each service.
    fn routed_matches(&self) -> Option<RoutedMatches<'_>> {
        let routes = &*self.virtual_services;
        (self.ranges.is_empty() && !routes.is_empty()).then_some((routes, self.port.protocol))
    }
}

/// TCP and TLS routes of a VirtualService. All services that have them share the value: there may be tens of thousands
/// of services and of destinations.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StreamRoutes {
    /// VirtualService.
    pub virtual_service: ObjectKey,
    /// Destination services with their DestinationRules, by host.
    pub destinations: Vec<(ScopedService, Option<RuleRef>)>,
}

/// The routes in the keys of all listeners. Equal ones are one allocation, so that keys are compared without reading
/// the destinations for each service.
pub type StreamRoutesPool = SharedPool<StreamRoutes>;

/// The number of times that the chains of service ports with equal matches are built, if some of them may match what
/// the ones before left over. Usually none can, so they are built once: tens of thousands of services may share a
/// listener and thousands of routes.
const MOST_BUILT: usize = 16;

/// Kind of a port's chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChainKind {
    /// A connection manager.
    Http,
    /// TCP proxies.
    Tcp,
    /// Both, distinguished by sniffing.
    Auto,
}

impl ChainKind {
    /// Returns the kind for a protocol; `None` for protocols without listeners.
    pub fn of(protocol: Protocol) -> Option<Self> {
        match protocol {
            Protocol::Udp => None,
            protocol if protocol.is_http() => Some(Self::Http),
            protocol if protocol.is_tcp() => Some(Self::Tcp),
            _ => Some(Self::Auto),
        }
    }
}

/// The builder of an outbound listener.
pub(crate) struct OutboundListenerBuilder<'a> {
    /// Builder of filters.
    pub(crate) stack: FilterStack<'a>,
    /// Inputs.
    pub(crate) key: &'a OutboundListenerKey,
}

impl OutboundListenerKey {
    /// Returns the name.
    pub fn name(&self) -> SmolStr {
        listener_name(&self.binds[0], self.port)
    }

    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let builder = OutboundListenerBuilder {
            stack: FilterStack::new(ctx, &self.client.filters, ListenerClass::SidecarOutbound),
            key: self,
        };
        let mut chains: Vec<Chain> = Vec::new();
        let mut taken = TakenMatches::default();
        let mut built: BTreeMap<RoutedMatches<'_>, usize> = BTreeMap::new();
        for member in &self.services {
            let matches = member.routed_matches();
            let times = matches.and_then(|matches| built.get(&matches));
            let times = times.copied().unwrap_or_default();
            if times == MOST_BUILT {
                if builder.service(member).is_some() {
                    builder.note_conflict(member);
                }
                continue;
            }
            let own = builder.chains(member);
            // Without a TLS route that applies, the names of the service are part of the match.
            let is_tls = member.port.protocol.is_tls();
            let is_routed = !own.is_empty() && own.iter().all(|chain| !is_tls || chain.metadata.is_some());
            let mut is_final = true;
            for mut chain in own {
                let is_simple = chain.ranges.len() < 2 || chain.sni.len() < 2;
                let remainder = taken.take(&mut chain);
                is_final &= match remainder {
                    Remainder::Whole => true,
                    Remainder::Part => false,
                    // Of several names in several ranges, some may be left over.
                    Remainder::Nothing => is_simple,
                };
                if remainder != Remainder::Whole {
                    builder.note_conflict(member);
                }
                if remainder != Remainder::Nothing {
                    chains.push(chain);
                }
            }
            if let Some(matches) = matches.filter(|_| is_routed) {
                built.insert(matches, if is_final { MOST_BUILT } else { times + 1 });
            }
        }
        let listener = builder.listener(chains, |out| builder.write_catch_all(out));
        listener.finish(ctx, builder.stack, PatchContext::SidecarOutbound)
    }
}

impl OutboundListenerBuilder<'_> {
    /// Returns the service of a port; `None` if the listener does not depend on it, or if it is gone.
    fn service(&self, member: &ListenerService) -> Option<&Shared<Service>> {
        self.stack.ctx.member(member.service.as_ref()?)
    }

    /// Notes that chains of a service have the match of an earlier one.
    fn note_conflict(&self, member: &ListenerService) {
        let host = member.service.as_ref().map_or("", |service| &service.key.hostname);
        let detail = format!("{} rejected {host}", self.key.name());
        self.stack
            .note("pilot_conflict_outbound_listener_tcp_over_current_tcp", detail);
    }

    /// Returns the chains of one service port.
    fn chains(&self, member: &ListenerService) -> Vec<Chain> {
        let service = self.service(member);
        let on_demand = service
            .filter(|service| resolves_on_demand(service))
            .map(|service| &**service);
        if member.kind == ChainKind::Http {
            return vec![self.http_chain(member, on_demand)];
        }
        let Some(service) = service else {
            return Vec::new();
        };
        let mut chains = self.tcp_chains(member, service);
        if member.kind == ChainKind::Auto {
            chains.push(self.http_chain(member, on_demand));
        }
        chains
    }

    fn http_chain(&self, member: &ListenerService, on_demand: Option<&Service>) -> Chain {
        let key = self.key;
        let features = self.stack.features();
        let at_wildcard = key.binds[0] == wildcards(key.client.vips.ip_mode)[0];
        let rds = match (&member.service, member.kind) {
            _ if key.port == 0 => key.binds[0].as_str().to_owned(),
            (Some(service), ChainKind::Auto) if !at_wildcard => {
                [&service.key.hostname, ":", itoa::Buffer::new().format(key.port)].concat()
            }
            _ => key.port.to_string(),
        };
        let stat_prefix = name::delimited_stat(&["outbound_", &key.name()].concat());
        let mut http = HttpConnection::new(stat_prefix, HttpRoutes::Rds(rds), member.port.protocol, key.port);
        let proxy = &key.client.filters;
        proxy.apply_headers(ListenerClass::SidecarOutbound, &mut http.base);
        http.base.http_protocol_options = proxy.http10_options(features.pilot_http10);
        http.use_remote_address = features.pilot_sidecar_use_remote_address;
        http.mesh_only_exchange = proxy.exchanges_in_mesh_only();
        http.dynamic_dns = on_demand.map(|service| service.key.hostname.clone());
        let mut filters = self.stack.filters_before_http(key.port, false);
        self.stack.add_http_connection(&mut filters, &http);
        let sniffs = member.sniffs || member.kind == ChainKind::Auto;
        Chain {
            alpns: if sniffs { plaintext_http_alpns(features) } else { &[] },
            transport: if sniffs { RAW_BUFFER } else { "" },
            filters,
            ..Default::default()
        }
    }

    /// Encodes the chain of connections that match no other chain.
    fn write_catch_all(&self, out: &mut Writer<FilterChain>) {
        out.message(filter_chain::FILTER_CHAIN_MATCH, &FilterChainMatch::default());
        let mut filters = NetworkFilters::new();
        self.stack.add_stats(&mut filters);
        self.stack.add_tcp_proxy(&mut filters, plain_proxy(&self.key.catch_all));
        out.fields(filters.fields());
        out.text(filter_chain::NAME, "PassthroughFilterChain");
    }

    /// Returns the listener with its chains.
    pub(crate) fn listener(
        &self,
        chains: Vec<Chain>,
        write_catch_all: impl FnOnce(&mut Writer<FilterChain>),
    ) -> EncodedListener {
        let key = self.key;
        let features = self.stack.features();
        let tls_inspected = chains.iter().any(Chain::needs_tls_inspector);
        let http_inspected = chains.iter().any(|chain| !chain.alpns.is_empty());
        let mut listener_filters: Vec<ListenerFilter> = Vec::new();
        if tls_inspected {
            listener_filters.push(tls_inspector());
        }
        if http_inspected {
            listener_filters.push(http_inspector());
        }
        let timeout = self.stack.mesh.protocol_detection_timeout.filter(|_| http_inspected);
        let (mut all, rest): (Vec<Chain>, Vec<Chain>) = chains.into_iter().partition(Chain::matches_all);
        let mut listener = EncodedListener::default();
        for chain in rest {
            listener.add_chain(|out| chain.write(out, features));
        }
        // The last one counts if several match everything.
        match all.pop() {
            Some(default) if listener.has_no_chains() => listener.add_chain(|out| default.write(out, features)),
            Some(default) => listener.set_default_chain(|out| default.write(out, features)),
            None => listener.set_default_chain(write_catch_all),
        }
        listener.rest = Listener {
            name: key.name().as_str().to_owned(),
            address: Some(constant::address(&key.binds[0], key.port)),
            additional_addresses: additional_addresses(&key.binds[1..], key.port),
            traffic_direction: TrafficDirection::Outbound as i32,
            continue_on_listener_filters_timeout: true,
            connection_balance_config: key.client.exact_balance.then(exact_balance),
            max_connections_to_accept_per_socket_event: if key.bind_to_port {
                max_connections_per_event(features)
            } else {
                None
            },
            bind_to_port: (!key.bind_to_port).then_some(false),
            listener_filters,
            listener_filters_timeout: Some(timeout.unwrap_or_default()),
            ..Default::default()
        };
        listener
    }
}

/// Returns the additional addresses of a listener.
pub fn additional_addresses<T: AsRef<str>>(binds: &[T], port: u32) -> Vec<AdditionalAddress> {
    binds
        .iter()
        .map(|bind| AdditionalAddress {
            address: Some(constant::address(bind.as_ref(), port)),
            ..Default::default()
        })
        .collect()
}

/// Returns the setting that balances connections exactly over worker threads.
pub(crate) fn exact_balance() -> ConnectionBalanceConfig {
    ConnectionBalanceConfig {
        balance_type: Some(connection_balance_config::BalanceType::ExactBalance(
            connection_balance_config::ExactBalance {},
        )),
    }
}
