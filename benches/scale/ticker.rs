//! A fixed rate.

use std::time::{Duration, Instant};

use crate::support::http::RUNTIME;
use crate::support::wait;

/// A fixed rate of events; late ones catch up.
pub(crate) struct Ticker {
    next: Instant,
    apart: Duration,
}

impl Ticker {
    pub(crate) fn new(a_second: f64) -> Ticker {
        Ticker {
            next: wait::now(),
            apart: Duration::from_secs_f64(1.0 / a_second),
        }
    }

    /// Waits for the next event.
    pub(crate) fn wait(&mut self) {
        let ahead = self.next.saturating_duration_since(wait::now());
        if !ahead.is_zero() {
            RUNTIME.block_on(async { tokio::time::sleep(ahead).await });
        }
        self.next += self.apart;
    }
}
