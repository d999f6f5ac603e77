//! VirtualServices made from routes.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    PARENTS_ANNOTATION, converted_meta,
    route::{AttachedRoute, Contribution, ConvertedName, RouteKey, Rules, sort_http},
};
use crate::{
    api::{Config, Kind},
    base::{Labels, Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        virtual_service::{SEMANTICS_ANNOTATION, counted_routes},
    },
    proto::istio::networking::v1alpha3::{HttpRoute, VirtualService},
    table::Cx,
};

/// Derives a VirtualService from the routes that contribute to it. The oldest one decides namespace and age.
pub fn virtual_service(cx: &Cx, mesh: &MeshSnapshot, name: &ConvertedName) -> Option<Config<VirtualService>> {
    let sources = sources(cx, mesh, name);
    let (_, oldest, first) = *sources.first()?;
    let mut spec = VirtualService {
        hosts: vec![first.host.clone()],
        gateways: vec![first.gateway.to_string()],
        ..Default::default()
    };
    for (_, _, contribution) in &sources {
        match &contribution.rules {
            Rules::Http(rules) => spec.http.extend_from_slice(rules),
            Rules::Tls(rules) => spec.tls.extend_from_slice(rules),
            Rules::Tcp(rules) => spec.tcp.extend_from_slice(rules),
        }
    }
    if sources.len() > 1 {
        sort_http(&mut spec.http);
    }
    let parents: Vec<String> = sources.iter().map(|(key, ..)| parent_text(key)).collect();
    let annotations: Labels = [
        (PARENTS_ANNOTATION, SmolStr::from(parents.join(","))),
        (SEMANTICS_ANNOTATION, SmolStr::new_static("gateway")),
    ]
    .into_iter()
    .map(|(name, value)| (SmolStr::new_static(name), value))
    .collect();
    let key = ObjectKey::new(
        oldest.meta.cluster(),
        oldest.meta.namespace().clone(),
        name.name.clone(),
    );
    // A written one of its name precedes it.
    if mesh.written_virtual_services.get(cx, &key).is_some() {
        return None;
    }
    Some(Config {
        meta: converted_meta(Kind::VirtualService, key, annotations, oldest.meta.creation),
        spec,
        status: None,
    })
}

impl MeshSnapshot {
    /// Returns what the routes of each namespace count in a VirtualService made from routes of several namespaces;
    /// nothing for any other one.
    pub fn routes_by_namespace(&self, cx: &Cx, object: &ObjectKey) -> BTreeMap<Namespace, u64> {
        let (name, mut numbers) = (merged_name(object), BTreeMap::new());
        let merged = self.converted_virtual_services.get(cx, &name);
        if merged.is_none_or(|merged| merged.meta.key != *object) {
            return numbers;
        }
        for (_, route, contribution) in sources(cx, self, &name) {
            *numbers.entry(route.meta.namespace().clone()).or_default() += counted_routes(contribution.http());
        }
        if numbers.len() == 1 {
            numbers.clear();
        }
        numbers
    }

    /// Returns the routes of a merged VirtualService without those of some namespaces.
    pub fn routes_without(&self, cx: &Cx, object: &ObjectKey, refused: &BTreeSet<Namespace>) -> Vec<HttpRoute> {
        let sources = sources(cx, self, &merged_name(object)).into_iter();
        let kept = sources.filter(|(_, route, _)| !refused.contains(route.meta.namespace()));
        let routes = kept.flat_map(|(.., contribution)| contribution.http());
        let mut routes: Vec<HttpRoute> = routes.cloned().collect();
        sort_http(&mut routes);
        routes
    }
}

/// Returns the name of a VirtualService that routes of several namespaces may be merged into.
fn merged_name(object: &ObjectKey) -> ConvertedName {
    ConvertedName {
        namespace: Namespace::default(),
        name: object.name.clone(),
    }
}

/// A route with one of its contributions.
type Source<'a> = (&'a RouteKey, &'a AttachedRoute, &'a Contribution);

/// Returns the contributions to a VirtualService, oldest route first.
fn sources<'a>(cx: &Cx, mesh: &'a MeshSnapshot, name: &ConvertedName) -> Vec<Source<'a>> {
    let routes = mesh.routes_by_virtual_service.get(cx, name);
    let mut sources: Vec<Source<'a>> = routes
        .flat_map(|(key, route)| {
            let own = route.contributions_to(name).iter();
            own.map(move |one| (key, &**route, one))
        })
        .collect();
    sources.sort_by_key(|(_, route, _)| (route.meta.creation, route.meta.namespace(), route.meta.name()));
    sources
}

fn parent_text(key: &RouteKey) -> String {
    let (namespace, name) = (&key.object.namespace, &key.object.name);
    format!("{}/{name}.{namespace}", key.kind.name())
}
