//! Workloads and services (WDS), for ztunnels and for Envoys that discover metadata of their peers.
//!
//! A client requests all of them, or some by name: the name of a workload, `NETWORK/ADDRESS`, or `NAMESPACE/HOST`. All
//! of them are listed in shards, which all clients share. What a client requests by name is a part of its own, whose
//! resources other such clients share. A service comes with its workloads, and a client on a node gets the workloads
//! of the node.
//!
//! Parity (pilot/pkg/xds/workload.go): resources have the names of their addresses as aliases only if they were
//! requested by name.

use std::collections::BTreeSet;

use prost::encoding;
use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource, RequestedResources, ResourceType,
    requested::{ADDRESSES, Names, WILDCARD},
    resource::Built,
};
use crate::{
    base::{Hostname, Shared},
    model::{
        ServiceKey,
        ambient::{
            SHARDS,
            remote::{RemoteKey, RemoteWorkloads},
            service::resource_name,
            shard,
            workload::{AmbientWorkload, WorkloadUid},
        },
    },
    proto::istio::workload::{Address, address},
};

/// Resources of one type that a client receives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddressPart {
    form: Form,
    selection: Selection,
}

/// Type of the resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// `istio.workload.Address`: workloads and services.
    Address,
    /// `istio.workload.Workload`: only workloads.
    Workload,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Selection {
    /// One shard of all.
    Shard(u8),
    /// Those with these names, and those on the node unless it is empty.
    Named { names: Names, node: SmolStr },
}

/// A workload or service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddressKey {
    form: Form,
    /// True if the resource has aliases.
    is_aliased: bool,
    subject: Subject,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Subject {
    Workload(WorkloadUid),
    /// One of the workloads that represent others.
    Remote(RemoteKey, WorkloadUid),
    Service(ServiceKey),
}

/// Returns the parts of what a client requests.
pub fn select(ctx: &BuildContext, requested: Option<&RequestedResources>, node: &SmolStr) -> Vec<AddressPart> {
    if !ctx.mesh.installation.features.pilot_enable_ambient {
        return Vec::new();
    }
    let mut parts = Vec::new();
    for resource_type in ADDRESSES {
        let Some(names) = requested.and_then(|requested| requested.get(resource_type)) else {
            continue;
        };
        let form = if resource_type == ResourceType::Workload {
            Form::Workload
        } else {
            Form::Address
        };
        let part = |selection| AddressPart { form, selection };
        if names.contains(WILDCARD) {
            parts.extend((0..SHARDS).map(|shard| part(Selection::Shard(shard))));
        } else {
            let (names, node) = (names.clone(), node.clone());
            parts.push(part(Selection::Named { names, node }));
        }
    }
    parts
}

impl AddressPart {
    /// Returns the type of its resources.
    pub fn resource_type(&self) -> ResourceType {
        match self.form {
            Form::Address => ResourceType::Address,
            Form::Workload => ResourceType::Workload,
        }
    }

    /// Lists the resources.
    pub fn list(&self, ctx: &BuildContext) -> Vec<AddressKey> {
        let subjects = match &self.selection {
            Selection::Shard(shard) => in_shard(ctx, *shard),
            Selection::Named { names, node } => named(ctx, names, node).into_iter().collect(),
        };
        let sent = subjects
            .into_iter()
            .filter(|subject| self.form == Form::Address || !matches!(subject, Subject::Service(_)));
        sent.map(|subject| AddressKey {
            form: self.form,
            is_aliased: matches!(self.selection, Selection::Named { .. }),
            subject,
        })
        .collect()
    }
}

fn in_shard(ctx: &BuildContext, own: u8) -> Vec<Subject> {
    let workloads = ctx.mesh.ambient_workloads_by_shard.get(ctx.cx, &own);
    let workloads = workloads.map(|(uid, _)| Subject::Workload(uid.clone()));
    let services = ctx.mesh.ambient_services_by_shard.get(ctx.cx, &own);
    let services = services.map(|(key, _)| Subject::Service(key.clone()));
    let rows = ctx.mesh.remote_workloads_by_shard.get(ctx.cx, &own);
    let remote = remote(rows, |uid, _| shard(uid.text()) == own);
    workloads.chain(services).chain(remote).collect()
}

