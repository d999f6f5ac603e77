//! A real Consul server.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Completion, Failed};
use serde_json::{Value, json};

use crate::registries::TIMEOUT;
use crate::support::http;
use crate::support::process::Process;
use crate::support::{missing, ports, project, wait};

/// Number of nodes that have instances.
const NODES: usize = 50;

/// Returns the binary installed by `make tools`, if it exists.
fn binary() -> Option<PathBuf> {
    let path = project().join(".tools/bin/consul-1.8.7");
    path.is_file().then_some(path)
}

/// Runs a test, or skips it where Consul is missing.
pub(super) fn with_consul(test: fn(&Path) -> Result<(), Failed>) -> Result<Completion, Failed> {
    match binary() {
        Some(path) => test(&path).map(|()| Completion::Completed),
        None => missing("Consul is missing; make tools installs it"),
    }
}

/// The settings of a server.
#[derive(Clone)]
pub(super) struct Server {
    /// Its name, which is also that of its data and its log.
    pub(super) name: String,
    pub(super) ports: Ports,
    /// Settings beside the ports, as the file of settings has them.
    pub(super) more: Value,
    /// Token of requests.
    pub(super) token: Option<&'static str>,
}

/// The ports of a server.
#[derive(Clone, Copy)]
pub(super) struct Ports {
    pub(super) http: u16,
    pub(super) serf_lan: u16,
    pub(super) serf_wan: u16,
    pub(super) server: u16,
}

impl Server {
    /// A server alone.
    pub(super) fn alone(name: &str) -> Server {
        Server::new(name, json!({ "bootstrap_expect": 1 }))
    }

    pub(super) fn new(name: &str, more: Value) -> Server {
        let ports = Ports {
            http: ports::free(),
            serf_lan: ports::free(),
            serf_wan: ports::free(),
            server: ports::free(),
        };
        Server {
            name: name.to_owned(),
            ports,
            more,
            token: None,
        }
    }

    /// Starts the server. Its state is in the folder.
    pub(super) fn start(&self, binary: &Path, folder: &Path) -> Result<Consul, String> {
        let data = folder.join(format!("{}-data", self.name));
        let Ports {
            http,
            serf_lan,
            serf_wan,
            server,
        } = self.ports;
        let mut settings = json!({
            "server": true, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1", "node_name": self.name,
            "data_dir": data, "log_level": "warn",
            "ports": {
                "dns": -1, "grpc": -1, "http": http, "serf_lan": serf_lan, "serf_wan": serf_wan, "server": server,
            },
            // A leader is elected in seconds.
            "performance": { "raft_multiplier": 1 },
        });
        for (key, value) in self.more.as_object().into_iter().flatten() {
            match value.as_object().filter(|_| key == "ports") {
                Some(ports) => {
                    for (name, port) in ports {
                        settings["ports"][name] = port.clone();
                    }
                }
                None => settings[key] = value.clone(),
            }
        }
        let file = folder.join(format!("{}.json", self.name));
        std::fs::write(&file, settings.to_string()).map_err(|error| error.to_string())?;
        let mut command = Command::new(binary);
        command.arg("agent").arg("-config-file").arg(&file);
        Ok(Consul {
            process: Process::start(&mut command, &folder.join(format!("{}.log", self.name))),
            settings: self.clone(),
        })
    }
}

/// A running server. Dropping it kills it.
pub(super) struct Consul {
    pub(super) process: Process,
    settings: Server,
}

/// An instance.
#[derive(Clone, Copy)]
pub(super) struct Instance<'a> {
    pub(super) service: &'a str,
    pub(super) id: &'a str,
    pub(super) address: &'a str,
    pub(super) port: u16,
}

