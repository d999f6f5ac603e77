//! Proxyless gRPC clients and servers of small meshes through the store, as in serving.

use serde_json::{Value, json};
use smol_str::SmolStr;

use crate::{
    generate::{
        Proxy, RequestedResources, ResourceType, fixture,
        store::{ConfigStore, ConnectionId},
    },
    model::{features::Features, installation::Installation},
};

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: echo}
spec:
  clusterIP: 10.0.0.1
  clusterIPs: [10.0.0.1, 'fd00::1']
  selector: {app: echo}
  ports: [{name: grpc, port: 7070, targetPort: 17070}, {name: http, port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: far, namespace: other}
spec: {clusterIP: 10.0.0.2, ports: [{name: grpc, port: 7070}]}
---
apiVersion: v1
kind: Pod
metadata: {name: echo-0, labels: {app: echo, version: v1, security.istio.io/tlsMode: istio}}
spec: {serviceAccountName: echo}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bare-0, labels: {app: echo}}
status: {phase: Running, podIP: 10.1.0.2, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: echo-1, labels: {kubernetes.io/service-name: echo}}
addressType: IPv4
endpoints: [{addresses: [10.1.0.1], conditions: {ready: true}, targetRef: {kind: Pod, name: echo-0, namespace: default}}]
ports: [{name: grpc, port: 17070}, {name: http, port: 8080}]
";

const ECHO: &str = "echo.default.svc.cluster.local";
const SOCKET: &str = "xds.istio.io/grpc/lds/inbound/0.0.0.0:17070";

fn proxy(id: &str, address: &str, metadata: Value) -> Proxy {
    let mut metadata = metadata;
    metadata["GENERATOR"] = json!("grpc");
    let node = format!("sidecar~{address}~{id}.default~default.svc.cluster.local");
    fixture::client(&node, &metadata)
}

fn client() -> Proxy {
    proxy("client", "10.1.0.9", json!({ "LABELS": { "app": "client" } }))
}

fn server() -> Proxy {
    let labels = json!({ "app": "echo", "security.istio.io/tlsMode": "istio" });
    proxy("echo-0", "10.1.0.1", json!({ "LABELS": labels }))
}

/// Returns the resources of one type that a client with these requested names receives.
fn ask_with(
    config: &str,
    features: Features,
    proxy: Proxy,
    resource_type: ResourceType,
    names: &[&str],
) -> Vec<(String, Value)> {
    let files = [
        ("mesh.yaml", "accessLogFile: ''\n"),
        ("kube.yaml", SERVICES),
        ("config.yaml", config),
    ];
    let installation = Installation {
        features,
        ..Installation::default()
    };
    let requested = RequestedResources::new([(resource_type, names.iter().map(SmolStr::new).collect())]);
    let store = fixture::store_of_requested(installation, &files, vec![proxy], &requested);
    all(&store, resource_type)
}

fn ask(config: &str, proxy: Proxy, resource_type: ResourceType, names: &[&str]) -> Vec<(String, Value)> {
    ask_with(config, Features::default(), proxy, resource_type, names)
}

fn all(store: &ConfigStore, resource_type: ResourceType) -> Vec<(String, Value)> {
    let names = fixture::names(store, 0, resource_type).into_iter();
    names
        .map(|name| {
            let resource = fixture::resource(store, 0, resource_type, &name);
            (name, resource)
        })
        .collect()
}

fn names(resources: &[(String, Value)]) -> Vec<&str> {
    resources.iter().map(|(name, _)| name.as_str()).collect()
}

fn only(resources: Vec<(String, Value)>) -> Value {
    let [(_, resource)] = <[_; 1]>::try_from(resources).expect("one resource");
    resource
}

