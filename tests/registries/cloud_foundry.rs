//! Cloud Foundry's Copilot, as a stand-in server made from the published messages.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use libtest_mimic::{Completion, Failed, Trial};
use prost::Message;
use tokio_rustls::TlsAcceptor;

use super::raw_grpc::{RawGrpc, Reply};
use super::routing::{ADDRESSES, Applications, Life};
use super::{TIMEOUT, metric, sidecar, until_metric};
use crate::secure::authority::Authority;
use crate::support::ads::{self, AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::{envoy, missing, scratch};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "registries::cloud_foundry::routes_are_polled_with_mutual_tls",
            routes_are_polled,
        ),
        Trial::test(
            "registries::cloud_foundry::nonsense_changes_nothing",
            nonsense_changes_nothing,
        ),
        Trial::ignorable_test("registries::cloud_foundry::envoys_route_to_backends", || {
            if envoy::binary().is_none() {
                return missing("Envoy is missing; make tools installs it");
            }
            envoys_route_to_backends().map(|()| Completion::Completed)
        }),
    ]
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

#[derive(Clone, PartialEq, Message)]
struct InternalRoutes {
    #[prost(message, repeated, tag = "1")]
    routes: Vec<InternalRoute>,
}

#[derive(Clone, PartialEq, Message)]
struct InternalRoute {
    #[prost(string, tag = "1")]
    hostname: String,
    #[prost(string, tag = "2")]
    vip: String,
    #[prost(message, optional, tag = "3")]
    backends: Option<Backends>,
}

/// Returns mutual TLS as Copilot has it.
fn tls(authority: &Authority) -> Result<TlsAcceptor, Failed> {
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
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Writes the settings of a client with its certificates, and returns the path.
fn write_settings(authority: &Authority, folder: &Path, port: u16, service_port: u16) -> Result<PathBuf, Failed> {
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
         address: 'localhost:{port}', poll_interval: 100ms}}\nservice_port: {service_port}\n",
        path("ca.crt"),
        path("tls.crt"),
        path("tls.key")
    );
    std::fs::write(folder.join("cf.yaml"), config)?;
    Ok(folder.join("cf.yaml"))
}

/// Returns replies: this one to `Routes`, and this message to `InternalRoutes`.
fn replies(routes: Reply, internal: Vec<u8>) -> impl Fn(&str) -> Reply + Send + Sync + 'static {
    move |path| match path {
        "/api.IstioCopilot/Routes" => routes.clone(),
        "/api.IstioCopilot/InternalRoutes" => Reply::Message(internal.clone()),
        _ => Reply::Status(404),
    }
}

fn backends(addresses: &[&str], port: u16) -> Option<Backends> {
    let backends = addresses.iter().map(|address| Backend {
        address: (*address).to_owned(),
        port: port.into(),
    });
    Some(Backends {
        backends: backends.collect(),
    })
}

fn routes(addresses: &[&str], port: u16) -> Reply {
    let routes = Routes {
        routes: vec![Route {
            hostname: "shop.example.com".to_owned(),
            backends: backends(addresses, port),
            process: "guid".to_owned(),
        }],
    };
    Reply::Message(routes.encode_to_vec())
}

fn internal_routes(address: &str) -> Vec<u8> {
    let routes = InternalRoutes {
        routes: vec![InternalRoute {
            hostname: "shop.apps.internal".to_owned(),
            vip: "127.128.0.1".to_owned(),
            backends: backends(&[address], 8080),
        }],
    };
    routes.encode_to_vec()
}

fn has(resources: &Resources, host: &str, address: &str) -> bool {
    let name = (Type::Endpoints, format!("outbound|8080||{host}"));
    let found = resources.get(&name);
    found.is_some_and(|found| found.body.windows(address.len()).any(|part| part == address.as_bytes()))
}

const HOST: &str = "shop.example.com";

/// A daemon with a server that has one backend.
fn start(folder: &Path) -> Result<(RawGrpc, Daemon), Failed> {
    let authority = Authority::new("cloud foundry");
    let first = replies(routes(&["10.0.0.1"], 61001), internal_routes("10.255.0.1"));
    let server = RawGrpc::start(0, Some(tls(&authority)?), first)?;
    let settings = write_settings(&authority, folder, server.port, 8080)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.arg("--registries=CloudFoundry").arg("--cfConfig").arg(settings);
    })?;
    Ok((server, daemon))
}

