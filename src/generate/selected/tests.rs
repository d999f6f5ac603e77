use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::{
    generate::{Proxy, fixture::with_context, patch::PatchRef, proxy::Extensions},
    model::{
        Installation, World,
        fixture::{folder_world, labels},
        policy::TargetService,
        service::{Protocol, Registry},
    },
};

const POD: &str = "
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r1, topology.kubernetes.io/zone: z1}}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web, version: v1}}
spec:
  nodeName: n1
  containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.0.0.1
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}, {name: http-again, port: 81, targetPort: 8080}, {name: tcp, port: 90, targetPort: 9090}]
---
apiVersion: v1
kind: Service
metadata: {name: other, namespace: shop}
spec: {clusterIP: 10.0.0.2, selector: {app: other}, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: inline, namespace: shop}
spec:
  hosts: [inline.example.com]
  resolution: STATIC
  ports: [{number: 443, name: tls, protocol: TLS, targetPort: 8443}]
  endpoints: [{address: 10.1.0.1, labels: {kind: inline}}, {address: 10.1.0.9}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: selecting, namespace: shop}
spec:
  hosts: [selecting.example.com]
  resolution: STATIC
  ports: [{number: 7000, name: tcp, protocol: TCP}]
  workloadSelector: {labels: {app: web}}
";

fn world(config: &str) -> World {
    folder_world(Installation::default(), &[("kube.yaml", POD), ("config.yaml", config)])
}

fn proxy(node_id: &str, metadata: Value) -> Proxy {
    let metadata: BTreeMap<String, Value> = serde_json::from_value(metadata).unwrap();
    Proxy::new(node_id, "", metadata, "r9/z9".into(), Extensions::default()).unwrap()
}

fn web() -> Proxy {
    let metadata = json!({"NAMESPACE": "shop", "CLUSTER_ID": "Kubernetes", "NETWORK": "n", "LABELS": {"app": "stale"}});
    proxy("sidecar~10.1.0.1~web-1.shop~shop.svc.cluster.local", metadata)
}

fn router(namespace: &str) -> Proxy {
    let metadata = json!({"NAMESPACE": namespace, "LABELS": {"app": "gw"}});
    proxy(
        &format!("router~10.1.0.7~gw.{namespace}~{namespace}.svc.cluster.local"),
        metadata,
    )
}

fn class(ctx: &BuildContext, proxy: &Proxy) -> ProxyClass {
    ProxyClass::of(ctx, proxy, &Shared::default())
}

fn targets_of_proxy(world: &World, proxy: &Proxy) -> Vec<String> {
    with_context(world, |ctx| targets_of(&Selected::of(ctx, &class(ctx, proxy))))
}

fn targets_of(selected: &Selected) -> Vec<String> {
    let text = |target: &ServiceTarget| format!("{}:{}->{}", target.service.hostname, target.port, target.target_port);
    selected.targets.iter().map(text).collect()
}

#[test]
fn a_pod_belongs_to_services_that_select_it() {
    let (world, proxy) = (world(""), web());
    with_context(&world, |ctx| {
        let class = class(ctx, &proxy);
        let selected = Selected::of(ctx, &class);
        let expected = [
            "inline.example.com:443->8443",
            "selecting.example.com:7000->7000",
            "web.shop.svc.cluster.local:80->8080",
            "web.shop.svc.cluster.local:90->9090",
        ];
        assert_eq!(targets_of(&selected), expected);
        assert_eq!(selected.labels.get("topology.kubernetes.io/region").unwrap(), "r1");
        assert_eq!(selected.labels.get("app").unwrap(), "web");
        assert_eq!(selected.labels.get("topology.istio.io/network").unwrap(), "n");
        assert_eq!(selected.labels.get("topology.kubernetes.io/zone").unwrap(), "z1");
        assert_eq!(selected.scope, ScopeKey::Default("shop".into()));
    });
}

