//! Whether the real Envoy takes what it is sent: every scenario of the conformance set, which lies beside the project
//! where it is at hand, is served by the daemon, and each of its proxies is an Envoy that loads its configuration.
//!
//! Each Envoy is in a network namespace of its own, where the scenario's addresses can be bound. It reaches the daemon
//! by a socket in the file system, through a relay that reads along. What is not accepted stands in `accept/refused.txt`
//! with its reason; that list has to be true in both directions.

mod agent;
mod ledger;
mod proxy;
mod refused;
mod relay;
mod secrets;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Completion, Failed, Trial};

use crate::golden::folders;
use crate::support::daemon::Daemon;
use crate::support::{envoy, http, missing, netns, project, scratch};
use proxy::Proxy;
use refused::Refused;

/// The groups of the conformance set whose proxies are Envoys that this daemon configures.
const GROUPS: [&str; 16] = [
    "ambient",
    "clusters",
    "destinationrules",
    "dns",
    "envoyfilter",
    "gateways",
    "ipfamily",
    "locality",
    "meshconfig",
    "multinetwork",
    "proxyconfig",
    "serviceentries",
    "sidecar",
    "telemetry",
    "virtualservices",
    "wasmplugin",
];

/// Scenarios of one group under way at a time. Groups run beside each other, and the number of namespaces is bounded for
/// all of them together; this evens out that groups differ in size.
const AT_A_TIME: usize = 2;

pub(crate) fn trials() -> Vec<Trial> {
    GROUPS
        .into_iter()
        .map(|group| Trial::ignorable_test(format!("accept::{group}"), move || accepted(group)))
        .collect()
}

fn accepted(group: &str) -> Result<Completion, Failed> {
    if envoy::binary().is_none() {
        return missing("there is no Envoy; `make tools` installs it");
    }
    if let Some(reason) = netns::lacking() {
        return missing(reason);
    }
    let set = project().join("../shared/conformance/scenarios");
    if !set.is_dir() {
        return Ok(Completion::ignored_with(
            "skipped, the conformance set is not beside the project (../shared/conformance)",
        ));
    }
    let list = Refused::read()?;
    let scenarios = folders(&set.join(group));
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = format!("{group}/{}", last(scenario));
                    if let Err(error) = check(scenario, &name, &list) {
                        wrong.lock().expect("no thread panics with it").push(error);
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().expect("no thread panicked with it");
    wrong.sort();
    if wrong.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(format!(
        "{} of {} scenarios are not as expected:\n\n{}",
        wrong.len(),
        scenarios.len(),
        wrong.join("\n\n")
    )
    .into())
}

fn last(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Serves one scenario to all of its Envoys and holds what happened against the list.
fn check(scenario: &Path, name: &str, list: &Refused) -> Result<(), String> {
    let proxies = Proxy::all(scenario).map_err(|error| format!("{name}: {error}"))?;
    if proxies.is_empty() {
        return Ok(());
    }
    let folder = scratch(&format!("accept/{name}"));
    let daemon =
        Daemon::start(scenario, &folder.join("istiod.log")).map_err(|error| format!("{name}: no daemon: {error}"))?;
    let mut wrong = Vec::new();
    let mut refusals = 0;
    for proxy in &proxies {
        let name = format!("{name}/{}", proxy.name);
        let outcome = proxy.load(scenario, &daemon, &folder);
        refusals += outcome.refusals;
        wrong.extend(list.judge(&name, outcome.verdict).err());
    }
    wrong.extend(counted(&daemon, refusals).err().map(|error| format!("{name}: {error}")));
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("\n"))
    }
}

/// The daemon counts the refusals that the relay has seen.
fn counted(daemon: &Daemon, seen: usize) -> Result<(), String> {
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    let rejects = metrics
        .lines()
        .filter(|line| line.starts_with("pilot_total_xds_rejects{"));
    let values = rejects.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    let told: f64 = values.sum();
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let expected = seen as f64;
    if (told - expected).abs() < 0.5 {
        return Ok(());
    }
    Err(format!(
        "the daemon counts {told} refused responses, and there were {seen}"
    ))
}
