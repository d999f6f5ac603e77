//! Servers of Consul and Eureka that answer as a test says: nonsense, and what real servers seldom do.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use libtest_mimic::{Failed, Trial};
use serde_json::json;
use tokio::task::JoinHandle;

use super::{TIMEOUT, sidecar, until_metric};
use crate::support::ads::{self, AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::http::RUNTIME;
use crate::support::{scratch, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "registries::scripted::nonsense_of_consul_changes_nothing",
            nonsense_of_consul,
        ),
        Trial::test(
            "registries::scripted::nonsense_of_eureka_changes_nothing",
            nonsense_of_eureka,
        ),
        Trial::test(
            "registries::scripted::consul_is_asked_for_its_namespace",
            consul_is_asked_for_its_namespace,
        ),
        Trial::test(
            "registries::scripted::a_token_that_loses_its_rights_removes_nothing",
            a_token_that_loses_its_rights_removes_nothing,
        ),
        Trial::test(
            "registries::scripted::eureka_is_read_by_changes",
            eureka_is_read_by_changes,
        ),
        Trial::test(
            "registries::scripted::eureka_is_read_completely_after_an_outage",
            eureka_is_read_completely_after_an_outage,
        ),
    ]
}

/// The answer to a request: status and body.
#[derive(Clone)]
pub(super) enum Script {
    Answer(u16, String),
    /// A success of Consul without the objects that the token may not read.
    Filtered(String),
    /// More bytes than a client should read.
    Endless,
}

/// The function from the path with its query to the answer; `None` leaves the request open.
type Answers = Arc<dyn Fn(&str) -> Option<Script> + Send + Sync>;

type BadAnswers = Box<dyn Fn(&str) -> Option<Script> + Send + Sync>;

/// The server. Dropping it stops it.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    answers: Arc<Mutex<Answers>>,
    requests: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(super) fn start(answers: impl Fn(&str) -> Option<Script> + Send + Sync + 'static) -> Server {
        let listener = RUNTIME.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a loopback address can be bound");
        let address = listener.local_addr().expect("a bound socket has an address");
        let answers: Arc<Mutex<Answers>> = Arc::new(Mutex::new(Arc::new(answers)));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (known, seen) = (answers.clone(), requests.clone());
        let task = RUNTIME.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (known, seen) = (known.clone(), seen.clone());
                let serve = service_fn(move |request: Request<Incoming>| {
                    let path = request.uri().to_string();
                    seen.lock().expect("no panic").push(path.clone());
                    let answers = known.lock().expect("no panic").clone();
                    async move { Ok::<_, Infallible>(respond(answers(&path)).await) }
                });
                let connection =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), serve);
                RUNTIME.spawn(crate::support::http::quietly(connection));
            }
        });
        Server {
            address,
            answers,
            requests,
            task,
        }
    }

    pub(super) fn set(&self, answers: impl Fn(&str) -> Option<Script> + Send + Sync + 'static) {
        *self.answers.lock().expect("no panic") = Arc::new(answers);
    }

    /// Returns true if a request contains this text.
    fn was_asked(&self, text: &str) -> bool {
        self.requests
            .lock()
            .expect("no panic")
            .iter()
            .any(|path| path.contains(text))
    }
}

async fn respond(script: Option<Script>) -> Response<BoxBody<Bytes, Infallible>> {
    let is_filtered = matches!(script, Some(Script::Filtered(_)));
    let (status, body) = match script {
        None => std::future::pending().await,
        Some(Script::Answer(status, body)) => (status, Full::new(Bytes::from(body)).boxed()),
        Some(Script::Filtered(body)) => (200, Full::new(Bytes::from(body)).boxed()),
        Some(Script::Endless) => {
            let part = Bytes::from(vec![b'x'; 1 << 20]);
            let endless = futures::stream::repeat_with(move || Ok::<_, Infallible>(Frame::data(part.clone())));
            (200, BodyExt::boxed(StreamBody::new(endless)))
        }
    };
    let mut response = Response::builder().status(status);
    if is_filtered {
        response = response.header("X-Consul-Results-Filtered-By-ACLs", "true");
    }
    response.body(body).expect("a valid response")
}

pub(super) fn ok(body: impl ToString) -> Option<Script> {
    Some(Script::Answer(200, body.to_string()))
}

fn half(text: &str) -> String {
    text[..text.len() / 2].to_owned()
}

