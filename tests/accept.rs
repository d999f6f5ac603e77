//! Acceptance by the real Envoy: the daemon serves every scenario of Istio's conformance set, where it is next to the
//! project, and each of its proxies is an Envoy that loads its configuration.
//!
//! Each Envoy runs in its own network namespace, where the scenario's addresses can be bound. It reaches the daemon
//! over a Unix socket, through a relay that records the exchange. `accept/refused.txt` lists the rejected
//! configurations with reasons; a line without a rejection fails the test too. Some random meshes are served in the
//! same way.

mod agent;
mod proxy;
mod record;
mod refused;
mod relay;
mod secrets;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Completion, Failed, Trial};

use crate::golden::folders;
use crate::properties::meshes::{Mesh, Seeds};
use crate::support::daemon::Daemon;
use crate::support::{envoy, http, missing, netns, project, scratch};
use proxy::Proxy;
use refused::ExpectedRejections;

/// The groups of the conformance set whose proxies are Envoys configured by this daemon.
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

/// Number of scenarios of one group at a time. Groups run in parallel under a common limit of namespaces; this
/// compensates for their different sizes.
const AT_A_TIME: usize = 2;

/// Number of random meshes; each has four Envoys.
const RANDOM_MESHES: u64 = 4;

pub(crate) fn trials() -> Vec<Trial> {
    let groups = GROUPS
        .into_iter()
        .map(|group| Trial::ignorable_test(format!("accept::{group}"), move || accepted(group)));
    groups
        .chain([
            Trial::ignorable_test("accept::random_meshes", random_meshes),
            Trial::ignorable_test("accept::golden_networks", golden_networks),
        ])
        .collect()
}

fn missing_component() -> Option<&'static str> {
    if envoy::binary().is_none() {
        return Some("Envoy is missing; `make tools` installs it");
    }
    netns::unavailable()
}

/// Real Envoys accept the configuration of random meshes. The folder of a rejected one stays.
fn random_meshes() -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let list = ExpectedRejections::read()?;
    let folder = scratch("accept/random-meshes");
    for seed in Seeds::new(RANDOM_MESHES)? {
        let mesh = folder.join(seed.to_string());
        let random = Mesh::loadable(seed, secrets::CERTIFICATE, secrets::KEY);
        random.write(&mesh).map_err(|error| error.to_string())?;
        check(&mesh, &format!("random/{seed}"), &list)
            .map_err(|error| format!("seed {seed}, mesh folder {}: {error}", mesh.display()))?;
    }
    Ok(Completion::Completed)
}

/// Real Envoys accept the golden cases of ambient traffic between networks, which the conformance set lacks.
fn golden_networks() -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let list = ExpectedRejections::read()?;
    let cases = folders(&project().join("tests/golden/ambient"));
    assert!(!cases.is_empty(), "no cases");
    for case in cases {
        check(&case, &format!("golden/{}", last(&case)), &list)?;
    }
    Ok(Completion::Completed)
}

fn accepted(group: &str) -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let set = project().join("../shared/conformance/scenarios");
    if !set.is_dir() {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    }
    let list = ExpectedRejections::read()?;
    let scenarios = folders(&set.join(group));
    assert!(!scenarios.is_empty(), "no scenarios");
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = format!("{group}/{}", last(scenario));
                    if let Err(error) = check(scenario, &name, &list) {
                        wrong
                            .lock()
                            .expect("no thread panics while it holds the lock")
                            .push(error);
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().expect("no thread panicked while it held the lock");
    wrong.sort();
    if wrong.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(format!(
        "unexpected results in {} of {} scenarios:\n\n{}",
        wrong.len(),
        scenarios.len(),
        wrong.join("\n\n")
    )
    .into())
}

fn last(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Serves one scenario to all of its Envoys and compares the results with the list.
fn check(scenario: &Path, name: &str, list: &ExpectedRejections) -> Result<(), String> {
    let proxies = Proxy::all(scenario).map_err(|error| format!("{name}: {error}"))?;
    if proxies.is_empty() {
        return Ok(());
    }
    let folder = scratch(&format!("accept/{name}"));
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        // Nothing is signed or served with TLS here, and reading a CA takes as long as the rest of the start.
        command.env("ENABLE_CA_SERVER", "false");
        command.arg("--configDir").arg(scenario);
    })
    .map_err(|error| format!("{name}: cannot start the daemon: {error}"))?;
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

/// Compares the daemon's count of rejections with that of the relay.
fn counted(daemon: &Daemon, seen: usize) -> Result<(), String> {
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    let rejects = metrics
        .lines()
        .filter(|line| line.starts_with("pilot_total_xds_rejects{"));
    let values = rejects.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    let counted_by_daemon: f64 = values.sum();
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let expected = seen as f64;
    if (counted_by_daemon - expected).abs() < 0.5 {
        return Ok(());
    }
    Err(format!(
        "the daemon counts {counted_by_daemon} rejected responses, the relay {seen}"
    ))
}
