//! The meshes, with the same shapes as those of istiod's own benchmark suite, so that times are comparable.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::{Value, json};

const NAMESPACE: &str = "default";
const GATEWAY_NAMESPACE: &str = "gateway";
pub(super) const LABEL: &str = "example.com/measured";
/// The addresses of the two proxies.
pub(super) const ADDRESSES: [&str; 2] = ["1.1.1.1", "1.1.1.2"];

pub(super) const HTTP: Port = (80, "http", "HTTP");
pub(super) const TCP: Port = (7070, "tcp", "TCP");
pub(super) const TLS: Port = (7070, "tls", "TLS");
pub(super) const SNIFFED: Port = (7070, "auto", "");
const HTTPS: Port = (443, "https", "HTTPS");
/// A port of every kind.
const MIXED: [Port; 4] = [HTTP, TCP, HTTPS, (9090, "auto", "")];

/// Number, name and protocol.
pub(super) type Port = (u16, &'static str, &'static str);

fn object(api_version: &str, kind: &str, namespace: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": api_version, "kind": kind, "metadata": { "name": name, "namespace": namespace },
        "spec": spec })
}

fn networking(kind: &str, namespace: &str, name: &str, spec: Value) -> Value {
    object("networking.istio.io/v1", kind, namespace, name, spec)
}

fn host(number: usize) -> String {
    format!("backend-{number}.host.example")
}

/// A unique address of a block for every number.
fn address(block: &str, number: usize) -> String {
    format!("{block}.{}.{}", number >> 8, number & 255)
}

fn ports(ports: &[Port]) -> Value {
    let port = |(number, name, protocol): &Port| json!({ "number": number, "name": name, "protocol": protocol });
    ports.iter().map(port).collect()
}

/// The service that has the two proxies as endpoints.
fn own_service(own: &[Port], labels: &Value, is_internal: bool) -> Value {
    let endpoint = |address: &str| json!({ "address": address, "labels": labels });
    let mut spec = json!({ "hosts": ["own.example"], "ports": ports(own), "resolution": "STATIC",
        "endpoints": ADDRESSES.map(endpoint) });
    if is_internal {
        spec["location"] = json!("MESH_INTERNAL");
    }
    networking("ServiceEntry", NAMESPACE, "own", spec)
}

fn mutual_tls() -> Value {
    json!({ "security.istio.io/tlsMode": "istio" })
}

fn measured() -> Value {
    json!({ LABEL: "true" })
}

/// A service outside the mesh, with one endpoint.
fn external(number: usize, with: &[Port]) -> Value {
    let spec = json!({ "hosts": [host(number)], "ports": ports(with), "resolution": "STATIC",
        "endpoints": [{ "address": "1.2.3.4" }] });
    networking("ServiceEntry", NAMESPACE, &format!("backend-{number}"), spec)
}

/// A service of the mesh with its own address.
fn internal(number: usize, with: &[Port]) -> Value {
    let endpoint = json!({ "address": address("240.241", number), "labels": mutual_tls() });
    let spec = json!({ "addresses": [address("240.240", number)], "hosts": [host(number)], "ports": ports(with),
        "resolution": "STATIC", "location": "MESH_INTERNAL", "endpoints": [endpoint] });
    networking("ServiceEntry", NAMESPACE, &format!("backend-{number}"), spec)
}

/// Services with one port.
pub(super) fn services(count: usize, port: Port) -> Vec<Value> {
    let own = own_service(&[port], &mutual_tls(), true);
    let others = (0..count).map(|number| internal(number, &[port]));
    std::iter::once(own).chain(others).collect()
}

/// Services with two ports behind a waypoint, which is the proxies' own service.
pub(super) fn behind_waypoint(count: usize) -> Vec<Value> {
    let mut waypoint = object(
        "gateway.networking.k8s.io/v1",
        "Gateway",
        NAMESPACE,
        "waypoint",
        json!({ "gatewayClassName": "istio-waypoint",
            "listeners": [{ "name": "mesh", "port": 15008, "protocol": "HBONE" }] }),
    );
    waypoint["status"] = json!({ "addresses": [{ "type": "Hostname", "value": "own.example" }] });
    let through = (0..count).map(|number| {
        let mut service = internal(number, &[HTTP, TCP]);
        service["metadata"]["labels"] = json!({ "istio.io/use-waypoint": "waypoint" });
        service
    });
    [waypoint, own_service(&[HTTP], &mutual_tls(), true)]
        .into_iter()
        .chain(through)
        .collect()
}

