//! Route configurations laid together from bytes: the same as if they were encoded as a whole.

use bytes::Bytes;
use prost::{Message, Name, encoding};

use super::configuration;
use crate::{
    base::SmolStr,
    generate::EncodedResource,
    proto::envoy::config::route::v3::{Route, RouteConfiguration, VirtualHost},
};

/// Fields in the order in which they are written.
mod field {
    /// Of a route configuration.
    pub(super) const VIRTUAL_HOSTS: u32 = 2;
    /// Of a virtual host.
    pub(super) const NAME: u32 = 1;
    /// Of a virtual host.
    pub(super) const DOMAINS: u32 = 2;
    /// Of a virtual host: what is not one of these three comes behind them.
    pub(super) const ROUTES: u32 = 3;
}

/// A virtual host whose routes stand beside it.
pub(super) struct Host {
    /// The rest of it; routes in it come before those beside it. In a box because hosts are sorted.
    pub(super) head: Box<VirtualHost>,
    /// The field `routes`, with tags and lengths, in pieces.
    pub(super) routes: Vec<Bytes>,
}

impl Host {
    /// A virtual host that has its routes in it.
    pub(super) fn whole(head: VirtualHost) -> Self {
        Self {
            head: Box::new(head),
            routes: Vec::new(),
        }
    }

    /// The virtual host as a message.
    pub(super) fn message(self) -> VirtualHost {
        let mut message = *self.head;
        for routes in self.routes {
            let holder = VirtualHost::decode(routes);
            let holder = holder.expect("because these bytes were encoded from routes");
            message.routes.extend(holder.routes);
        }
        message
    }

    fn split(self) -> Split {
        let Self { mut head, routes } = self;
        let name = std::mem::take(&mut head.name);
        let domains = std::mem::take(&mut head.domains);
        let whole_routes = std::mem::take(&mut head.routes);
        let name_len = if name.is_empty() {
            0
        } else {
            encoding::string::encoded_len(field::NAME, &name)
        };
        Split {
            len: name_len
                + encoding::string::encoded_len_repeated(field::DOMAINS, &domains)
                + encoding::message::encoded_len_repeated(field::ROUTES, &whole_routes)
                + routes.iter().map(Bytes::len).sum::<usize>()
                + head.encoded_len(),
            name,
            domains,
            whole_routes,
            routes,
            rest: head,
        }
    }
}

/// A virtual host field by field.
struct Split {
    name: String,
    domains: Vec<String>,
    whole_routes: Vec<Route>,
    routes: Vec<Bytes>,
    rest: Box<VirtualHost>,
    /// Of all together.
    len: usize,
}

impl Split {
    fn write(&self, value: &mut Vec<u8>) {
        encoding::encode_key(field::VIRTUAL_HOSTS, encoding::WireType::LengthDelimited, value);
        encoding::encode_varint(self.len as u64, value);
        if !self.name.is_empty() {
            encoding::string::encode(field::NAME, &self.name, value);
        }
        encoding::string::encode_repeated(field::DOMAINS, &self.domains, value);
        encoding::message::encode_repeated(field::ROUTES, &self.whole_routes, value);
        for routes in &self.routes {
            value.extend_from_slice(routes);
        }
        self.rest.encode_raw(value);
    }
}

/// The route configuration of these virtual hosts, in this order.
pub(super) fn assembled(name: &SmolStr, hosts: Vec<Host>) -> EncodedResource {
    let rest = RouteConfiguration {
        name: String::new(),
        ..configuration("", Vec::new())
    };
    let named = RouteConfiguration {
        name: name.to_string(),
        ..Default::default()
    };
    let hosts: Vec<Split> = hosts.into_iter().map(Host::split).collect();
    let key_len = encoding::key_len(field::VIRTUAL_HOSTS);
    let fields = hosts
        .iter()
        .map(|host| key_len + encoding::encoded_len_varint(host.len as u64) + host.len);
    let len = named.encoded_len() + fields.sum::<usize>() + rest.encoded_len();
    EncodedResource::framed(name.clone(), &RouteConfiguration::type_url(), len, |value| {
        named.encode_raw(value);
        for host in &hosts {
            host.write(value);
        }
        rest.encode_raw(value);
    })
}
