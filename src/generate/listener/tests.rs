//! Listeners of small meshes, through the store as when serving.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{
    generate::{
        Proxy, ResourceType, fixture,
        store::{ConfigStore, ConnectionId},
    },
    model::{features::Features, installation::Installation},
};

const MESH: &str = "proxyListenPort: 15001\nproxyInboundListenPort: 15006\ntrustDomain: cluster.local\n";

const WORKLOAD: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.0.0.1
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 90, targetPort: 9090}]
---
apiVersion: v1
kind: Service
metadata: {name: headless}
spec:
  clusterIP: None
  selector: {app: h}
  ports: [{name: tcp, port: 70}]
---
apiVersion: v1
kind: Pod
metadata: {name: a-0, labels: {app: a}}
spec: {serviceAccountName: a}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: headless-1, labels: {kubernetes.io/service-name: headless}}
addressType: IPv4
ports: [{name: tcp, port: 70}]
endpoints:
- {addresses: [10.1.0.8], conditions: {ready: true}}
- {addresses: [10.1.0.9], conditions: {ready: true}}
";

/// A mesh with its clients.
struct Fixture {
    store: ConfigStore,
}

impl Fixture {
    fn new(mesh: &str, files: &[(&str, &str)], proxies: Vec<Proxy>) -> Self {
        let mesh = format!("{MESH}{mesh}");
        let files: Vec<_> = std::iter::once(("mesh.yaml", mesh.as_str()))
            .chain(files.iter().copied())
            .collect();
        let store = fixture::store(Installation::default(), &files, proxies);
        Self { store }
    }

    /// A mesh of [`WORKLOAD`] and some Istio objects, with one client.
    fn of(config: &str) -> Self {
        let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
        Self::new("", &files, vec![sidecar("10.1.0.1", json!({}), None)])
    }

    /// A listener of a client as JSON; null if there is none.
    fn get(&self, name: &str) -> Value {
        fixture::resource(&self.store, 0, ResourceType::Listener, name)
    }

    fn names(&self) -> Vec<String> {
        let mut names = fixture::names(&self.store, 0, ResourceType::Listener);
        names.sort_unstable();
        names
    }
}

/// A sidecar of the app `a`; `metadata` is laid over the usual one.
fn sidecar(ip: &str, metadata: Value, extensions: Option<&[&str]>) -> Proxy {
    let mut all = json!({
        "SERVICE_ACCOUNT": "a", "LABELS": {"app": "a"}, "WORKLOAD_NAME": "a", "INSTANCE_IPS": ip,
    });
    for (key, value) in metadata.as_object().expect("an object") {
        all[key] = value.clone();
    }
    let node = format!("sidecar~{ip}~a-0.default~default.svc.cluster.local");
    fixture::changed(fixture::client(&node, &all), |kind| {
        kind.node_cluster = "a.default".into();
        kind.extensions = fixture::extensions(extensions);
    })
}

/// The filter chains as (match, name of the last filter).
fn chains(listener: &Value) -> Vec<(Value, String)> {
    let chains = listener["filterChains"].as_array().cloned().unwrap_or_default();
    chains
        .into_iter()
        .map(|chain| {
            let filters = chain["filters"].as_array().expect("filters");
            let last = filters.last().expect("a filter")["name"]
                .as_str()
                .expect("a name")
                .to_owned();
            (chain["filterChainMatch"].clone(), last)
        })
        .collect()
}

fn names_of(filters: &Value) -> Vec<&str> {
    let filters = filters.as_array().expect("filters");
    filters.iter().filter_map(|filter| filter["name"].as_str()).collect()
}

const TCP: &str = "envoy.filters.network.tcp_proxy";
const HTTP: &str = "envoy.filters.network.http_connection_manager";

/// ServiceEntries without addresses meet at the wildcard address.
fn entry(name: &str, age: u32, protocol: &str) -> String {
    format!(
        "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, creationTimestamp: '2024-01-0{age}T00:00:00Z'}}
spec:
  hosts: [{name}.example.com]
  resolution: DNS
  ports: [{{number: 4000, name: p, protocol: {protocol}}}]
---"
    )
}

#[test]
fn http_and_tcp_at_one_address_have_separate_chains() {
    let fixture = Fixture::of(&(entry("b", 1, "HTTP") + &entry("c", 2, "TCP") + &entry("d", 3, "TCP")));
    let listener = fixture.get("0.0.0.0_4000");
    let sniffed = json!({"applicationProtocols": ["http/1.1", "h2c"], "transportProtocol": "raw_buffer"});
    assert_eq!(chains(&listener), [(sniffed, HTTP.to_owned())]);
    // The TCP service that came first takes what is not HTTP; the second is not heard.
    let default = &listener["defaultFilterChain"];
    assert_eq!(names_of(&default["filters"]), [TCP]);
    assert_eq!(
        default["filters"][0]["typedConfig"]["cluster"],
        "outbound|4000||c.example.com"
    );
    assert_eq!(
        names_of(&listener["listenerFilters"]),
        ["envoy.filters.listener.http_inspector"]
    );
}

