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

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch as channel};

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
        let watchers = datacenters.iter().enumerate().map(|(index, datacenter)| {
            let watcher = Watcher::new(&self.settings, datacenter.clone(), self.metrics.clone());
            watcher.run(index, sender.clone())
        });
        let watchers = join_all(watchers.collect::<Vec<_>>());
        drop(sender);
        let state = State {
            unsynced: datacenters.len(),
            datacenters: vec![BTreeMap::new(); datacenters.len()],
            has_networks: self.settings.datacenter_networks,
            rows: self.rows,
            is_synced: self.is_synced,
        };
        tokio::select! {
            () = state.follow(updates, changes) => {}
            _ = watchers => {}
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
        if !given.iter().any(|name| name == "*") {
            return given.iter().cloned().map(Some).collect();
        }
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        loop {
            match self.settings.client().datacenters().await {
                Ok(names) => return names.into_iter().map(Some).collect(),
                Err(error) => {
                    self.metrics.failed(error.label(), 1);
                    let retry_in = backoff.next();
                    tracing::warn!(%error, ?retry_in, "failed to list the datacenters of Consul");
                    tokio::time::sleep(retry_in).await;
                }
            }
        }
    }
}

/// The services of all datacenters.
struct State {
    /// Number of datacenters that were not read completely yet.
    unsynced: usize,
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
            let is_first = self.unsynced == 0 && !*self.is_synced.borrow();
            if self.unsynced > 0 {
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
        let name = match update {
            Update::Synced => {
                self.unsynced -= 1;
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