#[test]
fn a_service_may_be_named_in_every_form() {
    let asked = [
        "echo:7070",
        "echo.default:7070",
        "echo.default.svc:7070",
        "echo.default.svc.cluster.local:7070",
    ];
    let listeners = ask("", client(), ResourceType::Listener, &asked);
    let mut expected = asked;
    expected.sort_unstable();
    assert_eq!(names(&listeners), expected);
    for (name, listener) in &listeners {
        assert_eq!(listener["name"], json!(name));
        let manager = &listener["apiListener"]["apiListener"];
        assert_eq!(
            manager["rds"]["routeConfigName"],
            "outbound|7070||echo.default.svc.cluster.local"
        );
        assert_eq!(
            listener["address"]["socketAddress"],
            json!({ "address": "10.0.0.1", "portValue": 7070 })
        );
    }
}

#[test]
fn a_host_without_a_port_means_all_its_ports() {
    let listeners = ask("", client(), ResourceType::Listener, &["echo"]);
    assert_eq!(names(&listeners), ["echo:7070", "echo:80"]);
}

#[test]
fn names_of_one_host_share_their_ports() {
    let listeners = ask("", client(), ResourceType::Listener, &["echo:80", "echo.default:7070"]);
    let expected = ["echo.default:7070", "echo.default:80", "echo:7070", "echo:80"];
    assert_eq!(names(&listeners), expected);
}

#[test]
fn unknown_names_have_no_listener() {
    for name in [
        "echo:81",
        "nobody:80",
        "far:7070",
        "far.other:7070",
        "echo.default.svc.cluster.local.extra:7070",
        "xds.istio.io/grpc/lds/inbound/0.0.0.0:17070",
        "",
        ":",
    ] {
        assert_eq!(
            names(&ask("", client(), ResourceType::Listener, &[name])),
            [""; 0],
            "{name:?}"
        );
    }
    let far = "far.other.svc.cluster.local:7070";
    assert_eq!(names(&ask("", client(), ResourceType::Listener, &[far])), [far]);
}

#[test]
fn a_host_with_several_services_has_the_ports_that_the_client_sees() {
    let entry = |name: &str, created: &str, port: u32, rest: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, creationTimestamp: '{created}T00:00:00Z'}}
spec: {{hosts: [y.example.com], {rest}, ports: [{{number: {port}, name: p, protocol: GRPC}}]}}
---"
        )
    };
    // The namespace sees the service that is exported to it alone first.
    let config = [
        entry("all", "2024-01-01", 81, "resolution: STATIC"),
        entry("own", "2024-01-02", 82, "resolution: STATIC, exportTo: [.]"),
    ]
    .concat();
    let listeners = ask(&config, client(), ResourceType::Listener, &["y.example.com"]);
    assert_eq!(names(&listeners), ["y.example.com:82"]);
    let asked = ["outbound|81||y.example.com", "outbound|82||y.example.com"];
    let clusters = ask(&config, client(), ResourceType::Cluster, &asked);
    assert_eq!(names(&clusters), asked[1..]);
}

#[test]
fn a_sidecar_resource_hides_services() {
    let sidecar = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: default}
spec: {egress: [{hosts: ['other/*']}]}
";
    let listeners = ask(
        sidecar,
        client(),
        ResourceType::Listener,
        &["echo:7070", "far.other.svc.cluster.local:7070"],
    );
    assert_eq!(names(&listeners), ["far.other.svc.cluster.local:7070"]);
}

#[test]
fn dual_stack_endpoints_have_both_addresses() {
    let features = Features {
        istio_dual_stack: true,
        ..Features::default()
    };
    let client = proxy("client", "10.1.0.9", json!({ "INSTANCE_IPS": "10.1.0.9,fd01::9" }));
    let listener = only(ask_with("", features, client, ResourceType::Listener, &["echo:80"]));
    let address = json!({ "address": "fd00::1", "portValue": 80 });
    assert_eq!(
        listener["additionalAddresses"],
        json!([{ "address": { "socketAddress": address } }])
    );
}

#[test]
fn the_session_filter_precedes_the_fault_filter() {
    let service = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: sticky, labels: {istio.io/persistent-session: 'c:/p'}}