#[test]
fn an_unknown_workload_has_its_own_labels_and_no_services() {
    let metadata = json!({"NAMESPACE": "shop", "LABELS": {"app": "web"}, "STATIC_LABELS": {"x": "y"}});
    let proxy = proxy("sidecar~10.1.0.5~web-2.shop~shop.svc.cluster.local", metadata);
    with_context(&world(""), |ctx| {
        let class = class(ctx, &proxy);
        let selected = Selected::of(ctx, &class);
        assert_eq!(targets_of(&selected), [""; 0]);
        assert_eq!(selected.labels.get("topology.kubernetes.io/zone").unwrap(), "z9");
        assert_eq!(selected.labels.get("app").unwrap(), "web");
        assert_eq!(selected.labels.get("x"), None);
    });
}

#[test]
fn a_workload_entry_maps_ports() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, namespace: shop}
spec: {address: 10.2.0.1, labels: {app: web}, ports: {http: 1234}}
",
    );
    let proxy = proxy(
        "sidecar~10.2.0.1~vm.shop~shop.svc.cluster.local",
        json!({"NAMESPACE": "shop"}),
    );
    let expected = [
        "selecting.example.com:7000->7000",
        "web.shop.svc.cluster.local:80->1234",
        "web.shop.svc.cluster.local:81->8080",
        "web.shop.svc.cluster.local:90->9090",
    ];
    assert_eq!(targets_of_proxy(&world, &proxy), expected);
}

#[test]
fn the_first_workload_alone_serves_an_entry_with_dns_round_robin() {
    let entry = |name: &str, address: &str| {
        format!(
            "apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {{name: {name}, namespace: shop}}
spec: {{address: {address}, labels: {{app: db}}}}
---
"
        )
    };
    let selecting = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: db, namespace: shop}
spec:
  hosts: [db.example.com]
  resolution: DNS_ROUND_ROBIN
  ports: [{number: 3306, name: tcp, protocol: TCP}]
  workloadSelector: {labels: {app: db}}
";
    let entries = [entry("b", "10.2.0.1"), entry("a", "10.2.0.2")].concat();
    let targets = |resolution: &str, address: &str| {
        let world = world(&(entries.clone() + &selecting.replace("DNS_ROUND_ROBIN", resolution)));
        let id = format!("sidecar~{address}~vm.shop~shop.svc.cluster.local");
        let proxy = proxy(&id, json!({"NAMESPACE": "shop", "LABELS": {"app": "own"}}));
        let app = with_context(&world, |ctx| {
            Selected::of(ctx, &class(ctx, &proxy)).labels.get("app").cloned()
        });
        let app = app.map(|app| app.to_string()).unwrap_or_default();
        (targets_of_proxy(&world, &proxy), app)
    };
    let served = (vec!["db.example.com:3306->3306".to_owned()], "db".to_owned());
    assert_eq!(targets("DNS", "10.2.0.1"), served);
    assert_eq!(targets("DNS_ROUND_ROBIN", "10.2.0.1"), (Vec::new(), "own".to_owned()));
    assert_eq!(targets("DNS_ROUND_ROBIN", "10.2.0.2"), served);
}

