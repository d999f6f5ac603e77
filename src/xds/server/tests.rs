//! Tests of the server with the generated client, over pipes in memory and over loopback.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use http::StatusCode;
use http_body::Frame;
use hyper_util::rt::TokioIo;
use prometheus::proto::{LabelPair, MetricFamily};
use smol_str::{SmolStr, format_smolstr};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use super::*;
use crate::{
    generate::{
        EncodedResource, ResourceSnapshot, ResourceType,
        resource::{PartResources, TypeResources, UnknownRoutes},
    },
    model::Revision,
    proto::{
        envoy::{
            config::{cluster::v3::Cluster, core::v3::Node},
            service::discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::rpc,
    },
    push::testing::manual_groups,
    rpc::{Connections, Router, Unary},
    settings::{self, Settings},
};

struct Fixture {
    environment: Environment,
    server: Server,
    feed: watch::Sender<Option<Arc<ResourceSnapshot>>>,
}

type Client = AggregatedDiscoveryServiceClient<Channel>;

impl Fixture {
    fn new(options: &ServerOptions) -> Self {
        Self::with_clock(options, environment::now)
    }

    fn with_clock(options: &ServerOptions, clock: fn() -> Instant) -> Self {
        Self::of(options, clock, BTreeMap::new())
    }

    fn with_variables(variables: BTreeMap<String, String>) -> Self {
        Self::of(&ServerOptions::default(), environment::now, variables)
    }

    fn of(options: &ServerOptions, clock: fn() -> Instant, variables: BTreeMap<String, String>) -> Self {
        let flags = settings::fixture::flags(&[]).expect("no flags are required");
        let environment = Environment::new(Settings { flags, variables });
        environment.ready.send_replace(true);
        let (groups, feed) = manual_groups(&environment.tasks);
        let mut server = Server::new(&environment, groups, *options, None).expect("an empty registry");
        Arc::get_mut(&mut server.shared).expect("not shared yet").clock = clock;
        Self {
            environment,
            server,
            feed,
        }
    }

    /// Publishes resources at a revision: (type, name, text).
    fn publish(&self, revision: u64, content: &[(ResourceType, &str, &str)]) {
        self.feed.send_replace(Some(snapshot(revision, content)));
    }

    fn router(&self) -> Router<Server> {
        Router::new(self.server.clone(), Vec::new())
    }

    /// Returns connections of the server, without other methods.
    fn connections(&self) -> Connections<Router<Server>> {
        connections(&self.server)
    }

    /// Returns a client over a pipe.
    async fn client(&self) -> Client {
        self.client_with(Endpoint::from_static("http://istiod")).await
    }

    async fn client_with(&self, endpoint: Endpoint) -> Client {
        self.client_of(endpoint, local()).await
    }

    async fn client_of(&self, endpoint: Endpoint, peer: Peer) -> Client {
        self.client_over(endpoint, peer, self.connections()).await
    }

    async fn client_over(&self, endpoint: Endpoint, peer: Peer, connections: Connections<Router<Server>>) -> Client {
        let tasks = self.environment.tasks.clone();
        let connector = tower::service_fn(move |_| {
            let (connections, peer, tasks) = (connections.clone(), peer.clone(), tasks.clone());
            async move {
                let (ours, theirs) = tokio::io::duplex(16 << 10);
                tasks.spawn("pipe", async move { connections.connection(theirs, peer).await });
                Ok::<_, io::Error>(TokioIo::new(ours))
            }
        });
        let channel = endpoint
            .connect_with_connector(connector)
            .await
            .expect("pipes always connect");
        Client::new(channel)
    }

    /// Waits until a metric has a value.
    async fn until(&self, name: &str, value: f64) {
        let reached = async {
            while (self.metric(name, &[]) - value).abs() > f64::EPSILON {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let reached = tokio::time::timeout(Duration::from_secs(20), reached).await;
        assert!(reached.is_ok(), "{name} is {}, not {value}", self.metric(name, &[]));
    }

    fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let families = self.environment.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let metrics = family.map_or(&[][..], MetricFamily::get_metric);
        let values = metrics.iter().filter(|metric| {
            let values: Vec<&str> = metric.get_label().iter().map(LabelPair::value).collect();
            labels.iter().all(|label| values.contains(label))
        });
        values
            .map(|metric| {
                let histogram = metric.get_histogram().get_sample_count() as f64;
                metric.get_counter().get_value() + metric.get_gauge().get_value() + histogram
            })
            .sum()
    }
}

fn local() -> Peer {
    Peer::plaintext(SocketAddr::from(([127, 0, 0, 1], 1)))
}

fn connections(server: &Server) -> Connections<Router<Server>> {
    let router = Router::new(server.clone(), Vec::new());
    Connections::new(router, server.connection_options(), server.tasks.clone())
}

fn cluster(name: &str, text: &str) -> Arc<EncodedResource> {
    let message = Cluster {
        name: name.into(),
        alt_stat_name: text.into(),
        ..Default::default()
    };
    Arc::new(EncodedResource::new(name, &message))
}

fn snapshot(revision: u64, content: &[(ResourceType, &str, &str)]) -> Arc<ResourceSnapshot> {
    let views = ResourceType::ALL.iter().map(|resource_type| {
        let mut part = PartResources::default();
        for (_, name, text) in content.iter().filter(|(of, _, _)| of == resource_type) {
            let resource = cluster(name, text);
            part.digest = part.digest.wrapping_add(resource.version.value());
            part.resources.insert(SmolStr::new(name), resource);
        }
        TypeResources {
            parts: [Arc::new(part)].into(),
            ..TypeResources::default()
        }
    });
    Arc::new(ResourceSnapshot::new(
        Revision(revision),
        views.collect(),
        UnknownRoutes::Omitted,
    ))
}

fn node() -> Option<Node> {
    Some(Node {
        id: "sidecar~10.0.0.1~web.default~default.svc.cluster.local".into(),
        ..Default::default()
    })
}

struct Sotw {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

impl Sotw {
    async fn open(client: &mut Client) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::channel(16);
        let responses = client
            .stream_aggregated_resources(ReceiverStream::new(receiver))
            .await?;
        Ok(Self {
            requests,
            responses: responses.into_inner(),
        })
    }

    async fn request(&self, resource_type: ResourceType, names: &[&str], nonce: &str) {
        let request = DiscoveryRequest {
            node: node(),
            type_url: resource_type.url().into(),
            resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
            response_nonce: nonce.into(),
            ..Default::default()
        };
        self.requests.send(request).await.expect("the stream is open");
    }

    async fn response(&mut self) -> DiscoveryResponse {
        let response = self.responses.message().await.expect("the stream stays open");
        response.expect("the stream stays open")
    }

    async fn end(&mut self) -> Status {
        loop {
            match self.responses.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Status::ok(""),
                Err(status) => return status,
            }
        }
    }
}

fn texts(response: &DiscoveryResponse) -> Vec<String> {
    let clusters = response
        .resources
        .iter()
        .map(|any| prost::Message::decode(any.value.clone()));
    clusters
        .map(|cluster: Result<Cluster, _>| cluster.expect("clusters").alt_stat_name)
        .collect()
}

#[tokio::test]
async fn state_of_the_world_streams_work_over_tcp() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(
        1,
        &[(ResourceType::Cluster, "a", "1"), (ResourceType::Endpoint, "a", "e1")],
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("a bound address");
    let server = fixture.server.clone();
    fixture
        .environment
        .tasks
        .spawn("test server", async move { connections(&server).serve(listener).await });
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .expect("a URI")
        .connect()
        .await;
    let mut stream = Sotw::open(&mut Client::new(channel.expect("a connection")))
        .await
        .expect("an accepted stream");

    stream.request(ResourceType::Cluster, &[], "").await;
    let clusters = stream.response().await;
    assert_eq!(texts(&clusters), ["1"]);
    stream.request(ResourceType::Cluster, &[], &clusters.nonce).await;
    stream.request(ResourceType::Endpoint, &["a", "b"], "").await;
    let endpoints = stream.response().await;
    assert_eq!(endpoints.type_url, ResourceType::Endpoint.url());
    assert_eq!(
        endpoints.resources.len(),
        2,
        "an unknown cluster has an empty assignment"
    );
    stream
        .request(ResourceType::Endpoint, &["a", "b"], &endpoints.nonce)
        .await;

    fixture.publish(
        2,
        &[(ResourceType::Cluster, "a", "1"), (ResourceType::Endpoint, "a", "e2")],
    );
    let endpoints = stream.response().await;
    assert_eq!(texts(&endpoints), ["e2"], "only the changes are sent");
    fixture.until("pilot_proxy_convergence_time", 1.0).await;
    let queued = fixture.metric("pilot_proxy_queue_time", &[]);
    assert!(
        (queued - 1.0).abs() < f64::EPSILON,
        "{queued}: only the change was queued"
    );

    let live = fixture.server.registry().connections();
    assert_eq!(live[0].id, "web.default-1");
    assert!(live[0].peer.is_some_and(|peer| peer.ip().is_loopback()));
    let types = live[0].types();
    assert_eq!(types[0].nonce_acked, types[0].nonce_sent);
    assert_eq!(types[1].names.iter().collect::<Vec<_>>(), ["a", "b"]);
    assert!(types[1].sent_at.is_some());
    assert!((fixture.metric("pilot_xds", &[]) - 1.0).abs() < f64::EPSILON);
    assert!((fixture.metric("pilot_xds_pushes", &["cds"]) - 1.0).abs() < f64::EPSILON);
    drop(stream);
    assert!(
        fixture.environment.tasks.end(Duration::from_secs(5)).await,
        "all tasks end"
    );
    assert!(fixture.server.registry().is_empty());
    assert!(fixture.metric("pilot_xds", &[]).abs() < f64::EPSILON);
}

#[tokio::test]
async fn delta_streams_work_over_a_pipe() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(
        1,
        &[(ResourceType::Listener, "a", "1"), (ResourceType::Listener, "b", "1")],
    );
    let (requests, receiver) = mpsc::channel(16);
    let mut client = fixture.client().await;
    let responses = client.delta_aggregated_resources(ReceiverStream::new(receiver)).await;
    let mut responses = responses.expect("an accepted stream").into_inner();
    let request = |nonce: &str, held: Option<String>| DeltaDiscoveryRequest {
        node: node(),
        type_url: ResourceType::Listener.url().into(),
        response_nonce: nonce.into(),
        initial_resource_versions: held.into_iter().map(|version| ("a".to_owned(), version)).collect(),
        ..Default::default()
    };
    let held = cluster("a", "1").version.to_string();
    requests.send(request("", Some(held))).await.expect("an open stream");
    let names = async |responses: &mut Streaming<DeltaDiscoveryResponse>| {
        let response = responses
            .message()
            .await
            .expect("the stream stays open")
            .expect("the stream stays open");
        let names: Vec<String> = response
            .resources
            .iter()
            .map(|resource| resource.name.clone())
            .collect();
        requests
            .send(request(&response.nonce, None))
            .await
            .expect("an open stream");
        (names, response.removed_resources)
    };
    assert_eq!(
        names(&mut responses).await,
        (vec!["b".into()], vec![]),
        "held resources are not sent again"
    );
    fixture.publish(2, &[(ResourceType::Listener, "a", "2")]);
    assert_eq!(names(&mut responses).await, (vec!["a".into()], vec!["b".into()]));
}

