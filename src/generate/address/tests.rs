pub(crate) mod churn;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use smol_str::SmolStr;

use crate::{
    api::Kind,
    generate::{Proxy, RequestedResources, ResourceType, fixture, requested::WILDCARD, store::ConfigStore},
    model::{Change, World, features::Features, fixture as mesh, installation::Installation},
};

/// Namespaces, and a node in a zone.
const BASE: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: a}
---
apiVersion: v1
kind: Namespace
metadata: {name: istio-system}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: z}}
";

pub(crate) fn ambient() -> Installation {
    Installation {
        features: Features {
            pilot_enable_ambient: true,
            ..Features::default()
        },
        ..Installation::default()
    }
}

pub(crate) fn ztunnel() -> Proxy {
    let node = "ztunnel~10.0.0.1~z.istio-system~istio-system.svc.cluster.local";
    fixture::client(node, &json!({"NODE_NAME": "n1"}))
}

/// Requests resources of a type by name.
fn request(resource_type: ResourceType, names: &[&str]) -> RequestedResources {
    let names = names.iter().map(SmolStr::new).collect();
    RequestedResources::new([(resource_type, names)])
}

/// Returns the workloads and services of a mesh by name.
fn all_of(installation: Installation, objects: &str) -> BTreeMap<String, Value> {
    let names = request(ResourceType::Address, &[WILDCARD]);
    // Objects may have a namespace `a` of their own.
    let declares_a = objects.contains("kind: Namespace\nmetadata: {name: a,");
    let base = BASE
        .split_once("---\n")
        .filter(|_| declares_a)
        .map_or(BASE, |(_, rest)| rest);
    let files = [("base.yaml", base), ("objects.yaml", objects)];
    let store = fixture::store_of_requested(installation, &files, vec![ztunnel()], &names);
    sent(&store, ResourceType::Address)
}

fn all(objects: &str) -> BTreeMap<String, Value> {
    all_of(ambient(), objects)
}

fn sent(store: &ConfigStore, resource_type: ResourceType) -> BTreeMap<String, Value> {
    let names = fixture::names(store, 0, resource_type).into_iter();
    names
        .map(|name| (name.clone(), fixture::resource(store, 0, resource_type, &name)))
        .collect()
}

/// Returns the resources that a ztunnel on node `n1` receives for these names.
fn on_demand(objects: &str, names: &[&str]) -> Vec<String> {
    let files = [("base.yaml", BASE), ("objects.yaml", objects)];
    let names = request(ResourceType::Address, names);
    let store = fixture::store_of_requested(ambient(), &files, vec![ztunnel()], &names);
    fixture::names(&store, 0, ResourceType::Address)
}

fn pod(name: &str, labels: &str, ip: &str, more: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: a, labels: {{{labels}}}}}\n\
         spec: {{serviceAccountName: sa, nodeName: n1}}\n\
         status: {{phase: Running, podIP: {ip}, conditions: [{{type: Ready, status: 'True'}}]}}\n{more}\n"
    )
}

/// Returns the workload of pod `a/p`.
fn pod_workload(object: &str) -> Value {
    all(object)
        .remove("Kubernetes//Pod/a/p")
        .map_or(Value::Null, |mut one| one["workload"].take())
}

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: a}\n";

#[test]
fn the_state_of_a_pod_decides_its_health() {
    let of = |metadata: &str, status: &str| {
        let object = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, namespace: a{metadata}}}\n\
             spec: {{serviceAccountName: sa}}\nstatus: {{{status}}}\n"
        );
        let workload = pod_workload(&object);
        (!workload.is_null()).then(|| workload["status"].as_str().unwrap_or("HEALTHY").to_owned())
    };
    let (healthy, unhealthy) = (Some("HEALTHY".to_owned()), Some("UNHEALTHY".to_owned()));
    let ready = "podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]";
    assert_eq!(of("", &format!("phase: Running, {ready}")), healthy);
    assert_eq!(
        of(
            "",
            "phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'False'}]"
        ),
        unhealthy
    );
    assert_eq!(of("", "phase: Pending, podIP: 10.1.0.1"), unhealthy);
    assert_eq!(of("", "phase: Pending"), None, "a pod without an address");
    assert_eq!(of("", &format!("phase: Failed, {ready}")), None);
    assert_eq!(of("", &format!("phase: Succeeded, {ready}")), None);
    let deleted = ", deletionTimestamp: '2024-01-01T00:00:00Z'";
    assert_eq!(of(deleted, &format!("phase: Running, {ready}")), unhealthy);
    assert_eq!(of("", "phase: Running, podIP: garbage"), None);
}