spec: {hosts: [sticky.example.com], resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}]}
";
    let features = Features {
        pilot_enable_persistent_session_filter: true,
        pilot_persistent_session_label: "istio.io/persistent-session".into(),
        ..Features::default()
    };
    let target = "sticky.example.com:80";
    let listener = only(ask_with(
        service,
        features.clone(),
        client(),
        ResourceType::Listener,
        &[target],
    ));
    let filters = listener["apiListener"]["apiListener"]["httpFilters"].clone();
    let filters: Vec<&str> = filters
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|filter| filter["name"].as_str())
        .collect();
    assert_eq!(
        filters,
        [
            "envoy.filters.http.stateful_session",
            "envoy.filters.http.fault",
            "envoy.filters.http.router"
        ]
    );
    let name = "outbound|80||sticky.example.com";
    let cluster = only(ask_with(service, features, client(), ResourceType::Cluster, &[name]));
    let statuses = &cluster["commonLbConfig"]["overrideHostStatus"]["statuses"];
    assert_eq!(*statuses, json!(["HEALTHY", "DRAINING", "UNKNOWN", "DEGRADED"]));
}

fn peer_authentication(mode: &str) -> String {
    format!(
        "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {{name: default}}
spec: {{mtls: {{mode: {mode}}}}}
"
    )
}

fn chain(config: &str, server: Proxy) -> Value {
    only(ask(config, server, ResourceType::Listener, &[SOCKET]))["filterChains"][0].clone()
}

#[test]
fn a_server_accepts_mutual_tls_or_plaintext_but_not_both() {
    for (mode, mtls) in [("STRICT", true), ("PERMISSIVE", true), ("DISABLE", false)] {
        let chain = chain(&peer_authentication(mode), server());
        let kind = if mtls { "mtls" } else { "plaintext" };
        assert_eq!(chain["name"], json!(format!("inbound-{kind}")), "{mode}");
        assert_eq!(
            chain["filters"][0]["name"],
            json!(format!("inbound-hcm{kind}")),
            "{mode}"
        );
        let context = &chain["transportSocket"]["typedConfig"];
        assert_eq!(
            context["requireClientCertificate"],
            json!(mtls.then_some(true)),
            "{mode}"
        );
    }
    let unlabelled = proxy("bare-0", "10.1.0.2", json!({ "LABELS": { "app": "echo" } }));
    assert_eq!(chain("", unlabelled)["name"], "inbound-plaintext");
}

#[test]
fn server_listeners_exist_only_for_served_ports() {
    for name in ["0.0.0.0:17071", "0.0.0.0", "0.0.0.0:http", "[::]17070", ""] {
        let name = format!("xds.istio.io/grpc/lds/inbound/{name}");
        assert_eq!(ask("", server(), ResourceType::Listener, &[&name]), [], "{name}");
    }
    let name = "xds.istio.io/grpc/lds/inbound/[::]:8080";
    let listener = only(ask("", server(), ResourceType::Listener, &[name]));
    assert_eq!(
        listener["address"]["socketAddress"],
        json!({ "address": "::", "portValue": 8080 })
    );
}

#[test]
fn only_policies_that_grpc_can_enforce_are_sent() {
    let policies = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: deny}
