//! Clusters of ServiceEntries: where the address comes from the client, from DNS, or from the request.

use super::*;

const CLUSTER_CONFIG: &str = "clusterType";
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

fn fixture(config: &str) -> Fixture {
    Fixture::new(&[("a.yaml", SERVICE), ("config.yaml", config)], vec![client("b", "n1")])
}

#[test]
fn target_ports_count_where_the_client_chooses_the_address() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: none}
spec:
  hosts: [none.com]
  location: MESH_EXTERNAL
  ports:
  - {number: 81, name: same, protocol: TCP, targetPort: 81}
  - {number: 82, name: open, protocol: TCP}
  - {number: 83, name: other, protocol: TCP, targetPort: 8383}
  workloadSelector: {labels: {app: a}}
---
apiVersion: v1
kind: Service
metadata: {name: headless}
spec: {clusterIP: None, ports: [{name: tcp, port: 84, targetPort: 8484}]}
";
    let fixture = fixture(entry);
    let target = |name: &str| fixture.cluster(name)["originalDstLbConfig"]["upstreamPortOverride"].clone();
    assert_eq!(target("outbound|81||none.com"), 81);
    assert_eq!(target("outbound|82||none.com"), Value::Null);
    assert_eq!(target("outbound|83||none.com"), 8383);
    let headless = "outbound|84||headless.default.svc.cluster.local";
    assert_eq!(fixture.cluster(headless)["type"], "ORIGINAL_DST");
    assert_eq!(target(headless), Value::Null);
}

#[test]
fn inbound_clusters_of_external_services_omit_workload_metadata() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: none}
spec:
  hosts: [none.com]
  location: MESH_EXTERNAL
  ports: [{number: 83, name: other, protocol: TCP, targetPort: 8383}]
  workloadSelector: {labels: {app: a}}
";
    let files = [("a.yaml", SERVICE), ("config.yaml", entry)];
    let own = |entry: &str| {
        let files = [files[0], ("config.yaml", entry)];
        let id = "sidecar~10.1.0.1~a-0.default~default.svc.cluster.local";
        let fixture = Fixture::new(&files, vec![fixture::client(id, &json!({"LABELS": {"app": "a"}}))]);
        let cluster = fixture.cluster("inbound|8383||");
        assert_eq!(cluster["originalDstLbConfig"]["upstreamPortOverride"], 8383);
        cluster["metadata"]["filterMetadata"]["istio"]["services"][0]["host"].clone()
    };
    assert_eq!(own(entry), Value::Null);
    assert_eq!(own(&entry.replace("EXTERNAL", "INTERNAL")), "none.com");
}

#[test]
fn inbound_clusters_of_ports_that_only_a_service_entry_has_are_its_own() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: e}
spec:
  hosts: [a.default.svc.cluster.local]
  location: MESH_INTERNAL
  ports:
  - {number: 80, name: http, protocol: HTTP}
  - {number: 83, name: other, protocol: TCP, targetPort: 8383}
  workloadSelector: {labels: {app: a}}
";
    let id = "sidecar~10.1.0.1~a-0.default~default.svc.cluster.local";
    let proxies = vec![fixture::client(id, &json!({"LABELS": {"app": "a"}}))];
    let fixture = Fixture::new(&[("a.yaml", SERVICE), ("config.yaml", entry)], proxies);
    let service_and_override = |name: &str| {
        let cluster = fixture.cluster(name);
        let service = cluster["metadata"]["filterMetadata"]["istio"]["services"][0]["name"].clone();
        (service, cluster["originalDstLbConfig"]["upstreamPortOverride"].clone())
    };
    assert_eq!(service_and_override("inbound|8080||"), (json!("a"), Value::Null));
    let (name, port) = service_and_override("inbound|8383||");
    assert_eq!(name, "a.default.svc.cluster.local");
    assert_eq!(port, 8383);
}

