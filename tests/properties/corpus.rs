//! Random objects of every kind, with few names, so that they refer to each other and collide.

use std::net::IpAddr;

use istiod::{
    api::{document, resolved_host::ResolvedHost},
    base::ClusterId,
    model::inputs::Row,
};
use serde_json::{Value, json};

use crate::support::random::Random;

pub(super) const NAMESPACES: [&str; 3] = ["a", "b", "istio-system"];
pub(super) const APPS: [&str; 4] = ["s0", "s1", "s2", "s3"];
pub(super) const PORTS: [(&str, u32); 6] = [
    ("http", 80),
    ("grpc-api", 81),
    ("tcp", 82),
    ("auto", 83),
    ("https", 443),
    ("mongo", 27017),
];
const KINDS: usize = 29;
/// Some hosts of services, short names, and one host without a service.
pub(super) const HOSTS: [&str; 7] = [
    "s0.a.svc.cluster.local",
    "s1.a.svc.cluster.local",
    "s0.b.svc.cluster.local",
    "s1",
    "ext.example.com",
    "two.example.com",
    "three.example.com",
];
/// The clusters of registries, in order. Some of their services have the hosts of other ServiceEntries.
pub(super) const REGISTRIES: [&str; 4] = ["Consul", "Eureka", "CloudFoundry", "Mock"];
/// The waypoint's Service in namespace `a`; the only object that is not random.
pub(super) const WAYPOINT: &str = "waypoint";
/// The names of its Gateways.
const WAYPOINTS: [&str; 2] = ["w0", "w1"];
/// Host names of network gateways.
const GATEWAY_HOSTS: [&str; 2] = ["east.example.com", "west.example.com"];

/// The rows of a random object. Its name comes from a small pool, so it often replaces another object.
pub(super) fn rows(random: &mut Random) -> Vec<Row> {
    let kind = random.below(KINDS);
    if kind == KINDS - 1 {
        return vec![resolved_host(random).into()];
    }
    let object = object_of(random, kind);
    let elsewhere = document::parse(&ClusterId::new("c2"), &object);
    if object["kind"] == "ServiceEntry" && random.one_in(3) {
        return document::parse(&ClusterId::new(random.pick(&REGISTRIES)), &object).rows;
    }
    let counts = elsewhere.rows.iter().all(|row| row.kind().counts_in_remote_clusters());
    if counts && random.one_in(3) {
        return elsewhere.rows;
    }
    document::parse(&ClusterId::new("Kubernetes"), &object).rows
}

/// The DNS result of a gateway's host name.
fn resolved_host(random: &mut Random) -> ResolvedHost {
    let key = ResolvedHost::key(&ClusterId::new("Kubernetes"), random.pick(&GATEWAY_HOSTS));
    let first = random.below(4);
    let addresses = (first..first + random.below(3)).map(|last| IpAddr::from([10, 6, 0, last as u8]));
    ResolvedHost {
        key,
        addresses: addresses.collect(),
    }
}

/// A random object of any kind that a mesh folder may contain.
pub(super) fn object(random: &mut Random) -> Value {
    let kind = random.below(KINDS - 1);
    object_of(random, kind)
}

