//! Services of Kubernetes Services with one name in any number of clusters.

use std::collections::BTreeMap;

use litemap::LiteMap;
use smol_str::SmolStr;

use super::{
    Protocol, Registry, Resolution, Service, ServiceKey, ServicePort, UNSPECIFIED_IP, mcs, node_selector::NodeSelector,
};
use crate::{
    api::{istio::common::MAX_EXPORTS, kube, mesh_config},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey, Shared},
    model::{
        MeshSnapshot,
        identity::{spiffe_id, trust_domain},
    },
    proto::istio::mesh::v1alpha1::mesh_config::service_scope_configs::Scope as ServiceScope,
    table::Cx,
};

/// Annotation of Services with the namespaces that see them.
pub(in crate::model) const EXPORT_TO: &str = "networking.istio.io/exportTo";
/// Visibility of a Service in a snapshot of release 1.1: PUBLIC, or PRIVATE to its namespace. That release documented
/// an annotation and read a label.
const CONFIG_SCOPE: &str = "networking.istio.io/configScope";

/// Returns true if a selector of the mesh config makes the Service span clusters.
pub(in crate::model) fn spans_clusters(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service) -> bool {
    let scopes = &mesh.mesh_config(cx).service_scope_configs;
    let namespace = ObjectKey::new(object.meta.cluster(), "", object.meta.namespace().as_str());
    scopes.iter().any(|scope| {
        let matches = |selector: Option<&_>, labels: &Labels| {
            selector.is_none_or(|selector| mesh_config::selector(selector).matches(labels))
        };
        scope.scope() == ServiceScope::Global
            && mesh.namespaces.get(cx, &namespace).is_some_and(|namespace| {
                matches(scope.namespace_selector.as_ref(), &namespace.meta.labels)
                    && matches(scope.services_selector.as_ref(), &object.meta.labels)
            })
    })
}

/// Merges the Kubernetes Services of this name. The first cluster decides everything except virtual IPs and accounts,
/// which are collected from all.
///
/// Parity (pilot/pkg/serviceregistry/aggregate/controller.go, `mergeService`): the external addresses are those of the
/// first cluster, too.
pub(super) fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    match object_name(&mesh.installation.domain, key) {
        Some(name) => merged(cx, mesh, key, &name),
        None => imported(cx, mesh, key),
    }
}

/// Returns the service by its imported host, from the Service in any cluster and the addresses of the imports. The
/// first cluster that imports it decides its main address.
fn imported(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    if !mcs::has_hosts(&mesh.installation.features) {
        return None;
    }
    let name = object_name(mcs::DOMAIN, key)?;
    let imports = mesh
        .service_imports_by_name
        .get(cx, &(key.namespace.clone(), name.clone()));
    let mut imports: Vec<(&ClusterId, Vec<SmolStr>)> = imports
        .map(|(object, _)| (&object.cluster, mcs::vips(cx, mesh, object)))
        .filter(|(_, vips)| !vips.is_empty())
        .collect();
    imports.sort_by_key(|(cluster, _)| **cluster != mesh.installation.cluster);
    let default_address = imports.first()?.1.first()?.clone();
    Some(Service {
        default_address,
        cluster_vips: imports
            .into_iter()
            .map(|(cluster, vips)| (cluster.clone(), vips))
            .collect(),
        ..merged(cx, mesh, key, &name)?
    })
}

fn merged(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, name: &SmolStr) -> Option<Service> {
    let objects = objects(cx, mesh, &key.namespace, name);
    let mut merged = converted(cx, mesh, key, objects.first()?);
    let others = objects[1..].iter();
    merged
        .cluster_vips
        .extend(others.map(|object| (object.meta.cluster().clone(), vips(object))));
    let accounts = objects.iter().flat_map(|object| service_accounts(cx, mesh, object));
    let mut accounts: Vec<SmolStr> = accounts.collect();
    accounts.sort_unstable();
    accounts.dedup();
    merged.service_accounts = accounts.into();
    Some(merged)
}

/// Returns the virtual IPs of a Service; [`UNSPECIFIED_IP`] without one.
fn vips(object: &kube::Service) -> Vec<SmolStr> {
    if object.is_headless() || object.cluster_ips.is_empty() {
        vec![SmolStr::new_static(UNSPECIFIED_IP)]
    } else {
        object.cluster_ips.clone()
    }
}

/// Returns the name of the Kubernetes Service with this host name in a domain; `None` for other hosts.
fn object_name(domain: &str, key: &ServiceKey) -> Option<SmolStr> {
    let (name, namespace) = split_host(domain, &key.hostname)?;
    (namespace == key.namespace.as_str()).then(|| SmolStr::new(name))
}

/// Splits the host name of a Kubernetes Service in a domain into name and namespace; `None` for other hosts.
fn split_host<'a>(domain: &str, hostname: &'a str) -> Option<(&'a str, &'a str)> {
    let rest = hostname.strip_suffix(domain)?.strip_suffix(".svc.")?;
    rest.split_once('.').filter(|(name, _)| !name.is_empty())
}

/// Returns true for the host of an ExternalName service.
pub(super) fn is_external_name(cx: &Cx, mesh: &MeshSnapshot, hostname: &Hostname) -> bool {
    let Some((name, namespace)) = split_host(&mesh.installation.domain, hostname) else {
        return false;
    };
    let objects = objects(cx, mesh, &Namespace::new(namespace), &SmolStr::new(name));
    objects.first().is_some_and(|object| object.is_external_name())
}

