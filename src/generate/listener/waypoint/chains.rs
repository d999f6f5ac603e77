//! Filter chains of one service behind a waypoint. They are fragments of the inner listener, so that a change of one
//! service rebuilds its chains and no others.

use std::collections::BTreeSet;

use prost::Message;
use smol_str::SmolStr;

use super::{
    WaypointProxyView, add_chain, default_destination, http_filters,
    matcher::{self, PortChain},
    tcp,
};
use crate::{
    base::{Hashed, Shared, host},
    generate::{
        BuildContext,
        filter::{
            chain_fields::{EncodedListener, NetworkFilters},
            proxy_view::{FilterProxyView, ListenerClass},
            stack::FilterStack,
        },
        listener::filter_chain::plaintext_http_alpns,
        name::{ClusterMode, VipTraffic},
        resource::Note,
        route::waypoint::{self as route, ServedPort},
        tunnel::HBONE_PORT,
        waypoint::Served,
        wire::Encoded,
    },
    model::{
        Service, ServiceKey,
        ambient::service::AmbientService,
        output_limit,
        policy::TargetService,
        service::{Protocol, Resolution, ServicePort},
        virtual_service::VirtualService,
    },
    proto::{
        envoy::config::listener::v3::Listener, istio::workload::gateway_address::Destination,
        xds::r#type::matcher::v3::IpMatcher,
    },
    table::{Cx, Table},
};

/// Inputs of the chains of a service, besides the rows that they read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceChains {
    client: Hashed<WaypointProxyView>,
    service: ServiceKey,
}

/// Key of the chains of a service, hashed once and cheap to compare.
pub type ServiceChainsKey = Hashed<ServiceChains>;

/// The chains that live listeners consist of; the store keeps them up to date.
pub type Chains = Table<ServiceChainsKey, BuiltChains>;

/// Chains of a service, with what the listener around them depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BuiltChains {
    /// The chains.
    pub(super) chains: Encoded<Listener>,
    /// Ports with their protocols.
    pub(super) ports: Vec<(u32, Protocol)>,
    /// Ports without chains, with their protocols.
    pub(super) unserved: Vec<(u32, Protocol)>,
    /// The matcher by the addresses of the service: fields of an [`IpMatcher`].
    pub(super) matcher: Vec<u8>,
    /// Chains by the authority (`host:port`) that clients request; none without several networks.
    pub(super) by_authority: Vec<(String, PortChain)>,
    /// Notes.
    pub(super) notes: Vec<Note>,
}

/// Returns the chains of a key that a listener lists.
pub(super) fn built<'a>(ctx: &BuildContext<'a>, key: &ServiceChainsKey) -> &'a Shared<BuiltChains> {
    let chains = ctx.memo.get::<Chains>().get(ctx.cx, key);
    chains.expect("because the chains of a listener are built before it")
}

impl ServiceChains {
    /// Returns the key of the chains of a service: an equal one in use, if there is one, to share its allocation.
    pub(super) fn key(
        ctx: &BuildContext,
        client: &Hashed<WaypointProxyView>,
        service: &ServiceKey,
    ) -> ServiceChainsKey {
        let key = Hashed::new(Self {
            client: client.clone(),
            service: service.clone(),
        });
        let known = ctx.memo.get::<Chains>().get_key_value(&Cx::untracked(), &key);
        known.map_or(key, |(known, _)| known.clone())
    }

