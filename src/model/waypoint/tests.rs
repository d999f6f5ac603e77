use super::*;
use crate::model::{
    Change, Installation,
    features::Features,
    fixture::{self, folder, key},
};

/// Returns an installation with waypoints enabled.
fn installation() -> Installation {
    Installation {
        features: Features {
            pilot_enable_ambient: true,
            pilot_enable_ambient_waypoints: true,
            ..Features::default()
        },
        ..Installation::default()
    }
}

const GATEWAYS: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: for-workloads, labels: {istio.io/waypoint-for: workload}}
spec: {controllerName: istio.io/mesh-controller}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: own, namespace: shop}
spec:
  gatewayClassName: istio-waypoint
  listeners: [{name: mesh, port: 15008, protocol: HBONE}]
status: {addresses: [{type: IPAddress, value: 10.0.0.9}, {type: Hostname, value: own.shop.svc.cluster.local}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: shared, namespace: infra}
spec:
  gatewayClassName: istio-waypoint
  listeners:
  - {name: mesh, port: 15008, protocol: HBONE, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: a}}}}}
status: {addresses: [{type: IPAddress, value: 10.0.0.8}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: pending, namespace: shop}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: workloads, namespace: shop}
spec: {gatewayClassName: for-workloads, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.7}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio.io/use-waypoint: own, team: a}}
---
apiVersion: v1
kind: Namespace
metadata: {name: bare, labels: {team: b}}
---
apiVersion: v1
kind: Service
metadata: {name: own, namespace: shop, labels: {gateway.istio.io/managed: istio.io-mesh-controller}}
spec: {clusterIP: 10.0.0.9, ports: [{port: 15008, name: mesh}]}
";

/// Returns a Service with an address that ends in this number.
fn service(name: &str, namespace: &str, labels: &str, number: u8) -> String {
    format!(
        "\n---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\n\
         spec: {{clusterIP: 10.0.1.{number}, ports: [{{port: 80, name: http}}]}}\n"
    )
}

fn snapshot(services: &[String]) -> std::sync::Arc<MeshSnapshot> {
    let text = GATEWAYS.to_owned() + &services.concat();
    fixture::folder_world(installation(), &[("kube.yaml", &text)]).snapshot()
}

/// Returns the names of the services that use a waypoint.
fn through(mesh: &MeshSnapshot, waypoint: &str) -> Vec<String> {
    through_gateway(mesh, key(waypoint))
}

fn through_gateway(mesh: &MeshSnapshot, gateway: ObjectKey) -> Vec<String> {
    let rows = served(&Cx::untracked(), mesh, &ServingRole::Waypoint(vec![gateway].into()));
    rows.iter()
        .map(|row| format!("{}/{}", row.key.namespace, row.name))
        .collect()
}

#[test]
fn service_labels_override_namespace_labels() {
    let mesh = snapshot(&[
        service("plain", "shop", "", 1),
        service(
            "other",
            "shop",
            "istio.io/use-waypoint: shared, istio.io/use-waypoint-namespace: infra",
            2,
        ),
        service("none", "shop", "istio.io/use-waypoint: none", 3),
        service("missing", "shop", "istio.io/use-waypoint: gone", 4),
        service("early", "shop", "istio.io/use-waypoint: pending", 5),
        service("unsuited", "shop", "istio.io/use-waypoint: workloads", 6),
        service("bare", "bare", "", 7),
        service("case", "shop", "istio.io/use-waypoint: None", 8),
        service("empty", "shop", "istio.io/use-waypoint: ''", 9),
        service(
            "nowhere",
            "shop",
            "istio.io/use-waypoint: own, istio.io/use-waypoint-namespace: ''",
            10,
        ),
    ]);
    // The waypoint's own Service uses none.
    assert_eq!(through(&mesh, "shop/own"), ["shop/plain"]);
    assert_eq!(through(&mesh, "infra/shared"), ["shop/other"]);
    assert!(through(&mesh, "shop/pending").is_empty());
    assert!(through(&mesh, "shop/workloads").is_empty());
}