/// Envoy refuses a second listener at an address, however it is spelled.
#[test]
fn spellings_of_an_address_share_a_listener() {
    let at = |age: u32, protocol: &str, address: &str| {
        let addresses = format!("resolution: DNS\n  addresses: ['{address}']");
        entry(&format!("e{age}"), age, protocol).replace("resolution: DNS", &addresses)
    };
    let config = [
        at(1, "TCP", "2001:db8:0::1"),
        at(2, "TCP", "2001:db8::1"),
        at(3, "TCP", "::0"),
        at(4, "HTTP", "2001:db8::2"),
    ]
    .concat();
    let client = sidecar("fd00::1", json!({}), None);
    let names = Fixture::new("", &[("config.yaml", config.as_str())], vec![client]).names();
    let own: Vec<&String> = names.iter().filter(|name| name.ends_with("_4000")).collect();
    assert_eq!(own, ["2001:db8:0::1_4000", "::_4000"]);
}

#[test]
fn generators_of_other_types_leave_listeners_as_they_are() {
    let names = |generator: &str| {
        let client = sidecar("10.1.0.1", json!({"GENERATOR": generator}), None);
        Fixture::new("", &[("kube.yaml", WORKLOAD)], vec![client]).names()
    };
    assert!(!names("").is_empty());
    assert_eq!(names("api"), names(""));
}

#[test]
fn unmatched_traffic_of_http_listeners_passes_through() {
    let listener = Fixture::of("").get("0.0.0.0_80");
    assert_eq!(listener["bindToPort"], json!(false));
    assert_eq!(listener["defaultFilterChain"]["name"], "PassthroughFilterChain");
}

#[test]
fn headless_services_are_listened_for_by_address() {
    let names = Fixture::of("").names();
    let own = ["0.0.0.0_80", "10.0.0.1_90", "10.1.0.8_70", "10.1.0.9_70"];
    assert_eq!(names, [&own[..], &["virtualInbound", "virtualOutbound"]].concat());
    let files = [("kube.yaml", WORKLOAD)];
    let member = Fixture::new("", &files, vec![sidecar("10.1.0.9", json!({}), None)]);
    assert_eq!(member.get("10.1.0.9_70"), Value::Null);
    assert_ne!(member.get("10.1.0.8_70"), Value::Null);
}

#[test]
fn pods_of_any_headless_service_of_a_host_have_no_listener_for_themselves() {
    let entries = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: first, creationTimestamp: '2024-01-01T00:00:00Z'}
spec:
  hosts: [shared.example.com]
  addresses: [10.5.0.1]
  resolution: STATIC
  ports: [{number: 71, name: tcp, protocol: TCP}]
  endpoints: [{address: 10.1.0.7}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: second, creationTimestamp: '2024-01-02T00:00:00Z'}
spec:
  hosts: [shared.example.com]
  resolution: NONE
  ports: [{number: 72, name: raw, protocol: TCP}]
  workloadSelector: {labels: {app: a}}
";
    let listener = |client: &str| {
        let files = [("kube.yaml", WORKLOAD), ("config.yaml", entries)];
        Fixture::new("", &files, vec![sidecar(client, json!({}), None)]).get("10.1.0.1_72")
    };
    assert_eq!(listener("10.1.0.1"), Value::Null);
    assert_ne!(listener("10.1.0.2"), Value::Null, "of another pod");
}

#[test]
fn entries_without_addresses_that_select_no_workload_have_no_listener() {
    let listener = |more: &str| {
        let entry = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: raw, namespace: empty}}
spec:
  hosts: [raw.example.com]
  resolution: NONE
  ports: [{{number: 72, name: raw, protocol: TCP}}]
{more}"
        );
        let files = [("kube.yaml", WORKLOAD), ("config.yaml", entry.as_str())];
        Fixture::new("", &files, vec![sidecar("10.1.0.1", json!({}), None)]).get("0.0.0.0_72")
    };
    assert_ne!(listener(""), Value::Null);
    for labels in ["{app: a}", "{}"] {
        let selector = format!("  workloadSelector: {{labels: {labels}}}\n");
        assert_eq!(listener(&selector), Value::Null, "{labels}");
    }
}

