//! Objects that Istio's webhook admits, and violations that only admission refuses. All of these objects apply, without
//! the parts that have no effect.

use super::{bad, good, parsed};
use crate::{
    api::{
        diagnostics::REFUSED,
        document::{self, ParsedDocument},
        yaml,
    },
    base::ClusterId,
};

const TO_A: &str = "route: [{destination: {host: a}}]";

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
fn virtual_services() {
    let delegating =
        format!("{{hosts: [a], http: [{{match: [{{uri: {{prefix: /x}}}}], delegate: {{}}}}, {{{TO_A}}}]}}");
    admitted("VirtualService", &delegating, ".http[0].delegate.name");
    let tcp = format!("{{hosts: [a], tcp: [{{match: [{{sourceNamespace: a_b}}], {TO_A}}}]}}");
    good("VirtualService", &tcp);
    let http = |more: &str| format!("{{hosts: [a], http: [{{{TO_A}, {more}}}]}}");
    let added = http("headers: {request: {add: {'x y': z}}}");
    admitted("VirtualService", &added, ".http[0].headers.request.add");
    let removed = http("headers: {response: {remove: ['x:']}}");
    admitted("VirtualService", &removed, ".http[0].headers.response.remove[0]");
    for (more, field) in [
        ("match: [{headers: {':x': {exact: v}}}]", "match[0].headers.:x"),
        ("retries: {retryRemoteLocalities: true}", "retries"),
        ("retries: {attempts: 1, retryOn: connect-error}", "retries.retryOn"),
    ] {
        refused("VirtualService", &http(more), &format!(".http[0].{field}"));
    }
}

#[test]
fn destination_rules() {
    let policy = |policy: &str| format!("{{host: a, trafficPolicy: {{outlierDetection: {{}}, {policy}}}}}");
    let balancer = |settings: &str| policy(&format!("loadBalancer: {{{settings}}}"));
    let locality = |settings: &str| balancer(&format!("localityLbSetting: {{{settings}}}"));
    let long = "x".repeat(64);
    good(
        "DestinationRule",
        &format!("{{host: a, subsets: [{{name: s, labels: {{version: {long}}}}}]}}"),
    );
    admitted(
        "DestinationRule",
        &balancer("consistentHash: {ringHash: {minimumRingSize: 1024}}"),
        ".trafficPolicy.loadBalancer.consistentHash",
    );
    admitted(
        "DestinationRule",
        &balancer("consistentHash: {httpHeaderName: x y}"),
        ".trafficPolicy.loadBalancer.consistentHash.httpHeaderName",
    );
    admitted(
        "DestinationRule",
        &policy("portLevelSettings: [{port: {number: 0}, tls: {mode: DISABLE}}]"),
        ".trafficPolicy.portLevelSettings[0].port.number",
    );
    for spec in [
        policy("tls: {mode: ISTIO_MUTUAL, credentialName: c, caCertificates: /x}"),
        policy("tls: {mode: SIMPLE, credentialName: 'configmap://ns/x'}"),
        locality("distribute: [{from: a, to: {b: 100}}], failoverPriority: [x]"),
        locality("failover: [{from: a, to: b}], failoverPriority: [x]"),
        locality("failover: [{to: b}]"),
    ] {
        good("DestinationRule", &spec);
    }
    let zone = "failover: [{from: a, to: b}], failoverPriority: [topology.kubernetes.io/zone]";
    for (spec, field) in [
        (locality(zone), "loadBalancer.localityLbSetting"),
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

#[test]
fn gateways_and_sidecars() {
    let server = |server: &str| format!("{{servers: [{{hosts: ['*'], {server}}}]}}");
    good(
        "Gateway",
        &server("port: {number: 80, protocol: HTTP, name: http}, tls: {mode: AUTO_PASSTHROUGH, httpsRedirect: true}"),
    );
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
}

#[test]
fn hosts_and_sockets_are_restricted() {
    let sidecar = "{egress: [{hosts: ['./*', ./a]}]}";
    refused("Sidecar", sidecar, ".egress[0].hosts[1]");
    let selecting = "{hosts: ['*.a.com'], resolution: DNS, workloadSelector: {labels: {a: b}}, \
                     ports: [{number: 80, name: p, protocol: HTTP}]}";
    refused("ServiceEntry", selecting, ".hosts[0]");
    let ports = "ports: [{number: 80, name: p, protocol: HTTP}, {number: 81, name: q, protocol: HTTP}]";
    let socket = format!("{{hosts: [a.com], resolution: STATIC, endpoints: [{{address: 'unix:///a'}}], {ports}}}");
    refused("ServiceEntry", &socket, ".endpoints[0].address");
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
