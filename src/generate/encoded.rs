//! `EncodedResource`: a resource encoded once, whose bytes all connections share.

use std::{cell::Cell, fmt, iter, sync::Arc};

use bytes::{Bytes, BytesMut};
use prost::{Message, Name, encoding};
use smol_str::SmolStr;

use super::{
    block::Block,
    wire::{self, Encoded, Writer, field_len},
};
use crate::{
    base::{Version, scratch},
    proto::{
        Any,
        envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource},
        field::{self, MessageFields},
    },
};

macro_rules! resource_types {
    ($($(#[$doc:meta])* $variant:ident => $short:literal, $url:literal, $wildcard:literal;)*) => {
        /// A type of resources, in push order.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ResourceType { $($(#[$doc])* $variant,)* }

        impl ResourceType {
            /// Every type, in push order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the short name in metrics and file names: `cds`, `lds`, ….
            pub fn short_name(self) -> &'static str {
                match self { $(Self::$variant => $short,)* }
            }

            /// Returns the type URL.
            pub fn url(self) -> &'static str {
                match self { $(Self::$variant => concat!("type.googleapis.com/", $url),)* }
            }

            /// Returns the type of a URL; `None` if it is not served.
            pub fn of_url(url: &str) -> Option<Self> {
                match url.strip_prefix("type.googleapis.com/")? { $($url => Some(Self::$variant),)* _ => None }
            }

            /// Returns true if a request without names is a wildcard subscription.
            pub fn is_wildcard(self) -> bool {
                match self { $(Self::$variant => $wildcard,)* }
            }
        }
    };
}

resource_types! {
    /// CDS.
    Cluster => "cds", "envoy.config.cluster.v3.Cluster", true;
    /// EDS.
    Endpoint => "eds", "envoy.config.endpoint.v3.ClusterLoadAssignment", false;
    /// LDS.
    Listener => "lds", "envoy.config.listener.v3.Listener", true;
    /// RDS.
    Route => "rds", "envoy.config.route.v3.RouteConfiguration", false;
    /// SDS.
    Secret => "sds", "envoy.extensions.transport_sockets.tls.v3.Secret", false;
    /// ECDS.
    Extension => "ecds", "envoy.config.core.v3.TypedExtensionConfig", false;
    /// NDS.
    NameTable => "nds", "istio.networking.nds.v1.NameTable", true;
    /// PCDS.
    ProxyConfig => "pcds", "istio.mesh.v1alpha1.ProxyConfig", true;
    /// WDS: workloads and services.
    Address => "wds", "istio.workload.Address", true;
    /// WDS: only workloads.
    Workload => "wds", "istio.workload.Workload", true;
    /// WADS.
    Authorization => "wads", "istio.security.Authorization", true;
}

thread_local! {
    /// The resource to encode. Without it, clusters take a tenth longer (bench `suite`, case `auto`).
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A resource: name, version, and its bytes framed for both xDS protocols.
#[derive(Clone)]
pub struct EncodedResource {
    /// The resource name; empty for types that have a single unnamed resource.
    pub name: SmolStr,
    /// Hash of type, name and content.
    pub version: Version,
    /// Other names by which clients request the resource.
    aliases: Option<Arc<[SmolStr]>>,
    /// The frames, or what precedes the blocks in them.
    delta: Bytes,
    sotw: Bytes,
    blocks: Option<Arc<Blocks>>,
}

/// The end of a resource that shares parts with others.
struct Blocks {
    blocks: Box<[Bytes]>,
    len: usize,
    delta_tail: Bytes,
    sotw_tail: Bytes,
}

/// A resource as a field of a response, in one or more buffers.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    head: &'a Bytes,
    /// The blocks, with what follows them.
    rest: Option<(&'a Blocks, &'a Bytes)>,
}

impl<'a> Frame<'a> {
    /// Returns the length in bytes.
    pub fn size(self) -> usize {
        self.head.len() + self.rest.map_or(0, |(blocks, tail)| blocks.len + tail.len())
    }

    /// Returns a buffer by its position; `None` after the last.
    pub fn buf(self, position: usize) -> Option<&'a Bytes> {
        let Some(after) = position.checked_sub(1) else {
            return Some(self.head);
        };
        let (blocks, tail) = self.rest?;
        let tail = (after == blocks.blocks.len()).then_some(tail);
        blocks.blocks.get(after).or(tail)
    }

    /// Returns the buffers in order.
    pub fn bufs(self) -> impl Iterator<Item = &'a Bytes> {
        let rest = self
            .rest
            .into_iter()
            .flat_map(|(blocks, tail)| blocks.blocks.iter().chain(iter::once(tail)));
        iter::once(self.head).chain(rest)
    }

    /// Returns all bytes in one buffer.
    pub fn to_bytes(self) -> Bytes {
        if self.rest.is_none() {
            return self.head.clone();
        }
        let mut bytes = BytesMut::with_capacity(self.size());
        self.bufs().for_each(|buf| bytes.extend_from_slice(buf));
        bytes.freeze()
    }
}

