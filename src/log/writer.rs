//! The thread that writes lines. A target that blocks, such as a pipe that nothing reads, delays no other thread.

use std::{
    collections::BTreeMap,
    io::Write as _,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use tracing::callsite::Identifier;

use super::{
    format::{Encoding, Record},
    levels::Level,
    output::{Output, is_recent},
    repetition::{PERIOD, Repetition},
};

/// Lines that wait at most. More are lost, and counted.
const CAPACITY: usize = 16_384;
/// The time after a write in which lines are collected. Without it, each of many lines would wake the thread and be a
/// write of its own, which takes 4 % of the CPU time when thousands of proxies connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Time for waiting lines at the end of the process.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// A line and the statement that logged it.
type Line = (Identifier, Record);

#[derive(Default)]
struct Waiting {
    lines: Vec<Line>,
    lost: u64,
    /// True while the thread waits for a line, until it is woken.
    is_idle: bool,
    /// True while taken lines are being written.
    is_writing: bool,
    /// True once summaries need not wait for the end of their period.
    is_ending: bool,
}

/// Lines between the threads that log and the one that writes.
#[derive(Default)]
pub(super) struct Queue {
    /// Guards the waiting lines.
    waiting: Mutex<Waiting>,
    filled: Condvar,
    written: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while it is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line, or counts it as lost.
    pub(super) fn push(&self, statement: Identifier, record: Record) {
        let mut waiting = self.lock();
        if waiting.lines.len() < CAPACITY {
            waiting.lines.push((statement, record));
            if std::mem::take(&mut waiting.is_idle) || waiting.lines.len() == CAPACITY / 2 {
                self.filled.notify_one();
            }
        } else {
            waiting.lost += 1;
        }
    }

    /// Waits until all lines are written, with the summaries of repetitions, for a limited time.
    pub(super) fn finish(&self) {
        let mut waiting = self.lock();
        waiting.is_ending = true;
        self.filled.notify_one();
        let is_busy = |waiting: &mut Waiting| waiting.is_ending || waiting.is_writing || !waiting.lines.is_empty();
        drop(self.written.wait_timeout_while(waiting, END_TIMEOUT, is_busy));
    }

    /// Waits for lines, at most for this time, and takes them with the number of lost ones. The last value is true if
    /// the process is about to end.
    fn take(&self, timeout: Option<Duration>) -> (Vec<Line>, u64, bool) {
        let mut waiting = self.lock();
        waiting.is_idle = true;
        let is_idle = |waiting: &mut Waiting| waiting.lines.is_empty() && !waiting.is_ending;
        let mut waiting = match timeout {
            None => self
                .filled
                .wait_while(waiting, is_idle)
                .unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = self.filled.wait_timeout_while(waiting, timeout, is_idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        waiting.is_idle = false;
        waiting.is_writing = true;
        let is_ending = std::mem::take(&mut waiting.is_ending);
        (
            std::mem::take(&mut waiting.lines),
            std::mem::take(&mut waiting.lost),
            is_ending,
        )
    }

    fn wrote(&self) {
        self.lock().is_writing = false;
        self.written.notify_all();
    }

    /// Waits while lines are collected, unless many are waiting or the process is about to end.
    fn pause(&self) {
        let is_collecting = |waiting: &mut Waiting| !waiting.is_ending && waiting.lines.len() < CAPACITY / 2;
        drop(self.filled.wait_timeout_while(self.lock(), PAUSE, is_collecting));
    }
}

/// The state of the writing thread.
pub(super) struct Writer {
    pub(super) queue: Arc<Queue>,
    pub(super) encoding: Encoding,
    pub(super) outputs: Vec<Output>,
    pub(super) clock: fn() -> SystemTime,
}

impl Writer {
    /// Writes lines until the process ends.
    pub(super) fn run(mut self) {
        let mut repetition = Repetition::default();
        let mut failures = Failures::default();
        loop {
            // Without an open period there is nothing to summarize.
            let timeout = (!repetition.is_empty()).then_some(PERIOD / 4);
            let (lines, lost, is_ending) = self.queue.take(timeout);
            let now = (self.clock)();
            let mut text = String::new();
            let mut write = |record: &Record| self.encoding.write(record, &mut text);
            for (statement, record) in lines {
                repetition.summaries(Some(record.time)).iter().for_each(&mut write);
                if let Some(record) = repetition.admit(statement, record) {
                    write(&record);
                }
            }
            if lost > 0 {
                write(&lost_lines(now, lost));
            }
            let until = (!is_ending).then_some(now);
            repetition.summaries(until).iter().for_each(&mut write);
            self.write(&text, now, &mut failures);
            self.queue.wrote();
            self.queue.pause();
        }
    }

    fn write(&mut self, text: &str, now: SystemTime, failures: &mut Failures) {
        if text.is_empty() {
            return;
        }
        for output in &mut self.outputs {
            if let Err(error) = output.write(text, now)
                && failures.is_new(&error.to_string(), now)
            {
                // Standard error may be closed, too.
                let _ = writeln!(std::io::stderr(), "failed to write log lines: {error}");
            }
        }
    }
}

/// The errors of targets that were reported recently. A full disk would otherwise add a line for every batch.
#[derive(Default)]
struct Failures(BTreeMap<String, SystemTime>);

impl Failures {
    /// Returns true if an error was not reported recently, and records it.
    fn is_new(&mut self, error: &str, now: SystemTime) -> bool {
        self.0.retain(|_, reported_at| is_recent(*reported_at, now));
        let is_new = !self.0.contains_key(error);
        if is_new {
            self.0.insert(error.to_owned(), now);
        }
        is_new
    }
}

fn lost_lines(time: SystemTime, count: u64) -> Record {
    Record {
        time,
        level: Level::Warn,
        scope: "default",
        caller: None,
        message: "log lines lost: a log target is slow".into(),
        fields: vec![("count", count.into())],
        stack: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_target_is_reported_once_a_minute() {
        let begin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let mut failures = Failures::default();
        let mut is_new = |error, seconds| failures.is_new(error, begin + Duration::from_secs(seconds));
        let full = "No space left on device";
        assert!(is_new(full, 0));
        assert!(!is_new(full, 59));
        assert!(is_new("Read-only file system", 59));
        assert!(is_new(full, 60));
        assert!(!is_new(full, 61));
    }
}
