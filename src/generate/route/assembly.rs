//! Assembles route configurations from encoded fields. The bytes equal those of encoding the whole message.

use std::sync::LazyLock;

use bytes::Bytes;
use prost::Message;

use super::configuration;
use crate::{
    base::SmolStr,
    generate::{
        EncodedResource,
        wire::{Encoded, Writer, field_len},
    },
    proto::{
        envoy::config::route::v3::{RouteConfiguration, VirtualHost},
        field::{route_configuration, virtual_host},
    },
};

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
        Encoded::write(self.len(), |out| self.write(out)).decode()
    }

    fn len(&self) -> usize {
        let domains = self.domains.iter();
        let domains = domains.map(|domain| field_len(virtual_host::DOMAINS, domain.len()));
        let name = match self.name.len() {
            0 => 0,
            len => field_len(virtual_host::NAME, len),
        };
        name + domains.sum::<usize>() + self.routes.iter().map(Bytes::len).sum::<usize>() + self.rest.len()
    }

    fn write(&self, out: &mut Writer<VirtualHost>) {
        out.text(virtual_host::NAME, &self.name);
        for domain in &self.domains {
            out.text(virtual_host::DOMAINS, domain);
        }
        for routes in &self.routes {
            out.raw(routes);
        }
        out.raw(&self.rest);
    }
}

/// Assembles the route configuration of these virtual hosts, in this order.
pub(super) fn assembled(name: &SmolStr, hosts: &[Host]) -> EncodedResource {
    static REST: LazyLock<Encoded<RouteConfiguration>> = LazyLock::new(|| Encoded::of(&configuration("", Vec::new())));
    let lens: Vec<usize> = hosts.iter().map(Host::len).collect();
    let host_lens = lens
        .iter()
        .map(|len| field_len(route_configuration::VIRTUAL_HOSTS, *len));
    let len = field_len(route_configuration::NAME, name.len()) + host_lens.sum::<usize>() + REST.len();
    EncodedResource::write(name.clone(), |out| {
        out.reserve(len);
        out.text(route_configuration::NAME, name);
        for (host, len) in hosts.iter().zip(&lens) {
            out.nested_of_length(route_configuration::VIRTUAL_HOSTS, *len, |out| host.write(out));
        }
        out.fields(&REST);
    })
}
