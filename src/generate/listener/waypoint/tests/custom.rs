//! EnvoyFilters and extensions at waypoints.

use serde_json::{Value, json};

use super::{A80, MESH, WAYPOINT, chain, client, http_filters, installation, main_internal, store};
use crate::generate::{ResourceType, fixture};

/// Patches of all listeners, for the waypoint and for other proxies.
const ALL_LISTENERS: &str = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: waypoint}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: waypoint}]
  configPatches:
  - applyTo: LISTENER
    match: {context: SIDECAR_INBOUND}
    patch: {operation: MERGE, value: {freebind: true}}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: others}
spec:
  configPatches: [{applyTo: LISTENER, patch: {operation: MERGE, value: {freebind: true}}}]
";

#[test]
fn patches_apply_to_all_listeners_of_a_waypoint() {
    let others = ["sidecar~10.1.0.8~s.default", "router~10.1.0.7~r.default"];
    let others = others.map(|node| fixture::client(&format!("{node}~default.svc.cluster.local"), &json!({})));
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", WAYPOINT),
        ("config.yaml", ALL_LISTENERS),
    ];
    let clients = std::iter::once(client(None)).chain(others).collect();
    let store = fixture::store(installation(), &files, clients);
    let listener = |client: u64, name: &str| fixture::resource(&store, client, ResourceType::Listener, name);
    let mut names = fixture::names(&store, 0, ResourceType::Listener);
    names.sort();
    assert_eq!(names, ["connect_originate", "connect_terminate", "main_internal"]);
    for name in &names {
        assert_eq!(listener(0, name)["freebind"], true, "{name}");
    }
    for client in [1, 2] {
        let originate = listener(client, "connect_originate");
        assert_eq!(originate["name"], "connect_originate");
        assert_eq!(originate["freebind"], Value::Null, "{client}");
    }
}

#[test]
fn patches_add_clusters_and_change_none_of_services() {
    let config = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: clusters}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: waypoint}]
  configPatches:
  - {applyTo: CLUSTER, match: {context: SIDECAR_INBOUND}, patch: {operation: MERGE, value: {connect_timeout: 3s}}}
  - applyTo: CLUSTER
    match: {cluster: {service: b.default.svc.cluster.local}}
    patch: {operation: REMOVE}
  - {applyTo: CLUSTER, match: {context: SIDECAR_INBOUND}, patch: {operation: ADD, value: {name: inbound}}}
  - {applyTo: CLUSTER, match: {context: SIDECAR_OUTBOUND}, patch: {operation: ADD, value: {name: outbound}}}
  - {applyTo: CLUSTER, patch: {operation: ADD, value: {name: any}}}
";
    let (plain, patched) = (store(""), store(config));
    let names = |store| {
        let mut names = fixture::names(store, 0, ResourceType::Cluster);
        names.sort();
        names
    };
    let (mut want, found) = (names(&plain), names(&patched));
    for name in &want {
        let cluster = |store| fixture::resource(store, 0, ResourceType::Cluster, name);
        assert_eq!(cluster(&patched), cluster(&plain), "{name}");
    }
    want.push("inbound".to_owned());
    want.sort();
    assert_eq!(found, want);
}

#[test]
fn route_patches_apply_to_routes_of_no_virtual_service() {
    let config = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: routes}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: waypoint}]
  configPatches:
  - applyTo: ROUTE_CONFIGURATION
    match: {context: SIDECAR_INBOUND}
    patch: {operation: MERGE, value: {request_headers_to_remove: [x-patched]}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r}
spec:
  hosts: [a.default.svc.cluster.local]
  http: [{route: [{destination: {host: b.default.svc.cluster.local, port: {number: 80}}}]}]
";
    let listener = main_internal(&store(config));
    let is_patched = |name: &str| chain(&listener, name).to_string().contains("x-patched");
    assert!(is_patched("inbound-vip|80|http|b.default.svc.cluster.local"));
    assert!(is_patched("direct-http"));
    assert!(!is_patched(A80), "routes of a VirtualService");
}

#[test]
fn extensions_for_certain_ports_do_not_apply_to_requests() {
    let extension = |name: &str, more: &str| {
        format!(
            "
apiVersion: extensions.istio.io/v1alpha1
kind: TrafficExtension
metadata: {{name: {name}}}
spec: {{lua: {{inlineCode: x()}}, targetRefs: [{{group: '', kind: Service, name: a}}]{more}}}
---"
        )
    };
    let config = extension("always", "") + &extension("eighty", ", match: [{ports: [{number: 80}]}]");
    let listener = main_internal(&store(&config));
    let filters = http_filters(chain(&listener, A80));
    let has = |name: &str| filters.contains(&format!("extensions.istio.io/trafficextension/default.{name}").as_str());
    assert!(has("always"), "{filters:?}");
    assert!(!has("eighty"), "{filters:?}");
}
