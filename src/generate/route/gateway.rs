//! Routes of gateways: virtual hosts of the VirtualServices that are bound to a server of the route configuration.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared, SmolStr, host},
    generate::{
        EncodedResource, GatewayView, View,
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
        envoy::config::route::v3::{Route, RouteConfiguration, VirtualHost, virtual_host::TlsRequirementType},
    },
};

use super::{
    Client, configuration,
    destination::{self, PortInference, Target},
    domains, empty_configuration, filters,
    http::{self, Translation},
    matches,
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
    pub(super) fn of(view: &View, selected: &Selected, client: Hashed<Client>) -> Self {
        Self {
            scope: selected.scope.clone(),
            gateways: GatewayView::of(view, selected),
            client,
            patches: selected.patches.routes.clone(),
        }
    }

    /// All route configurations, by name; also those that only patches know: listeners that are added by patches ask
    /// for them, and what they get is what the patches put in.
    pub(super) fn list(&self, view: &View) -> Vec<GatewayRoutes> {
        let scope = view.scope(&self.scope);
        let merged = self.gateways.merged(view);
        let patches = RoutePatchList::of(view, &self.patches, PatchContext::Gateway);
        let ports = if patches.is_empty() {
            BTreeMap::new()
        } else {
            declared_ports(&merged)
        };
        let patches_of = |name: &str| {
            let port = GatewayRouteName::of(name).port;
            patches.concerning(name, || ports.get(&port).cloned().unwrap_or_default())
        };
        let of_route = |(name, servers): (&SmolStr, &Vec<usize>)| GatewayRoutes {
            name: name.clone(),
            client: self.client.clone(),
            servers: servers
                .iter()
                .map(|index| self.server_routes(view, &scope, &merged.servers[*index]))
                .collect(),
            advertise_http3: merged.http3_routes.contains(name),
            patches: patches_of(name),
        };
        let unknown = patches.names().filter(|name| !merged.routes.contains_key(*name));
        let unknown = unknown.map(|name| GatewayRoutes {
            name: name.into(),
            client: self.client.clone(),
            servers: Vec::new(),
            advertise_http3: false,
            patches: patches_of(name),
        });
        merged.routes.iter().map(of_route).chain(unknown).collect()
    }

    fn server_routes(&self, view: &View, scope: &SidecarScope, server: &GatewayServer) -> ServerRoutes {
        let gateway = server.gateway_name();
        let declared = virtual_service::for_gateway(view.cx, view.mesh, &self.client.routes.namespace, &gateway);
        let bindings = declared
            .into_iter()
            .filter_map(|(key, reach)| self.binding(view, scope, server, key, reach))
            .collect();
        ServerRoutes {
            gateway,
            port: server.port(),
            tls: server.tls().is_some(),
            redirected: match server.tls() {
                Some(tls) if tls.https_redirect => Some(server.server.hosts.iter().map(Hostname::new).collect()),
                _ => None,
            },
            bindings,
        }
    }

    fn binding(
        &self,
        view: &View,
        scope: &SidecarScope,
        server: &GatewayServer,
        key: &ObjectKey,
        reach: &Reach,
    ) -> Option<Binding> {
        let offered = server.hosts_for(reach.meta.namespace());
        let hosts = intersection(&offered, &reach.hosts);
        if hosts.is_empty() {
            return None;
        }
        let destinations: BTreeSet<&Hostname> = reach.destinations.iter().map(|one| &one.host).collect();
        Some(Binding {
            virtual_service: key.clone(),
            hosts: hosts
                .into_iter()
                .map(|host| Hostname::from(host.to_ascii_lowercase()))
                .collect(),
            targets: destinations
                .into_iter()
                .map(|host| self.target(view, scope, host, reach))
                .collect(),
        })
    }

    /// A service of the VirtualService's own namespace is preferred, if the gateway may see it.
    fn target(&self, view: &View, scope: &SidecarScope, host: &Hostname, reach: &Reach) -> Target {
        let own = ServiceKey {
            hostname: host.clone(),
            namespace: reach.meta.namespace().clone(),
        };
        let visibility = view.mesh.visibility.get(view.cx, &own);
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
    /// Responses say that HTTP/3 is served too.
    advertise_http3: bool,
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
    /// The server has TLS settings.
    tls: bool,
    /// `httpsRedirect`: the hosts of the server, all of which must be called by HTTPS.
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
    /// Where it leads.
    targets: Vec<Target>,
}

/// A virtual host that is being put together.
struct Draft {
    name: String,
    domains: Vec<String>,
    /// Positions in [`Drafts::route_lists`].
    routes: Vec<usize>,
    https_only: bool,
    session: Option<Any>,
}

/// Virtual hosts by host.
#[derive(Default)]
struct Drafts {
    by_host: BTreeMap<Hostname, Draft>,
    /// The routes of each VirtualService on each Gateway, translated once.
    route_lists: Vec<Vec<Route>>,
    known_lists: BTreeMap<(SmolStr, ObjectKey), usize>,
}

impl GatewayRoutes {
    /// Builds the route configuration.
    pub(super) fn build(&self, view: &View) -> Built {
        let routes = if self.servers.is_empty() {
            empty_configuration(&self.name)
        } else {
            self.configuration(view)
        };
        let mut notes = Vec::new();
        let routes = patch::route::apply(view, &self.patches, PatchContext::Gateway, routes, &mut notes);
        Built::new(EncodedResource::new(self.name.as_str(), &routes)).with_notes(notes)
    }

    fn configuration(&self, view: &View) -> RouteConfiguration {
        let mut drafts = Drafts::default();
        for server in &self.servers {
            self.add_server(view, &mut drafts, server);
        }
        let mut virtual_hosts = if drafts.by_host.is_empty() {
            vec![self.black_hole()]
        } else {
            let collapse = view.mesh.installation.features.pilot_enable_route_collapse_optimization;
            self.virtual_hosts(drafts, collapse)
        };
        virtual_hosts.sort_by(|a, b| a.name.cmp(&b.name));
        configuration(&self.name, virtual_hosts)
    }

    fn add_server(&self, view: &View, drafts: &mut Drafts, server: &ServerRoutes) {
        for binding in &server.bindings {
            let client = &*self.client;
            let targets = destination::rows(view, &binding.targets, &client.routes.namespace, &client.routes.labels);
            let list = (server.gateway.clone(), binding.virtual_service.clone());
            // A server without routes does not speak for the next, whose port may be another.
            let routes = match drafts.known_lists.get(&list) {
                Some(known) => *known,
                None => {
                    let routes = self.routes(view, server, binding, &targets);
                    if routes.is_empty() {
                        continue;
                    }
                    let position = drafts.add_list(routes);
                    drafts.known_lists.insert(list, position);
                    position
                }
            };
            for host in &binding.hosts {
                let draft = drafts.host(host, server.port, || {
                    let service = targets.get(host)?.service.as_ref()?;
                    filters::stateful_session(service, &view.mesh.installation.features)
                });
                draft.routes.push(routes);
                draft.https_only |= server.redirected.is_some();
            }
        }
        for host in server.redirected.iter().flatten() {
            let host = Hostname::from(host.to_ascii_lowercase());
            drafts.host(&host, server.port, || None).https_only = true;
        }
    }

    fn routes(
        &self,
        view: &View,
        server: &ServerRoutes,
        binding: &Binding,
        targets: &destination::TargetMap,
    ) -> Vec<Route> {
        let Some(declared) = view.mesh.virtual_services.get(view.cx, &binding.virtual_service) else {
            return Vec::new();
        };
        let translation = Translation {
            view,
            client: &self.client.routes,
            gateway: &server.gateway,
            port: server.port,
            tls: server.tls,
            advertise_http3: self.advertise_http3,
            inference: PortInference::SolePort,
            targets,
        };
        http::routes(&translation, declared)
    }

    fn virtual_hosts(&self, drafts: Drafts, collapse: bool) -> Vec<VirtualHost> {
        let Drafts {
            by_host, route_lists, ..
        } = drafts;
        let finish = |draft: Draft| {
            let mut routes: Vec<Route> = draft
                .routes
                .iter()
                .flat_map(|list| route_lists[*list].iter().cloned())
                .collect();
            // Stable: a route for everything must not hide those of VirtualServices that come later.
            routes.sort_by_key(|route| route.r#match.as_ref().is_some_and(matches::is_catch_all));
            VirtualHost {
                name: draft.name,
                domains: draft.domains,
                routes,
                require_tls: if draft.https_only {
                    TlsRequirementType::All.into()
                } else {
                    TlsRequirementType::None.into()
                },
                typed_per_filter_config: draft
                    .session
                    .map(|session| (filters::STATEFUL_SESSION.to_owned(), session))
                    .into_iter()
                    .collect(),
                include_request_attempt_count: self.client.include_attempt_count,
                ..Default::default()
            }
        };
        let mut ordered: Vec<(Hostname, Draft)> = by_host.into_iter().collect();
        ordered.sort_by(|(a, _), (b, _)| host::more_specific(a, b));
        let drafts: Vec<Draft> = ordered.into_iter().map(|(_, draft)| draft).collect();
        let drafts = if collapse { collapsed(drafts) } else { drafts };
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

impl Drafts {
    fn add_list(&mut self, routes: Vec<Route>) -> usize {
        self.route_lists.push(routes);
        self.route_lists.len() - 1
    }

    /// The virtual host of a host; the first server that has it names it.
    fn host(&mut self, host: &Hostname, port: u32, session: impl FnOnce() -> Option<Any>) -> &mut Draft {
        self.by_host.entry(host.clone()).or_insert_with(|| Draft {
            name: domains::host_port(host, port),
            domains: vec![host.to_string()],
            routes: Vec::new(),
            https_only: false,
            session: session(),
        })
    }
}

/// Joins hosts with the same routes into one virtual host, named after the first of them.
fn collapsed(drafts: Vec<Draft>) -> Vec<Draft> {
    let mut result: Vec<Draft> = Vec::new();
    let mut by_routes: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    for draft in drafts {
        let same = by_routes.get(&draft.routes).copied();
        match same.filter(|position| result[*position].https_only == draft.https_only) {
            Some(position) => result[position].domains.extend(draft.domains),
            None => {
                by_routes.insert(draft.routes.clone(), result.len());
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

/// What two lists of hosts have in common: of each overlapping pair the more specific host.
fn intersection<'a>(offered: &[&'a str], wanted: &'a [Hostname]) -> Vec<&'a str> {
    let mut result = Vec::new();
    for offered in offered {
        for wanted in wanted {
            let common = if host::subset_of(offered, wanted) {
                offered
            } else if host::subset_of(wanted, offered) {
                wanted.as_str()
            } else {
                continue;
            };
            if !result.contains(&common) {
                result.push(common);
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
        assert_eq!(intersection(&["foo.com", "*.net"], &wanted), ["foo.com", "bar.net"]);
        assert!(intersection(&["foo.org"], &wanted).is_empty());
    }
}
