//! Clusters and endpoints of small meshes, through the store as when serving.

mod entries;
mod places;

use serde_json::{Value, json};

use crate::{
    generate::{Proxy, ResourceType, fixture, proxy::Extensions, store::ConfigStore},
    model::{features::Features, installation::Installation},
};

const MESH: (&str, &str) = ("mesh.yaml", "accessLogFile: ''\n");

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.0.0.1
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 90}]
---
apiVersion: v1
kind: Pod
metadata: {name: a-0, labels: {app: a, security.istio.io/tlsMode: istio}}
spec: {serviceAccountName: a, nodeName: n1}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: a-1, labels: {app: a}}
spec: {serviceAccountName: a, nodeName: n2}
status: {phase: Running, podIP: 10.1.0.2, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r1, topology.kubernetes.io/zone: z1}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, labels: {topology.kubernetes.io/region: r2, topology.kubernetes.io/zone: z2}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: tcp, port: 90}]
endpoints:
- {addresses: [10.1.0.1], nodeName: n1, targetRef: {kind: Pod, name: a-0, namespace: default}}
- {addresses: [10.1.0.2], nodeName: n2, targetRef: {kind: Pod, name: a-1, namespace: default}}
";

const HTTP: &str = "outbound|80||a.default.svc.cluster.local";
const TCP: &str = "outbound|90||a.default.svc.cluster.local";

/// A mesh with its clients.
struct Fixture {
    store: ConfigStore,
}

impl Fixture {
    fn new(files: &[(&str, &str)], proxies: Vec<Proxy>) -> Self {
        let files: Vec<_> = std::iter::once(MESH).chain(files.iter().copied()).collect();
        let store = fixture::store(Installation::default(), &files, proxies);
        Self { store }
    }

    /// A resource of a client as JSON; null if there is none.
    fn get(&self, client: u64, resource_type: ResourceType, name: &str) -> Value {
        fixture::resource(&self.store, client, resource_type, name)
    }

    fn cluster(&self, name: &str) -> Value {
        self.get(0, ResourceType::Cluster, name)
    }

    fn endpoints(&self, client: u64, name: &str) -> Value {
        self.get(client, ResourceType::Endpoint, name)["endpoints"].clone()
    }
}

fn client(pod: &str, node: &str) -> Proxy {
    client_with(pod, node, &json!({}), Extensions::default())
}

fn client_with(pod: &str, node: &str, more: &Value, extensions: Extensions) -> Proxy {
    let mut metadata = json!({"NODE_NAME": node, "LABELS": {"app": pod}});
    for (key, value) in more.as_object().expect("an object") {
        metadata[key] = value.clone();
    }
    let id = format!("sidecar~10.2.0.1~{pod}.default~default.svc.cluster.local");
    let locality = format!("r{0}/z{0}", node.trim_start_matches('n'));
    Proxy {
        node_locality: locality.into(),
        ..fixture::changed(fixture::client(&id, &metadata), |kind| kind.extensions = extensions)
    }
}

fn upstream_envoy() -> Extensions {
    fixture::extensions(Some(&["envoy.filters.http.router"]))
}

fn mtls_context(cluster: &Value) -> &Value {
    &cluster["transportSocketMatches"][0]["transportSocket"]["typedConfig"]["commonTlsContext"]
}

#[test]
fn an_upstream_envoy_gets_no_metadata_exchange_and_detects_http_by_alpn() {
    let proxy = client_with("b", "n1", &json!({}), upstream_envoy());
    let fixture = Fixture::new(&[("a.yaml", SERVICE)], vec![proxy]);
    let http = fixture.cluster(HTTP);
    assert_eq!(http["filters"], Value::Null);
    assert_eq!(
        mtls_context(&http)["alpnProtocols"],
        json!(["istio-http/1.1", "istio", "http/1.1"])
    );
    assert_eq!(mtls_context(&fixture.cluster(TCP))["alpnProtocols"], json!(["istio"]));
    assert_eq!(fixture.cluster("PassthroughCluster")["filters"], Value::Null);

    let fixture = Fixture::new(&[("a.yaml", SERVICE)], vec![client("b", "n1")]);
    let http = fixture.cluster(HTTP);
    assert_eq!(http["filters"][0]["name"], "istio.metadata_exchange");
    assert_eq!(
        mtls_context(&http)["alpnProtocols"],
        json!(["istio-peer-exchange", "istio"])
    );
}

