//! Routes with their parents, and the VirtualServices that they become part of.

use smol_str::SmolStr;

use super::{
    CONVERTED, Mistake,
    backend::{Backends, Side},
    grpc, http, inference_pool, is_converted,
    parent::{self, Child, Parent, Target},
};
use crate::{
    api::{Config, Kind, Meta, gateway_api::common::ParentReference},
    base::{
        Namespace, ObjectKey, Shared,
        host::{self, HostsByEnd},
    },
    model::{
        MeshSnapshot,
        inputs::InputWriters,
        output_limit::{self, Demand, DemandKey, Limits, SMALL},
        virtual_service::{RequestRoute, Requests},
    },
    proto::istio::networking::v1alpha3::{
        HttpMatchRequest, HttpRoute, L4MatchAttributes, TcpRoute, TlsMatchAttributes, TlsRoute, string_match::MatchType,
    },
    table::{Cx, TableWriter},
};

/// Key of an [`AttachedRoute`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttachedRouteKey {
    /// Kind of the route.
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

/// Name of a VirtualService made from routes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConvertedName {
    /// Namespace of the only route; empty if several may be merged.
    pub namespace: Namespace,
    /// Name.
    pub name: SmolStr,
}

/// A route with its parents.
#[derive(Clone, Debug, PartialEq)]
pub struct AttachedRoute {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// Parents, in the order of the references' texts.
    pub parents: Vec<Parent>,
    /// Mistake in the rules as services of the mesh use them.
    pub mesh_mistake: Option<Mistake>,
    /// Mistake in the rules as gateways use them.
    pub gateway_mistake: Option<Mistake>,
    /// Contributions to VirtualServices, sorted by name.
    pub contributions: Vec<Contribution>,
    /// InferencePools that the rules of an HTTPRoute refer to, sorted.
    pub pools: Vec<ObjectKey>,
}

/// Rules of a route for one host of one parent.
#[derive(Clone, Debug, PartialEq)]
pub struct Contribution {
    /// The VirtualService.
    pub name: ConvertedName,
    /// The host.
    pub host: String,
    /// The Gateway, or `mesh`.
    pub gateway: SmolStr,
    /// The position of the parent in [`AttachedRoute::parents`].
    pub parent: usize,
    /// The rules.
    pub rules: Rules,
}

impl Contribution {
    /// Returns the rules for requests.
    pub fn requests(&self) -> Option<&Shared<Requests>> {
        match &self.rules {
            Rules::Http(rules) => Some(rules),
            Rules::Tls(_) | Rules::Tcp(_) => None,
        }
    }
}

/// Converted rules.
#[derive(Clone, Debug, PartialEq)]
pub enum Rules {
    /// Of HTTPRoutes and GRPCRoutes, in order of precedence.
    Http(Shared<Requests>),
    /// Of TLSRoutes.
    Tls(Vec<TlsRoute>),
    /// Of TCPRoutes.
    Tcp(Vec<TcpRoute>),
}

impl AttachedRoute {
    /// Returns the contributions to a VirtualService. A route may have thousands, so they are not searched through.
    pub fn contributions_to(&self, name: &ConvertedName) -> &[Contribution] {
        let start = self
            .contributions
            .partition_point(|contribution| contribution.name < *name);
        let end = self
            .contributions
            .partition_point(|contribution| contribution.name <= *name);
        &self.contributions[start..end]
    }
}

/// Returns the changed routes.
pub fn candidates(inputs: &InputWriters) -> Vec<AttachedRouteKey> {
    let key = |kind, object: &ObjectKey| AttachedRouteKey {
        kind,
        object: object.clone(),
    };
    let http = inputs.http_routes.changes().iter();
    let grpc = inputs.grpc_routes.changes().iter();
    let tls = inputs.tls_routes.changes().iter();
    let tcp = inputs.tcp_routes.changes().iter();
    let mut keys: Vec<_> = http.map(|(object, ..)| key(Kind::HttpRoute, object)).collect();
    keys.extend(grpc.map(|(object, ..)| key(Kind::GrpcRoute, object)));
    keys.extend(tls.map(|(object, ..)| key(Kind::TlsRoute, object)));
    keys.extend(tcp.map(|(object, ..)| key(Kind::TcpRoute, object)));
    keys
}

