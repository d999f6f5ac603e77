//! Merging servers on one router.

use serde_json::{Value, json};

use super::*;
use crate::{
    api::{Config, Kind, document},
    model::{Change, Installation, World, features::Features, fixture},
    proto::istio::networking::v1alpha3::{Port, Server},
};

fn server(number: u32, protocol: &str, name: &str, hosts: &[&str]) -> Server {
    Server {
        port: Some(Port {
            number,
            protocol: protocol.to_owned(),
            name: name.to_owned(),
            ..Default::default()
        }),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        ..Default::default()
    }
}

fn tls(mode: TlSmode, server: Server) -> Server {
    let settings = ServerTlsSettings {
        mode: mode.into(),
        ..Default::default()
    };
    Server {
        tls: Some(settings),
        ..server
    }
}

fn bound(bind: &str, server: Server) -> Server {
    Server {
        bind: bind.to_owned(),
        ..server
    }
}

/// Returns a service port 80 on 8080, and a service port 443 on 8443, which exists for UDP too.
fn exposed() -> Vec<ExposedPort> {
    let port = |number, target, udp| ExposedPort {
        service: ServiceKey {
            hostname: "gateway.ns.svc.cluster.local".into(),
            namespace: "ns".into(),
        },
        number,
        target,
        udp,
        untranslated: false,
    };
    vec![port(80, 8080, false), port(443, 8443, true)]
}

/// Merges Gateways `ns/g0`, `ns/g1`, ... in this order.
fn merged_with(features: Features, exposed: &[ExposedPort], gateways: &[Vec<Server>]) -> MergedGateway {
    let name = |index: usize| format!("ns/g{index}");
    let mut world = World::new(Installation {
        features,
        ..Installation::default()
    });
    let rows = gateways.iter().enumerate().map(|(index, servers)| {
        let spec = networking::Gateway {
            servers: servers.clone(),
            ..Default::default()
        };
        Change::Upsert(fixture::config(Kind::Gateway, &name(index), 0, spec).into())
    });
    let mesh = world.commit(rows.collect()).snapshot;
    let keys: Vec<_> = (0..gateways.len()).map(|index| fixture::key(&name(index))).collect();
    MergedGateway::of(&Cx::untracked(), &mesh, &keys, exposed)
}

fn merged(gateways: &[Vec<Server>]) -> MergedGateway {
    merged_with(Features::default(), &exposed(), gateways)
}

fn routes(merged: &MergedGateway) -> Vec<(&str, usize)> {
    let routes = merged.routes.iter();
    routes.map(|(name, servers)| (name.as_str(), servers.len())).collect()
}

fn ports(merged: &MergedGateway) -> Vec<(u32, &str, usize)> {
    let ports = merged.ports.iter();
    ports
        .map(|(port, servers)| (port.number, port.bind.as_str(), servers.servers.len()))
        .collect()
}

#[test]
fn servers_offer_hosts_to_namespaces() {
    let mut hosts = ["./a.com", "*/b.com", "ns3/c.com"].map(str::to_owned).to_vec();
    qualify_hosts(&mut hosts, "ns1");
    assert_eq!(hosts_for_namespace(&hosts, "ns1"), ["a.com", "b.com"]);
    assert_eq!(hosts_for_namespace(&hosts, "ns3"), ["b.com", "c.com"]);
}

#[test]
fn a_wildcard_host_replaces_covered_hosts() {
    let mut hosts = ["./a.com", "*/*"].map(str::to_owned).to_vec();
    qualify_hosts(&mut hosts, "ns1");
    assert_eq!(hosts, ["*"]);
}

#[test]
fn plaintext_http_shares_a_port() {
    let merged = merged(&[
        vec![server(80, "HTTP", "http", &["a.com"])],
        vec![server(80, "HTTP2", "http2", &["b.com"])],
    ]);
    assert_eq!(routes(&merged), [("http.8080", 2)]);
    assert_eq!(ports(&merged), [(8080, "", 2)]);
    assert_eq!(merged.rejected, [""; 0]);
}

