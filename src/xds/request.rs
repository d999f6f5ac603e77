//! The requests of a stream: gRPC messages of an http body, decoded and reduced to what matters.

use std::{
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use prost::{
    Message,
    encoding::{self, DecodeContext},
};
use smol_str::SmolStr;
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    admission::{Admission, Share},
    claims::Claims,
    connection::{Protocol, Request, Wish},
    debug,
    names::{KnownNames, Names},
};
use crate::{
    generate::ResourceType,
    proto::{
        envoy::{
            config::core::v3::Node,
            service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
        },
        google::rpc,
    },
    rpc::Guest,
};

const PREFIX_LEN: usize = 5;
/// The field of names that are asked for: `resource_names`, and `resource_names_subscribe`.
const NAMES: u32 = 3;
/// The field of what an incremental client holds already, `initial_resource_versions`.
const CLAIMS: u32 = 5;
/// What is kept of the message of a NACK; Envoy's may name every resource of a response.
const ERROR_BYTES: usize = 8 << 10;

/// The most fields that a request may have: more than any that is served, and few enough that what they are decoded into
/// is not much larger than what came.
const MAX_FIELDS: usize = 250_000;

/// A request of more bytes than this takes its share of what may be held of requests that are on their way. It is more than an
/// Envoy says of itself.
const SMALL_BYTES: usize = 24 << 10;
/// How long a request may take that holds such a share, or waits for it.
const LARGE_PATIENCE: Duration = Duration::from_secs(20);

/// Fewer bytes of names do not tell that a list is said again.
const TELLING_BYTES: usize = 256;
/// Lists that may be said again: one for each type that is asked for by name.
const HEARD_LISTS: usize = 4;

/// How long is read what a client sends on a stream that has ended.
const DISCARDING: Duration = Duration::from_secs(1);

/// A request with what only the stream needs to know.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Who asks; Envoy may say so in the first request only.
    pub(super) node: Option<Node>,
    /// The type as it was asked for.
    pub(super) type_url: String,
    /// Code of `error_detail`.
    pub(super) error_code: i32,
    /// `error_detail.message` of a type that is not served; agents tell by it that their workload is not healthy.
    pub(super) complaint: Option<String>,
    /// The request; `None` if the type is not served.
    pub(super) request: Option<Request>,
    /// The names that a request for debug information has.
    pub(super) asked: Vec<SmolStr>,
    /// Size of the message.
    pub(super) size_bytes: usize,
    /// What a large one takes of what may be held of requests, for as long as it waits to be answered.
    pub(super) share: Option<Share>,
}

/// Why no further request can be read. None of these is retried on the same stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestError {
    /// The message is larger than is accepted.
    #[error("the request has {size_bytes} bytes, at most {limit_bytes} are accepted (ISTIO_GPRC_MAXRECVMSGSIZE)")]
    TooLarge {
        /// Its size.
        size_bytes: usize,
        /// What is accepted.
        limit_bytes: usize,
    },
    /// The message has more fields than any that is served.
    #[error("the request has more than {MAX_FIELDS} fields")]
    TooMany,
    /// A large message takes too long to come, or too many of these are on their way.
    #[error("the request did not come in {LARGE_PATIENCE:?}, which only small ones may take; try again")]
    Slow,
    /// The message is compressed.
    #[error("the request is compressed, which this server does not offer")]
    Compressed,
    /// The message is not what it should be.
    #[error("the request cannot be decoded: {0}")]
    Malformed(String),
    /// The transport failed.
    #[error("the stream broke off: {0}")]
    Broken(String),
}

/// Reads requests.
pub(super) struct Requests<B> {
    protocol: Protocol,
    body: B,
    /// What has come of the next request, but for what `repeated` stands for.
    buffer: BytesMut,
    /// What of the next request was said before on this stream, if that was looked for.
    repeated: Option<Repeated>,
    /// Lists of names that were asked for on this stream, if anybody else may have them too; the last comes last.
    heard: Vec<Weak<Names>>,
    limit_bytes: usize,
    admission: Arc<Admission>,
    known: Arc<KnownNames>,
    /// Told of what is read.
    guest: Option<Arc<Guest>>,
    /// The share of a large request that is on its way, and until when it may be held.
    share: Option<(Option<Share>, Instant)>,
}

