//! The http body of a stream: gRPC messages written from bytes that every stream shares.
//!
//! A message is a small head (length prefix, type, nonce, version), then the frames of its resources as they were encoded
//! once. Nothing is copied for a stream, and pieces are made only when the transport asks for more; so what a slow reader
//! costs is a list of references. A piece tells when the transport has let go of it: that is when it was written.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::IoSlice,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::Frame;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};

use super::{
    connection::{Protocol, Response},
    debug::Answer,
};
use crate::{
    generate::EncodedResource,
    proto::envoy::{
        config::core::v3::ControlPlane,
        service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse},
    },
};

/// A piece is full at this size. Larger than an HTTP/2 frame, so that frames are full, and small against the windows.
const PIECE_BYTES: usize = 64 << 10;
/// A piece is full at this number of chunks: as many as the transport hands to the kernel in one call.
const PIECE_CHUNKS: usize = 64;
/// Resources of fewer bytes on average are laid end to end first, if others are sent the same: the transport takes sixteen
/// chunks at a time, which are to fill a frame.
const SMALL_BYTES: usize = 4 << 10;
/// Of a gRPC message: one byte that says whether it is compressed, four of length.
const PREFIX_LEN: usize = 5;

/// Bytes in several shared chunks, laid end to end.
#[derive(Debug, Default)]
pub struct Chunks {
    chunks: VecDeque<Bytes>,
    remaining: usize,
    /// Dropped with the last byte: when nobody holds it any more, the message was written.
    written: Option<Arc<oneshot::Sender<()>>>,
}

impl Chunks {
    /// The chunks that are left.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.chunks.iter()
    }

    fn push(&mut self, chunk: Bytes) {
        self.remaining += chunk.len();
        self.chunks.push_back(chunk);
    }

    fn took(&mut self, count: usize) {
        self.remaining -= count;
        if self.remaining == 0 {
            self.written = None;
        }
    }
}

impl Buf for Chunks {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.chunks.front().map_or(&[], |chunk| chunk)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for (slice, chunk) in slices.iter_mut().zip(&self.chunks) {
            *slice = IoSlice::new(chunk);
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "advanced past the end");
        self.took(count);
        while let Some(front) = self.chunks.front_mut() {
            if count < front.len() {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.chunks.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        match self.chunks.front_mut() {
            // The common case of adapters that want one chunk after the other: no copy.
            Some(front) if len <= front.len() => {
                let bytes = front.split_to(len);
                if front.is_empty() {
                    self.chunks.pop_front();
                }
                self.took(len);
                bytes
            }
            _ => {
                assert!(len <= self.remaining, "advanced past the end");
                let mut bytes = BytesMut::with_capacity(len);
                bytes.put(self.take(len));
                bytes.freeze()
            }
        }
    }
}

/// The fields of a response that no other stream shares.
struct Head {
    url: String,
    version: String,
    nonce: String,
    removed: Vec<String>,
    control_plane: Option<ControlPlane>,
}

/// What follows a head.
#[derive(Debug)]
enum Content {
    Resources(Arc<[Arc<EncodedResource>]>),
    /// The same, laid end to end.
    Blocks(Arc<[Bytes]>),
}

impl Content {
    fn get(&self, protocol: Protocol, index: usize) -> Option<&Bytes> {
        match self {
            Self::Resources(resources) => resources.get(index).map(|resource| frame(protocol, resource)),
            Self::Blocks(blocks) => blocks.get(index),
        }
    }
}

/// A response as a gRPC message, cut into pieces on demand.
#[derive(Debug)]
pub struct Message {
    protocol: Protocol,
    head: Option<Bytes>,
    content: Content,
    next: usize,
    written: Option<Arc<oneshot::Sender<()>>>,
}

/// What is known of a message that was handed to a body.
#[derive(Debug)]
pub struct Sent {
    /// Size on the wire, without transport framing.
    pub size_bytes: usize,
    /// Ends (with an error, which says nothing) when the transport has written or dropped all of it.
    pub written: oneshot::Receiver<()>,
}

/// A response of 4 GiB or more cannot be a gRPC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a response of {0} bytes is larger than a gRPC message can be")]
pub struct TooLarge(usize);

impl Message {
    /// Renders a response.
    pub fn new(protocol: Protocol, response: Response) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url: response.resource_type.url().to_owned(),
            version: response.version.to_string(),
            nonce: response.nonce.to_string(),
            removed: response.removed.iter().map(ToString::to_string).collect(),
            control_plane: None,
        };
        let frames = || {
            response
                .resources
                .iter()
                .map(|resource| frame(protocol, resource).len())
        };
        let (len, count) = (frames().sum::<usize>(), response.resources.len());
        let laid = response.laid.filter(|_| len > PIECE_BYTES && len / count < SMALL_BYTES);
        let content = match laid {
            Some(laid) => Content::Blocks(laid.blocks(protocol, &response.resources)),
            None => Content::Resources(response.resources),
        };
        Self::of(protocol, head, content, len)
    }

    /// Renders debug information.
    pub(super) fn of_debug(
        protocol: Protocol,
        (url, nonce): (String, String),
        answer: Answer,
    ) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url,
            version: answer.version,
            nonce,
            removed: Vec::new(),
            control_plane: answer.control_plane.map(|identifier| ControlPlane { identifier }),
        };
        let frames = answer.resources.iter().map(|resource| frame(protocol, resource).len());
        let len = frames.sum();
        Self::of(protocol, head, Content::Resources(answer.resources.into()), len)
    }

    /// `frames` is the length of the content.
    fn of(protocol: Protocol, fields: Head, content: Content, frames: usize) -> Result<(Self, Sent), TooLarge> {
        let mut head = BytesMut::zeroed(PREFIX_LEN);
        // Fields of a protobuf message may come in any order, so those of this stream stand before the shared ones.
        match protocol {
            Protocol::Sotw => DiscoveryResponse {
                version_info: fields.version,
                type_url: fields.url,
                nonce: fields.nonce,
                control_plane: fields.control_plane,
                ..Default::default()
            }
            .encode(&mut head),
            Protocol::Delta => DeltaDiscoveryResponse {
                system_version_info: fields.version,
                type_url: fields.url,
                nonce: fields.nonce,
                removed_resources: fields.removed,
                control_plane: fields.control_plane,
                ..Default::default()
            }
            .encode(&mut head),
        }
        .expect("because a BytesMut grows");
        let len = head.len() - PREFIX_LEN + frames;
        let prefix = u32::try_from(len).map_err(|_| TooLarge(len))?;
        head[1..PREFIX_LEN].copy_from_slice(&prefix.to_be_bytes());
        let (written, receiver) = oneshot::channel();
        let message = Self {
            protocol,
            head: Some(head.freeze()),
            content,
            next: 0,
            written: Some(Arc::new(written)),
        };
        let sent = Sent {
            size_bytes: PREFIX_LEN + len,
            written: receiver,
        };
        Ok((message, sent))
    }

    /// The next piece; `None` after the last.
    fn piece(&mut self) -> Option<Chunks> {
        let mut piece = Chunks::default();
        if let Some(head) = self.head.take() {
            piece.push(head);
        }
        while let Some(chunk) = self.content.get(self.protocol, self.next) {
            if piece.remaining >= PIECE_BYTES || piece.chunks.len() >= PIECE_CHUNKS {
                break;
            }
            piece.push(chunk.clone());
            self.next += 1;
        }
        piece.written = if self.content.get(self.protocol, self.next).is_some() {
            self.written.clone()
        } else {
            self.written.take()
        };
        (piece.remaining > 0).then_some(piece)
    }
}