#[test]
fn other_protocols_are_refused_on_a_plaintext_port() {
    let merged = merged(&[
        vec![server(80, "HTTP", "http", &["a.com"])],
        vec![
            server(80, "TCP", "tcp", &["*"]),
            tls(TlSmode::Simple, server(80, "HTTPS", "https", &["b.com"])),
        ],
    ]);
    assert_eq!(ports(&merged), [(8080, "", 1)]);
    assert_eq!(merged.rejected, ["ns/g1", "ns/g1"]);
}

#[test]
fn different_addresses_have_separate_listeners() {
    let merged = merged(&[
        vec![server(80, "HTTP", "http", &["a.com"])],
        vec![
            bound("10.0.0.1", server(80, "HTTP", "http", &["a.com"])),
            bound("10.0.0.2", server(80, "TCP", "tcp", &["*"])),
        ],
    ]);
    assert_eq!(
        ports(&merged),
        [(8080, "", 1), (8080, "10.0.0.1", 1), (8080, "10.0.0.2", 1)]
    );
    assert_eq!(routes(&merged), [("http.8080", 1), ("http.8080.10.0.0.1", 1)]);
}

#[test]
fn servers_without_http_have_no_routes() {
    let tcp = || bound("10.0.0.1", server(80, "TCP", "tcp", &["*"]));
    let merged = merged(&[
        vec![tcp()],
        vec![bound("10.0.0.2", server(80, "TCP", "tcp", &["*"]))],
        vec![tcp()],
    ]);
    assert_eq!(ports(&merged), [(8080, "10.0.0.1", 2), (8080, "10.0.0.2", 1)]);
    assert!(merged.routes.is_empty());
}

#[test]
fn tls_servers_are_distinguished_by_host() {
    let https = |name: &str, hosts: &[&str]| tls(TlSmode::Simple, server(443, "HTTPS", name, hosts));
    let merged = merged(&[
        vec![https("a", &["a.com"]), https("b", &["b.com"])],
        vec![https("a", &["A.com", "c.com"]), https("c", &["c.com"])],
        vec![bound("10.0.0.1", https("a", &["a.com"]))],
    ]);
    let names = [
        "https.443.a.g0.ns",
        "https.443.a.g2.ns.10.0.0.1",
        "https.443.b.g0.ns",
        "https.443.c.g1.ns",
    ];
    assert_eq!(routes(&merged), names.map(|name| (name, 1)));
    assert_eq!(ports(&merged), [(8443, "", 3), (8443, "10.0.0.1", 1)]);
    assert_eq!(merged.rejected, ["ns/g1"]);
}

#[test]
fn ports_without_a_service_are_opened_unchanged() {
    let mut exposed = exposed();
    exposed[0].untranslated = true;
    let servers = vec![server(80, "HTTP", "http", &["*"]), server(9000, "TCP", "tcp", &["*"])];
    let merged = merged_with(Features::default(), &exposed, &[servers]);
    assert_eq!(ports(&merged), [(80, "", 1), (9000, "", 1)]);
}

#[test]
fn https_is_served_over_quic_if_the_service_has_a_udp_port() {
    let features = Features {
        pilot_enable_quic_listeners: true,
        ..Features::default()
    };
    let servers = vec![
        tls(TlSmode::Simple, server(443, "HTTPS", "https", &["a.com"])),
        tls(TlSmode::Passthrough, server(443, "TLS", "tls", &["b.com"])),
        tls(TlSmode::Simple, server(8443, "HTTPS", "other", &["c.com"])),
    ];
    let merged = merged_with(features, &exposed(), &[servers]);
    let quic: usize = merged.ports.iter().map(|(_, servers)| servers.quic.len()).sum();
    assert_eq!(quic, 1);
    assert_eq!(
        merged.http3_routes.iter().collect::<Vec<_>>(),
        ["https.443.https.g0.ns"]
    );
}