impl<B> Requests<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    pub(super) fn new(
        protocol: Protocol,
        body: B,
        limit_bytes: usize,
        (admission, known): (Arc<Admission>, Arc<KnownNames>),
        guest: Option<Arc<Guest>>,
    ) -> Self {
        Self {
            protocol,
            body,
            buffer: BytesMut::new(),
            repeated: None,
            heard: Vec::new(),
            limit_bytes,
            admission,
            known,
            guest,
            share: None,
        }
    }

    /// The next request; `None` when the client has ended its side. Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<Option<Incoming>, RequestError> {
        loop {
            if let Some((message, repeated)) = self.message()? {
                let share = self.share.take().and_then(|(share, _)| share);
                let decoded = self.decode(message, repeated)?;
                return Ok(Some(Incoming { share, ..decoded }));
            }
            let frame = match self.large().await? {
                None => self.body.frame().await,
                Some(until) => timeout_at(until, self.body.frame())
                    .await
                    .map_err(|_| RequestError::Slow)?,
            };
            match frame {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(RequestError::Broken("in the middle of a message".into())),
                Some(Err(error)) => return Err(RequestError::Broken(error.to_string())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        if let Some(guest) = &self.guest {
                            guest.took(data.len());
                        }
                        self.append(&data);
                    }
                }
            }
        }
    }

    /// Reads what the client still sends on a stream that has ended, if that would be in the way of its other streams: of who was
    /// not served yet little is read that nobody takes.
    pub(super) async fn discard(&mut self) {
        let Some(guest) = self.guest.as_ref().filter(|guest| !guest.is_served()) else {
            return;
        };
        self.buffer = BytesMut::new();
        let rest = async {
            while let Some(Ok(frame)) = self.body.frame().await {
                guest.took(frame.data_ref().map_or(0, Bytes::len));
            }
        };
        // A client that goes on for longer stays where it is.
        let _ = timeout(DISCARDING, rest).await;
    }

    /// Waits for the share of a request that is not small; tells until when it has to be here.
    async fn large(&mut self) -> Result<Option<Instant>, RequestError> {
        if self.buffer.len() < SMALL_BYTES {
            return Ok(None);
        }
        let (share, until) = self
            .share
            .get_or_insert_with(|| (None, Instant::now() + LARGE_PATIENCE));
        if share.is_none() {
            let size_bytes = self.buffer.get(1..PREFIX_LEN).map_or(0, |mut size| size.get_u32());
            let turn = timeout_at(*until, self.admission.request(size_bytes as usize));
            *share = turn.await.map_err(|_| RequestError::Slow)?;
            // What may be held is made room for at once, lest it be copied as it grows.
            let missing = (PREFIX_LEN + size_bytes as usize).saturating_sub(self.buffer.len());
            self.buffer.reserve(missing.min(self.limit_bytes));
        }
        Ok(Some(*until))
    }

    /// Takes what has come. Clients repeat all their names with each ACK; as long as these are those of a list that was heard
    /// before, they are compared and not kept.
    fn append(&mut self, mut data: &[u8]) {
        let (missing, waiting) = (self.missing_bytes(), self.buffer.len());
        if let Some(repeated) = &mut self.repeated
            && waiting == PREFIX_LEN + repeated.at
        {
            let rest = &repeated.names.fields()[repeated.len..];
            let len = rest.len().min(data.len()).min(missing);
            if rest[..len] == data[..len] {
                repeated.len += len;
                data = &data[len..];
            } else {
                self.unfold();
            }
        }
        self.buffer.extend_from_slice(data);
        if waiting == 0 {
            self.look_for_repetition();
        }
    }

    /// How much of the next message has not come, as far as that is known.
    fn missing_bytes(&self) -> usize {
        let here = self.buffer.len() + self.repeated.as_ref().map_or(0, |repeated| repeated.len);
        let size = self
            .buffer
            .get(1..PREFIX_LEN)
            .map_or(0, |mut size| size.get_u32() as usize);
        (PREFIX_LEN + size).saturating_sub(here)
    }

    /// Finds out whether the names of the message that has begun to come may be a list that was heard before.
    fn look_for_repetition(&mut self) {
        let Some((mut size, start)) = self
            .buffer
            .get(1..)
            .and_then(|rest| rest.split_at_checked(PREFIX_LEN - 1))
        else {
            return;
        };
        // What follows may be of the next message.
        let start = &start[..start.len().min(size.get_u32() as usize)];
        if start.len() < TELLING_BYTES {
            return;
        }
        let Some(at) = names_at(start) else { return };
        self.heard.retain(|names| names.strong_count() > 0);
        let heard = self.heard.iter().rev().filter_map(Weak::upgrade);
        let begins = |names: &Arc<Names>| {
            let fields = names.fields();
            let len = fields.len().min(start.len() - at);
            len >= TELLING_BYTES && fields[..len] == start[at..at + len]
        };
        let Some(names) = heard.into_iter().find(begins) else {
            return;
        };
        let len = names.fields().len().min(start.len() - at);
        let rest = self.buffer.split_off(PREFIX_LEN + at + len);
        self.buffer.truncate(PREFIX_LEN + at);
        self.buffer.unsplit(rest);
        self.repeated = Some(Repeated { names, at, len });
    }

    /// Puts what was found to be repeated where it would be otherwise.
    fn unfold(&mut self) {
        let Some(repeated) = self.repeated.take() else { return };
        let rest = self.buffer.split_off(PREFIX_LEN + repeated.at);
        self.buffer.extend_from_slice(&repeated.names.fields()[..repeated.len]);
        self.buffer.extend_from_slice(&rest);
    }

    /// The next message, if all of it is here: but for the names which it repeats.
    fn message(&mut self) -> Result<Option<Received>, RequestError> {
        let Some(mut prefix) = self.buffer.get(..PREFIX_LEN) else {
            return Ok(None);
        };
        if prefix.get_u8() != 0 {
            return Err(RequestError::Compressed);
        }
        let size_bytes = prefix.get_u32() as usize;
        if size_bytes > self.limit_bytes {
            return Err(RequestError::TooLarge {
                size_bytes,
                limit_bytes: self.limit_bytes,
            });
        }
        if self.missing_bytes() > 0 {
            return Ok(None);
        }
        let mut repeated = self.repeated.take();
        if let Some(found) = &repeated {
            let rest = &self.buffer[PREFIX_LEN + found.at..PREFIX_LEN + size_bytes - found.len];
            // Others that follow belong to the list.
            if found.len < found.names.fields().len() || names_at(rest).is_some() {
                self.repeated = repeated.take();
                self.unfold();
            }
        }
        self.buffer.advance(PREFIX_LEN);
        let omitted = repeated.as_ref().map_or(0, |repeated| repeated.len);
        let message = self.buffer.split_to(size_bytes - omitted).freeze();
        if self.buffer.is_empty() {
            // Else the stream would keep the memory of its largest request.
            self.buffer = BytesMut::new();
        } else {
            self.look_for_repetition();
        }
        Ok(Some((message, repeated.map(|repeated| repeated.names))))
    }

    fn decode(&mut self, message: Bytes, repeated: Option<Arc<Names>>) -> Result<Incoming, RequestError> {
        let omitted = repeated.as_ref().map_or(0, |names| names.fields().len());
        let size_bytes = message.len() + omitted;
        let malformed = |error: prost::DecodeError| RequestError::Malformed(error.to_string());
        let split = split(self.protocol, &message).map_err(malformed)?;
        let parts = split.ok_or(RequestError::TooMany)?;
        let names = match repeated {
            Some(names) => names,
            None => self.known.read(parts.names).map_err(malformed)?,
        };
        let claims = Claims::read(parts.claims).map_err(malformed)?;
        if !names.fields().is_empty() {
            self.heard.retain(|heard| heard.as_ptr() != Arc::as_ptr(&names));
            self.heard.push(Arc::downgrade(&names));
            let more = self.heard.len().saturating_sub(HEARD_LISTS);
            self.heard.drain(..more);
        }
        Incoming::decode(self.protocol, (names, claims), parts.rest, size_bytes)
    }
}

