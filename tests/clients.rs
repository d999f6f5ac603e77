//! The requests of istioctl and Kiali that reach istiod, and the answers that they need.
//!
//! `clients/requests.txt` lists the requests by command. Other commands, such as `tag`, `x precheck` and
//! `ztunnel-config`, ask the API server or proxies only.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use regex::Regex;
use serde_json::{Value, json};

use crate::secure::authority::Authority;
use crate::support::ads::AdsClient;
use crate::support::agent::{Agent, ClientCredentials, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::{self, RUNTIME};
use crate::support::{ports, project, scratch, wait};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("clients::requests_are_answered", requests_are_answered),
        Trial::test("clients::kiali_reads_the_control_plane", kiali_reads_the_control_plane),
    ]
}

const PROXY: &str = "web-1.app";

/// A daemon with a CA and ControlZ, and a proxy that has its configuration.
struct Fixture {
    daemon: Daemon,
    control: SocketAddr,
    authority: Authority,
    _proxy: AdsClient,
}

impl Fixture {
    fn start(name: &str) -> Result<Fixture, Failed> {
        let authority = Authority::new("clients");
        let (folder, port) = (scratch(name), ports::free());
        let plugged = folder.join("cacerts");
        authority.plug_into(&plugged);
        let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
            command.arg("--configDir").arg(project().join("tests/debug/mesh"));
            command.args(["-n", "istio-system", &format!("--ctrlz_port={port}")]);
            command.env("ROOT_CA_DIR", &plugged);
        })?;
        let node = Node {
            id: format!("sidecar~10.1.0.1~{PROXY}~app.svc.cluster.local"),
            metadata: json!({ "ISTIO_VERSION": "1.30.3", "LABELS": { "app": "web", "version": "v1" },
                "NAMESPACE": "app", "SERVICE_ACCOUNT": "web", "CLUSTER_ID": "Kubernetes",
                "PROXY_CONFIG": {} }),
        };
        let proxy = AdsClient::connect(daemon.xds, &node);
        proxy.first()?;
        Ok(Fixture {
            daemon,
            control: SocketAddr::from(([127, 0, 0, 1], port)),
            authority,
            _proxy: proxy,
        })
    }

    /// Asks for a type over xDS as istioctl does, with the identity of an operator. Returns the texts of the resources.
    fn over_xds(&self, type_url: &str, names: &[&str]) -> Result<Vec<String>, String> {
        let operator = self
            .authority
            .certificate("spiffe://cluster.local/ns/istio-system/sa/default");
        let agent = Agent::new(self.daemon.secure, Trust::Roots(self.authority.root.clone()));
        let node = Node {
            id: "sidecar~1.1.1.1~istioctl.istio-system~istio-system.svc.cluster.local".to_owned(),
            metadata: json!({ "GENERATOR": "event", "NAMESPACE": "istio-system" }),
        };
        let exchange = async {
            let mut stream = agent.ads(&ClientCredentials::certificate(operator), &node).await?;
            stream.ask(type_url, names).await
        };
        let answer = RUNTIME
            .block_on(exchange)
            .map_err(|status| format!("{type_url}: {status}"))?;

        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        Ok(answer.resources.iter().map(|resource| text(&resource.value)).collect())
    }
}

/// Each line is `COMMAND | WHERE REQUEST | PART`: the answer is a success and contains the part. `xds TYPE NAME…` is a
/// request on 15012, `monitoring PATH` and `control PATH` are GET requests on 15014 and 9876.
fn requests_are_answered() -> Result<(), Failed> {
    let fixture = Fixture::start("clients-requests")?;
    let mut problems = Vec::new();
    let mut commands = BTreeSet::new();
    for line in std::fs::read_to_string(project().join("tests/clients/requests.txt"))?.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let parts: Vec<&str> = line.split('|').map(str::trim).collect();
        let [command, request, part] = parts[..] else {
            return Err(format!("{line:?} has not three parts").into());
        };
        commands.insert(command.to_owned());
        let words: Vec<&str> = request.split_whitespace().collect();
        let over_http = |address| {
            let answer = http::send(address, "GET", words[1], &[], "")?;
            if answer.status.is_success() {
                Ok(answer.body)
            } else {
                Err(format!("{} {}", answer.status, answer.body))
            }
        };
        let answer = match words[0] {
            "xds" => fixture.over_xds(words[1], &words[2..]).map(|texts| texts.join("\n")),
            "monitoring" => over_http(fixture.daemon.monitoring),
            "control" => over_http(fixture.control),
            other => return Err(format!("{line:?}: unknown port {other:?}").into()),
        };
        match answer {
            Ok(text) if text.contains(part) => {}
            Ok(text) => problems.push(format!("{line}\n  {}", text.chars().take(400).collect::<String>())),
            Err(error) => problems.push(format!("{line}\n  {error}")),
        }
    }
    if commands.is_empty() {
        return Err("no request is listed".into());
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems.join("\n").into())
    }
}

/// Kiali finds the version on the port http-monitoring, the state of proxies on each replica, and metrics.
fn kiali_reads_the_control_plane() -> Result<(), Failed> {
    let fixture = Fixture::start("clients-kiali")?;
    let get = |path: &str| http::get(fixture.daemon.monitoring, "istiod", path);
    let version = get("/version")?.body;
    assert!(
        Regex::new(r"^\d+\.\d+\.\d+").is_ok_and(|form| form.is_match(&version)),
        "{version}"
    );
    let is_synced = |row: &Value| {
        let same = |kind: &str| {
            row[format!("{kind}_sent")].is_string() && row[format!("{kind}_sent")] == row[format!("{kind}_acked")]
        };
        row["proxy"] == PROXY && row["istio_version"] == "1.30.3" && same("cluster") && same("listener")
    };
    wait::until("the state of the proxy", Duration::from_mins(1), || {
        let rows: Value = serde_json::from_str(&get("/debug/syncz").ok()?.body).ok()?;
        rows.as_array()?.iter().any(is_synced).then_some(())
    })?;
    let metrics = get("/metrics")?.body;
    for name in [
        "pilot_info{",
        "pilot_proxy_convergence_time_sum",
        "pilot_proxy_convergence_time_count",
        "pilot_xds{",
        "pilot_xds_pushes{",
        "pilot_services",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
    ] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "{name}");
    }
    Ok(())
}