fn gateway(name: &str, hosts: &Value) -> Value {
    let servers = json!([
        { "port": { "number": 80, "name": "http", "protocol": "HTTP" }, "hosts": hosts },
        { "port": { "number": 443, "name": "https", "protocol": "HTTPS" }, "hosts": hosts, "tls": { "mode": "ISTIO_MUTUAL" } },
    ]);
    let spec = json!({ "selector": measured(), "servers": servers });
    networking("Gateway", GATEWAY_NAMESPACE, name, spec)
}

/// Routes of some hosts by path prefix, to the service of this number.
fn by_path(number: usize, hosts: &Value, gateway: &str, prefixes: impl IntoIterator<Item = String>) -> Value {
    let matches: Vec<_> = prefixes
        .into_iter()
        .map(|prefix| json!({ "uri": { "prefix": prefix } }))
        .collect();
    let route = json!([{ "destination": { "host": host(number) } }]);
    let spec = json!({ "hosts": hosts, "gateways": [format!("{GATEWAY_NAMESPACE}/{gateway}")],
        "http": [{ "match": matches, "route": route }] });
    networking("VirtualService", GATEWAY_NAMESPACE, &format!("by-path-{number}"), spec)
}

fn behind_gateways(count: usize) -> impl Iterator<Item = Value> {
    let own = own_service(&[HTTP, HTTPS], &measured(), false);
    std::iter::once(own).chain((0..count).map(|number| external(number, &[HTTP])))
}

/// Many Gateways with three hosts each.
pub(super) fn gateways(count: usize) -> Vec<Value> {
    let with_routes = |number: usize| {
        let hosts = json!(["a", "b", "c"].map(|prefix| format!("public-{prefix}-{number}.example")));
        let name = format!("gateway-{number}");
        [
            gateway(&name, &hosts),
            by_path(number, &hosts, &name, [format!("/path-{number}")]),
        ]
    };
    behind_gateways(count).chain((0..count).flat_map(with_routes)).collect()
}

/// One Gateway with three hosts, whose routes come from many VirtualServices.
pub(super) fn gateways_shared(count: usize) -> Vec<Value> {
    let hosts = json!([
        "public-1.host.example",
        "public-2.host.example",
        "public-3.host.example"
    ]);
    let shared = gateway("gateway", &hosts);
    let routes = (0..count).map(|number| {
        let prefixes = ["a", "b", "c", "d", "e", "f"].map(|branch| format!("/path-{branch}-{number}"));
        by_path(number, &hosts, "gateway", prefixes)
    });
    behind_gateways(count).chain([shared.clone()]).chain(routes).collect()
}

/// Revisions behind an external and an internal gateway, as Knative writes them.
pub(super) fn knative(count: usize) -> Vec<Value> {
    let entrance = |name: &str, host: &str, target: u16| {
        let endpoints = ADDRESSES.map(|address| json!({ "address": address, "labels": measured() }));
        let port = json!({ "number": 80, "targetPort": target, "name": "http", "protocol": "HTTP" });
        let spec = json!({ "hosts": [format!("{host}.istio-system.svc.cluster.local")], "ports": [port],
            "resolution": "STATIC", "endpoints": endpoints });
        networking("ServiceEntry", "istio-system", name, spec)
    };
    let gateway = |name: &str, port: u16| {
        let servers = json!([{ "hosts": ["*"], "port": { "name": "http", "number": port, "protocol": "HTTP" } }]);
        networking(
            "Gateway",
            "knative-serving",
            name,
            json!({ "selector": measured(), "servers": servers }),
        )
    };
    let fixed = [
        entrance("external", "istio-ingressgateway", 8080),
        entrance("internal", "knative-local-gateway", 8081),
        gateway("knative-ingress-gateway", 80),
        gateway("knative-local-gateway", 8081),
    ];
    fixed.into_iter().chain((0..count).map(revision)).collect()
}