#[test]
fn a_port_entry_replaces_the_policy_and_a_subset_overrides_by_field() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec:
  host: a
  trafficPolicy:
    connectionPool: {tcp: {maxConnections: 7}}
    loadBalancer: {simple: RANDOM}
    portLevelSettings:
    - {port: {number: 90}, connectionPool: {tcp: {maxConnections: 9}}}
  subsets:
  - {name: v1, labels: {version: v1}, trafficPolicy: {loadBalancer: {simple: ROUND_ROBIN}}}
";
    let fixture = Fixture::new(&[("a.yaml", SERVICE), ("rule.yaml", rule)], vec![client("b", "n1")]);
    let facts = |name: &str| {
        let cluster = fixture.cluster(name);
        let limit = cluster["circuitBreakers"]["thresholds"][0]["maxConnections"].clone();
        (cluster["lbPolicy"].clone(), limit)
    };
    assert_eq!(facts(HTTP), (json!("RANDOM"), json!(7)));
    assert_eq!(facts(TCP), (json!("LEAST_REQUEST"), json!(9)));
    // ROUND_ROBIN is the zero value, hence absent.
    assert_eq!(
        facts("outbound|80|v1|a.default.svc.cluster.local"),
        (Value::Null, json!(7))
    );
    assert_eq!(
        facts("outbound|90|v1|a.default.svc.cluster.local"),
        (Value::Null, json!(9))
    );
    assert_eq!(
        fixture.endpoints(0, "outbound|80|v1|a.default.svc.cluster.local"),
        Value::Null
    );
}

#[test]
fn certificates_of_the_node_replace_those_of_the_mesh() {
    let files = json!({"TLS_CLIENT_CERT_CHAIN": "/c", "TLS_CLIENT_KEY": "/k", "TLS_CLIENT_ROOT_CERT": "/r"});
    let proxy = client_with("b", "n1", &files, Extensions::default());
    let fixture = Fixture::new(&[("a.yaml", SERVICE)], vec![proxy]);
    let socket = &fixture.cluster(HTTP)["transportSocket"]["typedConfig"];
    let context = &socket["commonTlsContext"];
    assert_eq!(context["tlsCertificateSdsSecretConfigs"][0]["name"], "file-cert:/c~/k");
    let validation = &context["combinedValidationContext"];
    assert_eq!(validation["validationContextSdsSecretConfig"]["name"], "file-root:/r");
    assert_eq!(socket["sni"], "outbound_.80_._.a.default.svc.cluster.local");
}

#[test]
fn a_revocation_list_in_a_file_does_not_concern_credentials() {
    let list = |authority: &str| {
        let rule = format!(
            "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: a}}
spec:
  host: a
  workloadSelector: {{matchLabels: {{app: b}}}}
  trafficPolicy: {{tls: {{mode: SIMPLE, caCrl: /etc/crl.pem, {authority}}}}}
"
        );
        let fixture = Fixture::new(&[("a.yaml", SERVICE), ("rule.yaml", &rule)], vec![client("b", "n1")]);
        let cluster = fixture.cluster(HTTP);
        let context = &cluster["transportSocket"]["typedConfig"]["commonTlsContext"]["combinedValidationContext"];
        assert_ne!(context["validationContextSdsSecretConfig"], Value::Null, "{authority}");
        context["defaultValidationContext"]["crl"]["filename"].clone()
    };
    assert_eq!(list("caCertificates: /etc/ca.pem"), "/etc/crl.pem");
    assert_eq!(list("credentialName: c"), Value::Null);
}

