//! The requests of istioctl and Kiali, and the answers that they need.
//!
//! `clients/istioctl.txt` has a line for each request: `COMMAND | WHERE REQUEST | KIND CONTENT`. Where:
//! - `xds TYPE NAME…`: a request on 15012 with an operator's identity;
//! - `monitoring PATH` and `control METHOD PATH BODY`: requests on 15014 and 9876;
//! - `envoy PATH`: a request to the admin interface of a proxy that has its configuration from istiod;
//! - `ztunnel TYPE`: what a ztunnel holds, because istioctl reads the fields from its dump;
//! - `api METHOD PATH BODY`: a request to an API server with the objects of the charts.
//!
//! The kinds: `fields` that exist in the answer (`a>b`, `[]` for some element, `=TEXT` for the value), `contains` for a
//! part of the answer, and `status`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use istiod::proto::envoy::config::core::v3 as core;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse};
use istiod::proto::json::{any_to_json, struct_from_json};
use libtest_mimic::{Completion, Failed, Trial};
use regex::Regex;
use serde_json::{Value, json};
use tonic::transport::Endpoint;

use crate::secure::authority::Authority;
use crate::support::ads::AdsClient;
use crate::support::agent::{Agent, ClientCredentials, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::{self, Envoy, Node, Protocol};
use crate::support::http::{self, RUNTIME};
use crate::support::kubernetes::{self, Cluster};
use crate::support::{helm, missing, ports, project, scratch, wait};

/// Places where istiod answers, or what it sends.
const ISTIOD: [&str; 4] = ["xds", "monitoring", "control", "ztunnel"];
/// Commands whose requests are listed.
const COMMANDS: [&str; 11] = [
    "proxy-status",
    "proxy-config",
    "x internal-debug",
    "admin log",
    "version",
    "remote-clusters",
    "x precheck",
    "tag",
    "ztunnel-config",
    "dashboard controlz",
    "bug-report",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("clients::istiod_answers", istiod_answers),
        Trial::ignorable_test("clients::proxies_answer", proxies_answer),
        kubernetes::optional_trial("clients::the_api_server_answers", the_api_server_answers),
        Trial::test("clients::every_command_is_listed", every_command_is_listed),
        Trial::test("clients::kiali_reads_the_control_plane", kiali_reads_the_control_plane),
    ]
}

const PROXY: &str = "web-1.app";

/// A line of the list.
#[derive(Debug)]
struct Line {
    command: String,
    place: String,
    request: String,
    kind: String,
    content: String,
}

/// An answer: its HTTP status, and its text.
struct Answer {
    status: u16,
    text: String,
}

impl Answer {
    fn json(value: &Value) -> Self {
        Self {
            status: 200,
            text: value.to_string(),
        }
    }
}

fn lines() -> Result<Vec<Line>, Failed> {
    let text = std::fs::read_to_string(project().join("tests/clients/istioctl.txt"))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let line = |line: &str| -> Result<Line, Failed> {
        let parts: Vec<&str> = line.split(" | ").collect();
        let [command, request, expected] = parts[..] else {
            return Err(format!("{line:?} has not three parts").into());
        };
        let half = |text: &str| {
            let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
            (first.to_owned(), rest.to_owned())
        };
        let ((place, request), (kind, content)) = (half(request), half(expected));
        let command = command.to_owned();
        Ok(Line {
            command,
            place,
            request,
            kind,
            content,
        })
    };
    lines.map(line).collect()
}

/// Returns true if some value at the path has the text, or if there is none, exists.
fn has(value: &Value, path: &[&str], text: Option<&str>) -> bool {
    match path.split_first() {
        Some((&"[]", rest)) => value
            .as_array()
            .is_some_and(|elements| elements.iter().any(|element| has(element, rest, text))),
        Some((name, rest)) => value.get(name).is_some_and(|field| has(field, rest, text)),
        None if value.is_null() => false,
        None => text.is_none_or(|text| match value {
            Value::String(found) => found == text,
            other => {
                let written = other.to_string();
                written == text
            }
        }),
    }
}