#[test]
fn all_fields_of_a_pod_are_sent() {
    let object = format!(
        "{POD}spec: {{serviceAccountName: sa, nodeName: n1, hostNetwork: true}}\n\
         status: {{phase: Running, podIPs: [{{ip: 10.1.0.1}}, {{ip: '2001:db8::1'}}]}}\n"
    );
    let object = object.replace(
        "namespace: a}",
        "namespace: a, labels: {app: x, version: v2, networking.istio.io/tunnel: 'http,other'}, \
         annotations: {ambient.istio.io/redirection: enabled}}",
    );
    let want = json!({
        "uid": "Kubernetes//Pod/a/p",
        "name": "p",
        "namespace": "a",
        "addresses": ["CgEAAQ==", "IAENuAAAAAAAAAAAAAAAAQ=="],
        "tunnelProtocol": "HBONE",
        "nativeTunnel": true,
        "serviceAccount": "sa",
        "node": "n1",
        "canonicalName": "x",
        "canonicalRevision": "v2",
        "workloadType": "POD",
        "workloadName": "p",
        "status": "UNHEALTHY",
        "clusterId": "Kubernetes",
        "locality": {"region": "r", "zone": "z"},
        "networkMode": "HOST_NETWORK",
    });
    assert_eq!(pod_workload(&object), want);
}

/// Returns the ports of a workload by service.
fn services(workload: &Value) -> Value {
    workload.get("services").cloned().unwrap_or(Value::Null)
}

#[test]
fn ports_of_pods_follow_names() {
    let objects = "
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a}
spec:
  clusterIP: None
  selector: {app: x}
  ports: [{name: web, port: 80, targetPort: web}, {name: gone, port: 81, targetPort: gone}, {name: n, port: 82}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: e, namespace: a}
spec:
  hosts: [e.com]
  resolution: STATIC
  workloadSelector: {labels: {app: x}}
  ports: [{number: 90, name: web, protocol: TCP}, {number: 91, name: t, protocol: TCP, targetPort: 7}]
";
    let spec = "spec: {containers: [{ports: [{name: web, containerPort: 53, protocol: UDP}]}, {ports: [{name: web, \
                containerPort: 8080}, {name: gone, containerPort: 1, protocol: UDP}]}]}\n\
                status: {phase: Running, podIP: 10.1.0.1}\n";
    let pod = POD.replace("namespace: a}", "namespace: a, labels: {app: x}}");
    let found = all(&format!("{objects}---\n{pod}{spec}"));
    let want = json!({
        "a/s.a.svc.cluster.local": {"ports": [{"servicePort": 80, "targetPort": 8080}, {"servicePort": 82}]},
        "a/e.com": {"ports": [{"servicePort": 90, "targetPort": 8080}, {"servicePort": 91, "targetPort": 7}]},
    });
    assert_eq!(services(&found["Kubernetes//Pod/a/p"]["workload"]), want);
    let service = &found["a/s.a.svc.cluster.local"]["service"];
    assert_eq!(service.get("addresses"), None, "a headless Service has no addresses");
    assert_eq!(
        service["ports"][0],
        json!({"servicePort": 80}),
        "a named target port differs between pods"
    );
}

#[test]
fn slices_without_pods_are_workloads() {
    let objects = "
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a}
spec: {clusterIP: 10.0.0.9, ports: [{name: web, port: 80, targetPort: 8080}, {name: dns, port: 53, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s-1, namespace: a, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{name: web, port: 9090, protocol: TCP}, {name: dns, port: 5353, protocol: UDP}]
endpoints:
- {addresses: [192.0.2.1]}
- {addresses: [192.0.2.2], conditions: {ready: false}}
- {addresses: [192.0.2.1], conditions: {ready: false}}
- {addresses: [10.1.0.1], targetRef: {kind: Pod, name: p, namespace: a}}
";
    let found = all(&format!("{objects}{}", pod("p", "app: x", "10.1.0.1", "")));
    let uid = "Kubernetes/discovery.k8s.io/EndpointSlice/a/s-1/192.0.2.1";
    let ports = json!({"a/s.a.svc.cluster.local": {"ports": [{"servicePort": 80, "targetPort": 9090}]}});
    let want = json!({
        "uid": uid,
        "name": "s-1",
        "namespace": "a",
        "addresses": ["wAACAQ=="],
        "clusterId": "Kubernetes",
        "networkMode": "HOST_NETWORK",
        "services": ports,
    });
    assert_eq!(found[uid]["workload"], want);
    let second = &found["Kubernetes/discovery.k8s.io/EndpointSlice/a/s-1/192.0.2.2"]["workload"];
    assert_eq!(second["status"], "UNHEALTHY");
    let own = services(&found["Kubernetes//Pod/a/p"]["workload"]);
    let by_target = json!([{"servicePort": 80, "targetPort": 8080}, {"servicePort": 53}]);
    assert_eq!(
        own["a/s.a.svc.cluster.local"]["ports"], by_target,
        "a pod that a slice refers to"
    );
    let slices = found.keys().filter(|name| name.contains("EndpointSlice")).count();
    assert_eq!(slices, 2);
}

#[test]
fn mirrored_slices_are_workloads() {
    let objects = "
apiVersion: v1
kind: Service
metadata: {name: derived-s, namespace: a}
spec: {clusterIP: 10.0.0.9, ports: [{name: web, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: s-1
  namespace: a
  labels: {kubernetes.io/service-name: derived-s, multicluster.kubernetes.io/service-name: s}
addressType: IPv4
ports: [{name: web, port: 8080, protocol: TCP}]
endpoints: [{addresses: [192.0.2.1]}]
";
    let found = all(objects);
    let workload = &found["Kubernetes/discovery.k8s.io/EndpointSlice/a/s-1/192.0.2.1"]["workload"];
    let ports = json!([{"servicePort": 80, "targetPort": 8080}]);
    assert_eq!(services(workload)["a/derived-s.a.svc.cluster.local"]["ports"], ports);
}

#[test]
fn slices_refer_to_pods_by_uid() {
    let pod = pod("p", "app: x", "10.1.0.1", "").replace("name: p,", "name: p, uid: u1,");
    let of = |selector: &str, namespace: &str, reference: &str| {
        let objects = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: {namespace}}}\n\
             spec: {{clusterIP: 10.0.0.9, selector: {selector}, ports: [{{name: web, port: 80}}]}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: s-1, namespace: {namespace}, labels: {{kubernetes.io/service-name: s}}}}\n\
             addressType: IPv4\nports: [{{name: web, port: 80, protocol: TCP}}]\n\
             endpoints: [{{addresses: [10.1.0.1], targetRef: {{kind: Pod, name: p, namespace: a{reference}}}}}]\n"
        );
        let found = all(&[pod.as_str(), &objects].concat());
        let services = services(&found["Kubernetes//Pod/a/p"]["workload"]);
        services.as_object().map_or(0, serde_json::Map::len)
    };
    let own = ", uid: u1";
    // Without a selector, or with one that does not match.
    for selector in ["{}", "{app: other}"] {
        for namespace in ["a", "b"] {
            assert_eq!(of(selector, namespace, own), 1, "{selector} in {namespace}");
            assert_eq!(of(selector, namespace, ", uid: u2"), 0, "an earlier pod of the name");
            assert_eq!(of(selector, namespace, ""), 0);
        }
    }
    assert_eq!(of("{app: x}", "a", ""), 1, "the selector matches");
    assert_eq!(of("{app: x}", "b", own), 1, "a selector of another namespace");
    assert_eq!(of("{app: x}", "b", ""), 0);
}

