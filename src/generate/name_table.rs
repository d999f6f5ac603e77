//! The name table (NDS): what a proxy that captures DNS answers, one unnamed resource.
//!
//! What one would get wrong: only what egress listeners reach is in it, so gateways, which have none, get an empty one.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    EncodedResource, ProxyType, View,
    encoded::ResourceType,
    group::{Built, Listed, Resource},
    select::Selected,
    vip::VipView,
};
use crate::{
    base::{NetworkId, cidr},
    model::{
        ScopeKey, Service,
        endpoint::HeadlessAddress,
        service::{Registry, Resolution, UNSPECIFIED_IP},
    },
    proto::istio::networking::nds::v1::{NameTable, name_table::NameInfo},
};

/// Suffix of multi-cluster services, which have no short names.
const CLUSTER_SET_DOMAIN: &str = ".clusterset.local";

/// What a name table is selected by and built from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NameTableKey {
    /// What the client can see.
    scope: ScopeKey,
    /// Which addresses of services it uses.
    vips: VipView,
    /// Its network: pods of others are out of reach.
    network: NetworkId,
}

/// The name table of a proxy.
pub fn select(view: &View, selected: &Selected) -> NameTableKey {
    NameTableKey {
        scope: selected.scope.clone(),
        vips: VipView::of(selected.proxy, &view.mesh.installation.features),
        network: match selected.proxy.proxy_type {
            ProxyType::Sidecar => selected.network.clone(),
            _ => NetworkId::default(),
        },
    }
}

impl NameTableKey {
    /// The one resource.
    pub fn list(&self) -> Vec<Listed> {
        vec![Listed::new(ResourceType::NameTable, Resource::NameTable(self.clone()))]
    }

    /// Builds the table.
    pub fn build(&self, view: &View) -> Built {
        let mut table: BTreeMap<String, NameInfo> = BTreeMap::new();
        let scope = view.scope(&self.scope);
        for key in scope.egress.iter().flat_map(|listener| listener.services.iter()) {
            if let Some(service) = view.service(key) {
                self.add(view, service, &mut table);
            }
        }
        Built::new(EncodedResource::new("", &NameTable { table }))
    }

    fn add(&self, view: &View, service: &Service, table: &mut BTreeMap<String, NameInfo>) {
        let addresses = self.vips.addresses(service);
        let headless = addresses.iter().any(|address| address == UNSPECIFIED_IP);
        // Ranges are matched on, they answer no question.
        let mut ips: Vec<String> = addresses
            .iter()
            .filter(|address| is_usable(address))
            .map(ToString::to_string)
            .collect();
        if headless && service.resolution == Resolution::Passthrough {
            ips.extend(self.pods(view, service, table));
        }
        if ips.is_empty() {
            return;
        }
        let host = service.key.hostname.as_str();
        let row = row(service, host, service.name.as_str(), ips);
        match table.get_mut(host) {
            Some(standing) if service.registry == Registry::External => {
                if standing.registry == "External" {
                    standing.ips.extend(row.ips);
                }
            }
            _ => {
                table.insert(host.to_owned(), row);
            }
        }
    }

    /// Addresses of a headless service's pods; those that have names of their own get rows.
    fn pods(&self, view: &View, service: &Service, table: &mut BTreeMap<String, NameInfo>) -> Vec<String> {
        let traits = view.mesh.endpoint_traits.get(view.cx, &service.key);
        let (Some(traits), Some(port)) = (traits, service.ports.first()) else {
            return Vec::new();
        };
        let several_clusters = view.mesh.installation.features.enable_multicluster_headless;
        let mut ips = Vec::new();
        for pod in traits
            .addresses
            .iter()
            .filter(|pod| pod.port_name == port.name && pod.healthy)
        {
            let own: Vec<SmolStr> = std::iter::once(&pod.address)
                .chain(&pod.extra_addresses)
                .cloned()
                .collect();
            if !self.reaches(&pod.network) || !own.iter().all(|address| is_usable(address)) {
                continue;
            }
            let same_cluster = self.vips.cluster.is_empty() || pod.cluster == self.vips.cluster;
            name_pod(service, pod, &own, same_cluster, table);
            if same_cluster || several_clusters {
                ips.extend(own.iter().map(ToString::to_string));
            }
        }
        ips
    }

    fn reaches(&self, network: &NetworkId) -> bool {
        self.network.is_empty() || network.is_empty() || self.network == *network
    }
}

/// A pod with a host name in the service's subdomain is `<hostname>.<subdomain>.<rest of the service's host>`. One name
/// has one pod: that of the client's own cluster, if there is one.
fn name_pod(
    service: &Service,
    pod: &HeadlessAddress,
    ips: &[SmolStr],
    same_cluster: bool,
    table: &mut BTreeMap<String, NameInfo>,
) {
    let Some((_, rest)) = service.key.hostname.split_once('.') else {
        return;
    };
    if pod.subdomain.is_empty() {
        return;
    }
    let short_name = format!("{}.{}", pod.hostname, pod.subdomain);
    let host = format!("{short_name}.{rest}");
    if same_cluster || !table.contains_key(&host) {
        let ips = ips.iter().map(ToString::to_string).collect();
        let row = row(service, &host, &short_name, ips);
        table.insert(host, row);
    }
}

fn row(service: &Service, host: &str, short_name: &str, ips: Vec<String>) -> NameInfo {
    let has_short_name = service.registry == Registry::Kubernetes && !host.ends_with(CLUSTER_SET_DOMAIN);
    NameInfo {
        ips,
        registry: match service.registry {
            Registry::Kubernetes => "Kubernetes".to_owned(),
            Registry::External => "External".to_owned(),
        },
        shortname: if has_short_name {
            short_name.to_owned()
        } else {
            String::new()
        },
        namespace: if has_short_name {
            service.key.namespace.to_string()
        } else {
            String::new()
        },
        ..NameInfo::default()
    }
}

fn is_usable(address: &str) -> bool {
    address != UNSPECIFIED_IP && cidr::parse_ip(address).is_some()
}
