//! Consul: services and their healthy instances, by its HTTP API.
//!
//! Two blocking queries watch the catalog and all health checks of a datacenter. A change names the services that are
//! read again: those whose checks, tags or existence differ. A registration without checks names none, so the whole
//! catalog is read after it, at most once in an interval. A query for each service would need a connection for each,
//! and servers limit the connections of a client to 200 by default.
//!
//! Parity (pilot/pkg/serviceregistry/consul of releases 1.0 to 1.7): host names, ports, protocols, labels and locality.
//! Note: unlike these releases, only instances whose checks all pass are served, and a failed query keeps the last
//! state.

mod api;
mod convert;
mod settings;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch as channel},
    time::sleep,
};

use self::{
    api::HealthEntry,
    watch::{Update, Watcher},
};
use super::RegistryRows;
use crate::{
    base::ClusterId,
    ingest::{
        backoff::Backoff,
        diagnostics::Report,
        registry_metrics::OfRegistry,
        source::{Readiness, Source},
    },
    model::change::Batch,
};
pub use settings::{ConsulSettings, ConsulSettingsError};

/// The first and the longest delay after a failed query.
const FIRST_DELAY: Duration = Duration::from_millis(250);
const LONGEST_DELAY: Duration = Duration::from_secs(10);
/// Shortest interval between two listings of the datacenters.
const MIN_LISTING_INTERVAL: Duration = Duration::from_secs(1);
/// Queue length between watchers and rows, in updates.
const UPDATES: usize = 256;

/// The source.
pub struct ConsulSource {
    settings: ConsulSettings,
    rows: RegistryRows,
    metrics: OfRegistry,
    is_synced: channel::Sender<bool>,
}

impl ConsulSource {
    /// Returns the source.
    pub fn new(settings: ConsulSettings, cluster: ClusterId, metrics: OfRegistry, report: Report) -> Self {
        Self {
            settings,
            rows: RegistryRows::new(cluster, metrics.clone(), report),
            metrics,
            is_synced: channel::Sender::new(false),
        }
    }
}

impl Source for ConsulSource {
    fn name(&self) -> &'static str {
        "consul"
    }

    /// The first snapshot waits until all services were read once.
    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let datacenters = tokio::select! {
            datacenters = self.datacenters() => datacenters,
            () = changes.closed() => return,
        };
        let (sender, updates) = mpsc::channel(UPDATES);
        let Self {
            settings,
            rows,
            metrics,
            is_synced,
        } = self;
        let state = State {
            unsynced: (0..datacenters.len()).collect(),
            datacenters: vec![BTreeMap::new(); datacenters.len()],
            has_networks: settings.datacenter_networks,
            rows,
            is_synced,
        };
        tokio::select! {
            () = state.follow(updates, changes) => {}
            () = watch(&settings, &metrics, datacenters, sender) => {}
        }
    }
}

impl ConsulSource {
    /// Returns the datacenters to read; `None` is that of the server. Waits until the server answers, if it must be
    /// asked.
    async fn datacenters(&self) -> Vec<Option<String>> {
        let given = &self.settings.datacenters;
        if given.is_empty() {
            return vec![None];
        }
        if !self.settings.has_all_datacenters() {
            return given.iter().cloned().map(Some).collect();
        }
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        loop {
            match listed(&self.settings, &self.metrics).await {
                Some(names) => return names.into_iter().map(Some).collect(),
                None => sleep(backoff.next()).await,
            }
        }
    }
}

/// Watches datacenters, and those that appear later if all are read. A datacenter that is listed no longer stays: a
/// server that has just started knows only its own, and a watcher whose queries fail keeps the last state.
async fn watch(
    settings: &ConsulSettings,
    metrics: &OfRegistry,
    datacenters: Vec<Option<String>>,
    updates: mpsc::Sender<(usize, Update)>,
) {
    let start = |index: usize, datacenter: &Option<String>| {
        let client = settings.client().clone();
        let watcher = Watcher::new(client, datacenter.clone(), settings.interval, metrics.clone());
        watcher.run(index, updates.clone())
    };
    let mut watchers: FuturesUnordered<_> = datacenters
        .iter()
        .enumerate()
        .map(|(index, datacenter)| start(index, datacenter))
        .collect();
    let mut known = datacenters;
    let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
    let mut delay = settings.interval.max(MIN_LISTING_INTERVAL);
    loop {
        let list = async {
            sleep(delay).await;
            listed(settings, metrics).await
        };
        let names = tokio::select! {
            _ = watchers.next() => return,
            names = list, if settings.has_all_datacenters() => names,
        };
        delay = settings.interval.max(MIN_LISTING_INTERVAL);
        let Some(names) = names else {
            delay += backoff.next();
            continue;
        };
        backoff.reset();
        for name in names.into_iter().map(Some) {
            if !known.contains(&name) {
                tracing::info!(datacenter = name, "datacenter of Consul appeared");
                watchers.push(start(known.len(), &name));
                known.push(name);
            }
        }
    }
}

/// Returns the names of all datacenters; `None` if the server does not answer, which is logged and counted.
async fn listed(settings: &ConsulSettings, metrics: &OfRegistry) -> Option<Vec<String>> {
    match settings.client().datacenters().await {
        Ok(names) => Some(names),
        Err(error) => {
            metrics.failed(error.label(), 1);
            tracing::warn!(%error, "failed to list the datacenters of Consul");
            None
        }
    }
}

/// The services of all datacenters.
struct State {
    /// The datacenters of the start that were not read completely yet.
    unsynced: BTreeSet<usize>,
    /// The instances by service, for each datacenter.
    datacenters: Vec<BTreeMap<SmolStr, Vec<HealthEntry>>>,
    has_networks: bool,
    rows: RegistryRows,
    is_synced: channel::Sender<bool>,
}

impl State {
    /// Sends the changes of updates, from the first complete state on.
    async fn follow(mut self, mut updates: mpsc::Receiver<(usize, Update)>, changes: mpsc::Sender<Batch>) {
        while let Some((datacenter, update)) = updates.recv().await {
            let mut batch = Batch::new();
            let mut next = Some((datacenter, update));
            while let Some((datacenter, update)) = next {
                batch.extend(self.apply(datacenter, update));
                next = updates.try_recv().ok();
            }
            let is_first = self.unsynced.is_empty() && !*self.is_synced.borrow();
            if !self.unsynced.is_empty() {
                continue;
            }
            if is_first {
                batch = self.rows.all();
            }
            if !batch.is_empty() && changes.send(batch).await.is_err() {
                return;
            }
            if is_first {
                tracing::info!(services = self.rows.services.len(), "consul synced");
                self.is_synced.send_replace(true);
            }
        }
    }

    fn apply(&mut self, datacenter: usize, update: Update) -> Batch {
        if datacenter >= self.datacenters.len() {
            self.datacenters.resize_with(datacenter + 1, BTreeMap::new);
        }
        let name = match update {
            Update::Synced => {
                self.unsynced.remove(&datacenter);
                return Batch::new();
            }
            Update::Service(name, entries) => {
                self.datacenters[datacenter].insert(name.clone(), entries);
                name
            }
            Update::Gone(name) => {
                self.datacenters[datacenter].remove(&name);
                name
            }
        };
        let entries = self.datacenters.iter().filter_map(|services| services.get(&name));
        let service = convert::service(&name, entries.flatten(), self.has_networks);
        self.rows.set(&name, service)
    }
}
