//! Assembles route configurations from encoded fields. The bytes equal those of encoding the whole message.

use std::{
    ops::Range,
    sync::{Arc, LazyLock},
};

use prost::Message;

use super::{
    configuration,
    host_names::{HostNames, block_hash},
};
use crate::{
    base::{Shared, SmolStr, Version},
    generate::{
        EncodedResource,
        block::{Block, BlockPool},
        wire::{Encoded, Writer, field_len},
    },
    model::Service,
    proto::{
        envoy::config::route::v3::{RouteConfiguration, VirtualHost},
        field::{route_configuration, virtual_host},
    },
};

/// The name and domains of a virtual host.
pub(super) enum Names {
    /// All those of a service.
    Shared(Arc<HostNames>),
    /// Its own.
    Own { name: String, domains: Vec<String> },
}

impl Names {
    /// Returns the name and the domains.
    pub(super) fn into_parts(self) -> (String, Vec<String>) {
        match self {
            Self::Shared(names) => {
                let domains = names.domains.iter().map(|domain| domain.text.clone());
                (names.name.clone(), domains.collect())
            }
            Self::Own { name, domains } => (name, domains),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Shared(names) => &names.name,
            Self::Own { name, .. } => name,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Shared(names) => names.encoded.bytes.len(),
            Self::Own { name, domains } => {
                let domains = domains.iter();
                let domains = domains.map(|domain| field_len(virtual_host::DOMAINS, domain.len()));
                let name = match name.len() {
                    0 => 0,
                    len => field_len(virtual_host::NAME, len),
                };
                name + domains.sum::<usize>()
            }
        }
    }

    fn write(&self, out: &mut Writer<VirtualHost>) {
        match self {
            Self::Shared(names) => out.raw(&names.encoded.bytes),
            Self::Own { name, domains } => {
                out.text(virtual_host::NAME, name);
                for domain in domains {
                    out.text(virtual_host::DOMAINS, domain);
                }
            }
        }
    }

    fn version(&self) -> Version {
        match self {
            Self::Shared(names) => names.encoded.version,
            Self::Own { .. } => Version::of(Encoded::write(self.len(), |out| self.write(out)).as_bytes()),
        }
    }

    /// Returns the [`block_hash`] of the name.
    fn block_hash(&self) -> u64 {
        match self {
            Self::Shared(names) => names.block_hash,
            Self::Own { name, .. } => block_hash(name),
        }
    }
}

/// A virtual host with its fields partly encoded.
pub(super) struct Host {
    pub(super) names: Names,
    /// Field `routes` in several parts, with tags and lengths.
    pub(super) routes: Vec<Block>,
    /// Encoded fields after the routes.
    rest: Block,
    /// The service and port, if it is the virtual host of one.
    pub(super) service: Option<(Shared<Service>, u32)>,
}

impl Host {
    /// Wraps a message; its own routes follow those that are added.
    pub(super) fn whole(mut head: VirtualHost) -> Self {
        let (name, domains) = (std::mem::take(&mut head.name), std::mem::take(&mut head.domains));
        Self {
            names: Names::Own { name, domains },
            routes: Vec::new(),
            rest: Block::new(head.encode_to_vec().into()),
            service: None,
        }
    }

    /// Returns a virtual host without settings except the attempt count.
    pub(super) fn plain(names: Names, include_attempt_count: bool) -> Self {
        static REST: LazyLock<[Block; 2]> = LazyLock::new(|| {
            [false, true].map(|include_request_attempt_count| {
                let rest = VirtualHost {
                    include_request_attempt_count,
                    ..Default::default()
                };
                Block::new(rest.encode_to_vec().into())
            })
        });
        Self {
            names,
            routes: Vec::new(),
            rest: REST[usize::from(include_attempt_count)].clone(),
            service: None,
        }
    }

    /// Returns the name.
    pub(super) fn name(&self) -> &str {
        self.names.name()
    }

    /// Returns the domains.
    pub(super) fn domains(&self) -> impl Iterator<Item = &str> {
        let (shared, own) = match &self.names {
            Names::Shared(names) => (&*names.domains, &[][..]),
            Names::Own { domains, .. } => (&[][..], &**domains),
        };
        let shared = shared.iter().map(|domain| domain.text.as_str());
        shared.chain(own.iter().map(String::as_str))
    }

    /// Sets the domains.
    pub(super) fn with_domains(self, domains: Vec<String>) -> Self {
        let (name, _) = self.names.into_parts();
        Self {
            names: Names::Own { name, domains },
            ..self
        }
    }

    /// Returns the virtual host as that of a service port.
    pub(super) fn with_service(self, service: Shared<Service>, port: u32) -> Self {
        Self {
            service: Some((service, port)),
            ..self
        }
    }