    /// Builds the chains.
    pub fn build(&self, ctx: &BuildContext) -> BuiltChains {
        let Some(service) = ctx.service(&self.service) else {
            return BuiltChains::default();
        };
        let client = &*self.client;
        let is_east_west = client.waypoint.is_east_west();
        // Policies of a service are enforced at the end of the inner tunnel, of which a gateway between networks sees
        // no identity.
        let filters = if is_east_west {
            client.filters.clone()
        } else {
            let subject = client.subject.clone().with_service(TargetService::of(service));
            FilterProxyView::for_service(&client.filters, ctx, &subject)
        };
        let filters = FilterProxyView::with_inbound_ports(&filters, service.ports.len());
        let served = Served::of(ctx, &client.waypoint);
        let is_multi_network = ctx.mesh.installation.features.ambient_enable_multi_network;
        let of_clusters = || ctx.mesh.ambient_services.get(ctx.cx, &self.service);
        let of_clusters = is_multi_network.then(of_clusters).flatten();
        let declared = served.virtual_services(&service.key);
        let builder = ChainsBuilder {
            stack: FilterStack::new(ctx, &filters, ListenerClass::SidecarInbound),
            client,
            last_routed: route::last_port(ctx, service, &declared),
            declared,
            served,
            service,
            addresses: addresses(client, service, of_clusters.map(|service| &**service)),
        };
        let waypoint = of_clusters
            .filter(|_| is_east_west)
            .and_then(|row| OwnWaypoint::of(row));
        let declared = tcp::DeclaredStreams::of(&builder.declared, &service.key.hostname);
        let mut listener = EncodedListener::default();
        let (mut ports, mut unserved) = (Vec::new(), Vec::new());
        let (mut chains, mut numbers) = (Vec::new(), BTreeSet::new());
        for port in &service.ports {
            // Envoy refuses a listener with two chains of one name. A Service may have a number for SCTP as well as for
            // TCP.
            if port.protocol != Protocol::Udp && !numbers.insert(port.number) {
                continue;
            }
            let Some(chain) = builder.add_port(&mut listener, port, &declared) else {
                unserved.push((port.number, port.protocol));
                continue;
            };
            let chain = match (&waypoint, chain) {
                (Some(waypoint), PortChain::One(own)) => waypoint.before(own),
                (_, chain) => chain,
            };
            chains.push((port.number, chain));
            // Of a tunnel only TLS can be told apart.
            let is_opaque = is_east_west && !port.protocol.is_tls();
            ports.push((port.number, if is_opaque { Protocol::Tcp } else { port.protocol }));
        }
        let addresses = &builder.addresses;
        let mut by_authority = Vec::new();
        if is_multi_network && !addresses.is_empty() {
            let host = &service.key.hostname;
            let chains = chains.iter().cloned();
            by_authority.extend(chains.map(|(port, chain)| (format!("{host}:{port}"), chain)));
        }
        let range_matchers = matcher::service(addresses, chains).into_iter().collect();
        BuiltChains {
            chains: listener.into_chains(),
            ports,
            unserved,
            matcher: IpMatcher { range_matchers }.encode_to_vec(),
            by_authority,
            notes: builder.stack.into_notes(),
        }
    }
}

