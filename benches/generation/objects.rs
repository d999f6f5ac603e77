//! Objects of the meshes, all in one namespace and with a number in their names.

use serde_json::{Value, json};

pub(super) fn object(api_version: &str, kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": api_version, "kind": kind, "metadata": { "name": name, "namespace": "shop" }, "spec": spec })
}

pub(super) fn istio(kind: &str, name: &str, spec: Value) -> Value {
    let version = if kind == "EnvoyFilter" { "v1alpha3" } else { "v1" };
    object(&format!("networking.istio.io/{version}"), kind, name, spec)
}

pub(super) fn host(number: usize) -> String {
    format!("host-{number}.example.com")
}

pub(super) fn service_host(number: usize) -> String {
    format!("app-{number}.shop.svc.cluster.local")
}

pub(super) fn address(block: usize, number: usize) -> String {
    format!("10.{block}.{}.{}", number >> 8, number & 255)
}

/// A service with two ports and an endpoint.
pub(super) fn service(number: usize) -> Vec<Value> {
    let name = format!("app-{number}");
    let ip = address(96, number);
    let ports = json!([{ "name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP" },
        { "name": "tcp", "port": 9090, "targetPort": 9090, "protocol": "TCP" }]);
    let spec = json!({ "clusterIP": ip, "clusterIPs": [ip], "selector": { "app": name }, "ports": ports });
    vec![object("v1", "Service", &name, spec), slice(number, 1)]
}

pub(super) fn tcp_service(number: usize) -> Value {
    let name = format!("app-{number}");
    let ip = address(96, number);
    let ports = json!([{ "name": "tcp", "port": 9090, "targetPort": 9090, "protocol": "TCP" }]);
    object(
        "v1",
        "Service",
        &name,
        json!({ "clusterIP": ip, "clusterIPs": [ip], "selector": { "app": name }, "ports": ports }),
    )
}

pub(super) fn slice(number: usize, endpoints: usize) -> Value {
    let name = format!("app-{number}");
    let endpoint = |at: usize| json!({ "addresses": [address(1, number + at)], "conditions": { "ready": true } });
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": name, "namespace": "shop", "labels": { "kubernetes.io/service-name": name } },
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
        "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" },
            { "name": "tcp", "port": 9090, "protocol": "TCP" }] })
}

/// A few services and a gateway of constant number, and the objects that grow.
pub(super) fn with_base(more: impl IntoIterator<Item = Value>) -> Vec<Value> {
    with_services(10, more)
}

pub(super) fn with_services(services: usize, more: impl IntoIterator<Item = Value>) -> Vec<Value> {
    let port = json!({ "number": 8080, "protocol": "HTTP", "name": "http" });
    let mut edge = gateway(0, &port, None);
    edge["metadata"]["name"] = json!("edge");
    edge["spec"]["servers"][0]["hosts"] = json!(["*"]);
    (0..services).flat_map(service).chain([edge]).chain(more).collect()
}

pub(super) fn gateway(number: usize, port: &Value, credential: Option<usize>) -> Value {
    let mut server = json!({ "port": port, "hosts": [host(number)] });
    if let Some(credential) = credential {
        server["tls"] = json!({ "mode": "SIMPLE", "credentialName": format!("credential-{credential}") });
    }
    let spec = json!({ "selector": { "istio": "edge" }, "servers": [server] });
    istio("Gateway", &format!("gateway-{number}"), spec)
}

pub(super) fn route(number: usize) -> Value {
    json!({ "match": [{ "uri": { "prefix": format!("/{number}/") } }], "timeout": "5s",
        "route": [{ "destination": { "host": service_host(number % 10), "port": { "number": 80 } } }] })
}

pub(super) fn virtual_service(number: usize, hosts: &[String]) -> Value {
    let spec = json!({ "hosts": hosts, "gateways": ["mesh", "edge"], "http": [route(1), route(2)] });
    istio("VirtualService", &format!("virtual-{number}"), spec)
}

/// A VirtualService of the gateway with the same number.
pub(super) fn bound(number: usize) -> Value {
    let spec = json!({ "hosts": [host(number)], "gateways": [format!("gateway-{number}")], "http": [route(number)] });
    istio("VirtualService", &format!("virtual-{number}"), spec)
}

