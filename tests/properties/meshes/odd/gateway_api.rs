//! Objects of the Gateway API: Gateways of the router and of their own, listeners, routes, grants and policies.

use istiod::model::gateway_api::inference_pool;
use serde_json::{Value, json};

use crate::properties::corpus::{APPS, HOSTS, NAMESPACES};
use crate::support::random::Random;

/// Ports of the router's Service.
pub(super) const PORTS: [u32; 4] = [80, 443, 8080, 9999];
const GROUP: &str = "gateway.networking.k8s.io";
const INFERENCE: &str = "inference.networking.k8s.io";

/// A random object.
pub(super) fn object(random: &mut Random, meta: Value) -> Value {
    match random.below(14) {
        0..=2 => gateway(random, meta),
        3..=6 => http_route(random, meta),
        7 => grpc_route(random, meta),
        8 => tls_route(random, meta),
        9 => tcp_route(random, meta),
        10 => listener_set(random, meta),
        11 => backend_tls_policy(random, meta),
        12 if random.one_in(2) => pool(random, meta),
        12 => shadow_service(random, meta),
        _ => grant(random, meta),
    }
}

fn of(version: &str, kind: &str, meta: Value, spec: Value) -> Value {
    json!({ "apiVersion": format!("{GROUP}/{version}"), "kind": kind, "metadata": meta, "spec": spec })
}

/// A Gateway; most are in the router's namespace and are served by it.
fn gateway(random: &mut Random, mut meta: Value) -> Value {
    let addresses = match random.below(6) {
        0 => json!([]),
        1 => json!([{ "type": "IPAddress", "value": "10.6.0.1" }]),
        2 => json!([{ "type": "Hostname", "value": random.pick(&APPS) }, { "type": "example.com/x", "value": "y" }]),
        _ => {
            meta["namespace"] = json!("istio-system");
            json!([{ "type": "Hostname", "value": "gw" }])
        }
    };
    let class = random.pick(&["istio", "istio", "istio", "istio-waypoint", "istio-remote", "other"]);
    let mut spec = json!({ "gatewayClassName": class, "addresses": addresses, "listeners": listeners(random) });
    if random.one_in(2) {
        spec["allowedListeners"] = json!({ "namespaces": { "from": random.pick(&["All", "Same", "None"]) } });
    }
    of("v1", "Gateway", meta, spec)
}

fn listener_set(random: &mut Random, meta: Value) -> Value {
    let parent = json!({ "name": random.pick(&APPS), "namespace": namespace(random) });
    let spec = json!({ "parentRef": parent, "listeners": listeners(random) });
    of("v1", "ListenerSet", meta, spec)
}

fn listeners(random: &mut Random) -> Vec<Value> {
    let count = 1 + random.below(3);
    (0..count).map(|index| listener(random, index)).collect()
}

fn listener(random: &mut Random, index: usize) -> Value {
    let (port, protocol, tls) = match random.below(8) {
        0 | 1 => (443, "HTTPS", terminating(random)),
        2 => (443, "TLS", json!({ "mode": "Passthrough" })),
        3 => (9999, "TCP", Value::Null),
        4 => (15008, "HBONE", Value::Null),
        5 => (8080, "UDP", Value::Null),
        _ => (PORTS[random.below(PORTS.len())], "HTTP", Value::Null),
    };
    let mut listener = json!({ "name": format!("l{index}"), "port": port, "protocol": protocol });
    if !tls.is_null() {
        listener["tls"] = tls;
    }
    if random.one_in(2) {
        listener["hostname"] = json!(random.pick(&["*.example.com", "ext.example.com", "a.test", "*.test"]));
    }
    if !random.one_in(4) {
        let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": namespace(random) } });
        listener["allowedRoutes"] = match random.below(4) {
            0 => json!({ "namespaces": { "from": "Selector", "selector": selector } }),
            1 => json!({ "namespaces": { "from": "All" }, "kinds": [{ "kind": "HTTPRoute" }] }),
            _ => json!({ "namespaces": { "from": "All" } }),
        };
    }
    listener
}

