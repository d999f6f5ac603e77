mod clusters;
mod custom;
mod networks;
mod routes;
mod wildcard;

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::{
    generate::{
        RequestedResources, ResourceType, fixture,
        proxy::Proxy,
        store::{ConfigStore, ProxyEvents, Serial},
    },
    model::{
        Change, Installation, World,
        features::Features,
        fixture::{folder, folder_world},
    },
};

const MESH: &str = "trustDomain: cluster.local\n";

const WAYPOINT: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: waypoint}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.9}]}
---
apiVersion: v1
kind: Service
metadata: {name: waypoint}
spec:
  clusterIP: 10.0.0.9
  selector: {gateway.networking.k8s.io/gateway-name: waypoint}
  ports: [{name: mesh, port: 15008, appProtocol: hbone}]
---
apiVersion: v1
kind: Pod
metadata:
  name: waypoint-0
  labels: {gateway.networking.k8s.io/gateway-name: waypoint, gateway.istio.io/managed: istio.io-mesh-controller}
spec: {serviceAccountName: waypoint}
status: {phase: Running, podIP: 10.1.0.9, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Service
metadata: {name: a, labels: {istio.io/use-waypoint: waypoint}}
spec:
  clusterIP: 10.0.0.1
  ports: [{name: http, port: 80}, {name: tcp, port: 90}, {name: what, port: 100}, {name: udp, port: 110, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: b, labels: {istio.io/use-waypoint: waypoint}}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}, {name: tls, port: 443}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
";

/// Labels of instances of the waypoint.
static LABELS: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "gateway.networking.k8s.io/gateway-name": "waypoint",
        "gateway.istio.io/managed": "istio.io-mesh-controller",
    })
});

fn installation() -> Installation {
    Installation {
        features: Features {
            pilot_enable_ambient: true,
            pilot_enable_ambient_waypoints: true,
            pilot_enable_sending_hbone: true,
            enable_ingress_waypoint_routing: true,
            ..Features::default()
        },
        ..Installation::default()
    }
}

/// Returns the store of a waypoint with these extensions in a mesh of [`WAYPOINT`] and these objects.
fn store_with(extensions: Option<&[&str]>, config: &str) -> ConfigStore {
    store_in(installation(), extensions, config)
}

fn store_in(installation: Installation, extensions: Option<&[&str]>, config: &str) -> ConfigStore {
    let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT), ("config.yaml", config)];
    fixture::store(installation, &files, vec![client(extensions)])
}

/// Returns an instance of the waypoint.
fn client(extensions: Option<&[&str]>) -> Proxy {
    let labels = json!({"LABELS": LABELS.clone()});
    let node = "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local";
    fixture::changed(fixture::client(node, &labels), |kind| {
        kind.extensions = fixture::extensions(extensions);
    })
}

fn store(config: &str) -> ConfigStore {
    store_with(None, config)
}

fn main_internal(store: &ConfigStore) -> Value {
    fixture::resource(store, 0, ResourceType::Listener, "main_internal")
}

fn chain<'v>(listener: &'v Value, name: &str) -> &'v Value {
    let mut chains = listener["filterChains"].as_array().expect("chains").iter();
    chains.find(|chain| chain["name"] == name).expect("the chain is there")
}

/// The filters of the connection manager at the end of a chain.
fn http_filters(chain: &Value) -> Vec<&str> {
    let manager = chain["filters"].as_array().and_then(|filters| filters.last());
    let filters = &manager.expect("a filter")["typedConfig"]["httpFilters"];
    let names = filters.as_array().expect("HTTP filters").iter();
    names.filter_map(|filter| filter["name"].as_str()).collect()
}

const A80: &str = "inbound-vip|80|http|a.default.svc.cluster.local";

