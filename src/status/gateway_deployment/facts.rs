//! Facts that decide about a Gateway's deployment besides its own fields, from the mesh and the revisions.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::known::Gateway;
use crate::{
    api::mesh_config,
    base::{Namespace, ObjectKey, SmolStr},
    environment,
    inject::{
        self,
        gateway::{GatewayClass, Port},
    },
    model::{
        gateway_api::{class::Controller, listener, status::Revisions},
        snapshot::MeshSnapshot,
    },
    status::NamespacedName,
    table::Cx,
    template::Host,
};

/// Annotation with the version of the controller that deploys a Gateway. Versions only rise, so that an older control
/// plane leaves the Gateways of a newer one alone.
///
/// Istio writes it by the subresource `status`, where API servers drop changes of annotations
/// (k8s.io/apiextensions-apiserver, status_strategy.go). So it is only read here.
const CONTROLLER_VERSION: &str = "gateway.istio.io/controller-version";
/// The version of this controller: that of Istio since 1.18.
const VERSION: i64 = 5;
/// The time limit for rendering one Gateway.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The facts that decide about a Gateway of this control plane besides its own fields.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Facts {
    /// The class.
    pub(super) class: GatewayClass,
    /// The namespace.
    pub(super) namespace: Arc<inject::Namespace>,
    /// Ports of admitted ListenerSets.
    pub(super) ports: Vec<Port>,
    /// True if the parameters of the class count: the discovery selectors select the control plane's namespace.
    ///
    /// Parity (pilot/pkg/config/kube/gatewaycommon/deploymentcontroller.go): they filter all ConfigMaps.
    pub(super) has_class_parameters: bool,
}

impl Facts {
    /// Returns the facts; `None` for a Gateway that this control plane, whose namespace is `own`, does not deploy.
    pub(super) fn of(
        mesh: &MeshSnapshot,
        key: &NamespacedName,
        gateway: &Gateway,
        revisions: &Revisions,
        own: &SmolStr,
    ) -> Option<Self> {
        let cx = Cx::untracked();
        let NamespacedName { namespace, name } = key;
        let cluster = &mesh.installation.cluster;
        let key = ObjectKey::new(cluster, Namespace::from(namespace.as_str()), name.clone());
        // The row is missing if the discovery filter hides the namespace.
        let row = mesh.kube_gateways.get(&cx, &key)?;
        let controller = Controller::of_deployments(&cx, mesh, &SmolStr::new(gateway.class()))?;
        let class = class(mesh, controller)?;
        if !revisions.is_own(&cx, mesh, &key, gateway.revision()) {
            return None;
        }
        let namespace_row = mesh
            .namespaces
            .get(&cx, &ObjectKey::new(cluster, "", namespace.clone()));
        let annotations = namespace_row.iter().flat_map(|row| row.meta.annotations.iter());
        let sets = mesh.listener_sets_by_gateway.get(&cx, &key);
        let admitted = sets.filter(|(set, _)| listener::admits(&cx, mesh, row, &set.namespace));
        let listeners = admitted.flat_map(|(_, set)| {
            set.spec
                .listeners
                .iter()
                .filter_map(|listener| {
                    Some(Port {
                        name: listener.name.to_string(),
                        number: listener::port(listener).ok()?,
                        protocol: listener.protocol.to_string(),
                    })
                })
                .collect::<Vec<_>>()
        });
        Some(Self {
            class,
            ports: listeners.collect(),
            has_class_parameters: is_discovered(&cx, mesh, own),
            namespace: Arc::new(inject::Namespace {
                name: namespace.to_string(),
                annotations: annotations
                    .map(|(key, value)| (key.to_string(), value.to_string()))
                    .collect(),
            }),
        })
    }
}

