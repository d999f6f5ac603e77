//! Tests of what clients that wait, or do not read, hold up for themselves and for others.

use std::sync::atomic::AtomicUsize;

use futures::{StreamExt, future::BoxFuture, stream};
use http_body_util::BodyExt;

use super::*;
use crate::xds::debug::{DebugError, DebugRequest, DebugResponse, SYNC_STATUS};

#[tokio::test]
async fn a_slow_reader_does_not_delay_others() {
    let mut options = ServerOptions::default();
    options.limits.first_configurations = 1;
    options.limits.bytes_in_flight = 1 << 20;
    options.timeouts.permit = Duration::from_millis(20);
    options.timeouts.write = Duration::from_millis(400);
    let fixture = Fixture::new(&options);
    let text = "x".repeat(10 << 10);
    let names: Vec<SmolStr> = (0..200).map(|number| format_smolstr!("r{number:03}")).collect();
    let content: Vec<_> = names
        .iter()
        .map(|name| (ResourceType::Cluster, name.as_str(), text.as_str()))
        .collect();
    fixture.publish(1, &content);
    let slow = Endpoint::from_static("http://istiod").initial_stream_window_size(65_535);
    let mut slow = Sotw::open(&mut fixture.client_with(slow).await)
        .await
        .expect("an accepted stream");
    slow.request(ResourceType::Cluster, &[], "").await;
    let wide = Endpoint::from_static("http://istiod")
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(8 << 20);
    let mut fast = Sotw::open(&mut fixture.client_with(wide).await)
        .await
        .expect("an accepted stream");
    fast.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(fast.response().await.resources.len(), 200);
    fixture.until("pilot_xds_write_timeout", 1.0).await;
    assert_eq!(slow.response().await.resources.len(), 200, "it can still catch up");
}

/// A gateway that ends the TLS of many proxies forwards their streams over one connection.
#[tokio::test]
async fn a_slow_reader_does_not_delay_streams_of_its_connection() {
    let mut options = ServerOptions::default();
    options.timeouts.write = Duration::from_millis(100);
    let fixture = Fixture::new(&options);
    let text = "x".repeat(1 << 20);
    let content = [
        (ResourceType::Cluster, "a", text.as_str()),
        (ResourceType::Listener, "l", "1"),
    ];
    fixture.publish(1, &content);
    let gateway = Endpoint::from_static("http://istiod")
        .initial_stream_window_size(65_535)
        .initial_connection_window_size(8 << 20);
    let peer = Peer {
        is_tls: true,
        ..local()
    };
    let mut client = fixture.client_of(gateway, peer).await;
    let slow = Sotw::open(&mut client).await.expect("an accepted stream");
    slow.request(ResourceType::Cluster, &[], "").await;
    fixture.until("pilot_xds_write_timeout", 1.0).await;
    // More than the window of a stream.
    let names = many_names();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    slow.request(ResourceType::Endpoint, &names, "").await;
    let mut other = Sotw::open(&mut client).await.expect("an accepted stream");
    other.request(ResourceType::Listener, &[], "").await;
    let listeners = tokio::time::timeout(Duration::from_secs(20), other.response()).await;
    assert_eq!(texts(&listeners.expect("a configuration")), ["1"]);
}

/// A proxy answers endpoints with all of their names, while the rest of its first configuration is written. The frames
/// that say that it has read come behind this request.
#[tokio::test]
async fn requests_do_not_hold_up_a_first_configuration() {
    let fixture = Fixture::new(&ServerOptions::default());
    let narrow = Endpoint::from_static("http://istiod")
        .initial_stream_window_size(65_535)
        .initial_connection_window_size(65_535);
    let mut stream = Sotw::open(&mut fixture.client_with(narrow).await)
        .await
        .expect("an accepted stream");
    let names = many_names();
    let endpoints = DiscoveryRequest {
        node: node(),
        type_url: ResourceType::Endpoint.url().into(),
        resource_names: names[..50].to_vec(),
        ..Default::default()
    };
    let size_bytes = prost::Message::encoded_len(&endpoints);
    stream.request(ResourceType::Cluster, &[], "").await;
    stream.request(ResourceType::Listener, &[], "").await;
    stream.requests.send(endpoints).await.expect("an open stream");
    fixture.until("pilot_xds_recv_max", size_bytes as f64).await;
    let text = "x".repeat(10 << 10);
    let listeners: Vec<String> = (0..200).map(|number| format!("l{number}")).collect();
    let listeners = listeners
        .iter()
        .map(|name| (ResourceType::Listener, name.as_str(), text.as_str()));
    let others = [
        (ResourceType::Cluster, "c", ""),
        (ResourceType::Endpoint, names[0].as_str(), ""),
    ];
    let content: Vec<_> = listeners.chain(others).collect();
    fixture.publish(1, &content);
    assert_eq!(stream.response().await.type_url, ResourceType::Cluster.url());
    let response = stream.response().await;
    assert_eq!(response.type_url, ResourceType::Endpoint.url());
    let names: Vec<&str> = names[..500].iter().map(String::as_str).collect();
    stream.request(ResourceType::Endpoint, &names, &response.nonce).await;
    let listeners = tokio::time::timeout(Duration::from_secs(20), stream.response()).await;
    assert_eq!(listeners.expect("the rest of the configuration").resources.len(), 200);
}

