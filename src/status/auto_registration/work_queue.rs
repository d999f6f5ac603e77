//! Queued operations of each entry, in order, one at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
    time::SystemTime,
};

use tokio::sync::oneshot;

use crate::{
    status::NamespacedName,
    xds::events::{Health, Machine, Rejection},
};

/// An operation on one entry.
pub(super) enum Operation {
    /// The machine connected.
    Connect {
        /// Stream.
        connection: u64,
        /// Machine.
        machine: Arc<Machine>,
        /// Time of connection.
        at: SystemTime,
        /// Receiver of the result, if the stream waits for it.
        answer: Option<oneshot::Sender<Result<(), Rejection>>>,
        /// Number of previous attempts.
        attempt: u32,
    },
    /// The last stream of the machine ended.
    Disconnect {
        /// Time of connection.
        connected_at: SystemTime,
        /// Time of disconnection.
        at: SystemTime,
        /// True if the entry was created for the machine.
        registered: bool,
        /// Number of previous attempts.
        attempt: u32,
    },
    /// The agent reported the workload's health.
    Health {
        /// Report.
        health: Health,
        /// Number of previous attempts.
        attempt: u32,
    },
    /// The entry may be orphaned.
    CleanUp,
}

impl fmt::Debug for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Connect { .. } => "Connect",
            Self::Disconnect { .. } => "Disconnect",
            Self::Health { .. } => "Health",
            Self::CleanUp => "CleanUp",
        })
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct KeyedWorkQueue(BTreeMap<NamespacedName, KeyQueue>);

#[derive(Debug, Default)]
struct KeyQueue {
    busy: bool,
    waiting: VecDeque<Operation>,
}

impl KeyedWorkQueue {
    /// Adds an operation. Of several pending health reports only the last counts.
    pub(super) fn push(&mut self, key: NamespacedName, operation: Operation) {
        let waiting = &mut self.0.entry(key).or_default().waiting;
        if let (Operation::Health { health: new, .. }, Some(Operation::Health { health: last, .. })) =
            (&operation, waiting.back_mut())
        {
            if new.at >= last.at {
                *last = new.clone();
            }
            return;
        }
        waiting.push_back(operation);
    }

    /// Returns the next operation of the entry, if none is running.
    pub(super) fn start(&mut self, key: &NamespacedName) -> Option<Operation> {
        let queue = self.0.get_mut(key)?;
        if queue.busy {
            return None;
        }
        let next = queue.waiting.pop_front();
        queue.busy = next.is_some();
        next
    }

    /// Records that the running operation ended.
    pub(super) fn end(&mut self, key: &NamespacedName) {
        if let Some(queue) = self.0.get_mut(key) {
            queue.busy = false;
            if queue.waiting.is_empty() {
                self.0.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health(seconds: u64) -> Operation {
        let health = Health {
            healthy: true,
            message: String::new(),
            at: SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds),
        };
        Operation::Health { health, attempt: 0 }
    }

    #[test]
    fn operations_of_an_entry_are_serialized() {
        let mut work_queue = KeyedWorkQueue::default();
        let key = NamespacedName::new("a", "b");
        work_queue.push(key.clone(), Operation::CleanUp);
        for seconds in [1, 3, 2] {
            work_queue.push(key.clone(), health(seconds));
        }
        assert!(matches!(work_queue.start(&key), Some(Operation::CleanUp)));
        assert!(work_queue.start(&key).is_none(), "one is under way");
        work_queue.end(&key);
        let Some(Operation::Health { health, .. }) = work_queue.start(&key) else {
            panic!("health comes next");
        };
        assert_eq!(health.at, SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(3));
        work_queue.end(&key);
        assert!(work_queue.0.is_empty(), "nothing is kept of entries without work");
    }
}