/// Emits the VirtualServices that a route contributes to.
pub fn converted_names(_: &AttachedRouteKey, row: &AttachedRoute, emit: &mut dyn FnMut(ConvertedName)) {
    row.contributions
        .iter()
        .for_each(|contribution| emit(contribution.name.clone()));
}

/// Emits the InferencePools that a route refers to.
pub fn pools(_: &AttachedRouteKey, row: &AttachedRoute, emit: &mut dyn FnMut(ObjectKey)) {
    row.pools.iter().for_each(|pool| emit(pool.clone()));
}

/// Derives a route with its parents.
pub fn attached(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> Option<AttachedRoute> {
    if !is_converted_route(mesh, key.kind, &key.object) {
        return None;
    }
    match key.kind {
        Kind::HttpRoute => http_route(cx, mesh, key),
        Kind::GrpcRoute => grpc_route(cx, mesh, key),
        Kind::TlsRoute => tls_route(cx, mesh, key),
        Kind::TcpRoute => tcp_route(cx, mesh, key),
        _ => None,
    }
}

/// Returns true if a route is converted.
fn is_converted_route(mesh: &MeshSnapshot, kind: Kind, object: &ObjectKey) -> bool {
    let is_enabled = kind != Kind::TcpRoute || mesh.installation.features.pilot_enable_alpha_gateway_api;
    is_enabled && is_converted(mesh, object)
}

/// Returns true if a route makes few contributions, as far as it alone shows: each of its references is to a Service or
/// names a listener. Others may be to a Gateway with many listeners, or to a ServiceEntry with many hosts.
fn is_small(hostnames: &[SmolStr], references: &[ParentReference]) -> bool {
    let names_one = |reference: &ParentReference| match reference.kind.as_deref() {
        Some("Service") => true,
        Some("ServiceEntry") => false,
        _ => reference
            .section_name
            .as_deref()
            .is_some_and(|section| !section.is_empty()),
    };
    let most = references.len() * hostnames.len().max(1);
    most as u64 <= SMALL && references.iter().all(names_one)
}

/// Returns the changed routes that may make many contributions, or did so before.
pub fn demand_candidates(inputs: &InputWriters) -> Vec<DemandKey> {
    let http = large_routes(Kind::HttpRoute, &inputs.http_routes, |route| {
        is_small(&route.hostnames, &route.parent_refs)
    });
    let grpc = large_routes(Kind::GrpcRoute, &inputs.grpc_routes, |route| {
        is_small(&route.hostnames, &route.parent_refs)
    });
    let tls = large_routes(Kind::TlsRoute, &inputs.tls_routes, |route| {
        is_small(&route.hostnames, &route.parent_refs)
    });
    let tcp = large_routes(Kind::TcpRoute, &inputs.tcp_routes, |route| {
        is_small(&[], &route.parent_refs)
    });
    [http, grpc, tls, tcp].concat()
}

/// Returns the changed routes of a kind of which a version is not small.
fn large_routes<T: PartialEq>(
    kind: Kind,
    routes: &TableWriter<ObjectKey, Config<T>>,
    is_small: impl Fn(&T) -> bool,
) -> Vec<DemandKey> {
    let changed = routes.changes().iter().filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|route| !is_small(&route.spec))
    });
    let keys = changed.map(|(object, ..)| DemandKey {
        kind,
        object: object.clone(),
    });
    keys.collect()
}

