//! `EncodedResource`: a resource encoded once, whose bytes all connections share.

use std::{cell::Cell, fmt, sync::Arc};

use bytes::Bytes;
use prost::{Message, Name, encoding};
use smol_str::SmolStr;

use super::wire::{self, Writer, field_len};
use crate::{
    base::{Version, scratch},
    proto::{
        envoy::service::discovery::v3::DeltaDiscoveryResponse,
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
    delta: Bytes,
    sotw: Bytes,
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

    fn framed(name: SmolStr, type_url: &str, aliases: Vec<SmolStr>, write: impl FnOnce(&mut Vec<u8>)) -> Self {
        // The version is the hash of type, name and content, which are written in one piece. Aliases follow from those.
        let mut buffer = SCRATCH.take();
        for part in [type_url, "\0", name.as_str(), "\0"] {
            buffer.extend_from_slice(part.as_bytes());
        }
        let begin = buffer.len();
        write(&mut buffer);
        let framed = Self::frame(name, Version::of(&buffer), type_url, aliases, &buffer[begin..]);
        if buffer.capacity() <= MAX_BUFFER {
            scratch::put_back(&SCRATCH, buffer);
        }
        framed
    }

    fn frame(name: SmolStr, version: Version, type_url: &str, aliases: Vec<SmolStr>, value: &[u8]) -> Self {
        use field::{any, delta_discovery_response, resource};

        let any_len = field_len(any::TYPE_URL, type_url.len()) + field_len(any::VALUE, value.len());
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
        let mut bytes = Vec::with_capacity(field_len(delta_discovery_response::RESOURCES, resource_len));
        let mut any_range = 0..0;
        let mut response = Writer::<DeltaDiscoveryResponse>::new(&mut bytes);
        response.nested_of_length(delta_discovery_response::RESOURCES, resource_len, |out| {
            out.bytes(resource::VERSION, &version_text);
            any_range.start = out.position();
            out.nested_of_length(resource::RESOURCE, any_len, |out| {
                out.text(any::TYPE_URL, type_url);
                out.bytes(any::VALUE, value);
            });
            any_range.end = out.position();
            out.text(resource::NAME, &name);
            for alias in &aliases {
                out.bytes(resource::ALIASES, alias.as_bytes());
            }
        });
        let delta = Bytes::from(bytes);
        let sotw = delta.slice(any_range);
        Self {
            name,
            version,
            aliases: (!aliases.is_empty()).then(|| aliases.into()),
            delta,
            sotw,
        }
    }

    /// Returns other names by which clients request the resource.
    pub fn aliases(&self) -> &[SmolStr] {
        self.aliases.as_deref().unwrap_or_default()
    }

    /// Returns field 2 of a `DeltaDiscoveryResponse`: the whole `Resource` with tag and length.
    pub fn delta_frame(&self) -> &Bytes {
        &self.delta
    }

    /// Returns field 2 of a `DiscoveryResponse`: the `Any` with tag and length, a slice of the delta frame.
    pub fn sotw_frame(&self) -> &Bytes {
        &self.sotw
    }

    /// Returns the resource as an `Any`, for dumps.
    pub fn any(&self) -> crate::proto::Any {
        let mut slice = self.sotw.clone();
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
        let delta = DeltaDiscoveryResponse::decode(resource.delta_frame().clone()).expect("delta");
        assert_eq!(delta.resources[0].name, cluster.name);
        assert_eq!(delta.resources[0].version, resource.version.to_string());
        let sotw = DiscoveryResponse::decode(resource.sotw_frame().clone()).expect("sotw");
        assert_eq!(Some(&sotw.resources[0]), delta.resources[0].resource.as_ref());
        assert_eq!(
            Cluster::decode(sotw.resources[0].value.clone()).expect("cluster"),
            cluster
        );
        assert_eq!(resource.any(), sotw.resources[0]);
    }
}
