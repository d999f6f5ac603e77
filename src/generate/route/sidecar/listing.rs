//! Lists the route configurations that a sidecar may request, with the rows that each consists of.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use super::{
    CatchAll, SidecarPart, SidecarRoutes,
    egress_view::{EgressView, ServiceIndex},
    is_routed,
    visible_host::VisibleHost,
};
use crate::{
    base::{Hashed, SmolStr, cidr},
    generate::{
        BuildContext,
        constant::wildcards,
        name::allowed_cluster,
        patch::{
            PatchContext,
            route::{RoutePatchList, RoutePatches},
        },
        resource::HTTP_PROXY,
        route::domains::lower_case,
    },
    model::{
        Service,
        service::{Protocol, Resolution, ServicePort, UNSPECIFIED_IP},
        sidecar_scope::{AliasFilters, EgressListener, OutboundPolicy},
    },
};

/// Names under which listeners request the routes of a service port.
#[derive(Clone, Copy, Default)]
struct RequestedNames {
    /// True for the name of the service with the port.
    by_service: bool,
    /// True for the port number.
    by_port: bool,
}

/// Services of one route configuration.
#[derive(Clone, Copy)]
enum RdsScope {
    /// All services with the port; 0 means all services.
    Port(u32),
    /// This service, on this port.
    Sniffed(ServiceIndex, u32),
}

impl SidecarPart {
    /// Lists all route configurations by name. The first egress listener that serves a name builds it.
    pub(in super::super) fn list(&self, ctx: &BuildContext) -> Vec<SidecarRoutes> {
        let scope = ctx.scope(&self.scope);
        let mut result: BTreeMap<SmolStr, SidecarRoutes> = BTreeMap::new();
        let catch_all = catch_all(&scope.outbound_policy);
        let patches = RoutePatchList::of(ctx, &self.patches, PatchContext::SidecarOutbound);
        let listeners: Vec<EgressView> = scope
            .egress
            .iter()
            .map(|egress| EgressView::of(ctx, &scope, egress))
            .collect();
        for visible in &listeners {
            for (name, rds_scope) in self.names(ctx, visible) {
                // The requesting listener may differ from the serving one: a declared port takes precedence.
                let serving = serving(&listeners, rds_scope.port(), &name);
                let Entry::Vacant(entry) = result.entry(name) else {
                    continue;
                };
                let served = serving.and_then(|serving| Some((serving, rds_scope.within(visible, serving)?)));
                let name = entry.key().clone();
                let routes = match served {
                    Some((serving, rds_scope)) => self.routes(name, serving, rds_scope, &catch_all),
                    None => self.without_services(name, rds_scope, &catch_all),
                };
                entry.insert(routes);
            }
        }
        // Listeners added by patches may request any port. The patched route names are the ones that are known here.
        let requested = patches.names().filter_map(|name| Some((name, name.parse().ok()?)));
        for (name, port) in requested {
            if let (Entry::Vacant(entry), Some(serving)) = (result.entry(name.into()), serving(&listeners, port, name))
            {
                entry.insert(self.routes(name.into(), serving, RdsScope::Port(port), &catch_all));
            }
        }
        for (name, routes) in &mut result {
            routes.patches = patches.concerning(name, BTreeSet::new);
        }
        result.into_values().collect()
    }

    /// Returns the names that the listeners of an egress listener request, with the services of each.
    fn names(&self, ctx: &BuildContext, visible: &EgressView) -> Vec<(SmolStr, RdsScope)> {
        let mut names = Vec::new();
        if self.http_proxy || ctx.mesh_config().proxy_http_port != 0 {
            names.push((SmolStr::new_static(HTTP_PROXY), RdsScope::Port(0)));
        }
        let Some(declared) = &visible.egress.port else {
            let mut numbers = BTreeSet::new();
            for (index, host) in visible.hosts() {
                for (service, port) in host.ports() {
                    let number = port.number;
                    let requested = self.requested_names(service, port, visible.egress);
                    if requested.by_service {
                        names.push((sniffed_name(host, number), RdsScope::Sniffed(index, number)));
                    }
                    if requested.by_port && numbers.insert(number) {
                        names.push((number_name(number), RdsScope::Port(number)));
                    }
                }
            }
            return names;
        };
        let number = declared.number;
        let protocol = Protocol::parse(&declared.protocol);
        if !is_routed(protocol) {
            return names;
        }
        if number == 0 {
            names.push((visible.egress.bind.clone(), RdsScope::Port(0)));
            return names;
        }
        names.push((number_name(number), RdsScope::Port(number)));
        if protocol.is_unsupported() {
            let sniffed = visible.hosts();
            names.extend(sniffed.map(|(index, host)| (sniffed_name(host, number), RdsScope::Sniffed(index, number))));
        }
        names
    }