/// Returns the reason why an answer is not as listed.
fn problem(line: &Line, answer: &Answer) -> Option<String> {
    let start: String = answer.text.chars().take(600).collect();
    let wrong = |what: &str| {
        Some(format!(
            "{}: {} {}: {what}\n  {start}",
            line.command, line.place, line.request
        ))
    };
    if line.kind == "status" {
        let is_same = line.content == answer.status.to_string();
        return if is_same {
            None
        } else {
            wrong(&format!("status {}", answer.status))
        };
    }
    if !(200..300).contains(&answer.status) {
        return wrong(&format!("status {}", answer.status));
    }
    match line.kind.as_str() {
        "contains" if answer.text.contains(&line.content) => None,
        "contains" => wrong(&format!("{:?} is missing", line.content)),
        "fields" => {
            let value: Value = match serde_json::from_str(&answer.text) {
                Ok(value) => value,
                Err(error) => return wrong(&error.to_string()),
            };
            let is_missing = |field: &&str| {
                let (path, text) = match field.split_once('=') {
                    Some((path, text)) => (path, Some(text)),
                    None => (*field, None),
                };
                !has(&value, &path.split('>').collect::<Vec<_>>(), text)
            };
            let missing: Vec<&str> = line.content.split_whitespace().filter(is_missing).collect();
            if missing.is_empty() {
                None
            } else {
                wrong(&format!("without {missing:?}"))
            }
        }
        other => wrong(&format!("unknown kind {other:?}")),
    }
}

/// Sends the requests to some places and fails with all problems.
fn check(places: &[&str], mut send: impl FnMut(&Line) -> Result<Answer, String>) -> Result<(), Failed> {
    let lines = lines()?;
    let mut problems = Vec::new();
    for line in lines.iter().filter(|line| places.contains(&line.place.as_str())) {
        match send(line) {
            Ok(answer) => problems.extend(problem(line, &answer)),
            Err(error) => problems.push(format!("{line:?}: {error}")),
        }
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems.join("\n").into())
    }
}

/// A daemon with a CA and ControlZ, and a proxy that has its configuration.
struct Fixture {
    daemon: Daemon,
    control: SocketAddr,
    authority: Authority,
    _proxy: AdsClient,
}

