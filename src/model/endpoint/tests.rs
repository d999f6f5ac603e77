use serde_json::json;

use super::*;
use crate::{
    api::{Kind, document::parse_object},
    base::{ClusterId, ObjectKey},
    model::{Change, World, fixture, installation::Installation},
};

const A: &str = "a.default.svc.cluster.local";

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.0.0.1
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- addresses: [10.1.0.1]
  targetRef: {kind: Pod, name: a-0, namespace: default}
- addresses: [10.1.0.2]
  conditions: {ready: false, terminating: false}
  targetRef: {kind: Pod, name: a-1, namespace: default}
- addresses: [10.1.0.9]
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: a-0
  labels: {app: a, security.istio.io/tlsMode: istio}
spec: {serviceAccountName: sa, nodeName: n1, subdomain: sub}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: z}}
---
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net}}
";

fn mesh(files: &[(&str, &str)]) -> World {
    fixture::folder_world(Installation::default(), files)
}

fn list(world: &World, host: &str) -> Shared<[Endpoint]> {
    let key = ServiceKey {
        hostname: host.into(),
        namespace: "default".into(),
    };
    let row = world.snapshot().endpoints.get(&Cx::untracked(), &key).cloned();
    row.expect("because every service has a row").endpoints.clone()
}

fn traits_of(world: &World, host: &str) -> Shared<EndpointTraits> {
    let key = ServiceKey {
        hostname: host.into(),
        namespace: "default".into(),
    };
    world
        .snapshot()
        .endpoint_traits
        .get(&Cx::untracked(), &key)
        .cloned()
        .expect("because every service has a row")
}

/// `address:port name workload health`.
fn short(endpoints: &[Endpoint]) -> Vec<String> {
    let text = |e: &Endpoint| {
        format!(
            "{}:{} {} {} {:?}",
            e.address, e.port, e.port_name, e.origin.workload_name, e.health
        )
    };
    endpoints.iter().map(text).collect()
}

#[test]
fn slices_refer_to_pods() {
    let mut world = mesh(&[("kube.yaml", SERVICE), ("pods.yaml", POD)]);
    let endpoints = list(&world, A);
    let pending = |world: &World| -> usize {
        let mesh = world.snapshot();
        let rows = mesh.services_awaiting_pods.get(&Cx::untracked(), &());
        rows.map(|(_, row)| row.pending).sum()
    };
    assert_eq!(pending(&world), 1);
    // Pod a-1 is not known; the address without a pod is valid.
    assert_eq!(
        short(&endpoints),
        ["10.1.0.1:8080 http a-0 Healthy", "10.1.0.9:8080 http  Healthy"]
    );
    let first = &endpoints[0];
    assert_eq!(first.origin.identity, "spiffe://cluster.local/ns/default/sa/sa");
    assert_eq!(
        (
            first.origin.locality.as_str(),
            first.origin.network.as_str(),
            first.origin.node_name.as_str()
        ),
        ("r/z/", "net", "n1")
    );
    assert_eq!(
        (first.origin.hostname.as_str(), first.origin.subdomain.as_str()),
        ("a-0", "sub")
    );
    let labels: Vec<_> = first.origin.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let want = [
        "app=a",
        "kubernetes.io/hostname=n1",
        "security.istio.io/tlsMode=istio",
        "topology.istio.io/cluster=Kubernetes",
        "topology.istio.io/network=net",
        "topology.kubernetes.io/region=r",
        "topology.kubernetes.io/zone=z",
    ];
    assert_eq!(labels, want);
    assert_eq!(
        (
            endpoints[1].origin.tls_mode.as_str(),
            endpoints[1].origin.identity.as_str()
        ),
        ("disabled", "")
    );
    let traits = traits_of(&world, A);
    assert_eq!(
        (traits.ports.clone(), traits.identities.len()),
        (
            [(
                80,
                PortTraits {
                    plaintext: true,
                    all_tunnel: false
                }
            )]
            .into(),
            1
        )
    );

    let late = POD
        .split("---")
        .next()
        .unwrap_or_default()
        .replace("a-0", "a-1")
        .replace("10.1.0.1", "10.1.0.2");
    let rows = fixture::folder(&Installation::default(), &[("late.yaml", &late)]);
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    assert_eq!(short(&list(&world, A))[1], "10.1.0.2:8080 http a-1 Unhealthy");
    assert_eq!(pending(&world), 0);
    world.commit(vec![Change::Remove(
        Kind::Pod,
        ObjectKey::new(&fixture::CLUSTER, "default", "a-0"),
    )]);
    assert_eq!(list(&world, A).len(), 2);
}

