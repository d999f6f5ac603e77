//! Resolves host names of network gateways by DNS. The mesh declares the required ones; a result is a change like
//! others.
//!
//! Each host is resolved again when its records expire. While DNS fails, the last addresses stay: a broken resolver
//! must not separate networks.

mod dns;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::{
    in_flight::InFlight,
    source::{Readiness, Source},
};
use crate::{
    api::resolved_host::ResolvedHost,
    base::ClusterId,
    model::{
        change::{Batch, Change},
        external_dependencies::ExternalDependencies,
    },
};

/// Shortest interval of lookups, and the longest one after a failure or without records.
const SOONEST: Duration = Duration::from_secs(30);
/// First retry delay of a host that was never resolved; doubled each time.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Longest interval of lookups.
const LATEST: Duration = Duration::from_hours(1);

/// Longest wait for the first addresses at the start.
const START_TIMEOUT: Duration = Duration::from_secs(6);

/// Result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Answer {
    /// Addresses of both families; empty without records.
    pub addresses: Vec<IpAddr>,
    /// Smallest TTL of the records; `None` without records.
    pub ttl: Option<Duration>,
}

/// Error of a lookup, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LookupError(String);

/// Resolves hosts.
pub trait Lookup: Send + Sync + 'static {
    /// Resolves a fully qualified host name after a delay.
    fn lookup(self: Arc<Self>, host: SmolStr, wait: Duration) -> BoxFuture<'static, Result<Answer, LookupError>>;
}

/// The source of addresses of the required hosts, by the servers of `/etc/resolv.conf`.
pub struct DnsResolver {
    /// Config cluster.
    cluster: ClusterId,
    /// Required hosts.
    dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    /// Hosts that were resolved.
    answered: watch::Sender<BTreeSet<SmolStr>>,
}

impl DnsResolver {
    /// Returns the source of a config cluster.
    pub fn new(cluster: ClusterId, dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>) -> Self {
        Self {
            cluster,
            dependencies,
            answered: watch::Sender::default(),
        }
    }
}

impl Source for DnsResolver {
    fn name(&self) -> &'static str {
        "resolver"
    }

    /// A network without the addresses of its gateways counts as one that is reached directly.
    fn readiness(&self) -> Readiness {
        let known = self.answered.subscribe();
        Readiness::Answered(Box::new(move |dependencies| {
            Box::pin(async move { answered(known, &dependencies, START_TIMEOUT).await })
        }))
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let resolver = Resolver {
            answered: self.answered,
            ..Resolver::new(self.cluster, Arc::new(dns::SystemDns::default()), changes)
        };
        resolver.run(self.dependencies).await;
    }
}

/// Waits until every required host was resolved and its addresses were sent, up to a timeout.
async fn answered(
    mut known: watch::Receiver<BTreeSet<SmolStr>>,
    dependencies: &ExternalDependencies,
    patience: Duration,
) {
    let all = known.wait_for(|known| dependencies.hosts.is_subset(known));
    if timeout(patience, all).await.is_err() {
        tracing::warn!("network gateways not resolved yet, serving without them");
    }
}

/// Required hosts and their state.
struct Resolver<L> {
    cluster: ClusterId,
    lookup: Arc<L>,
    changes: mpsc::Sender<Vec<Change>>,
    hosts: BTreeMap<SmolStr, Host>,
    /// Next result of each: a delay, then a lookup.
    in_flight: InFlight<SmolStr, Result<Answer, LookupError>>,
    /// Hosts that were resolved.
    answered: watch::Sender<BTreeSet<SmolStr>>,
}

/// One host.
#[derive(Default)]
struct Host {
    /// Published addresses, sorted; `None` before the first result or failure.
    published: Option<Vec<IpAddr>>,
    /// Failures since the last result.
    failures: u32,
}

impl Host {
    /// Returns the delay after a failed lookup. Unlike the last addresses, unknown ones cannot serve meanwhile.
    fn retry_delay(&self) -> Duration {
        match self.published.as_deref() {
            Some([_, ..]) => SOONEST,
            _ => FIRST_RETRY.saturating_mul(1 << self.failures.min(5)).min(SOONEST),
        }
    }
}

