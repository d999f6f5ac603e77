//! Limits for unauthenticated connections: their number, their streams, and the invalid requests of a connection
//! (compare `MaxStartups` of OpenSSH).
//!
//! When the limiter is full, it evicts the oldest connection of the address with the most connections. So a thousand
//! half-open connections of one client displace connections of that client only.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicIsize, AtomicU32, AtomicUsize, Ordering},
    },
    task::Context,
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

/// The minimum age of a connection that may be evicted.
const MIN_AGE: Duration = Duration::from_secs(1);
/// The maximum number of open streams of an unauthenticated connection: more than any client opens before its first
/// response.
const UNAUTHENTICATED_STREAMS: u32 = 16;
/// The number of streams of an unauthenticated connection that reach the HTTP/2 server at a time. Each has credentials
/// in its headers, so none depends on another.
const STREAMS_AT_A_TIME: usize = 1;
/// The maximum number of streams of an admitted connection that wait for their first message or their response.
pub(super) const MAX_WAITING_STREAMS: usize = 256;
/// The number of such streams of all connections above which each connection may have only [`FEW_WAITING_STREAMS`].
const MANY_WAITING_STREAMS: isize = 4096;
const FEW_WAITING_STREAMS: usize = 8;
/// The maximum number of streams of a connection that [`UnauthenticatedConnection::serve_long_stream`] counts.
pub(super) const MAX_LONG_STREAMS: u32 = 4;
/// The number of violations after which a connection is closed, and the rate at which they are forgotten.
const MAX_VIOLATIONS: f64 = 100.0;
const VIOLATIONS_FORGOTTEN_PER_SECOND: f64 = 1.0;

/// A bounded set of unauthenticated connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PreAuthLimiter {
    capacity: u32,
    min_age: Duration,
    inner: Arc<Mutex<Inner>>,
    /// The number of streams of all connections that wait for their first message or their response.
    waiting_streams: Arc<AtomicIsize>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    connections: BTreeMap<u64, Entry>,
    /// The numbers of the connections of each address; the lowest is the oldest.
    by_source: BTreeMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
    since: Instant,
    evicted: CancellationToken,
}

/// The error for a full limiter whose connections are all younger than the minimum age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many connections are being opened")]
pub struct Full;

impl PreAuthLimiter {
    /// Creates a limiter for this many connections; at least one.
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity.max(1),
            min_age: MIN_AGE,
            inner: Arc::default(),
            waiting_streams: Arc::default(),
        }
    }

    /// Adds a connection from this address. Evicts another one if the limiter is full.
    pub fn register(&self, source: IpAddr) -> Result<Arc<UnauthenticatedConnection>, Full> {
        let mut inner = self.lock();
        if inner.connections.len() >= self.capacity as usize {
            inner.evict(self.min_age).ok_or(Full)?;
        }
        let number = inner.next;
        inner.next += 1;
        let evicted = CancellationToken::new();
        let entry = Entry {
            source,
            since: Instant::now(),
            evicted: evicted.clone(),
        };
        inner.connections.insert(number, entry);
        inner.by_source.entry(source).or_default().insert(number);
        Ok(Arc::new(UnauthenticatedConnection {
            limiter: self.clone(),
            number,
            evicted,
            admitted: AtomicBool::new(false),
            credentials_accepted: AtomicBool::new(false),
            read_unlimited: AtomicBool::new(false),
            large_data: LargeData::default(),
            reader: AtomicWaker::new(),
            streams: AtomicU32::new(0),
            served: AtomicUsize::new(0),
            long: AtomicU32::new(0),
            consumed: AtomicUsize::new(0),
            waiting: AtomicU32::new(0),
            violations: Mutex::new((0.0, Instant::now())),
        }))
    }

    /// Returns the number of unauthenticated connections.
    pub fn len(&self) -> usize {
        self.lock().connections.len()
    }

    /// Returns true without unauthenticated connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Evicts the oldest connection of the address with the most connections. Returns false if it is too young.
    pub fn evict_oldest(&self) -> bool {
        self.lock().evict(self.min_age).is_some()
    }

    /// Evicts the oldest connection of this address. Returns false if there is none, or if it is too young.
    pub fn evict_oldest_of(&self, source: IpAddr) -> bool {
        self.lock().evict_of(source, self.min_age).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn evict(&mut self, min_age: Duration) -> Option<()> {
        let most = self.by_source.iter().max_by_key(|(_, numbers)| numbers.len());
        let source = most.map(|(source, _)| *source)?;
        self.evict_of(source, min_age)
    }

    fn evict_of(&mut self, source: IpAddr, min_age: Duration) -> Option<()> {
        let oldest = *self.by_source.get(&source)?.first()?;
        let entry = self.connections.get(&oldest)?;
        if entry.since.elapsed() < min_age {
            return None;
        }
        entry.evicted.cancel();
        self.remove(oldest);
        Some(())
    }

    fn remove(&mut self, number: u64) {
        let Some(entry) = self.connections.remove(&number) else {
            return;
        };
        if let Some(numbers) = self.by_source.get_mut(&entry.source) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_source.remove(&entry.source);
            }
        }
    }
}

