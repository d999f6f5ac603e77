//! Injection of pods on their creation: a request of an API server and the mesh in, a verdict with a JSON patch out.

use std::sync::Arc;

use smol_str::SmolStr;

use super::review::{Request, Verdict};
use crate::{
    base::ObjectKey,
    inject::{Environment, Injector, Mesh, Namespace, Outcome, kubelet_minor, proxy_variables},
    model::snapshot::MeshSnapshot,
    table::Cx,
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

/// Injects the pod of a request. `path` is the path of the request's URL, which may set variables of the proxy.
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
    let environment = Environment {
        namespace: Arc::new(self::namespace(mesh, namespace)),
        proxy_variables: proxy_variables(path),
        ..environment
    };
    match injector.inject(&request.object, &environment) {
        Ok(Outcome::Skipped(reason)) => (Verdict::default(), Injection::Skipped(reason.to_string())),
        Ok(Outcome::Patch(patch)) => (Verdict::patched(patch.to_bytes()), Injection::Injected),
        Err(error) => (Verdict::refused(error.to_string()), Injection::Failed),
    }
}

fn namespace(mesh: &MeshSnapshot, name: &str) -> Namespace {
    let key = ObjectKey::new(&mesh.installation.cluster, "", name);
    let row = mesh.namespaces.get(&Cx::untracked(), &key);
    let text = |text: &SmolStr| text.to_string();
    let annotations = row.iter().flat_map(|row| row.meta.annotations.iter());
    Namespace {
        name: name.to_owned(),
        annotations: annotations.map(|(key, value)| (text(key), text(value))).collect(),
    }
}

/// Updates the part of an environment that follows from the mesh. Preparing an equal mesh config is skipped.
pub fn follow_mesh(environment: &mut Environment, mesh: &MeshSnapshot) {
    let cx = Cx::untracked();
    let config = mesh.mesh_config(&cx);
    if environment.mesh.config() != config {
        environment.mesh = Arc::new(Mesh::new(config.clone()));
    }
    let cluster = &mesh.installation.cluster;
    let nodes = mesh.nodes.iter(&cx).filter(|(key, _)| key.cluster == *cluster);
    let versions = nodes.filter_map(|(key, node)| Some((key.name.to_string(), kubelet_minor(&node.kubelet_version)?)));
    environment.kubelets = Arc::new(versions.collect());
    let mut configs: Vec<_> = mesh.proxy_configs.iter(&cx).map(|(_, config)| config).collect();
    configs.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
    let configs = configs.into_iter();
    environment.proxy_configs = configs
        .map(|config| (config.meta.key.namespace.to_string(), config.spec.clone()))
        .collect();
}
