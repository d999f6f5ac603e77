//! Route configurations and gateway listeners of small meshes, through the store as when serving.

use serde_json::{Value, json};

use crate::{
    generate::{
        Proxy, ResourceType, fixture,
        store::{ConfigStore, ConnectionId},
    },
    model::{features::Features, installation::Installation},
};

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}, {name: grpc, port: 90}]}
---
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}, {name: any, port: 91}]}
---
apiVersion: v1
kind: Service
metadata: {name: c, namespace: other}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: gateway, namespace: istio-system, labels: {app: gateway}}
spec:
  clusterIP: 10.0.0.9
  selector: {app: gateway}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: https, port: 443, targetPort: 8443}, {name: tcp-low, port: 81, targetPort: 81}]
---
apiVersion: v1
kind: Pod
metadata: {name: gateway-0, namespace: istio-system, labels: {app: gateway}}
status: {phase: Running, podIP: 10.1.0.9, conditions: [{type: Ready, status: 'True'}]}
";

/// A mesh with its clients.
struct Fixture {
    store: ConfigStore,
}

impl Fixture {
    fn new(config: &str, proxies: Vec<Proxy>) -> Self {
        Self::with_mesh("accessLogFile: ''\n", config, Features::default(), proxies)
    }

    fn with_mesh(mesh: &str, config: &str, features: Features, proxies: Vec<Proxy>) -> Self {
        let files = [("mesh.yaml", mesh), ("kube.yaml", SERVICES), ("config.yaml", config)];
        let installation = Installation {
            features,
            ..Installation::default()
        };
        let store = fixture::store(installation, &files, proxies);
        Self { store }
    }

    fn get(&self, client: u64, resource_type: ResourceType, name: &str) -> Value {
        fixture::resource(&self.store, client, resource_type, name)
    }

    fn names(&self, client: u64, resource_type: ResourceType) -> Vec<String> {
        fixture::names(&self.store, client, resource_type)
    }

    /// The virtual hosts of a route configuration: name and domains.
    fn hosts(&self, route: &str) -> Vec<(String, Vec<String>)> {
        let configuration = self.get(0, ResourceType::Route, route);
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let hosts = list(&configuration["virtualHosts"]);
        hosts
            .iter()
            .map(|host| (text(&host["name"]), list(&host["domains"]).iter().map(text).collect()))
            .collect()
    }

    /// A virtual host by name; null if there is none.
    fn host(&self, route: &str, name: &str) -> Value {
        let configuration = self.get(0, ResourceType::Route, route);
        let hosts = configuration["virtualHosts"].as_array().cloned().unwrap_or_default();
        let found = hosts.into_iter().find(|host| host["name"] == name);
        found.unwrap_or_default()
    }

    /// The clusters of the routes of a virtual host.
    fn clusters(&self, route: &str, name: &str) -> Vec<Value> {
        let host = self.host(route, name);
        let routes = host["routes"].as_array().cloned().unwrap_or_default();
        routes.iter().map(|route| route["route"]["cluster"].clone()).collect()
    }
}

fn proxy(id: &str, namespace: &str, more: &Value) -> Proxy {
    fixture::client(&format!("{id}.{namespace}~{namespace}.svc.cluster.local"), more)
}

fn sidecar(labels: &Value) -> Proxy {
    proxy("sidecar~10.1.0.1~client-0", "default", &json!({"LABELS": labels}))
}

fn gateway(more: &Value) -> Proxy {
    let mut metadata = json!({"LABELS": {"app": "gateway"}});
    for (key, value) in more.as_object().expect("an object") {
        metadata[key] = value.clone();
    }
    proxy("router~10.1.0.9~gateway-0", "istio-system", &metadata)
}

fn virtual_service(name: &str, spec: &str) -> String {
    format!("---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

fn gateway_config(servers: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: gw, namespace: istio-system}}\n\
         spec: {{selector: {{app: gateway}}, servers: {servers}}}\n"
    )
}

const A: &str = "a.default.svc.cluster.local";
const B: &str = "b.default.svc.cluster.local";