/// A connection that starts unauthenticated, and its way out of the pre-authentication limits. In the extensions of its
/// requests.
///
/// It passes three steps: [`Self::accept_credentials`] lets it send requests, [`Self::admit`] removes it from the
/// limiter, and [`Self::lift_read_limit`] lets it send without bounds.
#[derive(Debug)]
pub struct UnauthenticatedConnection {
    limiter: PreAuthLimiter,
    number: u64,
    evicted: CancellationToken,
    admitted: AtomicBool,
    credentials_accepted: AtomicBool,
    read_unlimited: AtomicBool,
    large_data: LargeData,
    /// The reader, which waits for [`Self::accept_credentials`].
    reader: AtomicWaker,
    /// The number of open streams without a response.
    streams: AtomicU32,
    /// The number of streams that are served after their first message.
    served: AtomicUsize,
    /// The number of streams of [`Self::serve_long_stream`].
    long: AtomicU32,
    /// The number of request bytes that the service has consumed.
    consumed: AtomicUsize,
    /// The number of streams with a response that wait for their first message.
    waiting: AtomicU32,
    /// The number of violations, and the time of the last one.
    violations: Mutex<(f64, Instant)>,
}

/// Large DATA frames at the start of a connection. They are not passed on before a service has room for their request.
#[derive(Debug, Default)]
struct LargeData {
    is_waiting: AtomicBool,
    is_allowed: AtomicBool,
    /// Notified when a frame begins to wait.
    waits: Notify,
}

impl UnauthenticatedConnection {
    /// Admits the connection: it leaves the limiter and has no time limit any more.
    pub fn admit(&self) {
        self.accept_credentials();
        if !self.admitted.swap(true, Ordering::AcqRel) {
            self.limiter.lock().remove(self.number);
            self.reader.wake();
        }
    }

