//! Several registries at once: their order, and their networks.

use libtest_mimic::{Failed, Trial};
use serde_json::json;

use super::scripted::{Script, Server, apps, consul};
use super::{TIMEOUT, sidecar};
use crate::support::ads::{AdsClient, Resources, Type, endpoints};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::scratch;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "registries::aggregation::instances_of_one_host_are_joined",
            all_have_instances,
        ),
        Trial::test(
            "registries::aggregation::registries_have_networks",
            registries_have_networks,
        ),
    ]
}

const HOST: &str = "web.service.consul";

/// Eureka with an instance of Consul's host, which has another protocol there.
fn eureka(path: &str) -> Option<Script> {
    let instance = json!({
        "instanceId": "a", "hostName": HOST, "ipAddr": "10.9.0.1", "status": "UP",
        "port": { "$": 8080, "@enabled": "true" }, "securePort": { "$": 443, "@enabled": "false" },
        "metadata": { "istio.protocol": "tcp" },
    });
    match path {
        "/eureka/v2/apps" => apps("UP_1_", &[instance]),
        "/eureka/v2/apps/delta" => apps("UP_1_", &[]),
        _ => Some(Script::Answer(404, String::new())),
    }
}

fn start(name: &str, registries: &str, networks: &str) -> Result<([Server; 2], Daemon), Failed> {
    let folder = scratch(name);
    std::fs::create_dir(folder.join("mesh"))?;
    std::fs::write(folder.join("mesh/meshnetworks.yaml"), networks)?;
    let servers = [Server::start(consul), Server::start(eureka)];
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.arg(format!("--registries={registries}"));
        command.arg(format!("--consulserverURL={}", servers[0].address));
        command.arg(format!("--eurekaserverURL=http://{}", servers[1].address));
        command.arg("--configDir").arg(folder.join("mesh"));
    })?;
    Ok((servers, daemon))
}

/// Returns the addresses of the host's instances, sorted.
fn addresses(resources: &Resources) -> Option<Vec<String>> {
    let assignment = resources.get(&(Type::Endpoints, format!("outbound|8080||{HOST}")))?;
    let mut found = endpoints(assignment).ok()?;
    found.sort();
    Some(found)
}

fn all_have_instances() -> Result<(), Failed> {
    for (registries, is_repeated) in [("Consul,Eureka,Consul", true), ("Eureka,Consul", false)] {
        let name = format!("registries-order-{}", if is_repeated { "consul" } else { "eureka" });
        let (_servers, daemon) = start(&name, registries, "networks: {}\n")?;
        let proxy = AdsClient::connect(daemon.xds, &sidecar());
        proxy.until("the instances of both", TIMEOUT, |resources| {
            (addresses(resources)? == ["10.0.0.1:8080", "10.9.0.1:8080"]).then_some(())
        })?;
        let is_said = daemon.process.log().contains("listed twice");
        assert_eq!(is_said, is_repeated, "{registries}");
    }
    Ok(())
}

fn registries_have_networks() -> Result<(), Failed> {
    let networks = "networks:
  vm: {endpoints: [{fromRegistry: consul}], gateways: [{address: 9.9.9.1, port: 15443}]}
  pcf: {endpoints: [{fromRegistry: Eureka}], gateways: [{address: 9.9.9.2, port: 15443}]}
";
    let (_servers, daemon) = start("registries-networks", "Consul,Eureka", networks)?;
    for (network, own) in [("vm", "10.0.0.1:8080"), ("pcf", "10.9.0.1:8080")] {
        let mut node: Node = sidecar();
        node.metadata["NETWORK"] = network.into();
        // Without TLS, instances of the other network cannot be reached through its gateway.
        AdsClient::connect(daemon.xds, &node).until(network, TIMEOUT, |resources| {
            (addresses(resources)? == [own]).then_some(())
        })?;
    }
    Ok(())
}