    /// Returns how the listeners of a catch-all egress listener request the routes of a service port.
    fn requested_names(&self, service: &Service, port: &ServicePort, egress: &EgressListener) -> RequestedNames {
        if port.protocol.is_http() {
            return RequestedNames {
                by_service: false,
                by_port: true,
            };
        }
        if !port.protocol.is_unsupported() || service.resolution == Resolution::Alias {
            return RequestedNames::default();
        }
        let address = self.client.vip.address(service);
        let is_wildcard =
            address.is_empty() || address == UNSPECIFIED_IP || cidr::is_range(&address) || !egress.bind.is_empty();
        RequestedNames {
            by_service: self.has_own_listener(service, egress),
            by_port: is_wildcard || service.resolution == Resolution::Passthrough,
        }
    }

    /// Returns true if the service may have a sniffing listener at an address other than the wildcard. A listener at
    /// the wildcard address requests the routes of the whole port.
    fn has_own_listener(&self, service: &Service, egress: &EgressListener) -> bool {
        let wildcard = wildcards(self.client.vip.ip_mode)[0];
        if !egress.bind.is_empty() {
            return egress.bind != wildcard;
        }
        // Headless services may have a listener per endpoint.
        if self.own_sockets || egress.capture_none || service.resolution == Resolution::Passthrough {
            return true;
        }
        let addresses = self.client.vip.listen_addresses(service);
        let first = addresses.first();
        first.is_some_and(|first| *first != wildcard && !cidr::is_range(first))
    }

    /// Returns the routes of a name, which the services and VirtualServices of an egress listener serve.
    fn routes(&self, name: SmolStr, visible: &EgressView, rds_scope: RdsScope, catch_all: &CatchAll) -> SidecarRoutes {
        // HTTP proxies route to all services and ports.
        let port = if visible.is_http_proxy() { 0 } else { rds_scope.port() };
        let client = &self.client.routes;
        let (mut bindings, mut services) = match rds_scope {
            RdsScope::Port(_) => {
                let (bindings, taken) = visible.bindings(port, client);
                (bindings, visible.default_hosts(port, client, &taken))
            }
            RdsScope::Sniffed(index, _) => {
                let (bindings, taken) = visible.bindings_of(index, port, client);
                let only = std::iter::once(index);
                (bindings, visible.hosts_with_routes(only, port, client, &taken))
            }
        };
        // Keys are kept, and as the lengths were not known, up to half of the lists is spare room.
        bindings.shrink_to_fit();
        services.shrink_to_fit();
        SidecarRoutes {
            name,
            port,
            client: self.client.clone(),
            catch_all: matches!(rds_scope, RdsScope::Port(_)).then(|| catch_all.clone()),
            bindings: Hashed::new(bindings),
            services: Hashed::new(services),
            alias_filters: visible.egress.alias_filters.clone(),
            single: None,
            patches: RoutePatches::default(),
        }
    }

    /// Returns the routes of a name for which the serving egress listener has no services.
    ///
    /// Parity (pilot/pkg/networking/core/httproute.go): every requested name is answered, because a listener waits for
    /// it.
    fn without_services(&self, name: SmolStr, rds_scope: RdsScope, catch_all: &CatchAll) -> SidecarRoutes {
        SidecarRoutes {
            name,
            port: rds_scope.port(),
            client: self.client.clone(),
            catch_all: matches!(rds_scope, RdsScope::Port(_)).then(|| catch_all.clone()),
            bindings: Hashed::new(Vec::new()),
            services: Hashed::new(Vec::new()),
            alias_filters: AliasFilters::default(),
            single: None,
            patches: RoutePatches::default(),
        }
    }
}

impl RdsScope {
    fn port(self) -> u32 {
        match self {
            Self::Port(port) | Self::Sniffed(_, port) => port,
        }
    }

    /// Translates the scope to the services of another listener; `None` if that listener does not see the service.
    fn within(self, requesting: &EgressView, serving: &EgressView) -> Option<Self> {
        match self {
            Self::Sniffed(index, port) => {
                let host = lower_case(&requesting.host(index).row.key.hostname);
                serving.by_host.get(&host).map(|index| Self::Sniffed(*index, port))
            }
            port @ Self::Port(_) => Some(port),
        }
    }
}

fn number_name(port: u32) -> SmolStr {
    SmolStr::new(itoa::Buffer::new().format(port))
}

fn sniffed_name(host: &VisibleHost, port: u32) -> SmolStr {
    [&host.row.key.hostname, ":", itoa::Buffer::new().format(port)]
        .into_iter()
        .collect()
}

pub(super) fn catch_all(policy: &OutboundPolicy) -> CatchAll {
    if policy.registry_only {
        CatchAll::BlockAll
    } else {
        CatchAll::AllowAny(allowed_cluster(policy))
    }
}

/// Returns the egress listener whose services and VirtualServices serve a name.
fn serving<'a, 'v>(listeners: &'a [EgressView<'v>], port: u32, name: &str) -> Option<&'a EgressView<'v>> {
    listeners.iter().find(|visible| match &visible.egress.port {
        None => true,
        Some(declared) => declared.number == port && (port != 0 || visible.egress.bind == name),
    })
}
