//! Routes of gateways: virtual hosts of the VirtualServices that are bound to a server of the route configuration.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared, SmolStr, host},
    generate::{
        BuildContext, EncodedResource, GatewayView,
        group::Built,
        patch::{
            self, PatchContext, PatchRef,
            route::{GatewayRouteName, RoutePatchList, RoutePatches},
        },
        select::Selected,
    },
    model::{
        ScopeKey, ServiceKey, SidecarScope,
        gateway::{GatewayServer, MergedGateway},
        virtual_service::{self, Reach},
    },
    proto::{
        Any,
        envoy::config::route::v3::{RouteConfiguration, VirtualHost, virtual_host::TlsRequirementType},
    },
};

use super::{
    Client,
    assembly::{self, Host},
    configuration,
    destination::Target,
    domains, empty_configuration, filters,
    fragment::{Entrance, Fragment, FragmentKey, Routes, Server},
};

/// What the routes of a gateway are selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayPart {
    /// What it can see.
    scope: ScopeKey,
    /// What it serves.
    gateways: GatewayView,
    /// The rest that is read of it.
    client: Hashed<Client>,
    /// EnvoyFilter patches of routes that apply, in order.
    patches: Shared<[PatchRef]>,
}

impl GatewayPart {
    pub(super) fn of(ctx: &BuildContext, selected: &Selected, client: Hashed<Client>) -> Self {
        Self {
            scope: selected.scope.clone(),
            gateways: GatewayView::of(ctx, selected),
            client,
            patches: selected.patches.routes.clone(),
        }
    }

    /// All route configurations, by name; also those that only patches know: listeners that are added by patches ask
    /// for them, and what they get is what the patches put in.
    pub(super) fn list(&self, ctx: &BuildContext) -> Vec<GatewayRoutes> {
        let scope = ctx.scope(&self.scope);
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
        let mut declared = Declarations {
            part: self,
            ctx,
            scope: &scope,
            by_gateway: FxHashMap::default(),
        };
        let of_route = |(name, servers): (&SmolStr, &Vec<usize>)| {
            let http3 = merged.http3_routes.contains(name);
            let servers = servers
                .iter()
                .map(|index| declared.server(&merged.servers[*index], http3));
            GatewayRoutes {
                name: name.clone(),
                client: self.client.clone(),
                servers: servers.collect(),
                patches: patches_of(name),
            }
        };
        let unknown = patches.names().filter(|name| !merged.routes.contains_key(*name));
        let unknown = unknown.map(|name| GatewayRoutes {
            name: name.into(),
            client: self.client.clone(),
            servers: Vec::new(),
            patches: patches_of(name),
        });
        merged.routes.iter().map(of_route).chain(unknown).collect()
    }
}

/// The VirtualServices of Gateways, looked up once for all servers of one.
struct Declarations<'a> {
    part: &'a GatewayPart,
    ctx: &'a BuildContext<'a>,
    scope: &'a SidecarScope,
    by_gateway: FxHashMap<SmolStr, Vec<Declaration<'a>>>,
}

/// A VirtualService of a Gateway.
struct Declaration<'a> {
    key: &'a ObjectKey,
    reach: &'a Reach,
    /// Where it leads.
    targets: Vec<Target>,
    /// Its routes, by what they depend on of a server: most are the same at all.
    routes: Vec<(Server, FragmentKey)>,
}

impl<'a> Declarations<'a> {
    fn server(&mut self, server: &GatewayServer, http3: bool) -> ServerRoutes {
        let gateway = server.gateway.clone();
        let (part, ctx, scope) = (self.part, self.ctx, self.scope);
        let declared = self.by_gateway.entry(gateway.clone()).or_insert_with(|| {
            let client = &part.client.routes.namespace;
            let declared = virtual_service::for_gateway(ctx.cx, ctx.mesh, client, &gateway);
            let declaration = |(key, reach): (_, &'a Shared<Reach>)| Declaration::of(part, ctx, scope, key, reach);
            declared.into_iter().map(declaration).collect()
        });
        let at = Server {
            gateway: gateway.clone(),
            port: server.port(),
            tls: server.tls().is_some(),
            http3,
        };
        let bindings = declared.iter_mut().filter_map(|declaration| {
            let offered = server.hosts_for(declaration.reach.meta.namespace());
            let hosts = intersection(&offered, &declaration.reach.hosts);
            if hosts.is_empty() {
                return None;
            }
            Some(Binding {
                virtual_service: declaration.key.clone(),
                routes: declaration.routes(part, ctx, &at),
                services: declaration.with_sessions(ctx, &hosts),
                hosts,
            })
        });
        ServerRoutes {
            bindings: bindings.collect(),
            gateway,
            port: server.port(),
            redirected: match server.tls() {
                Some(tls) if tls.https_redirect => {
                    Some(server.server.hosts.iter().map(|host| lower_case(host)).collect())
                }
                _ => None,
            },
        }
    }
}

impl<'a> Declaration<'a> {
    fn of(part: &GatewayPart, ctx: &BuildContext, scope: &SidecarScope, key: &'a ObjectKey, reach: &'a Reach) -> Self {
        let destinations: BTreeSet<&Hostname> = reach.destinations.iter().map(|one| &one.host).collect();
        let targets = destinations
            .into_iter()
            .map(|host| part.target(ctx, scope, host, reach));
        Self {
            key,
            reach,
            targets: targets.collect(),
            routes: Vec::new(),
        }
    }

