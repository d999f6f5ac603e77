//! A proxy's workload in the registry: its pod or WorkloadEntry, labels and locality.

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

/// The label of pods that act as virtual machines in tests. Labels of the registry are ignored for them.
const TEST_VM_LABEL: &str = "istio.io/test-vm";

/// Returns the cluster of a proxy, or else that of the control plane.
pub(crate) fn cluster(ctx: &BuildContext, proxy: &Proxy) -> ClusterId {
    if proxy.node.cluster.is_empty() {
        ctx.mesh.installation.cluster.clone()
    } else {
        proxy.node.cluster.clone()
    }
}

/// Returns true if only the proxy's own labels count.
fn is_test_vm(proxy: &Proxy) -> bool {
    proxy
        .node_labels
        .get(TEST_VM_LABEL)
        .is_some_and(|label| !label.is_empty())
}

/// Returns the proxy's pod, unless only its own labels count: by the node id if it agrees with the metadata, or else by
/// address if that is enabled.
pub(crate) fn pod<'a>(ctx: &BuildContext<'a>, proxy: &Proxy) -> Option<&'a Shared<Pod>> {
    if is_test_vm(proxy) {
        return None;
    }
    let cluster = cluster(ctx, proxy);
    let named = match proxy.id.split_once('.') {
        Some((name, namespace))
            if !namespace.contains('.') && proxy.node.metadata_value(MetadataKey::Namespace) == namespace =>
        {
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
            .find(|pod| *pod.meta.namespace() == proxy.node.namespace)
            .copied(),
    }
}

/// Returns the WorkloadEntry at the proxy's first address, if it is healthy and Services select WorkloadEntries. Those
/// of other clusters count only without one in the proxy's cluster and without a pod. Of several, the one with the
/// proxy's name counts, or else one of its namespace, or else the first.
///
/// Parity (pilot/pkg/serviceregistry/kube/controller/multicluster.go, `initializeCluster`): a registry of Kubernetes
/// knows the WorkloadEntries of its cluster. Pods of other clusters may have the addresses of these machines.
pub(crate) fn entry<'a>(
    ctx: &BuildContext<'a>,
    proxy: &Proxy,
    pod: Option<&Shared<Pod>>,
) -> Option<&'a Shared<Workload>> {
    if !ctx.mesh.installation.features.pilot_enable_k8s_select_workload_entries {
        return None;
    }
    let address = proxy.addresses.first()?;
    let rows = ctx.mesh.workloads_by_address.get(ctx.cx, address);
    let cluster = cluster(ctx, proxy);
    let (own, others): (Vec<_>, Vec<_>) = rows
        .filter(|(key, row)| key.source == WorkloadSource::WorkloadEntry && row.ready)
        .map(|(_, row)| row)
        .partition(|row| row.key.object.cluster == cluster);
    let entries = if own.is_empty() && pod.is_none() { others } else { own };
    let named = proxy
        .id
        .split_once('.')
        .filter(|(_, namespace)| proxy.node.namespace == *namespace);
    let of_namespace = |row: &&&Shared<Workload>| row.key.object.namespace == proxy.node.namespace;
    let of_name =
        |row: &&&Shared<Workload>| of_namespace(row) && named.is_some_and(|(name, _)| row.key.object.name == name);
    let chosen = entries.iter().find(of_name);
    chosen
        .or_else(|| entries.iter().find(of_namespace))
        .or(entries.first())
        .copied()
}

/// Returns true if a registry object of this namespace may apply to the proxy.
pub(super) fn is_of_namespace(proxy: &Proxy, namespace: &Namespace) -> bool {
    let own = proxy.node.metadata_value(MetadataKey::Namespace);
    own.is_empty() || *namespace == own.as_str()
}

/// Returns the labels for selectors: those of the registry over `STATIC_LABELS` if the registry has the workload, or
/// else `LABELS` alone. `of_entry` are the labels of a ServiceEntry's endpoint at the proxy's address; they count for
/// proxies of the config cluster and those without a cluster. Also returns the locality; that of the labels takes
/// precedence over that of the node.
///
/// Parity (pilot/pkg/serviceregistry/aggregate/controller.go, `GetProxyWorkloadLabels`): ServiceEntries are a registry
/// of the config cluster. The services of a proxy, in contrast, are those of ServiceEntries in any case.
pub(super) fn labels_and_locality(
    ctx: &BuildContext,
    proxy: &Proxy,
    pod: Option<&Shared<Pod>>,
    of_entry: Option<Labels>,
) -> (Labels, SmolStr) {
    let counts = proxy.node.cluster.is_empty() || proxy.node.cluster == ctx.mesh.installation.cluster;
    let of_entry = of_entry.filter(|_| counts && !is_test_vm(proxy));
    let registered = pod.and_then(|pod| labels_of_pod(ctx, proxy, pod)).or(of_entry);
    let mut labels = match registered {
        Some(registered) if proxy.static_labels.is_empty() => registered,
        Some(registered) => {
            let mut labels = Labels::clone(&proxy.static_labels);
            labels.extend(registered);
            labels
        }
        None => Labels::clone(&proxy.node_labels),
    };
    let locality = locality(&labels).unwrap_or_else(|| proxy.node_locality.clone());
    workload::augment(
        &mut labels,
        &proxy.node.cluster,
        &locality,
        &proxy.node_name,
        &proxy.node.network,
    );
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

/// Returns the locality of the topology labels, or else of the label that overrides it.
///
/// Parity (pilot/pkg/xds/ads.go, `localityFromProxyLabels`): `.` stands for `/` only in labels of the registry, which
/// also derives topology labels from them.
fn locality(labels: &Labels) -> Option<SmolStr> {
    let label = |key: &str| labels.get(key).map(SmolStr::as_str);
    let parts = [
        label("topology.kubernetes.io/region"),
        label("topology.kubernetes.io/zone"),
        label("topology.istio.io/subzone"),
    ];
    if parts.iter().all(Option::is_none) {
        return workload::locality_label(labels).cloned();
    }
    let [region, zone, subzone] = parts.map(Option::unwrap_or_default);
    Some(locality_text(region, zone, subzone))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_separate_the_locality_of_an_unregistered_proxy() {
        let of = |label: &str| locality(&Labels::from_iter([("istio-locality".into(), label.into())]));
        assert_eq!(of("r/z/s").as_deref(), Some("r/z/s"));
        assert_eq!(of("r.z.s").as_deref(), Some("r.z.s"));
        assert_eq!(of(""), None);
    }
}
