//! Changes of a transaction, as read keys.

use std::hash::Hash;

use rustc_hash::FxHashSet;

use super::{ReadKey, RelationId};

/// Collects the keys that change while tables and derivations are updated.
#[derive(Debug, Default)]
pub struct Transaction {
    changed: FxHashSet<ReadKey>,
    panics: Vec<String>,
    undoes_last: bool,
}

impl Transaction {
    /// Starts a transaction that undoes the last one, whose row changes the tables still have: where an evaluation
    /// panics, the row before that one comes back.
    pub fn undoing_last() -> Self {
        Self {
            undoes_last: true,
            ..Self::default()
        }
    }

    /// Starts with the changes of an earlier transaction on which this one builds.
    pub fn after(changes: &ChangeSet) -> Self {
        Self {
            changed: changes.changed.clone(),
            ..Self::default()
        }
    }

    /// Records that a key of a relation changed.
    pub fn mark<K: Hash>(&mut self, relation: RelationId, key: &K) {
        self.changed.insert(ReadKey::of(relation, key));
        self.changed.insert(ReadKey::whole(relation));
    }

    /// Returns the changes so far.
    pub fn changed(&self) -> impl Iterator<Item = ReadKey> + '_ {
        self.changed.iter().copied()
    }

    /// Returns a copy of the changes so far.
    pub fn so_far(&self) -> ChangeSet {
        ChangeSet {
            changed: self.changed.clone(),
        }
    }

    /// Returns true without changes.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// Returns true if the transaction undoes the last one.
    pub(super) fn undoes_last(&self) -> bool {
        self.undoes_last
    }

    /// Records that an evaluation panicked and kept its previous row.
    pub fn note_panic(&mut self, description: String) {
        self.panics.push(description);
    }

    /// Returns the descriptions of evaluations that panicked, each once.
    pub fn take_panics(&mut self) -> Vec<String> {
        std::mem::take(&mut self.panics)
    }

    /// Ends the transaction.
    pub fn finish(self) -> ChangeSet {
        ChangeSet { changed: self.changed }
    }
}

/// Keys that differ between two revisions; computed, never declared.
#[derive(Clone, Debug, Default)]
pub struct ChangeSet {
    changed: FxHashSet<ReadKey>,
}

impl ChangeSet {
    /// Returns true if nothing changed.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// Returns true if any of the reads would have another result now.
    pub fn touches(&self, reads: &[ReadKey]) -> bool {
        if self.changed.len() < reads.len() {
            self.changed.iter().any(|read| reads.binary_search(read).is_ok())
        } else {
            reads.iter().any(|read| self.changed.contains(read))
        }
    }

    /// Adds the changes of a later revision.
    pub fn extend(&mut self, later: &Self) {
        self.changed.extend(later.changed.iter().copied());
    }
}