/// The routes to one revision: for each gateway those of a probe, and the others.
fn revision(number: usize) -> Value {
    let (outside, inside) = (
        "knative-serving/knative-ingress-gateway",
        "knative-serving/knative-local-gateway",
    );
    let name = format!("greeter-{number}");
    let named = json!({ "Knative-Serving-Namespace": "default", "Knative-Serving-Revision": name });
    let route = json!([{ "destination": { "host": format!("{name}.default.svc.cluster.local"),
        "port": { "number": 80 } },
        "headers": { "request": { "set": named } }, "weight": 100 }]);
    let probed = json!({ "K-Network-Hash": { "exact": "override" } });
    let set = json!({ "request": { "set": { "K-Network-Hash": format!("{:064x}", 0x000a_11ce) } } });
    let routes = |gateway: &str, authority: &str| {
        let matched = json!({ "authority": { "prefix": authority }, "gateways": [gateway] });
        let mut probe = matched.clone();
        probe["headers"] = probed.clone();
        [
            json!({ "headers": set, "match": [probe], "route": route }),
            json!({ "match": [matched], "route": route }),
        ]
    };
    let (own, public) = ("greeter.default", "greeter.default.external.domain");
    let http = [routes(inside, own), routes(outside, public)].concat();
    let hosts = [own, public, "greeter.default.svc", "greeter.default.svc.cluster.local"];
    let spec = json!({ "gateways": [outside, inside], "hosts": hosts, "http": http });
    networking("VirtualService", NAMESPACE, &format!("greeter-ingress-{number}"), spec)
}

/// A workload with ports of every kind, under one PeerAuthentication.
pub(super) fn mutual_tls_mode(mode: &str) -> Vec<Value> {
    let policy = object(
        "security.istio.io/v1",
        "PeerAuthentication",
        NAMESPACE,
        "default",
        json!({ "mtls": { "mode": mode } }),
    );
    vec![own_service(&MIXED, &json!({}), false), policy]
}

/// ExternalName services.
pub(super) fn external_names(count: usize) -> Vec<Value> {
    let alias = |number: usize| {
        let spec = json!({ "type": "ExternalName", "externalName": format!("backend-{number}.example.com"),
            "ports": [{ "port": 80, "name": "http" }] });
        object("v1", "Service", NAMESPACE, &format!("backend-{number}"), spec)
    };
    let own = own_service(&[HTTP], &mutual_tls(), true);
    std::iter::once(own).chain((0..count).map(alias)).collect()
}

/// Services with four ports each, and access logs.
pub(super) fn telemetry(count: usize) -> Vec<Value> {
    let spec = json!({ "metrics": [{ "providers": [{ "name": "prometheus" }] }],
        "accessLogging": [{ "providers": [{ "name": LOG }] }] });
    let logs = object("telemetry.istio.io/v1", "Telemetry", "istio-system", "logs", spec);
    let fixed = [logs, own_service(&MIXED, &json!({}), false)];
    fixed
        .into_iter()
        .chain((0..count).map(|number| external(number, &MIXED)))
        .collect()
}

const LOG: &str = "json-log";

/// The mesh config: an access log provider.
pub(super) fn mesh_config() -> Value {
    json!({ "extensionProviders": [{ "name": LOG,
        "envoyFileAccessLog": { "path": "/dev/stdout", "logFormat": { "labels": {} } } }] })
}

/// A VirtualService for each service.
pub(super) fn virtual_services(count: usize) -> Vec<Value> {
    let routed = |number: usize| {
        let matches = json!([{ "uri": { "prefix": "/old" } }, { "uri": { "regex": "/any" } }]);
        let routes = json!([{ "name": "renamed", "match": matches, "rewrite": { "uri": "/renamed" },
            "route": [{ "destination": { "host": host(number) } }] }]);
        let spec = json!({ "hosts": [host(number)], "http": routes });
        let name = format!("routed-{number}");
        [
            networking("VirtualService", NAMESPACE, &name, spec),
            external(number, &[HTTP]),
        ]
    };
    let own = own_service(&[HTTP], &json!({}), false);
    std::iter::once(own).chain((0..count).flat_map(routed)).collect()
}

