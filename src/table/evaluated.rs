//! Results of evaluations with their reads, and protection against panics.

use std::panic::AssertUnwindSafe;

use super::{Cx, Key, ReadKey};

/// Result of one evaluation with its key and reads.
pub struct Evaluated<K, V> {
    pub(super) key: K,
    pub(super) outcome: Outcome<V>,
    pub(super) reads: Box<[ReadKey]>,
}

/// Result of an evaluation.
pub enum Outcome<V> {
    /// A row, or its absence.
    Row(Option<V>),
    /// A panic: the previous row stays.
    Panicked,
}

impl<K: Key, V> Evaluated<K, V> {
    /// Evaluates one key and records its reads. If the function panics, the previous row stays; it is evaluated again
    /// when one of the reads until then changes.
    pub fn guarded(key: K, function: impl FnOnce(&Cx, &K) -> Option<V>) -> Self {
        let cx = Cx::recording();
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| function(&cx, &key)));
        let outcome = attempt.map_or(Outcome::Panicked, Outcome::Row);
        Self {
            key,
            outcome,
            reads: cx.into_reads(),
        }
    }

    /// Returns true if the function panicked.
    pub fn panicked(&self) -> bool {
        matches!(self.outcome, Outcome::Panicked)
    }

    /// Returns the key and the result, without the reads.
    pub fn into_outcome(self) -> (K, Outcome<V>) {
        (self.key, self.outcome)
    }

    /// Replaces the row, if there is one.
    pub fn map<R>(self, function: impl FnOnce(V) -> R) -> Evaluated<K, R> {
        Evaluated {
            key: self.key,
            outcome: match self.outcome {
                Outcome::Row(row) => Outcome::Row(row.map(function)),
                Outcome::Panicked => Outcome::Panicked,
            },
            reads: self.reads,
        }
    }

    /// Returns the key.
    pub fn key(&self) -> &K {
        &self.key
    }
}
