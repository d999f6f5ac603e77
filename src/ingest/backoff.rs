//! Delays between attempts to reach a server.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// Delays that grow with each failure, up to a limit, and differ between processes.
///
/// Parity (pkg/backoff/exponential.go): factor 1.5, half of the delay up or down.
pub(super) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
    random: RandomState,
    attempts: u64,
}

/// Growth of the delay.
const FACTOR: f64 = 1.5;

impl Backoff {
    /// Returns the delays from the first one to the longest one.
    pub(super) fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
            random: RandomState::new(),
            attempts: 0,
        }
    }

    /// Returns the next delay.
    pub(super) fn next(&mut self) -> Duration {
        self.attempts += 1;
        // A `RandomState` has random keys; nothing else here needs randomness.
        let part = self.random.hash_one(self.attempts) % 1001;
        let delay = self.next.mul_f64(0.5 + part as f64 / 1000.0).min(self.longest);
        self.next = self.next.mul_f64(FACTOR).min(self.longest);
        delay
    }

    /// Starts with the first delay again, after a success.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_within_their_bounds_and_start_again() {
        let (first, longest) = (Duration::from_millis(500), Duration::from_mins(1));
        let mut backoff = Backoff::new(first, longest);
        let delays: Vec<Duration> = (0..40).map(|_| backoff.next()).collect();
        assert!(delays[0] >= first / 2 && delays[0] <= first * 3 / 2, "{:?}", delays[0]);
        assert!(delays.iter().all(|delay| *delay <= longest));
        assert!(delays[39] >= longest / 2);
        backoff.reset();
        assert!(backoff.next() <= first * 3 / 2);
    }
}
