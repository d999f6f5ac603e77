//! The registry of live connections, for debug pages.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use imbl::OrdSet;
use smol_str::{SmolStr, format_smolstr};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::admission::Source;
use super::connection::Connection;
use super::protocol::Protocol;
use super::share::{
    held::{Charge, HeldBytes},
    quarantine::{Build, Quarantine, Refusal},
    response_cache::ResponseCache,
};
use super::watched::Progress;
use crate::{
    base::Version,
    generate::{ResourceType, proxy::Proxy, resource::UnknownRoutes},
    push::groups::ConnectionId,
};

/// The time within which evicted connections release their memory. Until then, nothing else is evicted, and clients
/// that hold more than one part in [`LARGE`] of the limit are refused.
const EVICTION: Duration = Duration::from_millis(500);
const LARGE: usize = 64;
/// The size of a client's node metadata up to which it does not count. That of most nodes is a tenth of it.
const USUAL_METADATA: usize = 64 << 10;

/// All live connections, oldest first.
#[derive(Debug, Default)]
pub struct ConnectionRegistry {
    numbers: AtomicU64,
    /// Locked for one insertion, removal or listing. With an owner task instead, each page would wait for it.
    connections: Mutex<BTreeMap<u64, Arc<LiveConnection>>>,
    /// The time of the last eviction. Locked for a comparison.
    last_eviction: Mutex<Option<Instant>>,
    /// Responses that connections with equal subscriptions share.
    cache: Arc<ResponseCache>,
    /// The quarantine of refused resources; none if it is off.
    quarantine: Option<Arc<Quarantine>>,
    /// Changes whenever a client connects, disconnects, or answers a response.
    answers: watch::Sender<u64>,
}

/// The error for a subscription that needs more memory than all clients may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the subscriptions of all clients hold more than {limit_mib} MiB, and those of this client are among the largest; \
     hint: subscribe to fewer names, or raise PILOT_XDS_SUBSCRIPTION_MEMORY_MB"
)]
pub struct SubscriptionMemory {
    /// The limit.
    pub limit_mib: usize,
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
    /// The source of its requests.
    source: Source,
    /// The build of the client.
    build: Build,
    /// The memory of unusually large node metadata.
    metadata: Option<Arc<Charge>>,
    /// Cancelled when it must make room for others, or is closed by an operator.
    evicted: CancellationToken,
    /// True if an operator closes it.
    closed: AtomicBool,
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

/// The reason why a connection is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    /// It must make room for others.
    Memory,
    /// An operator closes it.
    Closed,
}

/// A resource that a client refused.
#[derive(Clone, Debug)]
pub struct RefusedResource {
    /// The connection.
    pub connection: Arc<LiveConnection>,
    /// The refusal.
    pub refusal: Arc<Refusal>,
}

/// The state of one type on a connection.
#[derive(Clone, Debug)]
pub struct TypeStatus {
    /// The type.
    pub resource_type: ResourceType,
    /// True for a wildcard subscription.
    pub wildcard: bool,
    /// The names of the subscription, shared with it: a page shows ten thousand clients with thousands of names each.
    pub names: OrdSet<SmolStr>,
    /// The nonce of the last response; empty before the first one.
    pub nonce_sent: SmolStr,
    /// The nonce of the last response that was acknowledged.
    pub nonce_acked: SmolStr,
    /// The error of the last response, if it was rejected.
    pub last_error: Option<String>,
    /// The time when the last response was passed to the transport.
    pub sent_at: Option<SystemTime>,
}

/// The connections of one source, with the memory that their subscriptions hold.
#[derive(Default)]
struct HeldBySource {
    total: usize,
    connections: Vec<(usize, Arc<LiveConnection>)>,
}

impl HeldBySource {
    fn add(&mut self, size_bytes: usize, connection: Arc<LiveConnection>) {
        self.total += size_bytes;
        self.connections.push((size_bytes, connection));
    }

    fn take_largest(&mut self) -> Option<(usize, Arc<LiveConnection>)> {
        let sizes = self.connections.iter().enumerate();
        let (at, _) = sizes.max_by_key(|(_, (size_bytes, _))| *size_bytes)?;
        let largest = self.connections.swap_remove(at);
        self.total -= largest.0;
        Some(largest)
    }
}

