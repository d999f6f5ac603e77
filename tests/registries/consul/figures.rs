//! The cost of many instances of Consul.
//!
//! The test has bounds for every build. For figures, measure an optimised daemon on a quiet machine:
//!
//!     CONSUL_INSTANCES=10000 REGISTRIES_BIN=target/release/istiod cargo test --test integration -- \
//!         registries::consul::a_changed_instance_costs_little --nocapture

use std::path::Path;
use std::time::Duration;

use libtest_mimic::Failed;

use super::server::{Instance, Server};
use super::{cluster, has};
use crate::registries::{TIMEOUT, count, measured, sidecar};
use crate::support::ads::AdsClient;
use crate::support::daemon::Daemon;
use crate::support::{scratch, variable, wait};

/// Instances of each service.
const PER_SERVICE: usize = 10;
/// Number of changes, of which the mean is measured.
const CHANGES: usize = 10;

pub(super) fn a_changed_instance_costs_little(binary: &Path) -> Result<(), Failed> {
    let instances = count("CONSUL_INSTANCES", 1000);
    let is_measurement = variable("REGISTRIES_BIN").is_some();
    let folder = scratch("registries-consul-figures");
    let consul = Server::alone("consul").start(binary, &folder)?;
    consul.until_led()?;
    consul.register_nodes()?;
    let registered: Vec<(String, String, String)> = (0..instances)
        .map(|number| {
            let (service, id) = (format!("web-{}", number / PER_SERVICE), format!("id-{number}"));
            (service, id, format!("10.3.{}.{}", number / 250, number % 250 + 1))
        })
        .collect();
    let all: Vec<Instance<'_>> = registered
        .iter()
        .map(|(service, id, address)| Instance {
            service,
            id,
            address,
            port: 8080,
        })
        .collect();
    consul.register_all(&all)?;
    let began = wait::now();
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={}", consul.address());
        measured(command.args(["--registries=Consul", &url]));
    })?;
    let started = began.elapsed();
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let services: Vec<_> = (0..instances / PER_SERVICE)
        .map(|number| cluster(&format!("web-{number}")))
        .collect();
    proxy.until("all services", TIMEOUT, |resources| {
        services.iter().all(|name| resources.contains_key(name)).then_some(())
    })?;
    // An instance of one service becomes unhealthy and healthy again.
    let changed = instances / 2 + 5;
    let (service, _, address) = &registered[changed];
    let mut arrived = Vec::new();
    let before = daemon.cpu();
    for change in 0..CHANGES {
        let is_healthy = change % 2 == 1;
        let began = wait::now();
        let status = if is_healthy { "passing" } else { "critical" };
        consul.register(&all[changed], Some(status))?;
        proxy.until("the changed instance", TIMEOUT, |resources| {
            (has(resources, service, address) == is_healthy).then_some(())
        })?;
        arrived.push(began.elapsed());
    }
    let each = daemon.cpu().saturating_sub(before) / u32::try_from(CHANGES)?;
    arrived.sort_unstable();
    let median = arrived[CHANGES / 2];
    eprintln!(
        "{instances} instances of Consul: started and synced in {started:?}; a changed instance costs {each:?} of CPU \
         time and arrives after {median:?}"
    );
    // An unoptimised build on a busy machine takes several times as long.
    let bounds = if is_measurement {
        (
            Duration::from_secs(5),
            Duration::from_millis(20),
            Duration::from_millis(500),
        )
    } else {
        (
            Duration::from_mins(1),
            Duration::from_millis(500),
            Duration::from_secs(5),
        )
    };
    let measured = (started, each, median);
    assert!(
        measured.0 < bounds.0 && measured.1 < bounds.1 && measured.2 < bounds.2,
        "{measured:?}, not below {bounds:?}"
    );
    Ok(())
}
