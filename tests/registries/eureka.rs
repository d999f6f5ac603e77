//! Eureka, as a real server.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::json;

use super::TIMEOUT;
use super::routing::{ADDRESSES, Applications, Life};
use crate::support::daemon::Daemon;
use crate::support::process::Process;
use crate::support::{envoy, http, missing, ports, project, scratch, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "registries::eureka::envoys_route_to_instances_that_are_up",
        || {
            let server = project().join(".tools/eureka.jar");
            if envoy::binary().is_none() {
                return missing("Envoy is missing; make tools installs it");
            }
            // Its libraries are from another registry than everything else, which may be unreachable.
            if !server.is_file() {
                let reason = "Eureka is missing; make tools builds it with Maven, Java 17 and Maven Central";
                return Ok(Completion::ignored_with(reason));
            }
            envoys_route_to_instances_that_are_up(&server).map(|()| Completion::Completed)
        },
    )]
}

/// A server. Dropping it kills it.
struct Eureka {
    process: Process,
    port: u16,
}

impl Eureka {
    fn start(server: &Path, port: u16, log: &Path) -> Result<Eureka, String> {
        let mut command = Command::new("java");
        command
            .args(["-Xmx192m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-jar"])
            .arg(server);
        command
            .arg("--server.address=127.0.0.1")
            .arg(format!("--server.port={port}"));
        command.args([
            "--eureka.client.registerWithEureka=false",
            "--eureka.client.fetchRegistry=false",
            // By default the server answers from a cache of 30 seconds.
            "--eureka.server.useReadOnlyResponseCache=false",
            "--eureka.server.waitTimeInMsWhenSyncEmpty=0",
        ]);
        let eureka = Eureka {
            process: Process::start(&mut command, log),
            port,
        };
        wait::until("a running Eureka", TIMEOUT, || {
            eureka.send("GET", "/eureka/apps", "").ok()
        })
        .map_err(|error| format!("{error}\n{}", eureka.process.log_tail()))?;
        Ok(eureka)
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Result<(), String> {
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let headers = [("content-type", "application/json"), ("accept", "application/json")];
        let answer = http::send(address, method, path, &headers, body)?;
        if answer.status.is_success() {
            Ok(())
        } else {
            Err(format!("{method} {path}: {} {}", answer.status, answer.body))
        }
    }

    fn register(&self, id: &str, address: &str, port: u16) -> Result<(), String> {
        let instance = json!({ "instance": {
            "instanceId": id, "hostName": "shop.example.com", "app": "SHOP", "ipAddr": address, "vipAddress": "shop",
            "status": "UP",
            "port": { "$": port, "@enabled": "true" }, "securePort": { "$": 8443, "@enabled": "false" },
            "dataCenterInfo": {
                "@class": "com.netflix.appinfo.InstanceInfo$DefaultDataCenterInfo", "name": "MyOwn",
            },
            // Nobody renews it, and a slow machine needs minutes for this test.
            "leaseInfo": { "renewalIntervalInSecs": 30, "durationInSecs": 900 },
            "metadata": { "istio.protocol": "http", "version": id },
        } });
        self.send("POST", "/eureka/apps/SHOP", &instance.to_string())
    }
}

fn envoys_route_to_instances_that_are_up(server: &Path) -> Result<(), Failed> {
    let folder = scratch("registries-eureka-real");
    let applications = Applications::start();
    let (port, log) = (ports::free(), folder.join("eureka.log"));
    let eureka = RefCell::new(Some(Eureka::start(server, port, &log)?));
    let running = |act: &dyn Fn(&Eureka) -> Result<(), String>| act(eureka.borrow().as_ref().ok_or("no server")?);
    running(&|eureka| eureka.register("v1", ADDRESSES[0], applications.port))?;
    running(&|eureka| eureka.register("v2", ADDRESSES[1], applications.port))?;
    let mesh = applications.mesh(&folder)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--eurekaserverURL=http://127.0.0.1:{port}/eureka");
        command
            .args(["--registries=Eureka", "--eurekaserverInterval=500ms", &url])
            .arg("--configDir")
            .arg(&mesh);
    })?;
    let life = Life {
        source: "Eureka",
        host: "shop.example.com",
        sicken: &|| running(&|eureka| eureka.send("PUT", "/eureka/apps/SHOP/v2/status?value=OUT_OF_SERVICE", "")),
        kill: &|| {
            eureka.take();
            Ok(())
        },
        // It knows no instance then. Those that it knew before stay until their leases end.
        restart: &|| {
            eureka.replace(Some(Eureka::start(server, port, &log)?));
            Ok(())
        },
        heal: &|| running(&|eureka| eureka.register("v2", ADDRESSES[1], applications.port)),
    };
    life.is_followed(&daemon, &folder, applications.port)?;
    Ok(())
}
