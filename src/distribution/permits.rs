//! Permits of queries, which leave room for operators.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::base::Namespace;

/// Permits of one kind of queries. A query may last for minutes, and any workload may have some about its namespace, so
/// those have permits of their own.
pub(super) struct QueryPermits {
    of_operators: Arc<Semaphore>,
    of_namespaces: Arc<Semaphore>,
}

impl QueryPermits {
    /// Creates this many permits for callers that see everything, and half as many for all that see one namespace.
    pub(super) fn new(most: usize) -> Self {
        Self {
            of_operators: Arc::new(Semaphore::new(most)),
            of_namespaces: Arc::new(Semaphore::new(most / 2)),
        }
    }

    /// Returns a permit of a caller that sees this namespace, or everything; `None` if there is none left.
    pub(super) fn acquire(&self, visible: Option<&Namespace>) -> Option<OwnedSemaphorePermit> {
        let permits = match visible {
            None => &self.of_operators,
            Some(_) => &self.of_namespaces,
        };
        permits.clone().try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r20_queries_of_tenants_leave_room_for_operators() {
        let permits = QueryPermits::new(4);
        let namespace = Namespace::from("a");
        let held: Vec<_> = std::iter::from_fn(|| permits.acquire(Some(&namespace))).collect();
        assert_eq!(held.len(), 2);
        let operators: Vec<_> = std::iter::from_fn(|| permits.acquire(None)).collect();
        assert_eq!(operators.len(), 4);
        drop(held);
        assert!(permits.acquire(Some(&namespace)).is_some());
    }
}