/// A host with TLS at an address of its own.
const OUT: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: out}
spec:
  hosts: [out.example.com]
  addresses: [240.0.0.1]
  resolution: DNS
  ports: [{number: 443, name: tls, protocol: TLS}]
---";

#[test]
fn routes_by_server_name_replace_the_service() {
    let config = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: out}
spec:
  hosts: [out.example.com]
  tls:
  - match: [{port: 443, sniHosts: [out.example.com]}]
    route:
    - {destination: {host: out.example.com, subset: v1}, weight: 20}
    - {destination: {host: out.example.com, subset: v2}, weight: 80}
  - match: [{port: 443, sniHosts: [out.example.com], sourceLabels: {app: z}}]
    route: [{destination: {host: other.example.com}}]
";
    let listener = Fixture::of(&[OUT, config].concat()).get("240.0.0.1_443");
    let by_name = json!({"serverNames": ["out.example.com"]});
    assert_eq!(chains(&listener), [(by_name, TCP.to_owned())]);
    let chain = &listener["filterChains"][0];
    let proxy = &chain["filters"][0]["typedConfig"];
    assert_eq!(proxy["statPrefix"], "out.default");
    assert_eq!(proxy["weightedClusters"]["clusters"][1]["weight"], 80);
    assert_eq!(
        chain["metadata"]["filterMetadata"]["istio"]["config"],
        "/apis/networking.istio.io/v1/namespaces/default/virtual-service/out"
    );
    assert_eq!(listener["defaultFilterChain"]["name"], "PassthroughFilterChain");
}

#[test]
fn server_names_include_the_imported_aliases_of_a_service() {
    let names = |hosts: &str| -> BTreeSet<String> {
        let config = format!(
            "
apiVersion: v1
kind: Service
metadata: {{name: secure}}
spec: {{clusterIP: None, ports: [{{name: tls, port: 443}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: old, namespace: legacy}}
spec: {{type: ExternalName, externalName: secure.default.svc.cluster.local}}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: default}}
spec: {{egress: [{{port: {{number: 443, name: tls, protocol: TLS}}, bind: 0.0.0.0, hosts: {hosts}}}]}}
"
        );
        let listener = Fixture::of(&config).get("0.0.0.0_443");
        let names = chains(&listener)[0].0["serverNames"].clone();
        let names = names.as_array().expect("server names").iter();
        names.map(|name| name.as_str().expect("a text").to_owned()).collect()
    };
    let own = "secure.default.svc.cluster.local".to_owned();
    let all = names("[./*]");
    assert!(all.contains(&own) && all.contains("old.legacy.svc.cluster.local") && all.contains("old.legacy"));
    assert_eq!(names(&format!("[./{own}]")), BTreeSet::from([own]));
}

#[test]
fn chains_of_a_listener_have_server_names_of_their_own() {
    let config = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: out}
spec:
  hosts: [out.example.com, '*example.com']
  tls:
  - match: [{sniHosts: [out.example.com, a.example.com]}]
    route: [{destination: {host: out.example.com, subset: v1}}]
  - match: [{sniHosts: [A.example.com, b.example.com, '*-c.example.com']}, {sniHosts: ['*-d.example.com']}]
    route: [{destination: {host: out.example.com, subset: v2}}]
";
    let listener = Fixture::of(&[OUT, config].concat()).get("240.0.0.1_443");
    let names: Vec<Value> = chains(&listener)
        .into_iter()
        .map(|(by, _)| by["serverNames"].clone())
        .collect();
    assert_eq!(
        names,
        [json!(["a.example.com", "out.example.com"]), json!(["b.example.com"])]
    );
}

