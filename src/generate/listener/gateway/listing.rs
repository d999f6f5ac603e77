//! Lists the listeners of a gateway, with the rows that each consists of.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use super::{
    GatewayKey, GatewayPart, MAX_PASSED_THROUGH, ServerChain, TcpBinding, TcpServer, reachable::ReachableServices,
};
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared, SmolStr, cidr, host::HostsByEnd},
    generate::{
        BuildContext, constant::wildcards, listener::termination::Transport, route::destination::Target,
        tunnel::HBONE_PORT,
    },
    model::{
        SidecarScope,
        gateway::{GatewayServer, MergedGateway, PortServers, ServerPort},
        output_limit,
        service::Protocol,
        virtual_service::{self, VirtualServiceSummary},
    },
    proto::istio::networking::v1alpha3::{ServerTlsSettings, server_tls_settings::TlSmode},
};

const FIRST_UNPRIVILEGED_PORT: u32 = 1024;
/// The maximum number of VirtualServices beyond a limit whose routes a server refuses. There may be thousands of both.
const MAX_REFUSALS: usize = 16;
/// The place of the first chains of a namespace.
const FIRST_PLACE: usize = 4;

/// Listeners while chains are added.
#[derive(Default)]
struct Listeners {
    /// In the order in which servers open them.
    all: Vec<GatewayKey>,
    /// Positions by main address, in its canonical spelling, and port. One Gateway may have thousands.
    places: BTreeMap<(SmolStr, u32, Transport), usize>,
}

/// The VirtualServices of a Gateway, in order of precedence. Both these and the servers may be thousands.
struct RoutesOfGateway<'m> {
    rows: Vec<(&'m ObjectKey, &'m Shared<VirtualServiceSummary>)>,
    /// Their positions by host.
    by_host: HostsByEnd<Vec<usize>>,
}

/// State that the servers listed so far share.
#[derive(Default)]
struct Listed<'m> {
    /// The VirtualServices of each Gateway with TCP servers.
    routes: BTreeMap<SmolStr, RoutesOfGateway<'m>>,
    counts: ChainCounts,
    /// Chains of servers with `AUTO_PASSTHROUGH`.
    auto_passthrough: ChainCounts,
    /// The number of such servers of each namespace, known once a namespace has [`MAX_PASSED_THROUGH`] of these chains.
    /// Each further server has an equal part of as many: all namespaces declare services and subsets, which could
    /// otherwise use up the chains of the servers that follow.
    servers: Option<BTreeMap<SmolStr, usize>>,
    /// The services that these servers reach.
    reachable: ReachableServices,
}

/// The number of filter chains of each namespace so far, in all listeners.
#[derive(Default)]
struct ChainCounts(BTreeMap<SmolStr, usize>);

impl ChainCounts {
    /// Counts chains of a namespace, and returns the place of the last one.
    fn place(&mut self, namespace: &str, chains: usize) -> usize {
        let count = self.0.entry(SmolStr::new(namespace)).or_default();
        *count = count.saturating_add(chains);
        (*count).max(FIRST_PLACE).next_power_of_two()
    }

    /// Counts chains of a namespace, and returns the place of the first one.
    fn first_place(&mut self, namespace: &str, chains: usize) -> usize {
        let first = self.place(namespace, chains.min(1));
        self.place(namespace, chains.saturating_sub(1));
        first
    }

    /// Returns true if further servers with `AUTO_PASSTHROUGH` of a namespace have only their shares.
    fn is_full(&self, namespace: &str) -> bool {
        self.0.get(namespace).is_some_and(|count| *count >= MAX_PASSED_THROUGH)
    }

    /// Counts the chain of plaintext HTTP servers for the namespace with the fewest chains: any tenant may open a port,
    /// whose other servers must not suffer from its limit. Returns the first Gateway of the namespace, and the place.
    fn shared_place<'s>(&mut self, servers: impl Iterator<Item = &'s GatewayServer>) -> (SmolStr, usize) {
        let mut first: BTreeMap<&str, &SmolStr> = BTreeMap::new();
        for server in servers {
            first.entry(namespace_of(&server.gateway)).or_insert(&server.gateway);
        }
        let fewest = first
            .into_iter()
            .min_by_key(|(namespace, _)| self.0.get(*namespace).copied());
        let Some((namespace, gateway)) = fewest else {
            return (SmolStr::default(), FIRST_PLACE);
        };
        (gateway.clone(), self.place(namespace, 1))
    }
}

