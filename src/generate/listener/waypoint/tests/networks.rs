//! Several networks: nested tunnels, and gateways between networks.

use std::sync::LazyLock;

use serde_json::{Value, json};

use super::{LABELS, MESH, WAYPOINT, chain, installation, main_internal};
use crate::{
    generate::{Proxy, ResourceType, fixture, store::ConfigStore},
    model::Installation,
};

/// A service with an endpoint in each of two networks, and the gateway to the other one.
const TWO_NETWORKS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net1}}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: far, labels: {istio.io/use-waypoint: waypoint}}
spec:
  hosts: [far.example.com]
  resolution: STATIC
  addresses: [10.0.0.77]
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints:
  - {address: 10.1.7.1, network: net1}
  - {address: 10.9.7.1, network: net2}
  - {address: 10.9.7.2, network: net3}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: west, namespace: istio-system, labels: {topology.istio.io/network: net2}}
spec:
  gatewayClassName: istio-remote
  addresses: [{type: IPAddress, value: 192.0.2.2}]
  listeners: [{name: mesh, port: 15008, protocol: HBONE}]
";

#[test]
fn endpoints_of_other_networks_are_reached_by_nested_tunnels() {
    let endpoints = |enabled: bool, crosses: bool| {
        let mut installation = installation();
        installation.features.ambient_enable_multi_network = enabled;
        installation.features.ambient_enable_multi_network_waypoint = crosses;
        let node = "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local";
        let client = fixture::client(node, &json!({"LABELS": LABELS.clone(), "NETWORK": "net1"}));
        let files = [
            ("mesh.yaml", MESH),
            ("kube.yaml", WAYPOINT),
            ("config.yaml", TWO_NETWORKS),
        ];
        let store = fixture::store(installation, &files, vec![client]);
        endpoints(&store, 0, "inbound-vip|80|http|far.example.com")
    };
    let [direct, tunnelled] = &endpoints(true, true)[..] else {
        panic!("the endpoint of a network without a gateway is unreachable");
    };
    assert_eq!(direct["endpoint"]["address"]["socketAddress"]["address"], "10.1.7.1");
    let address = json!({"serverListenerName": "inner_connect_originate", "endpointId": "192.0.2.2:15008"});
    assert_eq!(tunnelled["endpoint"]["address"]["envoyInternalAddress"], address);
    let metadata = &tunnelled["metadata"]["filterMetadata"];
    assert_eq!(
        metadata["envoy.filters.listener.original_dst"],
        json!({"local": "192.0.2.2:15008"})
    );
    assert_eq!(
        metadata["istio"]["double_hbone"],
        json!({"hbone_target_address": "far.example.com:80"})
    );
    assert_eq!(
        metadata["envoy.transport_socket_match"],
        Value::Null,
        "one socket for all"
    );
    assert_eq!(endpoints(true, false).len(), 1, "only the own network");
    assert_eq!(endpoints(false, true).len(), 2, "mutual TLS does not pass the gateway");
}

#[test]
fn sidecars_do_not_try_endpoints_of_networks_without_a_gateway() {
    let addresses = |enabled: bool| {
        let mut installation = installation();
        installation.features.ambient_enable_multi_network = enabled;
        let node = "sidecar~10.1.0.32~app-0.default~default.svc.cluster.local";
        let client = fixture::client(node, &json!({"NETWORK": "net1"}));
        let files = [("mesh.yaml", MESH), ("config.yaml", TWO_NETWORKS)];
        let store = fixture::store(installation, &files, vec![client]);
        let all = endpoints(&store, 0, "outbound|80||far.example.com");
        let address = |member: &Value| member["endpoint"]["address"]["socketAddress"]["address"].clone();
        all.iter().map(address).collect::<Vec<Value>>()
    };
    assert_eq!(addresses(true), ["10.1.7.1"]);
    let otherwise = ["10.1.7.1", "10.9.7.2"];
    assert_eq!(addresses(false), otherwise, "other networks may be reachable directly");
}

#[test]
fn endpoints_without_an_address_leave_their_locality_empty() {
    let config = TWO_NETWORKS.replace("{address: 10.9.7.2, network: net3}", "{network: net1, locality: far}");
    let node = "sidecar~10.1.0.32~app-0.default~default.svc.cluster.local";
    let client = fixture::client(node, &json!({"NETWORK": "net1"}));
    let files = [("mesh.yaml", MESH), ("config.yaml", config.as_str())];
    let store = fixture::store(installation(), &files, vec![client]);
    let assignment = fixture::resource(&store, 0, ResourceType::Endpoint, "outbound|80||far.example.com");
    let groups = assignment["endpoints"].as_array().expect("localities");
    let [own, empty] = &groups[..] else {
        panic!("both localities: {assignment}");
    };
    let count = |group: &Value| group["lbEndpoints"].as_array().map_or(0, Vec::len);
    assert_eq!((count(own), count(empty)), (1, 0));
    assert_eq!(empty["locality"]["region"], "far");
}