#[test]
fn services_of_other_clusters_and_imported_hosts_use_no_waypoint() {
    let import = "
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {name: here, namespace: shop}
spec: {type: ClusterSetIP, ips: [240.0.0.1], ports: [{port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: declared, namespace: shop}
spec:
  hosts: [declared.shop.svc.cluster.local]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
";
    let here = service("here", "shop", "", 1);
    let own = [GATEWAYS, &here, import].concat();
    let other = [
        here,
        service("there", "shop", "", 2),
        service("declared", "shop", "", 3),
    ];
    let other = other.concat();
    let mut installation = installation();
    let features = &mut installation.features;
    (features.enable_mcs_host, features.enable_mcs_service_discovery) = (true, true);
    let mesh = fixture::folder_world(installation, &[("kube.yaml", &own), ("kube-c2.yaml", &other)]).snapshot();
    let imported = ServiceKey {
        hostname: "here.shop.svc.clusterset.local".into(),
        namespace: Namespace::new("shop"),
    };
    assert!(mesh.services.get(&Cx::untracked(), &imported).is_some());
    assert_eq!(through(&mesh, "shop/own"), ["shop/declared", "shop/here"]);
}

fn several_networks() -> Installation {
    let mut installation = installation();
    installation.features.ambient_enable_multi_network = true;
    installation
}

/// Returns the key of an object in cluster `c2`.
fn key_in_c2(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey::new(&ClusterId::new_static("c2"), namespace, name)
}

/// A namespace with waypoints in cluster `c2`; the address of one is that of a waypoint in [`GATEWAYS`].
const IN_C2: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio.io/use-waypoint: twin}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: twin, namespace: shop}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: Hostname, value: own.shop.svc.cluster.local}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: by-class, namespace: shop}
spec: {gatewayClassName: for-workloads, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.6}]}
";

#[test]
fn services_that_span_clusters_use_waypoints_of_their_cluster() {
    let other = [
        service("wide", "shop", "scope: global", 1),
        service("narrow", "shop", "", 2),
        service("both", "shop", "scope: global", 3),
        service("away", "shop", "scope: global, istio.io/use-waypoint: own", 4),
        service("unsuited", "shop", "scope: global, istio.io/use-waypoint: by-class", 5),
    ];
    let other = IN_C2.to_owned() + &other.concat();
    let own = GATEWAYS.to_owned() + &service("both", "shop", "scope: global", 3);
    let scopes = "serviceScopeConfigs: [{servicesSelector: {matchLabels: {scope: global}}, scope: GLOBAL}]";
    let files = [
        ("mesh.yaml", scopes),
        ("kube.yaml", own.as_str()),
        ("kube-c2.yaml", other.as_str()),
    ];
    let mesh = fixture::folder_world(several_networks(), &files).snapshot();
    assert_eq!(through(&mesh, "shop/own"), ["shop/both"]);
    assert_eq!(through_gateway(&mesh, key_in_c2("shop", "twin")), ["shop/wide"]);
    let cx = Cx::untracked();
    let class_of_config_cluster = mesh.waypoints.get(&cx, &key_in_c2("shop", "by-class"));
    let traffic = class_of_config_cluster.map(|waypoint| waypoint.traffic);
    assert_eq!(traffic, Some(WaypointTraffic::Workload));

    let mesh = fixture::folder_world(installation(), &files).snapshot();
    assert!(mesh.waypoints.get(&cx, &key_in_c2("shop", "twin")).is_none());
    assert_eq!(through(&mesh, "shop/own"), ["shop/both"]);
}

#[test]
fn an_address_identifies_waypoints_of_one_network() {
    let found = |network: &str| {
        let system = format!(
            "\n---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: istio-system, labels: {{{network}}}}}\n\
             ---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\n\
             metadata: {{name: same-ip, namespace: shop}}\n\
             spec: {{gatewayClassName: istio-waypoint, listeners: [{{name: mesh, port: 15008, protocol: HBONE}}]}}\n\
             status: {{addresses: [{{type: IPAddress, value: 10.0.0.9}}]}}\n"
        );
        let other = IN_C2.to_owned() + &system;
        let files = [("kube.yaml", GATEWAYS), ("kube-c2.yaml", other.as_str())];
        let mesh = fixture::folder_world(several_networks(), &files).snapshot();
        let cx = Cx::untracked();
        let own = ServiceKey {
            hostname: "own.shop.svc.cluster.local".into(),
            namespace: Namespace::new("shop"),
        };
        let own = mesh.services.get(&cx, &own).expect("a service");
        at(&cx, &mesh, &Namespace::new("shop"), &fixture::CLUSTER, [own])
    };
    let (own, twin) = (key("shop/own"), key_in_c2("shop", "twin"));
    let same_ip = key_in_c2("shop", "same-ip");
    assert_eq!(found(""), [own.clone(), same_ip, twin.clone()]);
    assert_eq!(found("topology.istio.io/network: far"), [own, twin]);
}