/// Derives the number of contributions of a route, unless it is small: one for each host of each listener or service
/// that it attaches to. Each has a copy of the rules for connections, which count, and shares those for requests.
pub fn demand(cx: &Cx, mesh: &MeshSnapshot, key: &DemandKey) -> Option<Demand> {
    let (kind, object) = (key.kind, &key.object);
    if !is_converted_route(mesh, kind, object) {
        return None;
    }
    let (meta, hostnames, references, copies) = match kind {
        Kind::HttpRoute => {
            let route = mesh.http_routes.get(cx, object)?;
            (&route.meta, &route.spec.hostnames[..], &route.spec.parent_refs, 1)
        }
        Kind::GrpcRoute => {
            let route = mesh.grpc_routes.get(cx, object)?;
            (&route.meta, &route.spec.hostnames[..], &route.spec.parent_refs, 1)
        }
        Kind::TlsRoute => {
            let route = mesh.tls_routes.get(cx, object)?;
            let spec = &route.spec;
            (&route.meta, &spec.hostnames[..], &spec.parent_refs, spec.rules.len())
        }
        _ => {
            let route = mesh.tcp_routes.get(cx, object)?;
            (&route.meta, &[][..], &route.spec.parent_refs, route.spec.rules.len())
        }
    };
    if is_small(hostnames, references) {
        return None;
    }
    let child = Child {
        kind,
        meta,
        hostnames,
        contributes: false,
    };
    let (parents, written) = (parent::resolve(cx, mesh, &child, references), written_hosts(hostnames));
    let hosts = |parent: &Parent| match &parent.target {
        Target::Service { count, .. } => *count,
        Target::Listener { .. } if kind == Kind::TcpRoute => 1,
        Target::Listener { hostname, .. } if kind == Kind::TlsRoute && hostname.is_empty() => written.len(),
        Target::Listener { hostname, .. } if kind == Kind::TlsRoute => intersection(&written, hostname).len(),
        Target::Listener { .. } => {
            let served = written.iter().filter(|host| parent.target.is_most_specific_for(host));
            served.count()
        }
    };
    let hosts: usize = attached_parents(&parents)
        .into_iter()
        .map(|(_, parent)| hosts(parent))
        .sum();
    let declared = (hosts * copies) as u64;
    let applies = declared <= Limits::of(mesh, kind).object;
    (declared > SMALL).then(|| Demand {
        meta: meta.clone(),
        declared,
        applied: if applies { declared } else { 0 },
        parts: 1,
        kept: usize::from(applies),
        shares: Default::default(),
    })
}