#[tokio::test]
async fn streams_end_when_their_connection_is_drained() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(1, &[(ResourceType::Listener, "a", "1")]);
    let mut client = fixture.client().await;
    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    stream.request(ResourceType::Listener, &[], "").await;
    stream.response().await;
    // Shutdown also ends the groups of the fixture, as if the push loop had ended.
    let ending = fixture.environment.tasks.end(Duration::from_secs(20));
    let (has_ended, status) = tokio::join!(ending, stream.end());
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "the connection is closing; connect again")
    );
    assert!(has_ended, "all tasks end");
}

#[tokio::test]
async fn invalid_requests_end_the_stream() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.environment.ready.send_replace(false);
    let mut client = fixture.client().await;
    let status = Sotw::open(&mut client).await.err().expect("not ready");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "server is not ready to serve discovery information");
    fixture.environment.ready.send_replace(true);

    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    stream
        .requests
        .send(DiscoveryRequest::default())
        .await
        .expect("an open stream");
    let status = stream.end().await;
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "missing node information")
    );

    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    let long = "x".repeat(4 << 20);
    stream.request(ResourceType::Endpoint, &[&long], "").await;
    let status = stream.end().await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("at most 4194304"), "{}", status.message());

    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    let names: Vec<String> = (0..100_001).map(|number| format!("{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    stream.request(ResourceType::Endpoint, &names, "").await;
    let status = stream.end().await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(
        status.message().starts_with("too many resource names"),
        "{}",
        status.message()
    );

    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    stream.request(ResourceType::Endpoint, &vec!["x"; 260_000], "").await;
    assert_eq!(stream.end().await.message(), "the request has more than 250000 fields");
    assert!(fixture.server.registry().is_empty());
    let too_large = fixture.metric("pilot_total_xds_internal_errors", &[]);
    assert!((too_large - 1.0).abs() < f64::EPSILON, "{too_large}");
}

#[tokio::test]
async fn unknown_methods_are_rejected_and_health_reports_are_not_answered() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let mut client = fixture.client().await;
    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    let of_type = async |type_url: &str, node: Option<Node>| {
        let request = DiscoveryRequest {
            node,
            type_url: type_url.into(),
            ..Default::default()
        };
        stream.requests.send(request).await.expect("an open stream");
    };
    of_type("type.googleapis.com/istio.v1.HealthInformation", None).await;
    // An unknown type is answered without resources, because clients may wait for it.
    of_type("type.googleapis.com/some.Thing", node()).await;
    let response = stream.response().await;
    assert_eq!(response.type_url, "type.googleapis.com/some.Thing");
    assert!(response.resources.is_empty() && !response.nonce.is_empty());
    let of_type = async |type_url: &str| {
        let request = DiscoveryRequest {
            type_url: type_url.into(),
            ..Default::default()
        };
        stream.requests.send(request).await.expect("an open stream");
    };
    of_type(ResourceType::Cluster.url()).await;
    assert_eq!(texts(&stream.response().await), ["1"]);

    let request = Request::post("/envoy.service.cluster.v3.ClusterDiscoveryService/StreamClusters")
        .header(header::CONTENT_TYPE, "application/grpc")
        .body(http_body_util::Empty::<Bytes>::new())
        .expect("a request");
    let response = fixture.router().handle(request).await;
    assert_eq!(response.headers()[Status::GRPC_STATUS], "12");
    let request = Request::get("/")
        .body(http_body_util::Empty::<Bytes>::new())
        .expect("a request");
    assert_eq!(
        fixture.router().handle(request).await.status(),
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    );
}

