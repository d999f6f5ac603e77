//! A budget that clients share fairly. A client that waits is served before clients whose source uses more of the
//! budget, and before larger requests of the same source. A part of the budget is for authenticated clients only.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use smol_str::SmolStr;
use tokio::{sync::oneshot, time::Instant};
use tokio_util::sync::CancellationToken;

/// The part of a budget that is for authenticated clients only: one in this many units.
const RESERVED: usize = 4;
/// The time after which a holder may be too slow, and the interval of the check.
const GRACE: Duration = Duration::from_millis(250);
/// The time after which a holder may be too slow although others of its source are served. If thousands of clients of
/// one source reconnect at once, its requests wait for the server and for each other: while some complete, the rest
/// need time and no eviction. Requests that stall complete nothing, and a few that do delay others no longer than this.
const GRACE_OF_SERVED_SOURCE: Duration = Duration::from_secs(2);
/// The rate below which a holder is slow. It is evicted if others wait.
const SLOW_BYTES_PER_SECOND: f64 = 256.0 * 1024.0;

/// The source of a client's requests. Clients of one source share its part of a budget.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The first identity of an authenticated client.
    Identity(SmolStr),
    /// The address of a client without authentication, if it is known.
    Address(Option<IpAddr>),
}

impl Source {
    /// Returns true for authenticated clients.
    pub fn is_authenticated(&self) -> bool {
        matches!(self, Self::Identity(_))
    }
}

/// See the module's documentation. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct FairBudget {
    units: usize,
    /// Locked for one decision about the waiting clients.
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    used: usize,
    used_without_authentication: usize,
    /// The sources that use units or wait for them.
    sources: BTreeMap<Source, SourceState>,
    /// The next client of each source, without and with authentication.
    order: [BTreeSet<Turn>; 2],
    holders: BTreeMap<u64, Holder>,
}

#[derive(Debug, Default)]
struct SourceState {
    used: usize,
    /// The last time that a permit was given back without an eviction.
    released: Option<Instant>,
    /// By units, then by order of arrival.
    waiting: BTreeMap<(usize, u64), oneshot::Sender<Permit>>,
}

/// The place of a source in the order: what it uses, then the units of its next client and when that arrived.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    used: usize,
    units: usize,
    number: u64,
    source: Source,
}

impl SourceState {
    fn turn(&self, source: &Source) -> Option<Turn> {
        let (units, number) = *self.waiting.keys().next()?;
        Some(Turn {
            used: self.used,
            units,
            number,
            source: source.clone(),
        })
    }

    /// Returns the time after which a holder of this source may be too slow.
    fn grace(&self, now: Instant) -> Duration {
        let is_served = self
            .released
            .is_some_and(|released| now.saturating_duration_since(released) < GRACE);
        if is_served { GRACE_OF_SERVED_SOURCE } else { GRACE }
    }
}

#[derive(Debug)]
struct Holder {
    source: Source,
    units: usize,
    since: Instant,
    progress: Arc<AtomicUsize>,
    evicted: CancellationToken,
}

/// A part of a budget, released when dropped.
#[derive(Debug)]
pub struct Permit {
    budget: FairBudget,
    number: u64,
    source: Source,
    progress: Arc<AtomicUsize>,
    evicted: CancellationToken,
}

impl Permit {
    /// Records bytes that the client has sent. Slow holders are evicted first.
    pub(in crate::xds) fn record_progress(&self, bytes: usize) {
        self.progress.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Waits until the permit must be given back, because its holder is slow and others wait.
    pub(in crate::xds) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Returns the token that is cancelled when [`Self::evicted`] ends.
    pub(in crate::xds) fn eviction(&self) -> CancellationToken {
        self.evicted.clone()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let unclaimed = {
            let mut inner = self.budget.lock();
            inner.release(self);
            inner.grant(&self.budget)
        };
        drop(unclaimed);
    }
}

impl FairBudget {
    /// Creates a budget of this many units; at least one.
    pub(super) fn new(units: usize) -> Self {
        Self {
            units: units.max(1),
            inner: Arc::default(),
        }
    }

