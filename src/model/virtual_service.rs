//! VirtualServices with delegates merged, short names resolved and `exportTo` parsed.

mod declared;
mod delegate;
mod output;
mod ownership;
#[cfg(test)]
mod tests;
mod units;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use self::declared::Declared;
pub use self::{
    declared::{Converted, HttpRoutes, RequestRoute, Requests},
    output::{PortRoutes, demand, may_be_large},
    ownership::{WildcardOwners, wildcard_owners},
};
use super::{MeshSnapshot, destination_rule::resolve_host, export, installation::Installation};
use crate::{
    api::{Config, Meta},
    base::{Hostname, Namespace, ObjectKey, Shared, host},
    model::export::ExportTo,
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

/// Gateway name that refers to all sidecars.
pub const MESH_GATEWAY: &str = "mesh";

/// Annotation of VirtualServices that are made from other APIs: `gateway` or `ingress`.
pub const SEMANTICS_ANNOTATION: &str = "internal.istio.io/route-semantics";

/// Semantics of paths and rewrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Semantics {
    /// A VirtualService as written.
    Istio,
    /// Made from an Ingress.
    Ingress,
    /// Made from the Gateway API.
    Gateway,
}

/// A resolved VirtualService: hosts and destinations are fully qualified. Those in HTTP routes are resolved where they
/// are read.
#[derive(Clone, Debug, PartialEq)]
pub struct VirtualService {
    /// Metadata of the (root) object.
    pub meta: Shared<Meta>,
    /// Fully qualified hosts.
    pub hosts: Vec<Hostname>,
    /// `namespace/name` or `mesh`; never empty.
    pub gateways: Vec<SmolStr>,
    /// The namespaces that see it (`exportTo`, or the default of the mesh).
    pub export_to: ExportTo,
    /// HTTP routes.
    pub http: HttpRoutes,
    /// TLS routes.
    pub tls: Vec<networking::TlsRoute>,
    /// TCP routes.
    pub tcp: Vec<networking::TcpRoute>,
    /// The API that it is made from, which decides about paths and rewrites.
    pub semantics: Semantics,
    /// Destinations of all routes, sorted and unique.
    pub destinations: Shared<[Destination]>,
}

/// Visibility, precedence and destinations of a VirtualService; they change far less often than weights and matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServiceSummary {
    /// Metadata: age, name, namespace.
    pub meta: Shared<Meta>,
    /// The namespaces that see it (`exportTo`, or the default of the mesh).
    pub export_to: ExportTo,
    /// Fully qualified hosts.
    pub hosts: Vec<Hostname>,
    /// `namespace/name` or `mesh`.
    pub gateways: Vec<SmolStr>,
    /// The API that it is made from, which decides about paths and rewrites.
    pub semantics: Semantics,
    /// Destinations of all routes, sorted and unique.
    pub destinations: Shared<[Destination]>,
    /// True if as gateway `mesh` it applies only to clients of its own namespace, whatever its visibility: it has hosts
    /// that its namespace does not own ([`ownership::owns`]).
    pub only_own_clients: bool,
    /// True if some HTTP match depends on the client.
    pub by_source: bool,
    /// True if some HTTP match depends on the gateway.
    pub by_gateway: bool,
    /// True if the HTTP routes depend on the port of the request, whatever the services.
    pub by_port: bool,
    /// True if some HTTP route matches every request, so that every client has a route.
    pub unconditional: bool,
    /// The number of ports of a service on which the HTTP routes apply: they are repeated for each.
    pub most_ports: u32,
}

impl VirtualServiceSummary {
    /// Emits the namespaces that see it on gateway `mesh`.
    fn mesh_namespaces(&self, emit: &mut dyn FnMut(ExportNamespace)) {
        let own = self.meta.namespace();
        if !self.only_own_clients {
            export_namespaces(&self.export_to, emit);
        } else if self.export_to.visible_to(own) {
            emit(Some(own.clone()));
        }
    }
}

/// A destination host and port of a route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// Fully qualified host.
    pub host: Hostname,
    /// Port of the service; 0 if the route names none.
    pub port: u32,
    /// Namespaces of clients that the route applies to (`sourceNamespace`); empty for all. Only those of HTTP routes.
    pub sources: Vec<Namespace>,
}