/// Returns true if the discovery selectors select a namespace of the config cluster.
fn is_discovered(cx: &Cx, mesh: &MeshSnapshot, namespace: &SmolStr) -> bool {
    let selectors = mesh_config::discovery_selectors(mesh.mesh_config(cx));
    if selectors.is_empty() {
        return true;
    }
    let key = ObjectKey::new(&mesh.installation.cluster, "", namespace.clone());
    let row = mesh.namespaces.get(cx, &key);
    row.is_some_and(|row| selectors.iter().any(|selector| selector.matches(&row.meta.labels)))
}

/// Returns the class of a controller; `None` for one without deployments.
///
/// Parity (pilot/pkg/config/kube/gatewaycommon/classinfo.go).
fn class(mesh: &MeshSnapshot, controller: Controller) -> Option<GatewayClass> {
    let (label, template, service_type) = match controller {
        Controller::Gateway => ("istio.io-gateway-controller", "kube-gateway", "LoadBalancer"),
        Controller::Waypoint => ("istio.io-mesh-controller", "waypoint", "ClusterIP"),
        Controller::EastWest => ("istio.io-eastwest-controller", "waypoint", "LoadBalancer"),
        Controller::Remote => return None,
    };
    Some(GatewayClass {
        controller: controller.name(mesh).to_string(),
        label,
        template,
        service_type,
        has_plain_names: controller.has_plain_names(),
        is_east_west: controller == Controller::EastWest,
    })
}

/// Returns false for a Gateway of a newer controller.
pub(super) fn is_ours(gateway: &Gateway) -> bool {
    let version = gateway.value["metadata"]["annotations"][CONTROLLER_VERSION].as_str();
    version.is_none_or(|version| version.parse::<i64>().is_ok_and(|version| version <= VERSION))
}

/// The access of a template to the world: variables of the process. Time and randomness would make each rendering
/// differ.
pub(super) struct TemplateHost {
    variables: Arc<BTreeMap<String, String>>,
    until: Instant,
}

impl TemplateHost {
    pub(super) fn new(variables: Arc<BTreeMap<String, String>>) -> Self {
        Self {
            variables,
            until: environment::now() + TIMEOUT,
        }
    }
}

impl Host for TemplateHost {
    fn is_expired(&self) -> bool {
        environment::now() > self.until
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::{Installation, fixture};

    #[test]
    fn class_parameters_are_of_a_discovered_namespace() {
        let objects = "apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {team: mesh}}
---
apiVersion: v1
kind: Namespace
metadata: {name: web, labels: {team: web}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge, namespace: web}
spec: {gatewayClassName: istio, listeners: [{name: http, port: 80, protocol: HTTP}]}
";
        let has_parameters = |mesh: &str| {
            let files = [("mesh.yaml", mesh), ("objects.yaml", objects)];
            let world = fixture::folder_world(Installation::default(), &files);
            let key = NamespacedName::new("web", "edge");
            let gateway = Gateway {
                value: Arc::new(json!({"spec": {"gatewayClassName": "istio"}})),
            };
            let own = SmolStr::new("istio-system");
            let facts = Facts::of(&world.snapshot(), &key, &gateway, &Revisions::default(), &own);
            facts.expect("the Gateway is deployed").has_class_parameters
        };
        assert!(has_parameters(""));
        assert!(has_parameters(
            "discoverySelectors: [{matchLabels: {team: web}}, {matchLabels: {team: mesh}}]"
        ));
        assert!(!has_parameters("discoverySelectors: [{matchLabels: {team: web}}]"));
    }

    #[test]
    fn newer_controllers_keep_their_gateways() {
        let gateway = |annotations| Gateway {
            value: Arc::new(json!({"metadata": {"annotations": annotations}})),
        };
        assert!(is_ours(&gateway(json!({}))));
        for (version, is_expected) in [("1", true), ("5", true), ("6", false), ("x", false)] {
            assert_eq!(
                is_ours(&gateway(json!({CONTROLLER_VERSION: version}))),
                is_expected,
                "{version}"
            );
        }
    }
}