/// Returns the addresses by which a proxy recognises connections to a service: those of its cluster, and for a service
/// that spans clusters those of other clusters in its network.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go, `globalServiceVIPs`).
fn addresses(client: &WaypointProxyView, service: &Service, of_clusters: Option<&AmbientService>) -> Vec<SmolStr> {
    let mut addresses = client.vip.virtual_addresses(service);
    let global = of_clusters.filter(|service| service.is_global);
    let others = global.iter().flat_map(|service| service.addresses_in(&client.network));
    let others = others.filter(|ip| client.ip_mode.serves(ip));
    addresses.extend(others.map(|ip| SmolStr::from(ip.to_string())));
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

/// The waypoint of a service that a gateway between networks serves.
struct OwnWaypoint {
    /// Chain of tunnels to the waypoint.
    chain: String,
    /// True if requests of gateways go through it.
    from_gateways: bool,
}

impl OwnWaypoint {
    /// Returns the waypoint of a service.
    ///
    /// Note: its chain may be missing, for example while its Service is. Envoy closes these connections, which would
    /// otherwise reach the service without the waypoint's policies.
    fn of(row: &AmbientService) -> Option<Self> {
        // Parity (pilot/pkg/serviceregistry/ambient/sidecar_interop.go): an IP address of no known service counts as no
        // waypoint.
        let host = match row.message.waypoint.as_ref()?.destination.as_ref()? {
            Destination::Hostname(name) => name.hostname.as_str(),
            Destination::Address(_) => row.waypoint.as_ref()?.hostname.as_str(),
        };
        Some(Self {
            chain: ClusterMode::Vip(VipTraffic::Tcp).cluster_name(HBONE_PORT, "", host),
            from_gateways: row.message.ingress_use_waypoint,
        })
    }

    /// Returns the choice between the waypoint and the service's own chain. Tunnels of waypoints do not pass another
    /// one, because policies have been applied.
    fn before(&self, own: String) -> PortChain {
        let from_gateway = if self.from_gateways { &self.chain } else { &own };
        PortChain::BySource {
            from_gateway: from_gateway.clone(),
            from_waypoint: own,
            from_others: self.chain.clone(),
        }
    }
}

/// The builder of the chains of a service.
struct ChainsBuilder<'a> {
    stack: FilterStack<'a>,
    client: &'a WaypointProxyView,
    served: Served<'a>,
    /// VirtualServices of the service, in order of precedence.
    declared: Vec<&'a Shared<VirtualService>>,
    /// The last port on which the HTTP routes of these apply.
    last_routed: u32,
    service: &'a Service,
    /// Addresses of the service.
    addresses: Vec<SmolStr>,
}

impl ChainsBuilder<'_> {
    /// Adds the chains of a port; none for UDP.
    fn add_port(
        &self,
        listener: &mut EncodedListener,
        port: &ServicePort,
        declared: &tcp::DeclaredStreams,
    ) -> Option<PortChain> {
        let (stack, service) = (&self.stack, self.service);
        let is_dynamic = service.resolution == Resolution::DynamicDns;
        if is_dynamic && port.protocol.is_tls() && !stack.features().enable_wildcard_host_service_entries_for_tls {
            return None;
        }
        let mut chains = self.client.waypoint.traffic(port.protocol).iter().map(|traffic| {
            let name = ClusterMode::Vip(*traffic).cluster_name(port.number, "", &service.key.hostname);
            let target = ServedPort {
                served: &self.served,
                labels: &self.client.subject.labels,
                declared: &self.declared,
                service,
                port: port.number,
                cluster: &name,
                is_surplus: port.number > self.last_routed,
            };
            let mut filters = self.destination(port.number);
            let filters = match traffic {
                VipTraffic::Tcp => {
                    filters.append(&tcp::filters(stack, &target, port, declared));
                    filters
                }
                VipTraffic::Http => {
                    let forwarded = stack.client.proxy_headers.x_forwarded_host.as_ref();
                    let forwarded = forwarded.and_then(|forwarded| forwarded.enabled) == Some(true);
                    let routes = route::of_port(&stack.ctx, &target, forwarded);
                    let host = &service.key.hostname;
                    if target.is_surplus {
                        stack.note(output_limit::CODE, format!("{name}: routes of {host}:{}", port.number));
                    }
                    let wildcard = host::is_wildcard(host).then_some(host);
                    http_filters(stack, filters, port.protocol, port.number, routes, wildcard)
                }
            };
            add_chain(listener, &name, &filters);
            name
        });
        let first = chains.next()?;
        Some(match chains.next() {
            Some(http) => PortChain::Sniffed {
                tcp: first,
                http,
                alpns: plaintext_http_alpns(stack.features()),
            },
            None => PortChain::One(first),
        })
    }

    /// Returns the filter that sets the destination of connections to a service that came without one, as they do
    /// from other networks; none for a single network.
    fn destination(&self, port: u32) -> NetworkFilters {
        let mut filters = NetworkFilters::new();
        let may_lack = self.stack.features().ambient_enable_multi_network && !self.client.waypoint.is_east_west();
        if may_lack && !self.addresses.is_empty() {
            filters.push(&default_destination(&self.client.vip.address(self.service), port));
        }
        filters
    }
}
