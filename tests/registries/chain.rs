//! One daemon serves its configuration to another (MCP over xDS).

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use istiod::proto::Any;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use istiod::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use istiod::proto::istio::mcp::v1alpha1::{Metadata, Resource};
use istiod::proto::istio::networking::v1alpha3 as networking;
use libtest_mimic::{Completion, Failed, Trial};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, Streaming};

use super::raw_grpc::{RawGrpc, Reply};
use super::routing::{ADDRESSES, Applications, Life};
use super::{TIMEOUT, count, measured, metric, sidecar, until_disconnected, until_metric};
use crate::secure::authority::Authority;
use crate::support::ads::{self, AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::http::RUNTIME;
use crate::support::{envoy, missing, ports, replace_file, scratch, variable, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "registries::chain::resources_are_those_of_the_files",
            resources_are_those_of_the_files,
        ),
        Trial::test(
            "registries::chain::lost_servers_shrink_nothing",
            lost_servers_shrink_nothing,
        ),
        Trial::test("registries::chain::tls_modes_work", tls_modes_work),
        Trial::test("registries::chain::garbage_changes_nothing", garbage_changes_nothing),
        Trial::test(
            "registries::chain::broken_servers_change_nothing",
            broken_servers_change_nothing,
        ),
        Trial::ignorable_test("registries::chain::envoys_route_to_declared_instances", || {
            if envoy::binary().is_none() {
                return missing("Envoy is missing; make tools installs it");
            }
            envoys_route_to_declared_instances().map(|()| Completion::Completed)
        }),
        Trial::test(
            "registries::chain::clients_receive_what_they_request",
            clients_receive_what_they_request,
        ),
        Trial::test("registries::chain::sources_have_an_order", sources_have_an_order),
        Trial::test("registries::chain::many_objects_are_synced", many_objects_are_synced),
    ]
}

const OBJECTS: &str = "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api, namespace: default, labels: {team: shop}}
spec:
  hosts: [api.example.com]
  addresses: [240.1.2.3]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: STATIC
  location: MESH_INTERNAL
  endpoints:
  - {address: 10.1.0.1, labels: {version: v1}}
  - {address: 10.1.0.2, labels: {version: v2}}
---
apiVersion: networking.istio.io/v1alpha3
kind: DestinationRule
metadata: {name: api, namespace: default}
spec:
  host: api.example.com
  trafficPolicy: {connectionPool: {tcp: {maxConnections: 7}}}
  subsets: [{name: v1, labels: {version: v1}}, {name: v2, labels: {version: v2}}]
---
apiVersion: networking.istio.io/v1beta1
kind: VirtualService
metadata: {name: api, namespace: default, creationTimestamp: '2025-01-02T03:04:05Z'}
spec:
  hosts: [api.example.com]
  http:
  - match: [{uri: {prefix: /v2}}]
    route: [{destination: {host: api.example.com, subset: v2}}]
    timeout: 3s
  - route: [{destination: {host: api.example.com, subset: v1}}]
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: idle, namespace: istio-system}
spec:
  configPatches:
  - applyTo: CLUSTER
    match: {cluster: {service: api.example.com}}
    patch: {operation: MERGE, value: {connect_timeout: 4s}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: default}
spec: {mtls: {mode: STRICT}}
---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: logs, namespace: istio-system}
spec: {accessLogging: [{providers: [{name: envoy}]}]}
";

/// Returns a ServiceEntry as YAML.
pub(super) fn entry(name: &str) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, namespace: default}}
spec:
  hosts: [{name}.example.com]
  ports: [{{number: 80, name: http, protocol: HTTP}}]
  resolution: STATIC
  endpoints: [{{address: 10.2.0.1}}]
"
    )
}

fn folder(name: &str) -> Result<PathBuf, String> {
    let folder = scratch(name);
    for part in ["files", "chained"] {
        std::fs::create_dir(folder.join(part)).map_err(|error| error.to_string())?;
    }
    std::fs::write(folder.join("files/objects.yaml"), OBJECTS).map_err(|error| error.to_string())?;
    Ok(folder)
}

