use proptest::prelude::*;

use super::*;
use crate::{
    api::hidden_gateway::HiddenGateway,
    model::{Change, MeshSnapshot, World, fixture, installation::Installation},
};

/// Returns the snapshot of a mesh folder.
fn mesh(files: &[(&str, &str)]) -> std::sync::Arc<MeshSnapshot> {
    fixture::folder_world(Installation::default(), files).snapshot()
}

fn gateways(mesh: &MeshSnapshot) -> (Vec<String>, u32) {
    let networks = mesh
        .networks
        .get(&Cx::untracked(), &())
        .expect("because there is one row");
    let listed = networks.resolved.by_network.values().flatten();
    let text = listed.map(|g| format!("{} {}:{} {}", g.network, g.address, g.port, g.cluster));
    (text.collect(), networks.resolved.scale)
}

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: gw, namespace: istio-system, labels: {topology.istio.io/network: n2}}
spec: {type: LoadBalancer, ports: [{port: 15443, name: tls, nodePort: 31000}]}
status: {loadBalancer: {ingress: [{ip: 2.2.2.2}, {hostname: gw.example.com}, {ip: 1.1.1.1}]}}
";

/// An entry of a registry's service, with one endpoint.
fn entry(cluster: &str, address: &str, labels: &str) -> Vec<crate::api::Row> {
    let text = format!(
        "{{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {{name: web}}, spec: {{\
         hosts: [web.service.consul], ports: [{{number: 80, name: http, protocol: HTTP}}], resolution: STATIC, \
         endpoints: [{{address: {address}, labels: {{{labels}}}}}]}}}}"
    );
    let documents = crate::api::yaml::documents(&text);
    let object = documents[0].parse().expect("because the text is YAML");
    crate::api::document::parse(&ClusterId::new(cluster), &object).rows
}

#[test]
fn registries_count_in_their_order_and_have_networks() {
    let installation = Installation {
        registries: vec!["Mock".into(), "Consul".into()],
        ..Installation::default()
    };
    let networks = "networks: {n1: {endpoints: [{fromRegistry: consul}]}, n2: {endpoints: [{fromRegistry: c2}]}}\n";
    let mut world = fixture::folder_world(installation, &[("meshnetworks.yaml", networks)]);
    let rows = [
        entry("Consul", "10.0.0.1", "a: b"),
        entry("Mock", "10.0.0.2", "a: b"),
        entry("c2", "10.0.0.3", "a: b"),
    ];
    let changes = rows.into_iter().flatten().map(crate::model::Change::Upsert).collect();
    let mesh = world.commit(changes).snapshot;
    let key = crate::model::ServiceKey {
        hostname: "web.service.consul".into(),
        namespace: "default".into(),
    };
    let endpoints = &mesh
        .endpoints
        .get(&Cx::untracked(), &key)
        .expect("because it has entries")
        .endpoints;
    let found: Vec<(&str, &str)> = endpoints
        .iter()
        .map(|endpoint| (endpoint.address.as_str(), endpoint.origin.network.as_str()))
        .collect();
    let want = [("10.0.0.2", ""), ("10.0.0.1", "n1")];
    assert_eq!(found, want, "clusters that are not registries do not count");
}

#[test]
fn labelled_services_and_addresses_are_gateways() {
    let networks = "
networks:
  n1: {endpoints: [{fromRegistry: Kubernetes}], gateways: [{address: 9.9.9.9, port: 443}]}
  n3: {endpoints: [{fromCidr: 10.0.0.0/8}], gateways: [{address: 8.8.8.8, port: 443}, {address: 7.7.7.7, port: 443},
       {address: 6.6.6.6, port: 443}]}
";
    let mesh = mesh(&[("kube-c2.yaml", SERVICE), ("meshnetworks.yaml", networks)]);
    let (listed, scale) = gateways(&mesh);
    let want = [
        "n1 9.9.9.9:443 ",
        "n2 1.1.1.1:15443 c2",
        "n2 2.2.2.2:15443 c2",
        "n3 6.6.6.6:443 ",
        "n3 7.7.7.7:443 ",
        "n3 8.8.8.8:443 ",
    ];
    assert_eq!(listed, want);
    assert_eq!(scale, 6);
    let unresolved = &mesh.networks.get(&Cx::untracked(), &()).unwrap().unresolved;
    assert_eq!(unresolved.by_network[&NetworkId::new("n2")].len(), 3);
}