/// A resource as it goes on the wire.
pub(super) fn frame(protocol: Protocol, resource: &EncodedResource) -> &Bytes {
    match protocol {
        Protocol::Sotw => resource.sotw_frame(),
        Protocol::Delta => resource.delta_frame(),
    }
}

#[derive(Debug)]
enum Item {
    Message(Message),
    Trailers(HeaderMap),
}

/// The one message of a call, and how it ended.
#[derive(Debug)]
struct Whole {
    message: Option<Bytes>,
    trailers: HeaderMap,
}

/// The writing end of a [`Body`].
#[derive(Clone, Debug)]
pub struct Outlet {
    items: mpsc::Sender<Item>,
}

/// The client is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub struct Gone;

impl Outlet {
    /// Hands over a message; waits while an earlier one is being written.
    pub async fn send(&self, message: Message) -> Result<(), Gone> {
        self.items.send(Item::Message(message)).await.map_err(|_| Gone)
    }

    /// Ends the body with trailers.
    pub async fn end(self, trailers: HeaderMap) -> Result<(), Gone> {
        self.items.send(Item::Trailers(trailers)).await.map_err(|_| Gone)
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.items.closed().await;
    }
}

/// The body of a response. Ends with trailers, unless it was empty from the start.
#[derive(Debug, Default)]
pub struct Body {
    items: Option<mpsc::Receiver<Item>>,
    current: Option<Message>,
    whole: Option<Whole>,
}

impl Body {
    /// A body that is there as a whole, with its trailers.
    pub fn whole(message: Bytes, trailers: HeaderMap) -> Self {
        let message = Some(message);
        Self {
            whole: Some(Whole { message, trailers }),
            ..Self::default()
        }
    }

    /// A body and what writes to it. It holds one message that waits behind the one that is being written.
    pub fn channel() -> (Self, Outlet) {
        let (items, receiver) = mpsc::channel(1);
        let body = Self {
            items: Some(receiver),
            ..Self::default()
        };
        (body, Outlet { items })
    }
}

