//! Dangling references: destinations, subsets and gateways that VirtualServices refer to and that do not exist.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    MeshSnapshot, network, output_limit,
    virtual_service::{MESH_GATEWAY, VirtualService},
};
use crate::{
    api::{Diagnostic, Kind, Severity, field::FieldError},
    base::{Hostname, Namespace, ObjectKey, host},
    proto::istio::networking::v1alpha3::Destination,
    table::Cx,
};

/// Returns all dangling references of VirtualServices, and network gateways whose host names are not resolved. Missing
/// destinations are served as if they existed, without endpoints.
pub fn missing(cx: &Cx, mesh: &MeshSnapshot) -> BTreeSet<Diagnostic> {
    let declared = DeclaredNames::of(cx, mesh);
    let mut findings = BTreeSet::new();
    let declared_ones = mesh.virtual_services.iter(cx);
    for (key, virtual_service) in declared_ones.filter(|(key, _)| output_limit::surplus_of(key).is_none()) {
        let mut report = |field: &str, message: String| {
            let finding = FieldError {
                field: field.to_owned(),
                message,
            };
            let code = "ReferencedResourceNotFound";
            findings.insert(Diagnostic::of_object(
                Kind::VirtualService,
                key.clone(),
                Severity::Error,
                code,
                finding,
            ));
        };
        for gateway in virtual_service.gateways.iter().filter(|name| *name != MESH_GATEWAY) {
            if !has_gateway(cx, mesh, key, gateway) {
                report("spec.gateways", format!("there is no Gateway {gateway}"));
            }
        }
        for destination in destinations(mesh, virtual_service) {
            if !declared.has_host(cx, mesh, &destination.host) {
                report("spec", format!("no service has the host {}", destination.host));
            } else if !declared.has_subset(&destination) {
                let Destination { host, subset, .. } = &*destination;
                report(
                    "spec",
                    format!("no DestinationRule declares the subset {subset} of {host}"),
                );
            }
        }
    }
    findings.extend(network::dropped(cx, mesh));
    findings.extend(network::exceeded(cx, mesh));
    findings
}

/// Returns every destination of the routes, without those of mirrored requests.
fn destinations<'a>(
    mesh: &'a MeshSnapshot,
    virtual_service: &'a VirtualService,
) -> impl Iterator<Item = Cow<'a, Destination>> {
    let http = virtual_service.http.weighted(&mesh.installation);
    let tls = virtual_service.tls.iter().flat_map(|tls| tls.route.iter());
    let tcp = virtual_service.tcp.iter().flat_map(|tcp| tcp.route.iter());
    let streams = tls.chain(tcp).filter_map(|route| route.destination.as_ref());
    http.chain(streams.map(Cow::Borrowed))
}

/// The names that destinations may refer to.
struct DeclaredNames {
    /// Wildcard hosts of services.
    wildcards: Vec<Hostname>,
    /// Subsets of DestinationRules, by host.
    subsets: BTreeMap<Hostname, BTreeSet<String>>,
}

impl DeclaredNames {
    fn of(cx: &Cx, mesh: &MeshSnapshot) -> Self {
        let wildcards = mesh
            .services_by_host
            .keys(cx)
            .filter(|name| host::is_wildcard(name))
            .cloned()
            .collect();
        let mut subsets: BTreeMap<Hostname, BTreeSet<String>> = BTreeMap::new();
        for (key, rules) in mesh.destination_rules.iter(cx) {
            let all = rules.local.iter().chain(&rules.exported);
            let names = all.flat_map(|rule| rule.spec.subsets.iter().map(|subset| subset.name.clone()));
            subsets.entry(key.host.clone()).or_default().extend(names);
        }
        Self { wildcards, subsets }
    }

    fn has_host(&self, cx: &Cx, mesh: &MeshSnapshot, name: &str) -> bool {
        mesh.services_by_host.contains(cx, &Hostname::new(name))
            || self.wildcards.iter().any(|wildcard| host::subset_of(name, wildcard))
    }

    fn has_subset(&self, destination: &Destination) -> bool {
        let covers = |pattern: &Hostname| host::subset_of(&destination.host, pattern);
        destination.subset.is_empty()
            || self
                .subsets
                .iter()
                .any(|(host, names)| covers(host) && names.contains(&destination.subset))
    }
}

/// Returns true if the Gateway exists; a bare name is in the VirtualService's own namespace.
fn has_gateway(cx: &Cx, mesh: &MeshSnapshot, owner: &ObjectKey, name: &str) -> bool {
    let (namespace, name) = name.split_once('/').unwrap_or((&owner.namespace, name));
    let key = ObjectKey::new(&owner.cluster, Namespace::new(namespace), name);
    mesh.gateways.get(cx, &key).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Installation, fixture::folder_world};

    #[test]
    fn each_missing_reference_is_named() {
        let config = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: v, namespace: shop}
spec:
  hosts: [web]
  gateways: [mesh, nowhere]
  http:
  - match: [{uri: {prefix: /a}}]
    route: [{destination: {host: gone}}]
  - route: [{destination: {host: web, subset: v9}}]
";
        let world = folder_world(Installation::default(), &[("config.yaml", config)]);
        let found = missing(&Cx::untracked(), &world.snapshot());
        let messages: Vec<&str> = found.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(messages.len(), 3, "{messages:?}");
        assert!(messages.iter().any(|m| m.contains("gone.shop.svc.cluster.local")));
        assert!(messages.iter().any(|m| m.contains("subset v9")));
        assert!(messages.iter().any(|m| m.contains("nowhere")));
    }
}
