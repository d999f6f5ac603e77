//! The cost of injecting pods with the chart's templates: CPU time of one injection, and latency, CPU time and memory
//! of a daemon that an API server asks a hundred times a second.
//!
//! `admission` prints a table with goals, figures and those in `benches/figures.json`; `--keep` writes them there.
//! `--seconds N` sets the duration of the load.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use istiod::inject::{Environment, Injector, Namespace, Outcome};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::fixture;
use crate::support;
use crate::usage::Usage;

use support::agent::{Agent, Trust};
use support::daemon::Daemon;
use support::figures::{self, Figure};
use support::http::{RUNTIME, quietly};
use support::{helm, wait};

/// Duration of the load, unless it is set.
const SECONDS: u64 = 60;
/// Requests in each second.
const RATE: u64 = 100;
/// Connections of the API servers.
const CONNECTIONS: usize = 4;
/// Injections whose CPU time is measured.
const ROUNDS: u32 = 2_000;
/// Requests before the measurement.
const WARM_UP: u64 = 200;

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let keep = arguments.iter().any(|argument| argument == "--keep");
    let seconds = arguments.iter().position(|argument| argument == "--seconds");
    let seconds = seconds.and_then(|position| arguments.get(position + 1)?.parse().ok());
    report(&measure(seconds.unwrap_or(SECONDS))?, keep)
}

fn pod(number: u64) -> Value {
    let probe = |path: &str| json!({ "httpGet": { "path": path, "port": 8080 }, "periodSeconds": 10 });
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "generateName": "web-5d4f8c7b9-", "namespace": "shop", "annotations": { "team": "shop" },
            "labels": { "app": format!("web-{}", number % 50), "version": "v1", "pod-template-hash": "5d4f8c7b9" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d4f8c7b9",
                "uid": "0b5c2f8e-58a1-4e5c-8f4b-9c1b9d9d2a11", "controller": true }] },
        "spec": { "serviceAccountName": "web",
            "volumes": [{ "name": "kube-api-access", "projected": { "sources": [] } }],
            "containers": [{ "name": "web", "image": "web:1", "ports": [{ "containerPort": 8080 }],
                "livenessProbe": probe("/live"), "readinessProbe": probe("/ready"),
                "resources": { "requests": { "cpu": "100m", "memory": "128Mi" } },
                "volumeMounts": [{ "name": "kube-api-access", "mountPath": "/var/run/secrets", "readOnly": true }] }] } })
}

fn measure(seconds: u64) -> Result<Vec<Figure>, String> {
    let objects = helm::objects("istiod", &[])?;
    let [config, values] = helm::injector(&objects)?;
    let mut figures = vec![in_process(config, values)?];
    figures.extend(of_daemon(config, values, seconds)?);
    Ok(figures)
}

fn figure(name: &str, goal: Option<f64>, seen: f64) -> Figure {
    Figure {
        goal,
        ..Figure::new("", name, (seen * 1000.0).round() / 1000.0)
    }
}

fn in_process(config: &str, values: &str) -> Result<Figure, String> {
    let injector = Injector::parse(config, values).map_err(|error| error.to_string())?;
    let environment = Environment {
        namespace: Arc::new(Namespace {
            name: "shop".to_owned(),
            ..Namespace::default()
        }),
        ..Environment::default()
    };
    let before = fixture::cpu();
    for number in 0..ROUNDS {
        match injector.inject(&pod(number.into()), &environment) {
            Ok(Outcome::Patch(_)) => {}
            other => return Err(format!("{other:?}")),
        }
    }
    let each = (fixture::cpu() - before) / f64::from(ROUNDS);
    Ok(figure("ms of CPU for an injection, in process", None, each))
}