#[test]
fn waypoints_pass_tunnelled_endpoints_with_a_sidecar_to_gateways() {
    let labels = "labels: {security.istio.io/tlsMode: istio, networking.istio.io/tunnel: http}";
    let config = TWO_NETWORKS.replace("network: net2}\n", &format!("network: net2, {labels}}}\n"));
    let node = "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local";
    let client = fixture::client(node, &json!({"LABELS": LABELS.clone(), "NETWORK": "net1"}));
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", WAYPOINT),
        ("config.yaml", config.as_str()),
    ];
    let store = fixture::store(installation(), &files, vec![client]);
    let all = endpoints(&store, 0, "inbound-vip|80|http|far.example.com");
    let address = |member: &Value| member["endpoint"]["address"]["socketAddress"]["address"].clone();
    let addresses: Vec<Value> = all.iter().map(address).collect();
    assert_eq!(addresses, ["10.1.7.1", "10.9.7.2", "192.0.2.2"]);
}

#[test]
fn gateways_that_pass_mutual_tls_through_use_no_tunnels() {
    let gateway = "---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: cross}
spec:
  selector: {app: cross}
  servers:
  - {port: {number: 15443, name: tls, protocol: TLS}, tls: {mode: AUTO_PASSTHROUGH}, hosts: ['*.example.com']}
";
    let entry = TWO_NETWORKS
        .replace("STATIC", "STATIC\n  location: MESH_INTERNAL")
        .replace(", network: ", ", serviceAccount: sa, network: ");
    let mut installation = installation();
    installation.features.ambient_enable_multi_network = true;
    let node = "router~10.1.0.33~cross-0.default~default.svc.cluster.local";
    let client = fixture::client(node, &json!({"LABELS": {"app": "cross"}, "NETWORK": "net1"}));
    let config = format!("{entry}{gateway}");
    let files = [("mesh.yaml", MESH), ("config.yaml", config.as_str())];
    let store = fixture::store(installation, &files, vec![client]);
    let addresses = |name: &str| {
        let all = endpoints(&store, 0, name);
        let address = |member: &Value| member["endpoint"]["address"].clone();
        all.iter().map(address).collect::<Vec<Value>>()
    };
    let own = |address: &Value| address["socketAddress"]["address"] == "10.1.7.1";
    let through = |address: &Value| address["envoyInternalAddress"]["endpointId"] == "192.0.2.2:15008";
    let [one, other] = &addresses("outbound|80||far.example.com")[..] else {
        panic!("one endpoint for each network that is reached");
    };
    assert!(own(one) && through(other), "{one} {other}");
    let [one] = &addresses("outbound_.80_._.far.example.com")[..] else {
        panic!("one endpoint with mutual TLS");
    };
    assert!(own(one), "{one}");
}

/// An installation with several networks.
fn multi_network() -> Installation {
    let mut installation = installation();
    installation.features.ambient_enable_multi_network = true;
    installation.features.ambient_enable_multi_network_waypoint = true;
    installation.features.ambient_enable_multi_network_ingress = true;
    installation
}

const GLOBAL: &str = "
trustDomain: cluster.local
serviceScopeConfigs: [{servicesSelector: {matchLabels: {scope: global}}, scope: GLOBAL}]
";

/// Services that span clusters, of which one has a waypoint, and one that does not span clusters.
static EAST: LazyLock<String> = LazyLock::new(|| {
    let objects = "
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net1}}
---
apiVersion: v1
kind: Namespace
metadata: {name: default}
---
apiVersion: v1
kind: Service
metadata: {name: wide, labels: {scope: global, istio.io/use-waypoint: waypoint}}
spec:
  clusterIP: 10.0.0.41
  selector: {app: wide}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 90}, {name: udp, port: 110, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: plain, labels: {scope: global}}
spec: {clusterIP: 10.0.0.42, ports: [{name: http2, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: own, labels: {istio.io/use-waypoint: waypoint}}
spec: {clusterIP: 10.0.0.43, selector: {app: wide}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: west, namespace: istio-system, labels: {topology.istio.io/network: net2}}
spec:
  gatewayClassName: istio-remote
  addresses: [{type: IPAddress, value: 192.0.2.2}]
  listeners: [{name: mesh, port: 15008, protocol: HBONE}]
";
    [objects, &workload("wide-0", "10.1.0.41")].concat()
});