#[test]
fn ports_of_workload_entries_follow_names() {
    let objects = "
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a}
spec:
  clusterIP: 10.0.0.9
  selector: {app: x}
  ports: [{name: a, port: 80, targetPort: named}, {name: b, port: 81, targetPort: 1}, {name: c, port: 82, targetPort: none}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: e, namespace: a}
spec:
  hosts: [e.com]
  resolution: STATIC
  workloadSelector: {labels: {app: x}}
  ports: [{number: 90, name: b, protocol: HTTPS}, {number: 91, name: t, protocol: GRPC, targetPort: 7}]
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: w, namespace: a, labels: {app: x}, annotations: {istio.io/autoRegistrationGroup: g}}
spec: {address: vm.example.com, network: other, weight: 3, locality: r/z/s, ports: {named: 5, b: 6}}
";
    let found = all(objects);
    let workload = &found["Kubernetes/networking.istio.io/WorkloadEntry/a/w"]["workload"];
    let want = json!({
        "a/s.a.svc.cluster.local": {"ports": [
            {"servicePort": 80, "targetPort": 5},
            {"servicePort": 81, "targetPort": 6},
        ]},
        "a/e.com": {"ports": [{"servicePort": 90, "targetPort": 6}, {"servicePort": 91, "targetPort": 7}]},
    });
    assert_eq!(services(workload), want);
    for (field, want) in [
        ("hostname", json!("vm.example.com")),
        ("network", json!("other")),
        ("capacity", json!(3)),
        ("locality", json!({"region": "r", "zone": "z", "subzone": "s"})),
        ("workloadName", json!("g")),
        ("canonicalName", json!("x")),
    ] {
        assert_eq!(workload[field], want, "{field}");
    }
    let entry = &found["a/e.com"]["service"];
    let protocols: Vec<&Value> = entry["ports"]
        .as_array()
        .expect("ports")
        .iter()
        .map(|it| &it["appProtocol"])
        .collect();
    assert_eq!(protocols, [&json!("TLS"), &json!("GRPC")]);
}

fn entry(namespace: &str, name: &str, year: u32, more: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
         metadata: {{name: {name}, namespace: {namespace}, creationTimestamp: '{year}-01-01T00:00:00Z'}}\n\
         spec: {{hosts: [h.com], resolution: STATIC, ports: [{{number: 80, name: http, protocol: HTTP}}], {more}}}\n"
    )
}

