//! Networks and the gateways to them.

mod gateway_resource;

pub(super) use gateway_resource::{account as gateway_account, is_passthrough, labelled as labelled_gateway};

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use smol_str::SmolStr;

use super::{MeshSnapshot, inputs::InputWriters, output_limit, service::kube as registry};
use crate::{
    api::{Diagnostic, FieldError, Kind, Severity, kube, label::NETWORK, resolved_host::ResolvedHost},
    base::{ClusterId, Labels, Namespace, NetworkId, ObjectKey, Shared, cidr},
    proto::istio::mesh::v1alpha1::{
        Network,
        network::{istio_network_gateway::Gw, network_endpoints::Ne},
    },
    table::Cx,
};

/// A gateway to a network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkGateway {
    /// Address: an IP, or a host name among the unresolved ones.
    pub address: SmolStr,
    /// Port of mTLS passthrough, 15443 by default; 0 for none.
    pub port: u32,
    /// Port of HBONE; 0 for none.
    pub hbone_port: u32,
    /// Network behind the gateway.
    pub network: NetworkId,
    /// The cluster of the gateway, empty for addresses from meshNetworks.
    pub cluster: ClusterId,
    /// The identity for double HBONE as `namespace/account`, empty when unknown.
    pub service_account: SmolStr,
}

/// All gateways.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Networks {
    /// Gateways with an IP address. Gateways with a host name are omitted unless their address is known.
    pub resolved: GatewayIndex,
    /// All gateways as declared, including host names, for clusters that the proxy resolves by DNS.
    pub unresolved: GatewayIndex,
    /// Gateways with a host name that is being resolved for the first time.
    pub pending: GatewayIndex,
    /// Services and Gateways of which not all addresses count, see [`MAX_OF_NAMESPACE`].
    exceeding: BTreeSet<(Kind, ObjectKey)>,
}

/// Gateways by the networks behind them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct GatewayIndex {
    /// By network, sorted by address and port.
    pub by_network: BTreeMap<NetworkId, Vec<NetworkGateway>>,
    /// By network and cluster, sorted by address and port.
    pub by_network_and_cluster: BTreeMap<(NetworkId, ClusterId), Vec<NetworkGateway>>,
    /// Least common multiple of all list lengths: every endpoint weight is multiplied by it. 1 without gateways.
    pub scale: u32,
}

impl GatewayIndex {
    /// Indexes gateways.
    pub fn of(gateways: impl IntoIterator<Item = NetworkGateway>) -> Self {
        let mut index = Self {
            scale: 1,
            ..Self::default()
        };
        for gateway in gateways.into_iter().collect::<BTreeSet<_>>() {
            let in_cluster = (gateway.network.clone(), gateway.cluster.clone());
            index
                .by_network
                .entry(gateway.network.clone())
                .or_default()
                .push(gateway.clone());
            index
                .by_network_and_cluster
                .entry(in_cluster)
                .or_default()
                .push(gateway);
        }
        let sizes = index
            .by_network
            .values()
            .chain(index.by_network_and_cluster.values())
            .map(Vec::len);
        index.scale = sizes.fold(1, |scale, size| lcm(scale, u32::try_from(size).unwrap_or(u32::MAX)));
        index
    }

    /// Returns true if any gateway is known.
    pub fn is_multi_network(&self) -> bool {
        !self.by_network.is_empty()
    }
}

/// Returns the least common multiple; saturates instead of wrapping.
fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

/// Class of Gateways that represent a gateway of another network, which is not deployed here.
pub(super) const REMOTE_CLASS: &str = "istio-remote";
/// Label with the passthrough port of a gateway, by default [`PASSTHROUGH_PORT`].
const PORT_LABEL: &str = "networking.istio.io/gatewayPort";
/// Default port of mTLS passthrough.
const PASSTHROUGH_PORT: u32 = 15443;
/// Port of HBONE.
pub(super) const HBONE_PORT: u32 = 15008;

/// The maximum number of gateways that the objects of one namespace of a cluster declare. Each gateway is an endpoint
/// of every service with endpoints in its network, and a Service has room for ninety thousand addresses.
const MAX_OF_NAMESPACE: usize = 1000;