impl<L: Lookup> Resolver<L> {
    fn new(cluster: ClusterId, lookup: Arc<L>, changes: mpsc::Sender<Vec<Change>>) -> Self {
        Self {
            cluster,
            lookup,
            changes,
            hosts: BTreeMap::new(),
            in_flight: InFlight::default(),
            answered: watch::Sender::default(),
        }
    }

    /// Runs until an input or the receiver of changes is closed.
    async fn run(mut self, mut dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>) {
        loop {
            let required = dependencies.borrow_and_update().clone().unwrap_or_default();
            if !self.update_hosts(&required).await {
                return;
            }
            loop {
                let (host, answer) = tokio::select! {
                    changed = dependencies.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    answered = self.in_flight.next() => answered,
                };
                if !self.handle_result(host, answer).await {
                    return;
                }
            }
        }
    }

    /// Updates the required hosts. Returns false if the receiver of changes is closed.
    async fn update_hosts(&mut self, dependencies: &ExternalDependencies) -> bool {
        for host in &dependencies.hosts {
            if !self.hosts.contains_key(host) {
                self.schedule_lookup(host, Duration::ZERO);
                self.hosts.insert(host.clone(), Host::default());
            }
        }
        let mut gone = Vec::new();
        self.hosts.retain(|host, entry| {
            let keep = dependencies.hosts.contains(host);
            if !keep {
                self.in_flight.cancel(host);
                self.answered.send_if_modified(|answered| answered.remove(host));
            }
            if !keep && entry.published.is_some() {
                gone.push(Change::Remove(
                    ResolvedHost::KIND,
                    ResolvedHost::key(&self.cluster, host),
                ));
            }
            keep
        });
        gone.is_empty() || self.changes.send(gone).await.is_ok()
    }

    fn schedule_lookup(&mut self, host: &SmolStr, wait: Duration) {
        self.in_flight
            .insert(host.clone(), self.lookup.clone().lookup(host.clone(), wait));
    }

    /// Handles a result. Returns false if the receiver of changes is closed.
    async fn handle_result(&mut self, host: SmolStr, answer: Result<Answer, LookupError>) -> bool {
        let is_answer = answer.is_ok();
        let goes_on = self.publish(&host, answer).await;
        if is_answer {
            // It follows the addresses, so that its readers find them sent.
            self.answered.send_if_modified(|answered| answered.insert(host));
        }
        goes_on
    }

    /// Publishes a changed result and schedules the next lookup. Returns false if the receiver of changes is closed.
    async fn publish(&mut self, host: &SmolStr, answer: Result<Answer, LookupError>) -> bool {
        let wait = match &answer {
            Ok(answer) => answer.ttl.unwrap_or(SOONEST).clamp(SOONEST, LATEST),
            Err(_) => self.hosts.get(host).map_or(SOONEST, Host::retry_delay),
        };
        self.schedule_lookup(host, wait);
        let Some(entry) = self.hosts.get_mut(host) else {
            return true;
        };
        let addresses = match answer {
            Ok(mut answer) => {
                entry.failures = 0;
                answer.addresses.sort_unstable();
                answer.addresses.dedup();
                answer.addresses
            }
            Err(error) => {
                entry.failures = entry.failures.saturating_add(1);
                if entry.failures == 1 {
                    let kept = entry.published.as_deref().unwrap_or_default();
                    tracing::warn!(%host, %error, ?kept, "failed to resolve network gateway, keeping last addresses");
                }
                // Without an answer, endpoints wait for the gateway, and a failure must not make them wait any longer.
                entry.published.clone().unwrap_or_default()
            }
        };
        if entry.published.as_ref() == Some(&addresses) {
            return true;
        }
        tracing::info!(%host, ?addresses, before = ?entry.published, next_lookup = ?wait, "network gateway changed");
        entry.published = Some(addresses.clone());
        let key = ResolvedHost::key(&self.cluster, host);
        let change = Change::Upsert(ResolvedHost { key, addresses }.into());
        self.changes.send(vec![change]).await.is_ok()
    }
}

#[cfg(test)]
mod tests;
