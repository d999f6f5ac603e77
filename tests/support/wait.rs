//! Waiting for a condition, with a deadline and without a fixed pause.

use std::time::{Duration, Instant};

/// The time, to measure with.
#[expect(clippy::disallowed_methods, reason = "the tests run real processes, in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Asks `condition` until it gives a value, or fails with the words `what` once `deadline` has passed.
pub(crate) fn until<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T, String> {
    let begun = now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if begun.elapsed() >= deadline {
            return Err(format!("no sign of {what} within {} s", deadline.as_secs()));
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
