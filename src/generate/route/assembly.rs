//! Assembles route configurations from encoded fields. The bytes equal those of encoding the whole message.

use std::sync::LazyLock;

use bytes::Bytes;
use prost::{Message, encoding};

use super::configuration;
use crate::{
    base::SmolStr,
    generate::{EncodedResource, ResourceType, wire},
    proto::envoy::config::route::v3::VirtualHost,
};

/// Field numbers, in the order of encoding.
mod field {
    /// Name of a route configuration.
    pub(super) const CONFIGURATION_NAME: u32 = 1;
    /// Virtual hosts of a route configuration.
    pub(super) const VIRTUAL_HOSTS: u32 = 2;
    /// Name of a virtual host.
    pub(super) const NAME: u32 = 1;
    /// Domains of a virtual host.
    pub(super) const DOMAINS: u32 = 2;
}

/// A virtual host with its fields partly encoded.
pub(super) struct Host {
    /// Name.
    pub(super) name: String,
    /// Domains.
    pub(super) domains: Vec<String>,
    /// Field `routes` in several buffers, with tags and lengths.
    pub(super) routes: Vec<Bytes>,
    /// Encoded fields after the routes.
    rest: Bytes,
}

impl Host {
    /// Wraps a message; its own routes follow those that are added.
    pub(super) fn whole(mut head: VirtualHost) -> Self {
        let (name, domains) = (std::mem::take(&mut head.name), std::mem::take(&mut head.domains));
        Self {
            name,
            domains,
            routes: Vec::new(),
            rest: head.encode_to_vec().into(),
        }
    }

    /// Returns a virtual host without settings except the attempt count.
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

    /// Returns the virtual host as a message.
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

/// Returns the encoded length of a text field whose key is one byte.
fn text_len(text: &str) -> usize {
    1 + encoding::encoded_len_varint(text.len() as u64) + text.len()
}

/// Assembles the route configuration of these virtual hosts, in this order.
pub(super) fn assembled(name: &SmolStr, hosts: &[Host]) -> EncodedResource {
    static REST: LazyLock<Vec<u8>> = LazyLock::new(|| configuration("", Vec::new()).encode_to_vec());
    let lens: Vec<usize> = hosts.iter().map(Host::len).collect();
    // Key and length of each virtual host take at most 11 bytes.
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
