//! Several servers and datacenters, and servers that protect themselves.

use std::path::Path;

use libtest_mimic::Failed;
use serde_json::json;

use super::server::{Consul, Instance, Server};
use super::{cluster, has};
use crate::registries::{TIMEOUT, metric, sidecar, until_disconnected, until_metric};
use crate::secure::authority::Authority;
use crate::support::ads::{AdsClient, Resources, endpoints};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::{ports, scratch, wait};

fn instance<'a>(id: &'a str, address: &'a str) -> Instance<'a> {
    Instance {
        service: "web",
        id,
        address,
        port: 8080,
    }
}

fn until_has(proxy: &AdsClient, address: &str) -> Result<(), String> {
    proxy.until(address, TIMEOUT, |resources| {
        has(resources, "web", address).then_some(())
    })
}

pub(super) fn a_killed_leader_shrinks_nothing(binary: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-consul-leader");
    let mut servers: Vec<Server> = Vec::new();
    for name in ["one", "two", "three"] {
        let join: Vec<String> = servers
            .iter()
            .map(|server| format!("127.0.0.1:{}", server.ports.serf_lan))
            .collect();
        servers.push(Server::new(
            name,
            json!({ "bootstrap_expect": 3, "retry_join": join, "retry_interval": "1s" }),
        ));
    }
    let mut running: Vec<Consul> = Vec::new();
    for server in &servers {
        running.push(server.start(binary, &folder)?);
    }
    running[0].until_led()?;
    running[0].register_nodes()?;
    running[0].register(&instance("web-1", "10.0.0.1"), Some("passing"))?;
    let leader = wait::until("a known leader", TIMEOUT, || running.iter().position(Consul::is_leader))?;
    let follower = (leader + 1) % servers.len();
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={}", running[follower].address());
        command.args(["--registries=Consul", &url]);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    until_has(&proxy, "10.0.0.1")?;
    proxy.mark();
    running[leader].process.kill();
    // Without a leader, a server does not answer consistent queries.
    until_disconnected(&daemon, "Consul")?;
    wait::until("another leader", TIMEOUT, || {
        let mut others = (0..running.len()).filter(|index| *index != leader);
        others.any(|index| running[index].is_leader()).then_some(())
    })?;
    running[follower].until_led()?;
    running[follower].register(&instance("web-2", "10.0.0.2"), Some("passing"))?;
    until_has(&proxy, "10.0.0.2")?;
    // The old leader comes back.
    running[leader] = servers[leader].start(binary, &folder)?;
    running[leader].until_led()?;
    running[leader].register(&instance("web-3", "10.0.0.3"), Some("passing"))?;
    until_has(&proxy, "10.0.0.3")?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

/// A sidecar in a network.
fn sidecar_in(network: &str) -> Node {
    let mut node = sidecar();
    node.metadata["NETWORK"] = network.into();
    node
}

pub(super) fn datacenters_are_networks(binary: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-consul-datacenters");
    let first = Server::new("first", json!({ "bootstrap_expect": 1, "datacenter": "east" }));
    let join = format!("127.0.0.1:{}", first.ports.serf_wan);
    let joining = |name: &str, datacenter: &str| {
        let options = json!({ "bootstrap_expect": 1, "datacenter": datacenter, "retry_join_wan": [&join],
            "retry_interval_wan": "1s" });
        Server::new(name, options)
    };
    let second = joining("second", "west");
    let east = first.start(binary, &folder)?;
    let west = second.start(binary, &folder)?;
    // Clients use TLS with instances behind a gateway only.
    let tls = ["security.istio.io/tlsMode|istio"];
    for (server, id, address) in [(&east, "web-1", "10.0.0.1"), (&west, "web-2", "10.1.0.1")] {
        server.until_led()?;
        server.register_nodes()?;
        server.register_tagged(&instance(id, address), Some("passing"), &tls)?;
    }
    std::fs::create_dir(folder.join("mesh"))?;
    let gateway = |address: &str| format!("{{gateways: [{{address: {address}, port: 15443}}]}}");
    std::fs::write(
        folder.join("mesh/meshnetworks.yaml"),
        format!(
            "networks: {{east: {}, west: {}}}\n",
            gateway("9.9.9.1"),
            gateway("9.9.9.2")
        ),
    )?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={}", east.address());
        command
            .args([
                "--registries=Consul",
                "--consulserverDatacenters=*",
                "--consulserverNetworks",
                &url,
            ])
            .arg("--configDir")
            .arg(folder.join("mesh"));
    })?;
    let addresses = |resources: &Resources| -> Option<Vec<String>> {
        let mut found = endpoints(resources.get(&cluster("web"))?).ok()?;
        found.sort();
        Some(found)
    };
    let proxies = ["east", "west"].map(|network| AdsClient::connect(daemon.xds, &sidecar_in(network)));
    let expected = [["10.0.0.1:8080", "9.9.9.2:15443"], ["10.1.0.1:8080", "9.9.9.1:15443"]];
    for (proxy, expected) in proxies.iter().zip(expected) {
        proxy
            .until("own instances and the other's gateway", TIMEOUT, |resources| {
                (addresses(resources)? == expected).then_some(())
            })
            .map_err(|error| {
                format!(
                    "{error}: {:?}, not {expected:?}",
                    proxy.complete().map(|all| addresses(&all))
                )
            })?;
    }
    // A datacenter appears: it is read, too. Its network has no gateway, so its instances are reached directly.
    let third = joining("third", "north");
    let north = third.start(binary, &folder)?;
    north.until_led()?;
    north.register_nodes()?;
    north.register(&instance("web-4", "10.2.0.1"), Some("passing"))?;
    proxies[0].until("an instance of the datacenter that appeared", TIMEOUT, |resources| {
        (addresses(resources)? == ["10.0.0.1:8080", "10.2.0.1:8080", "9.9.9.2:15443"]).then_some(())
    })?;
    // The other datacenter is lost: its last state stays, and the own one is followed.
    let failed = metric(&daemon, "istiod_registry_errors_total", "Consul").unwrap_or_default();
    proxies[0].mark();
    west.process.kill();
    east.register_tagged(&instance("web-3", "10.0.0.3"), Some("passing"), &tls)?;
    proxies[0].until("an instance of the other datacenter", TIMEOUT, |resources| {
        let expected = ["10.0.0.1:8080", "10.0.0.3:8080", "10.2.0.1:8080", "9.9.9.2:15443"];
        (addresses(resources)? == expected).then_some(())
    })?;
    until_metric(&daemon, "istiod_registry_errors_total", "Consul", failed + 1.0)?;
    assert_eq!(proxies[0].lost(), Vec::<String>::new());
    Ok(())
}

