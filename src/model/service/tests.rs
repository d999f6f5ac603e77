use serde_json::{Value, json};

use super::*;
use crate::{
    api::{Kind, kube as raw},
    base::Shared,
    model::{Batch, Change, World, inputs::Row, installation::Installation},
    proto::istio::mesh::v1alpha1::MeshConfig,
};

fn meta(kind: Kind, cluster: &str, object: &Value) -> Shared<Meta> {
    Shared::new(Meta::parse(kind, &ClusterId::new(cluster), object).unwrap())
}

fn kube(cluster: &str, name: &str, spec: &Value, annotations: &Value) -> Row {
    let object = json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec});
    raw::Service::parse(meta(Kind::Service, cluster, &object), &object)
        .unwrap()
        .into()
}

fn entry(name: &str, spec: &Value, status: Value) -> Row {
    entry_created(name, spec, status, "2024-01-01T00:00:00Z")
}

fn entry_created(name: &str, spec: &Value, status: Value, time: &str) -> Row {
    let object = json!({"metadata": {"name": name, "creationTimestamp": time, "annotations": spec["annotations"]}});
    let mut message = networking::ServiceEntry {
        hosts: texts(&spec["hosts"]),
        addresses: texts(&spec["addresses"]),
        export_to: texts(&spec["exportTo"]),
        subject_alt_names: texts(&spec["subjectAltNames"]),
        ..Default::default()
    };
    for port in spec["ports"].as_array().into_iter().flatten() {
        message.ports.push(networking::ServicePort {
            number: u32::try_from(port.as_u64().unwrap()).unwrap(),
            name: format!("http-{port}"),
            protocol: "HTTP".into(),
            target_port: 0,
        });
    }
    let given = spec["resolution"].as_str().unwrap_or("NONE");
    message.set_resolution(networking::service_entry::Resolution::from_str_name(given).unwrap());
    Config {
        meta: meta(Kind::ServiceEntry, "Kubernetes", &object),
        spec: message,
        status: (!status.is_null()).then(|| Shared::new(status)),
    }
    .into()
}

