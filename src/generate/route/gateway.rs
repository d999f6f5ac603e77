//! Routes of gateways: virtual hosts of the VirtualServices bound to the servers of a route configuration.

mod build;
mod misdirected;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
};

use self::misdirected::MisdirectedHosts;
use super::{
    RouteConfigProxyView,
    destination::Target,
    fragment::{DeclaredRoutes, Fragment, FragmentKey, Server, TrafficOrigin},
};
use crate::{
    base::{
        Hashed, Hostname, ObjectKey, Shared, SmolStr,
        host::{self, HostsByEnd},
    },
    generate::{
        BuildContext, GatewayView,
        patch::{
            PatchContext, PatchRef,
            route::{GatewayRouteName, RoutePatchList, RoutePatches},
        },
        selected::Selected,
    },
    model::{
        ScopeKey, ServiceKey, SidecarScope,
        gateway::{GatewayServer, MergedGateway},
        output_limit,
        service::ScopedService,
        virtual_service::{self, VirtualServiceSummary},
    },
    table::{LastPieces, PieceReads},
};

/// Inputs of the selection of a gateway's routes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayPart {
    /// Visible services.
    scope: ScopeKey,
    /// Gateways that the proxy serves.
    gateways: GatewayView,
    /// Attributes of the proxy.
    client: Hashed<RouteConfigProxyView>,
    /// EnvoyFilter patches of routes that apply, in order.
    patches: Shared<[PatchRef]>,
}

impl GatewayPart {
    pub(super) fn of(ctx: &BuildContext, selected: &Selected, client: Hashed<RouteConfigProxyView>) -> Self {
        Self {
            scope: selected.scope.clone(),
            gateways: GatewayView::of(ctx, selected),
            client,
            patches: selected.patches.routes.clone(),
        }
    }

    /// Lists all route configurations by name. This includes names that only patches know: listeners that a patch adds
    /// request them, and they consist of the patch's content.
    pub(super) fn list(
        &self,
        ctx: &BuildContext,
        last: LastPieces<GatewayPieces>,
    ) -> (Vec<GatewayRoutes>, GatewayPieces) {
        let merged = self.gateways.merged(ctx);
        let patches = RoutePatchList::of(ctx, &self.patches, PatchContext::Gateway);
        let ports = if patches.is_empty() {
            BTreeMap::new()
        } else {
            declared_ports(&merged)
        };
        let patches_of = |name: &str| {
            if patches.is_empty() {
                return RoutePatches::default();
            }
            let port = GatewayRouteName::of(name).port;
            patches.concerning(name, || ports.get(&port).cloned().unwrap_or_default())
        };
        let (mut bindings, pieces) = self.bindings(ctx, &merged, last);
        let misdirected = MisdirectedHosts::by_route(&merged);
        let of_route = |(name, servers): (&SmolStr, &Vec<usize>)| GatewayRoutes {
            name: name.clone(),
            client: self.client.clone(),
            servers: servers
                .iter()
                .map(|index| ServerRoutes::new(&merged.servers[*index], std::mem::take(&mut bindings[*index])))
                .collect(),
            misdirected: misdirected.get(name).cloned(),
            patches: patches_of(name),
        };
        let unknown = patches.names().filter(|name| !merged.routes.contains_key(*name));
        let unknown = unknown.map(|name| GatewayRoutes {
            name: name.into(),
            client: self.client.clone(),
            servers: Vec::new(),
            misdirected: None,
            patches: patches_of(name),
        });
        (merged.routes.iter().map(of_route).chain(unknown).collect(), pieces)
    }