#[test]
fn a_chain_is_chosen_by_address_port_and_protocol() {
    let listener = main_internal(&store(""));
    let chains = listener["filterChains"].as_array().expect("chains").iter();
    let names: Vec<&str> = chains.filter_map(|chain| chain["name"].as_str()).collect();
    let want = [
        A80,
        "inbound-vip|90|tcp|a.default.svc.cluster.local",
        "inbound-vip|100|tcp|a.default.svc.cluster.local",
        "inbound-vip|100|http|a.default.svc.cluster.local",
        "inbound-vip|80|http|b.default.svc.cluster.local",
        "inbound-vip|443|tcp|b.default.svc.cluster.local",
        "direct-tcp",
        "direct-http",
    ];
    assert_eq!(names, want);

    let by_address = &listener["filterChainMatcher"]["matcherTree"]["customMatch"]["typedConfig"]["rangeMatchers"];
    let addresses = by_address.as_array().expect("services").iter();
    let addresses: Vec<&Value> = addresses
        .map(|service| &service["ranges"][0]["addressPrefix"])
        .collect();
    assert_eq!(addresses, ["10.0.0.1", "10.0.0.2"]);
    let by_port = &by_address[0]["onMatch"]["matcher"]["matcherTree"]["exactMatchMap"]["map"];
    assert_eq!(by_port["80"]["action"]["name"], A80);
    let sniffed = &by_port["100"]["matcher"];
    assert_eq!(sniffed["onNoMatch"]["action"]["name"], want[2]);
    let by_protocol = &sniffed["matcherTree"]["exactMatchMap"]["map"];
    assert_eq!(by_protocol["'http/1.1'"]["action"]["name"], want[3]);
    assert_eq!(by_protocol.as_object().map(serde_json::Map::len), Some(2));

    // Only the ports whose protocol is not declared are looked into; TLS only where it is declared. For TLS, the ports
    // include that of UDP, which has no chain.
    let disabled = |filter: usize| {
        let rules = &listener["listenerFilters"][filter]["filterDisabled"]["orMatch"]["rules"];
        let rules = rules.as_array().expect("several ports").iter();
        rules
            .map(|rule| rule["destinationPortRange"]["start"].as_u64().expect("a port"))
            .collect::<Vec<_>>()
    };
    assert_eq!(disabled(1), [80, 90, 443]);
    assert_eq!(disabled(2), [80, 90, 100, 110]);
}

/// Envoy refuses a listener with two chains of one name, and so all services of the waypoint.
#[test]
fn a_port_for_two_protocols_has_chains_once() {
    let config = "
apiVersion: v1
kind: Service
metadata: {name: c, labels: {istio.io/use-waypoint: waypoint}}
spec:
  clusterIP: 10.0.0.4
  ports:
  - {name: udp, port: 80, protocol: UDP}
  - {name: http, port: 80}
  - {name: http-sctp, port: 80, protocol: SCTP}
";
    let listener = main_internal(&store(config));
    let chains = listener["filterChains"].as_array().expect("chains").iter();
    let names = chains.filter_map(|chain| chain["name"].as_str());
    let names: Vec<&str> = names
        .filter(|name| name.ends_with("|c.default.svc.cluster.local"))
        .collect();
    assert_eq!(names, ["inbound-vip|80|http|c.default.svc.cluster.local"]);
}

#[test]
fn a_service_entry_without_addresses_adds_none_to_a_service() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: a}
spec:
  hosts: [a.default.svc.cluster.local]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{name: http, number: 80, protocol: HTTP}]
";
    let mut installation = installation();
    installation.features.ambient_enable_multi_network = true;
    let listener = main_internal(&store_in(installation, None, config));
    let matcher = &listener["filterChainMatcher"]["onNoMatch"]["matcher"]["matcherTree"]["customMatch"];
    let of_a = &matcher["typedConfig"]["rangeMatchers"][0]["ranges"];
    assert_eq!(*of_a, json!([{"addressPrefix": "10.0.0.1", "prefixLen": 32}]));
    // Connections from other networks go to the first address.
    let state = &chain(&listener, A80)["filters"][0]["typedConfig"]["onNewConnection"][0];
    let text = &state["formatString"]["textFormatSource"]["inlineString"];
    assert!(
        text.as_str().is_some_and(|text| text.ends_with("r'10.0.0.1:80')%")),
        "{text}"
    );
}

#[test]
fn services_of_several_networks_are_told_apart_by_host() {
    let mut installation = installation();
    installation.features.ambient_enable_multi_network = true;
    let listener = main_internal(&store_in(installation, None, ""));
    let matcher = &listener["filterChainMatcher"];
    let input = &matcher["matcherTree"]["input"];
    assert_eq!(input["typedConfig"]["key"], "io.istio.connect_authority");
    let by_authority = &matcher["matcherTree"]["exactMatchMap"]["map"];
    let asked: Vec<&String> = by_authority.as_object().expect("a map").keys().collect();
    let of = |host: &str, ports: &[u32]| {
        let ports = ports
            .iter()
            .map(|port| format!("{host}.default.svc.cluster.local:{port}"));
        ports.collect::<Vec<_>>()
    };
    assert_eq!(
        asked,
        [of("a", &[100, 80, 90]), of("b", &[443, 80])]
            .concat()
            .iter()
            .collect::<Vec<_>>()
    );
    assert_eq!(by_authority["a.default.svc.cluster.local:80"]["action"]["name"], A80);
    let by_address = &matcher["onNoMatch"]["matcher"]["matcherTree"]["customMatch"]["typedConfig"]["rangeMatchers"];
    assert_eq!(by_address.as_array().map(Vec::len), Some(2));
    // Connections from other networks have no destination address yet.
    let first = &chain(&listener, A80)["filters"][0];
    assert_eq!(first["name"], "set_dst_address");
    let state = &first["typedConfig"]["onNewConnection"][0];
    let text = &state["formatString"]["textFormatSource"]["inlineString"];
    assert!(
        text.as_str().is_some_and(|text| text.ends_with("r'10.0.0.1:80')%")),
        "{text}"
    );
    assert_ne!(chain(&listener, "direct-tcp")["filters"][0]["name"], "set_dst_address");
}