#[test]
fn one_service_of_a_host_counts_in_each_namespace() {
    let endpoint = |ip: &str| format!("endpoints: [{{address: {ip}}}]");
    let objects = [
        entry("a", "young", 2022, &endpoint("192.0.2.1")),
        entry("a", "old", 2021, &endpoint("192.0.2.2")),
        entry("b", "oldest", 2020, &endpoint("192.0.2.3")),
    ];
    let found = all(&objects.concat());
    let uid = |name: &str| format!("Kubernetes/networking.istio.io/ServiceEntry/{name}");
    let want = [
        uid("a/old/192.0.2.2"),
        uid("b/oldest/192.0.2.3"),
        "a/h.com".to_owned(),
        "b/h.com".to_owned(),
    ];
    assert_eq!(
        found.keys().cloned().collect::<Vec<_>>(),
        want,
        "endpoints of the young one are not sent"
    );
    assert_eq!(found["a/h.com"]["service"]["name"], "old");
    assert_eq!(found["a/h.com"]["service"].get("canonical"), None);
    assert_eq!(found["b/h.com"]["service"]["canonical"], true);

    let service = "
---
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a}
spec: {clusterIP: 10.0.0.9, ports: [{name: web, port: 80}]}
";
    let host = "s.a.svc.cluster.local";
    let overridden = entry("a", "e", 2000, "").replace("h.com", host);
    let elsewhere = entry("b", "e", 2000, "").replace("h.com", host);
    let found = all(&[service, &overridden, &elsewhere].concat());
    assert_eq!(
        found["a/s.a.svc.cluster.local"]["service"]["name"], "s",
        "a Service precedes ServiceEntries"
    );
    assert_eq!(found["b/s.a.svc.cluster.local"]["service"].get("canonical"), None);
}

#[test]
fn service_entries_have_addresses_and_endpoints() {
    let service = |more: &str| {
        let found = all(&entry("a", "e", 2020, more));
        found.get("a/h.com").map_or(Value::Null, |one| one["service"].clone())
    };
    let ranges = service("addresses: [10.9.0.0/16, 10.8.0.1]");
    let want = json!([{"address": "CgkAAA==", "length": 16}, {"address": "CggAAQ=="}]);
    assert_eq!(ranges["addresses"], want);
    let passthrough = json!({"mode": "PASSTHROUGH", "healthPolicy": "ALLOW_ALL"});
    assert_eq!(service("").get("loadBalancing"), None);
    let none = entry("a", "e", 2020, "").replace("STATIC", "NONE");
    assert_eq!(all(&none)["a/h.com"]["service"]["loadBalancing"], passthrough);

    let endpoints = "endpoints: [{address: 192.0.2.1, network: n1, weight: 2}, {address: 192.0.2.2}]";
    let found = all(&entry("a", "e", 2020, endpoints));
    let workload = |address: &str| {
        found[&format!("Kubernetes/networking.istio.io/ServiceEntry/a/e/{address}")]["workload"].clone()
    };
    assert_eq!(workload("192.0.2.1")["capacity"], 2);
    assert_eq!(
        workload("192.0.2.2")["network"],
        "n1",
        "the network of the endpoint before it"
    );
    assert_eq!(workload("192.0.2.2")["workloadName"], "e");

    let dns = entry("a", "e", 2020, "").replace("STATIC", "DNS");
    let found = all(&dns);
    let workload = &found["Kubernetes/networking.istio.io/ServiceEntry/a/e/h.com"]["workload"];
    assert_eq!(
        workload["hostname"], "h.com",
        "a host that is resolved has itself as endpoint"
    );
    let named = entry("a", "e", 2020, "endpoints: [{address: db.com}]").replace("STATIC", "DNS");
    let found = all(&named);
    let workload = &found["Kubernetes/networking.istio.io/ServiceEntry/a/e/db.com"]["workload"];
    assert_eq!(workload["hostname"], "db.com");
}

#[test]
fn services_have_load_balancing_and_families() {
    let service = |more: &str, annotations: &str| {
        let object = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: a, annotations: {{{annotations}}}}}\n\
             spec: {{clusterIPs: [10.0.0.9, '2001:db8::9'], clusterIP: 10.0.0.9, ports: [{{port: 80}}], {more}}}\n"
        );
        all(&object)["a/s.a.svc.cluster.local"]["service"].clone()
    };
    let of = |more: &str| service(more, "").get("loadBalancing").cloned().unwrap_or_default();
    let strict = json!({"routingPreference": ["NODE"], "mode": "STRICT"});
    let zone = json!({"routingPreference": ["NETWORK", "REGION", "ZONE"], "mode": "FAILOVER"});
    let node = json!({"routingPreference": ["NETWORK", "REGION", "ZONE", "SUBZONE", "NODE"], "mode": "FAILOVER"});
    assert_eq!(of(""), Value::Null);
    assert_eq!(
        of("internalTrafficPolicy: Local, trafficDistribution: PreferClose"),
        strict
    );
    assert_eq!(of("trafficDistribution: PreferSameZone"), zone);
    assert_eq!(of("trafficDistribution: PreferSameNode"), node);
    assert_eq!(
        of("publishNotReadyAddresses: true"),
        json!({"healthPolicy": "ALLOW_ALL"})
    );
    let annotated = service("", "networking.istio.io/traffic-distribution: PreferClose");
    assert_eq!(annotated["loadBalancing"], zone);
    let dual = service("ipFamilies: [IPv4, IPv6]", "");
    assert_eq!(dual["ipFamilies"], "DUAL");
    assert_eq!(
        dual["addresses"],
        json!([{"address": "CgAACQ=="}, {"address": "IAENuAAAAAAAAAAAAAAACQ=="}])
    );
    assert_eq!(service("ipFamilies: [IPv6]", "")["ipFamilies"], "IPV6_ONLY");
    let external = "apiVersion: v1\nkind: Service\nmetadata: {name: s, namespace: a}\n\
                    spec: {type: ExternalName, externalName: x.com}\n";
    assert!(all(external).is_empty());
}