/// The other cluster, in another network.
static WEST: LazyLock<String> = LazyLock::new(|| {
    let objects = "
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net2}}
---
apiVersion: v1
kind: Namespace
metadata: {name: default}
---
apiVersion: v1
kind: Service
metadata: {name: wide, labels: {scope: global}}
spec: {clusterIP: 10.8.0.41, selector: {app: wide}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: own}
spec: {clusterIP: 10.8.0.43, selector: {app: wide}, ports: [{name: http, port: 80, targetPort: 8080}]}
";
    [objects, &workload("wide-1", "10.9.0.41")].concat()
});

/// The pod of the services in one cluster, with its endpoints.
fn workload(pod: &str, address: &str) -> String {
    "---
apiVersion: v1
kind: Pod
metadata: {name: POD, labels: {app: wide}, annotations: {ambient.istio.io/redirection: enabled}}
spec: {serviceAccountName: wide}
status: {phase: Running, podIP: ADDRESS, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: wide, labels: {kubernetes.io/service-name: wide}}
addressType: IPv4
endpoints: [{addresses: [ADDRESS], targetRef: {kind: Pod, name: POD, namespace: default}}]
ports: [{name: http, port: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: own, labels: {kubernetes.io/service-name: own}}
addressType: IPv4
endpoints: [{addresses: [ADDRESS], targetRef: {kind: Pod, name: POD, namespace: default}}]
ports: [{name: http, port: 8080}]
"
    .replace("POD", pod)
    .replace("ADDRESS", address)
}

/// Returns the store of a gateway between the networks, an instance of the waypoint and an ingress gateway, in this
/// order.
fn two_networks(installation: Installation, config: &str) -> ConfigStore {
    two_clusters(installation, &EAST, &WEST, config)
}

fn two_clusters(installation: Installation, east: &str, west: &str, config: &str) -> ConfigStore {
    let of = |node: &str, controller: &str, view: Option<&str>| {
        let labels = json!({"gateway.istio.io/managed": controller});
        let mut metadata = json!({"LABELS": labels, "NETWORK": "net1"});
        if let Some(view) = view {
            metadata["REQUESTED_NETWORK_VIEW"] = view.into();
        }
        fixture::client(node, &metadata)
    };
    let east_west = of(
        "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local",
        "istio.io-eastwest-controller",
        Some("net1"),
    );
    let waypoint = of(
        "waypoint~10.1.0.9~waypoint-0.default~default.svc.cluster.local",
        "istio.io-mesh-controller",
        None,
    );
    let ingress = of(
        "router~10.1.0.31~gw-0.default~default.svc.cluster.local",
        "istio.io-gateway-controller",
        None,
    );
    let kube = format!("{WAYPOINT}---{east}");
    let files = [
        ("mesh.yaml", GLOBAL),
        ("kube.yaml", kube.as_str()),
        ("kube-west.yaml", west),
        ("config.yaml", config),
    ];
    fixture::store(installation, &files, vec![east_west, waypoint, ingress])
}

/// Returns the endpoints of a cluster.
fn endpoints(store: &ConfigStore, client: u64, name: &str) -> Vec<Value> {
    let assignment = fixture::resource(store, client, ResourceType::Endpoint, name);
    let groups = assignment["endpoints"].as_array().cloned().unwrap_or_default();
    let members = groups
        .iter()
        .filter_map(|group| group["lbEndpoints"].as_array().cloned());
    members.flatten().collect()
}

const WIDE: &str = "wide.default.svc.cluster.local";
const PLAIN: &str = "plain.default.svc.cluster.local";

#[test]
fn gateways_between_networks_forward_inner_tunnels() {
    let store = two_networks(multi_network(), "");
    let names = fixture::names(&store, 0, ResourceType::Listener);
    assert_eq!(names, ["connect_terminate", "forward_inner_connect", "main_internal"]);
    let forward = fixture::resource(&store, 0, ResourceType::Listener, "forward_inner_connect");
    let proxy = &forward["filterChains"][0]["filters"][0]["typedConfig"];
    assert_eq!(proxy["cluster"], "forward_inner_connect");
    assert_eq!(proxy["tunnelingConfig"], Value::Null);

    let mut clusters = fixture::names(&store, 0, ResourceType::Cluster);
    clusters.sort();
    let mut want = vec![
        "BlackHoleCluster".to_owned(),
        "encap".to_owned(),
        "forward_inner_connect".to_owned(),
        "main_internal".to_owned(),
        "inbound-vip|15008|tcp|waypoint.default.svc.cluster.local".to_owned(),
        format!("inbound-vip|80|tcp|{WIDE}"),
        format!("inbound-vip|90|tcp|{WIDE}"),
        format!("inbound-vip|80|tcp|{PLAIN}"),
    ];
    want.sort();
    assert_eq!(clusters, want, "services that span clusters, and their waypoints");
    let cluster = |name: &str| fixture::resource(&store, 0, ResourceType::Cluster, name);
    let forward = cluster("forward_inner_connect");
    assert_eq!(forward["type"], "ORIGINAL_DST");
    assert_eq!(forward["originalDstLbConfig"]["upstreamPortOverride"], 15008);
    assert_eq!(forward["transportSocket"], Value::Null, "the inner tunnel is encrypted");
    assert_eq!(forward["typedExtensionProtocolOptions"], Value::Null);
    let encap = cluster("encap");
    let listener = &encap["loadAssignment"]["endpoints"][0]["lbEndpoints"][0]["endpoint"]["address"];
    assert_eq!(
        listener["envoyInternalAddress"]["serverListenerName"],
        "forward_inner_connect"
    );
    let wide = cluster(&format!("inbound-vip|80|tcp|{WIDE}"));
    let passed = &wide["transportSocket"]["typedConfig"]["passthroughMetadata"];
    let passed = passed.as_array().expect("metadata").iter();
    let passed: Vec<_> = passed
        .map(|source| (source["kind"].clone(), source["name"].clone()))
        .collect();
    let want = [
        (json!({"host": {}}), json!("envoy.filters.listener.original_dst")),
        (json!({"cluster": {}}), json!("istio")),
        (json!({"host": {}}), json!("istio")),
    ];
    assert_eq!(passed, want);

    let own = endpoints(&store, 0, &format!("inbound-vip|80|tcp|{WIDE}"));
    let [own] = own.as_slice() else {
        panic!("only the endpoint of the own network: {own:?}");
    };
    let address = json!({"serverListenerName": "forward_inner_connect", "endpointId": "10.1.0.41:8080"});
    assert_eq!(own["endpoint"]["address"]["envoyInternalAddress"], address);
}

/// Tunnels that did not come from a waypoint go to the waypoint of the service.
#[test]
fn gateways_between_networks_choose_by_the_source() {
    let store = two_networks(multi_network(), "");
    let terminate = fixture::resource(&store, 0, ResourceType::Listener, "connect_terminate");
    let filters = &terminate["filterChains"][0]["filters"][0]["typedConfig"]["httpFilters"];
    let filters: Vec<_> = filters.as_array().expect("filters").iter().collect();
    let names: Vec<_> = filters
        .iter()
        .map(|filter| filter["name"].as_str().expect("a name"))
        .collect();
    let kept = ["connect_authority", "request_source", "envoy.filters.http.router"];
    assert_eq!(names[names.len() - 3..], kept);
    let state = &filters[names.len() - 2]["typedConfig"]["onRequestHeaders"][0];
    assert_eq!(state["objectKey"], "io.istio.source");

    let listener = main_internal(&store);
    let chains: Vec<_> = listener["filterChains"].as_array().expect("chains").iter().collect();
    let names: Vec<_> = chains
        .iter()
        .map(|chain| chain["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(names.len(), 4, "no chain for workloads: {names:?}");
    let to = |name: &str| json!({"name": name, "typedConfig": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": name}});
    let by_authority = &listener["filterChainMatcher"]["matcherTree"];
    assert_eq!(by_authority["input"]["name"], "authority-filter-state");
    let map = &by_authority["exactMatchMap"]["map"];
    let plain = format!("inbound-vip|80|tcp|{PLAIN}");
    assert_eq!(map[format!("{PLAIN}:80")]["action"], to(&plain));
    let by_source = &map[format!("{WIDE}:80")]["matcher"];
    let waypoint = "inbound-vip|15008|tcp|waypoint.default.svc.cluster.local";
    let own = format!("inbound-vip|80|tcp|{WIDE}");
    assert_eq!(by_source["matcherTree"]["input"]["name"], "request-source-filter-state");
    let sources = &by_source["matcherTree"]["exactMatchMap"]["map"];
    assert_eq!(sources["waypoint"]["action"], to(&own));
    assert_eq!(
        sources["gateway"]["action"],
        to(&own),
        "ingress gateways do not use the waypoint"
    );
    assert_eq!(by_source["onNoMatch"]["action"], to(waypoint));
    assert_eq!(
        chain(&listener, waypoint)["filters"].as_array().map(Vec::is_empty),
        Some(false)
    );

    let ingress = EAST.replace(
        "scope: global, istio.io",
        "scope: global, istio.io/ingress-use-waypoint: 'true', istio.io",
    );
    let files = [
        ("mesh.yaml", GLOBAL),
        ("kube.yaml", &[WAYPOINT, "---", &ingress].concat()),
    ];
    let node = "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local";
    let labels = json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}});
    let store = fixture::store(multi_network(), &files, vec![fixture::client(node, &labels)]);
    let listener = main_internal(&store);
    let map = &listener["filterChainMatcher"]["matcherTree"]["exactMatchMap"]["map"];
    let sources = &map[format!("{WIDE}:80")]["matcher"]["matcherTree"]["exactMatchMap"]["map"];
    assert_eq!(sources["gateway"]["action"], to(waypoint));
}

#[test]
fn gateways_between_networks_do_not_pass_by_a_waypoint_without_a_service() {
    let address = "{type: IPAddress, value: 10.0.0.9}";
    let host = "{type: Hostname, value: gone.default.svc.cluster.local}";
    let waypoint = WAYPOINT.replace(address, host);
    let files = [
        ("mesh.yaml", GLOBAL),
        ("kube.yaml", &[waypoint.as_str(), "---", EAST.as_str()].concat()),
    ];
    let node = "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local";
    let labels = json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}});
    let store = fixture::store(multi_network(), &files, vec![fixture::client(node, &labels)]);
    let listener = main_internal(&store);
    let map = &listener["filterChainMatcher"]["matcherTree"]["exactMatchMap"]["map"];
    let by_source = &map[format!("{WIDE}:80")]["matcher"];
    let gone = "inbound-vip|15008|tcp|gone.default.svc.cluster.local";
    assert_eq!(by_source["onNoMatch"]["action"]["name"], gone);
    let chains = listener["filterChains"].as_array().expect("chains");
    assert!(chains.iter().all(|chain| chain["name"] != gone));
}