/// Gateways that objects declare.
#[derive(Default)]
struct Declared {
    gateways: Vec<NetworkGateway>,
    counts: BTreeMap<(ClusterId, Namespace), usize>,
    exceeding: BTreeSet<(Kind, ObjectKey)>,
}

impl Declared {
    /// Adds the gateways of an object, as many as its namespace may have.
    fn add(&mut self, kind: Kind, object: &ObjectKey, gateways: impl IntoIterator<Item = NetworkGateway>) {
        let namespace = (object.cluster.clone(), object.namespace.clone());
        let count = self.counts.entry(namespace).or_default();
        for gateway in gateways {
            if *count == MAX_OF_NAMESPACE {
                self.exceeding.insert((kind, object.clone()));
                return;
            }
            *count += 1;
            self.gateways.push(gateway);
        }
    }
}

/// Returns the network in the labels.
pub fn label(labels: &Labels) -> Option<NetworkId> {
    let label = labels.get(NETWORK).filter(|network| !network.is_empty());
    label.map(|network| NetworkId::from(network.clone()))
}

/// Returns the clusters whose system namespaces have changed.
pub fn system_candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<ClusterId> {
    let changed = inputs.namespaces.changes().iter().map(|(key, ..)| key);
    let system = changed.filter(|key| key.name == mesh.installation.namespace.as_str());
    system.map(|key| key.cluster.clone()).collect()
}

/// Derives the network in the label of a cluster's system namespace. All workloads without a label of their own depend
/// on it, so other changes of the Namespace must leave the row as it is.
pub fn of_system_namespace(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId) -> Option<NetworkId> {
    let system = ObjectKey::new(cluster, "", SmolStr::new(mesh.installation.namespace.as_str()));
    label(&mesh.namespaces.get(cx, &system)?.meta.labels)
}

/// Returns the network of an endpoint: its label, or else that of its cluster's system namespace, or else the network
/// of the cluster in meshNetworks, or else the network whose range contains the address.
pub fn of_endpoint(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId, labels: &Labels, address: &str) -> NetworkId {
    if let Some(network) = label(labels) {
        return network;
    }
    if let Some(network) = mesh.system_networks.get(cx, cluster) {
        return NetworkId::clone(network);
    }
    let Some(networks) = mesh.mesh_networks.get(cx, &mesh.installation.mesh_config_key()) else {
        return NetworkId::default();
    };
    let networks = &networks.spec.networks;
    // Names of registries are known in any case: `fromRegistry: consul`.
    let is_registry = mesh.installation.registries.contains(cluster);
    let lists = |network: &Network| {
        let named = network.endpoints.iter().filter_map(|endpoints| match &endpoints.ne {
            Some(Ne::FromRegistry(name)) => Some(name),
            _ => None,
        });
        is_registry && named.into_iter().any(|name| name.eq_ignore_ascii_case(cluster))
    };
    let of_cluster = networks
        .iter()
        .find(|(_, network)| lists_registry(network, cluster) || lists(network));
    let found = of_cluster.map(|(id, _)| id).or_else(|| by_range(networks, address));
    found.map(NetworkId::new).unwrap_or_default()
}

/// Returns true if endpoints of the cluster belong to the network.
fn lists_registry(network: &Network, cluster: &ClusterId) -> bool {
    network.endpoints.iter().any(|endpoints| match &endpoints.ne {
        Some(Ne::FromRegistry(registry)) => cluster == registry.as_str(),
        _ => false,
    })
}

/// Returns the network with the widest range that contains the address.
fn by_range<'a>(networks: &'a BTreeMap<String, Network>, address: &str) -> Option<&'a String> {
    let ip = cidr::parse_ip(address)?;
    let ranges = networks
        .iter()
        .flat_map(|(id, network)| network.endpoints.iter().map(move |entry| (id, entry)));
    let holding = ranges.filter_map(|(id, entry)| match &entry.ne {
        Some(Ne::FromCidr(range)) => range
            .parse::<IpNet>()
            .ok()
            .filter(|net| net.contains(&ip))
            .map(|net| (net, id)),
        _ => None,
    });
    holding
        .min_by_key(|(net, id)| (net.prefix_len(), *id))
        .map(|(_, id)| id)
}

