//! VirtualServices made from routes.

use smol_str::SmolStr;

use super::{
    PARENTS_ANNOTATION, converted_meta,
    route::{AttachedRoute, Contribution, ConvertedName, RouteKey, Rules, sort_http},
};
use crate::{
    api::{Config, Kind},
    base::{Labels, ObjectKey},
    model::{MeshSnapshot, virtual_service::SEMANTICS_ANNOTATION},
    proto::istio::networking::v1alpha3::VirtualService,
    table::Cx,
};

/// Derives a VirtualService from the routes that contribute to it. The oldest one decides namespace and age.
pub fn virtual_service(cx: &Cx, mesh: &MeshSnapshot, name: &ConvertedName) -> Option<Config<VirtualService>> {
    let routes = mesh.routes_by_virtual_service.get(cx, name);
    let mut sources: Vec<(&RouteKey, &AttachedRoute, &Contribution)> = routes
        .flat_map(|(key, route)| {
            let own = route.contributions_to(name).iter();
            own.map(move |one| (key, &**route, one))
        })
        .collect();
    sources.sort_by_key(|(_, route, _)| (route.meta.creation, route.meta.namespace(), route.meta.name()));
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

fn parent_text(key: &RouteKey) -> String {
    let (namespace, name) = (&key.object.namespace, &key.object.name);
    format!("{}/{name}.{namespace}", key.kind.name())
}