    /// Returns the virtual host with other names.
    pub(super) fn renamed(&self, names: Arc<HostNames>) -> Self {
        Self {
            names: Names::Shared(names),
            routes: self.routes.clone(),
            rest: self.rest.clone(),
            service: self.service.clone(),
        }
    }

    /// Returns the virtual host as a message.
    pub(super) fn message(self) -> VirtualHost {
        Encoded::write(self.len(), |out| self.write(out)).decode()
    }

    fn len(&self) -> usize {
        let routes = self.routes.iter().map(|routes| routes.bytes.len());
        self.names.len() + routes.sum::<usize>() + self.rest.bytes.len()
    }

    fn write(&self, out: &mut Writer<VirtualHost>) {
        self.names.write(out);
        for part in self.routes.iter().chain([&self.rest]) {
            out.raw(&part.bytes);
        }
    }

    /// Appends what the bytes of the virtual host follow from: the hashes and lengths of its parts, and its length.
    fn hash(&self, len: usize, hashed: &mut Vec<u8>) {
        let mut add = |version: Version, len: usize| {
            hashed.extend_from_slice(&version.value().to_le_bytes());
            hashed.extend_from_slice(&(len as u64).to_le_bytes());
        };
        add(self.names.version(), self.names.len());
        for part in self.routes.iter().chain([&self.rest]) {
            add(part.version, part.bytes.len());
        }
        add(Version::default(), len);
    }

    /// Writes the virtual host, whose length is known, as a field of its route configuration.
    fn write_field(&self, len: usize, out: &mut Writer<RouteConfiguration>) {
        out.nested_of_length(route_configuration::VIRTUAL_HOSTS, len, |out| self.write(out));
    }
}

/// The size from which route configurations consist of blocks, in bytes.
const MIN_BYTES: usize = 32 << 10;
/// A block ends after one in this many virtual hosts, chosen by their names, so that an additional virtual host does
/// not move the ends of the blocks after it. Blocks are short, because those with a service of the client's namespace
/// are the namespace's own: with 50 namespaces, 15 % of the bytes are distinct, with blocks of 32 virtual hosts 81 %.
const BLOCK_HOSTS: u64 = 4;
/// A block ends at this size in bytes.
const BLOCK_BYTES: usize = 64 << 10;

/// The fields after the virtual hosts.
static REST: LazyLock<Encoded<RouteConfiguration>> = LazyLock::new(|| Encoded::of(&configuration("", Vec::new())));

/// Assembles the route configuration of these virtual hosts, in this order. Large ones share blocks: with 1,000
/// services and 50 namespaces, that saves 43 of 51 MB (bench `scale sotw`).
pub(super) fn assembled(pool: &BlockPool, name: &SmolStr, hosts: &[Host]) -> EncodedResource {
    if is_in_blocks(hosts) {
        let blocks = blocks(pool, hosts).into_iter().map(|(_, block)| block);
        return of_blocks(name, blocks.collect());
    }
    EncodedResource::write(name.clone(), |out| {
        let len = field_len(route_configuration::NAME, name.len()) + fields_len(hosts) + REST.len();
        out.reserve(len);
        out.text(route_configuration::NAME, name);
        for host in hosts {
            host.write_field(host.len(), out);
        }
        out.fields(&REST);
    })
}

/// Returns true if a route configuration is large enough to consist of blocks.
pub(super) fn is_in_blocks(hosts: &[Host]) -> bool {
    fields_len(hosts) >= MIN_BYTES
}

fn fields_len(hosts: &[Host]) -> usize {
    let lens = hosts
        .iter()
        .map(|host| field_len(route_configuration::VIRTUAL_HOSTS, host.len()));
    lens.sum()
}

/// Assembles a route configuration that consists of blocks.
pub(super) fn of_blocks(name: &SmolStr, blocks: Vec<Block>) -> EncodedResource {
    let begin = |out: &mut Writer<RouteConfiguration>| out.text(route_configuration::NAME, name);
    EncodedResource::of_blocks(name.clone(), begin, blocks, &REST)
}

/// Returns the blocks of these virtual hosts, with the positions of those that each consists of.
pub(super) fn blocks<'a>(pool: &BlockPool, hosts: impl IntoIterator<Item = &'a Host>) -> Vec<(Range<usize>, Block)> {
    let (mut blocks, mut next, mut begin, mut end) = (Vec::new(), NextBlock::default(), 0, 0);
    for host in hosts {
        next.add(host);
        end += 1;
        if next.len >= BLOCK_BYTES || host.names.block_hash().is_multiple_of(BLOCK_HOSTS) {
            blocks.push((begin..end, next.end(pool)));
            begin = end;
        }
    }
    if begin < end {
        blocks.push((begin..end, next.end(pool)));
    }
    blocks
}

