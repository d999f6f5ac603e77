//! Admission control: bounds the work in flight, so that a thundering herd of clients costs time but no memory.

mod fair;

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use self::fair::FairBudget;
pub use self::fair::{Permit, Source};

/// The maximum wait of a stream for the rate limit.
///
/// Parity (pilot/pkg/xds/discovery.go, `WaitForRequestLimit`): one second.
const LONGEST_RATE_WAIT: Duration = Duration::from_secs(1);
/// The pause between streams at the lowest rate.
const LONGEST_PAUSE: Duration = Duration::from_hours(1);
/// The number of clients that may send their first large requests at the same time, for each first configuration. Each
/// of them uses about 100 KiB.
const FIRST_REQUESTS: usize = 4;
/// The time after which a client that sends them loses its permit, if others wait.
const LONGEST_FIRST_REQUESTS: Duration = Duration::from_secs(2);
/// The budget for large requests that are arriving, over all streams.
const REQUEST_BYTES: usize = 32 << 20;
/// The number of debug requests that are answered at the same time. An answer is made for one client, and may be as
/// large as the configuration of a proxy.
const DEBUG_ANSWERS: usize = 16;

/// The size of very large requests whose names are processed at the same time, and the size that each counts as at
/// least. So clients without authentication have two at a time, and the largest ones take turns.
const PROCESSED_BYTES: usize = 6 << 20;
const LEAST_PROCESSED_BYTES: usize = 2 << 20;

/// The limits of work in flight.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The maximum number of first configurations that are generated or sent at the same time.
    pub first_configurations: usize,
    /// The maximum size of responses in flight, over all streams. A larger response is sent alone.
    pub bytes_in_flight: usize,
    /// The maximum wait of a stream for its first configuration.
    pub longest_wait: Duration,
    /// The rate of new streams (`PILOT_MAX_REQUESTS_PER_SECOND`); `None` for no rate limit.
    pub streams_per_second: Option<f64>,
}

/// The error for too many waiting first configurations. The client should try again, at any instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{first_configurations} first configurations are in flight, and the wait exceeds {longest_wait:?}; try again")]
pub struct Busy {
    /// The limit.
    pub first_configurations: usize,
    /// The maximum wait.
    pub longest_wait: Duration,
}

/// The error for more new streams than `PILOT_MAX_REQUESTS_PER_SECOND`. The client should try again.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("request rate limit exceeded: {0} streams per second are accepted, and the wait exceeds {LONGEST_RATE_WAIT:?}")]
pub struct RateExceeded(f64);

/// Admission control.
#[derive(Debug)]
pub struct Admission {
    limits: Limits,
    first: FairBudget,
    responses: FairBudget,
    first_requests: FairBudget,
    requests: FairBudget,
    processed: FairBudget,
    debug_answers: FairBudget,
    /// The time at which the next stream may start. Locked for two comparisons.
    next_stream: Mutex<Option<Instant>>,
    clock: fn() -> Instant,
}

impl Admission {
    /// Creates admission control with these limits. A rate that is not positive means no rate limit.
    pub fn new(mut limits: Limits, clock: fn() -> Instant) -> Self {
        limits.streams_per_second = limits.streams_per_second.filter(|rate| rate.is_finite() && *rate > 0.0);
        Self {
            limits,
            first: FairBudget::new(limits.first_configurations),
            responses: FairBudget::new(limits.bytes_in_flight),
            first_requests: FairBudget::new(FIRST_REQUESTS * limits.first_configurations),
            requests: FairBudget::new(REQUEST_BYTES),
            processed: FairBudget::new(PROCESSED_BYTES),
            debug_answers: FairBudget::new(DEBUG_ANSWERS),
            next_stream: Mutex::new(None),
            clock,
        }
    }

    /// Waits until a new stream may start: a token bucket with a burst of one.
    pub async fn stream(&self) -> Result<(), RateExceeded> {
        let Some(rate) = self.limits.streams_per_second else {
            return Ok(());
        };
        let wait = self.reserve(rate)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(())
    }

