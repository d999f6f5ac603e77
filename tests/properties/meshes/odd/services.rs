//! Services of all types, ServiceEntries and their endpoints.

use serde_json::{Value, json};

use super::{export_to, istio, selector};
use crate::properties::corpus::{APPS, HOSTS, NAMESPACES};
use crate::support::random::Random;

/// Ports with names, protocols and numbers, some of which say different things.
const PORTS: [(&str, u32, &str); 16] = [
    ("http", 80, ""),
    ("http-too", 8080, ""),
    ("grpc-api", 81, ""),
    ("tcp", 82, ""),
    ("", 83, ""),
    ("https", 443, ""),
    ("tls-x", 15443, ""),
    ("mongo", 27017, ""),
    ("mysql-db", 3306, ""),
    ("redis", 6379, ""),
    ("foo-bar", 80, ""),
    ("http2", 81, "kubernetes.io/h2c"),
    ("web", 82, "kubernetes.io/ws"),
    ("tcp-x", 80, "http"),
    ("grpc-web", 7072, ""),
    ("udp-dns", 53, ""),
];

fn port(random: &mut Random, index: usize) -> Value {
    let (name, number, protocol) = PORTS[random.below(PORTS.len())];
    // A Service with one port may leave out its name; names within a Service differ.
    let name = match (name, index) {
        ("", 0) => String::new(),
        (name, 0) => name.to_owned(),
        (name, _) => format!("{name}-{index}"),
    };
    let transport = if number == 53 { "UDP" } else { "TCP" };
    let target = if random.one_in(3) { number + 1000 } else { number };
    let mut port = json!({ "name": name, "port": number, "targetPort": target, "protocol": transport });
    if !protocol.is_empty() {
        port["appProtocol"] = json!(protocol);
    }
    port
}

/// Ports with different numbers.
fn ports(random: &mut Random) -> Vec<Value> {
    let mut ports: Vec<Value> = Vec::new();
    for index in 0..=random.below(4) {
        let port = port(random, index);
        if ports.iter().all(|other| other["port"] != port["port"]) {
            ports.push(port);
        }
    }
    ports
}

pub(super) fn service(random: &mut Random, mut meta: Value) -> Value {
    let app = random.pick(&APPS);
    let mut labels = json!({ "app": app });
    match random.below(6) {
        0 => labels["istio.io/use-waypoint"] = json!("w0"),
        1 => labels["topology.istio.io/network"] = json!("n1"),
        _ => {}
    }
    meta["labels"] = labels;
    match random.below(6) {
        0 => meta["annotations"] = json!({ "networking.istio.io/exportTo": random.pick(&[".", "a,b", "~", "*"]) }),
        1 => meta["annotations"] = json!({ "networking.istio.io/traffic-distribution": "PreferClose" }),
        _ => {}
    }
    let address = format!("10.2.0.{}", random.below(30));
    let mut spec =
        json!({ "type": "ClusterIP", "ports": ports(random), "clusterIP": address, "clusterIPs": [address] });
    if !random.one_in(5) {
        spec["selector"] = json!({ "app": app });
    }
    match random.below(8) {
        0 => {
            spec["clusterIP"] = json!("None");
            spec["clusterIPs"] = json!(["None"]);
            spec["publishNotReadyAddresses"] = json!(random.one_in(2));
        }
        1 => {
            let target = random.pick(&["outside.example.com", "s0.a.svc.cluster.local", "ext.example.com"]);
            spec = json!({ "type": "ExternalName", "externalName": target, "ports": spec["ports"] });
        }
        2 => {
            spec["type"] = json!("LoadBalancer");
            spec["externalIPs"] = json!(["203.0.113.7"]);
        }
        3 => spec["type"] = json!("NodePort"),
        4 => {
            spec["clusterIPs"] = json!([address, "fd00::5"]);
            spec["ipFamilies"] = json!(["IPv4", "IPv6"]);
        }
        5 => spec["internalTrafficPolicy"] = json!("Local"),
        _ => {}
    }
    let mut service = json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec });
    if service["spec"]["type"] == "LoadBalancer" {
        service["status"] = json!({ "loadBalancer": { "ingress": [{ "ip": "203.0.113.8" }] } });
    }
    service
}