#[test]
fn routes_of_partial_wildcards_apply() {
    let config = "
apiVersion: v1
kind: Service
metadata: {name: orders-db}
spec: {clusterIP: 10.0.0.6, ports: [{name: tcp-pg, port: 5432}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: db}
spec:
  hosts: ['*-db.default.svc.cluster.local']
  tcp: [{route: [{destination: {host: headless.default.svc.cluster.local, port: {number: 70}}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: out}
spec:
  hosts: ['*example.com']
  tls: [{match: [{sniHosts: [out.example.com]}], route: [{destination: {host: out.example.com, subset: v1}}]}]
";
    let fixture = Fixture::of(&[OUT, config].concat());
    let leads_to = |listener: &str, cluster: &str| fixture.get(listener).to_string().contains(cluster);
    assert!(leads_to("10.0.0.6_5432", "outbound|70||headless.default"));
    assert!(!leads_to("10.0.0.6_5432", "orders-db"));
    assert!(leads_to("240.0.0.1_443", "outbound|443|v1|out.example.com"));
    assert!(leads_to("10.0.0.1_90", "outbound|90||a.default"), "of the same domain");
    assert!(!leads_to("10.0.0.1_90", "headless"));
}

#[test]
fn r21_routes_of_connections_count_for_each_listener() {
    let service = |name: &str, day: u32, last: u32| {
        format!(
            "
apiVersion: v1
kind: Service
metadata: {{name: {name}, creationTimestamp: '2024-01-0{day}T00:00:00Z'}}
spec: {{clusterIP: 10.0.1.{last}, ports: [{{name: tcp, port: 90}}, {{name: tcp-2, port: 91}}]}}
---"
        )
    };
    let route = |last: u32| {
        format!(
            "  - match: [{{destinationSubnets: [10.9.0.{last}]}}]\n    \
             route: [{{destination: {{host: old, port: {{number: 90}}}}}}]\n"
        )
    };
    let routes: String = (0..4).map(route).collect();
    // The last one and the TLS route are for none of the listeners.
    let to = "{destination: {host: old, port: {number: 90}}}";
    let declared = format!(
        "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: r}}
spec:
  hosts: ['*.default.svc.cluster.local']
  tls: [{{match: [{{sniHosts: [new.default.svc.cluster.local]}}], route: [{to}]}}]
  tcp:
{routes}
  - {{match: [{{port: 92}}], route: [{to}]}}
"
    );
    let config = [service("new", 2, 1), service("old", 1, 2), declared].concat();
    let listeners = ["10.0.1.2_90", "10.0.1.2_91", "10.0.1.1_90", "10.0.1.1_91"];
    let refused = |limit: u32| {
        let installation = Installation {
            features: Features {
                pilot_max_routes_per_object: limit,
                ..Features::default()
            },
            ..Installation::default()
        };
        let files = [("mesh.yaml", MESH), ("config.yaml", config.as_str())];
        let store = fixture::store(installation, &files, vec![sidecar("10.1.0.1", json!({}), None)]);
        let notes = store.notes();
        let noted = notes.iter().filter(|note| note.code == "OutputLimitExceeded").count();
        let fixture = Fixture { store };
        let is_refused = listeners.map(|name| {
            let listener = fixture.get(name);
            let chains = chains(&listener).len();
            let closes = listener.to_string().contains("\"cluster\":\"BlackHoleCluster\"");
            assert_eq!(chains, if closes { 1 } else { 4 }, "{name}: {listener}");
            closes
        });
        assert_eq!(noted, is_refused.iter().filter(|is_refused| **is_refused).count());
        is_refused
    };
    assert_eq!(refused(0), [false; 4], "no limit");
    assert_eq!(refused(16), [false; 4]);
    assert_eq!(refused(15), [false, false, false, true]);
    assert_eq!(refused(8), [false, false, true, true], "older services first");
}

#[test]
fn r21_services_with_too_many_virtual_services_are_closed() {
    let declared = |number: usize| {
        format!(
            "---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: r{number}}}
spec:
  hosts: ['*.svc.cluster.local']
  tcp: [{{route: [{{destination: {{host: a, port: {{number: 90}}}}}}]}}]
"
        )
    };
    let closes = |number: usize| {
        let config: String = (0..number).map(declared).collect();
        let listener = Fixture::of(&config).get("10.0.0.1_90");
        listener.to_string().contains("\"cluster\":\"BlackHoleCluster\"")
    };
    assert!(!closes(1000));
    assert!(closes(1001));
}

/// Thousands of services may share an address and the routes of a VirtualService, so that only the chains of the first
/// of them are built.
#[test]
fn r21_services_of_one_address_share_the_chains_of_routes() {
    let entry = |number: usize| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: e{number}}}
spec:
  hosts: [e{number}.example.com]
  addresses: [240.0.0.9]
  resolution: STATIC
  ports:
  - {{number: 5000, name: tcp, protocol: TCP}}
  - {{number: 5001, name: tcp-2, protocol: TCP}}
  - {{number: 5002, name: tls, protocol: TLS}}
  - {{number: 5003, name: tls-2, protocol: TLS}}
---"
        )
    };
    let declared = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r}
spec:
  hosts: ['*.example.com']
  tcp:
  - match: [{destinationSubnets: [10.9.0.1], port: 5000}]
    route: [{destination: {host: e7.example.com}}]
  - match: [{destinationSubnets: [10.9.0.2], port: 5000}]
    route: [{destination: {host: e8.example.com}}]
  tls:
  - match: [{sniHosts: [a.example.com], port: 5002}, {sniHosts: [b.example.com], port: 5002}]
    route: [{destination: {host: e9.example.com}}]