#[test]
fn the_status_of_a_route_ignores_labels_without_a_name() {
    let mesh = snapshot(&[]);
    let is_named = |name: &str, namespace: &str| {
        let labels = fixture::labels(&[(USE_WAYPOINT, name)]);
        is_named(&Cx::untracked(), &mesh, &labels, &Namespace::new(namespace))
    };
    for (name, expected) in [("none", false), ("None", false), ("", false), ("gone", true)] {
        assert_eq!(is_named(name, "bare"), expected, "{name:?}");
        assert!(is_named(name, "shop"), "the namespace has a waypoint");
    }
}

#[test]
fn a_waypoint_admits_the_namespaces_of_its_listener() {
    let foreign = "istio.io/use-waypoint: own, istio.io/use-waypoint-namespace: shop";
    let of_other_team = "istio.io/use-waypoint: shared, istio.io/use-waypoint-namespace: infra";
    let mesh = snapshot(&[service("a", "bare", foreign, 1), service("b", "bare", of_other_team, 2)]);
    assert!(through(&mesh, "shop/own").is_empty());
    assert!(through(&mesh, "infra/shared").is_empty());
}

#[test]
fn a_waypoint_is_identified_by_its_address() {
    let mesh = snapshot(&[]);
    let cx = Cx::untracked();
    let service = |host: &str, namespace: &str| {
        let key = ServiceKey {
            hostname: host.into(),
            namespace: Namespace::new(namespace),
        };
        mesh.services.get(&cx, &key).expect("a service").clone()
    };
    let own = service("own.shop.svc.cluster.local", "shop");
    let at = |namespace: &str, services: &[Shared<Service>]| {
        at(&cx, &mesh, &Namespace::new(namespace), &fixture::CLUSTER, services)
    };
    assert_eq!(at("shop", std::slice::from_ref(&own)), [key("shop/own")]);
    // A host is unique only within its namespace.
    assert!(at("bare", &[own]).is_empty());
    assert!(at("shop", &[]).is_empty());
}

#[test]
fn the_service_of_a_waypoint_has_its_address_in_the_config_cluster() {
    let service = |name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: infra}}\n\
             spec: {{clusterIP: 10.0.0.8, ports: [{{port: 15008, name: mesh}}]}}\n"
        )
    };
    let (own, other) = ([GATEWAYS, &service("z")].concat(), service("a"));
    let mesh = fixture::folder_world(installation(), &[("kube.yaml", &own), ("kube-c2.yaml", &other)]).snapshot();
    let waypoint = mesh.waypoints.get(&Cx::untracked(), &key("infra/shared"));
    let service = waypoint.and_then(|waypoint| waypoint.service.clone());
    assert_eq!(service.expect("a service").hostname, "z.infra.svc.cluster.local");
}

#[test]
fn a_waypoint_that_becomes_reachable_is_used() {
    let mut world = fixture::folder_world(installation(), &[("kube.yaml", GATEWAYS)]);
    let more = service("early", "shop", "istio.io/use-waypoint: pending", 1);
    let reached = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: pending, namespace: shop}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.6}]}
";
    let mut commit = |text: &str| {
        let rows = folder(&installation(), &[("kube.yaml", text)]);
        world.commit(rows.into_iter().map(Change::Upsert).collect()).snapshot
    };
    assert!(through(&commit(&more), "shop/pending").is_empty());
    assert_eq!(through(&commit(reached), "shop/pending"), ["shop/early"]);
}

#[test]
fn without_ambient_there_are_no_waypoints() {
    let text = GATEWAYS.to_owned() + &service("plain", "shop", "", 1);
    let through_own = |installation: Installation| {
        let mesh = fixture::folder_world(installation, &[("kube.yaml", &text)]).snapshot();
        through(&mesh, "shop/own")
    };
    assert!(through_own(Installation::default()).is_empty());
    assert_eq!(through_own(installation()), ["shop/plain"]);
}

/// Workloads of each kind in a namespace with a waypoint for workloads.
const WORKLOADS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: web, labels: {istio.io/use-waypoint: any, istio.io/use-waypoint-namespace: shop}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: any, namespace: shop}
spec:
  gatewayClassName: for-workloads
  listeners: [{name: mesh, port: 15008, protocol: HBONE, allowedRoutes: {namespaces: {from: All}}}]