fn node() -> Node {
    Node {
        id: format!("sidecar~10.1.0.1~{PROXY}~app.svc.cluster.local"),
        metadata: json!({ "ISTIO_VERSION": "1.30.3", "LABELS": { "app": "web", "version": "v1" },
            "NAMESPACE": "app", "SERVICE_ACCOUNT": "web", "CLUSTER_ID": "Kubernetes",
            "PROXY_CONFIG": {} }),
    }
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
            command.env("ROOT_CA_DIR", &plugged).env("PILOT_ENABLE_AMBIENT", "true");
        })?;
        let proxy = AdsClient::connect(daemon.xds, &node());
        proxy.first()?;
        Ok(Fixture {
            daemon,
            control: SocketAddr::from(([127, 0, 0, 1], port)),
            authority,
            _proxy: proxy,
        })
    }

    /// Waits until the proxy has acknowledged what it was sent.
    fn until_acknowledged(&self) -> Result<(), String> {
        wait::until("the state of the proxy", Duration::from_mins(1), || {
            let answer = http::get(self.daemon.monitoring, "istiod", "/debug/syncz").ok()?;
            let rows: Value = serde_json::from_str(&answer.body).ok()?;
            rows.as_array()?.iter().any(is_synced).then_some(())
        })
    }

    /// Asks for a type over xDS as istioctl does, with the identity of an operator.
    fn over_xds(&self, type_url: &str, names: &[&str]) -> Result<Answer, String> {
        let operator = self
            .authority
            .certificate("spiffe://cluster.local/ns/istio-system/sa/default");
        let agent = Agent::new(self.daemon.secure, Trust::Roots(self.authority.root.clone()));
        // Parity (pkg/adsc/adsc.go): the node of istioctl has this version, whatever its own, and the first request has
        // a nonce.
        let node = Node {
            id: "sidecar~1.1.1.1~istioctl.istio-system~istio-system.svc.cluster.local".to_owned(),
            metadata: json!({ "GENERATOR": "event", "NAMESPACE": "istio-system", "SERVICE_ACCOUNT": "default",
                "ISTIO_VERSION": "65536.65536.65536" }),
        };
        let exchange = async {
            let mut stream = agent.ads(&ClientCredentials::certificate(operator), &node).await?;
            let request = DiscoveryRequest {
                type_url: type_url.to_owned(),
                resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
                response_nonce: "2026-01-01 00:00:00.1 +0000 UTC m=+0.1".to_owned(),
                ..Default::default()
            };
            stream.exchange(request).await
        };
        let answer = RUNTIME.block_on(exchange).map_err(|status| status.to_string())?;
        Ok(Answer::json(&as_json(&answer)))
    }

    /// Returns all resources of a type that a ztunnel receives.
    fn as_ztunnel(&self, type_url: &str) -> Result<Answer, String> {
        let metadata = json!({ "NAMESPACE": "istio-system", "CLUSTER_ID": "Kubernetes", "NODE_NAME": "node1" });
        let request = DeltaDiscoveryRequest {
            node: Some(core::Node {
                id: "ztunnel~10.1.0.9~ztunnel-a.istio-system~istio-system.svc.cluster.local".to_owned(),
                metadata: metadata.as_object().map(struct_from_json),
                ..Default::default()
            }),
            type_url: type_url.to_owned(),
            resource_names_subscribe: vec!["*".to_owned()],
            ..Default::default()
        };
        let exchange = async {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", self.daemon.xds));
            let channel = endpoint.map_err(|error| error.to_string())?.connect().await;
            let mut client = AggregatedDiscoveryServiceClient::new(channel.map_err(|error| error.to_string())?);
            let requests = futures::StreamExt::chain(futures::stream::iter([request]), futures::stream::pending());
            let stream = client.delta_aggregated_resources(requests).await;
            let mut responses = stream.map_err(|status| status.to_string())?.into_inner();
            let response = responses.message().await.map_err(|status| status.to_string())?;
            response.ok_or_else(|| "the stream ended".to_owned())
        };
        let answer = RUNTIME.block_on(exchange)?;
        let resources = answer
            .resources
            .iter()
            .filter_map(|resource| resource.resource.as_ref());
        Ok(Answer::json(&resources.map(any_to_json).collect()))
    }

    fn send(&self, line: &Line) -> Result<Answer, String> {
        let words: Vec<&str> = line.request.split_whitespace().collect();
        match line.place.as_str() {
            "xds" => self.over_xds(words[0], &words[1..]),
            "ztunnel" => self.as_ztunnel(words[0]),
            "monitoring" => over_http(self.daemon.monitoring, "GET", words[0], ""),
            _ => over_http(
                self.control,
                words[0],
                words[1],
                words.get(2).copied().unwrap_or_default(),
            ),
        }
    }
}

/// Returns a response as JSON; debug pages, whose type is no message, as they are.
fn as_json(answer: &DiscoveryResponse) -> Value {
    let resource = |any: &istiod::proto::Any| {
        if any.type_url.starts_with("istio.io/") {
            let text = String::from_utf8_lossy(&any.value);
            serde_json::from_str(&text).unwrap_or_else(|_| json!(text))
        } else {
            any_to_json(any)
        }
    };
    let identifier = answer.control_plane.as_ref().map(|control| control.identifier.as_str());
    let control_plane: Value = serde_json::from_str(identifier.unwrap_or_default()).unwrap_or_default();
    let resources: Vec<Value> = answer.resources.iter().map(resource).collect();
    json!({ "controlPlane": control_plane, "resources": resources })
}

fn over_http(address: SocketAddr, method: &str, path: &str, body: &str) -> Result<Answer, String> {
    let answer = http::send(address, method, path, &[], body)?;
    Ok(Answer {
        status: answer.status.as_u16(),
        text: answer.body,
    })
}