impl ConnectionRegistry {
    /// Creates a registry whose connections charge their subscriptions here.
    pub(super) fn new(held: Arc<HeldBytes>, quarantine: Option<Arc<Quarantine>>) -> Self {
        Self {
            cache: Arc::new(ResponseCache::new(held)),
            quarantine,
            ..Self::default()
        }
    }

    /// Evicts the largest subscriptions of the source that holds most, while all hold more than the limit. Clients
    /// without authentication never displace others: while they hold more than half of the limit, they go first. Fails
    /// if the subscriptions of this connection must go.
    pub(super) fn make_room(&self, own: &LiveConnection, limit_bytes: usize) -> Result<(), SubscriptionMemory> {
        let held = || self.cache.held().get();
        if held() <= limit_bytes {
            return Ok(());
        }
        self.cache.drop_unused();
        let refused = SubscriptionMemory {
            limit_mib: limit_bytes >> 20,
        };
        if self.is_evicting() {
            let is_large = own.held_bytes() > limit_bytes / LARGE;
            return if is_large { Err(refused) } else { Ok(()) };
        }
        let mut excess = held().saturating_sub(limit_bytes);
        let mut by_source: BTreeMap<Source, HeldBySource> = BTreeMap::new();
        for connection in self.connections() {
            let size_bytes = connection.held_bytes();
            if connection.evicted.is_cancelled() {
                excess = excess.saturating_sub(size_bytes);
            } else if size_bytes > 0 {
                by_source
                    .entry(connection.source.clone())
                    .or_default()
                    .add(size_bytes, connection);
            }
        }
        while excess > 0 {
            let of_unauthenticated = by_source.iter().filter(|(source, _)| !source.is_authenticated());
            let unauthenticated: usize = of_unauthenticated.map(|(_, held)| held.total).sum();
            let spares_authenticated = unauthenticated > limit_bytes / 2;
            let heaviest = by_source
                .iter_mut()
                .filter(|(source, _)| !(spares_authenticated && source.is_authenticated()))
                .max_by_key(|(_, held)| held.total);
            let Some((size_bytes, connection)) = heaviest.and_then(|(_, held)| held.take_largest()) else {
                return Ok(());
            };
            if std::ptr::eq(own, Arc::as_ptr(&connection)) {
                return Err(refused);
            }
            connection.evicted.cancel();
            *self.last_eviction.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            excess = excess.saturating_sub(size_bytes);
        }
        Ok(())
    }