#[test]
fn policies_of_a_service_stand_in_its_chains_alone() {
    let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: p}
spec:
  targetRefs: [{group: '', kind: Service, name: a}]
  rules: [{from: [{source: {principals: [cluster.local/ns/default/sa/x]}}]}]
";
    let listener = main_internal(&store(policy));
    let secured = |name: &str| http_filters(chain(&listener, name)).contains(&"envoy.filters.http.rbac");
    assert!(secured(A80));
    assert!(!secured("inbound-vip|80|http|b.default.svc.cluster.local"));
    assert!(!secured("direct-http"));
    // The caller's identity comes from the tunnel.
    assert!(chain(&listener, A80).to_string().contains("io.istio.peer_principal"));
    let tcp = chain(&listener, "inbound-vip|90|tcp|a.default.svc.cluster.local");
    assert!(tcp.to_string().contains("envoy.filters.network.rbac"));
}

#[test]
fn layered_policies_of_the_waypoint_apply_to_tunnels() {
    let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: p}
spec:
  action: DENY
  rules: [{from: [{source: {namespaces: [x]}}], to: [{operation: {methods: [GET]}}]}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: other}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: GatewayClass, name: istio-waypoint}]
  rules: [{}]
";
    let layered = |enabled| {
        let mut installation = installation();
        installation.features.enable_layered_waypoint_authorization_policies = enabled;
        let store = store_in(installation, None, policy);
        let listener = fixture::resource(&store, 0, ResourceType::Listener, "connect_terminate");
        let manager = &listener["filterChains"][0]["filters"][0]["typedConfig"];
        (manager["httpFilters"][0].clone(), listener.to_string())
    };
    assert!(!layered(false).1.contains("rbac"));
    let (first, listener) = layered(true);
    assert_eq!(first["name"], "envoy.filters.http.rbac");
    let policies = first["typedConfig"]["rules"]["policies"].as_object().expect("policies");
    let rule = &policies["ns[default]-policy[p]-rule[0]"];
    assert_eq!(
        policies.len(),
        1,
        "only policies that select the waypoint as a workload apply"
    );
    // Tunnels are connections: methods do not count, and the peer is that of the connection.
    assert_eq!(rule["permissions"][0]["andRules"]["rules"], json!([{"any": true}]));
    assert!(rule["principals"].to_string().contains("authenticated"));
    assert!(!listener.contains("directResponse"));
}

#[test]
fn proxies_that_cannot_enforce_layered_policies_accept_no_tunnels() {
    let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: p}
spec: {rules: [{from: [{source: {namespaces: [x]}}]}]}
";
    let mut installation = installation();
    installation.features.enable_layered_waypoint_authorization_policies = true;
    let store = store_in(installation, Some(&["envoy.filters.http.router"]), policy);
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "connect_terminate");
    let manager = &listener["filterChains"][0]["filters"][0]["typedConfig"];
    let route = &manager["routeConfig"]["virtualHosts"][0]["routes"][0];
    assert_eq!(route["directResponse"]["status"], 403);
}

#[test]
fn routes_lead_through_the_waypoint_where_it_serves_the_host() {
    let route = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r, namespace: NAMESPACE}
spec:
  hosts: [a.default.svc.cluster.local]
  http:
  - match: [{sourceLabels: {app: x}}]
    route: [{destination: {host: b.default.svc.cluster.local, subset: never}}]
  - match: [{gateways: [mesh], sourceLabels: {app: x}}]
    route: [{destination: {host: b.default.svc.cluster.local, subset: never}}]
  - match: [{uri: {prefix: /b}}]
    route: [{destination: {host: b.default.svc.cluster.local, subset: v1, port: {number: 80}}}]
  - route: [{destination: {host: elsewhere.default.svc.cluster.local}}]
";
    let clusters = |namespace: &str| {
        let store = store(&route.replace("NAMESPACE", namespace));
        let listener = main_internal(&store);
        let manager = &chain(&listener, A80)["filters"][0]["typedConfig"];
        let routes = &manager["routeConfig"]["virtualHosts"][0]["routes"];
        let routes = routes.as_array().expect("routes").iter();
        let led: Vec<String> = routes
            .map(|route| route["route"]["cluster"].as_str().expect("a cluster").to_owned())
            .collect();
        (led, fixture::names(&store, 0, ResourceType::Cluster))
    };
    let elsewhere = "outbound|80||elsewhere.default.svc.cluster.local".to_owned();
    let (led, known) = clusters("default");
    assert_eq!(led, ["inbound-vip|80|http/v1|b.default.svc.cluster.local", &elsewhere]);
    assert!(known.contains(&elsewhere));
    // Other namespaces than the waypoint's and the service's have no say, although the clusters of their destinations
    // are there.
    let (led, known) = clusters("other");
    assert_eq!(led, [A80]);
    assert!(known.contains(&elsewhere));
}