/// A waypoint in a namespace, with a pod.
fn waypoint(namespace: &str, traffic: &str, from: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\n\
         metadata: {{name: wp, namespace: {namespace}, labels: {{istio.io/waypoint-for: {traffic}}}}}\n\
         spec:\n  gatewayClassName: istio-waypoint\n  listeners:\n  \
         - {{name: mesh, port: 15008, protocol: HBONE, allowedRoutes: {{namespaces: {{from: {from}}}}}}}\n\
         status: {{addresses: [{{type: IPAddress, value: 10.0.0.5}}, {{type: Hostname, value: wp.svc}}]}}\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: wp-0, namespace: {namespace}, labels: \
         {{gateway.networking.k8s.io/gateway-name: wp}}}}\nspec: {{serviceAccountName: wp-sa}}\n\
         status: {{phase: Running, podIP: 10.1.9.9}}\n"
    )
}

/// Returns the waypoint namespaces of pod `a/p` and of Service `a/s`, of which both have these labels.
fn waypoints(labels: &str, others: &str) -> (Option<String>, Option<String>) {
    let service = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: a, labels: {{{labels}}}}}\n\
         spec: {{clusterIP: 10.0.0.9, ports: [{{port: 80}}]}}\n"
    );
    let found = all(&[service.as_str(), &pod("p", labels, "10.1.0.1", ""), others].concat());
    let namespace = |of: &Value| of["waypoint"]["hostname"]["namespace"].as_str().map(str::to_owned);
    let workload = namespace(&found["Kubernetes//Pod/a/p"]["workload"]);
    (workload, namespace(&found["a/s.a.svc.cluster.local"]["service"]))
}

#[test]
fn labels_decide_the_waypoint() {
    let (a, none) = (Some("a".to_owned()), None);
    let labelled = "istio.io/use-waypoint: wp";
    let own = waypoint("a", "all", "Same");
    assert_eq!(waypoints(labelled, &own), (a.clone(), a.clone()));
    assert_eq!(waypoints("app: x", &own), (none.clone(), none.clone()));
    assert_eq!(
        waypoints(labelled, ""),
        (none.clone(), none.clone()),
        "the Gateway does not exist"
    );
    assert_eq!(
        waypoints(labelled, &waypoint("a", "service", "Same")),
        (none.clone(), a.clone())
    );
    assert_eq!(
        waypoints(labelled, &waypoint("a", "workload", "Same")),
        (a.clone(), none.clone())
    );
    assert_eq!(
        waypoints(labelled, &waypoint("a", "none", "Same")),
        (none.clone(), none.clone())
    );

    let inherited = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: a, labels: {istio.io/use-waypoint: wp}}\n";
    let inherited = [inherited, &own].concat();
    assert_eq!(waypoints("app: x", &inherited), (a.clone(), a.clone()));
    assert_eq!(
        waypoints("istio.io/use-waypoint: none", &inherited),
        (none.clone(), none.clone())
    );

    let elsewhere = "istio.io/use-waypoint: wp, istio.io/use-waypoint-namespace: b";
    let b = Some("b".to_owned());
    assert_eq!(waypoints(elsewhere, &waypoint("b", "all", "All")), (b.clone(), b));
    assert_eq!(
        waypoints(elsewhere, &waypoint("b", "all", "Same")),
        (none.clone(), none),
        "denied"
    );
}

#[test]
fn waypoints_have_an_address_and_a_tunnel() {
    let objects = waypoint("a", "all", "Same");
    let labelled = pod("p", "istio.io/use-waypoint: wp", "10.1.0.1", "");
    let found = all(&[labelled.as_str(), &objects].concat());
    let want = json!({"hostname": {"namespace": "a", "hostname": "wp.svc"}, "hboneMtlsPort": 15008});
    assert_eq!(found["Kubernetes//Pod/a/p"]["workload"]["waypoint"], want);
    let by_ip = objects.replace(", {type: Hostname, value: wp.svc}", "");
    let found = all(&[labelled.as_str(), &by_ip].concat());
    let want = json!({"address": {"address": "CgAABQ=="}, "hboneMtlsPort": 15008});
    assert_eq!(found["Kubernetes//Pod/a/p"]["workload"]["waypoint"], want);
    let annotation = "name: wp, annotations: {ambient.istio.io/waypoint-inbound-binding: PROXY/15088}";
    let bound = objects.replacen("name: wp", annotation, 1);
    let found = all(&bound);
    let want = json!({"protocol": "PROXY", "port": 15088});
    assert_eq!(found["Kubernetes//Pod/a/wp-0"]["workload"]["applicationTunnel"], want);
}

#[test]
fn gateways_use_waypoints_by_label() {
    let service = |labels: &str| {
        let object = format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: a, labels: {{{labels}}}}}\n\
             spec: {{clusterIP: 10.0.0.9, ports: [{{port: 80}}]}}\n"
        );
        let found = all(&[object.as_str(), &waypoint("a", "service", "Same")].concat());
        found["a/s.a.svc.cluster.local"]["service"]["ingressUseWaypoint"] == true
    };
    assert!(service(
        "istio.io/use-waypoint: wp, istio.io/ingress-use-waypoint: 'true'"
    ));
    assert!(!service(
        "istio.io/use-waypoint: wp, istio.io/ingress-use-waypoint: maybe"
    ));
    assert!(!service("istio.io/ingress-use-waypoint: 'true'"), "without a waypoint");
}