#[test]
fn each_http_port_and_each_sniffed_service_has_routes() {
    let fixture = Fixture::new("", vec![sidecar(&json!({}))]);
    let names = fixture.names(0, ResourceType::Route);
    assert_eq!(names, ["80", "90", &format!("{B}:91")]);
    let hosts = fixture.hosts("80");
    let domains = [A, &format!("{A}."), "a", "a.default.svc", "a.default", "10.0.0.1"];
    assert_eq!(hosts[0], (format!("{A}:80"), domains.map(str::to_owned).to_vec()));
    let foreign = &hosts.iter().find(|(name, _)| name.starts_with("c.")).expect("host c").1;
    assert_eq!(foreign[2..4], ["c.other", "c.other.svc"]);
    assert_eq!(hosts.last().expect("a last host").0, "allow_any");
    let sniffed = fixture.hosts(&format!("{B}:91"));
    assert_eq!(sniffed, [(format!("{B}:91"), vec!["*".to_owned()])]);
}

/// HTTP/3 uses the UDP port with the number of the HTTP port, and may be declared first.
#[test]
fn ports_of_udp_hide_no_default_routes() {
    const HOST: &str = "d.default.svc.cluster.local";
    let service = "
apiVersion: v1
kind: Service
metadata: {name: d}
spec:
  clusterIP: 10.0.0.4
  ports:
  - {name: http3, port: 80, protocol: UDP}
  - {name: http, port: 80}
  - {name: quic, port: 91, protocol: UDP}
  - {name: any, port: 91}
";
    let fixture = Fixture::new(service, vec![sidecar(&json!({}))]);
    for (route, port) in [("80", 80), ("d.default.svc.cluster.local:91", 91)] {
        let clusters = fixture.clusters(route, &format!("{HOST}:{port}"));
        assert_eq!(clusters, [format!("outbound|{port}||{HOST}")], "{route}");
    }
}

#[test]
fn http_proxies_route_by_port() {
    let fixture = Fixture::with_mesh(
        "proxyHttpPort: 15007\n",
        "",
        Features::default(),
        vec![sidecar(&json!({}))],
    );
    let hosts = fixture.hosts("http_proxy");
    let a = |port: u32| {
        hosts
            .iter()
            .find(|(name, _)| *name == format!("{A}:{port}"))
            .expect("host a")
    };
    assert!(a(80).1.contains(&"a".to_owned()) && a(80).1.contains(&"a:80".to_owned()));
    assert!(a(90).1.iter().all(|domain| domain.contains(':')), "{:?}", a(90).1);
}

#[test]
fn hosts_outside_the_registry_are_routed_on_port_80_only() {
    let spec = "{hosts: [x.example.com, b], http: [{route: [{destination: {host: a}}]}]}";
    let fixture = Fixture::new(&virtual_service("vs", spec), vec![sidecar(&json!({}))]);
    let domains = fixture
        .hosts("80")
        .into_iter()
        .find(|(name, _)| name == "x.example.com:80");
    assert_eq!(domains.expect("host x").1, ["x.example.com"]);
    assert!(fixture.hosts("90").iter().all(|(name, _)| !name.contains("example")));
    // Without a port the destination means the port that the request came to.
    let sniffed = format!("{B}:91");
    assert_eq!(
        fixture.clusters(&sniffed, &sniffed),
        [json!(format!("outbound|91||{A}"))]
    );
}

#[test]
fn the_most_specific_virtual_service_takes_a_host() {
    let config = [
        virtual_service(
            "wide",
            "{hosts: ['*.cluster.local'], http: [{name: wide, route: [{destination: {host: a}}]}]}",
        ),
        virtual_service(
            "near",
            "{hosts: ['*.default.svc.cluster.local'], http: [{name: near, route: [{destination: {host: a}}]}]}",
        ),
        virtual_service(
            "exact",
            "{hosts: [b], http: [{name: exact, route: [{destination: {host: a}}]}]}",
        ),
    ];
    let fixture = Fixture::new(&config.concat(), vec![sidecar(&json!({}))]);
    let name_of = |host: &str| fixture.host("80", &format!("{host}:80"))["routes"][0]["name"].clone();
    assert_eq!(name_of(A), "near");
    assert_eq!(name_of(B), "exact");
    assert_eq!(name_of("c.other.svc.cluster.local"), "wide");
}