fn object_of(random: &mut Random, kind: usize) -> Value {
    let namespace = random.pick(&NAMESPACES).to_owned();
    let name = random.pick(&APPS).to_owned();
    let meta = json!({ "name": name, "namespace": namespace,
        "creationTimestamp": format!("2024-01-0{}T00:00:00Z", 1 + random.below(9)) });
    let istio = |kind: &str, spec: Value| networking(kind, &meta, spec);
    match kind {
        0 => {
            let mut labels = waypoint_labels(random);
            if random.one_in(2) {
                labels["topology.istio.io/network"] = json!("n1");
            }
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace, "labels": labels } })
        }
        1 => node(random),
        2 | 3 => pod(random, &meta, &name),
        4 | 5 => service(random, &meta, &name),
        6 => slice(random, &meta, &name, &namespace),
        7 => secret(random, &meta),
        8 => {
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta,
                "data": { "ca.crt": random.pick(&["x", "y"]) } })
        }
        9 | 10 => destination_rule(random, &istio),
        11 => gateway(random, &istio),
        12 => service_entry(random, &istio),
        13 => sidecar(random, &istio),
        14 | 15 => virtual_service(random, &istio),
        16 => istio(
            "WorkloadEntry",
            json!({ "address": format!("10.9.0.{}", random.below(8)),
            "labels": { "app": random.pick(&APPS), "version": random.pick(&["v1", "v2"]) }, "serviceAccount": "sa",
            "weight": random.below(4), "locality": random.pick(&["r1/z1", "r2/z1"]) }),
        ),
        17 => istio("WorkloadGroup", json!({ "template": { "serviceAccount": "sa" } })),
        18 => security(
            "PeerAuthentication",
            &meta,
            json!({ "mtls": { "mode": random.pick(&["STRICT", "PERMISSIVE", "DISABLE"]) } }),
        ),
        19 => {
            let mut spec = json!({ "action": random.pick(&["ALLOW", "DENY"]),
                "rules": [{ "from": [{ "source": { "namespaces": [random.pick(&NAMESPACES)] } }] }] });
            if random.one_in(3) {
                spec["targetRefs"] = json!([{ "group": "", "kind": "Service", "name": random.pick(&APPS) }]);
            }
            security("AuthorizationPolicy", &meta, spec)
        }
        20 => json!({ "apiVersion": "telemetry.istio.io/v1", "kind": "Telemetry", "metadata": meta,
            "spec": { "accessLogging": [{ "providers": [{ "name": "envoy" }], "disabled": random.one_in(2) }] } }),
        21 => envoy_filter(random, &istio),
        22 => network_gateway(random, &meta),
        23 => json!({ "apiVersion": "multicluster.x-k8s.io/v1alpha1", "kind": "ServiceExport", "metadata": meta }),
        24 => json!({ "apiVersion": "multicluster.x-k8s.io/v1alpha1", "kind": "ServiceImport", "metadata": meta,
            "spec": { "ips": [format!("10.2.1.{}", random.below(9))] } }),
        25 | 26 => waypoint(random, &meta),
        _ => extension(random, &meta),
    }
}

/// A WasmPlugin, whose Secret may exist, or a TrafficExtension.
fn extension(random: &mut Random, meta: &Value) -> Value {
    let mut spec = json!({ "phase": random.pick(&["AUTHN", "AUTHZ", "STATS"]), "priority": random.below(3),
        "match": [{ "mode": random.pick(&["CLIENT", "SERVER", "CLIENT_AND_SERVER"]) }] });
    if random.one_in(2) {
        spec["selector"] = json!({ "matchLabels": { "app": random.pick(&APPS) } });
    }
    let wasm = json!({ "url": random.pick(&["example.com/a", "file:///a.wasm"]),
        "type": random.pick(&["HTTP", "NETWORK"]),
        "imagePullSecret": random.pick(&APPS) });
    let kind = match random.below(3) {
        0 => {
            spec["lua"] = json!({ "inlineCode": random.pick(&["x()", "y()"]) });
            "TrafficExtension"
        }
        1 => {
            spec["wasm"] = wasm;
            "TrafficExtension"
        }
        _ => {
            for (key, value) in wasm.as_object().into_iter().flatten() {
                spec[key] = value.clone();
            }
            "WasmPlugin"
        }
    };
    json!({ "apiVersion": "extensions.istio.io/v1alpha1", "kind": kind, "metadata": meta, "spec": spec })
}