status: {addresses: [{type: IPAddress, value: 10.0.0.6}]}
---
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: web}
status: {phase: Pending, podIP: 10.1.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: old, namespace: web, creationTimestamp: '2001-01-01T00:00:00Z'}
status: {phase: Running, podIP: 10.1.0.2}
---
apiVersion: v1
kind: Pod
metadata: {name: finished, namespace: web}
status: {phase: Succeeded, podIP: 10.1.0.3}
---
apiVersion: v1
kind: Pod
metadata: {name: without, namespace: web, labels: {istio.io/use-waypoint: none}}
status: {phase: Running, podIP: 10.1.0.4}
---
apiVersion: v1
kind: Pod
metadata: {name: unsuited, namespace: shop, labels: {istio.io/use-waypoint: own}}
status: {phase: Running, podIP: 10.1.0.5}
---
apiVersion: v1
kind: Pod
metadata:
  name: any-0
  namespace: shop
  labels: {gateway.networking.k8s.io/gateway-name: any, istio.io/use-waypoint: any}
status: {phase: Running, podIP: 10.1.0.6}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: machine, namespace: web}
spec: {address: 10.1.0.7}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: named, namespace: web}
spec: {address: machine.example.com}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: external, namespace: web}
spec:
  hosts: [external.example.com]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints:
  - {address: 10.1.0.9}
  - {address: 10.1.0.8}
  - {address: 10.1.0.10, labels: {istio.io/use-waypoint: none}}
";

#[test]
fn workloads_use_waypoints_for_workloads() {
    let text = [GATEWAYS, "---", WORKLOADS].concat();
    let mesh = fixture::folder_world(installation(), &[("kube.yaml", &text)]).snapshot();
    let cx = Cx::untracked();
    let at = |waypoint: &str| workloads::addresses(&cx, &mesh, &[key(waypoint)]);
    // The oldest first, then pods, ServiceEntries and WorkloadEntries.
    let want = ["10.1.0.2", "10.1.0.1", "10.1.0.8", "10.1.0.9", "10.1.0.7"];
    assert_eq!(at("shop/any"), Some(want.map(SmolStr::new).to_vec()));
    assert_eq!(at("shop/own"), None);
}

#[test]
fn pods_of_other_clusters_in_the_network_use_waypoints_of_their_cluster() {
    let found = |installation: Installation, network: &str| {
        let other = format!(
            "{IN_C2}---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: istio-system, labels: {{{network}}}}}\n\
             ---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: there, namespace: shop, labels: {{istio.io/use-waypoint: by-class}}}}\n\
             status: {{phase: Running, podIP: 10.1.0.20}}\n"
        );
        let files = [("kube.yaml", GATEWAYS), ("kube-c2.yaml", other.as_str())];
        let mesh = fixture::folder_world(installation, &files).snapshot();
        workloads::addresses(&Cx::untracked(), &mesh, &[key_in_c2("shop", "by-class")])
    };
    assert_eq!(found(several_networks(), ""), Some(vec!["10.1.0.20".into()]));
    assert_eq!(found(several_networks(), "topology.istio.io/network: far"), None);
    assert_eq!(found(installation(), ""), None);
}

#[test]
fn workloads_of_other_networks_use_no_waypoint() {
    const DECLARED: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: near}}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: far, namespace: shop, labels: {istio.io/use-waypoint: workloads}}
spec: {address: 10.1.0.21, network: far}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: near, namespace: shop, labels: {istio.io/use-waypoint: workloads}}
spec: {address: 10.1.0.22, network: near}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: external, namespace: shop}
spec:
  hosts: [external.example.com]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints:
  - {address: 10.1.0.26, labels: {istio.io/use-waypoint: workloads}}
  - {address: 10.1.0.25, labels: {istio.io/use-waypoint: workloads}, network: far}
  - {address: 10.1.0.24, labels: {istio.io/use-waypoint: workloads}}
  - {address: 10.1.0.23, labels: {istio.io/use-waypoint: workloads}, network: near}
