//! Tests of clients that read objects of configuration: none keeps the permit of a first configuration from others.

use futures::{StreamExt, stream::BoxStream};
use prost_types::{Struct, Value, value::Kind};

use super::{
    slow_clients::{many_names, until_requests_are_free},
    *,
};
use crate::xds::config_objects::Resources;

const TYPE: &str = "networking.istio.io/v1/ServiceEntry";

/// The same objects of every type.
struct FakeObjects(Resources);

impl ConfigObjects for FakeObjects {
    fn permits(&self, _: &[SmolStr]) -> bool {
        true
    }

    fn list(&self, _: &str) -> Option<Resources> {
        Some(self.0.clone())
    }

    fn kind(&self, type_url: &str) -> Option<SmolStr> {
        Some(type_url.into())
    }

    fn changes(&self) -> BoxStream<'static, ()> {
        // As after the end of the push loop, which ends no stream.
        futures::stream::empty().boxed()
    }
}

/// Returns a server that sends one first configuration at a time, of this many objects.
fn fixture(objects: usize) -> Fixture {
    let mut options = ServerOptions::default();
    options.limits.first_configurations = 1;
    options.timeouts.first_configuration = Duration::from_millis(50);
    let fixture = Fixture::new(&options);
    let text = "x".repeat(10 << 10);
    let objects = (0..objects).map(|number| cluster(&format!("o{number:03}"), &text));
    fixture
        .server
        .set_config_objects(Arc::new(FakeObjects(objects.collect())));
    fixture
}

fn request(error: Option<&str>) -> DiscoveryRequest {
    let api = Value {
        kind: Some(Kind::StringValue("api".into())),
    };
    DiscoveryRequest {
        node: Some(Node {
            metadata: Some(Struct {
                fields: [("GENERATOR".to_owned(), api)].into(),
            }),
            ..node().expect("a node")
        }),
        type_url: TYPE.into(),
        error_detail: error.map(|message| rpc::Status {
            message: message.into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

async fn open(client: &mut Client, request: DiscoveryRequest) -> Sotw {
    let stream = Sotw::open(client).await.expect("an accepted stream");
    stream.requests.send(request).await.expect("an open stream");
    stream
}

#[tokio::test]
async fn a_stream_for_types_of_proxies_receives_their_configuration() {
    let fixture = fixture(1);
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let clusters = DiscoveryRequest {
        type_url: ResourceType::Cluster.url().into(),
        ..request(None)
    };
    let mut client = fixture.client().await;
    let mut stream = open(&mut client, clusters.clone()).await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    // Another stream has objects, and no configuration of proxies.
    let mut stream = open(&mut client, request(None)).await;
    assert_eq!(stream.response().await.type_url, TYPE);
    stream.requests.send(clusters).await.expect("an open stream");
    let gateways = DiscoveryRequest {
        type_url: "networking.istio.io/v1/Gateway".into(),
        ..request(None)
    };
    stream.requests.send(gateways.clone()).await.expect("an open stream");
    assert_eq!(stream.response().await.type_url, gateways.type_url);
}

#[tokio::test]
async fn a_first_request_without_answer_ends_a_first_configuration() {
    let fixture = fixture(1);
    let mut client = fixture.client().await;
    let _first = open(&mut client, request(Some("stale"))).await;
    fixture.until("pilot_xds", 1.0).await;
    let mut second = open(&mut client, request(None)).await;
    assert_eq!(second.response().await.resources.len(), 1);
}

#[tokio::test]
async fn a_slow_reader_of_objects_does_not_delay_others() {
    let fixture = fixture(200);
    let slow = Endpoint::from_static("http://istiod").initial_stream_window_size(65_535);
    let mut slow = fixture.client_with(slow).await;
    let mut unread = open(&mut slow, request(None)).await;
    fixture.until("pilot_xds", 1.0).await;
    let wide = Endpoint::from_static("http://istiod")
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(8 << 20);
    let mut fast = open(&mut fixture.client_with(wide).await, request(None)).await;
    assert_eq!(fast.response().await.resources.len(), 200);
    assert_eq!(unread.response().await.resources.len(), 200, "it can still catch up");
}

#[tokio::test]
async fn r20_unread_objects_hold_no_budget_of_requests() {
    let fixture = fixture(1);
    let large = DiscoveryRequest {
        resource_names: many_names(),
        ..request(None)
    };
    let size_bytes = prost::Message::encoded_len(&large);
    let blind = Endpoint::from_static("http://istiod").initial_stream_window_size(0);
    let _unread = open(&mut fixture.client_with(blind).await, large).await;
    fixture.until("pilot_xds_recv_max", size_bytes as f64).await;
    until_requests_are_free(&fixture).await;
}