/// Policies of services are enforced where the inner tunnel ends; the gateway sees none of its identities.
#[test]
fn gateways_between_networks_enforce_no_policies_of_services() {
    let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: deny}
spec:
  targetRefs: [{kind: Service, group: '', name: wide}]
  action: DENY
  rules: [{from: [{source: {namespaces: [a]}}]}]
";
    let store = two_networks(multi_network(), policy);
    let gateway = main_internal(&store);
    let own = chain(&gateway, &format!("inbound-vip|80|tcp|{WIDE}")).to_string();
    assert!(!own.contains("rbac"), "{own}");
    let waypoint = fixture::resource(&store, 1, ResourceType::Listener, "main_internal");
    let own = chain(&waypoint, &format!("inbound-vip|80|http|{WIDE}")).to_string();
    assert!(own.contains("rbac"), "the waypoint enforces the policy: {own}");
}

#[test]
fn a_gateway_between_networks_without_services_drops_connections() {
    let files = [("mesh.yaml", MESH), ("kube.yaml", WAYPOINT)];
    let node = "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local";
    let labels = json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}});
    let store = fixture::store(multi_network(), &files, vec![fixture::client(node, &labels)]);
    let listener = main_internal(&store);
    let chains = listener["filterChains"].as_array().expect("chains");
    assert_eq!(chains.len(), 1);
    assert_eq!(chains[0]["name"], "virtualInbound-blackhole");
    assert_eq!(chains[0]["filters"][0]["typedConfig"]["cluster"], "BlackHoleCluster");
}