fn write(folder: &Path, file: &str, text: &str) -> Result<(), String> {
    replace_file(folder, file, text).map_err(|error| error.to_string())
}

/// Writes a mesh config with these sources, as YAML of the list.
fn write_sources(folder: &Path, sources: &str) -> Result<(), String> {
    write(
        &folder.join("chained"),
        "mesh.yaml",
        &format!("configSources: {sources}\n"),
    )
}

/// Returns a condition: the routes have this text.
pub(super) fn routes_have(wanted: &'static str) -> impl Fn(&Resources) -> Option<()> {
    move |resources| {
        let routes = resources.iter().filter(|((of, _), _)| *of == Type::Route);
        let mut bodies = routes.map(|(_, resource)| &resource.body);
        let found = bodies.any(|body| body.windows(wanted.len()).any(|part| part == wanted.as_bytes()));
        found.then_some(())
    }
}

/// Returns a condition: the service of [`entry`] exists.
pub(super) fn has(name: &str) -> impl Fn(&Resources) -> Option<Resources> {
    let cluster = format!("outbound|80||{name}.example.com");
    move |resources| {
        let found = resources.contains_key(&(Type::Cluster, cluster.clone()));
        found.then(|| resources.clone())
    }
}

fn resources_are_those_of_the_files() -> Result<(), Failed> {
    let folder = folder("registries-chain")?;
    let server = Daemon::start(&folder.join("files"), &folder.join("server.log"))?;
    write_sources(&folder, &format!("[{{address: 'xds://127.0.0.1:{}'}}]", server.xds))?;
    let chained = Daemon::start(&folder.join("chained"), &folder.join("chained.log"))?;
    let (direct, through) = (
        AdsClient::connect(server.xds, &sidecar()),
        AdsClient::connect(chained.xds, &sidecar()),
    );
    let expected = direct.first()?;
    assert!(
        expected.contains_key(&(Type::Cluster, "outbound|80|v2|api.example.com".to_owned())),
        "{:?}",
        expected.keys()
    );
    through.until_same(&expected, TIMEOUT)?;
    // Changes, additions and removals.
    write(&folder.join("files"), "more.yaml", &entry("more"))?;
    through.until("the added service", TIMEOUT, has("more"))?;
    let changed = OBJECTS
        .replace("timeout: 3s", "timeout: 9s")
        .replace("10.1.0.2", "10.1.0.9");
    write(&folder.join("files"), "objects.yaml", &changed)?;
    std::fs::remove_file(folder.join("files/more.yaml"))?;
    let expected = direct.until("the direct changes", TIMEOUT, |resources| {
        let gone = has("more")(resources).is_none();
        let text = |key: &str| {
            resources
                .get(&(Type::Endpoints, key.to_owned()))
                .map(|found| found.body.clone())
        };
        let moved = text("outbound|80||api.example.com")?
            .windows(8)
            .any(|part| part == b"10.1.0.9");
        (gone && moved).then(|| resources.clone())
    })?;
    through.until_same(&expected, TIMEOUT)?;
    let errors = metric(&chained, "istiod_registry_errors_total", "xds://");
    assert!(errors.is_none_or(|count| count < 1.0), "{errors:?}");
    Ok(())
}