fn policies(installation: Installation, objects: &str) -> Vec<String> {
    let objects = [
        pod("p", "app: x, istio.io/use-waypoint: wp", "10.1.0.1", "").as_str(),
        objects,
    ]
    .concat();
    let found = all_of(installation, &objects);
    let listed = found["Kubernetes//Pod/a/p"]["workload"]["authorizationPolicies"]
        .as_array()
        .cloned();
    let listed = listed.unwrap_or_default();
    listed
        .iter()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect()
}

fn authorization(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n"
    )
}

fn peer(namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
         metadata: {{name: pa, namespace: {namespace}}}\nspec: {{{spec}}}\n"
    )
}

#[test]
fn workloads_list_the_policies_that_select_them() {
    let selecting = "selector: {matchLabels: {app: x}}";
    let objects = [
        authorization("a", "own", selecting),
        authorization("istio-system", "root", selecting),
        authorization("b", "other", selecting),
        authorization("a", "general", ""),
        authorization("a", "mismatch", "selector: {matchLabels: {app: other}}"),
        authorization("a", "audit", &format!("{selecting}, action: AUDIT")),
    ];
    assert_eq!(policies(ambient(), &objects.concat()), ["a/own", "istio-system/root"]);

    let strict = "istio-system/istio_converted_static_strict".to_owned();
    let converted = "a/converted_peer_authentication_pa".to_owned();
    let selector = "selector: {matchLabels: {app: x}}";
    let root = peer("istio-system", "mtls: {mode: STRICT}");
    for (objects, want) in [
        (root.clone(), vec![strict.clone()]),
        (peer("a", "mtls: {mode: STRICT}"), vec![strict.clone()]),
        ([root.clone(), peer("a", "mtls: {mode: PERMISSIVE}")].concat(), vec![]),
        (
            [root.clone(), peer("a", "mtls: {mode: UNSET}")].concat(),
            vec![strict.clone()],
        ),
        (
            peer(
                "a",
                &format!("{selector}, mtls: {{mode: STRICT}}, portLevelMtls: {{80: {{mode: DISABLE}}}}"),
            ),
            vec![converted.clone()],
        ),
        (
            peer(
                "a",
                &format!("{selector}, mtls: {{mode: DISABLE}}, portLevelMtls: {{80: {{mode: STRICT}}}}"),
            ),
            vec![converted.clone()],
        ),
        (
            [
                root.clone(),
                peer("a", &format!("{selector}, portLevelMtls: {{80: {{mode: DISABLE}}}}")),
            ]
            .concat(),
            vec![strict],
        ),
        (
            [
                root,
                peer("a", &format!("{selector}, portLevelMtls: {{80: {{mode: PERMISSIVE}}}}")),
            ]
            .concat(),
            vec![converted],
        ),
    ] {
        assert_eq!(policies(ambient(), &objects), want, "{objects}");
    }
}

#[test]
fn waypoints_are_admitted_by_implicit_policies() {
    let mut installation = ambient();
    let failed = pod("wp-1", "gateway.networking.k8s.io/gateway-name: wp", "10.1.9.8", "");
    let failed = failed.replace("Running", "Failed").replace("Name: sa", "Name: old");
    let objects = [waypoint("a", "all", "Same"), failed].concat();
    assert_eq!(policies(installation.clone(), &objects), [""; 0]);
    installation.features.pilot_auto_allow_waypoint_policy = true;
    let name = "a/istio_allow_waypoint_a_wp";
    assert_eq!(policies(installation.clone(), &objects), [name]);
    let store = fixture::store(
        installation,
        &[("base.yaml", BASE), ("wp.yaml", &objects)],
        vec![ztunnel()],
    );
    let policy = fixture::resource(&store, 0, ResourceType::Authorization, name);
    assert_eq!(policy["scope"], "WORKLOAD_SELECTOR");
    let principals = &policy["groups"][0]["rules"][0]["matches"][0]["principals"];
    assert_eq!(*principals, json!([{"exact": "cluster.local/ns/a/sa/wp-sa"}]));
}

const SERVED: &str = "
---
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a}
spec: {clusterIP: 10.0.0.9, selector: {app: x}, ports: [{port: 80}]}
";

