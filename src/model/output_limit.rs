//! Limits of what the objects of a tenant may produce. One object with thousands of hosts, matches, subsets or
//! endpoints can cost all proxies that see it more than the rest of the mesh.
//!
//! An object beyond its limit applies in part, and the objects of a namespace apply in order of age until the limit of
//! the namespace is reached. Small objects always apply and count nothing. The decision depends on the objects alone,
//! so every replica takes the same one. Where the services that a proxy sees multiply TCP and TLS routes, these are
//! counted again for the proxy ([`RouteBudget`]). HTTP routes, which services multiply as well, are not: wildcards with
//! few routes would exceed the limit in large meshes.
//!
//! A cut never opens anything: requests and connections that the surplus of a VirtualService would route are refused
//! instead of falling through to other routes, and clusters of surplus subsets do not exist. There are four
//! exceptions. Surplus hosts of a ServiceEntry are no services, so the outbound traffic policy decides about them as
//! about every unknown host. Where routes of several namespaces are merged for a host of a Gateway API listener, those
//! of a namespace with a surplus are left out, so that a tenant cannot take the host from the others. Where services
//! without an address share a listener of a sidecar, surplus TLS routes are refused for the names of these services
//! only. A route of the Gateway API with too many hosts, listeners and services does not apply, as one with a mistake:
//! rows that refuse its requests would be as many.

use std::collections::{BTreeMap, BTreeSet};

use super::MeshSnapshot;
use crate::{
    api::{Diagnostic, Kind, Meta, Severity, field::FieldError},
    base::{Namespace, ObjectKey, Shared},
    table::Cx,
};

/// The number of routes, subsets or endpoints up to which an object always applies.
pub const SMALL: u64 = 20;
/// The code of diagnostics and notes.
pub const CODE: &str = "OutputLimitExceeded";
/// The end of the name of the row that refuses the surplus of a VirtualService. No object has such a name.
const SURPLUS: &str = "~surplus";

/// An object whose output is limited: a DestinationRule, a ServiceEntry, a VirtualService, or a route of the Gateway
/// API.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DemandKey {
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

/// The output of an object that is not small.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The metadata, for the order of age.
    pub meta: Shared<Meta>,
    /// The number of routes, subsets or endpoints that it declares.
    pub declared: u64,
    /// The number of these that apply by its own limit.
    pub applied: u64,
    /// The number of hosts or subsets that it declares.
    pub parts: usize,
    /// The number of these, from the first, that apply by its own limit.
    pub kept: usize,
    /// The number of routes of each namespace, if routes of several are merged into the VirtualService; empty for
    /// every other object. The limits then apply to each of these as to an object of that namespace.
    pub shares: BTreeMap<Namespace, u64>,
}

impl Demand {
    /// Returns what the object uses of the limit of a namespace.
    fn used(&self, namespace: &Namespace, limits: Limits) -> u64 {
        match self.shares.get(namespace) {
            None => self.applied,
            Some(share) if *share <= SMALL || *share > limits.object => 0,
            Some(share) => *share,
        }
    }
}

/// The objects of a namespace that do not apply because others have used up the limit of the namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct RefusedObjects(BTreeSet<ObjectKey>);

/// The limits of a kind; no limit is `u64::MAX`.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limit of one object.
    pub object: u64,
    /// The limit of the objects of one namespace together.
    pub namespace: u64,
}

impl Limits {
    /// Returns the limits of a kind.
    pub fn of(mesh: &MeshSnapshot, kind: Kind) -> Self {
        let features = &mesh.installation.features;
        let (object, namespace) = match kind {
            Kind::DestinationRule => (
                features.pilot_max_subsets_per_object,
                features.pilot_max_subsets_per_namespace,
            ),
            Kind::ServiceEntry => (
                features.pilot_max_endpoints_per_object,
                features.pilot_max_endpoints_per_namespace,
            ),
            _ => (
                features.pilot_max_routes_per_object,
                features.pilot_max_routes_per_namespace,
            ),
        };
        let limit = |number: u32| if number == 0 { u64::MAX } else { u64::from(number) };
        Self {
            object: limit(object),
            namespace: limit(namespace),
        }
    }
}

