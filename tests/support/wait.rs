//! Waiting for a condition, with a deadline and without a fixed pause.

use std::time::{Duration, Instant};

/// Returns the current time, for measurements.
#[expect(clippy::disallowed_methods, reason = "the tests run real processes, in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Polls `condition` until it returns a value. Fails with `what` once `deadline` has passed.
pub(crate) fn until<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T, String> {
    let started_at = now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if started_at.elapsed() >= deadline {
            return Err(format!("timed out after {} s waiting for {what}", deadline.as_secs()));
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
