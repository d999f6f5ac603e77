//! A proxy of a scenario as a real Envoy, with a bootstrap like istio-agent's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use istiod::api::folder;
use istiod::cli::render::read_files;
use istiod::model::Installation;
use serde_json::{Map, Value};

use super::record::{CLUSTER, LISTENER};
use super::relay::Relay;
use super::secrets;
use crate::support::daemon::Daemon;
use crate::support::process::Process;
use crate::support::{bootstrap, envoy, http, netns, sockets, wait};

/// Time limit of a load; a successful one does not reach it.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for the remaining types after a rejection.
const AFTERWARDS: Duration = Duration::from_secs(3);

/// The statistics that every Envoy has, and that are 0 if it has accepted and opened everything.
const NO_PROBLEM: [&str; 5] = [
    "cluster_manager.cds.update_rejected",
    "cluster_manager.warming_clusters",
    "listener_manager.lds.update_rejected",
    "listener_manager.listener_create_failure",
    "listener_manager.total_listeners_warming",
];

/// An entry of a scenario's `proxies.yaml`.
pub(super) struct Proxy {
    pub(super) name: String,
    /// The `node` of its bootstrap.
    node: Value,
}

/// The result of a load.
pub(super) struct Outcome {
    /// Number of rejected responses of the daemon.
    pub(super) refusals: usize,
    /// Success if Envoy accepted everything; otherwise the reason.
    pub(super) verdict: Result<(), String>,
}

impl Proxy {
    /// Returns the sidecars, gateways and waypoints of a scenario.
    pub(super) fn all(scenario: &Path) -> Result<Vec<Proxy>, String> {
        let files = read_files(scenario).map_err(|error| error.to_string())?;
        let installation = Installation::default();
        let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
        if folder.proxies.is_empty() {
            return Err("it has no proxies".to_owned());
        }
        let envoys = folder.proxies.iter().filter(|entry| {
            let id = entry["node"].as_str().unwrap_or_default();
            let is_envoy = entry["metadata"]["GENERATOR"] != "grpc";
            let kinds = ["sidecar~", "router~", "waypoint~"];
            is_envoy && kinds.iter().any(|kind| id.starts_with(kind))
        });
        Ok(envoys.map(Proxy::of).collect())
    }

    fn of(entry: &Value) -> Proxy {
        let mut node = Map::new();
        node.insert("id".into(), entry["node"].clone());
        for key in ["cluster", "metadata"] {
            node.insert(key.into(), entry[key].clone());
        }
        if let Some(locality) = entry["locality"].as_object() {
            let names = [("region", "region"), ("zone", "zone"), ("subZone", "sub_zone")];
            let known = names
                .iter()
                .filter_map(|(from, to)| Some(((*to).to_owned(), locality.get(*from)?.clone())));
            node.insert("locality".into(), Value::Object(known.collect()));
        }
        Proxy {
            name: entry["name"].as_str().unwrap_or_default().to_owned(),
            node: Value::Object(node),
        }
    }

    /// Starts an Envoy, waits until it has loaded its configuration, and ends it.
    pub(super) fn load(&self, scenario: &Path, daemon: &Daemon, folder: &Path) -> Outcome {
        match self.started(scenario, daemon, folder) {
            Ok(running) => running.outcome(),
            Err(error) => Outcome {
                refusals: 0,
                verdict: Err(error),
            },
        }
    }

    fn started(&self, scenario: &Path, daemon: &Daemon, folder: &Path) -> Result<Running, String> {
        let permit = netns::permit();
        let sockets = sockets();
        let secrets = secrets::rendered(scenario, &folder.join("rendered"), &self.name);
        let relay_socket = sockets.join("relay");
        let relay = Relay::start(&relay_socket, daemon.xds, secrets)?;
        let config = folder.join(format!("{}.json", self.name));
        let bootstrap = bootstrap::sidecar(&self.node, &sockets.join("admin"), &relay_socket, &relay_socket);
        std::fs::write(&config, bootstrap.to_string()).map_err(|error| error.to_string())?;
        let mut command = netns::in_namespace(&envoy::binary().ok_or("Envoy is missing; `make tools` installs it")?);
        command.args([
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "warning",
            "-c",
        ]);
        // Files with relative paths in a configuration do not exist there, and Envoy writes none elsewhere.
        command.arg(&config).current_dir(&sockets);
        let process = Process::start(&mut command, &folder.join(format!("{}.log", self.name)));
        Ok(Running {
            process,
            relay,
            admin: sockets.join("admin"),
            _permit: permit,
        })
    }
}

