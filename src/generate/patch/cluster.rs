//! Patches of clusters.
//!
//! A part finds out which patches concern each of its clusters ([`ClusterPatches`]), so that a cluster's key names these
//! alone and all other clusters go on being shared. What one would get wrong: a patch matches the name that the cluster
//! has by then, which an earlier patch may have changed.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    PatchContext, PatchRef,
    merge::{self, MergeError},
    resolve_each, set,
};
use crate::{
    base::{Hostname, Shared},
    generate::{BuildContext, resource::Note},
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

/// What the name of a cluster says: `outbound|80|v1|host`, or with `_.` between, as the SNI has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParsedName<'a> {
    /// The first word.
    pub direction: &'a str,
    /// The port; 0 if there is none.
    pub port: u32,
    /// The subset.
    pub subset: &'a str,
    /// The host.
    pub host: &'a str,
}

impl<'a> ParsedName<'a> {
    /// Reads a name, as far as it has the form.
    pub fn of(name: &'a str) -> Self {
        let is_sni = name.starts_with("outbound_") || name.starts_with("inbound_");
        let mut words = name.split(if is_sni { "_." } else { "|" });
        let mut parsed = Self::default();
        // Parity: a word counts if another one follows.
        let (Some(direction), Some(port)) = (words.next(), words.next()) else {
            return parsed;
        };
        parsed.direction = direction;
        let Some(subset) = words.next() else { return parsed };
        parsed.port = port.parse().unwrap_or_default();
        let Some(host) = words.next() else { return parsed };
        parsed.subset = subset;
        if words.next().is_none() {
            parsed.host = host;
        }
        parsed
    }
}

/// The merges and removals of one context, by what they look for.
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
    /// Sorts the patches of a proxy.
    pub fn of(ctx: &BuildContext<'a>, refs: &[PatchRef], context: PatchContext) -> Self {
        let changes = resolve_each(ctx, refs).filter(|(_, patch)| {
            patch.is_for(context) && matches!(patch.operation, Operation::Merge | Operation::Remove)
        });
        let (refs, patches): (Vec<PatchRef>, Vec<&Patch>) = changes.map(|(one, patch)| (one.clone(), patch)).unzip();
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
                Some(wanted) if !wanted.name.is_empty() => sorted.by_name.entry(&wanted.name).or_default(),
                Some(wanted) if !wanted.service.is_empty() => sorted.by_service.entry(&wanted.service).or_default(),
                _ => &mut sorted.rest,
            };
            list.push(index);
        }
        sorted
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty()
    }

    /// What a cluster has that none of them concerns: one allocation for all.
    pub fn none(&self) -> Shared<[PatchRef]> {
        self.none.clone()
    }

    /// True if some of them gives clusters another way to find endpoints: EDS, it may be.
    pub fn makes_eds(&self) -> bool {
        self.makes_eds
    }

    /// The patches that have to be looked at for a cluster: those that match it; all, if one of these renames it.
    /// `hosts`: the services of an inbound cluster.
    pub fn concerning(&self, name: &str, hosts: &[Hostname]) -> Shared<[PatchRef]> {
        if self.patches.is_empty() {
            return self.none();
        }
        let found = |map: &BTreeMap<&str, Vec<usize>>, word: &str| map.get(word).cloned().unwrap_or_default();
        let mut indexes: BTreeSet<usize> = self.rest.iter().copied().collect();
        indexes.extend(found(&self.by_name, name));
        indexes.extend(found(&self.by_service, ParsedName::of(name).host));
        indexes.extend(hosts.iter().flat_map(|host| found(&self.by_service, host.as_str())));
        indexes.retain(|index| matches(self.patches[*index].cluster(), name, hosts));
        if indexes.is_empty() {
            return self.none();
        }
        if indexes.iter().any(|index| sets(self.patches[*index], "name")) {
            return self.refs.clone();
        }
        let refs = indexes.into_iter().map(|index| self.refs[index].clone());
        refs.collect::<Vec<_>>().into()
    }
}

/// Merges the patches into a cluster, in their order; `None` if one removes it.
///
/// A transport socket goes its own way, see [`merge_socket`]. A socket of another kind than the one that it should be
/// merged into ends it all: what came before stays, what comes after is lost.
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

/// The patches that add a cluster in a context.
pub fn additions(ctx: &BuildContext, refs: &[PatchRef], context: PatchContext) -> Vec<PatchRef> {
    let added = resolve_each(ctx, refs).filter(|(_, patch)| patch.adds_in(context));
    added.map(|(one, _)| one.clone()).collect()
}

/// The names that Envoy will ask endpoints for because a patch says so.
pub fn asked_endpoints(ctx: &BuildContext, refs: &[PatchRef]) -> BTreeSet<String> {
    let wants = |patch: &Patch| sets(patch, "eds_cluster_config") || patch.operation == Operation::Add;
    let values = resolve_each(ctx, refs).filter(|(_, patch)| wants(patch));
    let clusters = values.filter_map(|(_, patch)| patch.read::<Cluster>());
    let names = clusters.map(|cluster| {
        let service = cluster.eds_cluster_config.map(|eds| eds.service_name);
        service.filter(|name| !name.is_empty()).unwrap_or(cluster.name)
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// A cluster's match. The name alone decides if it is given.
fn matches(wanted: Option<&ClusterMatch>, name: &str, hosts: &[Hostname]) -> bool {
    let Some(wanted) = wanted else { return true };
    if !wanted.name.is_empty() {
        return wanted.name == name;
    }
    let parsed = ParsedName::of(name);
    let of_service = if parsed.direction == "inbound" && !hosts.is_empty() {
        hosts.iter().any(|host| host.as_str() == wanted.service)
    } else {
        parsed.host == wanted.service
    };
    (wanted.subset.is_empty() || wanted.subset == parsed.subset)
        && (wanted.service.is_empty() || of_service)
        && (wanted.port_number == 0 || wanted.port_number == parsed.port)
}

/// True if the patch's value has a field, whatever is in it.
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

/// Merges a socket into the one of the same name. Parity: nothing else of such a patch counts.
///
/// A cluster that chooses among sockets cannot have one besides: if none of its sockets has the name, nothing happens.
/// Any other cluster gets the socket, in place of one of another name.
fn merge_socket(cluster: &mut Cluster, socket: TransportSocket) -> Result<(), MergeError> {
    let chosen = if cluster.transport_socket_matches.is_empty() {
        cluster.transport_socket.as_mut().filter(|own| own.name == socket.name)
    } else {
        let sockets = cluster.transport_socket_matches.iter_mut();
        let mut sockets = sockets.filter_map(|one| one.transport_socket.as_mut());
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
