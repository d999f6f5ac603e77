//! Odd but valid objects: overlapping hosts, unusual ports and protocols, visibility, several servers on one port.
//! Names are those of [`corpus`], so that the objects of both refer to each other.

mod gateway_api;
mod routing;
mod services;

use serde_json::{Map, Value, json};

use super::super::corpus::{self, APPS, NAMESPACES};
use crate::support::random::Random;

/// Objects that every mesh has: proxies need a pod, and gateways of the Gateway API a Service.
pub(super) fn fixed() -> Vec<Value> {
    let meta = |name: &str, labels: Value| json!({ "name": name, "namespace": "a", "labels": labels });
    let ready = |address: &str| {
        json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": "True" }] })
    };
    let waypoint = json!({ "app": corpus::WAYPOINT, "gateway.networking.k8s.io/gateway-name": "w0" });
    let pod = |name: &str, labels: Value, address: &str| {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": meta(name, labels),
            "spec": { "serviceAccountName": "sa" }, "status": ready(address) })
    };
    let router = json!({ "name": "gw", "namespace": "istio-system", "labels": { "istio": "gw" } });
    let port = |number: u32| json!({ "name": format!("p{number}"), "port": number });
    vec![
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": router,
            "spec": { "serviceAccountName": "sa" }, "status": ready("10.1.0.9") }),
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": router,
            "spec": { "clusterIP": "10.2.2.2", "selector": { "istio": "gw" },
                "ports": gateway_api::PORTS.map(port) } }),
        pod("s0-0", json!({ "app": "s0", "version": "v1" }), "10.1.0.1"),
        pod("waypoint-0", waypoint, "10.1.1.4"),
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta(corpus::WAYPOINT, json!({})),
            "spec": { "clusterIP": "10.2.2.1", "selector": { "app": corpus::WAYPOINT },
                "ports": [{ "name": "mesh", "port": 15008, "targetPort": 15008, "protocol": "TCP" }] } }),
    ]
}

/// The proxies, as in `proxies.yaml`: one of each kind, and sidecars of different sorts.
pub(super) fn proxies() -> Value {
    let proxy = |name: &str, kind: &str, ip: &str, pod: &str, namespace: &str, more: Value| {
        let mut metadata = json!({ "NAMESPACE": namespace, "CLUSTER_ID": "Kubernetes", "ISTIO_VERSION": "1.30.3",
            "SERVICE_ACCOUNT": "sa", "INSTANCE_IPS": ip });
        merge(&mut metadata, more);
        json!({ "name": name, "node": format!("{kind}~{ip}~{pod}.{namespace}~{namespace}.svc.cluster.local"),
            "cluster": format!("{pod}.{namespace}"), "metadata": metadata,
            "locality": { "region": "r1", "zone": "z1" } })
    };
    let labels = |labels: Value| json!({ "LABELS": labels });
    let mut grpc = proxy(
        "grpc",
        "sidecar",
        "10.1.0.1",
        "s0-0",
        "a",
        json!({ "LABELS": { "app": "s0" }, "GENERATOR": "grpc" }),
    );
    let targets = corpus::HOSTS
        .iter()
        .flat_map(|host| corpus::PORTS.map(|(_, port)| format!("{host}:{port}")));
    grpc["grpcTargets"] = targets.collect();
    let tunnels = json!({ "LABELS": { "app": "s2", "networking.istio.io/tunnel": "http" }, "ENABLE_HBONE": "true" });
    let waypoint = json!({ "app": corpus::WAYPOINT, "gateway.networking.k8s.io/gateway-name": "w0" });
    json!({ "proxies": [
        proxy("sidecar", "sidecar", "10.1.0.1", "s0-0", "a", labels(json!({ "app": "s0", "version": "v1" }))),
        proxy("tunnels", "sidecar", "10.1.0.3", "s2-0", "b", tunnels),
        proxy("router", "router", "10.1.0.9", "gw", "istio-system", labels(json!({ "istio": "gw" }))),
        proxy("waypoint", "waypoint", "10.1.1.4", "waypoint-0", "a", labels(waypoint)),
        grpc,
    ] })
}

fn merge(into: &mut Value, more: Value) {
    if let (Some(into), Value::Object(more)) = (into.as_object_mut(), more) {
        into.extend(more);
    }
}

