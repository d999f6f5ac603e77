//! Consul, as a real server.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::{TIMEOUT, sidecar, until_disconnected};
use crate::support::ads::{AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::envoy::{self, Envoy, Protocol};
use crate::support::http::{self, Application, RUNTIME};
use crate::support::process::Process;
use crate::support::{missing, ports, project, scratch, variable, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test("registries::consul::services_follow_the_server", || {
            with_consul(services_follow_the_server)
        }),
        Trial::ignorable_test("registries::consul::envoys_route_to_healthy_instances", || {
            if envoy::binary().is_none() {
                return missing("Envoy is missing; make tools installs it");
            }
            with_consul(envoys_route_to_healthy_instances)
        }),
    ]
}

/// Returns the binary installed by `make tools`, if it exists.
fn binary() -> Option<PathBuf> {
    let path = project().join(".tools/bin/consul-1.8.7");
    path.is_file().then_some(path)
}

fn with_consul(test: fn(&Path) -> Result<(), Failed>) -> Result<Completion, Failed> {
    match binary() {
        Some(path) => test(&path).map(|()| Completion::Completed),
        None => missing("Consul is missing; make tools installs it"),
    }
}

/// A server of one datacenter. Dropping it kills it.
struct Consul {
    process: Process,
    ports: Ports,
}

/// The ports of a server: HTTP, and those of its own protocols.
#[derive(Clone, Copy)]
struct Ports([u16; 4]);

impl Ports {
    fn free() -> Ports {
        Ports([ports::free(), ports::free(), ports::free(), ports::free()])
    }
}

impl Consul {
    fn start(binary: &Path, folder: &Path, ports: Ports, log: &str) -> Result<Consul, String> {
        let mut command = Command::new(binary);
        command.args([
            "agent",
            "-server",
            "-bootstrap-expect=1",
            "-bind=127.0.0.1",
            "-client=127.0.0.1",
        ]);
        command.args(["-dns-port=-1", "-grpc-port=-1", "-log-level=warn", "-node=server"]);
        command.arg("-data-dir").arg(folder.join("consul"));
        let flags = ["-http-port", "-serf-lan-port", "-serf-wan-port", "-server-port"];
        for (flag, port) in flags.into_iter().zip(ports.0) {
            command.arg(format!("{flag}={port}"));
        }
        let server = Consul {
            process: Process::start(&mut command, &folder.join(log)),
            ports,
        };
        wait::until("a leader of Consul", TIMEOUT, || {
            let answer = http::get(server.address(), "consul", "/v1/status/leader").ok()?;
            (answer.body.len() > 4).then_some(())
        })
        .map_err(|error| format!("{error}\n{}", server.process.log_tail()))?;
        Ok(server)
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.ports.0[0]))
    }

    fn put(&self, path: &str, body: &Value) -> Result<(), String> {
        put(self.address(), path, body)
    }

    /// Registers an instance; without a status it has no check.
    fn register(&self, instance: &Instance<'_>, status: Option<&str>) -> Result<(), String> {
        let Instance {
            service,
            id,
            address,
            port,
        } = instance;
        let node = format!("node-{}", number(id) % 50);
        let mut body = json!({
            "Node": node, "Address": "10.255.0.1", "SkipNodeUpdate": true,
            "Service": {
                "ID": id, "Service": service, "Address": address, "Port": port,
                "Tags": [format!("version|{id}"), "plain"], "Meta": { "protocol": "http" },
            },
        });
        if let Some(status) = status {
            body["Check"] =
                json!({ "CheckID": format!("check-{id}"), "ServiceID": id, "Name": "up", "Status": status });
        }
        self.put("/v1/catalog/register", &body)
    }

    fn deregister(&self, id: &str) -> Result<(), String> {
        let node = format!("node-{}", number(id) % 50);
        self.put("/v1/catalog/deregister", &json!({ "Node": node, "ServiceID": id }))
    }
}

struct Instance<'a> {
    service: &'a str,
    id: &'a str,
    address: &'a str,
    port: u16,
}

/// Returns the number in an id, such as 17 of `web-17`.
fn number(id: &str) -> usize {
    id.rsplit('-')
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}