/// The Envoy in its namespace.
struct Running {
    process: Process,
    relay: Relay,
    admin: PathBuf,
    _permit: netns::Permit,
}

impl Running {
    fn outcome(self) -> Outcome {
        let mut missing = "Envoy does not answer".to_owned();
        let started_at = wait::now();
        let mut refused_at = None;
        let loaded = wait::until("an Envoy that has loaded its configuration", TIMEOUT, || {
            if let Some(status) = self.process.ended() {
                return Some(Err(format!("Envoy exited: {status}")));
            }
            match self.outstanding() {
                None => return Some(Ok(())),
                Some(messages) => missing = messages,
            }
            let is_refused = !self.relay.record().complaints().is_empty();
            let since = is_refused.then(|| *refused_at.get_or_insert_with(|| started_at.elapsed()))?;
            (started_at.elapsed() > since + AFTERWARDS).then_some(Ok(()))
        });
        let record = self.relay.record();
        let refusals = record.refusals.len();
        let complaints = record.complaints();
        let verdict = if !complaints.is_empty() {
            Err(complaints.join("\n"))
        } else if let Some(broken) = &record.broken {
            Err(format!("stream failed: {broken}"))
        } else {
            let open = record.open();
            drop(record);
            let with_log = |error| format!("{error}; {missing}; {open}\n{}", self.process.log_tail());
            loaded.flatten().map_err(with_log)
        };
        Outcome { refusals, verdict }
    }

    /// Describes what this Envoy has not yet accepted and opened; `None` if nothing is missing.
    fn outstanding(&self) -> Option<String> {
        let settled = self.relay.record().settled();
        if !settled {
            return Some("responses without ACK".to_owned());
        }
        match http::get_at(&self.admin, "/ready") {
            Ok(ready) if ready.status.is_success() => self.counts().unwrap_or_else(Some),
            Ok(ready) => Some(format!("Envoy is {}", ready.body.trim())),
            Err(error) => Some(error),
        }
    }

    /// Compares Envoy's own counters with the resources sent.
    fn counts(&self) -> Result<Option<String>, String> {
        let filter = "update_rejected|listener_create_failure|warming|total_listeners_active|active_clusters";
        let stats = http::get_at(&self.admin, &format!("/stats?format=json&filter={filter}"))?.body;
        let stats: Value = serde_json::from_str(&stats).map_err(|error| error.to_string())?;
        let rows = stats["stats"].as_array().into_iter().flatten();
        let values = rows.filter_map(|row| Some((row["name"].as_str()?, row["value"].as_u64()?)));
        let values: BTreeMap<&str, u64> = values.collect();
        let record = self.relay.record();
        // Other statistics with names of the filter, such as those of other subscriptions, need not exist.
        let mut expected: BTreeMap<&str, u64> = values.keys().map(|name| (*name, 0)).collect();
        expected.extend(NO_PROBLEM.map(|name| (name, 0)));
        let (clusters, listeners) = (bootstrap::CLUSTERS + record.count(CLUSTER), record.count(LISTENER));
        expected.insert("cluster_manager.active_clusters", clusters);
        expected.insert("listener_manager.total_listeners_active", listeners);
        for (name, expected) in expected {
            let value = values.get(name);
            if value != Some(&expected) {
                return Ok(Some(format!("{name} is {value:?}, not {expected}")));
            }
        }
        Ok((record.streams != 1).then(|| format!("{} streams instead of one", record.streams)))
    }
}