/// Omits the content, which may be a private key.
impl fmt::Debug for EncodedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodedResource")
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl PartialEq for EncodedResource {
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version
    }
}

/// An encoded message: the blocks that it shares with other messages, and what precedes and follows them.
struct Value<'a> {
    head: &'a [u8],
    blocks: Vec<Bytes>,
    tail: &'a [u8],
}

/// The largest buffer that a thread keeps, in bytes.
const MAX_BUFFER: usize = 1 << 16;

impl EncodedResource {
    /// Encodes a message under a name.
    pub fn new<M: Message + Name>(name: impl Into<SmolStr>, message: &M) -> Self {
        Self::framed(name.into(), &M::type_url(), Vec::new(), |value| {
            message.encode_raw(value);
        })
    }

    /// Encodes a message under a name with aliases.
    pub fn with_aliases<M: Message + Name>(name: SmolStr, message: &M, aliases: Vec<SmolStr>) -> Self {
        Self::framed(name, &M::type_url(), aliases, |value| message.encode_raw(value))
    }

    /// Frames what a function writes: an encoded message.
    pub fn of_encoded(name: SmolStr, type_url: &str, aliases: Vec<SmolStr>, write: impl FnOnce(&mut Vec<u8>)) -> Self {
        Self::framed(name, type_url, aliases, write)
    }

    /// Frames a message that is already encoded.
    pub fn from_bytes(name: SmolStr, type_url: &str, value: &[u8]) -> Self {
        Self::framed(name, type_url, Vec::new(), |out| out.extend_from_slice(value))
    }

    /// Frames the message that a function writes.
    pub fn write<M: MessageFields>(name: SmolStr, write: impl FnOnce(&mut Writer<M>)) -> Self {
        Self::framed(name, M::TYPE_URL, Vec::new(), |out| {
            let begin = out.len();
            write(&mut Writer::new(out));
            wire::debug_assert_canonical::<M>(&out[begin..]);
        })
    }

    /// Frames a message that a function begins, with blocks of further fields and then the last ones.
    pub fn of_blocks<M: MessageFields>(
        name: SmolStr,
        begin: impl FnOnce(&mut Writer<M>),
        blocks: Vec<Block>,
        last: &Encoded<M>,
    ) -> Self {
        let mut head = Vec::new();
        begin(&mut Writer::<M>::new(&mut head));
        if cfg!(debug_assertions) {
            let mut whole = head.clone();
            for block in &blocks {
                whole.extend_from_slice(&block.bytes);
            }
            whole.extend_from_slice(last.as_bytes());
            wire::debug_assert_canonical::<M>(&whole);
        }
        // The version is the hash of type, name, the fields before and after the blocks, and the blocks' own hashes.
        let mut hashed = Vec::with_capacity(head.len() + last.len() + blocks.len() * size_of::<u128>() + 256);
        hashed.extend_from_slice(M::TYPE_URL.as_bytes());
        for part in [b"\0", name.as_bytes(), b"\0", &head] {
            hashed.extend_from_slice(part);
        }
        for block in &blocks {
            hashed.extend_from_slice(&block.version.value().to_le_bytes());
        }
        hashed.extend_from_slice(last.as_bytes());
        let value = Value {
            head: &head,
            tail: last.as_bytes(),
            blocks: blocks.into_iter().map(|block| block.bytes).collect(),
        };
        Self::frame(name, Version::of(&hashed), M::TYPE_URL, Vec::new(), value)
    }

    /// Returns the same resource with its version in capital letters in the incremental protocol. A client repeats the
    /// version when it reconnects. So the next control plane learns that the client may still wait for resources which
    /// should have followed this one. A version that has no letters, one in three million, stays as it is.
    #[must_use]
    pub fn unconfirmed(&self) -> Self {
        let mut delta = self.delta.to_vec();
        // The version follows two tags and two lengths, of which the second is one byte.
        let begin = delta.iter().skip(1).take_while(|byte| **byte >= 0x80).count() + 4;
        let version = &mut delta[begin..begin + Version::TEXT_LEN];
        debug_assert_eq!(version, self.version.text(), "the place of the version");
        version.make_ascii_uppercase();
        Self {
            delta: delta.into(),
            ..self.clone()
        }
    }

    fn framed(name: SmolStr, type_url: &str, aliases: Vec<SmolStr>, write: impl FnOnce(&mut Vec<u8>)) -> Self {
        // The version is the hash of type, name and content, which are written in one piece. Aliases follow from those.
        let mut buffer = SCRATCH.take();
        for part in [type_url, "\0", name.as_str(), "\0"] {
            buffer.extend_from_slice(part.as_bytes());
        }
        let begin = buffer.len();
        write(&mut buffer);
        let value = Value {
            head: &buffer[begin..],
            tail: &[],
            blocks: Vec::new(),
        };
        let framed = Self::frame(name, Version::of(&buffer), type_url, aliases, value);
        if buffer.capacity() <= MAX_BUFFER {
            scratch::put_back(&SCRATCH, buffer);
        }
        framed
    }

