//! Injection of pods on their creation: a request of an API server and the mesh in, a verdict with a JSON patch out.

use std::{collections::BTreeMap, sync::Arc};

use smol_str::SmolStr;

use super::review::{Request, Verdict};
use crate::{
    base::{ClusterId, ObjectKey},
    inject::{
        CLUSTER_VARIABLE, Environment, Injector, Kubelets, Mesh, Namespace, NativeSidecars, Outcome, kubelet_minor,
        proxy_variables,
    },
    model::snapshot::MeshSnapshot,
    table::{Cx, Key, Table},
};

/// The outcome for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Injection {
    /// The pod is injected.
    Injected,
    /// The pod is not injected, for this reason.
    Skipped(String),
    /// The pod cannot be injected.
    Failed,
}

/// Injects the pod of a request. `path` is the path of the request's URL, which may set variables of the proxy and so
/// its cluster.
pub fn inject(
    injector: &Injector,
    environment: Environment,
    mesh: &MeshSnapshot,
    path: &str,
    request: &Request,
) -> (Verdict, Injection) {
    let namespace = match request.object["metadata"]["namespace"].as_str() {
        Some(namespace) if !namespace.is_empty() => namespace,
        _ => request.namespace.as_str(),
    };
    let proxy_variables = proxy_variables(path);
    let cluster = cluster(injector, &environment, mesh, &proxy_variables);
    let kubelets = environment.clusters.get(&cluster).cloned();
    let environment = Environment {
        namespace: Arc::new(self::namespace(mesh, &cluster, namespace)),
        // Parity (pkg/kube/inject/webhook.go, DetectNativeSidecar): the nodes of an unknown cluster may be too old.
        native_sidecars: match environment.native_sidecars {
            NativeSidecars::ByNodeVersion if kubelets.is_none() => NativeSidecars::Disabled,
            mode => mode,
        },
        kubelets: kubelets.unwrap_or_default(),
        proxy_variables,
        ..environment
    };
    match injector.inject(&request.object, &environment) {
        Ok(Outcome::Skipped(reason)) => (Verdict::default(), Injection::Skipped(reason.to_string())),
        Ok(Outcome::Patch(patch)) => (Verdict::patched(patch.to_bytes()), Injection::Injected),
        Err(error) => (Verdict::refused(error.to_string()), Injection::Failed),
    }
}

/// Returns the cluster of a pod: of the path, or of the values if it is known, or the config cluster.
///
/// Parity (pkg/kube/inject/inject.go, extractClusterAndNetwork): but an unknown cluster in the values does not count.
/// Requests without a cluster in their path then come from the config cluster, under another name.
fn cluster(
    injector: &Injector,
    environment: &Environment,
    mesh: &MeshSnapshot,
    proxy_variables: &BTreeMap<String, String>,
) -> ClusterId {
    if let Some(cluster) = proxy_variables
        .get(CLUSTER_VARIABLE)
        .filter(|cluster| !cluster.is_empty())
    {
        return ClusterId::new(cluster);
    }
    let cluster = ClusterId::new(injector.cluster());
    if environment.clusters.contains_key(&cluster) {
        cluster
    } else {
        mesh.installation.cluster.clone()
    }
}

fn namespace(mesh: &MeshSnapshot, cluster: &ClusterId, name: &str) -> Namespace {
    let key = ObjectKey::new(cluster, "", name);
    let row = mesh.namespaces.get(&Cx::untracked(), &key);
    let text = |text: &SmolStr| text.to_string();
    let annotations = row.iter().flat_map(|row| row.meta.annotations.iter());
    Namespace {
        name: name.to_owned(),
        annotations: annotations.map(|(key, value)| (text(key), text(value))).collect(),
    }
}

/// Updates the part of an environment that follows from the mesh. `last` is the mesh that it followed before. Returns
/// true if something has changed.
pub fn follow_mesh(environment: &mut Environment, mesh: &MeshSnapshot, last: Option<&MeshSnapshot>) -> bool {
    let cx = Cx::untracked();
    let config = mesh.mesh_config(&cx);
    let has_new_config = environment.mesh.config() != config;
    if has_new_config {
        environment.mesh = Arc::new(Mesh::new(config.clone()));
    }
    // A mesh of many clusters has thousands of nodes and namespaces, and nearly all of its changes are others.
    let has_new_clusters =
        last.is_none_or(|last| differs(&mesh.nodes, &last.nodes) || differs(&mesh.namespaces, &last.namespaces));
    if has_new_clusters {
        let clusters = kubelets(mesh).into_iter();
        let clusters = clusters.map(|(cluster, kubelets)| (cluster, Arc::new(kubelets)));
        environment.clusters = Arc::new(clusters.collect());
    }
    let has_new_proxy_configs = last.is_none_or(|last| differs(&mesh.proxy_configs, &last.proxy_configs));
    if has_new_proxy_configs {
        let mut configs: Vec<_> = mesh.proxy_configs.iter(&cx).map(|(_, config)| config).collect();
        configs.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
        let configs = configs.into_iter();
        environment.proxy_configs = configs
            .map(|config| (config.meta.key.namespace.to_string(), config.spec.clone()))
            .collect();
    }
    has_new_config || has_new_clusters || has_new_proxy_configs
}