#[test]
fn common_endpoint_fields_are_stored_once() {
    let service = SERVICE
        .replace(
            "ports: [{name: http, port: 8080}]",
            "ports: [{name: http, port: 8080}, {name: grpc, port: 9090}]",
        )
        .replace(
            "- addresses: [10.1.0.9]",
            "- addresses: [10.1.0.9]\n- addresses: [10.1.0.10]",
        );
    let endpoints = list(&mesh(&[("kube.yaml", &service), ("pods.yaml", POD)]), A);
    let origin = |address: &str| -> Vec<_> {
        let found = endpoints.iter().filter(|endpoint| endpoint.address == address);
        found.map(|endpoint| &endpoint.origin).collect()
    };
    let [one, other] = origin("10.1.0.1")[..] else { panic!() };
    assert!(one.ptr_eq(other), "both ports are of one pod");
    let [one, _, other, _] = [origin("10.1.0.9"), origin("10.1.0.10")].concat()[..] else {
        panic!()
    };
    assert!(one.ptr_eq(other), "nothing is known of either address");
}

#[test]
fn unusable_slices_are_ignored() {
    let count = |service: &str| list(&mesh(&[("kube.yaml", service), ("pods.yaml", POD)]), A).len();
    assert_eq!(count(SERVICE), 2);
    assert_eq!(count(&SERVICE.replace("IPv4", "FQDN")), 0);
    let mirrored = SERVICE.replace(
        "service-name: a}",
        "service-name: a, multicluster.kubernetes.io/service-name: a}",
    );
    assert_eq!(count(&mirrored), 0);
    let unnamed = SERVICE.replace("kubernetes.io/service-name: a", "x: y");
    assert_eq!(count(&unnamed), 0);
}

#[test]
fn an_address_in_two_slices_counts_once() {
    let second = SERVICE
        .split("---")
        .nth(1)
        .unwrap_or_default()
        .replace("{name: a-1, labels", "{name: a-0, labels");
    let world = mesh(&[("kube.yaml", SERVICE), ("second.yaml", &second), ("pods.yaml", POD)]);
    assert_eq!(list(&world, A).len(), 2);
}

#[test]
fn ports_may_lack_name_and_number() {
    let bare = SERVICE.replace("ports: [{name: http, port: 8080}]", "ports: [{}]");
    let endpoints = list(&mesh(&[("kube.yaml", &bare), ("pods.yaml", POD)]), A);
    assert_eq!((endpoints[0].port_name.as_str(), endpoints[0].port), ("", 0));
}

#[test]
fn addresses_without_a_reference_find_a_pod_of_the_namespace() {
    let bare = SERVICE.replace("  targetRef: {kind: Pod, name: a-0, namespace: default}\n", "");
    let workload = |pods: &str| {
        let endpoints = list(&mesh(&[("kube.yaml", &bare), ("pods.yaml", pods)]), A);
        let found = endpoints.iter().find(|endpoint| endpoint.address == "10.1.0.1");
        found.map(|endpoint| endpoint.origin.workload_name.to_string())
    };
    assert_eq!(workload(POD).as_deref(), Some("a-0"));
    for other in [
        POD.replace("status: 'True'", "status: 'False'"),
        POD.replace("phase: Running", "phase: Failed"),
        POD.replace("name: a-0", "name: a-0\n  deletionTimestamp: '2024-01-01T00:00:00Z'"),
        POD.replace("name: a-0", "name: a-0\n  namespace: other"),
    ] {
        assert_eq!(workload(&other).as_deref(), Some(""), "{other}");
    }
}

#[test]
fn localities_of_pods_come_from_labels_or_nodes() {
    let of = |pods: &str| {
        list(&mesh(&[("kube.yaml", SERVICE), ("pods.yaml", pods)]), A)[0]
            .origin
            .locality
            .to_string()
    };
    assert_eq!(of(POD), "r/z/");
    assert_eq!(
        of(&POD.replace("app: a,", "app: a, istio-locality: r2.z2.s2,")),
        "r2/z2/s2"
    );
    let both = POD.replace("app: a,", "app: a, istio-locality: x, topology.istio.io/locality: a.b,");
    assert_eq!(of(&both), "a/b");
    let beta = POD.replace(
        "topology.kubernetes.io/zone: z",
        "failure-domain.beta.kubernetes.io/zone: old, topology.istio.io/subzone: s",
    );
    assert_eq!(of(&beta), "r/old/s");
    assert_eq!(of(&POD.replace("nodeName: n1", "nodeName: n2")), "");
}

