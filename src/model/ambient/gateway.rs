//! Gateways to other networks, as ztunnels know them: Gateways with the label of a network and an address in their
//! status.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/networks.go): in the config cluster those of the class for remote
//! gateways, in other clusters the gateways between networks themselves.

use std::{collections::BTreeMap, net::IpAddr};

use smol_str::SmolStr;

use super::{network_address, octets, trust_domain};
use crate::{
    api::{Config, gateway_api},
    base::{ClusterId, Namespace, NetworkId, cidr},
    model::{MeshSnapshot, network, waypoint::addresses_of_type},
    proto::istio::workload::{GatewayAddress, NamespacedHostname, Workload, gateway_address::Destination},
    table::Cx,
};

/// Class of gateways between networks.
const EAST_WEST_CLASS: &str = "istio-east-west";

/// One address of a gateway to a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Cluster of the object.
    pub cluster: ClusterId,
    /// Namespace of the object and of its service account.
    pub namespace: Namespace,
    /// Name of the object.
    pub name: SmolStr,
    /// The network behind it.
    pub network: NetworkId,
    /// An IP address or a host name.
    pub address: SmolStr,
    /// Port of HBONE; 0 if unknown.
    pub port: u32,
    /// The service account's name.
    pub service_account: SmolStr,
}

/// All gateways to networks, by network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateways(BTreeMap<NetworkId, Vec<Gateway>>);

/// Derives the gateways to all networks.
pub fn gateways(cx: &Cx, mesh: &MeshSnapshot, _: &()) -> Option<Gateways> {
    if !mesh.installation.features.pilot_enable_ambient {
        return None;
    }
    let objects = mesh.network_gateways.get(cx, &()).map(|(_, gateway)| gateway);
    let objects = objects.filter(|gateway| mesh.installation.is_ambient(gateway.meta.cluster()));
    let is_remote = |gateway: &Gateway| gateway.cluster != mesh.installation.cluster;
    let mut found: Vec<Gateway> = objects.flat_map(|object| addresses(mesh, object)).collect();
    let name = |gateway: &Gateway| (gateway.namespace.clone(), gateway.name.clone(), gateway.address.clone());
    // Of equal names, that of the config cluster counts.
    found.sort_by_cached_key(|gateway| (name(gateway), is_remote(gateway), gateway.cluster.clone()));
    found.dedup_by_key(|gateway| name(gateway));
    let mut by_network: BTreeMap<NetworkId, Vec<Gateway>> = BTreeMap::new();
    for gateway in found {
        by_network.entry(gateway.network.clone()).or_default().push(gateway);
    }
    Some(Gateways(by_network))
}

fn addresses(mesh: &MeshSnapshot, object: &Config<gateway_api::Gateway>) -> Vec<Gateway> {
    let Some(network) = network::label(&object.meta.labels) else {
        return Vec::new();
    };
    let is_own = *object.meta.cluster() == mesh.installation.cluster;
    let class = if is_own { network::REMOTE_CLASS } else { EAST_WEST_CLASS };
    let terminates = |listener: &gateway_api::gateway::Listener| {
        let mode = listener.tls.as_ref().and_then(|tls| tls.mode.as_deref());
        mode == Some("Terminate")
    };
    let mut listeners = object.spec.listeners.iter();
    let listener = listeners.find(|listener| listener.protocol == "HBONE" && (is_own || terminates(listener)));
    let Some(listener) = listener.filter(|_| object.spec.gateway_class_name == class) else {
        return Vec::new();
    };
    let listed = object.status.as_ref();
    let listed = listed.and_then(|status| status.get("addresses")?.as_array());
    let listed = listed
        .into_iter()
        .flatten()
        .filter_map(|address| address["value"].as_str());
    let is_usable = |value: &&str| {
        let mut typed = addresses_of_type(object, "IPAddress").chain(addresses_of_type(object, "Hostname"));
        typed.any(|usable| usable == *value)
    };
    let gateways = listed.filter(is_usable).map(|address| Gateway {
        cluster: object.meta.cluster().clone(),
        namespace: object.meta.namespace().clone(),
        name: object.meta.name().clone(),
        network: network.clone(),
        address: SmolStr::new(address),
        port: if is_own { u32::from(listener.port) } else { 0 },
        service_account: network::gateway_account(object),
    });
    gateways.collect()
}

impl Gateways {
    /// Returns all gateways.
    pub fn all(&self) -> impl Iterator<Item = &Gateway> {
        self.0.values().flatten()
    }

    /// Returns the gateways to a network.
    pub fn of_network(&self, network: &NetworkId) -> &[Gateway] {
        self.0.get(network).map_or(&[], Vec::as_slice)
    }
}

/// Returns the address of the gateway through which workloads of a network are reached.
pub(super) fn address_of(cx: &Cx, mesh: &MeshSnapshot, network: &NetworkId) -> Option<GatewayAddress> {
    if network.is_empty() {
        return None;
    }
    let gateways = mesh.ambient_gateways.get(cx, &())?;
    let mut usable = gateways.of_network(network).iter().filter(|gateway| gateway.port != 0);
    usable.next().map(|gateway| gateway.at(gateway.port))
}

impl Gateway {
    fn ip(&self) -> Option<IpAddr> {
        cidr::parse_ip(&self.address)
    }

    /// Returns the address with a port.
    fn at(&self, port: u32) -> GatewayAddress {
        let destination = match self.ip() {
            Some(ip) => Destination::Address(network_address(&self.network, ip)),
            None => Destination::Hostname(NamespacedHostname {
                namespace: self.namespace.to_string(),
                hostname: self.address.to_string(),
            }),
        };
        GatewayAddress {
            destination: Some(destination),
            hbone_mtls_port: port,
        }
    }

    /// Returns the address with the port of HBONE, by default the well-known one.
    pub(super) fn tunnel_address(&self) -> GatewayAddress {
        self.at(if self.port == 0 { network::HBONE_PORT } else { self.port })
    }

    /// Returns the resource name of the workload that represents it.
    pub(super) fn uid(&self) -> String {
        format!("NetworkGateway/{}/{}/{}", self.network, self.address, self.port)
    }

    /// Returns the workload that represents it.
    pub(super) fn workload(&self, cx: &Cx, mesh: &MeshSnapshot) -> Workload {
        let ip = self.ip();
        Workload {
            uid: self.uid(),
            name: self.uid(),
            namespace: self.namespace.to_string(),
            service_account: self.service_account.to_string(),
            network: self.network.to_string(),
            trust_domain: trust_domain(cx, mesh),
            addresses: ip.map(|ip| octets(ip).into()).into_iter().collect(),
            hostname: if ip.is_some() {
                String::new()
            } else {
                self.address.to_string()
            },
            ..Workload::default()
        }
    }
}
