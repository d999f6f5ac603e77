//! Clusters of a waypoint besides those of the services behind it.

use serde_json::{Value, json};

use super::{MESH, WAYPOINT, client, installation, store_in};
use crate::{
    generate::{ResourceType, fixture},
    model::features::RemoteJwks,
};

#[test]
fn waypoints_request_credentials_of_rules_and_sidecars_do_not() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api}
spec:
  hosts: [api.example.com]
  location: MESH_EXTERNAL
  resolution: STATIC
  ports: [{number: 443, name: http, protocol: HTTP}]
  endpoints: [{address: 192.0.2.7}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r}
spec:
  hosts: [a.default.svc.cluster.local]
  http: [{route: [{destination: {host: api.example.com, port: {number: 443}}}]}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec: {host: api.example.com, trafficPolicy: {tls: {mode: SIMPLE, credentialName: api-ca}}}
";
    let sidecar = fixture::client("sidecar~10.1.0.8~s.default~default.svc.cluster.local", &json!({}));
    let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT), ("config.yaml", config)];
    let store = fixture::store(installation(), &files, vec![client(None), sidecar]);
    let sockets = |client| {
        let name = "outbound|443||api.example.com";
        let cluster = fixture::resource(&store, client, ResourceType::Cluster, name);
        let sockets = cluster["transportSocketMatches"].as_array();
        sockets.expect("several sockets").clone()
    };
    let waypoint = sockets(0);
    let mut of_rule = waypoint.iter().filter(|socket| socket["name"] == "user");
    let context = &of_rule.next().expect("TLS of the rule")["transportSocket"]["typedConfig"]["commonTlsContext"];
    let roots = &context["combinedValidationContext"]["validationContextSdsSecretConfig"];
    assert_eq!(roots["name"], "kubernetes://api-ca-cacert");
    let sidecar = sockets(1);
    let names: Vec<&Value> = sidecar.iter().map(|socket| &socket["name"]).collect();
    assert_eq!(names, ["hbone", "tlsMode-disabled"]);
}

#[test]
fn names_keep_their_localities_at_gateways_that_use_waypoints() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: dns, labels: {istio.io/use-waypoint: waypoint, istio.io/ingress-use-waypoint: 'true'}}
spec:
  hosts: [dns.com]
  resolution: DNS
  ports: [{number: 80, name: http, protocol: HTTP}]
  addresses: [240.240.0.9]
  endpoints:
  - {address: one.dns.com, labels: {v: one}}
  - {address: two.dns.com, labels: {v: two}}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: dns}
spec:
  host: dns.com
  trafficPolicy:
    outlierDetection: {}
    loadBalancer: {localityLbSetting: {failoverPriority: [v=two]}}
";
    let labels = json!({"LABELS": {"app": "gateway"}});
    let router = fixture::client("router~10.1.0.7~r.default~default.svc.cluster.local", &labels);
    let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT), ("config.yaml", config)];
    let store = fixture::store(installation(), &files, vec![router]);
    let cluster = fixture::resource(&store, 0, ResourceType::Cluster, "outbound|80||dns.com");
    let split = &cluster["loadAssignment"]["endpoints"];
    let first = &split[0]["lbEndpoints"][0]["endpoint"]["address"]["socketAddress"]["address"];
    assert_eq!((first, &split[1]["priority"]), (&json!("two.dns.com"), &json!(1)));
}

#[test]
fn subsets_of_services_behind_waypoints_have_their_own_discovery_types() {
    let config = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec:
  host: a.default.svc.cluster.local
  trafficPolicy: {loadBalancer: {simple: PASSTHROUGH}}
  subsets:
  - {name: spread, labels: {v: one}, trafficPolicy: {loadBalancer: {simple: ROUND_ROBIN}}}
  - {name: same, labels: {v: two}}
";
    let store = store_in(installation(), None, config);
    let kind = |subset: &str| {
        let name = format!("inbound-vip|80|http{subset}|a.default.svc.cluster.local");
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, &name);
        cluster["type"].clone()
    };
    assert_eq!(kind(""), "ORIGINAL_DST");
    assert_eq!(kind("/same"), "ORIGINAL_DST");
    assert_eq!(kind("/spread"), "EDS");
}

