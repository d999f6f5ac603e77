//! Waypoints: the Gateways that requests to services go through where workloads have no sidecars, and which services go
//! through which.
//!
//! What one would get wrong: a service that names a waypoint which is not there goes through none, not through that of
//! its namespace; and a Gateway is a waypoint only once its status says where it is to be reached.

#[cfg(test)]
mod tests;

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    service::{Registry, Service, ServiceKey},
};
use crate::{
    api::{Config, gateway_api},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey, Shared, select::LabelSelector},
    table::Cx,
};

/// The label by which a service or namespace names its waypoint; [`NO_WAYPOINT`]: it wants none.
const USE_WAYPOINT: &str = "istio.io/use-waypoint";
/// The label that names the waypoint's namespace, where it is another than the service's.
const USE_WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
const NO_WAYPOINT: &str = "none";
/// The label by which a Gateway or GatewayClass says for what its waypoints are: `service` (also without the label),
/// `workload`, `all` or `none`.
const WAYPOINT_FOR: &str = "istio.io/waypoint-for";
/// The protocol of the listener that takes tunnels.
const HBONE: &str = "HBONE";
/// The label of what a controller deploys for a Gateway, and its value for waypoints. They have no waypoints themselves.
pub const MANAGED_LABEL: &str = "gateway.istio.io/managed";
/// See [`MANAGED_LABEL`].
pub const MESH_CONTROLLER: &str = "istio.io-mesh-controller";

/// A Gateway that services may go through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waypoint {
    /// Where it is reached, as its status says: the host of a Service, else an IP address.
    pub address: SmolStr,
    /// The service that is reached there, if it is known.
    pub service: Option<ServiceKey>,
    /// From which namespaces services may go through it.
    pub admits: Admits,
}

/// Namespaces whose services may use a waypoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admits {
    /// Its own.
    Same,
    /// Every one.
    All,
    /// Those with such labels.
    Selected(LabelSelector),
    /// None, not even its own.
    Nobody,
}

/// Which waypoint a service goes through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceWaypoint {
    /// The Gateway.
    pub gateway: ObjectKey,
}

/// Derives the waypoint that a Gateway of the config cluster is.
pub fn waypoint(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Waypoint> {
    if !mesh.installation.features.pilot_enable_ambient_waypoints || key.cluster != mesh.installation.cluster {
        return None;
    }
    let gateway = mesh.kube_gateways.get(cx, key)?;
    let class = ObjectKey::new(&key.cluster, "", gateway.spec.gateway_class_name.clone());
    let class = mesh.gateway_classes.get(cx, &class);
    let labels = [Some(&gateway.meta.labels), class.map(|class| &class.meta.labels)];
    let mut declared = labels
        .into_iter()
        .flatten()
        .filter_map(|labels| labels.get(WAYPOINT_FOR));
    let is_for_services = declared
        .next()
        .is_none_or(|traffic| matches!(traffic.as_str(), "service" | "all"));
    let address = address(gateway).filter(|_| is_for_services)?;
    Some(Waypoint {
        service: service_at(cx, mesh, &key.namespace, &address),
        address,
        admits: admits(&gateway.spec),
    })
}

/// The address in the status: a host name before IP addresses.
fn address(gateway: &Config<gateway_api::Gateway>) -> Option<SmolStr> {
    let listed = gateway.status.as_ref()?.get("addresses")?.as_array()?;
    let of_type = |wanted: &str| {
        let mut found = listed
            .iter()
            .filter(|address| address["type"].as_str().unwrap_or("IPAddress") == wanted);
        found.find_map(|address| address["value"].as_str().filter(|value| !value.is_empty()))
    };
    of_type("Hostname").or_else(|| of_type("IPAddress")).map(SmolStr::new)
}

/// The service of a namespace that is reached at a host or address.
fn service_at(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, address: &SmolStr) -> Option<ServiceKey> {
    let by_host = ServiceKey {
        hostname: Hostname::new(address),
        namespace: namespace.clone(),
    };
    if mesh.services.get(cx, &by_host).is_some() {
        return Some(by_host);
    }
    let mut services = mesh.services_by_namespace.get(cx, namespace);
    let found = services.find(|(_, service)| {
        let mut own = service.cluster_vips.values().flatten();
        own.any(|vip| vip == address) || service.default_address == *address
    });
    found.map(|(key, _)| key.clone())
}

/// What the listener for tunnels says of routes counts for services.
fn admits(gateway: &gateway_api::Gateway) -> Admits {
    let listener = gateway.listeners.iter().find(|listener| listener.protocol == HBONE);
    let namespaces = listener
        .and_then(|listener| listener.allowed_routes.as_ref())
        .and_then(|allowed| allowed.namespaces.as_ref());
    match namespaces.map(|namespaces| (namespaces.from.as_deref(), &namespaces.selector)) {
        None | Some((None | Some("Same"), _)) => Admits::Same,
        Some((Some("All"), _)) => Admits::All,
        Some((Some("Selector"), Some(selector))) => Admits::Selected(selector.clone()),
        Some(_) => Admits::Nobody,
    }
}

/// Derives which waypoint a service goes through.
pub fn of_service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<ServiceWaypoint> {
    if !mesh.installation.features.pilot_enable_ambient_waypoints {
        return None;
    }
    let service = mesh.services.get(cx, key)?;
    if service.label(MANAGED_LABEL).is_some_and(|by| by == MESH_CONTROLLER) {
        return None;
    }
    let own = Choice::of(&service.labels, &key.namespace);
    let of_namespace = || Choice::of(namespace_labels(cx, mesh, &key.namespace)?, &key.namespace);
    let Some(Choice::Named { namespace, name }) = own.or_else(of_namespace) else {
        return None;
    };
    let gateway = ObjectKey::new(&mesh.installation.cluster, namespace, name);
    let waypoint = mesh.waypoints.get(cx, &gateway)?;
    let admitted = match &waypoint.admits {
        Admits::Same => gateway.namespace == key.namespace,
        Admits::All => true,
        Admits::Selected(selector) => {
            let labels = namespace_labels(cx, mesh, &key.namespace);
            labels.is_some_and(|labels| selector.matches(labels))
        }
        Admits::Nobody => false,
    };
    admitted.then_some(ServiceWaypoint { gateway })
}

fn namespace_labels<'a>(cx: &Cx, mesh: &'a MeshSnapshot, namespace: &Namespace) -> Option<&'a Labels> {
    let key = ObjectKey::new(&mesh.installation.cluster, "", SmolStr::new(namespace.as_str()));
    mesh.namespaces.get(cx, &key).map(|namespace| &namespace.meta.labels)
}

