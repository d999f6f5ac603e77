//! Many simulated proxies and their statistics.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use regex::bytes::Regex;
use rustc_hash::FxHashMap;
use tokio::task::JoinHandle;

use super::churn::Churn;
use super::proxy::{HeldResource, PAUSE, Proxy};
use super::wire::Response;
use crate::support::ads::Type;
use crate::support::http::RUNTIME;
use crate::support::wait;

/// Time limit of the slowest proxy before the run fails.
const TIMEOUT: Duration = Duration::from_mins(5);

/// The number and kind of the proxies, and how fast they connect.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) proxies: usize,
    /// Number of workloads that the proxies belong to.
    pub(crate) workloads: usize,
    pub(crate) namespaces: usize,
    /// The time over which they connect.
    pub(crate) ramp: Duration,
    pub(crate) is_delta: bool,
}

/// State shared by all proxies.
pub(crate) struct Fleet {
    pub(crate) address: SocketAddr,
    pub(crate) is_delta: bool,
    /// For each ready proxy: the start of its connection, and the time when it was ready.
    readiness: Mutex<Vec<(Instant, Instant)>>,
    counts: Counts,
    change: ArcSwapOption<Change>,
    churn: ArcSwapOption<Churn>,
    shared: Mutex<FxHashMap<u64, Arc<HeldResource>>>,
}

/// Sums over all proxies.
#[derive(Default)]
struct Counts {
    responses: AtomicU64,
    resources: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of resources that the proxy already held at the same version.
    bytes_resent: AtomicU64,
    broken: AtomicU64,
}

/// The sums at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) responses: u64,
    pub(crate) resources: u64,
    pub(crate) bytes: u64,
    /// See [`Counts`].
    pub(crate) bytes_resent: u64,
    /// Streams that ended early.
    pub(crate) broken: u64,
}

/// An expected change: a response of this type that contains these bytes carries it.
struct Change {
    kind: Type,
    sign: Regex,
    reached: Mutex<FxHashMap<usize, Instant>>,
}

impl Fleet {
    /// Counts a response, and records whether it carries the expected change.
    pub(crate) fn note(&self, proxy: usize, response: &Response) {
        let add = |count: &AtomicU64, number: usize| count.fetch_add(number as u64, Ordering::Relaxed);
        add(&self.counts.responses, 1);
        add(&self.counts.resources, response.resources.len());
        let bytes = response.resources.iter().map(|resource| resource.body.len()).sum();
        add(&self.counts.bytes, bytes);
        let churn = self.churn.load();
        if let Some(churn) = churn.as_ref().filter(|churn| churn.kind == response.kind) {
            churn.note(proxy, response);
        }
        let change = self.change.load();
        let Some(change) = change.as_ref().filter(|change| change.kind == response.kind) else {
            return;
        };
        if response
            .resources
            .iter()
            .any(|resource| change.sign.is_match(resource.body))
        {
            let mut reached = change.reached.lock().unwrap_or_else(PoisonError::into_inner);
            reached.entry(proxy).or_insert_with(wait::now);
        }
    }

    /// Counts bytes of a resource that the proxy already held.
    pub(crate) fn note_resent(&self, bytes: usize) {
        self.counts.bytes_resent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Records that a proxy has all requested resources.
    pub(crate) fn ready(&self, began: Instant) {
        let mut readiness = self.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        readiness.push((began, wait::now()));
    }

    /// Returns the shared copy of equal resources.
    pub(crate) fn shared(&self, hash: u64, make: impl FnOnce() -> HeldResource) -> Arc<HeldResource> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.entry(hash).or_insert_with(|| Arc::new(make())).clone()
    }
}

/// Connected proxies; dropping it closes their connections.
pub(crate) struct Load {
    plan: Plan,
    fleet: Arc<Fleet>,
    proxies: Vec<Arc<Proxy>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Load {
    fn drop(&mut self) {
        self.disconnect();
    }
}

/// Durations in seconds.
pub(crate) struct Times {
    /// Until the last one.
    pub(crate) all: f64,
    /// The 99th percentile.
    pub(crate) p99: f64,
}

impl Times {
    /// The statistics of durations.
    fn of(all: Duration, mut each: Vec<Duration>) -> Times {
        each.sort_unstable();
        let p99 = each.get(each.len().saturating_sub(1) * 99 / 100);
        Times {
            all: all.as_secs_f64(),
            p99: p99.copied().unwrap_or_default().as_secs_f64(),
        }
    }
}

impl Load {
    /// Proxies that are not connected yet.
    pub(crate) fn new(address: SocketAddr, plan: Plan) -> Load {
        Load::starting_at(address, plan, 0)
    }

