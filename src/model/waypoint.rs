//! Waypoints: Gateways that process requests to services and workloads, and what uses them.
//!
//! Note: a service that refers to a missing waypoint uses none, not that of its namespace. A Gateway is a waypoint only
//! once its status has an address. Objects refer to Gateways of their own cluster, and proxies of one host serve the
//! waypoints of all clusters that have this host.

pub mod addresses;
pub mod workloads;

#[cfg(test)]
mod tests;

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    features::Features,
    policy::TargetService,
    service::{Registry, Resolution, Service, ServiceKey, kube, mcs},
};
use crate::{
    api::{Config, gateway_api, istio::service_entry::USE_WAYPOINT},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey, Shared, boolean, select::LabelSelector},
    proto::istio::workload::{ApplicationTunnel, application_tunnel::Protocol},
    table::Cx,
};

/// Label with the waypoint's namespace, if it differs from the service's.
const USE_WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
/// Value of [`USE_WAYPOINT`] for none.
const NO_WAYPOINT: &str = "none";
/// Label with the traffic of a Gateway's or GatewayClass' waypoints: `service` (the default), `workload`, `all` or
/// `none`.
const WAYPOINT_FOR: &str = "istio.io/waypoint-for";
/// Protocol of the listener that accepts tunnels.
const HBONE: &str = "HBONE";
/// Protocol of the listener for connections with a PROXY header.
const PROXY: &str = "istio.io/PROXY";
/// Annotation with the tunnel into instances that do not accept HBONE.
const INBOUND_BINDING: &str = "ambient.istio.io/waypoint-inbound-binding";
/// Label of resources that a controller deploys for a Gateway, with the value for waypoints. They have no waypoints
/// themselves.
pub const MANAGED_LABEL: &str = "gateway.istio.io/managed";
/// See [`MANAGED_LABEL`].
pub const MESH_CONTROLLER: &str = "istio.io-mesh-controller";
/// The value of [`MANAGED_LABEL`] for other gateways.
pub const GATEWAY_CONTROLLER: &str = "istio.io-gateway-controller";
/// The value of [`MANAGED_LABEL`] for gateways between networks.
const EAST_WEST_CONTROLLER: &str = "istio.io-eastwest-controller";
/// Label of a service, or else of its namespace, that makes gateways use the waypoint.
const INGRESS_USE_WAYPOINT: &str = "istio.io/ingress-use-waypoint";

/// A Gateway that may be used as a waypoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waypoint {
    /// Traffic that it processes.
    pub traffic: WaypointTraffic,
    /// Address in its status: the host of a Service, or else an IP address.
    pub address: SmolStr,
    /// Service with that address, if known.
    pub service: Option<ServiceKey>,
    /// Namespaces whose services and workloads may use it.
    pub allowed_namespaces: AllowedNamespaces,
}

/// Traffic that a waypoint processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaypointTraffic {
    /// Connections to services.
    Service,
    /// Connections to addresses of workloads.
    Workload,
    /// Both.
    All,
    /// Neither.
    None,
}

impl WaypointTraffic {
    /// Parses the value of the label; no label means services.
    fn of(label: Option<&SmolStr>) -> Self {
        match label.map(SmolStr::as_str) {
            None | Some("service") => Self::Service,
            Some("workload") => Self::Workload,
            Some("all") => Self::All,
            Some(_) => Self::None,
        }
    }
}

/// Namespaces whose services and workloads may use a waypoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedNamespaces {
    /// Its own namespace.
    Same,
    /// All namespaces.
    All,
    /// Namespaces with these labels.
    Selected(LabelSelector),
    /// No namespace, not even its own.
    None,
}

/// The waypoint that a service uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceWaypoint {
    /// The Gateway that declares the waypoint.
    pub gateway: ObjectKey,
    /// The service, as the waypoint serves it.
    pub service: ServedService,
}

/// A service that a proxy at the end of tunnels may serve: the attributes that decide about its place among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedService {
    /// The service as policies refer to it.
    pub target: TargetService,
    /// Creation time of the service, in seconds since 1970.
    pub creation: i64,
    /// False for a host of the mesh that is resolved per request: waypoints do not serve it.
    pub is_served: bool,
}

impl ServedService {
    /// Returns the attributes of a service.
    pub fn of(service: &Service) -> Self {
        Self {
            target: TargetService::of(service),
            creation: service.creation,
            // Parity (pilot/pkg/networking/core/waypoint.go): only hosts outside the mesh are resolved per request.
            is_served: service.mesh_external || service.resolution != Resolution::DynamicDns,
        }
    }
}