    fn routes(&mut self, part: &GatewayPart, ctx: &BuildContext, at: &Server) -> FragmentKey {
        let sole_port = |host: &Hostname| {
            let target = self.targets.iter().find(|target| target.host == *host);
            let service = target.and_then(|target| target.service.as_ref());
            let row = service.and_then(|key| ctx.mesh.visibility.get(ctx.cx, key));
            row.is_some_and(|row| row.ports.len() == 1)
        };
        let server = at.clone().reduced(self.reach, sole_port);
        if let Some((_, known)) = self.routes.iter().find(|(known, _)| *known == server) {
            return known.clone();
        }
        let towards = (Entrance::Server(server.clone()), self.targets.clone());
        let client = &part.client.routes;
        let routes = Fragment::declared(ctx, self.key, towards, client, self.reach.by_source);
        self.routes.push((server, routes.clone()));
        routes
    }

    /// The destinations that are hosts of a server as well and may ask for sessions.
    fn with_sessions(&self, ctx: &BuildContext, hosts: &[Hostname]) -> Vec<(Hostname, ServiceKey)> {
        if !ctx.mesh.installation.features.pilot_enable_persistent_session_filter {
            return Vec::new();
        }
        let own = self.targets.iter().filter(|target| hosts.contains(&target.host));
        own.filter_map(|target| Some((target.host.clone(), target.service.clone()?)))
            .collect()
    }
}

impl GatewayPart {
    /// A service of the VirtualService's own namespace is preferred, if the gateway may see it.
    fn target(&self, ctx: &BuildContext, scope: &SidecarScope, host: &Hostname, reach: &Reach) -> Target {
        let own = ServiceKey {
            hostname: host.clone(),
            namespace: reach.meta.namespace().clone(),
        };
        let visibility = ctx.mesh.visibility.get(ctx.cx, &own);
        let is_visible = visibility.is_some_and(|row| row.export_to.visible_to(&self.client.routes.namespace));
        let ruled = scope.by_host.get(host).cloned();
        Target {
            host: host.clone(),
            service: if is_visible { Some(own) } else { ruled.clone() },
            ruled,
        }
    }
}

/// One route configuration of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayRoutes {
    /// The resource name.
    name: SmolStr,
    /// The client.
    client: Hashed<Client>,
    /// The servers, in the order of merging.
    servers: Vec<ServerRoutes>,
    /// EnvoyFilter patches that concern it.
    patches: RoutePatches,
}

/// What one server contributes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ServerRoutes {
    /// `namespace/name` of the Gateway.
    gateway: SmolStr,
    /// The port as declared.
    port: u32,
    /// `httpsRedirect`: the hosts of the server in lower case, all of which must be called by HTTPS.
    redirected: Option<Vec<Hostname>>,
    /// VirtualServices in order.
    bindings: Vec<Binding>,
}

/// A VirtualService of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Binding {
    virtual_service: ObjectKey,
    /// What its hosts and those of the server have in common, in lower case.
    hosts: Vec<Hostname>,
    /// What it has for requests at the server.
    routes: FragmentKey,
    /// Those of the hosts that are services which may ask for sessions.
    services: Vec<(Hostname, ServiceKey)>,
}

/// A virtual host that is being put together.
struct Draft<'a> {
    host: &'a Hostname,
    /// Other hosts with the same routes.
    others: Vec<&'a Hostname>,
    /// The port of the first server that has it: it stands in the name.
    port: u32,
    routes: SequenceId,
    https_only: bool,
    session: Option<Any>,
}

