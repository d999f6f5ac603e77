//! Writes addresses into the status of ServiceEntries that have none, so that every replica and every proxy sees the
//! same ones.
//!
//! What a reader would get wrong: it reads the ServiceEntries by a watch of its own and not from the snapshot, which lacks
//! those of other revisions. One lock serves all revisions, and an address is taken whoever reads its ServiceEntry.

pub mod allocator;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt, stream};
use ipnet::IpNet;
use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::allocator::{Allocator, Entry, EntryKey, Patch};
use super::{
    leader::{Election, Lock},
    store::{Store, WriteError},
    watching::Watches,
};
use crate::{
    api::{Config, Kind, Row, document::parse_object},
    base::{ClusterId, ObjectKey, cidr},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
    proto::istio::networking::v1alpha3::{ServiceEntry, service_entry::Resolution},
    table::Cx,
};

/// With the value `false` on a ServiceEntry: it is given no addresses.
const OPT_OUT: &str = "networking.istio.io/enable-autoallocate-ip";
/// Patches under way at once.
const AT_ONCE: usize = 8;
/// How long what could not be written rests.
const REST: std::time::Duration = std::time::Duration::from_secs(2);

/// The ranges that addresses come from.
#[derive(Clone, Copy, Debug)]
pub struct Ranges {
    /// `PILOT_IP_AUTOALLOCATE_IPV4_PREFIX`.
    pub ipv4: IpNet,
    /// `PILOT_IP_AUTOALLOCATE_IPV6_PREFIX`.
    pub ipv6: IpNet,
}

/// Allocates while this instance leads.
pub async fn run(election: &Election, watches: Watches, mesh: watch::Receiver<Arc<MeshSnapshot>>, ranges: Ranges) {
    let store = Store::new(
        election.client.clone(),
        "networking.istio.io",
        "v1",
        "ServiceEntry",
        "serviceentries",
    );
    let work = |token: CancellationToken| {
        let (watches, mesh, store) = (watches.clone(), mesh.clone(), store.clone());
        async move {
            let (watching, events) = watches.open(WatchTarget::all(store.resource().clone()), known);
            tokio::select! {
                () = token.cancelled() => {}
                () = watching => {}
                () = allocate(store, mesh, ranges, events) => {}
            }
        }
    };
    election.run(Lock::AUTO_ALLOCATION, work).await;
}

async fn allocate(
    store: Store,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ranges: Ranges,
    mut events: mpsc::Receiver<WatchEvent<Known>>,
) {
    let mut allocator = Allocator::new(ranges.ipv4, ranges.ipv6);
    let mut entries = Entries::default();
    // Before the list is there, every address would seem to be free.
    let Some(first) = events.recv().await else { return };
    entries.take(first);
    mesh.mark_changed();
    let (mut due, mut retry) = (true, false);
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => {
                    entries.take(event);
                    due = true;
                }
                None => return,
            },
            changed = mesh.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(REST), if retry => {}
        }
        while let Ok(event) = events.try_recv() {
            entries.take(event);
            due = true;
        }
        let snapshot = mesh.borrow_and_update().clone();
        due |= entries.select(&snapshot) | retry;
        // Before the first commit nobody knows which namespaces count.
        if snapshot.revision.0 == 0 || !due {
            continue;
        }
        due = false;
        retry = write_all(&store, &mut allocator, &entries.entries).await;
    }
}

/// Writes what is due; true if something has to be tried again.
async fn write_all(store: &Store, allocator: &mut Allocator, entries: &BTreeMap<EntryKey, Entry>) -> bool {
    let written: Vec<(Patch, Result<Value, WriteError>)> = stream::iter(allocator.plan(entries))
        .map(|patch| write(store, patch))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let mut retry = false;
    for (patch, written) in written {
        let (namespace, name) = &patch.key;
        match written {
            Ok(_) => {
                tracing::info!(%namespace, %name, reason = patch.reason, "addresses of a ServiceEntry written");
            }
            Err(WriteError::NotFound(_)) => allocator.failed(&patch),
            Err(error) => {
                tracing::warn!(%namespace, %name, %error, "addresses of a ServiceEntry could not be written");
                allocator.failed(&patch);
                retry = true;
            }
        }
    }
    retry
}

async fn write(store: &Store, patch: Patch) -> (Patch, Result<Value, WriteError>) {
    let (namespace, name) = &patch.key;
    let written = store.patch_status(namespace, name, &patch.operations).await;
    (patch, written)
}

/// A ServiceEntry as the watch hands it over.
type Known = (EntryKey, Entry);

/// All ServiceEntries of the cluster, of whatever revision.
#[derive(Default)]
struct Entries {
    entries: BTreeMap<EntryKey, Entry>,
    /// Namespaces with entries that the discovery selectors leave out.
    left_out: BTreeSet<SmolStr>,
}

impl Entries {
    fn take(&mut self, event: WatchEvent<Known>) {
        match event {
            WatchEvent::Restarted(all) => {
                self.entries.clear();
                for known in all {
                    self.put(known);
                }
            }
            WatchEvent::Applied(known) => self.put(known),
            WatchEvent::Deleted((key, _)) => {
                self.entries.remove(&key);
            }
        }
    }

    fn put(&mut self, (key, mut entry): Known) {
        entry.selected = !self.left_out.contains(&key.0);
        self.entries.insert(key, entry);
    }

    /// Takes over which namespaces count; true if that is news.
    fn select(&mut self, mesh: &MeshSnapshot) -> bool {
        let cx = Cx::untracked();
        let selectors = mesh.wants.get(&cx, &()).map(|wants| &wants.discovery_selectors);
        let Some(selectors) = selectors.filter(|selectors| !selectors.is_empty() || !self.left_out.is_empty()) else {
            return false;
        };
        let is_left_out = |namespace: &SmolStr| {
            let key = ObjectKey::new(&mesh.installation.cluster, "", namespace.clone());
            let labels = mesh.namespaces.get(&cx, &key).map(|namespace| &namespace.meta.labels);
            let selected = labels.is_some_and(|labels| selectors.iter().any(|selector| selector.matches(labels)));
            !selectors.is_empty() && !selected
        };
        let namespaces: BTreeSet<&SmolStr> = self.entries.keys().map(|(namespace, _)| namespace).collect();
        let left_out = namespaces.into_iter().filter(|namespace| is_left_out(namespace));
        let left_out: BTreeSet<SmolStr> = left_out.cloned().collect();
        let mut changed = false;
        for ((namespace, _), entry) in &mut self.entries {
            let selected = !left_out.contains(namespace);
            changed |= entry.selected != selected;
            entry.selected = selected;
        }
        self.left_out = left_out;
        changed
    }
}

/// What matters of an object. One that is invalid is given nothing, but what it was given is taken.
fn known(object: Object) -> Known {
    let key: EntryKey = (object.namespace().into(), object.name().into());
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
    // A wildcard has no name that a client could resolve, unless the proxy resolves what it is asked for.
    let hosts = spec.hosts.iter().filter(|host| dynamic || !host.starts_with('*'));
    Entry {
        creation: config.meta.creation,
        is_valid: true,
        wanted: spec.resolution != Resolution::None as i32 && !opted_out && spec.addresses.is_empty(),
        hosts: hosts.map(Into::into).collect(),
        own: own.collect(),
        ..Entry::default()
    }
}

#[cfg(test)]
mod tests;