/// Derives the network gateways: addresses and services in meshNetworks, and labelled Services and Gateways.
pub fn networks(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<Networks> {
    let mut declared = Declared::default();
    for (key, service) in mesh.network_services.get(cx, &()) {
        let template = labelled(service).into_iter();
        let reached = template.flat_map(|template| reached(cx, mesh, service, &template));
        declared.add(Kind::Service, key, reached);
    }
    if mesh.installation.features.pilot_multi_network_discover_gateway_api {
        let labelled = mesh.network_gateways.get(cx, &()).map(|(_, gateway)| &**gateway);
        let hidden = mesh.hidden_gateways.iter(cx).map(|(_, row)| &*row.gateway);
        for gateway in labelled.chain(hidden) {
            let offered = gateway_resource::offered(&mesh.installation, gateway);
            declared.add(Kind::KubeGateway, &gateway.meta.key, offered);
        }
    }
    let mut gateways = declared.gateways;
    let config = mesh.mesh_networks.get(cx, &mesh.installation.mesh_config_key());
    for (id, network) in config.iter().flat_map(|config| &config.spec.networks) {
        for gateway in &network.gateways {
            match &gateway.gw {
                Some(Gw::Address(address)) if !address.is_empty() => gateways.push(NetworkGateway {
                    address: SmolStr::new(address),
                    ..template(id, gateway.port)
                }),
                Some(Gw::RegistryServiceName(host)) => {
                    let services = registry_services(cx, mesh, host);
                    let named = services.into_iter().filter(|service| {
                        network_label(service).is_none() && lists_registry(network, service.meta.cluster())
                    });
                    gateways.extend(named.flat_map(|service| reached(cx, mesh, service, &template(id, gateway.port))));
                }
                _ => {}
            }
        }
    }
    let resolved = gateways.iter().flat_map(|gateway| resolved(cx, mesh, gateway));
    let pending = gateways.iter().filter(|gateway| is_pending(cx, mesh, gateway));
    Some(Networks {
        resolved: GatewayIndex::of(resolved),
        pending: GatewayIndex::of(pending.cloned()),
        unresolved: GatewayIndex::of(gateways),
        exceeding: declared.exceeding,
    })
}

/// Returns a gateway for each address of its host name; none before the first answer, and none if resolution is
/// disabled.
fn resolved(cx: &Cx, mesh: &MeshSnapshot, gateway: &NetworkGateway) -> Vec<NetworkGateway> {
    if cidr::parse_ip(&gateway.address).is_some() {
        return vec![gateway.clone()];
    }
    if !mesh.installation.features.resolve_hostname_gateways {
        return Vec::new();
    }
    let key = ResolvedHost::key(&mesh.installation.cluster, &gateway.address);
    let addresses = mesh.resolved_hosts.get(cx, &key).map(|host| &host.addresses);
    let at = |address: &IpAddr| NetworkGateway {
        address: SmolStr::new(address.to_string()),
        ..gateway.clone()
    };
    addresses.into_iter().flatten().map(at).collect()
}

/// Returns true if the gateway has a host name without an answer, and will have one.
fn is_pending(cx: &Cx, mesh: &MeshSnapshot, gateway: &NetworkGateway) -> bool {
    let installation = &mesh.installation;
    let resolves = installation.resolves_hosts && installation.features.resolve_hostname_gateways;
    let has_answer = || {
        let key = ResolvedHost::key(&installation.cluster, &gateway.address);
        mesh.resolved_hosts.get(cx, &key).is_some()
    };
    resolves && cidr::parse_ip(&gateway.address).is_none() && !has_answer()
}

/// Returns the host names of gateways.
pub fn hosts(networks: &Networks) -> BTreeSet<SmolStr> {
    let gateways = networks.unresolved.by_network.values().flatten();
    let addresses = gateways.map(|gateway| &gateway.address);
    addresses
        .filter(|address| cidr::parse_ip(address).is_none())
        .cloned()
        .collect()
}

/// Returns diagnostics of gateways that are ignored because host names are not resolved.
pub fn dropped(cx: &Cx, mesh: &MeshSnapshot) -> Vec<Diagnostic> {
    if mesh.installation.features.resolve_hostname_gateways {
        return Vec::new();
    }
    let networks = mesh.networks.get(cx, &());
    let hosts = networks.map(|networks| hosts(networks)).unwrap_or_default();
    let tell = |host: SmolStr| {
        let message =
            format!("the gateway {host} does not count: host names are resolved only with RESOLVE_HOSTNAME_GATEWAYS");
        let finding = FieldError {
            field: String::new(),
            message,
        };
        let key = mesh.installation.mesh_config_key();
        Diagnostic::of_object(Kind::MeshNetworks, key, Severity::Warning, "UnresolvedGateway", finding)
    };
    hosts.into_iter().map(tell).collect()
}

/// Returns a diagnostic for each object whose addresses do not all count.
pub fn exceeded(cx: &Cx, mesh: &MeshSnapshot) -> Vec<Diagnostic> {
    let networks = mesh.networks.get(cx, &()).into_iter();
    let objects = networks.flat_map(|networks| &networks.exceeding);
    let tell = |(kind, object): &(Kind, ObjectKey)| {
        let finding = FieldError {
            field: String::new(),
            message: format!(
                "the network gateways of the namespace exceed the limit of {MAX_OF_NAMESPACE}; further addresses do \
                 not count"
            ),
        };
        Diagnostic::of_object(*kind, object.clone(), Severity::Warning, output_limit::CODE, finding)
    };
    objects.map(tell).collect()
}

/// Returns a gateway without address and cluster.
fn template(network: &str, port: u32) -> NetworkGateway {
    NetworkGateway {
        address: SmolStr::default(),
        port,
        hbone_port: 0,
        network: NetworkId::new(network),
        cluster: ClusterId::default(),
        service_account: SmolStr::default(),
    }
}

/// Returns the label that makes a Service a gateway, unless it is empty.
pub(super) fn network_label(service: &kube::Service) -> Option<&SmolStr> {
    service.meta.labels.get(NETWORK).filter(|network| !network.is_empty())
}

/// Returns the gateway that a labelled Service declares; `None` if it has neither the passthrough port nor the HBONE
/// port.
fn labelled(service: &kube::Service) -> Option<NetworkGateway> {
    let network = network_label(service)?;
    let given = service.meta.labels.get(PORT_LABEL);
    let port = given.and_then(|text| text.parse().ok()).unwrap_or(PASSTHROUGH_PORT);
    let served = |number: u32| {
        let found = service
            .ports
            .iter()
            .any(|port| port.number == number && port.protocol != "UDP");
        if found { number } else { 0 }
    };
    let gateway = NetworkGateway {
        hbone_port: served(HBONE_PORT),
        ..template(network, served(port))
    };
    (gateway.port > 0 || gateway.hbone_port > 0).then_some(gateway)
}

/// Returns the Services of all clusters with this host name.
fn registry_services<'a>(cx: &Cx, mesh: &'a MeshSnapshot, host: &str) -> Vec<&'a Shared<kube::Service>> {
    let suffix = format!(".svc.{}", mesh.installation.domain);
    let parts = host.strip_suffix(&suffix).and_then(|rest| rest.split_once('.'));
    let Some((name, namespace)) = parts else {
        return Vec::new();
    };
    registry::objects(cx, mesh, &Namespace::new(namespace), &SmolStr::new(name))
}

/// Returns a gateway for each external address of the Service; a node port, if any, replaces the port.
fn reached(cx: &Cx, mesh: &MeshSnapshot, service: &kube::Service, template: &NetworkGateway) -> Vec<NetworkGateway> {
    let (addresses, node_ports) = registry::external_addresses(cx, mesh, service);
    let node_port = node_ports.and_then(|ports| ports.get(&template.port).copied());
    let addresses = addresses.iter().flat_map(|addresses| addresses.iter());
    let gateways = addresses.map(|address| NetworkGateway {
        address: address.clone(),
        port: node_port.unwrap_or(template.port),
        cluster: service.meta.cluster().clone(),
        ..template.clone()
    });
    gateways.collect()
}

#[cfg(test)]
mod tests;
