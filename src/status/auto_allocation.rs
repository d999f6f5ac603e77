//! Writes addresses into the status of ServiceEntries that have none, so that every replica and every proxy sees the
//! same ones. What it decides on are the rows of the snapshot; what it writes comes back as rows.

pub mod allocator;

use std::{collections::BTreeMap, sync::Arc};

use futures::{StreamExt, stream};
use ipnet::IpNet;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::allocator::{Allocator, Entry, EntryKey, Patch};
use super::{
    leader::{Election, Lock},
    store::{Store, WriteError},
};
use crate::{
    api::Config,
    base::{Shared, cidr},
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
pub async fn run(election: &Election, mesh: watch::Receiver<Arc<MeshSnapshot>>, ranges: Ranges) {
    let store = Store::new(
        election.client.clone(),
        "networking.istio.io",
        "v1",
        "ServiceEntry",
        "serviceentries",
    );
    election
        .run(Lock::AUTO_ALLOCATION, |token| {
            allocate(store.clone(), mesh.clone(), ranges, token)
        })
        .await;
}

async fn allocate(store: Store, mesh: watch::Receiver<Arc<MeshSnapshot>>, ranges: Ranges, token: CancellationToken) {
    let mut mesh = mesh;
    let mut allocator = Allocator::new(ranges.ipv4, ranges.ipv6);
    let mut rows = Rows::default();
    let mut retry = false;
    mesh.mark_changed();
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            changed = mesh.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(REST), if retry => {}
        }
        let snapshot = mesh.borrow_and_update().clone();
        // Before the first commit nothing is known: all that was given would seem to be free.
        if snapshot.revision.0 == 0 || !(rows.read(&snapshot) || retry) {
            continue;
        }
        let patches = allocator.plan(&rows.entries);
        let written: Vec<(Patch, Result<Value, WriteError>)> = stream::iter(patches)
            .map(|patch| write(&store, patch))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        retry = false;
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
    }
}

async fn write(store: &Store, patch: Patch) -> (Patch, Result<Value, WriteError>) {
    let (namespace, name) = &patch.key;
    let written = store.patch_status(namespace, name, &patch.operations).await;
    (patch, written)
}

/// The rows as the allocator wants them, made anew only where they changed.
#[derive(Default)]
struct Rows {
    seen: BTreeMap<EntryKey, Shared<Config<ServiceEntry>>>,
    entries: BTreeMap<EntryKey, Entry>,
}

impl Rows {
    /// Takes over what the snapshot has of the config cluster; true if anything changed.
    fn read(&mut self, mesh: &MeshSnapshot) -> bool {
        let cx = Cx::untracked();
        let mut changed = false;
        let mut seen = BTreeMap::new();
        let rows = mesh.service_entries.iter(&cx);
        for (key, row) in rows.filter(|(key, _)| key.cluster == mesh.installation.cluster) {
            let key: EntryKey = (key.namespace.as_str().into(), key.name.clone());
            if !self.seen.get(&key).is_some_and(|known| known.same(row)) {
                changed = true;
                self.entries.insert(key.clone(), entry(row));
            }
            seen.insert(key, row.clone());
        }
        let before = self.entries.len();
        self.entries.retain(|key, _| seen.contains_key(key));
        self.seen = seen;
        changed || self.entries.len() != before
    }
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
        resource_version: config.meta.resource_version.clone(),
        wanted: spec.resolution != Resolution::None as i32 && !opted_out && spec.addresses.is_empty(),
        hosts: hosts.map(Into::into).collect(),
        own: own.collect(),
        status: config.status.as_ref().map_or(Value::Null, |status| (**status).clone()),
    }
}
