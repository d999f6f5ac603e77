//! Who is let in, and when: work in flight is bounded, so that a thundering herd costs time, not memory.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a stream waits for its first configuration to be begun.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How long a stream waits for the rate limit, as in Istio.
const LONGEST_RATE_WAIT: Duration = Duration::from_secs(1);
/// Bytes are counted in units of this, since a semaphore counts in `u32`.
const UNIT_BYTES: usize = 1 << 10;

/// The bounds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many first configurations may be in the making or on their way.
    pub first_configurations: usize,
    /// How many bytes of responses may be on their way, over all streams. A larger response goes alone.
    pub bytes_in_flight: usize,
    /// New streams each second (`PILOT_MAX_REQUESTS_PER_SECOND`); `None`: only work is bounded.
    pub streams_per_second: Option<f64>,
}

/// Too many first configurations wait; the client should try again, here or elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} first configurations are in flight and none ended within {LONGEST_WAIT:?}; try again", .0)]
pub struct Busy(usize);

/// Streams come faster than `PILOT_MAX_REQUESTS_PER_SECOND`; the client should try again.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("request rate limit exceeded: {0} streams per second are admitted, and the wait is over {LONGEST_RATE_WAIT:?}")]
pub struct RateExceeded(f64);

/// A share of the work in flight, given back when dropped.
#[derive(Debug)]
pub struct Share {
    _permit: OwnedSemaphorePermit,
}

/// See the module's text.
#[derive(Debug)]
pub struct Admission {
    limits: Limits,
    first: Arc<Semaphore>,
    units: Arc<Semaphore>,
    all_units: u32,
    /// When the next stream may come. A lock for two comparisons; a task that hands out tokens would do no better.
    next_stream: Mutex<Option<Instant>>,
    clock: fn() -> Instant,
}

impl Admission {
    /// Admission with these bounds.
    pub fn new(limits: Limits, clock: fn() -> Instant) -> Self {
        let all_units = u32::try_from(limits.bytes_in_flight / UNIT_BYTES)
            .unwrap_or(u32::MAX)
            .max(1);
        Self {
            limits,
            first: Arc::new(Semaphore::new(limits.first_configurations.max(1))),
            units: Arc::new(Semaphore::new(all_units as usize)),
            all_units,
            next_stream: Mutex::new(None),
            clock,
        }
    }

    /// Lets a new stream in, at the rate limit if there is one: a bucket that holds one token.
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
        *next = Some(turn + Duration::try_from_secs_f64(1.0 / rate).unwrap_or(LONGEST_WAIT));
        Ok(wait)
    }

    /// Waits, in order of arrival, until a first configuration may begin.
    pub async fn first_configuration(&self) -> Result<Share, Busy> {
        let turn = tokio::time::timeout(LONGEST_WAIT, self.first.clone().acquire_owned());
        match turn.await {
            Ok(Ok(permit)) => Ok(Share { _permit: permit }),
            Ok(Err(_)) | Err(_) => Err(Busy(self.limits.first_configurations)),
        }
    }

    /// Waits, in order of arrival, until a response of this size may be sent.
    pub async fn response(&self, size_bytes: usize) -> Option<Share> {
        let units = u32::try_from(size_bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let permit = self
            .units
            .clone()
            .acquire_many_owned(units.clamp(1, self.all_units))
            .await;
        permit.ok().map(|permit| Share { _permit: permit })
    }
}