/// A certificate, possibly incomplete, or registry credentials.
fn secret(random: &mut Random, meta: &Value) -> Value {
    let mut meta = meta.clone();
    if random.one_in(4) {
        meta["name"] = json!(format!("{}-cacert", random.pick(&APPS)));
    }
    if random.one_in(3) {
        let config = json!({ ".dockerconfigjson": random.pick(&["{}", "x"]) });
        return json!({ "apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "kubernetes.io/dockerconfigjson",
            "stringData": config });
    }
    let (chain, key, roots) = match random.below(2) {
        0 => ("tls.crt", "tls.key", "ca.crt"),
        _ => ("cert", "key", "cacert"),
    };
    let mut data = json!({ chain: random.pick(&["x", "y"]), key: random.pick(&["", "k"]) });
    if random.one_in(2) {
        data[roots] = json!(random.pick(&["r", "s"]));
    }
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": data })
}

/// The name of a credential of any kind.
fn credential(random: &mut Random) -> String {
    let (namespace, name) = (random.pick(&NAMESPACES), random.pick(&APPS));
    match random.below(4) {
        0 => format!("configmap://{namespace}/{name}"),
        1 => format!("kubernetes-gateway://{namespace}/{name}"),
        _ => name.to_owned(),
    }
}

/// A Gateway of the Gateway API that is a network gateway.
fn network_gateway(random: &mut Random, meta: &Value) -> Value {
    let mut meta = meta.clone();
    meta["labels"] = json!({ "topology.istio.io/network": random.pick(&["n1", "n2"]) });
    let address = match random.below(2) {
        0 => json!({ "type": "IPAddress", "value": format!("10.6.1.{}", random.below(4)) }),
        _ => json!({ "type": "Hostname", "value": random.pick(&GATEWAY_HOSTS) }),
    };
    json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": meta, "spec": {
        "gatewayClassName": random.pick(&["istio", "istio-remote"]), "addresses": [address],
        "listeners": [{ "name": "tls", "port": 15443, "protocol": "TLS", "tls": { "mode": "Passthrough" } }] } })
}

/// A waypoint Gateway, with or without a Service as its address.
fn waypoint(random: &mut Random, meta: &Value) -> Value {
    let mut meta = meta.clone();
    meta["name"] = json!(random.pick(&WAYPOINTS));
    meta["namespace"] = json!("a");
    meta["labels"] = json!({ "istio.io/waypoint-for": random.pick(&["service", "all", "workload"]) });
    let namespaces = json!({ "from": random.pick(&["Same", "All"]) });
    let address = match random.below(4) {
        0 => json!([]),
        1 => json!([{ "type": "IPAddress", "value": format!("10.2.0.{}", random.below(30)) }]),
        _ => json!([{ "type": "Hostname", "value": format!("{WAYPOINT}.a.svc.cluster.local") }]),
    };
    json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": meta,
        "spec": { "gatewayClassName": "istio-waypoint",
            "listeners": [{ "name": "mesh", "port": 15008, "protocol": "HBONE",
            "allowedRoutes": { "namespaces": namespaces } }] },
        "status": { "addresses": address } })
}

/// Waypoint labels of an object, possibly none.
fn waypoint_labels(random: &mut Random) -> Value {
    match random.below(4) {
        0 => json!({}),
        1 => json!({ "istio.io/use-waypoint": random.pick(&["w0", "none"]), "istio.io/ingress-use-waypoint": "true" }),
        _ => json!({ "istio.io/use-waypoint": random.pick(&WAYPOINTS), "istio.io/use-waypoint-namespace": "a" }),
    }
}

fn networking(kind: &str, meta: &Value, spec: Value) -> Value {
    let version = if kind == "EnvoyFilter" { "v1alpha3" } else { "v1" };
    json!({ "apiVersion": format!("networking.istio.io/{version}"), "kind": kind, "metadata": meta, "spec": spec })
}

fn security(kind: &str, meta: &Value, spec: Value) -> Value {
    json!({ "apiVersion": "security.istio.io/v1", "kind": kind, "metadata": meta, "spec": spec })
}

fn host(random: &mut Random) -> String {
    match random.below(8) {
        0 => random.pick(&APPS).to_owned(),
        1 => "ext.example.com".to_owned(),
        2 => "*.example.com".to_owned(),
        _ => format!("{}.{}.svc.cluster.local", random.pick(&APPS), random.pick(&NAMESPACES)),
    }
}