#[test]
fn only_selected_labels_distinguish_proxies() {
    let spec = "{hosts: [a], http: [{match: [{sourceLabels: {app: x}}], route: [{destination: {host: b}}]}, \
                {route: [{destination: {host: a}}]}]}";
    let clients = vec![
        sidecar(&json!({"app": "x", "hash": "1"})),
        sidecar(&json!({"app": "x", "hash": "2"})),
        sidecar(&json!({"app": "y", "hash": "3"})),
    ];
    let fixture = Fixture::new(&virtual_service("vs", spec), clients);
    let group = |client| fixture.store.group_of(ConnectionId(client)).cloned();
    let route =
        |client| fixture.get(client, ResourceType::Route, "80")["virtualHosts"][0]["routes"][0]["route"].clone();
    assert_eq!(route(0)["cluster"], json!(format!("outbound|80||{B}")));
    assert_eq!(route(2)["cluster"], json!(format!("outbound|80||{A}")));
    assert_eq!(route(0), route(1));
    assert!(group(0) != group(2));
}

#[test]
fn consistent_hash_gives_a_policy_and_keeps_retries_in_place() {
    let config = virtual_service(
        "vs",
        "{hosts: [a], http: [{route: [{destination: {host: b, subset: v1}}]}]}",
    ) + "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: dr}\n\
           spec: {host: b, trafficPolicy: {loadBalancer: {consistentHash: {useSourceIp: true}}}, \
           subsets: [{name: v1, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user}}}}]}\n";
    let fixture = Fixture::new(&config, vec![sidecar(&json!({}))]);
    let action = |host: &str| fixture.host("80", &format!("{host}:80"))["routes"][0]["route"].clone();
    assert_eq!(action(A)["hashPolicy"], json!([{"header": {"headerName": "x-user"}}]));
    assert_eq!(action(A)["retryPolicy"]["retryHostPredicate"], Value::Null);
    assert_eq!(
        action(B)["hashPolicy"],
        json!([{"connectionProperties": {"sourceIp": true}}])
    );
    assert!(action(B)["retryPolicy"]["retryHostPredicate"].is_array());
}

#[test]
fn a_rule_of_the_clients_namespace_hides_a_consistent_hash() {
    let rule = |namespace: &str, balancer: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
             metadata: {{name: a, namespace: {namespace}}}\n\
             spec: {{host: {A}, trafficPolicy: {{loadBalancer: {balancer}}}}}\n"
        )
    };
    let config = virtual_service("vs", "{hosts: [b], http: [{route: [{destination: {host: a}}]}]}")
        + &rule("default", "{consistentHash: {httpHeaderName: x-user}}")
        + &rule("other", "{simple: ROUND_ROBIN}");
    let clients = ["default", "other", "third"].map(|name| proxy("sidecar~10.1.0.1~client-0", name, &json!({})));
    let fixture = Fixture::new(&config, clients.into());
    for (client, is_hashed) in [(0, true), (1, false), (2, true)] {
        let routes = fixture.get(client, ResourceType::Route, "80");
        let hosts = routes["virtualHosts"].as_array().expect("virtual hosts");
        let action = |name: &str| {
            let host = hosts.iter().find(|host| host["name"] == format!("{name}:80"));
            host.expect(name)["routes"][0]["route"].clone()
        };
        for host in [A, B] {
            assert_eq!(action(host)["hashPolicy"].is_array(), is_hashed, "{client}: {host}");
        }
        assert_eq!(
            action(B)["retryPolicy"]["retryHostPredicate"].is_array(),
            !is_hashed,
            "{client}"
        );
    }
}

#[test]
fn routes_after_a_catch_all_are_omitted() {
    let spec = "{hosts: [a], http: [{match: [{uri: {prefix: /x}}, {uri: {prefix: /}}, {uri: {exact: /y}}], \
                route: [{destination: {host: a}}]}, {route: [{destination: {host: b}}]}]}";
    let fixture = Fixture::new(&virtual_service("vs", spec), vec![sidecar(&json!({}))]);
    assert_eq!(fixture.clusters("80", &format!("{A}:80")).len(), 2);
}

#[test]
fn claims_are_matched_in_the_metadata_of_the_jwt_filter() {
    let spec = "{hosts: [x.example.com], gateways: [istio-system/gw], http: [{match: [{headers: {'@request.auth.claims.group': {exact: x}}, \
                withoutHeaders: {'@request.auth.claims[sub][id]': {prefix: z}}}], route: [{destination: {host: a}}]}]}";
    let config = gateway_config("[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]")
        + &virtual_service("vs", spec);
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    let declared = &fixture.host("http.8080", "x.example.com:80")["routes"][0]["match"]["dynamicMetadata"];
    assert_eq!(declared[0]["path"], json!([{"key": "payload"}, {"key": "group"}]));
    let text = json!({"stringMatch": {"exact": "x"}});
    let both = json!({"orMatch": {"valueMatchers": [{"listMatch": {"oneOf": text}}, text]}});
    assert_eq!(declared[0]["value"], both);
    assert_eq!(
        declared[1]["path"],
        json!([{"key": "payload"}, {"key": "sub"}, {"key": "id"}])
    );
    assert_eq!(declared[1]["invert"], true);
}

