//! The class of a proxy: all of its attributes that selection reads. Replicas of one workload have the same class.

mod targets;
mod workload;

use std::fmt;

use smol_str::SmolStr;

use super::{
    BuildContext, RequestedResources,
    proxy::{Identity, MetadataKey, NodeMetadata, Proxy, ProxyType},
};
use crate::{
    base::{Hashed, Labels, Shared},
    model::{
        Service, ServiceKey,
        per_replica::{PerReplicaInputs, REPLICA_LABELS},
        service::{InboundPorts, Resolution, ServicePort},
    },
    proto::istio::mesh::v1alpha1::mesh_config::extension_provider::{
        OpenTelemetryTracingProvider, Provider, ServiceAttributeEnrichment,
    },
};

/// A service port that the proxy itself serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceTarget {
    /// The service.
    pub service: ServiceKey,
    /// The service's port number.
    pub port: u32,
    /// The port on which the workload listens; 0 if the object has none.
    pub target_port: u32,
    /// The service port, if only the Service in the workload's own cluster has it: a service of the model has the ports
    /// of the first cluster.
    pub own: Option<Box<ServicePort>>,
}

impl ServiceTarget {
    /// Returns the service port.
    pub fn declared<'a>(&'a self, service: &'a Service) -> Option<&'a ServicePort> {
        let own = self.own.as_deref();
        own.or_else(|| service.inbound_port(self.port, self.target_port))
    }

    /// Returns the service port, given all ports of the service.
    pub fn declared_among<'a>(&'a self, ports: &InboundPorts<'a>) -> Option<&'a ServicePort> {
        let own = self.own.as_deref();
        own.or_else(|| ports.get(self.port, self.target_port))
    }
}

/// The attributes of a proxy, from its node and the registry, that its configuration depends on. Attributes that differ
/// between replicas are filled only if the mesh refers to them; otherwise they are empty.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ProxyClass {
    /// The node metadata.
    pub node: Hashed<NodeMetadata>,
    /// Labels of the pod or WorkloadEntry in the registry, or else of the node, overlaid with cluster, network,
    /// locality and node name. Contains those of [`REPLICA_LABELS`] only if an object refers to them.
    pub labels: Shared<Labels>,
    /// The services it serves, by creation time and host of the service, then in the order of the service's ports.
    pub targets: Shared<[ServiceTarget]>,
    /// The verified identity.
    pub identity: Option<Identity>,
    /// The requested names, for proxyless clients and for clients that request workloads or services.
    pub requested: Option<Shared<RequestedResources>>,
    /// `region/zone/subzone` from the registry, labels or node; filled if a service uses locality.
    pub locality: SmolStr,
    /// The name of its Kubernetes node; filled if a service is node-local, or if it requests workloads by name.
    pub node_name: SmolStr,
    /// Text metadata that EnvoyFilters match.
    pub metadata: Labels,
    /// Its addresses; filled if its listeners or clusters may contain them.
    pub addresses: Shared<[SmolStr]>,
    /// Its first address; filled if it is an endpoint of a headless service.
    pub headless_address: Option<SmolStr>,
    /// The pod name; filled if traces may contain it.
    pub pod: SmolStr,
}

/// The key of a class, hashed once and cheap to compare.
pub type ProxyClassKey = Hashed<ProxyClass>;

impl fmt::Debug for ProxyClass {
    /// Shows only identifying attributes: metadata may be large.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeMetadata {
            proxy_type, namespace, ..
        } = &*self.node;
        write!(f, "{proxy_type:?} of {namespace} with labels {:?}", self.labels)
    }
}

