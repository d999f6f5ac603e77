//! Patches of route configurations, their virtual hosts and their routes.
//!
//! Note the order: merges of the configuration; for each virtual host its own patches, then those of its routes
//! (changes first, additions after); finally added virtual hosts, which are not patched.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{MOST_OWN, PatchContext, PatchRef, merge, resolve_each, set};
use crate::{
    base::Shared,
    generate::{BuildContext, name::ClusterName, resource::Note},
    model::envoy_filter::{ApplyTo, Operation, Patch},
    proto::{
        envoy::config::route::v3::{Route, RouteConfiguration, VirtualHost, route::Action},
        istio::networking::v1alpha3::envoy_filter::{
            RouteConfigurationMatch,
            route_configuration_match::{
                RouteMatch, VirtualHostMatch,
                route_match::{self, Action as Kind},
            },
        },
    },
};

/// Fields of a gateway's route configuration name: `http.80` or `https.443.port-name.gateway.namespace`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayRouteName<'a> {
    /// Port: the listening port for plaintext, otherwise the port that the server declares; 0 if absent.
    pub port: u32,
    /// Name of the server's port.
    pub port_name: &'a str,
    /// `namespace/name` of the Gateway.
    pub gateway: String,
}

impl<'a> GatewayRouteName<'a> {
    /// Parses a name. Parity (pilot/pkg/model/gateway.go, ParseGatewayRDSRouteName): names with an address, and those
    /// of Gateways with dots in their names, have no fields.
    pub fn of(name: &'a str) -> Self {
        if let Some(port) = name.strip_prefix("http.") {
            return Self {
                port: port.parse().unwrap_or_default(),
                ..Self::default()
            };
        }
        let words: Vec<&str> = name.split('.').collect();
        match words.as_slice() {
            ["https", port, port_name, gateway, namespace] => Self {
                port: port.parse().unwrap_or_default(),
                port_name,
                gateway: format!("{namespace}/{gateway}"),
            },
            _ => Self::default(),
        }
    }
}

/// Patches that may apply to one route configuration, and their further conditions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoutePatches {
    refs: Shared<[PatchRef]>,
    /// For gateways: the declared ports of servers that listen on the configuration's port.
    ports: Shared<BTreeSet<u32>>,
}

impl Default for RoutePatches {
    fn default() -> Self {
        Self {
            refs: Vec::new().into(),
            ports: Shared::default(),
        }
    }
}

impl RoutePatches {
    /// Returns true without patches.
    pub fn is_empty(&self) -> bool {
        self.refs.is_empty()
    }
}

/// Patches of one context, by the route configuration name that they match.
pub struct RoutePatchList<'a> {
    context: PatchContext,
    refs: Shared<[PatchRef]>,
    patches: Vec<&'a Patch>,
    by_name: BTreeMap<&'a str, Vec<usize>>,
    rest: Vec<usize>,
    none: RoutePatches,
}

impl<'a> RoutePatchList<'a> {
    /// Sorts the patches of a proxy.
    pub fn of(ctx: &BuildContext<'a>, refs: &[PatchRef], context: PatchContext) -> Self {
        let counting = resolve_each(ctx, refs).filter(|(_, patch)| patch.is_for(context));
        let (refs, patches): (Vec<PatchRef>, Vec<&Patch>) =
            counting.map(|(reference, patch)| (reference.clone(), patch)).unzip();
        let mut by_name: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let mut rest = Vec::new();
        for (index, patch) in patches.iter().enumerate() {
            match patch.route_configuration() {
                Some(condition) if !condition.name.is_empty() => {
                    by_name.entry(&condition.name).or_default().push(index);
                }
                _ => rest.push(index),
            }
        }
        Self {
            context,
            refs: refs.into(),
            patches,
            by_name,
            rest,
            none: RoutePatches::default(),
        }
    }

    /// Returns true without patches.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// Returns the names of route configurations that patches match.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.by_name.keys().copied()
    }

    /// Returns the ports of route configurations that patches match, once for each patch.
    pub fn ports(&self) -> impl Iterator<Item = u32> {
        let conditions = self.patches.iter().filter_map(|patch| patch.route_configuration());
        conditions
            .map(|condition| condition.port_number)
            .filter(|port| *port != 0)
    }

    /// Returns the patches that match a route configuration, or all if one of these renames it or if they are many. For
    /// `ports`, see [`RoutePatches`].
    pub fn concerning(&self, name: &str, ports: impl FnOnce() -> BTreeSet<u32>) -> RoutePatches {
        self.list(name, ports, MOST_OWN)
    }

    /// Returns the patches of [`Self::concerning`] without others, for callers that apply them and do not keep the
    /// list.
    pub fn at_once(&self, name: &str, ports: impl FnOnce() -> BTreeSet<u32>) -> RoutePatches {
        self.list(name, ports, usize::MAX)
    }

    fn list(&self, name: &str, ports: impl FnOnce() -> BTreeSet<u32>, most_own: usize) -> RoutePatches {
        if self.is_empty() {
            return self.none.clone();
        }
        let ports = Shared::new(ports());
        let named = self.by_name.get(name).into_iter().flatten();
        let mut indexes: BTreeSet<usize> = named.chain(&self.rest).copied().collect();
        indexes.retain(|index| {
            let condition = self.patches[*index].route_configuration();
            condition.is_none_or(|condition| is_configuration(condition, self.context, name, &ports))
        });
        if indexes.is_empty() {
            return self.none.clone();
        }
        let renames = |index: &usize| {
            let patch = self.patches[*index];
            let value = patch.value.as_ref().filter(|_| is_merge_of_configuration(patch));
            value.is_some_and(|value| value.message.has_field_by_name("name"))
        };
        let refs = if indexes.len() > most_own || indexes.iter().any(renames) {
            self.refs.clone()
        } else {
            let refs = indexes.into_iter().map(|index| self.refs[index].clone());
            refs.collect::<Vec<_>>().into()
        };
        RoutePatches { refs, ports }
    }
}

