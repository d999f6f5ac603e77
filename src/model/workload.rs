//! Workloads: pods and WorkloadEntries in one form, with the attributes that their endpoints inherit.

use std::{collections::BTreeMap, fmt::Display};

use smol_str::{SmolStr, format_smolstr};

use super::{
    MeshSnapshot,
    identity::{spiffe_id, trust_domain},
    inputs::InputWriters,
    network,
    policy::GATEWAY_NAME_LABEL,
};
use crate::{
    api::{
        Config,
        kube::{Node, Pod},
        label::NETWORK,
    },
    base::{ClusterId, Labels, Namespace, NetworkId, ObjectKey, Shared},
    proto::istio::networking::v1alpha3::WorkloadEntry,
    table::Cx,
};

/// Key of a workload.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadKey {
    /// Pod or WorkloadEntry.
    pub source: WorkloadSource,
    /// The object.
    pub object: ObjectKey,
}

/// Kind of a workload's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadSource {
    /// A Pod.
    Pod,
    /// A WorkloadEntry.
    WorkloadEntry,
}

/// A workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its key.
    pub key: WorkloadKey,
    /// Addresses, the main one first. A WorkloadEntry may have a host name or a `unix://` path.
    pub addresses: Vec<SmolStr>,
    /// Labels of the object, without the augmented ones. Selectors match these.
    pub labels: Shared<Labels>,
    /// Attributes that its endpoints inherit.
    pub origin: Shared<Origin>,
    /// The service account's name.
    pub service_account: SmolStr,
    /// Named ports: TCP ports of containers, or those of the WorkloadEntry.
    pub named_ports: BTreeMap<SmolStr, u32>,
    /// True if it is ready: running and not being deleted. A WorkloadEntry is ready unless its health condition denies
    /// it. Lookups by address or label skip workloads that are not ready.
    pub ready: bool,
}

/// Attributes of a workload that all its endpoints share.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Origin {
    /// Labels, with those of cluster, network, locality and host name added. Subsets match these.
    pub labels: Shared<Labels>,
    /// `spiffe://<trust domain>/ns/<namespace>/sa/<account>`, empty when unknown.
    pub identity: SmolStr,
    /// The network, empty when unknown.
    pub network: NetworkId,
    /// The cluster.
    pub cluster: ClusterId,
    /// `region/zone/subzone` (trailing parts may be missing or empty), empty when unknown.
    pub locality: SmolStr,
    /// Load balancing weight, 0 if unset.
    pub weight: u32,
    /// [`MUTUAL_TLS`], [`PLAINTEXT`], or another text of the label.
    pub tls_mode: SmolStr,
    /// Name of the owner (Deployment …) or of the WorkloadEntry, empty if unknown.
    pub workload_name: SmolStr,
    /// Namespace of the workload, empty when unknown.
    pub namespace: Namespace,
    /// Node of the workload, empty if unknown.
    pub node_name: SmolStr,
    /// Name of the pod in its subdomain, for names of headless services; empty without a subdomain.
    pub hostname: SmolStr,
    /// `subdomain` of the pod.
    pub subdomain: SmolStr,
}

/// The mode of a workload that accepts mutual TLS of the mesh itself: it has a sidecar, or is a gateway.
pub const MUTUAL_TLS: &str = "istio";
/// The mode of a workload that accepts plaintext only.
pub const PLAINTEXT: &str = "disabled";

impl Origin {
    /// Returns true if the workload accepts mutual TLS of the mesh itself, without HBONE.
    pub fn accepts_mutual_tls(&self) -> bool {
        self.tls_mode == MUTUAL_TLS
    }
}