";
    let config: String = (0..20).map(entry).chain([declared.to_owned()]).collect();
    let fixture = Fixture::of(&config);
    let clusters = |port: u32| {
        let listener = fixture.get(&format!("240.0.0.9_{port}"));
        let all = listener["filterChains"].as_array().cloned().unwrap_or_default();
        let of_chain = |chain: Value| {
            let filters = chain["filters"].as_array().expect("filters");
            let proxy = &filters.last().expect("a filter")["typedConfig"];
            proxy["cluster"].as_str().expect("a cluster").to_owned()
        };
        all.into_iter().map(of_chain).collect::<Vec<String>>()
    };
    let to = |port: u32, number: usize| format!("outbound|{port}||e{number}.example.com");
    assert_eq!(clusters(5000), [to(5000, 7), to(5000, 8)]);
    assert_eq!(clusters(5001), [to(5001, 0)], "no route is for the port");
    assert_eq!(clusters(5002), [to(5002, 9), to(5002, 9)]);
    assert_eq!(clusters(5003), [to(5003, 0)], "no route is for the port");
    let notes = fixture.store.notes();
    for port in [5000, 5001, 5002, 5003] {
        let rejected = |number: usize| {
            let detail = format!("240.0.0.9_{port} rejected e{number}.example.com");
            notes.iter().any(|note| note.detail == detail)
        };
        assert!(!rejected(0) && (1..20).all(rejected), "{port}: {notes:?}");
    }
}

/// A chain keeps the names that are free in all of its ranges. A later service with the same routes has what is left.
#[test]
fn services_of_one_address_add_what_is_left_of_matches() {
    let entry = |number: usize| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: e{number}}}
spec:
  hosts: [e{number}.example.com]
  addresses: [240.0.0.9]
  resolution: STATIC
  ports: [{{number: 5000, name: tls, protocol: TLS}}]
---"
        )
    };
    let declared = "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: r}
spec:
  hosts: ['*.example.com']
  tls:
  - match:
    - {sniHosts: [a.example.com], destinationSubnets: [10.9.0.1]}
    - {sniHosts: [a.example.com, b.example.com], destinationSubnets: [10.9.0.1, 10.9.0.2]}
    route: [{destination: {host: e0.example.com}}]
";
    let config: String = (0..3).map(entry).chain([declared.to_owned()]).collect();
    let listener = Fixture::of(&config).get("240.0.0.9_5000");
    let of_chain = |chain: &Value| {
        let by = &chain["filterChainMatch"];
        let ranges = by["prefixRanges"].as_array().expect("ranges").iter();
        let ranges: Vec<Value> = ranges.map(|range| range["addressPrefix"].clone()).collect();
        (by["serverNames"].clone(), Value::from(ranges))
    };
    let chains = listener["filterChains"].as_array().expect("chains").iter();
    let expected = [
        (json!(["a.example.com"]), json!(["10.9.0.1"])),
        (json!(["b.example.com"]), json!(["10.9.0.1", "10.9.0.2"])),
        (json!(["a.example.com"]), json!(["10.9.0.2"])),
    ];
    assert_eq!(chains.map(of_chain).collect::<Vec<_>>(), expected);
}

#[test]
fn modes_of_mutual_tls_differ_by_port() {
    let config = "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: a}
spec:
  selector: {matchLabels: {app: a}}
  mtls: {mode: STRICT}
  portLevelMtls: {8080: {mode: DISABLE}, 7777: {mode: DISABLE}}
";
    let listener = Fixture::of(config).get("virtualInbound");
    let on = |port: u32| -> Vec<(String, String)> {
        let all = chains(&listener).into_iter();
        all.filter(|(by, _)| by["destinationPort"] == json!(port))
            .map(|(by, last)| (by["transportProtocol"].as_str().unwrap_or_default().to_owned(), last))
            .collect()
    };
    let pair = |transport: &str, last: &str| (transport.to_owned(), last.to_owned());
    assert_eq!(on(8080), [pair("raw_buffer", HTTP)]);
    assert_eq!(on(9090), [pair("tls", TCP)]);
    // None serves this port, so both kinds of traffic pass.
    assert_eq!(on(7777), [pair("raw_buffer", HTTP), pair("raw_buffer", TCP)]);
}

/// Returns a mesh in which the sidecar of a serves port 9000 of a Sidecar beside the ports of its services.
fn merging(config: &str, metadata: Value) -> Fixture {
    let ingress = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: a}
