//! The registry of live connections, for debug pages.

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
    push::groups::ConnectionId,
};

/// All live connections, oldest first.
#[derive(Debug, Default)]
pub struct Registry {
    numbers: AtomicU64,
    /// Locked for one insertion, removal or listing. With an owner task instead, each page would wait for it.
    connections: Mutex<BTreeMap<u64, Arc<LiveConnection>>>,
    /// Responses that connections with equal subscriptions share.
    cache: Arc<ResponseCache>,
}

/// One connection, from its first request to its end.
#[derive(Debug)]
pub struct LiveConnection {
    /// `<proxy id>-<number>`.
    pub id: SmolStr,
    /// The client's address, if it is known.
    pub peer: Option<SocketAddr>,
    /// The new time of the first request.
    pub connected_at: SystemTime,
    /// The client.
    pub proxy: Arc<Proxy>,
    /// Its id in the push loop.
    pub subscription: ConnectionId,
    /// Its protocol.
    pub protocol: Protocol,
    /// Shared by the stream, which changes it, and debug pages, which read it; never locked across an `await`. A
    /// message to the stream would wait while a response is written, and a copy for debug pages would double the memory
    /// of its names.
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) connection: Connection,
    pub(super) sent_at: [Option<SystemTime>; ResourceType::ALL.len()],
}

/// The state of one type on a connection.
#[derive(Clone, Debug)]
pub struct TypeStatus {
    /// The type.
    pub resource_type: ResourceType,
    /// True for a wildcard subscription.
    pub wildcard: bool,
    /// The names of the subscription, sorted.
    pub names: Vec<SmolStr>,
    /// The nonce of the last response; empty before the first one.
    pub nonce_sent: SmolStr,
    /// The nonce of the last response that was acknowledged.
    pub nonce_acked: SmolStr,
    /// The error of the last response, if it was rejected.
    pub last_error: Option<String>,
    /// The time when the last response was passed to the transport.
    pub sent_at: Option<SystemTime>,
}

impl Registry {
    /// Returns all connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<LiveConnection>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Returns true without connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn register(self: &Arc<Self>, new: NewConnection) -> Registration {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = if new.proxy.node.is_proxyless() {
            Connection::on_demand(new.protocol)
        } else {
            Connection::new(new.protocol)
        };
        let connection = connection.sharing(self.cache.clone());
        let connection = Arc::new(LiveConnection {
            id: format_smolstr!("{}-{number}", new.proxy.id),
            peer: new.peer,
            connected_at: new.connected_at,
            proxy: new.proxy,
            subscription: new.subscription,
            protocol: new.protocol,
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
    /// Returns the state of each subscribed type, in push order.
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

/// The properties of a client that are known at its first request.
pub(super) struct NewConnection {
    pub(super) peer: Option<SocketAddr>,
    pub(super) connected_at: SystemTime,
    pub(super) proxy: Arc<Proxy>,
    pub(super) subscription: ConnectionId,
    pub(super) protocol: Protocol,
}

/// The registration of a connection, which ends when it is dropped.
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
        // Without connections, nothing reuses the cached responses.
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
    fn the_last_connection_clears_the_response_cache() {
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
                subscription: ConnectionId(0),
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