#[tokio::test]
async fn nodes_that_istio_refuses_are_refused() {
    let fixture = Fixture::new(&ServerOptions::default());
    let mut client = fixture.client().await;
    let number = prost_types::Value {
        kind: Some(prost_types::value::Kind::NumberValue(5.0)),
    };
    let metadata = prost_types::Struct {
        fields: [("NAMESPACE".to_owned(), number)].into(),
    };
    let wrong = Node {
        metadata: Some(metadata),
        ..node().expect("a node")
    };
    let ztunnel = Node {
        id: "ztunnel~10.0.0.1~ztunnel.istio-system~istio-system.svc.cluster.local".into(),
        ..Default::default()
    };
    for (node, code, message) in [
        (
            wrong,
            Code::InvalidArgument,
            "invalid node metadata: NAMESPACE has the wrong type, want a string",
        ),
        (ztunnel, Code::Unknown, "ztunnel requires PILOT_ENABLE_AMBIENT=true"),
    ] {
        let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
        let request = DiscoveryRequest {
            node: Some(node),
            type_url: ResourceType::Cluster.url().into(),
            ..Default::default()
        };
        stream.requests.send(request).await.expect("an open stream");
        let status = stream.end().await;
        assert_eq!((status.code(), status.message()), (code, message));
    }
}