#[test]
fn rules_do_not_apply_to_services_that_the_namespace_of_the_waypoint_does_not_see() {
    let kube = WAYPOINT.replace(
        "protocol: HBONE}",
        "protocol: HBONE, allowedRoutes: {namespaces: {from: All}}}",
    );
    let clusters = |export: &str| {
        let config = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata:
  name: dns
  namespace: other
  labels: {{istio.io/use-waypoint: waypoint, istio.io/use-waypoint-namespace: default}}
spec:
  hosts: [dns.com]
  exportTo: ['{export}']
  resolution: DNS
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  addresses: [240.240.0.9]
  endpoints: [{{address: one.dns.com, labels: {{v: one}}}}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: dns}}
spec: {{host: dns.com, subsets: [{{name: one, labels: {{v: one}}}}]}}
"
        );
        let files = [
            ("mesh.yaml", MESH),
            ("kube.yaml", kube.as_str()),
            ("config.yaml", config.as_str()),
        ];
        let store = fixture::store(installation(), &files, vec![client(None)]);
        let mut names = fixture::names(&store, 0, ResourceType::Cluster);
        names.retain(|name| name.ends_with("|dns.com"));
        names.sort();
        names
    };
    let own = "inbound-vip|80|http|dns.com";
    assert_eq!(clusters("*"), ["inbound-vip|80|http/one|dns.com", own]);
    assert_eq!(clusters("."), [own]);
}

#[test]
fn any_peer_is_accepted_if_trust_domains_are_not_validated() {
    let accepted = |skips| {
        let mut installation = installation();
        installation.features.pilot_skip_validate_trust_domain = skips;
        let store = store_in(installation, None, "");
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, "connect_originate");
        let context = &cluster["transportSocket"]["typedConfig"]["commonTlsContext"]["combinedValidationContext"];
        let names = context["defaultValidationContext"]["matchTypedSubjectAltNames"].as_array();
        let prefixes = names
            .into_iter()
            .flatten()
            .map(|name| name["matcher"]["prefix"].clone());
        prefixes.collect::<Vec<Value>>()
    };
    let of_namespace = "spiffe://cluster.local/ns/default/sa/";
    assert_eq!(accepted(false), ["spiffe://cluster.local/", of_namespace]);
    assert_eq!(accepted(true), [""; 0], "workloads of all namespaces and trust domains");
}

#[test]
fn waypoints_have_clusters_of_the_servers_of_their_jwt_keys() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: keys}
spec:
  hosts: [keys.example.com, own.example.com]
  resolution: DNS
  ports: [{number: 443, name: https, protocol: HTTPS}]
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: all, namespace: istio-system}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: GatewayClass, name: istio-waypoint}]
  jwtRules: [{issuer: x, jwksUri: 'https://keys.example.com/jwks', timeout: 5000000000s}]
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: workloads}
spec: {jwtRules: [{issuer: own, jwksUri: 'https://own.example.com/jwks'}]}
";
    let mut installation = installation();
    installation.features.pilot_jwt_enable_remote_jwks = RemoteJwks::Envoy;
    let store = store_in(installation, None, config);
    let has = |host: &str| {
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, &format!("outbound|443||{host}"));
        !cluster.is_null()
    };
    assert!(has("keys.example.com"));
    assert!(!has("own.example.com"), "the policy is for other workloads");
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "main_internal").to_string();
    assert!(listener.contains("https://keys.example.com/jwks"));
    assert!(!listener.contains("5000000000s"), "Envoy refuses 136 years");
}

#[test]
fn waypoints_have_clusters_of_destinations_of_routes_that_they_do_not_follow() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: hosts}
spec:
  hosts: [one.example.com, two.example.com]
  resolution: DNS
  ports: [{number: 443, name: https, protocol: HTTPS}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: served, namespace: other}
spec:
  hosts: [a.default.svc.cluster.local]
  exportTo: [.]
  http: [{route: [{destination: {host: one.example.com}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: elsewhere, namespace: other}
spec:
  hosts: [elsewhere.default.svc.cluster.local]
  http: [{route: [{destination: {host: two.example.com}}]}]
";
    let store = store_in(installation(), None, config);
    let has = |host: &str| {
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, &format!("outbound|443||{host}"));
        !cluster.is_null()
    };
    assert!(has("one.example.com"));
    assert!(!has("two.example.com"), "the waypoint does not serve the host");
}