fn http_route(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> Option<AttachedRoute> {
    let route = mesh.http_routes.get(cx, &key.object)?;
    let (spec, meta) = (&route.spec, &route.meta);
    let conversion = Conversion { cx, mesh, key, meta };
    let converted = conversion.requests(&spec.hostnames, &spec.parent_refs, |backends| {
        each_match(
            &spec.rules,
            |rule| &rule.matches,
            |position, rule, matched| http::rule(backends, position, rule, matched),
        )
    });
    Some(AttachedRoute {
        pools: inference_pool::of_route(mesh, &key.object, spec),
        ..converted
    })
}

fn grpc_route(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> Option<AttachedRoute> {
    let route = mesh.grpc_routes.get(cx, &key.object)?;
    let (spec, meta) = (&route.spec, &route.meta);
    let conversion = Conversion { cx, mesh, key, meta };
    let converted = conversion.requests(&spec.hostnames, &spec.parent_refs, |backends| {
        each_match(
            &spec.rules,
            |rule| &rule.matches,
            |position, rule, matched| grpc::rule(backends, position, rule, matched),
        )
    });
    Some(converted)
}

fn tls_route(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> Option<AttachedRoute> {
    let route = mesh.tls_routes.get(cx, &key.object)?;
    let (spec, meta) = (&route.spec, &route.meta);
    let hosts = written_hosts(&spec.hostnames);
    let conversion = Conversion { cx, mesh, key, meta };
    let converted = conversion.rules(&spec.hostnames, &spec.parent_refs, |backends| {
        collected(spec.rules.iter().map(|rule| {
            let weighted = backends.connections(&rule.backend_refs)?;
            let matched = TlsMatchAttributes {
                sni_hosts: hosts.clone(),
                ..Default::default()
            };
            let route = TlsRoute {
                r#match: vec![matched],
                route: weighted.backends,
            };
            Ok((route, weighted.mistake))
        }))
    });
    Some(conversion.attached(converted, |parent, rules| tls_contributions(parent, rules, &hosts)))
}

fn tcp_route(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> Option<AttachedRoute> {
    let route = mesh.tcp_routes.get(cx, &key.object)?;
    let (spec, meta) = (&route.spec, &route.meta);
    let conversion = Conversion { cx, mesh, key, meta };
    let converted = conversion.rules(&[], &spec.parent_refs, |backends| {
        collected(spec.rules.iter().map(|rule| {
            let weighted = backends.connections(&rule.backend_refs)?;
            let route = TcpRoute {
                r#match: Vec::new(),
                route: weighted.backends,
            };
            Ok((route, weighted.mistake))
        }))
    });
    Some(conversion.attached(converted, tcp_contributions))
}

/// Result of converting all rules: without a mistake, or with the last one; without rules if one is severe.
type Rows<T> = (Vec<T>, Option<Mistake>);

/// Rules for the two kinds of parents.
struct BothSides<T> {
    parents: Vec<Parent>,
    /// False if the contributions of the route would exceed a limit.
    contributes: bool,
    mesh: Rows<T>,
    gateway: Rows<T>,
}

struct Conversion<'a> {
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    key: &'a AttachedRouteKey,
    meta: &'a Shared<Meta>,
}

impl Conversion<'_> {
    /// Resolves the parents, and converts the rules for each kind of parents.
    fn rules<T>(
        &self,
        hostnames: &[SmolStr],
        references: &[ParentReference],
        convert: impl Fn(&Backends) -> Rows<T>,
    ) -> BothSides<T> {
        let kept = || output_limit::kept(self.cx, self.mesh, self.key.kind, &self.key.object);
        let contributes = is_small(hostnames, references) || kept().is_none();
        let child = Child {
            kind: self.key.kind,
            meta: self.meta,
            hostnames,
            contributes,
        };
        let parents = parent::resolve(self.cx, self.mesh, &child, references);
        let is_mesh = |parent: &Parent| matches!(parent.target, Target::Service { .. });
        let rows = |side, is_needed: bool| {
            if !is_needed {
                return (Vec::new(), None);
            }
            convert(&Backends {
                cx: self.cx,
                mesh: self.mesh,
                kind: self.key.kind,
                meta: self.meta,
                side,
            })
        };
        let (for_mesh, for_gateway) = (
            parents.iter().any(is_mesh),
            parents.iter().any(|parent| !is_mesh(parent)),
        );
        BothSides {
            mesh: rows(Side::Mesh, for_mesh),
            gateway: rows(Side::Gateway, for_gateway),
            parents,
            contributes,
        }
    }

    /// Returns the route with what it contributes for each parent that it attaches to.
    fn attached<T>(
        &self,
        both: BothSides<T>,
        contribute: impl Fn(&Parent, &[T]) -> Vec<(String, Rules)>,
    ) -> AttachedRoute {
        let mut contributions = Vec::new();
        for (position, parent) in both.contributed() {
            let (rules, _) = both.side_of(parent);
            for (host, rules) in contribute(parent, rules) {
                contributions.push(Contribution {
                    name: self.own_name(&rules, contributions.len()),
                    host,
                    gateway: parent.target.gateway().into(),
                    parent: position,
                    rules,
                });
            }
        }
        self.contributing(both, contributions)
    }

    /// Returns the route with these contributions.
    fn contributing<T>(&self, both: BothSides<T>, mut contributions: Vec<Contribution>) -> AttachedRoute {
        contributions.sort_by(|a, b| a.name.cmp(&b.name));
        AttachedRoute {
            meta: self.meta.clone(),
            parents: both.parents,
            mesh_mistake: both.mesh.1,
            gateway_mistake: both.gateway.1,
            contributions,
            pools: Vec::new(),
        }
    }

    fn own_name(&self, rules: &Rules, count: usize) -> ConvertedName {
        let protocol = if matches!(rules, Rules::Tls(_)) { "tls" } else { "tcp" };
        ConvertedName {
            namespace: self.meta.namespace().clone(),
            name: format!("{}~{protocol}~{count}~{CONVERTED}", self.meta.name()).into(),
        }
    }

    /// Converts a route for requests.
    fn requests(
        &self,
        hostnames: &[SmolStr],
        references: &[ParentReference],
        convert: impl Fn(&Backends) -> Rows<HttpRoute>,
    ) -> AttachedRoute {
        let mut both = self.rules(hostnames, references, convert);
        let written = written_hosts(hostnames);
        // Parity (pilot/pkg/config/kube/gateway/conversion.go, `convertGRPCRoute`): only HTTPRoutes ask pickers, which
        // may read bodies as JSON and refuse others.
        let asks_picker = self.key.kind == Kind::HttpRoute;
        let for_mesh = ordered(std::mem::take(&mut both.mesh.0), asks_picker);
        let for_gateways = ordered(std::mem::take(&mut both.gateway.0), asks_picker);
        let mut contributions = Vec::new();
        for (position, parent) in both.contributed() {
            let (scope, rules, hosts) = match &parent.target {
                Target::Service { hosts, .. } => {
                    let port = parent.reference.port;
                    let rules = port.map_or_else(|| for_mesh.clone(), |port| on_port(&for_mesh, port));
                    let own = self.meta.namespace();
                    (
                        port.map_or_else(|| own.to_string(), |port| format!("{own}~{port}")),
                        rules,
                        hosts,
                    )
                }
                Target::Listener { gateway, .. } => (gateway.replace('/', "~"), for_gateways.clone(), &written),
            };
            if rules.routes.is_empty() {
                continue;
            }
            for host in hosts.iter().filter(|host| parent.target.is_most_specific_for(host)) {
                contributions.push(Contribution {
                    name: ConvertedName {
                        namespace: Namespace::default(),
                        name: [&scope, "~", host].concat().into(),
                    },
                    host: host.clone(),
                    gateway: parent.target.gateway().into(),
                    parent: position,
                    rules: Rules::Http(rules.clone()),
                });
            }
        }
        self.contributing(both, contributions)
    }
}

impl<T> BothSides<T> {
    /// Returns the parents that the route contributes to, with their positions, in order of their Gateways.
    fn contributed(&self) -> Vec<(usize, &Parent)> {
        if self.contributes {
            attached_parents(&self.parents)
        } else {
            Vec::new()
        }
    }

    fn side_of(&self, parent: &Parent) -> (&[T], Option<&Mistake>) {
        let (rules, mistake) = match parent.target {
            Target::Service { .. } => &self.mesh,
            Target::Listener { .. } => &self.gateway,
        };
        (rules, mistake.as_ref())
    }
}

/// Returns the parents that a route attaches to, with their positions, in order of their Gateways.
fn attached_parents(parents: &[Parent]) -> Vec<(usize, &Parent)> {
    let parents = parents.iter().enumerate();
    let mut attached: Vec<_> = parents.filter(|(_, parent)| parent.denied.is_none()).collect();
    attached.sort_by(|(_, a), (_, b)| a.target.gateway().cmp(b.target.gateway()));
    attached
}

fn written_hosts(hostnames: &[SmolStr]) -> Vec<String> {
    if hostnames.is_empty() {
        return vec!["*".to_owned()];
    }
    hostnames.iter().map(ToString::to_string).collect()
}

/// Converts each match of each rule. A severe mistake leaves no rule.
fn each_match<R, M>(
    rules: &[R],
    matches: impl Fn(&R) -> &Vec<M>,
    convert: impl Fn(usize, &R, Option<&M>) -> Result<http::Converted<HttpRoute>, Mistake>,
) -> Rows<HttpRoute> {
    let converted = rules.iter().enumerate().flat_map(|(position, rule)| {
        let all = matches(rule);
        let none = all.is_empty().then_some(None);
        let convert = &convert;
        let each = all.iter().map(Some).chain(none);
        each.map(move |matched| convert(position, rule, matched))
    });
    collected(converted)
}

/// Collects converted rules with the last mistake. A severe mistake leaves no rule.
fn collected<T>(converted: impl Iterator<Item = Result<http::Converted<T>, Mistake>>) -> Rows<T> {
    let (mut rules, mut last) = (Vec::new(), None);
    for result in converted {
        match result {
            Ok((rule, mistake)) => {
                rules.push(rule);
                last = mistake.or(last);
            }
            Err(severe) => return (Vec::new(), Some(severe)),
        }
    }
    (rules, last)
}

/// Returns rules in order of precedence.
fn ordered(rules: Vec<HttpRoute>, asks_picker: bool) -> Shared<Requests> {
    let rules = rules.into_iter().map(|http| RequestRoute { http, asks_picker });
    let mut rules: Vec<Shared<RequestRoute>> = rules.map(Shared::new).collect();
    sort_http(&mut rules);
    Requests::new(rules).into()
}

/// Sorts rules by the precedence of the API: exact paths, then long ones, then more conditions.
pub fn sort_http(rules: &mut [Shared<RequestRoute>]) {
    rules.sort_by_cached_key(|rule| {
        let matched = rule.http.r#match.first();
        std::cmp::Reverse((
            matched.is_some(),
            matched.map(path_rank).unwrap_or_default(),
            matched.is_some_and(|request| request.method.is_some()),
            matched
                .map(|request| (request.headers.len(), request.query_params.len()))
                .unwrap_or_default(),
        ))
    });
}

/// Returns the rank of the path's type, and its length.
fn path_rank(matched: &HttpMatchRequest) -> (u8, usize) {
    match matched.uri.as_ref().and_then(|uri| uri.match_type.as_ref()) {
        Some(MatchType::Exact(path)) => (3, path.len()),
        Some(MatchType::Prefix(path)) => (2, path.len()),
        Some(MatchType::Regex(path)) => (1, path.len()),
        None => (0, 0),
    }
}

/// Restricts rules to a port.
fn on_port(rules: &Requests, port: u16) -> Shared<Requests> {
    let rules = rules.routes.iter().map(|rule| {
        let mut rule = RequestRoute::clone(rule);
        let matches = &mut rule.http.r#match;
        if matches.is_empty() {
            matches.push(HttpMatchRequest::default());
        }
        for matched in matches {
            matched.port = port.into();
        }
        Shared::new(rule)
    });
    Requests::new(rules.collect()).into()
}

fn tcp_contributions(parent: &Parent, rules: &[TcpRoute]) -> Vec<(String, Rules)> {
    let (hosts, port) = match &parent.target {
        Target::Service { hosts, .. } => (hosts.clone(), parent.reference.port),
        Target::Listener { .. } => (vec!["*".to_owned()], None),
    };
    let mut rules = rules.to_vec();
    if let Some(port) = port {
        for rule in &mut rules {
            rule.r#match.push(L4MatchAttributes {
                port: port.into(),
                ..Default::default()
            });
        }
    }
    let each = hosts.into_iter().map(|host| (host, Rules::Tcp(rules.clone())));
    each.collect()
}