/// Counts the routes that VirtualServices add to the configuration of one proxy, where the number of places depends on
/// the services that the proxy sees.
pub struct RouteBudget {
    limits: Limits,
    objects: BTreeMap<ObjectKey, u64>,
    namespaces: BTreeMap<Namespace, u64>,
}

impl RouteBudget {
    /// Returns the whole budget.
    pub fn of(mesh: &MeshSnapshot) -> Self {
        Self {
            limits: Limits::of(mesh, Kind::VirtualService),
            objects: BTreeMap::new(),
            namespaces: BTreeMap::new(),
        }
    }

    /// Counts further routes of a VirtualService. Returns false, and counts nothing, if they exceed its limit or that
    /// of its namespace.
    pub fn take(&mut self, object: &ObjectKey, routes: u64) -> bool {
        let of_object = routes + self.objects.get(object).unwrap_or(&0);
        let of_namespace = routes + self.namespaces.get(&object.namespace).unwrap_or(&0);
        if of_object > self.limits.object || of_namespace > self.limits.namespace {
            return false;
        }
        self.objects.insert(object.clone(), of_object);
        self.namespaces.insert(object.namespace.clone(), of_namespace);
        true
    }
}

/// Emits the index keys of a demand: its kind, and each namespace whose limit it uses.
pub fn namespace_key(key: &DemandKey, demand: &Demand, emit: &mut dyn FnMut((Kind, Namespace))) {
    if demand.shares.is_empty() {
        emit((key.kind, key.object.namespace.clone()));
    }
    for namespace in demand.shares.keys() {
        emit((key.kind, namespace.clone()));
    }
}

/// Derives the refused objects of a namespace; no row without any.
pub fn refused(cx: &Cx, mesh: &MeshSnapshot, key: &(Kind, Namespace)) -> Option<RefusedObjects> {
    let demands = match key.0 {
        Kind::ServiceEntry => &mesh.entry_demands_by_namespace,
        kind if is_route(kind) => &mesh.route_demands_by_namespace,
        _ => &mesh.demands_by_namespace,
    };
    let mut demands: Vec<_> = demands.get(cx, key).collect();
    demands.sort_by_key(|(_, demand)| demand.meta.age_order());
    let limits = Limits::of(mesh, key.0);
    let (mut left, mut refused) = (limits.namespace, BTreeSet::new());
    for (DemandKey { object, .. }, demand) in demands {
        match left.checked_sub(demand.used(&key.1, limits)) {
            Some(rest) => left = rest,
            None => drop(refused.insert(object.clone())),
        }
    }
    (!refused.is_empty()).then_some(RefusedObjects(refused))
}

/// Returns how many hosts or subsets of an object apply, from the first; `None` if all do.
pub fn kept(cx: &Cx, mesh: &MeshSnapshot, kind: Kind, object: &ObjectKey) -> Option<usize> {
    let key = DemandKey {
        kind,
        object: object.clone(),
    };
    let (demands, refused) = match kind {
        Kind::ServiceEntry => (&mesh.entry_demands, &mesh.refused_entries),
        kind if is_route(kind) => (&mesh.route_demands, &mesh.refused_routes),
        _ => (&mesh.demands, &mesh.refused_objects),
    };
    let demand = demands.get(cx, &key)?;
    if !demand.shares.is_empty() {
        return (refused_namespaces(cx, mesh, object).len() == demand.shares.len()).then_some(0);
    }
    let refused = refused.get(cx, &(kind, object.namespace.clone()));
    if refused.is_some_and(|refused| refused.0.contains(object)) {
        return Some(0);
    }
    (demand.kept < demand.parts).then_some(demand.kept)
}

/// Returns the namespaces whose routes do not apply in a VirtualService that routes of several are merged into.
pub fn refused_namespaces(cx: &Cx, mesh: &MeshSnapshot, object: &ObjectKey) -> BTreeSet<Namespace> {
    let kind = Kind::VirtualService;
    let key = DemandKey {
        kind,
        object: object.clone(),
    };
    let limit = Limits::of(mesh, kind).object.max(SMALL);
    let is_refused = |namespace: &Namespace| {
        let refused = mesh.refused_objects.get(cx, &(kind, namespace.clone()));
        refused.is_some_and(|refused| refused.0.contains(object))
    };
    let shares = mesh.demands.get(cx, &key).into_iter().flat_map(|demand| &demand.shares);
    let refused = shares.filter(|(namespace, share)| **share > limit || is_refused(namespace));
    refused.map(|(namespace, _)| namespace.clone()).collect()
}