/// Applies the patches to a route configuration that proxies request. It keeps its name: the listener waits for this
/// one, and Envoy drops others.
pub fn apply(
    ctx: &BuildContext,
    patches: &RoutePatches,
    context: PatchContext,
    routes: RouteConfiguration,
    notes: &mut Vec<Note>,
) -> RouteConfiguration {
    let name = routes.name.clone();
    RouteConfiguration {
        name,
        ..patched(ctx, patches, context, routes, notes)
    }
}

fn patched(
    ctx: &BuildContext,
    patches: &RoutePatches,
    context: PatchContext,
    mut routes: RouteConfiguration,
    notes: &mut Vec<Note>,
) -> RouteConfiguration {
    if patches.refs.is_empty() {
        return routes;
    }
    let mut patching = Patching {
        context,
        ports: &patches.ports,
        all: resolve_each(ctx, &patches.refs).map(|(_, patch)| patch).collect(),
        notes: BTreeSet::new(),
    };
    patching.configuration(&mut routes);
    notes.extend(patching.notes);
    set::compact(notes);
    routes
}

/// Applies the patches to the routes inside an inbound listener.
pub fn inbound(
    ctx: &BuildContext,
    refs: &[PatchRef],
    routes: RouteConfiguration,
    notes: &mut Vec<Note>,
) -> RouteConfiguration {
    if refs.is_empty() {
        return routes;
    }
    let context = PatchContext::SidecarInbound;
    let patches = RoutePatchList::of(ctx, refs, context).at_once(&routes.name, BTreeSet::new);
    patched(ctx, &patches, context, routes, notes)
}

/// State of patching one route configuration.
struct Patching<'a, 'p> {
    context: PatchContext,
    ports: &'a BTreeSet<u32>,
    all: Vec<&'p Patch>,
    /// Each once: a patch may change thousands of routes.
    notes: BTreeSet<Note>,
}