/// The Service of the gateway, and a Gateway of the Gateway API for it.
pub(super) fn kube_gateway() -> [Value; 3] {
    let labels = json!({ "kubernetes.io/service-name": "edge" });
    let port = json!({ "name": "http", "port": 80, "targetPort": 80, "protocol": "TCP" });
    let service = json!({ "clusterIP": "10.96.255.1", "selector": { "app": "edge" }, "ports": [port] });
    let listener = json!({ "name": "http", "port": 80, "protocol": "HTTP" });
    let gateway = json!({ "gatewayClassName": "istio", "listeners": [listener],
        "addresses": [{ "type": "Hostname", "value": "edge" }] });
    [
        object("v1", "Service", "edge", service),
        json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "name": "edge", "namespace": "shop", "labels": labels },
            "ports": [{ "name": "http", "port": 80 }],
            "endpoints": [{ "addresses": [address(3, 1)], "conditions": { "ready": true } }] }),
        object("gateway.networking.k8s.io/v1", "Gateway", "edge", gateway),
    ]
}

/// An HTTPRoute of that Gateway, with a host of its own.
pub(super) fn http_route(number: usize) -> Value {
    let rule = |path: &str| {
        json!({ "matches": [{ "path": { "type": "PathPrefix", "value": path } }],
            "backendRefs": [{ "name": format!("app-{}", number % 10), "port": 80 }] })
    };
    let spec =
        json!({ "parentRefs": [{ "name": "edge" }], "hostnames": [host(number)], "rules": [rule("/a"), rule("/")] });
    object(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        &format!("route-{number}"),
        spec,
    )
}

pub(super) fn long_virtual_service(routes: usize) -> Value {
    let spec =
        json!({ "hosts": [host(0)], "gateways": ["mesh", "edge"], "http": (0..routes).map(route).collect::<Vec<_>>() });
    istio("VirtualService", "long", spec)
}

/// A VirtualService and a DestinationRule for one of the services.
pub(super) fn routed_service(number: usize) -> [Value; 2] {
    let to = |subset: &str| json!({ "destination": { "host": service_host(number), "subset": subset }, "weight": 50 });
    let spec = json!({ "hosts": [service_host(number)], "http": [{ "route": [to("v1"), to("v2")] }] });
    let subset = |version: &str| json!({ "name": version, "labels": { "version": version } });
    let rule = json!({ "host": service_host(number), "subsets": [subset("v1"), subset("v2")],
        "trafficPolicy": { "outlierDetection": { "consecutive5xxErrors": 5 } } });
    let name = format!("routed-{number}");
    [
        istio("VirtualService", &name, spec),
        istio("DestinationRule", &name, rule),
    ]
}

pub(super) fn service_entry(number: usize, hosts: &[String], port: u16) -> Value {
    let spec = json!({ "hosts": hosts, "resolution": "DNS", "location": "MESH_EXTERNAL",
        "ports": [{ "number": port, "protocol": "HTTP", "name": "http" }] });
    istio("ServiceEntry", &format!("entry-{number}"), spec)
}

/// Patches of each class. Those that match apply to one cluster, one listener and one virtual host.
pub(super) fn envoy_filter(number: usize, is_match: bool) -> Value {
    let service = if is_match { number % 10 } else { 1_000_000 };
    let name = |text: String| if is_match { text } else { format!("no-{text}") };
    let lua = json!({ "name": format!("lua-{number}"), "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": { "inline_string": "-- nothing" } } });
    let patches = json!([
        { "applyTo": "CLUSTER", "match": { "cluster": { "name": format!("outbound|80||{}", service_host(service)) } },
          "patch": { "operation": "MERGE", "value": { "connect_timeout": "3s" } } },
        { "applyTo": "HTTP_FILTER", "match": { "listener": { "name": name("0.0.0.0_80".into()),
            "filterChain": { "filter": { "name": "envoy.filters.network.http_connection_manager",
                "subFilter": { "name": "envoy.filters.http.router" } } } } },
          "patch": { "operation": "INSERT_BEFORE", "value": lua } },
        { "applyTo": "VIRTUAL_HOST", "match": { "routeConfiguration": { "vhost": {
            "name": format!("{}:80", service_host(service)) } } },
          "patch": { "operation": "MERGE", "value": { "include_request_attempt_count": true } } },
    ]);
    istio(
        "EnvoyFilter",
        &format!("filter-{number}"),
        json!({ "configPatches": patches }),
    )
}

