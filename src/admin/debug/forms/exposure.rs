//! A service as its clients meet it: who sees it, through which gateways and routes, with which mutual TLS, and which
//! policies requests pass.
//!
//! Nothing is derived here: visibility, attachment of policies, modes of mutual TLS, waypoints and routes are those of
//! generation.

mod collect;

use std::collections::BTreeMap;

use serde::Serialize;

use self::collect::View;
use crate::{
    base::{Hostname, Shared},
    distribution::report::ObjectName,
    model::{MeshSnapshot, ServiceKey, SidecarScope},
    table::Cx,
};

/// The most workloads, and the most scopes, that a view lists.
const MAX_ROWS: usize = 200;

/// The scopes of connected proxies, with the number of proxies that use each.
pub(in crate::admin::debug) type Scopes = Vec<(Shared<SidecarScope>, usize)>;

/// A service as its clients meet it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::admin::debug) struct Exposure {
    host: String,
    namespace: String,
    /// The objects that declare it.
    objects: Vec<ObjectName>,
    /// True if it is outside the mesh.
    external: bool,
    ports: Vec<Port>,
    /// Those with most endpoints first.
    workloads: Vec<Workload>,
    /// The number of workloads, also of those that are not listed.
    workload_count: usize,
    visibility: Visibility,
    #[serde(skip_serializing_if = "Option::is_none")]
    waypoint: Option<Waypoint>,
    policies: Vec<Policy>,
    routes: Vec<Route>,
    gateways: Vec<Gateway>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_rule: Option<DestinationRule>,
}

/// A port of the service.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    number: u32,
    name: String,
    protocol: &'static str,
    endpoints: usize,
    /// Modes of mutual TLS of its workloads, by the number of endpoints: `STRICT`, `PERMISSIVE` or `DISABLE`.
    mutual_tls: BTreeMap<&'static str, usize>,
}

/// The endpoints of one workload: a Deployment, or whatever owns them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Workload {
    name: String,
    namespace: String,
    cluster: String,
    /// SPIFFE identity; empty if unknown.
    identity: String,
    endpoints: usize,
    transport: Transport,
    /// The mode of mutual TLS by the port of the service.
    mutual_tls: BTreeMap<u32, &'static str>,
    /// `deny` if there is an ALLOW policy, so that other requests are denied.
    default_action: &'static str,
}

/// The acceptor of mutual TLS.
#[derive(Debug, PartialEq, Serialize)]
enum Transport {
    #[serde(rename = "sidecar")]
    Sidecar,
    #[serde(rename = "HBONE")]
    Hbone,
    #[serde(rename = "none")]
    None,
}

/// The clients that see the service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Visibility {
    /// Namespaces, `*` for all; none if no namespace sees it.
    export_to: Vec<String>,
    /// Connected proxies that see it, and all connected proxies.
    seeing: usize,
    proxies: usize,
    /// Groups of connected proxies: those that do not see it first.
    scopes: Vec<Seen>,
    /// The number of such groups, also of those that are not listed.
    scope_count: usize,
}

/// Proxies with one view of the mesh.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Seen {
    namespace: String,
    /// The Sidecar that applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    sidecar: Option<ObjectName>,
    /// True for gateways and waypoints.
    gateway: bool,
    proxies: usize,
    /// The reason why the service is not seen; none if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_by: Option<HiddenBy>,
}

/// The reason why proxies do not see the service.
#[derive(Debug, PartialEq, Serialize)]
enum HiddenBy {
    /// It is not exported to their namespace.
    #[serde(rename = "exportTo")]
    ExportTo,
    /// Their Sidecar does not import it.
    #[serde(rename = "Sidecar")]
    Sidecar,
    /// They see another service of the host.
    #[serde(rename = "another service")]
    AnotherService,
}

/// The waypoint that the service requests.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Waypoint {
    gateway: ObjectName,
    state: WaypointState,
}

/// The use of the waypoint, or the reason why it is not used.
#[derive(Debug, PartialEq, Serialize)]
enum WaypointState {
    #[serde(rename = "used")]
    Used,
    #[serde(rename = "not ready")]
    NotReady,
    #[serde(rename = "denied")]
    Denied,
    #[serde(rename = "unsupported")]
    Unsupported,
}

/// A policy that applies to requests to the service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Policy {
    #[serde(flatten)]
    object: ObjectName,
    /// The place where it applies: `workload` or `waypoint`.
    at: &'static str,
    /// Its workloads, if these are not all; empty otherwise.
    workloads: Vec<String>,
    /// The action of an AuthorizationPolicy.
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<&'static str>,
    /// True if it is only logged.
    dry_run: bool,
    /// The rules of an AuthorizationPolicy in words.
    rules: Vec<String>,
}

/// A VirtualService that leads to the service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Route {
    /// The VirtualService, or the routes or Ingresses that it was made from.
    objects: Vec<ObjectName>,
    hosts: Vec<String>,
    /// `mesh` for all sidecars, or `namespace/name`.
    gateways: Vec<String>,
    /// True if it applies to requests to the service's own host.
    own_host: bool,
}

/// A gateway through which the service is reached.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gateway {
    objects: Vec<ObjectName>,
    /// The hosts of routes at this gateway.
    hosts: Vec<String>,
    servers: Vec<Server>,
}

/// A server of a gateway.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct Server {
    port: u32,
    protocol: String,
    hosts: Vec<String>,
    /// The mode of TLS; empty without.
    tls: &'static str,
}

/// The DestinationRules for clients of the service's own namespace.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DestinationRule {
    objects: Vec<ObjectName>,
    subsets: Vec<String>,
    /// The mode of TLS of clients; empty if unset.
    tls: &'static str,
}

/// Returns the view of a service; `None` if there is none.
pub(in crate::admin::debug) fn of_service(mesh: &MeshSnapshot, key: &ServiceKey, scopes: &Scopes) -> Option<Exposure> {
    let cx = Cx::untracked();
    let service = mesh.services.get(&cx, key)?;
    let view = View { mesh, cx, key, service };
    Some(view.exposure(scopes))
}

/// Returns the services of a host, or the one of a namespace.
pub(in crate::admin::debug) fn named<'a>(
    mesh: &'a MeshSnapshot,
    hostname: &Hostname,
    namespace: &str,
) -> Vec<&'a ServiceKey> {
    let keys = mesh
        .services_by_host
        .get(&Cx::untracked(), hostname)
        .map(|(key, _)| key);
    keys.filter(|key| namespace.is_empty() || key.namespace == *namespace)
        .collect()
}

#[cfg(test)]
mod tests;