/// A block to which virtual hosts are added.
#[derive(Default)]
struct NextBlock<'a> {
    /// With their lengths.
    hosts: Vec<(&'a Host, usize)>,
    /// See [`Host::hash`].
    hashed: Vec<u8>,
    /// The length of the block.
    len: usize,
}

impl<'a> NextBlock<'a> {
    fn add(&mut self, host: &'a Host) {
        let len = host.len();
        self.hosts.push((host, len));
        self.len += field_len(route_configuration::VIRTUAL_HOSTS, len);
        host.hash(len, &mut self.hashed);
    }

    /// Returns the block, and begins an empty one.
    fn end(&mut self, pool: &BlockPool) -> Block {
        let block = pool.share(Version::of(&self.hashed), || {
            let mut bytes = Vec::with_capacity(self.len);
            for (host, len) in &self.hosts {
                host.write_field(*len, &mut Writer::new(&mut bytes));
            }
            bytes
        });
        self.hosts.clear();
        self.hashed.clear();
        self.len = 0;
        block
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bytes::Bytes;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::proto::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};

    fn host(number: usize) -> Host {
        let name = format!("svc-{number}.ns.svc.cluster.local");
        let names = Names::Own {
            name: format!("{name}:80"),
            domains: vec![name.clone(), "x".repeat(300)],
        };
        let mut host = Host::plain(names, true);
        let routes = VirtualHost {
            routes: vec![Default::default(); number % 3],
            ..Default::default()
        };
        host.routes.push(Block::new(routes.encode_to_vec().into()));
        host
    }

    fn message(hosts: impl IntoIterator<Item = usize>) -> RouteConfiguration {
        configuration("80", hosts.into_iter().map(|number| host(number).message()).collect())
    }

    fn assembled_of(pool: &BlockPool, hosts: impl IntoIterator<Item = usize>) -> EncodedResource {
        let hosts: Vec<Host> = hosts.into_iter().map(host).collect();
        assembled(pool, &"80".into(), &hosts)
    }

    #[test]
    fn the_bytes_are_those_of_the_message() {
        let pool = BlockPool::default();
        for count in [0, 3, 2000] {
            let resource = assembled_of(&pool, 0..count);
            let expected = message(0..count);
            assert_eq!(resource.any().value, expected.encode_to_vec());
            let delta = DeltaDiscoveryResponse::decode(resource.delta_frame().to_bytes()).expect("a response");
            assert_eq!(delta.resources[0].name, "80");
            assert_eq!(delta.resources[0].version, resource.version.to_string());
            let sotw = DiscoveryResponse::decode(resource.sotw_frame().to_bytes()).expect("a response");
            assert_eq!(Some(&sotw.resources[0]), delta.resources[0].resource.as_ref());
            let frame = resource.delta_frame();
            assert_eq!(frame.bufs().map(Bytes::len).sum::<usize>(), frame.size());
            let by_position: Vec<&Bytes> = (0..).map_while(|position| frame.buf(position)).collect();
            assert_eq!(by_position, frame.bufs().collect::<Vec<_>>());
        }
    }

    /// With a key of the process, each replica would have other blocks, and so other versions of the same bytes.
    #[test]
    fn the_ends_of_blocks_are_the_same_on_every_replica() {
        let hosts: Vec<Host> = (0..100).map(host).collect();
        let blocks = blocks(&BlockPool::default(), &hosts).into_iter();
        let ends: BTreeSet<usize> = blocks.map(|(range, _)| range.end).collect();
        let with_ends = (1..).zip(&hosts);
        let chosen = with_ends.filter(|(_, host)| xxh3_64(host.name().as_bytes()).is_multiple_of(BLOCK_HOSTS));
        let expected: BTreeSet<usize> = chosen.map(|(end, _)| end).chain([hosts.len()]).collect();
        assert_eq!(ends, expected);
    }

    #[test]
    fn large_configurations_share_blocks() {
        let pool = BlockPool::default();
        let (one, same) = (assembled_of(&pool, 0..2000), assembled_of(&pool, 0..2000));
        let other = assembled_of(&pool, (0..2000).filter(|number| *number != 700));
        assert!(one == same && one != other);
        let blocks = |resource: &EncodedResource| -> BTreeSet<*const u8> {
            resource.delta_frame().bufs().map(|buf| buf.as_ptr()).collect()
        };
        let count = blocks(&one).len();
        assert!((200..1000).contains(&count), "{count}");
        // The head and the tail are their own.
        assert_eq!(blocks(&one).intersection(&blocks(&same)).count(), count - 2);
        // Without a virtual host, one block differs, or two become one.
        assert!(blocks(&one).intersection(&blocks(&other)).count() >= count - 4);
    }
}
