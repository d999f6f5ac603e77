//! core/v1 Pod.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `status.podIPs`, else `status.podIP`.
    pub ips: Vec<SmolStr>,
    /// `spec.nodeName`.
    pub node_name: SmolStr,
    /// `spec.serviceAccountName`.
    pub service_account: SmolStr,
    /// `spec.hostname`.
    pub hostname: SmolStr,
    /// `spec.subdomain`.
    pub subdomain: SmolStr,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// Named container ports, init containers with restartPolicy Always included: name → (number, protocol).
    /// The first container that has the name wins.
    pub named_ports: BTreeMap<SmolStr, (u32, SmolStr)>,
    /// The workload that owns the pod (`Deployment` name and the like), see kube.md section 3.
    pub workload_name: SmolStr,
    /// The kind of that owner (`Deployment`, `CronJob`, …; `Pod` when none).
    pub workload_kind: SmolStr,
    /// Condition `Ready` is `True`.
    pub ready: bool,
    /// `status.phase`.
    pub phase: SmolStr,
    /// `metadata.deletionTimestamp` is set.
    pub terminating: bool,
}

impl Keyed for Pod {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