    /// Like [`Self::new`]; the first proxy has this number, which must be unique in a run.
    pub(crate) fn starting_at(address: SocketAddr, plan: Plan, first: usize) -> Load {
        let fleet = Fleet {
            address,
            is_delta: plan.is_delta,
            readiness: Mutex::default(),
            counts: Counts::default(),
            change: ArcSwapOption::empty(),
            churn: ArcSwapOption::empty(),
            shared: Mutex::default(),
        };
        let proxy = |number| Arc::new(Proxy::new(number, number % plan.workloads, plan.namespaces));
        Load {
            plan,
            fleet: Arc::new(fleet),
            proxies: (first..first + plan.proxies).map(proxy).collect(),
            tasks: Vec::new(),
        }
    }

    /// Connects all proxies and waits until each is configured. Reconnecting proxies report the resources that they
    /// hold.
    pub(crate) fn connect(&mut self, ramp: Duration) -> Result<Times, String> {
        self.readiness().clear();
        let started_at = wait::now();
        let pause = ramp / u32::try_from(self.plan.proxies.max(1)).unwrap_or(u32::MAX);
        for (number, proxy) in (0..).zip(&self.proxies) {
            let (proxy, fleet) = (proxy.clone(), self.fleet.clone());
            self.tasks.push(RUNTIME.spawn(async move {
                tokio::time::sleep(pause * number).await;
                loop {
                    let why = proxy.connect(&fleet).await;
                    if fleet.counts.broken.fetch_add(1, Ordering::Relaxed) < 3 {
                        eprintln!("proxy {}: {why}", proxy.number);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }));
        }
        wait::until("the last configured proxy", TIMEOUT, || {
            (self.readiness().len() >= self.plan.proxies).then_some(())
        })
        .map_err(|error| format!("{error}; {} proxies are configured", self.readiness().len()))?;
        let readiness = self.readiness();
        let last = readiness.iter().map(|(_, ready)| *ready).max().unwrap_or(started_at);
        let each = readiness.iter().map(|(began, ready)| *ready - *began).collect();
        Ok(Times::of(last - started_at, each))
    }

    fn readiness(&self) -> std::sync::MutexGuard<'_, Vec<(Instant, Instant)>> {
        self.fleet.readiness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes all connections at once. The proxies remember the resources that they hold.
    pub(crate) fn disconnect(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
        }
    }

    /// Returns the sums so far.
    pub(crate) fn sums(&self) -> Sums {
        let counts = &self.fleet.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Sums {
            responses: of(&counts.responses),
            resources: of(&counts.resources),
            bytes: of(&counts.bytes),
            bytes_resent: of(&counts.bytes_resent),
            broken: of(&counts.broken),
        }
    }

    /// Makes a change with `write` and waits until each proxy has a response of this type that contains `sign`. Returns
    /// the latencies from the end of the write.
    pub(crate) fn converge(
        &self,
        kind: Type,
        sign: &str,
        write: impl FnOnce() -> Result<(), String>,
    ) -> Result<Vec<Duration>, String> {
        let change = Arc::new(Change {
            kind,
            sign: Regex::new(&regex::escape(sign)).map_err(|error| error.to_string())?,
            reached: Mutex::default(),
        });
        self.fleet.change.store(Some(change.clone()));
        write()?;
        let written = wait::now();
        let reached = || change.reached.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = wait::until("the change in every proxy", TIMEOUT, || {
            (reached().len() >= self.plan.proxies).then_some(())
        });
        self.fleet.change.store(None);
        outcome.map_err(|error| format!("{error}; it has reached {} proxies", reached().len()))?;
        Ok(reached()
            .values()
            .map(|at| at.saturating_duration_since(written))
            .collect())
    }

    /// Tracks these changes from now on, or none.
    pub(crate) fn follow(&self, churn: Option<Arc<Churn>>) {
        self.fleet.churn.store(churn);
    }

    /// Returns the statistics of latencies.
    pub(crate) fn times(waits: Vec<Duration>) -> Times {
        Times::of(waits.iter().max().copied().unwrap_or_default(), waits)
    }
}