impl Destination {
    fn new(destination: &networking::Destination, sources: &[Namespace]) -> Self {
        Self {
            host: Hostname::new(&destination.host),
            port: destination.port.as_ref().map_or(0, |port| port.number),
            sources: sources.to_vec(),
        }
    }
}

/// A namespace that an object is exported to; `None` for all.
pub type ExportNamespace = Option<Namespace>;

/// Emits the index keys of a VirtualService: its gateways. Those of `mesh` have the namespaces that see it; the others
/// have `None`, because an object may name thousands of gateways and of namespaces.
pub fn export_keys(_: &ObjectKey, summary: &VirtualServiceSummary, emit: &mut dyn FnMut((ExportNamespace, SmolStr))) {
    for gateway in summary.gateways.iter().collect::<BTreeSet<_>>() {
        if gateway == MESH_GATEWAY {
            summary.mesh_namespaces(&mut |audience| emit((audience, gateway.clone())));
        } else {
            emit((None, gateway.clone()));
        }
    }
}

/// Emits the index keys of a VirtualService of gateway `mesh`: its hosts, and `None` for its wildcards.
pub fn mesh_hosts(_: &ObjectKey, summary: &VirtualServiceSummary, emit: &mut dyn FnMut(Option<Hostname>)) {
    if summary.gateways.iter().any(|gateway| gateway == MESH_GATEWAY) {
        let hosts = summary.hosts.iter();
        let keys: BTreeSet<Option<&Hostname>> = hosts.map(|one| (!host::is_wildcard(one)).then_some(one)).collect();
        for key in keys {
            emit(key.cloned());
        }
    }
}

/// Emits the only index key for a VirtualService with TCP or TLS routes.
pub fn tcp_entry(_: &ObjectKey, row: &VirtualService, emit: &mut dyn FnMut(())) {
    if row.routes_tcp() {
        emit(());
    }
}

/// Emits the index keys of a VirtualService with TCP or TLS routes: its hosts, and two marks of each partial wildcard
/// (`*-a.b.c`): that there is one, and that there is one with these whole labels (`.b.c`).
pub fn tcp_hosts(_: &ObjectKey, row: &VirtualService, emit: &mut dyn FnMut(Hostname)) {
    if row.routes_tcp() {
        let partial = row.hosts.iter().filter_map(|host| {
            let suffix = host.strip_prefix('*')?;
            let is_partial = !suffix.is_empty() && !suffix.starts_with('.');
            is_partial.then(|| suffix.find('.').map_or("", |dot| &suffix[dot..]))
        });
        let marks = partial.flat_map(|labels| ["", labels]).map(mark_of);
        let keys: BTreeSet<Hostname> = row.hosts.iter().cloned().chain(marks).collect();
        keys.into_iter().for_each(emit);
    }
}

fn wildcard_of(suffix: &str) -> Hostname {
    Hostname::from(format!("*{suffix}"))
}

/// Returns the index key of all partial wildcards with these whole labels.
fn mark_of(labels: &str) -> Hostname {
    Hostname::from(format!("**{labels}"))
}

/// Returns the VirtualServices with TCP or TLS routes for a host without wildcard. There may be thousands of hosts in
/// each, so the index is asked for every pattern instead; partial ones are rare.
pub fn tcp_for_host<'a>(cx: &Cx, mesh: &'a MeshSnapshot, hostname: &Hostname) -> BTreeSet<&'a ObjectKey> {
    let index = &mesh.tcp_virtual_services_by_host;
    let dots = || hostname.match_indices('.').map(|(dot, _)| dot);
    let mut patterns = vec![hostname.clone(), wildcard_of("")];
    patterns.extend(dots().map(|dot| wildcard_of(&hostname[dot..])));
    if index.contains(cx, &mark_of("")) {
        let mut begin = 0;
        for end in dots().chain([hostname.len()]) {
            if index.contains(cx, &mark_of(&hostname[end..])) {
                let label = hostname[begin..end].char_indices();
                patterns.extend(label.map(|(at, _)| wildcard_of(&hostname[begin + at..])));
            }
            begin = end + 1;
        }
    }
    let rows = patterns.into_iter().flat_map(|pattern| index.get(cx, &pattern));
    rows.map(|(key, _)| key).collect()
}

impl VirtualService {
    /// Returns true if it has TCP or TLS routes.
    pub fn routes_tcp(&self) -> bool {
        !self.tcp.is_empty() || !self.tls.is_empty()
    }
}