pub(super) fn endpoint_slice(random: &mut Random, mut meta: Value) -> Value {
    let app = meta["name"].clone();
    meta["labels"] = json!({ "kubernetes.io/service-name": app });
    meta["name"] = json!(format!("{}-{}", app.as_str().unwrap_or_default(), random.below(3)));
    let family = random.pick(&["IPv4", "IPv4", "IPv6"]);
    let endpoints: Vec<Value> = (0..random.below(5))
        .map(|_| {
            let last = random.below(10);
            let address = if family == "IPv6" {
                format!("fd00::{last}")
            } else {
                format!("10.1.0.{last}")
            };
            json!({ "addresses": [address], "nodeName": random.pick(&["n0", "n1"]),
                "conditions": { "ready": !random.one_in(4), "serving": true, "terminating": random.one_in(6) } })
        })
        .collect();
    let ports: Vec<Value> = ports(random)
        .into_iter()
        .map(|port| json!({ "name": port["name"], "port": port["targetPort"], "protocol": port["protocol"] }))
        .collect();
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, "addressType": family,
        "ports": ports, "endpoints": endpoints })
}

pub(super) fn service_entry(random: &mut Random, meta: Value) -> Value {
    let mut hosts = vec![entry_host(random)];
    if random.one_in(3) {
        hosts.push(entry_host(random));
        hosts.dedup();
    }
    let has_wildcard = hosts.iter().any(|host| host.starts_with('*'));
    let protocols = ["HTTP", "HTTP2", "GRPC", "TCP", "TLS", "HTTPS", "MONGO"];
    let mut ports: Vec<Value> = Vec::new();
    for index in 0..=random.below(3) {
        let number = [80, 81, 82, 443, 8080, 9999][random.below(6)];
        if ports.iter().all(|port| port["number"] != number) {
            let mut port = json!({ "number": number, "name": format!("p{index}"),
                "protocol": random.pick(&protocols) });
            if random.one_in(3) {
                port["targetPort"] = json!(number + 1);
            }
            ports.push(port);
        }
    }
    let resolutions: &[&str] = if has_wildcard {
        &["NONE", "STATIC"]
    } else {
        &["NONE", "STATIC", "DNS", "DNS_ROUND_ROBIN"]
    };
    let resolution = random.pick(resolutions);
    let mut spec = json!({ "hosts": hosts, "ports": ports, "resolution": resolution, "exportTo": export_to(random),
        "location": random.pick(&["MESH_EXTERNAL", "MESH_INTERNAL"]) });
    if random.one_in(2) {
        let addresses = ["10.3.0.1", "10.3.1.0/24", "10.2.0.5", "fd00::9", "10.3.0.2"];
        spec["addresses"] = json!([random.pick(&addresses), "10.3.0.9"]);
    }
    let is_dns = resolution.starts_with("DNS");
    if resolution == "STATIC" && random.one_in(3) {
        spec["workloadSelector"] = json!({ "labels": { "app": random.pick(&APPS) } });
    } else if resolution != "NONE" && (resolution == "STATIC" || random.one_in(2)) {
        let addresses: &[&str] = if is_dns {
            &["up.example.com", "10.4.0.1"]
        } else {
            &["10.4.0.1", "10.4.0.2", "fd00::7"]
        };
        // An endpoint with DNS names is not mixed with others.
        let endpoints: Vec<Value> = (0..=random.below(if is_dns { 1 } else { 3 }))
            .map(|_| {
                let mut endpoint = json!({ "address": random.pick(addresses), "weight": random.below(5),
                    "labels": { "version": random.pick(&["v1", "v2"]) } });
                if random.one_in(3) {
                    endpoint["locality"] = json!("r2/z1");
                    endpoint["network"] = json!(random.pick(&["n1", "n2"]));
                }
                endpoint
            })
            .collect();
        spec["endpoints"] = json!(endpoints);
    }
    if random.one_in(4) {
        spec["subjectAltNames"] = json!(["spiffe://cluster.local/ns/x/sa/y"]);
    }
    istio("networking", "ServiceEntry", meta, spec)
}

/// A host of a ServiceEntry, which a Service may have too.
fn entry_host(random: &mut Random) -> String {
    match random.below(8) {
        0 => "*.example.com".to_owned(),
        1 => "*.wild.example.com".to_owned(),
        2 => format!("{}.{}.svc.cluster.local", random.pick(&APPS), random.pick(&NAMESPACES)),
        3 => "db.internal".to_owned(),
        _ => random.pick(&HOSTS[4..]).to_owned(),
    }
}

pub(super) fn workload_entry(random: &mut Random, meta: Value) -> Value {
    let mut spec = json!({ "address": random.pick(&["10.9.0.1", "10.9.0.2", "10.1.0.1", "fd00::8"]),
        "labels": { "app": random.pick(&APPS), "version": random.pick(&["v1", "v2"]) }, "serviceAccount": "sa",
        "weight": random.below(3) });
    if random.one_in(3) {
        spec["ports"] = json!({ "http": 8081, "p0": 9000 });
    }
    if random.one_in(3) {
        spec["network"] = json!("n1");
    }
    if selector(random).is_null() {
        spec["locality"] = json!("r2/z1");
    }
    istio("networking", "WorkloadEntry", meta, spec)
}