fn lost_servers_shrink_nothing() -> Result<(), Failed> {
    let folder = folder("registries-chain-lost")?;
    let (files, log) = (folder.join("files"), folder.join("server.log"));
    // The chained daemon starts first, and waits for its server.
    let port = ports::free();
    write_sources(&folder, &format!("[{{address: 'xds://127.0.0.1:{port}'}}]"))?;
    let chained = |log: &str| {
        let (mesh, state) = (folder.join("chained"), folder.join("state"));
        Daemon::unready(&folder.join(log), |command| {
            command.arg("--configDir").arg(mesh).arg("--remoteStateDir").arg(state);
        })
    };
    let first = chained("chained.log");
    until_metric(&first, "istiod_registry_errors_total", "disconnected", 1.0)?;
    assert!(!first.is_ready(), "the objects are not known yet");
    let serve = |log: &Path| {
        Daemon::configured(log, |command| {
            command
                .arg("--configDir")
                .arg(&files)
                .arg(format!("--grpcAddr=127.0.0.1:{port}"));
        })
    };
    let server = serve(&log)?;
    first.until_ready()?;
    let proxy = AdsClient::connect(first.xds, &sidecar());
    let before = proxy.first()?;
    proxy.mark();
    server.process.kill();
    until_disconnected(&first, "xds://")?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    wait::until("the stored state", TIMEOUT, || {
        std::fs::read_dir(folder.join("state")).ok()?.find_map(|entry| {
            let name = entry.ok()?.file_name();
            name.to_str()?.ends_with(".config-source-state").then_some(())
        })
    })?;
    // Another daemon starts while the server is gone.
    let second = chained("second.log");
    second.until_ready()?;
    let other = AdsClient::connect(second.xds, &sidecar());
    other.until_same(&before, TIMEOUT)?;
    // The server returns with other files.
    write(&files, "more.yaml", &entry("more"))?;
    let _server = serve(&folder.join("server-again.log"))?;
    proxy.until("the added service", TIMEOUT, has("more"))?;
    other.until("the added service", TIMEOUT, has("more"))?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

fn tls_modes_work() -> Result<(), Failed> {
    let folder = folder("registries-chain-tls")?;
    let authority = Authority::new("mesh");
    let plugged = folder.join("cacerts");
    authority.plug_into(&plugged);
    let server = Daemon::secured(&folder.join("server.log"), |command| {
        command
            .arg("--configDir")
            .arg(folder.join("files"))
            .env("ROOT_CA_DIR", &plugged);
    })?;
    let identity = |name: &str, id: &str| {
        let certificate = authority.certificate(id);
        for (end, text) in [("crt", &certificate.chain), ("key", &certificate.key)] {
            std::fs::write(folder.join(format!("{name}.{end}")), text).expect("the test's folder is writable");
        }
        let path = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
        format!(
            "mode: MUTUAL, clientCertificate: {}, privateKey: {}",
            path("crt"),
            path("key")
        )
    };
    let system = identity("system", "spiffe://cluster.local/ns/istio-system/sa/istiod");
    let root = plugged.join("root-cert.pem").display().to_string();
    let names = "sni: istiod.istio-system.svc";
    let expected = AdsClient::connect(server.xds, &sidecar()).first()?;
    // A server without client certificates: TLS in front of the plaintext port.
    let front = TlsFront::start(&authority, server.xds)?;
    let secure = server.secure;
    for (name, port, tls) in [
        ("disable", server.xds, "{mode: DISABLE}".to_owned()),
        (
            "simple",
            front.port,
            format!("{{mode: SIMPLE, caCertificates: {root}, sni: {FRONT}}}"),
        ),
        (
            "mutual",
            secure,
            format!("{{{system}, caCertificates: {root}, {names}}}"),
        ),
        (
            "names",
            secure,
            format!("{{{system}, caCertificates: {root}, subjectAltNames: [other, istiod.istio-system.svc]}}"),
        ),
        ("istio-mutual", secure, format!("{{mode: ISTIO_MUTUAL, {names}}}")),
    ] {
        let source = format!("[{{address: 'xds://127.0.0.1:{port}', tlsSettings: {tls}}}]");
        write_sources(&folder, &source)?;
        let chained = Daemon::configured(&folder.join(format!("{name}.log")), |command| {
            command.arg("--configDir").arg(folder.join("chained"));
            command.env("ROOT_CA_DIR", &plugged).env("SERVICE_ACCOUNT", "istiod");
        });
        let chained = chained.map_err(|error| format!("{name}: {error}"))?;
        AdsClient::connect(chained.xds, &sidecar()).until_same(&expected, TIMEOUT)?;
    }
    // Refused: no certificate, one of another namespace, a server with another name, and other roots.
    let foreign = identity("foreign", "spiffe://cluster.local/ns/default/sa/web");
    let other = folder.join("other.pem");
    std::fs::write(&other, Authority::new("other").root)?;
    for (name, tls, logged) in [
        (
            "anonymous",
            format!("{{mode: SIMPLE, caCertificates: {root}, {names}}}"),
            "Unauthenticated",
        ),
        (
            "foreign",
            format!("{{{foreign}, caCertificates: {root}, {names}}}"),
            "PermissionDenied",
        ),
        (
            "name",
            format!("{{{system}, caCertificates: {root}, subjectAltNames: [other]}}"),
            "none of the names",
        ),
        (
            "roots",
            format!("{{{system}, caCertificates: {}, {names}}}", other.display()),
            "UnknownIssuer",
        ),
    ] {
        let source = format!("[{{address: 'xds://127.0.0.1:{}', tlsSettings: {tls}}}]", server.secure);
        write_sources(&folder, &source)?;
        let chained = Daemon::unready(&folder.join(format!("{name}.log")), |command| {
            command.arg("--configDir").arg(folder.join("chained"));
        });
        wait::until(&format!("{name}: {logged} in the log"), TIMEOUT, || {
            chained.process.log().contains(logged).then_some(())
        })?;
        assert!(!chained.is_ready(), "{name}");
    }
    Ok(())
}

/// The name of a [`TlsFront`] in its certificate.
pub(super) const FRONT: &str = "front.internal";

/// TLS without client certificates in front of a port. Dropping it ends it and its connections.
pub(super) struct TlsFront {
    pub(super) port: u16,
    _stop: DropGuard,
}

impl TlsFront {
    pub(super) fn start(authority: &Authority, behind: u16) -> Result<TlsFront, Failed> {
        let own = authority.certificate(FRONT);
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(own.chain.as_bytes()).collect();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain?, PrivateKeyDer::from_pem_slice(own.key.as_bytes())?)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = RUNTIME.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let port = listener.local_addr()?.port();
        let stop = CancellationToken::new();
        let until = stop.clone();
        let accepting = async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                let copying = async move {
                    let (mut client, mut server) =
                        tokio::try_join!(acceptor.accept(stream), TcpStream::connect(("127.0.0.1", behind)))?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                };
                RUNTIME.spawn(until.clone().run_until_cancelled_owned(copying));
            }
        };
        RUNTIME.spawn(stop.clone().run_until_cancelled_owned(accepting));
        Ok(TlsFront {
            port,
            _stop: stop.drop_guard(),
        })
    }
}

