//! Services with wildcard hosts behind a waypoint.

use serde_json::{Value, json};

use super::{chain, http_filters, installation, main_internal, store, store_in};
use crate::generate::{ResourceType, fixture};

#[test]
fn waypoints_resolve_dynamic_hosts_per_request() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: w, labels: {istio.io/use-waypoint: waypoint}}
spec:
  hosts: ['*.example.com']
  location: MESH_EXTERNAL
  resolution: DYNAMIC_DNS
  ports: [{number: 80, name: http, protocol: HTTP}, {number: 443, name: tls, protocol: TLS}]
";
    let mut installation = installation();
    installation.features.enable_wildcard_host_service_entries_for_tls = true;
    let store = store_in(installation.clone(), None, entry);
    let listener = main_internal(&store);
    let http = chain(&listener, "inbound-vip|80|http|*.example.com");
    assert!(http_filters(http).contains(&"envoy.filters.http.dynamic_forward_proxy"));
    let manager = &http["filters"][0]["typedConfig"];
    assert_eq!(
        manager["routeConfig"]["virtualHosts"][0]["domains"],
        json!(["*.example.com"])
    );
    let tls = chain(&listener, "inbound-vip|443|tcp|*.example.com").to_string();
    assert!(tls.contains("sni_dynamic_forward_proxy"));
    for name in ["inbound-vip|80|http|*.example.com", "inbound-vip|443|tcp|*.example.com"] {
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, name);
        assert_eq!(
            cluster["clusterType"]["name"], "envoy.clusters.dynamic_forward_proxy",
            "{name}"
        );
        assert_eq!(cluster["transportSocket"]["name"], "internal_upstream", "{name}");
        assert_eq!(
            fixture::resource(&store, 0, ResourceType::Endpoint, name),
            Value::Null,
            "{name}"
        );
    }
    // A route leads elsewhere.
    let route = "---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r}
spec:
  hosts: ['*.example.com']
  tls:
  - match: [{sniHosts: ['*.example.com']}]
    route: [{destination: {host: b.default.svc.cluster.local, port: {number: 443}}}]
";
    let listener = main_internal(&store_in(installation, None, &[entry, route].concat()));
    let tls = chain(&listener, "inbound-vip|443|tcp|*.example.com").to_string();
    assert!(tls.contains("inbound-vip|443|tcp|b.default.svc.cluster.local"), "{tls}");
    assert!(!tls.contains("sni_dynamic_forward_proxy"), "{tls}");
}

#[test]
fn virtual_services_for_names_below_a_wildcard_apply_to_it() {
    let config = |host: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: w, labels: {{istio.io/use-waypoint: waypoint}}}}
spec:
  hosts: ['*.example.com']
  location: MESH_EXTERNAL
  resolution: DYNAMIC_DNS
  ports: [{{number: 80, name: http, protocol: HTTP}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: r}}
spec:
  hosts: ['{host}']
  http: [{{route: [{{destination: {{host: b.default.svc.cluster.local, port: {{number: 80}}}}}}]}}]
"
        )
    };
    let own = "inbound-vip|80|http|*.example.com";
    let b = "inbound-vip|80|http|b.default.svc.cluster.local";
    for (host, cluster) in [
        ("api.example.com", b),
        ("*.a.example.com", b),
        ("*.com", b),
        ("example.com", own),
    ] {
        let listener = main_internal(&store(&config(host)));
        let manager = &chain(&listener, own)["filters"][0]["typedConfig"];
        let only = &manager["routeConfig"]["virtualHosts"][0];
        assert_eq!(only["domains"], json!(["*.example.com"]));
        assert_eq!(only["routes"][0]["route"]["cluster"], cluster, "{host}");
    }
}