#[test]
fn names_are_looked_up_in_order() {
    let elsewhere = pod("q", "app: x", "10.1.0.2", "").replace("nodeName: n1", "nodeName: n2");
    let third = pod("r", "app: other", "10.1.0.3", "").replace("nodeName: n1", "nodeName: n2");
    let objects = [SERVED, &pod("p", "app: x", "10.1.0.1", ""), &elsewhere, &third].concat();
    let (p, q, r) = ("Kubernetes//Pod/a/p", "Kubernetes//Pod/a/q", "Kubernetes//Pod/a/r");
    let service = "a/s.a.svc.cluster.local";
    let of = |names: &[&str]| on_demand(&objects, names);
    assert_eq!(of(&[]), [p], "workloads of its node");
    assert_eq!(of(&[r]), [p, r]);
    assert_eq!(of(&["/10.1.0.3"]), [p, r]);
    assert_eq!(of(&[service]), [p, q, service]);
    assert_eq!(of(&["/10.0.0.9"]), [p, q, service]);
    assert_eq!(of(&["/10.9.9.9", "unknown", "Kubernetes//Pod/a/none"]), [p]);

    let dual = objects.replace("podIP: 10.1.0.3", "podIPs: [{ip: 10.1.0.3}, {ip: 10.1.0.4}]");
    let dual = dual.replace("10.0.0.9", "10.1.0.4");
    let of = |names: &[&str]| on_demand(&dual, names);
    let message = "a workload precedes the service with its address";
    assert_eq!(of(&["/10.1.0.4"]), [p, r], "{message}");
    assert_eq!(of(&["/10.1.0.3", "/10.1.0.4"]), [p, r], "{message}, also by two names");
}

#[test]
fn names_of_clusters_may_contain_slashes() {
    let mut installation = ambient();
    installation.cluster = "cluster/prod".into();
    let endpoint = entry("a", "e", 2020, "endpoints: [{address: 192.0.2.1}]");
    let found = all_of(installation, &[pod("p", "app: x", "10.1.0.1", ""), endpoint].concat());
    let want = [
        "a/h.com",
        "cluster/prod//Pod/a/p",
        "cluster/prod/networking.istio.io/ServiceEntry/a/e/192.0.2.1",
    ];
    assert_eq!(found.keys().collect::<Vec<_>>(), want);
}

#[test]
fn aliases_are_sent_only_on_demand() {
    let objects = [SERVED, &pod("p", "app: x", "10.1.0.1", "")].concat();
    let files = [("base.yaml", BASE), ("objects.yaml", objects.as_str())];
    for (requested, want) in [
        (WILDCARD, vec![]),
        ("a/s.a.svc.cluster.local", vec!["/10.1.0.1", "/10.0.0.9"]),
    ] {
        let names = request(ResourceType::Address, &[requested]);
        let store = fixture::store_of_requested(ambient(), &files, vec![ztunnel()], &names);
        let all = fixture::snapshot(&store, 0).resources(ResourceType::Address);
        let found: Vec<&str> = all.iter().flat_map(|one| one.aliases()).map(SmolStr::as_str).collect();
        let mut found = found;
        found.sort_unstable();
        let mut want = want;
        want.sort_unstable();
        assert_eq!(found, want);
    }
}

#[test]
fn the_type_of_workloads_has_no_services() {
    let objects = [SERVED, &pod("p", "app: x", "10.1.0.1", "")].concat();
    let files = [("base.yaml", BASE), ("objects.yaml", objects.as_str())];
    for requested in [WILDCARD, "a/s.a.svc.cluster.local"] {
        let names = request(ResourceType::Workload, &[requested]);
        let store = fixture::store_of_requested(ambient(), &files, vec![ztunnel()], &names);
        let found = sent(&store, ResourceType::Workload);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["Kubernetes//Pod/a/p"]);
        assert_eq!(found["Kubernetes//Pod/a/p"]["uid"], "Kubernetes//Pod/a/p");
        assert_eq!(sent(&store, ResourceType::Address).len(), 0);
    }
}

#[test]
fn nothing_is_derived_without_ambient_mode() {
    let objects = [SERVED, &pod("p", "app: x", "10.1.0.1", ""), &entry("a", "e", 2020, "")].concat();
    assert!(all_of(Installation::default(), &objects).is_empty());
    let world = mesh::folder_world(
        Installation::default(),
        &[("base.yaml", BASE), ("objects.yaml", &objects)],
    );
    let snapshot = world.snapshot();
    assert!(snapshot.declared_services.is_empty() && snapshot.ambient_workloads.is_empty());
    assert!(snapshot.slice_targets.is_empty() && snapshot.policy_selectors.is_empty());
}

/// Returns the objects of another cluster, whose system namespace names its network.
fn in_cluster(cluster: &str, network: &str, mesh_config: &str, objects: &str) -> Vec<Change> {
    let system = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: istio-system, labels: \
         {{topology.istio.io/network: {network}}}}}\n---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: a}}\n"
    );
    let installation = Installation {
        cluster: cluster.into(),
        ..Installation::default()
    };
    let objects = [system.as_str(), objects].concat();
    let mut files = vec![("objects.yaml", objects.as_str())];
    files.extend((!mesh_config.is_empty()).then_some(("mesh.yaml", mesh_config)));
    let rows = mesh::folder(&installation, &files);
    rows.into_iter().map(Change::Upsert).collect()
}