/// A Service of the cluster `c2`, with a pod at the address of a machine of the config cluster.
const REMOTE: &str = "
apiVersion: v1
kind: Pod
metadata: {name: api-1, namespace: shop, labels: {app: api}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
status: {phase: Running, podIP: 10.2.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop}
spec: {clusterIP: 10.9.0.1, selector: {app: api}, ports: [{name: http, port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: database, namespace: shop}
spec: {clusterIP: 10.9.0.2, selector: {app: database}, ports: [{name: http, port: 3306}]}
";

const MACHINE: &str = "
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, namespace: shop}
spec: {address: 10.2.0.1, labels: {app: database}}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: listed, namespace: shop}
spec:
  hosts: [listed.example.com]
  resolution: STATIC
  ports: [{number: 443, name: tls, protocol: TLS}]
  endpoints: [{address: 10.2.0.1, labels: {app: listed}}]
";

#[test]
fn a_workload_entry_of_another_cluster_is_not_that_of_a_pod() {
    let files = [("kube-c2.yaml", REMOTE), ("config.yaml", MACHINE)];
    let world = folder_world(Installation::default(), &files);
    let targets = |name: &str, cluster: &str| {
        let id = format!("sidecar~10.2.0.1~{name}.shop~shop.svc.cluster.local");
        let proxy = proxy(&id, json!({"NAMESPACE": "shop", "CLUSTER_ID": cluster}));
        targets_of_proxy(&world, &proxy)
    };
    let listed = "listed.example.com:443->443";
    assert_eq!(targets("api-1", "c2"), ["api.shop.svc.cluster.local:80->8080", listed]);
    // The machine of a cluster whose config is elsewhere.
    let own = ["database.shop.svc.cluster.local:3306->3306", listed];
    assert_eq!(targets("vm", "c2"), own);
}

#[test]
fn a_workload_serves_the_ports_of_its_own_cluster() {
    let service = |ports: &str| {
        format!(
            "apiVersion: v1
kind: Service
metadata: {{name: gw, namespace: shop}}
spec: {{clusterIP: 10.9.0.3, selector: {{app: gw}}, ports: [{ports}]}}
"
        )
    };
    let first = service("{name: http, port: 80, targetPort: 8080}, {name: tls, port: 15443}");
    let second = service("{name: http, port: 81, targetPort: 8080}, {name: https, port: 443, targetPort: 8443}");
    let pod = "
apiVersion: v1
kind: Pod
metadata: {name: gw, namespace: shop, labels: {app: gw}}
spec: {containers: [{name: app}]}
status: {phase: Running, podIP: 10.1.0.7, conditions: [{type: Ready, status: 'True'}]}
";
    let second = format!("{second}---{pod}");
    let files = [("kube.yaml", first.as_str()), ("kube-c2.yaml", second.as_str())];
    let world = folder_world(Installation::default(), &files);
    let host = "gw.shop.svc.cluster.local";
    let expected = [format!("{host}:81->8080"), format!("{host}:443->8443")];
    for kind in ["router", "sidecar"] {
        let id = format!("{kind}~10.1.0.7~gw.shop~shop.svc.cluster.local");
        let workload = proxy(&id, json!({"NAMESPACE": "shop", "CLUSTER_ID": "c2"}));
        assert_eq!(targets_of_proxy(&world, &workload), expected);
    }
}

/// Returns a Service that was created on a day.
fn service_of(name: &str, day: u32, spec: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop, creationTimestamp: '2024-01-0{day}T00:00:00Z'}}
spec: {{{spec}}}
"
    )
}

/// Returns the targets of the workload at 10.2.0.1 in the cluster `c2`, given the objects of the config cluster and
/// those of `c2`.
fn remote_targets(first: &str, objects: &str) -> Vec<ServiceTarget> {
    let files = [("kube.yaml", first), ("kube-c2.yaml", objects)];
    let world = folder_world(Installation::default(), &files);
    let proxy = proxy(
        "sidecar~10.2.0.1~app.shop~shop.svc.cluster.local",
        json!({"NAMESPACE": "shop", "CLUSTER_ID": "c2"}),
    );
    with_context(&world, |ctx| class(ctx, &proxy).targets.to_vec())
}

#[test]
fn a_machine_serves_the_services_of_its_own_cluster() {
    let entry = "---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: app, namespace: shop}
spec: {address: 10.2.0.1, labels: {app: db}}
";
    let service = |ip: &str, port: &str| {
        let spec = format!("clusterIP: {ip}, selector: {{app: db}}, ports: [{port}]");
        service_of("db", 1, &spec)
    };
    let headless = service("None", "{name: http, port: 80}");
    let balanced = service("10.9.0.1", "{name: tcp, port: 5432, targetPort: 6432}");
    let targets = |first: &str, own: &str| remote_targets(&format!("{first}{entry}"), own);
    let found = targets(&headless, &balanced);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].port, found[0].target_port), (5432, 6432));
    let protocol = found[0].own.as_ref().map(|port| port.protocol);
    assert_eq!(protocol, Some(Protocol::Tcp), "not that of another cluster");
    assert!(targets(&balanced, &headless).is_empty());
}

