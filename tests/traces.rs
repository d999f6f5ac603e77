//! Traces of pushes, as a collector receives them.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use libtest_mimic::{Failed, Trial};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use prost::Message;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;

use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::{self, RUNTIME, quietly};
use crate::support::{ports, replace_file, scratch, wait};

const TIMEOUT: Duration = Duration::from_mins(1);
const REASON: &str = "Duplicate entry of domain web";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("traces::a_change_is_one_trace", a_change_is_one_trace),
        Trial::test("traces::http_collectors_receive_spans", http_collectors_receive_spans),
        Trial::test(
            "traces::an_absent_collector_delays_nothing",
            an_absent_collector_delays_nothing,
        ),
    ]
}

/// The spans and headers that a collector has received.
#[derive(Clone, Default)]
struct Received {
    spans: Arc<Mutex<Vec<ResourceSpans>>>,
    /// The values of header `x-tenant`.
    tenants: Arc<Mutex<Vec<String>>>,
}

impl Received {
    fn add(&self, tenant: Option<&str>, request: ExportTraceServiceRequest) {
        self.tenants.lock().expect("no panic").extend(tenant.map(str::to_owned));
        self.spans.lock().expect("no panic").extend(request.resource_spans);
    }

    fn spans(&self) -> Vec<Span> {
        let all = self.spans.lock().expect("no panic");
        let scopes = all.iter().flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Returns a complete trace of a push that changed this object and has a span of this name.
    fn trace_of(&self, object: &str, name: &str) -> Option<Vec<Span>> {
        let spans = self.spans();
        let has_changed = |span: &&Span| {
            let mut events = span.events.iter();
            events.any(|event| text(&event.attributes, "istiod.object.name").as_deref() == Some(object))
        };
        let trace_of = |span: &Span| -> Vec<Span> {
            let of_trace = spans.iter().filter(|other| other.trace_id == span.trace_id);
            of_trace.cloned().collect()
        };
        let mut traces = spans.iter().filter(has_changed).map(trace_of);
        traces.find(|trace| {
            ["change", name]
                .iter()
                .all(|name| trace.iter().any(|span| span.name == *name))
        })
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let tenant = request.metadata().get("x-tenant").and_then(|value| value.to_str().ok());
        let tenant = tenant.map(str::to_owned);
        self.add(tenant.as_deref(), request.into_inner());
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector on a port of 127.0.0.1. Dropping it stops it.
struct Collector {
    received: Received,
    port: u16,
    task: JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn listen() -> Result<(tokio::net::TcpListener, u16), String> {
    let listener = RUNTIME.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
    let listener = listener.map_err(|error| error.to_string())?;
    let port = listener.local_addr().map_err(|error| error.to_string())?.port();
    Ok((listener, port))
}

impl Collector {
    fn grpc() -> Result<Self, String> {
        let (listener, port) = listen()?;
        let received = Received::default();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(received.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let task = RUNTIME.spawn(async move {
            let _ = server.await;
        });
        Ok(Self { received, port, task })
    }

    fn http() -> Result<Self, String> {
        let (listener, port) = listen()?;
        let received = Received::default();
        let seen = received.clone();
        let task = RUNTIME.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let seen = seen.clone();
                let serve = service_fn(move |request: Request<Incoming>| {
                    let seen = seen.clone();
                    async move { Ok::<_, Infallible>(take(&seen, request).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new();
                RUNTIME.spawn(quietly(connection.serve_connection(TokioIo::new(stream), serve)));
            }
        });
        Ok(Self { received, port, task })
    }
}

async fn take(received: &Received, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let status = |status| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        response
    };
    if request.method() != "POST" || request.uri().path() != "/v1/traces" {
        return status(hyper::StatusCode::NOT_FOUND);
    }
    let tenant = request.headers().get("x-tenant").and_then(|value| value.to_str().ok());
    let tenant = tenant.map(str::to_owned);
    let Ok(body) = request.into_body().collect().await else {
        return status(hyper::StatusCode::BAD_REQUEST);
    };
    match ExportTraceServiceRequest::decode(body.to_bytes()) {
        Ok(request) => received.add(tenant.as_deref(), request),
        Err(_) => return status(hyper::StatusCode::BAD_REQUEST),
    }
    status(hyper::StatusCode::OK)
}

fn text(attributes: &[KeyValue], name: &str) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.key == name)?;
    match attribute.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        Value::BoolValue(flag) => Some(flag.to_string()),
        _ => None,
    }
}

const SERVICE: &str = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.1
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]
";

/// Writes a mesh whose route has this timeout.
fn write(folder: &Path, timeout: &str) -> std::io::Result<()> {
    let route = format!(
        "apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: traced, namespace: shop}}
spec:
  hosts: [web.shop.svc.cluster.local]
  http: [{{timeout: {timeout}, route: [{{destination: {{host: web.shop.svc.cluster.local}}}}]}}]
"
    );
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("service.yaml"), SERVICE)?;
    replace_file(folder, "route.yaml", &route)
}

/// Starts a daemon whose traces go to this port.
fn daemon(folder: &Path, port: u16, protocol: &str) -> Result<Daemon, String> {
    Daemon::configured(&folder.join("istiod.log"), |command| {
        command.arg("--configDir").arg(folder.join("mesh"));
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://127.0.0.1:{port}"));
        command.env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol);
        command.env("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=mesh");
        command.env(
            "OTEL_RESOURCE_ATTRIBUTES",
            "deployment.environment.name=test,service.name=ignored",
        );
        command.env("OTEL_SERVICE_NAME", "istiod-of-the-test");
        command.env("OTEL_BSP_SCHEDULE_DELAY", "50");
    })
}