/// Runs a daemon through bad answers of its registry, which must count and change nothing. `good` and `next` are
/// answers, each with what a proxy has then.
fn nonsense(
    server: &Server,
    (name, flag): (&str, String),
    (good, has): (
        impl Fn(&str) -> Option<Script> + Clone + Send + Sync + 'static,
        impl Fn(&Resources) -> bool,
    ),
    (next, has_next): (
        impl Fn(&str) -> Option<Script> + Send + Sync + 'static,
        impl Fn(&Resources) -> bool,
    ),
) -> Result<(), Failed> {
    let folder = scratch(&format!("registries-nonsense-{name}"));
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.args([&format!("--registries={name}"), &flag]);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let before = proxy.until("the service", TIMEOUT, |resources| {
        has(resources).then(|| resources.clone())
    })?;
    proxy.mark();
    let halves = good.clone();
    let bad: [(&str, BadAnswers); 5] = [
        ("status", Box::new(|_| Some(Script::Answer(500, "sorry".to_owned())))),
        ("malformed", Box::new(|_| ok("\u{1}garbage"))),
        ("malformed", Box::new(|_| ok(""))),
        ("too_large", Box::new(|_| Some(Script::Endless))),
        (
            "malformed",
            Box::new(move |path| match halves(path) {
                Some(Script::Answer(status, body)) => Some(Script::Answer(status, half(&body))),
                other => other,
            }),
        ),
    ];
    for (reason, answers) in bad {
        let label = format!("reason=\"{reason}\"");
        let seen = super::metric(&daemon, "istiod_registry_errors_total", &label).unwrap_or_default();
        server.set(answers);
        until_metric(&daemon, "istiod_registry_errors_total", &label, seen + 1.0)?;
    }
    ads::same(&before, &proxy.first()?)?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    server.set(good);
    wait::until("a new connection", TIMEOUT, || {
        super::metric(&daemon, "istiod_registry_connected", name).filter(|value| *value > 0.5)
    })?;
    ads::same(&before, &proxy.first()?)?;
    // Changes arrive in order, so none from before is under way.
    server.set(next);
    proxy.until("the next change", TIMEOUT, |resources| {
        has_next(resources).then_some(())
    })?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

/// The answers of a Consul with one service, without an index: a server that does not block.
pub(super) fn consul(path: &str) -> Option<Script> {
    consul_with(json!({ "consul": [], "web": ["version|v1"] }), path)
}

/// Like [`consul`], with another service.
fn next_consul(path: &str) -> Option<Script> {
    consul_with(json!({ "consul": [], "web": ["version|v1"], "next": [] }), path)
}

fn consul_with(services: serde_json::Value, path: &str) -> Option<Script> {
    let path = path.split('?').next().unwrap_or_default();
    match path {
        "/v1/catalog/services" => ok(services),
        "/v1/health/state/any" => ok(json!([])),
        _ => match path.strip_prefix("/v1/health/service/") {
            Some(name @ ("web" | "next")) if services[name].is_array() => ok(json!([{
                "Node": { "Node": "n", "Address": "10.0.0.1", "Datacenter": "dc1" },
                "Service": { "ID": name, "Service": name, "Port": 8080, "Tags": null, "Meta": { "protocol": "http" } },
                "Checks": [],
            }])),
            _ => Some(Script::Answer(404, String::new())),
        },
    }
}

/// Returns true if a proxy knows the endpoints of a service of Consul.
fn knows(resources: &Resources, service: &str) -> bool {
    resources.contains_key(&(Type::Endpoints, format!("outbound|8080||{service}.service.consul")))
}

/// Only Consul Enterprise has namespaces, so this checks what is asked.
fn consul_is_asked_for_its_namespace() -> Result<(), Failed> {
    let folder = scratch("registries-consul-namespace");
    let scoped = |path: &str| {
        let is_scoped = path.contains("&ns=team%2Da") && path.contains("&partition=p");
        if is_scoped { consul(path) } else { ok("{}") }
    };
    let server = Server::start(scoped);
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={}", server.address);
        command.args(["--registries=Consul", &url]);
        command.env("CONSUL_NAMESPACE", "team-a").env("CONSUL_PARTITION", "p");
    })?;
    let resources = AdsClient::connect(daemon.xds, &sidecar()).first()?;
    assert!(knows(&resources, "web"));
    Ok(())
}

