//! Changes that follow one another faster than proxies are sent them: how long each is under way to each proxy.
//!
//! A later change of a service takes the place of an earlier one on its way, so a change has arrived with the first
//! response that holds it or a later one of the same service.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use regex::bytes::Regex;

use super::wire::{Response, Type};
use crate::tests::support::wait;

/// Waits are counted by the millisecond, those of more than this together.
const MOST_MILLISECONDS: usize = 120_000;

/// What is followed from the first write to the last arrival.
pub(crate) struct Churn {
    pub(crate) kind: Type,
    /// Its one or two groups are numbers.
    sign: Regex,
    /// The service and the round that the numbers of a sign tell.
    meaning: fn([usize; 2]) -> (usize, usize),
    proxies: usize,
    /// When each round of each service was written; rounds are counted from 1.
    written: Vec<Mutex<Vec<Instant>>>,
    /// The last round of each service that each proxy has: proxy by proxy.
    reached: Vec<AtomicU16>,
    /// How many changes were so many milliseconds on their way.
    waits: Vec<AtomicU32>,
    arrived: AtomicUsize,
}

/// How long changes were on their way, in milliseconds.
pub(crate) struct Waits {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) longest: f64,
}

impl Churn {
    /// Nothing is written so far.
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

    /// The next round of a service is being written.
    pub(crate) fn writes(&self, service: usize) {
        let mut written = self.written[service].lock().unwrap_or_else(PoisonError::into_inner);
        written.push(wait::now());
    }

    /// Takes note of what a proxy was sent.
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

    /// How many changes were written.
    pub(crate) fn changes(&self) -> usize {
        let count = |written: &Mutex<Vec<Instant>>| written.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.written.iter().map(count).sum()
    }

    /// Waits until each proxy has each change.
    pub(crate) fn settle(&self, patience: Duration) -> Result<Waits, String> {
        let all = self.changes() * self.proxies;
        let arrived = || self.arrived.load(Ordering::Relaxed);
        wait::until("the last change everywhere", patience, || {
            (arrived() >= all).then_some(())
        })
        .map_err(|error| format!("{error}; {} of {all} arrivals", arrived()))?;
        Ok(Waits {
            p50: self.wait_of(0.5, all),
            p99: self.wait_of(0.99, all),
            longest: self.wait_of(1.0, all),
        })
    }

    /// That share of all arrivals took at most so many milliseconds.
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