/// A message without the names that it repeats, and these.
type Received = (Bytes, Option<Arc<Names>>);

/// Names of a message that were said before on its stream.
struct Repeated {
    names: Arc<Names>,
    /// Where in the message they stand.
    at: usize,
    /// How many bytes of them have come.
    len: usize,
}

/// Where in a message names begin, as far as it is here.
fn names_at(message: &[u8]) -> Option<usize> {
    let mut left = message;
    while !left.is_empty() {
        let at = message.len() - left.len();
        let (tag, wire_type) = encoding::decode_key(&mut left).ok()?;
        if tag == NAMES {
            return Some(at);
        }
        encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default()).ok()?;
    }
    None
}

impl Incoming {
    /// Reads a request without the names that it asks for and what it claims.
    fn decode(
        protocol: Protocol,
        (names, claims): (Arc<Names>, Claims),
        rest: Bytes,
        size_bytes: usize,
    ) -> Result<Self, RequestError> {
        let malformed = |error: prost::DecodeError| RequestError::Malformed(error.to_string());
        let (node, type_url, nonce, error, wish) = match protocol {
            Protocol::Sotw => {
                let request = DiscoveryRequest::decode(rest).map_err(malformed)?;
                let (nonce, error) = (request.response_nonce, request.error_detail);
                (request.node, request.type_url, nonce, error, Wish::Names(names))
            }
            Protocol::Delta => {
                let request = DeltaDiscoveryRequest::decode(rest).map_err(malformed)?;
                let unsubscribe = request.resource_names_unsubscribe.into_iter();
                let wish = Wish::Change {
                    subscribe: names,
                    unsubscribe: unsubscribe.map(SmolStr::from).collect(),
                    claims,
                };
                let (nonce, error) = (request.response_nonce, request.error_detail);
                (request.node, request.type_url, nonce, error, wish)
            }
        };
        let error_code = error.as_ref().map_or(0, |status| status.code);
        let mut error = error.map(shortened);
        let asked = match &wish {
            Wish::Names(names) | Wish::Change { subscribe: names, .. } if debug::is_debug(&type_url) => {
                names.iter().take(debug::MAX_NAMES).collect()
            }
            _ => Vec::new(),
        };
        let request = ResourceType::of_url(&type_url).map(|resource_type| Request {
            resource_type,
            nonce: nonce.into(),
            error: error.take(),
            wish,
        });
        Ok(Self {
            node,
            type_url,
            error_code,
            complaint: error,
            request,
            asked,
            size_bytes,
            share: None,
        })
    }
}