#[test]
fn networks_of_pods_come_from_labels_or_mesh_networks() {
    let at = |service: &str, pods: &str, networks: &str| {
        let files = [
            ("kube.yaml", service),
            ("pods.yaml", pods),
            ("meshnetworks.yaml", networks),
        ];
        let endpoint = list(&mesh(&files), A)[0].clone();
        let label = endpoint
            .origin
            .labels
            .get("topology.istio.io/network")
            .cloned()
            .unwrap_or_default();
        assert_eq!(label, endpoint.origin.network.as_str());
        label.to_string()
    };
    let of = |pods: &str, networks: &str| at(SERVICE, pods, networks);
    let none = "networks: {}";
    let registry = "networks: {reg: {endpoints: [{fromRegistry: Kubernetes}, {fromCidr: 10.0.0.0/8}]}}";
    let range = "networks: {range: {endpoints: [{fromCidr: 10.0.0.0/8}]}}";
    assert_eq!(
        of(
            &POD.replace("app: a,", "app: a, topology.istio.io/network: own,"),
            registry
        ),
        "own"
    );
    assert_eq!(of(POD, registry), "net");
    let node = POD.replace(
        "labels: {topology.kubernetes.io/region: r,",
        "labels: {topology.istio.io/network: node,",
    );
    assert_eq!(of(&node, registry), "net", "the label of a node does not count");
    let unlabelled = POD.replace("labels: {topology.istio.io/network: net}", "labels: {}");
    assert_eq!(of(&unlabelled, registry), "reg");
    assert_eq!(of(&unlabelled, range), "range");
    assert_eq!(of(&unlabelled, none), "");
    let both = unlabelled.replace("podIP: 10.1.0.1", "podIPs: [{ip: 10.1.0.1}, {ip: 'fd00::1'}]");
    let second = SERVICE.replace("IPv4", "IPv6").replace("[10.1.0.1]", "['fd00::1']");
    let six = "networks: {six: {endpoints: [{fromCidr: 'fd00::/64'}]}}";
    assert_eq!(of(&both, six), "");
    assert_eq!(at(&second, &both, six), "six");
}

#[test]
fn machines_that_are_not_healthy_are_not_served() {
    let service = SERVICE.split("---").next().unwrap_or_default();
    let of = |entry: &str, checks: bool| {
        let mut installation = Installation::default();
        installation.features.pilot_enable_workload_entry_healthchecks = checks;
        let files = [("kube.yaml", service), ("config.yaml", entry)];
        list(&fixture::folder_world(installation, &files), A).len()
    };
    // One of the three entries has a host name, and one is unhealthy.
    assert_eq!(of(ENTRIES, true), 1);
    assert_eq!(of(ENTRIES, false), 2);
    assert_eq!(of(&ENTRIES.replace("'False'", "'True'"), true), 2);
    assert_eq!(
        of(&ENTRIES.replace("type: Healthy", "type: Other"), true),
        1,
        "not known to be healthy"
    );
    assert_eq!(
        of(
            &ENTRIES.replace("health-checks-enabled: 'true'", "health-checks-enabled: 'false'"),
            true
        ),
        2
    );
}

#[test]
fn health_follows_the_conditions() {
    let of = |conditions: &str, label: &str| {
        let service = SERVICE.replace("{name: a}", &format!("{{name: a, labels: {{{label}}}}}"));
        let slice = service.replace("ready: false, terminating: false", conditions);
        let pods = POD.replace("a-0", "a-1").replace("10.1.0.1", "10.1.0.2");
        list(&mesh(&[("kube.yaml", &slice), ("pods.yaml", &pods)]), A)[0].health
    };
    assert_eq!(of("ready: true, terminating: true", ""), Health::Healthy);
    assert_eq!(of("ready: false", ""), Health::Terminating);
    assert_eq!(
        of("ready: false, terminating: true", "istio.io/persistent-session: c"),
        Health::Draining
    );
    assert_eq!(
        of("ready: false, serving: false", "istio.io/persistent-session: c"),
        Health::Terminating
    );
    assert_eq!(
        of(
            "ready: false, terminating: false",
            "istio.io/persistent-session-header: h"
        ),
        Health::Unhealthy
    );
}