spec:
  workloadSelector: {labels: {app: a}}
  ingress: [{port: {number: 9000, protocol: HTTP, name: http}, defaultEndpoint: '127.0.0.1:9000'}]
---";
    let installation = Installation {
        features: Features {
            pilot_allow_sidecar_service_inbound_listener_merge: true,
            istio_dual_stack: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let config = [ingress, config].concat();
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", WORKLOAD),
        ("config.yaml", config.as_str()),
    ];
    let store = fixture::store(installation, &files, vec![sidecar("10.1.0.1", metadata, None)]);
    Fixture { store }
}

#[test]
fn ports_of_services_beside_a_sidecar_resource_have_chains_once() {
    let config = "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: a}
spec:
  selector: {matchLabels: {app: a}}
  portLevelMtls: {8080: {mode: STRICT}, 7777: {mode: STRICT}}
";
    let listener = merging(config, json!({})).get("virtualInbound");
    let chains = chains(&listener);
    let matches: BTreeSet<String> = chains.iter().map(|(by, _)| by.to_string()).collect();
    assert_eq!(matches.len(), chains.len(), "{chains:?}");
    let on = |port: u32| {
        let of_port = chains.iter().filter(|(by, _)| by["destinationPort"] == json!(port));
        of_port.map(|(_, last)| last.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(on(8080), [HTTP]);
    assert!(on(7777).contains(&TCP), "none serves it: {chains:?}");
}

#[test]
fn ports_of_services_beside_a_sidecar_resource_bind_both_address_families() {
    let metadata = json!({"INTERCEPTION_MODE": "NONE", "INSTANCE_IPS": "10.1.0.1,fd00::1"});
    let listener = merging("", metadata).get("0.0.0.0_8080");
    let further = &listener["additionalAddresses"][0]["address"]["socketAddress"];
    assert_eq!(further["address"], "::");
    assert_eq!(further["portValue"], 8080);
}

#[test]
fn sidecars_without_interception_bind_the_addresses_of_the_sidecar_resource() {
    let config = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: a}
spec:
  ingress:
  - {port: {number: 8888, protocol: HTTP, name: http}, bind: 127.0.0.1, defaultEndpoint: '127.0.0.1:8080'}
  egress:
  - {port: {number: 80, protocol: HTTP, name: http}, bind: 127.0.0.1, hosts: ['./a.default.svc.cluster.local']}
";
    let metadata = json!({"INTERCEPTION_MODE": "NONE"});
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    let fixture = Fixture::new("", &files, vec![sidecar("10.1.0.1", metadata, None)]);
    assert_eq!(fixture.names(), ["127.0.0.1_80", "127.0.0.1_8888"]);
    let inbound = fixture.get("127.0.0.1_8888");
    assert_eq!(inbound["trafficDirection"], "INBOUND");
    assert_eq!(fixture.get("127.0.0.1_80")["bindToPort"], Value::Null);
}

#[test]
fn each_socket_of_a_sidecar_resource_has_the_first_ingress_listener_of_its_port() {
    let config = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: a}
spec:
  ingress:
  - {port: {number: 9000, protocol: HTTP, name: a}, bind: 127.0.0.1, defaultEndpoint: '127.0.0.1:8080'}
  - {port: {number: 9000, protocol: TCP, name: b}, bind: 127.0.0.2, defaultEndpoint: '127.0.0.1:8080'}
  - {port: {number: 9001, protocol: TCP, name: c}, bind: 127.0.0.3, defaultEndpoint: '127.0.0.1:8080'}
  egress:
  - {port: {number: 80, protocol: HTTP, name: http}, bind: 127.0.0.1, hosts: ['./a.default.svc.cluster.local']}
";
    let metadata = json!({"INTERCEPTION_MODE": "NONE"});
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    let fixture = Fixture::new("", &files, vec![sidecar("10.1.0.1", metadata, None)]);
    assert_eq!(fixture.names(), ["127.0.0.1_80", "127.0.0.1_9000", "127.0.0.3_9001"]);
    for (name, port) in [("127.0.0.1_9000", 9000), ("127.0.0.3_9001", 9001)] {
        assert_eq!(fixture.get(name)["address"]["socketAddress"]["portValue"], port);
    }
}

