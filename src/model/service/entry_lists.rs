//! Lists that all services of a ServiceEntry have in common.
//!
//! An entry has a service for each of its hosts and addresses, and no limit for the length of these lists. So they
//! exist once: in a row for the entry, or in that of its only host.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{
    api::Config,
    base::{Labels, ObjectKey, Shared},
    model::{MeshSnapshot, canonical, export::ExportTo},
    proto::istio::networking::v1alpha3::{ServiceEntry, service_entry::Location},
    table::Cx,
};

/// The lists of one ServiceEntry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryLists {
    /// `subjectAltNames` as written.
    pub subject_alt_names: Shared<[SmolStr]>,
    /// The same sorted, each once.
    pub service_accounts: Shared<[SmolStr]>,
    /// Visibility of the services.
    pub export_to: Shared<ExportTo>,
    /// Labels of the services.
    pub labels: Shared<Labels>,
    /// Labels of the workloads that the entry selects.
    pub selector: Shared<Labels>,
}

/// Returns true if the lists of an entry have a row.
pub fn has_row(entry: &ServiceEntry) -> bool {
    entry.hosts.len() > 1
}

/// Derives the lists of an entry with several hosts.
pub fn entry_lists(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<EntryLists> {
    let entry = mesh.service_entries.get(cx, key)?;
    has_row(&entry.spec).then(|| EntryLists::new(cx, mesh, entry))
}

impl EntryLists {
    /// Returns the lists of an entry that declares services.
    pub fn of(cx: &Cx, mesh: &MeshSnapshot, entry: &Config<ServiceEntry>) -> Shared<Self> {
        let row = has_row(&entry.spec).then(|| mesh.entry_lists.get(cx, &entry.meta.key));
        let row = row.flatten().cloned();
        row.unwrap_or_else(|| Self::new(cx, mesh, entry).into())
    }

    fn new(cx: &Cx, mesh: &MeshSnapshot, entry: &Config<ServiceEntry>) -> Self {
        let spec = &entry.spec;
        let names: Vec<SmolStr> = spec.subject_alt_names.iter().map(SmolStr::new).collect();
        let sorted: BTreeSet<SmolStr> = names.iter().cloned().collect();
        let selector = spec.workload_selector.iter().flat_map(|selector| &selector.labels);
        let selector = selector.map(|(name, value)| (SmolStr::new(name), SmolStr::new(value)));
        Self {
            subject_alt_names: names.into(),
            service_accounts: sorted.into_iter().collect::<Vec<_>>().into(),
            export_to: super::export_to(cx, mesh, &spec.export_to, entry.meta.namespace()),
            labels: labels(mesh, entry),
            selector: selector.collect::<Labels>().into(),
        }
    }
}

/// Returns the labels of the services; with the feature enabled, mesh-external ones get a canonical name.
fn labels(mesh: &MeshSnapshot, entry: &Config<ServiceEntry>) -> Shared<Labels> {
    let features = &mesh.installation.features;
    if !features.label_canonical_services_for_mesh_external_service_entries
        || entry.spec.location() != Location::MeshExternal
    {
        return entry.meta.labels.clone();
    }
    let (name, revision) = canonical::service(&entry.meta.labels, entry.meta.name());
    let mut labels = Labels::clone(&entry.meta.labels);
    labels.insert(SmolStr::new_static(canonical::NAME_LABEL), name);
    labels.insert(SmolStr::new_static(canonical::REVISION_LABEL), revision);
    labels.into()
}