#[test]
fn endpoints_of_all_clusters_are_combined() {
    let world = mesh(&[("kube.yaml", SERVICE), ("pods.yaml", POD), ("kube-c2.yaml", SERVICE)]);
    let endpoints = list(&world, A);
    let clusters: Vec<_> = endpoints
        .iter()
        .map(|e| (e.origin.cluster.as_str(), e.origin.network.as_str()))
        .collect();
    assert_eq!(clusters, [("Kubernetes", "net"), ("Kubernetes", "net"), ("c2", "")]);
}

/// Sets the mesh config of a remote cluster.
fn remote_mesh(cluster: &str, text: &str) -> Change {
    let metadata = json!({"name": "istio", "namespace": "istio-system"});
    let map = json!({"metadata": metadata, "data": {"mesh": text}});
    let parsed = parse_object(&ClusterId::new(cluster), Kind::MeshConfig, &map);
    Change::Upsert(parsed.rows.into_iter().next().expect("a mesh config"))
}

#[test]
fn identities_of_pods_have_the_trust_domain_of_their_cluster() {
    let kube = format!("{SERVICE}---{POD}");
    let mut world = mesh(&[
        ("mesh.yaml", "trustDomain: td1\n"),
        ("kube.yaml", &kube),
        ("kube-c2.yaml", &kube),
        ("kube-c3.yaml", &kube),
    ]);
    let domains = |world: &World| -> Vec<String> {
        let endpoints = list(world, A);
        let known = endpoints.iter().filter(|endpoint| !endpoint.origin.identity.is_empty());
        let text = |endpoint: &Endpoint| {
            let domain = endpoint.origin.identity.strip_prefix("spiffe://").unwrap();
            let domain = domain.strip_suffix("/ns/default/sa/sa").unwrap();
            format!("{} {domain}", endpoint.origin.cluster)
        };
        known.map(text).collect()
    };
    assert_eq!(domains(&world), ["Kubernetes td1", "c2 td1", "c3 td1"]);
    world.commit(vec![remote_mesh("c2", "trustDomain: td2")]);
    assert_eq!(domains(&world), ["Kubernetes td1", "c2 td2", "c3 td1"]);
    assert_eq!(
        traits_of(&world, A).identities,
        ["spiffe://td1/ns/default/sa/sa", "spiffe://td2/ns/default/sa/sa"]
    );
    // A mesh config without a trust domain has the default one.
    world.commit(vec![remote_mesh("c3", "enableTracing: false")]);
    assert_eq!(domains(&world), ["Kubernetes td1", "c2 td2", "c3 cluster.local"]);
    let Change::Upsert(row) = remote_mesh("c2", "") else {
        panic!("not a row");
    };
    world.commit(vec![Change::Remove(Kind::MeshConfig, row.key().clone())]);
    assert_eq!(domains(&world), ["Kubernetes td1", "c2 td1", "c3 cluster.local"]);
    world.commit(vec![Change::RemoveCluster("c3".into())]);
    assert_eq!(domains(&world), ["Kubernetes td1", "c2 td1"]);
    assert_eq!(world.snapshot().mesh_config(&Cx::untracked()).trust_domain, "td1");
}

const ENTRIES: &str = "
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, labels: {app: a}}
spec: {address: 10.2.0.1, serviceAccount: vm, ports: {http: 9000}, locality: r/z, weight: 5, labels: {app: other, v: '1'}}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: named, labels: {app: a}}
spec: {address: vm.example.com}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: sick, labels: {app: a}, annotations: {proxy.istio.io/health-checks-enabled: 'true'}}
spec: {address: 10.2.0.3}
status: {conditions: [{type: Healthy, status: 'False'}]}
";

#[test]
fn services_select_machines() {
    let service = SERVICE.split("---").next().unwrap_or_default();
    let world = mesh(&[("kube.yaml", service), ("config.yaml", ENTRIES)]);
    let endpoints = list(&world, A);
    assert_eq!(short(&endpoints), ["10.2.0.1:9000 http vm Unknown"]);
    assert_eq!(
        (endpoints[0].origin.weight, endpoints[0].origin.tls_mode.as_str()),
        (5, "istio")
    );
    assert_eq!(endpoints[0].origin.labels.get("v").map(SmolStr::as_str), Some("1"));
    let named = service.replace("targetPort: 8080", "targetPort: web");
    assert!(list(&mesh(&[("kube.yaml", &named), ("config.yaml", ENTRIES)]), A).is_empty());
}