#[test]
fn auxiliary_extensions_that_a_client_lacks_are_left_out() {
    let files = [("kube.yaml", WORKLOAD)];
    let mesh = "defaultProviders: {metrics: [prometheus]}\nextensionProviders: [{name: prometheus, prometheus: {}}]\n";
    let filters = |extensions: Option<&[&str]>| {
        let fixture = Fixture::new(mesh, &files, vec![sidecar("10.1.0.1", json!({}), extensions)]);
        let outbound = fixture.get("0.0.0.0_80");
        let http = &outbound["filterChains"][0]["filters"][0]["typedConfig"]["httpFilters"];
        let names: Vec<String> = names_of(http).into_iter().map(str::to_owned).collect();
        (names, fixture.get("virtualInbound").to_string())
    };
    let (names, inbound) = filters(None);
    for name in [
        "istio.metadata_exchange",
        "envoy.filters.http.grpc_stats",
        "istio.alpn",
        "istio.stats",
    ] {
        assert!(names.iter().any(|have| have == name), "{name}");
    }
    assert!(inbound.contains("\"alpnProtocols\":[\"istio-peer-exchange\",\"h2\",\"http/1.1\"]"));
    let (names, inbound) = filters(Some(&["envoy.filters.http.router"]));
    assert_eq!(
        names,
        [
            "envoy.filters.http.fault",
            "envoy.filters.http.cors",
            "envoy.filters.http.router"
        ]
    );
    assert!(!inbound.contains("metadata_exchange") && !inbound.contains("\"alpnProtocols\":[\"istio-peer-exchange\""));
}

#[test]
fn a_telemetry_switches_the_log_of_one_direction_off() {
    let config = "
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: a}
spec:
  accessLogging:
  - {match: {mode: SERVER}, providers: [{name: log}], disabled: true}
  - {match: {mode: CLIENT}, providers: [{name: log}], filter: {expression: 'true'}}
";
    let mesh = "accessLogFile: /dev/stdout\nextensionProviders: [{name: log, envoyFileAccessLog: {path: /tmp/log}}]\n";
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    let fixture = Fixture::new(mesh, &files, vec![sidecar("10.1.0.1", json!({}), None)]);
    assert!(!fixture.get("virtualInbound").to_string().contains("accessLog"));
    let log = &fixture.get("virtualOutbound")["accessLog"][0];
    assert_eq!(log["typedConfig"]["path"], "/tmp/log");
    assert_eq!(log["filter"]["andFilter"]["filters"].as_array().map(Vec::len), Some(2));
}

#[test]
fn general_telemetries_are_for_every_workload() {
    let config = "
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: mesh, namespace: istio-system}
spec: {accessLogging: [{providers: [{name: log}]}]}
";
    let mesh = "extensionProviders: [{name: log, envoyFileAccessLog: {path: /tmp/log}}]\n";
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config), ("mesh.yaml", mesh)];
    let installation = Installation {
        features: Features {
            enable_selector_based_k8s_gateway_policy: false,
            ..Features::default()
        },
        ..Installation::default()
    };
    let labels = json!({"LABELS": {"gateway.networking.k8s.io/gateway-name": "g"}});
    let store = fixture::store(installation, &files, vec![sidecar("10.1.0.3", labels, None)]);
    let log = &Fixture { store }.get("virtualOutbound")["accessLog"][0];
    assert_eq!(log["typedConfig"]["path"], "/tmp/log");
}

#[test]
fn ports_of_the_intercepting_listeners_are_not_served() {
    let workload = WORKLOAD.replace("targetPort: 9090", "targetPort: 15001");
    let fixture = Fixture::new(
        "",
        &[("kube.yaml", &workload)],
        vec![sidecar("10.1.0.1", json!({}), None)],
    );
    let listener = fixture.get("virtualInbound");
    let ports: BTreeSet<u64> = chains(&listener)
        .iter()
        .filter_map(|(by, _)| by["destinationPort"].as_u64())
        .collect();
    assert_eq!(ports, BTreeSet::from([8080, 15006]));
}

#[test]
fn pods_of_one_workload_share_their_listeners() {
    let proxies = ["10.1.0.1", "10.1.0.2"].map(|ip| sidecar(ip, json!({"LABELS": {"app": "x", "pod": ip}}), None));
    let fixture = Fixture::new("", &[("kube.yaml", WORKLOAD)], proxies.to_vec());
    let groups = [0, 1].map(|member| fixture.store.group_of(ConnectionId(member)).expect("a group").clone());
    let parts = groups.map(|group| {
        format!(
            "{:?}",
            fixture
                .store
                .snapshot(&group)
                .expect("a snapshot")
                .resources(ResourceType::Listener)
                .version()
        )
    });
    assert_eq!(parts[0], parts[1]);
}