fn a_token_that_loses_its_rights_removes_nothing() -> Result<(), Failed> {
    let folder = scratch("registries-consul-rights");
    let server = Server::start(consul);
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--consulserverURL={}", server.address);
        command.args(["--registries=Consul", "--consulserverInterval=100ms", &url]);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let before = proxy.first()?;
    assert!(knows(&before, "web"));
    proxy.mark();
    server.set(|path| {
        let is_catalog = path.starts_with("/v1/catalog/services");
        Some(Script::Filtered(if is_catalog { "{}" } else { "[]" }.to_owned()))
    });
    until_metric(&daemon, "istiod_registry_errors_total", "reason=\"filtered\"", 4.0)?;
    ads::same(&before, &proxy.first()?)?;
    // Changes arrive in order, so none from before is under way.
    server.set(next_consul);
    proxy.until("the next service", TIMEOUT, |resources| {
        knows(resources, "next").then_some(())
    })?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

fn nonsense_of_consul() -> Result<(), Failed> {
    let server = Server::start(consul);
    let flag = format!("--consulserverURL={}", server.address);
    nonsense(
        &server,
        ("Consul", flag),
        (consul, |resources: &Resources| knows(resources, "web")),
        (next_consul, |resources: &Resources| knows(resources, "next")),
    )
}

fn instance(id: &str, address: &str, status: &str) -> serde_json::Value {
    json!({
        "instanceId": id, "hostName": "shop.example.com", "ipAddr": address, "status": status,
        "port": { "$": 8080, "@enabled": "true" }, "securePort": { "$": 443, "@enabled": "false" },
        "metadata": { "istio.protocol": "http", "version": id },
    })
}

pub(super) fn apps(hash: &str, instances: &[serde_json::Value]) -> Option<Script> {
    let application = json!([{ "name": "SHOP", "instance": instances }]);
    ok(json!({ "applications": { "versions__delta": "1", "apps__hashcode": hash, "application": application } }))
}

fn shop(resources: &Resources, address: &str) -> bool {
    let name = (Type::Endpoints, "outbound|8080||shop.example.com".to_owned());
    let found = resources.get(&name);
    found.is_some_and(|found| found.body.windows(address.len()).any(|part| part == address.as_bytes()))
}

fn nonsense_of_eureka() -> Result<(), Failed> {
    let good = |path: &str| match path {
        "/eureka/v2/apps" => apps("UP_1_", &[instance("a", "10.0.0.1", "UP")]),
        "/eureka/v2/apps/delta" => apps("UP_1_", &[]),
        _ => Some(Script::Answer(404, String::new())),
    };
    let server = Server::start(good);
    let next = |path: &str| match path {
        "/eureka/v2/apps/delta" => apps("UP_2_", &[instance("b", "10.0.0.2", "UP")]),
        _ => Some(Script::Answer(404, String::new())),
    };
    let flag = format!("--eurekaserverURL=http://{}", server.address);
    nonsense(
        &server,
        ("Eureka", flag),
        (good, |resources: &Resources| shop(resources, "10.0.0.1")),
        (next, |resources: &Resources| shop(resources, "10.0.0.2")),
    )
}

fn eureka_is_read_by_changes() -> Result<(), Failed> {
    let folder = scratch("registries-eureka");
    let first = || {
        apps(
            "DOWN_1_UP_1_",
            &[instance("a", "10.0.0.1", "UP"), instance("b", "10.0.0.2", "DOWN")],
        )
    };
    let server = Server::start(move |path| match path {
        "/eureka/apps" => first(),
        "/eureka/apps/delta" => apps("DOWN_1_UP_1_", &[]),
        _ => Some(Script::Answer(404, String::new())),
    });
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--eurekaserverURL=http://{}/eureka/", server.address);
        command.args(["--registries=Eureka", "--eurekaserverInterval=100ms", &url]);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the instance that is up", TIMEOUT, |resources| {
        (shop(resources, "10.0.0.1") && !shop(resources, "10.0.0.2")).then_some(())
    })?;
    // A change whose hash fits, without reading everything.
    server.set(move |path| match path {
        "/eureka/apps/delta" => apps("UP_2_", &[instance("b", "10.0.0.2", "UP")]),
        _ => Some(Script::Answer(500, String::new())),
    });
    proxy.until("the second instance", TIMEOUT, |resources| {
        (shop(resources, "10.0.0.1") && shop(resources, "10.0.0.2")).then_some(())
    })?;
    // A change whose hash does not fit: everything is read.
    server.set(move |path| match path {
        "/eureka/apps/delta" => apps("UP_1_", &[]),
        "/eureka/apps" => apps("UP_1_", &[instance("c", "10.0.0.3", "UP")]),
        _ => Some(Script::Answer(404, String::new())),
    });
    proxy.until("the present instances", TIMEOUT, |resources| {
        (shop(resources, "10.0.0.3") && !shop(resources, "10.0.0.1")).then_some(())
    })?;
    assert!(server.was_asked("/eureka/apps/delta"));
    Ok(())
}

/// The changes that a server keeps may begin after the outage.
fn eureka_is_read_completely_after_an_outage() -> Result<(), Failed> {
    let folder = scratch("registries-eureka-outage");
    let answers = |id: &'static str, address: &'static str| {
        move |path: &str| match path {
            "/eureka/v2/apps" => apps("UP_1_", &[instance(id, address, "UP")]),
            "/eureka/v2/apps/delta" => apps("UP_1_", &[]),
            _ => Some(Script::Answer(404, String::new())),
        }
    };
    let server = Server::start(answers("a", "10.0.0.1"));
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        let url = format!("--eurekaserverURL=http://{}", server.address);
        command.args(["--registries=Eureka", "--eurekaserverInterval=100ms", &url]);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the first instance", TIMEOUT, |resources| {
        shop(resources, "10.0.0.1").then_some(())
    })?;
    server.set(|_| Some(Script::Answer(500, String::new())));
    until_metric(&daemon, "istiod_registry_errors_total", "reason=\"status\"", 1.0)?;
    server.set(answers("b", "10.0.0.2"));
    proxy.until("the instance of after the outage", TIMEOUT, |resources| {
        shop(resources, "10.0.0.2").then_some(())
    })?;
    Ok(())
}
