//! Writes addresses into the status of ServiceEntries without one, so that all replicas and proxies use the same.
//!
//! Note: it watches ServiceEntries itself, because the snapshot lacks those of other revisions. One lock serves all
//! revisions, and an address is in use whatever the revision of its ServiceEntry.

pub mod allocator;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use ipnet::IpNet;
use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::allocator::{Allocator, Entry, Patch};
use super::{
    NamespacedName,
    discovery::is_selected,
    leader::{Election, Lock},
    store::{Store, WriteError},
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::{Config, Kind, Row, document::parse_object},
    base::{ClusterId, cidr},
    environment,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
    proto::istio::networking::v1alpha3::{ServiceEntry, service_entry::Resolution},
    table::Cx,
    task,
};

/// Label of a ServiceEntry; with the value `false` it gets no addresses.
const OPT_OUT: &str = "networking.istio.io/enable-autoallocate-ip";
/// Concurrent patches.
const MAX_CONCURRENT: usize = 8;
/// Delay before a failed write is retried.
const REST: Duration = Duration::from_secs(2);
/// Rest after a plan, as a multiple of its CPU time. A plan reads all ServiceEntries, and one tenant may change one of
/// them all the time.
const PLAN_REST: u32 = 9;

/// Ranges of allocated addresses.
#[derive(Clone, Copy, Debug)]
pub struct Ranges {
    /// `PILOT_IP_AUTOALLOCATE_IPV4_PREFIX`.
    pub ipv4: IpNet,
    /// `PILOT_IP_AUTOALLOCATE_IPV6_PREFIX`.
    pub ipv6: IpNet,
}

/// Allocates addresses while this replica leads, to ServiceEntries of the namespaces in `only`.
pub async fn run(
    election: &Election,
    watches: Watches,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ranges: Ranges,
    only: WatchedNamespaces,
) {
    let store = Store::new(
        election.client.clone(),
        "networking.istio.io",
        "v1",
        "ServiceEntry",
        "serviceentries",
    );
    let work = |token: CancellationToken| {
        let (watches, mesh, store, only) = (watches.clone(), mesh.clone(), store.clone(), only.clone());
        async move {
            let target = WatchTarget {
                namespace: only.target(),
                ..WatchTarget::all(store.resource().clone())
            };
            let (watching, events) = watches.open(target, entry_row);
            tokio::select! {
                () = token.cancelled() => {}
                () = watching => {}
                () = allocate(store, mesh, ranges, only, events) => {}
            }
        }
    };
    election.run(Lock::AUTO_ALLOCATION, work).await;
}

async fn allocate(
    store: Store,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ranges: Ranges,
    only: WatchedNamespaces,
    mut events: mpsc::Receiver<WatchEvent<EntryRow>>,
) {
    let mut allocator = Allocator::new(ranges.ipv4, ranges.ipv6);
    let mut entries = Entries {
        only,
        ..Entries::default()
    };
    // Before the first list, every address would seem to be free.
    let Some(first) = events.recv().await else { return };
    entries.apply_event(first);
    mesh.mark_changed();
    let (mut is_due, mut retry) = (true, false);
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => {
                    entries.apply_event(event);
                    is_due = true;
                }
                None => return,
            },
            changed = mesh.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(REST), if retry => {}
        }
        while let Ok(event) = events.try_recv() {
            entries.apply_event(event);
            is_due = true;
        }
        let snapshot = mesh.borrow_and_update().clone();
        is_due |= entries.select(&snapshot) | retry;
        // Before the first commit, the discovery selectors are unknown.
        if snapshot.revision.0 == 0 || !is_due {
            continue;
        }
        is_due = false;
        let (has_failed, used) = write_all(&store, &mut allocator, &entries.entries).await;
        retry = has_failed;
        tokio::time::sleep(PLAN_REST * used).await;
    }
}

/// Writes what is due. Returns true if something must be retried, and the CPU time of the plan.
async fn write_all(
    store: &Store,
    allocator: &mut Allocator,
    entries: &BTreeMap<NamespacedName, Entry>,
) -> (bool, Duration) {
    let (patches, used) = task::aside(|| {
        let before = environment::thread_time();
        let patches = allocator.plan(entries);
        (patches, environment::thread_time().saturating_sub(before))
    });
    let written: Vec<(Patch, Result<Value, WriteError>)> = stream::iter(patches)
        .map(|patch| write(store, patch))
        .buffer_unordered(MAX_CONCURRENT)
        .collect()
        .await;
    let mut retry = false;
    for (patch, written) in written {
        let NamespacedName { namespace, name } = &patch.key;
        match written {
            Ok(_) => {
                tracing::info!(%namespace, %name, reason = patch.reason, "ServiceEntry addresses allocated");
            }
            Err(WriteError::NotFound(_)) => allocator.failed(&patch),
            Err(error) => {
                tracing::warn!(%namespace, %name, %error, "failed to write ServiceEntry addresses");
                allocator.failed(&patch);
                retry = true;
            }
        }
    }
    (retry, used)
}