#[test]
fn a_label_takes_precedence_over_a_registry_service_name() {
    let networks = "
networks:
  n1:
    endpoints: [{fromRegistry: c2}]
    gateways: [{registryServiceName: gw.istio-system.svc.cluster.local, port: 443}]
";
    let labelled = mesh(&[("kube-c2.yaml", SERVICE), ("meshnetworks.yaml", networks)]);
    assert_eq!(gateways(&labelled).0, ["n2 1.1.1.1:15443 c2", "n2 2.2.2.2:15443 c2"]);
    let plain = SERVICE.replace("topology.istio.io/network", "x");
    let named = mesh(&[("kube-c2.yaml", &plain), ("meshnetworks.yaml", networks)]);
    assert_eq!(gateways(&named).0, ["n1 1.1.1.1:443 c2", "n1 2.2.2.2:443 c2"]);
    let elsewhere = mesh(&[("kube-c3.yaml", &plain), ("meshnetworks.yaml", networks)]);
    assert!(gateways(&elsewhere).0.is_empty());
}

#[test]
fn gateways_can_use_node_ports_and_mapped_ports() {
    let nodes = "
apiVersion: v1
kind: Node
metadata: {name: n, labels: {role: gw}}
status: {addresses: [{type: ExternalIP, address: 3.3.3.3}]}
---
apiVersion: v1
kind: Node
metadata: {name: m}
status: {addresses: [{type: ExternalIP, address: 4.4.4.4}]}
---
apiVersion: v1
kind: Service
metadata:
  name: gw
  labels: {topology.istio.io/network: n2, networking.istio.io/gatewayPort: '443'}
  annotations: {traffic.istio.io/nodeSelector: '{\"role\":\"gw\"}'}
spec: {type: NodePort, ports: [{port: 443, nodePort: 31443}]}
";
    assert_eq!(gateways(&mesh(&[("kube-c2.yaml", nodes)])).0, ["n2 3.3.3.3:31443 c2"]);
    let other = nodes.replace("port: 443,", "port: 444,");
    assert!(gateways(&mesh(&[("kube-c2.yaml", &other)])).0.is_empty());
}

const GATEWAY: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: east, namespace: istio-system, labels: {topology.istio.io/network: n2}}
spec:
  gatewayClassName: istio
  addresses: [{type: IPAddress, value: 1.2.3.4}, {type: Hostname, value: gw.example.com}, {type: NamedAddress, value: x},
    {value: 9.9.9.9}]
  listeners:
  - {name: option, port: 35443, protocol: TLS, tls: {mode: Passthrough, options: {gateway.istio.io/listener-protocol: auto-passthrough}}}
  - {name: number, port: 15443, protocol: TLS, tls: {mode: Passthrough}}
  - {name: plain, port: 15444, protocol: TCP}
  - {name: hbone, port: 15008, protocol: HBONE}
";

#[test]
fn labelled_gateway_resources_are_network_gateways() {
    let of = |file: &str, text: &str| {
        let mesh = mesh(&[(file, text)]);
        let networks = mesh.networks.get(&Cx::untracked(), &()).unwrap();
        let listed = networks.resolved.by_network.values().flatten();
        let text = listed.map(|g| format!("{}:{} {} {}", g.address, g.port, g.hbone_port, g.service_account));
        let dependencies = crate::model::external_dependencies::ExternalDependencies::of(&mesh);
        (
            text.collect::<Vec<_>>(),
            dependencies.hosts.into_iter().collect::<Vec<_>>(),
        )
    };
    let account = "istio-system/east";
    let want = [
        format!("1.2.3.4:15008 15008 {account}"),
        format!("1.2.3.4:15443 0 {account}"),
        format!("1.2.3.4:35443 0 {account}"),
    ];
    let (listed, hosts) = of("kube-c2.yaml", GATEWAY);
    assert_eq!(listed, want);
    assert_eq!(hosts, ["gw.example.com"]);
    let other_port = GATEWAY.replace("network: n2", "network: n2, networking.istio.io/gatewayPort: '15444'");
    let (listed, _) = of("kube-c2.yaml", &other_port);
    assert_eq!(listed.len(), 2, "the option and HBONE: {listed:?}");
    let remote = GATEWAY.replace("gatewayClassName: istio", "gatewayClassName: istio-remote");
    assert!(of("kube-c2.yaml", &remote).0.is_empty());
    assert!(of("kube.yaml", &remote).0[0].ends_with("istio-system/east-istio-remote"));
    let unlabelled = GATEWAY.replace("topology.istio.io/network: n2", "");
    assert!(of("kube.yaml", &unlabelled).0.is_empty());
}