/// Returns the workloads that changes of Pods or WorkloadEntries affect.
pub fn candidates(inputs: &InputWriters) -> Vec<WorkloadKey> {
    let workload_key = |source: WorkloadSource, object: &ObjectKey| WorkloadKey {
        source,
        object: object.clone(),
    };
    let pods = inputs
        .pods
        .changes()
        .iter()
        .map(|(key, ..)| workload_key(WorkloadSource::Pod, key));
    let entries = inputs
        .workload_entries
        .changes()
        .iter()
        .map(|(key, ..)| workload_key(WorkloadSource::WorkloadEntry, key));
    pods.chain(entries).collect()
}

/// Label of endpoints that accept tunnels, with their protocols.
pub const TUNNEL_LABEL: &str = "networking.istio.io/tunnel";
/// HBONE as a tunnel protocol.
pub const TUNNEL_HTTP: &str = "http";

/// Returns the name by which ztunnels request an address.
pub fn address_name(network: &str, address: &impl Display) -> SmolStr {
    format_smolstr!("{network}/{address}")
}

/// Derives one workload.
pub fn workload(cx: &Cx, mesh: &MeshSnapshot, key: &WorkloadKey) -> Option<Workload> {
    match key.source {
        WorkloadSource::Pod => Some(of_pod(cx, mesh, key, mesh.pods.get(cx, &key.object)?)),
        WorkloadSource::WorkloadEntry => {
            let entry = mesh.workload_entries.get(cx, &key.object)?;
            let meta = &entry.meta;
            let name = entry_name(&meta.annotations, &meta.labels, meta.name());
            let ready = !mesh.installation.features.pilot_enable_workload_entry_healthchecks || is_healthy(entry);
            let workload = of_entry(cx, mesh, key, &entry.spec, entry_labels(entry), name);
            Some(Workload { ready, ..workload })
        }
    }
}

fn of_pod(cx: &Cx, mesh: &MeshSnapshot, key: &WorkloadKey, pod: &Pod) -> Workload {
    let meta = &pod.meta;
    let locality = labelled_locality(&meta.labels).unwrap_or_else(|| node_locality(cx, mesh, pod));
    let ip = pod.ips.first().map_or("", SmolStr::as_str);
    let network = network::of_endpoint(cx, mesh, meta.cluster(), &meta.labels, ip);
    let trust_domain = trust_domain(cx, mesh, meta.cluster());
    let labels = augmented(&meta.labels, meta.cluster(), &locality, &pod.node_name, &network);
    let origin = Origin {
        labels: Shared::new(labels),
        identity: spiffe_id(trust_domain, meta.namespace(), &pod.service_account),
        network,
        cluster: meta.cluster().clone(),
        locality,
        weight: 0,
        tls_mode: tls_mode(&meta.labels, ""),
        workload_name: pod.workload_name.clone(),
        namespace: meta.namespace().clone(),
        node_name: pod.node_name.clone(),
        hostname: dns_hostname(pod),
        subdomain: pod.subdomain.clone(),
    };
    Workload {
        key: key.clone(),
        addresses: pod.ips.clone(),
        labels: meta.labels.clone(),
        origin: Shared::new(origin),
        service_account: pod.service_account.clone(),
        named_ports: tcp_ports(pod),
        ready: pod.is_serving(),
    }
}

/// Returns the name of a pod in its subdomain: its hostname, by default its own name.
fn dns_hostname(pod: &Pod) -> SmolStr {
    if pod.subdomain.is_empty() {
        SmolStr::default()
    } else if pod.hostname.is_empty() {
        pod.meta.name().clone()
    } else {
        pod.hostname.clone()
    }
}

fn tcp_ports(pod: &Pod) -> BTreeMap<SmolStr, u32> {
    let tcp = pod.named_ports.iter().filter(|((_, protocol), _)| protocol == "TCP");
    tcp.map(|((name, _), number)| (name.clone(), *number)).collect()
}