fn is_synced(row: &Value) -> bool {
    let same = |kind: &str| {
        row[format!("{kind}_sent")].is_string() && row[format!("{kind}_sent")] == row[format!("{kind}_acked")]
    };
    row["proxy"] == PROXY && row["istio_version"] == "1.30.3" && same("cluster") && same("listener")
}

fn istiod_answers() -> Result<(), Failed> {
    let fixture = Fixture::start("clients-requests")?;
    fixture.until_acknowledged()?;
    check(&ISTIOD, |line| fixture.send(line))
}

/// The commands that read a proxy find the configuration of istiod there.
fn proxies_answer() -> Result<Completion, Failed> {
    if envoy::binary().is_none() {
        return missing("Envoy is missing; `make tools` installs it");
    }
    let folder = scratch("clients-envoy");
    let mesh = folder.join("mesh");
    std::fs::create_dir_all(&mesh)?;
    for name in ["mesh.yaml", "objects.yaml"] {
        std::fs::copy(project().join("tests/debug/mesh").join(name), mesh.join(name))?;
    }
    // Without an agent, there are no certificates.
    let plaintext = json!({ "apiVersion": "security.istio.io/v1", "kind": "PeerAuthentication",
        "metadata": { "name": "default", "namespace": "istio-system" }, "spec": { "mtls": { "mode": "DISABLE" } } });
    std::fs::write(mesh.join("plaintext.yaml"), plaintext.to_string())?;
    let daemon = Daemon::of_folder(&mesh, "istio-system", &folder.join("istiod.log"))?;
    let envoy = Envoy::start(&folder, "envoy", &node(), daemon.xds, Protocol::Delta)?;
    let answer = |path: &str| over_http(envoy.admin(), "GET", path, "");
    check(&["envoy"], |line| answer(&line.request))?;
    Ok(Completion::Completed)
}

/// The commands that read the API server find the objects of the charts: a revision, and a tag that refers to it.
fn the_api_server_answers(folder: &str) -> Result<Completion, Failed> {
    if !helm::is_installed() {
        return missing("Helm is missing; `make tools` installs it");
    }
    // The webhooks would refuse the pods of other tests.
    let cluster = Cluster::start(folder)?;
    cluster.namespace("istio-system", &json!({}))?;
    cluster.namespace("tagged", &json!({ "istio.io/rev": "prod" }))?;
    for object in helm::objects("istiod", &["revision=canary", "revisionTags={prod}"])? {
        if object["kind"] == "MutatingWebhookConfiguration" || object["kind"] == "Service" {
            cluster.api.apply(&object)?;
        }
    }
    check(&["api"], |line| {
        let words: Vec<&str> = line.request.splitn(3, ' ').collect();
        match words[..] {
            ["POST", path, body] => {
                let document: Value = serde_json::from_str(body).map_err(|error| error.to_string())?;
                Ok(Answer::json(&cluster.api.post(path, &document)?))
            }
            [_, path] => Ok(Answer {
                status: 200,
                text: cluster.api.text(path)?,
            }),
            _ => Err("want a method and a path".to_owned()),
        }
    })?;
    Ok(Completion::Completed)
}

fn every_command_is_listed() -> Result<(), Failed> {
    let lines = lines()?;
    let is_listed = |command: &&str| {
        let beginning = format!("istioctl {command}");
        lines.iter().any(|line| line.command.starts_with(&beginning))
    };
    let absent: Vec<&str> = COMMANDS.into_iter().filter(|command| !is_listed(command)).collect();
    let places: BTreeSet<&str> = lines.iter().map(|line| line.place.as_str()).collect();
    let others = places.difference(&BTreeSet::from(["api", "envoy"])).count();
    if absent.is_empty() && others == ISTIOD.len() {
        Ok(())
    } else {
        Err(format!("without a request: {absent:?}; places: {places:?}").into())
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
    fixture.until_acknowledged()?;
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