#[test]
fn a_pod_of_a_slice_serves_the_ports_of_its_own_cluster() {
    let objects = "---
apiVersion: v1
kind: Pod
metadata: {name: app, namespace: shop}
spec: {containers: [{name: app}]}
status: {phase: Running, podIP: 10.2.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: listed-1, namespace: shop, labels: {kubernetes.io/service-name: listed}}
addressType: IPv4
ports: [{name: grpc, port: 7070}]
endpoints: [{addresses: [10.2.0.1]}]
";
    let first = service_of("listed", 1, "clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]");
    let own = service_of("listed", 1, "clusterIP: 10.9.0.1, ports: [{name: grpc, port: 70}]");
    let found = remote_targets(&first, &format!("{own}{objects}"));
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].port, found[0].target_port), (70, 7070));
}

#[test]
fn services_of_a_workload_come_in_their_order_in_its_cluster() {
    let pod = "---
apiVersion: v1
kind: Pod
metadata: {name: app, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app}]}
status: {phase: Running, podIP: 10.2.0.1, conditions: [{type: Ready, status: 'True'}]}
";
    let services = |ages: [u32; 2]| {
        let spec = "clusterIP: 10.0.0.1, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]";
        service_of("a", ages[0], spec) + &service_of("b", ages[1], spec)
    };
    let own = services([4, 3]) + pod;
    let found = remote_targets(&services([1, 2]), &own);
    let hosts: Vec<&str> = found.iter().map(|target| target.service.hostname.as_str()).collect();
    assert_eq!(hosts, ["b.shop.svc.cluster.local", "a.shop.svc.cluster.local"]);
}

#[test]
fn a_pod_decides_if_services_do_not_select_workload_entries() {
    let files = [("kube.yaml", REMOTE), ("config.yaml", MACHINE)];
    for (selects, service) in [(true, "database"), (false, "api")] {
        let mut installation = Installation::default();
        installation.features.pilot_enable_k8s_select_workload_entries = selects;
        let world = folder_world(installation, &files);
        let proxy = proxy(
            "sidecar~10.2.0.1~api-1.shop~shop.svc.cluster.local",
            json!({"NAMESPACE": "shop"}),
        );
        let targets = targets_of_proxy(&world, &proxy);
        let host = format!("{service}.shop.svc.cluster.local");
        assert!(targets.iter().any(|target| target.starts_with(&host)), "{targets:?}");
        assert_eq!(targets.len(), 2);
    }
}

#[test]
fn a_node_id_of_another_namespace_names_no_workload_entry() {
    let entry = |name: &str, namespace: &str, port: u32| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: WorkloadEntry\n\
             metadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{address: 10.2.0.1, labels: {{app: web}}, ports: {{http: {port}}}}}\n"
        )
    };
    let entries = [
        entry("a", "shop", 1001),
        entry("vm", "shop", 1002),
        entry("vm", "yard", 1003),
    ];
    let world = world(&entries.join("---\n"));
    for (id, port) in [("vm.shop", 1002), ("vm.yard", 1001)] {
        let proxy = proxy(
            &format!("sidecar~10.2.0.1~{id}~shop.svc.cluster.local"),
            json!({"NAMESPACE": "shop"}),
        );
        let targets = targets_of_proxy(&world, &proxy);
        let expected = format!("web.shop.svc.cluster.local:80->{port}");
        assert!(targets.contains(&expected), "{id}: {targets:?}");
    }
}

#[test]
fn labels_of_a_service_entry_count_in_the_config_cluster() {
    let world = folder_world(Installation::default(), &[("config.yaml", MACHINE)]);
    for (cluster, label) in [("Kubernetes", "listed"), ("", "listed"), ("c2", "own")] {
        let metadata = json!({"NAMESPACE": "shop", "CLUSTER_ID": cluster, "LABELS": {"app": "own"}});
        let proxy = proxy("sidecar~10.2.0.1~vm.shop~shop.svc.cluster.local", metadata);
        with_context(&world, |ctx| {
            let class = class(ctx, &proxy);
            let selected = Selected::of(ctx, &class);
            assert_eq!(selected.labels.get("app").unwrap(), label, "{cluster}");
            assert_eq!(targets_of(&selected), ["listed.example.com:443->443"]);
        });
    }
}