/// Returns the reason why a route of the Gateway API does not apply, with a hint; `None` if it applies.
pub fn route_refusal(cx: &Cx, mesh: &MeshSnapshot, kind: Kind, route: &ObjectKey) -> Option<String> {
    let kept = kept(cx, mesh, kind, route)?;
    let key = DemandKey {
        kind,
        object: route.clone(),
    };
    let demand = mesh.route_demands.get(cx, &key)?;
    let is_large = kept == demand.kept;
    Some(parents_message(kind, demand, is_large, Limits::of(mesh, kind)))
}

/// Returns the namespaces whose routes do not apply in a VirtualService with one host that is made from routes of the
/// Gateway API, with the reasons.
pub fn refusals(cx: &Cx, mesh: &MeshSnapshot, object: &ObjectKey) -> BTreeMap<Namespace, String> {
    let kind = Kind::VirtualService;
    let key = DemandKey {
        kind,
        object: object.clone(),
    };
    let Some(demand) = mesh.demands.get(cx, &key) else {
        return BTreeMap::new();
    };
    let limits = Limits::of(mesh, kind);
    if demand.shares.is_empty() {
        let kept = kept(cx, mesh, kind, object);
        let refused = kept.map(|kept| matches_message(demand.declared, kept == demand.kept, limits));
        let refused = refused.map(|reason| (object.namespace.clone(), reason));
        return refused.into_iter().collect();
    }
    let refused = refused_namespaces(cx, mesh, object).into_iter();
    let with_reason = |namespace: Namespace| {
        let share = demand.shares.get(&namespace).copied().unwrap_or_default();
        let is_large = share > limits.object.max(SMALL);
        (namespace, matches_message(share, is_large, limits))
    };
    refused.map(with_reason).collect()
}

/// Returns true for routes of the Gateway API. Their hosts, for each listener and service, count like routes.
fn is_route(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::HttpRoute | Kind::GrpcRoute | Kind::TlsRoute | Kind::TcpRoute
    )
}

/// Returns the key of the row that refuses the surplus of a VirtualService.
pub fn surplus_key(of: &ObjectKey) -> ObjectKey {
    ObjectKey::new(&of.cluster, of.namespace.clone(), [&of.name, SURPLUS].concat())
}

/// Returns the VirtualService whose surplus the row with this key refuses.
pub fn surplus_of(key: &ObjectKey) -> Option<ObjectKey> {
    let name = key.name.strip_suffix(SURPLUS)?;
    Some(ObjectKey::new(&key.cluster, key.namespace.clone(), name))
}

impl MeshSnapshot {
    /// Returns the result of [`exceeded`] for this snapshot.
    pub fn exceeded_limits(&self, cx: &Cx) -> BTreeSet<Diagnostic> {
        exceeded(cx, self)
    }

    /// Returns how many hosts of a ServiceEntry apply, from the first; `None` if all do.
    pub fn kept_hosts(&self, cx: &Cx, entry: &ObjectKey) -> Option<usize> {
        kept(cx, self, Kind::ServiceEntry, entry)
    }
}

/// Returns a diagnostic for each object that does not apply as a whole.
pub fn exceeded(cx: &Cx, mesh: &MeshSnapshot) -> BTreeSet<Diagnostic> {
    let demands = mesh.demands.iter(cx).chain(mesh.entry_demands.iter(cx));
    let demands = demands.chain(mesh.route_demands.iter(cx));
    let cut = demands.filter_map(|(key, demand)| {
        let limits = Limits::of(mesh, key.kind);
        let (field, message) = if demand.shares.is_empty() {
            let kept = kept(cx, mesh, key.kind, &key.object)?;
            // The limit of the namespace refuses only objects that apply at least in part by their own limit.
            let is_large = kept == demand.kept;
            match key.kind {
                Kind::DestinationRule => ("spec.subsets", subsets_message(demand, kept, is_large, limits)),
                Kind::ServiceEntry => ("spec.hosts", endpoints_message(demand, kept, is_large, limits)),
                kind if is_route(kind) => ("spec.parentRefs", parents_message(kind, demand, is_large, limits)),
                _ => ("spec.hosts", routes_message(demand, kept, is_large, limits)),
            }
        } else {
            let refused = refused_namespaces(cx, mesh, &key.object);
            ("spec.http", shares_message(&refused, limits)?)
        };
        let finding = FieldError {
            field: field.to_owned(),
            message,
        };
        let object = key.object.clone();
        Some(Diagnostic::of_object(key.kind, object, Severity::Error, CODE, finding))
    });
    cut.collect()
}