#[test]
fn redirects_omit_default_ports() {
    let spec = "{hosts: [a], http: [{match: [{uri: {prefix: /1}}], redirect: {port: 443, scheme: https}}, \
                {match: [{uri: {prefix: /2}}], redirect: {derivePort: FROM_REQUEST_PORT, scheme: https, redirectCode: 308}}, \
                {match: [{uri: {prefix: /3}}], redirect: {derivePort: FROM_REQUEST_PORT, uri: /x}}]}";
    let fixture = Fixture::new(&virtual_service("vs", spec), vec![sidecar(&json!({}))]);
    let redirect = |index: usize| fixture.host("80", &format!("{A}:80"))["routes"][index]["redirect"].clone();
    assert_eq!(redirect(0), json!({"schemeRedirect": "https", "pathRedirect": ""}));
    assert_eq!(redirect(1)["portRedirect"], 80);
    assert_eq!(redirect(1)["responseCode"], "PERMANENT_REDIRECT");
    assert_eq!(redirect(2), json!({"pathRedirect": "/x"}));
}

#[test]
fn registry_only_refuses_unknown_traffic() {
    let sidecar_config = "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: default}\n\
                          spec: {outboundTrafficPolicy: {mode: REGISTRY_ONLY}}\n";
    let fixture = Fixture::new(sidecar_config, vec![sidecar(&json!({}))]);
    let last = fixture.host("80", "block_all");
    assert_eq!(last["routes"][0]["directResponse"], json!({"status": 502}));
}

#[test]
fn a_sidecar_shows_services_under_the_aliases_that_it_imports() {
    let alias = |name: &str, target: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: legacy}}\n\
             spec: {{type: ExternalName, externalName: {target}}}\n"
        )
    };
    let config = [
        alias("old-a", A),
        alias("old-b", B),
        virtual_service("vs", "{hosts: [b], http: [{route: [{destination: {host: a}}]}]}"),
    ]
    .concat();
    let shown = |hosts: &str| {
        let imports = format!(
            "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {{name: default}}\n\
             spec: {{egress: [{{hosts: {hosts}}}]}}\n"
        );
        let fixture = Fixture::new(&[config.as_str(), &imports].concat(), vec![sidecar(&json!({}))]);
        let hosts = fixture.hosts("80");
        [(A, "old-a.legacy"), (B, "old-b.legacy")].map(|(host, alias)| {
            let (_, domains) = hosts
                .iter()
                .find(|(name, _)| *name == format!("{host}:80"))
                .expect(host);
            [alias.to_owned(), format!("{alias}.svc.cluster.local")].map(|name| domains.contains(&name))
        })
    };
    assert_eq!(shown("[./*]"), [[true; 2]; 2]);
    assert_eq!(shown(&format!("[./{A}, ./{B}]")), [[false; 2]; 2]);
    let with_alias = format!("[./{A}, ./{B}, ./old-b.legacy.svc.cluster.local]");
    assert_eq!(shown(&with_alias), [[false; 2], [true; 2]]);
}

#[test]
fn gateways_join_hosts_with_the_same_routes() {
    let config = gateway_config("[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]")
        + &virtual_service(
            "vs",
            "{hosts: [x.example.com, longer.example.com], gateways: [istio-system/gw], \
             http: [{route: [{destination: {host: a}}]}]}",
        )
        + &virtual_service(
            "vs2",
            "{hosts: [y.example.com], gateways: [istio-system/gw], http: [{route: [{destination: {host: a}}]}]}",
        );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    assert_eq!(fixture.names(0, ResourceType::Route), ["http.8080"]);
    assert_eq!(fixture.names(0, ResourceType::Listener), ["0.0.0.0_8080"]);
    let joined = vec!["longer.example.com".to_owned(), "x.example.com".to_owned()];
    let hosts = fixture.hosts("http.8080");
    assert_eq!(hosts[0], ("longer.example.com:80".to_owned(), joined));
    assert_eq!(
        hosts[1],
        ("y.example.com:80".to_owned(), vec!["y.example.com".to_owned()])
    );
}