#[test]
fn names_of_requests_decide_about_tls_where_hosts_are_resolved_by_request() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: wild}
spec:
  hosts: ['*.wild.com']
  resolution: DYNAMIC_DNS
  location: MESH_EXTERNAL
  subjectAltNames: [spiffe://cluster.local/ns/default/sa/x]
  ports: [{number: 443, name: tls, protocol: TLS}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: wild}
spec:
  host: '*.wild.com'
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 3}
    tls: {mode: ISTIO_MUTUAL, insecureSkipVerify: true}
";
    let cluster = fixture(entry).cluster("outbound|443||*.wild.com");
    let socket = &cluster["transportSocket"]["typedConfig"];
    assert_eq!(socket["sni"], Value::Null);
    let validation = &socket["commonTlsContext"]["combinedValidationContext"]["defaultValidationContext"];
    assert_eq!(*validation, json!({}));
    let names = |cluster: &Value| {
        let options = &cluster["typedExtensionProtocolOptions"][HTTP_OPTIONS];
        options["upstreamHttpProtocolOptions"].clone()
    };
    assert_eq!(names(&cluster), json!({"autoSni": true}));
    let insecure = |cluster: &Value| cluster[CLUSTER_CONFIG]["typedConfig"]["allowInsecureClusterOptions"].clone();
    assert_eq!(insecure(&cluster), true);
    assert_eq!(cluster["outlierDetection"]["consecutive5xx"], 3);

    let verified = entry.replace(", insecureSkipVerify: true", "");
    let cluster = fixture(&verified).cluster("outbound|443||*.wild.com");
    assert_eq!(names(&cluster), json!({"autoSni": true, "autoSanValidation": true}));
    assert_eq!(insecure(&cluster), Value::Null);
}

#[test]
fn passthrough_makes_original_destination_clusters_of_dns_services() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: dns}
spec:
  hosts: [dns.com]
  resolution: DNS
  location: MESH_EXTERNAL
  ports: [{number: 80, name: http, protocol: HTTP}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: empty}
spec:
  hosts: [empty.com]
  resolution: DNS
  location: MESH_EXTERNAL
  ports: [{number: 80, name: http, protocol: HTTP}]
  workloadSelector: {labels: {app: nobody}}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: dns}
spec:
  host: '*.com'
  subsets:
  - {name: own, trafficPolicy: {loadBalancer: {simple: PASSTHROUGH}}}
  - {name: plain}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: all}
spec: {hosts: [all.org], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: all}
spec: {host: all.org, trafficPolicy: {loadBalancer: {simple: PASSTHROUGH}}}
";
    let fixture = fixture(config);
    let facts = |name: &str| {
        let cluster = fixture.cluster(name);
        (cluster["type"].clone(), cluster["dnsRefreshRate"].clone())
    };
    let own = (json!("ORIGINAL_DST"), Value::Null);
    assert_eq!(facts("outbound|80|own|dns.com"), own);
    assert_eq!(facts("outbound|80|plain|dns.com"), (json!("STRICT_DNS"), json!("60s")));
    // Nothing to resolve: no clusters, whatever their subsets want.
    assert_eq!(facts("outbound|80|own|empty.com"), (Value::Null, Value::Null));
    assert_eq!(facts("outbound|80||all.org"), (json!("ORIGINAL_DST"), json!("60s")));
    assert_eq!(fixture.cluster("outbound|80||all.org")["loadAssignment"], Value::Null);
}

#[test]
fn entries_of_one_host_with_ports_of_one_name_do_not_mix_their_addresses() {
    let entry = |name: &str, port: u32| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}}}
spec:
  hosts: [dns.com]
  resolution: DNS
  ports: [{{number: {port}, name: http, protocol: HTTP}}]
  endpoints: [{{address: {name}.dns.com}}]