spec:
  action: DENY
  rules:
  - to: [{operation: {paths: [/x]}}]
  - from: [{source: {principals: [cluster.local/ns/a/sa/b]}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: allow}
spec: {rules: [{from: [{source: {namespaces: [default]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: audit}
spec: {action: AUDIT, rules: [{}]}
";
    let chain = chain(policies, server());
    let filters = chain["filters"][0]["typedConfig"]["httpFilters"].as_array().cloned();
    let filters = filters.expect("a list of filters");
    let rules = |index: usize| &filters[index]["typedConfig"]["rules"];
    let names = |index: usize| -> Vec<&String> {
        let policies = rules(index)["policies"].as_object();
        policies.into_iter().flat_map(serde_json::Map::keys).collect()
    };
    assert_eq!(filters.len(), 3);
    assert_eq!(filters[0]["name"], "envoy.filters.http.rbac.DENY");
    assert_eq!(rules(0)["action"], "DENY");
    assert_eq!(names(0), ["default-deny-0", "default-deny-1"]);
    assert_eq!(filters[1]["name"], "envoy.filters.http.rbac");
    assert_eq!(names(1), ["default-allow-0"]);
    assert_eq!(filters[2]["name"], "envoy.filters.http.router");
}

/// Names of namespaces and of policies contain the separator of both.
#[test]
fn a_policy_does_not_replace_one_of_the_root_namespace() {
    let policies = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: b, namespace: default-a}
spec: {action: DENY, rules: [{to: [{operation: {paths: [/x]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: a-b}
spec: {action: DENY, rules: [{to: [{operation: {paths: [/y]}}]}]}
";
    let files = [
        ("mesh.yaml", "rootNamespace: default-a\n"),
        ("kube.yaml", SERVICES),
        ("config.yaml", policies),
    ];
    let socket = [SOCKET].into_iter().map(SmolStr::new).collect();
    let requested = RequestedResources::new([(ResourceType::Listener, socket)]);
    let store = fixture::store_of_requested(Installation::default(), &files, vec![server()], &requested);
    let listener = only(all(&store, ResourceType::Listener));
    let manager = &listener["filterChains"][0]["filters"][0]["typedConfig"];
    let policies = manager["httpFilters"][0]["typedConfig"]["rules"]["policies"].as_object();
    let names: Vec<&String> = policies.into_iter().flat_map(serde_json::Map::keys).collect();
    assert_eq!(names, ["default-a-b-0", "default-a-b-0-"]);
}

/// Each listener repeats the policies. Of those that are too large already as they are declared, no filters are made:
/// that would take most of the time of these tests.
#[test]
fn r21_policies_that_are_too_large_for_all_listeners_deny_everything() {
    let ports = 20_000..20_600;
    let declared: Vec<String> = ports
        .clone()
        .map(|port| format!("{{name: p{port}, port: {port}, targetPort: {port}}}"))
        .collect();
    let range = |number: u32| format!("192.{}.{}.0/24", number >> 8, number & 0xff);
    let ranges: Vec<String> = (0..17_000).map(range).collect();
    let (declared, ranges) = (declared.join(", "), ranges.join(", "));
    let config = format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: wide}}
spec: {{clusterIP: 10.0.0.3, selector: {{app: echo}}, ports: [{declared}]}}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {{name: deny}}
spec: {{action: DENY, rules: [{{from: [{{source: {{ipBlocks: [{ranges}]}}}}]}}]}}
"
    );
    let names: Vec<String> = ports
        .map(|port| format!("xds.istio.io/grpc/lds/inbound/0.0.0.0:{port}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let policies = |names: &[&str]| -> Vec<Value> {
        let listeners = ask(&config, server(), ResourceType::Listener, names).into_iter();
        let filters = listeners.map(|(_, listener)| {
            listener["filterChains"][0]["filters"][0]["typedConfig"]["httpFilters"][0]["typedConfig"].clone()
        });
        filters.map(|filter| filter["rules"]["policies"].clone()).collect()
    };
    let all = policies(&names);
    assert_eq!(all.len(), 600);
    let everything = json!({ "permissions": [{ "any": true }], "principals": [{ "any": true }] });
    assert!(all.iter().all(|found| *found == json!({ "too-large": everything })));
    let few = policies(&names[..2]);
    assert_eq!(few.len(), 2);
    assert!(few.iter().all(|found| found["default-deny-0"].is_object()));
}

const RULE: &str = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: echo}
spec:
  host: echo.default.svc.cluster.local
  trafficPolicy:
    connectionPool: {tcp: {maxConnections: 5}, http: {http2MaxRequests: 100, maxRetries: 7}}
    loadBalancer: {simple: LEAST_REQUEST}
    outlierDetection: {consecutive5xxErrors: 3}
    tls: {mode: ISTIO_MUTUAL}
    portLevelSettings: [{port: {number: 80}, loadBalancer: {simple: RANDOM}}]
  subsets:
  - {name: v1, labels: {version: v1}}
  - {name: hashed, labels: {version: v2}, trafficPolicy: {tls: {mode: SIMPLE}, loadBalancer: {consistentHash: {httpHeaderName: x}}}}
";

fn cluster(name: &str) -> Value {
    only(ask(RULE, client(), ResourceType::Cluster, &[name]))
}

#[test]
fn only_rule_fields_supported_by_grpc_are_sent() {
    let mut default = cluster("outbound|7070||echo.default.svc.cluster.local");
    let socket = default["transportSocket"].take();
    let context = &socket["typedConfig"]["commonTlsContext"];
    let validation = &context["combinedValidationContext"]["defaultValidationContext"];
    assert_eq!(
        validation["matchSubjectAltNames"],
        json!([{ "exact": "spiffe://cluster.local/ns/default/sa/echo" }])
    );
    assert_eq!(
        default,
        json!({
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": "outbound|7070||echo.default.svc.cluster.local",
            "altStatName": "outbound|7070||echo.default.svc.cluster.local;",
            "type": "EDS",
            "edsClusterConfig": {
                "edsConfig": { "ads": {} },
                "serviceName": "outbound|7070||echo.default.svc.cluster.local",
            },
            "lbPolicy": "LEAST_REQUEST",
            "circuitBreakers": { "thresholds": [{ "maxRequests": 100 }] },
            "transportSocket": null,
        })
    );
    let port = cluster("outbound|80||echo.default.svc.cluster.local");
    for field in ["transportSocket", "lbPolicy", "circuitBreakers"] {
        assert_eq!(port[field], Value::Null, "{field} of a port with its own policy");
    }
    let hashed = cluster("outbound|7070|hashed|echo.default.svc.cluster.local");
    assert_eq!(hashed["transportSocket"], Value::Null);
    assert_eq!(hashed["lbPolicy"], "RING_HASH");
    assert_eq!(hashed["ringHashLbConfig"], json!({ "minimumRingSize": "1024" }));
}

#[test]
fn clusters_exist_for_ports_and_subsets() {
    for name in [
        "outbound|7071||echo.default.svc.cluster.local",
        "outbound|7070|v3|echo.default.svc.cluster.local",
        "outbound|7070||nobody.default.svc.cluster.local",
        "outbound|07070||echo.default.svc.cluster.local",
        "outbound_.7070_._.echo.default.svc.cluster.local",
        "inbound|17070||",
        "echo:7070",
        "",
    ] {
        assert_eq!(ask(RULE, client(), ResourceType::Cluster, &[name]), [], "{name}");
    }
}

#[test]
fn endpoints_are_filtered_by_subset() {
    let addresses = |subset: &str| {
        let name = format!("outbound|7070|{subset}|{ECHO}");
        let assignment = only(ask(RULE, client(), ResourceType::Endpoint, &[&name]));
        assert_eq!(assignment["clusterName"], json!(name));
        assignment["endpoints"][0]["lbEndpoints"].as_array().map_or(0, Vec::len)
    };
    assert_eq!([addresses(""), addresses("v1"), addresses("hashed")], [1, 1, 0]);
}

/// Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): the cluster is the same, and stays empty.
#[test]
fn endpoints_that_dns_resolves_are_not_sent() {
    let localities = |resolution: &str| {
        let config = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: out}}
spec:
  hosts: [out.example.com]
  resolution: {resolution}
  endpoints: [{{address: 10.9.9.9}}]
  ports: [{{number: 80, name: grpc, protocol: GRPC}}]
"
        );
        let name = "outbound|80||out.example.com";
        let cluster = only(ask(&config, client(), ResourceType::Cluster, &[name]));
        assert_eq!(cluster["type"], "EDS");
        let assignment = only(ask(&config, client(), ResourceType::Endpoint, &[name]));
        assert_eq!(assignment["clusterName"], name);
        assignment["endpoints"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(["STATIC", "DNS", "DNS_ROUND_ROBIN"].map(localities), [1, 0, 0]);
}

#[test]
fn endpoints_in_the_ambient_mesh_are_reached_without_tunnels() {
    let config = "
apiVersion: v1
kind: Service
metadata: {name: t}
spec: {clusterIP: 10.0.0.7, ports: [{name: grpc, port: 7070}]}
---
apiVersion: v1
kind: Pod
metadata: {name: t-0, labels: {networking.istio.io/tunnel: http}}
status: {phase: Running, podIP: 10.1.0.7, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: t-1, labels: {kubernetes.io/service-name: t}}
addressType: IPv4
endpoints: [{addresses: [10.1.0.7], conditions: {ready: true}, targetRef: {kind: Pod, name: t-0, namespace: default}}]
ports: [{name: grpc, port: 7070}]
";
    let features = Features {
        pilot_enable_ambient: true,
        pilot_enable_sending_hbone: true,
        ..Features::default()
    };
    let name = "outbound|7070||t.default.svc.cluster.local";
    let assignment = only(ask_with(config, features, client(), ResourceType::Endpoint, &[name]));
    let endpoint = &assignment["endpoints"][0]["lbEndpoints"][0];
    assert_eq!(endpoint["endpoint"]["address"]["socketAddress"]["address"], "10.1.0.7");
}

/// Returns the number of resources that a client receives for forty names.
fn count_of_forty(config: &str, proxy: Proxy, resource_type: ResourceType, name: impl Fn(usize) -> String) -> usize {
    let asked: Vec<String> = (0..40).map(name).collect();
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    ask(config, proxy, resource_type, &asked).len()
}

#[test]
fn few_names_have_the_same_content() {
    let endpoints = |name: &dyn Fn(usize) -> String| count_of_forty(RULE, client(), ResourceType::Endpoint, name);
    assert_eq!(endpoints(&|number| format!("outbound|7070|x{number}|{ECHO}")), 16);
    assert_eq!(endpoints(&|number| format!("outbound|{}||{ECHO}", 7070 + number)), 40);
    let known = ["outbound|7070||", "outbound|7070|hashed|", "outbound|7070|v1|"].map(|name| format!("{name}{ECHO}"));
    let unknown = (0..40).map(|number| format!("outbound|7070|a{number}|{ECHO}"));
    let asked: Vec<String> = unknown.chain(known.iter().cloned()).collect();
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    let received = ask(RULE, client(), ResourceType::Endpoint, &asked);
    assert_eq!(names(&received).len(), 16 + known.len());
    assert!(known.iter().all(|name| names(&received).contains(&name.as_str())));

    let socket = |number: usize| format!("xds.istio.io/grpc/lds/inbound/10.0.0.{number}:17070");
    assert_eq!(count_of_forty("", server(), ResourceType::Listener, socket), 16);
}

#[test]
fn few_names_have_the_same_routes() {
    let virtual_services = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: wild}
spec:
  hosts: ['*.example.com']
  http: [{route: [{destination: {host: echo, port: {number: 7070}}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: many}
spec:
  hosts: [HOSTS]
  http: [{route: [{destination: {host: echo, port: {number: 7070}}}]}]
";
    let declared = |number: usize| format!("h{number}.example.org");
    let hosts: Vec<String> = (0..40).map(declared).collect();
    let config = virtual_services.replace("HOSTS", &hosts.join(", "));
    let count = |name: &dyn Fn(usize) -> String| count_of_forty(&config, client(), ResourceType::Route, name);
    assert_eq!(count(&|number| format!("outbound|80||h{number}.example.com")), 16);
    assert_eq!(count(&|number| format!("outbound|7070|x{number}|{ECHO}")), 16);
    assert_eq!(count(&|number| format!("outbound|80||{}", declared(number))), 40);
    assert_eq!(count(&|number| format!("outbound|80||h{number}.example.net")), 40);
}

fn routes(config: &str, name: &str) -> Value {
    only(ask(config, client(), ResourceType::Route, &[name]))
}

#[test]
fn a_route_configuration_contains_one_host() {
    let routes = routes("", "outbound|7070||echo.default.svc.cluster.local");
    assert_eq!(routes["virtualHosts"].as_array().map(Vec::len), Some(1));
    let host = &routes["virtualHosts"][0];
    assert_eq!(host["name"], "echo.default.svc.cluster.local:7070");
    let domains: Vec<&str> = host["domains"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(
        domains[..2],
        ["echo.default.svc.cluster.local", "echo.default.svc.cluster.local:7070"]
    );
    assert!(domains.contains(&"10.0.0.1:7070"));
    for field in [
        "validateClusters",
        "ignorePortInHostMatching",
        "maxDirectResponseBodySizeBytes",
    ] {
        assert_eq!(routes[field], Value::Null, "{field}");
    }
}

#[test]
fn unknown_hosts_have_no_virtual_host() {
    for host in ["nobody.example.com", "far.default.svc.cluster.local"] {
        let routes = routes("", &format!("outbound|7070||{host}"));
        assert_eq!(routes["virtualHosts"], Value::Null, "{host}");
    }
    assert_eq!(
        ask(
            "",
            client(),
            ResourceType::Route,
            &["7070", "outbound|http||echo", "outbound|0||echo"]
        ),
        []
    );
}

#[test]
fn timeouts_are_stream_durations() {
    let virtual_service = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: echo}
spec:
  hosts: [echo]
  http: [{timeout: 3s, route: [{destination: {host: far.other.svc.cluster.local}}]}]
";
    let routes = routes(virtual_service, "outbound|7070||echo.default.svc.cluster.local");
    let action = &routes["virtualHosts"][0]["routes"][0]["route"];
    assert_eq!(action["cluster"], "outbound|7070||far.other.svc.cluster.local");
    assert_eq!(action["timeout"], "3s");
    assert_eq!(action["maxStreamDuration"], json!({ "maxStreamDuration": "3s" }));
    assert_eq!(action["maxGrpcTimeout"], Value::Null);
}

#[test]
fn hosts_declared_only_by_virtual_services_are_matched_too() {
    let virtual_service = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: wild}
spec:
  hosts: ['*.example.com', echo]
  http: [{route: [{destination: {host: echo, port: {number: 7070}}}]}]
";
    let wild = routes(virtual_service, "outbound|80||foo.example.com");
    assert_eq!(
        wild["virtualHosts"][0]["domains"],
        json!(["*.example.com", "*.example.com:80"])
    );
    // Once a service has such a name, the VirtualService applies to it.
    let service = "
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: bar}
spec: {hosts: [bar.example.com], resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}]}
";
    let config = format!("{virtual_service}{service}");
    assert_eq!(
        routes(&config, "outbound|80||foo.example.com")["virtualHosts"],
        Value::Null
    );
    let bar = routes(&config, "outbound|80||bar.example.com");
    assert_eq!(bar["virtualHosts"][0]["name"], "bar.example.com:80");
    let action = &bar["virtualHosts"][0]["routes"][0]["route"];
    assert_eq!(action["cluster"], "outbound|7070||echo.default.svc.cluster.local");
}

#[test]
fn r21_routes_of_many_hosts_apply_if_one_service_has_the_port() {
    let host = |number: usize| format!("h{number}.example.org");
    let entry = |number: usize, port: u32| {
        let spec = format!(
            "{{hosts: [{}], resolution: STATIC, ports: [{{number: {port}, name: http, protocol: HTTP}}]}}",
            host(number)
        );
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e{number}}}\nspec: {spec}\n---\n"
        )
    };
    let entries: String = (0..20)
        .map(|number| entry(number, 81))
        .chain([entry(20, 7070)])
        .collect();
    let hosts: Vec<String> = (0..40).map(host).collect();
    let virtual_service = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: many}