/// The answers of a server to one request, by its type.
type Script = Arc<Mutex<Vec<(String, Vec<Any>)>>>;

/// A server that has state of the world only, and old versions only.
struct Scripted {
    objects: Script,
    /// Wakes streams after a change of the objects.
    changed: tokio::sync::watch::Receiver<u64>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Scripted {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (sender, receiver) = mpsc::channel(64);
        let (objects, mut changed) = (self.objects.clone(), self.changed.clone());
        let mut requests = request.into_inner();
        RUNTIME.spawn(async move {
            let mut types = Vec::new();
            loop {
                let asked = tokio::select! {
                    request = requests.message() => match request {
                        Ok(Some(request)) if types.contains(&request.type_url) => continue,
                        Ok(Some(request)) => {
                            types.push(request.type_url.clone());
                            vec![request.type_url]
                        }
                        Ok(None) | Err(_) => return,
                    },
                    _ = changed.changed() => types.clone(),
                };
                for type_url in asked {
                    let known = objects.lock().expect("no panic").clone();
                    let found = known.into_iter().find(|(of, _)| *of == type_url);
                    let response = DiscoveryResponse {
                        resources: found.map(|(_, resources)| resources).unwrap_or_default(),
                        type_url,
                        nonce: "n".to_owned(),
                        version_info: "v".to_owned(),
                        ..Default::default()
                    };
                    if sender.send(Ok(response)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn delta_aggregated_resources(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("no incremental protocol"))
    }
}

fn packed(name: &str, host: &str) -> Any {
    let spec = networking::ServiceEntry {
        hosts: vec![host.to_owned()],
        ports: vec![networking::ServicePort {
            number: 80,
            name: "http".to_owned(),
            protocol: "HTTP".to_owned(),
            ..Default::default()
        }],
        endpoints: vec![networking::WorkloadEntry {
            address: "10.0.0.1".to_owned(),
            ..Default::default()
        }],
        resolution: networking::service_entry::Resolution::Static as i32,
        ..Default::default()
    };
    Any::pack(&Resource {
        metadata: Some(Metadata {
            name: name.to_owned(),
            ..Default::default()
        }),
        body: Some(Any::pack(&spec)),
    })
}

fn garbage_changes_nothing() -> Result<(), Failed> {
    let folder = folder("registries-chain-garbage")?;
    let entries = "networking.istio.io/v1alpha3/ServiceEntry".to_owned();
    let script: Script = Arc::new(Mutex::new(vec![(
        entries.clone(),
        vec![packed("default/a", "a.example.com")],
    )]));
    let (change, changed) = tokio::sync::watch::channel(0);
    let service = Scripted {
        objects: script.clone(),
        changed,
    };
    let listener = RUNTIME.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let port = listener.local_addr()?.port();
    let server = tonic::transport::Server::builder()
        .add_service(AggregatedDiscoveryServiceServer::new(service))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let serving = RUNTIME.spawn(server);
    write_sources(&folder, &format!("[{{address: 'xds://127.0.0.1:{port}'}}]"))?;
    let daemon = Daemon::start(&folder.join("chained"), &folder.join("chained.log"))?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let before = proxy.until("the service", TIMEOUT, has("a"))?;
    let set = |objects: Vec<Any>| {
        *script.lock().expect("no panic") = vec![(entries.clone(), objects)];
        change.send_modify(|number| *number += 1);
    };
    let garbage = Any {
        type_url: "type.googleapis.com/istio.mcp.v1alpha1.Resource".to_owned(),
        value: vec![0xff; 64].into(),
    };
    set(vec![garbage]);
    until_metric(&daemon, "istiod_registry_errors_total", "unusable_resource", 1.0)?;
    set(vec![packed("default/a", "not a host")]);
    until_metric(&daemon, "istiod_registry_errors_total", "refused_object", 1.0)?;
    ads::same(&before, &proxy.first()?)?;
    set(vec![
        packed("default/a", "a.example.com"),
        packed("default/b", "b.example.com"),
    ]);
    proxy.until("the next service", TIMEOUT, has("b"))?;
    set(vec![packed("default/b", "b.example.com")]);
    proxy.until("the removal", TIMEOUT, |resources| {
        has("a")(resources).is_none().then_some(())
    })?;
    serving.abort();
    Ok(())
}

/// A response: its type, and the names of sent and removed objects.
type Read = (String, BTreeSet<String>, Vec<String>);

/// A client that reads the objects of two kinds.
struct Reader {
    responses: mpsc::Receiver<Read>,
    /// Kept open.
    _requests: (mpsc::Sender<DiscoveryRequest>, mpsc::Sender<DeltaDiscoveryRequest>),
}

const READ: [&str; 2] = [
    "networking.istio.io/v1/Gateway",
    "networking.istio.io/v1alpha3/VirtualService",
];

impl Reader {
    /// Connects, with the incremental protocol or that of the state of the world, and does not acknowledge.
    fn connect(xds: u16, is_delta: bool) -> Result<Reader, Failed> {
        let node = istiod::proto::envoy::config::core::v3::Node {
            id: "sidecar~127.0.0.1~reader.other~other.svc.cluster.local".to_owned(),
            metadata: json!({ "GENERATOR": "api", "NAMESPACE": "other" })
                .as_object()
                .map(istiod::proto::json::struct_from_json),
            ..Default::default()
        };
        let (sender, responses) = mpsc::channel(64);
        let (sotw, sotw_requests) = mpsc::channel(8);
        let (delta, delta_requests) = mpsc::channel(8);
        for type_url in READ.map(str::to_owned) {
            let node = Some(node.clone());
            if is_delta {
                delta.try_send(DeltaDiscoveryRequest {
                    node,
                    type_url,
                    ..Default::default()
                })?;
            } else {
                sotw.try_send(DiscoveryRequest {
                    node,
                    type_url,
                    ..Default::default()
                })?;
            }
        }
        let name = |any: &Any| -> Option<String> { Some(any.unpack::<Resource>().ok()??.metadata?.name) };
        RUNTIME.spawn(async move {
            let endpoint = tonic::transport::Endpoint::from_shared(format!("http://127.0.0.1:{xds}"));
            let unavailable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
            let channel = endpoint.map_err(unavailable)?.connect().await.map_err(unavailable)?;
            let mut client = AggregatedDiscoveryServiceClient::new(channel);
            if is_delta {
                let answers = client
                    .delta_aggregated_resources(ReceiverStream::new(delta_requests))
                    .await;
                let mut answers = answers?.into_inner();
                while let Some(answer) = answers.message().await? {
                    let names = answer.resources.iter();
                    let names = names.filter_map(|resource| name(resource.resource.as_ref()?)).collect();
                    let _ = sender.send((answer.type_url, names, answer.removed_resources)).await;
                }
            } else {
                let answers = client
                    .stream_aggregated_resources(ReceiverStream::new(sotw_requests))
                    .await;
                let mut answers = answers?.into_inner();
                while let Some(answer) = answers.message().await? {
                    let names = answer.resources.iter().filter_map(name).collect();
                    let _ = sender.send((answer.type_url, names, Vec::new())).await;
                }
            }
            Ok::<(), Status>(())
        });
        Ok(Reader {
            responses,
            _requests: (sotw, delta),
        })
    }

    fn next(&mut self) -> Result<Read, Failed> {
        let next = RUNTIME.block_on(async { tokio::time::timeout(TIMEOUT, self.responses.recv()).await });
        Ok(next?.ok_or("the stream ended")?)
    }
}

fn clients_receive_what_they_request() -> Result<(), Failed> {
    let folder = folder("registries-chain-requested")?;
    let files = folder.join("files");
    let gateway = |name: &str| {
        format!(
            "apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {{name: {name}, namespace: hidden}}
spec:
  selector: {{app: {name}}}
  servers: [{{port: {{number: 80, name: http, protocol: HTTP}}, hosts: [{name}.example.com]}}]
"
        )
    };
    write(&files, "a.yaml", &gateway("a"))?;
    let server = Daemon::start(&files, &folder.join("server.log"))?;
    let mut readers = Vec::new();
    for is_delta in [false, true] {
        readers.push((is_delta, Reader::connect(server.xds, is_delta)?));
    }
    let set = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    for (is_delta, reader) in &mut readers {
        let mut first = [reader.next()?, reader.next()?];
        first.sort();
        let expected = [
            (READ[0].to_owned(), set(&["hidden/a"]), Vec::new()),
            (READ[1].to_owned(), set(&["default/api"]), Vec::new()),
        ];
        assert_eq!(first, expected, "delta: {is_delta}");
    }
    // A change of another kind is not sent, one that no sidecar of the client's namespace sees is.
    write(&files, "more.yaml", &entry("more"))?;
    let proxy = AdsClient::connect(server.xds, &sidecar());
    proxy.until("the other kind", TIMEOUT, has("more"))?;
    write(&files, "b.yaml", &gateway("b"))?;
    for (is_delta, reader) in &mut readers {
        let expected = if *is_delta {
            set(&["hidden/b"])
        } else {
            set(&["hidden/a", "hidden/b"])
        };
        assert_eq!(
            reader.next()?,
            (READ[0].to_owned(), expected, Vec::new()),
            "delta: {is_delta}"
        );
    }
    std::fs::remove_file(files.join("a.yaml"))?;
    for (is_delta, reader) in &mut readers {
        let expected = if *is_delta {
            (READ[0].to_owned(), BTreeSet::new(), vec!["hidden/a".to_owned()])
        } else {
            (READ[0].to_owned(), set(&["hidden/b"]), Vec::new())
        };
        assert_eq!(reader.next()?, expected, "delta: {is_delta}");
    }
    Ok(())
}

/// Starts a server of the files at a fixed port.
fn serve_files(files: &Path, log: &Path, port: u16) -> Result<Daemon, String> {
    Daemon::configured(log, |command| {
        command
            .arg("--configDir")
            .arg(files)
            .arg(format!("--grpcAddr=127.0.0.1:{port}"));
    })
}

fn broken_servers_change_nothing() -> Result<(), Failed> {
    let folder = folder("registries-chain-broken")?;
    let (files, port) = (folder.join("files"), ports::free());
    let server = serve_files(&files, &folder.join("server.log"), port)?;
    write_sources(&folder, &format!("[{{address: 'xds://127.0.0.1:{port}'}}]"))?;
    let daemon = Daemon::start(&folder.join("chained"), &folder.join("chained.log"))?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    let before = proxy.first()?;
    proxy.mark();
    server.process.kill();
    until_disconnected(&daemon, "xds://")?;
    drop(server);
    // A valid message without its end.
    let message = prost::Message::encode_to_vec(&DiscoveryResponse {
        type_url: "networking.istio.io/v1/ServiceEntry".to_owned(),
        nonce: "1".to_owned(),
        ..Default::default()
    });
    let broken = RawGrpc::start(port, None, |_| Reply::Status(500))?;
    let replies = [
        Reply::Status(500),
        Reply::Message(vec![0xff; 64]),
        Reply::Half(message),
        Reply::Endless,
    ];
    for reply in replies {
        let seen = metric(&daemon, "istiod_registry_errors_total", "xds://").unwrap_or_default();
        broken.set(move |_| reply.clone());
        until_metric(&daemon, "istiod_registry_errors_total", "xds://", seen + 2.0)?;
    }
    ads::same(&before, &proxy.first()?)?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    drop(broken);
    write(&files, "more.yaml", &entry("more"))?;
    let _server = serve_files(&files, &folder.join("server-again.log"), port)?;
    proxy.until("the added service", TIMEOUT, has("more"))?;
    assert_eq!(proxy.lost(), Vec::<String>::new());
    Ok(())
}

fn envoys_route_to_declared_instances() -> Result<(), Failed> {
    let folder = folder("registries-chain-envoy")?;
    let files = folder.join("files");
    let applications = Applications::start();
    let declare = |addresses: &[&str]| {
        let endpoints: Vec<String> = addresses
            .iter()
            .map(|address| format!("{{address: {address}}}"))
            .collect();
        let text = format!(
            "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: web, namespace: default}}
spec:
  hosts: [web.example.com]
  ports: [{{number: {}, name: http, protocol: HTTP}}]
  resolution: STATIC
  location: MESH_INTERNAL
  endpoints: [{}]
",
            applications.port,
            endpoints.join(", ")
        );
        write(&files, "web.yaml", &text)
    };
    std::fs::remove_file(files.join("objects.yaml"))?;
    let mesh = applications.mesh(&folder)?;
    std::fs::copy(mesh.join("sidecar.yaml"), files.join("sidecar.yaml"))?;
    declare(&ADDRESSES)?;
    let (port, log) = (ports::free(), folder.join("server.log"));
    let server = RefCell::new(Some(serve_files(&files, &log, port)?));
    let sources = format!("enableAutoMtls: false\nconfigSources: [{{address: 'xds://127.0.0.1:{port}'}}]\n");
    write(&folder.join("chained"), "mesh.yaml", &sources)?;
    let daemon = Daemon::start(&folder.join("chained"), &folder.join("chained.log"))?;
    let life = Life {
        source: "xds://",
        host: "web.example.com",
        sicken: &|| declare(&ADDRESSES[..1]),
        kill: &|| {
            server.take();
            Ok(())
        },
        restart: &|| {
            server.replace(Some(serve_files(&files, &log, port)?));
            Ok(())
        },
        heal: &|| declare(&ADDRESSES),
    };
    life.is_followed(&daemon, &folder, applications.port)?;
    Ok(())
}

fn sources_have_an_order() -> Result<(), Failed> {
    let folder = folder("registries-chain-order")?;
    let server = Daemon::start(&folder.join("files"), &folder.join("server.log"))?;
    let local = folder.join("local.yaml");
    let own = OBJECTS.replace("240.1.2.3", "240.9.9.9");
    std::fs::write(&local, own + "---\n" + &entry("local"))?;
    std::fs::create_dir(folder.join("more"))?;
    std::fs::write(folder.join("more/entry.yaml"), entry("more"))?;
    let (file, xds, more) = (local.display(), server.xds, folder.join("more"));
    let sources = [
        format!("fs://{file}"),
        format!("xds://127.0.0.1:{xds}"),
        format!("fs://{}", more.display()),
    ];
    let sources = sources.map(|address| format!("{{address: '{address}'}}"));
    write_sources(&folder, &format!("[{}]", sources.join(", ")))?;
    let chained = Daemon::start(&folder.join("chained"), &folder.join("chained.log"))?;
    let proxy = AdsClient::connect(chained.xds, &sidecar());
    proxy.until("the objects of the file", TIMEOUT, has("local"))?;
    proxy.until("the objects of the folder", TIMEOUT, has("more"))?;
    proxy.until("the first source's object", TIMEOUT, routes_have("240.9.9.9"))?;
    std::fs::write(&local, entry("local"))?;
    proxy.until("the second source's object", TIMEOUT, routes_have("240.1.2.3"))?;
    Ok(())
}

/// `CHAIN_OBJECTS` sets the number, `REGISTRIES_BIN` an optimised daemon; figures are printed with `--nocapture`.
fn many_objects_are_synced() -> Result<(), Failed> {
    let count = count("CHAIN_OBJECTS", 1000);
    let folder = folder("registries-chain-many")?;
    let files = folder.join("files");
    let mut text = String::new();
    for number in 0..count {
        let _ = write!(text, "---\n{}", entry(&format!("many-{number}")));
    }
    write(&files, "many.yaml", &text)?;
    let start = |mesh: &Path, log: &str| {
        Daemon::configured(&folder.join(log), |command| {
            measured(command.arg("--configDir").arg(mesh));
        })
    };
    let server = start(&files, "server.log")?;
    write_sources(&folder, &format!("[{{address: 'xds://127.0.0.1:{}'}}]", server.xds))?;
    let began = wait::now();
    let chained = start(&folder.join("chained"), "chained.log")?;
    let synced = began.elapsed();
    let (direct, proxy) = (
        AdsClient::connect(server.xds, &sidecar()),
        AdsClient::connect(chained.xds, &sidecar()),
    );
    let expected = direct.until("all services", TIMEOUT, has(&format!("many-{}", count - 1)))?;
    proxy.until_same(&expected, TIMEOUT)?;
    drop((direct, expected));
    // A file of its own, so that the server does not read the other objects again.
    let mut number = 0;
    let mut change = |pause: Duration| -> Result<Duration, String> {
        let paused = wait::now();
        wait::until("a pause", TIMEOUT, || (paused.elapsed() >= pause).then_some(()))?;
        let name = format!("more-{number}");
        number += 1;
        let began = wait::now();
        write(&files, "more.yaml", &entry(&name))?;
        proxy.until_received(&(Type::Cluster, format!("outbound|80||{name}.example.com")), TIMEOUT)?;
        Ok(began.elapsed())
    };
    let mut median = |pause: Duration| -> Result<Duration, String> {
        let mut changes = (0..5).map(|_| change(pause)).collect::<Result<Vec<_>, _>>()?;
        changes.sort_unstable();
        Ok(changes[changes.len() / 2])
    };
    // Daemons push a change early if it is not one of many.
    let (in_a_row, changed) = (median(Duration::ZERO)?, median(Duration::from_secs(1))?);
    eprintln!(
        "{count} objects: started and synced in {synced:?}; through both daemons, a change in {changed:?}, one of many in \
         {in_a_row:?}"
    );
    // An unoptimised build takes several times as long, and its limits grow with the load of the machine.
    let bounds = match variable("REGISTRIES_BIN") {
        Some(_) => (Duration::from_secs(3), Duration::from_millis(500)),
        None => [60, 20]
            .map(|seconds| wait::extended(Duration::from_secs(seconds)))
            .into(),
    };
    assert!(
        synced < bounds.0 && changed < bounds.1,
        "{synced:?} and {changed:?}, not below {bounds:?}"
    );
    Ok(())
}
