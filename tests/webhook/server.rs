//! The HTTPS server of the webhooks: paths, refusals, limits, and a new certificate.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper_util::rt::TokioIo;
use libtest_mimic::{Failed, Trial};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::secure::authority::Authority;
use crate::support::agent::{Agent, Trust};
use crate::support::daemon::Daemon;
use crate::support::http::{self, Answer, RUNTIME, answered, quietly};
use crate::support::{project, scratch, wait};

const SERVER: &str = "istiod.istio-system.svc";
/// Longer than a handshake or a request on a busy machine.
const TIMEOUT: Duration = Duration::from_mins(1);
/// The maximum size of a body.
pub(super) const MAX_BYTES: usize = 6 << 20;

/// More connections, and more bytes in bodies, than the server holds.
const SILENT: usize = 500;
const SLOW: usize = 30;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("webhook::server::answers_reviews", answers_reviews),
        Trial::test("webhook::server::refuses_other_requests", refuses_other_requests),
        Trial::test("webhook::server::serves_a_new_certificate", serves_a_new_certificate),
        Trial::test("webhook::server::moves_to_the_http_port", moves_to_the_http_port),
        Trial::test(
            "webhook::server::hostile_clients_do_not_stop_others",
            hostile_clients_do_not_stop_others,
        ),
    ]
}

pub(super) fn sample() -> PathBuf {
    project().join("samples/helloworld")
}

/// A daemon whose serving certificate is of this CA.
fn start(name: &str, authority: &Authority) -> Result<Daemon, String> {
    let folder = scratch(name);
    let plugged = folder.join("cacerts");
    authority.plug_into(&plugged);
    Daemon::secured(&folder.join("istiod.log"), |command| {
        command.arg("--configDir").arg(sample()).env("ROOT_CA_DIR", &plugged);
    })
}

async fn connect(port: u16, root: &str) -> Result<TlsStream<TcpStream>, String> {
    let agent = Agent::new(port, Trust::Roots(root.to_owned()));
    let mut tls = agent.tls(None)?;
    // An agent speaks HTTP/2 only.
    tls.alpn_protocols.clear();
    let tls = TlsConnector::from(Arc::new(tls));
    let stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .map_err(|error| error.to_string())?;
    let name = ServerName::try_from(SERVER).map_err(|error| error.to_string())?;
    tls.connect(name, stream).await.map_err(|error| error.to_string())
}

/// Sends a request with this content type and body.
pub(super) fn post(port: u16, root: &str, path: &str, content_type: &str, body: Vec<u8>) -> Result<Answer, String> {
    let exchange = async {
        let stream = connect(port, root).await?;
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(|error| error.to_string())?;
        RUNTIME.spawn(quietly(connection));
        let request = ::http::Request::post(path)
            .header("host", SERVER)
            .header("content-type", content_type)
            .body(Full::<bytes::Bytes>::from(body))
            .map_err(|error| error.to_string())?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| format!("{error:?}"))?;
        answered(response).await
    };
    RUNTIME.block_on(async {
        tokio::time::timeout(TIMEOUT, exchange)
            .await
            .unwrap_or(Err("no answer".into()))
    })
}

/// A review of the creation of a VirtualService with this weight.
fn review(version: &str, weight: i32) -> Value {
    let routes = ["a", "b"].map(|host| json!({ "destination": { "host": host }, "weight": weight }));
    json!({ "kind": "AdmissionReview", "apiVersion": format!("admission.k8s.io/{version}"), "request": {
        "uid": "7", "operation": "CREATE", "namespace": "shop", "name": "web",
        "resource": { "group": "networking.istio.io", "version": "v1", "resource": "virtualservices" },
        "object": { "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
            "metadata": { "name": "web", "namespace": "shop" },
            "spec": { "hosts": ["web"], "http": [{ "route": routes }] } } } })
}

fn response(answer: &Answer) -> Result<Value, String> {
    let body: Value = serde_json::from_str(&answer.body).map_err(|error| format!("{error}: {}", answer.body))?;
    Ok(body["response"].clone())
}

/// Waits until a metric has the value of this line. A page is kept for as long as it took to render, so the first one
/// may be older than the count.
pub(super) fn until_counted(daemon: &Daemon, line: &str) -> Result<(), String> {
    wait::until(line, TIMEOUT, || {
        let page = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
        page.lines().any(|found| found == line).then_some(())
    })
}

fn answers_reviews() -> Result<(), Failed> {
    let authority = Authority::new("webhooks");
    let daemon = start("webhook/reviews", &authority)?;
    let send = |path: &str, body: &Value| {
        let body = body.to_string().into_bytes();
        post(daemon.webhooks, &authority.root, path, "application/json", body)
    };
    for (path, version) in [("/validate", "v1"), ("/validate/", "v1beta1"), ("/validate/a/b", "v1")] {
        let answer = send(path, &review(version, 50))?;
        let body: Value = serde_json::from_str(&answer.body).map_err(|error| error.to_string())?;
        assert_eq!(body["apiVersion"], format!("admission.k8s.io/{version}"));
        assert_eq!(body["response"], json!({ "uid": "7", "allowed": true }), "{path}");
    }
    let refused = response(&send("/validate", &review("v1", 0))?)?;
    assert_eq!(refused["allowed"], false);
    let message = refused["status"]["message"].as_str().unwrap_or_default();
    assert_eq!(
        message,
        "configuration is invalid: spec.http[0].route: the sum of the weights is 0"
    );
    let mut deleted = review("v1", 0);
    deleted["request"]["operation"] = "DELETE".into();
    assert_eq!(response(&send("/validate", &deleted)?)?["allowed"], true);
    let mut dry_run = review("v1", 0);
    dry_run["request"]["dryRun"] = true.into();
    assert_eq!(response(&send("/validate", &dry_run)?)?["allowed"], false);
    let labels = r#"group="networking.istio.io""#;
    let resource = r#"resource="virtualservices",version="v1""#;
    for line in [
        format!("galley_validation_passed{{{labels},{resource}}} 3"),
        format!("galley_validation_failed{{{labels},reason=\"invalid_resource\",{resource}}} 1"),
        format!("galley_validation_failed{{{labels},reason=\"unsupported_operation\",{resource}}} 1"),
    ] {
        until_counted(&daemon, &line)?;
    }
    let ready = send("/ready", &Value::Null)?;
    assert_eq!(ready.status, 405, "GET only");
    Ok(())
}