/// The services that a proxy at the end of tunnels serves. Part of keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServingRole {
    /// A waypoint: the services that use one of these Gateways, which are sorted.
    Waypoint(Shared<[ObjectKey]>),
    /// A gateway between networks: the services that span clusters, and their waypoints.
    EastWest,
}

impl ServingRole {
    /// Returns the role of a proxy that serves nothing.
    pub fn none() -> Self {
        Self::Waypoint(Vec::new().into())
    }
}

/// Returns true if a proxy with these labels is a gateway between networks.
#[doc(alias = "IsAmbientEastWestGateway")]
pub fn is_east_west(features: &Features, labels: &Labels) -> bool {
    features.ambient_enable_multi_network && labels.get(MANAGED_LABEL).is_some_and(|by| by == EAST_WEST_CONTROLLER)
}

/// Reason why an object does not use the waypoint that it requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAttached {
    /// The Gateway that the object requests.
    pub gateway: ObjectKey,
    /// The reason why it does not use that Gateway.
    pub reason: Refusal,
}

/// See [`NotAttached`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No such Gateway exists, or it has no address yet.
    NotReady,
    /// The waypoint does not admit the namespace.
    Denied,
    /// The waypoint does not process traffic to such objects.
    Unsupported,
}

/// The waypoint that an object uses, if any.
pub type Attachment = Result<Option<ObjectKey>, NotAttached>;

/// Derives the waypoint of a Gateway.
pub fn waypoint(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Waypoint> {
    if !mesh.installation.is_ambient(&key.cluster) {
        return None;
    }
    let gateway = mesh.kube_gateways.get(cx, key)?;
    let class = mesh.gateway_classes.get(cx, &class_key(mesh, gateway));
    let labels = [Some(&gateway.meta.labels), class.map(|class| &class.meta.labels)];
    let mut declared = labels
        .into_iter()
        .flatten()
        .filter_map(|labels| labels.get(WAYPOINT_FOR));
    let address = address(gateway)?;
    Some(Waypoint {
        traffic: WaypointTraffic::of(declared.next()),
        service: service_at(cx, mesh, key, &address),
        address,
        allowed_namespaces: allowed_namespaces(&gateway.spec, inbound_binding(cx, mesh, gateway).as_ref()),
    })
}

/// Returns the key of a Gateway's class.
///
/// Parity (pilot/pkg/serviceregistry/ambient/waypoints.go): classes of the config cluster count for Gateways of all
/// clusters.
fn class_key(mesh: &MeshSnapshot, gateway: &Config<gateway_api::Gateway>) -> ObjectKey {
    ObjectKey::new(&mesh.installation.cluster, "", gateway.spec.gateway_class_name.clone())
}

/// Returns the tunnel into the instances of a waypoint that do not accept HBONE, as the annotation of the Gateway or
/// else of its class declares it: `PROTOCOL` or `PROTOCOL/PORT`. A port that is not a number counts as none.
pub fn inbound_binding(
    cx: &Cx,
    mesh: &MeshSnapshot,
    gateway: &Config<gateway_api::Gateway>,
) -> Option<ApplicationTunnel> {
    let class = class_key(mesh, gateway);
    let own = gateway.meta.annotations.get(INBOUND_BINDING);
    let of_class = || {
        mesh.gateway_classes
            .get(cx, &class)?
            .meta
            .annotations
            .get(INBOUND_BINDING)
    };
    let text = own.or_else(of_class)?;
    let (protocol, port) = text.split_once('/').unwrap_or((text, ""));
    let protocol = match protocol {
        "NONE" => Protocol::None,
        "PROXY" => Protocol::Proxy,
        _ => return None,
    };
    (!port.contains('/')).then(|| ApplicationTunnel {
        protocol: protocol.into(),
        port: port.parse().unwrap_or_default(),
    })
}

/// Returns the address in the status: a host name before IP addresses.
fn address(gateway: &Config<gateway_api::Gateway>) -> Option<SmolStr> {
    let mut found = addresses_of_type(gateway, "Hostname").chain(addresses_of_type(gateway, "IPAddress"));
    found.next().map(SmolStr::new)
}

/// Returns the addresses of a type in the status of a Gateway.
pub fn addresses_of_type<'a>(
    gateway: &'a Config<gateway_api::Gateway>,
    address_type: &'a str,
) -> impl Iterator<Item = &'a str> {
    let status = gateway.status.as_ref();
    let listed = status.and_then(|status| status.get("addresses")?.as_array());
    let of_type = listed
        .into_iter()
        .flatten()
        .filter(move |address| address["type"].as_str().unwrap_or("IPAddress") == address_type);
    of_type.filter_map(|address| address["value"].as_str().filter(|value| !value.is_empty()))
}

