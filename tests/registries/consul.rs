//! Consul, as real servers.

mod clusters;
mod figures;
mod server;

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};

use self::server::{Consul, Instance, Server, with_consul};
use super::routing::{ADDRESSES, Applications, Life};
use super::{TIMEOUT, sidecar, until_disconnected};
use crate::support::ads::{AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::{envoy, missing, scratch, variable, wait};

pub(super) fn trials() -> Vec<Trial> {
    let test = |name: &str, test: fn(&Path) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("registries::consul::{name}"), move || with_consul(test))
    };
    vec![
        test("services_follow_the_server", services_follow_the_server),
        test(
            "a_killed_leader_shrinks_nothing",
            clusters::a_killed_leader_shrinks_nothing,
        ),
        test("datacenters_are_networks", clusters::datacenters_are_networks),
        test("tokens_and_tls_are_used", clusters::tokens_and_tls_are_used),
        test(
            "a_changed_instance_costs_little",
            figures::a_changed_instance_costs_little,
        ),
        Trial::ignorable_test("registries::consul::envoys_route_to_healthy_instances", || {
            if envoy::binary().is_none() {
                return missing("Envoy is missing; make tools installs it");
            }
            with_consul(envoys_route_to_healthy_instances)
        }),
    ]
}

fn cluster(service: &str) -> (Type, String) {
    (Type::Endpoints, format!("outbound|8080||{service}.service.consul"))
}

/// Returns true if the endpoints of a service have this address.
fn has(resources: &Resources, service: &str, address: &str) -> bool {
    let found = resources.get(&cluster(service));
    found.is_some_and(|found| found.body.windows(address.len()).any(|part| part == address.as_bytes()))
}

/// `CONSUL_SERVICES` sets the number of services; figures are printed with `--nocapture`.
fn services_follow_the_server(binary: &Path) -> Result<(), Failed> {
    let count: usize = variable("CONSUL_SERVICES")
        .and_then(|text| text.parse().ok())
        .unwrap_or(1000);
    let folder = scratch("registries-consul");
    let server = Server::alone("consul");
    let consul = server.start(binary, &folder)?;
    consul.until_led()?;
    let address = consul.address();
    let name = |number: usize| format!("web-{number}");
    consul.register_nodes()?;
    let registered: Vec<(String, String)> = (0..count)
        .map(|number| (name(number), format!("10.3.{}.{}", number / 250, number % 250 + 1)))
        .collect();
    let instances = registered.iter().map(|(service, address)| Instance {
        service,
        id: service,
        address,
        port: 8080,
    });
    consul.register_all(&instances.collect::<Vec<_>>())?;
    let began = wait::now();
    let start = |log: &str| {
        Daemon::configured(&folder.join(log), |command| {
            command.args(["--registries=Consul", &format!("--consulserverURL={address}")]);
        })
    };
    let daemon = start("istiod.log")?;
    eprintln!(
        "{count} services of Consul: started and synced in {:?}",
        began.elapsed()
    );
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("all services", TIMEOUT, |resources| {
        let found = (0..count).all(|number| resources.contains_key(&cluster(&name(number))));
        (found && has(resources, "web-0", "10.3.0.1")).then_some(())
    })?;
    // A second instance, which becomes unhealthy and healthy again.
    let other = Instance {
        service: "web-0",
        id: "other-0",
        address: "10.4.0.1",
        port: 8080,
    };
    consul.register(&other, Some("passing"))?;
    proxy.until("a second instance", TIMEOUT, |resources| {
        has(resources, "web-0", "10.4.0.1").then_some(())
    })?;
    let began = wait::now();
    consul.register(&other, Some("critical"))?;
    proxy.until("the end of the unhealthy instance", TIMEOUT, |resources| {
        (!has(resources, "web-0", "10.4.0.1") && has(resources, "web-0", "10.3.0.1")).then_some(())
    })?;
    let left = began.elapsed();
    eprintln!("an unhealthy instance left after {left:?}");
    assert!(left < wait::extended(Duration::from_secs(2)), "{left:?}");
    consul.register(&other, Some("passing"))?;
    proxy.until("the healthy instance", TIMEOUT, |resources| {
        has(resources, "web-0", "10.4.0.1").then_some(())
    })?;
    // Instances without checks, which no check names: a new service, an instance of a known one, and their end.
    let bare = Instance {
        service: "bare",
        id: "bare-1",
        address: "10.5.0.1",
        port: 8080,
    };
    consul.register(&bare, None)?;
    proxy.until("a service without checks", TIMEOUT, |resources| {
        has(resources, "bare", "10.5.0.1").then_some(())
    })?;
    consul.register(
        &Instance {
            id: "bare-2",
            address: "10.5.0.2",
            ..bare
        },
        None,
    )?;
    proxy.until("an instance without checks", TIMEOUT, |resources| {
        has(resources, "bare", "10.5.0.2").then_some(())
    })?;
    consul.deregister("bare-2")?;
    proxy.until("the end of the instance", TIMEOUT, |resources| {
        (!has(resources, "bare", "10.5.0.2")).then_some(())
    })?;
    consul.deregister("bare-1")?;
    let gone = (Type::Cluster, "outbound|8080||bare.service.consul".to_owned());
    proxy.until("the end of the service", TIMEOUT, |resources| {
        (!resources.contains_key(&gone)).then_some(())
    })?;
    // Incremental equals from scratch.
    let before = proxy.first()?;
    let fresh = start("fresh.log")?;
    AdsClient::connect(fresh.xds, &sidecar()).until_same(&before, TIMEOUT)?;
    drop(fresh);
    // The server is killed, and started again with its data.
    proxy.mark();
    consul.process.kill();
    until_disconnected(&daemon, "Consul")?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    let consul = server.start(binary, &folder)?;
    consul.until_led()?;
    let late = Instance {
        service: "late",
        id: "late-1",
        address: "10.6.0.1",
        port: 8080,
    };
    consul.register(&late, Some("passing"))?;
    proxy.until("a service after the restart", TIMEOUT, |resources| {
        has(resources, "late", "10.6.0.1").then_some(())
    })?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

fn envoys_route_to_healthy_instances(binary: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-consul-envoy");
    let applications = Applications::start();
    let server = Server::alone("consul");
    let start = || -> Result<Consul, String> {
        let consul = server.start(binary, &folder)?;
        consul.until_led().map(|()| consul)
    };
    let consul = RefCell::new(Some(start()?));
    let address = format!("http://127.0.0.1:{}", server.ports.http);
    let [one, two] = [("web-1", ADDRESSES[0]), ("web-2", ADDRESSES[1])].map(|(id, address)| Instance {
        service: "web",
        id,
        address,
        port: applications.port,
    });
    let register = |instance: &Instance<'_>, status: &str| {
        let consul = consul.borrow();
        consul.as_ref().ok_or("no server")?.register(instance, Some(status))
    };
    consul.borrow().as_ref().ok_or("no server")?.register_nodes()?;
    register(&one, "passing")?;
    register(&two, "passing")?;
    let mesh = applications.mesh(&folder)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={address}");
        command
            .args(["--registries=Consul", &url])
            .arg("--configDir")
            .arg(&mesh);
    })?;
    let life = Life {
        source: "Consul",
        host: "web.service.consul",
        sicken: &|| register(&two, "critical"),
        kill: &|| {
            consul.take();
            Ok(())
        },
        restart: &|| {
            consul.replace(Some(start()?));
            Ok(())
        },
        heal: &|| register(&two, "passing"),
    };
    life.is_followed(&daemon, &folder, applications.port)?;
    Ok(())
}