#[test]
fn services_select_machines_as_declared_in_their_cluster() {
    let service = SERVICE.split("---").next().unwrap_or_default();
    let headless = service.replace("10.0.0.1", "None");
    let installation = Installation::default();
    let remote = Installation {
        cluster: ClusterId::new("c2"),
        ..Installation::default()
    };
    let endpoints = |first: &str, own: &str| {
        let mut rows = fixture::folder(&installation, &[("kube.yaml", first), ("kube-c2.yaml", own)]);
        rows.extend(fixture::folder(&remote, &[("config.yaml", ENTRIES)]));
        let mut world = World::new(installation.clone());
        world.commit(rows.into_iter().map(Change::Upsert).collect());
        short(&list(&world, A))
    };
    assert_eq!(endpoints(&headless, service), ["10.2.0.1:9000 http vm Unknown"]);
    assert!(endpoints(service, &headless).is_empty());
}

#[test]
fn entries_select_pods_and_machines() {
    let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: se}
spec:
  hosts: [x.com]
  resolution: STATIC
  workloadSelector: {labels: {app: a}}
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8081}]
";
    let files = [("config.yaml", ENTRIES), ("kube.yaml", POD), ("se.yaml", entry)];
    let want = ["10.1.0.1:8081 http a-0 Healthy", "10.2.0.1:9000 http vm Unknown"];
    assert_eq!(short(&list(&mesh(&files), "x.com")), want);
    let dns = entry.replace("STATIC", "DNS");
    let files = [("config.yaml", ENTRIES), ("se.yaml", dns.as_str())];
    let mut world = mesh(&files);
    let want = [
        "vm.example.com:8081 http named Unknown",
        "10.2.0.1:9000 http vm Unknown",
    ];
    assert_eq!(short(&list(&world, "x.com")), want);
    assert_eq!(traits_of(&world, "x.com").inline.len(), 2);
    // A host does not match the workloads of the namespace itself: an entry has many hosts.
    let (host, all) = (Cx::recording(), Cx::recording());
    let mesh = world.snapshot();
    let key = ServiceKey {
        hostname: "x.com".into(),
        namespace: "default".into(),
    };
    assert!(endpoints(&host, &mesh, &key).is_some());
    assert!(mesh.workloads_by_namespace.get(&all, &key.namespace).count() > 2);
    let read = host.into_reads();
    assert!(all.into_reads().iter().all(|one| !read.contains(one)));
    // The row goes with the selector.
    let inline = dns.replace(
        "workloadSelector: {labels: {app: a}}",
        "endpoints: [{address: b.example.com}]",
    );
    for (entry, want) in [
        (&inline, vec!["b.example.com:8081 http se-0 Unknown"]),
        (&dns, want.to_vec()),
    ] {
        let rows = fixture::folder(&Installation::default(), &[("se.yaml", entry)]);
        world.commit(rows.into_iter().map(Change::Upsert).collect());
        assert_eq!(short(&list(&world, "x.com")), want);
    }
}

#[test]
fn entries_have_inline_endpoints_or_use_their_hosts() {
    let entry = |resolution: &str, endpoints: &str| {
        let text = format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: se}}
spec:
  hosts: [x.com]
  resolution: {resolution}
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  endpoints: {endpoints}
"
        );
        short(&list(&mesh(&[("se.yaml", text.as_str())]), "x.com"))
    };
    let inline = "[{address: 1.1.1.1, ports: {http: 81}}, {address: 'unix:///sock'}]";
    let want = ["1.1.1.1:81 http se-0 Unknown", "unix:///sock:0 http se-1 Unknown"];
    assert_eq!(entry("STATIC", inline), want);
    assert_eq!(entry("DNS", "[]"), ["x.com:80 http se Unknown"]);
    assert_eq!(entry("NONE", "[]"), [""; 0]);
    let two = "[{address: a.com}, {address: b.com}]";
    assert_eq!(
        entry("DNS", two),
        ["a.com:80 http se-0 Unknown", "b.com:80 http se-1 Unknown"]
    );
    assert_eq!(entry("DNS_ROUND_ROBIN", two), ["a.com:80 http se-0 Unknown"]);
}

