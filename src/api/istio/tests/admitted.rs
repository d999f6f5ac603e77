//! Objects that Istio's webhook admits, and violations that only admission refuses. All of these objects apply, without
//! the parts that have no effect.

use super::{TO_A, bad, good, parsed, warned};
use crate::{
    api::{
        diagnostics::REFUSED,
        document::{self, ParsedDocument},
        yaml,
    },
    base::ClusterId,
};

/// Returns the fields with diagnostics of an object that applies, each with true if admission refuses the object.
#[track_caller]
fn found(document: &ParsedDocument) -> Vec<(&str, bool)> {
    assert_eq!(document.rows.len(), 1, "{:?}", document.diagnostics);
    let found = document.diagnostics.iter();
    found
        .map(|found| (found.field.as_str(), found.code.as_str() == REFUSED))
        .collect()
}

/// Asserts one warning about an object that admission admits.
#[track_caller]
fn admitted(kind: &str, spec: &str, field: &str) {
    let field = format!("spec{field}");
    assert_eq!(found(&parsed(kind, spec)), [(field.as_str(), false)], "{kind} {spec}");
}

/// Asserts that admission refuses an object because of a field.
#[track_caller]
fn refused(kind: &str, spec: &str, field: &str) {
    let (parsed, field) = (parsed(kind, spec), format!("spec{field}"));
    let found = found(&parsed);
    assert!(found.contains(&(field.as_str(), true)), "{kind} {spec}: {found:?}");
}

#[test]
fn routes_apply_without_incomplete_faults() {
    let fault = |fault: &str| format!("{{hosts: [a], http: [{{{TO_A}, fault: {{{fault}}}}}]}}");
    for (spec, field) in [
        ("delay: {percentage: {value: 50}}", "delay"),
        ("delay: {percent: 150, fixedDelay: 1s}", "delay.percent"),
        ("abort: {percentage: {value: 50}}", "abort"),
    ] {
        admitted("VirtualService", &fault(spec), &format!(".http[0].fault.{field}"));
    }
    for (spec, field) in [
        ("delay: {exponentialDelay: 1s}", "delay.exponentialDelay"),
        ("abort: {http2Error: x}", "abort.http2Error"),
        (
            "abort: {httpStatus: 503, percentage: {value: 0.00001}}",
            "abort.percentage",
        ),
    ] {
        refused("VirtualService", &fault(spec), &format!(".http[0].fault.{field}"));
    }
}

#[test]
fn gateways_route_by_the_server_names_of_clusters() {
    let name = "outbound_.80_._.a.ns.svc.cluster.local";
    let tls = format!("tls: [{{match: [{{port: 15443, sniHosts: ['{name}']}}], {TO_A}}}]");
    let spec = |gateways: &str| format!("{{hosts: ['{name}'], gateways: [{gateways}], {tls}}}");
    good("VirtualService", &spec("gw"));
    let fields = [".hosts[0]", ".tls[0].match[0].sniHosts[0]"];
    bad("VirtualService", &spec("gw, mesh"), &fields);
    let http = format!("{{hosts: ['{name}'], gateways: [gw], http: [{{{TO_A}}}]}}");
    bad("VirtualService", &http, &[".hosts[0]"]);
}

#[test]
fn delegates_may_lack_names_and_routes() {
    let delegating =
        format!("{{hosts: [a], http: [{{match: [{{uri: {{prefix: /x}}}}], delegate: {{}}}}, {{{TO_A}}}]}}");
    admitted("VirtualService", &delegating, ".http[0].delegate.name");
    good(
        "VirtualService",
        "{hosts: [a], http: [{delegate: {name: d}, directResponse: {status: 503}, fault: {abort: {httpStatus: 503}}}]}",
    );
}

#[test]
fn gateways_of_virtual_services_have_valid_names() {
    let bound = |gateways: &str| format!("{{hosts: [a.com], gateways: [{gateways}], http: [{{{TO_A}}}]}}");
    // Names after one without a slash are not checked.
    admitted("VirtualService", &bound("mesh, a_b/gw"), ".gateways[1]");
    for gateways in ["a_b/gw, mesh", "./gw", "ns/a.b"] {
        refused("VirtualService", &bound(gateways), ".gateways[0]");
    }
}

