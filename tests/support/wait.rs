//! Waiting for a condition, with a deadline and without a fixed pause.

use std::time::{Duration, Instant};

/// Returns the current time, for measurements.
#[expect(clippy::disallowed_methods, reason = "the tests run real processes, in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The maximum factor by which time limits are extended.
const MAX_EXTENSION: f64 = 8.0;

/// The time between two polls, at first and at most.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(100));

/// Polls `condition` until it returns a value. Fails with `what` once `deadline` has passed, which is extended while
/// the machine is busy.
pub(crate) fn until<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T, String> {
    let started_at = now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        let elapsed = started_at.elapsed();
        // The load is read only after the deadline.
        if elapsed >= deadline && elapsed >= extended(deadline) {
            return Err(format!("timed out after {} s waiting for {what}", elapsed.as_secs()));
        }
        // A twentieth of the time so far: a long wait costs less CPU time, and ends hardly later.
        std::thread::park_timeout((elapsed / 20).clamp(INTERVALS.0, INTERVALS.1));
    }
}

/// Returns a time limit that is meant for a quiet machine, extended by the number of tasks that share a core, on
/// average over the last minute. For limits after which a test fails, not for times that it asserts.
pub(crate) fn extended(limit: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let tasks = load.split(' ').next().and_then(|tasks| tasks.parse::<f64>().ok());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Without the file, the machine counts as quiet.
    limit.mul_f64(tasks.map_or(1.0, |tasks| (tasks / cores as f64).clamp(1.0, MAX_EXTENSION)))
}