fn terminating(random: &mut Random) -> Value {
    let mut tls = json!({ "mode": "Terminate",
        "certificateRefs": [{ "name": random.pick(&APPS), "namespace": "istio-system" }] });
    if random.one_in(3) {
        let mode = random.pick(&["MUTUAL", "ISTIO_MUTUAL", "ISTIO_SIMPLE"]);
        tls["options"] = json!({ "gateway.istio.io/tls-terminate-mode": mode });
    }
    tls
}

fn namespace(random: &mut Random) -> &'static str {
    match random.below(2) {
        0 => "istio-system",
        _ => random.pick(&NAMESPACES),
    }
}

fn parents(random: &mut Random) -> Vec<Value> {
    let count = 1 + random.below(2);
    let parents = (0..count).map(|_| match random.below(8) {
        0 => json!({ "group": "", "kind": "Service", "name": random.pick(&APPS) }),
        1 => json!({ "group": "", "kind": "Service", "name": random.pick(&APPS), "port": 80 }),
        2 => json!({ "group": "networking.istio.io", "kind": "ServiceEntry", "name": random.pick(&APPS) }),
        3 => json!({ "kind": "ListenerSet", "name": random.pick(&APPS), "namespace": random.pick(&NAMESPACES) }),
        4 => json!({ "name": random.pick(&APPS), "namespace": "istio-system", "sectionName": "l0" }),
        5 => json!({ "name": random.pick(&APPS), "namespace": "istio-system", "port": 443 }),
        _ => json!({ "name": random.pick(&APPS), "namespace": "istio-system" }),
    });
    parents.collect()
}

fn backend(random: &mut Random) -> Value {
    let port = [80, 81, 82, 443][random.below(4)];
    let mut backend = match random.below(8) {
        0 => {
            json!({ "group": "networking.istio.io", "kind": "Hostname", "name": random.pick(&HOSTS[4..]), "port": 80 })
        }
        1 => json!({ "group": INFERENCE, "kind": "InferencePool", "name": random.pick(&APPS) }),
        2 => json!({ "kind": "Bucket", "name": "b", "port": 1 }),
        3 => json!({ "name": random.pick(&APPS), "namespace": random.pick(&NAMESPACES), "port": port }),
        _ => json!({ "name": random.pick(&APPS), "port": port }),
    };
    if random.one_in(3) {
        backend["weight"] = json!(random.below(4));
    }
    backend
}

fn backends(random: &mut Random) -> Vec<Value> {
    (0..random.below(3)).map(|_| backend(random)).collect()
}

fn hostnames(random: &mut Random, spec: &mut Value) {
    if random.one_in(2) {
        spec["hostnames"] = json!([random.pick(&["ext.example.com", "*.example.com", "a.test", "two.example.com"])]);
    }
}

fn http_route(random: &mut Random, meta: Value) -> Value {
    let rules: Vec<Value> = (0..=random.below(2)).map(|_| http_rule(random)).collect();
    let mut spec = json!({ "parentRefs": parents(random), "rules": rules });
    hostnames(random, &mut spec);
    of("v1", "HTTPRoute", meta, spec)
}

fn http_rule(random: &mut Random) -> Value {
    let mut rule = json!({ "backendRefs": backends(random) });
    if random.one_in(2) {
        let path = random.pick(&["PathPrefix", "Exact"]);
        rule["matches"] = json!([{ "path": { "type": path, "value": random.pick(&["/", "/a", "/b/"]) } },
            { "headers": [{ "name": "x", "value": "y" }], "method": "GET" }]);
    }
    let filters = [
        json!({ "type": "RequestHeaderModifier", "requestHeaderModifier": { "set": [{ "name": "A", "value": "b" }] } }),
        json!({ "type": "RequestRedirect", "requestRedirect": { "hostname": "r.example.com", "statusCode": 301 } }),
        json!({ "type": "URLRewrite", "urlRewrite": { "path": { "type": "ReplacePrefixMatch", "replacePrefixMatch": "/z" } } }),
        json!({ "type": "CORS", "cors": { "allowOrigins": ["https://*.example.com"], "maxAge": 5 } }),
        json!({ "type": "RequestMirror", "requestMirror": { "backendRef": { "name": random.pick(&APPS), "port": 80 } } }),
        json!({ "type": "ExtensionRef" }),
    ];
    if random.one_in(2) {
        let choice = match random.below(12) {
            0 => 5,
            other => other % 5,
        };
        rule["filters"] = json!([filters[choice]]);
    }
    if random.one_in(4) {
        rule["timeouts"] = json!({ "request": "10s", "backendRequest": "2s" });
        rule["retry"] = json!({ "codes": [503], "attempts": random.below(3) });
    }
    rule
}