#[test]
fn matches_of_connections_and_hosts_are_checked() {
    let tcp = format!("{{hosts: [a], tcp: [{{match: [{{sourceNamespace: a_b}}], {TO_A}}}]}}");
    good("VirtualService", &tcp);
    let name = "outbound_.80_._.x.a.com";
    let tls = format!("{{hosts: ['*.a.com'], tls: [{{match: [{{sniHosts: ['{name}']}}], {TO_A}}}]}}");
    good("VirtualService", &tls);
    let address = format!("{{hosts: [a.com], tls: [{{match: [{{sniHosts: [10.0.0.1]}}], {TO_A}}}]}}");
    admitted("VirtualService", &address, ".tls[0].match[0].sniHosts[0]");
    let zoned = format!("{{hosts: ['fe80::1%eth0'], http: [{{{TO_A}}}]}}");
    good("VirtualService", &zoned);
}

#[test]
fn destinations_of_http_routes_are_checked() {
    let port = "{hosts: [a], http: [{redirect: {uri: /x, port: 70000}}]}";
    refused("VirtualService", port, ".http[0].redirect.port");
    let subset =
        |name: &str| format!("{{hosts: [a], http: [{{route: [{{destination: {{host: a, subset: {name}}}}}]}}]}}");
    let field = ".http[0].route[0].destination.subset";
    refused("VirtualService", &subset("v1_0"), field);
    bad("VirtualService", &subset("'a|b'"), &[field]);
}

#[test]
fn fields_of_http_routes_are_checked() {
    let http = |more: &str| format!("{{hosts: [a], http: [{{{TO_A}, {more}}}]}}");
    // Istio's expression for names of headers has the comma.
    good(
        "VirtualService",
        &http("corsPolicy: {allowHeaders: ['x-a,x-b'], exposeHeaders: ['*']}, match: [{headers: {'a,b': {exact: v}}}]"),
    );
    let broken = http("corsPolicy: {allowMethods: [GET], exposeHeaders: [\"a\\n\"]}");
    assert!(parsed("VirtualService", &broken).rows.is_empty());
    let added = http("headers: {request: {add: {'x y': z}}}");
    admitted("VirtualService", &added, ".http[0].headers.request.add");
    let removed = http("headers: {response: {remove: ['x:']}}");
    admitted("VirtualService", &removed, ".http[0].headers.response.remove[0]");
    for (more, field) in [
        ("match: [{headers: {':x': {exact: v}}}]", "match[0].headers.:x"),
        ("retries: {retryRemoteLocalities: true}", "retries"),
        ("match: [{headers: {x: {regex: '*'}}}]", "match[0].headers.x"),
        ("match: [{queryParams: {x: {regex: '*'}}}]", "match[0].queryParams.x"),
        ("retries: {attempts: 1, perTryTimeout: 0s}", "retries.perTryTimeout"),
        ("retries: {attempts: 1, retryOn: connect-error}", "retries.retryOn"),
        ("retries: {attempts: 1, retryOn: '5xx, reset'}", "retries.retryOn"),
        ("retries: {attempts: 1, retryOn: '5xx,'}", "retries.retryOn"),
        ("retries: {attempts: 1, retryOn: '499'}", "retries.retryOn"),
        ("corsPolicy: {allowMethods: [get]}", "corsPolicy.allowMethods[0]"),
        ("corsPolicy: {allowHeaders: ['x-a, x-b']}", "corsPolicy.allowHeaders[0]"),
        ("corsPolicy: {maxAge: 1.5s}", "corsPolicy.maxAge"),
        ("timeout: 1000500us", "timeout"),
    ] {
        refused("VirtualService", &http(more), &format!(".http[0].{field}"));
    }
}

/// Returns the spec of a DestinationRule with a traffic policy, in which localities have an effect.
fn policy(policy: &str) -> String {
    format!("{{host: a, trafficPolicy: {{outlierDetection: {{}}, {policy}}}}}")
}

fn balancer(settings: &str) -> String {
    policy(&format!("loadBalancer: {{{settings}}}"))
}

fn locality(settings: &str) -> String {
    balancer(&format!("localityLbSetting: {{{settings}}}"))
}

