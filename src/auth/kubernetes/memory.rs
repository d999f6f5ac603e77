//! What is known of tokens, for a while, and which reviews are under way.

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

use super::Reviewed;
use crate::{auth::Refusal, base::ClusterId};

/// How long an answer of an API server is believed. API servers themselves believe a token as long as this.
const BELIEF: Duration = Duration::from_secs(10);
/// How many answers are kept, about 300 bytes each.
const KNOWN: usize = 8192;
/// How many reviews may be noted before those that nobody waits for any more are forgotten.
const PENDING: usize = 256;

/// A token of a cluster. The token itself is not kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key([u8; 32]);

impl Key {
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

type Answer = Result<Arc<Reviewed>, Refusal>;
type Pending = Shared<BoxFuture<'static, Answer>>;

/// Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Memory(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    known: BTreeMap<Key, (Arc<Reviewed>, Instant)>,
    /// Of what is known, the oldest first: all is believed equally long.
    order: VecDeque<Key>,
    /// Weak, so that a review that nobody waits for any more ends.
    pending: BTreeMap<Key, WeakShared<BoxFuture<'static, Answer>>>,
}

impl Memory {
    /// What is known of a token, else what the review under way says, else what this one says.
    pub(super) async fn get_or(
        &self,
        key: Key,
        now: Instant,
        calendar: SystemTime,
        review: BoxFuture<'static, Result<Reviewed, Refusal>>,
        clock: fn() -> (Instant, SystemTime),
    ) -> Answer {
        let pending = {
            let mut state = self.lock();
            if let Some(reviewed) = state.known(&key, now, calendar) {
                return Ok(reviewed);
            }
            match state.pending.get(&key).and_then(WeakShared::upgrade) {
                Some(pending) => pending,
                None => self.begin(&mut state, key, review, clock),
            }
        };
        pending.await
    }

    fn begin(
        &self,
        state: &mut State,
        key: Key,
        review: BoxFuture<'static, Result<Reviewed, Refusal>>,
        clock: fn() -> (Instant, SystemTime),
    ) -> Pending {
        let memory = self.clone();
        let answering = async move {
            let answer = review.await.map(Arc::new);
            let mut state = memory.lock();
            state.pending.remove(&key);
            // A refusal is not kept: what was wrong may be put right, and merging bounds the cost.
            if let Ok(reviewed) = &answer {
                state.learn(key, reviewed.clone(), clock().0);
            }
            answer
        };
        let pending = answering.boxed().shared();
        if state.pending.len() >= PENDING {
            state.pending.retain(|_, pending| pending.upgrade().is_some());
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
        assert_eq!(state.known.len(), state.order.len());
        (state.known.len(), state.pending.len())
    }
}

impl State {
    fn known(&self, key: &Key, now: Instant, calendar: SystemTime) -> Option<Arc<Reviewed>> {
        let (reviewed, since) = self.known.get(key)?;
        let is_fresh = now.saturating_duration_since(*since) < BELIEF;
        let is_valid = reviewed.expires_at.is_none_or(|end| calendar < end);
        (is_fresh && is_valid).then(|| reviewed.clone())
    }

    fn learn(&mut self, key: Key, reviewed: Arc<Reviewed>, now: Instant) {
        if self.known.insert(key, (reviewed, now)).is_some() {
            self.order.retain(|known| *known != key);
        }
        self.order.push_back(key);
        while let Some(oldest) = self.order.front().copied() {
            let since = self.known.get(&oldest).map(|(_, since)| *since);
            let is_stale = since.is_none_or(|since| now.saturating_duration_since(since) >= BELIEF);
            if !is_stale && self.order.len() <= KNOWN {
                return;
            }
            self.known.remove(&oldest);
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::KubernetesInfo;

    fn reviewed() -> Arc<Reviewed> {
        Arc::new(Reviewed {
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
    fn what_is_known_is_bounded_in_time_and_number() {
        let mut state = State::default();
        let begin = crate::environment::now();
        let calendar = SystemTime::UNIX_EPOCH;
        let key = |n: usize| Key::new(&"c".into(), &n.to_string());
        for n in 0..=KNOWN {
            state.learn(key(n), reviewed(), begin);
        }
        assert_eq!((state.known.len(), state.order.len()), (KNOWN, KNOWN));
        assert!(state.known(&key(0), begin, calendar).is_none(), "the oldest had to go");
        assert!(state.known(&key(1), begin + BELIEF / 2, calendar).is_some());
        assert!(state.known(&key(1), begin + BELIEF, calendar).is_none());
        let after = calendar + Duration::from_secs(100);
        assert!(
            state.known(&key(1), begin, after).is_none(),
            "the token has expired meanwhile"
        );
        state.learn(key(1), reviewed(), begin + BELIEF);
        assert_eq!((state.known.len(), state.order.len()), (1, 1));
    }

    #[test]
    fn clusters_do_not_share_what_they_know() {
        let keys = [("a", "bc"), ("ab", "c"), ("", "abc")].map(|(cluster, token)| Key::new(&cluster.into(), token));
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    }
}
