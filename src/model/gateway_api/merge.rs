//! VirtualServices made from routes.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    PARENTS_ANNOTATION, converted_meta,
    route::{AttachedRoute, AttachedRouteKey, Contribution, ConvertedName, Rules, sort_http},
};
use crate::{
    api::{Config, Kind},
    base::{Labels, Namespace, ObjectKey, Shared},
    model::{
        MeshSnapshot,
        virtual_service::{Converted, Requests, SEMANTICS_ANNOTATION},
    },
    proto::istio::networking::v1alpha3::VirtualService,
    table::Cx,
};

/// Derives a VirtualService from the routes that contribute to it. The oldest one decides namespace and age.
pub fn virtual_service(cx: &Cx, mesh: &MeshSnapshot, name: &ConvertedName) -> Option<Converted> {
    let sources = sources(cx, mesh, name);
    let (_, oldest, first) = *sources.first()?;
    let key = ObjectKey::new(
        oldest.meta.cluster(),
        oldest.meta.namespace().clone(),
        name.name.clone(),
    );
    // A written one of its name precedes it.
    if mesh.written_virtual_services.get(cx, &key).is_some() {
        return None;
    }
    let mut spec = VirtualService {
        hosts: vec![first.host.clone()],
        gateways: vec![first.gateway.to_string()],
        ..Default::default()
    };
    for (_, _, contribution) in &sources {
        match &contribution.rules {
            Rules::Http(_) => {}
            Rules::Tls(rules) => spec.tls.extend_from_slice(rules),
            Rules::Tcp(rules) => spec.tcp.extend_from_slice(rules),
        }
    }
    let requests = match (first.requests(), sources.len()) {
        (Some(only), 1) => only.clone(),
        _ => merged(&sources).into(),
    };
    let parents: Vec<String> = sources.iter().map(|(key, ..)| parent_text(key)).collect();
    let annotations: Labels = [
        (PARENTS_ANNOTATION, SmolStr::from(parents.join(","))),
        (SEMANTICS_ANNOTATION, SmolStr::new_static("gateway")),
    ]
    .into_iter()
    .map(|(name, value)| (SmolStr::new_static(name), value))
    .collect();
    let object = Config {
        meta: converted_meta(Kind::VirtualService, key, annotations, oldest.meta.creation),
        spec,
        status: None,
    };
    Some(Converted {
        object: object.into(),
        requests,
    })
}

/// Returns the rules for requests of several routes, in order of precedence.
fn merged(sources: &[Source<'_>]) -> Requests {
    let all = sources.iter().filter_map(|(.., contribution)| contribution.requests());
    let mut rules: Vec<_> = all.flat_map(|requests| &requests.routes).cloned().collect();
    sort_http(&mut rules);
    Requests::new(rules)
}

impl MeshSnapshot {
    /// Returns the VirtualService with a key that is made from routes.
    pub fn converted_virtual_service(&self, cx: &Cx, object: &ObjectKey) -> Option<&Shared<Converted>> {
        let (_, converted) = converted(cx, self, object)?;
        Some(converted)
    }

    /// Returns what the routes of each namespace count in a VirtualService made from routes of several namespaces;
    /// nothing for any other one.
    pub fn routes_by_namespace(&self, cx: &Cx, object: &ObjectKey) -> BTreeMap<Namespace, u64> {
        let (name, mut numbers) = (merged_name(object), BTreeMap::new());
        let merged = self.converted_virtual_services.get(cx, &name);
        if merged.is_none_or(|merged| merged.object.meta.key != *object) {
            return numbers;
        }
        for (_, route, contribution) in sources(cx, self, &name) {
            let counted = contribution.requests().map_or(0, |requests| requests.counted());
            *numbers.entry(route.meta.namespace().clone()).or_default() += counted;
        }
        if numbers.len() == 1 {
            numbers.clear();
        }
        numbers
    }

    /// Returns the routes of a merged VirtualService without those of some namespaces.
    pub fn requests_without(&self, cx: &Cx, object: &ObjectKey, refused: &BTreeSet<Namespace>) -> Requests {
        let mut sources = sources(cx, self, &merged_name(object));
        sources.retain(|(_, route, _)| !refused.contains(route.meta.namespace()));
        merged(&sources)
    }
}

/// Returns the name by which routes contribute to the VirtualService with a key; `None` if it is not made from routes.
pub(super) fn converted_name(cx: &Cx, mesh: &MeshSnapshot, object: &ObjectKey) -> Option<ConvertedName> {
    let (name, _) = converted(cx, mesh, object)?;
    Some(name)
}

/// Returns the VirtualService with a key that is made from routes, with the name by which they contribute to it.
fn converted<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    object: &ObjectKey,
) -> Option<(ConvertedName, &'a Shared<Converted>)> {
    let own = ConvertedName {
        namespace: object.namespace.clone(),
        name: object.name.clone(),
    };
    let mut found = [merged_name(object), own].into_iter().filter_map(|name| {
        let converted = mesh.converted_virtual_services.get(cx, &name)?;
        Some((name, converted))
    });
    found.find(|(_, converted)| converted.object.meta.key == *object)
}

/// Returns the name of a VirtualService that routes of several namespaces may be merged into.
fn merged_name(object: &ObjectKey) -> ConvertedName {
    ConvertedName {
        namespace: Namespace::default(),
        name: object.name.clone(),
    }
}