/// Waypoints and ingress gateways reach endpoints of services that span clusters by nested tunnels, and no endpoints of
/// other services in other clusters.
#[test]
fn services_that_do_not_span_clusters_keep_their_own_endpoints() {
    let store = two_networks(multi_network(), "");
    let addresses = |client: u64, name: &str| {
        let all = endpoints(&store, client, name);
        let address = |member: &Value| {
            let address = &member["endpoint"]["address"];
            let internal = &address["envoyInternalAddress"];
            format!("{} {}", internal["serverListenerName"], internal["endpointId"]).replace('"', "")
        };
        all.iter().map(address).collect::<Vec<_>>()
    };
    let own = "connect_originate 10.1.0.41:8080";
    let west = "inner_connect_originate 192.0.2.2:15008";
    assert_eq!(addresses(1, &format!("inbound-vip|80|http|{WIDE}")), [own, west]);
    assert_eq!(addresses(1, "inbound-vip|80|http|own.default.svc.cluster.local"), [own]);
    assert_eq!(addresses(2, &format!("outbound|80||{WIDE}")), [own, west]);
    assert_eq!(addresses(2, "outbound|80||own.default.svc.cluster.local"), [own]);

    let names = fixture::names(&store, 2, ResourceType::Listener);
    assert!(names.contains(&"inner_connect_originate".to_owned()), "{names:?}");
    let header = |client| {
        let outer = fixture::resource(&store, client, ResourceType::Listener, "outer_connect_originate");
        let tunnel = &outer["filterChains"][0]["filters"][0]["typedConfig"]["tunnelingConfig"];
        tunnel["headersToAdd"][0]["header"].clone()
    };
    assert_eq!(header(1), json!({"key": "x-istio-source", "value": "waypoint"}));
    assert_eq!(header(2), json!({"key": "x-istio-source", "value": "gateway"}));
}

