//! Patches of clusters.
//!
//! A part determines the patches that apply to each of its clusters ([`ClusterPatches`]). Only those are in the
//! cluster's key, so all other clusters stay shared. Note: a patch matches the cluster's current name, which an earlier
//! patch may have changed.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    MOST_OWN, PatchContext, PatchRef,
    merge::{self, MergeError},
    resolve_each, set,
};
use crate::{
    base::{Hostname, Shared},
    generate::{BuildContext, name::ClusterName, resource::Note},
    model::envoy_filter::{Operation, Patch},
    proto::{
        Any,
        envoy::config::{
            cluster::v3::Cluster,
            core::v3::{TransportSocket, transport_socket::ConfigType},
        },
        istio::networking::v1alpha3::envoy_filter::ClusterMatch,
    },
};

/// Merges and removals of one context, by their match.
pub struct ClusterPatches<'a> {
    refs: Shared<[PatchRef]>,
    patches: Vec<&'a Patch>,
    by_name: BTreeMap<&'a str, Vec<usize>>,
    by_service: BTreeMap<&'a str, Vec<usize>>,
    rest: Vec<usize>,
    none: Shared<[PatchRef]>,
    makes_eds: bool,
}

impl<'a> ClusterPatches<'a> {
    /// Sorts the patches of a proxy by their match.
    pub fn of(ctx: &BuildContext<'a>, refs: &[PatchRef], context: PatchContext) -> Self {
        let changes = resolve_each(ctx, refs).filter(|(_, patch)| {
            patch.is_for(context) && matches!(patch.operation, Operation::Merge | Operation::Remove)
        });
        let (refs, patches): (Vec<PatchRef>, Vec<&Patch>) =
            changes.map(|(reference, patch)| (reference.clone(), patch)).unzip();
        let mut sorted = Self {
            refs: refs.into(),
            patches,
            by_name: BTreeMap::new(),
            by_service: BTreeMap::new(),
            rest: Vec::new(),
            none: Vec::new().into(),
            makes_eds: false,
        };
        sorted.makes_eds = sorted.patches.iter().any(|patch| sets(patch, "type"));
        for (index, patch) in sorted.patches.iter().enumerate() {
            let list = match patch.cluster() {
                Some(condition) if !condition.name.is_empty() => sorted.by_name.entry(&condition.name).or_default(),
                Some(condition) if !condition.service.is_empty() => {
                    sorted.by_service.entry(&condition.service).or_default()
                }
                _ => &mut sorted.rest,
            };
            list.push(index);
        }
        sorted
    }

    /// Returns true if there are no patches.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// Returns the empty list, in one allocation for all clusters without patches.
    pub fn none(&self) -> Shared<[PatchRef]> {
        self.none.clone()
    }

    /// Returns true if a patch may change the discovery type of clusters, for example to EDS.
    pub fn makes_eds(&self) -> bool {
        self.makes_eds
    }

    /// Returns the patches to apply to a cluster: those that match it, or all if one of these renames it or if they are
    /// many. `hosts` are the services of an inbound cluster.
    pub fn concerning(&self, name: &str, hosts: &[Hostname]) -> Shared<[PatchRef]> {
        if self.patches.is_empty() {
            return self.none();
        }
        let found = |map: &BTreeMap<&str, Vec<usize>>, word: &str| map.get(word).cloned().unwrap_or_default();
        let mut indexes: BTreeSet<usize> = self.rest.iter().copied().collect();
        indexes.extend(found(&self.by_name, name));
        indexes.extend(found(&self.by_service, ClusterName::parse(name).host));
        indexes.extend(hosts.iter().flat_map(|host| found(&self.by_service, host.as_str())));
        indexes.retain(|index| matches(self.patches[*index].cluster(), name, hosts));
        if indexes.is_empty() {
            return self.none();
        }
        if indexes.len() > MOST_OWN || indexes.iter().any(|index| sets(self.patches[*index], "name")) {
            return self.refs.clone();
        }
        let refs = indexes.into_iter().map(|index| self.refs[index].clone());
        refs.collect::<Vec<_>>().into()
    }
}