    /// Returns the VirtualServices of each server, by the position of the server. Those that the changes do not touch
    /// are taken from the last list.
    fn bindings(
        &self,
        ctx: &BuildContext,
        merged: &MergedGateway,
        last: LastPieces<GatewayPieces>,
    ) -> (Vec<Vec<Hashed<Binding>>>, GatewayPieces) {
        let mut by_gateway: BTreeMap<&SmolStr, Vec<ServerOfRoute>> = BTreeMap::new();
        for (name, servers) in &merged.routes {
            let http3 = merged.http3_routes.contains(name);
            for position in servers.iter().copied() {
                let server = &merged.servers[position];
                by_gateway.entry(&server.gateway).or_default().push(ServerOfRoute {
                    position,
                    server,
                    http3,
                });
            }
        }
        // All pieces depend on the servers, which have been read by now.
        let mut reads = PieceReads::begin(ctx.cx);
        let scope = ctx.tcp_scope(&self.scope);
        let last_pieces = last
            .pieces
            .filter(|pieces| pieces.reads.are_usable(last.changes) && pieces.scope.ptr_eq(&scope));
        let mut rest = last_pieces.map_or(&[][..], |pieces| &pieces.pieces);
        let mut bindings = vec![Vec::new(); merged.servers.len()];
        let mut pieces = Vec::with_capacity(rest.len());
        for (gateway, servers) in by_gateway {
            let servers = ServersOfRoutes::of(servers);
            let client = &self.client.routes.namespace;
            for (key, summary) in virtual_service::for_gateway(ctx.cx, ctx.mesh, client, gateway) {
                let is_same = |piece: &GatewayPiece| piece.gateway == *gateway && piece.summary.ptr_eq(summary);
                let at = rest.iter().take(WINDOW).position(is_same);
                let known = at.and_then(|at| {
                    let piece = &rest[at];
                    rest = &rest[at + 1..];
                    let number = last_pieces.map_or(0, |pieces| pieces.pieces.len()) - rest.len() - 1;
                    let is_valid = reads.reuse(ctx.cx, &last_pieces?.reads, number, last.changes);
                    is_valid.then(|| piece.bindings.clone())
                });
                let found = known.unwrap_or_else(|| {
                    reads.evaluate(ctx.cx, |cx| {
                        let ctx = BuildContext { cx, ..*ctx };
                        let declared = GatewayVirtualService::of(self, &ctx, &scope, key, summary);
                        declared.bindings(self, &ctx, &servers).into()
                    })
                });
                for (server, binding) in found.iter() {
                    bindings[*server].push(binding.clone());
                }
                pieces.push(GatewayPiece {
                    gateway: gateway.clone(),
                    summary: summary.clone(),
                    bindings: found,
                });
            }
        }
        reads.finish();
        pieces.shrink_to_fit();
        (bindings, GatewayPieces { reads, scope, pieces })
    }
}

/// The number of removed VirtualServices after which the place in the last list is found again.
const WINDOW: usize = 64;

/// The VirtualServices of a list, from which the next one takes those that have not changed.
pub struct GatewayPieces {
    reads: PieceReads,
    scope: Shared<SidecarScope>,
    pieces: Vec<GatewayPiece>,
}

/// A VirtualService of a Gateway in a list.
struct GatewayPiece {
    /// `namespace/name` of the Gateway.
    gateway: SmolStr,
    summary: Shared<VirtualServiceSummary>,
    /// The servers that have it, by position.
    bindings: Shared<[(usize, Hashed<Binding>)]>,
}

/// A server of a Gateway in one of its route configurations.
struct ServerOfRoute<'a> {
    /// Position among the merged servers.
    position: usize,
    server: &'a GatewayServer,
    /// True if responses advertise HTTP/3.
    http3: bool,
}

/// The servers of a Gateway with routes. Both these and the VirtualServices may be thousands.
struct ServersOfRoutes<'a> {
    servers: Vec<ServerOfRoute<'a>>,
    /// Their positions, by the hosts that they offer to any namespace.
    by_host: HostsByEnd<Vec<usize>>,
}

impl<'a> ServersOfRoutes<'a> {
    fn of(servers: Vec<ServerOfRoute<'a>>) -> Self {
        let mut by_host = HostsByEnd::default();
        for (place, one) in servers.iter().enumerate() {
            for name in one.server.sni.iter() {
                by_host.add(name, place);
            }
        }
        Self { servers, by_host }
    }

    /// Returns the servers that offer one of some hosts.
    fn offering<'s>(&'s self, hosts: &[Hostname]) -> impl Iterator<Item = &'s ServerOfRoute<'a>> + use<'s, 'a> {
        let places = hosts.iter().flat_map(|name| self.by_host.overlapping(name));
        let places: BTreeSet<usize> = places.collect();
        places.into_iter().map(move |place| &self.servers[place])
    }
}

/// The maximum number of servers that refuse the routes of a VirtualService beyond a limit. There may be thousands of
/// both.
const MAX_REFUSING: usize = 256;

/// A VirtualService of a Gateway.
struct GatewayVirtualService<'a> {
    key: &'a ObjectKey,
    summary: &'a VirtualServiceSummary,
    /// Destinations, sorted by host.
    targets: Vec<Target>,
    /// Cached result of [`GatewayVirtualService::infers_ports`], because there may be thousands of destinations and
    /// servers.
    infers_ports: OnceCell<bool>,
    /// Routes by the server attributes that they depend on. Most servers share them, but thousands may differ.
    routes: BTreeMap<Server, FragmentKey>,
}