#[test]
fn proxy_protocol_wraps_every_socket() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec: {host: a, trafficPolicy: {proxyProtocol: {version: V2}}}
";
    let fixture = Fixture::new(&[("a.yaml", SERVICE), ("rule.yaml", rule)], vec![client("b", "n1")]);
    let cluster = fixture.cluster(HTTP);
    let matches = cluster["transportSocketMatches"].as_array().expect("a list");
    for socket in matches.iter().map(|choice| &choice["transportSocket"]) {
        assert_eq!(socket["name"], "envoy.transport_sockets.upstream_proxy_protocol");
        assert_eq!(socket["typedConfig"]["config"]["version"], "V2");
    }
    assert_eq!(matches.len(), 2);
    assert_eq!(cluster["transportSocket"], Value::Null);
}

#[test]
fn only_clients_of_node_local_services_differ_by_node() {
    let clients = || vec![client("b", "n1"), client("b", "n2")];
    let fixture = Fixture::new(&[("a.yaml", SERVICE)], clients());
    assert_eq!(fixture.store.size().groups, 1);

    let local = SERVICE.replace("selector:", "internalTrafficPolicy: Local\n  selector:");
    let fixture = Fixture::new(&[("a.yaml", &local)], clients());
    let address = |client| {
        let groups = fixture.endpoints(client, HTTP);
        assert_eq!(groups.as_array().map(Vec::len), Some(1));
        groups[0]["lbEndpoints"][0]["endpoint"]["address"]["socketAddress"]["address"].clone()
    };
    assert_eq!([address(0), address(1)], [json!("10.1.0.1"), json!("10.1.0.2")]);
}

#[test]
fn traffic_distribution_prefers_the_zone_without_outlier_detection() {
    let near = SERVICE.replace("selector:", "trafficDistribution: PreferClose\n  selector:");
    let fixture = Fixture::new(&[("a.yaml", &near)], vec![client("b", "n1"), client("b", "n2")]);
    let cluster = fixture.cluster(HTTP);
    let expected = json!({"healthyPanicThreshold": {}, "localityWeightedLbConfig": {}});
    assert_eq!(cluster["commonLbConfig"], expected);
    let priorities = |client| {
        let groups = fixture.endpoints(client, HTTP);
        let priority = |index: usize| groups[index]["priority"].as_u64().unwrap_or(0);
        [priority(0), priority(1)]
    };
    assert_eq!(priorities(0), [0, 1]);
    assert_eq!(priorities(1), [1, 0]);
}

#[test]
fn a_sidecar_defines_inbound_destinations() {
    let sidecar = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s}
spec:
  ingress:
  - {port: {number: 7000, protocol: HTTP, name: http}, defaultEndpoint: 'unix:///tmp/a'}
  - {port: {number: 7001, protocol: TCP, name: tcp}, defaultEndpoint: '127.0.0.1:7101'}
  - {port: {number: 7002, protocol: GRPC, name: grpc}, defaultEndpoint: '0.0.0.0:7102'}
  - {port: {number: 7003, protocol: TCP, name: plain}}
";
    let fixture = Fixture::new(
        &[("a.yaml", SERVICE), ("sidecar.yaml", sidecar)],
        vec![client("b", "n1")],
    );
    let endpoint = |port: u32| {
        let cluster = fixture.cluster(&format!("inbound|{port}||"));
        let assignment = &cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"][0];
        (
            assignment["endpoint"]["address"].clone(),
            !cluster["upstreamBindConfig"].is_null(),
        )
    };
    assert_eq!(endpoint(7000), (json!({"pipe": {"path": "/tmp/a"}}), true));
    let socket = |address: &str, port: u32| json!({"socketAddress": {"address": address, "portValue": port}});
    assert_eq!(endpoint(7001), (socket("127.0.0.1", 7101), false));
    assert_eq!(endpoint(7002), (socket("10.2.0.1", 7102), true));
    assert_eq!(endpoint(7003), (Value::Null, true));
    assert_eq!(fixture.cluster("inbound|7003||")["type"], "ORIGINAL_DST");
}

