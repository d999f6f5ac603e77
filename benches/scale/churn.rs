//! Changes that are faster than pushes, and the latency of each to each proxy.
//!
//! A later change of a service may replace an earlier one on the way. A change has therefore arrived with the first
//! response that holds it or a later change of the same service.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use regex::bytes::Regex;

use super::wire::Response;
use crate::support::ads::Type;
use crate::support::wait;

/// The largest latency bucket; buckets are one millisecond wide.
const MOST_MILLISECONDS: usize = 120_000;

/// A series of changes, from the first write to the last arrival.
pub(crate) struct Churn {
    pub(crate) kind: Type,
    /// The mark of a change in a response; its one or two groups are numbers.
    sign: Regex,
    /// Converts the numbers of a mark to service and round.
    meaning: fn([usize; 2]) -> (usize, usize),
    proxies: usize,
    /// The write times of each service's rounds; rounds are counted from 1.
    written: Vec<Mutex<Vec<Instant>>>,
    /// The last round of each service in each proxy, ordered by proxy.
    reached: Vec<AtomicU16>,
    /// Number of changes by latency in milliseconds.
    waits: Vec<AtomicU32>,
    arrived: AtomicUsize,
}

/// Latencies of changes, in milliseconds.
pub(crate) struct Waits {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) longest: f64,
}

impl Churn {
    /// A series before its first change.
    pub(crate) fn new(
        kind: Type,
        sign: &str,
        meaning: fn([usize; 2]) -> (usize, usize),
        services: usize,
        proxies: usize,
    ) -> Result<Churn, String> {
        Ok(Churn {
            kind,
            sign: Regex::new(sign).map_err(|error| error.to_string())?,
            meaning,
            proxies,
            written: (0..services).map(|_| Mutex::default()).collect(),
            reached: (0..services * proxies).map(|_| AtomicU16::new(0)).collect(),
            waits: (0..=MOST_MILLISECONDS).map(|_| AtomicU32::new(0)).collect(),
            arrived: AtomicUsize::new(0),
        })
    }

    /// Records that the next round of a service is being written.
    pub(crate) fn writes(&self, service: usize) {
        let mut written = self.written[service].lock().unwrap_or_else(PoisonError::into_inner);
        written.push(wait::now());
    }

    /// Records the changes in a response to a proxy.
    pub(crate) fn note(&self, proxy: usize, response: &Response) {
        if proxy >= self.proxies {
            return;
        }
        for resource in &response.resources {
            for captures in self.sign.captures_iter(resource.body) {
                let number = |group: usize| {
                    let text = captures.get(group).map_or(&b"0"[..], |found| found.as_bytes());
                    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok())
                };
                if let Some(numbers) = number(1).zip(number(2)) {
                    let (service, round) = (self.meaning)(numbers.into());
                    self.arrives(proxy, service, round);
                }
            }
        }
    }

    fn arrives(&self, proxy: usize, service: usize, round: usize) {
        let Some(written) = self.written.get(service) else {
            return;
        };
        let Ok(now_at) = u16::try_from(round) else { return };
        let reached = &self.reached[proxy * self.written.len() + service];
        let before = reached.fetch_max(now_at, Ordering::Relaxed);
        if before >= now_at {
            return;
        }
        let now = wait::now();
        let written = written.lock().unwrap_or_else(PoisonError::into_inner);
        for at in written.iter().take(round).skip(usize::from(before)) {
            let milliseconds = now.saturating_duration_since(*at).as_millis() as usize;
            self.waits[milliseconds.min(MOST_MILLISECONDS)].fetch_add(1, Ordering::Relaxed);
            self.arrived.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of changes written.
    pub(crate) fn changes(&self) -> usize {
        let count = |written: &Mutex<Vec<Instant>>| written.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.written.iter().map(count).sum()
    }

    /// Waits until each proxy has each change.
    pub(crate) fn settle(&self, patience: Duration) -> Result<Waits, String> {
        let all = self.changes() * self.proxies;
        let arrived = || self.arrived.load(Ordering::Relaxed);
        wait::until("the last change in every proxy", patience, || {
            (arrived() >= all).then_some(())
        })
        .map_err(|error| format!("{error}; {} of {all} arrivals", arrived()))?;
        Ok(Waits {
            p50: self.wait_of(0.5, all),
            p99: self.wait_of(0.99, all),
            longest: self.wait_of(1.0, all),
        })
    }

    /// Returns the latency that this share of all arrivals did not exceed.
    fn wait_of(&self, share: f64, all: usize) -> f64 {
        let rank = (all as f64 * share).ceil() as usize;
        let mut count = 0;
        let at = self.waits.iter().position(|wait| {
            count += wait.load(Ordering::Relaxed) as usize;
            count >= rank
        });
        at.unwrap_or(MOST_MILLISECONDS) as f64
    }
}