/// Returns the service with the host or address of a Gateway. Services of other clusters may have the same IP address.
fn service_at(cx: &Cx, mesh: &MeshSnapshot, gateway: &ObjectKey, address: &SmolStr) -> Option<ServiceKey> {
    if let Some(found) = with_host(cx, mesh, &gateway.namespace, address) {
        return Some(found);
    }
    let services = mesh.services_at_gateways.get(cx, &gateway.namespace)?;
    services.at(&gateway.cluster, address).cloned()
}

/// Returns the service of a namespace whose host is the address of a Gateway.
fn with_host(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, address: &SmolStr) -> Option<ServiceKey> {
    let key = ServiceKey {
        hostname: Hostname::new(address),
        namespace: namespace.clone(),
    };
    mesh.services.get(cx, &key).is_some().then_some(key)
}

/// Returns the allowed namespaces of the listener that the binding refers to, or else of the one for tunnels.
fn allowed_namespaces(gateway: &gateway_api::Gateway, binding: Option<&ApplicationTunnel>) -> AllowedNamespaces {
    let is_bound = |listener: &&gateway_api::gateway::Listener| match binding {
        Some(binding) if binding.port != 0 => u32::from(listener.port) == binding.port,
        Some(binding) if binding.protocol() == Protocol::Proxy => listener.protocol == PROXY,
        _ => false,
    };
    let is_hbone = |listener: &&gateway_api::gateway::Listener| listener.protocol == HBONE && listener.port == 15008;
    let mut listeners = gateway.listeners.iter();
    let listener = listeners.clone().find(is_bound).or_else(|| listeners.find(is_hbone));
    let namespaces = listener
        .and_then(|listener| listener.allowed_routes.as_ref())
        .and_then(|allowed| allowed.namespaces.as_ref());
    match namespaces.map(|namespaces| (namespaces.from.as_deref(), &namespaces.selector)) {
        None | Some((None | Some("Same"), _)) => AllowedNamespaces::Same,
        Some((Some("All"), _)) => AllowedNamespaces::All,
        Some((Some("Selector"), Some(selector))) => AllowedNamespaces::Selected(selector.clone()),
        Some(_) => AllowedNamespaces::None,
    }
}

/// Derives the waypoint of a service.
pub fn of_service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<ServiceWaypoint> {
    if !mesh.installation.features.pilot_enable_ambient {
        return None;
    }
    let service = mesh.services.get(cx, key)?;
    // An ExternalName.
    if service.resolution == Resolution::Alias {
        return None;
    }
    let (cluster, labels) = declaration(cx, mesh, service)?;
    let gateway = for_service(cx, mesh, cluster, labels, &key.namespace).ok()??;
    Some(ServiceWaypoint {
        gateway,
        service: ServedService::of(service),
    })
}

/// Returns the labels that decide about the waypoint of a service, with the cluster of their object; `None` for a
/// service outside the ambient mesh.
///
/// Parity (pilot/pkg/serviceregistry/ambient, services.go and multicluster.go): the ambient mesh consists of the
/// services of the config cluster, and with several networks of those that span clusters. Of these, the object in the
/// config cluster decides, or else the first one. The mesh has no hosts of imported services.
pub fn declaration<'a>(cx: &Cx, mesh: &'a MeshSnapshot, service: &'a Service) -> Option<(&'a ClusterId, &'a Labels)> {
    let own = &mesh.installation.cluster;
    let is_own = |one: &&Service| match one.registry {
        Registry::External => true,
        Registry::Kubernetes => !mcs::is_imported(one) && mcs::is_known(cx, mesh, one, own),
    };
    // A ServiceEntry may have the host of a Service of another cluster.
    if let Some(declared) = std::iter::once(service).chain(service.all()).find(is_own) {
        return Some((own, &*declared.labels));
    }
    if !mesh.installation.features.ambient_enable_multi_network || mcs::is_imported(service) {
        return None;
    }
    let objects = kube::objects(cx, mesh, &service.key.namespace, &service.name).into_iter();
    let mut spanning = objects.filter(|object| kube::spans_clusters(cx, mesh, object));
    let object = spanning.find(|object| !object.is_external_name())?;
    Some((object.meta.cluster(), &*object.meta.labels))
}