/// All but the first select no workloads.
pub(super) fn sidecar(number: usize) -> Value {
    let spec = json!({ "workloadSelector": { "labels": { "app": format!("app-{number}") } },
        "egress": [{ "hosts": ["./*", "istio-system/*"] }] });
    istio("Sidecar", &format!("sidecar-{number}"), spec)
}

/// One of many VirtualServices that share a host and a gateway.
pub(super) fn part(number: usize) -> Value {
    let spec = json!({ "hosts": [host(0)], "gateways": ["edge"], "http": [route(number)] });
    istio("VirtualService", &format!("part-{number}"), spec)
}

pub(super) fn delegate(number: usize) -> Value {
    istio(
        "VirtualService",
        &format!("delegate-{number}"),
        json!({ "http": [route(number)] }),
    )
}

/// The VirtualService whose routes are all delegates.
pub(super) fn delegating(delegates: usize) -> Value {
    let to = |number: usize| {
        json!({ "match": [{ "uri": { "prefix": format!("/{number}/") } }],
        "delegate": { "name": format!("delegate-{number}") } })
    };
    let spec =
        json!({ "hosts": [host(0)], "gateways": ["mesh", "edge"], "http": (0..delegates).map(to).collect::<Vec<_>>() });
    istio("VirtualService", "delegating", spec)
}

/// One of many DestinationRules of one host, each with its own subset.
pub(super) fn rule_of_one(number: usize) -> Value {
    let subset = json!({ "name": format!("v{number}"), "labels": { "version": format!("v{number}") } });
    istio(
        "DestinationRule",
        &format!("rule-{number}"),
        json!({ "host": service_host(0), "subsets": [subset] }),
    )
}

/// A ServiceEntry and the WorkloadEntry that it selects.
pub(super) fn selecting(number: usize) -> [Value; 2] {
    let name = format!("machine-{number}");
    let entry = json!({ "hosts": [host(number)], "resolution": "STATIC",
        "workloadSelector": { "labels": { "app": name } },
        "addresses": [address(97, number)], "ports": [{ "number": 80, "protocol": "HTTP", "name": "http" }] });
    let workload = json!({ "address": address(2, number), "labels": { "app": name }, "serviceAccount": "machine" });
    [
        istio("ServiceEntry", &name, entry),
        istio("WorkloadEntry", &name, workload),
    ]
}

pub(super) fn pod(number: usize) -> Value {
    let name = format!("app-{number}");
    let ip = address(1, number);
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "shop", "labels": { "app": name, "version": "v1" } },
        "spec": { "serviceAccountName": "sa", "containers": [{ "name": "app", "ports": [{ "containerPort": 8080 }] }] },
        "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
            "conditions": [{ "type": "Ready", "status": "True" }] } })
}

pub(super) fn headless(number: usize) -> Value {
    let name = format!("app-{number}");
    let ports = json!([{ "name": "tcp", "port": 9090, "targetPort": 9090, "protocol": "TCP" }]);
    object(
        "v1",
        "Service",
        &name,
        json!({ "clusterIP": "None", "clusterIPs": ["None"], "selector": { "app": name }, "ports": ports }),
    )
}

/// A namespace with one service.
pub(super) fn elsewhere(number: usize) -> Vec<Value> {
    let name = format!("ns-{number}");
    let mut objects = service(number);
    for object in &mut objects {
        object["metadata"]["namespace"] = json!(name);
    }
    objects.push(json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
    objects
}

pub(super) fn authorization_policy(number: usize) -> Value {
    let rules = json!([{ "from": [{ "source": { "principals": [format!("cluster.local/ns/shop/sa/sa-{number}")] } }],
        "to": [{ "operation": { "paths": [format!("/{number}/*")] } }] }]);
    object(
        "security.istio.io/v1",
        "AuthorizationPolicy",
        &format!("policy-{number}"),
        json!({ "rules": rules }),
    )
}
