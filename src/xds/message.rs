//! xDS responses as gRPC messages.
//!
//! A message is a small head (length prefix, type, nonce, version), followed by the frames of its resources, which were
//! encoded once for all streams. Only the head is made for one stream.

use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use prost::Message as _;
use tokio::sync::oneshot;

use super::{connection::Response, debug::DebugResponse, protocol::Protocol, share::held::Charge};
use crate::{
    generate::EncodedResource,
    proto::envoy::{
        config::core::v3::ControlPlane,
        service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse},
    },
    rpc::{
        body::{self, BufList},
        framing::{self, PREFIX_LEN, TooLarge},
    },
};

/// The body of an xDS response.
pub type Body = body::Body<Message>;
/// The sending half of a [`Body`].
pub type ResponseSender = body::ResponseSender<Message>;

/// The size at which a DATA payload is full. The HTTP/2 server queues payloads of up to 400 KiB for a stream, and never
/// gives the memory of the queue back. Large payloads keep it short.
const DATA_BYTES: usize = 256 << 10;
/// The number of buffers at which a DATA payload is full, which bounds the list of its buffers to 8 KiB.
const DATA_BUFS: usize = 256;
/// The size above which lists of small resources are coalesced first, if other streams are sent the same ones.
const LARGE_LIST_BYTES: usize = 64 << 10;
/// The average size of small resources: the transport takes sixteen buffers at a time, which should fill a frame.
const SMALL_BYTES: usize = 4 << 10;

/// The fields of a response that are specific to one stream.
struct Head {
    url: String,
    version: String,
    nonce: String,
    removed: Vec<String>,
    control_plane: Option<ControlPlane>,
}

/// The resources of a response.
#[derive(Debug)]
enum Content {
    Resources(Arc<[Arc<EncodedResource>]>),
    /// The same, in coalesced blocks.
    Blocks(Arc<[Bytes]>),
}

/// The place of a buffer.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// The resource or block.
    item: usize,
    /// The position among its buffers.
    buf: usize,
}

impl Content {
    fn buf(&self, protocol: Protocol, place: Place) -> Option<&Bytes> {
        match self {
            Self::Resources(resources) => protocol.frame(resources.get(place.item)?).buf(place.buf),
            Self::Blocks(blocks) => blocks.get(place.item).filter(|_| place.buf == 0),
        }
    }

    /// Returns the place of the next buffer.
    fn after(&self, protocol: Protocol, place: Place) -> Place {
        let next = Place {
            buf: place.buf + 1,
            ..place
        };
        match self.buf(protocol, next) {
            Some(_) => next,
            None => Place {
                item: place.item + 1,
                buf: 0,
            },
        }
    }
}

/// A response as a gRPC message, split into DATA payloads on demand.
#[derive(Debug)]
pub struct Message {
    protocol: Protocol,
    head: Option<Bytes>,
    content: Content,
    next: Place,
    written: Option<Arc<oneshot::Sender<()>>>,
    /// The memory of resources that only this message has. A client may leave it unread after its stream has ended.
    _held: Option<Arc<Charge>>,
}

/// The state of a message that was passed to a body.
#[derive(Debug)]
pub struct Sent {
    /// Its size on the wire, without HTTP/2 framing.
    pub size_bytes: usize,
    /// Completes, always with an error, when the transport has written or dropped all of it.
    pub written: oneshot::Receiver<()>,
}

/// A response with objects of configuration.
pub(super) struct ConfigResponse {
    /// The type.
    pub(super) type_url: String,
    /// The nonce, which is also the version.
    pub(super) nonce: String,
    /// The objects.
    pub(super) resources: Arc<[Arc<EncodedResource>]>,
    /// The names of removed objects (incremental protocol only).
    pub(super) removed: Vec<String>,
}

impl Message {
    /// Encodes a response.
    pub fn new(protocol: Protocol, response: Response) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url: response.resource_type.url().to_owned(),
            version: response.version.to_string(),
            nonce: response.nonce.to_string(),
            removed: response.removed.iter().map(ToString::to_string).collect(),
            control_plane: None,
        };
        let held = response.held.clone();
        let resources = &response.resources;
        let len = match &response.coalesced {
            Some(coalesced) => coalesced.size(protocol, resources),
            None => protocol.size(resources),
        };
        let count = resources.len();
        let coalesced = response
            .coalesced
            .filter(|_| len > LARGE_LIST_BYTES && len / count < SMALL_BYTES);
        let content = match coalesced {
            Some(coalesced) => Content::Blocks(coalesced.blocks(protocol, &response.resources)),
            None => Content::Resources(response.resources),
        };
        let (message, sent) = Self::of(protocol, head, content, len)?;
        Ok((Self { _held: held, ..message }, sent))
    }

    /// Encodes a debug response.
    pub(super) fn of_debug(
        protocol: Protocol,
        type_url: String,
        answer: DebugResponse,
    ) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url: type_url,
            nonce: answer.version.clone(),
            version: answer.version,
            removed: Vec::new(),
            control_plane: answer.control_plane.map(|identifier| ControlPlane { identifier }),
        };
        let len = protocol.size(&answer.resources);
        Self::of(protocol, head, Content::Resources(answer.resources.into()), len)
    }

    /// Encodes a response with objects of configuration.
    pub(super) fn of_config(protocol: Protocol, response: ConfigResponse) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url: response.type_url,
            version: response.nonce.clone(),
            nonce: response.nonce,
            removed: response.removed,
            control_plane: None,
        };
        let len = protocol.size(&response.resources);
        Self::of(protocol, head, Content::Resources(response.resources), len)
    }

    /// Encodes a response without resources.
    pub(super) fn empty(
        protocol: Protocol,
        type_url: String,
        nonce: String,
        removed: Vec<String>,
    ) -> Result<(Self, Sent), TooLarge> {
        let head = Head {
            url: type_url,
            version: nonce.clone(),
            nonce,
            removed,
            control_plane: None,
        };
        Self::of(protocol, head, Content::Resources(Arc::default()), 0)
    }

    /// Encodes the head in front of content of `frames` bytes.
    fn of(protocol: Protocol, fields: Head, content: Content, frames: usize) -> Result<(Self, Sent), TooLarge> {
        let mut head = BytesMut::zeroed(PREFIX_LEN);
        // Protobuf fields may come in any order, so those of this stream precede the shared ones.
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
        .expect("because a BytesMut grows on demand");
        let len = head.len() - PREFIX_LEN + frames;
        head[..PREFIX_LEN].copy_from_slice(&framing::prefix(len)?);
        let (written, receiver) = oneshot::channel();
        let message = Self {
            protocol,
            head: Some(head.freeze()),
            content,
            next: Place::default(),
            written: Some(Arc::new(written)),
            _held: None,
        };
        let sent = Sent {
            size_bytes: PREFIX_LEN + len,
            written: receiver,
        };
        Ok((message, sent))
    }
}