/// Looking up the endpoints of each port, again for each address, would take quadratic time.
#[test]
fn an_entry_may_have_many_addresses_and_ports() {
    let (addresses, ports) = (250, 80);
    let joined = |count: usize, item: &dyn Fn(usize) -> String| (0..count).map(item).collect::<Vec<_>>().join(", ");
    let port = |number: usize| format!("{{number: {}, name: p{number}, protocol: TCP}}", 8000 + number);
    let entry = format!(
        "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: many}}\n\
         spec: {{hosts: [x.com], resolution: STATIC, addresses: [{}], ports: [{}], \
         endpoints: [{{address: 1.1.1.1, serviceAccount: sa}}, {{address: 1.1.1.2}}, {{address: 1.1.1.3}}]}}\n",
        joined(addresses, &|number| format!("10.0.0.{number}")),
        joined(ports, &port),
    );
    let world = mesh(&[("se.yaml", entry.as_str())]);
    assert_eq!(list(&world, "x.com").len(), addresses * ports * 3);
    let traits = traits_of(&world, "x.com");
    assert_eq!(traits.ports.len(), ports);
    let plaintext = PortTraits {
        plaintext: true,
        all_tunnel: false,
    };
    assert!(traits.ports.values().all(|port| *port == plaintext));
}

#[test]
fn traits_of_a_port_are_those_of_all_endpoints_by_number_or_name() {
    // The slice of the Service names the port, and the ServiceEntry of the same host its number.
    let entry = |more: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: more}}\n\
             spec: {{hosts: [{A}], resolution: STATIC, ports: [{{number: 80, name: http, protocol: HTTP}}], \
             endpoints: [{{address: 1.1.1.1, serviceAccount: sa{more}}}]}}\n"
        )
    };
    let tunnel = ", labels: {networking.istio.io/tunnel: http}";
    let slice = SERVICE.replace("- addresses: [10.1.0.9]\n", "");
    let pod = POD.replace("app: a,", "app: a, networking.istio.io/tunnel: http,");
    let traits = |slice: &str, more: &str| {
        let world = mesh(&[("kube.yaml", slice), ("pods.yaml", &pod), ("se.yaml", &entry(more))]);
        traits_of(&world, A).ports[&80]
    };
    let of = |plaintext: bool, all_tunnel: bool| PortTraits { plaintext, all_tunnel };
    assert_eq!(traits(&slice, tunnel), of(false, true));
    assert_eq!(traits(&slice, ""), of(false, false));
    assert_eq!(traits(SERVICE, tunnel), of(true, false));
}

#[test]
fn r21_addresses_and_ports_of_slices_multiply_up_to_a_limit() {
    let ports = [80, 90, 91, 92].map(|port| json!({"name": format!("tcp-{port}"), "port": port}));
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"},
        "spec": {"clusterIP": "10.0.0.1", "ports": ports}});
    let slice = |name: &str, addresses: [&str; 2]| {
        let endpoints = addresses.map(|address| json!({"addresses": [address]}));
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "a"}},
            "ports": service["spec"]["ports"], "endpoints": endpoints})
    };
    let first = slice("a-1", ["10.1.0.1", "10.1.0.2"]);
    let second = slice("a-2", ["10.1.0.3", "10.1.0.4"]);
    let objects = format!("{service}\n---\n{first}\n---\n{second}\n");
    let last = |limit: u32| {
        let mut installation = Installation::default();
        installation.features.pilot_max_endpoints_per_object = limit;
        let world = fixture::folder_world(installation, &[("kube.yaml", objects.as_str())]);
        let endpoints = list(&world, A);
        (endpoints.len(), endpoints[endpoints.len() - 1].address.clone())
    };
    assert_eq!(last(1), (10, "10.1.0.3".into()));
    assert_eq!(last(0), (16, "10.1.0.4".into()));
}