spec:
  hosts: [HOSTS]
  http: [{route: [{destination: {host: echo, port: {number: 80}}}]}]
";
    let config = entries + &virtual_service.replace("HOSTS", &hosts.join(", "));
    let domains = |port: u32, number: usize| {
        let routes = routes(&config, &format!("outbound|{port}||{}", host(number)));
        let hosts = routes["virtualHosts"].as_array().cloned().unwrap_or_default();
        assert!(hosts.len() <= 1, "{hosts:?}");
        let first = hosts.first().map(|host| host["domains"][0].clone());
        let routed = hosts.first().map(|host| &host["routes"][0]["route"]["cluster"]);
        assert!(routed.is_none_or(|cluster| *cluster == "outbound|80||echo.default.svc.cluster.local"));
        first
    };
    // A service, hosts that only the VirtualService has, and services without the port.
    for (port, number) in [(81, 19), (7070, 20), (7070, 39), (81, 39), (7070, 0), (80, 39)] {
        assert_eq!(domains(port, number), Some(json!(host(number))), "{port} {number}");
    }
    assert_eq!(domains(9090, 39), None);
    assert_eq!(domains(9090, 20), None);
}

#[test]
fn the_first_service_of_a_virtual_service_has_a_shared_address() {
    let entry = |name: &str, address: &str| {
        let spec = format!(
            "{{hosts: [{name}.example.org], addresses: [{address}], resolution: STATIC, \
             ports: [{{number: 81, name: http, protocol: HTTP}}]}}"
        );
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: {name}}}\nspec: {spec}\n---\n"
        )
    };
    let virtual_service = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: many}
