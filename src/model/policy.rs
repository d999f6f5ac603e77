//! Policy attachment: AuthorizationPolicies, RequestAuthentications, Telemetries, Wasm plugins, traffic extensions and
//! EnvoyFilters of a workload.
//!
//! Note: a Gateway API gateway uses selectors and `targetRefs`, a waypoint only `targetRefs`, all other workloads only
//! selectors. PeerAuthentication has no references and is not attached by these rules.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    selector::Selects,
    service::{Registry, Service},
};
use crate::{
    api::{Config, Meta},
    base::{Labels, Namespace, ObjectKey, select},
    proto::istio::{
        extensions::v1alpha1 as extensions, networking::v1alpha3 as networking, security::v1beta1 as security,
        telemetry::v1alpha1 as telemetry, r#type::v1beta1::PolicyTargetReference,
    },
    table::{Cx, Index},
};

/// Label of workloads of a Gateway API Gateway, with the Gateway's name.
pub const GATEWAY_NAME_LABEL: &str = "gateway.networking.k8s.io/gateway-name";

/// The GatewayClass of waypoints.
const WAYPOINT_CLASS: &str = "istio-waypoint";

/// Returns the root namespace: `rootNamespace`, or else the control plane's own.
pub fn root_namespace(cx: &Cx, mesh: &MeshSnapshot) -> Namespace {
    match mesh.mesh_config(cx).root_namespace.as_str() {
        "" => mesh.installation.namespace.clone(),
        root => Namespace::new(root),
    }
}

/// Subject of policies: a workload, and for waypoints the services it serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// The namespace of the workload.
    pub namespace: Namespace,
    /// The labels of the workload.
    pub labels: Labels,
    /// True if it is a waypoint.
    pub is_waypoint: bool,
    /// Services of a listener or chain; used for waypoints only.
    pub services: Vec<TargetService>,
}

/// A service that a policy may refer to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetService {
    /// Kubernetes: `kind: Service`; External: `kind: ServiceEntry`.
    pub registry: Registry,
    /// The namespace of the object.
    pub namespace: Namespace,
    /// The name of the object.
    pub name: SmolStr,
}

impl Subject {
    /// Returns the subject of a workload that is not a waypoint.
    pub fn workload(namespace: Namespace, labels: Labels) -> Self {
        Self {
            namespace,
            labels,
            is_waypoint: false,
            services: Vec::new(),
        }
    }

    /// Adds a service.
    pub fn with_service(mut self, service: TargetService) -> Self {
        self.services.push(service);
        self
    }
}

impl TargetService {
    /// Returns the object of a service.
    pub fn of(service: &Service) -> Self {
        Self {
            registry: service.registry,
            namespace: service.key.namespace.clone(),
            name: service.name.clone(),
        }
    }

    fn kind(&self) -> TargetKind {
        match self.registry {
            Registry::Kubernetes => TargetKind::Service,
            Registry::External => TargetKind::ServiceEntry,
        }
    }
}

/// A kind of policy that attaches to workloads.
pub trait Attach: Selects + Sized {
    /// True if policies of the workload's own namespace precede those of the root namespace.
    const OWN_FIRST: bool;
    /// Returns `targetRefs`, or else the deprecated `targetRef`.
    fn target_refs(&self) -> &[PolicyTargetReference];
    /// Returns the policies by namespace.
    fn by_namespace(mesh: &MeshSnapshot) -> &Index<Namespace, ObjectKey, Config<Self>>;
    /// Returns the policies by the objects that they refer to.
    fn by_target(mesh: &MeshSnapshot) -> &Index<PolicyTarget, ObjectKey, Config<Self>>;
}

/// An object that policies of a namespace refer to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyTarget {
    /// The namespace of the policies.
    pub namespace: Namespace,
    /// The kind of the object.
    pub kind: TargetKind,
    /// The name of the object.
    pub name: SmolStr,
}

