//! A cache of TokenReview results, and the reviews in flight.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use aws_lc_rs::digest::{Context, SHA256};
use futures::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};

use super::ReviewedToken;
use crate::{auth::AuthenticationError, base::ClusterId};

/// The lifetime of a cached result. API servers cache their own token authentication equally long.
const CACHE_TTL: Duration = Duration::from_secs(10);
/// The maximum number of cached results, about 300 bytes each.
const CACHE_CAPACITY: usize = 8192;
/// The least number of pending entries at which abandoned reviews are removed.
const PENDING_SWEEP_SIZE: usize = 256;

/// The SHA-256 of a cluster and a token. The token itself is not stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CacheKey([u8; 32]);

impl CacheKey {
    pub(super) fn new(cluster: &ClusterId, token: &str) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(&(cluster.len() as u64).to_be_bytes());
        context.update(cluster.as_bytes());
        context.update(token.as_bytes());
        let mut key = [0; 32];
        key.copy_from_slice(context.finish().as_ref());
        Self(key)
    }
}

type ReviewResult = Result<Arc<ReviewedToken>, AuthenticationError>;
type Pending = Shared<BoxFuture<'static, ReviewResult>>;

/// Cached and pending reviews by token. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct ReviewCache(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    cached: BTreeMap<CacheKey, (Arc<ReviewedToken>, Instant)>,
    /// Keys of cached results, oldest first. All have the same lifetime.
    order: VecDeque<CacheKey>,
    /// Weak references, so that a review without waiters is cancelled.
    pending: BTreeMap<CacheKey, WeakShared<BoxFuture<'static, ReviewResult>>>,
    /// The number of pending entries at which abandoned reviews are removed. It grows with those that have waiters: a
    /// look at all of them for every new one would take quadratic time.
    sweep_size: usize,
}

impl ReviewCache {
    /// Returns the cached result, else the result of the pending review, else that of `review`.
    pub(super) async fn get_or(
        &self,
        key: CacheKey,
        now: Instant,
        wall_clock: SystemTime,
        review: BoxFuture<'static, Result<ReviewedToken, AuthenticationError>>,
        clock: fn() -> (Instant, SystemTime),
    ) -> ReviewResult {
        let pending = {
            let mut state = self.lock();
            if let Some(reviewed) = state.cached(&key, now, wall_clock) {
                return Ok(reviewed);
            }
            match state.pending.get(&key).and_then(WeakShared::upgrade) {
                Some(pending) => pending,
                None => self.start_review(&mut state, key, review, clock),
            }
        };
        pending.await
    }

    fn start_review(
        &self,
        state: &mut State,
        key: CacheKey,
        review: BoxFuture<'static, Result<ReviewedToken, AuthenticationError>>,
        clock: fn() -> (Instant, SystemTime),
    ) -> Pending {
        let cache = self.clone();
        let answering = async move {
            let answer = review.await.map(Arc::new);
            let mut state = cache.lock();
            state.pending.remove(&key);
            // Failures are not cached: the cause may be fixed soon, and sharing of reviews bounds the cost.
            if let Ok(reviewed) = &answer {
                state.insert(key, reviewed.clone(), clock().0);
            }
            answer
        };
        let pending = answering.boxed().shared();
        if state.pending.len() >= state.sweep_size {
            state.pending.retain(|_, pending| pending.upgrade().is_some());
            state.sweep_size = PENDING_SWEEP_SIZE.max(2 * state.pending.len());
        }
        if let Some(weak) = pending.downgrade() {
            state.pending.insert(key, weak);
        }
        pending
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize) {
        let state = self.lock();
        assert_eq!(state.cached.len(), state.order.len());
        (state.cached.len(), state.pending.len())
    }
}

impl State {
    fn cached(&self, key: &CacheKey, now: Instant, wall_clock: SystemTime) -> Option<Arc<ReviewedToken>> {
        let (reviewed, since) = self.cached.get(key)?;
        let is_fresh = now.saturating_duration_since(*since) < CACHE_TTL;
        let is_valid = reviewed.expires_at.is_none_or(|end| wall_clock < end);
        (is_fresh && is_valid).then(|| reviewed.clone())
    }

    fn insert(&mut self, key: CacheKey, reviewed: Arc<ReviewedToken>, now: Instant) {
        if self.cached.insert(key, (reviewed, now)).is_some() {
            self.order.retain(|cached| *cached != key);
        }
        self.order.push_back(key);
        while let Some(oldest) = self.order.front().copied() {
            let since = self.cached.get(&oldest).map(|(_, since)| *since);
            let is_stale = since.is_none_or(|since| now.saturating_duration_since(since) >= CACHE_TTL);
            if !is_stale && self.order.len() <= CACHE_CAPACITY {
                return;
            }
            self.cached.remove(&oldest);
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::KubernetesInfo;

    fn reviewed() -> Arc<ReviewedToken> {
        Arc::new(ReviewedToken {
            info: KubernetesInfo {
                cluster: "Kubernetes".into(),
                namespace: "default".into(),
                service_account: "reviews".into(),
                pod_name: "".into(),
                pod_uid: "".into(),
            },
            expires_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(100)),
        })
    }

    #[test]
    fn cached_reviews_are_bounded_in_time_and_number() {
        let mut state = State::default();
        let start_review = crate::environment::now();
        let wall_clock = SystemTime::UNIX_EPOCH;
        let key = |n: usize| CacheKey::new(&"c".into(), &n.to_string());
        for n in 0..=CACHE_CAPACITY {
            state.insert(key(n), reviewed(), start_review);
        }
        assert_eq!(
            (state.cached.len(), state.order.len()),
            (CACHE_CAPACITY, CACHE_CAPACITY)
        );
        assert!(
            state.cached(&key(0), start_review, wall_clock).is_none(),
            "the oldest entry is evicted"
        );
        assert!(
            state
                .cached(&key(1), start_review + CACHE_TTL / 2, wall_clock)
                .is_some()
        );
        assert!(state.cached(&key(1), start_review + CACHE_TTL, wall_clock).is_none());
        let after = wall_clock + Duration::from_secs(100);
        assert!(
            state.cached(&key(1), start_review, after).is_none(),
            "the token has expired"
        );
        state.insert(key(1), reviewed(), start_review + CACHE_TTL);
        assert_eq!((state.cached.len(), state.order.len()), (1, 1));
    }

    #[test]
    fn abandoned_reviews_are_removed_without_a_look_at_all_for_each() {
        let cache = ReviewCache::default();
        let clock: fn() -> (Instant, SystemTime) = || (crate::environment::now(), SystemTime::UNIX_EPOCH);
        let start = |n: usize| {
            let key = CacheKey::new(&"c".into(), &n.to_string());
            let review = futures::future::pending().boxed();
            cache.start_review(&mut cache.lock(), key, review, clock)
        };
        let held: Vec<Pending> = (0..3 * PENDING_SWEEP_SIZE).map(start).collect();
        assert_eq!(cache.sizes(), (0, held.len()));
        assert_eq!(cache.lock().sweep_size, 4 * PENDING_SWEEP_SIZE);
        drop(held);
        for n in 0..10 * PENDING_SWEEP_SIZE {
            drop(start(n));
        }
        let (_, pending) = cache.sizes();
        assert!(pending <= PENDING_SWEEP_SIZE, "{pending}");
    }

    #[test]
    fn cache_keys_differ_between_clusters() {
        let keys =
            [("a", "bc"), ("ab", "c"), ("", "abc")].map(|(cluster, token)| CacheKey::new(&cluster.into(), token));
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    }
}