    /// Returns true while evicted connections may still hold their memory.
    fn is_evicting(&self) -> bool {
        let last = *self.last_eviction.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < EVICTION)
    }

    /// Returns all connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<LiveConnection>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the number of the newest connection; later ones have greater numbers.
    pub fn newest(&self) -> Option<u64> {
        self.lock().keys().next_back().copied()
    }

    /// Returns a receiver that changes whenever a client connects, disconnects, or answers a response.
    pub fn answers(&self) -> watch::Receiver<u64> {
        self.answers.subscribe()
    }

    /// Notifies those that wait for answers.
    pub(super) fn answered(&self) {
        if self.answers.receiver_count() > 0 {
            self.answers.send_modify(|answers| *answers += 1);
        }
    }

    /// Records which refused resources are held by clients of the same source and build. [`Quarantine::accept`] records
    /// only what they acknowledge after the first refusal.
    pub(super) fn accept_held(&self, own: &LiveConnection, refused: &[Arc<Refusal>]) {
        let new: Vec<&Arc<Refusal>> = refused.iter().filter(|refusal| refusal.must_be_compared()).collect();
        if new.is_empty() {
            return;
        }
        // Thousands of identities may refuse a resource at once, and each looks for its own clients among all.
        let connections = self.lock();
        let others = connections.values().filter(|other| other.build == own.build);
        let others: Vec<Arc<LiveConnection>> = others.cloned().collect();
        drop(connections);
        for other in others {
            let resources = new
                .iter()
                .map(|refusal| (refusal.resource_type, &refusal.name, Some(refusal.version)));
            for (refusal, progress) in new.iter().zip(other.progress(resources)) {
                if matches!(progress, Progress::Acknowledged) {
                    refusal.accept();
                }
            }
        }
    }

    /// Drops the responses that connections with equal subscriptions share.
    pub fn clear_responses(&self) {
        self.cache.clear();
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
        let build = Build::of(&new.proxy.node, &new.source);
        let quarantine = self.quarantine.clone().map(|quarantine| (quarantine, build));
        let connection = connection.sharing(self.cache.clone()).with_quarantine(quarantine);
        let metadata = new.proxy.metadata.size_bytes().saturating_sub(USUAL_METADATA);
        let connection = Arc::new(LiveConnection {
            id: format_smolstr!("{}-{number}", new.proxy.id),
            peer: new.peer,
            connected_at: new.connected_at,
            proxy: new.proxy,
            subscription: new.subscription,
            protocol: new.protocol,
            source: new.source,
            build,
            metadata: (metadata > 0).then(|| self.cache.held().charge(metadata)),
            evicted: CancellationToken::new(),
            closed: AtomicBool::new(false),
            state: Mutex::new(State {
                connection,
                sent_at: Default::default(),
            }),
        });
        self.lock().insert(number, connection.clone());
        self.answered();
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
    /// Closes the connection; the client may connect again.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.evicted.cancel();
    }

    /// Waits until the connection must make room for others, or is closed by an operator.
    pub(super) async fn evicted(&self) -> Eviction {
        self.evicted.cancelled().await;
        if self.closed.load(Ordering::Acquire) {
            Eviction::Closed
        } else {
            Eviction::Memory
        }
    }

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
                names: watched.names.clone(),
                nonce_sent: watched.nonce_sent.clone(),
                nonce_acked: watched.nonce_acked.clone(),
                last_error: watched.last_error.clone(),
                sent_at: state.sent_at[resource_type as usize],
            })
            .collect()
    }

    /// Returns the progress of resources with the versions that they should have; `None` for those that should not
    /// exist.
    pub fn progress<'a>(
        &self,
        resources: impl IntoIterator<Item = (ResourceType, &'a SmolStr, Option<Version>)>,
    ) -> Vec<Progress> {
        let state = self.state();
        let progress = |(resource_type, name, version)| match state.connection.watched(resource_type) {
            Some(watched) => watched.progress(name, version),
            None => Progress::Unrequested,
        };
        resources.into_iter().map(progress).collect()
    }

    /// Returns the progress of the answers to unknown names of route configurations.
    pub fn progress_of_unknown_routes(&self, wanted: &UnknownRoutes) -> Progress {
        let state = self.state();
        let (Some(latest), Some(routes)) = (state.connection.latest(), state.connection.watched(ResourceType::Route))
        else {
            return Progress::Unrequested;
        };
        let view = latest.resources(ResourceType::Route);
        if routes.names.iter().all(|name| view.get(name).is_some()) {
            Progress::Unrequested
        } else if latest.unknown_routes != *wanted || !routes.is_up_to_date(view) {
            Progress::Waiting
        } else if routes.in_flight.is_some() {
            Progress::Sent
        } else {
            Progress::Acknowledged
        }
    }

    /// Returns the refusals of the resources that are withheld from the client, and the errors of responses that it
    /// rejected for another reason, by type.
    pub fn refusals(&self) -> (Vec<Arc<Refusal>>, Vec<(ResourceType, String)>) {
        let state = self.state();
        let (mut refusals, mut errors) = (Vec::new(), Vec::new());
        for resource_type in ResourceType::ALL {
            let Some(watched) = state.connection.watched(*resource_type) else {
                continue;
            };
            refusals.extend(watched.refused.values().map(|withheld| withheld.refusal.clone()));
            if let Some(error) = watched.last_error.as_ref().filter(|_| watched.refused.is_empty()) {
                errors.push((*resource_type, error.clone()));
            }
        }
        (refusals, errors)
    }

    /// Returns true if everything was sent and answered.
    pub fn is_settled(&self) -> bool {
        self.state().connection.is_settled()
    }

    /// Returns the memory that its subscriptions and its metadata hold.
    fn held_bytes(&self) -> usize {
        let metadata = self.metadata.as_ref().map_or(0, Charge::share);
        self.state().connection.held_bytes() + metadata
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
    pub(super) source: Source,
}