/// Virtual hosts by host.
#[derive(Default)]
struct Drafts<'a> {
    all: Vec<Draft<'a>>,
    by_host: FxHashMap<&'a Hostname, usize>,
    /// The routes of each VirtualService on each Gateway.
    route_lists: Vec<Shared<Routes>>,
    known_lists: FxHashMap<(&'a SmolStr, &'a ObjectKey), usize>,
    sequences: Sequences,
}

/// Names a sequence of lists of routes; 0: the empty one.
type SequenceId = usize;

/// Sequences of lists of routes: hosts of one sequence have one number, however long it is.
#[derive(Default)]
struct Sequences {
    /// What each is without its last list, and that list; the first stands under 1.
    known: Vec<(SequenceId, usize)>,
    longer: FxHashMap<(SequenceId, usize), SequenceId>,
}

impl Sequences {
    /// The sequence with a list behind it.
    fn with(&mut self, sequence: SequenceId, list: usize) -> SequenceId {
        let next = self.known.len() + 1;
        let id = *self.longer.entry((sequence, list)).or_insert(next);
        if id == next {
            self.known.push((sequence, list));
        }
        id
    }

    /// The lists of a sequence in order.
    fn lists(&self, sequence: SequenceId) -> Vec<usize> {
        let mut lists = Vec::new();
        let mut rest = sequence;
        while rest > 0 {
            let (shorter, last) = self.known[rest - 1];
            lists.push(last);
            rest = shorter;
        }
        lists.reverse();
        lists
    }
}

impl GatewayRoutes {
    /// Builds the route configuration.
    pub(super) fn build(&self, ctx: &BuildContext) -> Built {
        if self.servers.is_empty() {
            return self.patched(ctx, empty_configuration(&self.name));
        }
        let hosts = self.hosts(ctx);
        if self.patches.is_empty() {
            return Built::new(assembly::assembled(&self.name, &hosts));
        }
        let hosts = hosts.into_iter().map(Host::message).collect();
        self.patched(ctx, configuration(&self.name, hosts))
    }

    fn patched(&self, ctx: &BuildContext, routes: RouteConfiguration) -> Built {
        let mut notes = Vec::new();
        let routes = patch::route::apply(ctx, &self.patches, PatchContext::Gateway, routes, &mut notes);
        Built::new(EncodedResource::new(self.name.as_str(), &routes)).with_notes(notes)
    }

    /// The fragments that it is made of.
    pub(super) fn fragments(&self) -> impl Iterator<Item = &FragmentKey> {
        let bindings = self.servers.iter().flat_map(|server| &server.bindings);
        bindings.map(|binding| &binding.routes)
    }

    fn hosts(&self, ctx: &BuildContext) -> Vec<Host> {
        let mut drafts = Drafts::default();
        for server in &self.servers {
            drafts.add_server(ctx, server);
        }
        if drafts.all.is_empty() {
            return vec![Host::whole(self.black_hole())];
        }
        let collapse = ctx.mesh.installation.features.pilot_enable_route_collapse_optimization;
        let mut hosts = self.virtual_hosts(drafts, collapse);
        hosts.sort_by(|a, b| a.name.cmp(&b.name));
        hosts
    }

    fn virtual_hosts(&self, drafts: Drafts, collapse: bool) -> Vec<Host> {
        let Drafts {
            mut all,
            route_lists,
            sequences,
            ..
        } = drafts;
        let parts: Vec<(Bytes, Bytes)> = route_lists.iter().map(|routes| routes.parts()).collect();
        let finish = |draft: Draft| {
            let lists = sequences.lists(draft.routes);
            // A route for everything must not hide those of VirtualServices that come later.
            let conditional = lists.iter().map(|list| &parts[*list].0);
            let routes = conditional.chain(lists.iter().map(|list| &parts[*list].1));
            let hosts = std::iter::once(draft.host).chain(draft.others);
            let name = domains::host_port(draft.host, draft.port);
            let domains = hosts.map(|host| host.as_str().to_owned()).collect();
            let include_attempt_count = self.client.include_attempt_count;
            let mut host = if draft.https_only || draft.session.is_some() {
                let require_tls = if draft.https_only {
                    TlsRequirementType::All
                } else {
                    TlsRequirementType::None
                };
                let session = draft.session.into_iter();
                Host::whole(VirtualHost {
                    name,
                    domains,
                    require_tls: require_tls.into(),
                    typed_per_filter_config: session
                        .map(|session| (filters::STATEFUL_SESSION.to_owned(), session))
                        .collect(),
                    include_request_attempt_count: include_attempt_count,
                    ..Default::default()
                })
            } else {
                Host::plain(name, domains, include_attempt_count)
            };
            host.routes.extend(routes.filter(|routes| !routes.is_empty()).cloned());
            host
        };
        all.sort_by(|a, b| host::more_specific(a.host, b.host));
        let drafts = if collapse { collapsed(all) } else { all };
        drafts.into_iter().map(finish).collect()
    }