/// A request in parts, each with the tags of its fields.
struct Parts {
    /// The names that a request of either protocol asks for.
    names: Bytes,
    /// What an incremental one claims to hold.
    claims: Bytes,
    rest: Bytes,
}

/// Takes a request apart; nothing if it has too many fields, not counting those inside of fields.
fn split(protocol: Protocol, message: &Bytes) -> Result<Option<Parts>, prost::DecodeError> {
    let mut left: &[u8] = message;
    let (mut names, mut claims, mut rest) = (Pieces::default(), Pieces::default(), Pieces::default());
    for _ in 0..=MAX_FIELDS {
        if left.is_empty() {
            return Ok(Some(Parts {
                names: names.joined(message),
                claims: claims.joined(message),
                rest: rest.joined(message),
            }));
        }
        let start = message.len() - left.len();
        let (tag, wire_type) = encoding::decode_key(&mut left)?;
        encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default())?;
        let pieces = match (tag, protocol) {
            (NAMES, _) => &mut names,
            (CLAIMS, Protocol::Delta) => &mut claims,
            _ => &mut rest,
        };
        pieces.add(start..message.len() - left.len());
    }
    Ok(None)
}

/// Pieces of a message, in order; neighbours are one piece.
#[derive(Default)]
struct Pieces(Vec<Range<usize>>);

