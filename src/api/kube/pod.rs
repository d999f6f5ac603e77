//! core/v1 Pod.

use std::collections::BTreeMap;

use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::{Keyed, with_annotations},
    },
    base::{ClusterId, Namespace, ObjectKey, Shared},
};

/// Annotation by which a node's agent marks pods whose traffic goes through the node's ztunnel.
pub const REDIRECTION: &str = "ambient.istio.io/redirection";

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Metadata, of annotations only [`REDIRECTION`].
    pub meta: Shared<Meta>,
    /// `metadata.uid`.
    pub uid: SmolStr,
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
    /// Named container ports as (name, protocol) → number, including init containers with restartPolicy Always. Of
    /// equal names and protocols the first container wins.
    pub named_ports: BTreeMap<(SmolStr, SmolStr), u32>,
    /// The workload that owns the pod, such as the name of a Deployment, unless a label names it.
    pub workload_name: SmolStr,
    /// The kind of the owner (`Deployment`, `CronJob`, …); `Pod` without owner.
    pub workload_kind: SmolStr,
    /// True if the condition `Ready` is `True`.
    pub ready: bool,
    /// `status.phase`.
    pub phase: SmolStr,
    /// True if `metadata.deletionTimestamp` is set.
    pub terminating: bool,
}

/// A service account and a node on which a pod of it runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeAccount {
    /// The cluster of the pod.
    pub cluster: ClusterId,
    /// The node.
    pub node: SmolStr,
    /// The namespace of the pod and the account.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
}

impl Pod {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let metadata = root.object("metadata");
        let (spec, status) = (root.object("spec"), root.object("status"));
        let mut ips: Vec<SmolStr> = status.objects("podIPs").iter().map(|entry| entry.text("ip")).collect();
        ips.retain(|ip| !ip.is_empty());
        if ips.is_empty() {
            ips.extend(status.optional_text("podIP").filter(|ip| !ip.is_empty()));
        }
        let conditions = status.objects("conditions");
        let ready = conditions
            .iter()
            .any(|condition| condition.text("type") == "Ready" && condition.text("status") == "True");
        let (workload_name, workload_kind) = owner(&meta, &metadata);
        let named = meta.labels.get("service.istio.io/workload-name").cloned();
        let pod = Self {
            meta: with_annotations(meta, &[REDIRECTION]),
            uid: metadata.text("uid"),
            ips,
            node_name: spec.text("nodeName"),
            service_account: spec.text("serviceAccountName"),
            hostname: spec.text("hostname"),
            subdomain: spec.text("subdomain"),
            host_network: spec.flag("hostNetwork").unwrap_or_default(),
            named_ports: named_ports(&spec),
            workload_name: named.unwrap_or(workload_name),
            workload_kind,
            ready,
            phase: status.text("phase"),
            terminating: metadata.has("deletionTimestamp"),
        };
        errors.finish(pod)
    }

    /// Returns the port with a name and a protocol (`TCP`, …). Names are unique only within a container.
    pub fn named_port(&self, name: &str, protocol: &str) -> Option<u32> {
        let key = (SmolStr::new(name), SmolStr::new(protocol));
        self.named_ports.get(&key).copied()
    }

    /// Returns the node and the account of a pod that is scheduled and has not failed.
    pub fn node_account(&self, key: &ObjectKey) -> Option<NodeAccount> {
        let is_scheduled = !self.node_name.is_empty() && !self.service_account.is_empty() && self.phase != "Failed";
        is_scheduled.then(|| NodeAccount {
            cluster: key.cluster.clone(),
            node: self.node_name.clone(),
            namespace: key.namespace.clone(),
            service_account: self.service_account.clone(),
        })
    }

    /// Returns true for a ready pod with an address that has not finished and is not being deleted. Such pods own their
    /// addresses.
    pub fn is_serving(&self) -> bool {
        self.ready && !self.terminating && !self.ips.is_empty() && !self.is_finished()
    }

    /// Returns true for a pod that has succeeded or failed.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase.as_str(), "Failed" | "Succeeded")
    }
}

/// Returns the named ports of containers, and of init containers that keep running (sidecar containers).
fn named_ports(spec: &Fields<'_>) -> BTreeMap<(SmolStr, SmolStr), u32> {
    let mut containers = spec.objects("containers");
    let sidecars = spec.objects("initContainers").into_iter();
    containers.extend(sidecars.filter(|container| container.text("restartPolicy") == "Always"));
    let mut named = BTreeMap::new();
    for port in containers.iter().flat_map(|container| container.objects("ports")) {
        let name = port.text("name");
        if name.is_empty() {
            continue;
        }
        let protocol = match port.text("protocol") {
            protocol if protocol.is_empty() => SmolStr::new_static("TCP"),
            protocol => protocol,
        };
        named.entry((name, protocol)).or_insert(port.port("containerPort"));
    }
    named
}

/// Returns name and kind of the workload that created the pod; a pod without owner is its own workload. Removes the
/// hash that a Deployment or Rollout appends to its ReplicaSet, and the time that a CronJob appends to its Job.
fn owner(meta: &Meta, metadata: &Fields<'_>) -> (SmolStr, SmolStr) {
    let itself = || (meta.name().clone(), SmolStr::new_static("Pod"));
    if metadata.text("generateName").is_empty() {
        return itself();
    }
    let owners = metadata.objects("ownerReferences");
    let Some(owner) = owners.iter().find(|owner| owner.flag("controller") == Some(true)) else {
        return itself();
    };
    let (name, kind) = (owner.text("name"), owner.text("kind"));
    let trimmed = |label: &str| {
        let hash = meta.labels.get(label).filter(|hash| !hash.is_empty())?;
        Some(SmolStr::new(name.strip_suffix(hash.as_str())?.strip_suffix('-')?))
    };
    let (name, kind) = match kind.as_str() {
        "ReplicaSet" => match (trimmed("pod-template-hash"), trimmed("rollouts-pod-template-hash")) {
            (Some(stem), _) => (stem, SmolStr::new_static("Deployment")),
            (None, Some(stem)) => (stem, SmolStr::new_static("Rollout")),
            (None, None) => (name, kind),
        },
        "ReplicationController" => match meta.labels.get("deploymentconfig") {
            Some(config) => (config.clone(), SmolStr::new_static("DeploymentConfig")),
            None => (name, kind),
        },
        "Job" => match name.rsplit_once('-') {
            Some((stem, digits))
                if (8..=10).contains(&digits.len()) && digits.as_bytes().iter().all(u8::is_ascii_digit) =>
            {
                (SmolStr::new(stem), SmolStr::new_static("CronJob"))
            }
            _ => (name, kind),
        },
        _ => (name, kind),
    };
    if name.is_empty() { itself() } else { (name, kind) }
}

impl Keyed for Pod {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