#[test]
fn tcp_connections_follow_tls_and_tcp_routes() {
    let route = |name: &str, rest: &str| {
        format!(
            "---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: {name}}}
spec: {{hosts: [a.default.svc.cluster.local, b.default.svc.cluster.local], {rest}}}
"
        )
    };
    let destination =
        |host: &str, rest: &str| format!("{{destination: {{host: {host}.default.svc.cluster.local{rest}}}}}");
    let rule = "---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec:
  host: elsewhere.default.svc.cluster.local
  trafficPolicy:
    connectionPool: {tcp: {idleTimeout: 7s}}
    loadBalancer: {consistentHash: {useSourceIp: true}}
";
    let proxy = |config: &[String]| {
        let listener = main_internal(&store(&config.concat()));
        let name = "inbound-vip|90|tcp|a.default.svc.cluster.local";
        let filters = chain(&listener, name)["filters"].as_array().expect("filters").clone();
        filters.last().expect("a filter")["typedConfig"].clone()
    };
    let elsewhere = destination("elsewhere", ", port: {number: 80}, subset: v1");
    let b = destination("b", ", port: {number: 443}");
    let tcp =
        format!("tcp: [{{match: [{{port: 91}}], route: [{b}]}}, {{match: [{{port: 90}}], route: [{elsewhere}]}}]");
    let single = proxy(&[route("r", &tcp), rule.to_owned()]);
    assert_eq!(single["cluster"], "outbound|80|v1|elsewhere.default.svc.cluster.local");
    assert_eq!(single["idleTimeout"], "7s");
    assert_eq!(single["hashPolicy"], json!([{"sourceIp": {}}]));
    // A rule for the waypoint itself takes precedence.
    let own = "---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: own}
spec:
  host: elsewhere.default.svc.cluster.local
  workloadSelector: {matchLabels: {gateway.networking.k8s.io/gateway-name: waypoint}}
  trafficPolicy: {connectionPool: {tcp: {idleTimeout: 8s}}}
";
    let selected = proxy(&[route("r", &tcp), rule.to_owned(), own.to_owned()]);
    assert_eq!(selected["idleTimeout"], "8s");
    assert_eq!(selected["hashPolicy"], Value::Null);
    // A TLS route of a later VirtualService takes precedence, if it is for the host.
    let both = format!("{{weight: 3, {}, {{weight: 1, {}", &elsewhere[1..], &b[1..]);
    let tls = |sni: &str| format!("tls: [{{match: [{{sniHosts: [{sni}]}}], route: [{both}]}}]");
    let weighted = proxy(&[route("r", &tcp), route("s", &tls("a.default.svc.cluster.local"))]);
    let clusters = json!([
        {"name": "outbound|80|v1|elsewhere.default.svc.cluster.local", "weight": 3},
        {"name": "inbound-vip|443|tcp|b.default.svc.cluster.local", "weight": 1},
    ]);
    assert_eq!(weighted["weightedClusters"]["clusters"], clusters);
    assert_eq!(
        proxy(&[route("r", &tcp), route("s", &tls("b.default.svc.cluster.local"))])["cluster"],
        single["cluster"]
    );
    // The first of all routes for the port applies, also if another one is for all ports.
    let to = |routes: &[String]| format!("tcp: [{}]", routes.join(", "));
    let [for_port, for_other, for_all] = ["[{port: 90}]", "[{port: 91}]", "[{gateways: [mesh]}]"];
    let routed = |by: &str, destination: &str| format!("{{match: {by}, route: [{destination}]}}");
    let own_first = to(&[routed(for_other, &b), routed(for_port, &elsewhere), routed(for_all, &b)]);
    let all_first = to(&[
        routed(for_other, &elsewhere),
        routed(for_all, &b),
        routed(for_port, &elsewhere),
    ]);
    let without_match = to(&[format!("{{route: [{b}]}}"), routed(for_port, &elsewhere)]);
    let to_b = "inbound-vip|443|tcp|b.default.svc.cluster.local";
    assert_eq!(proxy(&[route("r", &own_first)])["cluster"], single["cluster"]);
    assert_eq!(proxy(&[route("r", &all_first)])["cluster"], to_b);
    assert_eq!(proxy(&[route("r", &without_match)])["cluster"], to_b);
    assert_eq!(
        proxy(&[route("r", &own_first), route("s", &all_first)])["cluster"],
        single["cluster"]
    );
    // Routes for clients that a waypoint does not know never apply.
    let unknown = format!("tcp: [{{match: [{{sourceLabels: {{app: x}}}}], route: [{elsewhere}]}}]");
    let own = "inbound-vip|90|tcp|a.default.svc.cluster.local";
    assert_eq!(proxy(&[route("r", &unknown)])["cluster"], own);
}

#[test]
fn routes_of_several_virtual_services_follow_each_other() {
    let config = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r, creationTimestamp: '2024-01-01T00:00:00Z'}
