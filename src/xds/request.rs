//! The requests of a stream: gRPC messages of an http body, decoded and reduced to what matters.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use prost::{
    Message,
    encoding::{self, DecodeContext},
};
use smol_str::SmolStr;
use tokio::time::{Instant, timeout_at};

use super::{
    admission::{Admission, Share},
    connection::{Protocol, Request, Wish},
    debug,
    names::KnownNames,
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
};

const PREFIX_LEN: usize = 5;
/// The field of names that are asked for: `resource_names`, and `resource_names_subscribe`.
const NAMES: u32 = 3;
/// What is kept of the message of a NACK; Envoy's may name every resource of a response.
const ERROR_BYTES: usize = 8 << 10;

/// The most fields that a request may have: more than any that is served, and few enough that what they are decoded into
/// is not much larger than what came.
const MAX_FIELDS: usize = 250_000;

/// A request of more bytes than this takes its share of what may be held of requests that are on their way. It is more than an
/// Envoy says of itself.
const SMALL_BYTES: usize = 48 << 10;
/// How long a request may take that holds such a share, or waits for it.
const LARGE_PATIENCE: Duration = Duration::from_secs(20);

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
    buffer: BytesMut,
    limit_bytes: usize,
    admission: Arc<Admission>,
    known: Arc<KnownNames>,
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
    ) -> Self {
        Self {
            protocol,
            body,
            buffer: BytesMut::new(),
            limit_bytes,
            admission,
            known,
            share: None,
        }
    }

    /// The next request; `None` when the client has ended its side. Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<Option<Incoming>, RequestError> {
        loop {
            if let Some(message) = self.message()? {
                let decoded = decode(self.protocol, message, &self.known);
                self.share = None;
                return decoded.map(Some);
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
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
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

    fn message(&mut self) -> Result<Option<Bytes>, RequestError> {
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
        if self.buffer.len() < PREFIX_LEN + size_bytes {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_LEN);
        let message = self.buffer.split_to(size_bytes).freeze();
        if self.buffer.is_empty() {
            // Else the stream would keep the memory of its largest request.
            self.buffer = BytesMut::new();
        }
        Ok(Some(message))
    }
}

fn decode(protocol: Protocol, message: Bytes, known: &KnownNames) -> Result<Incoming, RequestError> {
    let size_bytes = message.len();
    let malformed = |error: prost::DecodeError| RequestError::Malformed(error.to_string());
    let (names, rest) = split(&message).map_err(malformed)?.ok_or(RequestError::TooMany)?;
    let names = known.read(names).map_err(malformed)?;
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
                initial: request
                    .initial_resource_versions
                    .into_iter()
                    .map(|(name, version)| (name.into(), version))
                    .collect(),
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
    Ok(Incoming {
        node,
        type_url,
        error_code,
        complaint: error,
        request,
        asked,
        size_bytes,
    })
}

/// The names that a request of either protocol asks for, and the request without them; nothing if it has too many fields,
/// not counting those inside of fields.
fn split(message: &Bytes) -> Result<Option<(Bytes, Bytes)>, prost::DecodeError> {
    let mut left: &[u8] = message;
    let (mut names, mut others) = (Pieces::default(), Pieces::default());
    for _ in 0..=MAX_FIELDS {
        if left.is_empty() {
            return Ok(Some((names.joined(message), others.joined(message))));
        }
        let start = message.len() - left.len();
        let (tag, wire_type) = encoding::decode_key(&mut left)?;
        encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default())?;
        let pieces = if tag == NAMES { &mut names } else { &mut others };
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
