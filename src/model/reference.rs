//! Dangling references: destinations, subsets and gateways that VirtualServices refer to and that do not exist.

use std::{borrow::Cow, collections::BTreeSet};

use super::{
    MeshSnapshot, network, output_limit,
    virtual_service::{MESH_GATEWAY, VirtualService},
};
use crate::{
    api::{Diagnostic, Kind, Severity, field::FieldError},
    base::{
        Hostname, Namespace, ObjectKey,
        host::{self, HostsByEnd},
    },
    proto::istio::networking::v1alpha3::Destination,
    table::Cx,
};

/// The maximum number of missing references of one VirtualService that are reported. An object has room for thirty
/// thousand.
const MAX_OF_OBJECT: usize = 10;

/// A field, and the problem in it.
type Missing = (&'static str, String);

/// Returns dangling references of VirtualServices, at most some of each, and network gateways that do not count.
/// Missing destinations are served as if they existed, without endpoints.
pub fn missing(cx: &Cx, mesh: &MeshSnapshot) -> BTreeSet<Diagnostic> {
    let declared = DeclaredNames::of(cx, mesh);
    let mut findings = BTreeSet::new();
    let declared_ones = mesh.virtual_services.iter(cx);
    for (key, virtual_service) in declared_ones.filter(|(key, _)| output_limit::surplus_of(key).is_none()) {
        let of_object = few(missing_of(cx, mesh, &declared, key, virtual_service));
        findings.extend(of_object.into_iter().map(|(field, message)| {
            let finding = FieldError {
                field: field.to_owned(),
                message,
            };
            let code = "ReferencedResourceNotFound";
            Diagnostic::of_object(Kind::VirtualService, key.clone(), Severity::Error, code, finding)
        }));
    }
    findings.extend(network::dropped(cx, mesh));
    findings.extend(network::exceeded(cx, mesh));
    findings
}

/// Returns the first different references, and says so if there are more.
fn few(all: impl Iterator<Item = Missing>) -> BTreeSet<Missing> {
    let mut found: BTreeSet<Missing> = BTreeSet::new();
    for missing in all {
        if found.len() == MAX_OF_OBJECT && !found.contains(&missing) {
            found.insert(("spec", "further references are missing".to_owned()));
            break;
        }
        found.insert(missing);
    }
    found
}

/// Returns the dangling references of a VirtualService. Equal ones may repeat.
fn missing_of<'a>(
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    declared: &'a DeclaredNames<'a>,
    key: &'a ObjectKey,
    virtual_service: &'a VirtualService,
) -> impl Iterator<Item = Missing> + use<'a> {
    let named = virtual_service.gateways.iter().filter(|name| *name != MESH_GATEWAY);
    let gateways = named.filter(move |name| !has_gateway(cx, mesh, key, name));
    let gateways = gateways.map(|gateway| ("spec.gateways", format!("there is no Gateway {gateway}")));
    let destinations = destinations(mesh, virtual_service).filter_map(move |destination| {
        let Destination { host, subset, .. } = &*destination;
        if !declared.has_host(cx, mesh, host) {
            return Some(("spec", format!("no service has the host {host}")));
        }
        if !declared.has_subset(host, subset) {
            let message = format!("no DestinationRule declares the subset {subset} of {host}");
            return Some(("spec", message));
        }
        None
    });
    gateways.chain(destinations)
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
#[derive(Default)]
struct DeclaredNames<'a> {
    /// Wildcard hosts of services.
    wildcards: HostsByEnd<()>,
    /// Subsets of DestinationRules.
    subsets: HostsByEnd<BTreeSet<&'a str>>,
}

impl<'a> DeclaredNames<'a> {
    fn of(cx: &Cx, mesh: &'a MeshSnapshot) -> Self {
        let mut declared = Self::default();
        let hosts = mesh.services_by_host.keys(cx);
        for wildcard in hosts.filter(|name| host::is_wildcard(name)) {
            declared.wildcards.entry(wildcard);
        }
        for (key, rules) in mesh.destination_rules.iter(cx) {
            let all = rules.local.iter().chain(&rules.exported);
            for subset in all.flat_map(|rule| &rule.spec.subsets) {
                declared.subsets.entry(&key.host).insert(subset.name.as_str());
            }
        }
        declared
    }

    fn has_host(&self, cx: &Cx, mesh: &MeshSnapshot, name: &str) -> bool {
        mesh.services_by_host.contains(cx, &Hostname::new(name)) || !self.wildcards.covering(name).is_empty()
    }

    fn has_subset(&self, name: &str, subset: &str) -> bool {
        subset.is_empty() || self.subsets.covering(name).iter().any(|names| names.contains(subset))
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
    fn r21_few_missing_references_of_an_object_are_reported() {
        let route = |number: usize| format!("  - route: [{{destination: {{host: gone-{number}}}}}]\n");
        let routes: String = (0..30).map(route).collect();
        let config = format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v, namespace: shop}}\n\
             spec:\n  hosts: [web.test]\n  http:\n{routes}"
        );
        let world = folder_world(Installation::default(), &[("config.yaml", &config)]);
        let found = missing(&Cx::untracked(), &world.snapshot());
        assert_eq!(found.len(), MAX_OF_OBJECT + 1);
        assert!(found.iter().any(|finding| finding.message.starts_with("further")));
        let repeated = (0..100).map(|number| ("spec", format!("host {}", number % MAX_OF_OBJECT)));
        assert_eq!(few(repeated).len(), MAX_OF_OBJECT, "equal ones count once");
    }

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
        assert!(
            messages
                .iter()
                .any(|message| message.contains("gone.shop.svc.cluster.local"))
        );
        assert!(messages.iter().any(|message| message.contains("subset v9")));
        assert!(messages.iter().any(|message| message.contains("nowhere")));
    }
}