/// Returns the namespace of a Gateway (`namespace/name`).
fn namespace_of(gateway: &str) -> &str {
    gateway.split_once('/').map_or("", |(namespace, _)| namespace)
}

impl<'m> RoutesOfGateway<'m> {
    fn of(ctx: &BuildContext<'m>, client: &Namespace, gateway: &str) -> Self {
        let rows = virtual_service::for_gateway(ctx.cx, ctx.mesh, client, gateway);
        let mut by_host = HostsByEnd::default();
        for (position, (_, summary)) in rows.iter().enumerate() {
            for name in &summary.hosts {
                by_host.add(name, position);
            }
        }
        Self { rows, by_host }
    }

    /// Returns the VirtualServices with hosts that a server offers to their namespaces.
    fn of_server(
        &self,
        ctx: &BuildContext<'m>,
        server: &GatewayServer,
    ) -> Vec<(&'m ObjectKey, &'m Shared<VirtualServiceSummary>)> {
        let overlapping = |names: Vec<&str>| -> BTreeSet<usize> {
            let positions = names.into_iter().flat_map(|name| self.by_host.overlapping(name));
            positions.collect()
        };
        let mut usable: BTreeMap<&Namespace, BTreeSet<usize>> = BTreeMap::new();
        let (mut found, mut refusals) = (Vec::new(), 0);
        for position in overlapping(server.sni.iter().map(SmolStr::as_str).collect()) {
            let (key, summary) = self.rows[position];
            let is_refusal = output_limit::surplus_of(key).is_some();
            if is_refusal && refusals == MAX_REFUSALS {
                continue;
            }
            let own = summary.meta.namespace();
            let usable = usable
                .entry(own)
                .or_insert_with(|| overlapping(server.hosts_for(ctx.cx, ctx.mesh, own)));
            if usable.contains(&position) {
                refusals += usize::from(is_refusal);
                found.push((key, summary));
            }
        }
        found
    }
}

impl GatewayPart {
    /// Lists the listeners, in the order in which servers open them.
    pub(in super::super) fn list(&self, ctx: &BuildContext) -> Vec<GatewayKey> {
        let merged = self.gateways.merged(ctx);
        let scope = ctx.tcp_scope(&self.scope);
        let mut listeners = Listeners::default();
        let mut listed = Listed::default();
        for (port, servers) in &merged.ports {
            if self.client.unprivileged && port.number < FIRST_UNPRIVILEGED_PORT {
                continue;
            }
            // A gateway between networks opens the port of tunnels by itself.
            if self.client.is_east_west && port.number == HBONE_PORT {
                continue;
            }
            let chains = self.tcp_server_chains(ctx, &scope, &merged, port, servers, &mut listed);
            self.add(ctx, &mut listeners, port, Transport::Tcp, chains);
            if !servers.quic.is_empty() && !self.client.is_east_west {
                let quic = servers.quic.iter().map(|index| &merged.servers[*index]);
                let quic = quic.map(|server| https_chain(server, &mut listed.counts)).collect();
                self.add(ctx, &mut listeners, port, Transport::Quic, quic);
            }
        }
        listeners.all
    }

    /// Adds chains to the listener of an address and port. Ports with different protocols may share it.
    fn add(
        &self,
        ctx: &BuildContext,
        listeners: &mut Listeners,
        port: &ServerPort,
        transport: Transport,
        chains: Vec<ServerChain>,
    ) {
        let binds = self.binds(ctx, port);
        match listeners
            .places
            .entry((cidr::canonical(&binds[0]), port.number, transport))
        {
            Entry::Occupied(place) => listeners.all[*place.get()].chains.extend(chains),
            Entry::Vacant(place) => {
                place.insert(listeners.all.len());
                listeners.all.push(GatewayKey {
                    client: self.client.clone(),
                    binds,
                    port: port.number,
                    transport,
                    chains,
                });
            }
        }
    }