fn export_to(random: &mut Random) -> Value {
    match random.below(5) {
        0 => json!(["."]),
        1 => json!(["a"]),
        _ => json!(["*"]),
    }
}

fn node(random: &mut Random) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": random.pick(&["n0", "n1"]),
        "labels": { "topology.kubernetes.io/region": random.pick(&["r1", "r2"]),
            "topology.kubernetes.io/zone": "z1" } },
        "status": { "addresses": [{ "type": "InternalIP", "address": "10.8.0.1" }] } })
}

fn pod(random: &mut Random, meta: &Value, app: &str) -> Value {
    let mut meta = meta.clone();
    meta["name"] = json!(format!("{app}-{}", random.below(2)));
    meta["labels"] = json!({ "app": random.pick(&APPS), "version": random.pick(&["v1", "v2"]),
        "security.istio.io/tlsMode": random.pick(&["istio", "disabled"]) });
    meta["annotations"] = json!({ "ambient.istio.io/redirection": random.pick(&["enabled", "disabled"]) });
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": meta,
        "spec": { "serviceAccountName": random.pick(&["sa", "sb"]), "nodeName": random.pick(&["n0", "n1"]),
            "containers": [{ "ports": [{ "name": "web", "containerPort": 8080 + random.below(2) }] }] },
        "status": { "phase": "Running", "podIP": format!("10.1.0.{}", random.below(10)),
            "conditions": [{ "type": "Ready", "status": if random.one_in(5) { "False" } else { "True" } }] } })
}

fn service(random: &mut Random, meta: &Value, app: &str) -> Value {
    let first = random.below(PORTS.len());
    let ports: Vec<Value> = (0..=random.below(2))
        .map(|offset| PORTS[(first + offset) % PORTS.len()])
        .map(|(name, number)| {
            json!({ "name": name, "port": number,
            "targetPort": if name == "http" { json!("web") } else { json!(number) } })
        })
        .collect();
    if random.one_in(6) {
        let mut meta = meta.clone();
        meta["labels"] = json!({ "topology.istio.io/network": random.pick(&["n1", "n2"]) });
        let ingress = match random.below(2) {
            0 => json!({ "ip": format!("10.6.2.{}", random.below(4)) }),
            _ => json!({ "hostname": random.pick(&GATEWAY_HOSTS) }),
        };
        return json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta,
            "spec": { "type": "LoadBalancer", "clusterIP": "10.2.0.99", "ports": [{ "name": "tls", "port": 15443 }] },
            "status": { "loadBalancer": { "ingress": [ingress] } } });
    }
    let headless = random.one_in(5);
    let mut meta = meta.clone();
    meta["labels"] = waypoint_labels(random);
    json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {
        "clusterIP": if headless { "None".to_owned() } else { format!("10.2.0.{}", random.below(30)) },
        "selector": { "app": app }, "ports": ports } })
}

fn slice(random: &mut Random, meta: &Value, app: &str, namespace: &str) -> Value {
    let mut meta = meta.clone();
    meta["labels"] = json!({ "kubernetes.io/service-name": app });
    let (name, number) = PORTS[random.below(PORTS.len())];
    let endpoints: Vec<Value> = (0..random.below(4))
        .map(|index| {
            json!({ "addresses": [format!("10.1.0.{}", random.below(10))],
            "conditions": { "ready": !random.one_in(4) },
            "targetRef": if random.one_in(2) { json!({ "kind": "Pod", "name": format!("{app}-{}", index % 2),
                "namespace": namespace }) } else { Value::Null } })
        })
        .collect();
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, "addressType": "IPv4",
        "ports": [{ "name": name, "port": number }], "endpoints": endpoints })
}