#[test]
fn catch_all_routes_follow_routes_of_later_virtual_services() {
    let config = gateway_config("[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]")
        + &virtual_service(
            "first",
            "{hosts: [x.example.com], gateways: [istio-system/gw], http: [{route: [{destination: {host: a}}]}]}",
        )
        + &virtual_service(
            "second",
            "{hosts: [x.example.com], gateways: [istio-system/gw], \
             http: [{match: [{uri: {prefix: /b}}], route: [{destination: {host: b}}]}]}",
        );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    let clusters = [B, A].map(|host| json!(format!("outbound|80||{host}")));
    assert_eq!(fixture.clusters("http.8080", "x.example.com:80"), clusters);
}

#[test]
fn routes_of_a_gateway_follow_the_port_of_the_server_where_they_depend_on_it() {
    let servers = "[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}, \
                   {port: {number: 90, name: grpc, protocol: HTTP}, hosts: ['*']}]";
    let bound = |name: &str, http: &str| {
        let spec = format!("{{hosts: [{name}.example.com], gateways: [istio-system/gw], http: [{http}]}}");
        virtual_service(name, &spec)
    };
    let config = gateway_config(servers)
        + &bound("several", "{route: [{destination: {host: a}}]}")
        + &bound("sole", "{route: [{destination: {host: c.other.svc.cluster.local}}]}")
        + &bound(
            "redirected",
            "{redirect: {derivePort: FROM_REQUEST_PORT, scheme: https}}",
        )
        + &bound(
            "asked",
            "{match: [{port: 90}], route: [{destination: {host: c.other.svc.cluster.local}}]}",
        );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    let route = |port: u32, name: &str| {
        let configuration = if port == 80 { "http.8080" } else { "http.90" };
        fixture.host(configuration, &format!("{name}.example.com:{port}"))["routes"][0].clone()
    };
    let traced = |port: u32, name: &str| route(port, name)["decorator"]["operation"].clone();
    for port in [80, 90] {
        assert_eq!(
            route(port, "several")["route"]["cluster"],
            format!("outbound|{port}||{A}")
        );
        assert_eq!(
            route(port, "sole")["route"]["cluster"],
            "outbound|80||c.other.svc.cluster.local"
        );
        assert_eq!(traced(port, "sole"), "c.other.svc.cluster.local:80/*");
        assert_eq!(route(port, "redirected")["redirect"]["portRedirect"], port);
        assert_eq!(traced(port, "redirected"), format!("redirected:{port}/*"));
    }
    assert_eq!(fixture.host("http.8080", "asked.example.com:80"), Value::Null);
    assert_ne!(route(90, "asked"), Value::Null);
}

/// Looking up each destination among all of them, again for each server, would take quadratic time.
#[test]
fn a_virtual_service_may_have_many_destinations_and_servers() {
    let (destinations, servers) = (4000, 8);
    let list = |count: usize, item: &dyn Fn(usize) -> String| (0..count).map(item).collect::<Vec<_>>().join(", ");
    let hosts = list(destinations, &|number| format!("a{number}.example"));
    let mirrors = list(destinations, &|number| {
        format!("{{destination: {{host: a{number}.example}}, percentage: {{value: 1}}}}")
    });
    let servers = list(servers, &|number| {
        format!("{{port: {{number: 80, name: http-{number}, protocol: HTTP}}, hosts: ['*']}}")
    });
    let spec = format!(
        "{{hosts: [x.example.com], gateways: [istio-system/gw], \
         http: [{{route: [{{destination: {{host: a0.example}}}}], mirrors: [{mirrors}]}}]}}"
    );
    let entry = format!(
        "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: many}}\n\
         spec: {{hosts: [{hosts}], resolution: DNS, ports: [{{number: 8000, name: http, protocol: HTTP}}]}}\n"
    );
    let config = gateway_config(&format!("[{servers}]")) + &virtual_service("vs", &spec) + &entry;
    let features = Features {
        pilot_max_routes_per_object: 0,
        pilot_max_routes_per_namespace: 0,
        ..Features::default()
    };
    let fixture = Fixture::with_mesh("accessLogFile: ''\n", &config, features, vec![gateway(&json!({}))]);
    let action = fixture.host("http.8080", "x.example.com:80")["routes"][0]["route"].clone();
    let mirrors = action["requestMirrorPolicies"].as_array().expect("mirrors");
    assert_eq!(mirrors.len(), destinations);
    assert_eq!(mirrors[1]["cluster"], "outbound|8000||a1.example");
}