fn refuses_other_requests() -> Result<(), Failed> {
    let authority = Authority::new("webhooks");
    let daemon = start("webhook/refusals", &authority)?;
    let send =
        |content_type: &str, body: Vec<u8>| post(daemon.webhooks, &authority.root, "/validate", content_type, body);
    for (content_type, body, status, text) in [
        ("application/json", Vec::new(), 400, "no body found\n"),
        (
            "text/plain",
            b"{}".to_vec(),
            415,
            "invalid Content-Type, want `application/json`\n",
        ),
        (
            "application/json",
            vec![b'{'; MAX_BYTES + 1],
            400,
            "request body too large: limit is 6291456 bytes\n",
        ),
    ] {
        let answer = send(content_type, body)?;
        assert_eq!((answer.status.as_u16(), answer.body.as_str()), (status, text));
    }
    for (body, want) in [
        (b"{".to_vec(), "could not decode body"),
        (b"{}".to_vec(), "no kind \"\" is registered"),
        ("[".repeat(1_000_000).into_bytes(), "could not decode body"),
        (vec![b'{'; MAX_BYTES], "could not decode body"),
        (br#"{"request": {"object": "#.repeat(100_000), "recursion limit"),
    ] {
        let answer = send("application/json", body)?;
        assert_eq!(answer.status, 200);
        let response = response(&answer)?;
        assert_eq!(response["allowed"], false);
        let message = response["status"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(want), "{message}");
    }
    until_counted(&daemon, "galley_validation_http_error{status=\"400\"} 2")?;
    until_counted(&daemon, "galley_validation_http_error{status=\"415\"} 1")?;
    Ok(())
}

fn serves_a_new_certificate() -> Result<(), Failed> {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let folder = scratch("webhook/certificate");
    let write = |authority: &Authority| authority.write_serving_certificate(&folder, SERVER);
    write(&old);
    let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
        command.arg("--configDir").arg(sample());
        for (flag, file) in [
            ("--tlsCertFile", "tls.crt"),
            ("--tlsKeyFile", "tls.key"),
            ("--caCertFile", "root.crt"),
        ] {
            command.arg(flag).arg(folder.join(file));
        }
    })?;
    let is_served = |authority: &Authority| RUNTIME.block_on(connect(daemon.webhooks, &authority.root)).is_ok();
    assert!(is_served(&old) && !is_served(&new));
    write(&new);
    wait::until("the new certificate", TIMEOUT, || is_served(&new).then_some(()))?;
    Ok(())
}

fn moves_to_the_http_port() -> Result<(), Failed> {
    let folder = scratch("webhook/http");
    let daemon = Daemon::start(&sample(), &folder.join("istiod.log"))?;
    let answer = http::post(daemon.http.port(), "/validate", &review("v1", 0))?;
    assert_eq!(answer["response"]["allowed"], false);
    Ok(())
}

/// Silent, slow and very many connections: requests of another client are answered.
fn hostile_clients_do_not_stop_others() -> Result<(), Failed> {
    let authority = Authority::new("webhooks");
    let daemon = start("webhook/hostile", &authority)?;
    let (silent, begun) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let hostile: Vec<_> = (0..SILENT + SLOW)
        .map(|number| {
            let (port, root) = (daemon.webhooks, authority.root.clone());
            let (silent, begun) = (silent.clone(), begun.clone());
            RUNTIME.spawn(async move {
                if number < SILENT {
                    let connected = TcpStream::connect(("127.0.0.1", port)).await;
                    silent.fetch_add(usize::from(connected.is_ok()), Ordering::Relaxed);
                    std::future::pending::<()>().await;
                } else {
                    slow(port, &root, &begun).await;
                }
            })
        })
        .collect();
    wait::until("hostile clients", TIMEOUT, || {
        let are_many = silent.load(Ordering::Relaxed) >= SILENT * 9 / 10;
        (are_many && begun.load(Ordering::Relaxed) > 0).then_some(())
    })?;
    for _ in 0..5 {
        let body = review("v1", 50).to_string().into_bytes();
        let answer = post(daemon.webhooks, &authority.root, "/validate", "application/json", body)?;
        assert_eq!(response(&answer)?["allowed"], true);
    }
    hostile.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(())
}

/// Announces a large body, sends most of it and then nothing. Counts requests that have begun.
async fn slow(port: u16, root: &str, begun: &AtomicUsize) {
    let Ok(mut stream) = connect(port, root).await else {
        return;
    };
    let head = format!("POST /validate HTTP/1.1\r\nhost: a\r\ncontent-length: {MAX_BYTES}\r\n\r\n");
    let written = stream.write_all(head.as_bytes()).await;
    begun.fetch_add(usize::from(written.is_ok()), Ordering::Relaxed);
    let _ = stream.write_all(&vec![b' '; MAX_BYTES / 2]).await;
    std::future::pending::<()>().await;
}