    /// Waits for units, at most all that a client of the source may use.
    pub(super) async fn acquire(&self, source: &Source, units: usize) -> Permit {
        self.request(source, units)
            .await
            .unwrap_or_else(|_| self.unbounded(source))
    }

    /// Waits for units like [`Self::acquire`]. While it waits, slow holders are evicted.
    pub(super) async fn acquire_from_slow(&self, source: &Source, units: usize) -> Permit {
        let mut granted = self.request(source, units);
        loop {
            match tokio::time::timeout(GRACE, &mut granted).await {
                Ok(permit) => return permit.unwrap_or_else(|_| self.unbounded(source)),
                Err(_) => self.lock().evict_slow(source, units, Instant::now()),
            }
        }
    }

    /// Waits for units like [`Self::acquire`]. While it waits, permits that are held for longer than this become free.
    pub(super) async fn acquire_from_late(&self, source: &Source, units: usize, longest: Duration) -> Permit {
        let mut granted = self.request(source, units);
        loop {
            if let Ok(permit) = tokio::time::timeout(GRACE, &mut granted).await {
                return permit.unwrap_or_else(|_| self.unbounded(source));
            }
            let unclaimed = {
                let mut inner = self.lock();
                inner.expire(longest);
                inner.grant(self)
            };
            drop(unclaimed);
        }
    }

    fn request(&self, source: &Source, units: usize) -> oneshot::Receiver<Permit> {
        let (granted, receiver) = oneshot::channel();
        let units = units.clamp(1, self.most(source));
        let unclaimed = {
            let mut inner = self.lock();
            inner.enqueue(source, units, granted);
            inner.grant(self)
        };
        drop(unclaimed);
        receiver
    }

    /// Returns the number of units that clients without authentication, or all clients, may use.
    fn most(&self, source: &Source) -> usize {
        if source.is_authenticated() {
            self.units
        } else {
            (self.units - self.units / RESERVED).max(1)
        }
    }