impl ProxyClass {
    /// Computes the class of a proxy. No other step of generation reads a single proxy.
    pub fn of(ctx: &BuildContext, proxy: &Proxy, requested: &Shared<RequestedResources>) -> Self {
        let pod = workload::pod(ctx, proxy);
        let found = targets::targets(ctx, proxy, pod);
        let (labels, locality) = workload::labels_and_locality(ctx, proxy, pod, found.entry_labels);
        let needs = ctx.mesh.per_replica_inputs.get(ctx.cx, &());
        let needs = needs.map(|needs| &**needs);
        let where_needed = |needed: bool, text: &SmolStr| if needed { text.clone() } else { SmolStr::default() };
        Self {
            node: proxy.node.clone(),
            labels: Shared::new(of_all_replicas(labels, needs)),
            targets: found.list.into(),
            identity: proxy.identity.clone(),
            requested: (proxy.node.is_proxyless() || requested.has_addresses()).then(|| requested.clone()),
            locality: where_needed(needs.is_some_and(|needs| needs.locality), &locality),
            node_name: where_needed(
                needs.is_some_and(|needs| needs.node) || requested.has_named_addresses(),
                &proxy.node_name,
            ),
            metadata: needs.map(|needs| metadata(needs, proxy)).unwrap_or_default(),
            addresses: addresses(ctx, needs, proxy),
            headless_address: headless_address(ctx, proxy),
            pod: named_pod(ctx, proxy),
        }
    }
}

/// Removes labels of single replicas that no object refers to.
fn of_all_replicas(mut labels: Labels, needs: Option<&PerReplicaInputs>) -> Labels {
    let is_referenced = |label: &str| needs.is_some_and(|needs| needs.labels.contains(label));
    let own = REPLICA_LABELS.into_iter().filter(|label| !is_referenced(label));
    let own: Vec<&str> = own.filter(|label| labels.contains_key(*label)).collect();
    // An empty set of labels has a meaning of its own, so the last labels stay.
    if own.len() < labels.len() {
        for label in own {
            labels.remove(label);
        }
    }
    labels
}

fn metadata(needs: &PerReplicaInputs, proxy: &Proxy) -> Labels {
    if needs.metadata.is_empty() {
        return Labels::default();
    }
    let values = proxy.metadata.values();
    let text = |key: &SmolStr| Some((key.clone(), values.get(key.as_str())?.as_str()?.into()));
    needs.metadata.iter().filter_map(text).collect()
}

/// Returns the addresses of a sidecar that accepts HBONE or whose Sidecar may have listeners.
fn addresses(ctx: &BuildContext, needs: Option<&PerReplicaInputs>, proxy: &Proxy) -> Shared<[SmolStr]> {
    let features = &ctx.mesh.installation.features;
    let in_tunnels = features.pilot_enable_sidecar_listening_hbone && proxy.node.has(MetadataKey::EnableHbone);
    let in_listeners = needs.is_some_and(|needs| needs.addresses(&proxy.node.namespace));
    let uses_addresses = proxy.node.proxy_type == ProxyType::Sidecar && (in_tunnels || in_listeners);
    let addresses = uses_addresses.then(|| proxy.addresses.clone());
    addresses.unwrap_or_default().into()
}

fn headless_address(ctx: &BuildContext, proxy: &Proxy) -> Option<SmolStr> {
    if proxy.node.proxy_type != ProxyType::Sidecar || proxy.node.is_proxyless() {
        return None;
    }
    let address = proxy.addresses.first()?;
    let mut serving = ctx.mesh.services_by_endpoint_address.get(ctx.cx, address);
    let headless = serving.any(|(key, _)| {
        let mut services = ctx.service(key).into_iter().flat_map(|row| row.all());
        services.any(|service| service.resolution == Resolution::Passthrough)
    });
    headless.then(|| address.clone())
}

/// Returns the pod name of a node, if traces may use it as the service name.
fn named_pod(ctx: &BuildContext, proxy: &Proxy) -> SmolStr {
    let has_name = !proxy.node.workload_name.is_empty() || !proxy.node.otel_service_name.is_empty();
    match proxy.id.split_once('.') {
        Some((pod, _)) if !has_name && names_services_by_conventions(ctx) => SmolStr::new(pod),
        _ => SmolStr::default(),
    }
}

/// Returns true if a tracing provider names services by OpenTelemetry's conventions.
pub fn names_services_by_conventions(ctx: &BuildContext) -> bool {
    let mut providers = ctx.mesh_config().extension_providers.iter();
    providers.any(|provider| match &provider.provider {
        Some(Provider::Opentelemetry(otel)) => names_by_conventions(otel),
        _ => false,
    })
}

/// Returns true for a provider that names services by OpenTelemetry's semantic conventions.
pub fn names_by_conventions(otel: &OpenTelemetryTracingProvider) -> bool {
    otel.service_attribute_enrichment == ServiceAttributeEnrichment::OtelSemanticConventions as i32
}