---"
        )
    };
    let fixture = fixture(&(entry("one", 80) + &entry("two", 8080)));
    let addresses = |port: u32| {
        let cluster = fixture.cluster(&format!("outbound|{port}||dns.com"));
        let endpoints = cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"].clone();
        let all = endpoints.as_array().expect("a list").iter();
        all.map(|endpoint| endpoint["endpoint"]["address"]["socketAddress"]["address"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(addresses(80), ["one.dns.com"]);
    assert_eq!(addresses(8080), ["two.dns.com"]);
}

#[test]
fn labels_split_the_default_cluster_of_a_name_and_no_other() {
    let config = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: dns}
spec:
  hosts: [dns.com]
  resolution: DNS
  ports: [{number: 80, name: http, protocol: HTTP}]
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
  subsets: [{name: all}]
";
    let fixture = fixture(config);
    let groups = |name: &str| fixture.cluster(name)["loadAssignment"]["endpoints"].clone();
    let split = groups("outbound|80||dns.com");
    let first = &split[0]["lbEndpoints"][0]["endpoint"]["address"]["socketAddress"]["address"];
    assert_eq!((first, &split[1]["priority"]), (&json!("two.dns.com"), &json!(1)));
    let whole = groups("outbound|80|all|dns.com");
    assert_eq!(whole.as_array().map(Vec::len), Some(1));
}

#[test]
fn entries_of_one_host_share_clusters_only_if_they_agree() {
    let entry = |name: &str, port: u32, more: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}}}
spec:
  hosts: [one.com]
  ports: [{{number: {port}, name: tcp-{port}, protocol: TCP}}]
  {more}
---"
        )
    };
    let has = |more: &str| {
        let first = entry("one", 80, "resolution: NONE");
        let fixture = fixture(&(first + &entry("two", 81, more)));
        [80, 81].map(|port| !fixture.cluster(&format!("outbound|{port}||one.com")).is_null())
    };
    assert_eq!(has("resolution: NONE"), [true, true]);
    assert_eq!(has("resolution: DNS"), [true, false]);
    // A client sees services of its own namespace alone before public ones.
    assert_eq!(has("exportTo: ['.']"), [false, true]);
}

#[test]
fn identities_of_service_accounts_count_in_every_trust_domain() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: sans}
spec:
  hosts: [sans.com]
  resolution: STATIC
  location: MESH_INTERNAL
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 192.0.2.1}]
  subjectAltNames: [spiffe://new/ns/a/sa/b, spiffe://new/ns/a, spiffe://new/ns/a/b/sa/c, sans.com]
";
    let files = [
        ("mesh.yaml", "{trustDomain: new, trustDomainAliases: [old]}"),
        ("entry.yaml", entry),
    ];
    let store = fixture::store(Installation::default(), &files, vec![client("b", "n1")]);
    let cluster = fixture::resource(&store, 0, ResourceType::Cluster, "outbound|80||sans.com");
    let validation = &mtls_context(&cluster)["combinedValidationContext"]["defaultValidationContext"];
    let exactly = |name: &str| json!({"exact": name});
    assert_eq!(
        validation["matchSubjectAltNames"],
        json!([
            exactly("sans.com"),
            exactly("spiffe://new/ns/a"),
            exactly("spiffe://new/ns/a/b/sa/c"),
            exactly("spiffe://new/ns/a/sa/b"),
            exactly("spiffe://old/ns/a/sa/b"),
        ])
    );
}

#[test]
fn a_server_name_that_is_too_long_is_not_sent() {
    let cluster = |length: usize| {
        let label = "x".repeat(60);
        let host = format!("{label}.{label}.{label}.{}.com", "y".repeat(length - 187));
        let entry = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: long}}
spec:
  hosts: [{host}]
  resolution: STATIC
  location: MESH_INTERNAL
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  endpoints: [{{address: 192.0.2.1}}]
"
        );
        fixture(&entry).cluster(&format!("outbound|80||{host}"))
    };
    let sent = |length: usize| {
        let context = &cluster(length)["transportSocketMatches"][0]["transportSocket"]["typedConfig"];
        assert_ne!(context["commonTlsContext"], Value::Null);
        context["sni"].as_str().map(str::len)
    };
    // `outbound_.80_._.` precedes the host.
    assert_eq!(sent(239), Some(255));
    assert_eq!(sent(240), None);
}