fn subsets_message(demand: &Demand, kept: usize, is_large: bool, limits: Limits) -> String {
    let reason = if is_large {
        let (declared, limit) = (demand.declared, limits.object);
        format!("{declared} subsets exceed the limit of {limit} (PILOT_MAX_SUBSETS_PER_OBJECT)")
    } else {
        let limit = limits.namespace;
        format!("the subsets of the namespace exceed the limit of {limit} (PILOT_MAX_SUBSETS_PER_NAMESPACE)")
    };
    format!("{reason}; the first {kept} apply, requests to the others fail")
}

fn routes_message(demand: &Demand, kept: usize, is_large: bool, limits: Limits) -> String {
    let reason = if is_large {
        let (declared, limit) = (demand.declared, limits.object);
        format!("{declared} routes of all hosts exceed the limit of {limit} (PILOT_MAX_ROUTES_PER_OBJECT)")
    } else {
        let limit = limits.namespace;
        format!("the routes of the namespace exceed the limit of {limit} (PILOT_MAX_ROUTES_PER_NAMESPACE)")
    };
    format!("{reason}; routes of the first {kept} hosts apply, requests to the others are refused")
}

fn shares_message(refused: &BTreeSet<Namespace>, limits: Limits) -> Option<String> {
    if refused.is_empty() {
        return None;
    }
    let refused: Vec<&str> = refused.iter().map(Namespace::as_str).collect();
    let (refused, object, namespace) = (refused.join(", "), limits.object, limits.namespace);
    Some(format!(
        "the routes of namespaces {refused} do not apply: they exceed the limit of {object} for one host \
         (PILOT_MAX_ROUTES_PER_OBJECT), or that of {namespace} for all (PILOT_MAX_ROUTES_PER_NAMESPACE)"
    ))
}

fn endpoints_message(demand: &Demand, kept: usize, is_large: bool, limits: Limits) -> String {
    let reason = if is_large {
        let (declared, limit) = (demand.declared, limits.object);
        format!("{declared} endpoints of all hosts exceed the limit of {limit} (PILOT_MAX_ENDPOINTS_PER_OBJECT)")
    } else {
        let limit = limits.namespace;
        format!("the endpoints of the namespace exceed the limit of {limit} (PILOT_MAX_ENDPOINTS_PER_NAMESPACE)")
    };
    format!("{reason}; the first {kept} hosts apply, the others are unknown to proxies")
}

fn parents_message(kind: Kind, demand: &Demand, is_large: bool, limits: Limits) -> String {
    let declared = demand.declared;
    let (counted, fewer) = match kind {
        Kind::TlsRoute | Kind::TcpRoute => ("rules for hosts of all parents", "rules, hosts, listeners or services"),
        _ => ("hosts of all parents", "hostnames, listeners or services"),
    };
    let reason = if is_large {
        let limit = limits.object;
        format!("{declared} {counted} exceed the limit of {limit} (PILOT_MAX_ROUTES_PER_OBJECT)")
    } else {
        let limit = limits.namespace;
        format!(
            "{declared} {counted} and those of older routes of the namespace exceed the limit of {limit} \
             (PILOT_MAX_ROUTES_PER_NAMESPACE)"
        )
    };
    format!("{reason}; the route does not apply (hint: use fewer {fewer}, or raise the limit)")
}

fn matches_message(matches: u64, is_large: bool, limits: Limits) -> String {
    if is_large {
        let limit = limits.object;
        return format!(
            "{matches} matches of the namespace's routes exceed the limit of {limit} (PILOT_MAX_ROUTES_PER_OBJECT)"
        );
    }
    let limit = limits.namespace;
    format!(
        "{matches} matches of the namespace's routes and those of older objects of the namespace exceed the limit of \
         {limit} (PILOT_MAX_ROUTES_PER_NAMESPACE)"
    )
}

#[cfg(test)]
mod tests;