spec:
  hosts: [a.default.svc.cluster.local]
  http:
  - match: [{uri: {prefix: /a}}]
    route: [{destination: {host: a.default.svc.cluster.local, port: {number: 90}}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: s, creationTimestamp: '2024-01-02T00:00:00Z'}
spec:
  hosts: [a.default.svc.cluster.local]
  http: [{route: [{destination: {host: b.default.svc.cluster.local, port: {number: 80}}}]}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec:
  host: b.default.svc.cluster.local
  trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x}}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: t}
spec:
  hosts: [b.default.svc.cluster.local]
  http: [{match: [{sourceLabels: {app: x}}], route: [{destination: {host: b.default.svc.cluster.local}}]}]
";
    let listener = main_internal(&store(config));
    let routes = |name: &str| {
        let manager = &chain(&listener, name)["filters"][0]["typedConfig"];
        let routes = manager["routeConfig"]["virtualHosts"][0]["routes"].as_array();
        routes.expect("routes").clone()
    };
    let found = routes(A80);
    let clusters: Vec<&Value> = found.iter().map(|route| &route["route"]["cluster"]).collect();
    let b80 = "inbound-vip|80|http|b.default.svc.cluster.local";
    assert_eq!(clusters, ["inbound-vip|90|tcp|a.default.svc.cluster.local", b80]);
    assert_eq!(
        found[1]["route"]["hashPolicy"],
        json!([{"header": {"headerName": "x"}}])
    );
    // A VirtualService of which no route applies is no reason for an empty virtual host.
    let found = routes(b80);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0]["route"]["cluster"], b80);
}

#[test]
fn clusters_behind_a_waypoint_use_tunnels() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec:
  host: b.default.svc.cluster.local
  trafficPolicy: {portLevelSettings: [{port: {number: 443}, tls: {mode: SIMPLE, sni: b.example}}]}
  subsets: [{name: v1, labels: {v: '1'}}]
";
    let store = store(rule);
    let socket = |name: &str| {
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, name);
        let socket = &cluster["transportSocket"];
        assert_eq!(socket["name"], "internal_upstream", "{name}");
        socket["typedConfig"]["transportSocket"]["name"].clone()
    };
    assert_eq!(
        socket("inbound-vip|80|http/v1|b.default.svc.cluster.local"),
        "raw_buffer"
    );
    assert_eq!(
        socket("inbound-vip|443|tcp|b.default.svc.cluster.local"),
        "envoy.transport_sockets.tls"
    );
    let names = fixture::names(&store, 0, ResourceType::Cluster);
    for name in ["main_internal", "encap", "connect_originate"] {
        assert!(names.iter().any(|known| known == name), "{name}");
    }
    assert!(!names.iter().any(|name| name.starts_with("outbound|")));
}

