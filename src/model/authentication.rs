//! Resolves PeerAuthentication: the mTLS mode of a workload's port, and the mode that clients may assume for a
//! namespace.
//!
//! The two differ: a client knows only the namespace of a service, so policies with a selector apply to servers alone.

use std::collections::BTreeMap;

use super::{MeshSnapshot, policy};
use crate::{
    api::Config,
    base::{Labels, Namespace, Shared, select},
    proto::istio::security::v1beta1::{
        self as security,
        peer_authentication::{MutualTls, mutual_tls::Mode},
    },
    table::Cx,
};

/// mTLS mode of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MtlsMode {
    /// Plaintext only.
    Disable,
    /// Plaintext and mutual TLS.
    Permissive,
    /// Mutual TLS only.
    Strict,
}

/// mTLS modes of a workload, by port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerPolicy {
    /// Mode of every port that is not listed.
    pub mode: MtlsMode,
    /// Modes of these ports of the workload (target ports).
    pub ports: BTreeMap<u32, MtlsMode>,
}

impl PeerPolicy {
    /// Returns the mode of a port of the workload.
    pub fn mode_on(&self, port: u32) -> MtlsMode {
        self.ports.get(&port).copied().unwrap_or(self.mode)
    }
}

type PeerAuthentication = Config<security::PeerAuthentication>;

/// Returns the mode of one port of a workload.
pub fn mtls_mode(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels, port: u32) -> MtlsMode {
    peer_policy(cx, mesh, namespace, labels).mode_on(port)
}

/// Returns the modes of a workload: the oldest policy each of mesh, namespace and workload, with later ones overriding.
/// Port levels count only in workload policies.
pub fn peer_policy(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels) -> PeerPolicy {
    let root = policy::root_namespace(cx, mesh);
    let mut mode = mesh_mode(cx, mesh, &root).unwrap_or(MtlsMode::Permissive);
    if *namespace == root {
        return PeerPolicy {
            mode,
            ports: BTreeMap::new(),
        };
    }
    let rows = by_age(cx, mesh, namespace);
    if let Some(set) = rows.iter().find(|row| is_general(row)).and_then(|row| mode_of(row)) {
        mode = set;
    }
    let Some(own) = rows.iter().find(|row| selects(row, labels)) else {
        return PeerPolicy {
            mode,
            ports: BTreeMap::new(),
        };
    };
    let mode = mode_of(own).unwrap_or(mode);
    // Envoy would refuse a chain for an invalid port.
    let ports = own
        .spec
        .port_level_mtls
        .iter()
        .filter(|(port, _)| (1..=65_535).contains(*port));
    PeerPolicy {
        mode,
        ports: ports
            .map(|(port, mtls)| (*port, converted(mtls).unwrap_or(mode)))
            .collect(),
    }
}

/// Returns the mode that clients may assume for a namespace: of its own policy, or else of the mesh's, or else
/// permissive.
pub fn namespace_mode(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> MtlsMode {
    let root = policy::root_namespace(cx, mesh);
    let own = (*namespace != root)
        .then(|| by_age(cx, mesh, namespace))
        .and_then(|rows| rows.iter().find(|row| is_general(row)).and_then(|row| mode_of(row)));
    own.or_else(|| mesh_mode(cx, mesh, &root))
        .unwrap_or(MtlsMode::Permissive)
}

fn mesh_mode(cx: &Cx, mesh: &MeshSnapshot, root: &Namespace) -> Option<MtlsMode> {
    let rows = by_age(cx, mesh, root);
    rows.iter().find(|row| is_general(row)).and_then(|row| mode_of(row))
}

fn by_age<'a>(cx: &Cx, mesh: &'a MeshSnapshot, namespace: &Namespace) -> Vec<&'a Shared<PeerAuthentication>> {
    let index = &mesh.peer_authentications_by_namespace;
    let mut rows: Vec<_> = index.get(cx, namespace).map(|(_, row)| row).collect();
    rows.sort_by_key(|row| row.meta.age_order());
    rows
}

/// Returns true without labels: an empty selector counts as none.
fn is_general(row: &PeerAuthentication) -> bool {
    let selector = row.spec.selector.as_ref();
    selector.is_none_or(|selector| selector.match_labels.is_empty())
}

fn selects(row: &PeerAuthentication, labels: &Labels) -> bool {
    let selector = row.spec.selector.as_ref();
    selector.is_some_and(|selector| {
        let pairs = selector.match_labels.iter();
        !selector.match_labels.is_empty() && select::matches(pairs.map(|(k, v)| (k.as_str(), v.as_str())), labels)
    })
}

fn mode_of(row: &PeerAuthentication) -> Option<MtlsMode> {
    row.spec.mtls.as_ref().and_then(converted)
}

fn converted(mtls: &MutualTls) -> Option<MtlsMode> {
    match mtls.mode() {
        Mode::Unset => None,
        Mode::Disable => Some(MtlsMode::Disable),
        Mode::Permissive => Some(MtlsMode::Permissive),
        Mode::Strict => Some(MtlsMode::Strict),
    }
}

#[cfg(test)]
mod tests;