impl<'p> Patching<'_, 'p> {
    fn configuration(&mut self, routes: &mut RouteConfiguration) {
        for patch in self.all.clone() {
            if is_merge_of_configuration(patch) && self.is_configuration(patch, &routes.name) {
                self.merge(routes, patch);
            }
        }
        // The name is final from here on, so patches that do not match it can be dropped.
        let matching = self
            .all
            .iter()
            .filter(|patch| self.is_configuration(patch, &routes.name));
        let (of_hosts, of_routes): (Vec<&Patch>, Vec<&Patch>) = matching
            .filter(|patch| patch.apply_to != ApplyTo::RouteConfiguration)
            .partition(|patch| patch.apply_to == ApplyTo::VirtualHost);
        self.virtual_hosts(routes, &of_hosts, &of_routes);
    }

    fn virtual_hosts(&mut self, routes: &mut RouteConfiguration, of_hosts: &[&'p Patch], of_routes: &[&'p Patch]) {
        let mut removed: BTreeSet<String> = BTreeSet::new();
        for host in &mut routes.virtual_hosts {
            if self.changes_host(host, of_hosts) {
                self.routes(host, of_routes);
            } else {
                removed.insert(host.name.clone());
            }
        }
        for patch in of_hosts.iter().filter(|patch| patch.operation == Operation::Add) {
            routes.virtual_hosts.extend(patch.read::<VirtualHost>());
            self.notes.insert(set::applied(patch));
        }
        // Parity (pilot/pkg/networking/core/envoyfilter/rc_patch.go): hosts are removed by name, so an added host with
        // the name of a removed one does not stay.
        routes.virtual_hosts.retain(|host| !removed.contains(&host.name));
    }

    /// Returns false if the host is removed.
    fn changes_host(&mut self, host: &mut VirtualHost, patches: &[&'p Patch]) -> bool {
        for patch in patches {
            if !is_host(patch, host) {
                continue;
            }
            match patch.operation {
                Operation::Remove => {
                    self.notes.insert(set::applied(patch));
                    return false;
                }
                Operation::Merge => self.merge(host, patch),
                Operation::Replace => {
                    if let Some(value) = patch.read() {
                        *host = value;
                        self.notes.insert(set::applied(patch));
                    }
                }
                _ => {}
            }
        }
        true
    }

    fn routes(&mut self, host: &mut VirtualHost, patches: &[&'p Patch]) {
        let patches: Vec<&Patch> = patches.iter().copied().filter(|patch| is_host(patch, host)).collect();
        if patches.is_empty() {
            return;
        }
        let mut kept = std::mem::take(&mut host.routes);
        kept.retain_mut(|route| self.changes_route(route, &patches));
        for patch in patches {
            if insert(&mut kept, patch) {
                self.notes.insert(set::applied(patch));
            }
        }
        host.routes = kept;
    }

    /// Returns false if the route is removed.
    fn changes_route(&mut self, route: &mut Route, patches: &[&Patch]) -> bool {
        for patch in patches {
            if !route_match(patch).is_none_or(|condition| is_route(condition, route)) {
                continue;
            }
            match patch.operation {
                Operation::Remove => {
                    self.notes.insert(set::applied(patch));
                    return false;
                }
                Operation::Merge => self.merge(route, patch),
                _ => {}
            }
        }
        true
    }

    fn merge<M: prost::Message + prost::Name + Default>(&mut self, message: &mut M, patch: &Patch) {
        let Some(value) = &patch.value else { return };
        self.notes.insert(match merge::merge_into(message, &value.message) {
            Ok(()) => set::applied(patch),
            Err(error) => set::problem(patch, &error),
        });
    }

    fn is_configuration(&self, patch: &Patch, name: &str) -> bool {
        let condition = patch.route_configuration();
        condition.is_none_or(|condition| is_configuration(condition, self.context, name, self.ports))
    }
}

/// Adds a route if the patch does so. Without a match of routes it becomes the first or last route; with one, nothing
/// is added unless a route matches.
fn insert(routes: &mut Vec<Route>, patch: &Patch) -> bool {
    let found = route_match(patch).map(|condition| routes.iter().position(|route| is_route(condition, route)));
    let place = match (patch.operation, found) {
        (Operation::Add, _) | (Operation::InsertAfter, None) => Some(routes.len()),
        (Operation::InsertBefore | Operation::InsertFirst, None) => Some(0),
        (Operation::InsertFirst, Some(found)) => found.map(|_| 0),
        (Operation::InsertBefore, Some(found)) => found,
        (Operation::InsertAfter, Some(found)) => found.map(|found| found + 1),
        _ => None,
    };
    let (Some(place), Some(route)) = (place, patch.read()) else {
        return false;
    };
    routes.insert(place, route);
    true
}

/// Returns true for merges; a route configuration accepts no other operation.
fn is_merge_of_configuration(patch: &Patch) -> bool {
    patch.apply_to == ApplyTo::RouteConfiguration && patch.operation == Operation::Merge
}

fn is_configuration(
    condition: &RouteConfigurationMatch,
    context: PatchContext,
    name: &str,
    ports: &BTreeSet<u32>,
) -> bool {
    if !condition.name.is_empty() && condition.name != name {
        return false;
    }
    if context != PatchContext::Gateway {
        return condition.port_number == 0 || condition.port_number == sidecar_port(name);
    }
    let parsed = GatewayRouteName::of(name);
    let on_port = || {
        if ports.is_empty() {
            parsed.port == condition.port_number
        } else {
            ports.contains(&condition.port_number)
        }
    };
    (condition.port_name.is_empty() || condition.port_name == parsed.port_name)
        && (condition.gateway.is_empty() || condition.gateway == parsed.gateway)
        && (condition.port_number == 0 || on_port())
}

/// Returns the port of a sidecar's route configuration name: the whole name, or that of an inbound cluster.
///
/// Parity (pilot/pkg/networking/core/envoyfilter/rc_patch.go, getListenerPortFromName): the routes of a single host
/// (`host:80`) have none.
fn sidecar_port(name: &str) -> u32 {
    if name.starts_with("inbound") {
        ClusterName::parse(name).port
    } else {
        name.parse().unwrap_or_default()
    }
}

fn host_match(patch: &Patch) -> Option<&VirtualHostMatch> {
    patch.route_configuration()?.vhost.as_ref()
}

fn is_host(patch: &Patch, host: &VirtualHost) -> bool {
    host_match(patch).is_none_or(|condition| {
        (condition.name.is_empty() || condition.name == host.name)
            && (condition.domain_name.is_empty() || host.domains.contains(&condition.domain_name))
    })
}

fn route_match(patch: &Patch) -> Option<&RouteMatch> {
    host_match(patch)?.route.as_ref()
}

/// Returns true if a route matches; actions of other kinds than those that a match can name always match.
fn is_route(condition: &RouteMatch, route: &Route) -> bool {
    let kind = match &route.action {
        Some(Action::Route(_)) => Some(Kind::Route),
        Some(Action::Redirect(_)) => Some(Kind::Redirect),
        Some(Action::DirectResponse(_)) => Some(Kind::DirectResponse),
        _ => None,
    };
    let expected = condition.action();
    (condition.name.is_empty() || condition.name == route.name)
        && (expected == route_match::Action::Any || kind.is_none_or(|kind| kind == expected))
}