    /// Returns a permit without units. A waiter is never dropped before it is granted, so this is not needed.
    fn unbounded(&self, source: &Source) -> Permit {
        Permit {
            budget: self.clone(),
            number: u64::MAX,
            source: source.clone(),
            progress: Arc::default(),
            evicted: CancellationToken::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Changes the state of a source, and with it the place of the source in the order.
    fn update(&mut self, source: &Source, change: impl FnOnce(&mut SourceState)) {
        let state = self.sources.entry(source.clone()).or_default();
        let order = &mut self.order[usize::from(source.is_authenticated())];
        if let Some(turn) = state.turn(source) {
            order.remove(&turn);
        }
        change(state);
        match state.turn(source) {
            Some(turn) => drop(order.insert(turn)),
            None if state.used == 0 => drop(self.sources.remove(source)),
            None => {}
        }
    }

    fn enqueue(&mut self, source: &Source, units: usize, granted: oneshot::Sender<Permit>) {
        self.next += 1;
        let number = self.next;
        self.update(source, |state| drop(state.waiting.insert((units, number), granted)));
    }

    /// Grants units to waiting clients for as long as they fit. Returns permits of clients that have left in the
    /// meantime; they must be dropped without the lock.
    fn grant(&mut self, budget: &FairBudget) -> Vec<Permit> {
        let mut unclaimed = Vec::new();
        while let Some(turn) = self.next_turn(budget) {
            let (
                Turn {
                    units, number, source, ..
                },
                mut waiter,
            ) = (turn, None);
            self.update(&source, |state| {
                waiter = state
                    .waiting
                    .remove(&(units, number))
                    .filter(|waiter| !waiter.is_closed());
                state.used += if waiter.is_some() { units } else { 0 };
            });
            let Some(waiter) = waiter else { continue };
            self.used += units;
            if !source.is_authenticated() {
                self.used_without_authentication += units;
            }
            let permit = Permit {
                budget: budget.clone(),
                number,
                source,
                progress: Arc::default(),
                evicted: CancellationToken::new(),
            };
            let holder = Holder {
                source: permit.source.clone(),
                units,
                since: Instant::now(),
                progress: permit.progress.clone(),
                evicted: permit.evicted.clone(),
            };
            self.holders.insert(number, holder);
            unclaimed.extend(waiter.send(permit).err());
        }
        unclaimed
    }

    /// Returns the client that is served next, if its units fit.
    fn next_turn(&self, budget: &FairBudget) -> Option<Turn> {
        let [without, with] = self.order.each_ref().map(BTreeSet::first);
        let may_use = |turn: &&Turn| self.used_without_authentication + turn.units <= budget.most(&turn.source);
        let first = without.filter(may_use).into_iter().chain(with).min()?;
        (self.used + first.units <= budget.units).then(|| first.clone())
    }

    fn release(&mut self, permit: &Permit) {
        if let Some(holder) = self.holders.remove(&permit.number) {
            self.take_back(&holder);
        }
    }

    fn take_back(&mut self, holder: &Holder) {
        self.used -= holder.units;
        if !holder.source.is_authenticated() {
            self.used_without_authentication -= holder.units;
        }
        let released = (!holder.evicted.is_cancelled()).then(Instant::now);
        self.update(&holder.source, |state| {
            state.used -= holder.units;
            state.released = released.or(state.released);
        });
    }

    /// Takes back what was held for longer than this. The holders do not notice.
    fn expire(&mut self, longest: Duration) {
        let now = Instant::now();
        let is_late = |holder: &Holder| now.saturating_duration_since(holder.since) > longest;
        let late: Vec<Holder> = self
            .holders
            .extract_if(.., |_, holder| is_late(holder))
            .map(|(_, holder)| holder)
            .collect();
        for holder in late {
            self.take_back(&holder);
        }
    }

    /// Evicts the slowest holders until this many units become free. A client without authentication displaces only
    /// its like, and a source that is being served has more time.
    fn evict_slow(&mut self, waiting: &Source, units: usize, now: Instant) {
        let rate = |holder: &Holder| {
            let age = now.saturating_duration_since(holder.since);
            let rate = holder.progress.load(Ordering::Acquire) as f64 / age.as_secs_f64();
            let may_evict = waiting.is_authenticated() || !holder.source.is_authenticated();
            let grace = self.sources.get(&holder.source).map_or(GRACE, |state| state.grace(now));
            (may_evict && age >= grace && rate < SLOW_BYTES_PER_SECOND).then_some(rate)
        };
        let mut free: usize = self.evicted().map(|holder| holder.units).sum();
        let present = self.holders.values().filter(|holder| !holder.evicted.is_cancelled());
        let mut slow: Vec<(f64, &Holder)> = present.filter_map(|holder| Some((rate(holder)?, holder))).collect();
        slow.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        for (_, holder) in slow {
            if free >= units {
                return;
            }
            holder.evicted.cancel();
            free += holder.units;
        }
    }

    /// Returns the holders that were evicted and have not released their units yet.
    fn evicted(&self) -> impl Iterator<Item = &Holder> {
        self.holders.values().filter(|holder| holder.evicted.is_cancelled())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: u8) -> Source {
        Source::Address(Some(Ipv4Addr::new(10, 0, 0, last).into()))
    }

    fn identity() -> Source {
        Source::Identity("spiffe://cluster.local/ns/app/sa/web".into())
    }

    #[tokio::test]
    async fn r20_sources_take_turns() {
        let budget = FairBudget::new(8);
        let (greedy, other) = (address(1), address(2));
        let mut held: Vec<Permit> = Vec::new();
        for _ in 0..6 {
            held.push(budget.acquire(&greedy, 1).await);
        }
        let mut queued: Vec<_> = (0..50).map(|_| budget.request(&greedy, 1)).collect();
        let mut waiting = std::pin::pin!(budget.acquire(&other, 1));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        held.pop();
        let granted = waiting.await;
        assert!(queued.iter_mut().all(|queued| queued.try_recv().is_err()));
        drop(granted);
        assert!(queued[0].try_recv().is_ok(), "then in order of arrival");
    }

    #[tokio::test]
    async fn r20_authenticated_clients_have_a_share_of_their_own() {
        let budget = FairBudget::new(8);
        let (other, authenticated) = (address(2), identity());
        let large = budget.acquire(&address(1), 100).await;
        let mut more = std::pin::pin!(budget.acquire(&other, 1));
        assert!(futures::poll!(more.as_mut()).is_pending());
        let held = budget.acquire(&authenticated, 2).await;
        let mut third = std::pin::pin!(budget.acquire(&authenticated, 1));
        assert!(futures::poll!(third.as_mut()).is_pending());
        drop(large);
        more.await;
        third.await;
        drop(held);
        assert_eq!(budget.lock().used, 0);
        assert!(budget.lock().sources.is_empty());
    }

    #[tokio::test]
    async fn r20_permits_that_are_held_for_long_become_free() {
        let (budget, source) = (FairBudget::new(4), identity());
        let held = budget.acquire(&source, 4).await;
        let mut patient = std::pin::pin!(budget.acquire_from_late(&source, 1, Duration::from_hours(1)));
        assert!(futures::poll!(patient.as_mut()).is_pending());
        let granted = budget.acquire_from_late(&source, 2, Duration::ZERO).await;
        let other = patient.await;
        assert_eq!(budget.lock().used, 3);
        drop(held);
        assert_eq!(budget.lock().used, 3, "it was taken back before");
        drop((granted, other));
        assert_eq!(budget.lock().used, 0);
        assert!(budget.lock().sources.is_empty());
    }

    #[tokio::test]
    async fn r20_slow_holders_make_room() {
        let (budget, source) = (FairBudget::new(4), address(1));
        let slow = budget.acquire(&source, 1).await;
        let fast = budget.acquire(&source, 2).await;
        fast.record_progress(1 << 30);
        let mut waiting = std::pin::pin!(budget.acquire_from_slow(&source, 1));
        tokio::select! {
            _ = waiting.as_mut() => panic!("the budget is used up"),
            () = slow.evicted() => {}
        }
        assert!(!fast.evicted.is_cancelled());
        drop(slow);
        waiting.await;
    }

    /// Returns whether a holder without progress is evicted this many milliseconds after its grant, if a permit of its
    /// source was given back at the other time.
    async fn is_evicted(released: Option<u64>, after: u64) -> bool {
        let (budget, source, begin) = (FairBudget::new(4), address(1), Instant::now());
        let held = budget.acquire(&source, 3).await;
        let at = |milliseconds| Instant::now() + Duration::from_millis(milliseconds);
        let mut inner = budget.lock();
        inner.update(&source, |state| {
            state.released = released.map(|released| begin + Duration::from_millis(released));
        });
        inner.evict_slow(&source, 1, at(after));
        drop(inner);
        held.evicted.is_cancelled()
    }

    #[tokio::test]
    async fn r20_requests_of_a_source_that_is_served_have_more_time() {
        let short = GRACE.as_millis() as u64;
        let long = GRACE_OF_SERVED_SOURCE.as_millis() as u64;
        assert!(is_evicted(None, short).await);
        assert!(is_evicted(Some(0), 2 * short).await, "nothing completed since");
        assert!(!is_evicted(Some(long), long - short).await);
        assert!(is_evicted(Some(long), long).await);
    }

    #[tokio::test]
    async fn completed_requests_show_that_a_source_is_served() {
        let (budget, source) = (FairBudget::new(4), address(1));
        let _held = budget.acquire(&source, 1).await;
        let released = || budget.lock().sources[&source].released;
        let evicted = budget.acquire(&source, 1).await;
        evicted.evicted.cancel();
        drop(evicted);
        assert!(released().is_none());
        drop(budget.acquire(&source, 1).await);
        assert!(released().is_some());
    }

    #[tokio::test]
    async fn clients_that_leave_keep_nothing() {
        let budget = FairBudget::new(1);
        let held = budget.acquire(&address(1), 1).await;
        drop(budget.request(&address(2), 1));
        let mut waiting = budget.request(&address(3), 1);
        drop(held);
        assert!(waiting.try_recv().is_ok());
        assert_eq!(budget.lock().used, 0);
    }
}