#[test]
fn subsets_have_valid_names_and_labels() {
    let long = "x".repeat(64);
    good(
        "DestinationRule",
        &format!("{{host: a, subsets: [{{name: s, labels: {{version: {long}}}}}]}}"),
    );
    good(
        "DestinationRule",
        "{host: a, subsets: [{name: s, labels: {release.1/x: a}}]}",
    );
    for key in ["release./x", "/x", "a_b/x"] {
        let labelled = format!("{{host: a, subsets: [{{name: s, labels: {{{key}: a}}}}]}}");
        bad("DestinationRule", &labelled, &[".subsets[0].labels"]);
    }
    refused(
        "DestinationRule",
        "{host: a, subsets: [{name: v1.0}]}",
        ".subsets[0].name",
    );
    bad(
        "DestinationRule",
        "{host: a, subsets: [{name: 'a|b'}]}",
        &[".subsets[0].name"],
    );
}

#[test]
fn destination_rules_apply_without_parts_that_have_no_effect() {
    admitted(
        "DestinationRule",
        "{host: a, workloadSelector: {}}",
        ".workloadSelector",
    );
    for (spec, field) in [
        (
            balancer("consistentHash: {ringHash: {minimumRingSize: 1024}}"),
            "loadBalancer.consistentHash",
        ),
        (
            balancer("consistentHash: {httpHeaderName: x y}"),
            "loadBalancer.consistentHash.httpHeaderName",
        ),
        (
            policy("portLevelSettings: [{port: {number: 0}, tls: {mode: DISABLE}}]"),
            "portLevelSettings[0].port.number",
        ),
    ] {
        admitted("DestinationRule", &spec, &format!(".trafficPolicy.{field}"));
    }
}

#[test]
fn unusual_traffic_policies_are_accepted() {
    for spec in [
        policy("tls: {mode: ISTIO_MUTUAL, credentialName: c, caCertificates: /x}"),
        policy("tls: {mode: SIMPLE, credentialName: 'configmap://ns/x'}"),
        locality("distribute: [{from: a, to: {b: 100}}], failoverPriority: [x]"),
        locality("failover: [{from: a, to: b}], failoverPriority: [x]"),
        locality("failover: [{to: b}]"),
        // Each entry has the localities that no earlier one has.
        locality("distribute: [{from: a/b, to: {c: 100}}, {from: 'a/*', to: {c: 100}}, {from: '*', to: {c: 100}}]"),
        balancer("consistentHash: {useSourceIp: true, maglev: {tableSize: 1}}"),
        // Zero disables the timeout.
        policy("connectionPool: {tcp: {idleTimeout: 0s}}"),
        policy("connectionPool: {tcp: {tcpKeepalive: {time: 10s, interval: 0.5s}}}"),
    ] {
        good("DestinationRule", &spec);
    }
}

#[test]
fn traffic_policies_that_istio_refuses_are_refused() {
    let zone = "failover: [{from: a, to: b}], failoverPriority: [topology.kubernetes.io/zone]";
    for (spec, field) in [
        (locality(zone), "loadBalancer.localityLbSetting"),
        (
            locality("distribute: [{from: a//b, to: {c: 100}}]"),
            "loadBalancer.localityLbSetting.distribute[0].from",
        ),
        (
            locality("distribute: [{from: '*/b', to: {c: 100}}]"),
            "loadBalancer.localityLbSetting.distribute[0].from",
        ),
        (
            locality("distribute: [{from: a, to: {c/: 100}}]"),
            "loadBalancer.localityLbSetting.distribute[0].to.c/",
        ),
        (
            locality("distribute: [{from: a/b, to: {c: 100}}, {from: a, to: {c: 100}}]"),
            "loadBalancer.localityLbSetting.distribute[1].from",
        ),
        (
            policy("connectionPool: {http: {idleTimeout: 0s}}"),
            "connectionPool.http.idleTimeout",
        ),
        (
            policy("connectionPool: {tcp: {tcpKeepalive: {time: 1500500us}}}"),
            "connectionPool.tcp.tcpKeepalive.time",
        ),
        (
            policy("connectionPool: {tcp: {tcpKeepalive: {interval: 0s}}}"),
            "connectionPool.tcp.tcpKeepalive.interval",
        ),
        (
            policy("tls: {mode: SIMPLE, credentialName: c, caCertificates: /x}"),
            "tls",
        ),
        (
            policy("tls: {mode: SIMPLE, credentialName: 'configmap://other/x'}"),
            "tls.credentialName",
        ),
        (policy("tls: {mode: SIMPLE, credentialName: c, caCrl: /x}"), "tls.caCrl"),
        (
            policy("tls: {mode: SIMPLE, credentialName: c, insecureSkipVerify: true}"),
            "tls",
        ),
    ] {
        refused("DestinationRule", &spec, &format!(".trafficPolicy.{field}"));
    }
}

