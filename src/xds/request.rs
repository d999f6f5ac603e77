//! The requests of a stream: gRPC messages of an HTTP body, decoded into the fields that the server uses.

mod buffer;
mod decode;
mod parts;

use std::{future::pending, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body::Frame;
use http_body_util::BodyExt;
use smol_str::SmolStr;
use tokio::{
    task::coop::consume_budget,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use self::{
    buffer::{Received, RequestBuffer},
    decode::DecodedFields,
    parts::{MAX_FIELDS, MAX_NODE_FIELDS, Parts},
};
use super::{
    admission::{Admission, Permit, Source},
    connection::Request,
    protocol::Protocol,
    share::Interners,
};
use crate::{generate::ResourceType, proto::envoy::config::core::v3::Node, rpc::UnauthenticatedConnection, task};

/// The number and the size of names of a type that is not served which are kept until the answer is written. A client
/// may never read it, and no budget bounds these names.
const MAX_UNSERVED_NAMES: usize = 4096;
const MAX_UNSERVED_BYTES: usize = 64 << 10;

/// A request with more bytes needs a permit from the budget for large requests. The node of an Envoy is smaller.
const SMALL_BYTES: usize = 24 << 10;
/// A request with more bytes is processed in turn with others, aside from the threads that serve streams. It may have
/// thousands of names.
const VERY_LARGE_BYTES: usize = 256 << 10;
/// The time limit for the arrival of a large request, including the wait for its permit.
const LARGE_REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The time after which a new client loses its permit for large requests, if it sends nothing or one of them waits.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);

/// The time for which data is read and discarded after a stream has ended.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);

/// A request with the fields that only the stream uses.
#[derive(Debug)]
pub(super) struct IncomingRequest {
    /// The node; Envoy may send it in the first request only, and later ones are not kept.
    pub(super) node: Option<Node>,
    /// The requested type.
    pub(super) type_url: String,
    /// Code of `error_detail`.
    pub(super) error_code: i32,
    /// The request itself.
    pub(super) content: RequestContent,
    /// Size of the message.
    pub(super) size_bytes: usize,
    /// The permit of a large request, held until it is answered.
    pub(super) permit: Option<Permit>,
    /// The turn of a very large request, held until its response is made.
    pub(super) turn: Option<Permit>,
}

/// The content of a request, by its type.
#[derive(Debug)]
pub(super) enum RequestContent {
    /// A request for configuration of a type that is served.
    Configuration(Request),
    /// A debug request for these names.
    Debug(Vec<SmolStr>),
    /// A request for a type that is not served.
    Unserved(UnservedRequest),
}

/// A request for a type that is not served.
#[derive(Debug)]
pub(super) struct UnservedRequest {
    /// The nonce of the response that it acknowledges.
    pub(super) nonce: SmolStr,
    /// `error_detail.message`, if it rejects a response. Agents report an unhealthy workload in it.
    pub(super) error: Option<String>,
    /// Its first names, some thousands at most.
    pub(super) names: Vec<String>,
    /// A hash of all its names.
    pub(super) names_hash: u64,
}

/// An error that ends the requests of a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestError {
    /// The message is too large.
    #[error("the request has {size_bytes} bytes; at most {limit_bytes} are accepted (ISTIO_GPRC_MAXRECVMSGSIZE)")]
    TooLarge {
        /// Its size.
        size_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The message has too many fields.
    #[error("the request has more than {MAX_FIELDS} fields")]
    TooMany,
    /// The node has too many fields.
    #[error("the node of the request has more than {MAX_NODE_FIELDS} fields")]
    TooManyOfNode,
    /// A large message did not arrive in time, or too many of these are arriving.
    #[error("the request is large and did not arrive within {LARGE_REQUEST_TIMEOUT:?}; try again")]
    Slow,
    /// A large message arrives slowly while others wait.
    #[error("the request is large and arrives slowly while others wait; try again")]
    Evicted,
    /// The message is compressed.
    #[error("compressed requests are not supported")]
    Compressed,
    /// The message is malformed.
    #[error("cannot decode the request: {0}")]
    Malformed(String),
    /// The transport failed.
    #[error("the stream was interrupted: {0}")]
    Broken(String),
}

impl RequestError {
    /// Returns true if the request cannot be read, whatever the load.
    pub(super) fn is_unreadable(&self) -> bool {
        matches!(self, Self::TooLarge { .. } | Self::Compressed | Self::Malformed(_))
    }
}

/// The limits of a stream's requests, and what it shares with other streams.
pub(super) struct RequestOptions {
    /// The maximum size of a request.
    pub(super) limit_bytes: usize,
    pub(super) admission: Arc<Admission>,
    /// The source of the requests, whose share of the budget they use.
    pub(super) source: Source,
    pub(super) interners: Arc<Interners>,
    pub(super) pre_auth: Option<Arc<UnauthenticatedConnection>>,
}

/// The requests of one stream.
pub(super) struct Requests<B> {
    protocol: Protocol,
    body: B,
    buffer: RequestBuffer,
    admission: Arc<Admission>,
    source: Source,
    interners: Arc<Interners>,
    /// The connection, whose consumed bytes are counted.
    pre_auth: Option<Arc<UnauthenticatedConnection>>,
    first_requests: FirstRequests,
    /// The large request that is arriving, if there is one.
    large: Option<LargeRequest>,
    /// A complete request that waits for its turn, which it may have given up.
    waiting: Option<(Received, Option<BoxFuture<'static, Permit>>)>,
    /// The bytes that have arrived last. While they are not consumed, the transport reads no more.
    arrived: Bytes,
    /// True if the node of the client is known; those of further requests are dropped.
    ignores_nodes: bool,
}

/// A large request that is arriving.
struct LargeRequest {
    /// `None` until it is granted.
    permit: Option<Permit>,
    deadline: Instant,
}

/// The first large requests of a client. Thousands of clients reconnect at once, and each announces what it holds in a
/// large request for each type. They send these in turn, so that a few hundred at a time use buffers of the HTTP/2
/// server.
enum FirstRequests {
    /// There was none, or nothing is waited for any more.
    Free,
    /// The client waits for its turn.
    Wait(BoxFuture<'static, Permit>),
    /// It sends them. The permit is not used, only held.
    Permitted { _permit: Permit },
}

impl<B> Requests<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    pub(super) fn new(protocol: Protocol, body: B, options: RequestOptions) -> Self {
        Self {
            protocol,
            body,
            buffer: RequestBuffer::new(options.limit_bytes),
            admission: options.admission,
            source: options.source,
            interners: options.interners,
            pre_auth: options.pre_auth,
            first_requests: FirstRequests::Free,
            large: None,
            waiting: None,
            arrived: Bytes::new(),
            ignores_nodes: false,
        }
    }

    /// Drops the nodes of further requests once they are decoded.
    pub(super) fn ignore_nodes(&mut self) {
        self.ignores_nodes = true;
    }

    /// Returns the next request; `None` when the client has closed its side. Cancel-safe.
    ///
    /// Boxed, since the task of a stream has room for each place that a request passes through.
    pub(super) async fn next(&mut self) -> Result<Option<Box<IncomingRequest>>, RequestError> {
        // A client that sends requests without a pause leaves its thread to others.
        consume_budget().await;
        loop {
            if let Some((received, turn)) = &mut self.waiting {
                let size_bytes = received.message.len();
                let turn = turn.get_or_insert_with(|| turn_of(&self.admission, &self.source, size_bytes));
                let turn = turn.await;
                if let Some((received, _)) = self.waiting.take() {
                    let decoded = task::aside(|| self.decode(received))?;
                    return Ok(Some(self.admitted(decoded, Some(turn))));
                }
            }
            if let Some(received) = self.buffer.next_message()? {
                if received.message.len() > VERY_LARGE_BYTES {
                    self.waiting = Some((received, None));
                    continue;
                }
                let decoded = self.decode(received)?;
                return Ok(Some(self.admitted(decoded, None)));
            }
            let is_large = self.await_large_permit().await?;
            if !self.arrived.is_empty() {
                self.consume();
                continue;
            }
            let frame = match &self.large {
                Some(LargeRequest {
                    permit: Some(permit),
                    deadline,
                }) if is_large => tokio::select! {
                    biased;
                    frame = timeout_at(*deadline, self.body.frame()) => frame.map_err(|_| RequestError::Slow)?,
                    () = permit.evicted() => {
                        // Others wait for the permit, and the client is still told why.
                        self.large = None;
                        self.buffer.clear();
                        return Err(RequestError::Evicted);
                    }
                },
                _ => self.frame().await,
            };
            match frame {
                None if self.buffer.is_empty() => {
                    // The stream may go on, but sends no more requests.
                    self.first_requests = FirstRequests::Free;
                    return Ok(None);
                }
                None => return Err(RequestError::Broken("in the middle of a message".into())),
                Some(Err(error)) => return Err(RequestError::Broken(error.to_string())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.arrived = data;
                    }
                }
            }
        }
    }

    /// Returns the next frame. The first large one of a connection waits for its turn. Cancel-safe.
    async fn frame(&mut self) -> Option<Result<Frame<Bytes>, B::Error>> {
        let Some(pre_auth) = &self.pre_auth else {
            return self.body.frame().await;
        };
        loop {
            match &mut self.first_requests {
                FirstRequests::Free => tokio::select! {
                    biased;
                    frame = self.body.frame() => return frame,
                    () = pre_auth.large_data_waits() => {
                        let (admission, source) = (self.admission.clone(), self.source.clone());
                        let turn = async move { admission.first_requests(&source).await };
                        self.first_requests = FirstRequests::Wait(Box::pin(turn));
                    }
                },
                FirstRequests::Wait(turn) => tokio::select! {
                    biased;
                    frame = self.body.frame() => return frame,
                    permit = turn => {
                        self.first_requests = FirstRequests::Permitted { _permit: permit };
                        pre_auth.allow_large_data();
                    }
                },
                FirstRequests::Permitted { .. } => match timeout(IDLE_TIMEOUT, self.body.frame()).await {
                    Ok(frame) => return frame,
                    Err(_) => self.first_requests = FirstRequests::Free,
                },
            }
        }
    }

    /// Runs work that waits until the client has read responses. Meanwhile, no request is read: a large one that has
    /// begun gives up its turn. The work ends with an error when the request is late, or if the client does not read
    /// within `read_timeout` and the request must make room for others.
    pub(super) async fn pause_for<E: From<RequestError>>(
        &mut self,
        read_timeout: Duration,
        work: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        if let Some((_, turn)) = &mut self.waiting {
            *turn = None;
        }
        let Some(large) = &self.large else {
            return work.await;
        };
        let (eviction, deadline) = (large.permit.as_ref().map(Permit::eviction), large.deadline);
        let evicted = async move {
            sleep(read_timeout).await;
            match eviction {
                Some(eviction) => eviction.cancelled().await,
                None => pending().await,
            }
        };
        let error = tokio::select! {
            biased;
            done = work => return done,
            () = sleep_until(deadline) => RequestError::Slow,
            () = evicted => RequestError::Evicted,
        };
        // Others wait for the permit, and the client is still told why.
        self.large = None;
        self.waiting = None;
        self.buffer.clear();
        Err(error.into())
    }

    /// Adds the permits of a request.
    fn admitted(&mut self, decoded: IncomingRequest, turn: Option<Permit>) -> Box<IncomingRequest> {
        let permit = self.large.take().and_then(|large| large.permit);
        if let RequestContent::Configuration(request) = &decoded.content
            && request.resource_type == ResourceType::Route
        {
            // Envoy requests these last.
            self.first_requests = FirstRequests::Free;
        }
        Box::new(IncomingRequest {
            permit,
            turn,
            ..decoded
        })
    }

    /// Moves the bytes that have arrived into the buffer.
    fn consume(&mut self) {
        let data = std::mem::take(&mut self.arrived);
        if let Some(pre_auth) = &self.pre_auth {
            pre_auth.record_consumed(data.len());
        }
        if let Some(permit) = self.large.as_ref().and_then(|large| large.permit.as_ref()) {
            permit.record_progress(data.len());
        }
        self.buffer.append(&data);
    }

    /// Discards the data that the client still sends on a stream that has ended. Before the read limit of a connection
    /// is lifted, data that is not consumed would block its other streams.
    pub(super) async fn discard(&mut self) {
        let Some(pre_auth) = self.pre_auth.as_ref().filter(|pre_auth| !pre_auth.is_read_unlimited()) else {
            return;
        };
        pre_auth.allow_large_data();
        self.first_requests = FirstRequests::Free;
        self.large = None;
        self.buffer.clear();
        pre_auth.record_consumed(std::mem::take(&mut self.arrived).len());
        let rest = async {
            while let Some(Ok(frame)) = self.body.frame().await {
                pre_auth.record_consumed(frame.data_ref().map_or(0, Bytes::len));
            }
        };
        // The connection of a client that sends for longer stays blocked.
        let _ = timeout(DISCARD_TIMEOUT, rest).await;
    }

    /// Waits for the permit of a large request. Returns false for a small one. If nothing of it can be a repetition,
    /// the permit precedes the second of its frames: thousands of reconnecting clients wait with a few KiB each.
    async fn await_large_permit(&mut self) -> Result<bool, RequestError> {
        let size_bytes = self.buffer.size_bytes_with(&self.arrived);
        let is_announced = size_bytes >= SMALL_BYTES && !self.buffer.may_repeat();
        if self.buffer.len() < SMALL_BYTES && !is_announced {
            return Ok(false);
        }
        let LargeRequest { permit, deadline } = self.large.get_or_insert_with(|| LargeRequest {
            permit: None,
            deadline: Instant::now() + LARGE_REQUEST_TIMEOUT,
        });
        if permit.is_none() {
            let turn = self.admission.request(&self.source, size_bytes);
            let mut turn = pin!(timeout_at(*deadline, turn));
            let granted = match timeout(IDLE_TIMEOUT, turn.as_mut()).await {
                Ok(granted) => granted,
                Err(_) => {
                    self.first_requests = FirstRequests::Free;
                    turn.await
                }
            };
            *permit = Some(granted.map_err(|_| RequestError::Slow)?);
            self.buffer.reserve(size_bytes);
        }
        Ok(true)
    }

    fn decode(&mut self, received: Received) -> Result<IncomingRequest, RequestError> {
        let Received { message, repeated } = received;
        let omitted = repeated.as_ref().map_or(0, |names| names.fields().len());
        let size_bytes = message.len() + omitted;
        let parts = Parts::of(self.protocol, &message)?;
        let names = match repeated {
            Some(names) => names,
            None => self.interners.names.read(parts.names).map_err(malformed)?,
        };
        let initial_versions = self.interners.initial_versions.read(&parts.initial_versions);
        let initial_versions = initial_versions.map_err(|error| RequestError::Malformed(error.to_string()))?;
        self.buffer.remember(&names);
        let decoded = DecodedFields {
            names,
            initial_versions,
        };
        let mut request = IncomingRequest::decode(self.protocol, decoded, parts.rest, size_bytes)?;
        if self.ignores_nodes {
            request.node = None;
        }
        Ok(request)
    }
}

/// Waits for the turn of a very large request.
fn turn_of(admission: &Arc<Admission>, source: &Source, size_bytes: usize) -> BoxFuture<'static, Permit> {
    let (admission, source) = (admission.clone(), source.clone());
    Box::pin(async move { admission.processing(&source, size_bytes).await })
}