/// Returns the Services of one name in all clusters: the config cluster first, then by cluster id.
pub(in crate::model) fn objects<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    name: &SmolStr,
) -> Vec<&'a Shared<kube::Service>> {
    let rows = mesh.kube_services_by_name.get(cx, &(namespace.clone(), name.clone()));
    let mut objects: Vec<_> = rows.map(|(_, row)| row).collect();
    objects.sort_by_key(|object| *object.meta.cluster() != mesh.installation.cluster);
    objects
}

/// Converts one object of a cluster to a service without accounts.
fn converted(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, object: &kube::Service) -> Service {
    let meta = &object.meta;
    let external_name = if object.is_external_name() {
        object.external_name.as_str()
    } else {
        ""
    };
    let vips = vips(object);
    let annotation = |name: &str| meta.annotations.get(name).map_or("", SmolStr::as_str);
    let scope = match annotation(CONFIG_SCOPE) {
        "" => meta.labels.get(CONFIG_SCOPE).map_or("", SmolStr::as_str),
        scope => scope,
    };
    let export_to = match annotation(EXPORT_TO) {
        "" if scope == "PRIVATE" => vec![".".to_owned()],
        "" => Vec::new(),
        list => exports(list),
    };
    let cluster = meta.cluster().clone();
    let (addresses, ports) = external_addresses(cx, mesh, object);
    Service {
        key: key.clone(),
        name: meta.name().clone(),
        registry: Registry::Kubernetes,
        service_entry: None,
        creation: meta.creation,
        ports: object.ports.iter().map(ServicePort::of_kube).collect(),
        default_address: vips[0].clone(),
        cluster_vips: LiteMap::from_sorted_store_unchecked(vec![(cluster.clone(), vips)]),
        auto_ipv4: SmolStr::default(),
        auto_ipv6: SmolStr::default(),
        members: Vec::new(),
        merge_class: 0,
        resolution: Resolution::of_kube(object),
        mesh_external: !external_name.is_empty(),
        export_to: super::export_to(cx, mesh, &export_to, meta.namespace()),
        service_accounts: Shared::default(),
        labels: meta.labels.clone(),
        selector: object.selector.clone().into(),
        selects_workloads: false,
        aliases: Shared::default(),
        external_name: Hostname::new(external_name),
        node_local: object.node_local,
        traffic_distribution: super::traffic_distribution(cx, mesh, &object.traffic_distribution, meta),
        publish_not_ready: object.publish_not_ready,
        race_first_tcp_connect: false,
        headless: object.is_headless(),
        external_addresses: addresses.into_iter().map(|list| (cluster.clone(), list)).collect(),
        external_ports: ports.into_iter().map(|map| (cluster.clone(), map)).collect(),
    }
}

/// Returns the namespaces in the annotation, of many the first: as many as Istio's objects may have in `exportTo`. `*`
/// and `~` stand for themselves alone, wherever they are.
fn exports(list: &str) -> Vec<String> {
    let entries = || list.split(',').map(str::trim);
    let alone = ["*", "~"]
        .into_iter()
        .find(|alone| entries().any(|entry| entry == *alone));
    match alone {
        Some(alone) => vec![alone.to_owned()],
        None => entries().take(MAX_EXPORTS).map(str::to_owned).collect(),
    }
}

impl Resolution {
    /// Returns the resolution of a Kubernetes Service.
    pub fn of_kube(object: &kube::Service) -> Self {
        if object.is_headless() {
            Self::Passthrough
        } else if object.is_external_name() && !object.external_name.is_empty() {
            Self::Alias
        } else {
            Self::ClientSideLb
        }
    }
}

impl ServicePort {
    /// Returns a port of a Kubernetes Service.
    pub fn of_kube(port: &kube::service::Port) -> Self {
        Self {
            name: port.name.clone(),
            number: port.number,
            target: port.target.clone(),
            protocol: Protocol::of_kube_port(port),
        }
    }
}

/// Returns accounts that annotations add to those of the endpoints.
fn service_accounts(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service) -> Vec<SmolStr> {
    let list = |name: &str| {
        let text = object.meta.annotations.get(name).map_or("", SmolStr::as_str);
        text.split(',').filter(move |_| !text.is_empty())
    };
    let mut accounts: Vec<SmolStr> = list("alpha.istio.io/canonical-serviceaccounts")
        .map(SmolStr::new)
        .collect();
    let trust_domain = trust_domain(cx, mesh, object.meta.cluster());
    accounts.extend(
        list("alpha.istio.io/kubernetes-serviceaccounts")
            .map(|account| spiffe_id(trust_domain, object.meta.namespace(), account)),
    );
    accounts
}

pub(in crate::model) type Addresses = Option<Shared<[SmolStr]>>;
pub(in crate::model) type NodePorts = Option<BTreeMap<u32, u32>>;

/// Returns external addresses of the service in its cluster, and node ports.
pub(in crate::model) fn external_addresses(
    cx: &Cx,
    mesh: &MeshSnapshot,
    object: &kube::Service,
) -> (Addresses, NodePorts) {
    let mut addresses = Vec::new();
    if object.service_type == "LoadBalancer" {
        addresses.extend(object.load_balancer.iter().cloned());
    }
    addresses.extend(object.external_ips.iter().cloned());
    let selector = NodeSelector::of(object);
    let addresses: Shared<[SmolStr]> = match &selector {
        Some(selector) if addresses.is_empty() => {
            let selected = mesh.selected_nodes.get(cx, selector);
            selected.map(|selected| (**selected).clone()).unwrap_or_default()
        }
        _ => addresses.into(),
    };
    let ports = selector.map(|_| object.ports.iter().map(|port| (port.number, port.node_port)).collect());
    ((!addresses.is_empty()).then_some(addresses), ports)
}