fn routes_are_polled() -> Result<(), Failed> {
    let folder = scratch("registries-cloud-foundry");
    let (server, daemon) = start(&folder)?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let until = |host: &'static str, address: &'static str| {
        proxy.until(address, TIMEOUT, |resources| {
            has(resources, host, address).then_some(())
        })
    };
    until(HOST, "10.0.0.1")?;
    until("shop.apps.internal", "10.255.0.1")?;
    let both = routes(&["10.0.0.1", "10.0.0.2"], 61001);
    server.set(replies(both.clone(), internal_routes("10.255.0.1")));
    until(HOST, "10.0.0.2")?;
    // Internal routes alone change.
    server.set(replies(both, internal_routes("10.255.0.2")));
    until("shop.apps.internal", "10.255.0.2")?;
    server.set(replies(routes(&["10.0.0.2"], 61001), internal_routes("10.255.0.2")));
    proxy.until("the remaining backend", TIMEOUT, |resources| {
        (has(resources, HOST, "10.0.0.2") && !has(resources, HOST, "10.0.0.1")).then_some(())
    })?;
    Ok(())
}

fn nonsense_changes_nothing() -> Result<(), Failed> {
    let folder = scratch("registries-cloud-foundry-nonsense");
    let (server, daemon) = start(&folder)?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let before = proxy.first()?;
    assert!(has(&before, HOST, "10.0.0.1"), "{:?}", before.keys());
    proxy.mark();
    let Reply::Message(valid) = routes(&["10.0.0.1", "10.0.0.2"], 61001) else {
        return Err("no message".into());
    };
    let bad = [
        Reply::Status(500),
        Reply::Message(vec![0xff; 32]),
        Reply::Half(valid),
        Reply::Endless,
    ];
    for reply in bad {
        let seen = metric(&daemon, "istiod_registry_errors_total", "CloudFoundry").unwrap_or_default();
        server.set(replies(reply, internal_routes("10.255.0.1")));
        // The first error may be of the reply before.
        until_metric(&daemon, "istiod_registry_errors_total", "CloudFoundry", seen + 2.0)?;
    }
    ads::same(&before, &proxy.first()?)?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    server.set(replies(routes(&["10.0.0.2"], 61001), internal_routes("10.255.0.1")));
    proxy.until("the next backend", TIMEOUT, |resources| {
        (has(resources, HOST, "10.0.0.2") && !has(resources, HOST, "10.0.0.1")).then_some(())
    })?;
    Ok(())
}

fn envoys_route_to_backends() -> Result<(), Failed> {
    let folder = scratch("registries-cloud-foundry-envoy");
    let applications = Applications::start();
    let authority = Authority::new("cloud foundry");
    let acceptor = tls(&authority)?;
    let served: Arc<Mutex<Reply>> = Arc::new(Mutex::new(routes(&ADDRESSES, applications.port)));
    let start = |port: u16| {
        let served = served.clone();
        let replies = move |path: &str| replies(served.lock().expect("no panic").clone(), Vec::new())(path);
        RawGrpc::start(port, Some(acceptor.clone()), replies)
    };
    let server = start(0)?;
    let port = server.port;
    let server = RefCell::new(Some(server));
    let settings = write_settings(&authority, &folder, port, applications.port)?;
    let mesh = applications.mesh(&folder)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.arg("--registries=CloudFoundry").arg("--cfConfig").arg(settings);
        command.arg("--configDir").arg(&mesh);
    })?;
    let serve = |addresses: &[&str]| {
        *served.lock().expect("no panic") = routes(addresses, applications.port);
        Ok(())
    };
    let life = Life {
        source: "CloudFoundry",
        host: HOST,
        sicken: &|| serve(&ADDRESSES[..1]),
        kill: &|| {
            server.take();
            Ok(())
        },
        restart: &|| {
            let started = start(port).map_err(|error| format!("{error:?}"))?;
            server.replace(Some(started));
            Ok(())
        },
        heal: &|| serve(&ADDRESSES),
    };
    life.is_followed(&daemon, &folder, applications.port)?;
    Ok(())
}