#[test]
fn headless_services_are_reached_at_the_addresses_that_clients_selected() {
    let headless = "
apiVersion: v1
kind: Service
metadata: {name: h, labels: {istio.io/use-waypoint: waypoint}}
spec: {clusterIP: None, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: n, labels: {istio.io/use-waypoint: waypoint}}
spec:
  hosts: [n.example.com]
  addresses: [10.0.0.5]
  resolution: NONE
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]
";
    let store = store(headless);
    let resource = |kind, host: &str| fixture::resource(&store, 0, kind, &format!("inbound-vip|80|http|{host}"));
    for (host, port) in [
        ("h.default.svc.cluster.local", Value::Null),
        ("n.example.com", json!(8080)),
    ] {
        let cluster = resource(ResourceType::Cluster, host);
        assert_eq!(cluster["type"], "ORIGINAL_DST", "{host}");
        assert_eq!(cluster["lbPolicy"], "CLUSTER_PROVIDED", "{host}");
        assert_eq!(cluster["originalDstLbConfig"]["upstreamPortOverride"], port, "{host}");
        assert_eq!(resource(ResourceType::Endpoint, host), Value::Null, "{host}");
    }
    let by_address = &main_internal(&store)["filterChainMatcher"]["matcherTree"]["customMatch"]["typedConfig"];
    assert!(by_address.to_string().contains(r#""addressPrefix":"0.0.0.0""#));
}

#[test]
fn services_hidden_from_the_namespace_of_the_waypoint_have_no_endpoints() {
    let more = |export_to: &str| {
        format!(
            "
apiVersion: v1
kind: Service
metadata:
  name: x
  labels: {{istio.io/use-waypoint: waypoint}}
  annotations: {{networking.istio.io/exportTo: '{export_to}'}}
spec: {{clusterIP: 10.0.0.5, ports: [{{name: http, port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: x-1, labels: {{kubernetes.io/service-name: x}}}}
addressType: IPv4
ports: [{{name: http, port: 80}}]
endpoints: [{{addresses: [10.1.0.3], conditions: {{ready: true}}}}]
"
        )
    };
    for (export_to, is_served) in [("default", true), ("other", false)] {
        let store = store(&more(export_to));
        let name = "inbound-vip|80|http|x.default.svc.cluster.local";
        let resource = |kind| fixture::resource(&store, 0, kind, name);
        assert_eq!(resource(ResourceType::Cluster)["type"], "EDS", "{export_to}");
        assert_eq!(
            resource(ResourceType::Endpoint)["endpoints"].is_array(),
            is_served,
            "{export_to}"
        );
    }
}

#[test]
fn filters_unknown_to_upstream_envoy_are_omitted() {
    let store = store_with(Some(&["envoy.filters.http.grpc_stats"]), "");
    for name in ["connect_terminate", "main_internal"] {
        let listener = fixture::resource(&store, 0, ResourceType::Listener, name);
        assert!(listener.is_object(), "{name}");
        let listener = listener.to_string();
        assert!(
            !listener.contains("peer_metadata") && !listener.contains("hashable_string"),
            "{name}"
        );
    }
}

#[test]
fn gateways_use_waypoints_of_services_that_require_it() {
    let more = "
---
apiVersion: v1
kind: Service
metadata: {name: c, labels: {istio.io/use-waypoint: waypoint, istio.io/ingress-use-waypoint: 'true'}}
spec: {clusterIP: 10.0.0.4, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: h, labels: {istio.io/use-waypoint: waypoint, istio.io/ingress-use-waypoint: 'true'}}
spec: {clusterIP: None, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: waypoint-1, labels: {kubernetes.io/service-name: waypoint}}
addressType: IPv4
ports: [{name: mesh, port: 15008}]
endpoints: [{addresses: [10.1.0.9], conditions: {ready: true}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: b-1, labels: {kubernetes.io/service-name: b}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.1.0.2], conditions: {ready: true}}]
";
    let kube = format!("{WAYPOINT}{more}");
    let files = [("mesh.yaml", MESH), ("kube.yaml", kube.as_str())];
    let clients = ["router~10.1.0.7~r.default", "sidecar~10.1.0.8~s.default"];
    let clients = clients.map(|node| fixture::client(&format!("{node}~default.svc.cluster.local"), &json!({})));
    let store = fixture::store(installation(), &files, clients.to_vec());
    let destination = |client: u64, host: &str| {
        let name = format!("outbound|80||{host}.default.svc.cluster.local");
        let assignment = fixture::resource(&store, client, ResourceType::Endpoint, &name);
        let endpoint = &assignment["endpoints"][0]["lbEndpoints"][0];
        endpoint["metadata"]["filterMetadata"]["envoy.filters.listener.original_dst"].clone()
    };
    let through = json!({"local": "10.0.0.4:80", "waypoint": "10.1.0.9:15008"});
    assert_eq!(destination(0, "c"), through);
    let headless = json!({"local": "0.0.0.0:80", "waypoint": "10.1.0.9:15008"});
    assert_eq!(destination(0, "h"), headless);
    // Others did not ask for it, or their own sidecars' ztunnel leads there.
    assert_eq!(destination(0, "b"), Value::Null);
    assert_eq!(destination(1, "c"), Value::Null);
}

#[test]
fn tunnels_use_the_certificates_that_the_node_names() {
    let metadata = json!({
        "LABELS": {"gateway.networking.k8s.io/gateway-name": "waypoint"},
        "TLS_SERVER_CERT_CHAIN": "/c", "TLS_SERVER_KEY": "/k", "TLS_SERVER_ROOT_CERT": "/r",
    });
    let client = fixture::client(
        "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local",
        &metadata,
    );
    let store = fixture::store(
        installation(),
        &[("mesh.yaml", MESH), ("kube.yaml", WAYPOINT)],
        vec![client],
    );
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "connect_terminate");
    let cluster = fixture::resource(&store, 0, ResourceType::Cluster, "connect_originate");
    for socket in [
        &listener["filterChains"][0]["transportSocket"],
        &cluster["transportSocket"],
    ] {
        let context = &socket["typedConfig"]["commonTlsContext"];
        assert_eq!(context["tlsCertificateSdsSecretConfigs"][0]["name"], "file-cert:/c~/k");
        let roots = &context["combinedValidationContext"]["validationContextSdsSecretConfig"];
        assert_eq!(roots["name"], "file-root:/r");
    }
}

#[test]
fn windows_of_tunnels_are_those_of_the_variables() {
    let mut installation = installation();
    installation.features.pilot_hbone_initial_stream_window_size = 70_000;
    let store = store_in(installation, None, "");
    let cluster = fixture::resource(&store, 0, ResourceType::Cluster, "connect_originate");
    let options = &cluster["typedExtensionProtocolOptions"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    let http2 = &options["explicitHttpConfig"]["http2ProtocolOptions"];
    assert_eq!(http2["initialStreamWindowSize"], 70_000);
    assert_eq!(http2["initialConnectionWindowSize"], Value::Null);
}

#[test]
fn tunnels_carry_baggage_if_it_is_enabled() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec: {host: b.default.svc.cluster.local, trafficPolicy: {tls: {mode: SIMPLE}}}
";
    let mut installation = installation();
    installation.features.ambient_enable_baggage = true;
    let store = store_in(installation, None, rule);
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "connect_originate");
    let filters = &listener["filterChains"][0]["filters"];
    assert_eq!(filters[0]["name"], "upstream_hbone_peer_metadata");
    let tunnel = &filters[1]["typedConfig"]["tunnelingConfig"];
    assert_eq!(tunnel["headersToAdd"][0]["header"]["key"], "baggage");
    let cluster = |host: &str| {
        let name = format!("inbound-vip|80|http|{host}.default.svc.cluster.local");
        fixture::resource(&store, 0, ResourceType::Cluster, &name)
    };
    for host in ["a", "b"] {
        let cluster = cluster(host);
        assert_eq!(cluster["filters"][0]["name"], "upstream_hbone_peer_metadata", "{host}");
        let passed = &cluster["transportSocket"]["typedConfig"]["passthroughMetadata"];
        assert_eq!(passed[3]["name"], "istio.peer_metadata", "{host}");
    }
    // A server behind TLS of a rule does not describe itself.
    let disabled = |host: &str| cluster(host)["metadata"]["filterMetadata"]["istio.peer_metadata"].clone();
    assert_eq!(disabled("a"), Value::Null);
    assert_eq!(disabled("b"), json!({"disable_baggage_discovery": true}));
    let text = main_internal(&store).to_string();
    assert!(text.contains("upstream_filter_state"));
}

#[test]
fn connections_to_workloads_have_chains_by_protocol() {
    let mesh = |traffic: &str| {
        format!(
            "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: direct, labels: {{istio.io/waypoint-for: {traffic}}}}}
spec: {{gatewayClassName: istio-waypoint, listeners: [{{name: mesh, port: 15008, protocol: HBONE}}]}}
status: {{addresses: [{{type: IPAddress, value: 10.0.0.9}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: web-0, labels: {{istio.io/use-waypoint: direct}}}}
spec: {{serviceAccountName: web}}
status: {{phase: Running, podIP: 10.1.0.4, podIPs: [{{ip: 10.1.0.4}}, {{ip: 'fd00::4'}}]}}
"
        )
    };
    let matched = |listener: &Value| {
        let tree = &listener["filterChainMatcher"]["matcherTree"];
        let ranges = &tree["customMatch"]["typedConfig"]["rangeMatchers"];
        ranges.as_array().cloned().unwrap_or_default()
    };
    let all = main_internal(&store(&mesh("all")));
    let workloads = matched(&all).pop().expect("a matcher");
    let prefixes = workloads["ranges"].as_array().expect("ranges").iter();
    let prefixes: Vec<_> = prefixes
        .map(|range| (range["addressPrefix"].clone(), range["prefixLen"].clone()))
        .collect();
    assert_eq!(
        prefixes,
        [(json!("10.1.0.4"), json!(32)), (json!("fd00::4"), json!(128))]
    );
    let by_protocol = &workloads["onMatch"]["matcher"];
    assert_eq!(by_protocol["onNoMatch"]["action"]["name"], "direct-tcp");
    let http = &by_protocol["matcherTree"]["exactMatchMap"]["map"]["'http/1.1'"];
    assert_eq!(http["action"]["name"], "direct-http");
    // Services precede workloads, and any port of a workload may carry HTTP.
    assert_eq!(matched(&all).len(), 3);
    assert!(all["listenerFilters"][1].get("filterDisabled").is_none());

    let only = matched(&main_internal(&store(&mesh("workload"))));
    assert_eq!(only.last(), Some(&workloads));
    for unsuited in ["service", "none"] {
        let listener = main_internal(&store(&mesh(unsuited)));
        assert_eq!(matched(&listener).len(), 2);
        assert!(listener["listenerFilters"][1]["filterDisabled"].is_object());
    }
}

/// A waypoint with a number of services, whose mesh changes.
struct Many {
    world: World,
    store: ConfigStore,
}

impl Many {
    fn new(services: usize, config: &str) -> Self {
        let config: String = (0..services)
            .map(Self::service)
            .chain([config.to_owned()])
            .collect::<Vec<_>>()
            .join("---\n");
        let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT), ("config.yaml", &config)];
        let world = folder_world(installation(), &files);
        let store = fixture::store_of_world(&world, vec![client(None)], &RequestedResources::default());
        Self { world, store }
    }

    fn service(number: usize) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s-{number}, labels: {{istio.io/use-waypoint: waypoint}}}}\n\
             spec: {{clusterIP: 10.0.8.{number}, ports: [{{name: http, port: 80}}, {{name: tcp, port: 90}}]}}\n"
        )
    }

    /// Applies objects, and returns the number of services whose chains were built.
    fn apply(&mut self, manifest: &str) -> usize {
        let rows = folder(&installation(), &[("change.yaml", manifest)]);
        let commit = self.world.commit(rows.into_iter().map(Change::Upsert).collect());
        let update = self
            .store
            .update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
        assert_eq!(update.panics, [""; 0]);
        let scratch = fixture::store_of_world(&self.world, vec![client(None)], &RequestedResources::default());
        assert_eq!(
            main_internal(&self.store),
            main_internal(&scratch),
            "incremental as from scratch"
        );
        update.fragments
    }
}