impl Consul {
    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.settings.ports.http))
    }

    /// Returns the address of the leader; `None` while there is none.
    pub(super) fn leader(&self) -> Option<String> {
        let answer = self.send("GET", "/v1/status/leader", "").ok()?;
        let address: String = serde_json::from_str(&answer).ok()?;
        (!address.is_empty()).then_some(address)
    }

    /// Returns true if it is the leader.
    pub(super) fn is_leader(&self) -> bool {
        self.leader()
            .is_some_and(|leader| leader.ends_with(&format!(":{}", self.settings.ports.server)))
    }

    /// Waits until a leader accepts writes.
    pub(super) fn until_led(&self) -> Result<(), String> {
        let led = wait::until("a leader of Consul", TIMEOUT, || {
            self.leader()?;
            self.put("/v1/kv/led", &json!({})).ok()
        });
        led.map_err(|error| format!("{error}\n{}", self.process.log_tail()))
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Result<String, String> {
        let token = self.settings.token.map(|token| ("x-consul-token", token));
        let headers: Vec<(&str, &str)> = token.into_iter().collect();
        let answer = http::send(self.address(), method, path, &headers, body)?;
        if answer.status.is_success() {
            Ok(answer.body)
        } else {
            Err(format!("{method} {path}: {} {}", answer.status, answer.body))
        }
    }

    pub(super) fn put(&self, path: &str, body: &Value) -> Result<(), String> {
        self.send("PUT", path, &body.to_string()).map(drop)
    }

    pub(super) fn delete(&self, path: &str) -> Result<(), String> {
        self.send("DELETE", path, "").map(drop)
    }

    /// Registers the nodes of instances, without checks.
    pub(super) fn register_nodes(&self) -> Result<(), String> {
        for node in 0..NODES {
            let body = json!({ "Node": format!("node-{node}"), "Address": format!("10.255.0.{node}") });
            self.put("/v1/catalog/register", &body)?;
        }
        Ok(())
    }

    /// Registers an instance; without a status it has no check.
    pub(super) fn register(&self, instance: &Instance<'_>, status: Option<&str>) -> Result<(), String> {
        self.register_tagged(instance, status, &[])
    }

    /// Registers an instance with further tags.
    pub(super) fn register_tagged(
        &self,
        instance: &Instance<'_>,
        status: Option<&str>,
        tags: &[&str],
    ) -> Result<(), String> {
        let mut body = json!({
            "Node": node(instance.id), "Address": "10.255.0.1", "SkipNodeUpdate": true,
            "Service": service(instance, tags),
        });
        if let Some(status) = status {
            body["Check"] = check(instance, status);
        }
        self.put("/v1/catalog/register", &body)
    }

    /// Registers many healthy instances on nodes that exist, some in each transaction.
    pub(super) fn register_all(&self, instances: &[Instance<'_>]) -> Result<(), String> {
        // A transaction has 64 operations at most.
        for some in instances.chunks(32) {
            let operations: Vec<Value> = some
                .iter()
                .flat_map(|instance| {
                    let mut check = check(instance, "passing");
                    check["Node"] = node(instance.id).into();
                    let service =
                        json!({ "Verb": "set", "Node": node(instance.id), "Service": service(instance, &[]) });
                    [
                        json!({ "Service": service }),
                        json!({ "Check": { "Verb": "set", "Check": check } }),
                    ]
                })
                .collect();
            self.put("/v1/txn", &operations.into())?;
        }
        Ok(())
    }

    pub(super) fn deregister(&self, id: &str) -> Result<(), String> {
        self.put("/v1/catalog/deregister", &json!({ "Node": node(id), "ServiceID": id }))
    }
}

fn service(instance: &Instance<'_>, tags: &[&str]) -> Value {
    let mut all = vec![format!("version|{}", instance.id), "plain".to_owned()];
    all.extend(tags.iter().map(|tag| (*tag).to_owned()));
    json!({
        "ID": instance.id, "Service": instance.service, "Address": instance.address, "Port": instance.port,
        "Tags": all, "Meta": { "protocol": "http" },
    })
}

fn check(instance: &Instance<'_>, status: &str) -> Value {
    let id = instance.id;
    json!({ "CheckID": format!("check-{id}"), "ServiceID": id, "Name": "up", "Status": status })
}

/// Returns the node of an instance, by the number at the end of its id.
fn node(id: &str) -> String {
    let number: usize = id
        .rsplit('-')
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default();
    format!("node-{}", number % NODES)
}