/// Listeners of gateways between networks that pass TLS through.
const API: &str = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: api, namespace: istio-system}
spec:
  selector: {gateway.istio.io/managed: istio.io-eastwest-controller}
  servers:
  - {port: {number: 6443, name: tls, protocol: TLS}, hosts: ['*'], tls: {mode: PASSTHROUGH}}
  - {port: {number: 7443, name: https, protocol: HTTPS}, hosts: ['*'], tls: {mode: PASSTHROUGH}}
  - {port: {number: 8080, name: http, protocol: HTTP}, hosts: ['*']}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: api, namespace: istio-system}
spec:
  hosts: [api.example.com]
  gateways: [api]
  tls:
  - match: [{sniHosts: [api.example.com]}]
    route: [{destination: {host: wide.default.svc.cluster.local, port: {number: 90}}}]
";

#[test]
fn gateways_between_networks_pass_connections_on_without_a_proxy_header() {
    let mesh = format!("{GLOBAL}defaultConfig: {{gatewayTopology: {{proxyProtocol: {{}}}}}}\n");
    let node = "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local";
    let labels = json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}});
    let files = [
        ("mesh.yaml", mesh.as_str()),
        ("kube.yaml", EAST.as_str()),
        ("config.yaml", API),
    ];
    let store = fixture::store(multi_network(), &files, vec![fixture::client(node, &labels)]);
    for name in ["0.0.0.0_6443", "0.0.0.0_7443"] {
        let listener = fixture::resource(&store, 0, ResourceType::Listener, name);
        let filters = listener["listenerFilters"].as_array().expect("listener filters");
        let names: Vec<_> = filters.iter().map(|filter| filter["name"].clone()).collect();
        assert_eq!(names, ["envoy.filters.listener.tls_inspector"], "{name}");
        let chain = &listener["filterChains"][0];
        assert_eq!(chain["filterChainMatch"]["serverNames"], json!(["api.example.com"]));
    }
    let plaintext = fixture::resource(&store, 0, ResourceType::Listener, "0.0.0.0_8080");
    assert_eq!(plaintext, Value::Null, "there is no TCP route");
}

#[test]
fn patches_apply_to_listeners_of_nested_tunnels_and_of_gateways_between_networks() {
    let patches = "  configPatches:
  - applyTo: LISTENER
    match: {context: SIDECAR_INBOUND}
    patch: {operation: MERGE, value: {freebind: true}}
  - applyTo: LISTENER
    match: {context: GATEWAY}
    patch: {operation: MERGE, value: {transparent: true}}
";
    let config = format!(
        "{API}---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: all, namespace: istio-system}}
spec:
{patches}---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: waypoints, namespace: istio-system}}
spec:
  targetRefs: [{{group: gateway.networking.k8s.io, kind: GatewayClass, name: istio-waypoint}}]
{patches}"
    );
    let store = two_networks(multi_network(), &config);
    let patched = |client: u64, name: &str| {
        let listener = fixture::resource(&store, client, ResourceType::Listener, name);
        assert_eq!(listener["name"], name, "{client}");
        [listener["freebind"] == true, listener["transparent"] == true]
    };
    for name in ["forward_inner_connect", "0.0.0.0_6443"] {
        assert_eq!(patched(0, name), [true, false], "{name}");
    }
    for name in ["inner_connect_originate", "outer_connect_originate"] {
        assert_eq!(patched(1, name), [true, false], "{name}");
        assert_eq!(patched(2, name), [false, true], "{name}");
    }
}

/// Returns [`EAST`] and [`WEST`] with an endpoint of the waypoint each, which ingress gateways must use.
fn with_waypoints() -> (String, String) {
    let labels = "scope: global, istio.io/use-waypoint: waypoint, istio.io/ingress-use-waypoint: 'true'";
    let slice = |address: &str| {
        format!(
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: waypoint, labels: {{kubernetes.io/service-name: waypoint}}}}
addressType: IPv4
endpoints: [{{addresses: [{address}], conditions: {{ready: true}}}}]
ports: [{{name: mesh, port: 15008}}]
"
        )
    };
    let service = "---
