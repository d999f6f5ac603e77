//! Equal shares of something that is limited, so that one caller cannot use all of it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The least number of callers at which those without permits are removed.
const SWEEP_SIZE: usize = 256;

/// Permits of callers, each of which has the same number. A caller that holds all of its own waits.
pub struct Shares<K> {
    permits: usize,
    /// Locked for one look-up.
    callers: Mutex<Callers<K>>,
}

struct Callers<K> {
    /// Weak references: permits, and those who wait for one, keep the semaphore of their caller.
    semaphores: BTreeMap<K, Weak<Semaphore>>,
    /// The number of callers at which those without permits are removed.
    sweep_size: usize,
}

impl<K: Ord> Shares<K> {
    /// Creates shares of this many permits for each caller.
    pub fn new(permits: usize) -> Self {
        Self {
            permits,
            callers: Mutex::new(Callers {
                semaphores: BTreeMap::new(),
                sweep_size: SWEEP_SIZE,
            }),
        }
    }

    /// Waits for a permit of a caller, in order of arrival.
    pub async fn acquire(&self, caller: K) -> OwnedSemaphorePermit {
        self.acquire_many(caller, 1).await
    }

    /// Waits for this many permits of a caller, in order of arrival.
    pub async fn acquire_many(&self, caller: K, permits: u32) -> OwnedSemaphorePermit {
        let permits = self.semaphore(caller).acquire_many_owned(permits).await;
        permits.expect("because the semaphore is never closed")
    }

    /// Returns the number of permits that a caller does not hold.
    #[cfg(test)]
    pub fn available(&self, caller: K) -> usize {
        self.semaphore(caller).available_permits()
    }

    fn semaphore(&self, caller: K) -> Arc<Semaphore> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if callers.semaphores.len() >= callers.sweep_size {
            callers.semaphores.retain(|_, semaphore| semaphore.strong_count() > 0);
            callers.sweep_size = SWEEP_SIZE.max(2 * callers.semaphores.len());
        }
        let entry = callers.semaphores.entry(caller).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let semaphore = Arc::new(Semaphore::new(self.permits));
            *entry = Arc::downgrade(&semaphore);
            semaphore
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_wait_for_themselves_only() {
        let shares = Shares::new(2);
        let held = [shares.acquire("a").await, shares.acquire("a").await];
        let mut third = std::pin::pin!(shares.acquire("a"));
        assert!(futures::poll!(third.as_mut()).is_pending());
        drop(shares.acquire("b").await);
        drop(held);
        drop(third.await);
    }

    #[tokio::test]
    async fn callers_without_permits_are_removed() {
        let shares = Shares::new(1);
        let held = shares.acquire(0).await;
        for caller in 1..10 * SWEEP_SIZE {
            drop(shares.acquire(caller).await);
        }
        let callers = shares.callers.lock().expect("an unpoisoned lock").semaphores.len();
        assert!(callers <= SWEEP_SIZE, "{callers}");
        let mut again = std::pin::pin!(shares.acquire(0));
        assert!(futures::poll!(again.as_mut()).is_pending());
        drop(held);
    }
}