/// Merges the patches into a cluster in order; `None` if one removes it.
///
/// A transport socket is merged separately, see [`merge_socket`]. A type mismatch of sockets ends the patching: earlier
/// patches stay, later ones are lost.
pub fn apply(
    ctx: &BuildContext,
    refs: &[PatchRef],
    hosts: &[Hostname],
    mut cluster: Cluster,
    notes: &mut Vec<Note>,
) -> Option<Cluster> {
    for (_, patch) in resolve_each(ctx, refs) {
        if !matches(patch.cluster(), &cluster.name, hosts) {
            continue;
        }
        if patch.operation == Operation::Remove {
            notes.push(set::applied(patch));
            return None;
        }
        match merge_patch(&mut cluster, patch) {
            Ok(()) => notes.push(set::applied(patch)),
            Err(error) => {
                notes.push(set::problem(patch, &error));
                if matches!(error, MergeError::TypeMismatch { .. }) {
                    break;
                }
            }
        }
    }
    Some(cluster)
}

/// Returns the patches that add a cluster in a context.
pub fn additions(ctx: &BuildContext, refs: &[PatchRef], context: PatchContext) -> Vec<PatchRef> {
    let added = resolve_each(ctx, refs).filter(|(_, patch)| patch.adds_in(context));
    added.map(|(reference, _)| reference.clone()).collect()
}

/// Returns the EDS names that Envoy will request because of a patch.
pub fn requested_endpoints(ctx: &BuildContext, refs: &[PatchRef]) -> BTreeSet<String> {
    let wants = |patch: &Patch| sets(patch, "eds_cluster_config") || patch.operation == Operation::Add;
    let values = resolve_each(ctx, refs).filter(|(_, patch)| wants(patch));
    let clusters = values.filter_map(|(_, patch)| patch.read::<Cluster>());
    let names = clusters.map(|cluster| {
        let service = cluster.eds_cluster_config.map(|eds| eds.service_name);
        service.filter(|name| !name.is_empty()).unwrap_or(cluster.name)
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// Returns true if a cluster matches. A name, if given, is the only condition.
fn matches(condition: Option<&ClusterMatch>, name: &str, hosts: &[Hostname]) -> bool {
    let Some(condition) = condition else { return true };
    if !condition.name.is_empty() {
        return condition.name == name;
    }
    let parsed = ClusterName::parse(name);
    let of_service = if parsed.direction == "inbound" && !hosts.is_empty() {
        hosts.iter().any(|host| host.as_str() == condition.service)
    } else {
        parsed.host == condition.service
    };
    (condition.subset.is_empty() || condition.subset == parsed.subset)
        && (condition.service.is_empty() || of_service)
        && (condition.port_number == 0 || condition.port_number == parsed.port)
}

/// Returns true if the patch's value has a field, whatever its content.
fn sets(patch: &Patch, field: &str) -> bool {
    let value = patch.value.as_ref();
    value.is_some_and(|value| value.message.has_field_by_name(field))
}

fn merge_patch(cluster: &mut Cluster, patch: &Patch) -> Result<(), MergeError> {
    let Some(value) = &patch.value else { return Ok(()) };
    if sets(patch, "transport_socket") {
        let socket = merge::read::<Cluster>(&value.message)?.transport_socket;
        return socket.map_or(Ok(()), |socket| merge_socket(cluster, socket));
    }
    merge::merge_into(cluster, &value.message)
}

/// Merges a socket into the socket of the same name.
///
/// Parity (pilot/pkg/networking/core/envoyfilter/cluster_patch.go, mergeTransportSocketCluster): nothing else of such a
/// patch counts. A cluster with transport socket matches has no other socket: if none of them has the name, nothing
/// happens. Any other cluster gets the socket, replacing one of another name.
fn merge_socket(cluster: &mut Cluster, socket: TransportSocket) -> Result<(), MergeError> {
    let chosen = if cluster.transport_socket_matches.is_empty() {
        cluster.transport_socket.as_mut().filter(|own| own.name == socket.name)
    } else {
        let sockets = cluster.transport_socket_matches.iter_mut();
        let mut sockets = sockets.filter_map(|candidate| candidate.transport_socket.as_mut());
        let Some(found) = sockets.find(|own| own.name == socket.name) else {
            return Ok(());
        };
        Some(found)
    };
    let Some(own) = chosen else {
        cluster.transport_socket = Some(socket);
        return Ok(());
    };
    if let (Some(config), Some(patch)) = (config(own), config(&socket)) {
        own.config_type = Some(ConfigType::TypedConfig(merge::merge_any(config, patch)?));
    }
    Ok(())
}

fn config(socket: &TransportSocket) -> Option<&Any> {
    match socket.config_type.as_ref()? {
        ConfigType::TypedConfig(config) => Some(config),
    }
}
