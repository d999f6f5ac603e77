//! Cloud Foundry's Copilot, as a stand-in server made from the published messages.

use std::sync::{Arc, Mutex};

use libtest_mimic::{Failed, Trial};
use prost::Message;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::{TIMEOUT, sidecar, until_metric};
use crate::secure::authority::Authority;
use crate::support::ads::{AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::http::RUNTIME;
use crate::support::scratch;

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::test(
        "registries::cloud_foundry::routes_are_polled_with_mutual_tls",
        routes_are_polled,
    )]
}

#[derive(Clone, PartialEq, Message)]
struct Routes {
    #[prost(message, repeated, tag = "2")]
    routes: Vec<Route>,
}

#[derive(Clone, PartialEq, Message)]
struct Route {
    #[prost(string, tag = "1")]
    hostname: String,
    #[prost(message, optional, tag = "3")]
    backends: Option<Backends>,
    #[prost(string, tag = "4")]
    process: String,
}

#[derive(Clone, PartialEq, Message)]
struct Backends {
    #[prost(message, repeated, tag = "1")]
    backends: Vec<Backend>,
}

#[derive(Clone, PartialEq, Message)]
struct Backend {
    #[prost(string, tag = "1")]
    address: String,
    #[prost(uint32, tag = "2")]
    port: u32,
}

/// Serves gRPC on one port with mutual TLS: these bytes as the answer of `Routes`, and no internal routes.
fn serve(authority: &Authority, answer: Arc<Mutex<Vec<u8>>>) -> Result<(u16, JoinHandle<()>), Failed> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let own = authority.certificate("localhost");
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(own.chain.as_bytes()).collect();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.root.as_bytes())?)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients.build()?)
        .with_single_cert(chain?, PrivateKeyDer::from_pem_slice(own.key.as_bytes())?)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = RUNTIME.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let port = listener.local_addr()?.port();
    let task = RUNTIME.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(stream) = acceptor.accept(stream).await else {
                continue;
            };
            let answer = answer.clone();
            RUNTIME.spawn(async move {
                let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                    let body = match request.uri().path() {
                        "/api.IstioCopilot/Routes" => answer.lock().expect("no panic").clone(),
                        _ => Vec::new(),
                    };
                    async move { Ok::<_, std::convert::Infallible>(framed(&body)) }
                });
                let executor = hyper_util::rt::TokioExecutor::new();
                let connection = hyper::server::conn::http2::Builder::new(executor)
                    .serve_connection(hyper_util::rt::TokioIo::new(stream), service);
                let _ = connection.await;
            });
        }
    });
    Ok((port, task))
}

/// Returns a gRPC response with one message.
fn framed(
    message: &[u8],
) -> hyper::Response<http_body_util::combinators::BoxBody<bytes::Bytes, std::convert::Infallible>> {
    use http_body_util::BodyExt;
    use hyper::body::Frame;
    let mut bytes = vec![0];
    bytes.extend(u32::try_from(message.len()).expect("a short message").to_be_bytes());
    bytes.extend(message);
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let frames = [Frame::data(bytes::Bytes::from(bytes)), Frame::trailers(trailers)];
    let body = http_body_util::StreamBody::new(futures::stream::iter(frames.map(Ok)));
    hyper::Response::builder()
        .header("content-type", "application/grpc")
        .body(body.boxed())
        .expect("a valid response")
}

fn routes(backends: &[&str]) -> Routes {
    let backends = backends.iter().map(|address| Backend {
        address: (*address).to_owned(),
        port: 61001,
    });
    Routes {
        routes: vec![Route {
            hostname: "shop.example.com".to_owned(),
            backends: Some(Backends {
                backends: backends.collect(),
            }),
            process: "guid".to_owned(),
        }],
    }
}

fn has(resources: &Resources, address: &str) -> bool {
    let name = (Type::Endpoints, "outbound|8080||shop.example.com".to_owned());
    let found = resources.get(&name);
    found.is_some_and(|found| found.body.windows(address.len()).any(|part| part == address.as_bytes()))
}

fn routes_are_polled() -> Result<(), Failed> {
    let folder = scratch("registries-cloud-foundry");
    let authority = Authority::new("cloud foundry");
    let answer = Arc::new(Mutex::new(routes(&["10.0.0.1"]).encode_to_vec()));
    let (port, serving) = serve(&authority, answer.clone())?;
    let client = authority.certificate("istiod.internal");
    for (name, text) in [
        ("ca.crt", &authority.root),
        ("tls.crt", &client.chain),
        ("tls.key", &client.key),
    ] {
        std::fs::write(folder.join(name), text)?;
    }
    let path = |name: &str| folder.join(name).display().to_string();
    let config = format!(
        "copilot: {{server_ca_cert_path: {}, client_cert_path: {}, client_key_path: {}, \
         address: 'localhost:{port}', poll_interval: 100ms}}\nservice_port: 8080\n",
        path("ca.crt"),
        path("tls.crt"),
        path("tls.key")
    );
    std::fs::write(folder.join("cf.yaml"), config)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command
            .arg("--registries=CloudFoundry")
            .arg("--cfConfig")
            .arg(folder.join("cf.yaml"));
    })?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the backend", TIMEOUT, |resources| {
        has(resources, "10.0.0.1").then_some(())
    })?;
    let set = |bytes: Vec<u8>| *answer.lock().expect("no panic") = bytes;
    set(routes(&["10.0.0.1", "10.0.0.2"]).encode_to_vec());
    proxy.until("the second backend", TIMEOUT, |resources| {
        has(resources, "10.0.0.2").then_some(())
    })?;
    // Garbage changes nothing.
    proxy.mark();
    set(vec![0xff; 32]);
    until_metric(&daemon, "istiod_registry_errors_total", "CloudFoundry", 1.0)?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    set(routes(&["10.0.0.2"]).encode_to_vec());
    proxy.until("the remaining backend", TIMEOUT, |resources| {
        (has(resources, "10.0.0.2") && !has(resources, "10.0.0.1")).then_some(())
    })?;
    serving.abort();
    Ok(())
}
