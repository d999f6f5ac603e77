//! InferencePools: a real Envoy sends each request to the endpoint that a small picker selects.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istiod::model::gateway_api::inference_pool::service_name;
use istiod::proto::envoy::config::core::v3::HeaderMap;
use istiod::proto::json::struct_from_json;
use libtest_mimic::Failed;
use prost_types::Struct;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::fixture::TIMEOUT;
use crate::support::daemon::Daemon;
use crate::support::envoy::{Envoy, Node, Protocol};
use crate::support::http::{self, Application, RUNTIME, quietly};
use crate::support::ports::Reserved;
use crate::support::{replace_file, scratch, wait};

/// The fields of a request or its response that the picker reads (envoy/service/ext_proc/v3/external_processor.proto).
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessingRequest {
    #[prost(oneof = "Part", tags = "2, 3, 4, 5, 6, 7")]
    request: Option<Part>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Part {
    #[prost(message, tag = "2")]
    RequestHeaders(Headers),
    #[prost(message, tag = "3")]
    ResponseHeaders(Headers),
    #[prost(message, tag = "4")]
    RequestBody(Body),
    #[prost(message, tag = "5")]
    ResponseBody(Body),
    #[prost(message, tag = "6")]
    RequestTrailers(Nothing),
    #[prost(message, tag = "7")]
    ResponseTrailers(Nothing),
}

#[derive(Clone, PartialEq, prost::Message)]
struct Headers {
    #[prost(message, optional, tag = "1")]
    headers: Option<HeaderMap>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Body {
    #[prost(bytes = "vec", tag = "1")]
    body: Vec<u8>,
    #[prost(bool, tag = "2")]
    end_of_stream: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

/// The answer of the picker.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessingResponse {
    #[prost(oneof = "Answer", tags = "1, 2, 3, 4, 5, 6")]
    response: Option<Answer>,
    #[prost(message, optional, tag = "8")]
    dynamic_metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Answer {
    #[prost(message, tag = "1")]
    RequestHeaders(Nothing),
    #[prost(message, tag = "2")]
    ResponseHeaders(Nothing),
    #[prost(message, tag = "3")]
    RequestBody(BodyResponse),
    #[prost(message, tag = "4")]
    ResponseBody(BodyResponse),
    #[prost(message, tag = "5")]
    RequestTrailers(Nothing),
    #[prost(message, tag = "6")]
    ResponseTrailers(Nothing),
}

#[derive(Clone, PartialEq, prost::Message)]
struct BodyResponse {
    #[prost(message, optional, tag = "1")]
    response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CommonResponse {
    #[prost(message, optional, tag = "3")]
    body_mutation: Option<BodyMutation>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct BodyMutation {
    #[prost(message, optional, tag = "3")]
    streamed_response: Option<Body>,
}

/// The host of requests for the pool.
const MODELS: &str = "models.example.com";
/// The header in which requests name their endpoint to the picker of this test.
const ENDPOINT: &str = "x-endpoint";

/// A picker that selects the endpoint in a header of the request. Dropping it ends it and its connections.
struct Picker {
    address: SocketAddr,
    /// The bodies of the requests.
    bodies: Arc<Mutex<Vec<u8>>>,
    _server: JoinSet<()>,
}

impl Picker {
    fn start() -> Self {
        let listener = RUNTIME.block_on(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a loopback port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let bodies = Arc::new(Mutex::default());
        let mut server = JoinSet::new();
        server.spawn_on(serve(listener, Arc::clone(&bodies)), RUNTIME.handle());
        Self {
            address,
            bodies,
            _server: server,
        }
    }

    fn has_read(&self, text: &str) -> bool {
        let bodies = self.bodies.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bodies).contains(text)
    }
}

async fn serve(listener: TcpListener, bodies: Arc<Mutex<Vec<u8>>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let bodies = Arc::clone(&bodies);
        let answers = service_fn(move |request| {
            let bodies = Arc::clone(&bodies);
            async move { Ok::<_, Infallible>(dispatch(request, bodies).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        connections.spawn(quietly(connection.serve_connection(TokioIo::new(stream), answers)));
    }
}

async fn dispatch(
    request: ::http::Request<Incoming>,
    bodies: Arc<Mutex<Vec<u8>>>,
) -> ::http::Response<tonic::body::Body> {
    let rpc = tower::service_fn(move |request| ready(Ok(process(request, Arc::clone(&bodies)))));
    let codec = ProstCodec::<ProcessingResponse, ProcessingRequest>::default();
    tonic::server::Grpc::new(codec).streaming(rpc, request).await
}

/// Processes one HTTP request with its response.
fn process(
    request: Request<Streaming<ProcessingRequest>>,
    bodies: Arc<Mutex<Vec<u8>>>,
) -> Response<ReceiverStream<Result<ProcessingResponse, Status>>> {
    let mut parts = request.into_inner();
    let (outbox, answers) = mpsc::channel(4);
    RUNTIME.spawn(async move {
        while let Ok(Some(part)) = parts.message().await {
            let Some(part) = part.request else { continue };
            if let Part::RequestBody(body) = &part {
                bodies
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend_from_slice(&body.body);
            }
            if outbox.send(Ok(answer(part))).await.is_err() {
                return;
            }
        }
    });
    Response::new(ReceiverStream::new(answers))
}

/// Passes a part on. That of the request's headers also selects the endpoint.
fn answer(part: Part) -> ProcessingResponse {
    let mut dynamic_metadata = None;
    let response = match part {
        Part::RequestHeaders(headers) => {
            dynamic_metadata = picked(&headers);
            Answer::RequestHeaders(Nothing {})
        }
        Part::ResponseHeaders(_) => Answer::ResponseHeaders(Nothing {}),
        Part::RequestBody(body) => Answer::RequestBody(passed(body)),
        Part::ResponseBody(body) => Answer::ResponseBody(passed(body)),
        Part::RequestTrailers(_) => Answer::RequestTrailers(Nothing {}),
        Part::ResponseTrailers(_) => Answer::ResponseTrailers(Nothing {}),
    };
    ProcessingResponse {
        response: Some(response),
        dynamic_metadata,
    }
}

fn picked(headers: &Headers) -> Option<Struct> {
    let mut headers = headers.headers.iter().flat_map(|map| &map.headers);
    let header = headers.find(|header| header.key == ENDPOINT)?;
    let endpoint = String::from_utf8_lossy(&header.raw_value);
    let metadata = json!({ "envoy.lb": { "x-gateway-destination-endpoint": endpoint } });
    metadata.as_object().map(struct_from_json)
}

fn passed(body: Body) -> BodyResponse {
    let mutation = BodyMutation {
        streamed_response: Some(body),
    };
    BodyResponse {
        response: Some(CommonResponse {
            body_mutation: Some(mutation),
        }),
    }
}

pub(super) fn picker_selects_endpoints(name: &str) -> Result<(), Failed> {
    let folder = scratch(name);
    let mesh = folder.join("mesh");
    std::fs::create_dir(&mesh)?;
    // The two serve different ports of the pool.
    let models: BTreeMap<&str, Application> = [("a", "127.0.0.2"), ("b", "127.0.0.3")]
        .map(|(name, ip)| (name, Application::start(name, ip)))
        .into();
    let (picker, port) = (Picker::start(), Reserved::new());
    let write = |file: &str, text: &str| replace_file(&mesh, file, text);
    write("mesh.yaml", "enableAutoMtls: false\n")?;
    write("env.yaml", "ENABLE_GATEWAY_API_INFERENCE_EXTENSION: 'true'\n")?;
    write("gateway.yaml", &gateway(port.port))?;
    write("pool.yaml", POOL)?;
    write("picker.yaml", &service("picker", "grpc", picker.address))?;
    write("shadow.yaml", &shadow("FailClose", &models))?;
    let daemon = Daemon::start(&mesh, &folder.join("istiod.log"))?;
    let envoy = edge(&folder, &daemon)?;
    let address = SocketAddr::from(([127, 0, 0, 4], port.port));
    let send = |endpoint: SocketAddr, body: &str| {
        let endpoint = endpoint.to_string();
        let headers = [("host", MODELS), (ENDPOINT, endpoint.as_str())];
        http::send(address, "POST", "/v1/completions", &headers, body)
    };
    wait::until("a request through the picker", TIMEOUT, || {
        let answer = send(models["a"].address, "warm-up").ok()?;
        answer.status.is_success().then_some(())
    })?;
    envoy.rejected_nothing()?;
    for round in 0..10 {
        for (name, model) in &models {
            let text = format!("question {round} for {name}");
            let answer = send(model.address, &text)?;
            assert_eq!(answer.application().as_deref(), Some(*name), "{answer:?}");
            assert!(picker.has_read(&text), "the picker must read bodies of requests");
        }
    }
    // The fallback is a policy of its own.
    let unknown = send(SocketAddr::from(([127, 0, 0, 9], 1)), "")?;
    assert!(unknown.status.is_success(), "{unknown:?}");
    drop(picker);
    let failed = send(models["a"].address, "")?;
    assert!(failed.status.is_server_error(), "FailClose: {failed:?}");
    write("shadow.yaml", &shadow("FailOpen", &models))?;
    wait::until("a request without the picker", TIMEOUT, || {
        let answer = send(models["a"].address, "").ok()?;
        answer.status.is_success().then_some(())
    })?;
    Ok(())
}

fn edge(folder: &Path, daemon: &Daemon) -> Result<Envoy, String> {
    let node = Node {
        id: "router~127.0.0.4~edge-0.shop~shop.svc.cluster.local".to_owned(),
        metadata: json!({
            "NAMESPACE": "shop",
            "SERVICE_ACCOUNT": "edge",
            "CLUSTER_ID": "Kubernetes",
            "ISTIO_VERSION": "1.30.3",
            "INSTANCE_IPS": "127.0.0.4",
            "LABELS": { "gateway.networking.k8s.io/gateway-name": "edge" },
        }),
    };
    Envoy::start(folder, "edge", &node, daemon.xds, Protocol::Delta)
}

const POOL: &str = "apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: models, namespace: shop}
spec:
  selector: {matchLabels: {app: models}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: picker, port: {number: 9002}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: models, namespace: shop}
spec:
  parentRefs: [{name: edge}]
  hostnames: [models.example.com]
  rules:
  - backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: models}]
";

fn gateway(port: u16) -> String {
    format!(
        "apiVersion: v1
kind: Namespace
metadata: {{name: shop}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: edge, namespace: shop}}
spec:
  gatewayClassName: istio
  addresses: [{{type: Hostname, value: edge}}]
  listeners: [{{name: http, port: {port}, protocol: HTTP}}]
---
apiVersion: v1
kind: Service
metadata: {{name: edge, namespace: shop}}
spec:
  clusterIP: 10.96.0.8
  ports: [{{name: http, port: {port}, targetPort: {port}}}]
---
apiVersion: v1
kind: Pod
metadata: {{name: edge-0, namespace: shop, labels: {{gateway.networking.k8s.io/gateway-name: edge}}}}
spec: {{serviceAccountName: edge}}
status: {{phase: Running, podIP: 127.0.0.4, conditions: [{{type: Ready, status: 'True'}}]}}
---
{slice}",
        slice = slice("edge", "edge", "http", SocketAddr::from(([127, 0, 0, 4], port)))
    )
}

/// A Service of port 9002 with one address.
fn service(name: &str, port: &str, address: SocketAddr) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  clusterIP: 10.96.0.9
  ports: [{{name: {port}, port: 9002}}]
---
{slice}",
        slice = slice(name, name, port, address)
    )
}

/// The Service of the pool, as the control plane writes it into a cluster.
fn shadow(failure_mode: &str, models: &BTreeMap<&str, Application>) -> String {
    let name = service_name("models");
    let slices = models.values().enumerate().map(|(index, model)| {
        let slice = slice(
            &format!("models-{index}"),
            &name,
            &format!("http-{index}"),
            model.address,
        );
        format!("---\n{slice}")
    });
    let service = format!(
        "apiVersion: v1
kind: Service
metadata:
  name: {name}
  namespace: shop
  labels:
    internal.istio.io/service-semantics: inferencepool
    istio.io/inferencepool-name: models
    istio.io/inferencepool-extension-service: picker
    istio.io/inferencepool-extension-port: '9002'
    istio.io/inferencepool-extension-failure-mode: {failure_mode}
spec:
  clusterIP: None
  selector: {{app: models}}
  ports: [{{name: http-0, port: 54321, targetPort: 8000}}, {{name: http-1, port: 54322, targetPort: 8001}}]
"
    );
    std::iter::once(service).chain(slices).collect()
}

/// An address of a port of a Service.
fn slice(name: &str, service: &str, port: &str, address: SocketAddr) -> String {
    let target = if name == "edge" {
        "\n  targetRef: {kind: Pod, name: edge-0, namespace: shop}"
    } else {
        ""
    };
    format!(
        "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}, namespace: shop, labels: {{kubernetes.io/service-name: {service}}}}}
addressType: IPv4
endpoints:
- addresses: [{ip}]
  conditions: {{ready: true}}{target}
ports: [{{name: {port}, port: {number}, protocol: TCP}}]
",
        ip = address.ip(),
        number = address.port()
    )
}
