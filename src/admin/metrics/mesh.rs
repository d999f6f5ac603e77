//! Gauges of the mesh and of connected proxies, computed when metrics are read.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus::{IntCounterVec, IntGauge, Registry};

use crate::{
    base::ObjectKey,
    generate::{
        Proxy,
        proxy_class::ProxyClassKey,
        store::{ConfigStore, ConnectionId, StoreSize},
    },
    metrics,
    model::{
        MeshSnapshot, Service,
        endpoint::Health,
        service::{Protocol, Resolution},
    },
    table::Cx,
};

/// The reasons of `pilot_k8s_proxies_with_no_service_targets`.
///
/// Parity (pilot/pkg/serviceregistry/kube/controller/controller.go).
const NO_SERVICE: &str = "no_matching_services";
const NO_POD: &str = "no_matching_metadata";

/// A connected proxy, with its class once that is known.
type Connected = (ConnectionId, Arc<Proxy>, Option<ProxyClassKey>);

/// The inputs of the gauges from the store.
pub(in crate::admin) struct Observed {
    proxies: Vec<Connected>,
    size: StoreSize,
}

impl Observed {
    /// Copies it from the store.
    pub(in crate::admin) fn of(store: &ConfigStore) -> Self {
        let proxies = store.proxies();
        Self {
            proxies: proxies
                .map(|(id, proxy, class)| (id, proxy.clone(), class.cloned()))
                .collect(),
            size: store.size(),
        }
    }
}

/// The gauges.
pub(in crate::admin) struct MeshMetrics {
    clusters_without_endpoints: IntGauge,
    endpoints_without_pod: IntGauge,
    not_ready: IntGauge,
    without_service: IntGauge,
    duplicate_subsets: IntGauge,
    resources: IntGauge,
    dependencies: IntGauge,
    new_without_service: IntCounterVec,
    /// Proxies without a service at the last collection.
    known: Mutex<BTreeSet<ConnectionId>>,
}

impl MeshMetrics {
    /// Registers the gauges.
    pub(in crate::admin) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
        Ok(Self {
            clusters_without_endpoints: gauge("pilot_eds_no_instances", "Number of service ports without endpoints.")?,
            endpoints_without_pod: gauge("endpoint_no_pod", "Endpoints without an associated pod.")?,
            not_ready: gauge(
                "pilot_endpoint_not_ready",
                "Connected proxies whose endpoint is not ready.",
            )?,
            without_service: gauge("pilot_no_ip", "Connected proxies that no service selects.")?,
            duplicate_subsets: gauge(
                "pilot_destrule_subsets",
                "Hosts with duplicate subsets across DestinationRules.",
            )?,
            resources: gauge("xds_cache_size", "Number of generated resources, each held once.")?,
            dependencies: gauge(
                "xds_cache_dependent_config_size",
                "Recorded dependencies of generated resources.",
            )?,
            new_without_service: metrics::counters(
                registry,
                "pilot_k8s_proxies_with_no_service_targets",
                "Number of proxies that do not have any corresponding service targets.",
                &["reason"],
            )?,
            known: Mutex::default(),
        })
    }

    /// Sets the gauges.
    pub(in crate::admin) fn set(&self, mesh: &MeshSnapshot, observed: &Observed) {
        let cx = Cx::untracked();
        let services = mesh.services.iter(&cx);
        let empty: usize = services
            .map(|(_, service)| ports_without_endpoints(mesh, service))
            .sum();
        self.clusters_without_endpoints.set(empty as i64);
        let awaiting = mesh.services_awaiting_pods.get(&cx, &());
        let pending: usize = awaiting.map(|(_, endpoints)| endpoints.pending).sum();
        self.endpoints_without_pod.set(pending as i64);
        let unready = unready_addresses(mesh);
        let addresses = observed
            .proxies
            .iter()
            .filter_map(|(_, proxy, _)| proxy.addresses.first());
        let not_ready = addresses.filter(|address| unready.contains(address.as_str()));
        self.not_ready.set(not_ready.count() as i64);
        self.duplicate_subsets.set(hosts_with_duplicate_subsets(mesh) as i64);
        self.resources.set(observed.size.resources as i64);
        self.dependencies.set(observed.size.reads as i64);
        self.count_without_service(mesh, &observed.proxies);
    }

    fn count_without_service(&self, mesh: &MeshSnapshot, proxies: &[Connected]) {
        let without = proxies
            .iter()
            .filter(|(_, _, class)| class.as_ref().is_some_and(|class| class.targets.is_empty()));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut present = BTreeSet::new();
        for (id, proxy, _) in without {
            if !known.contains(id) {
                let reason = if has_pod(mesh, proxy) { NO_SERVICE } else { NO_POD };
                self.new_without_service.with_label_values(&[reason]).inc();
            }
            present.insert(*id);
        }
        self.without_service.set(present.len() as i64);
        *known = present;
    }
}