    fn binds(&self, ctx: &BuildContext, port: &ServerPort) -> Vec<SmolStr> {
        if !port.bind.is_empty() {
            return vec![port.bind.clone()];
        }
        let wildcards = wildcards(self.client.ip_mode);
        let count = if ctx.mesh.installation.features.istio_dual_stack {
            wildcards.len()
        } else {
            1
        };
        wildcards[..count]
            .iter()
            .map(|bind| SmolStr::new_static(bind))
            .collect()
    }

    fn tcp_server_chains<'m>(
        &self,
        ctx: &BuildContext<'m>,
        scope: &SidecarScope,
        merged: &MergedGateway,
        port: &ServerPort,
        servers: &PortServers,
        listed: &mut Listed<'m>,
    ) -> Vec<ServerChain> {
        let protocol = Protocol::parse(&port.protocol);
        // Parity (pilot/pkg/networking/core/listener_waypoint.go): a gateway between networks reads no requests.
        let reads_requests = !self.client.is_east_west;
        let route = &servers.route;
        let servers = servers.servers.iter().map(|index| &merged.servers[*index]);
        if protocol.is_http() && reads_requests {
            let (gateway, place) = listed.counts.shared_place(servers);
            return vec![ServerChain::Http {
                gateway,
                route: route.clone(),
                protocol,
                place,
            }];
        }
        // VirtualServices whose chains are counted: the listener has one for each match, however many servers it has.
        let mut counted: BTreeSet<ObjectKey> = BTreeSet::new();
        servers
            .map(|server| {
                if server.terminates_https() && reads_requests {
                    return https_chain(server, &mut listed.counts);
                }
                match server.tls().map(ServerTlsSettings::mode) {
                    Some(TlSmode::AutoPassthrough) => {
                        let namespace = namespace_of(&server.gateway);
                        let share = if listed.auto_passthrough.is_full(namespace) {
                            let servers = listed.servers.get_or_insert_with(|| auto_passthrough_servers(merged));
                            MAX_PASSED_THROUGH / servers.get(namespace).copied().unwrap_or(1)
                        } else {
                            usize::MAX
                        };
                        let reach = listed.reachable.of_server(self, ctx, scope, server, share);
                        ServerChain::AutoPassthrough {
                            gateway: server.gateway.clone(),
                            place: listed.auto_passthrough.first_place(namespace, reach.chains),
                            services: reach.services,
                            is_cut: reach.is_cut,
                        }
                    }
                    Some(TlSmode::Passthrough) => {
                        let server = self.tcp_server(ctx, scope, server, listed);
                        let keys = server.routes.iter().map(|binding| &binding.virtual_service);
                        let places = keys.map(|key| {
                            let matches = ctx.mesh.tls_match_counts.get(ctx.cx, key);
                            let matches = matches.filter(|_| counted.insert(key.clone()));
                            let chains = matches.map_or(0, |matches| **matches);
                            listed.counts.place(&key.namespace, chains)
                        });
                        ServerChain::Passthrough {
                            places: places.collect(),
                            server,
                        }
                    }
                    _ => ServerChain::Tcp {
                        server: self.tcp_server(ctx, scope, server, listed),
                        place: listed.counts.place(namespace_of(&server.gateway), 1),
                    },
                }
            })
            .collect()
    }

    fn tcp_server<'m>(
        &self,
        ctx: &BuildContext<'m>,
        scope: &SidecarScope,
        server: &GatewayServer,
        listed: &mut Listed<'m>,
    ) -> TcpServer {
        let gateway = &server.gateway;
        let namespace = &self.client.filters.namespace;
        let of_gateway = listed
            .routes
            .entry(gateway.clone())
            .or_insert_with(|| RoutesOfGateway::of(ctx, namespace, gateway));
        let bindings = of_gateway.of_server(ctx, server).into_iter();
        TcpServer {
            gateway: gateway.clone(),
            spec: server.spec.clone(),
            sni: server.sni.clone(),
            accepts_untrusted: server.accepts_untrusted,
            routes: bindings
                .map(|(key, reach)| TcpBinding {
                    virtual_service: key.clone(),
                    targets: targets(ctx, scope, reach),
                })
                .collect(),
        }
    }
}