async fn write(store: &Store, patch: Patch) -> (Patch, Result<Value, WriteError>) {
    let NamespacedName { namespace, name } = &patch.key;
    let written = store.patch_status(namespace, name, &patch.operations).await;
    (patch, written)
}

/// A ServiceEntry from the watch.
type EntryRow = (NamespacedName, Entry);

/// All ServiceEntries of the cluster, of every revision.
#[derive(Default)]
struct Entries {
    entries: BTreeMap<NamespacedName, Entry>,
    /// Namespaces whose entries get addresses.
    only: WatchedNamespaces,
    /// Namespaces with entries that the discovery selectors exclude.
    excluded: BTreeSet<SmolStr>,
}

impl Entries {
    fn apply_event(&mut self, event: WatchEvent<EntryRow>) {
        match event {
            WatchEvent::Restarted(all) => {
                self.entries.clear();
                for entry in all {
                    self.put(entry);
                }
            }
            WatchEvent::Applied(entry) => self.put(entry),
            WatchEvent::Deleted((key, _)) => {
                self.entries.remove(&key);
            }
        }
    }

    fn put(&mut self, (key, mut entry): EntryRow) {
        entry.selected = self.only.contains(&key.namespace) && !self.excluded.contains(&key.namespace);
        self.entries.insert(key, entry);
    }

    /// Updates the selected namespaces; returns true on a change.
    fn select(&mut self, mesh: &MeshSnapshot) -> bool {
        let cx = Cx::untracked();
        let selectors = mesh
            .external_dependencies
            .get(&cx, &())
            .map(|dependencies| &dependencies.discovery_selectors);
        if selectors.is_none_or(|selectors| selectors.is_empty() && self.excluded.is_empty()) {
            return false;
        }
        let cluster = &mesh.installation.cluster;
        let namespaces: BTreeSet<&SmolStr> = self.entries.keys().map(|key| &key.namespace).collect();
        let excluded = namespaces
            .into_iter()
            .filter(|namespace| !is_selected(mesh, cluster, namespace));
        let excluded: BTreeSet<SmolStr> = excluded.cloned().collect();
        let mut changed = false;
        for (key, entry) in &mut self.entries {
            let selected = self.only.contains(&key.namespace) && !excluded.contains(&key.namespace);
            changed |= entry.selected != selected;
            entry.selected = selected;
        }
        self.excluded = excluded;
        changed
    }
}

/// Converts an object. An invalid one gets no addresses but keeps those that it has.
fn entry_row(object: Object) -> EntryRow {
    let key = NamespacedName::of(&object);
    let row = parse_object(&ClusterId::default(), Kind::ServiceEntry, &object.value)
        .rows
        .pop();
    let mut entry = match row {
        Some(Row::ServiceEntry(config)) => entry(&config),
        _ => Entry::default(),
    };
    entry.status = object.value["status"].clone();
    entry.resource_version = object.resource_version().into();
    (key, entry)
}

fn entry(config: &Config<ServiceEntry>) -> Entry {
    let spec = &config.spec;
    let opted_out = config
        .meta
        .labels
        .get(OPT_OUT)
        .is_some_and(|value| value.eq_ignore_ascii_case("false"));
    let dynamic = spec.resolution == Resolution::DynamicDns as i32;
    let own = spec.addresses.iter().filter_map(|text| cidr::parse_ip(text));
    // Clients cannot resolve a wildcard, unless the proxy resolves each request's host.
    let hosts = spec.hosts.iter().filter(|host| dynamic || !host.starts_with('*'));
    Entry {
        creation: config.meta.creation,
        is_valid: true,
        needs_addresses: spec.resolution != Resolution::None as i32 && !opted_out && spec.addresses.is_empty(),
        hosts: hosts.map(Into::into).collect(),
        own: own.collect(),
        ..Entry::default()
    }
}

#[cfg(test)]
mod tests;