fn destination_rule(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let policy = match random.below(5) {
        0 => json!({ "loadBalancer": { "simple": "ROUND_ROBIN" } }),
        1 => {
            json!({ "outlierDetection": { "consecutive5xxErrors": 3 },
                "loadBalancer": { "localityLbSetting": { "enabled": true,
            "failover": [{ "from": "r1", "to": "r2" }] } } })
        }
        2 if random.one_in(2) => {
            json!({ "tls": { "mode": random.pick(&["SIMPLE", "MUTUAL"]), "credentialName": credential(random) } })
        }
        2 => json!({ "tls": { "mode": random.pick(&["ISTIO_MUTUAL", "DISABLE", "SIMPLE"]) } }),
        3 => json!({ "connectionPool": { "tcp": { "maxConnections": random.below(9) + 1 } } }),
        _ => json!({ "loadBalancer": { "consistentHash": { "httpHeaderName": "x-user" } } }),
    };
    istio(
        "DestinationRule",
        json!({ "host": host(random), "exportTo": export_to(random), "trafficPolicy": policy,
        "subsets": [{ "name": "v1", "labels": { "version": "v1" } },
            { "name": "v2", "labels": { "version": "v2" } }] }),
    )
}

fn gateway(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let https = random.one_in(3);
    let server = if https {
        json!({ "port": { "number": 443, "name": "https", "protocol": "HTTPS" }, "hosts": [host(random)],
            "tls": { "mode": random.pick(&["SIMPLE", "MUTUAL"]), "credentialName": credential(random) } })
    } else {
        json!({ "port": { "number": 80, "name": "http", "protocol": "HTTP" }, "hosts": ["*"] })
    };
    istio("Gateway", json!({ "selector": { "istio": "gw" }, "servers": [server] }))
}

fn service_entry(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let (name, number) = PORTS[random.below(PORTS.len())];
    let protocol = ["HTTP", "GRPC", "TCP", "TLS"][random.below(4)];
    let (resolution, addresses, endpoints, selector) = match random.below(4) {
        0 => ("DNS", json!([]), json!([]), Value::Null),
        1 => (
            "STATIC",
            json!(["10.3.0.1"]),
            json!([{ "address": format!("10.4.0.{}", random.below(4)) }]),
            Value::Null,
        ),
        2 => ("NONE", json!(["10.5.0.0/24"]), json!([]), Value::Null),
        _ => (
            "STATIC",
            json!(["10.3.0.2"]),
            json!([]),
            json!({ "labels": { "app": random.pick(&APPS) } }),
        ),
    };
    // The second host is that of Kubernetes Services, too.
    let hosts = ["ext.example.com", "s0.a.svc.cluster.local", "two.example.com"];
    let mut entry = istio(
        "ServiceEntry",
        json!({ "hosts": [random.pick(&hosts)], "resolution": resolution,
        "location": random.pick(&["MESH_EXTERNAL", "MESH_INTERNAL"]), "addresses": addresses, "endpoints": endpoints,
        "workloadSelector": selector, "exportTo": export_to(random),
        "ports": [{ "number": number, "name": name, "protocol": protocol }] }),
    );
    let created = format!("2024-01-0{}T00:00:00Z", 1 + random.below(3));
    entry["metadata"]["creationTimestamp"] = json!(created);
    if random.one_in(3) {
        entry["metadata"]["labels"] = json!({ "tier": random.pick(&["x", "z"]) });
    }
    entry
}

fn sidecar(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let hosts: Vec<&str> = match random.below(4) {
        0 => vec!["./*"],
        1 => vec!["b/*", "./*"],
        2 => vec!["*/ext.example.com"],
        _ => vec!["*/*"],
    };
    let selector = if random.one_in(2) {
        json!({ "labels": { "app": random.pick(&APPS) } })
    } else {
        Value::Null
    };
    istio(
        "Sidecar",
        json!({ "workloadSelector": selector, "egress": [{ "hosts": hosts }],
        "outboundTrafficPolicy": { "mode": random.pick(&["ALLOW_ANY", "REGISTRY_ONLY"]) } }),
    )
}