    fn frame(name: SmolStr, version: Version, type_url: &str, aliases: Vec<SmolStr>, value: Value) -> Self {
        use field::{any, delta_discovery_response, resource};

        let blocks_len: usize = value.blocks.iter().map(Bytes::len).sum();
        let value_len = value.head.len() + blocks_len + value.tail.len();
        let any_len = field_len(any::TYPE_URL, type_url.len()) + field_len(any::VALUE, value_len);
        let version_text = version.text();
        let name_len = if name.is_empty() {
            0
        } else {
            field_len(resource::NAME, name.len())
        };
        let aliases_len: usize = aliases
            .iter()
            .map(|alias| field_len(resource::ALIASES, alias.len()))
            .sum();
        let resource_len = field_len(resource::VERSION, version_text.len())
            + field_len(resource::RESOURCE, any_len)
            + name_len
            + aliases_len;
        let len = field_len(delta_discovery_response::RESOURCES, resource_len) - blocks_len;
        let mut bytes = Vec::with_capacity(len);
        let mut out = Writer::<DeltaDiscoveryResponse>::new(&mut bytes);
        out.header(delta_discovery_response::RESOURCES, resource_len);
        let mut out = out.of::<Resource>();
        out.bytes(resource::VERSION, &version_text);
        let any_begin = out.position();
        out.header(resource::RESOURCE, any_len);
        let mut out = out.of::<Any>();
        out.text(any::TYPE_URL, type_url);
        out.header(any::VALUE, value_len);
        out.raw(value.head);
        let head_end = out.position();
        out.raw(value.tail);
        let any_end = out.position();
        let mut out = out.of::<Resource>();
        out.text(resource::NAME, &name);
        for alias in &aliases {
            out.bytes(resource::ALIASES, alias.as_bytes());
        }
        debug_assert_eq!(bytes.len(), len, "length of the frame of {name}");
        let bytes = Bytes::from(bytes);
        let framed = Self {
            name,
            version,
            aliases: (!aliases.is_empty()).then(|| aliases.into()),
            delta: bytes.clone(),
            sotw: bytes.slice(any_begin..any_end),
            blocks: None,
        };
        if value.blocks.is_empty() {
            return framed;
        }
        Self {
            delta: bytes.slice(..head_end),
            sotw: bytes.slice(any_begin..head_end),
            blocks: Some(Arc::new(Blocks {
                blocks: value.blocks.into(),
                len: blocks_len,
                delta_tail: bytes.slice(head_end..),
                sotw_tail: bytes.slice(head_end..any_end),
            })),
            ..framed
        }
    }

    /// Returns other names by which clients request the resource.
    pub fn aliases(&self) -> &[SmolStr] {
        self.aliases.as_deref().unwrap_or_default()
    }

    /// Returns field 2 of a `DeltaDiscoveryResponse`: the whole `Resource` with tag and length.
    pub fn delta_frame(&self) -> Frame<'_> {
        let blocks = self.blocks.as_deref();
        Frame {
            head: &self.delta,
            rest: blocks.map(|blocks| (blocks, &blocks.delta_tail)),
        }
    }

    /// Returns field 2 of a `DiscoveryResponse`: the `Any` with tag and length, a part of the delta frame.
    pub fn sotw_frame(&self) -> Frame<'_> {
        let blocks = self.blocks.as_deref();
        Frame {
            head: &self.sotw,
            rest: blocks.map(|blocks| (blocks, &blocks.sotw_tail)),
        }
    }

    /// Returns the resource as an `Any`, for dumps.
    pub fn any(&self) -> crate::proto::Any {
        let mut slice = self.sotw_frame().to_bytes();
        let parsed = encoding::decode_key(&mut slice)
            .and_then(|_| encoding::decode_varint(&mut slice))
            .map_err(|error| error.to_string())
            .and_then(|_| crate::proto::Any::decode(slice).map_err(|error| error.to_string()));
        parsed.expect("because the frame was written by this type")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::envoy::{
        config::cluster::v3::Cluster,
        service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse},
    };

    #[test]
    fn frames_decode_as_both_responses() {
        let cluster = Cluster {
            name: "outbound|80||a.b".into(),
            ..Default::default()
        };
        let resource = EncodedResource::new("outbound|80||a.b", &cluster);
        let delta = DeltaDiscoveryResponse::decode(resource.delta_frame().to_bytes()).expect("delta");
        assert_eq!(delta.resources[0].name, cluster.name);
        assert_eq!(delta.resources[0].version, resource.version.to_string());
        let sotw = DiscoveryResponse::decode(resource.sotw_frame().to_bytes()).expect("sotw");
        assert_eq!(Some(&sotw.resources[0]), delta.resources[0].resource.as_ref());
        assert_eq!(
            Cluster::decode(sotw.resources[0].value.clone()).expect("cluster"),
            cluster
        );
        assert_eq!(resource.any(), sotw.resources[0]);
    }
}