impl http_body::Body for Body {
    type Data = Chunks;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Chunks>, Infallible>>> {
        if let Some(mut whole) = self.whole.take() {
            let Some(message) = whole.message.take() else {
                return Poll::Ready(Some(Ok(Frame::trailers(whole.trailers))));
            };
            self.whole = Some(whole);
            let mut piece = Chunks::default();
            piece.push(message);
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        loop {
            if let Some(piece) = self.current.as_mut().and_then(Message::piece) {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            self.current = None;
            let Some(items) = &mut self.items else {
                return Poll::Ready(None);
            };
            match ready!(items.poll_recv(cx)) {
                Some(Item::Message(message)) => self.current = Some(message),
                Some(Item::Trailers(trailers)) => {
                    self.items = None;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                None => self.items = None,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.items.is_none() && self.current.is_none() && self.whole.is_none()
    }
}

/// The same body, one chunk after the other, for servers that want plain `Bytes`.
#[derive(Debug, Default)]
pub struct FlatBody {
    body: Body,
    piece: Chunks,
}

impl From<Body> for FlatBody {
    fn from(body: Body) -> Self {
        Self {
            body,
            piece: Chunks::default(),
        }
    }
}

impl http_body::Body for FlatBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            let len = self.piece.chunk().len();
            if len > 0 {
                let chunk = self.piece.copy_to_bytes(len);
                return Poll::Ready(Some(Ok(Frame::data(chunk))));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => return Poll::Ready(None),
                Some(Err(never)) => match never {},
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => self.piece = piece,
                    Err(frame) => {
                        return Poll::Ready(frame.into_trailers().ok().map(|trailers| Ok(Frame::trailers(trailers))));
                    }
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !self.piece.has_remaining()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::{base::Version, generate::ResourceType, proto::envoy::config::cluster::v3::Cluster};

    fn response(count: usize) -> Response {
        let resources = (0..count).map(|number| {
            let message = Cluster {
                name: format!("c{number}"),
                alt_stat_name: "x".repeat(2000),
                ..Default::default()
            };
            Arc::new(EncodedResource::new(format!("c{number}"), &message))
        });
        Response {
            resource_type: ResourceType::Cluster,
            nonce: "1-1".into(),
            version: Version::of(b"1"),
            resources: resources.collect(),
            laid: None,
            removed: vec!["gone".into()],
        }
    }

    #[tokio::test]
    async fn chunks_are_the_shared_bytes() {
        let response = response(100);
        let resources = response.resources.clone();
        let (message, mut sent) = Message::new(Protocol::Delta, response).expect("small");
        let (mut body, outlet) = Body::channel();
        outlet.send(message).await.expect("open");
        let mut bytes = BytesMut::new();
        let mut frames = resources.iter().map(|resource| resource.delta_frame());
        let mut pieces = 0;
        while bytes.len() < sent.size_bytes {
            assert!(
                sent.written.try_recv() == Err(oneshot::error::TryRecvError::Empty),
                "not yet written"
            );
            let frame = body.frame().await.expect("more").expect("cannot fail");
            let piece = frame.into_data().expect("data");
            for chunk in piece.iter().skip(usize::from(pieces == 0)) {
                let shared = frames.next().expect("one chunk for each resource");
                assert_eq!(chunk.as_ptr(), shared.as_ptr());
                assert_eq!(chunk.len(), shared.len());
            }
            pieces += 1;
            bytes.put(piece);
        }
        assert!(pieces > 1, "a large message is cut");
        assert!(sent.written.await.is_err(), "written with the last piece");
        assert_eq!(bytes[..PREFIX_LEN - 4], [0]);
        let decoded = DeltaDiscoveryResponse::decode(&bytes[PREFIX_LEN..]).expect("a response");
        assert_eq!(decoded.resources.len(), 100);
        assert_eq!(
            (decoded.nonce.as_str(), decoded.removed_resources),
            ("1-1", vec!["gone".to_owned()])
        );
    }

    #[tokio::test]
    async fn the_flat_body_has_the_same_bytes() {
        let (body, outlet) = Body::channel();
        let (message, sent) = Message::new(Protocol::Sotw, response(10)).expect("small");
        outlet.send(message).await.expect("open");
        // The body is alive and asked for more: the message was written all the same.
        let mut body = FlatBody::from(body);
        let mut head = BytesMut::new();
        while head.len() < sent.size_bytes {
            let frame = body.frame().await.expect("more").expect("cannot fail");
            head.put(frame.into_data().expect("data"));
        }
        assert!(futures::poll!(body.frame()).is_pending());
        assert!(sent.written.await.is_err());
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        let writer = async { outlet.end(trailers.clone()).await.expect("open") };
        let (collected, ()) = tokio::join!(body.collect(), writer);
        let collected = collected.expect("cannot fail");
        assert_eq!(collected.trailers(), Some(&trailers));
        let decoded = DiscoveryResponse::decode(&head[PREFIX_LEN..]).expect("a response");
        assert_eq!(decoded.resources.len(), 10);
    }

    #[test]
    fn chunks_advance_across_their_borders() {
        let mut chunks = Chunks::default();
        for text in ["ab", "cde", "f"] {
            chunks.push(Bytes::from_static(text.as_bytes()));
        }
        chunks.advance(1);
        let mut slices = [IoSlice::new(&[]); 8];
        assert_eq!(chunks.chunks_vectored(&mut slices), 3);
        assert_eq!(chunks.copy_to_bytes(3), "bcd");
        assert_eq!(chunks.chunk(), b"e");
        chunks.advance(2);
        assert!(!chunks.has_remaining());
    }
}
