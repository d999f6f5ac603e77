//! Route configurations laid together from bytes: the same as if they were encoded as a whole.

use std::sync::LazyLock;

use bytes::Bytes;
use prost::{Message, encoding};

use super::configuration;
use crate::{
    base::SmolStr,
    generate::{EncodedResource, ResourceType, wire},
    proto::envoy::config::route::v3::VirtualHost,
};

/// Fields in the order in which they are written.
mod field {
    /// Of a route configuration.
    pub(super) const CONFIGURATION_NAME: u32 = 1;
    /// Of a route configuration.
    pub(super) const VIRTUAL_HOSTS: u32 = 2;
    /// Of a virtual host.
    pub(super) const NAME: u32 = 1;
    /// Of a virtual host.
    pub(super) const DOMAINS: u32 = 2;
}

/// A virtual host whose fields stand beside each other.
pub(super) struct Host {
    /// Its name.
    pub(super) name: String,
    /// Its domains.
    pub(super) domains: Vec<String>,
    /// The field `routes`, with tags and lengths, in pieces.
    pub(super) routes: Vec<Bytes>,
    /// What comes behind the routes, as fields.
    rest: Bytes,
}

impl Host {
    /// A virtual host that is a message; routes in it come behind those that are added.
    pub(super) fn whole(mut head: VirtualHost) -> Self {
        let (name, domains) = (std::mem::take(&mut head.name), std::mem::take(&mut head.domains));
        Self {
            name,
            domains,
            routes: Vec::new(),
            rest: head.encode_to_vec().into(),
        }
    }

    /// A virtual host of which nothing else is said than whether upstreams are told how often a request was tried.
    pub(super) fn plain(name: String, domains: Vec<String>, include_attempt_count: bool) -> Self {
        static COUNTED: LazyLock<Bytes> = LazyLock::new(|| {
            let counted = VirtualHost {
                include_request_attempt_count: true,
                ..Default::default()
            };
            counted.encode_to_vec().into()
        });
        Self {
            name,
            domains,
            routes: Vec::new(),
            rest: if include_attempt_count {
                COUNTED.clone()
            } else {
                Bytes::new()
            },
        }
    }

    /// The virtual host as a message.
    pub(super) fn message(self) -> VirtualHost {
        let mut written = Vec::with_capacity(self.len());
        self.write(&mut written);
        VirtualHost::decode(written.as_slice()).expect("because it was written according to the message")
    }

    fn len(&self) -> usize {
        let texts = self.domains.iter().map(|domain| text_len(domain));
        let name = if self.name.is_empty() { 0 } else { text_len(&self.name) };
        name + texts.sum::<usize>() + self.routes.iter().map(Bytes::len).sum::<usize>() + self.rest.len()
    }

    fn write(&self, out: &mut Vec<u8>) {
        wire::text(out, field::NAME, &self.name);
        for domain in &self.domains {
            wire::bytes(out, field::DOMAINS, domain.as_bytes());
        }
        for routes in &self.routes {
            out.extend_from_slice(routes);
        }
        out.extend_from_slice(&self.rest);
    }
}

/// A text as a field whose key is a single byte.
fn text_len(text: &str) -> usize {
    1 + encoding::encoded_len_varint(text.len() as u64) + text.len()
}

/// The route configuration of these virtual hosts, in this order.
pub(super) fn assembled(name: &SmolStr, hosts: &[Host]) -> EncodedResource {
    static REST: LazyLock<Vec<u8>> = LazyLock::new(|| configuration("", Vec::new()).encode_to_vec());
    let lens: Vec<usize> = hosts.iter().map(Host::len).collect();
    // A key and a length for each.
    let len = text_len(name) + lens.iter().map(|len| len + 11).sum::<usize>() + REST.len();
    EncodedResource::framed(name.clone(), ResourceType::Route.url(), len, |value| {
        wire::text(value, field::CONFIGURATION_NAME, name);
        for (host, len) in hosts.iter().zip(&lens) {
            wire::header(value, field::VIRTUAL_HOSTS, *len);
            host.write(value);
        }
        value.extend_from_slice(&REST);
    })
}