#[test]
fn namespaces_share_listeners_that_do_not_depend_on_them() {
    let config = "
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, ports: [{name: tcp, port: 90}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: a}
spec:
  hosts: [a.default.svc.cluster.local]
  tcp: [{match: [{sourceNamespace: one}], route: [{destination: {host: b.default.svc.cluster.local}}]}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: of-one, namespace: one}
spec:
  host: b.default.svc.cluster.local
  trafficPolicy: {connectionPool: {tcp: {idleTimeout: 7s}}}
";
    let client = |namespace: &str| {
        let node = format!("sidecar~10.2.0.1~p.{namespace}~{namespace}.svc.cluster.local");
        fixture::client(&node, &json!({}))
    };
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    let fixture = Fixture::new("", &files, ["one", "two", "three"].map(client).to_vec());
    let bytes = |member: u64, name: &str| {
        let group = fixture.store.group_of(ConnectionId(member)).expect("a group");
        let snapshot = fixture.store.snapshot(group).expect("a snapshot");
        let listener = snapshot
            .resources(ResourceType::Listener)
            .get(name)
            .expect("a listener");
        listener.sotw_frame().to_bytes()
    };
    let is_shared = |name: &str| {
        let held = [0, 1, 2].map(|member| bytes(member, name).as_ptr());
        [held[0] == held[1], held[1] == held[2]]
    };
    // Headless; a route for one namespace; a rule of one namespace.
    assert_eq!(is_shared("10.1.0.8_70"), [true, true]);
    assert_eq!(is_shared("10.0.0.1_90"), [false, false]);
    assert_eq!(is_shared("10.0.0.2_90"), [false, true]);
    assert_ne!(bytes(0, "10.0.0.1_90"), bytes(1, "10.0.0.1_90"));
    assert_ne!(bytes(0, "10.0.0.2_90"), bytes(1, "10.0.0.2_90"));
}

mod security;

#[test]
fn udp_ports_of_services_are_served_as_tcp() {
    let dns = "
apiVersion: v1
kind: Service
metadata: {name: dns}
spec:
  clusterIP: 10.0.0.5
  selector: {app: a}
  ports: [{name: dns, port: 53, targetPort: 5353, protocol: UDP}, {name: http, port: 53, targetPort: 8053}]
";
    let fixture = Fixture::of(dns);
    let listener = fixture.get("virtualInbound");
    let of_port = |port: u32| {
        let mut of_port = chains(&listener);
        of_port.retain(|(by, _)| by["destinationPort"] == port);
        of_port.into_iter().map(|(_, last)| last).collect::<Vec<_>>()
    };
    assert_eq!(of_port(5353), [TCP, TCP, TCP]);
    assert_eq!(of_port(8053), [HTTP, HTTP]);
    let clusters = fixture::names(&fixture.store, 0, ResourceType::Cluster);
    for name in ["inbound|5353||", "inbound|8053||"] {
        assert!(clusters.iter().any(|known| known == name), "{name}");
    }
}

#[test]
fn hosts_of_two_tenants_leave_the_listener_valid() {
    let gateway = |namespace: &str, day: u32, hosts: &str, names: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {{name: g, namespace: {namespace}, creationTimestamp: '2024-01-0{day}T00:00:00Z'}}
spec:
  selector: {{istio: edge}}
  servers:
  - {{port: {{number: 443, name: https, protocol: HTTPS}}, hosts: [{hosts}], tls: {{mode: SIMPLE, credentialName: c}}}}
  - {{port: {{number: 443, name: tls, protocol: TLS}}, hosts: ['./*.pass.com'], tls: {{mode: PASSTHROUGH}}}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: v, namespace: {namespace}}}
spec:
  hosts: ['*.pass.com']
  gateways: [g]
  tls: [{{match: [{{sniHosts: [{names}]}}], route: [{{destination: {{host: a.default.svc.cluster.local, port: {{number: 90}}}}}}]}}]
---"
        )
    };
    let config = [
        gateway("one", 1, "./x.com, ./y.pass.com", "x.pass.com"),
        gateway("two", 2, "./X.com, ./*-w.com, ./z.com", "Y.pass.com"),
        gateway("three", 3, "./z.com", "x.pass.com"),
    ]
    .concat();
    let metadata = json!({"SERVICE_ACCOUNT": "edge", "LABELS": {"istio": "edge"}});
    let router = fixture::client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
    let fixture = Fixture::new("", &[("kube.yaml", WORKLOAD), ("config.yaml", &config)], vec![router]);
    let names: Vec<Value> = chains(&fixture.get("0.0.0.0_443"))
        .into_iter()
        .map(|(by, _)| by["serverNames"].clone())
        .collect();
    assert_eq!(
        names,
        [json!(["x.com", "y.pass.com"]), json!(["z.com"]), json!(["x.pass.com"])]
    );
}