/// Returns those workloads of rows that represent others and meet a condition.
fn remote<'a>(
    rows: impl Iterator<Item = (&'a RemoteKey, &'a Shared<RemoteWorkloads>)>,
    condition: impl Fn(&WorkloadUid, &AmbientWorkload) -> bool,
) -> impl Iterator<Item = Subject> {
    let all = rows.flat_map(|(key, workloads)| workloads.iter().map(move |(uid, workload)| (key, uid, workload)));
    let found = all.filter(move |(_, uid, workload)| condition(uid, workload));
    found.map(|(key, uid, _)| Subject::Remote(key.clone(), uid.clone()))
}

fn named(ctx: &BuildContext, names: &BTreeSet<SmolStr>, node: &SmolStr) -> BTreeSet<Subject> {
    let mut found = BTreeSet::new();
    for name in names {
        look_up(ctx, name, &mut found);
    }
    if !node.is_empty() {
        let on_node = ctx.mesh.ambient_workloads_by_node.get(ctx.cx, node);
        found.extend(on_node.map(|(uid, _)| Subject::Workload(uid.clone())));
    }
    found
}

/// Finds what a name refers to: a workload by its name, else workloads by their address, else a service by its name or
/// address with its workloads.
fn look_up(ctx: &BuildContext, name: &SmolStr, found: &mut BTreeSet<Subject>) {
    let (cx, mesh) = (ctx.cx, ctx.mesh);
    let uid = WorkloadUid::new(name.clone());
    if mesh
        .ambient_workloads
        .get(cx, &uid)
        .is_some_and(|workload| !workload.is_hidden)
    {
        found.insert(Subject::Workload(uid));
        return;
    }
    let named = mesh.remote_workloads_by_name.get(cx, name);
    let named = remote(named, |uid, workload| {
        uid.text() == name || workload.aliases().any(|alias| alias == *name)
    });
    let at_address = mesh.ambient_workloads_by_address.get(cx, name);
    let at_address = at_address.map(|(uid, _)| Subject::Workload(uid.clone()));
    let mut workloads = named.chain(at_address).peekable();
    if workloads.peek().is_some() {
        found.extend(workloads);
        return;
    }
    let Some((namespace, hostname)) = name.split_once('/') else {
        return;
    };
    let key = ServiceKey {
        hostname: Hostname::new(hostname),
        namespace: namespace.into(),
    };
    let by_address = || {
        mesh.ambient_services_by_address
            .get(cx, name)
            .next()
            .map(|(key, _)| key.clone())
    };
    let is_known = mesh.ambient_services.get(cx, &key).is_some();
    let Some(key) = is_known.then_some(key).or_else(by_address) else {
        return;
    };
    let workloads = mesh.ambient_workloads_by_service.get(cx, &key);
    found.extend(workloads.map(|(uid, _)| Subject::Workload(uid.clone())));
    let rows = mesh.remote_workloads_by_service.get(cx, &key);
    found.extend(remote(rows, |_, workload| workload.services.contains(&key)));
    found.insert(Subject::Service(key));
}

impl AddressKey {
    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let found = match &self.subject {
            Subject::Workload(uid) => ctx
                .mesh
                .ambient_workloads
                .get(ctx.cx, uid)
                .map(|row| self.workload(uid, row)),
            Subject::Remote(key, uid) => ctx.mesh.remote_workloads.get(ctx.cx, key).and_then(|rows| {
                let row = rows.iter().find(|(own, _)| own == uid);
                row.map(|(_, workload)| self.workload(uid, workload))
            }),
            Subject::Service(key) => ctx.mesh.ambient_services.get(ctx.cx, key).map(|service| {
                let aliases = if self.is_aliased {
                    service.aliases().collect()
                } else {
                    Vec::new()
                };
                let message = Address {
                    r#type: Some(address::Type::Service(service.sent())),
                };
                EncodedResource::with_aliases(resource_name(key), &message, aliases)
            }),
        };
        found.map_or_else(Built::none, Built::new)
    }

    fn workload(&self, uid: &WorkloadUid, workload: &AmbientWorkload) -> EncodedResource {
        let aliases = if self.is_aliased {
            workload.aliases().collect()
        } else {
            Vec::new()
        };
        let name = uid.text().clone();
        match self.form {
            Form::Workload => EncodedResource::of_encoded(name, ResourceType::Workload.url(), aliases, |out| {
                out.extend_from_slice(&workload.message);
            }),
            Form::Address => EncodedResource::of_encoded(name, ResourceType::Address.url(), aliases, |out| {
                encoding::bytes::encode(WORKLOAD_FIELD, &workload.message, out);
            }),
        }
    }
}

/// Number of the field `workload` of an [`Address`].
const WORKLOAD_FIELD: u32 = 1;

#[cfg(test)]
pub(crate) mod tests;
