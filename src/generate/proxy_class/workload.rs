//! What the registry knows of a proxy's workload: its pod, its WorkloadEntry, labels and locality.

use smol_str::SmolStr;

use crate::{
    api::kube::Pod,
    base::{ClusterId, Labels, Namespace, ObjectKey, Shared},
    generate::{
        BuildContext, Proxy,
        proxy::{MetadataKey, locality_text},
    },
    model::workload::{self, Workload, WorkloadKey, WorkloadSource},
};

/// Marks pods that play a virtual machine in tests; the registry's labels do not count for them.
const TEST_VM_LABEL: &str = "istio.io/test-vm";

/// The cluster of a proxy: its own, else that of the control plane.
pub(crate) fn cluster(ctx: &BuildContext, proxy: &Proxy) -> ClusterId {
    if proxy.cluster.is_empty() {
        ctx.mesh.installation.cluster.clone()
    } else {
        proxy.cluster.clone()
    }
}

/// True if the proxy's own labels are all that counts.
fn is_test_vm(proxy: &Proxy) -> bool {
    proxy
        .node_labels
        .get(TEST_VM_LABEL)
        .is_some_and(|label| !label.is_empty())
}

/// The proxy's pod, if that counts: named by the node id where that agrees with the metadata, else found by address if
/// that is asked for.
pub(crate) fn pod<'a>(ctx: &BuildContext<'a>, proxy: &Proxy) -> Option<&'a Shared<Pod>> {
    if is_test_vm(proxy) {
        return None;
    }
    let cluster = cluster(ctx, proxy);
    let named = match proxy.id.split_once('.') {
        Some((name, namespace)) if !namespace.contains('.') && proxy.setting(MetadataKey::Namespace) == namespace => {
            ctx.mesh.pods.get(ctx.cx, &ObjectKey::new(&cluster, namespace, name))
        }
        _ => None,
    };
    named.or_else(|| {
        let by_address = ctx.mesh.installation.features.enable_proxy_find_pod_by_ip;
        by_address.then(|| pod_by_address(ctx, proxy, cluster)).flatten()
    })
}

fn pod_by_address<'a>(ctx: &BuildContext<'a>, proxy: &Proxy, cluster: ClusterId) -> Option<&'a Shared<Pod>> {
    let address = proxy.addresses.first()?;
    let pods = ctx.mesh.pods_by_address.get(ctx.cx, &(cluster, address.clone()));
    let pods: Vec<_> = pods.map(|(_, pod)| pod).filter(|pod| pod.is_serving()).collect();
    match pods.as_slice() {
        [only] => Some(only),
        several => several
            .iter()
            .find(|pod| *pod.meta.namespace() == proxy.namespace)
            .copied(),
    }
}

/// The WorkloadEntry at the proxy's first address, if it is healthy; of several, that of its name, else one of its namespace, else the first.
pub(crate) fn entry<'a>(ctx: &BuildContext<'a>, proxy: &Proxy) -> Option<&'a Shared<Workload>> {
    let address = proxy.addresses.first()?;
    let rows = ctx.mesh.workloads_by_address.get(ctx.cx, address);
    let entries: Vec<_> = rows
        .filter(|(key, row)| key.source == WorkloadSource::WorkloadEntry && row.ready)
        .map(|(_, row)| row)
        .collect();
    let (name, namespace) = proxy.id.split_once('.').unwrap_or((&proxy.id, ""));
    let of_name = |row: &&&Shared<Workload>| row.key.object.name == name && row.key.object.namespace == *namespace;
    let of_namespace = |row: &&&Shared<Workload>| row.key.object.namespace == proxy.namespace;
    let chosen = entries.iter().find(of_name);
    chosen
        .or_else(|| entries.iter().find(of_namespace))
        .or(entries.first())
        .copied()
}

/// True if a registry object of this namespace may be meant for the proxy.
pub(crate) fn is_of_namespace(proxy: &Proxy, namespace: &Namespace) -> bool {
    let own = proxy.setting(MetadataKey::Namespace);
    own.is_empty() || *namespace == own.as_str()
}

/// The labels that selectors see: the registry's over `STATIC_LABELS` where the registry knows the workload, else
/// `LABELS` alone. `of_entry` are the labels of a ServiceEntry's endpoint at the proxy's address. And the locality, that
/// of the labels before that of the node.
pub(crate) fn labels_and_locality(
    ctx: &BuildContext,
    proxy: &Proxy,
    pod: Option<&Shared<Pod>>,
    of_entry: Option<Labels>,
) -> (Labels, SmolStr) {
    let of_entry = of_entry.filter(|_| !is_test_vm(proxy));
    let registered = pod.and_then(|pod| labels_of_pod(ctx, proxy, pod)).or(of_entry);
    let mut labels = match registered {
        Some(registered) if proxy.static_labels.is_empty() => registered,
        Some(registered) => {
            let mut labels = proxy.static_labels.clone();
            labels.extend(registered);
            labels
        }
        None => proxy.node_labels.clone(),
    };
    let locality = locality(&labels).unwrap_or_else(|| proxy.node_locality.clone());
    workload::augment(&mut labels, &proxy.cluster, &locality, &proxy.node_name, &proxy.network);
    (labels, locality)
}

fn labels_of_pod(ctx: &BuildContext, proxy: &Proxy, pod: &Pod) -> Option<Labels> {
    let key = WorkloadKey {
        source: WorkloadSource::Pod,
        object: pod.meta.key.clone(),
    };
    let row = ctx.mesh.workloads.get(ctx.cx, &key)?;
    let locality = &row.origin.locality;
    Some(workload::augmented(
        &row.labels,
        &row.origin.cluster,
        locality,
        &proxy.node_name,
        &row.origin.network,
    ))
}

/// The locality that topology labels tell, else the label that overrides it.
fn locality(labels: &Labels) -> Option<SmolStr> {
    let of = |key: &str| labels.get(key).map(SmolStr::as_str);
    let parts = [
        of("topology.kubernetes.io/region"),
        of("topology.kubernetes.io/zone"),
        of("topology.istio.io/subzone"),
    ];
    if parts.iter().all(Option::is_none) {
        return workload::locality_label(labels);
    }
    let [region, zone, subzone] = parts.map(Option::unwrap_or_default);
    Some(locality_text(region, zone, subzone))
}