impl<'a> GatewayVirtualService<'a> {
    fn of(
        part: &GatewayPart,
        ctx: &BuildContext,
        scope: &SidecarScope,
        key: &'a ObjectKey,
        summary: &'a VirtualServiceSummary,
    ) -> Self {
        let destinations: BTreeSet<&Hostname> = summary
            .destinations
            .iter()
            .map(|destination| &destination.host)
            .collect();
        let targets = destinations
            .into_iter()
            .map(|host| part.target(ctx, scope, host, summary));
        Self {
            key,
            summary,
            targets: targets.collect(),
            infers_ports: OnceCell::new(),
            routes: BTreeMap::new(),
        }
    }

    /// Returns the servers that it is bound to, by their positions.
    fn bindings(
        mut self,
        part: &GatewayPart,
        ctx: &BuildContext,
        servers: &ServersOfRoutes<'_>,
    ) -> Vec<(usize, Hashed<Binding>)> {
        let mut bindings = Vec::new();
        let summary = self.summary;
        let positions = positions_of(&summary.hosts);
        let most = match output_limit::surplus_of(self.key) {
            Some(_) => MAX_REFUSING,
            None => usize::MAX,
        };
        for ServerOfRoute {
            position,
            server,
            http3,
        } in servers.offering(&summary.hosts)
        {
            let offered = server.hosts_for(ctx.cx, ctx.mesh, summary.meta.namespace());
            let hosts = intersection(&offered, &summary.hosts, &positions);
            if hosts.is_empty() {
                continue;
            }
            if bindings.len() == most {
                break;
            }
            let at = Server {
                gateway: server.gateway.clone(),
                port: server.port(),
                tls: server.tls().is_some(),
                http3: *http3,
            };
            let binding = Binding {
                virtual_service: self.key.clone(),
                routes: self.routes(part, ctx, &at),
                services: self.with_sessions(ctx, &hosts),
                hosts,
            };
            bindings.push((*position, Hashed::new(binding)));
        }
        bindings
    }

    fn routes(&mut self, part: &GatewayPart, ctx: &BuildContext, at: &Server) -> FragmentKey {
        let server = at.clone().reduced(self.summary, || self.infers_ports(ctx));
        if let Some(known) = self.routes.get(&server) {
            return known.clone();
        }
        let declared = DeclaredRoutes {
            virtual_service: self.key,
            origin: TrafficOrigin::Server(server.clone()),
            targets: self.targets.clone(),
            by_source: self.summary.by_source,
        };
        let routes = Fragment::declared(ctx, declared, &part.client.routes);
        self.routes.insert(server, routes.clone());
        routes
    }

    /// Returns true if a destination without a port has not exactly one, so that the server's port is meant.
    fn infers_ports(&self, ctx: &BuildContext) -> bool {
        *self.infers_ports.get_or_init(|| {
            let mut inferred = self
                .summary
                .destinations
                .iter()
                .filter(|destination| destination.port == 0);
            inferred.any(|destination| !self.has_sole_port(ctx, &destination.host))
        })
    }

    fn has_sole_port(&self, ctx: &BuildContext, host: &Hostname) -> bool {
        let target = self.targets.binary_search_by(|target| target.host.cmp(host)).ok();
        let service = target.and_then(|at| self.targets[at].service.as_ref());
        service.is_some_and(|service| match &service.merged {
            Some(merged) => merged.ports.len() == 1,
            None => {
                let row = ctx.mesh.visibility.get(ctx.cx, &service.key);
                row.is_some_and(|row| row.ports.len() == 1)
            }
        })
    }

    /// Returns the destinations that are also hosts of a server and may use sessions.
    fn with_sessions(&self, ctx: &BuildContext, hosts: &[Hostname]) -> Vec<(Hostname, ServiceKey)> {
        if !ctx.mesh.installation.features.pilot_enable_persistent_session_filter {
            return Vec::new();
        }
        let own = self.targets.iter().filter(|target| hosts.contains(&target.host));
        own.filter_map(|target| Some((target.host.clone(), target.service.clone()?.key)))
            .collect()
    }
}

impl GatewayPart {
    /// Resolves a host. A service of the VirtualService's own namespace is preferred if the gateway may see it.
    fn target(
        &self,
        ctx: &BuildContext,
        scope: &SidecarScope,
        host: &Hostname,
        summary: &VirtualServiceSummary,
    ) -> Target {
        let own = ServiceKey {
            hostname: host.clone(),
            namespace: summary.meta.namespace().clone(),
        };
        let visibility = ctx.mesh.visibility.get(ctx.cx, &own);
        let visible = visibility.filter(|row| row.export_to.visible_to(&self.client.routes.namespace));
        let ruled = scope.by_host.get(host).cloned();
        let service = match visible {
            Some(row) => Some(ScopedService::representative(own, row)),
            None => ruled.as_ref().map(|key| scope.scoped(key)),
        };
        Target {
            host: host.clone(),
            service: service.map(|service| ctx.as_destination(service)),
            ruled,
        }
    }
}