apiVersion: v1
kind: Service
metadata: {name: waypoint}
spec: {clusterIP: 10.8.0.9, ports: [{name: mesh, port: 15008, appProtocol: hbone}]}
";
    let east = EAST.replace("scope: global, istio.io/use-waypoint: waypoint", labels);
    let west = WEST.replace(
        "{name: wide, labels: {scope: global}}",
        &format!("{{name: wide, labels: {{{labels}}}}}"),
    );
    (
        [east.as_str(), &slice("10.1.0.9")].concat(),
        [west.as_str(), service, &slice("10.9.0.9")].concat(),
    )
}

/// A gateway asks the waypoint in its network for the address that the service has in the waypoint's cluster, and the
/// other network for the service, not for the waypoint.
#[test]
fn ingress_gateways_reach_waypoints_of_all_clusters() {
    let (east, west) = with_waypoints();
    let metadata = |store: &ConfigStore| {
        let members = endpoints(store, 2, &format!("outbound|80||{WIDE}"));
        let metadata = members
            .iter()
            .map(|member| member["metadata"]["filterMetadata"].clone());
        metadata.collect::<Vec<_>>()
    };
    let destination = "envoy.filters.listener.original_dst";

    let [own, other] = &metadata(&two_clusters(multi_network(), &east, &west, ""))[..] else {
        panic!("the waypoint of the own network, and the gateway to the other one");
    };
    assert_eq!(
        own[destination],
        json!({"local": "10.0.0.41:80", "waypoint": "10.1.0.9:15008"})
    );
    assert_eq!(
        other["istio"]["double_hbone"],
        json!({"hbone_target_address": format!("{WIDE}:80")})
    );

    let one_network = west.replace("net2", "net1");
    let mut found = metadata(&two_clusters(installation(), &east, &one_network, ""));
    found.sort_by_key(|metadata| metadata[destination]["waypoint"].to_string());
    let found: Vec<&Value> = found.iter().map(|metadata| &metadata[destination]).collect();
    let want = [
        json!({"local": "10.0.0.41:80", "waypoint": "10.1.0.9:15008"}),
        json!({"local": "10.8.0.41:80", "waypoint": "10.9.0.9:15008"}),
    ];
    assert_eq!(found, want.iter().collect::<Vec<_>>());
}

#[test]
fn ingress_gateways_reach_cluster_local_waypoints_of_their_cluster() {
    let (east, west) = with_waypoints();
    let kube = [WAYPOINT, "---", &east].concat();
    let west = west.replace("net2", "net1");
    let local = "serviceSettings: [{settings: {clusterLocal: true}, hosts: [waypoint.default.svc.cluster.local]}]\n";
    let node = "router~10.1.0.31~gw-0.default~default.svc.cluster.local";
    let client = |cluster: &str| fixture::client(node, &json!({"NETWORK": "net1", "CLUSTER_ID": cluster}));
    let waypoints = |settings: &str| {
        let mesh = [MESH, settings].concat();
        let files = [
            ("mesh.yaml", mesh.as_str()),
            ("kube.yaml", &kube),
            ("kube-west.yaml", &west),
        ];
        let store = fixture::store(installation(), &files, vec![client("Kubernetes"), client("west")]);
        let of = |client: u64| {
            let members = endpoints(&store, client, &format!("outbound|80||{WIDE}"));
            let through = |member: &Value| {
                let metadata = &member["metadata"]["filterMetadata"]["envoy.filters.listener.original_dst"];
                metadata["waypoint"].clone()
            };
            members.iter().map(through).collect::<Vec<_>>()
        };
        [of(0), of(1)]
    };
    assert_eq!(waypoints(local), [["10.1.0.9:15008"], ["10.9.0.9:15008"]]);
    assert!(
        waypoints("").iter().all(|found| found.len() == 2),
        "other waypoints are reached in all clusters"
    );
}

