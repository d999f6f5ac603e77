//! Waiting for a condition, with a deadline and without a fixed pause.

use std::time::{Duration, Instant};

/// Returns the current time, for measurements.
#[expect(clippy::disallowed_methods, reason = "the tests run real processes, in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The most by which deadlines are extended.
const MAX_SLOWNESS: f64 = 8.0;

/// Polls `condition` until it returns a value. Fails with `what` once `deadline` has passed, which is extended while
/// the machine is busy.
pub(crate) fn until<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T, String> {
    let started_at = now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        let elapsed = started_at.elapsed();
        if elapsed >= deadline && elapsed >= patience(deadline) {
            return Err(format!("timed out after {} s waiting for {what}", elapsed.as_secs()));
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// Returns what a time limit for a quiet machine is now: it grows with the number of tasks that share a core, on
/// average over the last minute.
pub(crate) fn patience(limit: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let tasks = load.split(' ').next().and_then(|tasks| tasks.parse::<f64>().ok());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Without the file, the machine counts as quiet.
    limit.mul_f64(tasks.map_or(1.0, |tasks| (tasks / cores as f64).clamp(1.0, MAX_SLOWNESS)))
}
