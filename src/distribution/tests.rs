//! One replica with a push loop and a server.

use std::{io, net::SocketAddr};

use hyper_util::rt::TokioIo;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Endpoint};

use super::{replicas::Scope, *};
use crate::{
    environment::Environment,
    generate,
    model::{Batch, Change, Installation, World, fixture},
    proto::{
        envoy::{
            config::core::v3::Node,
            service::discovery::v3::{
                DiscoveryRequest, DiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::rpc,
    },
    push::{
        debounce::DebounceOptions,
        push_loop::{Observer, PushReport},
    },
    rpc::{Connections, Peer, Router},
    settings::fixture::settings,
    xds::server::{Server, ServerOptions},
};

const NODE: &str = "sidecar~10.0.0.1~web.default~default.svc.cluster.local";

struct NoMetrics;

impl Observer for NoMetrics {
    fn pushed(&self, _: &PushReport) {}
}

pub(super) struct Fixture {
    pub(super) distribution: Arc<Distribution>,
    push: PushHandle,
    server: Server,
    environment: Environment,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let environment = Environment::new(settings(&[], &[]));
        environment.ready.send_replace(true);
        let debounce = DebounceOptions {
            after: Duration::from_millis(100),
            max: Duration::from_secs(10),
            endpoints_wait: true,
        };
        let (push, run) = PushHandle::new(World::new(Installation::default()), debounce, environment::now);
        environment.tasks.spawn("push loop", run.run(NoMetrics));
        let server = Server::new(&environment, push.groups.clone(), ServerOptions::default(), None);
        let server = server.expect("an empty registry");
        let inputs = DistributionSources {
            mesh: push.mesh.clone(),
            inspect: push.inspect.clone(),
            flushes: push.flushes.clone(),
            tracker: push.tracker.clone(),
            connections: server.registry().clone(),
            ingest_status: Arc::default(),
            replica: OwnReplica::default(),
            peers: None,
            runtime: Handle::current(),
        };
        Self {
            distribution: Distribution::start(&environment.tasks, inputs).0,
            push,
            server,
            environment,
        }
    }

    /// Pushes changes at once.
    pub(super) async fn apply(&self, batch: Batch) {
        self.push.changes.send(batch).await.expect("the push loop runs");
        assert!(self.push.flushes.flush().await);
    }

    /// Returns the first cluster that a client refuses, and its stream.
    pub(super) async fn refused(&self, cluster: &str) -> (RefusedResource, Streaming<DiscoveryResponse>) {
        let (sender, mut refusals) = mpsc::channel(1);
        self.server.set_refusal_queue(sender);
        let connections = Connections::new(
            Router::new(self.server.clone(), Vec::new()),
            self.server.connection_options(),
            self.environment.tasks.clone(),
        );
        let tasks = self.environment.tasks.clone();
        let connector = tower::service_fn(move |_| {
            let (connections, tasks) = (connections.clone(), tasks.clone());
            async move {
                let (ours, theirs) = tokio::io::duplex(16 << 10);
                let peer = Peer::plaintext(SocketAddr::from(([127, 0, 0, 1], 1)));
                tasks.spawn("pipe", async move { connections.connection(theirs, peer).await });
                Ok::<_, io::Error>(TokioIo::new(ours))
            }
        });
        let endpoint = Endpoint::from_static("http://istiod");
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.expect("pipes always connect");
        let mut client = AggregatedDiscoveryServiceClient::new(channel);
        let (requests, receiver) = mpsc::channel(1);
        let mut request = DiscoveryRequest {
            node: Some(Node {
                id: NODE.into(),
                ..Node::default()
            }),
            type_url: generate::ResourceType::Cluster.url().into(),
            ..DiscoveryRequest::default()
        };
        requests.send(request.clone()).await.expect("an open stream");
        let responses = client.stream_aggregated_resources(ReceiverStream::new(receiver));
        let mut responses = responses.await.expect("an accepted stream").into_inner();
        let response = responses.message().await.expect("an open stream");
        request.response_nonce = response.expect("an open stream").nonce;
        request.error_detail = Some(rpc::Status {
            message: format!("Error adding/updating cluster(s) {cluster}: no reason"),
            ..rpc::Status::default()
        });
        requests.send(request).await.expect("an open stream");
        let refused = refusals.recv().await.expect("a refusal");
        // The stream stays open as long as its client does not end its requests.
        self.environment.tasks.spawn_until_shutdown("requests", async move {
            let _requests = requests;
            std::future::pending::<()>().await;
        });
        (refused, responses)
    }
}

/// Returns the changes that add ServiceEntries of one host each, `<name>.example.com`.
pub(super) fn entries(names: &[String], resolution: &str) -> Batch {
    let entry = |name: &String| {
        format!(
            "{{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {{name: {name}}}, spec: {{hosts: \
             [{name}.example.com], resolution: {resolution}, ports: [{{number: 80, name: http, protocol: HTTP}}]}}}}"
        )
    };
    let text = names.iter().map(entry).collect::<Vec<_>>().join("\n---\n");
    let rows = fixture::folder(&Installation::default(), &[("config.yaml", &text)]);
    rows.into_iter().map(Change::Upsert).collect()
}

#[tokio::test]
async fn a_removal_that_a_push_does_not_list_is_pending_until_it_is_answered() {
    let fixture = Fixture::new();
    // One more than a push lists.
    let names: Vec<String> = (0..65).map(|number| format!("e{number:02}")).collect();
    let added = entries(&names, "DNS");
    let removals = added.iter().filter_map(|change| match change {
        Change::Upsert(row) if row.kind() == Kind::ServiceEntry => Some(Change::Remove(row.kind(), row.key().clone())),
        _ => None,
    });
    let removals: Batch = removals.collect();
    fixture.apply(added).await;
    let proxy = generate::fixture::client(NODE, &serde_json::json!({}));
    let mut subscription = fixture.push.groups.join(Arc::new(proxy));
    subscription.next().await.expect("a first configuration");
    fixture.apply(removals).await;
    let query = ObjectQuery {
        kinds: vec![Kind::ServiceEntry],
        namespace: "default".to_owned(),
        name: "e64".to_owned(),
        resource_version: None,
        proxy: String::new(),
        visible: None,
    };
    let report = fixture.distribution.ask(&query, Scope::Replica).await;
    assert_eq!((report.state, report.unanswered), (ObjectState::Pending, 1));
    let received = subscription.next().await.expect("the removals");
    let report = fixture.distribution.ask(&query, Scope::Replica).await;
    assert_eq!(report.state, ObjectState::Pending, "received, not answered");
    drop(received);
    let report = fixture.distribution.ask(&query, Scope::Replica).await;
    assert_eq!((report.state, report.unanswered), (ObjectState::Unknown, 0));
}
