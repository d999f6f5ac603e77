//! The objects of a mesh, indexed for analyzers.

use std::{collections::BTreeMap, ops::Range};

use serde_json::{Value, json};

use super::object::{Object, Type};
use crate::{
    api::Kind,
    base::{Labels, SmolStr, select},
};

/// Input of analyzers besides objects.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The mesh config with its defaults, as JSON.
    pub config: Value,
    /// The mesh networks, as JSON.
    pub networks: Value,
    /// The namespace of the control plane.
    pub istio_namespace: String,
    /// True if Gateways select pods of their own namespace alone (`PILOT_SCOPE_GATEWAY_TO_NAMESPACE`).
    pub scopes_gateways: bool,
    /// The time in seconds since 1970, for the validity of certificates.
    pub now: i64,
}

/// The objects of a mesh.
pub struct Mesh {
    /// The settings.
    pub(super) settings: Settings,
    /// Objects in the order of namespace, name and cluster.
    objects: BTreeMap<Type, Vec<Object>>,
    /// Positions of pods by a label and its value.
    pods: BTreeMap<(SmolStr, SmolStr), Vec<usize>>,
}

impl Mesh {
    /// Indexes objects. Of several with one name, the last one counts.
    pub fn new(objects: impl IntoIterator<Item = Object>, settings: Settings) -> Self {
        let mut unique = BTreeMap::new();
        for object in objects {
            let key = (
                object.kind,
                object.namespace.clone(),
                object.name.clone(),
                object.cluster.clone(),
            );
            unique.insert(key, object);
        }
        let mut objects: BTreeMap<Type, Vec<Object>> = BTreeMap::new();
        for object in unique.into_values() {
            objects.entry(object.kind).or_default().push(object);
        }
        let mut pods: BTreeMap<(SmolStr, SmolStr), Vec<usize>> = BTreeMap::new();
        for (position, pod) in objects.get(&Kind::Pod.into()).into_iter().flatten().enumerate() {
            for (key, value) in &pod.labels {
                pods.entry((key.clone(), value.clone())).or_default().push(position);
            }
        }
        Self {
            settings,
            objects,
            pods,
        }
    }

    /// Returns the objects of a kind.
    pub(super) fn of(&self, kind: impl Into<Type>) -> &[Object] {
        self.objects.get(&kind.into()).map_or(&[], Vec::as_slice)
    }

    /// Returns the objects of a kind in a namespace.
    pub(super) fn within(&self, kind: impl Into<Type>, namespace: &str) -> &[Object] {
        let all = self.of(kind);
        &all[range(all, namespace)]
    }

    /// Returns an object by its name.
    pub(super) fn find(&self, kind: impl Into<Type>, namespace: &str, name: &str) -> Option<&Object> {
        let all = self.within(kind, namespace);
        let at = all.partition_point(|object| object.name.as_str() < name);
        all.get(at).filter(|object| object.name == name)
    }

    /// Returns the pods with these labels, in one namespace or in all. An empty selector selects all of them.
    pub(super) fn pods<'a>(
        &'a self,
        namespace: Option<&str>,
        selector: &'a Labels,
    ) -> impl Iterator<Item = &'a Object> + use<'a> {
        let all = self.of(Kind::Pod);
        let range = namespace.map_or(0..all.len(), |namespace| range(all, namespace));
        let lists = selector
            .iter()
            .map(|(key, value)| self.pods.get(&(key.clone(), value.clone())));
        let shortest: Option<&[usize]> = lists
            .map(|positions| positions.map_or(&[][..], Vec::as_slice))
            .min_by_key(|positions| positions.len());
        let listed = shortest.into_iter().flatten().copied().filter({
            let range = range.clone();
            move |position| range.contains(position)
        });
        let unlisted = if shortest.is_none() { range } else { 0..0 };
        listed
            .chain(unlisted)
            .filter_map(|position| all.get(position))
            .filter(|pod| select::subset(selector, &pod.labels))
    }

    /// Returns the root namespace of the mesh config.
    pub(super) fn root_namespace(&self) -> &str {
        self.settings.config["rootNamespace"].as_str().unwrap_or("istio-system")
    }
}

fn range(all: &[Object], namespace: &str) -> Range<usize> {
    let start = all.partition_point(|object| object.namespace.as_str() < namespace);
    let length = all[start..].partition_point(|object| object.namespace == namespace);
    start..start + length
}

/// Returns the objects of a default installation that files lack: the Service and a pod of the ingress gateway.
///
/// Parity (pkg/config/analysis/local/defaults.go).
pub(super) fn default_manifests(istio_namespace: &str, ingress_service: &str) -> [(Type, Value); 2] {
    let port = |name: &str, port: u16, node_port: u16| json!({"name": name, "port": port, "targetPort": port, "nodePort": node_port, "protocol": "TCP"});
    let labels = json!({"istio": "ingressgateway"});
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("{ingress_service}-dummypod"), "namespace": istio_namespace, "labels": labels.clone(),
        },
        "spec": {"containers": [{"name": "istio-proxy"}]},
    });
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": ingress_service, "namespace": istio_namespace},
        "spec": {
            "selector": labels,
            "ports": [
                port("http2", 80, 31380),
                port("https", 443, 31390),
                port("tcp", 31400, 31400),
                port("tls", 15443, 31447),
            ],
        },
    });
    [(Kind::Pod.into(), pod), (Kind::Service.into(), service)]
}

/// Returns the objects of a default installation; none without an ingress controller.
pub fn default_objects(settings: &Settings) -> Vec<Object> {
    if settings.config["ingressControllerMode"] == "OFF" {
        return Vec::new();
    }
    let service = settings.config["ingressService"]
        .as_str()
        .unwrap_or("istio-ingressgateway");
    default_manifests(&settings.istio_namespace, service)
        .into_iter()
        .filter_map(|(kind, manifest)| Object::of(kind, manifest, &settings.istio_namespace))
        .collect()
}
