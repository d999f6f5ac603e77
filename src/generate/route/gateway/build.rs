//! Builds the route configuration of a gateway.

use rustc_hash::FxHashMap;

use super::{Binding, GatewayRoutes, ServerRoutes};
use crate::{
    base::{Hostname, ObjectKey, Shared, SmolStr, address::host_port, host, keyed::KeyedMap},
    generate::{
        BuildContext, EncodedResource,
        block::{Block, BlockPool},
        constant::empty_route_configuration,
        patch::{self, PatchContext},
        resource::Built,
        route::{
            assembly::{self, Host, Names},
            configuration, filters, fragment,
            routes::Routes,
        },
    },
    proto::{
        Any,
        envoy::config::route::v3::{RouteConfiguration, VirtualHost, virtual_host::TlsRequirementType},
    },
};

/// A virtual host under construction.
struct VirtualHostBuilder<'a> {
    host: &'a Hostname,
    /// Other hosts with the same routes.
    others: Vec<&'a Hostname>,
    /// Port of the first server that has the host; part of the name.
    port: u32,
    routes: SequenceId,
    https_only: bool,
    session: Option<Any>,
}

/// Virtual hosts by host.
#[derive(Default)]
struct VirtualHostBuilders<'a> {
    all: Vec<VirtualHostBuilder<'a>>,
    by_host: KeyedMap<&'a Hostname, usize>,
    /// Routes of each VirtualService on each Gateway.
    route_lists: Vec<Shared<Routes>>,
    known_lists: KeyedMap<(&'a SmolStr, &'a ObjectKey), usize>,
    sequences: Sequences,
}

/// Number of a sequence of route lists; 0 is the empty sequence.
type SequenceId = usize;

/// Sequences of route lists. Hosts with the same sequence share a number, however long the sequence is.
#[derive(Default)]
struct Sequences {
    /// Each sequence as its prefix and last list. The first has number 1.
    known: Vec<(SequenceId, usize)>,
    longer: FxHashMap<(SequenceId, usize), SequenceId>,
}

impl Sequences {
    /// Returns the sequence extended by a list.
    fn with(&mut self, sequence: SequenceId, list: usize) -> SequenceId {
        let next = self.known.len() + 1;
        let id = *self.longer.entry((sequence, list)).or_insert(next);
        if id == next {
            self.known.push((sequence, list));
        }
        id
    }

    /// Returns the lists of a sequence in order.
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
    pub(in super::super) fn build(&self, ctx: &BuildContext) -> Built {
        if self.servers.is_empty() {
            return self.patched(ctx, empty_route_configuration(&self.name));
        }
        let hosts = self.hosts(ctx);
        if self.patches.is_empty() {
            return Built::new(assembly::assembled(
                ctx.memo.get::<Shared<BlockPool>>(),
                &self.name,
                &hosts,
            ));
        }
        let hosts = hosts.into_iter().map(Host::message).collect();
        self.patched(ctx, configuration(&self.name, hosts))
    }

    fn patched(&self, ctx: &BuildContext, routes: RouteConfiguration) -> Built {
        let mut notes = Vec::new();
        let routes = patch::route::apply(ctx, &self.patches, PatchContext::Gateway, routes, &mut notes);
        Built::new(EncodedResource::new(self.name.as_str(), &routes)).with_notes(notes)
    }

    fn hosts(&self, ctx: &BuildContext) -> Vec<Host> {
        let mut builders = VirtualHostBuilders::default();
        for server in &self.servers {
            builders.add_server(ctx, server);
        }
        let misdirected = self.misdirected.iter().flat_map(|hosts| {
            let is_known = |host: &str| builders.by_host.contains_key(&Hostname::new(host));
            hosts.virtual_hosts(self.servers.first().map_or(0, |server| server.port), is_known)
        });
        let misdirected: Vec<Host> = misdirected.map(Host::whole).collect();
        if builders.all.is_empty() && misdirected.is_empty() {
            return vec![Host::whole(self.black_hole())];
        }
        let collapse = ctx.mesh.installation.features.pilot_enable_route_collapse_optimization;
        let mut hosts = self.virtual_hosts(builders, collapse);
        hosts.extend(misdirected);
        hosts.sort_by(|a, b| a.name().cmp(b.name()));
        hosts
    }