/// Returns the spec of a Gateway with one server.
fn server(server: &str) -> String {
    format!("{{servers: [{{hosts: ['*'], {server}}}]}}")
}

#[test]
fn servers_with_hbone_or_mixed_tls_settings_are_refused() {
    for (spec, field) in [
        ("port: {number: 15008, protocol: HBONE, name: hbone}", "port.protocol"),
        (
            "port: {number: 443, protocol: HTTPS, name: https}, \
             tls: {mode: ISTIO_MUTUAL, tlsCertificates: [{serverCertificate: /c, privateKey: /k}]}",
            "tls",
        ),
    ] {
        refused("Gateway", &server(spec), &format!(".servers[0].{field}"));
    }
}

#[test]
fn tls_settings_of_plaintext_servers_are_checked() {
    good(
        "Gateway",
        &server("port: {number: 80, protocol: HTTP, name: http}, tls: {mode: AUTO_PASSTHROUGH, httpsRedirect: true}"),
    );
    let http = |tls: &str| {
        server(&format!(
            "port: {{number: 80, protocol: HTTP, name: http}}, tls: {{httpsRedirect: true, {tls}}}"
        ))
    };
    for (tls, field) in [
        ("credentialName: c", ""),
        ("tlsCertificates: [{serverCertificate: /c, privateKey: /k}]", ""),
        ("cipherSuites: [RC4]", ".cipherSuites[0]"),
        ("minProtocolVersion: TLSV1_1", ".minProtocolVersion"),
    ] {
        admitted("Gateway", &http(tls), &format!(".servers[0].tls{field}"));
    }
    refused(
        "Gateway",
        &http("credentialName: c, caCrl: /l"),
        ".servers[0].tls.caCrl",
    );
    refused(
        "Gateway",
        &http("credentialName: c, credentialNames: [d]"),
        ".servers[0].tls",
    );
}

#[test]
fn tls_settings_of_https_servers_are_checked() {
    let https = |tls: &str| {
        server(&format!(
            "port: {{number: 443, protocol: HTTPS, name: https}}, tls: {{{tls}}}"
        ))
    };
    // Istio admits and ignores it.
    let crl = https("mode: SIMPLE, credentialName: c, caCrl: /l");
    admitted("Gateway", &crl, ".servers[0].tls.caCrl");
    let old = "mode: SIMPLE, credentialName: c, minProtocolVersion: TLSV1_1";
    admitted("Gateway", &https(old), ".servers[0].tls.minProtocolVersion");
    good(
        "Gateway",
        &https(&format!("{old}, cipherSuites: [ECDHE-RSA-AES128-SHA]")),
    );
    let several = "tlsCertificates: [{serverCertificate: /c, privateKey: /k}]";
    let unknown = "mode: SIMPLE, credentialName: c, cipherSuites: [AES128-SHA, RC4]";
    for (tls, field) in [
        ("mode: PASSTHROUGH, caCrl: /l".to_owned(), ""),
        (format!("mode: PASSTHROUGH, {several}"), ""),
        (unknown.to_owned(), ".cipherSuites[1]"),
    ] {
        admitted("Gateway", &https(&tls), &format!(".servers[0].tls{field}"));
    }
    good(
        "Gateway",
        &https(&format!("mode: MUTUAL, {several}, caCertificates: /a, caCrl: /l")),
    );
    for (tls, field) in [
        (format!("mode: MUTUAL, {several}"), "caCertificates"),
        (format!("mode: SIMPLE, {several}, caCrl: /l"), "caCrl"),
        (
            "mode: SIMPLE, tlsCertificates: [{serverCertificate: /c}]".to_owned(),
            "tlsCertificates[0].privateKey",
        ),
    ] {
        refused("Gateway", &https(&tls), &format!(".servers[0].tls.{field}"));
    }
}