#[test]
fn gateways_of_other_namespaces_lead_to_networks_and_do_nothing_else() {
    let rows = fixture::folder(&Installation::default(), &[("kube-c2.yaml", GATEWAY)]);
    let hidden = rows.iter().find_map(|row| match row {
        crate::api::Row::KubeGateway(gateway) => HiddenGateway::of(gateway),
        _ => None,
    });
    let hidden = hidden.expect("a Gateway to a network");
    let mut world = fixture::folder_world(Installation::default(), &[]);
    let mesh = world.commit(vec![crate::model::Change::Upsert(hidden.into())]).snapshot;
    let want = ["n2 1.2.3.4:15008 c2", "n2 1.2.3.4:15443 c2", "n2 1.2.3.4:35443 c2"];
    assert_eq!(gateways(&mesh).0, want);
    assert!(mesh.kube_gateways.is_empty());
}

#[test]
fn host_names_are_gateways_at_each_address() {
    use crate::model::{Change, World};
    let installation = Installation::default();
    let answer = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let key = ResolvedHost::key(&Installation::default().cluster, "gw.example.com");
        Change::Upsert(ResolvedHost { key, addresses }.into())
    };
    let mut world: World = fixture::folder_world(installation, &[("kube-c2.yaml", SERVICE)]);
    assert_eq!(gateways(&world.snapshot()).0.len(), 2);
    let mesh = world.commit(vec![answer(&["3.3.3.3", "2001:db8::1"])]).snapshot;
    let want = [
        "n2 1.1.1.1:15443 c2",
        "n2 2.2.2.2:15443 c2",
        "n2 2001:db8::1:15443 c2",
        "n2 3.3.3.3:15443 c2",
    ];
    assert_eq!(gateways(&mesh), (want.map(str::to_owned).to_vec(), 4));
    let mesh = world.commit(vec![answer(&[])]).snapshot;
    assert_eq!(gateways(&mesh).0.len(), 2, "no records");
    let networks = mesh.networks.get(&Cx::untracked(), &()).unwrap();
    assert_eq!(networks.unresolved.by_network[&NetworkId::new("n2")].len(), 3);
}

#[test]
fn host_names_are_pending_until_the_first_answer() {
    let files = [("kube-c2.yaml", SERVICE)];
    let pending = |mesh: &MeshSnapshot| {
        let networks = mesh.networks.get(&Cx::untracked(), &()).unwrap();
        let pending = networks.pending.by_network.values().flatten();
        pending.map(|gateway| gateway.address.to_string()).collect::<Vec<_>>()
    };
    assert!(pending(&mesh(&files)).is_empty(), "nothing resolves them");
    let mut installation = Installation {
        resolves_hosts: true,
        ..Installation::default()
    };
    let key = ResolvedHost::key(&installation.cluster, "gw.example.com");
    let mut world = fixture::folder_world(installation.clone(), &files);
    assert_eq!(pending(&world.snapshot()), ["gw.example.com"]);
    let addresses = Vec::new();
    let answer = crate::model::Change::Upsert(ResolvedHost { key, addresses }.into());
    let answered = world.commit(vec![answer]).snapshot;
    assert!(pending(&answered).is_empty(), "it has no address");
    installation.features.resolve_hostname_gateways = false;
    let disabled = fixture::folder_world(installation, &files).snapshot();
    assert!(pending(&disabled).is_empty());
}

#[test]
fn host_names_are_dropped_without_resolution() {
    let mut installation = Installation::default();
    installation.features.resolve_hostname_gateways = false;
    let mut world = fixture::folder_world(installation, &[("kube-c2.yaml", SERVICE)]);
    let key = ResolvedHost::key(&Installation::default().cluster, "gw.example.com");
    let addresses = vec!["3.3.3.3".parse().unwrap()];
    let mesh = world
        .commit(vec![crate::model::Change::Upsert(
            ResolvedHost { key, addresses }.into(),
        )])
        .snapshot;
    assert_eq!(gateways(&mesh).0.len(), 2);
    assert!(
        crate::model::external_dependencies::ExternalDependencies::of(&mesh)
            .hosts
            .is_empty()
    );
    let diagnostics = dropped(&Cx::untracked(), &mesh);
    assert_eq!(diagnostics.len(), 1);
    assert!(diagnostics[0].message.contains("gw.example.com"), "{}", diagnostics[0]);
}