/// Each port has routes of its own. Reading all ports of the destination for each of them would take cubic time.
#[test]
fn r21_services_of_one_host_may_have_many_ports() {
    const HOST: &str = "d.default.svc.cluster.local";
    let ports = (1000..2000).map(|number| format!("{{name: http-{number}, port: {number}}}"));
    let ports: Vec<String> = ports.collect();
    let service = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: d}}\nspec: {{clusterIP: 10.0.0.4, ports: [{}]}}\n",
        ports.join(", ")
    );
    let entry = format!(
        "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: d}}\n\
         spec: {{hosts: [{HOST}], resolution: STATIC, ports: [{{number: 999, name: http, protocol: HTTP}}]}}\n"
    );
    let spec = format!("{{hosts: [{HOST}], http: [{{route: [{{destination: {{host: {HOST}, subset: v1}}}}]}}]}}");
    let config = [service, entry, virtual_service("d", &spec)].concat();
    let fixture = Fixture::new(&config, vec![sidecar(&json!({}))]);
    for port in [999, 1000, 1999] {
        let clusters = fixture.clusters(&port.to_string(), &format!("{HOST}:{port}"));
        assert_eq!(clusters, [format!("outbound|{port}|v1|{HOST}")]);
    }
}

/// Routes are repeated for each port of a service, and so are the other hosts of the VirtualService.
#[test]
fn r21_routes_apply_on_a_limited_number_of_ports() {
    const HOST: &str = "d.default.svc.cluster.local";
    let ports: Vec<String> = (1000..1045)
        .map(|number| format!("{{name: http-{number}, port: {number}}}"))
        .collect();
    let service = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: d}}\nspec: {{clusterIP: 10.0.0.4, ports: [{}]}}\n",
        ports.join(", ")
    );
    let others: Vec<String> = (0..14).map(|number| format!("x{number}.example.com")).collect();
    let spec = format!(
        "{{hosts: [{HOST}, {}], http: [{{route: [{{destination: {{host: {HOST}, port: {{number: 1000}}}}}}]}}]}}",
        others.join(", ")
    );
    let younger = format!(
        "{{hosts: [{HOST}], http: [{{match: [{{uri: {{prefix: /a}}}}, {{uri: {{prefix: /b}}}}], \
         route: [{{destination: {{host: {HOST}}}}}]}}]}}"
    );
    let config = [service, virtual_service("d", &spec), virtual_service("e", &younger)].concat();
    let features = Features {
        pilot_max_routes_per_object: 40,
        ..Features::default()
    };
    let mesh = "proxyHttpPort: 15002\n";
    let fixture = Fixture::with_mesh(mesh, &config, features, vec![sidecar(&json!({}))]);
    let others = |route: &str| {
        let hosts = fixture.hosts(route).into_iter();
        hosts.filter(|(name, _)| name.starts_with('x')).count()
    };
    let status = |route: &str, port: u32| {
        let host = fixture.host(route, &format!("{HOST}:{port}"));
        assert_eq!(host["routes"].as_array().map(Vec::len), Some(1), "{route} {port}");
        host["routes"][0]["directResponse"]["status"].clone()
    };
    assert_eq!((others("1000"), others("1025"), others("1026")), (14, 14, 0));
    for port in [1000, 1039, 1040, 1044] {
        let expected = if port < 1040 { Value::Null } else { json!(404) };
        assert_eq!(status(&port.to_string(), port), expected, "{port}");
        assert_eq!(status("http_proxy", port), expected, "{port} of an HTTP proxy");
    }
    // The other VirtualService would refuse requests to more ports, which are served.
    let notes = fixture.store.notes();
    let noted = notes.iter().filter(|note| note.code == "OutputLimitExceeded").count();
    assert_eq!(noted, 10, "five ports in two route configurations");
}

