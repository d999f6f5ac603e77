//! A connected proxy as operators ask for it: its scope, its group, the services that it serves and what it refused.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::moment;
use crate::{
    api::Kind,
    base::{Hostname, Shared},
    distribution::{overview::RefusalReport, report::ObjectName},
    generate::{ResourceSnapshot, ResourceType, proxy_class::ProxyClassKey},
    model::SidecarScope,
    xds::registry::LiveConnection,
};

/// A group as one of its proxies sees it.
pub(in crate::admin::debug) struct Membership {
    /// The class of the proxy.
    pub(in crate::admin::debug) class: Option<ProxyClassKey>,
    /// The services that it sees.
    pub(in crate::admin::debug) scope: Option<Shared<SidecarScope>>,
    /// The number of connected proxies with the same configuration.
    pub(in crate::admin::debug) proxies: usize,
    /// Their resources, once these are generated.
    pub(in crate::admin::debug) resources: Option<Arc<ResourceSnapshot>>,
}

/// Returns the page of a proxy.
pub(in crate::admin::debug) fn proxy(live: &LiveConnection, of: &Membership, refusals: &[RefusalReport]) -> Value {
    let node = &live.proxy.node;
    let sidecar = of.scope.as_ref().and_then(|scope| scope.key.sidecar());
    let mut services: BTreeMap<&Hostname, Vec<u32>> = BTreeMap::new();
    for target in of.class.iter().flat_map(|class| &*class.targets) {
        services.entry(&target.service.hostname).or_default().push(target.port);
    }
    let services: Vec<Value> = services
        .into_iter()
        .map(|(host, ports)| json!({ "host": host.as_str(), "ports": ports }))
        .collect();
    let number = |snapshot: &Arc<ResourceSnapshot>| -> usize {
        let types = ResourceType::ALL.iter();
        types
            .map(|resource_type| snapshot.resources(*resource_type).iter().count())
            .sum()
    };
    let resources = of.resources.as_ref().map_or(0, number);
    json!({
        "proxy": live.proxy.id,
        "namespace": node.namespace.as_str(),
        "cluster": node.cluster.as_str(),
        "connectedAt": moment(live.connected_at.into()),
        "sidecar": sidecar.map(|key| ObjectName::of(Kind::Sidecar, key)),
        "visibleServices": of.scope.as_ref().map_or(0, |scope| scope.services.len()),
        "group": { "proxies": of.proxies, "resources": resources },
        "services": services,
        "refusals": refusals,
    })
}