/// A route with one of its contributions.
type Source<'a> = (&'a AttachedRouteKey, &'a AttachedRoute, &'a Contribution);

/// Returns the contributions to a VirtualService, oldest route first.
fn sources<'a>(cx: &Cx, mesh: &'a MeshSnapshot, name: &ConvertedName) -> Vec<Source<'a>> {
    let routes = mesh.routes_by_virtual_service.get(cx, name);
    let mut sources: Vec<Source<'a>> = routes
        .flat_map(|(key, route)| {
            let own = route.contributions_to(name).iter();
            own.map(move |contribution| (key, &**route, contribution))
        })
        .collect();
    sources.sort_by(|(_, one, _), (_, other, _)| {
        let (one, other) = (&one.meta, &other.meta);
        one.creation
            .cmp(&other.creation)
            .then_with(|| one.namespace().cmp(other.namespace()))
            .then_with(|| compared(one.name()).cmp(compared(other.name())))
    });
    sources
}

/// Returns the bytes by which names of routes of one age and namespace are compared.
///
/// Parity (pilot/pkg/config/kube/gateway/conversion.go, `sortRoutesByCreationTime`): Istio compares the names of the
/// VirtualServices that it merges, in which a `~` follows that of the route. So `web-v2` precedes `web`.
fn compared(name: &str) -> impl Iterator<Item = u8> {
    name.bytes().chain(std::iter::once(b'~'))
}

fn parent_text(key: &AttachedRouteKey) -> String {
    let (namespace, name) = (&key.object.namespace, &key.object.name);
    format!("{}/{name}.{namespace}", key.kind.name())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        api::document,
        base::Hostname,
        model::{Change, Installation, World, fixture::CLUSTER, virtual_service::HttpRoutes},
    };

    #[test]
    fn listeners_and_hosts_share_the_routes() {
        let listener = |port: u16| {
            json!({"name": format!("p{port}"), "port": port, "protocol": "HTTP",
                "allowedRoutes": {"namespaces": {"from": "All"}}})
        };
        let gateway = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
            "metadata": {"name": "edge", "namespace": "gw"},
            "spec": {"gatewayClassName": "istio", "listeners": [listener(80), listener(81)]}});
        let route = |name: &str, hosts: &[&str]| {
            json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
                "metadata": {"name": name, "namespace": "app"},
                "spec": {"parentRefs": [{"name": "edge", "namespace": "gw"}], "hostnames": hosts,
                    "rules": [{"matches": [{"path": {"value": format!("/{name}")}}]}]}})
        };
        let objects = [
            gateway,
            route("one", &["a.test", "b.test"]),
            route("other", &["b.test"]),
        ];
        let mut world = World::new(Installation::default());
        let rows = objects.iter().flat_map(|object| document::parse(&CLUSTER, object).rows);
        world.commit(rows.map(Change::Upsert).collect());
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        let rows: Vec<_> = mesh.virtual_services.iter(&cx).map(|(_, row)| row).collect();
        let of = |host: &str| {
            let of_host = rows.iter().filter(|row| row.hosts == [Hostname::new(host)]);
            let requests = |http: &HttpRoutes| match http {
                HttpRoutes::Resolved(requests) => requests.clone(),
                HttpRoutes::Written(object) => panic!("routes of an object: {object:?}"),
            };
            of_host.map(|row| requests(&row.http)).collect::<Vec<_>>()
        };
        let [first, second] = of("a.test").try_into().expect("one for each listener");
        assert!(first.ptr_eq(&second), "rows of one route share all");
        assert_eq!(first.routes.len(), 1);
        let both = of("b.test");
        assert_eq!(both.len(), 2, "one for each listener");
        for merged in both {
            let [longer, shorter] = &*merged.routes else {
                panic!("routes of both: {merged:?}")
            };
            assert!(shorter.ptr_eq(&first.routes[0]), "merged rows share each route");
            assert_ne!(longer, shorter);
        }
    }

    #[test]
    fn routes_of_one_age_are_in_the_order_of_istio() {
        let listener = json!({"name": "http", "port": 80, "protocol": "HTTP",
            "allowedRoutes": {"namespaces": {"from": "All"}}});
        let gateway = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
            "metadata": {"name": "edge", "namespace": "gw"},
            "spec": {"gatewayClassName": "istio", "listeners": [listener]}});
        let route = |name: &str| {
            json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
                "metadata": {"name": name, "namespace": "app"},
                "spec": {"parentRefs": [{"name": "edge", "namespace": "gw"}], "rules": [{"name": name}]}})
        };
        let objects = [gateway, route("web"), route("web2"), route("web-v2"), route("able")];
        let mut world = World::new(Installation::default());
        let rows = objects.iter().flat_map(|object| document::parse(&CLUSTER, object).rows);
        world.commit(rows.map(Change::Upsert).collect());
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        let rows = mesh.converted_virtual_services.iter(&cx);
        let rules = rows.flat_map(|(_, row)| row.requests.routes.iter());
        let names: Vec<&str> = rules.map(|rule| rule.http.name.as_str()).collect();
        assert_eq!(names, ["able", "web-v2", "web2", "web"]);
    }
}