/// A destination without a port has the only one of its service, or else that of the server. Each of tens of thousands
/// of servers may have routes of its own, which must not read all ports of a host with several services.
#[test]
fn r21_a_host_with_several_services_may_have_a_sole_port() {
    const HOST: &str = "d.default.svc.cluster.local";
    let udp = "{name: dns, port: 53, protocol: UDP}, {name: dns-2, port: 54, protocol: UDP}";
    for (ports, expected) in [
        ("{name: http, port: 1000}", 1000),
        ("{name: http, port: 1000}, {name: http-2, port: 1001}", 80),
        (
            "{name: http, port: 1000}, {name: http-2, port: 1001}, {name: http-3, port: 1002}",
            80,
        ),
    ] {
        let service = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: d}}\n\
             spec: {{clusterIP: 10.0.0.4, ports: [{udp}, {ports}]}}\n"
        );
        let entry = format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: d}}\n\
             spec: {{hosts: [{HOST}], resolution: STATIC, ports: [{{number: 999, name: http, protocol: HTTP}}]}}\n"
        );
        let spec = format!(
            "{{hosts: [x.example.com], gateways: [istio-system/gw], \
             http: [{{route: [{{destination: {{host: {HOST}}}}}]}}]}}"
        );
        let servers = "[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]";
        let config = [service, entry, gateway_config(servers), virtual_service("d", &spec)].concat();
        let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
        let clusters = fixture.clusters("http.8080", "x.example.com:80");
        assert_eq!(clusters, [format!("outbound|{expected}||{HOST}")], "{ports}");
    }
}

#[test]
fn https_redirect_needs_no_virtual_service() {
    let config = gateway_config(
        "[{port: {number: 80, name: http, protocol: HTTP}, hosts: [x.example.com], tls: {httpsRedirect: true}}]",
    );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    let host = fixture.host("http.8080", "x.example.com:80");
    assert_eq!(host["requireTls"], "ALL");
    assert_eq!(host["routes"], Value::Null);
}

#[test]
fn pods_without_privileges_do_not_open_low_ports() {
    let servers = "[{port: {number: 81, name: low, protocol: HTTP}, hosts: ['*']}, \
                    {port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]";
    let clients = vec![gateway(&json!({})), gateway(&json!({"UNPRIVILEGED_POD": "true"}))];
    let fixture = Fixture::new(&gateway_config(servers), clients);
    assert_eq!(fixture.names(0, ResourceType::Listener), ["0.0.0.0_8080", "0.0.0.0_81"]);
    assert_eq!(fixture.names(1, ResourceType::Listener), ["0.0.0.0_8080"]);
}

#[test]
fn gateway_topology_sets_listener_options() {
    let mesh = "defaultConfig: {gatewayTopology: {numTrustedProxies: 2, forwardClientCertDetails: ALWAYS_FORWARD_ONLY, \
                proxyProtocol: {}}}\n";
    let config = gateway_config("[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]");
    let fixture = Fixture::with_mesh(mesh, &config, Features::default(), vec![gateway(&json!({}))]);
    let listener = fixture.get(0, ResourceType::Listener, "0.0.0.0_8080");
    assert_eq!(
        listener["listenerFilters"][0]["name"],
        "envoy.filters.listener.proxy_protocol"
    );
    let manager = &listener["filterChains"][0]["filters"][0]["typedConfig"];
    assert_eq!(manager["xffNumTrustedHops"], 2);
    assert_eq!(manager["forwardClientCertDetails"], "ALWAYS_FORWARD_ONLY");
    assert_eq!(manager["setCurrentClientCertDetails"], Value::Null);
}

#[test]
fn tls_routes_use_each_server_name_once() {
    let config =
        gateway_config("[{port: {number: 443, name: tls, protocol: TLS}, hosts: ['*'], tls: {mode: PASSTHROUGH}}]")
            + &virtual_service(
                "vs",
                "{hosts: [x.example.com, y.example.com], gateways: [istio-system/gw], tls: [\
             {match: [{sniHosts: [x.example.com]}, {sniHosts: [x.example.com]}], route: [{destination: {host: a}}]}, \
             {match: [{port: 1, sniHosts: [y.example.com]}], route: [{destination: {host: a}}]}]}",
            );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    let listener = fixture.get(0, ResourceType::Listener, "0.0.0.0_8443");
    let chains = listener["filterChains"].as_array().expect("chains");
    assert_eq!(chains.len(), 1);
    assert_eq!(chains[0]["filterChainMatch"], json!({"serverNames": ["x.example.com"]}));
    assert_eq!(
        chains[0]["filters"][0]["typedConfig"]["cluster"],
        json!(format!("outbound|443||{A}"))
    );
}

#[test]
fn a_server_without_routes_does_not_hide_the_next() {
    let config = gateway_config(
        "[{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}, \
          {port: {number: 8080, name: http-two, protocol: HTTP}, hosts: ['*']}]",
    ) + &virtual_service(
        "vs",
        "{hosts: [x.example.com], gateways: [istio-system/gw], \
          http: [{match: [{port: 8080}], route: [{destination: {host: a}}]}]}",
    );
    let fixture = Fixture::new(&config, vec![gateway(&json!({}))]);
    assert_eq!(fixture.clusters("http.8080", "x.example.com:8080").len(), 1);
}