#[test]
fn other_networks_are_one_workload_for_each_service() {
    let mut installation = ambient();
    installation.features.ambient_enable_multi_network = true;
    let config = "serviceScopeConfigs: [{servicesSelector: {matchLabels: {scope: global}}, scope: GLOBAL}]";
    let global = SERVED.replace("namespace: a}", "namespace: a, labels: {scope: global}}");
    let other = global.replace("name: s,", "name: s2,").replace("10.0.0.9", "10.0.0.8");
    let local_only = SERVED.replace("name: s,", "name: local,");
    let gateway = "
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gw, namespace: istio-system, labels: {topology.istio.io/network: n2}}
spec:
  gatewayClassName: istio-east-west
  listeners: [{name: hbone, port: 15008, protocol: HBONE, tls: {mode: Terminate}}]
status: {addresses: [{type: IPAddress, value: 192.0.2.5}]}
";
    let mut world = World::new(installation);
    let pods = [pod("p", "app: x", "10.1.0.1", ""), pod("q", "app: x", "10.1.0.2", "")].concat();
    world.commit(in_cluster(
        "Kubernetes",
        "n1",
        config,
        &[global.as_str(), &pods].concat(),
    ));
    let vip = global.replace("10.0.0.9", "10.0.0.7");
    let objects = [vip.as_str(), &other, &local_only, &pods, gateway].concat();
    world.commit(in_cluster("c2", "n2", "", &objects));
    let names = request(ResourceType::Address, &[WILDCARD]);
    let store = fixture::store_of_world(&world, vec![ztunnel()], &names);
    let found = sent(&store, ResourceType::Address);
    let split = |host: &str| format!("n2/SplitHorizonWorkload/istio-system/gw/192.0.2.5/a/{host}.a.svc.cluster.local");
    let mut want = vec![
        "Kubernetes//Pod/a/p".to_owned(),
        "Kubernetes//Pod/a/q".to_owned(),
        "NetworkGateway/n2/192.0.2.5/0".to_owned(),
        "a/s.a.svc.cluster.local".to_owned(),
        "a/s2.a.svc.cluster.local".to_owned(),
        split("s"),
        split("s2"),
    ];
    want.sort_unstable();
    assert_eq!(found.keys().cloned().collect::<Vec<_>>(), want);
    let workload = &found[&split("s")]["workload"];
    assert_eq!(workload["capacity"], 2);
    assert_eq!(workload["tunnelProtocol"], "HBONE");
    let address = json!({"address": {"network": "n2", "address": "wAACBQ=="}, "hboneMtlsPort": 15008});
    assert_eq!(workload["networkGateway"], address);
    let service = &found["a/s.a.svc.cluster.local"]["service"];
    let addresses = json!([
        {"network": "n1", "address": "CgAACQ=="},
        {"network": "n2", "address": "CgAABw=="},
    ]);
    assert_eq!(service["addresses"], addresses);
    assert_eq!(service["subjectAltNames"], json!(["spiffe://cluster.local/ns/a/sa/sa"]));

    let gone = in_cluster("c2", "n2", "", &pods)
        .into_iter()
        .filter_map(|change| match change {
            Change::Upsert(row) if row.kind() == Kind::Pod => Some(Change::Remove(row.kind(), row.key().clone())),
            _ => None,
        });
    world.commit(gone.collect());
    let store = fixture::store_of_world(&world, vec![ztunnel()], &names);
    let found = sent(&store, ResourceType::Address);
    want.retain(|name| !name.contains("SplitHorizonWorkload"));
    assert_eq!(
        found.keys().cloned().collect::<Vec<_>>(),
        want,
        "a network without workloads of a service has none that represents them"
    );
}

#[test]
fn objects_of_other_clusters_use_waypoints_of_their_cluster() {
    let mut installation = ambient();
    installation.features.ambient_enable_multi_network = true;
    installation.features.pilot_auto_allow_waypoint_policy = true;
    let config = "serviceScopeConfigs: [{servicesSelector: {matchLabels: {scope: global}}, scope: GLOBAL}]";
    let label = "istio.io/use-waypoint: wp";
    let labels = format!("namespace: a, labels: {{scope: global, {label}}}}}");
    let objects = [
        SERVED.replace("namespace: a}", &labels),
        pod("p", &format!("app: x, {label}"), "10.1.0.1", ""),
        waypoint("a", "all", "Same"),
    ];
    let mut world = World::new(installation);
    world.commit(in_cluster("Kubernetes", "n1", config, ""));
    world.commit(in_cluster("c2", "n1", "", &objects.concat()));
    let names = request(ResourceType::Address, &[WILDCARD]);
    let store = fixture::store_of_world(&world, vec![ztunnel()], &names);
    let found = sent(&store, ResourceType::Address);
    let address = json!({"hostname": {"namespace": "a", "hostname": "wp.svc"}, "hboneMtlsPort": 15008});
    assert_eq!(found["a/s.a.svc.cluster.local"]["service"]["waypoint"], address);
    let workload = &found["c2//Pod/a/p"]["workload"];
    assert_eq!(workload["waypoint"], address);
    let admitting = json!(["a/istio_allow_waypoint_a_wp"]);
    assert_eq!(workload["authorizationPolicies"], admitting);
    let store = fixture::store_of_world(&world, vec![ztunnel()], &RequestedResources::default());
    let policies = fixture::names(&store, 0, ResourceType::Authorization);
    assert!(policies.is_empty(), "those of the config cluster only: {policies:?}");
}