#[test]
fn a_change_of_one_service_rebuilds_its_chains_only() {
    let mut many = Many::new(20, "");
    let changed = Many::service(3).replace("name: tcp", "name: mongo");
    assert_eq!(many.apply(&changed), 1, "a port");
    assert_eq!(many.apply(&changed), 0, "no change");
    let detached = changed.replace("istio.io/use-waypoint: waypoint", "app: s");
    // The chains of the service are built before the listener that they belonged to goes.
    assert_eq!(many.apply(&detached), 1, "a service less");
    assert_eq!(many.apply(&changed), 1, "a service more");
    let policy = |target: &str, path: &str| {
        format!(
            "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p}}\nspec:\n  \
             targetRefs: [{{group: '', kind: Service, name: {target}}}]\n  \
             rules: [{{to: [{{operation: {{paths: [{path}]}}}}]}}]\n"
        )
    };
    assert_eq!(many.apply(&policy("s-4", "/a")), 1, "a policy of one service");
    assert_eq!(many.apply(&policy("s-4", "/b")), 1, "its content");
    assert_eq!(many.apply(&policy("s-5", "/b")), 2, "its target");
    let elsewhere = policy("s-5", "/c").replace("name: p", "name: p, namespace: elsewhere");
    assert_eq!(many.apply(&elsewhere), 0, "a policy of another namespace");
    let route = |host: &str, destination: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: r}}\nspec:\n  \
             hosts: [{host}]\n  http: [{{route: [{{destination: {{host: {destination}}}}}]}}]\n"
        )
    };
    assert_eq!(many.apply(&route("s-6", "s-7")), 1, "a VirtualService");
    assert_eq!(many.apply(&Many::service(7).replace("80", "81")), 2, "its destination");
    assert_eq!(many.apply(&Many::service(6).replace("80", "81")), 1, "its host");
    let rule = "apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: d}\nspec:\n  \
                host: s-8\n  trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: a}}}\n";
    assert_eq!(many.apply(rule), 1, "a DestinationRule");
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: s-8-0}\nstatus: {phase: Running, podIP: 10.1.3.3}\n";
    assert_eq!(many.apply(pod), 0, "a pod");
}