#[test]
fn the_address_of_an_inbound_destination_may_have_brackets() {
    let sidecar = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s}
spec:
  ingress: [{port: {number: 7000, protocol: TCP, name: tcp}, defaultEndpoint: '[0.0.0.0]:7100'}]
";
    let fixture = Fixture::new(
        &[("a.yaml", SERVICE), ("sidecar.yaml", sidecar)],
        vec![client("b", "n1")],
    );
    let cluster = fixture.cluster("inbound|7000||");
    let assignment = &cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"][0];
    let socket = json!({"socketAddress": {"address": "10.2.0.1", "portValue": 7100}});
    assert_eq!(assignment["endpoint"]["address"], socket);
}

#[test]
fn services_without_endpoints_that_dns_would_resolve_have_no_cluster() {
    let entries = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: empty}
spec:
  hosts: [empty.example.com]
  resolution: DNS
  ports: [{number: 80, name: http, protocol: HTTP}]
  workloadSelector: {labels: {app: nobody}}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: full}
spec: {hosts: [full.example.com], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
";
    let fixture = Fixture::new(&[("entries.yaml", entries)], vec![client("b", "n1")]);
    assert_eq!(fixture.cluster("outbound|80||empty.example.com"), Value::Null);
    let notes = fixture.store.notes();
    assert!(
        notes
            .iter()
            .any(|note| note.code == "pilot_dns_cluster_without_endpoints")
    );
    assert_eq!(fixture.cluster("outbound|80||full.example.com")["type"], "STRICT_DNS");
}

#[test]
fn header_names_stay_as_written_on_every_kind_of_cluster() {
    let service = SERVICE.replace(
        "{name: tcp, port: 90}",
        "{name: tcp, port: 90}, {name: any, port: 91}, {name: grpc-x, port: 92}",
    );
    let config = json!({"proxyHeaders": {"preserveHttp1HeaderCase": true}});
    let proxy = client_with("b", "n1", &json!({"PROXY_CONFIG": config}), Extensions::default());
    let fixture = Fixture::new(&[("a.yaml", &service)], vec![proxy]);
    let options = |name: &str| {
        let options = &fixture.cluster(name)["typedExtensionProtocolOptions"];
        options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"].clone()
    };
    let of = |http: &Value| http["headerKeyFormat"]["statefulFormatter"]["name"].clone();
    let any = "outbound|91||a.default.svc.cluster.local";
    for name in ["PassthroughCluster", "InboundPassthroughCluster", any] {
        let options = options(name);
        assert_eq!(
            of(&options["useDownstreamProtocolConfig"]["httpProtocolOptions"]),
            "preserve_case"
        );
    }
    assert_eq!(
        of(&options(HTTP)["explicitHttpConfig"]["httpProtocolOptions"]),
        "preserve_case"
    );
    assert_eq!(options(TCP), Value::Null);
    let grpc = options("outbound|92||a.default.svc.cluster.local");
    assert_eq!(grpc["explicitHttpConfig"], json!({"http2ProtocolOptions": {}}));
}