    fn virtual_hosts(&self, builders: VirtualHostBuilders, collapse: bool) -> Vec<Host> {
        let VirtualHostBuilders {
            mut all,
            route_lists,
            sequences,
            ..
        } = builders;
        let parts: Vec<[Block; 2]> = route_lists.iter().map(|routes| routes.parts()).collect();
        let finish = |builder: VirtualHostBuilder| {
            let lists = sequences.lists(builder.routes);
            // A catch-all route must not hide the routes of later VirtualServices.
            let conditional = lists.iter().map(|list| &parts[*list][0]);
            let routes = conditional.chain(lists.iter().map(|list| &parts[*list][1]));
            let hosts = std::iter::once(builder.host).chain(builder.others);
            let name = host_port(builder.host, builder.port);
            let domains = hosts.map(|host| host.as_str().to_owned()).collect();
            let include_attempt_count = self.client.include_attempt_count;
            let mut host = if builder.https_only || builder.session.is_some() {
                let require_tls = if builder.https_only {
                    TlsRequirementType::All
                } else {
                    TlsRequirementType::None
                };
                let session = builder.session.into_iter();
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
                Host::plain(Names::Own { name, domains }, include_attempt_count)
            };
            host.routes
                .extend(routes.filter(|routes| !routes.bytes.is_empty()).cloned());
            host
        };
        all.sort_by(|a, b| host::more_specific(a.host, b.host));
        let builders = if collapse { collapsed(all) } else { all };
        builders.into_iter().map(finish).collect()
    }

    /// Returns a virtual host that answers 404: without any virtual host all requests get 404.
    fn black_hole(&self) -> VirtualHost {
        let port = self.servers.first().map_or(0, |server| server.port);
        VirtualHost {
            name: host_port("blackhole", port),
            domains: vec!["*".to_owned()],
            ..Default::default()
        }
    }
}

impl<'a> VirtualHostBuilders<'a> {
    fn add_server(&mut self, ctx: &BuildContext, server: &'a ServerRoutes) {
        for binding in &server.bindings {
            let list = (&server.gateway, &binding.virtual_service);
            // The routes of a server without VirtualServices do not count for the next server, whose port may differ.
            let routes = match self.known_lists.get(&list) {
                Some(known) => *known,
                None => {
                    let routes = fragment::routes(ctx, &binding.routes);
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
                let builder = &mut self.all[position];
                builder.routes = self.sequences.with(builder.routes, routes);
                builder.https_only |= server.redirected.is_some();
            }
        }
        for host in server.redirected.iter().flatten() {
            let position = self.host(host, server.port, || None);
            self.all[position].https_only = true;
        }
    }

    /// Returns the position of a host's virtual host; the first server with the host names it.
    fn host(&mut self, host: &'a Hostname, port: u32, session: impl FnOnce() -> Option<Any>) -> usize {
        let position = *self.by_host.entry(host).or_insert(self.all.len());
        if position == self.all.len() {
            self.all.push(VirtualHostBuilder {
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
    /// Returns the session configuration of a host that is a service.
    fn session(&self, ctx: &BuildContext, host: &Hostname) -> Option<Any> {
        let (_, service) = self.services.iter().find(|(own, _)| own == host)?;
        filters::stateful_session(ctx.service(service)?, &ctx.mesh.installation.features)
    }
}

/// Joins hosts with the same routes into one virtual host, named after the first.
fn collapsed(builders: Vec<VirtualHostBuilder>) -> Vec<VirtualHostBuilder> {
    let mut result: Vec<VirtualHostBuilder> = Vec::new();
    let mut by_routes: FxHashMap<SequenceId, usize> = FxHashMap::default();
    for builder in builders {
        let same = by_routes.get(&builder.routes).copied();
        match same.filter(|position| result[*position].https_only == builder.https_only) {
            Some(position) => result[position].others.push(builder.host),
            None => {
                by_routes.insert(builder.routes, result.len());
                result.push(builder);
            }
        }
    }
    result
}