#[test]
fn selectors_and_hosts_of_gateways_are_checked() {
    let port = "port: {number: 80, protocol: HTTP, name: http}";
    let selecting = format!("{{selector: {{istio: '*'}}, servers: [{{hosts: ['*'], {port}}}]}}");
    admitted("Gateway", &selecting, ".selector");
    let address = format!("{{servers: [{{hosts: ['2001:db8::1'], {port}}}]}}");
    refused("Gateway", &address, ".servers[0].hosts[0]");
}

#[test]
fn ingress_listeners_of_sidecars_are_checked() {
    let ingress = |protocol: &str, tls: &str| {
        let port = format!("port: {{number: 443, protocol: {protocol}, name: p}}");
        format!("{{ingress: [{{{port}, tls: {{{tls}}}}}]}}")
    };
    // Without a mode, it is PASSTHROUGH.
    let files = "serverCertificate: /c, privateKey: /k";
    admitted("Sidecar", &ingress("HTTPS", files), ".ingress[0].tls");
    let auto = ingress("HTTPS", "mode: AUTO_PASSTHROUGH");
    refused("Sidecar", &auto, ".ingress[0].tls.mode");
    let plaintext = ingress("HTTP", &format!("mode: SIMPLE, {files}"));
    refused("Sidecar", &plaintext, ".ingress[0].tls");
    let pool = |protocol: &str| {
        let port = format!("port: {{number: 90, protocol: {protocol}, name: p}}");
        format!("{{ingress: [{{{port}, connectionPool: {{http: {{maxRetries: 3}}}}}}]}}")
    };
    good("Sidecar", &pool("HTTP2"));
    admitted("Sidecar", &pool("TCP"), ".ingress[0].connectionPool.http");
}

#[test]
fn hosts_and_sockets_are_restricted() {
    let sidecar = "{egress: [{hosts: ['./*', ./a]}]}";
    refused("Sidecar", sidecar, ".egress[0].hosts[1]");
    let through = |subset: &str| {
        let proxy = format!("{{host: a.com, subset: {subset}, port: {{number: 80}}}}");
        format!("{{outboundTrafficPolicy: {{mode: ALLOW_ANY, egressProxy: {proxy}}}}}")
    };
    good("Sidecar", &through("v1"));
    refused("Sidecar", &through("v_1"), ".outboundTrafficPolicy.egressProxy.subset");
    let port = |number: u16| format!("port: {{number: {number}, protocol: HTTP, name: p}}");
    let bound = format!("{{ingress: [{{bind: 'unix:///a', {}}}]}}", port(80));
    refused("Sidecar", &bound, ".ingress[0].bind");
    let listener = |bind: &str, number: u16| format!("{{bind: '{bind}', {}, hosts: ['*/*']}}", port(number));
    let relative = format!("{{egress: [{}]}}", listener("unix://a", 0));
    refused("Sidecar", &relative, ".egress[0].bind");
    let equal = format!(
        "{{egress: [{}, {}]}}",
        listener("10.0.0.1", 80),
        listener("10.0.0.2", 80)
    );
    refused("Sidecar", &equal, ".egress[1].port");
    let selecting = "{hosts: ['*.a.com'], resolution: DNS, workloadSelector: {labels: {a: b}}, \
                     ports: [{number: 80, name: p, protocol: HTTP}]}";
    refused("ServiceEntry", selecting, ".hosts[0]");
    let ports = "ports: [{number: 80, name: p, protocol: HTTP}, {number: 81, name: q, protocol: HTTP}]";
    let socket = format!("{{hosts: [a.com], resolution: STATIC, endpoints: [{{address: 'unix:///a'}}], {ports}}}");
    refused("ServiceEntry", &socket, ".endpoints[0].address");
    let local = |endpoint: &str| {
        let port = "{number: 80, name: p, protocol: HTTP}";
        format!("{{hosts: [a.com], resolution: STATIC, endpoints: [{{{endpoint}}}], ports: [{port}]}}")
    };
    good("ServiceEntry", &local("address: 'unix:///a'"));
    refused("ServiceEntry", &local("address: 'unix://./a'"), ".endpoints[0].address");
    let numbered = local("address: 'unix:///a', ports: {p: 80}");
    refused("ServiceEntry", &numbered, ".endpoints[0].ports");
    admitted("ServiceEntry", &local("network: net"), ".endpoints[0].address");
    let entry = |host: &str, port: &str, more: &str| {
        format!("{{hosts: ['{host}'], resolution: DNS, ports: [{{number: 80, name: {port}, protocol: HTTP}}]{more}}}")
    };
    good("ServiceEntry", &entry("a.1.", "http", ""));
    refused("ServiceEntry", &entry("a.com", "http_web", ""), ".ports[0].name");
    bad(
        "ServiceEntry",
        &entry("a.com", &"p".repeat(257), ""),
        &[".ports[0].name"],
    );
    let elsewhere = entry("a.com", "http", ", endpoints: [{network: net}]");
    refused("ServiceEntry", &elsewhere, ".endpoints[0].address");
}