impl body::Message for Message {
    fn next_data(&mut self) -> Option<BufList> {
        let mut data = BufList::default();
        if let Some(head) = self.head.take() {
            data.push(head);
        }
        while let Some(buf) = self.content.buf(self.protocol, self.next) {
            if data.remaining() >= DATA_BYTES || data.len() >= DATA_BUFS {
                break;
            }
            data.push(buf.clone());
            self.next = self.content.after(self.protocol, self.next);
        }
        data.hold_until_written(if self.content.buf(self.protocol, self.next).is_some() {
            self.written.clone()
        } else {
            self.written.take()
        });
        data.has_remaining().then_some(data)
    }
}

#[cfg(test)]
mod tests {
    use bytes::BufMut;
    use http::HeaderMap;
    use http_body_util::BodyExt;

    use super::*;
    use crate::rpc::body::FlatBody;
    use crate::{base::Version, generate::ResourceType, proto::envoy::config::cluster::v3::Cluster};

    fn response(count: usize) -> Response {
        let resources = (0..count).map(|number| {
            let message = Cluster {
                name: format!("c{number}"),
                alt_stat_name: "x".repeat(DATA_BYTES / 32),
                ..Default::default()
            };
            Arc::new(EncodedResource::new(format!("c{number}"), &message))
        });
        Response {
            resource_type: ResourceType::Cluster,
            nonce: "1-1".into(),
            version: Version::of(b"1"),
            resources: resources.collect(),
            coalesced: None,
            removed: vec!["gone".into()],
            held: None,
        }
    }

    #[tokio::test]
    async fn resources_are_written_from_shared_bytes() {
        let response = response(100);
        let resources = response.resources.clone();
        let (message, mut sent) = Message::new(Protocol::Delta, response).expect("a message within the size limit");
        let (mut body, sender) = Body::channel();
        sender.send(message).await.expect("an open receiver");
        let mut bytes = BytesMut::new();
        let mut frames = resources.iter().flat_map(|resource| resource.delta_frame().bufs());
        let mut pieces = 0;
        while bytes.len() < sent.size_bytes {
            assert!(
                sent.written.try_recv() == Err(oneshot::error::TryRecvError::Empty),
                "not yet written"
            );
            let frame = body.frame().await.expect("more").expect("cannot fail");
            let piece = frame.into_data().expect("a data frame");
            for buf in piece.iter().skip(usize::from(pieces == 0)) {
                let shared = frames.next().expect("one buffer for each resource");
                assert_eq!(buf.as_ptr(), shared.as_ptr());
                assert_eq!(buf.len(), shared.len());
            }
            pieces += 1;
            bytes.put(piece);
        }
        assert!(pieces > 1, "a large message is split");
        assert!(sent.written.await.is_err(), "written with the last payload");
        assert_eq!(bytes[..PREFIX_LEN - 4], [0]);
        let decoded = DeltaDiscoveryResponse::decode(&bytes[PREFIX_LEN..]).expect("a response");
        assert_eq!(decoded.resources.len(), 100);
        assert_eq!(
            (decoded.nonce.as_str(), decoded.removed_resources),
            ("1-1", vec!["gone".to_owned()])
        );
    }

    #[tokio::test]
    async fn flat_bodies_have_the_same_bytes() {
        let (body, sender) = Body::channel();
        let (message, sent) = Message::new(Protocol::Sotw, response(10)).expect("a message within the size limit");
        sender.send(message).await.expect("an open receiver");
        // The message counts as written although the body is still open.
        let mut body = FlatBody::from(body);
        let mut head = BytesMut::new();
        while head.len() < sent.size_bytes {
            let frame = body.frame().await.expect("more").expect("cannot fail");
            head.put(frame.into_data().expect("a data frame"));
        }
        assert!(futures::poll!(body.frame()).is_pending());
        assert!(sent.written.await.is_err());
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        let writer = async { sender.end(trailers.clone()).await.expect("an open receiver") };
        let (collected, ()) = tokio::join!(body.collect(), writer);
        let collected = collected.expect("cannot fail");
        assert_eq!(collected.trailers(), Some(&trailers));
        let decoded = DiscoveryResponse::decode(&head[PREFIX_LEN..]).expect("a response");
        assert_eq!(decoded.resources.len(), 10);
    }
}