#[test]
fn servers_whose_hosts_are_taken_pass_no_tls_through() {
    let passing = || tls(TlSmode::AutoPassthrough, server(9443, "TLS", "p", &["*.example.com"]));
    assert!(merged(&[vec![passing()]]).auto_passthrough);
    // The port is taken, but not the hosts.
    let plain = server(9443, "HTTP", "h", &["*"]);
    assert!(merged(&[vec![plain], vec![passing()]]).auto_passthrough);
    let same_hosts = tls(TlSmode::Simple, server(9443, "HTTPS", "s", &["*.example.com"]));
    assert!(!merged(&[vec![same_hosts], vec![passing()]]).auto_passthrough);
}

/// Merges Gateways of the Gateway API, `ns/g0`, `ns/g1`, ... Each has a listener for `x.test` that allows routes of
/// these namespaces. Teams `a` and `b` have a namespace each.
fn merged_listeners(allowed: &[&Value]) -> MergedGateway {
    let namespace = |name: &str| {
        let meta = json!({"name": name, "labels": {"team": name}});
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    };
    let gateway = |(number, namespaces): (usize, &&Value)| {
        let listener = json!({"name": "tls", "port": 443, "protocol": "TLS", "hostname": "x.test",
            "tls": {"mode": "Passthrough"}, "allowedRoutes": {"namespaces": namespaces}});
        json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
            "metadata": {"name": format!("g{number}"), "namespace": "ns",
                "annotations": {"gateway.istio.io/name-override": "gateway"}},
            "spec": {"gatewayClassName": "istio", "listeners": [listener]}})
    };
    let objects = ["a", "b"].map(namespace).into_iter();
    let objects = objects.chain(allowed.iter().enumerate().map(gateway));
    let rows = objects.flat_map(|object| document::parse(&fixture::CLUSTER, &object).rows);
    let mut world = World::new(Installation::default());
    let mesh = world.commit(rows.map(Change::Upsert).collect()).snapshot;
    let cx = Cx::untracked();
    let keys: Vec<_> = mesh.gateways.keys(&cx).cloned().collect();
    assert_eq!(keys.len(), allowed.len());
    MergedGateway::of(&cx, &mesh, &keys, &exposed())
}

#[test]
fn listeners_for_one_host_conflict_in_namespaces_that_both_select() {
    let of_team = |team: &str| json!({"from": "Selector", "selector": {"matchLabels": {"team": team}}});
    let (a, b, c) = (of_team("a"), of_team("b"), of_team("c"));
    let exists = json!({"matchExpressions": [{"key": "team", "operator": "Exists"}]});
    let each = json!({"from": "Selector", "selector": exists});
    let (all, own) = (json!({"from": "All"}), json!({"from": "Same"}));
    let rejected = |allowed: &[&Value]| -> Vec<String> {
        let merged = merged_listeners(allowed);
        assert_eq!(merged.servers.len() + merged.rejected.len(), allowed.len());
        let names = merged.rejected.iter().filter_map(|name| name.split('~').next());
        names.map(str::to_owned).collect()
    };
    assert_eq!(rejected(&[&a, &b]), [""; 0]);
    assert_eq!(rejected(&[&a, &a]), ["ns/g1"]);
    assert_eq!(rejected(&[&each, &b]), ["ns/g1"]);
    assert_eq!(rejected(&[&a, &b, &each, &b]), ["ns/g2", "ns/g3"]);
    // A listener for all namespaces is another user of the host.
    assert_eq!(rejected(&[&each, &all, &own]), [""; 0]);
    assert_eq!(rejected(&[&all, &a, &all]), ["ns/g2"]);
    // Parity (pilot/pkg/config/kube/gateway/conversion.go, buildHostnameMatch): selectors without a namespace conflict.
    assert_eq!(rejected(&[&c, &a, &c]), ["ns/g2"]);
}