    /// Returns true after [`Self::admit`].
    pub fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Acquire)
    }

    /// Lifts the read limit, before the first configuration is written. Until then the data of thousands of connections
    /// stays in the buffers of the clients. The frames that say that a client has read come behind its requests, so
    /// those must not hold them up while responses are written.
    pub fn lift_read_limit(&self) {
        if !self.read_unlimited.swap(true, Ordering::AcqRel) {
            self.reader.wake();
        }
    }

    /// Returns true after [`Self::lift_read_limit`].
    pub fn is_read_unlimited(&self) -> bool {
        self.read_unlimited.load(Ordering::Acquire)
    }

    /// Waits until the client has sent a large frame, which waits for [`Self::allow_large_data`].
    pub async fn large_data_waits(&self) {
        let LargeData {
            is_waiting,
            is_allowed,
            waits,
        } = &self.large_data;
        loop {
            let waits = waits.notified();
            if is_waiting.load(Ordering::Acquire) && !is_allowed.load(Ordering::Acquire) {
                return;
            }
            waits.await;
        }
    }

    /// Lets the client send large frames from now on.
    pub fn allow_large_data(&self) {
        if !self.large_data.is_allowed.swap(true, Ordering::AcqRel) {
            self.reader.wake();
        }
    }

    /// Returns true after [`Self::allow_large_data`].
    pub(super) fn is_large_data_allowed(&self) -> bool {
        self.large_data.is_allowed.load(Ordering::Acquire)
    }

    /// Records that a large frame waits.
    pub(super) fn hold_large_data(&self) {
        if !self.large_data.is_waiting.swap(true, Ordering::AcqRel) {
            self.large_data.waits.notify_waiters();
        }
    }

    /// Records valid credentials, or that none are required. From now on data is read as it is consumed; before, a few
    /// kilobytes in total.
    pub fn accept_credentials(&self) {
        if !self.credentials_accepted.swap(true, Ordering::AcqRel) {
            self.reader.wake();
        }
    }

    /// Returns true after [`Self::accept_credentials`]. Wakes the task when the result or the read limit changes, until
    /// the limit is lifted.
    pub(super) fn has_accepted_credentials(&self, cx: &Context<'_>) -> bool {
        if !self.is_read_unlimited() {
            self.reader.register(cx.waker());
        }
        self.credentials_accepted.load(Ordering::Acquire)
    }

    /// Wakes the task when the result of one of these methods changes.
    pub(super) fn wake_on_change(&self, cx: &Context<'_>) {
        self.reader.register(cx.waker());
    }

    /// Wakes the task of [`Self::wake_on_change`].
    pub(super) fn wake_reader(&self) {
        self.reader.wake();
    }

    /// Returns the maximum number of open streams. Streams that are served do not count: other limits apply to them.
    pub(super) fn max_open_streams(&self) -> usize {
        let waiting = if !self.credentials_accepted.load(Ordering::Acquire) {
            STREAMS_AT_A_TIME
        } else if !self.is_admitted() {
            UNAUTHENTICATED_STREAMS as usize
        } else if self.limiter.waiting_streams.load(Ordering::Acquire) > MANY_WAITING_STREAMS {
            FEW_WAITING_STREAMS
        } else {
            MAX_WAITING_STREAMS
        };
        waiting + self.served.load(Ordering::Acquire)
    }

    /// Records a change of the number of open streams.
    pub(super) fn count_open_streams(&self, before: usize, after: usize) {
        let change = after.cast_signed() - before.cast_signed();
        if change != 0 {
            self.limiter.waiting_streams.fetch_add(change, Ordering::AcqRel);
        }
    }

    /// Records a stream whose first message has arrived. The handle is held until the stream ends.
    pub fn serve_stream(self: &Arc<Self>) -> ServedStream {
        self.served.fetch_add(1, Ordering::AcqRel);
        self.count_open_streams(1, 0);
        self.reader.wake();
        ServedStream(self.clone())
    }

    /// Records a stream that has no other limits and may last as long as the connection; `None` if the connection has
    /// too many. Such a stream does not keep others waiting, before admission either: clients may watch the health of a
    /// server before they use it.
    pub(super) fn serve_long_stream(self: &Arc<Self>) -> Option<LongStream> {
        let more = |streams| (streams < MAX_LONG_STREAMS).then_some(streams + 1);
        let counted = self.long.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.ok().map(|_| LongStream(self.serve_stream()))
    }

    /// Records request bytes that the service has consumed.
    pub fn record_consumed(&self, bytes: usize) {
        if !self.is_read_unlimited() {
            self.consumed.fetch_add(bytes, Ordering::AcqRel);
            self.reader.wake();
        }
    }

    /// Returns the number of consumed bytes before the read limit was lifted. More bytes wake the task of
    /// [`Self::has_accepted_credentials`].
    pub(super) fn consumed(&self) -> usize {
        self.consumed.load(Ordering::Acquire)
    }

    /// Records a violation: a stream that was reset before its response, or invalid credentials. Too many of these
    /// close the connection.
    pub fn record_violation(&self) {
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let forgotten = now.duration_since(violations.1).as_secs_f64() * VIOLATIONS_FORGOTTEN_PER_SECOND;
        *violations = ((violations.0 - forgotten).max(0.0) + 1.0, now);
        if violations.0 > MAX_VIOLATIONS {
            tracing::debug!(reason = "too many violations", "closing connection");
            self.evicted.cancel();
        }
    }

    /// Closes the connection at once, because its client does not read.
    pub fn close(&self) {
        self.evicted.cancel();
    }

    /// Waits until the connection must be closed at once.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Records a new stream. The handle is held until its response.
    pub(super) fn open_stream(self: &Arc<Self>) -> OpenStream {
        let streams = self.streams.fetch_add(1, Ordering::AcqRel) + 1;
        if streams > UNAUTHENTICATED_STREAMS && !self.is_admitted() {
            tracing::debug!(
                streams,
                reason = "too many streams before admission",
                "closing connection"
            );
            self.evicted.cancel();
        }
        OpenStream {
            pre_auth: self.clone(),
            answered: false,
        }
    }

    /// Records a stream that waits for its first message, which drops the handle. Silent streams use as much memory as
    /// others, and without authentication they are all that is known of a connection.
    pub fn open_silent_stream(self: &Arc<Self>) -> SilentStream {
        let waiting = self.waiting.fetch_add(1, Ordering::AcqRel) + 1;
        let most = if self.is_admitted() {
            MAX_WAITING_STREAMS as u32
        } else {
            UNAUTHENTICATED_STREAMS
        };
        if waiting > most {
            tracing::debug!(waiting, reason = "too many silent streams", "closing connection");
            self.evicted.cancel();
        }
        SilentStream(self.clone())
    }
}

