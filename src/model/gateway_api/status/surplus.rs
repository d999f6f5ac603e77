//! Rules of routes that do not apply because of limits of what the objects of a namespace may produce.
//!
//! A route with too many hosts, listeners and services contributes to no VirtualService. Each VirtualService has a
//! limit of its own, so the rules of a route may also be refused for some hosts only. Few routes have such rules, and
//! only these look for them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use crate::{
    base::{Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        gateway_api::{
            Mistake, merge,
            route::{AttachedRoute, AttachedRouteKey, ConvertedName},
        },
        output_limit,
    },
    table::{Cx, Index},
};

/// Hosts that a message names.
const MAX_HOSTS: usize = 8;
/// Hint of messages about hosts.
const HINT: &str = "(hint: use fewer matches or smaller rules, or raise the limit)";

/// The rules of a VirtualService that do not apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Surplus {
    /// The name by which the routes contribute to it.
    name: ConvertedName,
    /// The reasons by namespace of the routes.
    reasons: BTreeMap<Namespace, String>,
    /// The routes with these rules.
    routes: BTreeSet<AttachedRouteKey>,
}

/// Surpluses by route.
pub(super) type Surpluses = Index<AttachedRouteKey, ObjectKey, Surplus>;

/// Derives the rules of a VirtualService that do not apply; no row for one that is not made from routes.
pub(super) fn surplus(cx: &Cx, mesh: &MeshSnapshot, object: &ObjectKey) -> Option<Surplus> {
    let reasons = output_limit::refusals(cx, mesh, object);
    if reasons.is_empty() {
        return None;
    }
    let name = merge::converted_name(cx, mesh, object)?;
    let routes = mesh.routes_by_virtual_service.get(cx, &name).map(|(route, _)| route);
    let refused = routes.filter(|route| reasons.contains_key(&route.object.namespace));
    let routes = refused.cloned().collect();
    Some(Surplus { name, reasons, routes })
}

/// Emits the routes with rules that do not apply.
pub(super) fn routes(_: &ObjectKey, row: &Surplus, emit: &mut dyn FnMut(AttachedRouteKey)) {
    row.routes.iter().for_each(|route| emit(route.clone()));
}

/// The rules of a route that do not apply, by its parents.
pub(super) struct Refused<'a> {
    /// The reason why no rule applies for any parent.
    whole: Option<String>,
    /// The refused hosts of each parent, with the reasons.
    hosts: BTreeMap<usize, Vec<(&'a str, &'a str)>>,
    /// The number of all hosts of each parent; empty without refused ones.
    numbers: BTreeMap<usize, usize>,
}

impl<'a> Refused<'a> {
    /// Returns the rules of a route that do not apply.
    pub(super) fn of(
        cx: &Cx,
        mesh: &MeshSnapshot,
        surpluses: &'a Surpluses,
        key: &AttachedRouteKey,
        route: &'a AttachedRoute,
    ) -> Self {
        // A route that does not apply as a whole contributes nothing.
        let whole = route.contributions.is_empty();
        let whole = whole.then(|| output_limit::route_refusal(cx, mesh, key.kind, &key.object));
        let mut refused = Self {
            whole: whole.flatten(),
            hosts: BTreeMap::new(),
            numbers: BTreeMap::new(),
        };
        for (_, surplus) in surpluses.get(cx, key) {
            let Some(reason) = surplus.reasons.get(&key.object.namespace) else {
                continue;
            };
            for contribution in route.contributions_to(&surplus.name) {
                let hosts = refused.hosts.entry(contribution.parent).or_default();
                hosts.push((contribution.host.as_str(), reason.as_str()));
            }
        }
        if !refused.hosts.is_empty() {
            for contribution in &route.contributions {
                *refused.numbers.entry(contribution.parent).or_default() += 1;
            }
        }
        refused
    }

    /// Returns the mistake because of which no rule applies for any of these parents.
    pub(super) fn all(&self, parents: Range<usize>) -> Option<Mistake> {
        if let Some(reason) = &self.whole {
            return Some(Mistake::new(output_limit::CODE, reason));
        }
        let hosts = self.hosts(&parents);
        let number: usize = self.numbers.range(parents).map(|(_, number)| number).sum();
        let is_all = !hosts.is_empty() && hosts.len() == number;
        is_all.then(|| Mistake::new(output_limit::CODE, format!("No rule applies: {}", text(hosts))))
    }

    /// Returns a message about the hosts for which no rule applies for some of these parents.
    pub(super) fn some(&self, parents: Range<usize>) -> Option<String> {
        let hosts = self.hosts(&parents);
        (!hosts.is_empty()).then(|| format!("Dropped Rules for some hosts: {}", text(hosts)))
    }

    /// Returns the refused hosts of some parents, with the reasons.
    fn hosts(&self, parents: &Range<usize>) -> Vec<(&'a str, &'a str)> {
        let hosts = self.hosts.range(parents.clone());
        hosts.flat_map(|(_, hosts)| hosts).copied().collect()
    }
}

/// Returns a text with the first hosts and their reasons.
fn text(hosts: Vec<(&str, &str)>) -> String {
    let hosts: BTreeSet<(&str, &str)> = hosts.into_iter().collect();
    let named = hosts.iter().take(MAX_HOSTS);
    let mut texts: Vec<String> = named.map(|(host, reason)| format!("host {host:?}: {reason}")).collect();
    let others = hosts.len() - texts.len();
    if others > 0 {
        texts.push(format!("and {others} more"));
    }
    format!("{} {HINT}", texts.join("; "))
}