/// Emits the index keys of a VirtualService: the client labels in its matches.
pub fn source_labels(_: &ObjectKey, row: &VirtualService, emit: &mut dyn FnMut(SmolStr)) {
    let http = row.http.as_written().flat_map(|route| &route.r#match);
    let tls = row.tls.iter().flat_map(|route| &route.r#match);
    let tcp = row.tcp.iter().flat_map(|route| &route.r#match);
    let labels = http
        .map(|rule| &rule.source_labels)
        .chain(tls.map(|rule| &rule.source_labels))
        .chain(tcp.map(|rule| &rule.source_labels));
    let names: BTreeSet<&String> = labels.flat_map(|labels| labels.keys()).collect();
    for name in names {
        emit(SmolStr::new(name));
    }
}

/// Emits the namespaces that an object is exported to.
pub(super) fn export_namespaces(export_to: &ExportTo, emit: &mut dyn FnMut(ExportNamespace)) {
    match export_to {
        ExportTo::Public => emit(None),
        ExportTo::None => {}
        ExportTo::Namespaces(namespaces) => namespaces.iter().for_each(|namespace| emit(Some(namespace.clone()))),
    }
}

/// Returns the VirtualServices of a gateway (`namespace/name` or `mesh`) that a namespace sees. Order: private ones,
/// those exported to this namespace by another, public ones. Among the public ones, Gateway API routes of the own
/// namespace come first, so that consumers can override; oldest first within each.
pub fn for_gateway<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    gateway: &str,
) -> Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> {
    ordered(cx, mesh, namespace, gateway, Overriding::Public)
}

/// Returns the VirtualServices like [`for_gateway`], for sidecars: overriding routes come first among the private ones
/// as well.
pub(super) fn for_sidecars<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
) -> Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> {
    let overriding = if mesh.installation.features.pilot_unified_sidecar_scope {
        Overriding::All
    } else {
        Overriding::None
    };
    ordered(cx, mesh, namespace, MESH_GATEWAY, overriding)
}

/// Returns the VirtualServices of gateway `mesh` for one host that a namespace sees, in the order of [`for_gateway`]:
/// those of the namespaces for which `admits` is true. Those for a wildcard include those for names below it.
pub fn for_host<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    hostname: &Hostname,
    admits: impl Fn(&Namespace) -> bool,
) -> Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> {
    let overlaps = |summary: &VirtualServiceSummary| summary.hosts.iter().any(|one| host::overlaps(one, hostname));
    // A mesh may have many VirtualServices, and a tenant many wildcards: the hosts of the others are not compared.
    let admitted = |key: &ObjectKey| admits(&key.namespace);
    if host::is_wildcard(hostname) {
        let all = seen(cx, mesh, namespace, MESH_GATEWAY).filter(|(key, _)| admitted(key));
        let mut rows: Vec<_> = all.filter(|(_, summary)| overlaps(summary)).collect();
        sort(&mut rows, namespace, Overriding::Public);
        return rows;
    }
    let index = &mesh.virtual_services_by_mesh_host;
    let wildcards = index.get(cx, &None).filter(|(key, _)| admitted(key));
    let wildcards = wildcards.filter(|(_, summary)| overlaps(summary));
    let is_seen = |summary: &VirtualServiceSummary| {
        let mut found = false;
        summary.mesh_namespaces(&mut |audience| {
            found |= audience.is_none_or(|audience| audience == *namespace);
        });
        found
    };
    let exact = index.get(cx, &Some(hostname.clone())).filter(|(key, _)| admitted(key));
    let all: BTreeMap<_, _> = exact.chain(wildcards).collect();
    let mut rows: Vec<_> = all.into_iter().filter(|(_, summary)| is_seen(summary)).collect();
    sort(&mut rows, namespace, Overriding::Public);
    rows
}

/// Returns the VirtualServices that name a gateway (`namespace/name`), whatever their visibility.
pub fn naming_gateway<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    gateway: &str,
) -> impl Iterator<Item = &'a Shared<VirtualServiceSummary>> + use<'a> {
    let rows = mesh.virtual_services_by_gateway.get(cx, &(None, SmolStr::new(gateway)));
    rows.map(|(_, summary)| summary)
}