#[test]
fn an_upgrade_does_not_touch_ports_that_follow_the_client() {
    let service = SERVICE.replace("{name: tcp, port: 90}", "{name: tcp, port: 90}, {name: any, port: 91}");
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec: {host: a, trafficPolicy: {connectionPool: {http: {h2UpgradePolicy: UPGRADE}}}}
";
    let fixture = Fixture::new(&[("a.yaml", &service), ("rule.yaml", rule)], vec![client("b", "n1")]);
    let options = |name: &str| {
        let options = &fixture.cluster(name)["typedExtensionProtocolOptions"];
        options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"].clone()
    };
    let h2 = json!({"http2ProtocolOptions": {}});
    assert_eq!(options(HTTP)["explicitHttpConfig"], h2);
    assert_eq!(options(TCP)["explicitHttpConfig"], h2);
    let any = options("outbound|91||a.default.svc.cluster.local");
    assert_eq!(any["explicitHttpConfig"], Value::Null);
    assert!(!any["useDownstreamProtocolConfig"].is_null());
}

/// Returns the maximum number of connections to a workload of service `a`.
fn limit_of_server(service: &str, config: &str) -> Value {
    let id = "sidecar~10.1.0.1~a-0.default~default.svc.cluster.local";
    let proxy = fixture::client(id, &json!({"LABELS": {"app": "a"}}));
    let fixture = Fixture::new(&[("a.yaml", service), ("b.yaml", config)], vec![proxy]);
    fixture.cluster("inbound|8080||")["circuitBreakers"]["thresholds"][0]["maxConnections"].clone()
}

#[test]
fn a_servers_rule_applies_only_if_the_server_sees_its_own_service() {
    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec: {host: a, trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s}
spec: {egress: [{hosts: [HOSTS]}]}
";
    let limit = |hosts: &str| limit_of_server(SERVICE, &rule.replace("HOSTS", hosts));
    assert_eq!(limit("'*/*'"), 7);
    assert_eq!(limit("'other/*'"), u32::MAX);
}

#[test]
fn a_server_sees_its_own_service_if_a_route_of_the_mesh_leads_there() {
    let objects = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec: {host: a, trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: b}
spec: {hosts: [b.example.com], gateways: [GATEWAY], http: [{route: [{destination: {host: a}}]}]}
";
    let unexported = "{name: a, annotations: {networking.istio.io/exportTo: other}}";
    let service = SERVICE.replacen("{name: a}", unexported, 1);
    let limit = |gateway: &str| limit_of_server(&service, &objects.replace("GATEWAY", gateway));
    assert_eq!(limit("mesh"), 7);
    assert_eq!(limit("g"), u32::MAX);
}