";
    let text = [GATEWAYS, "---", DECLARED].concat();
    let found = |installation: Installation| {
        let mesh = fixture::folder_world(installation, &[("kube.yaml", &text)]).snapshot();
        workloads::addresses(&Cx::untracked(), &mesh, &[key("shop/workloads")]).unwrap_or_default()
    };
    assert_eq!(found(several_networks()), ["10.1.0.23", "10.1.0.26", "10.1.0.22"]);
    assert_eq!(found(installation()).len(), 6, "with one network");
}

#[test]
fn endpoints_of_hosts_that_others_declare_use_no_waypoint() {
    let entry = |name: &str, year: u16, hosts: &str, number: u8| {
        format!(
            "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, namespace: shop, creationTimestamp: '{year}-01-01T00:00:00Z'}}
spec:
  hosts: [{hosts}]
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  resolution: STATIC
  endpoints: [{{address: 10.1.0.{number}, labels: {{istio.io/use-waypoint: workloads}}}}]
"
        )
    };
    let entries = [
        entry("old", 2001, "a.example.com", 1),
        entry("same", 2002, "a.example.com", 2),
        entry("more", 2003, "'a.example.com', 'b.example.com'", 3),
    ];
    let mesh = snapshot(&entries);
    let found = workloads::addresses(&Cx::untracked(), &mesh, &[key("shop/workloads")]);
    assert_eq!(found, Some(["10.1.0.1", "10.1.0.3"].map(SmolStr::new).to_vec()));
}

#[test]
fn a_pod_that_changes_its_label_changes_its_waypoint() {
    let text = [GATEWAYS, "---", WORKLOADS].concat();
    let mut world = fixture::folder_world(installation(), &[("kube.yaml", &text)]);
    let pod = |label: &str| {
        format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: without, namespace: web, labels: {{{label}}}}}
status: {{phase: Running, podIP: 10.1.0.4}}
"
        )
    };
    let mut is_behind = |text: &str| {
        let rows = folder(&installation(), &[("kube.yaml", text)]);
        let mesh = world.commit(rows.into_iter().map(Change::Upsert).collect()).snapshot;
        let found = workloads::addresses(&Cx::untracked(), &mesh, &[key("shop/any")]);
        found.expect("workloads").contains(&SmolStr::new("10.1.0.4"))
    };
    assert!(is_behind(&pod("")));
    assert!(!is_behind(&pod("istio.io/use-waypoint: gone")));
    assert!(is_behind(&pod("app: web")));
}

#[test]
fn r21_services_are_read_once_for_all_waypoints() {
    let mut world = fixture::folder_world(installation(), &[("kube.yaml", GATEWAYS)]);
    let mut put = |object: &str| {
        let rows = folder(&installation(), &[("objects.yaml", object)]);
        let mesh = world.commit(rows.into_iter().map(Change::Upsert).collect()).snapshot;
        let cx = Cx::untracked();
        let waypoint = mesh
            .waypoints
            .get(&cx, &key("shop/workloads"))
            .expect("it has an address");
        let host = waypoint.service.as_ref().map(|service| service.hostname.to_string());
        let row = mesh.services_at_gateways.get(&cx, &Namespace::new("shop")).cloned();
        (host, row)
    };
    let at = |name: &str, address: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{clusterIP: {address}, ports: [{{port: 15008, name: mesh}}]}}\n"
        )
    };
    let entry = |host: &str, address: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e, namespace: shop}}\nspec:\n  \
             hosts: [{host}]\n  addresses: [10.0.3.1, {address}]\n  \
             ports: [{{number: 80, name: http, protocol: HTTP}}]\n"
        )
    };
    let host = |name: &str| Some(format!("{name}.shop.svc.cluster.local"));
    let (found, row) = put(&at("other", "10.0.2.1"));
    assert!(found.is_none() && row.is_none(), "no service has the address");
    assert_eq!(put(&at("first", "10.0.0.7")).0, host("first"));
    assert_eq!(put(&at("again", "10.0.0.7")).0, host("again"), "the first one counts");
    assert_eq!(put(&entry("a.test", "10.0.0.7")).0, Some("a.test".to_owned()));
    let (found, row) = put(&entry("z.test", "10.0.0.7"));
    assert_eq!(found, host("again"));
    let row = row.expect("services have the address");
    let (_, after) = put(&at("other", "10.0.2.2"));
    assert!(
        after.is_some_and(|after| after.ptr_eq(&row)),
        "waypoints do not depend on other services"
    );
    assert_eq!(put(&at("again", "10.0.2.3")).0, host("first"));
}