fn tls_contributions(parent: &Parent, rules: &[TlsRoute], written: &[String]) -> Vec<(String, Rules)> {
    match &parent.target {
        Target::Service { hosts, .. } => {
            let rules = for_service(rules, hosts, parent.reference.port);
            let rules = for_hosts(&rules, hosts).into_iter().map(Rules::Tls);
            hosts.iter().cloned().zip(rules).collect()
        }
        Target::Listener { hostname, .. } if hostname.is_empty() => {
            let each = written.iter().map(|host| (host.clone(), Rules::Tls(rules.to_vec())));
            each.collect()
        }
        Target::Listener { hostname, .. } => {
            let mut rules = rules.to_vec();
            for matched in rules.iter_mut().flat_map(|rule| &mut rule.r#match) {
                matched.sni_hosts = intersection(&matched.sni_hosts, hostname);
            }
            rules.retain(|rule| rule.r#match.iter().any(|matched| !matched.sni_hosts.is_empty()));
            let hosts = intersection(written, hostname).into_iter();
            hosts.map(|host| (host, Rules::Tls(rules.clone()))).collect()
        }
    }
}

/// Returns the rules for a service: without hosts of their own, those of the service, and only on a port.
fn for_service(rules: &[TlsRoute], hosts: &[String], port: Option<u16>) -> Vec<TlsRoute> {
    let mut rules = rules.to_vec();
    for matched in rules.iter_mut().flat_map(|rule| &mut rule.r#match) {
        if matched.sni_hosts == ["*"] {
            matched.sni_hosts = hosts.to_vec();
        }
        matched.port = port.unwrap_or_default().into();
    }
    rules
}

/// Returns for each host of a service the rules with the server names that belong to it. A ServiceEntry may have ten
/// thousand hosts, which are the names of its rules by default, so they are not compared with each other.
fn for_hosts(rules: &[TlsRoute], hosts: &[String]) -> Vec<Vec<TlsRoute>> {
    let matches = rules.iter().flat_map(|rule| &rule.r#match);
    let names: Vec<&[String]> = matches.map(|matched| matched.sni_hosts.as_slice()).collect();
    let index = |names: &&[String]| {
        let positions = names.iter().enumerate();
        HostsByEnd::of(positions.map(|(position, name)| (name.as_str(), position)))
    };
    let indexes: Vec<HostsByEnd<Vec<usize>>> = names.iter().map(index).collect();
    let mut unnamed = rules.to_vec();
    for matched in unnamed.iter_mut().flat_map(|rule| &mut rule.r#match) {
        if matched.sni_hosts.len() > 1 {
            matched.sni_hosts.clear();
        }
    }
    let for_host = |service_host: &String| {
        let mut rules = unnamed.clone();
        let matches = rules.iter_mut().flat_map(|rule| &mut rule.r#match);
        for (matched, (names, index)) in matches.zip(names.iter().zip(&indexes)) {
            if names.len() > 1 {
                let own = index.overlapping(service_host).into_iter();
                matched.sni_hosts = own.map(|position| names[position].clone()).collect();
            }
        }
        rules
    };
    hosts.iter().map(for_host).collect()
}

/// Returns the names that both a list and a host cover, each once.
fn intersection(names: &[String], listener: &str) -> Vec<String> {
    let mut common: Vec<String> = Vec::new();
    for name in names {
        let covered = if host::subset_of(name, listener) {
            name.as_str()
        } else if host::subset_of(listener, name) {
            listener
        } else {
            continue;
        };
        if !common.iter().any(|known| known == covered) {
            common.push(covered.to_owned());
        }
    }
    common
}

#[cfg(test)]
mod tests {
    use super::{for_hosts, intersection};
    use crate::proto::istio::networking::v1alpha3::{TlsMatchAttributes, TlsRoute};

    #[test]
    fn r21_server_names_are_looked_up_for_each_host_of_a_service() {
        let rule = |names: &[&str]| TlsRoute {
            r#match: vec![TlsMatchAttributes {
                sni_hosts: names.iter().map(|name| (*name).to_owned()).collect(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let several = rule(&["b.test", "*.a.test", "x.a.test", "c.test"]);
        let rules = [several, rule(&["other.test"])];
        let hosts = ["x.a.test", "b.test", "*.test", "none.example"].map(str::to_owned);
        let found = for_hosts(&rules, &hosts);
        let names = |rules: &[TlsRoute]| {
            let matches = rules.iter().flat_map(|rule| &rule.r#match);
            matches.map(|matched| matched.sni_hosts.join(" ")).collect::<Vec<_>>()
        };
        let found: Vec<Vec<String>> = found.iter().map(|rules| names(rules)).collect();
        // The only name of a rule stays.
        assert_eq!(found[0], ["*.a.test x.a.test", "other.test"]);
        assert_eq!(found[1], ["b.test", "other.test"]);
        assert_eq!(found[2], ["b.test *.a.test x.a.test c.test", "other.test"]);
        assert_eq!(found[3], ["", "other.test"]);
        // Compared with each other, these would take minutes.
        let many: Vec<String> = (0..20_000).map(|number| format!("h{number}.test")).collect();
        let all = rule(&many.iter().map(String::as_str).collect::<Vec<_>>());
        let found = for_hosts(&[all], &many);
        let mut pairs = found.iter().zip(&many);
        assert!(pairs.all(|(rules, host)| names(rules) == [host.as_str()]));
    }

    #[test]
    fn names_that_a_host_shares_count_once() {
        let names = ["*.com", "*.example.com", "other.test"].map(str::to_owned);
        assert_eq!(intersection(&names, "a.example.com"), ["a.example.com"]);
        assert_eq!(intersection(&names, "*.example.com"), ["*.example.com"]);
        assert_eq!(intersection(&names, "*.com"), ["*.com", "*.example.com"]);
    }
}
