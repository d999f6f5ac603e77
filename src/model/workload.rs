//! Workloads: pods and WorkloadEntries in one form, with everything an endpoint inherits from them.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{MeshSnapshot, inputs::Inputs};
use crate::base::{ClusterId, Labels, Namespace, NetworkId, ObjectKey, Shared};
use crate::table::Cx;

/// Names a workload.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadKey {
    /// Pod or WorkloadEntry.
    pub source: WorkloadSource,
    /// The object.
    pub object: ObjectKey,
}

/// What a workload was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadSource {
    /// A Pod.
    Pod,
    /// A WorkloadEntry.
    WorkloadEntry,
}

/// A place where endpoints run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its key.
    pub key: WorkloadKey,
    /// The namespace.
    pub namespace: Namespace,
    /// The cluster.
    pub cluster: ClusterId,
    /// The addresses, first one first. A WorkloadEntry may have a host name or a `unix://` path.
    pub addresses: Vec<SmolStr>,
    /// Labels of the object, without the augmented ones. Selectors look here.
    pub labels: Shared<Labels>,
    /// Labels with cluster, network, locality and host name laid over (kube.md section 3). Subsets look here.
    pub endpoint_labels: Shared<Labels>,
    /// `spiffe://<trust domain>/ns/<namespace>/sa/<account>`; empty if there is no account.
    pub identity: SmolStr,
    /// The service account's name.
    pub service_account: SmolStr,
    /// The network, empty when unknown.
    pub network: NetworkId,
    /// `region/zone/subzone` (trailing parts may be missing), empty when unknown.
    pub locality: SmolStr,
    /// Label `security.istio.io/tlsMode`, else `disabled` (WorkloadEntry with service account: `istio`).
    pub tls_mode: SmolStr,
    /// The owner's name (Deployment …), or the WorkloadEntry's.
    pub workload_name: SmolStr,
    /// The node, empty for WorkloadEntries.
    pub node_name: SmolStr,
    /// `spec.hostname` of the pod.
    pub hostname: SmolStr,
    /// `spec.subdomain` of the pod.
    pub subdomain: SmolStr,
    /// Named ports: of containers, or of the WorkloadEntry.
    pub named_ports: BTreeMap<SmolStr, u32>,
    /// `weight` of the WorkloadEntry, 0 when absent.
    pub weight: u32,
    /// Ready, running, not being deleted; a WorkloadEntry is ready unless its health condition says no.
    pub ready: bool,
}

/// The workloads that a change of Pods or WorkloadEntries concerns.
pub fn candidates(inputs: &Inputs) -> Vec<WorkloadKey> {
    let of = |source: WorkloadSource, object: &ObjectKey| WorkloadKey {
        source,
        object: object.clone(),
    };
    let pods = inputs
        .pods
        .changes()
        .iter()
        .map(|(key, ..)| of(WorkloadSource::Pod, key));
    let entries = inputs
        .workload_entries
        .changes()
        .iter()
        .map(|(key, ..)| of(WorkloadSource::WorkloadEntry, key));
    pods.chain(entries).collect()
}

/// The SPIFFE identity of a service account. Parity: written even where the account is empty.
pub fn spiffe_id(trust_domain: &str, namespace: &str, account: &str) -> SmolStr {
    let trust_domain = trust_domain.replace('@', ".");
    SmolStr::from(format!("spiffe://{trust_domain}/ns/{namespace}/sa/{account}"))
}

/// Derives one workload.
pub fn workload(_cx: &Cx, _mesh: &MeshSnapshot, _key: &WorkloadKey) -> Option<Workload> {
    None
}
