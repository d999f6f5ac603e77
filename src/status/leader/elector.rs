//! What one candidate for a lock decides, without IO: a record comes in, a step comes out. A lock counts as held for a
//! lease from the moment in which *this* candidate saw its record change; the times in the record are for people.

use std::time::{Duration, Instant};

use smol_str::SmolStr;
use time::OffsetDateTime;

use super::record::Record;

/// Begins the key of a holder that is remote to the cluster.
const REMOTE: char = '^';

/// Who stands for election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The pod's name.
    pub identity: SmolStr,
    /// The control plane's revision.
    pub revision: SmolStr,
    /// The control plane runs in another cluster than the lock.
    pub remote: bool,
    /// Revisions compete for the lock, and better ones may evict others.
    pub prioritised: bool,
    /// How long the lock is held without being renewed.
    pub lease: Duration,
}

/// What is to be done now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The lock does not exist: create it with this record.
    Create(Record),
    /// Write this record over the one that was read.
    Update(Record),
    /// Somebody else holds it.
    Wait,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Elector {
    candidate: Candidate,
    observed: Option<(Record, Instant)>,
}

impl Candidate {
    /// The key that tells others how good this candidate is. Locks of one revision have none.
    pub fn key(&self) -> String {
        match (self.prioritised, self.remote) {
            (false, _) => String::new(),
            (true, false) => self.revision.to_string(),
            (true, true) => format!("{REMOTE}{}", self.revision),
        }
    }

    /// True if this candidate may take the lock from a live holder with this key.
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
    /// A candidate that has seen nothing yet.
    pub fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            observed: None,
        }
    }

    /// True if the last record that was read or written names this candidate.
    pub fn is_leader(&self) -> bool {
        let observed = self.observed.as_ref();
        observed.is_some_and(|(record, _)| record.holder_identity == self.candidate.identity.as_str())
    }

    /// Decides on the record that was just read; `None`: there is no such object. `wall` goes into records only.
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

    /// The record was written.
    pub fn wrote(&mut self, record: Record, now: Instant) {
        self.observed = Some((record, now));
    }

    /// The record that gives the lock back, over the one that was read; `None` if it is not ours.
    pub fn release(&self, found: &Record, wall: OffsetDateTime) -> Option<Record> {
        (found.holder_identity == self.candidate.identity.as_str()).then(|| Record {
            holder_identity: String::new(),
            holder_key: String::new(),
            // As client-go does: nobody waits longer than this for a lock that was given back.
            lease_duration_seconds: 1,
            acquire_time: Some(wall),
            renew_time: Some(wall),
            leader_transitions: found.leader_transitions,
        })
    }
}