#[test]
fn a_port_that_only_the_own_cluster_has_is_inbound() {
    let remote = SERVICE.replace("{name: tcp, port: 90}", "{name: grpc, port: 70, targetPort: 7070}");
    let files = [("a.yaml", SERVICE), ("kube-c2.yaml", remote.as_str())];
    let inbound = |cluster: &str| {
        let id = "sidecar~10.1.0.1~a-0.default~default.svc.cluster.local";
        let proxy = fixture::client(id, &json!({"CLUSTER_ID": cluster}));
        let fixture = Fixture::new(&files, vec![proxy]);
        let listener = fixture.get(0, ResourceType::Listener, "virtualInbound");
        let chains = listener["filterChains"].as_array().expect("chains").iter();
        let mut ports: Vec<u64> = chains
            .filter_map(|chain| chain["filterChainMatch"]["destinationPort"].as_u64())
            .collect();
        ports.sort_unstable();
        ports.dedup();
        (fixture.cluster("inbound|7070||"), ports)
    };
    let (cluster, ports) = inbound("c2");
    assert!(ports.contains(&7070), "{ports:?}");
    let services = &cluster["metadata"]["filterMetadata"]["istio"]["services"];
    assert_eq!(services[0]["host"], "a.default.svc.cluster.local");
    let options = &cluster["typedExtensionProtocolOptions"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    assert_eq!(options["explicitHttpConfig"], json!({"http2ProtocolOptions": {}}));
    let (cluster, ports) = inbound("Kubernetes");
    assert!(cluster.is_null());
    assert!(ports.contains(&8080) && !ports.contains(&7070), "{ports:?}");
}

#[test]
fn tls_of_a_rule_stays_inside_tunnels_except_that_of_the_mesh() {
    let sockets = |tls: &str, balancer: &str, certificates: &Value| {
        let rule = format!(
            "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: d}}
spec: {{host: a.default.svc.cluster.local, trafficPolicy: {{{tls}{balancer}}}}}
"
        );
        let installation = Installation {
            features: Features {
                pilot_enable_sending_hbone: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let files = [MESH, ("a.yaml", SERVICE), ("d.yaml", rule.as_str())];
        let proxy = client_with("b", "n1", certificates, Extensions::default());
        let store = fixture::store(installation, &files, vec![proxy]);
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, HTTP);
        let matches = cluster["transportSocketMatches"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let of_match = |found: &Value| {
            let socket = &found["transportSocket"];
            let inner = socket["typedConfig"]["transportSocket"]["name"].as_str();
            let inner = inner.or(socket["name"].as_str()).unwrap_or_default();
            let inner = inner.trim_start_matches("envoy.transport_sockets.").to_owned();
            (
                found["name"].as_str().unwrap_or_default().to_owned(),
                inner,
                found["match"].clone(),
            )
        };
        matches.iter().map(of_match).collect::<Vec<_>>()
    };
    let expected = |given: &[(&str, &str, Value)]| -> Vec<(String, String, Value)> {
        let owned = given.iter().cloned();
        owned
            .map(|(name, inner, by)| (name.to_owned(), inner.to_owned(), by))
            .collect()
    };
    let (none, hbone) = (json!({}), || json!({"tunnel": "http"}));
    let in_tunnel = expected(&[("hbone", "tls", hbone()), ("user", "tls", Value::Null)]);
    assert_eq!(sockets("tls: {mode: SIMPLE}", "", &none), in_tunnel);
    assert_eq!(
        sockets("tls: {mode: ISTIO_MUTUAL}", "", &none),
        expected(&[("hbone", "raw_buffer", hbone()), ("tlsMode-istio", "tls", Value::Null)])
    );
    let plain = expected(&[
        ("hbone", "raw_buffer", hbone()),
        ("tlsMode-disabled", "raw_buffer", json!({})),
    ]);
    assert_eq!(sockets("tls: {mode: DISABLE}", "", &none), plain);
    // Auto mTLS, with the mesh's certificates and with certificates in files.
    assert_eq!(
        sockets("", "", &none),
        expected(&[
            ("hbone", "raw_buffer", hbone()),
            ("tlsMode-istio", "tls", json!({"tlsMode": "istio"})),
            ("tlsMode-disabled", "raw_buffer", json!({})),
        ])
    );
    let files = json!({"TLS_CLIENT_CERT_CHAIN": "/c", "TLS_CLIENT_KEY": "/k", "TLS_CLIENT_ROOT_CERT": "/r"});
    assert_eq!(sockets("", "", &files), in_tunnel);
    // Addresses that the workload selected are not reached through tunnels, if there are settings.
    let passthrough = ", loadBalancer: {simple: PASSTHROUGH}";
    assert_eq!(sockets("tls: {mode: SIMPLE}", passthrough, &none), []);
    assert_eq!(sockets("tls: {mode: DISABLE}", passthrough, &none), []);
}

#[test]
fn metadata_exchange_carries_additional_labels() {
    let installation = Installation {
        features: Features {
            pilot_mx_additional_labels: vec!["role".into()],
            ..Features::default()
        },
        ..Installation::default()
    };
    let files = [MESH, ("a.yaml", SERVICE)];
    let store = fixture::store(installation, &files, vec![client("b", "n1")]);
    for name in [HTTP, "PassthroughCluster"] {
        let cluster = fixture::resource(&store, 0, ResourceType::Cluster, name);
        let config = &cluster["filters"][0]["typedConfig"]["value"];
        assert_eq!(config["additional_labels"], json!(["role"]), "{name}");
    }
}