/// What an object says about its waypoint.
enum Choice {
    /// It wants none.
    Nothing,
    /// It wants this one.
    Named { namespace: Namespace, name: SmolStr },
}

impl Choice {
    /// What labels say; `None`: nothing. `own` is the namespace of the object.
    fn of(labels: &Labels, own: &Namespace) -> Option<Self> {
        let name = labels.get(USE_WAYPOINT)?;
        if name.is_empty() || name.eq_ignore_ascii_case(NO_WAYPOINT) {
            return Some(Self::Nothing);
        }
        let namespace = labels.get(USE_WAYPOINT_NAMESPACE);
        let namespace = namespace.filter(|namespace| !namespace.is_empty());
        Some(Self::Named {
            namespace: namespace.map_or_else(|| own.clone(), Namespace::new),
            name: name.clone(),
        })
    }
}

/// The waypoints that a workload is which serves these services: those that are reached at a host or address of one of
/// them in the workload's cluster. Sorted.
#[doc(alias = "WaypointKeyForProxy")]
pub fn at<'s>(
    cx: &Cx,
    mesh: &MeshSnapshot,
    namespace: &Namespace,
    cluster: &ClusterId,
    services: impl IntoIterator<Item = &'s Shared<Service>>,
) -> Vec<ObjectKey> {
    let mut found = Vec::new();
    for service in services {
        let addresses = match service.registry {
            Registry::Kubernetes => service.cluster_vips.get(cluster).map_or(&[][..], Vec::as_slice),
            Registry::External => std::slice::from_ref(&service.default_address),
        };
        for address in addresses {
            let there = mesh.waypoints_by_address.get(cx, address);
            found.extend(there.map(|(key, _)| key.clone()));
        }
        let host = SmolStr::new(&*service.key.hostname);
        let there = mesh.waypoints_by_address.get(cx, &host);
        let own = there.filter(|(key, _)| key.namespace == *namespace);
        found.extend(own.map(|(key, _)| key.clone()));
    }
    found.sort();
    found.dedup();
    found
}

/// The services that go through these waypoints, one for each host, oldest first.
pub fn served<'a>(cx: &Cx, mesh: &'a MeshSnapshot, waypoints: &[ObjectKey]) -> Vec<&'a Shared<Service>> {
    let keys = waypoints
        .iter()
        .flat_map(|waypoint| mesh.services_by_waypoint.get(cx, waypoint));
    let mut found: Vec<_> = keys.filter_map(|(key, _)| mesh.services.get(cx, key)).collect();
    found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    found.dedup_by(|a, b| a.key.hostname == b.key.hostname);
    found.sort_by(|a, b| age_order(a).cmp(&age_order(b)));
    found
}

fn age_order(service: &Service) -> (i64, &str, &Namespace) {
    let name = match service.registry {
        Registry::Kubernetes => service.name.as_str(),
        Registry::External => &service.key.hostname,
    };
    (service.creation, name, &service.key.namespace)
}