#[test]
fn ranges_of_one_address_are_ranges() {
    let entry = |resolution: &str| {
        let port = "{number: 80, name: p, protocol: HTTP}";
        format!("{{hosts: [a.com], addresses: [10.0.0.1/32], resolution: {resolution}, ports: [{port}]}}")
    };
    good("ServiceEntry", &entry("NONE"));
    refused("ServiceEntry", &entry("DNS"), ".addresses[0]");
}

#[test]
fn ports_without_addresses_of_their_own_are_warned_of() {
    let entry = |resolution: &str, protocol: &str, more: &str| {
        let port = format!("{{number: 443, name: p{protocol}}}");
        format!("{{hosts: [a.com, b.com], resolution: {resolution}, ports: [{port}]{more}}}")
    };
    let addresses = ", addresses: [10.0.0.1]";
    good("ServiceEntry", &entry("DNS", ", protocol: HTTPS", ""));
    good("ServiceEntry", &entry("DNS", ", protocol: HTTP", addresses));
    admitted(
        "ServiceEntry",
        &entry("DNS", ", protocol: HTTPS", addresses),
        ".addresses",
    );
    good("ServiceEntry", &entry("NONE", ", protocol: TCP", addresses));
    good("ServiceEntry", &entry("NONE", ", protocol: TLS", ""));
    for protocol in ["", ", protocol: TCP"] {
        admitted("ServiceEntry", &entry("NONE", protocol, ""), ".ports[0].protocol");
    }
}

#[test]
fn overrides_of_tags_without_a_name() {
    let metrics = "{metrics: [{overrides: [{tagOverrides: {'': {value: request.host}}}]}]}";
    admitted("Telemetry", metrics, ".metrics[0].overrides[0].tagOverrides");
}

#[test]
fn templates_of_workload_groups() {
    let group = |template: &str| format!("{{template: {{{template}}}}}");
    good("WorkloadGroup", &group("ports: {http: 8080}, labels: {app: a}"));
    admitted("WorkloadGroup", &group("labels: {version: a b}"), ".template.labels");
    admitted("WorkloadGroup", &group("ports: {http: 99999}"), ".template.ports.http");
    let labelled = "{template: {}, metadata: {labels: {version: a b}}}";
    bad("WorkloadGroup", labelled, &[".metadata.labels"]);
}

#[test]
fn headers_of_probes_are_those_of_kubernetes() {
    let probe = |name: &str| {
        format!("{{template: {{}}, probe: {{httpGet: {{port: 80, httpHeaders: [{{name: {name}, value: v}}]}}}}}}")
    };
    good("WorkloadGroup", &probe("x-a"));
    refused("WorkloadGroup", &probe("x_a"), ".probe.httpGet.httpHeaders[0].name");
}