/// A kind that policies may refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TargetKind {
    /// A Service.
    Service,
    /// A ServiceEntry.
    ServiceEntry,
    /// A Gateway.
    Gateway,
    /// A GatewayClass.
    GatewayClass,
}

impl TargetKind {
    /// Returns the kind of a reference; `None` for others.
    fn of(target: &PolicyTargetReference) -> Option<Self> {
        match (target.group.as_str(), target.kind.as_str()) {
            // The core group may be written out.
            ("" | "core", "Service") => Some(Self::Service),
            ("networking.istio.io", "ServiceEntry") => Some(Self::ServiceEntry),
            ("gateway.networking.k8s.io", "Gateway") => Some(Self::Gateway),
            ("gateway.networking.k8s.io", "GatewayClass") => Some(Self::GatewayClass),
            _ => None,
        }
    }
}

/// Emits the index keys of a policy: the objects that it refers to.
pub fn targets<T: Attach>(key: &ObjectKey, policy: &Config<T>, emit: &mut dyn FnMut(PolicyTarget)) {
    let references = policy.spec.target_refs().iter();
    let targets: BTreeSet<PolicyTarget> = references
        .filter_map(|target| {
            Some(PolicyTarget {
                namespace: key.namespace.clone(),
                kind: TargetKind::of(target)?,
                name: SmolStr::new(&target.name),
            })
        })
        .collect();
    targets.into_iter().for_each(emit);
}

macro_rules! attach {
    ($($kind:ty, $own_first:literal, $by_namespace:ident, $by_target:ident $(, $single:ident)?;)*) => { $(
        impl Attach for $kind {
            const OWN_FIRST: bool = $own_first;
            fn by_namespace(mesh: &MeshSnapshot) -> &Index<Namespace, ObjectKey, Config<Self>> {
                &mesh.$by_namespace
            }
            fn by_target(mesh: &MeshSnapshot) -> &Index<PolicyTarget, ObjectKey, Config<Self>> {
                &mesh.$by_target
            }
            fn target_refs(&self) -> &[PolicyTargetReference] {
                $(if self.target_refs.is_empty() {
                    return self.$single.as_slice();
                })?
                &self.target_refs
            }
        }
    )* };
}

attach! {
    security::AuthorizationPolicy, false,
        authorization_policies_by_namespace, authorization_policies_by_target, target_ref;
    security::RequestAuthentication, true,
        request_authentications_by_namespace, request_authentications_by_target, target_ref;
    telemetry::Telemetry, false, telemetries_by_namespace, telemetries_by_target, target_ref;
    extensions::WasmPlugin, true, wasm_plugins_by_namespace, wasm_plugins_by_target, target_ref;
    extensions::TrafficExtension, true, traffic_extensions_by_namespace, traffic_extensions_by_target;
    networking::EnvoyFilter, false, envoy_filters_by_namespace, envoy_filters_by_target;
}

/// Returns the policies of a kind that apply to the subject: those of the root and of its own namespace (in the order
/// of [`Attach::OWN_FIRST`]), then those of the services' namespaces; oldest first within each. For a waypoint, only
/// policies that refer to it or to one of its services are looked at.
pub fn attached<T: Attach + Send + Sync + 'static>(cx: &Cx, mesh: &MeshSnapshot, subject: &Subject) -> Vec<ObjectKey> {
    let root = root_namespace(cx, mesh);
    let selector_on_gateways = mesh.installation.features.enable_selector_based_k8s_gateway_policy;
    let mut keys = Vec::new();
    for namespace in namespaces::<T>(&root, subject) {
        let mut rows: Vec<_> = match subject.labels.get(GATEWAY_NAME_LABEL) {
            Some(gateway) if subject.is_waypoint => {
                let targets = waypoint_targets(namespace, subject, &root, gateway);
                let rows = targets.flat_map(|target| T::by_target(mesh).get(cx, &target));
                rows.collect::<BTreeMap<_, _>>().into_values().collect()
            }
            _ => T::by_namespace(mesh).get(cx, namespace).map(|(_, row)| row).collect(),
        };
        rows.sort_by_key(|row| row.meta.age_order());
        let matching = rows
            .into_iter()
            .filter(|row| concerns(&row.meta, &row.spec, subject, &root, selector_on_gateways));
        keys.extend(matching.map(|row| row.meta.key.clone()));
    }
    keys
}

