//! The profile of a proxy: all that selection knows of it, so that replicas of one workload are one to it.

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
        ServiceKey,
        per_replica::{PerReplicaInputs, REPLICA_LABELS},
        service::Resolution,
    },
    proto::istio::mesh::v1alpha1::mesh_config::extension_provider::{
        OpenTelemetryTracingProvider, Provider, ServiceAttributeEnrichment,
    },
};

/// A service port that the proxy itself serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceTarget {
    /// Service.
    pub service: ServiceKey,
    /// The service's port number.
    pub port: u32,
    /// The port that the workload listens on; 0 when the object gives none.
    pub target_port: u32,
}

/// What a proxy says and what the registry says of it, as far as it can decide what the proxy is sent. What replicas do
/// not have in common stands here only where the mesh asks for it; otherwise it is empty.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ProxyClass {
    /// What it says of itself.
    pub node: Hashed<NodeMetadata>,
    /// Labels of the registry's pod or WorkloadEntry where known, else those of the node; with cluster, network,
    /// locality and node name laid over. Those of [`REPLICA_LABELS`] only where something asks for them.
    pub labels: Shared<Labels>,
    /// The services it serves, in a fixed order (service creation time, host, then as the service lists its ports).
    pub targets: Shared<[ServiceTarget]>,
    /// Who it has proved to be.
    pub identity: Option<Identity>,
    /// What it asks for, if it is sent nothing else.
    pub requested: Option<Shared<RequestedResources>>,
    /// `region/zone/subzone`, from the registry, labels or node; where it matters to some service.
    pub locality: SmolStr,
    /// Its node; where some service is node-local.
    pub node_name: SmolStr,
    /// Metadata that EnvoyFilters ask for, as far as it is text.
    pub metadata: Labels,
    /// Its addresses; where listeners or clusters of its own may name them.
    pub addresses: Shared<[SmolStr]>,
    /// Its first address; where it is an endpoint of a headless service.
    pub headless_address: Option<SmolStr>,
    /// Its pod; where traces may name it.
    pub pod: SmolStr,
}

/// A profile that is held once: hashed once, cheap to compare.
pub type ProxyClassKey = Hashed<ProxyClass>;

impl fmt::Debug for ProxyClass {
    /// Enough to find it. Metadata may be anything.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeMetadata {
            proxy_type, namespace, ..
        } = &*self.node;
        write!(f, "{proxy_type:?} of {namespace} with labels {:?}", self.labels)
    }
}

impl ProxyClass {
    /// Looks a proxy up. Nothing else sees a proxy by itself.
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
            requested: proxy.is_proxyless().then(|| requested.clone()),
            locality: where_needed(needs.is_some_and(|needs| needs.locality), &locality),
            node_name: where_needed(needs.is_some_and(|needs| needs.node), &proxy.node_name),
            metadata: needs.map(|needs| metadata(needs, proxy)).unwrap_or_default(),
            addresses: addresses(ctx, needs, proxy),
            headless_address: headless_address(ctx, proxy),
            pod: named_pod(ctx, proxy),
        }
    }
}

/// The labels without those of single replicas, unless something asks for these.
fn of_all_replicas(mut labels: Labels, needs: Option<&PerReplicaInputs>) -> Labels {
    let is_asked = |label: &str| needs.is_some_and(|needs| needs.labels.contains(label));
    let own = REPLICA_LABELS.into_iter().filter(|label| !is_asked(label));
    let own: Vec<&str> = own.filter(|label| labels.contains_key(*label)).collect();
    // Whether there are labels at all decides by itself.
    if own.len() < labels.len() {
        for label in own {
            labels.remove(label);
        }
    }
    labels
}

fn metadata(needs: &PerReplicaInputs, proxy: &Proxy) -> Labels {
    let text = |key: &SmolStr| Some((key.clone(), proxy.metadata.get(key.as_str())?.as_str()?.into()));
    needs.metadata.iter().filter_map(text).collect()
}

/// The addresses of a sidecar that takes HBONE, or whose Sidecar may have listeners.
fn addresses(ctx: &BuildContext, needs: Option<&PerReplicaInputs>, proxy: &Proxy) -> Shared<[SmolStr]> {
    let features = &ctx.mesh.installation.features;
    let in_tunnels = features.pilot_enable_sidecar_listening_hbone && proxy.has(MetadataKey::EnableHbone);
    let in_listeners = needs.is_some_and(|needs| needs.addresses(&proxy.namespace));
    let wanted = proxy.proxy_type == ProxyType::Sidecar && (in_tunnels || in_listeners);
    let addresses = wanted.then(|| proxy.addresses.clone());
    addresses.unwrap_or_default().into()
}

fn headless_address(ctx: &BuildContext, proxy: &Proxy) -> Option<SmolStr> {
    if proxy.proxy_type != ProxyType::Sidecar || !proxy.generator.is_empty() {
        return None;
    }
    let address = proxy.addresses.first()?;
    let mut serving = ctx.mesh.services_by_endpoint_address.get(ctx.cx, address);
    let headless = serving.any(|(key, _)| {
        let service = ctx.service(key);
        service.is_some_and(|service| service.resolution == Resolution::Passthrough)
    });
    headless.then(|| address.clone())
}

/// The pod that a node names, where nothing better may name its service in traces.
fn named_pod(ctx: &BuildContext, proxy: &Proxy) -> SmolStr {
    let has_name = !proxy.workload_name.is_empty() || !proxy.otel_service_name.is_empty();
    match proxy.id.split_once('.') {
        Some((pod, _)) if !has_name && names_services_by_conventions(ctx) => SmolStr::new(pod),
        _ => SmolStr::default(),
    }
}

/// True if there is a tracing provider that names services by OpenTelemetry's conventions.
pub fn names_services_by_conventions(ctx: &BuildContext) -> bool {
    let mut providers = ctx.mesh_config().extension_providers.iter();
    providers.any(|provider| match &provider.provider {
        Some(Provider::Opentelemetry(otel)) => names_by_conventions(otel),
        _ => false,
    })
}

/// True for a provider whose services are named by OpenTelemetry's semantic conventions.
pub fn names_by_conventions(otel: &OpenTelemetryTracingProvider) -> bool {
    otel.service_attribute_enrichment == ServiceAttributeEnrichment::OtelSemanticConventions as i32
}