spec:
  hosts: [c.example.org, b.example.org, a.example.org]
  http: [{route: [{destination: {host: echo, port: {number: 80}}}]}]
";
    let entries = [entry("a", "10.9.0.2"), entry("b", "10.9.0.2"), entry("c", "10.9.0.1")];
    let config = entries.concat() + virtual_service;
    let has_address = |name: &str, address: &str| {
        let routes = routes(&config, &format!("outbound|81||{name}.example.org"));
        let domains = routes["virtualHosts"][0]["domains"].as_array();
        domains.expect("a virtual host").contains(&json!(address))
    };
    assert!(has_address("c", "10.9.0.1"));
    assert!(has_address("b", "10.9.0.2"));
    assert!(!has_address("a", "10.9.0.2"));
}

#[test]
fn full_names_take_precedence_over_short_ones() {
    let service = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: short}
spec: {hosts: [echo], resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}]}
";
    let routes = routes(service, "outbound|80||echo.default.svc.cluster.local");
    let domains = routes["virtualHosts"][0]["domains"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    assert!(
        !domains.contains(&json!("echo")) && !domains.contains(&json!("echo:80")),
        "{domains:?}"
    );
    assert!(domains.contains(&json!("echo.default")));
}

#[test]
fn agents_that_capture_dns_have_a_name_table() {
    let tables = |captures: &str| {
        let proxy = proxy("client", "10.1.0.9", json!({ "DNS_CAPTURE": captures }));
        ask("", proxy, ResourceType::NameTable, &[])
    };
    assert!(tables("false").is_empty());
    let table = only(tables("true"));
    assert_eq!(table["table"][ECHO]["ips"], json!(["10.0.0.1"]));
}

#[test]
fn clients_with_equal_views_share_resources() {
    let files = [("mesh.yaml", ""), ("kube.yaml", SERVICES)];
    let requested = RequestedResources::new([
        (ResourceType::Listener, [SmolStr::new("echo:80")].into()),
        (
            ResourceType::Cluster,
            [SmolStr::new("outbound|80||echo.default.svc.cluster.local")].into(),
        ),
    ]);
    let other = proxy("other", "10.1.0.8", json!({ "LABELS": { "app": "other" } }));
    let store = fixture::store_of_requested(Installation::default(), &files, vec![client(), other], &requested);
    assert_eq!(store.group_of(ConnectionId(0)), store.group_of(ConnectionId(1)));
    assert_eq!((store.size().groups, store.size().resources), (1, 2));
}