/// Returns the objects that policies of a namespace refer to if they apply to a waypoint.
fn waypoint_targets<'a>(
    namespace: &'a Namespace,
    subject: &'a Subject,
    root: &'a Namespace,
    gateway: &'a SmolStr,
) -> impl Iterator<Item = PolicyTarget> + use<'a> {
    let target = |kind, name| PolicyTarget {
        namespace: namespace.clone(),
        kind,
        name,
    };
    let services = subject
        .services
        .iter()
        .filter(|service| service.namespace == *namespace);
    let services = services.map(move |service| target(service.kind(), service.name.clone()));
    let own = (subject.namespace == *namespace).then(|| target(TargetKind::Gateway, gateway.clone()));
    let class = (root == namespace).then(|| target(TargetKind::GatewayClass, SmolStr::new_static(WAYPOINT_CLASS)));
    services.chain(own).chain(class)
}

/// Returns the namespaces whose policies of a kind may apply to the subject, without duplicates.
fn namespaces<'a, T: Attach>(root: &'a Namespace, subject: &'a Subject) -> Vec<&'a Namespace> {
    let first = if T::OWN_FIRST {
        [&subject.namespace, root]
    } else {
        [root, &subject.namespace]
    };
    let services = subject.services.iter().map(|service| &service.namespace);
    let mut namespaces: Vec<&Namespace> = Vec::new();
    for namespace in first.into_iter().chain(services) {
        if !namespaces.contains(&namespace) {
            namespaces.push(namespace);
        }
    }
    namespaces
}

fn concerns(
    meta: &Meta,
    policy: &impl Attach,
    subject: &Subject,
    root: &Namespace,
    selector_on_gateways: bool,
) -> bool {
    let targets = policy.target_refs();
    match subject.labels.get(GATEWAY_NAME_LABEL) {
        None => targets.is_empty() && selected(policy, &subject.labels),
        Some(_) if targets.is_empty() => {
            !subject.is_waypoint && selector_on_gateways && selected(policy, &subject.labels)
        }
        Some(gateway) => targets
            .iter()
            .any(|target| refers(meta.namespace(), target, subject, root, gateway)),
    }
}

/// Returns true if the policy's selector, if any, matches the labels.
pub fn selected(policy: &impl Attach, labels: &Labels) -> bool {
    policy.selector().is_none_or(|selector| {
        let pairs = selector.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        select::matches(pairs, labels)
    })
}

/// Returns true if a reference in a policy of `namespace` refers to the subject.
fn refers(
    namespace: &Namespace,
    target: &PolicyTargetReference,
    subject: &Subject,
    root: &Namespace,
    gateway: &str,
) -> bool {
    let serves = |registry: Registry| {
        let is_target = |service: &TargetService| {
            service.registry == registry && service.name == target.name && service.namespace == *namespace
        };
        subject.is_waypoint && subject.services.iter().any(is_target)
    };
    match TargetKind::of(target) {
        Some(TargetKind::Service) => serves(Registry::Kubernetes),
        Some(TargetKind::ServiceEntry) => serves(Registry::External),
        Some(TargetKind::GatewayClass) => subject.is_waypoint && namespace == root && target.name == WAYPOINT_CLASS,
        Some(TargetKind::Gateway) => {
            let same = target.namespace.is_empty() || subject.namespace == target.namespace.as_str();
            subject.namespace == *namespace && same && target.name == gateway
        }
        None => false,
    }
}

#[cfg(test)]
mod tests;