impl Pieces {
    fn add(&mut self, piece: Range<usize>) {
        match self.0.last_mut() {
            Some(last) if last.end == piece.start => last.end = piece.end,
            _ => self.0.push(piece),
        }
    }

    /// The pieces end to end; a single one is not copied.
    fn joined(self, message: &Bytes) -> Bytes {
        match self.0.as_slice() {
            [] => Bytes::new(),
            [only] => message.slice(only.clone()),
            several => {
                let pieces = several.iter().map(|piece| &message[piece.clone()]);
                pieces.collect::<Vec<_>>().concat().into()
            }
        }
    }
}

fn shortened(status: rpc::Status) -> String {
    let mut message = status.message;
    if message.len() > ERROR_BYTES {
        let end = (0..=ERROR_BYTES).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or_default());
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use proptest::prelude::*;

    use super::*;
    use crate::{environment, xds::admission::Limits};

    const TYPE: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

    fn admission() -> Arc<Admission> {
        let limits = Limits {
            first_configurations: 1,
            bytes_in_flight: 1 << 20,
            longest_wait: Duration::from_secs(10),
            streams_per_second: None,
        };
        Arc::new(Admission::new(limits, environment::now))
    }

    /// What a stream of these bytes says, cut like this: the names of each request, its nonce and its size.
    fn heard(bytes: &[u8], cut: usize) -> Vec<(Vec<SmolStr>, String, usize)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let frames = bytes
            .chunks(cut)
            .map(|part| Ok::<_, std::convert::Infallible>(Frame::data(Bytes::copy_from_slice(part))));
        let body = StreamBody::new(futures::stream::iter(frames.collect::<Vec<_>>()));
        let mut requests = Requests::new(Protocol::Sotw, body, 4 << 20, (admission(), Arc::default()), None);
        let read = async {
            let mut all = Vec::new();
            // As a connection does, which the lists live by.
            let mut asked = Vec::new();
            while let Some(incoming) = requests.next().await.expect("well-formed") {
                let request = incoming.request.expect("a type that is served");
                let Wish::Names(names) = request.wish else {
                    panic!("state of the world")
                };
                all.push((names.iter().collect(), request.nonce.to_string(), incoming.size_bytes));
                asked.push(names);
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

    fn framed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
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
        /// More names behind the other fields, as nobody sends them.
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
        fn what_is_said_again_is_heard_as_if_it_was_new(steps in steps(), cut in 1..3000_usize) {
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
                expected.extend(heard(&framed(&message), 1 << 20));
            }
            prop_assert_eq!(heard(&bytes, cut), expected);
        }
    }

    #[test]
    fn lists_that_are_said_again_are_not_held_twice() {
        let names: Vec<String> = (0..1000).map(name).collect();
        let known = Arc::default();
        let mut requests = Requests::new(
            Protocol::Sotw,
            http_body_util::Empty::<Bytes>::new(),
            4 << 20,
            (admission(), known),
            None,
        );
        let first = framed(&message(&names, "1"));
        requests.append(&first);
        let (whole, repeated) = requests.message().expect("well-formed").expect("complete");
        assert!(repeated.is_none());
        let first = requests
            .decode(whole, None)
            .expect("well-formed")
            .request
            .expect("served");
        let again = framed(&message(&names, "2"));
        let mut most = 0;
        for part in again.chunks(16 << 10) {
            requests.append(part);
            most = most.max(requests.buffer.len());
        }
        assert!(most < 1000, "{most} bytes of {}", again.len());
        let (rest, repeated) = requests.message().expect("well-formed").expect("complete");
        let second = requests
            .decode(rest, repeated)
            .expect("well-formed")
            .request
            .expect("served");
        let (Wish::Names(a), Wish::Names(b)) = (&first.wish, &second.wish) else {
            panic!("state of the world");
        };
        assert!(Arc::ptr_eq(a, b));
    }
}