#[test]
fn pods_with_two_families_are_one_endpoint() {
    let service = SERVICE.replace(
        "clusterIP: 10.0.0.1",
        "clusterIP: 10.0.0.1\n  clusterIPs: [10.0.0.1, 'fd00::1']",
    );
    let v6 = service
        .split("---")
        .nth(1)
        .unwrap_or_default()
        .replace("a-1,", "a-2,")
        .replace("IPv4", "IPv6");
    let v6 = v6.replace("10.1.0.1", "fd00::1:1");
    let pod = POD.replace(
        "podIP: 10.1.0.1",
        "podIP: fd00::1:1, podIPs: [{ip: 'fd00::1:1'}, {ip: 10.1.0.1}]",
    );
    let files = [
        ("kube.yaml", service.as_str()),
        ("v6.yaml", v6.as_str()),
        ("pod.yaml", pod.as_str()),
    ];
    let mut installation = Installation::default();
    installation.features.istio_dual_stack = true;
    let endpoints = list(&fixture::folder_world(installation, &files), A);
    assert_eq!(
        (endpoints[0].address.as_str(), endpoints[0].extra_addresses[0].as_str()),
        ("fd00::1:1", "10.1.0.1")
    );
    assert_eq!(endpoints.iter().filter(|e| e.origin.workload_name == "a-0").count(), 1);
    assert_eq!(
        list(&mesh(&files), A)
            .iter()
            .filter(|e| e.origin.workload_name == "a-0")
            .count(),
        2
    );
}

#[test]
fn ready_endpoints_of_a_service_that_no_namespace_sees_are_ignored() {
    let endpoints = |export_to: &str| {
        let annotation = format!("{{name: a, annotations: {{networking.istio.io/exportTo: '{export_to}'}}}}");
        let service = SERVICE.replacen("{name: a}", &annotation, 1);
        list(&mesh(&[("a.yaml", &service), ("b.yaml", POD)]), A).len()
    };
    assert_eq!(endpoints("."), 2);
    assert_eq!(endpoints("~"), 0);
}

fn ambient() -> Installation {
    let mut installation = Installation::default();
    installation.features.pilot_enable_ambient = true;
    installation
}

/// Returns pod `a-0` with its node and network, redirected to its ztunnel.
fn redirected() -> String {
    let annotations = "annotations: {ambient.istio.io/redirection: enabled}";
    POD.replacen("name: a-0", &format!("name: a-0\n  {annotations}"), 1)
}

/// Returns the host and address of each endpoint that accepts HBONE.
fn tunnelled(world: &World) -> Vec<String> {
    let (mesh, cx) = (world.snapshot(), Cx::untracked());
    let mut found = Vec::new();
    for (key, row) in mesh.endpoints.iter(&cx) {
        let endpoints = row.endpoints.iter().filter(|endpoint| endpoint.supports_tunnel());
        found.extend(endpoints.map(|endpoint| format!("{} {}", key.hostname, endpoint.address)));
    }
    found.sort();
    found
}

#[test]
fn ambient_pods_are_known_by_canonical_addresses() {
    let accepts_tunnels = |address: &str| {
        let pod = redirected().replace("10.1.0.1", address);
        let service = SERVICE.replace("10.1.0.1", address);
        let world = fixture::folder_world(ambient(), &[("a.yaml", &service), ("b.yaml", &pod)]);
        !tunnelled(&world).is_empty()
    };
    assert!(accepts_tunnels("10.1.0.1"));
    assert!(accepts_tunnels("'fd00::1'"));
    assert!(!accepts_tunnels("'fd00:0::1'"));
}

/// Endpoints of other services at the address of pod `a-0`, and other workloads that accept HBONE.
const SHARED_ADDRESS: &str = "
apiVersion: v1
kind: Service
metadata: {name: b, namespace: other}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: b-1, namespace: other, labels: {kubernetes.io/service-name: b}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.1.0.1]}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: x}
spec:
  hosts: [x.com]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 10.1.0.1}, {address: 10.1.0.7}]
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, labels: {app: vm}, annotations: {ambient.istio.io/redirection: enabled}}
spec: {address: 10.2.0.1}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: y}
spec:
  hosts: [y.com]
  resolution: STATIC
  workloadSelector: {labels: {app: vm}}
  ports: [{number: 80, name: http, protocol: HTTP}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: z, labels: {networking.istio.io/tunnel: http}}
spec:
  hosts: [z.com]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 10.3.0.1}]
";