/// The token of the administrator, and that of the daemon.
const ADMINISTRATOR: &str = "6d1a0e0c-27b2-4f2c-9b5e-0d6f6a0f8a01";
const READER: &str = "f6c2a1de-43a4-4b34-8d0e-6a2f8b1a7c02";

pub(super) fn tokens_and_tls_are_used(binary: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-consul-tls");
    let authority = Authority::new("consul");
    let path = |name: &str| folder.join(name).display().to_string();
    std::fs::write(folder.join("ca.pem"), &authority.root)?;
    for (name, id) in [("server", "consul.internal"), ("client", "istiod.internal")] {
        let certificate = authority.certificate(id);
        std::fs::write(folder.join(format!("{name}.pem")), &certificate.chain)?;
        std::fs::write(folder.join(format!("{name}.key")), &certificate.key)?;
    }
    let https = ports::free();
    let mut server = Server::new(
        "consul",
        json!({
            "bootstrap_expect": 1,
            "ports": { "https": https },
            "ca_file": path("ca.pem"), "cert_file": path("server.pem"), "key_file": path("server.key"),
            "verify_incoming_https": true,
            "acl": { "enabled": true, "default_policy": "deny", "tokens": { "master": ADMINISTRATOR } },
        }),
    );
    server.token = Some(ADMINISTRATOR);
    let consul = server.start(binary, &folder)?;
    consul.until_led()?;
    consul.register_nodes()?;
    consul.register(&instance("web-1", "10.0.0.1"), Some("passing"))?;
    let rules = "service_prefix \"\" { policy = \"read\" } node_prefix \"\" { policy = \"read\" }";
    consul.put("/v1/acl/policy", &json!({ "Name": "reader", "Rules": rules }))?;
    let token = json!({ "AccessorID": READER, "SecretID": READER, "Policies": [{ "Name": "reader" }] });
    consul.put("/v1/acl/token", &token)?;
    std::fs::write(folder.join("token"), format!("{READER}\n"))?;
    let start = |log: &str, variables: &[(&str, &str)]| {
        let variables: Vec<(String, String)> = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Daemon::unready(&folder.join(log), |command| {
            let url = format!("--consulserverURL=https://127.0.0.1:{https}");
            command.args(["--registries=Consul", &url]).envs(variables);
        })
    };
    let (ca, certificate, key, file) = (path("ca.pem"), path("client.pem"), path("client.key"), path("token"));
    let tls = [
        ("CONSUL_CACERT", ca.as_str()),
        ("CONSUL_TLS_SERVER_NAME", "consul.internal"),
        ("CONSUL_CLIENT_CERT", &certificate),
        ("CONSUL_CLIENT_KEY", &key),
    ];
    // Refused: another name of the server, no certificate, and an unknown token.
    let mut other = tls;
    other[1] = ("CONSUL_TLS_SERVER_NAME", "other.internal");
    let unknown = [
        &tls[..],
        &[("CONSUL_HTTP_TOKEN", "00000000-0000-0000-0000-000000000003")],
    ]
    .concat();
    for (name, variables) in [("name", &other[..]), ("anonymous", &tls[..2]), ("unknown", &unknown)] {
        let refused = start(&format!("{name}.log"), variables);
        until_metric(&refused, "istiod_registry_errors_total", "Consul", 2.0)
            .map_err(|error| format!("{name}: {error}\n{}", refused.process.log_tail()))?;
        assert!(!refused.is_ready(), "{name}");
    }
    let daemon = start("istiod.log", &[&tls[..], &[("CONSUL_HTTP_TOKEN_FILE", &file)]].concat());
    daemon.until_ready()?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    until_has(&proxy, "10.0.0.1")?;
    // The token is deleted and created again.
    proxy.mark();
    consul.delete(&format!("/v1/acl/token/{READER}"))?;
    consul.register(&instance("web-2", "10.0.0.2"), Some("passing"))?;
    until_disconnected(&daemon, "Consul")?;
    consul.put("/v1/acl/token", &token)?;
    until_has(&proxy, "10.0.0.2")?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    let log = daemon.process.log();
    assert!(!log.contains(READER), "the token must not be logged");
    Ok(())
}
