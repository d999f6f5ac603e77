//! The scope of a proxy, in the form of `model.SidecarScope`, and multi-cluster services.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{list_or_null, map_or_null, object, service};
use crate::{
    base::{Hostname, Labels, ObjectKey},
    model::{
        MeshSnapshot, Service, ServiceKey, SidecarScope,
        destination_rule::{self, DestinationRule},
        export::ExportTo,
        service::mcs,
        sidecar_scope::EgressListener,
    },
    proto::{istio::networking::v1alpha3 as networking, json},
    table::Cx,
};

/// The name of a scope without a Sidecar.
const DEFAULT_NAME: &str = "default-sidecar";

/// Returns the scope of a proxy with these labels.
///
/// Parity (pilot/pkg/model/sidecar.go).
pub(in crate::admin::debug) fn scope(mesh: &MeshSnapshot, scope: &SidecarScope, labels: &Labels) -> Value {
    let cx = Cx::untracked();
    let of_key = |key: &ServiceKey| service::of_key(mesh, key);
    let by_host = scope.by_host.iter().map(|(host, key)| (host, of_key(key)));
    let rules = scope.services.iter().filter_map(|key| {
        let rule = destination_rule::find(&cx, mesh, scope.key.namespace(), Some(labels), key)?.1;
        Some((&key.hostname, json!([merged_rule(mesh, &rule)])))
    });
    let sidecar = scope.key.sidecar();
    let spec = sidecar.and_then(|key| mesh.sidecars.get(&cx, key));
    let mode = if scope.outbound_policy.registry_only {
        "REGISTRY_ONLY"
    } else {
        "ALLOW_ANY"
    };
    json!({
        "destinationRules": map_or_null(rules),
        "egressListenerServices": list_or_null(scope.egress.iter().map(|listener| services(mesh, listener))),
        "name": sidecar.map_or(DEFAULT_NAME, |key| key.name.as_str()),
        "namespace": scope.key.namespace().as_str(),
        "outboundTrafficPolicy": { "mode": mode },
        "services": list_or_null(scope.services.iter().map(of_key)),
        "servicesByHostname": map_or_null(by_host),
        "sidecar": spec.map_or(Value::Null, |row| json::to_json(&row.spec)),
        "version": mesh.revision.0.to_string(),
    })
}

fn services(mesh: &MeshSnapshot, listener: &EgressListener) -> Value {
    let cx = Cx::untracked();
    let members = listener.services.iter().filter_map(|shown| {
        let row = mesh.services.get(&cx, &shown.key)?;
        Some(service::service(mesh, Service::member(row, shown.member)?))
    });
    list_or_null(members)
}

fn merged_rule(mesh: &MeshSnapshot, rule: &DestinationRule) -> Value {
    let export_to = match &rule.export_to {
        ExportTo::Public => json!({}),
        ExportTo::None => json!({ "~": {} }),
        ExportTo::Namespaces(namespaces) => map_or_null(namespaces.iter().map(|namespace| (namespace, json!({})))),
    };
    let from = rule.from.iter();
    let from = from.map(|key| json!({ "Namespace": key.namespace.as_str(), "Name": key.name }));
    let spec = networking::DestinationRule {
        host: rule.host.to_string(),
        ..networking::DestinationRule::clone(&rule.spec)
    };
    json!({
        "exportTo": export_to,
        "from": list_or_null(from),
        "rule": object::config(&rule.meta, &spec, &mesh.installation.domain),
    })
}

/// Returns exports and imports of services by cluster.
pub(in crate::admin::debug) fn mcs(mesh: &MeshSnapshot) -> Value {
    let (cx, features) = (Cx::untracked(), &mesh.installation.features);
    let mut keys: BTreeSet<&ObjectKey> = BTreeSet::new();
    if features.enable_mcs_service_discovery {
        keys.extend(mesh.service_exports.iter(&cx).map(|(key, _)| key));
    }
    if mcs::has_hosts(features) {
        keys.extend(mesh.service_imports.iter(&cx).map(|(key, _)| key));
    }
    let mut keys: Vec<&ObjectKey> = keys.into_iter().collect();
    keys.sort_by_key(|key| (&key.cluster, &key.namespace, &key.name));
    let row = |key: &ObjectKey| {
        let own = format!("{}.{}.svc.{}", key.name, key.namespace, mesh.installation.domain);
        let hosts = [Hostname::from(own), mcs::hostname(&key.name, &key.namespace)];
        let exported = features.enable_mcs_service_discovery && mesh.service_exports.get(&cx, key).is_some();
        let policies: Map<String, Value> = hosts
            .into_iter()
            .filter_map(|hostname| {
                let namespace = key.namespace.clone();
                let service = mesh.services.get(&cx, &ServiceKey { hostname, namespace })?;
                let known = mcs::is_known(&cx, mesh, service, &key.cluster);
                let cluster_local = mcs::is_cluster_local_in(&cx, mesh, service, &key.cluster);
                let policy = if cluster_local {
                    "DiscoverableFromSameCluster"
                } else {
                    "AlwaysDiscoverable"
                };
                known.then(|| (service.key.hostname.to_string(), json!(policy)))
            })
            .collect();
        json!({
            "Cluster": key.cluster.as_str(),
            "Name": key.name,
            "Namespace": key.namespace.as_str(),
            "Exported": exported,
            "Imported": mcs::has_hosts(features) && mesh.service_imports.get(&cx, key).is_some(),
            "ClusterSetVIP": mcs::vips(&cx, mesh, key).into_iter().next().unwrap_or_default(),
            "Discoverability": if exported { Value::Object(policies) } else { Value::Null },
        })
    };
    list_or_null(keys.into_iter().map(row))
}