/// Returns the VirtualServices of gateway `mesh` that name exactly this host, whatever their visibility.
pub fn naming_host<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    hostname: &Hostname,
) -> impl Iterator<Item = &'a Shared<VirtualServiceSummary>> + use<'a> {
    let entry = (!host::is_wildcard(hostname)).then(|| hostname.clone());
    let rows = mesh.virtual_services_by_mesh_host.get(cx, &entry);
    let hostname = hostname.clone();
    rows.map(|(_, summary)| summary)
        .filter(move |summary| summary.hosts.contains(&hostname))
}

/// The classes of VirtualServices in which overriding routes come first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Overriding {
    None,
    Public,
    All,
}

fn ordered<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    gateway: &str,
    overriding: Overriding,
) -> Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> {
    let mut rows: Vec<_> = seen(cx, mesh, namespace, gateway).collect();
    sort(&mut rows, namespace, overriding);
    rows
}

/// Returns the VirtualServices of a gateway that a namespace sees.
fn seen<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    gateway: &str,
) -> impl Iterator<Item = (&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> + use<'a> {
    let index = &mesh.virtual_services_by_gateway;
    let of = |audience: ExportNamespace| index.get(cx, &(audience, SmolStr::new(gateway)));
    let is_mesh = gateway == MESH_GATEWAY;
    let exported = is_mesh.then(|| of(Some(namespace.clone())));
    let namespace = namespace.clone();
    let all = exported.into_iter().flatten().chain(of(None));
    all.filter(move |(_, summary)| is_mesh || summary.export_to.visible_to(&namespace))
}

fn sort<'a>(
    rows: &mut [(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)],
    namespace: &Namespace,
    overriding: Overriding,
) {
    // The rows lie apart in memory, so each is read once.
    rows.sort_by_cached_key(|(_, summary)| {
        let summary: &'a VirtualServiceSummary = summary;
        let own = summary.meta.namespace() == namespace;
        let (class, may_override) = match &summary.export_to {
            ExportTo::Namespaces(_) if own => (0, overriding == Overriding::All),
            ExportTo::Namespaces(_) => (1, false),
            _ => (2, overriding != Overriding::None),
        };
        let overrides = own && may_override && summary.semantics == Semantics::Gateway;
        (class, !overrides, summary.meta.age_order())
    });
}

