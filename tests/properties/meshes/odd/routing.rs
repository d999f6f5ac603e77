//! VirtualServices, DestinationRules, Gateways and Sidecars.

use serde_json::{Value, json};

use super::{export_to, istio, selector};
use crate::properties::corpus::{APPS, HOSTS, NAMESPACES};
use crate::support::random::Random;

const PORTS: [u32; 6] = [80, 81, 82, 443, 8080, 9999];

/// A host of a service, perhaps in its short form, or a wildcard.
fn host(random: &mut Random) -> String {
    match random.below(10) {
        0 => random.pick(&APPS).to_owned(),
        1 => format!("{}.{}", random.pick(&APPS), random.pick(&NAMESPACES)),
        2 => "*.example.com".to_owned(),
        3 => "*.a.svc.cluster.local".to_owned(),
        4 => "*".to_owned(),
        5 | 6 => random.pick(&HOSTS[4..]).to_owned(),
        _ => format!("{}.{}.svc.cluster.local", random.pick(&APPS), random.pick(&NAMESPACES)),
    }
}

fn exact_host(random: &mut Random) -> String {
    loop {
        let host = host(random);
        if !host.contains('*') {
            return host;
        }
    }
}

fn destination(random: &mut Random) -> Value {
    let mut destination = json!({ "host": exact_host(random) });
    if random.one_in(2) {
        destination["subset"] = json!(random.pick(&["v1", "v2", "none"]));
    }
    if random.one_in(2) {
        destination["port"] = json!({ "number": PORTS[random.below(PORTS.len())] });
    }
    destination
}

fn destinations(random: &mut Random) -> Vec<Value> {
    let count = 1 + random.below(2);
    let each = |random: &mut Random| json!({ "destination": destination(random), "weight": 100 / count });
    (0..count).map(|_| each(random)).collect()
}

fn gateways(random: &mut Random) -> Value {
    match random.below(4) {
        0 => json!(["a/s0", "mesh"]),
        1 => json!([random.pick(&APPS)]),
        2 => json!(["istio-system/s1", "b/s1"]),
        _ => json!(["mesh"]),
    }
}

pub(super) fn virtual_service(random: &mut Random, meta: Value) -> Value {
    let mut hosts = vec![host(random)];
    if random.one_in(3) {
        let second = host(random);
        if second != hosts[0] {
            hosts.push(second);
        }
    }
    let mut spec = json!({ "hosts": hosts, "gateways": gateways(random), "exportTo": export_to(random) });
    let with_tls = random.one_in(5);
    if with_tls {
        // SNI hosts must be below the hosts.
        let sni: Vec<&String> = hosts
            .iter()
            .filter(|host| host.contains('.') && host.as_str() != "*")
            .collect();
        if !sni.is_empty() {
            spec["tls"] = json!([{ "match": [{ "port": 443, "sniHosts": sni }], "route": destinations(random) }]);
        }
    }
    if random.one_in(5) {
        let mut route = json!({ "route": destinations(random) });
        if random.one_in(2) {
            route["match"] = json!([{ "port": PORTS[random.below(PORTS.len())] }]);
        }
        spec["tcp"] = json!([route]);
    }
    let routes: Vec<Value> = (0..=random.below(3)).map(|_| http_route(random)).collect();
    spec["http"] = json!(routes);
    istio("networking", "VirtualService", meta, spec)
}