    /// Without any virtual host all requests get 404.
    fn black_hole(&self) -> VirtualHost {
        let port = self.servers.first().map_or(0, |server| server.port);
        VirtualHost {
            name: domains::host_port("blackhole", port),
            domains: vec!["*".to_owned()],
            ..Default::default()
        }
    }
}

impl<'a> Drafts<'a> {
    fn add_server(&mut self, ctx: &BuildContext, server: &'a ServerRoutes) {
        for binding in &server.bindings {
            let list = (&server.gateway, &binding.virtual_service);
            // A server without routes does not speak for the next, whose port may be another.
            let routes = match self.known_lists.get(&list) {
                Some(known) => *known,
                None => {
                    let routes = ctx.routes(&binding.routes);
                    if routes.is_empty() {
                        continue;
                    }
                    self.route_lists.push(routes.clone());
                    self.known_lists.insert(list, self.route_lists.len() - 1);
                    self.route_lists.len() - 1
                }
            };
            for host in &binding.hosts {
                let position = self.host(host, server.port, || binding.session(ctx, host));
                let draft = &mut self.all[position];
                draft.routes = self.sequences.with(draft.routes, routes);
                draft.https_only |= server.redirected.is_some();
            }
        }
        for host in server.redirected.iter().flatten() {
            let position = self.host(host, server.port, || None);
            self.all[position].https_only = true;
        }
    }

    /// The position of a host's virtual host; the first server that has it names it.
    fn host(&mut self, host: &'a Hostname, port: u32, session: impl FnOnce() -> Option<Any>) -> usize {
        let position = *self.by_host.entry(host).or_insert(self.all.len());
        if position == self.all.len() {
            self.all.push(Draft {
                host,
                others: Vec::new(),
                port,
                routes: SequenceId::default(),
                https_only: false,
                session: session(),
            });
        }
        position
    }
}

impl Binding {
    /// What a host of it asks for as a service.
    fn session(&self, ctx: &BuildContext, host: &Hostname) -> Option<Any> {
        let (_, service) = self.services.iter().find(|(own, _)| own == host)?;
        filters::stateful_session(ctx.service(service)?, &ctx.mesh.installation.features)
    }
}

/// Joins hosts with the same routes into one virtual host, named after the first of them.
fn collapsed(drafts: Vec<Draft>) -> Vec<Draft> {
    let mut result: Vec<Draft> = Vec::new();
    let mut by_routes: FxHashMap<SequenceId, usize> = FxHashMap::default();
    for draft in drafts {
        let same = by_routes.get(&draft.routes).copied();
        match same.filter(|position| result[*position].https_only == draft.https_only) {
            Some(position) => result[position].others.push(draft.host),
            None => {
                by_routes.insert(draft.routes, result.len());
                result.push(draft);
            }
        }
    }
    result
}

/// The ports that servers declare, by the port in the name of their route configuration.
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

/// The same, in its allocation if it is in lower case already.
fn lower_cased(host: &Hostname) -> Hostname {
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        lower_case(host)
    } else {
        host.clone()
    }
}

/// What two lists of hosts have in common, in lower case: of each overlapping pair the more specific host.
fn intersection(offered: &[&str], wanted: &[Hostname]) -> Vec<Hostname> {
    let mut result = Vec::with_capacity(wanted.len());
    let mut known = Vec::with_capacity(wanted.len());
    for offered in offered {
        for wanted in wanted {
            let (common, lower) = if wanted.as_str() == *offered {
                // As VirtualServices have it, in one allocation for all servers.
                (wanted.as_str(), lower_cased(wanted))
            } else if host::subset_of(offered, wanted) {
                (*offered, lower_case(offered))
            } else if host::subset_of(wanted, offered) {
                (wanted.as_str(), lower_cased(wanted))
            } else {
                continue;
            };
            if !known.contains(&common) {
                known.push(common);
                result.push(lower);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_meet_in_the_more_specific_one() {
        let wanted = ["*.com", "bar.net"].map(Hostname::new);
        let common = intersection(&["foo.com", "*.net"], &wanted);
        assert_eq!(common, ["foo.com", "bar.net"].map(Hostname::new));
        assert!(intersection(&["foo.org"], &wanted).is_empty());
    }
}