/// Returns the number of ports that proxies reach by EDS and that have no endpoint.
fn ports_without_endpoints(mesh: &MeshSnapshot, service: &Service) -> usize {
    if service.resolution != Resolution::ClientSideLb {
        return 0;
    }
    let row = mesh.endpoints.get(&Cx::untracked(), &service.key);
    let endpoints = row.map(|row| &*row.endpoints).unwrap_or_default();
    let ports = || {
        let ports = service.ports.iter().filter(|port| port.protocol != Protocol::Udp);
        ports.map(|port| port.name.as_str())
    };
    // A service may have thousands of both. The first endpoints usually serve all ports.
    let mut empty: BTreeSet<&str> = ports().collect();
    for endpoint in endpoints {
        if empty.is_empty() {
            break;
        }
        empty.remove(endpoint.port_name.as_str());
    }
    ports().filter(|port| empty.contains(port)).count()
}

/// Returns the addresses of endpoints that are not ready. One pass over all endpoints: services may have as many
/// endpoints as there are proxies.
fn unready_addresses(mesh: &MeshSnapshot) -> BTreeSet<&str> {
    let cx = Cx::untracked();
    let mut addresses = BTreeSet::new();
    for (_, row) in mesh.endpoints.iter(&cx) {
        let unready = row.endpoints.iter().filter(|endpoint| is_unready(endpoint.health));
        addresses.extend(unready.map(|endpoint| endpoint.address.as_str()));
    }
    addresses
}

fn is_unready(health: Health) -> bool {
    matches!(health, Health::Unhealthy | Health::Terminating)
}

fn has_pod(mesh: &MeshSnapshot, proxy: &Proxy) -> bool {
    let Some((name, namespace)) = proxy.id.split_once('.') else {
        return false;
    };
    let key = ObjectKey::new(&proxy.node.cluster, namespace, name);
    mesh.pods.get(&Cx::untracked(), &key).is_some()
}

/// Returns the number of hosts for which merged DestinationRules declare a subset twice.
fn hosts_with_duplicate_subsets(mesh: &MeshSnapshot) -> usize {
    let cx = Cx::untracked();
    let has_duplicates = |from: &[ObjectKey]| {
        let mut names = BTreeSet::new();
        let rules = from.iter().filter_map(|key| mesh.raw_destination_rules.get(&cx, key));
        let mut subsets = rules.flat_map(|rule| &rule.spec.subsets);
        subsets.any(|subset| !names.insert(subset.name.as_str()))
    };
    let rows = mesh.destination_rules.iter(&cx);
    let hosts: BTreeSet<_> = rows
        .filter(|(_, rules)| {
            rules
                .local
                .iter()
                .any(|rule| rule.from.len() > 1 && has_duplicates(&rule.from))
        })
        .map(|(_, rules)| rules.local.first().map(|rule| rule.host.clone()))
        .collect();
    hosts.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Installation, fixture};

    const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 10.0.0.1, selector: {app: a}, ports: [{name: http, port: 80}, {name: tcp, port: 90}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.1.0.1], conditions: {ready: true}}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: one}
spec: {host: a, subsets: [{name: v1, labels: {version: v1}}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: two}
spec: {host: a, subsets: [{name: v1, labels: {version: v1}}]}
";

    #[test]
    fn empty_ports_and_duplicate_subsets_are_counted() {
        let world = fixture::folder_world(Installation::default(), &[("kube.yaml", OBJECTS)]);
        let mesh = world.snapshot();
        let metrics = MeshMetrics::new(&Registry::new()).expect("no name is taken");
        metrics.set(&mesh, &Observed::of(&ConfigStore::default()));
        assert_eq!(metrics.clusters_without_endpoints.get(), 1);
        assert_eq!(metrics.duplicate_subsets.get(), 1);
    }
}