#[test]
fn only_the_main_allocated_address_is_a_domain() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: out}
spec: {hosts: [out.example.com], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
status:
  addresses: [{value: 240.240.0.1, host: out.example.com}, {value: '2001:2::1', host: out.example.com}]
";
    let features = Features {
        istio_dual_stack: true,
        ..Features::default()
    };
    let client = json!({"DNS_CAPTURE": "true", "INSTANCE_IPS": "10.1.0.1,2001:1::1"});
    let client = proxy("sidecar~10.1.0.1~client-0", "default", &client);
    let fixture = Fixture::with_mesh("accessLogFile: ''\n", config, features, vec![client]);
    let host = fixture.host("80", "out.example.com:80");
    assert_eq!(
        host["domains"],
        json!(["out.example.com", "out.example.com.", "240.240.0.1"])
    );
}

#[test]
fn the_http_proxy_has_routes_even_if_all_egress_listeners_have_ports() {
    let scope = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s}
spec:
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress: [{port: {number: 9443, protocol: HTTP, name: h}, hosts: [./*]}]
";
    let fixture = Fixture::with_mesh(
        "proxyHttpPort: 15007\n",
        scope,
        Features::default(),
        vec![sidecar(&json!({}))],
    );
    let hosts = &fixture.get(0, ResourceType::Route, "http_proxy")["virtualHosts"];
    assert_eq!(hosts[0]["name"], "block_all");
    assert_eq!(hosts[1], Value::Null);
}

#[test]
fn every_route_that_a_listener_names_is_answered() {
    // The egress listener of port 80 answers for the headless service, which it does not have.
    let config = "
apiVersion: v1
kind: Service
metadata: {name: h}
spec: {clusterIP: None, ports: [{name: any, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: h, labels: {kubernetes.io/service-name: h}}
addressType: IPv4
ports: [{name: any, port: 80}]
endpoints: [{addresses: [10.1.2.1], conditions: {ready: true}}]
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: default}
spec:
  egress:
  - {port: {number: 80, protocol: HTTP, name: http}, hosts: [./a.default.svc.cluster.local]}
  - {hosts: ['*/*']}
";
    let fixture = Fixture::new(config, vec![sidecar(&json!({}))]);
    let name = "h.default.svc.cluster.local:80";
    let listener = fixture.get(0, ResourceType::Listener, "10.1.2.1_80").to_string();
    assert!(listener.contains(name), "{listener}");
    assert_eq!(fixture.get(0, ResourceType::Route, name)["name"], name);
    assert_eq!(fixture.hosts(name), []);
}

/// Large route configurations of a port are built from what namespaces have in common.
#[test]
fn namespaces_differ_in_the_names_of_their_own_services() {
    let mut config = fixture::crowd(199);
    config.push_str(
        "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: short}\n\
         spec: {hosts: [svc-7], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}\n",
    );
    let client = |namespace: &str| proxy("sidecar~10.2.0.1~client-0", namespace, &json!({}));
    let fixture = Fixture::new(&config, ["crowd", "default", "other"].map(client).into());
    let domains = |client: u64, name: &str| -> Vec<String> {
        let routes = fixture.get(client, ResourceType::Route, "80");
        let hosts = routes["virtualHosts"].as_array().expect("virtual hosts");
        let host = hosts.iter().find(|host| host["name"] == format!("{name}:80"));
        let domains = host.expect(name)["domains"].as_array().expect("domains");
        domains
            .iter()
            .map(|domain| domain.as_str().expect("a text").to_owned())
            .collect()
    };
    for (client, crowd, default) in [(0, true, false), (1, false, true), (2, false, false)] {
        let has = |name: &str, domain: &str| domains(client, name).contains(&domain.to_owned());
        assert_eq!(has("svc-8.crowd.svc.cluster.local", "svc-8"), crowd);
        assert_eq!(has("a.default.svc.cluster.local", "a"), default);
        assert!(has("svc-7", "svc-7"));
        assert!(
            !has("svc-7.crowd.svc.cluster.local", "svc-7"),
            "the full name of another host"
        );
        assert!(has("svc-7.crowd.svc.cluster.local", "svc-7.crowd"));
    }
}