fn https_chain(server: &GatewayServer, counts: &mut ChainCounts) -> ServerChain {
    ServerChain::Https {
        gateway: server.gateway.clone(),
        route: server.route.clone(),
        server: server.spec.clone(),
        sni: server.sni.clone(),
        accepts_untrusted: server.accepts_untrusted,
        place: counts.place(namespace_of(&server.gateway), 1),
    }
}

fn targets(ctx: &BuildContext, scope: &SidecarScope, reach: &VirtualServiceSummary) -> Vec<Target> {
    let hosts: BTreeSet<&Hostname> = reach.destinations.iter().map(|destination| &destination.host).collect();
    let target = |host: &Hostname| {
        let service = scope.by_host.get(host).cloned();
        Target {
            host: host.clone(),
            service: service.as_ref().map(|key| ctx.as_destination(scope.scoped(key))),
            ruled: service,
        }
    };
    hosts.into_iter().map(target).collect()
}

/// Returns the number of servers with `AUTO_PASSTHROUGH` of each namespace.
fn auto_passthrough_servers(merged: &MergedGateway) -> BTreeMap<SmolStr, usize> {
    let mut servers: BTreeMap<SmolStr, usize> = BTreeMap::new();
    for server in &merged.servers {
        if server.tls().map(ServerTlsSettings::mode) == Some(TlSmode::AutoPassthrough) {
            *servers.entry(namespace_of(&server.gateway).into()).or_default() += 1;
        }
    }
    servers
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{SERVICES, auto_passthrough, with_part},
        *,
    };
    use crate::model::sidecar_scope;

    /// Each server has the chains of all services, so thousands of servers multiply them. But a tenant with thousands
    /// of subsets must not take all chains from a second server.
    #[test]
    fn r21_servers_beyond_the_limit_of_auto_passthrough_share_chains() {
        for hosts in ["'*'", "b.default.svc.cluster.local, x.example, '*.local'"] {
            let gateway = auto_passthrough(hosts);
            let files = [("config.yaml", gateway.as_str()), ("kube.yaml", SERVICES)];
            with_part(&files, |ctx, part| {
                let merged = part.gateways.merged(ctx);
                let scope = sidecar_scope::scope(ctx.cx, ctx.mesh, &part.scope).expect("a scope");
                let (port, servers) = merged.ports.first().expect("a port");
                for (namespace, before, share, expected, is_less) in [
                    ("one", MAX_PASSED_THROUGH - 1, 5, "ab", false),
                    ("two", MAX_PASSED_THROUGH, 5, "ab", false),
                    ("one", MAX_PASSED_THROUGH, 7, "ab", false),
                    ("one", MAX_PASSED_THROUGH, 6, "a", true),
                    ("one", MAX_PASSED_THROUGH, 5, "", true),
                ] {
                    let mut counts = auto_passthrough_servers(&merged);
                    let counted = counts.insert("one".into(), MAX_PASSED_THROUGH / share);
                    assert_eq!(counted, Some(1));
                    let mut listed = Listed {
                        servers: Some(counts),
                        ..Listed::default()
                    };
                    listed.auto_passthrough.place(namespace, before);
                    let chains = part.tcp_server_chains(ctx, &scope, &merged, port, servers, &mut listed);
                    let [ServerChain::AutoPassthrough { services, is_cut, .. }] = chains.as_slice() else {
                        panic!("{chains:?}");
                    };
                    let hosts = services.iter().map(|service| service.key.hostname.as_str());
                    let names: String = hosts.filter_map(|host| host.split('.').next()).collect();
                    assert_eq!(
                        (names.as_str(), *is_cut),
                        (expected, is_less),
                        "{namespace}: {before}, {share}"
                    );
                }
            });
        }
    }

    #[test]
    fn places_count_all_chains_before() {
        let mut counts = ChainCounts::default();
        assert_eq!(counts.first_place("one", 0), FIRST_PLACE);
        assert_eq!(counts.first_place("one", 5000), FIRST_PLACE);
        assert_eq!(counts.first_place("one", 3), 8192);
        assert_eq!(counts.place("one", 1), 8192);
        assert_eq!(counts.first_place("two", 3), FIRST_PLACE);
    }
}