fn texts(value: &Value) -> Vec<String> {
    let list = value.as_array().into_iter().flatten();
    list.map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn world(rows: Vec<Row>) -> World {
    world_with(Installation::default(), rows)
}

fn world_with(installation: Installation, rows: Vec<Row>) -> World {
    let mut world = World::new(installation);
    let batch: Batch = rows.into_iter().map(Change::Upsert).collect();
    world.commit(batch);
    world
}

fn find(world: &World, host: &str) -> Option<Shared<Service>> {
    let key = ServiceKey {
        hostname: host.into(),
        namespace: "default".into(),
    };
    world.snapshot().services.get(&Cx::untracked(), &key).cloned()
}

fn service_of(world: &World, host: &str) -> Shared<Service> {
    find(world, host).expect("a service")
}

const A: &str = "a.default.svc.cluster.local";

#[test]
fn r21_ports_by_number_are_those_that_a_search_finds() {
    let ports = json!([
        {"name": "a", "port": 80, "targetPort": 8080},
        {"name": "b", "port": 80, "targetPort": 8081, "protocol": "UDP"},
        {"name": "c", "port": 90, "targetPort": "named"},
    ]);
    let spec = json!({"clusterIP": "10.0.0.1", "ports": ports});
    let further = json!({"hosts": [A], "ports": [80, 91]});
    let world = world(vec![
        kube("Kubernetes", "a", &spec, &json!({})),
        entry("e", &further, Value::Null),
    ]);
    let service = service_of(&world, A);
    let by_number = InboundPorts::of(&service);
    for number in [80, 81, 90, 91] {
        for target in [0, 80, 8080, 8081] {
            let found = service.inbound_port(number, target);
            assert_eq!(by_number.get(number, target), found, "{number} {target}");
            let position = by_number.position(number, target);
            assert_eq!(
                position
                    .and_then(|position| service.port_at(position))
                    .map(|(_, port)| port),
                found,
                "{number} {target}"
            );
            assert_eq!(by_number.contains(number), found.is_some(), "{number}");
        }
    }
    let further = by_number
        .position(91, 91)
        .and_then(|position| service.port_at(position));
    assert_eq!(further.map(|(service, _)| service.registry), Some(Registry::External));
}

#[test]
fn clusters_merge_with_the_config_cluster_first() {
    let spec = |ip: &str, port: u32| json!({"clusterIP": ip, "ports": [{"name": "http", "port": port}]});
    let world = world(vec![
        kube(
            "aaa",
            "a",
            &spec("10.9.0.1", 81),
            &json!({"alpha.istio.io/canonical-serviceaccounts": "x,y"}),
        ),
        kube(
            "Kubernetes",
            "a",
            &spec("10.0.0.1", 80),
            &json!({"alpha.istio.io/kubernetes-serviceaccounts": "sa"}),
        ),
    ]);
    let service = service_of(&world, A);
    assert_eq!(service.ports[0].number, 80);
    assert_eq!(service.default_address, "10.0.0.1");
    let vips: Vec<_> = service
        .cluster_vips
        .iter()
        .map(|(id, ips)| (id.as_str(), ips[0].as_str()))
        .collect();
    assert_eq!(vips, [("Kubernetes", "10.0.0.1"), ("aaa", "10.9.0.1")]);
    assert_eq!(*service.service_accounts, ["spiffe:///ns/default/sa/sa", "x", "y"]);
}

#[test]
fn accounts_of_annotations_have_the_trust_domain_of_their_cluster() {
    let annotations = json!({"alpha.istio.io/kubernetes-serviceaccounts": "sa"});
    let spec = json!({"clusterIP": "10.0.0.1"});
    let mut rows: Vec<Row> = ["Kubernetes", "c2", "c3"]
        .map(|cluster| kube(cluster, "a", &spec, &annotations))
        .into();
    for (cluster, domain) in [("Kubernetes", "td1"), ("c2", "td2")] {
        let object = json!({"metadata": {"name": "istio", "namespace": "istio-system"},
            "data": {"mesh": format!("trustDomain: {domain}")}});
        let config = Config::<MeshConfig>::parse(meta(Kind::MeshConfig, cluster, &object), &object).unwrap();
        rows.push(config.into());
    }
    let service = service_of(&world(rows), A);
    assert_eq!(
        *service.service_accounts,
        ["spiffe://td1/ns/default/sa/sa", "spiffe://td2/ns/default/sa/sa"]
    );
}

#[test]
fn a_kubernetes_service_takes_precedence_over_an_entry() {
    let spec = json!({"hosts": [A], "ports": [9], "resolution": "STATIC"});
    let mut world = world(vec![
        entry_created("old", &spec, Value::Null, "2001-01-01T00:00:00Z"),
        kube("Kubernetes", "a", &json!({"clusterIP": "10.0.0.1"}), &json!({})),
    ]);
    assert_eq!(service_of(&world, A).registry, Registry::Kubernetes);
    let key = ObjectKey::new(&"Kubernetes".into(), "default", "a");
    world.commit(vec![Change::Remove(Kind::Service, key)]);
    assert_eq!(service_of(&world, A).registry, Registry::External);
}

#[test]
fn headless_and_external_name_services_are_converted() {
    let world = world(vec![
        kube("Kubernetes", "a", &json!({"clusterIP": "None"}), &json!({})),
        kube(
            "Kubernetes",
            "b",
            &json!({"type": "ExternalName", "externalName": A}),
            &json!({}),
        ),
        kube(
            "Kubernetes",
            "c",
            &json!({"type": "ExternalName", "externalName": "b.default.svc.cluster.local"}),
            &json!({}),
        ),
        kube(
            "Kubernetes",
            "x",
            &json!({"type": "ExternalName", "externalName": "y.default.svc.cluster.local"}),
            &json!({}),
        ),
        kube(
            "Kubernetes",
            "y",
            &json!({"type": "ExternalName", "externalName": "x.default.svc.cluster.local"}),
            &json!({}),
        ),
    ]);
    let service = service_of(&world, A);
    assert!(service.headless);
    assert_eq!(
        (service.resolution, service.default_address.as_str()),
        (Resolution::Passthrough, UNSPECIFIED_IP)
    );
    let aliases: Vec<_> = service.aliases.iter().map(|key| key.hostname.as_str()).collect();
    assert_eq!(aliases, ["b.default.svc.cluster.local", "c.default.svc.cluster.local"]);
    let alias = service_of(&world, "x.default.svc.cluster.local");
    assert_eq!(
        (alias.resolution, alias.mesh_external, alias.aliases.len()),
        (Resolution::Alias, true, 0)
    );
}

#[test]
fn an_alias_chain_is_followed_when_its_middle_changes() {
    let external = |name: &str, target: &str| {
        let target = format!("{target}.default.svc.cluster.local");
        kube(
            "Kubernetes",
            name,
            &json!({"type": "ExternalName", "externalName": target}),
            &json!({}),
        )
    };
    let concrete = |name: &str| kube("Kubernetes", name, &json!({"clusterIP": "10.0.0.1"}), &json!({}));
    let mut world = world(vec![
        concrete("a"),
        concrete("d"),
        external("b", "a"),
        external("c", "b"),
    ]);
    assert_eq!(service_of(&world, A).aliases.len(), 2);
    assert_eq!(world.snapshot().host_aliases.len(), 1, "only of the end of the chain");
    world.commit(vec![Change::Upsert(external("b", "d"))]);
    assert_eq!(service_of(&world, A).aliases.len(), 0);
    assert_eq!(service_of(&world, "d.default.svc.cluster.local").aliases.len(), 2);
    // A ServiceEntry for the host of an alias has the aliases of that host.
    let spec = json!({"hosts": ["b.default.svc.cluster.local"], "ports": [80]});
    world.commit(vec![Change::Upsert(entry("e", &spec, Value::Null))]);
    let both = service_of(&world, "b.default.svc.cluster.local");
    let mut counts: Vec<usize> = both.members.iter().map(|one| one.aliases.len()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [0, 1]);
    assert_eq!(service_of(&world, "d.default.svc.cluster.local").aliases.len(), 2);
    world.commit(vec![Change::Upsert(concrete("b"))]);
    assert_eq!(service_of(&world, "d.default.svc.cluster.local").aliases.len(), 0);
    assert_eq!(service_of(&world, "b.default.svc.cluster.local").aliases.len(), 1);
}

#[test]
fn config_scope_is_read_as_annotation_and_as_label() {
    let scope = "networking.istio.io/configScope";
    let private = json!({ scope: "PRIVATE" });
    let labelled = json!({"metadata": {"name": "b", "labels": private, "annotations": {}}, "spec": {}});
    let labelled = raw::Service::parse(meta(Kind::Service, "Kubernetes", &labelled), &labelled).unwrap();
    let world = world(vec![
        kube("Kubernetes", "a", &json!({}), &private),
        labelled.into(),
        kube("Kubernetes", "c", &json!({}), &json!({ scope: "PUBLIC" })),
        kube(
            "Kubernetes",
            "d",
            &json!({}),
            &json!({ scope: "PRIVATE", "networking.istio.io/exportTo": "*" }),
        ),
    ]);
    let export_to = |name: &str| {
        let service = service_of(&world, &format!("{name}.default.svc.cluster.local"));
        ExportTo::clone(&service.export_to)
    };
    let own = ExportTo::Namespaces([Namespace::new("default")].into());
    assert_eq!((export_to("a"), export_to("b")), (own.clone(), own));
    assert_eq!(
        (export_to("c"), export_to("d")),
        (ExportTo::Public, ExportTo::Public),
        "exportTo precedes it"
    );
}

#[test]
fn r21_first_namespaces_of_an_annotation_count() {
    let names: Vec<String> = (0..4_100).map(|number| format!("n{number}")).collect();
    let visibility = |last: &str| {
        let namespaces = format!("{},{last}", names.join(","));
        let annotations = json!({ "networking.istio.io/exportTo": namespaces });
        let world = world(vec![kube("Kubernetes", "a", &json!({}), &annotations)]);
        ExportTo::clone(&service_of(&world, A).export_to)
    };
    let first = names.iter().take(4_000).map(Namespace::new).collect();
    assert_eq!(visibility("other"), ExportTo::Namespaces(first));
    assert_eq!((visibility("*"), visibility("~")), (ExportTo::Public, ExportTo::None));
}

#[test]
fn export_to_defaults_to_the_mesh_config() {
    let plain = kube("Kubernetes", "a", &json!({}), &json!({}));
    let own = kube(
        "Kubernetes",
        "b",
        &json!({}),
        &json!({"networking.istio.io/exportTo": ". , other"}),
    );
    let mut world = world(vec![plain, own]);
    assert_eq!(*service_of(&world, A).export_to, ExportTo::Public);
    let named = ["default", "other"].map(Namespace::new).into();
    assert_eq!(
        *service_of(&world, "b.default.svc.cluster.local").export_to,
        ExportTo::Namespaces(named)
    );
    let object = json!({"metadata": {"name": "istio", "namespace": "istio-system"}});
    let config = Config {
        meta: meta(Kind::MeshConfig, "Kubernetes", &object),
        spec: MeshConfig {
            default_service_export_to: vec!["~".into()],
            ..Default::default()
        },
        status: None,
    };
    world.commit(vec![Change::Upsert(config.into())]);
    assert_eq!(*service_of(&world, A).export_to, ExportTo::None);
}

#[test]
fn empty_elements_of_export_to_name_no_namespace() {
    let own = Namespace::new("default");
    let read = |written: &[&str], default: &[&str]| {
        let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
        export::read(&texts(written), &texts(default), &own)
    };
    let named = ExportTo::Namespaces([Namespace::new("b")].into());
    assert_eq!(read(&["b", ""], &[]), named);
    assert_eq!(read(&["", ""], &["b"]), ExportTo::None, "not the default");
    assert_eq!(read(&[], &[""]), ExportTo::None);
}

fn node(name: &str, ip: &str, zone: &str) -> Row {
    let object = json!({"metadata": {"name": name, "labels": {"zone": zone}},
        "status": {"addresses": [{"type": "InternalIP", "address": "10.1.1.1"},
            {"type": "ExternalIP", "address": ip}]}});
    Row::from(raw::Node::parse(meta(Kind::Node, "Kubernetes", &object), &object).unwrap())
}

#[test]
fn load_balancers_and_nodes_give_external_addresses() {
    let spec = json!({"type": "NodePort", "ports": [{"port": 15443, "nodePort": 30443}]});
    let mut world = world(vec![
        node("n1", "1.1.1.1", "a"),
        node("n2", "2.2.2.2", "b"),
        kube(
            "Kubernetes",
            "a",
            &spec,
            &json!({"traffic.istio.io/nodeSelector": "{\"zone\":\"a\"}"}),
        ),
    ]);
    let cluster = ClusterId::new("Kubernetes");
    assert_eq!(service_of(&world, A).external_addresses[&cluster][..], ["1.1.1.1"]);
    assert_eq!(service_of(&world, A).external_ports[&cluster][&15443], 30443);
    world.commit(vec![Change::Upsert(node("n3", "3.3.3.3", "a"))]);
    assert_eq!(
        service_of(&world, A).external_addresses[&cluster][..],
        ["1.1.1.1", "3.3.3.3"]
    );
}

#[test]
fn services_with_equal_node_selectors_share_their_addresses() {
    let spec = json!({"type": "NodePort", "ports": [{"port": 15443, "nodePort": 30443}]});
    let selecting = |name: &str, selector: &str| {
        kube(
            "Kubernetes",
            name,
            &spec,
            &json!({"traffic.istio.io/nodeSelector": selector}),
        )
    };
    let mut world = world(vec![
        node("n1", "1.1.1.1", "a"),
        node("n2", "2.2.2.2", "b"),
        selecting("a", r#"{"zone":"a"}"#),
        selecting("b", r#"{ "zone": "a" }"#),
        selecting("c", "{}"),
        selecting("d", "invalid"),
    ]);
    let cluster = ClusterId::new("Kubernetes");
    let of = |world: &World, name: &str| {
        let service = service_of(world, &format!("{name}.default.svc.cluster.local"));
        service.external_addresses[&cluster].clone()
    };
    let one = of(&world, "a");
    assert_eq!(one[..], ["1.1.1.1"]);
    assert!(one.ptr_eq(&of(&world, "b")));
    assert_eq!(of(&world, "c")[..], ["1.1.1.1", "2.2.2.2"]);
    assert!(of(&world, "c").ptr_eq(&of(&world, "d")));
    assert_eq!(world.snapshot().selected_nodes.len(), 2);
    // Another node changes only what it is part of.
    world.commit(vec![Change::Upsert(node("n3", "3.3.3.3", "b"))]);
    assert_eq!(of(&world, "d")[..], ["1.1.1.1", "2.2.2.2", "3.3.3.3"]);
    assert!(one.ptr_eq(&of(&world, "a")) && one.ptr_eq(&of(&world, "b")));
    // A list is removed with its last service and added with a new one.
    let remove = |name: &str| Change::Remove(Kind::Service, ObjectKey::new(&cluster, "default", name));
    world.commit(vec![remove("a")]);
    assert!(one.ptr_eq(&of(&world, "b")));
    world.commit(vec![remove("b")]);
    assert_eq!(world.snapshot().selected_nodes.len(), 1);
    world.commit(vec![Change::Upsert(selecting("a", r#"{"zone":"b"}"#))]);
    assert_eq!(of(&world, "a")[..], ["2.2.2.2", "3.3.3.3"]);
}

#[test]
fn external_addresses_depend_on_the_service_type() {
    let status = json!({"loadBalancer": {"ingress": [{"hostname": "lb.com"}, {"ip": "3.3.3.3", "hostname": "x"}, {}]}});
    let addresses = |spec: Value, annotations: Value| {
        let object = json!({"metadata": {"name": "a", "annotations": annotations}, "spec": spec, "status": status});
        let row = raw::Service::parse(meta(Kind::Service, "Kubernetes", &object), &object).unwrap();
        let service = service_of(&world(vec![row.into()]), A);
        let lists = service.external_addresses.values().flat_map(|list| list.iter());
        (
            lists.map(SmolStr::to_string).collect::<Vec<_>>(),
            service.external_ports.len(),
        )
    };
    let both = json!({"type": "LoadBalancer", "externalIPs": ["4.4.4.4"]});
    assert_eq!(
        addresses(both, json!({})),
        (["lb.com", "3.3.3.3", "4.4.4.4"].map(str::to_owned).to_vec(), 0)
    );
    let cluster_ip = json!({"externalIPs": ["4.4.4.4"]});
    assert_eq!(addresses(cluster_ip, json!({})), (vec!["4.4.4.4".to_owned()], 0));
    let node_port = json!({"type": "NodePort", "externalIPs": ["4.4.4.4"], "ports": [{"port": 80, "nodePort": 30080}]});
    let selector = json!({"traffic.istio.io/nodeSelector": "{}"});
    assert_eq!(addresses(node_port.clone(), selector), (vec!["4.4.4.4".to_owned()], 1));
    assert_eq!(addresses(node_port, json!({})), (vec!["4.4.4.4".to_owned()], 0));
}

#[test]
fn fields_of_a_kubernetes_service_are_converted() {
    let spec = json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"], "internalTrafficPolicy": "Local",
        "publishNotReadyAddresses": true, "selector": {"app": "a"}, "ports": [
            {"port": 80, "name": "http", "targetPort": 8080}, {"port": 81, "targetPort": "web"},
            {"port": 82}, {"port": 53, "protocol": "UDP", "name": "http-dns"}, {"port": 83, "name": "x", "appProtocol": "grpc"}]});
    let service = service_of(&world(vec![kube("Kubernetes", "a", &spec, &json!({}))]), A);
    assert_eq!(
        (service.resolution, service.mesh_external),
        (Resolution::ClientSideLb, false)
    );
    assert_eq!(
        service.cluster_vips[&ClusterId::new("Kubernetes")],
        ["10.0.0.1", "fd00::1"]
    );
    assert_eq!(service.default_address, "10.0.0.1");
    assert!(service.node_local && service.publish_not_ready && !service.headless);
    let ports: Vec<_> = service
        .ports
        .iter()
        .map(|port| (port.target.clone(), port.protocol))
        .collect();
    let want = [
        (TargetPort::Number(8080), Protocol::Http),
        (TargetPort::Name("web".into()), Protocol::Unsupported),
        (TargetPort::Number(0), Protocol::Unsupported),
        (TargetPort::Number(0), Protocol::Udp),
        (TargetPort::Number(0), Protocol::Grpc),
    ];
    assert_eq!(ports, want);
    let bare = service_of(&world(vec![kube("Kubernetes", "a", &json!({}), &json!({}))]), A);
    assert_eq!(bare.default_address, UNSPECIFIED_IP);
    assert_eq!(bare.cluster_vips[&ClusterId::new("Kubernetes")], [UNSPECIFIED_IP]);
    // Without a name there is no target.
    let nameless = json!({"type": "ExternalName", "clusterIP": "10.0.0.1"});
    let nameless = service_of(&world(vec![kube("Kubernetes", "a", &nameless, &json!({}))]), A);
    assert_eq!(
        (nameless.resolution, nameless.mesh_external),
        (Resolution::ClientSideLb, false)
    );
}

#[test]
fn traffic_distribution_of_a_service_overrides_its_namespace() {
    const ANNOTATION: &str = "networking.istio.io/traffic-distribution";
    let namespace = |annotations: Value| -> Row {
        let namespace = json!({"metadata": {"name": "default", "annotations": annotations}});
        let meta = meta(Kind::Namespace, "Kubernetes", &namespace);
        raw::Namespace::parse(meta, &namespace).unwrap().into()
    };
    let of = |spec: Value, service: Value, annotations: Value| {
        let rows = vec![namespace(annotations), kube("Kubernetes", "a", &spec, &service)];
        service_of(&world(rows), A).traffic_distribution
    };
    let (node, zone) = (TrafficDistribution::PreferSameNode, TrafficDistribution::PreferSameZone);
    let annotated = |value: &str| json!({ANNOTATION: value});
    let field = |value: &str| json!({"trafficDistribution": value});
    assert_eq!(of(json!({}), json!({}), json!({})), TrafficDistribution::Any);
    for close in ["PreferClose", "PreferSameZone"] {
        assert_eq!(of(field(close), annotated("PreferSameNode"), json!({})), zone);
        assert_eq!(of(json!({}), annotated(close), annotated("PreferSameNode")), zone);
        assert_eq!(of(json!({}), json!({}), annotated(close)), zone);
    }
    assert_eq!(of(field("PreferSameNode"), json!({}), json!({})), node);
    assert_eq!(of(field("Unknown"), annotated("prefersamenode"), json!({})), node);
    assert_eq!(of(json!({}), json!({}), annotated("PreferSameNode")), node);
    // An unknown value overrides the namespace's.
    assert_eq!(
        of(json!({}), annotated("x"), annotated("PreferSameNode")),
        TrafficDistribution::Any
    );
    let of_entry = |annotations: Value| {
        let spec = json!({"hosts": ["x.com"], "ports": [80], "annotations": annotations});
        let mut world = world(vec![
            namespace(annotated("PreferSameNode")),
            entry("e", &spec, Value::Null),
        ]);
        let first = service_of(&world, "x.com").traffic_distribution;
        world.commit(vec![Change::Upsert(namespace(json!({})))]);
        (first, service_of(&world, "x.com").traffic_distribution)
    };
    assert_eq!(
        of_entry(json!({})),
        (node, TrafficDistribution::Any),
        "before and after the annotation is removed"
    );
    assert_eq!(of_entry(annotated("PreferClose")), (zone, zone));
}

#[test]
fn an_entry_has_a_service_for_each_host_and_address() {
    let spec = json!({"hosts": ["x.com", "y.com"], "addresses": ["1.1.1.1/32", "nonsense", "2.0.0.0/8"],
        "ports": [80], "resolution": "STATIC", "exportTo": ["."]});
    let world = world(vec![entry("e", &spec, Value::Null)]);
    let service = service_of(&world, "y.com");
    assert_eq!(service.default_address, "1.1.1.1");
    let addresses: Vec<_> = service.all().map(|one| one.default_address.as_str()).collect();
    assert_eq!(addresses, ["1.1.1.1", "2.0.0.0/8"]);
    assert!(find(&world, "x.com").is_some());
}

/// With the unspecified address, each service of an entry would have the addresses of the endpoints of all of them.
#[test]
fn r21_an_address_of_an_entry_counts_once() {
    let spec = json!({"hosts": ["x.com"], "addresses": ["0.0.0.0", "1.1.1.1", "0.0.0.0/32", "0.0.0.0", "1.1.1.1"],
        "ports": [80], "resolution": "NONE"});
    let world = world(vec![entry("e", &spec, Value::Null)]);
    let service = service_of(&world, "x.com");
    let addresses: Vec<_> = service.all().map(|one| one.default_address.as_str()).collect();
    assert_eq!(addresses, ["0.0.0.0", "1.1.1.1"]);
    let repeated = networking::ServiceEntry {
        addresses: ["1.1.1.1", "1.1.1.1", "nonsense"].map(str::to_owned).to_vec(),
        ..Default::default()
    };
    assert_eq!(entry::address_count(&repeated), 1, "so its endpoints do not repeat");
}

#[test]
fn services_of_an_entry_share_its_lists() {
    let spec = json!({"hosts": ["x.com", "y.com"], "addresses": ["1.1.1.1", "1.1.1.2"], "ports": [80],
        "exportTo": [".", "b"], "subjectAltNames": ["b", "a"]});
    let alias = kube(
        "Kubernetes",
        "alias",
        &json!({"type": "ExternalName", "externalName": "x.com"}),
        &json!({}),
    );
    let mut world = world(vec![entry("e", &spec, Value::Null), alias]);
    let rows = ["x.com", "y.com"].map(|host| service_of(&world, host));
    let all: Vec<&Service> = rows.iter().flat_map(|row| row.all()).collect();
    let first = all[0];
    assert_eq!(
        (all.len(), &*first.service_accounts),
        (4, &["a", "b"].map(SmolStr::new)[..])
    );
    for one in &all {
        assert!(one.service_accounts.ptr_eq(&first.service_accounts));
        assert!(one.export_to.ptr_eq(&first.export_to) && one.selector.ptr_eq(&first.selector));
        assert!(one.labels.ptr_eq(&first.labels));
    }
    assert!(all[1].aliases.ptr_eq(&first.aliases) && first.aliases.len() == 1);
    let key = first.key.clone();
    let visibility = world.snapshot().visibility.get(&Cx::untracked(), &key).cloned();
    let members = &visibility.expect("a row").members;
    assert_eq!(members.len(), 2);
    for one in members {
        assert!(one.export_to.ptr_eq(&first.export_to) && one.aliases.ptr_eq(&first.aliases));
    }
    // With one host left, its own row has the lists, except the aliases.
    let spec = json!({"hosts": ["x.com"], "ports": [80], "subjectAltNames": ["c"]});
    world.commit(vec![Change::Upsert(entry("e", &spec, Value::Null))]);
    let service = service_of(&world, "x.com");
    assert_eq!(*service.service_accounts, ["c"]);
    assert!(service.aliases.ptr_eq(&first.aliases));
    assert!(world.snapshot().entry_lists.is_empty());
}

#[test]
fn entries_of_one_host_merge_and_the_oldest_decides() {
    let spec = |port: u32, resolution: &str| json!({"hosts": ["x.com"], "ports": [port], "resolution": resolution});
    let with = |resolution: &str| {
        let world = world(vec![
            entry("young", &spec(80, resolution), Value::Null),
            entry_created("old", &spec(81, "STATIC"), Value::Null, "2020-01-01T00:00:00Z"),
        ]);
        service_of(&world, "x.com")
    };
    let ports = |service: &Service| service.ports.iter().map(|port| port.number).collect::<Vec<_>>();
    assert_eq!(ports(&with("STATIC")), [81, 80]);
    // Entries that disagree keep their ports separate.
    let service = with("DNS");
    assert_eq!(
        (service.name.as_str(), service.resolution),
        ("old", Resolution::ClientSideLb)
    );
    assert_eq!(ports(&service), [81]);
    assert_eq!(service.all().map(ports).collect::<Vec<_>>(), [[81], [80]]);
}

#[test]
fn a_kubernetes_service_represents_its_host_beside_entries() {
    let old = json!({"hosts": [A], "ports": [81], "resolution": "DNS", "subjectAltNames": ["spiffe://old"]});
    let young = json!({"hosts": [A], "ports": [82], "resolution": "DNS", "subjectAltNames": ["spiffe://young"]});
    let spec = json!({"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80}]});
    let mut rows = vec![
        entry_created("old", &old, Value::Null, "2020-01-01T00:00:00Z"),
        kube("Kubernetes", "a", &spec, &json!({})),
        entry_created("young", &young, Value::Null, "2025-01-01T00:00:00Z"),
    ];
    let ports = |service: &Service| service.ports.iter().map(|port| port.number).collect::<Vec<_>>();
    let expected = service_of(&world(rows.clone()), A);
    assert_eq!((expected.registry, ports(&expected)), (Registry::Kubernetes, vec![80]));
    assert_eq!(expected.all().map(ports).collect::<Vec<_>>(), [[81], [80], [82]]);
    assert!(expected.all().all(|one| *one.service_accounts == ["spiffe://young"]));
    rows.reverse();
    let mut world = world(rows);
    assert_eq!(service_of(&world, A), expected);
    // Without the Service, the oldest entry represents the host, and the ports of the other one are added.
    let key = ObjectKey::new(&ClusterId::new("Kubernetes"), "default", SmolStr::new_static("a"));
    world.commit(vec![Change::Remove(Kind::Service, key)]);
    let rest = service_of(&world, A);
    assert_eq!((rest.name.as_str(), ports(&rest)), ("old", vec![81, 82]));
    let key = ObjectKey::new(&ClusterId::new("Kubernetes"), "default", SmolStr::new_static("old"));
    world.commit(vec![Change::Remove(Kind::ServiceEntry, key)]);
    let last = service_of(&world, A);
    assert_eq!((last.name.as_str(), last.members.len()), ("young", 0));
}

#[test]
fn allocated_addresses_come_from_the_status() {
    let spec = json!({"hosts": ["x.com"], "ports": [80], "resolution": "DNS"});
    let status = json!({"addresses": [{"value": "240.240.0.7", "host": "x.com"},
        {"value": "2001:2::7", "host": "x.com"},
        {"value": "240.240.0.8", "host": "y.com"}]});
    let service = service_of(&world(vec![entry("e", &spec, status.clone())]), "x.com");
    assert_eq!(
        (service.auto_ipv4.as_str(), service.auto_ipv6.as_str()),
        ("240.240.0.7", "2001:2::7")
    );
    let none = json!({"hosts": ["x.com"], "ports": [80], "resolution": "NONE"});
    assert_eq!(
        service_of(&world(vec![entry("e", &none, status)]), "x.com").auto_ipv4,
        ""
    );
}

#[test]
fn computed_addresses_follow_the_set_of_hosts() {
    let mut installation = Installation::default();
    installation.features.pilot_enable_ip_autoallocate = false;
    let spec = |host: &str| json!({"hosts": [host], "ports": [80], "resolution": "DNS"});
    let mut world = world_with(installation, vec![entry("e", &spec("x.com"), Value::Null)]);
    let first = service_of(&world, "x.com").auto_ipv4.clone();
    assert!(first.starts_with("240.240."), "{first}");
    world.commit(vec![Change::Upsert(entry("f", &spec("*.y.com"), Value::Null))]);
    assert_eq!(service_of(&world, "*.y.com").auto_ipv4, "");
    world.commit(vec![Change::Upsert(entry(
        "f",
        &spec("auto1.example.com"),
        Value::Null,
    ))]);
    // Observed in Istio: these hosts have these addresses in any mesh without collisions.
    assert_eq!(service_of(&world, "auto1.example.com").auto_ipv4, "240.240.80.153");
    world.commit(vec![Change::Upsert(entry(
        "g",
        &spec("auto2.example.com"),
        Value::Null,
    ))]);
    assert_eq!(service_of(&world, "auto2.example.com").auto_ipv4, "240.240.27.89");
    assert_eq!(service_of(&world, "x.com").auto_ipv4, first);
}
