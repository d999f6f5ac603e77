//! Shares of namespaces in fetches and in the memory of key sets, so that one namespace does not use up what others
//! need.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{FutureExt, future::select_all};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::base::{Namespace, ObjectKey};

/// Concurrent fetches for one namespace.
const FETCHES: usize = 32;
/// Memory for the key sets of one namespace, in KiB.
pub(super) const KEYS_KIB: usize = 8 << 10;

/// The shares of all namespaces that require keys.
#[derive(Default)]
pub(super) struct Shares(BTreeMap<Namespace, Arc<Share>>);

struct Share {
    fetches: Arc<Semaphore>,
    kib: Arc<Semaphore>,
}

/// Publishes the shares of the namespaces that require a source.
pub(super) struct SharesSender(watch::Sender<Vec<Arc<Share>>>);

/// The present shares of the namespaces that require a source. Any of them may be used.
#[derive(Clone)]
pub struct SourceShares(watch::Receiver<Vec<Arc<Share>>>);

impl Shares {
    /// Returns the shares of a source that these policies require.
    pub(super) fn of(&mut self, by: &BTreeSet<ObjectKey>) -> SharesSender {
        SharesSender(watch::Sender::new(self.of_namespaces(by)))
    }

    /// Publishes the shares of a source that these policies require now. A fetch that waits may use new ones.
    pub(super) fn update(&mut self, shares: &SharesSender, by: &BTreeSet<ObjectKey>) {
        let new = self.of_namespaces(by);
        shares.0.send_if_modified(|present| {
            let is_same = present.len() == new.len() && present.iter().zip(&new).all(|(a, b)| Arc::ptr_eq(a, b));
            if !is_same {
                *present = new;
            }
            !is_same
        });
    }

    fn of_namespaces(&mut self, by: &BTreeSet<ObjectKey>) -> Vec<Arc<Share>> {
        let mut namespaces: Vec<&Namespace> = by.iter().map(|policy| &policy.namespace).collect();
        namespaces.dedup();
        let shares = namespaces.into_iter().map(|namespace| {
            let share = self.0.entry(namespace.clone());
            share.or_insert_with(|| Arc::new(Share::new())).clone()
        });
        shares.collect()
    }

    /// Forgets the shares that are not in use.
    pub(super) fn prune(&mut self) {
        self.0.retain(|_, share| {
            Arc::strong_count(share) > 1 || Arc::strong_count(&share.fetches) > 1 || Arc::strong_count(&share.kib) > 1
        });
    }
}

impl Share {
    fn new() -> Self {
        Self {
            fetches: Arc::new(Semaphore::new(FETCHES)),
            kib: Arc::new(Semaphore::new(KEYS_KIB)),
        }
    }
}

impl SharesSender {
    /// Returns a receiver of the shares.
    pub(super) fn subscribe(&self) -> SourceShares {
        SourceShares(self.0.subscribe())
    }
}

impl SourceShares {
    /// Waits until one of the namespaces may fetch.
    pub(super) async fn fetch(&self) -> Option<OwnedSemaphorePermit> {
        let mut shares = self.0.clone();
        loop {
            let permits: Vec<_> = shares
                .borrow_and_update()
                .iter()
                .map(|share| share.fetches.clone().acquire_owned().boxed())
                .collect();
            if permits.is_empty() {
                return None;
            }
            tokio::select! {
                // The semaphores are never closed.
                (permit, ..) = select_all(permits) => return permit.ok(),
                Ok(()) = shares.changed() => {}
            }
        }
    }

    /// Returns the memory for a key set of this size; `None` if no namespace has enough.
    pub(super) fn memory(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kib = u32::try_from(bytes.div_ceil(1024)).ok()?;
        let shares = self.0.borrow();
        let mut memory = shares.iter().map(|share| share.kib.clone().try_acquire_many_owned(kib));
        memory.find_map(Result::ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ClusterId;

    #[tokio::test]
    async fn a_namespace_does_not_use_up_the_share_of_another() {
        let mut shares = Shares::default();
        let cluster = ClusterId::new_static("c");
        let mut of = |namespaces: &[&str]| {
            let policies = namespaces
                .iter()
                .map(|namespace| ObjectKey::new(&cluster, *namespace, "p"));
            shares.of(&policies.collect()).subscribe()
        };
        let (one, other, both) = (of(&["a"]), of(&["b"]), of(&["a", "b"]));
        let mut held = Vec::new();
        for _ in 0..FETCHES {
            held.push(one.fetch().await);
        }
        assert!(one.fetch().now_or_never().is_none());
        assert!(other.fetch().now_or_never().is_some() && both.fetch().now_or_never().is_some());
        held.clear();
        assert!(one.fetch().now_or_never().is_some());
        let memory = one.memory(KEYS_KIB * 1024);
        assert!(memory.is_some() && one.memory(1).is_none());
        assert!(other.memory(1).is_some() && both.memory(1).is_some());
        drop((one, other, both));
        shares.prune();
        assert_eq!(shares.0.len(), 1, "the memory of one is in use");
        drop(memory);
        shares.prune();
        assert!(shares.0.is_empty());
    }

    #[tokio::test]
    async fn a_fetch_that_waits_uses_the_share_of_a_new_namespace() {
        let mut shares = Shares::default();
        let cluster = ClusterId::new_static("c");
        let policy = |namespace: &str| ObjectKey::new(&cluster, namespace, "p");
        let source = shares.of(&[policy("a")].into());
        let subscribed = source.subscribe();
        let mut held = Vec::new();
        for _ in 0..FETCHES {
            held.push(subscribed.fetch().await);
        }
        let mut waiting = subscribed.fetch().boxed();
        assert!((&mut waiting).now_or_never().is_none());
        shares.update(&source, &[policy("a"), policy("b")].into());
        assert!(waiting.now_or_never().flatten().is_some());
        drop((source, subscribed));
        shares.prune();
        assert_eq!(shares.0.len(), 1, "the fetches of one are in use");
    }
}