/// Returns a workload from the specification of a WorkloadEntry: an object of its own, or an endpoint of a
/// ServiceEntry.
pub(super) fn of_entry(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &WorkloadKey,
    entry: &WorkloadEntry,
    labels: Labels,
    workload_name: SmolStr,
) -> Workload {
    let object = &key.object;
    let locality = entry_locality(entry, &labels);
    // Parity (pilot/pkg/serviceregistry/serviceentry/conversion.go): only a network set by the entry counts when
    // gateways are selected; a network known otherwise appears in the labels alone. Parity
    // (pilot/pkg/bootstrap/servicecontroller.go): entries of the config cluster have no other network.
    let known_network = match entry.network.as_str() {
        "" if object.cluster == mesh.installation.cluster => NetworkId::default(),
        "" => network::of_endpoint(cx, mesh, &object.cluster, &labels, &entry.address),
        given => NetworkId::new(given),
    };
    // Parity (pilot/pkg/serviceregistry/kube/controller/multicluster.go): the trust domain of entries is that of the
    // config cluster, whatever their own cluster.
    let trust_domain = &mesh.mesh_config(cx).trust_domain;
    let identity = match entry.service_account.as_str() {
        "" => SmolStr::default(),
        account => spiffe_id(trust_domain, &object.namespace, account),
    };
    let origin = Origin {
        labels: Shared::new(augmented(&labels, &object.cluster, &locality, "", &known_network)),
        identity,
        // Registries have networks as clusters do (`fromRegistry` in meshNetworks).
        network: if mesh.installation.registries.contains(&object.cluster) {
            known_network
        } else {
            NetworkId::new(&entry.network)
        },
        cluster: object.cluster.clone(),
        locality,
        weight: entry.weight,
        tls_mode: tls_mode(&labels, &entry.service_account),
        workload_name,
        namespace: object.namespace.clone(),
        ..Origin::default()
    };
    Workload {
        key: key.clone(),
        addresses: vec![SmolStr::new(&entry.address)],
        labels: Shared::new(labels),
        origin: Shared::new(origin),
        service_account: SmolStr::new(&entry.service_account),
        named_ports: entry
            .ports
            .iter()
            .map(|(name, port)| (SmolStr::new(name), *port))
            .collect(),
        ready: true,
    }
}

/// Returns the locality of a WorkloadEntry with these labels.
pub fn entry_locality(entry: &WorkloadEntry, labels: &Labels) -> SmolStr {
    match entry.locality.as_str() {
        "" => labelled_locality(labels).unwrap_or_default(),
        given => SmolStr::new(given),
    }
}

/// Converts a map of a message to labels.
pub(super) fn label_map<'a>(map: impl IntoIterator<Item = (&'a String, &'a String)>) -> Labels {
    map.into_iter()
        .map(|(key, value)| (SmolStr::new(key), SmolStr::new(value)))
        .collect()
}

/// Returns the name of a WorkloadEntry in telemetry: of its group, of its label, or its own.
pub(super) fn entry_name(annotations: &Labels, labels: &Labels, name: &SmolStr) -> SmolStr {
    let group = annotations.get("istio.io/autoRegistrationGroup");
    let label = labels.get("service.istio.io/workload-name");
    group.or(label).unwrap_or(name).clone()
}

/// Returns the labels of a WorkloadEntry: those of its metadata precede those of its specification.
pub(super) fn entry_labels(entry: &Config<WorkloadEntry>) -> Labels {
    let mut labels = label_map(&entry.spec.labels);
    labels.extend(Labels::clone(&entry.meta.labels));
    labels
}

/// Returns true if health checks are off or the entry's condition `Healthy` is true.
fn is_healthy(entry: &Config<WorkloadEntry>) -> bool {
    let checked = entry.meta.annotations.get("proxy.istio.io/health-checks-enabled");
    if !checked.is_some_and(|value| matches!(value.as_str(), "1" | "t" | "T" | "true" | "TRUE" | "True")) {
        return true;
    }
    let conditions = entry
        .status
        .as_ref()
        .and_then(|status| status.get("conditions")?.as_array());
    let healthy = conditions
        .into_iter()
        .flatten()
        .find(|condition| condition["type"] == "Healthy");
    healthy.is_some_and(|condition| condition["status"] == "True")
}