fn of_daemon(config: &str, values: &str, seconds: u64) -> Result<Vec<Figure>, String> {
    let folder = support::scratch("bench/admission");
    let files = folder.join("var/lib/istio/inject");
    let mesh = folder.join("mesh");
    for created in [&files, &mesh] {
        std::fs::create_dir_all(created).map_err(|error| error.to_string())?;
    }
    for (file, text) in [(files.join("config"), config), (files.join("values"), values)] {
        std::fs::write(file, text).map_err(|error| error.to_string())?;
    }
    std::fs::write(mesh.join("mesh.yaml"), "{}\n").map_err(|error| error.to_string())?;
    let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
        command.current_dir(&folder).arg("--configDir").arg(&mesh);
        command.env("ROOT_CA_DIR", folder.join("none"));
    })?;
    RUNTIME.block_on(load(daemon.webhooks, Duration::from_millis(1000 / RATE), WARM_UP))?;
    let before = Usage::of(&daemon.process)?;
    let requests = seconds * RATE;
    let mut times = RUNTIME.block_on(load(daemon.webhooks, Duration::from_millis(1000 / RATE), requests))?;
    let after = Usage::of(&daemon.process)?;
    times.sort_unstable();
    let at = |part: usize| {
        let time = times.get(times.len() * part / 100).copied().unwrap_or_default();
        time.as_secs_f64() * 1000.0
    };
    let cpu = (after.cpu_seconds - before.cpu_seconds) * 1000.0 / requests as f64;
    Ok(vec![
        figure("ms p50, 100 pods a second", None, at(50)),
        figure("ms p99, 100 pods a second", Some(5.0), at(99)),
        figure("ms of CPU for a pod", Some(1.0), cpu),
        figure("MiB peak", None, after.highest_mib),
        figure("MiB after the load", None, after.resident_mib),
        figure(
            "MiB more than before the load",
            Some(2.0),
            after.resident_mib - before.resident_mib,
        ),
    ])
}

type Sender = SendRequest<Full<bytes::Bytes>>;

async fn connect(port: u16) -> Result<Sender, String> {
    let mut tls = Agent::new(port, Trust::Anything).tls(None)?;
    tls.alpn_protocols.clear();
    let stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let name = ServerName::try_from("istiod.istio-system.svc").map_err(|error| error.to_string())?;
    let connected = TlsConnector::from(Arc::new(tls)).connect(name, stream).await;
    let stream = connected.map_err(|error| error.to_string())?;
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    RUNTIME.spawn(quietly(connection));
    Ok(sender)
}

/// Sends requests at this interval and returns the time of each.
async fn load(port: u16, interval: Duration, requests: u64) -> Result<Vec<Duration>, String> {
    let mut senders = Vec::new();
    for _ in 0..CONNECTIONS {
        senders.push(connect(port).await?);
    }
    let mut pace = tokio::time::interval(interval);
    let mut pending = Vec::new();
    let (idle, mut free) = tokio::sync::mpsc::channel(CONNECTIONS);
    for sender in senders {
        idle.send(sender).await.map_err(|error| error.to_string())?;
    }
    for number in 0..requests {
        pace.tick().await;
        let mut sender: Sender = free.recv().await.ok_or("no connection is left")?;
        let idle = idle.clone();
        pending.push(RUNTIME.spawn(async move {
            let time = request(&mut sender, number).await?;
            idle.send(sender).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(time)
        }));
    }
    let mut times = Vec::new();
    for request in pending {
        times.push(request.await.map_err(|error| error.to_string())??);
    }
    Ok(times)
}

async fn request(sender: &mut Sender, number: u64) -> Result<Duration, String> {
    let review = json!({ "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {
        "uid": number.to_string(), "operation": "CREATE", "namespace": "shop",
        "resource": { "group": "", "version": "v1", "resource": "pods" }, "object": pod(number) } });
    let request = http::Request::post("/inject")
        .header("host", "istiod.istio-system.svc")
        .header("content-type", "application/json")
        .body(Full::from(review.to_string()))
        .map_err(|error| error.to_string())?;
    sender.ready().await.map_err(|error| error.to_string())?;
    let started_at = wait::now();
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(|error| error.to_string())?;
    let took = started_at.elapsed();
    let body: Value = serde_json::from_slice(&body.to_bytes()).map_err(|error| error.to_string())?;
    if body["response"]["patch"].is_string() {
        Ok(took)
    } else {
        Err(format!("no patch: {body}"))
    }
}

fn report(seen: &[Figure], keep: bool) -> Result<(), String> {
    let kept = figures::kept("admission");
    println!(
        "on {}; kept figures are from {}\n",
        figures::machine(),
        figures::kept_on("admission")
    );
    println!("{:<44} {:>8} {:>10} {:>10}", "injection", "goal", "now", "kept");
    let number = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.2}"));
    for figure in seen {
        let before = figures::kept_of(&kept, &figure.case, &figure.name);
        println!(
            "{:<44} {:>8} {:>10.2} {:>10}",
            figure.name,
            number(figure.goal),
            figure.seen,
            number(before)
        );
    }
    figures::seen("admission", seen)?;
    if keep {
        figures::keep_seen("admission", seen)?;
    }
    Ok(())
}