/// Returns the waypoint that a Service or ServiceEntry of a cluster with these labels uses. Services of waypoints and
/// of gateways between networks use none.
pub fn for_service(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId, labels: &Labels, own: &Namespace) -> Attachment {
    let managed_by = labels.get(MANAGED_LABEL);
    if managed_by.is_some_and(|by| by == MESH_CONTROLLER || by == EAST_WEST_CONTROLLER) {
        return Ok(None);
    }
    let Some((gateway, waypoint)) = requested(cx, mesh, cluster, labels, own)? else {
        return Ok(None);
    };
    match waypoint.traffic {
        WaypointTraffic::Service | WaypointTraffic::All => Ok(Some(gateway)),
        WaypointTraffic::Workload | WaypointTraffic::None => Err(NotAttached {
            gateway,
            reason: Refusal::Unsupported,
        }),
    }
}

/// Returns the waypoint that the labels of an object or of its namespace request, if it admits the namespace.
fn requested<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    cluster: &ClusterId,
    labels: &Labels,
    own: &Namespace,
) -> Result<Option<(ObjectKey, &'a Shared<Waypoint>)>, NotAttached> {
    let Some(gateway) = requested_gateway(cx, mesh, cluster, labels, own) else {
        return Ok(None);
    };
    let Some(waypoint) = mesh.waypoints.get(cx, &gateway) else {
        return Err(NotAttached {
            gateway,
            reason: Refusal::NotReady,
        });
    };
    let admitted = match &waypoint.allowed_namespaces {
        AllowedNamespaces::Same => gateway.namespace == *own,
        AllowedNamespaces::All => true,
        AllowedNamespaces::Selected(selector) => {
            let labels = namespace_labels(cx, mesh, cluster, own);
            labels.is_some_and(|labels| selector.matches(labels))
        }
        AllowedNamespaces::None => false,
    };
    if admitted {
        return Ok(Some((gateway, waypoint)));
    }
    Err(NotAttached {
        gateway,
        reason: Refusal::Denied,
    })
}

/// Returns the label of a service, or else of its namespace, that makes gateways use the waypoint. A text that is
/// not a boolean counts as false.
pub fn ingress_label(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    labels: &Labels,
    own: &Namespace,
) -> Option<bool> {
    let of_namespace = || namespace_labels(cx, mesh, cluster, own)?.get(INGRESS_USE_WAYPOINT);
    let label = labels.get(INGRESS_USE_WAYPOINT).or_else(of_namespace)?;
    Some(boolean::parse(label).unwrap_or_default())
}

/// Returns the Gateway that the labels of an object or of its namespace name as waypoint. All are of one cluster.
fn requested_gateway(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    labels: &Labels,
    own: &Namespace,
) -> Option<ObjectKey> {
    let of_namespace = || Choice::of(namespace_labels(cx, mesh, cluster, own)?, own);
    match Choice::of(labels, own).or_else(of_namespace)? {
        Choice::Named { namespace, name } => Some(ObjectKey::new(cluster, namespace, name)),
        Choice::Nothing => None,
    }
}

/// Returns true if the labels of an object of the config cluster or of its namespace name any waypoint.
///
/// Parity (pilot/pkg/config/kube/gateway/conversion.go, `waypointConfigured`): the status of a route reads the label
/// differently from clients. An empty text and `none` in any case leave the decision to the namespace.
pub fn is_named(cx: &Cx, mesh: &MeshSnapshot, labels: &Labels, own: &Namespace) -> bool {
    let names = |labels: &Labels| {
        let name = labels.get(USE_WAYPOINT);
        name.is_some_and(|name| !name.is_empty() && !name.eq_ignore_ascii_case(NO_WAYPOINT))
    };
    names(labels) || namespace_labels(cx, mesh, &mesh.installation.cluster, own).is_none_or(names)
}

/// Returns the labels of a namespace of a cluster.
fn namespace_labels<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    cluster: &ClusterId,
    namespace: &Namespace,
) -> Option<&'a Labels> {
    let key = ObjectKey::new(cluster, "", SmolStr::new(namespace.as_str()));
    mesh.namespaces.get(cx, &key).map(|namespace| &*namespace.meta.labels)
}