/// A random MeshConfig.
pub(super) fn mesh_config(random: &mut Random) -> Value {
    let choices = [
        json!({ "outboundTrafficPolicy": { "mode": "REGISTRY_ONLY" } }),
        json!({ "inboundTrafficPolicy": { "mode": "LOCALHOST" } }),
        json!({ "enableAutoMtls": false }),
        json!({ "trustDomain": "td.example.com", "trustDomainAliases": ["cluster.local"] }),
        json!({ "defaultServiceExportTo": ["."] }),
        json!({ "defaultVirtualServiceExportTo": ["."], "defaultDestinationRuleExportTo": ["."] }),
        json!({ "accessLogFile": "/dev/stdout", "accessLogEncoding": "JSON" }),
        json!({ "protocolDetectionTimeout": "0.1s" }),
        json!({ "h2UpgradePolicy": "UPGRADE" }),
        json!({ "proxyHttpPort": 15007 }),
        json!({ "rootNamespace": "a" }),
        json!({ "pathNormalization": { "normalization": "MERGE_SLASHES" } }),
        json!({ "localityLbSetting": { "distribute": [{ "from": "r1/*", "to": { "r1/*": 80, "r2/*": 20 } }] } }),
        json!({ "serviceSettings": [{ "settings": { "clusterLocal": true }, "hosts": ["s0.a.svc.cluster.local"] }] }),
        json!({ "extensionProviders": [
            { "name": "check", "envoyExtAuthzGrpc": { "service": "s0.a.svc.cluster.local", "port": 81 } },
            { "name": "log", "envoyOtelAls": { "service": "s1.a.svc.cluster.local", "port": 81 } },
            { "name": "trace", "opentelemetry": { "service": "s0.b.svc.cluster.local", "port": 81 } }] }),
    ];
    some_of(random, &choices)
}

/// Random feature variables.
pub(super) fn variables(random: &mut Random) -> Value {
    let choices = [
        json!({ "PILOT_ENABLE_AMBIENT": "true" }),
        json!({ "PILOT_ENABLE_AMBIENT": "true", "PILOT_PREFER_SENDING_HBONE": "true" }),
        json!({ "ENABLE_LAYERED_WAYPOINT_AUTHORIZATION_POLICIES": "true" }),
        json!({ "ISTIO_DUAL_STACK": "true" }),
        json!({ "PILOT_SEND_UNHEALTHY_ENDPOINTS": "true" }),
        json!({ "PILOT_FILTER_GATEWAY_CLUSTER_CONFIG": "true" }),
        json!({ "PILOT_SCOPE_GATEWAY_TO_NAMESPACE": "true" }),
        json!({ "PILOT_ENABLE_ALPN_FILTER": "false" }),
        json!({ "PILOT_ENABLE_IP_AUTOALLOCATE": "false" }),
        json!({ "PILOT_ENABLE_EDS_FOR_HEADLESS_SERVICES": "true" }),
        json!({ "ENABLE_TLS_ON_SIDECAR_INGRESS": "true" }),
        json!({ "ENABLE_MCS_SERVICE_DISCOVERY": "true", "ENABLE_MCS_HOST": "true" }),
        json!({ "PILOT_HTTP10": "true" }),
        json!({ "PILOT_ENABLE_ALPHA_GATEWAY_API": "true" }),
        json!({ "PILOT_ENABLE_ALPHA_GATEWAY_API": "true", "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true" }),
    ];
    some_of(random, &choices)
}

/// Merges at most three of the choices, and often none.
fn some_of(random: &mut Random, choices: &[Value]) -> Value {
    let mut settings = Value::Object(Map::new());
    for _ in 0..random.below(4) {
        merge(&mut settings, choices[random.below(choices.len())].clone());
    }
    settings
}

/// A random object.
pub(super) fn object(random: &mut Random) -> Value {
    let namespace = random.pick(&NAMESPACES);
    let created = format!("2024-01-0{}T00:00:00Z", 1 + random.below(9));
    let meta = json!({ "name": random.pick(&APPS), "namespace": namespace, "creationTimestamp": created });
    match random.below(25) {
        0..=2 => services::service(random, meta),
        3 | 4 => services::service_entry(random, meta),
        5 => services::endpoint_slice(random, meta),
        6 => services::workload_entry(random, meta),
        7..=9 => routing::virtual_service(random, meta),
        10 | 11 => routing::destination_rule(random, meta),
        12 | 13 => routing::gateway(random, meta),
        14 | 15 => routing::sidecar(random, meta),
        16 => peer_authentication(random, meta),
        17 => authorization_policy(random, meta),
        18 => request_authentication(random, meta),
        19..=23 => gateway_api::object(random, meta),
        _ => telemetry(random, meta),
    }
}

/// An object of one of Istio's groups.
fn istio(group: &str, kind: &str, meta: Value, spec: Value) -> Value {
    json!({ "apiVersion": format!("{group}.istio.io/v1"), "kind": kind, "metadata": meta, "spec": spec })
}