/// Knative (`K_REVISION`) routes one request to a new server before it scales.
#[tokio::test]
async fn the_first_stream_warms_a_knative_server_up() {
    let fixture = Fixture::with_variables(BTreeMap::from([("K_REVISION".to_owned(), "1".to_owned())]));
    let mut client = fixture.client().await;
    let status = Sotw::open(&mut client).await.err().expect("a refused stream");
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "server warmup not complete; try again")
    );
    assert!(Sotw::open(&mut client).await.is_ok());
}

#[tokio::test]
async fn a_nack_is_counted() {
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let mut stream = Sotw::open(&mut fixture.client().await)
        .await
        .expect("an accepted stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    let response = stream.response().await;
    let nack = DiscoveryRequest {
        type_url: ResourceType::Cluster.url().into(),
        response_nonce: response.nonce.clone(),
        error_detail: Some(rpc::Status {
            code: 13,
            message: "no such thing".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    stream.requests.send(nack).await.expect("an open stream");
    stream.request(ResourceType::Cluster, &[], "stale").await;
    fixture.publish(2, &[(ResourceType::Cluster, "a", "2")]);
    assert_eq!(texts(&stream.response().await), ["2"]);
    assert!((fixture.metric("pilot_total_xds_rejects", &["cds"]) - 1.0).abs() < f64::EPSILON);
    assert!((fixture.metric("pilot_xds_cds_reject", &["web.default", "Internal"]) - 1.0).abs() < f64::EPSILON);
    assert!((fixture.metric("pilot_xds_expired_nonce", &["cds"]) - 1.0).abs() < f64::EPSILON);
    let types = fixture.server.registry().connections()[0].types();
    assert_eq!(types[0].last_error.as_deref(), Some("no such thing"));
}

/// Envoy applies clusters while others warm, but does not answer.
#[tokio::test]
async fn unanswered_clusters_do_not_hold_up_newer_ones() {
    let mut options = ServerOptions::default();
    options.timeouts.clusters = Duration::from_millis(50);
    let fixture = Fixture::new(&options);
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let mut stream = Sotw::open(&mut fixture.client().await)
        .await
        .expect("an accepted stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    for (revision, text) in [(2, "2"), (3, "3")] {
        fixture.publish(revision, &[(ResourceType::Cluster, "a", text)]);
        assert_eq!(texts(&stream.response().await), [text]);
    }
}

/// Opens two streams with room for one first configuration at a time. Nothing is published, so the first stream holds
/// the permit.
async fn two_first_configurations(options: &ServerOptions) -> (Fixture, Sotw, Sotw) {
    let mut options = *options;
    options.limits.first_configurations = 1;
    let fixture = Fixture::new(&options);
    let mut client = fixture.client().await;
    let first = Sotw::open(&mut client).await.expect("an accepted stream");
    first.request(ResourceType::Cluster, &[], "").await;
    fixture.until("pilot_xds", 1.0).await;
    let second = Sotw::open(&mut client).await.expect("an accepted stream");
    second.request(ResourceType::Cluster, &[], "").await;
    (fixture, first, second)
}

#[tokio::test]
async fn first_configurations_are_limited() {
    let mut options = ServerOptions::default();
    options.limits.longest_wait = Duration::from_millis(50);
    options.timeouts.first_configuration = Duration::from_hours(1);
    let (fixture, mut first, mut second) = two_first_configurations(&options).await;
    let status = second.end().await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("try again"), "{}", status.message());
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    assert_eq!(texts(&first.response().await), ["1"]);
}

#[tokio::test]
async fn late_first_configurations_do_not_delay_others() {
    let mut options = ServerOptions::default();
    options.limits.longest_wait = Duration::from_hours(1);
    options.timeouts.first_configuration = Duration::from_millis(50);
    let (fixture, mut first, mut second) = two_first_configurations(&options).await;
    // The first stream loses its permit at the time limit, and stays open.
    fixture.until("pilot_xds", 2.0).await;
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    for stream in [&mut first, &mut second] {
        assert_eq!(texts(&stream.response().await), ["1"]);
    }
}

#[tokio::test]
async fn connections_close_at_their_maximum_age() {
    let fixture = Fixture::new(&ServerOptions {
        max_connection_age: Some(Duration::from_millis(200)),
        age_grace: Duration::from_millis(100),
        ..ServerOptions::default()
    });
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let started = tokio::time::Instant::now();
    let mut stream = Sotw::open(&mut fixture.client().await)
        .await
        .expect("an accepted stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    let status = stream.end().await;
    assert_eq!(status.code(), Code::Unavailable);
    let age = started.elapsed().as_millis();
    assert!(age >= 180 + 100, "{age}");
}

#[tokio::test]
async fn shed_connections_close_and_new_ones_stay() {
    let fixture = Fixture::new(&ServerOptions {
        age_grace: Duration::from_millis(10),
        ..ServerOptions::default()
    });
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let (sender, shedding) = tokio::sync::watch::channel(None);
    let connections = fixture.connections().with_shedding(shedding);
    let open = || {
        let connections = connections.clone();
        async {
            let mut client = fixture
                .client_over(Endpoint::from_static("http://istiod"), local(), connections)
                .await;
            let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
            stream.request(ResourceType::Cluster, &[], "").await;
            assert_eq!(texts(&stream.response().await), ["1"]);
            stream
        }
    };
    let mut first = open().await;
    sender.send_replace(Some(Duration::ZERO));
    assert_eq!(first.end().await.code(), Code::Unavailable);
    // The order does not concern connections that begin after it.
    let mut second = open().await;
    second.request(ResourceType::Endpoint, &["x"], "").await;
    second.response().await;
    sender.send_replace(Some(Duration::ZERO));
    assert_eq!(second.end().await.code(), Code::Unavailable);
}

static PANICS: AtomicBool = AtomicBool::new(false);

#[tokio::test]
async fn a_panic_ends_one_stream_only() {
    let fixture = Fixture::with_clock(&ServerOptions::default(), || {
        assert!(!PANICS.load(Ordering::Relaxed), "the test requests a panic");
        environment::now()
    });
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let mut client = fixture.client().await;
    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    PANICS.store(true, Ordering::Relaxed);
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(stream.end().await.code(), Code::Internal);
    PANICS.store(false, Ordering::Relaxed);
    assert!((fixture.metric("pilot_total_xds_internal_errors", &[]) - 1.0).abs() < f64::EPSILON);
    let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
}

/// Returns the node of a machine that registers itself in a group.
fn machine() -> Node {
    use prost_types::{Struct, Value, value::Kind};
    let text = |text: &str| Value {
        kind: Some(Kind::StringValue(text.into())),
    };
    let fields = [
        ("AUTO_REGISTER_GROUP", "web"),
        ("NAMESPACE", "vms"),
        ("NETWORK", "net1"),
    ];
    Node {
        id: "sidecar~10.0.0.9~vm.vms~vms.svc.cluster.local".into(),
        metadata: Some(Struct {
            fields: fields.map(|(key, value)| (key.to_owned(), text(value))).into(),
        }),
        ..Default::default()
    }
}

fn health(complaint: Option<&str>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/istio.v1.HealthInformation".into(),
        error_detail: complaint.map(|message| rpc::Status {
            message: message.into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[tokio::test]
async fn machines_are_announced_before_they_are_served() {
    use crate::xds::events::{Binding, Event, EventOptions, Rejection};
    let mut fixture = Fixture::new(&ServerOptions::default());
    let options = EventOptions {
        registration: true,
        health: true,
        sidecars_accept_hbone: true,
    };
    let (events, mut received) = Events::channel(options);
    Arc::get_mut(&mut fixture.server.shared).expect("not shared yet").events = Some(events);
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let mut client = fixture.client().await;
    let first = DeltaDiscoveryRequest {
        node: Some(machine()),
        type_url: ResourceType::Cluster.url().into(),
        ..Default::default()
    };
    let open = async |client: &mut Client| {
        let (requests, outbox) = mpsc::channel(8);
        requests.send(first.clone()).await.expect("an open channel");
        let responses = client.delta_aggregated_resources(ReceiverStream::new(outbox)).await;
        (requests, responses.expect("a stream").into_inner())
    };

    let (_requests, mut responses) = open(&mut client).await;
    let Some(Event::Connected { machine, answer, .. }) = received.recv().await else {
        panic!("no connect event");
    };
    assert_eq!(machine.binding, Binding::Group("web".into()));
    assert_eq!(
        (machine.namespace.as_str(), machine.address.as_str()),
        ("vms", "10.0.0.9")
    );
    answer
        .send(Err(Rejection::Missing("no such group".into())))
        .expect("the stream waits");
    let refused = responses.message().await.expect_err("it is rejected");
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, "no such group")
    );

    let (requests, mut responses) = open(&mut client).await;
    let Some(Event::Connected {
        answer,
        gone,
        connection,
        ..
    }) = received.recv().await
    else {
        panic!("no connect event");
    };
    answer.send(Ok(())).expect("the stream waits");
    let served = responses
        .message()
        .await
        .expect("an accepted stream")
        .expect("a response");
    assert_eq!(served.resources.len(), 1);
    for complaint in [Some("refused"), None] {
        requests.send(health(complaint)).await.expect("an open channel");
        let Some(Event::Health {
            connection: reported,
            health,
        }) = received.recv().await
        else {
            panic!("no health report");
        };
        assert_eq!(reported, connection);
        assert_eq!(
            (health.healthy, health.message.as_str()),
            (complaint.is_none(), complaint.unwrap_or_default())
        );
    }
    drop((requests, responses));
    assert!(gone.await.is_err(), "its attachment was dropped");
}

mod config_objects;
mod identity;
mod lifetime;
mod refusals;
mod slow_clients;