/// A client that sends requests without a pause is sent its configuration all the same, and keeps no permit longer than
/// others.
#[tokio::test]
async fn r20_requests_without_a_pause_hold_up_nothing() {
    const REQUESTS: usize = 5000;
    let fixture = Fixture::new(&ServerOptions::default());
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let read = Arc::new(AtomicUsize::new(0));
    let counter = read.clone();
    let requests = stream::iter(0..REQUESTS).map(move |number| {
        counter.store(number + 1, Ordering::Relaxed);
        let nonce = if number == 0 { "" } else { "stale" };
        Ok::<_, Infallible>(Frame::data(framed(&clusters(nonce))))
    });
    let mut response = call(&fixture, requests.chain(stream::pending())).await;
    let configuration = tokio::time::timeout(Duration::from_secs(20), response.body_mut().frame()).await;
    assert!(configuration.is_ok_and(|frame| frame.is_some()));
    let read = read.load(Ordering::Relaxed);
    assert!(read < REQUESTS, "all requests are read before");
}

/// Calls the server with these DATA frames as the body of a request.
async fn call<S>(fixture: &Fixture, frames: S) -> Response<Body>
where
    S: futures::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + Unpin + 'static,
{
    let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
    let request = Request::post(path).body(http_body_util::StreamBody::new(frames));
    fixture.server.call(request.expect("a request")).await
}

fn clusters(nonce: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: node(),
        type_url: ResourceType::Cluster.url().into(),
        response_nonce: nonce.into(),
        ..Default::default()
    }
}

/// Returns a request as a gRPC message.
fn framed(request: &DiscoveryRequest) -> Bytes {
    let message = prost::Message::encode_to_vec(request);
    crate::rpc::framing::framed(&message).expect("a message within the size limit")
}

/// Returns names of more than 256 KiB together.
pub(super) fn many_names() -> Vec<String> {
    (0..3000).map(|number| format!("{number:0100}")).collect()
}

/// Waits until clients use nothing of the budgets for requests.
pub(super) async fn until_requests_are_free(fixture: &Fixture) {
    let (admission, source) = (&fixture.server.shared.admission, Source::Address(None));
    // As much as clients without authentication may use.
    let all = async {
        admission.request(&source, usize::MAX).await;
        admission.processing(&source, usize::MAX).await;
    };
    let free = tokio::time::timeout(Duration::from_secs(20), all).await;
    assert!(free.is_ok(), "a client holds a budget of requests");
}

/// Opens the stream of a client that reads nothing.
async fn unread(fixture: &Fixture) -> Sotw {
    let blind = Endpoint::from_static("http://istiod").initial_stream_window_size(0);
    let stream = Sotw::open(&mut fixture.client_with(blind).await).await;
    stream.expect("an accepted stream")
}

/// Returns a request for a type that is not served.
fn unserved(type_url: &str, resource_names: Vec<String>) -> DiscoveryRequest {
    DiscoveryRequest {
        node: node(),
        type_url: format!("type.googleapis.com/{type_url}"),
        resource_names,
        ..Default::default()
    }
}

#[tokio::test]
async fn r20_unread_answers_hold_no_budget_of_requests() {
    let fixture = Fixture::new(&ServerOptions::default());
    let stream = unread(&fixture).await;
    let request = unserved("a", many_names());
    let size_bytes = prost::Message::encoded_len(&request);
    stream.requests.send(request).await.expect("an open stream");
    fixture.until("pilot_xds_recv_max", size_bytes as f64).await;
    until_requests_are_free(&fixture).await;
}

#[tokio::test]
async fn r20_unread_answers_hold_no_first_configuration() {
    let mut options = ServerOptions::default();
    options.limits.longest_wait = Duration::from_hours(1);
    options.limits.first_configurations = 1;
    options.timeouts.first_configuration = Duration::from_hours(1);
    let fixture = Fixture::new(&options);
    let stream = unread(&fixture).await;
    for type_url in ["a", "b", "c"] {
        let request = unserved(type_url, Vec::new());
        stream.requests.send(request).await.expect("an open stream");
    }
    fixture.until("pilot_xds", 1.0).await;
    let other = Sotw::open(&mut fixture.client().await).await;
    let other = other.expect("an accepted stream");
    other.request(ResourceType::Cluster, &[], "").await;
    fixture.until("pilot_xds", 2.0).await;
}

