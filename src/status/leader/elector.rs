//! Decisions of one candidate for a lock, without IO: a record comes in, a step comes out. A lock counts as held for
//! one lease after *this* candidate saw its record change; the times in the record are informational.

use std::time::{Duration, Instant};

use smol_str::SmolStr;
use time::OffsetDateTime;

use super::record::Record;

/// Prefix of the key of a remote holder.
const REMOTE: char = '^';

/// A candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the pod.
    pub identity: SmolStr,
    /// Revision of the control plane.
    pub revision: SmolStr,
    /// True if the control plane runs in another cluster than the lock.
    pub remote: bool,
    /// True if revisions compete for the lock, so that better ones may evict others.
    pub prioritised: bool,
    /// Time for which the lock is held without renewal.
    pub lease: Duration,
}

/// Next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create the lock with this record.
    Create(Record),
    /// Replace the record that was read by this one.
    Update(Record),
    /// Another candidate holds it.
    Wait,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Elector {
    candidate: Candidate,
    observed: Option<(Record, Instant)>,
}

impl Candidate {
    /// Returns the key that shows the candidate's priority. Locks of one revision have none.
    pub fn key(&self) -> String {
        match (self.prioritised, self.remote) {
            (false, _) => String::new(),
            (true, false) => self.revision.to_string(),
            (true, true) => format!("{REMOTE}{}", self.revision),
        }
    }

    /// Returns true if this candidate may evict a live holder with this key.
    fn outranks(&self, holder_key: &str, default_revision: &str) -> bool {
        let holder_revision = holder_key.strip_prefix(REMOTE);
        let holder_remote = holder_revision.is_some();
        let holder_revision = holder_revision.unwrap_or(holder_key);
        if self.revision != holder_revision {
            return !default_revision.is_empty() && self.revision == default_revision;
        }
        holder_remote && !self.remote
    }
}

impl Elector {
    /// Returns the state of a candidate that has seen no record.
    pub fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            observed: None,
        }
    }

    /// Returns true if the last record read or written names this candidate.
    pub fn is_leader(&self) -> bool {
        let observed = self.observed.as_ref();
        observed.is_some_and(|(record, _)| record.holder_identity == self.candidate.identity.as_str())
    }

    /// Decides about the record just read; `None` if the object does not exist. `wall` is used in records only.
    pub fn step(&mut self, found: Option<&Record>, now: Instant, wall: OffsetDateTime, default_revision: &str) -> Step {
        let mut record = Record {
            holder_identity: self.candidate.identity.to_string(),
            holder_key: self.candidate.key(),
            lease_duration_seconds: self.candidate.lease.as_secs() as i64,
            acquire_time: Some(wall),
            renew_time: Some(wall),
            leader_transitions: 0,
        };
        let Some(found) = found else {
            return Step::Create(record);
        };
        let since = match &self.observed {
            Some((observed, since)) if observed == found => *since,
            _ => now,
        };
        self.observed = Some((found.clone(), since));
        let own = self.is_leader();
        let held = !found.holder_identity.is_empty() && now.saturating_duration_since(since) < self.candidate.lease;
        let evicts = self.candidate.prioritised && self.candidate.outranks(&found.holder_key, default_revision);
        if held && !own && !evicts {
            return Step::Wait;
        }
        if own {
            record.acquire_time = found.acquire_time;
            record.leader_transitions = found.leader_transitions;
        } else {
            record.leader_transitions = found.leader_transitions + 1;
        }
        Step::Update(record)
    }

    /// Records a successful write.
    pub fn wrote(&mut self, record: Record, now: Instant) {
        self.observed = Some((record, now));
    }

    /// Returns the record that releases the lock, from the one that was read; `None` if another candidate holds it.
    pub fn release(&self, found: &Record, wall: OffsetDateTime) -> Option<Record> {
        (found.holder_identity == self.candidate.identity.as_str()).then(|| Record {
            holder_identity: String::new(),
            holder_key: String::new(),
            // As in client-go: candidates wait at most this long for a released lock.
            lease_duration_seconds: 1,
            acquire_time: Some(wall),
            renew_time: Some(wall),
            leader_transitions: found.leader_transitions,
        })
    }
}