fn grpc_route(random: &mut Random, meta: Value) -> Value {
    let method = json!([{ "method": { "service": "a.S", "method": random.pick(&["M", "N"]) } }]);
    let mut spec = json!({ "parentRefs": parents(random),
        "rules": [{ "matches": method, "backendRefs": backends(random) }] });
    hostnames(random, &mut spec);
    of("v1", "GRPCRoute", meta, spec)
}

fn tls_route(random: &mut Random, meta: Value) -> Value {
    let mut spec = json!({ "parentRefs": parents(random), "rules": [{ "backendRefs": backends(random) }] });
    hostnames(random, &mut spec);
    of("v1", "TLSRoute", meta, spec)
}

fn tcp_route(random: &mut Random, meta: Value) -> Value {
    let spec = json!({ "parentRefs": parents(random), "rules": [{ "backendRefs": backends(random) }] });
    of("v1alpha2", "TCPRoute", meta, spec)
}

fn grant(random: &mut Random, meta: Value) -> Value {
    let kind = random.pick(&["HTTPRoute", "TLSRoute", "Gateway", "ListenerSet"]);
    let to = json!([{ "group": "", "kind": "Service" }, { "group": "", "kind": "Secret" }]);
    let from = json!([{ "group": GROUP, "kind": kind, "namespace": namespace(random) }]);
    of("v1beta1", "ReferenceGrant", meta, json!({ "from": from, "to": to }))
}

fn backend_tls_policy(random: &mut Random, meta: Value) -> Value {
    let mut target = json!({ "group": "", "kind": "Service", "name": random.pick(&APPS) });
    if random.one_in(3) {
        target["sectionName"] = json!("http");
    }
    let mut validation = json!({ "hostname": "backend.example.com" });
    match random.below(3) {
        0 => {
            validation["caCertificateRefs"] = json!([{ "group": "", "kind": "ConfigMap", "name": random.pick(&APPS) }]);
        }
        1 => validation["caCertificateRefs"] = json!([{ "group": "", "kind": "Other", "name": "x" }]),
        _ => validation["wellKnownCACertificates"] = json!("System"),
    }
    of(
        "v1",
        "BackendTLSPolicy",
        meta,
        json!({ "targetRefs": [target], "validation": validation }),
    )
}

/// The Service of a pool, and a few that look like one.
fn shadow_service(random: &mut Random, mut meta: Value) -> Value {
    meta["name"] = json!(inference_pool::service_name(random.pick(&APPS)));
    meta["labels"] = json!({ "internal.istio.io/service-semantics": "inferencepool",
        "istio.io/inferencepool-extension-service": random.pick(&APPS),
        "istio.io/inferencepool-extension-port": random.pick(&["80", "9002", "x"]),
        "istio.io/inferencepool-extension-failure-mode": random.pick(&["FailOpen", "FailClose", ""]) });
    let ports = [
        json!({ "name": "http-0", "port": 54321, "targetPort": 8080 }),
        json!({ "name": "http-1", "port": 54322, "targetPort": 9090 }),
    ];
    let ports = &ports[..=random.below(2)];
    let spec = json!({ "clusterIP": "None", "selector": { "app": random.pick(&APPS) }, "ports": ports });
    json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec })
}

fn pool(random: &mut Random, meta: Value) -> Value {
    let spec = json!({ "selector": { "matchLabels": { "app": random.pick(&APPS) } },
        "targetPorts": [{ "number": 8080 }],
        "endpointPickerRef": { "name": random.pick(&APPS), "port": { "number": 9002 } } });
    json!({ "apiVersion": format!("{INFERENCE}/v1"), "kind": "InferencePool", "metadata": meta, "spec": spec })
}