#[test]
fn wildcard_hosts_of_virtual_services_apply_to_services() {
    let mut many = Many::new(3, "");
    let route = "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: r}\nspec:\n  \
                 hosts: ['*.default.svc.cluster.local']\n  http: [{route: [{destination: {host: b}}]}]\n";
    assert_eq!(many.apply(route), 5, "all services");
    let listener = main_internal(&many.store);
    let text = chain(&listener, "inbound-vip|80|http|s-2.default.svc.cluster.local").to_string();
    assert!(
        text.contains("inbound-vip|80|http|b.default.svc.cluster.local"),
        "{text}"
    );
    let exported = route.replace("hosts:", "exportTo: [elsewhere]\n  hosts:");
    assert_eq!(many.apply(&exported), 5);
    let listener = main_internal(&many.store);
    let text = chain(&listener, "inbound-vip|80|http|s-2.default.svc.cluster.local").to_string();
    assert!(
        !text.contains("inbound-vip|80|http|b."),
        "the waypoint does not see it: {text}"
    );
}

#[test]
fn the_annotation_forwards_the_identity_of_clients() {
    let filters_of = |annotations: Value| {
        let node = "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local";
        let client = fixture::client(node, &json!({"LABELS": LABELS.clone(), "ANNOTATIONS": annotations}));
        let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT)];
        let listener = main_internal(&fixture::store(installation(), &files, vec![client]));
        let chain = chain(&listener, A80);
        let first = http_filters(chain)[0].to_owned();
        let manager = chain["filters"]
            .as_array()
            .and_then(|filters| filters.last())
            .expect("a filter");
        (first, manager["typedConfig"]["forwardClientCertDetails"].clone())
    };
    let with = filters_of(json!({"ambient.istio.io/xfcc-include-client-identity": "True"}));
    assert_eq!(
        with,
        (
            "istio.waypoint.xfcc_client_identity".to_owned(),
            json!("ALWAYS_FORWARD_ONLY")
        )
    );
    let without = filters_of(json!({"ambient.istio.io/xfcc-include-client-identity": "no"}));
    assert_ne!(without.0, with.0);
    assert_eq!(without.1, Value::Null);
}
