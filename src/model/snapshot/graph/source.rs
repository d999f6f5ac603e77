//! Sources of derived tables: the keys whose rows may have changed.

use std::collections::BTreeSet;

use super::Graph;
use crate::{
    api::Kind,
    base::{ObjectKey, Shared},
    model::{
        MeshSnapshot, destination_rule, endpoint,
        inputs::InputWriters,
        output_limit::DemandKey,
        service::entry_lists,
        virtual_service::{self, Converted},
    },
    table::{Key, TableWriter},
};

/// Returns the keys of the rows of a table that have changed.
pub(super) fn changed_keys<K: Key, V: PartialEq>(table: &TableWriter<K, V>) -> Vec<K> {
    table.changes().iter().map(|(key, ..)| key.clone()).collect()
}

/// Returns the changed ServiceEntries whose output may be above that of small ones.
pub(super) fn large_entries(inputs: &InputWriters) -> Vec<DemandKey> {
    let entries = inputs.service_entries.changes().iter();
    let entries = entries.filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|entry| endpoint::may_be_large(&entry.spec))
    });
    let keys = entries.map(|(object, ..)| DemandKey {
        kind: Kind::ServiceEntry,
        object: object.clone(),
    });
    keys.collect()
}

/// Returns the changed ServiceEntries that select workloads or did so before.
pub(super) fn selecting_entries(inputs: &InputWriters) -> Vec<ObjectKey> {
    let entries = inputs.service_entries.changes().iter();
    let entries = entries.filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|entry| entry.spec.workload_selector.is_some())
    });
    entries.map(|(key, ..)| key.clone()).collect()
}

/// Returns the changed ServiceEntries whose lists have or had a row.
pub(super) fn entries_with_lists(inputs: &InputWriters, mesh: &MeshSnapshot) -> Vec<ObjectKey> {
    let entries = inputs.service_entries.changes().iter();
    let entries = entries.filter(|(key, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        mesh.installation.entry_rank(&key.cluster).is_some() && versions.any(|entry| entry_lists::has_row(&entry.spec))
    });
    entries.map(|(key, ..)| key.clone()).collect()
}

/// Returns the DestinationRules and VirtualServices whose output may have changed and be above that of small ones.
pub(super) fn large_objects(graph: &Graph, mesh: &MeshSnapshot) -> Vec<DemandKey> {
    let (rules, policies) = (graph.raw_destination_rules.writer(), graph.large_policies.writer());
    let rules = destination_rule::demand_candidates(mesh, rules, policies).into_iter();
    let services = graph.raw_virtual_services.writer().changes().iter();
    let services = services.filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|service| virtual_service::may_be_large(&service.spec, None))
    });
    let converted = graph.converted_virtual_services.writer().changes().iter();
    let converted = converted.filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|row| virtual_service::may_be_large(&row.object.spec, Some(&row.requests)))
    });
    let key = |kind, object| DemandKey { kind, object };
    let rules = rules.map(|object| key(Kind::DestinationRule, object));
    let services = services.map(|(object, ..)| object.clone());
    let services = services.chain(converted.flat_map(|(_, old, new)| converted_keys(old.as_ref(), new.as_ref())));
    rules
        .chain(services.map(|object| key(Kind::VirtualService, object)))
        .collect()
}

/// Returns the keys of the changed VirtualServices that are made from routes of the Gateway API.
pub(super) fn changed_converted(graph: &Graph) -> Vec<ObjectKey> {
    let changes = graph.converted_virtual_services.writer().changes().iter();
    changes
        .flat_map(|(_, old, new)| converted_keys(old.as_ref(), new.as_ref()))
        .collect()
}

/// Returns the keys of a row before and after a change: routes of another namespace may have become the oldest.
fn converted_keys(old: Option<&Shared<Converted>>, new: Option<&Shared<Converted>>) -> BTreeSet<ObjectKey> {
    let versions = [old, new].into_iter().flatten();
    versions.map(|row| row.object.meta.key.clone()).collect()
}

/// Returns keys in ambient mode, and none otherwise.
pub(super) fn if_ambient<K>(mesh: &MeshSnapshot, keys: impl FnOnce() -> Vec<K>) -> Vec<K> {
    let is_enabled = mesh.installation.features.pilot_enable_ambient;
    is_enabled.then(keys).unwrap_or_default()
}

/// Calls a source; gives the parameters of the closure their types.
pub(super) fn candidates<K>(
    graph: &Graph,
    inputs: &InputWriters,
    mesh: &MeshSnapshot,
    source: impl Fn(&Graph, &InputWriters, &MeshSnapshot) -> Vec<K>,
) -> Vec<K> {
    source(graph, inputs, mesh)
}