fn http_route(random: &mut Random) -> Value {
    let mut route = match random.below(6) {
        0 => json!({ "redirect": { "uri": "/r", "authority": "r.example.com", "redirectCode": 302 } }),
        1 => json!({ "directResponse": { "status": 503, "body": { "string": "x" } } }),
        _ => json!({ "route": destinations(random) }),
    };
    if random.one_in(2) {
        let matches: Vec<Value> = (0..=random.below(2)).map(|_| http_match(random)).collect();
        route["match"] = json!(matches);
    }
    if !route["route"].is_null() {
        match random.below(8) {
            0 => route["rewrite"] = json!({ "uri": "/w", "authority": "w.example.com" }),
            1 => route["mirrors"] = json!([{ "destination": destination(random), "percentage": { "value": 5.0 } }]),
            2 => route["retries"] = json!({ "attempts": 2, "perTryTimeout": "1s", "retryOn": "5xx,reset" }),
            3 => {
                route["fault"] = json!({ "abort": { "httpStatus": 500, "percentage": { "value": 1.0 } },
                "delay": { "fixedDelay": "1s", "percentage": { "value": 1.0 } } });
            }
            4 => {
                route["corsPolicy"] = json!({ "allowOrigins": [{ "exact": "https://a.example.com" }],
                "allowMethods": ["GET"], "maxAge": "60s" });
            }
            5 => {
                route["headers"] = json!({ "request": { "set": { "x-a": "b" }, "remove": ["x-c"] },
                "response": { "add": { "x-d": "e" } } });
            }
            6 => route["timeout"] = json!("3s"),
            _ => {}
        }
    }
    route
}

fn http_match(random: &mut Random) -> Value {
    match random.below(8) {
        0 => json!({ "uri": { "exact": "/e" }, "method": { "exact": "GET" } }),
        1 => json!({ "uri": { "regex": "/r[0-9]+" }, "ignoreUriCase": false }),
        2 => json!({ "headers": { "x-h": { "prefix": "p" } }, "withoutHeaders": { "x-n": {} } }),
        3 => json!({ "port": PORTS[random.below(PORTS.len())] }),
        4 => json!({ "sourceLabels": { "app": random.pick(&APPS) }, "uri": { "prefix": "/s" } }),
        5 => json!({ "authority": { "exact": "s0.a.svc.cluster.local" }, "queryParams": { "q": { "exact": "1" } } }),
        6 => json!({ "sourceNamespace": random.pick(&NAMESPACES), "scheme": { "exact": "http" } }),
        _ => json!({ "uri": { "prefix": "/p" }, "ignoreUriCase": true, "gateways": ["mesh"] }),
    }
}

fn traffic_policy(random: &mut Random) -> Value {
    match random.below(10) {
        0 => json!({ "loadBalancer": { "simple": random.pick(&["RANDOM", "LEAST_REQUEST", "PASSTHROUGH"]) } }),
        1 => json!({ "loadBalancer": { "consistentHash": { "httpCookie": { "name": "c", "ttl": "5s" } } } }),
        2 => json!({ "loadBalancer": { "consistentHash": { "useSourceIp": true, "maglev": { "tableSize": 101 } } } }),
        3 => json!({ "outlierDetection": { "consecutive5xxErrors": 3, "interval": "5s", "baseEjectionTime": "5s" } }),
        4 => json!({ "connectionPool": { "http": { "h2UpgradePolicy": "UPGRADE", "maxRequestsPerConnection": 2 },
            "tcp": { "connectTimeout": "2s" } } }),
        5 => json!({ "tls": { "mode": random.pick(&["ISTIO_MUTUAL", "DISABLE"]) } }),
        6 => json!({ "tls": { "mode": "SIMPLE", "sni": "x.example.com", "subjectAltNames": ["x.example.com"] } }),
        7 => json!({ "portLevelSettings": [{ "port": { "number": 80 }, "tls": { "mode": "ISTIO_MUTUAL" } },
            { "port": { "number": 82 }, "loadBalancer": { "simple": "ROUND_ROBIN" } }] }),
        8 => json!({ "proxyProtocol": { "version": "V2" } }),
        _ => json!({ "loadBalancer": { "simple": "ROUND_ROBIN", "warmup": { "duration": "10s" } } }),
    }
}

pub(super) fn destination_rule(random: &mut Random, meta: Value) -> Value {
    let mut subsets = Vec::new();
    for name in ["v1", "v2"] {
        if random.one_in(2) {
            let mut subset = json!({ "name": name, "labels": { "version": name } });
            if random.one_in(3) {
                subset["trafficPolicy"] = traffic_policy(random);
            }
            subsets.push(subset);
        }
    }
    let mut spec = json!({ "host": host(random), "exportTo": export_to(random), "subsets": subsets });
    if random.one_in(2) {
        spec["trafficPolicy"] = traffic_policy(random);
    }
    let labels = selector(random);
    if !labels.is_null() && random.one_in(3) {
        spec["workloadSelector"] = json!({ "matchLabels": labels });
    }
    istio("networking", "DestinationRule", meta, spec)
}