/// Envoy refuses a second listener at an address, however it is spelled.
#[test]
fn spellings_of_an_address_share_a_port() {
    let http = |bind: &str| bound(bind, server(80, "HTTP", "http", &["*"]));
    let shared = merged(&[vec![http("2001:db8:0::1")], vec![http("2001:db8::1"), http("::0")]]);
    assert_eq!(ports(&shared), [(8080, "2001:db8:0::1", 2), (8080, "::0", 1)]);
    assert_eq!(routes(&shared), [("http.8080.2001:db8:0::1", 2), ("http.8080.::0", 1)]);
    let https = |bind: &str| {
        let simple = tls(TlSmode::Simple, server(443, "HTTPS", "https", &["a.com"]));
        vec![bound(bind, simple)]
    };
    assert_eq!(merged(&[https("::"), https("::0")]).rejected, ["ns/g1"]);
    assert_eq!(merged(&[https("::"), https("::1")]).rejected, [""; 0]);
}

/// Comparing each address with all others would take minutes.
#[test]
fn a_gateway_may_bind_many_addresses() {
    let servers: Vec<Server> = (0..50_000_u32)
        .map(|number| {
            let bind = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number).to_string();
            bound(&bind, server(80, "HTTP", &format!("http-{number}"), &["*"]))
        })
        .collect();
    let merged = merged(&[servers]);
    assert_eq!(merged.rejected, [""; 0]);
    let ports = ports(&merged);
    assert_eq!(ports.len(), 50_000);
    assert_eq!(ports[256], (8080, "10.0.1.0", 1));
}

/// Each listener of the Gateway API is a Gateway that refers to services, whose ports must not be compared for each.
#[test]
fn r21_ports_of_services_are_looked_up_for_each_listener() {
    let service = |number: u32| format!("s{number}.ns.svc.cluster.local");
    let port = |number: u32, target: u32, of: u32| ExposedPort {
        service: ServiceKey {
            hostname: service(of).into(),
            namespace: "ns".into(),
        },
        number,
        target,
        udp: false,
        untranslated: false,
    };
    let mut exposed: Vec<ExposedPort> = (0..50_000).map(|number| port(number, 100_000 + number, 0)).collect();
    exposed.extend([port(80, 8080, 1), port(80, 8081, 2)]);
    let gateway = |name: &str, number: u32, services: &str| {
        let spec = networking::Gateway {
            servers: vec![server(number, "HTTP", "http", &["*"])],
            ..Default::default()
        };
        let config = fixture::config(Kind::Gateway, name, 0, spec);
        let annotations = [(SmolStr::new_static(SERVICE_ANNOTATION), SmolStr::new(services))];
        Config {
            meta: Shared::new(Meta {
                annotations: annotations.into_iter().collect(),
                ..Meta::clone(&config.meta)
            }),
            ..config
        }
    };
    let mut gateways: Vec<Config<networking::Gateway>> = (0..1_000)
        .map(|number| gateway(&format!("ns/g{number}"), number, &service(0)))
        .collect();
    gateways.extend([
        gateway("ns/one", 80, &service(1)),
        gateway("ns/two", 80, &[service(1), service(2)].join(",")),
        gateway("ns/none", 80, &service(9)),
    ]);
    let keys: Vec<ObjectKey> = gateways.iter().map(|gateway| gateway.meta.key.clone()).collect();
    let rows = gateways.into_iter().map(|gateway| Change::Upsert(gateway.into()));
    let mesh = World::new(Installation::default()).commit(rows.collect()).snapshot;
    let merged = MergedGateway::of(&Cx::untracked(), &mesh, &keys, &exposed);
    let ports = ports(&merged);
    assert_eq!(ports.len(), 1_002);
    assert_eq!([ports[0], ports[999]], [(100_000, "", 1), (100_999, "", 1)]);
    // The router does not serve the service of the last Gateway.
    assert_eq!(ports[1_000..], [(8080, "", 2), (8081, "", 1)]);
}
