//! Repeated warnings and errors: a line is written once in a while, and its repetitions are counted. Pure; the time is
//! an argument.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, SystemTime},
};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{format::Record, levels::Level};

/// Time for which repetitions are counted, beginning with the first line.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
/// Different lines of one statement of the code that are written within a period, so that a peer whose lines all
/// differ, by its port for example, cannot fill a disk.
const DIFFERENT_LINES: usize = 1000;

/// The lines of one statement in the present period.
struct Window {
    began: SystemTime,
    /// Hashes of the lines that were written.
    written: FxHashSet<u64>,
    /// The number of lines that were not, and the last of them.
    omitted: Option<(u64, Record)>,
}

/// The statements (`K`) that logged warnings within the last period. Bounded by the statements of the program.
pub(super) struct Repetition<K> {
    windows: FxHashMap<K, Window>,
}

impl<K> Default for Repetition<K> {
    fn default() -> Self {
        Self {
            windows: FxHashMap::default(),
        }
    }
}

impl<K: Eq + Hash> Repetition<K> {
    /// Returns the line if it must be written. Periods that have ended must be [summarized](Self::summaries) before.
    pub(super) fn admit(&mut self, statement: K, record: Record) -> Option<Record> {
        if record.level > Level::Warn {
            return Some(record);
        }
        let window = self.windows.entry(statement).or_insert_with(|| Window {
            began: record.time,
            written: FxHashSet::default(),
            omitted: None,
        });
        let hash = hash(&record);
        let is_new = window.written.len() < DIFFERENT_LINES && window.written.insert(hash);
        if is_new {
            return Some(record);
        }
        let omitted = window.omitted.take().map_or(0, |(count, _)| count);
        window.omitted = Some((omitted + 1, record));
        None
    }

    /// Ends the periods that are over, or all of them without a time. Returns a line for each that omitted lines: the
    /// last of them with their number.
    pub(super) fn summaries(&mut self, now: Option<SystemTime>) -> Vec<Record> {
        let is_over = |window: &Window| {
            // A clock that was set back ends the period as well.
            now.is_none_or(|now| now.duration_since(window.began).map_or(true, |age| age >= PERIOD))
        };
        let mut lines = Vec::new();
        self.windows.retain(|_, window| {
            let ends = is_over(window);
            if let Some((count, mut record)) = window.omitted.take_if(|_| ends) {
                record.fields.push(("repeated", count.into()));
                lines.push(record);
            }
            !ends
        });
        lines.sort_by_key(|record| record.time);
        lines
    }

    /// Returns true if no period is open.
    pub(super) fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }
}

fn hash(record: &Record) -> u64 {
    let mut hasher = DefaultHasher::new();
    record.message.hash(&mut hasher);
    record.fields.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(millis: u64, level: Level, peer: u64) -> Record {
        Record {
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(millis),
            level,
            scope: "grpc",
            caller: None,
            message: "failed to accept connection".into(),
            fields: vec![("peer", peer.into())],
            stack: None,
        }
    }

    fn at(millis: u64) -> Option<SystemTime> {
        Some(SystemTime::UNIX_EPOCH + Duration::from_millis(millis))
    }

    #[test]
    fn repetitions_are_counted_and_summarized() {
        let mut repetition = Repetition::default();
        let warn = |millis, peer| record(millis, Level::Warn, peer);
        assert!(repetition.admit("accept", warn(0, 1)).is_some());
        assert!(repetition.admit("accept", warn(1, 1)).is_none());
        // Another line of the same statement, and the same line of another statement.
        assert!(repetition.admit("accept", warn(2, 2)).is_some());
        assert!(repetition.admit("other", warn(3, 1)).is_some());
        assert!(repetition.admit("accept", warn(9_000, 1)).is_none());
        assert_eq!(repetition.summaries(at(9_999)), []);
        let mut summary = warn(9_000, 1);
        summary.fields.push(("repeated", 2.into()));
        assert_eq!(repetition.summaries(at(10_000)), [summary]);
        // A new period begins with the next line.
        assert!(repetition.admit("accept", warn(10_001, 1)).is_some());
        assert_eq!(repetition.summaries(at(10_003)), []);
        assert_eq!(repetition.summaries(at(20_001)), []);
        assert!(repetition.is_empty());
    }

    #[test]
    fn only_warnings_and_errors_are_counted() {
        let mut repetition = Repetition::default();
        for _ in 0..3 {
            assert!(repetition.admit("push", record(0, Level::Info, 1)).is_some());
        }
        assert!(repetition.admit("push", record(0, Level::Error, 1)).is_some());
        assert!(repetition.admit("push", record(0, Level::Error, 1)).is_none());
        assert_eq!(repetition.summaries(None).len(), 1);
    }

    #[test]
    fn a_statement_has_a_limit_of_different_lines() {
        let mut repetition = Repetition::default();
        let lines = 3 * DIFFERENT_LINES as u64;
        let written = (0..lines).filter(|peer| repetition.admit("accept", record(0, Level::Warn, *peer)).is_some());
        assert_eq!(written.count(), DIFFERENT_LINES);
        let summaries = repetition.summaries(at(10_000));
        let repeated = summaries[0].fields.last();
        assert_eq!(repeated, Some(&("repeated", (2 * DIFFERENT_LINES as u64).into())));
    }
}