fn put(address: SocketAddr, path: &str, body: &Value) -> Result<(), String> {
    let request = ::http::Request::put(format!("http://{address}{path}")).body(Full::<Bytes>::from(body.to_string()));
    let request = request.map_err(|error| error.to_string())?;
    let response = RUNTIME.block_on(async {
        let client = Client::builder(TokioExecutor::new()).build_http();
        client.request(request).await
    });
    let status = response.map_err(|error| format!("{error:?}"))?.status();
    if status.is_success() {
        Ok(())
    } else {
        Err(format!("{path}: {status}"))
    }
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
    let ports = Ports::free();
    let consul = Consul::start(binary, &folder, ports, "consul.log")?;
    let address = consul.address();
    let name = |number: usize| format!("web-{number}");
    for node in 0..50 {
        let body = json!({ "Node": format!("node-{node}"), "Address": format!("10.255.0.{node}") });
        consul.put("/v1/catalog/register", &body)?;
    }
    for number in 0..count {
        let (service, address) = (name(number), format!("10.3.{}.{}", number / 250, number % 250 + 1));
        let instance = Instance {
            service: &service,
            id: &service,
            address: &address,
            port: 8080,
        };
        consul.register(&instance, Some("passing"))?;
    }
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
    assert!(left < Duration::from_secs(2), "{left:?}");
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
    let consul = Consul::start(binary, &folder, ports, "consul-again.log")?;
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

const MESH: &str = "enableAutoMtls: false\n";

fn envoys_route_to_healthy_instances(binary: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-consul-envoy");
    let consul = Consul::start(binary, &folder, Ports::free(), "consul.log")?;
    let first = Application::start("v1", "127.0.0.2");
    let second = Application::at("v2", SocketAddr::from(([127, 0, 0, 3], first.address.port())));
    let port = first.address.port();
    consul.put(
        "/v1/catalog/register",
        &json!({ "Node": "node-1", "Address": "127.0.0.9" }),
    )?;
    consul.put(
        "/v1/catalog/register",
        &json!({ "Node": "node-2", "Address": "127.0.0.9" }),
    )?;
    let one = Instance {
        service: "web",
        id: "web-1",
        address: "127.0.0.2",
        port,
    };
    let two = Instance {
        service: "web",
        id: "web-2",
        address: "127.0.0.3",
        port,
    };
    consul.register(&one, Some("passing"))?;
    consul.register(&two, Some("passing"))?;
    let mesh = folder.join("mesh");
    std::fs::create_dir(&mesh)?;
    std::fs::write(mesh.join("mesh.yaml"), MESH)?;
    let listener = format!(
        "apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: client, namespace: default}}
spec:
  egress:
  - port: {{number: {port}, protocol: HTTP, name: http}}
    bind: 127.0.0.1
    captureMode: NONE
    hosts: ['*/*']
"
    );
    std::fs::write(mesh.join("sidecar.yaml"), listener)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL=http://{}", consul.address());
        command
            .args(["--registries=Consul", &url])
            .arg("--configDir")
            .arg(&mesh);
    })?;
    let sidecar = Envoy::start(&folder, "sidecar", &sidecar(), daemon.xds, Protocol::Delta)?;
    let outbound = SocketAddr::from(([127, 0, 0, 1], port));
    let answers = || -> Option<Vec<String>> {
        let answers = (0..10).map(|_| http::get(outbound, "web.service.consul", "/").ok()?.application());
        answers.collect()
    };
    wait::until("responses of both instances", TIMEOUT, || {
        let answers = answers()?;
        (answers.contains(&"v1".to_owned()) && answers.contains(&"v2".to_owned())).then_some(())
    })?;
    consul.register(&two, Some("critical"))?;
    wait::until("responses of the healthy instance", TIMEOUT, || {
        answers()?.iter().all(|answer| answer == "v1").then_some(())
    })?;
    consul.process.kill();
    until_disconnected(&daemon, "Consul")?;
    assert_eq!(
        answers(),
        Some(vec!["v1".to_owned(); 10]),
        "a lost server must not affect traffic"
    );
    sidecar.rejected_nothing()?;
    drop(second);
    Ok(())
}