pub(super) fn gateway(random: &mut Random, meta: Value) -> Value {
    let servers: Vec<Value> = (0..=random.below(3)).map(|index| server(random, index)).collect();
    istio(
        "networking",
        "Gateway",
        meta,
        json!({ "selector": { "istio": "gw" }, "servers": servers }),
    )
}

fn server(random: &mut Random, index: usize) -> Value {
    let prefix = random.pick(&["", "*/", "./", "b/"]);
    let host = match host(random) {
        short if !short.contains(['.', '*']) => "s0.a.svc.cluster.local".to_owned(),
        host => host,
    };
    let hosts = json!([format!("{prefix}{host}")]);
    let (port, protocol, tls) = match random.below(8) {
        0 => (
            443,
            "HTTPS",
            json!({ "mode": "SIMPLE", "credentialName": random.pick(&APPS) }),
        ),
        1 => (
            443,
            "HTTPS",
            json!({ "mode": "MUTUAL", "credentialName": random.pick(&APPS) }),
        ),
        2 => (443, "TLS", json!({ "mode": "PASSTHROUGH" })),
        3 => (15443, "TLS", json!({ "mode": "AUTO_PASSTHROUGH" })),
        4 => (82, "TCP", Value::Null),
        5 => (443, "HTTPS", json!({ "mode": "ISTIO_MUTUAL" })),
        6 => (8080, "HTTP2", Value::Null),
        _ => (80, "HTTP", json!({ "httpsRedirect": random.one_in(2) })),
    };
    let mut server = json!({ "port": { "number": port, "name": format!("{}-{index}", protocol.to_lowercase()),
        "protocol": protocol }, "hosts": hosts, "name": format!("s{index}") });
    if !tls.is_null() {
        server["tls"] = tls;
    }
    if random.one_in(8) {
        server["bind"] = json!("10.1.0.9");
    }
    server
}

pub(super) fn sidecar(random: &mut Random, meta: Value) -> Value {
    let mut spec = json!({});
    let labels = selector(random);
    if !labels.is_null() {
        spec["workloadSelector"] = json!({ "labels": labels });
    }
    let hosts = |random: &mut Random| match random.below(6) {
        0 => json!(["./*"]),
        1 => json!(["b/*", "./*"]),
        2 => json!(["*/ext.example.com", "a/s0.a.svc.cluster.local"]),
        3 => json!(["*/*.example.com"]),
        4 => json!(["~/*"]),
        _ => json!(["*/*"]),
    };
    let mut egress = Vec::new();
    for number in [80, 82, 9999] {
        if random.one_in(4) {
            let mut listener = json!({ "port": { "number": number, "name": format!("e{number}"),
                "protocol": random.pick(&["HTTP", "TCP", "GRPC", "HTTP_PROXY"]) }, "hosts": hosts(random) });
            if random.one_in(2) {
                listener["bind"] = json!(random.pick(&["127.0.0.1", "0.0.0.0"]));
                listener["captureMode"] = json!(random.pick(&["NONE", "DEFAULT"]));
            }
            egress.push(listener);
        }
    }
    if egress.is_empty() || random.one_in(2) {
        egress.push(json!({ "hosts": hosts(random) }));
    }
    spec["egress"] = json!(egress);
    if !spec["workloadSelector"].is_null() && random.one_in(2) {
        let ports = [7443, 8443];
        let ingress: Vec<Value> = (0..=random.below(2))
            .map(|index| {
                json!({ "port": { "number": ports[index], "name": format!("i{index}"),
                    "protocol": random.pick(&["HTTP", "TCP", "TLS", "HTTP2"]) },
                    "defaultEndpoint": random.pick(&["127.0.0.1:8080", "0.0.0.0:8080", "unix:///var/run/x"]) })
            })
            .collect();
        spec["ingress"] = json!(ingress);
    }
    if random.one_in(3) {
        spec["outboundTrafficPolicy"] = json!({ "mode": random.pick(&["ALLOW_ANY", "REGISTRY_ONLY"]) });
    }
    istio("networking", "Sidecar", meta, spec)
}