#[test]
fn only_one_endpoint_is_resolved_logically() {
    let kind = |endpoints: &str| {
        let entry = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: race, annotations: {{istio.io/connect-strategy: RACE_FIRST_TCP_CONNECT}}}}
spec:
  hosts: [race.com]
  resolution: DNS
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  endpoints: [{endpoints}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: race}}
spec:
  host: race.com
  trafficPolicy: {{loadBalancer: {{localityLbSetting: {{distribute: [{{from: '*', to: {{r1: 100}}}}]}}}}}}
"
        );
        fixture(&entry).cluster("outbound|80||race.com")["type"].clone()
    };
    assert_eq!(kind("{address: x.com, locality: r1}"), "LOGICAL_DNS");
    let equal = "{address: x.com, locality: r1}, {address: y.com, locality: r1}";
    assert_eq!(kind(equal), "STRICT_DNS");
    // The second locality has no endpoint.
    let excluded = "{address: x.com, locality: r1}, {address: y.com, locality: r2}";
    assert_eq!(kind(excluded), "STRICT_DNS");
}

#[test]
fn ports_and_subsets_select_from_few_endpoints_and_from_many() {
    let subsets: [(&str, &[(&str, usize)]); 4] = [
        ("one", &[("a", 1)]),
        ("both", &[("a", 1), ("b", 2)]),
        ("none", &[("a", 7)]),
        ("all", &[]),
    ];
    for (resolution, workloads) in [("STATIC", 60), ("STATIC", 200), ("DNS", 60), ("DNS", 200)] {
        let labels = |workload: usize| [("a", workload % 2), ("b", workload % 5)];
        let map = |labels: &[(&str, usize)]| {
            let pairs = labels.iter().map(|(key, value)| format!("{key}: '{value}'"));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        };
        let endpoints = (0..workloads).map(|workload| {
            let labels = map(&labels(workload));
            format!("{{address: 10.9.0.{workload}, labels: {labels}, ports: {{second: 9002}}}}")
        });
        let declared = subsets
            .iter()
            .map(|(name, labels)| format!("{{name: {name}, labels: {}}}", map(labels)));
        let config = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: many}}
spec:
  hosts: [many.example]
  resolution: {resolution}
  ports:
  - {{number: 81, name: first, protocol: TCP}}
  - {{number: 82, name: second, protocol: TCP}}
  - {{number: 83, name: third, protocol: TCP, targetPort: 9003}}
  endpoints: [{}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: many}}
spec: {{host: many.example, subsets: [{}]}}
",
            endpoints.collect::<Vec<_>>().join(", "),
            declared.collect::<Vec<_>>().join(", "),
        );
        let fixture = fixture(&config);
        let without = ("", [].as_slice());
        for ((subset, selector), (port, target)) in subsets
            .iter()
            .chain([&without])
            .flat_map(|subset| [(81, 81), (82, 9002), (83, 9003)].map(|port| (subset, port)))
        {
            let name = format!("outbound|{port}|{subset}|many.example");
            let groups = match resolution {
                "DNS" => fixture.cluster(&name)["loadAssignment"]["endpoints"].clone(),
                _ => fixture.endpoints(0, &name),
            };
            let members = groups[0]["lbEndpoints"].as_array().into_iter().flatten();
            let sockets = members.map(|member| &member["endpoint"]["address"]["socketAddress"]);
            let sockets: Vec<(&Value, &Value)> = sockets
                .map(|socket| (&socket["address"], &socket["portValue"]))
                .collect();
            let selected =
                (0..workloads).filter(|workload| selector.iter().all(|pair| labels(*workload).contains(pair)));
            let expected: Vec<(Value, Value)> = selected
                .map(|workload| (json!(format!("10.9.0.{workload}")), json!(target)))
                .collect();
            let expected: Vec<(&Value, &Value)> = expected.iter().map(|(address, port)| (address, port)).collect();
            assert_eq!(sockets, expected, "{resolution} {workloads} {name}");
        }
    }
}