impl IncomingRequest {
    /// Gives its permits back. A client that does not read its answer must not delay the requests of others.
    pub(super) fn release(&mut self) {
        self.permit = None;
        self.turn = None;
    }
}

fn malformed(error: prost::DecodeError) -> RequestError {
    RequestError::Malformed(error.to_string())
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::{
        environment,
        proto::envoy::service::discovery::v3::DiscoveryRequest,
        xds::{admission::Limits, connection::SubscriptionChange},
    };

    const TYPE: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

    fn options() -> RequestOptions {
        let limits = Limits {
            first_configurations: 1,
            bytes_in_flight: 1 << 20,
            longest_wait: Duration::from_secs(10),
            streams_per_second: None,
        };
        RequestOptions {
            limit_bytes: 4 << 20,
            admission: Arc::new(Admission::new(limits, environment::now)),
            source: Source::Address(None),
            interners: Arc::default(),
            pre_auth: None,
        }
    }

    /// Returns the names, nonce and size of each request in these bytes, which arrive in parts of this size.
    fn decoded(bytes: &[u8], cut: usize) -> Vec<(Vec<SmolStr>, String, usize)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let frames = bytes
            .chunks(cut)
            .map(|part| Ok::<_, std::convert::Infallible>(Frame::data(Bytes::copy_from_slice(part))));
        let body = StreamBody::new(futures::stream::iter(frames.collect::<Vec<_>>()));
        let mut requests = Requests::new(Protocol::Sotw, body, options());
        let read = async {
            let mut all = Vec::new();
            // Keeps the lists alive, as a connection does.
            let mut lists = Vec::new();
            while let Some(incoming) = requests.next().await.expect("a valid request") {
                let RequestContent::Configuration(request) = incoming.content else {
                    panic!("a type that is served")
                };
                let SubscriptionChange::Names(names) = request.change else {
                    panic!("state of the world")
                };
                all.push((names.iter().collect(), request.nonce.to_string(), incoming.size_bytes));
                lists.push(names);
            }
            all
        };
        runtime.expect("a runtime").block_on(read)
    }

    fn message(names: &[String], nonce: &str) -> Vec<u8> {
        let request = DiscoveryRequest {
            version_info: "1".to_owned(),
            resource_names: names.to_vec(),
            type_url: TYPE.to_owned(),
            response_nonce: nonce.to_owned(),
            ..Default::default()
        };
        request.encode_to_vec()
    }

    fn framed(message: &[u8]) -> Bytes {
        crate::rpc::framing::framed(message).expect("a message within the size limit")
    }

    fn name(number: usize) -> String {
        format!("outbound|80||service-{number}.default.svc.cluster.local")
    }

    #[derive(Clone, Debug)]
    enum Step {
        Same,
        Other(usize),
        Longer(usize),
        Shorter(usize),
        /// One name in the middle.
        Changed(usize),
        /// More names after the other fields, which no known client sends.
        Split,
        Nothing,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => Just(Step::Same),
            1 => (0..3_usize).prop_map(Step::Other),
            1 => (1..9_usize).prop_map(Step::Longer),
            1 => (1..9_usize).prop_map(Step::Shorter),
            1 => (0..99_usize).prop_map(Step::Changed),
            1 => Just(Step::Split),
            1 => Just(Step::Nothing),
        ];
        proptest::collection::vec(step, 1..12)
    }

    proptest! {
        #[test]
        fn repeated_names_are_decoded_like_new_ones(steps in steps(), cut in 1..3000_usize) {
            let mut names: Vec<String> = (0..100).map(name).collect();
            let (mut bytes, mut expected) = (Vec::new(), Vec::new());
            for (number, step) in steps.iter().enumerate() {
                let nonce = number.to_string();
                match step {
                    Step::Same | Step::Split | Step::Nothing => {}
                    Step::Other(list) => names = (list * 1000..list * 1000 + 100).map(name).collect(),
                    Step::Longer(more) => names.extend((0..*more).map(|extra| name(5000 + number * 100 + extra))),
                    Step::Shorter(fewer) => names.truncate(names.len().saturating_sub(*fewer)),
                    Step::Changed(at) => {
                        if let Some(name) = names.get_mut(*at) {
                            name.replace_range(0..1, "O");
                        }
                    }
                }
                let message = match step {
                    Step::Split => [message(&names, &nonce), message(&[name(9999)], &nonce)].concat(),
                    Step::Nothing => message(&[], &nonce),
                    _ => message(&names, &nonce),
                };
                bytes.extend(framed(&message));
                expected.extend(decoded(&framed(&message), 1 << 20));
            }
            prop_assert_eq!(decoded(&bytes, cut), expected);
        }
    }

    #[tokio::test]
    async fn a_client_that_has_closed_its_side_gives_up_its_turn() {
        let options = options();
        let (admission, source) = (options.admission.clone(), options.source.clone());
        let mut requests = Requests::new(Protocol::Sotw, http_body_util::Empty::<Bytes>::new(), options);
        requests.first_requests = FirstRequests::Permitted {
            _permit: admission.first_requests(&source).await,
        };
        let _others = [
            admission.first_requests(&source).await,
            admission.first_requests(&source).await,
        ];
        let mut waiting = pin!(admission.first_requests(&source));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert!(matches!(requests.next().await, Ok(None)));
        assert!(futures::poll!(waiting.as_mut()).is_ready());
    }

    #[tokio::test]
    async fn r20_names_of_unserved_types_are_bounded() {
        let request = DiscoveryRequest {
            type_url: "type.googleapis.com/some.Thing".to_owned(),
            resource_names: (0..1000).map(|number| format!("{number:01000}")).collect(),
            ..Default::default()
        };
        let body = http_body_util::Full::new(framed(&request.encode_to_vec()));
        let mut requests = Requests::new(Protocol::Sotw, body, options());
        let incoming = requests.next().await.expect("a valid request").expect("a request");
        let RequestContent::Unserved(request) = incoming.content else {
            panic!("a type that is not served")
        };
        assert_eq!(request.names.len(), MAX_UNSERVED_BYTES / 1000);
    }

    #[test]
    fn r20_nodes_of_later_requests_are_not_kept() {
        let request = DiscoveryRequest {
            node: Some(Node::default()),
            type_url: TYPE.to_owned(),
            ..Default::default()
        };
        let bytes = framed(&request.encode_to_vec());
        let mut requests = Requests::new(Protocol::Sotw, http_body_util::Empty::<Bytes>::new(), options());
        for is_first in [true, false] {
            requests.buffer.append(&bytes);
            let received = requests
                .buffer
                .next_message()
                .expect("a valid request")
                .expect("a complete message");
            let decoded = requests.decode(received).expect("a valid request");
            assert_eq!(decoded.node.is_some(), is_first);
            requests.ignore_nodes();
        }
    }

    #[test]
    fn repeated_lists_are_not_stored() {
        let names: Vec<String> = (0..1000).map(name).collect();
        let mut requests = Requests::new(Protocol::Sotw, http_body_util::Empty::<Bytes>::new(), options());
        let first = framed(&message(&names, "1"));
        requests.buffer.append(&first);
        let received = requests
            .buffer
            .next_message()
            .expect("a valid request")
            .expect("a complete message");
        assert!(received.repeated.is_none());
        let first = requests.decode(received).expect("a valid request");
        let again = framed(&message(&names, "2"));
        let mut most = 0;
        for part in again.chunks(16 << 10) {
            requests.buffer.append(part);
            most = most.max(requests.buffer.len());
        }
        assert!(most < 1000, "{most} bytes of {}", again.len());
        let received = requests
            .buffer
            .next_message()
            .expect("a valid request")
            .expect("a complete message");
        let second = requests.decode(received).expect("a valid request");
        let [first, second] = [&first, &second].map(|incoming| match &incoming.content {
            RequestContent::Configuration(request) => &request.change,
            content => panic!("a request of a served type, not {content:?}"),
        });
        let (SubscriptionChange::Names(a), SubscriptionChange::Names(b)) = (first, second) else {
            panic!("state of the world");
        };
        assert!(Arc::ptr_eq(a, b));
    }
}