/// A stream that waits for its first message.
#[derive(Debug)]
pub struct SilentStream(Arc<UnauthenticatedConnection>);

impl Drop for SilentStream {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A stream whose first message has arrived.
#[derive(Debug)]
pub struct ServedStream(Arc<UnauthenticatedConnection>);

impl Drop for ServedStream {
    fn drop(&mut self) {
        self.0.served.fetch_sub(1, Ordering::AcqRel);
        self.0.count_open_streams(0, 1);
    }
}

/// A stream of [`UnauthenticatedConnection::serve_long_stream`].
#[derive(Debug)]
pub(super) struct LongStream(ServedStream);

impl Drop for LongStream {
    fn drop(&mut self) {
        self.0.0.long.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for UnauthenticatedConnection {
    fn drop(&mut self) {
        if !self.is_admitted() {
            self.limiter.lock().remove(self.number);
        }
    }
}

/// A stream that waits for its response.
pub(super) struct OpenStream {
    pre_auth: Arc<UnauthenticatedConnection>,
    answered: bool,
}

impl OpenStream {
    /// Records the response.
    pub(super) fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.pre_auth.streams.fetch_sub(1, Ordering::AcqRel);
        if !self.answered {
            self.pre_auth.record_violation();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    #[test]
    fn the_address_with_most_connections_is_evicted_from() {
        let mut limiter = PreAuthLimiter::new(3);
        let first = limiter.register(source(1)).expect("an empty limiter");
        let same_address =
            [limiter.register(source(2)), limiter.register(source(2))].map(|pre_auth| pre_auth.expect("free capacity"));
        assert_eq!(limiter.register(source(3)).err(), Some(Full), "all are too young");
        limiter.min_age = Duration::ZERO;
        let late = limiter.register(source(3)).expect("an evicted connection");
        assert!(same_address[0].evicted.is_cancelled() && !same_address[1].evicted.is_cancelled());
        assert!(
            !first.evicted.is_cancelled(),
            "an older connection of an address with fewer stays"
        );
        late.admit();
        assert_eq!(limiter.len(), 2);
        drop(first);
        drop(same_address);
        assert!(limiter.is_empty());
    }

    #[test]
    fn connections_of_a_given_address_are_evicted() {
        let mut limiter = PreAuthLimiter::new(3);
        limiter.min_age = Duration::ZERO;
        let [first, second, other] = [1, 1, 2].map(|last| limiter.register(source(last)).expect("free capacity"));
        assert!(limiter.evict_oldest_of(source(2)) && other.evicted.is_cancelled());
        assert!(!limiter.evict_oldest_of(source(2)), "it has no more");
        assert!(limiter.evict_oldest_of(source(1)) && first.evicted.is_cancelled());
        assert!(!second.evicted.is_cancelled());
    }

    #[test]
    fn r3_too_many_violations_close_the_connection() {
        let pre_auth = PreAuthLimiter::new(1).register(source(1)).expect("an empty limiter");
        pre_auth.admit();
        for _ in 0..100 {
            pre_auth.open_stream().answered();
            drop(pre_auth.open_stream());
        }
        assert!(!pre_auth.evicted.is_cancelled());
        // Some may be forgotten by now.
        for _ in 0..50 {
            drop(pre_auth.open_stream());
        }
        assert!(pre_auth.evicted.is_cancelled());

        let unauthenticated = PreAuthLimiter::new(1).register(source(1)).expect("an empty limiter");
        let streams: Vec<_> = (0..UNAUTHENTICATED_STREAMS)
            .map(|_| unauthenticated.open_stream())
            .collect();
        assert!(!unauthenticated.evicted.is_cancelled());
        let more = unauthenticated.open_stream();
        assert!(unauthenticated.evicted.is_cancelled());
        drop((streams, more));

        let unauthenticated = PreAuthLimiter::new(1).register(source(1)).expect("an empty limiter");
        let silent: Vec<_> = (0..UNAUTHENTICATED_STREAMS)
            .map(|_| unauthenticated.open_silent_stream())
            .collect();
        drop(silent);
        let silent: Vec<_> = (0..UNAUTHENTICATED_STREAMS)
            .map(|_| unauthenticated.open_silent_stream())
            .collect();
        assert!(!unauthenticated.evicted.is_cancelled());
        let more = unauthenticated.open_silent_stream();
        assert!(unauthenticated.evicted.is_cancelled());
        drop((silent, more));
    }
}