/// Many AuthorizationPolicies.
pub(super) fn authorization_policies(count: usize) -> Vec<Value> {
    let policy = |number: usize| {
        let rule = json!({ "from": [{ "source": { "namespaces": ["default"] } }],
            "to": [{ "operation": { "methods": ["POST"] } }] });
        let spec = json!({ "action": "DENY", "rules": [rule] });
        object(
            "security.istio.io/v1",
            "AuthorizationPolicy",
            NAMESPACE,
            &format!("deny-{number}"),
            spec,
        )
    };
    let own = own_service(&[HTTP, HTTPS], &measured(), false);
    std::iter::once(own).chain((0..count).map(policy)).collect()
}

/// Services that select WorkloadEntries.
pub(super) fn workload_entries(count: usize, workloads: usize) -> Vec<Value> {
    let app = |number: usize| json!({ "app": format!("backend-{number}") });
    let service = |number: usize| {
        let spec = json!({ "hosts": [host(number)], "ports": ports(&MIXED), "resolution": "STATIC",
            "location": "MESH_INTERNAL", "workloadSelector": { "labels": app(number) } });
        networking("ServiceEntry", NAMESPACE, &format!("backend-{number}"), spec)
    };
    let workload = |number: usize| {
        let spec = json!({ "address": address("240.241", number), "labels": app(number % count),
            "serviceAccount": "backend" });
        networking("WorkloadEntry", NAMESPACE, &format!("backend-{number}"), spec)
    };
    let own = own_service(&MIXED, &mutual_tls(), true);
    let all = std::iter::once(own).chain((0..count).map(service));
    all.chain((0..workloads).map(workload)).collect()
}

/// Services with this number of endpoints each, on four networks.
pub(super) fn endpoints(endpoints: usize, services: usize) -> Vec<Value> {
    let endpoint = |number: usize| {
        json!({ "address": address("111.1", number), "network": format!("network-{}", number % 4),
            "labels": { "kind": "measured" }, "serviceAccount": "backend" })
    };
    let service = |number: usize| {
        let spec = json!({ "hosts": [host(number)], "ports": ports(&[HTTP]), "resolution": "STATIC",
            "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>() });
        networking("ServiceEntry", NAMESPACE, &format!("backend-{number}"), spec)
    };
    (0..services).map(service).collect()
}

/// A gateway with many certificates, each with a certificate chain.
pub(super) fn secrets(count: usize) -> Vec<Value> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("key generation succeeds");
    let certificate =
        CertificateParams::new(vec!["public.example".to_owned()]).and_then(|params| params.self_signed(&key));
    let chain = certificate.expect("the name is a DNS name").pem().repeat(4);
    let (chain, key) = (
        BASE64_STANDARD.encode(chain),
        BASE64_STANDARD.encode(key.serialize_pem()),
    );
    let name = |number: usize| format!("certificate-{number}");
    let secret = |number: usize| {
        json!({ "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
            "metadata": { "name": name(number), "namespace": NAMESPACE },
            "data": { "tls.crt": chain, "tls.key": key } })
    };
    let server = |number: usize| {
        json!({ "port": { "number": 443, "name": format!("https-{number}"), "protocol": "HTTPS" },
            "hosts": [format!("public-{number}.example")],
            "tls": { "mode": "SIMPLE", "credentialName": name(number) } })
    };
    let servers: Vec<_> = (0..count).map(server).collect();
    let spec = json!({ "selector": measured(), "servers": servers });
    let fixed = [
        own_service(&[HTTPS], &measured(), false),
        networking("Gateway", NAMESPACE, "edge", spec),
    ];
    fixed.into_iter().chain((0..count).map(secret)).collect()
}