fn a_change_is_one_trace() -> Result<(), Failed> {
    let folder = scratch("traces-grpc");
    write(&folder.join("mesh"), "10s")?;
    let collector = Collector::grpc()?;
    let daemon = daemon(&folder, collector.port, "grpc")?;
    let (accepts, refuses) = (
        AdsClient::connect(daemon.xds, &Node::in_shop("accepts")),
        AdsClient::connect(daemon.xds, &Node::in_shop("refuses")),
    );
    accepts.first()?;
    refuses.first()?;
    refuses.refuse(Type::Route, REASON);
    write(&folder.join("mesh"), "11s")?;
    let received = &collector.received;
    let trace = wait::until("the trace", TIMEOUT, || received.trace_of("traced", "NACK"))?;

    let named = |name: &str| trace.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let one = |name: &str| match named(name)[..] {
        [span] => Ok(span),
        ref spans => Err(format!("{} spans {name}", spans.len())),
    };
    let root = one("change")?;
    assert!(root.parent_span_id.is_empty(), "{root:?}");
    assert_eq!(
        text(&root.attributes, "istiod.refused").as_deref(),
        Some("1"),
        "{root:?}"
    );
    assert_eq!(root.status.as_ref().map(|status| status.code), Some(2), "{root:?}");
    for name in ["debounce", "commit", "generate"] {
        assert_eq!(one(name)?.parent_span_id, root.span_id, "{name}");
    }
    // One step follows the other.
    let steps = [one("debounce")?, one("commit")?, one("generate")?];
    assert_eq!(steps[0].start_time_unix_nano, root.start_time_unix_nano);
    for pair in steps.windows(2) {
        assert_eq!(pair[0].end_time_unix_nano, pair[1].start_time_unix_nano, "{pair:?}");
    }
    let changed = &steps[0].events;
    assert_eq!(changed.len(), 1, "{changed:?}");
    assert_eq!(
        text(&changed[0].attributes, "istiod.object.kind").as_deref(),
        Some("VirtualService")
    );
    let pushes = named("push");
    assert_eq!(pushes.len(), 2, "{pushes:?}");
    for push in &pushes {
        assert_eq!(push.parent_span_id, root.span_id);
        let children = trace.iter().filter(|span| span.parent_span_id == push.span_id);
        let mut children: Vec<&str> = children.map(|span| span.name.as_str()).collect();
        children.sort_unstable();
        let proxy = text(&push.attributes, "istiod.proxy").ok_or("a push without proxy")?;
        let answer = if proxy.starts_with("refuses.shop") {
            "NACK"
        } else {
            "ACK"
        };
        assert_eq!(children, [answer, "send"], "{proxy}");
        assert!(push.start_time_unix_nano >= steps[2].end_time_unix_nano, "{push:?}");
        assert!(push.end_time_unix_nano <= root.end_time_unix_nano, "{push:?}");
    }
    let last = pushes
        .iter()
        .filter(|push| text(&push.attributes, "istiod.last").as_deref() == Some("true"));
    assert!(last.count() <= 1);

    let resources = received.spans.lock().expect("no panic").clone();
    let resource = resources[0].resource.clone().ok_or("no resource")?;
    for (name, value) in [
        ("service.name", "istiod-of-the-test"),
        ("deployment.environment.name", "test"),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ] {
        assert_eq!(text(&resource.attributes, name).as_deref(), Some(value), "{resource:?}");
    }
    let tenants = received.tenants.lock().expect("no panic").clone();
    assert!(
        !tenants.is_empty() && tenants.iter().all(|tenant| tenant == "mesh"),
        "{tenants:?}"
    );
    // The metric counts what was received, and perhaps a batch that is under way.
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    assert!(
        metrics.contains("istiod_trace_spans_total{result=\"failed\"} 0"),
        "{metrics}"
    );
    Ok(())
}

fn http_collectors_receive_spans() -> Result<(), Failed> {
    let folder = scratch("traces-http");
    write(&folder.join("mesh"), "10s")?;
    let collector = Collector::http()?;
    let daemon = daemon(&folder, collector.port, "http/protobuf")?;
    let proxy = AdsClient::connect(daemon.xds, &Node::in_shop("accepts"));
    proxy.first()?;
    write(&folder.join("mesh"), "11s")?;
    wait::until("the trace", TIMEOUT, || collector.received.trace_of("traced", "ACK"))?;
    let tenants = collector.received.tenants.lock().expect("no panic").clone();
    assert!(
        tenants.iter().all(|tenant| tenant == "mesh") && !tenants.is_empty(),
        "{tenants:?}"
    );
    Ok(())
}

/// Pushes arrive, failures are counted, and the daemon ends in time.
fn an_absent_collector_delays_nothing() -> Result<(), Failed> {
    let folder = scratch("traces-absent");
    write(&folder.join("mesh"), "10s")?;
    let daemon = daemon(&folder, ports::free(), "grpc")?;
    let proxy = AdsClient::connect(daemon.xds, &Node::in_shop("accepts"));
    let mut held = proxy.first()?;
    for timeout in ["11s", "12s"] {
        write(&folder.join("mesh"), timeout)?;
        held = proxy.until("the new timeout", TIMEOUT, |resources| {
            (*resources != held).then(|| resources.clone())
        })?;
    }
    wait::until("a failed export", TIMEOUT, || {
        let page = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
        let line = page
            .lines()
            .find(|line| line.starts_with("istiod_trace_spans_total{result=\"failed\"}"))?;
        line.rsplit(' ')
            .next()?
            .parse()
            .ok()
            .filter(|failed: &f64| *failed > 0.0)
    })?;
    drop(proxy);
    daemon.process.terminate();
    let status = daemon.process.end_of(TIMEOUT)?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the daemon ended with {status}").into())
    }
}