#[test]
fn the_narrowest_sidecar_is_chosen() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: root, namespace: istio-system}
spec: {egress: [{hosts: ['*/*']}]}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: picky, namespace: shop}
spec: {workloadSelector: {labels: {app: web}}, egress: [{hosts: ['*/*']}]}
",
    );
    with_context(&world, |ctx| {
        let scope_of = |proxy: &Proxy| Selected::of(ctx, &class(ctx, proxy)).scope;
        let key = crate::model::fixture::key;
        assert_eq!(scope_of(&web()), ScopeKey::Sidecar("shop".into(), key("shop/picky")));
        let other = proxy(
            "sidecar~10.1.0.5~x.shop~shop.svc.cluster.local",
            json!({"NAMESPACE": "shop"}),
        );
        assert_eq!(
            scope_of(&other),
            ScopeKey::Sidecar("shop".into(), key("istio-system/root"))
        );
        assert_eq!(scope_of(&router("shop")), ScopeKey::Gateway("shop".into()));
    });
}

#[test]
fn filters_and_gateways_come_in_order() {
    let world = world(
        "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: late, namespace: istio-system}
spec: {priority: 5, configPatches: [{applyTo: CLUSTER, patch: {operation: REMOVE}}]}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: own, namespace: edge, creationTimestamp: '2023-01-01T00:00:00Z'}
spec:
  workloadSelector: {labels: {app: gw}}
  configPatches: [{applyTo: CLUSTER, patch: {operation: REMOVE}}]
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: root, namespace: istio-system}
spec:
  configPatches:
  - {applyTo: CLUSTER, match: {context: SIDECAR_INBOUND}, patch: {operation: REMOVE}}
  - {applyTo: LISTENER, patch: {operation: REMOVE}}
  - {applyTo: CLUSTER, match: {context: GATEWAY}, patch: {operation: REMOVE}}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: b, namespace: other}
spec: {selector: {app: gw}, servers: [{port: {number: 80, protocol: HTTP, name: http}, hosts: ['*']}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: a, namespace: other}
spec: {selector: {app: none}, servers: [{port: {number: 80, protocol: HTTP, name: http}, hosts: ['*']}]}
",
    );
    let proxy = router("edge");
    with_context(&world, |ctx| {
        let class = class(ctx, &proxy);
        let selected = Selected::of(ctx, &class);
        let named = |one: &PatchRef| format!("{}[{}]", one.filter, one.index);
        let patches: Vec<_> = selected.patches.clusters.iter().map(named).collect();
        assert_eq!(patches, ["istio-system/root[2]", "edge/own[0]", "istio-system/late[0]"]);
        let gateways: Vec<_> = selected.gateways.iter().map(ToString::to_string).collect();
        assert_eq!(gateways, ["other/b"]);
    });
}

#[test]
fn extensions_of_the_root_namespace_precede_those_of_services() {
    let extension = |name: &str, namespace: &str, month: u32, target: &str| {
        format!(
            "
---
apiVersion: extensions.istio.io/v1alpha1
kind: TrafficExtension
metadata: {{name: {name}, namespace: {namespace}, creationTimestamp: '2024-0{month}-01T00:00:00Z'}}
spec: {{lua: {{inlineCode: x()}}, targetRefs: [{{{target}}}]}}
"
        )
    };
    let gateway = "group: gateway.networking.k8s.io, kind: Gateway, name: w";
    let class = "group: gateway.networking.k8s.io, kind: GatewayClass, name: istio-waypoint";
    let service = "group: '', kind: Service, name: web";
    let config = [
        extension("own", "infra", 3, gateway),
        extension("mesh", "istio-system", 2, class),
        extension("tenant", "shop", 1, service),
    ];
    let waypoint = Subject {
        is_waypoint: true,
        ..Subject::workload("infra".into(), labels(&[(GATEWAY_NAME_LABEL, "w")]))
    };
    let subject = waypoint.with_service(TargetService {
        registry: Registry::Kubernetes,
        namespace: "shop".into(),
        name: "web".into(),
    });
    with_context(&world(&config.concat()), |ctx| {
        let found = attached_extensions(ctx, &subject);
        let found: Vec<_> = found.iter().map(|id| id.object().to_string()).collect();
        assert_eq!(found, ["infra/own", "istio-system/mesh", "shop/tenant"]);
    });
}