/// One route configuration of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayRoutes {
    /// Resource name.
    name: SmolStr,
    /// Attributes of the proxy.
    client: Hashed<RouteConfigProxyView>,
    /// Servers, in merge order.
    servers: Vec<ServerRoutes>,
    /// Hosts whose requests belong to other connections.
    misdirected: Option<MisdirectedHosts>,
    /// EnvoyFilter patches that apply.
    patches: RoutePatches,
}

impl GatewayRoutes {
    /// Returns the fragments that it consists of.
    pub(super) fn fragments(&self) -> impl Iterator<Item = &FragmentKey> {
        let bindings = self.servers.iter().flat_map(|server| &server.bindings);
        bindings.map(|binding| &binding.routes)
    }
}

/// Contribution of one server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ServerRoutes {
    /// `namespace/name` of the Gateway.
    gateway: SmolStr,
    /// Declared port.
    port: u32,
    /// Hosts of a server with `httpsRedirect`, in lower case; all of them require HTTPS.
    redirected: Option<Vec<Hostname>>,
    /// VirtualServices in order.
    bindings: Vec<Hashed<Binding>>,
}

impl ServerRoutes {
    fn new(server: &GatewayServer, bindings: Vec<Hashed<Binding>>) -> Self {
        Self {
            bindings,
            gateway: server.gateway.clone(),
            port: server.port(),
            redirected: match server.tls() {
                Some(tls) if tls.https_redirect => {
                    Some(server.spec.hosts.iter().map(|host| lower_case(host)).collect())
                }
                _ => None,
            },
        }
    }
}

/// A VirtualService of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Binding {
    virtual_service: ObjectKey,
    /// Intersection of its hosts and the server's, in lower case.
    hosts: Vec<Hostname>,
    /// Routes for requests at the server.
    routes: FragmentKey,
    /// Hosts that are services which may use sessions.
    services: Vec<(Hostname, ServiceKey)>,
}

/// Returns the ports that servers declare, by the port in the name of their route configuration.
fn declared_ports(merged: &MergedGateway) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut ports: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for (name, servers) in &merged.routes {
        let declared = servers.iter().map(|index| merged.servers[*index].port());
        ports
            .entry(GatewayRouteName::of(name).port)
            .or_default()
            .extend(declared);
    }
    ports
}

fn lower_case(host: &str) -> Hostname {
    Hostname::from(host.to_ascii_lowercase())
}

/// Returns the host in lower case, in the same allocation if it already is.
fn lower_cased(host: &Hostname) -> Hostname {
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        lower_case(host)
    } else {
        host.clone()
    }
}

/// Returns the intersection of two host lists in lower case: the more specific host of each overlapping pair.
fn intersection(offered: &[&str], wanted: &[Hostname], positions: &HostsByEnd<Vec<usize>>) -> Vec<Hostname> {
    let mut result = Vec::new();
    let mut known = BTreeSet::new();
    for offered in offered {
        for position in positions.overlapping(offered) {
            let wanted = &wanted[position];
            let (common, lower) = if wanted.as_str() == *offered {
                // The VirtualService's spelling, which is one allocation for all servers.
                (wanted.as_str(), lower_cased(wanted))
            } else if host::subset_of(offered, wanted) {
                (*offered, lower_case(offered))
            } else {
                (wanted.as_str(), lower_cased(wanted))
            };
            if known.insert(common) {
                result.push(lower);
            }
        }
    }
    // Keys are kept.
    result.shrink_to_fit();
    result
}

/// Returns the positions of hosts.
fn positions_of(hosts: &[Hostname]) -> HostsByEnd<Vec<usize>> {
    HostsByEnd::of(
        hosts
            .iter()
            .enumerate()
            .map(|(position, name)| (name.as_str(), position)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_intersection_is_the_more_specific_host() {
        let wanted = ["*.com", "bar.net"].map(Hostname::new);
        let positions = positions_of(&wanted);
        let common = intersection(&["foo.com", "*.net"], &wanted, &positions);
        assert_eq!(common, ["foo.com", "bar.net"].map(Hostname::new));
        assert!(intersection(&["foo.org"], &wanted, &positions).is_empty());
    }
}