/// The registration of a connection, which ends when it is dropped.
pub(super) struct Registration {
    registry: Arc<ConnectionRegistry>,
    number: u64,
    pub(super) connection: Arc<LiveConnection>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut connections = self.registry.lock();
        connections.remove(&self.number);
        let was_last = connections.is_empty();
        drop(connections);
        self.registry.answered();
        // Without connections, nothing reuses the cached responses.
        if was_last {
            self.registry.clear_responses();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{generate::fixture, xds::share::response_cache::tests::long_snapshot};

    /// Registers a client that subscribes to this many names, which no other client has.
    fn subscriber(registry: &Arc<ConnectionRegistry>, source: &Source, id: &str, names: usize) -> Registration {
        use crate::xds::{connection::SubscriptionChange, share::names::NameListInterner};
        let node = format!("sidecar~10.0.0.1~{id}.default~default.svc.cluster.local");
        let registration = registry.register(NewConnection {
            peer: None,
            connected_at: SystemTime::UNIX_EPOCH,
            proxy: Arc::new(fixture::client(&node, &json!({}))),
            subscription: ConnectionId(0),
            protocol: Protocol::Sotw,
            source: source.clone(),
        });
        let names: Vec<String> = (0..names).map(|number| format!("{id}-{number}.svc")).collect();
        let mut fields = Vec::new();
        prost::encoding::string::encode_repeated(3, &names, &mut fields);
        let interner = NameListInterner::new(registry.cache.held().clone());
        let request = crate::xds::Request {
            resource_type: ResourceType::Endpoint,
            nonce: SmolStr::default(),
            error: None,
            change: SubscriptionChange::Names(interner.read(fields.into()).expect("valid names")),
        };
        let subscribed = registration.connection.state().connection.on_request(request);
        subscribed.expect("few names");
        registration
    }

    #[test]
    fn r20_large_subscriptions_make_room_for_others() {
        let registry = Arc::new(ConnectionRegistry::new(Arc::default(), None));
        let (greedy, modest) = (Source::Address(None), Source::Identity("gateway".into()));
        let large = subscriber(&registry, &greedy, "large", 5000);
        let larger = subscriber(&registry, &greedy, "larger", 6000);
        let gateway = subscriber(&registry, &modest, "gateway", 9000);
        let limit = registry.cache.held().get();
        registry.make_room(&gateway.connection, limit).expect("just enough");
        let small = subscriber(&registry, &greedy, "small", 100);
        registry.make_room(&small.connection, limit).expect("others are larger");
        let evicted = |of: &Registration| of.connection.evicted.is_cancelled();
        assert!(evicted(&larger) && !evicted(&large) && !evicted(&gateway) && !evicted(&small));
        let huge = subscriber(&registry, &greedy, "huge", 20_000);
        let refused = registry.make_room(&huge.connection, limit);
        assert!(refused.is_err_and(|error| error.to_string().contains("PILOT_XDS_SUBSCRIPTION_MEMORY_MB")));
        drop((large, larger, gateway, small, huge));
        assert_eq!(registry.cache.held().get(), 0);
    }

    #[test]
    fn the_state_of_a_type_shares_the_names_of_the_subscription() {
        let registry = Arc::new(ConnectionRegistry::new(Arc::default(), None));
        let client = subscriber(&registry, &Source::Address(None), "client", 5000);
        let types = client.connection.types();
        let state = client.connection.state();
        let watched = state
            .connection
            .watched(ResourceType::Endpoint)
            .expect("a subscription");
        assert_eq!((types.len(), types[0].names.len()), (1, 5000));
        assert!(types[0].names.ptr_eq(&watched.names));
    }

    #[test]
    fn r20_large_metadata_makes_room_for_others() {
        let registry = Arc::new(ConnectionRegistry::new(Arc::default(), None));
        let registered = |size_bytes: usize| {
            let metadata = json!({"ANNOTATIONS": {"a": "x".repeat(size_bytes)}});
            registry.register(NewConnection {
                peer: None,
                connected_at: SystemTime::UNIX_EPOCH,
                proxy: Arc::new(fixture::client(
                    "sidecar~10.0.0.1~a.default~default.svc.cluster.local",
                    &metadata,
                )),
                subscription: ConnectionId(0),
                protocol: Protocol::Sotw,
                source: Source::Address(None),
            })
        };
        let held = || registry.cache.held().get();
        let usual = registered(USUAL_METADATA / 2);
        assert_eq!(held(), 0);
        let large = registered(2 * USUAL_METADATA);
        assert!(held() >= USUAL_METADATA);
        registry
            .make_room(&usual.connection, held() - 1)
            .expect("the other one is larger");
        let evicted = |of: &Registration| of.connection.evicted.is_cancelled();
        assert!(evicted(&large) && !evicted(&usual));
        drop((usual, large));
        assert_eq!(held(), 0);
    }

    #[test]
    fn the_last_connection_clears_the_response_cache() {
        let registry = Arc::new(ConnectionRegistry::default());
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
                source: Source::Address(None),
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