/// Returns true if a table differs from an earlier one. What both share is not compared.
fn differs<K: Key, V: PartialEq>(now: &Table<K, V>, earlier: &Table<K, V>) -> bool {
    now.differences(earlier).next().is_some()
}

/// Returns the kubelets of all known clusters.
fn kubelets(mesh: &MeshSnapshot) -> BTreeMap<ClusterId, Kubelets> {
    let cx = Cx::untracked();
    let mut clusters = BTreeMap::from([(mesh.installation.cluster.clone(), Kubelets::new())]);
    // A cluster is known by its namespaces, because it may have no nodes.
    for key in mesh.namespaces.keys(&cx) {
        clusters.entry(key.cluster.clone()).or_default();
    }
    for (key, node) in mesh.nodes.iter(&cx) {
        let kubelets = clusters.entry(key.cluster.clone()).or_default();
        kubelets.insert(key.name.to_string(), kubelet_minor(&node.kubelet_version));
    }
    clusters
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        inject::Platform,
        model::{Installation, fixture},
    };

    const CONFIG: &str = "
policy: enabled
templates:
  sidecar: |
    spec:
      containers:
      - name: istio-proxy
        image: native={{ .NativeSidecars }},user={{ .ProxyUID }}
";

    /// Returns what the template writes for a pod, with nodes and namespaces of two clusters.
    fn injected(path: &str, values: &str) -> String {
        let objects = |kubelet: &str, users: &str| {
            format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: node}}\n\
                 status: {{nodeInfo: {{kubeletVersion: {kubelet}}}}}\n---\n\
                 apiVersion: v1\nkind: Namespace\n\
                 metadata: {{name: a, annotations: {{openshift.io/sa.scc.uid-range: {users}}}}}\n---\n\
                 apiVersion: v1\nkind: Namespace\nmetadata: {{name: b}}\n"
            )
        };
        let files = [
            ("kube.yaml", objects("v1.34.1", "1000/10")),
            ("kube-west.yaml", objects("v1.32.0", "2000/10")),
            (
                "kube-empty.yaml",
                "apiVersion: v1\nkind: Namespace\nmetadata: {name: b}\n".to_owned(),
            ),
        ];
        let files = files.each_ref().map(|(name, text)| (*name, text.as_str()));
        let mesh = fixture::folder_world(Installation::default(), &files).snapshot();
        let mut environment = Environment {
            platform: Platform::OpenShift,
            ..Environment::default()
        };
        follow_mesh(&mut environment, &mesh, None);
        let request = Request {
            namespace: "a".to_owned(),
            object: json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "web"}]}}),
            ..Request::default()
        };
        let injector = Injector::parse(CONFIG, values).expect("the configuration is valid");
        let (verdict, outcome) = inject(&injector, environment, &mesh, path, &request);
        assert_eq!(outcome, Injection::Injected, "{verdict:?}");
        let patch: Value = serde_json::from_slice(&verdict.patch.unwrap_or_default()).expect("a JSON patch");
        let operations = patch.as_array().into_iter().flatten();
        let mut images = operations.filter_map(|operation| operation["value"]["image"].as_str());
        images.next().unwrap_or_default().to_owned()
    }

    #[test]
    fn nodes_are_read_again_only_after_a_change() {
        let node = "apiVersion: v1\nkind: Node\nmetadata: {name: node}\n\
                    status: {nodeInfo: {kubeletVersion: v1.34.1}}\n";
        let service = "---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\n\
                       spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}\n";
        let mesh = |text: &str| fixture::folder_world(Installation::default(), &[("kube.yaml", text)]).snapshot();
        let (first, second) = (mesh(node), mesh(&format!("{node}{service}")));
        let mut environment = Environment::default();
        assert!(follow_mesh(&mut environment, &first, None));
        let clusters = environment.clusters.clone();
        assert!(!follow_mesh(&mut environment, &second, Some(&*first)));
        assert!(Arc::ptr_eq(&environment.clusters, &clusters));
        let upgraded = mesh(&node.replace("34", "35"));
        assert!(follow_mesh(&mut environment, &upgraded, Some(&*second)));
        assert_ne!(environment.clusters, clusters);
    }

    #[test]
    fn nodes_and_namespace_are_those_of_the_pods_cluster() {
        let values = |cluster: &str| format!("global: {{multiCluster: {{clusterName: {cluster}}}}}");
        let (config_cluster, west) = ("native=true,user=1009", "native=false,user=2009");
        for (path, values, expected) in [
            ("/inject", String::new(), config_cluster),
            ("/inject", values("Kubernetes"), config_cluster),
            ("/inject", values("other-name"), config_cluster),
            ("/inject", values("west"), west),
            ("/inject/cluster/west/net/n1", values("Kubernetes"), west),
            ("/inject/cluster/Kubernetes", values("west"), config_cluster),
            ("/inject/cluster/empty", String::new(), "native=true,user=1337"),
            ("/inject/cluster/unknown", String::new(), "native=false,user=1337"),
        ] {
            assert_eq!(injected(path, &values), expected, "{path} {values}");
        }
    }
}