/// Derives one VirtualService, or the row that refuses its surplus; delegates (without hosts) have no row.
pub fn virtual_service(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<VirtualService> {
    output::limited(cx, mesh, key)
}

fn resolved(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey, declared: &Declared) -> Option<VirtualService> {
    let raw = &*declared.object;
    if raw.spec.hosts.is_empty() {
        return None;
    }
    let semantics = semantics_of(&raw.meta);
    let mut spec = networking::VirtualService {
        hosts: raw.spec.hosts.clone(),
        gateways: raw.spec.gateways.clone(),
        tls: raw.spec.tls.clone(),
        tcp: raw.spec.tcp.clone(),
        ..Default::default()
    };
    if semantics != Semantics::Gateway {
        Resolver::new(&mesh.installation, &raw.meta).resolve(&mut spec);
    }
    if spec.gateways.is_empty() {
        spec.gateways.push(MESH_GATEWAY.to_owned());
    }
    let http = http_routes(cx, mesh, key, declared);
    Some(VirtualService {
        meta: raw.meta.clone(),
        hosts: spec.hosts.iter().map(Hostname::new).collect(),
        export_to: exported(cx, mesh, raw),
        semantics,
        destinations: destinations(http.destinations(&mesh.installation), &spec),
        gateways: spec.gateways.iter().map(SmolStr::new).collect(),
        http,
        tls: spec.tls,
        tcp: spec.tcp,
    })
}

/// Returns the HTTP routes, with those of delegates merged. Names in objects with the semantics of the Gateway API are
/// fully qualified.
fn http_routes(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey, declared: &Declared) -> HttpRoutes {
    if let Some(converted) = &declared.converted {
        return HttpRoutes::Resolved(converted.clone());
    }
    let routes = &declared.object.spec.http;
    let written = HttpRoutes::Written(declared.object.clone());
    let routes = match semantics_of(&declared.object.meta) {
        Semantics::Gateway => routes.clone(),
        Semantics::Istio if routes.iter().any(|route| route.delegate.is_some()) => {
            let own: Vec<_> = written.resolved(&mesh.installation).map(Cow::into_owned).collect();
            delegated(cx, mesh, key, &own)
        }
        Semantics::Istio | Semantics::Ingress => return written,
    };
    let routes = routes.into_iter().map(RequestRoute::of).map(Shared::new).collect();
    HttpRoutes::Resolved(Requests::new(routes).into())
}

/// Derives visibility and destinations of one VirtualService.
pub fn summary(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<VirtualServiceSummary> {
    let row = mesh.virtual_services.get(cx, key)?;
    Some(VirtualServiceSummary {
        meta: row.meta.clone(),
        export_to: row.export_to.clone(),
        hosts: row.hosts.clone(),
        gateways: row.gateways.clone(),
        semantics: row.semantics,
        destinations: row.destinations.clone(),
        only_own_clients: mesh.installation.features.pilot_strict_host_ownership
            && !row
                .hosts
                .iter()
                .all(|host| ownership::owns(cx, mesh, row.meta.namespace(), host)),
        by_source: row
            .http
            .as_written()
            .flat_map(|http| &http.r#match)
            .any(|condition| !condition.source_labels.is_empty() || !condition.source_namespace.is_empty()),
        by_gateway: row
            .http
            .as_written()
            .flat_map(|http| &http.r#match)
            .any(|condition| !condition.gateways.is_empty()),
        by_port: row.http.as_written().any(mentions_port),
        unconditional: row.http.as_written().any(|http| http.r#match.is_empty()),
        most_ports: output::most_ports(mesh, &row.http),
    })
}

/// Derives the number of matches of the TLS routes, each of which is a filter chain of a gateway; no row without any.
/// Scopes of sidecars depend on the summary, but not on this number.
pub fn tls_match_count(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<usize> {
    let row = mesh.virtual_services.get(cx, key)?;
    let count: usize = row.tls.iter().map(|route| route.r#match.len()).sum();
    (count > 0).then_some(count)
}

/// Returns true if the listener's port is matched or used: traces contain it for routes without a single cluster, and
/// redirects may keep it.
fn mentions_port(http: &networking::HttpRoute) -> bool {
    let is_plain = |text: &str| !text.contains('|');
    let leads_to_cluster = match http.route.as_slice() {
        [only] => only.destination.as_ref().is_some_and(|destination| {
            !destination.host.is_empty() && is_plain(&destination.host) && is_plain(&destination.subset)
        }),
        _ => false,
    };
    !leads_to_cluster
        || http.redirect.is_some()
        || http.direct_response.is_some()
        || http.r#match.iter().any(|condition| condition.port != 0)
}

fn exported(cx: &Cx, mesh: &MeshSnapshot, raw: &Config<networking::VirtualService>) -> ExportTo {
    let default = &mesh.mesh_config(cx).default_virtual_service_export_to;
    export::read(&raw.spec.export_to, default, raw.meta.namespace())
}

fn semantics_of(meta: &Meta) -> Semantics {
    match meta.annotations.get(SEMANTICS_ANNOTATION).map(SmolStr::as_str) {
        Some("ingress") => Semantics::Ingress,
        Some("gateway") => Semantics::Gateway,
        _ => Semantics::Istio,
    }
}

/// Returns the routes with those of visible delegates inserted; a route with a missing delegate is omitted.
fn delegated(
    cx: &Cx,
    mesh: &MeshSnapshot,
    root: &ObjectKey,
    routes: &[networking::HttpRoute],
) -> Vec<networking::HttpRoute> {
    let routes_of = |raw: &Config<networking::VirtualService>| -> Vec<networking::HttpRoute> {
        let resolver = Resolver::new(&mesh.installation, &raw.meta);
        raw.spec.http.iter().map(|route| resolver.http(route)).collect()
    };
    let delegates = delegates(cx, mesh, root, routes).into_iter();
    let delegates: BTreeMap<_, _> = delegates.map(|(key, raw)| (key, routes_of(raw))).collect();
    let mut merged = Vec::new();
    for route in routes {
        let Some(key) = delegate_key(root, route) else {
            merged.push(route.clone());
            continue;
        };
        if let Some(own) = delegates.get(&key) {
            merged.extend(delegate::merged(route, own));
        }
    }
    merged
}

/// Returns the key of the delegate of a route.
fn delegate_key(root: &ObjectKey, route: &networking::HttpRoute) -> Option<ObjectKey> {
    let delegate = route.delegate.as_ref()?;
    let namespace = match delegate.namespace.as_str() {
        "" => root.namespace.clone(),
        namespace => Namespace::new(namespace),
    };
    Some(ObjectKey::new(&root.cluster, namespace, delegate.name.as_str()))
}

/// Returns the delegates of some routes that exist and that the root may use. Many routes may have the same one.
fn delegates<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    root: &ObjectKey,
    routes: &[networking::HttpRoute],
) -> BTreeMap<ObjectKey, &'a Shared<Config<networking::VirtualService>>> {
    let keys: BTreeSet<ObjectKey> = routes.iter().filter_map(|route| delegate_key(root, route)).collect();
    let usable = keys.into_iter().filter_map(|key| {
        let raw = mesh.raw_virtual_services.get(cx, &key)?;
        let may_use = raw.spec.hosts.is_empty() && exported(cx, mesh, raw).visible_to(&root.namespace);
        may_use.then_some((key, raw))
    });
    usable.collect()
}

/// Expands names, as seen from the namespace of an object.
struct Resolver<'a> {
    installation: &'a Installation,
    namespace: &'a Namespace,
}

impl<'a> Resolver<'a> {
    fn new(installation: &'a Installation, meta: &'a Meta) -> Self {
        Self {
            installation,
            namespace: meta.namespace(),
        }
    }

    /// Returns an HTTP route with fully qualified names.
    fn http(&self, route: &networking::HttpRoute) -> networking::HttpRoute {
        let mut route = route.clone();
        for condition in &mut route.r#match {
            self.gateways(&mut condition.gateways);
        }
        let mirrors = route
            .mirrors
            .iter_mut()
            .filter_map(|mirror| mirror.destination.as_mut());
        let weighted = route.route.iter_mut().filter_map(|route| route.destination.as_mut());
        weighted
            .chain(route.mirror.as_deref_mut())
            .chain(mirrors)
            .for_each(|destination| self.host(&mut destination.host));
        route
    }

    /// Returns a destination with a fully qualified host.
    fn destination(&self, destination: &networking::Destination) -> networking::Destination {
        let mut destination = destination.clone();
        self.host(&mut destination.host);
        destination
    }

    /// Resolves all names but those in HTTP routes.
    fn resolve(&self, spec: &mut networking::VirtualService) {
        spec.hosts.iter_mut().for_each(|host| self.host(host));
        self.gateways(&mut spec.gateways);
        for route in &mut spec.tcp {
            for condition in &mut route.r#match {
                self.gateways(&mut condition.gateways);
            }
            self.destinations(&mut route.route);
        }
        for route in &mut spec.tls {
            for condition in &mut route.r#match {
                self.gateways(&mut condition.gateways);
            }
            self.destinations(&mut route.route);
        }
    }

    fn destinations(&self, routes: &mut [networking::RouteDestination]) {
        let destinations = routes.iter_mut().filter_map(|route| route.destination.as_mut());
        destinations.for_each(|destination| self.host(&mut destination.host));
    }

    fn host(&self, host: &mut String) {
        *host = resolve_host(self.installation, host, self.namespace).to_string();
    }

    fn gateways(&self, gateways: &mut [String]) {
        for gateway in gateways {
            if gateway != MESH_GATEWAY {
                *gateway = resolve_gateway(gateway, self.namespace);
            }
        }
    }
}

/// Returns `namespace/name` of a gateway: a bare name is in the own namespace, a host name (an old form) refers to the
/// gateway's service.
pub fn resolve_gateway(gateway: &str, namespace: &Namespace) -> String {
    if let Some((of, name)) = gateway.split_once('/') {
        let of = if of == "." { namespace } else { of };
        return format!("{of}/{name}");
    }
    let mut labels = gateway.split('.');
    match (labels.next(), labels.next()) {
        (Some(name), Some(of)) => format!("{of}/{name}"),
        _ => format!("{namespace}/{gateway}"),
    }
}

/// Returns the destinations of all routes, given those of HTTP routes.
fn destinations(http: Shared<[Destination]>, spec: &networking::VirtualService) -> Shared<[Destination]> {
    let tcp = spec.tcp.iter().flat_map(|route| &route.route);
    let tls = spec.tls.iter().flat_map(|route| &route.route);
    let mut streams = tcp.chain(tls).filter_map(|route| route.destination.as_ref()).peekable();
    if streams.peek().is_none() {
        return http;
    }
    let mut all: BTreeSet<Destination> = http.iter().cloned().collect();
    all.extend(streams.map(|destination| Destination::new(destination, &[])));
    all.into_iter().collect::<Vec<_>>().into()
}
