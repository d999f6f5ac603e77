//! Live connections, for debug pages.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use smol_str::{SmolStr, format_smolstr};

use super::connection::Connection;
use super::protocol::Protocol;
use super::share::response_cache::ResponseCache;
use crate::{
    generate::{ResourceType, proxy::Proxy},
    push::groups::MemberId,
};

/// All live connections, in the order in which they came.
#[derive(Debug, Default)]
pub struct Registry {
    numbers: AtomicU64,
    /// Locked for one insertion, removal or listing at a time; a message to an owner would make each page wait for it.
    connections: Mutex<BTreeMap<u64, Arc<LiveConnection>>>,
    /// What connections are answered that ask alike.
    cache: Arc<ResponseCache>,
}

/// One connection, from its first request to its end.
#[derive(Debug)]
pub struct LiveConnection {
    /// `<proxy id>-<number>`.
    pub id: SmolStr,
    /// The client's address; `None` where the server does not know it.
    pub peer: Option<SocketAddr>,
    /// When the first request came.
    pub connected_at: SystemTime,
    /// The client.
    pub proxy: Arc<Proxy>,
    /// Its place in its group.
    pub subscription: MemberId,
    /// What it speaks.
    pub protocol: Protocol,
    /// Shared by the stream, which changes it, and debug pages, which copy from it: never held across an `await`. A
    /// message to the stream would wait while a response is written, and a copy for each request would double its names.
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) connection: Connection,
    pub(super) sent_at: [Option<SystemTime>; ResourceType::ALL.len()],
}

/// What a connection holds of one type.
#[derive(Clone, Debug)]
pub struct TypeStatus {
    /// The type.
    pub resource_type: ResourceType,
    /// Everything of the type is wanted.
    pub wildcard: bool,
    /// Names that are wanted one by one, sorted.
    pub names: Vec<SmolStr>,
    /// Nonce of the last response; empty before it.
    pub nonce_sent: SmolStr,
    /// Nonce of the last response that was accepted.
    pub nonce_acked: SmolStr,
    /// Why the last response was refused, if it was.
    pub last_error: Option<String>,
    /// When the last response was handed to the transport.
    pub sent_at: Option<SystemTime>,
}

impl Registry {
    /// All connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<LiveConnection>> {
        self.lock().values().cloned().collect()
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True without connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn register(self: &Arc<Self>, arrival: NewConnection) -> Registration {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = if arrival.proxy.is_proxyless() {
            Connection::on_demand(arrival.protocol)
        } else {
            Connection::new(arrival.protocol)
        };
        let connection = connection.sharing(self.cache.clone());
        let connection = Arc::new(LiveConnection {
            id: format_smolstr!("{}-{number}", arrival.proxy.id),
            peer: arrival.peer,
            connected_at: arrival.connected_at,
            proxy: arrival.proxy,
            subscription: arrival.subscription,
            protocol: arrival.protocol,
            state: Mutex::new(State {
                connection,
                sent_at: Default::default(),
            }),
        });
        self.lock().insert(number, connection.clone());
        Registration {
            registry: self.clone(),
            number,
            connection,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<LiveConnection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveConnection {
    /// What the connection holds of each type that it watches, in push order.
    pub fn types(&self) -> Vec<TypeStatus> {
        let state = self.state();
        let watched = ResourceType::ALL
            .iter()
            .filter_map(|resource_type| Some((*resource_type, state.connection.watched(*resource_type)?)));
        watched
            .map(|(resource_type, watched)| TypeStatus {
                resource_type,
                wildcard: watched.wildcard,
                names: watched.names.iter().cloned().collect(),
                nonce_sent: watched.nonce_sent.clone(),
                nonce_acked: watched.nonce_acked.clone(),
                last_error: watched.last_error.clone(),
                sent_at: state.sent_at[resource_type as usize],
            })
            .collect()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of a client at its first request.
pub(super) struct NewConnection {
    pub(super) peer: Option<SocketAddr>,
    pub(super) connected_at: SystemTime,
    pub(super) proxy: Arc<Proxy>,
    pub(super) subscription: MemberId,
    pub(super) protocol: Protocol,
}

/// A place in the registry, given back when dropped.
pub(super) struct Registration {
    registry: Arc<Registry>,
    number: u64,
    pub(super) connection: Arc<LiveConnection>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut connections = self.registry.lock();
        connections.remove(&self.number);
        let was_last = connections.is_empty();
        drop(connections);
        // There is nobody who would ask again for what was answered.
        if was_last {
            self.registry.cache.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{generate::fixture, xds::share::response_cache::tests::long_snapshot};

    #[test]
    fn the_last_connection_takes_along_what_was_answered() {
        let registry = Arc::new(Registry::default());
        let proxy = Arc::new(fixture::client(
            "sidecar~10.0.0.1~a.default~default.svc.cluster.local",
            &json!({}),
        ));
        let registered = || {
            registry.register(NewConnection {
                peer: None,
                connected_at: SystemTime::UNIX_EPOCH,
                proxy: proxy.clone(),
                subscription: MemberId(0),
                protocol: Protocol::Sotw,
            })
        };
        let (first, last) = (registered(), registered());
        let answer = registry.cache.all(ResourceType::Cluster, &long_snapshot(), None);
        let kept = Arc::downgrade(&answer.resources);
        drop(answer);
        drop(first);
        assert!(kept.upgrade().is_some());
        drop(last);
        assert!(kept.upgrade().is_none());
    }
}