    fn reserve(&self, rate: f64) -> Result<Duration, RateExceeded> {
        let now = (self.clock)();
        let mut next = self.next_stream.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = next.map_or(now, |next| next.max(now));
        let wait = turn.saturating_duration_since(now);
        if wait > LONGEST_RATE_WAIT {
            return Err(RateExceeded(rate));
        }
        let pause = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(LONGEST_PAUSE);
        *next = Some(turn + pause.min(LONGEST_PAUSE));
        Ok(wait)
    }

    /// Waits until a first configuration may begin.
    pub async fn first_configuration(&self, source: &Source) -> Result<Permit, Busy> {
        let turn = tokio::time::timeout(self.limits.longest_wait, self.first.acquire(source, 1));
        turn.await.map_err(|_| Busy {
            first_configurations: self.limits.first_configurations,
            longest_wait: self.limits.longest_wait,
        })
    }

    /// Waits until a new client may send its first large requests.
    pub async fn first_requests(&self, source: &Source) -> Permit {
        self.first_requests
            .acquire_from_late(source, 1, LONGEST_FIRST_REQUESTS)
            .await
    }

    /// Waits until a request of this size may be held. Slower requests are evicted for it.
    pub async fn request(&self, source: &Source, size_bytes: usize) -> Permit {
        self.requests.acquire_from_slow(source, size_bytes).await
    }

    /// Waits until a very large request of this size may be processed.
    pub async fn processing(&self, source: &Source, size_bytes: usize) -> Permit {
        let size_bytes = size_bytes.max(LEAST_PROCESSED_BYTES);
        self.processed.acquire(source, size_bytes).await
    }

    /// Waits until a debug request may be answered. The permit is held until the answer is read.
    pub async fn debug_answer(&self, source: &Source) -> Permit {
        self.debug_answers.acquire(source, 1).await
    }

    /// Waits until a response of this size may be sent. A very large one is sent alone.
    pub async fn response(&self, source: &Source, size_bytes: usize) -> Permit {
        self.responses.acquire(source, size_bytes).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment;

    fn limits() -> Limits {
        Limits {
            first_configurations: 1,
            bytes_in_flight: 10 << 10,
            longest_wait: Duration::from_secs(10),
            streams_per_second: None,
        }
    }

    #[tokio::test]
    async fn the_rate_limit_has_a_burst_of_one() {
        let streams_per_second = Some(2.0);
        let admission = Admission::new(
            Limits {
                streams_per_second,
                ..limits()
            },
            environment::now,
        );
        let waits: Vec<Option<u64>> = (0..4)
            .map(|_| {
                admission
                    .reserve(2.0)
                    .ok()
                    .map(|wait| wait.as_secs_f64().mul_add(10.0, 0.5) as u64)
            })
            .collect();
        assert_eq!(waits, [Some(0), Some(5), Some(10), None], "tenths of a second");
        let error = admission.stream().await.expect_err("the wait exceeds a second");
        assert!(
            error.to_string().starts_with("request rate limit exceeded: "),
            "{error}"
        );
    }

    #[tokio::test]
    async fn r20_few_very_large_requests_are_processed_at_once() {
        let admission = Admission::new(limits(), environment::now);
        let source = Source::Address(None);
        let held = [
            admission.processing(&source, 300 << 10).await,
            admission.processing(&source, 300 << 10).await,
        ];
        let mut third = std::pin::pin!(admission.processing(&source, 300 << 10));
        assert!(futures::poll!(third.as_mut()).is_pending());
        let authenticated = Source::Identity("spiffe://cluster.local/ns/app/sa/web".into());
        let other = admission.processing(&authenticated, 300 << 10).await;
        drop((held, other));
        third.await;
    }

    #[tokio::test]
    async fn large_responses_are_sent_alone() {
        let admission = Admission::new(limits(), environment::now);
        let source = Source::Address(None);
        let small = admission.response(&source, 1).await;
        let mut large = std::pin::pin!(admission.response(&source, 1 << 30));
        assert!(futures::poll!(large.as_mut()).is_pending());
        drop(small);
        let large = large.await;
        let mut later = std::pin::pin!(admission.response(&source, 1));
        assert!(futures::poll!(later.as_mut()).is_pending());
        drop(large);
        later.await;
    }
}