#[test]
fn envoy_filters_apply_without_mistaken_patches() {
    let patch = |apply_to: &str, more: &str| format!("{{configPatches: [{{applyTo: {apply_to}, {more}}}]}}");
    let patched = "match: {listener: {portNumber: 80}}, patch: {operation: REMOVE}";
    for apply_to in ["EXTENSION_CONFIG", "BOOTSTRAP"] {
        warned(
            "EnvoyFilter",
            &patch(apply_to, patched),
            &[".configPatches[0].match", ""],
        );
    }
    refused("EnvoyFilter", &patch("CLUSTER", patched), ".configPatches[0].match");
    warned(
        "EnvoyFilter",
        &patch("NETWORK_FILTER", "patch: {operation: REMOVE, filterClass: STATS}"),
        &[".configPatches[0].patch.filterClass", ""],
    );
    let changed = |operation: &str, value: &str| format!("patch: {{operation: {operation}, value: {value}}}");
    for (apply_to, value) in [
        ("CLUSTER", "{nam: a}"),
        ("HTTP_FILTER", "{name: a}"),
        (
            "HTTP_FILTER",
            "{typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua, code: x}}",
        ),
    ] {
        let mistaken = patch(apply_to, &changed("ADD", value));
        warned("EnvoyFilter", &mistaken, &[".configPatches[0].patch.value", ""]);
    }
    let merged = patch("HTTP_FILTER", &changed("MERGE", "{name: a}"));
    warned("EnvoyFilter", &merged, &[""]);
    let named = "match: {listener: {filterChain: {filter: {name: envoy.tcp_proxy}}}}, patch: {operation: REMOVE}";
    warned(
        "EnvoyFilter",
        &patch("NETWORK_FILTER", named),
        &[".configPatches[0].match.listener.filterChain.filter.name", ""],
    );
    let of_waypoints = |context: &str| {
        let matched = format!("match: {{context: {context}, waypoint: {{portNumber: 80}}}}");
        patch("HTTP_FILTER", &format!("{matched}, patch: {{operation: REMOVE}}"))
    };
    warned("EnvoyFilter", &of_waypoints("WAYPOINT"), &[""]);
    refused("EnvoyFilter", &of_waypoints("ANY"), ".configPatches[0].match");
    let of_waypoints = "{configPatches: [{match: {context: WAYPOINT, proxy: {proxyVersion: '('}}, patch: {}}]}";
    warned(
        "EnvoyFilter",
        of_waypoints,
        &[
            ".configPatches[0].applyTo",
            ".configPatches[0].patch.operation",
            ".configPatches[0].patch.value",
            "",
        ],
    );
    let no_proxy = patch(
        "CLUSTER",
        "match: {proxy: {metadata: {'': a}}}, patch: {operation: REMOVE}",
    );
    let field = ".configPatches[0].match.proxy.metadata";
    warned("EnvoyFilter", &no_proxy, &[field, ""]);
    // The reference has no effect.
    let target = "{targetRefs: [{group: networking.istio.io, kind: Gateway, name: a}]}";
    warned("EnvoyFilter", target, &[".targetRefs[0]", ""]);
}

#[test]
fn names_and_addresses_of_wasm_plugins_are_checked() {
    let plugin = |secret: usize, name: usize, sha256: &str| {
        let (secret, name) = ("s".repeat(secret), "n".repeat(name));
        format!("{{url: 'oci://a/b', imagePullSecret: {secret}, pluginName: {name}, sha256: '{sha256}'}}")
    };
    good("WasmPlugin", &plugin(253, 256, &"a".repeat(64)));
    refused("WasmPlugin", &plugin(254, 256, ""), ".imagePullSecret");
    refused("WasmPlugin", &plugin(253, 257, ""), ".pluginName");
    refused("WasmPlugin", &plugin(253, 256, &"A".repeat(64)), ".sha256");
    // Admission puts `http://` before a text that is not a URL.
    for url in ["10.0.0.1:5000/img", "oci://h:port/a"] {
        admitted("WasmPlugin", &format!("{{url: '{url}'}}"), ".url");
    }
    for url in ["a b/c", "localhost:5000/img"] {
        refused("WasmPlugin", &format!("{{url: '{url}'}}"), ".url");
    }
    bad("WasmPlugin", "{url: '//h:port/a'}", &[".url"]);
}

#[test]
fn service_entries_with_dynamic_dns() {
    let spec = |protocol: &str, location: &str| {
        let port = format!("{{number: 80, name: p, protocol: {protocol}}}");
        format!("{{hosts: ['*-a.com'], resolution: DYNAMIC_DNS, location: {location}, ports: [{port}]}}")
    };
    good("ServiceEntry", &spec("HTTP", "MESH_INTERNAL"));
    refused("ServiceEntry", &spec("HTTPS", "MESH_EXTERNAL"), ".ports[0].protocol");
    let behind = |waypoint: &str| {
        let metadata = format!("{{name: a, namespace: ns, labels: {{istio.io/use-waypoint: {waypoint}}}}}");
        let spec = spec("HTTP", "MESH_INTERNAL");
        let text =
            format!("apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {metadata}\nspec: {spec}");
        let value = yaml::documents(&text)[0].parse().unwrap();
        document::parse(&ClusterId::new("c"), &value)
    };
    assert_eq!(found(&behind("waypoint")), [("spec.location", true)]);
    assert!(found(&behind("none")).is_empty());
}