/// `exportTo`, often to all.
fn export_to(random: &mut Random) -> Value {
    match random.below(8) {
        0 => json!(["."]),
        1 => json!(["b"]),
        2 => json!(["~"]),
        3 => json!([".", "istio-system"]),
        4 => json!([]),
        _ => json!(["*"]),
    }
}

/// Labels that select a workload; often none, which selects the namespace.
fn selector(random: &mut Random) -> Value {
    match random.below(4) {
        0 => json!({ "app": random.pick(&APPS) }),
        1 => json!({ "app": random.pick(&APPS), "version": "v1" }),
        _ => Value::Null,
    }
}

fn match_labels(random: &mut Random, spec: &mut Value) {
    let labels = selector(random);
    if !labels.is_null() {
        spec["selector"] = json!({ "matchLabels": labels });
    }
}

fn peer_authentication(random: &mut Random, meta: Value) -> Value {
    let mut spec = json!({ "mtls": { "mode": random.pick(&["STRICT", "PERMISSIVE", "DISABLE", "UNSET"]) } });
    match_labels(random, &mut spec);
    if !spec["selector"].is_null() && random.one_in(2) {
        let port = [8080, 80, 82, 9999][random.below(4)].to_string();
        spec["portLevelMtls"] = json!({ port: { "mode": random.pick(&["STRICT", "DISABLE"]) } });
    }
    istio("security", "PeerAuthentication", meta, spec)
}

fn authorization_policy(random: &mut Random, meta: Value) -> Value {
    let operations = [
        json!({ "paths": ["/a*", "*/b", "/c"] }),
        json!({ "methods": ["GET"], "notPaths": ["/x"] }),
        json!({ "ports": ["80", "8080"] }),
        json!({ "hosts": ["*.example.com"] }),
    ];
    let sources = [
        json!({ "principals": ["cluster.local/ns/a/sa/sa", "*/sa/sb"] }),
        json!({ "notNamespaces": ["b"] }),
        json!({ "ipBlocks": ["10.0.0.0/8"], "notIpBlocks": ["10.1.0.0/16"] }),
        json!({ "requestPrincipals": ["*"] }),
        json!({ "remoteIpBlocks": ["192.0.2.0/24"] }),
    ];
    let conditions = [
        json!({ "key": "request.headers[x-a]", "values": ["b*"] }),
        json!({ "key": "connection.sni", "notValues": ["a.example.com"] }),
        json!({ "key": "destination.port", "values": ["82"] }),
        json!({ "key": "request.auth.claims[groups]", "values": ["g"] }),
    ];
    let rules: Vec<Value> = (0..random.below(3))
        .map(|_| {
            let mut rule = json!({});
            if random.one_in(2) {
                rule["from"] = json!([{ "source": sources[random.below(sources.len())] }]);
            }
            if random.one_in(2) {
                rule["to"] = json!([{ "operation": operations[random.below(operations.len())] }]);
            }
            if random.one_in(3) {
                rule["when"] = json!([conditions[random.below(conditions.len())]]);
            }
            rule
        })
        .collect();
    let action = random.pick(&["ALLOW", "DENY", "AUDIT", "CUSTOM"]);
    let mut spec = json!({ "action": action, "rules": rules });
    if action == "CUSTOM" {
        spec["provider"] = json!({ "name": random.pick(&["check", "nowhere"]) });
    }
    match_labels(random, &mut spec);
    istio("security", "AuthorizationPolicy", meta, spec)
}

fn request_authentication(random: &mut Random, meta: Value) -> Value {
    let jwks = r#"{"keys":[{"kty":"oct","kid":"k","k":"c2VjcmV0","alg":"HS256"}]}"#;
    let mut spec = json!({ "jwtRules": [{ "issuer": random.pick(&["i", "j"]), "jwks": jwks,
        "fromHeaders": [{ "name": "x-jwt" }], "forwardOriginalToken": random.one_in(2) }] });
    match_labels(random, &mut spec);
    istio("security", "RequestAuthentication", meta, spec)
}

fn telemetry(random: &mut Random, meta: Value) -> Value {
    let mut spec = match random.below(3) {
        0 => json!({ "accessLogging": [{ "providers": [{ "name": random.pick(&["envoy", "log", "nowhere"]) }],
            "filter": { "expression": "response.code >= 400" } }] }),
        1 => json!({ "tracing": [{ "providers": [{ "name": "trace" }], "randomSamplingPercentage": 10.0 }] }),
        _ => json!({ "metrics": [{ "providers": [{ "name": "prometheus" }], "overrides": [{
            "match": { "metric": "ALL_METRICS", "mode": random.pick(&["CLIENT", "SERVER"]) }, "disabled": true }] }] }),
    };
    match_labels(random, &mut spec);
    istio("telemetry", "Telemetry", meta, spec)
}
