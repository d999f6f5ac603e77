//! What is to be done with each entry, in order, one at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
    time::SystemTime,
};

use tokio::sync::oneshot;

use super::EntryKey;
use crate::xds::events::{Health, Machine, Rejection};

/// Something to be done with one entry.
pub(super) enum Operation {
    /// The machine connected.
    Connect {
        /// On this stream.
        connection: u64,
        /// Who came.
        machine: Arc<Machine>,
        /// When.
        at: SystemTime,
        /// Where the stream waits, if it does.
        answer: Option<oneshot::Sender<Result<(), Rejection>>>,
    },
    /// The machine's last stream ended.
    Disconnect {
        /// When it had begun.
        connected_at: SystemTime,
        /// When it ended.
        at: SystemTime,
        /// The entry was made for the machine.
        registered: bool,
        /// How often this was tried before.
        attempt: u32,
    },
    /// The agent told the workload's health.
    Health {
        /// What it told.
        health: Health,
        /// How often this was tried before.
        attempt: u32,
    },
    /// The entry may be left behind.
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

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Lanes(BTreeMap<EntryKey, Lane>);

#[derive(Debug, Default)]
struct Lane {
    busy: bool,
    waiting: VecDeque<Operation>,
}

impl Lanes {
    /// Adds an operation. Of several reports of health that wait only the last counts.
    pub(super) fn push(&mut self, key: EntryKey, operation: Operation) {
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

    /// The next operation of the entry, if none is under way.
    pub(super) fn start(&mut self, key: &EntryKey) -> Option<Operation> {
        let lane = self.0.get_mut(key)?;
        if lane.busy {
            return None;
        }
        let next = lane.waiting.pop_front();
        lane.busy = next.is_some();
        next
    }

    /// The operation under way has ended.
    pub(super) fn end(&mut self, key: &EntryKey) {
        if let Some(lane) = self.0.get_mut(key) {
            lane.busy = false;
            if lane.waiting.is_empty() {
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
    fn operations_of_an_entry_come_one_by_one() {
        let mut lanes = Lanes::default();
        let key: EntryKey = ("a".into(), "b".into());
        lanes.push(key.clone(), Operation::CleanUp);
        for seconds in [1, 3, 2] {
            lanes.push(key.clone(), health(seconds));
        }
        assert!(matches!(lanes.start(&key), Some(Operation::CleanUp)));
        assert!(lanes.start(&key).is_none(), "one is under way");
        lanes.end(&key);
        let Some(Operation::Health { health, .. }) = lanes.start(&key) else {
            panic!("health comes next");
        };
        assert_eq!(health.at, SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(3));
        lanes.end(&key);
        assert!(lanes.0.is_empty(), "nothing is kept of entries without work");
    }
}