/// Returns the mTLS mode of a workload: by its label, or else by whether an entry has an account.
fn tls_mode(labels: &Labels, entry_account: &str) -> SmolStr {
    let default = if entry_account.is_empty() {
        PLAINTEXT
    } else {
        MUTUAL_TLS
    };
    let label = labels.get("security.istio.io/tlsMode");
    label.cloned().unwrap_or(SmolStr::new_static(default))
}

/// Emits the namespace of a workload that has a sidecar. Gateways, which also accept TLS of the mesh, have none.
pub fn sidecar_namespace(key: &WorkloadKey, workload: &Workload, emit: &mut dyn FnMut(Namespace)) {
    if workload.origin.accepts_mutual_tls() && !workload.labels.contains_key(GATEWAY_NAME_LABEL) {
        emit(key.object.namespace.clone());
    }
}

/// Returns the label with a locality, unless it is empty.
pub fn locality_label(labels: &Labels) -> Option<&SmolStr> {
    let label = labels
        .get("topology.istio.io/locality")
        .or_else(|| labels.get("istio-locality"))?;
    (!label.is_empty()).then_some(label)
}

/// Returns the locality in a label of an object; labels cannot contain `/`, so `.` replaces it.
fn labelled_locality(labels: &Labels) -> Option<SmolStr> {
    let label = locality_label(labels)?;
    if label.contains('/') {
        Some(label.clone())
    } else {
        Some(SmolStr::from(label.replace('.', "/")))
    }
}

/// Returns the node of a pod.
fn node<'a>(cx: &Cx, mesh: &'a MeshSnapshot, pod: &Pod) -> Option<&'a Shared<Node>> {
    let key = ObjectKey::new(pod.meta.cluster(), "", pod.node_name.clone());
    mesh.nodes.get(cx, &key)
}

fn node_locality(cx: &Cx, mesh: &MeshSnapshot, pod: &Pod) -> SmolStr {
    let Some(node) = node(cx, mesh, pod) else {
        return SmolStr::default();
    };
    let label = |names: [&str; 2]| {
        let found = names
            .iter()
            .find_map(|name| node.meta.labels.get(*name).filter(|value| !value.is_empty()));
        found.map_or("", SmolStr::as_str)
    };
    let region = label([
        "topology.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/region",
    ]);
    let zone = label(["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]);
    let subzone = label(["topology.istio.io/subzone", "topology.istio.io/subzone"]);
    if region.is_empty() && zone.is_empty() && subzone.is_empty() {
        return SmolStr::default();
    }
    SmolStr::from(format!("{region}/{zone}/{subzone}"))
}

/// Returns labels with cluster, locality, node and network added, for subsets and failover priorities.
pub fn augmented(labels: &Labels, cluster: &ClusterId, locality: &str, node: &str, network: &NetworkId) -> Labels {
    let mut augmented = labels.clone();
    augment(&mut augmented, cluster, locality, node, network);
    // Workloads keep the labels. A clone gives back the room for more that the additions left.
    augmented.clone()
}

/// Adds these labels in place.
pub fn augment(labels: &mut Labels, cluster: &ClusterId, locality: &str, node: &str, network: &NetworkId) {
    let names_network = labels.get(NETWORK).is_some_and(|label| !label.is_empty());
    let mut put = |key: &'static str, value: &str| {
        if !value.is_empty() {
            labels.insert(SmolStr::new_static(key), SmolStr::new(value));
        }
    };
    let mut parts = locality.split('/');
    put("topology.kubernetes.io/region", parts.next().unwrap_or_default());
    put("topology.kubernetes.io/zone", parts.next().unwrap_or_default());
    put("topology.istio.io/subzone", parts.next().unwrap_or_default());
    put("topology.istio.io/cluster", cluster);
    put("kubernetes.io/hostname", node);
    if !names_network {
        put(NETWORK, network);
    }
}