fn virtual_service(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let destination = |random: &mut Random| json!({ "host": host(random), "subset": random.pick(&["v1", "v2"]) });
    let weight = random.below(100);
    let http = json!([{
        "match": [{ "uri": { "prefix": random.pick(&["/", "/x"]) }, "headers": { "k": { "exact": "v" } } }],
        "timeout": format!("{}s", 1 + random.below(5)),
        "route": [{ "destination": destination(random), "weight": weight },
            { "destination": destination(random), "weight": 100 - weight }],
    }, { "route": [{ "destination": destination(random) }] }]);
    let gateways = match random.below(3) {
        0 => json!(["a/s0"]),
        1 => json!(["mesh", "b/s1"]),
        _ => json!([]),
    };
    istio(
        "VirtualService",
        json!({ "hosts": [host(random)], "gateways": gateways, "exportTo": export_to(random), "http": http }),
    )
}

fn envoy_filter(random: &mut Random, istio: &impl Fn(&str, Value) -> Value) -> Value {
    let patches: Vec<Value> = (0..=random.below(3)).map(|_| patch(random)).collect();
    let selector = if random.one_in(3) {
        json!({ "labels": { "app": random.pick(&APPS) } })
    } else {
        Value::Null
    };
    istio(
        "EnvoyFilter",
        json!({ "priority": random.below(3), "workloadSelector": selector, "configPatches": patches }),
    )
}

/// A patch of random type and context.
fn patch(random: &mut Random) -> Value {
    let context = random.pick(&["ANY", "SIDECAR_INBOUND", "SIDECAR_OUTBOUND", "GATEWAY"]);
    let seconds = format!("{}s", 1 + random.below(9));
    let lua = json!({ "name": format!("lua-{}", random.below(3)), "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": { "inline_string": "function envoy_on_request(handle) end" } } });
    let echo = json!({ "name": "echo", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.echo.v3.Echo" } });
    let manager = json!({ "name": "envoy.filters.network.http_connection_manager",
        "subFilter": { "name": "envoy.filters.http.router" } });
    let (apply_to, object, operation, value) = match random.below(9) {
        0 => ("CLUSTER", Value::Null, "MERGE", json!({ "connect_timeout": seconds })),
        1 => {
            let service = format!("{}.{}.svc.cluster.local", random.pick(&APPS), random.pick(&NAMESPACES));
            (
                "CLUSTER",
                json!({ "cluster": { "service": service } }),
                "REMOVE",
                Value::Null,
            )
        }
        2 => (
            "CLUSTER",
            Value::Null,
            "ADD",
            json!({ "name": format!("added-{}", random.below(3)), "connect_timeout": seconds }),
        ),
        3 => (
            "HTTP_FILTER",
            json!({ "listener": { "filterChain": { "filter": manager } } }),
            random.pick(&["INSERT_BEFORE", "INSERT_AFTER", "INSERT_FIRST"]),
            lua,
        ),
        4 => (
            "NETWORK_FILTER",
            json!({ "listener": { "filterChain": { "filter": { "name": "envoy.filters.network.tcp_proxy" } } } }),
            random.pick(&["INSERT_BEFORE", "REPLACE"]),
            echo,
        ),
        5 => (
            "LISTENER",
            Value::Null,
            "ADD",
            json!({ "name": format!("added-{}", random.below(3)), "filter_chains": [{ "filters": [echo] }] }),
        ),
        6 => (
            "LISTENER",
            json!({ "listener": { "name": "virtualInbound" } }),
            random.pick(&["MERGE", "REMOVE"]),
            json!({ "listener_filters_timeout": seconds }),
        ),
        7 => (
            "ROUTE_CONFIGURATION",
            Value::Null,
            "MERGE",
            json!({ "internal_only_headers": [seconds] }),
        ),
        _ => (
            "HTTP_ROUTE",
            json!({ "routeConfiguration": { "vhost": { "route": { "action": "ROUTE" } } } }),
            "MERGE",
            json!({ "route": { "timeout": seconds } }),
        ),
    };
    let mut matched = object;
    if matched.is_null() {
        matched = json!({});
    }
    matched["context"] = json!(context);
    json!({ "applyTo": apply_to, "match": matched, "patch": { "operation": operation, "value": value } })
}