/// Waypoint that an object's labels request.
enum Choice {
    /// No waypoint.
    Nothing,
    /// This waypoint.
    Named { namespace: Namespace, name: SmolStr },
}

impl Choice {
    /// Parses labels; `None` without a label. `own` is the namespace of the object.
    ///
    /// Parity (pilot/pkg/serviceregistry/ambient/waypoints.go): only [`NO_WAYPOINT`] as written means none, and empty
    /// labels name a waypoint that does not exist.
    fn of(labels: &Labels, own: &Namespace) -> Option<Self> {
        let name = labels.get(USE_WAYPOINT)?;
        if name == NO_WAYPOINT {
            return Some(Self::Nothing);
        }
        let namespace = labels.get(USE_WAYPOINT_NAMESPACE);
        Some(Self::Named {
            namespace: namespace.map_or_else(|| own.clone(), Namespace::new),
            name: name.clone(),
        })
    }
}

/// Returns the waypoints of a workload that serves these services: those of all clusters whose address belongs to one
/// of the services in the workload's cluster. Sorted.
///
/// Parity (pilot/pkg/serviceregistry/ambient/ambientindex.go, `ServicesForWaypoint`): a host means the same in all
/// clusters, and an IP address the same in all clusters of a network.
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
            let there = mesh.waypoints_by_address.get(cx, address).map(|(key, _)| key);
            let near = there.filter(|key| is_one_network(cx, mesh, &key.cluster, cluster));
            found.extend(near.cloned());
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

/// Returns true if two clusters of the ambient mesh are in one network.
fn is_one_network(cx: &Cx, mesh: &MeshSnapshot, one: &ClusterId, other: &ClusterId) -> bool {
    if one == other || !mesh.installation.features.ambient_enable_multi_network {
        return true;
    }
    let network = |cluster: &ClusterId| mesh.cluster_networks.get(cx, cluster);
    network(one) == network(other)
}

/// Returns the services that a proxy serves, one per host, oldest first. Depends on no other attribute of a service.
pub fn served_keys<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    role: &ServingRole,
) -> Vec<(&'a ServiceKey, &'a ServedService)> {
    let mut found: Vec<(&ServiceKey, &ServedService)> = match role {
        ServingRole::Waypoint(gateways) => {
            let rows = gateways
                .iter()
                .flat_map(|gateway| mesh.services_by_waypoint.get(cx, gateway));
            rows.map(|(key, row)| (key, &row.service)).collect()
        }
        ServingRole::EastWest => {
            let rows = mesh.exposed_services.iter(cx);
            rows.map(|(key, row)| (key, &**row)).collect()
        }
    };
    found.retain(|(_, row)| row.is_served);
    found.sort_unstable_by_key(|(key, _)| *key);
    found.dedup_by(|(a, _), (b, _)| a.hostname == b.hostname);
    found.sort_by(|(a, a_row), (b, b_row)| age_order(a, a_row).cmp(&age_order(b, b_row)));
    found
}

/// Returns the services that a proxy serves like [`served_keys`].
pub fn served<'a>(cx: &Cx, mesh: &'a MeshSnapshot, role: &ServingRole) -> Vec<&'a Shared<Service>> {
    let keys = served_keys(cx, mesh, role).into_iter();
    keys.filter_map(|(key, _)| mesh.services.get(cx, key)).collect()
}

/// Returns the service of a host that a proxy serves.
pub fn served_host<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    role: &ServingRole,
    host: &Hostname,
) -> Option<&'a Shared<Service>> {
    let mut keys = mesh.services_by_host.get(cx, host).map(|(key, _)| key);
    let is_served = |key: &&ServiceKey| match role {
        ServingRole::Waypoint(gateways) => {
            let row = mesh.service_waypoints.get(cx, *key);
            row.is_some_and(|row| row.service.is_served && gateways.contains(&row.gateway))
        }
        ServingRole::EastWest => mesh.exposed_services.get(cx, *key).is_some_and(|row| row.is_served),
    };
    mesh.services.get(cx, keys.find(is_served)?)
}

fn age_order<'a>(key: &'a ServiceKey, row: &'a ServedService) -> (i64, &'a str, &'a Namespace) {
    let name = match row.target.registry {
        Registry::Kubernetes => row.target.name.as_str(),
        Registry::External => &key.hostname,
    };
    (row.creation, name, &key.namespace)
}