#[test]
fn endpoints_accept_hbone_if_a_workload_at_their_address_does() {
    let files = |pod: &str, installation: Installation| {
        let files = [("a.yaml", SERVICE), ("pod.yaml", pod), ("more.yaml", SHARED_ADDRESS)];
        fixture::folder_world(installation, &files)
    };
    let with_network = redirected();
    let pod = with_network.split("---").next().unwrap_or_default();
    let of_pod = [
        "a.default.svc.cluster.local 10.1.0.1",
        "b.other.svc.cluster.local 10.1.0.1",
        "x.com 10.1.0.1",
    ];
    let of_others = ["y.com 10.2.0.1", "z.com 10.3.0.1"];
    let all = [&of_pod[..], &of_others].concat();

    let mut world = files(pod, ambient());
    assert_eq!(tunnelled(&world), all);
    assert!(!list(&world, A)[0].origin.labels.contains_key(TUNNEL_LABEL));
    let all_tunnel = |host: &str| traits_of(&world, host).ports[&80].all_tunnel;
    assert_eq!(["x.com", "y.com", "z.com"].map(all_tunnel), [false, true, true]);

    let mut after = |pod: &str| {
        let rows = fixture::folder(&ambient(), &[("pod.yaml", pod)]);
        world.commit(rows.into_iter().map(Change::Upsert).collect());
        tunnelled(&world)
    };
    assert_eq!(after(&pod.replace("enabled", "disabled")), of_others);
    assert_eq!(after(pod), all);

    // The config cluster has a network, and endpoints of ServiceEntries without one have none.
    assert_eq!(tunnelled(&files(&with_network, ambient())), of_pod[..2]);
    let off = files(pod, Installation::default());
    assert!(tunnelled(&off).is_empty() && off.snapshot().tunnelled_addresses.is_empty());
}

#[test]
fn pods_of_remote_clusters_accept_hbone_with_several_networks_only() {
    let kube = format!("{SERVICE}---{}", redirected());
    let remote = |multi_network: bool| {
        let mut installation = ambient();
        installation.features.ambient_enable_multi_network = multi_network;
        let own = "apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system, labels: \
                   {topology.istio.io/network: net}}\n";
        let files = [("kube.yaml", own), ("kube-c2.yaml", kube.as_str())];
        tunnelled(&fixture::folder_world(installation, &files))
    };
    assert_eq!(remote(true), ["a.default.svc.cluster.local 10.1.0.1"]);
    assert!(remote(false).is_empty());
}

/// An address of a headless host.
fn headless(address: usize, service_port: u32, port_name: &str) -> HeadlessAddress {
    HeadlessAddress {
        address: address.to_string().into(),
        extra_addresses: Box::default(),
        port_name: port_name.into(),
        service_port,
        cluster: ClusterId::default(),
        network: NetworkId::default(),
        hostname: SmolStr::default(),
        subdomain: SmolStr::default(),
        healthy: true,
    }
}

#[test]
fn r21_addresses_of_a_port_are_found_as_by_a_search() {
    let address = |place: usize| headless(place, [0, 80, 90, 0][place % 4], ["tcp", "tcp-2", ""][place % 3]);
    let addresses: Vec<HeadlessAddress> = (0..50).map(address).collect();
    let serves = |address: &HeadlessAddress, number: u32, name: &str| match address.service_port {
        0 => address.port_name == name,
        own => own == number,
    };
    for mut index in [PortAddresses::of(&addresses), PortAddresses::distinct(&addresses)] {
        for (number, name) in [
            (80, "tcp"),
            (90, "tcp"),
            (90, ""),
            (70, "tcp-2"),
            (70, "other"),
            (0, "tcp"),
        ] {
            let expected = addresses.iter().filter(|address| serves(address, number, name));
            let expected: Vec<&HeadlessAddress> = expected.collect();
            assert_eq!(index.serves(number, name), !expected.is_empty(), "{number} {name}");
            assert_eq!(index.take(number, name), expected, "{number} {name}");
        }
    }
}

#[test]
fn r21_services_of_a_headless_host_take_each_address_a_few_times() {
    // Many ServiceEntries of the host select the same workloads.
    let addresses: Vec<HeadlessAddress> = (0..20_000).map(|place| headless(place % 5_000, 80, "tcp")).collect();
    let taken = |mut index: PortAddresses<'_>| -> Vec<usize> {
        let counts = std::iter::repeat_with(|| index.take(80, "tcp").len());
        counts.take_while(|count| *count > 0).take(50).collect()
    };
    assert_eq!(taken(PortAddresses::of(&addresses)), [20_000; 4]);
    assert_eq!(taken(PortAddresses::distinct(&addresses)), [5_000; 16]);
    // A few addresses may be taken as often as honest services do.
    assert_eq!(
        taken(PortAddresses::of(&addresses[..300])),
        [[300_usize; 33].as_slice(), &[100]].concat()
    );
}