/// A waypoint serves the services of other clusters whose waypoint has its host. Gateways use the waypoint as the
/// namespace in the other cluster says.
#[test]
fn waypoints_serve_services_that_exist_only_in_another_cluster() {
    let more = "---
apiVersion: v1
kind: Service
metadata: {name: afar, labels: {scope: global, istio.io/use-waypoint: other}}
spec: {clusterIP: 10.8.0.45, ports: [{name: http, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: other}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: Hostname, value: waypoint.default.svc.cluster.local}]}
---
apiVersion: v1
kind: Service
metadata: {name: waypoint}
spec: {clusterIP: 10.8.0.9, ports: [{name: mesh, port: 15008, appProtocol: hbone}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: waypoint, labels: {kubernetes.io/service-name: waypoint}}
addressType: IPv4
endpoints: [{addresses: [10.9.0.9], conditions: {ready: true}}]
ports: [{name: mesh, port: 15008}]
";
    let namespace = "{name: default, labels: {istio.io/ingress-use-waypoint: 'true'}}";
    let west = WEST.replace("{name: default}", namespace).replace("net2", "net1");
    let west = [west.as_str(), more].concat();
    let store = two_clusters(multi_network(), &EAST, &west, "");
    let listener = fixture::resource(&store, 1, ResourceType::Listener, "main_internal");
    chain(&listener, "inbound-vip|80|http|afar.default.svc.cluster.local");

    let members = endpoints(&store, 2, "outbound|80||afar.default.svc.cluster.local");
    let through = |member: &Value| {
        let metadata = &member["metadata"]["filterMetadata"]["envoy.filters.listener.original_dst"];
        metadata["waypoint"].clone()
    };
    assert_eq!(members.iter().map(through).collect::<Vec<_>>(), ["10.9.0.9:15008"]);
}

/// A service with an endpoint in each of two zones.
const ZONES: &str = "
apiVersion: v1
kind: Service
metadata: {name: near, labels: {scope: global}}
spec: {clusterIP: 10.0.0.44, selector: {app: near}, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r1, topology.kubernetes.io/zone: z1}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, labels: {topology.kubernetes.io/region: r1, topology.kubernetes.io/zone: z2}}
---
apiVersion: v1
kind: Pod
metadata: {name: near-0, labels: {app: near}}
spec: {serviceAccountName: near, nodeName: n1}
status: {phase: Running, podIP: 10.1.0.51, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: near-1, labels: {app: near}}
spec: {serviceAccountName: near, nodeName: n2}
status: {phase: Running, podIP: 10.1.0.52, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: near, labels: {kubernetes.io/service-name: near}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints:
- {addresses: [10.1.0.51], nodeName: n1, targetRef: {kind: Pod, name: near-0, namespace: default}}
- {addresses: [10.1.0.52], nodeName: n2, targetRef: {kind: Pod, name: near-1, namespace: default}}
";

/// Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): clusters of gateways between networks ignore rules, endpoints
/// do not.
#[test]
fn gateways_between_networks_prefer_endpoints_as_rules_say() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: near}
spec:
  host: near.default.svc.cluster.local
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 3}
    loadBalancer: {localityLbSetting: {enabled: true}}
";
    let kube = [WAYPOINT, "---", EAST.as_str(), "---", ZONES].concat();
    let files = [("mesh.yaml", GLOBAL), ("kube.yaml", kube.as_str()), ("rule.yaml", rule)];
    let gateway = fixture::client(
        "waypoint~10.1.0.30~ew-0.istio-system~istio-system.svc.cluster.local",
        &json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}, "NETWORK": "net1"}),
    );
    let gateway = Proxy {
        node_locality: "r1/z2".into(),
        ..gateway
    };
    let store = fixture::store(multi_network(), &files, vec![gateway]);
    let name = "inbound-vip|80|tcp|near.default.svc.cluster.local";
    let assignment = fixture::resource(&store, 0, ResourceType::Endpoint, name);
    let groups = assignment["endpoints"].as_array().expect("localities").iter();
    let priorities: Vec<_> = groups
        .map(|group| {
            (
                group["locality"]["zone"].clone(),
                group["priority"].as_u64().unwrap_or_default(),
            )
        })
        .collect();
    assert_eq!(priorities, [(json!("z1"), 1), (json!("z2"), 0)]);
    let cluster = fixture::resource(&store, 0, ResourceType::Cluster, name);
    assert_eq!(cluster["type"], "EDS");
    assert_eq!(cluster["outlierDetection"], Value::Null);
}

#[test]
fn gateways_between_networks_leave_baggage_to_the_ends_of_tunnels() {
    let mut installation = multi_network();
    installation.features.ambient_enable_baggage = true;
    let store = two_networks(installation, "");
    let filters = |client: u64, traffic: &str| {
        let name = format!("inbound-vip|80|{traffic}|{WIDE}");
        fixture::resource(&store, client, ResourceType::Cluster, &name)["filters"].clone()
    };
    assert_eq!(filters(0, "tcp"), Value::Null);
    assert_eq!(filters(1, "http")[0]["name"], "upstream_hbone_peer_metadata");
}
