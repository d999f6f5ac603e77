//! Resolves PeerAuthentication: the mTLS mode of a workload's port, and the mode that clients may assume for a
//! namespace.
//!
//! The two differ: a client knows only the namespace of a service, so policies with a selector apply to servers alone.

use std::collections::BTreeMap;

use super::{MeshSnapshot, policy};
use crate::{
    api::{Config, istio::security::MAX_MTLS_PORTS},
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
    NamespacePolicies::of(cx, mesh, namespace).mode_on(labels, port)
}

/// Returns the modes of a workload.
pub fn peer_policy(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels) -> PeerPolicy {
    NamespacePolicies::of(cx, mesh, namespace).of_workload(labels)
}

/// The policies of a namespace, sorted once for all of its workloads: the oldest one each of mesh, namespace and
/// workload counts, with later ones overriding. Port levels count only in workload policies.
pub struct NamespacePolicies<'a> {
    /// The mode of workloads without a policy of their own.
    mode: MtlsMode,
    /// Policies that select workloads, oldest first.
    selecting: Vec<&'a Shared<PeerAuthentication>>,
}

impl<'a> NamespacePolicies<'a> {
    /// Reads the policies.
    pub fn of(cx: &Cx, mesh: &'a MeshSnapshot, namespace: &Namespace) -> Self {
        let root = policy::root_namespace(cx, mesh);
        let mode = general_mode(&by_age(cx, mesh, &root)).unwrap_or(MtlsMode::Permissive);
        if *namespace == root {
            return Self {
                mode,
                selecting: Vec::new(),
            };
        }
        let mut selecting = by_age(cx, mesh, namespace);
        let mode = general_mode(&selecting).unwrap_or(mode);
        selecting.retain(|row| !is_general(row));
        Self { mode, selecting }
    }

    /// Returns the mode of one port of a workload.
    pub fn mode_on(&self, labels: &Labels, port: u32) -> MtlsMode {
        let Some(own) = self.own(labels) else {
            return self.mode;
        };
        // No service has an invalid port.
        let of_port = own.spec.port_level_mtls.get(&port).and_then(converted);
        of_port.or_else(|| mode_of(own)).unwrap_or(self.mode)
    }

    /// Returns the modes of a workload.
    fn of_workload(&self, labels: &Labels) -> PeerPolicy {
        let Some(own) = self.own(labels) else {
            return PeerPolicy {
                mode: self.mode,
                ports: BTreeMap::new(),
            };
        };
        let mode = mode_of(own).unwrap_or(self.mode);
        // Envoy would refuse a chain for an invalid port.
        let ports = own
            .spec
            .port_level_mtls
            .iter()
            .filter(|(port, _)| (1..=65_535).contains(*port));
        let mut ports = ports.map(|(port, mtls)| (*port, converted(mtls).unwrap_or(mode)));
        let kept = ports.by_ref().take(MAX_MTLS_PORTS).collect();
        // A port must not be more open than its own mode says.
        let is_strict = ports.any(|(_, surplus)| surplus == MtlsMode::Strict);
        PeerPolicy {
            mode: if is_strict { MtlsMode::Strict } else { mode },
            ports: kept,
        }
    }

    /// Returns the policy of a workload.
    fn own(&self, labels: &Labels) -> Option<&'a Shared<PeerAuthentication>> {
        self.selecting.iter().copied().find(|row| selects(row, labels))
    }
}

/// Returns the mode that clients may assume for a namespace: of its own policy, or else of the mesh's, or else
/// permissive.
pub fn namespace_mode(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> MtlsMode {
    NamespacePolicies::of(cx, mesh, namespace).mode
}

/// Returns the mode of the oldest policy for all workloads; `None` if it sets none.
fn general_mode(by_age: &[&Shared<PeerAuthentication>]) -> Option<MtlsMode> {
    by_age.iter().find(|row| is_general(row)).and_then(|row| mode_of(row))
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