/// Answers debug requests at once, and tells that it was asked.
struct Status(mpsc::Sender<()>);

impl DebugHandler for Status {
    fn answer(&self, _: DebugRequest) -> BoxFuture<'static, Result<DebugResponse, DebugError>> {
        self.0.try_send(()).expect("few requests");
        std::future::ready(Ok(DebugResponse::default())).boxed()
    }
}

/// Sets a handler of debug requests. Returns a receiver of what it was asked.
fn with_debug_handler(fixture: &Fixture) -> mpsc::Receiver<()> {
    let (asked, questions) = mpsc::channel(4);
    fixture.server.set_debug_handler(Arc::new(Status(asked)));
    questions
}

/// Sends a debug request.
async fn ask(stream: &Sotw) {
    let request = DiscoveryRequest {
        node: node(),
        type_url: SYNC_STATUS.into(),
        ..Default::default()
    };
    stream.requests.send(request).await.expect("an open stream");
}

/// Clients whose subscriptions take too much memory are closed in the same way.
#[tokio::test]
async fn r20_clients_that_do_not_read_debug_answers_can_be_closed() {
    let fixture = Fixture::new(&ServerOptions::default());
    let mut questions = with_debug_handler(&fixture);
    let stream = unread(&fixture).await;
    stream.request(ResourceType::Cluster, &[], "").await;
    fixture.until("pilot_xds", 1.0).await;
    ask(&stream).await;
    questions.recv().await.expect("a handler");
    fixture.server.registry().connections()[0].close();
    fixture.until("pilot_xds", 0.0).await;
}

/// Returns the number of debug requests that may be answered besides the present ones.
fn free_debug_answers(fixture: &Fixture) -> usize {
    let (admission, source) = (&fixture.server.shared.admission, Source::Address(None));
    let permits: Vec<_> = std::iter::from_fn(|| admission.debug_answer(&source).now_or_never()).collect();
    permits.len()
}

#[tokio::test]
async fn r20_unread_debug_answers_are_bounded() {
    let unread_within = async |limit: Duration| {
        let mut options = ServerOptions::default();
        options.timeouts.debug_answer = limit;
        let fixture = Fixture::new(&options);
        let mut questions = with_debug_handler(&fixture);
        let stream = unread(&fixture).await;
        ask(&stream).await;
        questions.recv().await.expect("a handler");
        (fixture, stream)
    };
    let (held, _stream) = unread_within(Duration::from_hours(1)).await;
    let (ended, _other) = unread_within(Duration::ZERO).await;
    ended.until("istiod_limited_streams_total", 1.0).await;
    assert_eq!(free_debug_answers(&held) + 1, free_debug_answers(&ended));
}

/// A client begins a large request and does not read its configuration.
#[tokio::test]
async fn r20_begun_requests_of_clients_that_do_not_read_make_room() {
    let mut options = ServerOptions::default();
    options.timeouts.permit = Duration::from_millis(20);
    let fixture = Fixture::new(&options);
    let (frames, receiver) = mpsc::channel::<Result<Frame<Bytes>, Infallible>>(4);
    let unread = call(&fixture, ReceiverStream::new(receiver)).await;
    let begun = framed(&unserved("a", many_names())).slice(..100 << 10);
    for bytes in [framed(&clusters("")), begun] {
        frames.send(Ok(Frame::data(bytes))).await.expect("an open stream");
    }
    let (admission, source) = (&fixture.server.shared.admission, Source::Address(None));
    while admission.request(&source, usize::MAX).now_or_never().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    until_requests_are_free(&fixture).await;
    drop((unread, frames));
}

#[tokio::test]
async fn r20_clients_that_wait_for_admission_hold_no_turn() {
    let mut options = ServerOptions::default();
    options.limits.longest_wait = Duration::from_hours(1);
    options.timeouts.first_configuration = Duration::from_hours(1);
    options.limits.first_configurations = 1;
    let fixture = Fixture::new(&options);
    let first = Sotw::open(&mut fixture.client().await).await;
    let first = first.expect("an accepted stream");
    first.request(ResourceType::Cluster, &[], "").await;
    fixture.until("pilot_xds", 1.0).await;
    let connections = fixture.connections();
    let endpoint = Endpoint::from_static("http://istiod");
    let mut client = fixture.client_over(endpoint, local(), connections.clone()).await;
    let second = Sotw::open(&mut client).await.expect("an accepted stream");
    let names = many_names();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    second.request(ResourceType::Endpoint, &names, "").await;
    let (admission, source) = (&fixture.server.shared.admission, Source::Address(None));
    let arrived = async {
        while !connections.limiter().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        admission.processing(&source, usize::MAX).await
    };
    let turn = tokio::time::timeout(Duration::from_secs(20), arrived).await;
    assert!(turn.is_ok(), "the second client holds a turn");
}