#[test]
fn r21_gateways_of_a_namespace_are_limited() {
    let service = |namespace: &str, count: usize| {
        let addresses = (0..count).map(|number| format!("1.1.{}.{}", number / 250, number % 250));
        let addresses: Vec<String> = addresses.collect();
        format!(
            "---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: gw, namespace: {namespace}, labels: {{topology.istio.io/network: {namespace}}}}}\n\
             spec: {{ports: [{{port: 15443, name: tls}}], externalIPs: [{}]}}\n",
            addresses.join(", ")
        )
    };
    let services = [service("many", MAX_OF_NAMESPACE + 1), service("one", 1)].concat();
    let mesh = mesh(&[("kube.yaml", &services)]);
    let networks = mesh.networks.get(&Cx::untracked(), &()).unwrap();
    let count = |network: &str| networks.resolved.by_network[&NetworkId::new(network)].len();
    assert_eq!((count("many"), count("one")), (MAX_OF_NAMESPACE, 1));
    let findings = exceeded(&Cx::untracked(), &mesh);
    let objects: Vec<&str> = findings.iter().map(|finding| finding.key.namespace.as_str()).collect();
    assert_eq!(objects, ["many"]);
}

#[test]
fn labels_and_address_ranges_decide_the_network_of_an_endpoint() {
    let networks = "
networks:
  wide: {endpoints: [{fromCidr: 10.0.0.0/8}]}
  narrow: {endpoints: [{fromCidr: 10.1.0.0/16}]}
  registry: {endpoints: [{fromRegistry: c2}]}
";
    let namespace = "
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: system}}
";
    let mesh = mesh(&[("meshnetworks.yaml", networks), ("kube-c3.yaml", namespace)]);
    let of = |cluster: &str, label: &str, address: &str| {
        let labels = [(SmolStr::new(NETWORK), SmolStr::new(label))].into_iter().collect();
        of_endpoint(&Cx::untracked(), &mesh, &ClusterId::new(cluster), &labels, address).to_string()
    };
    assert_eq!(of("c1", "own", "10.1.0.1"), "own");
    assert_eq!(of("c3", "", "10.1.0.1"), "system");
    assert_eq!(of("c2", "", "10.1.0.1"), "registry");
    assert_eq!(of("c1", "", "10.1.0.1"), "wide");
    assert_eq!(of("c1", "", "11.1.0.1"), "");
    assert_eq!(of("c1", "", "host.name"), "");
}

#[test]
fn only_the_network_of_a_system_namespace_concerns_endpoints() {
    let namespace = |labels: &str| {
        let text =
            format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: istio-system, labels: {{{labels}}}}}}}");
        let rows = fixture::folder(&Installation::default(), &[("kube.yaml", &text)]);
        rows.into_iter().map(Change::Upsert).collect::<Vec<_>>()
    };
    let mut world = World::new(Installation::default());
    world.commit(namespace("topology.istio.io/network: n1"));
    let cx = Cx::recording();
    let mesh = world.snapshot();
    let network = of_endpoint(&cx, &mesh, &fixture::CLUSTER, &Labels::new(), "10.0.0.1");
    assert_eq!(network.as_str(), "n1");
    let reads = cx.into_reads();
    let changes = world
        .commit(namespace("topology.istio.io/network: n1, team: a"))
        .changes;
    assert!(!changes.is_empty() && !changes.touches(&reads));
    let changes = world.commit(namespace("topology.istio.io/network: n2")).changes;
    assert!(changes.touches(&reads));
}

proptest! {
    #[test]
    fn every_list_divides_the_scale(networks in prop::collection::vec((0..4_u8, 0..3_u8, any::<u8>()), 0..12)) {
        let gateways = networks.iter().map(|(network, cluster, address)| NetworkGateway {
            address: SmolStr::from(format!("1.1.1.{address}")),
            cluster: ClusterId::from(format!("c{cluster}")),
            ..template(&format!("n{network}"), 15443)
        });
        let index = GatewayIndex::of(gateways);
        for list in index.by_network.values().map(Vec::len).chain(index.by_network_and_cluster.values().map(Vec::len)) {
            prop_assert_eq!(index.scale as usize % list, 0);
        }
        let in_clusters: usize = index.by_network_and_cluster.values().map(Vec::len).sum();
        prop_assert_eq!(in_clusters, index.by_network.values().map(Vec::len).sum::<usize>());
    }
}
