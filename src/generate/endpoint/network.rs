//! Split horizon: replaces endpoints in other networks by the gateways to these networks.

use std::collections::BTreeMap;

use prost_types::Value;

use super::{
    NetworkProxyView,
    lb_endpoint::{LbEndpoint, LocalityEndpoints, SOCKET_METADATA, peer},
};
use crate::{
    api::label,
    base::{
        Labels, NetworkId, Shared,
        address::host_port,
        cidr::{self, IpMode},
    },
    generate::{
        BuildContext,
        constant::{ISTIO_METADATA, object, structure, text},
        proxy_view::NetworkCrossing,
        tunnel::{DESTINATION_METADATA, INNER_CONNECT_ORIGINATE, internal_address},
        wire::Encoded,
    },
    model::{
        Service,
        features::Features,
        network::{GatewayIndex, NetworkGateway},
    },
    proto::envoy::config::{
        core::v3::Metadata,
        endpoint::v3::{Endpoint, LbEndpoint as EnvoyLbEndpoint, lb_endpoint::HostIdentifier},
    },
};

/// The service port whose endpoints gateways lead to.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    /// The service.
    pub(super) service: &'a Service,
    /// The port.
    pub(super) port: u32,
    /// True if all endpoints have the same socket.
    pub(super) is_vip: bool,
}

/// The gateways that lead to endpoints of a service.
#[derive(Clone, Copy)]
pub(super) struct Gateways<'a> {
    /// Gateways as declared if the proxy resolves names itself, otherwise those with an address.
    known: &'a GatewayIndex,
    /// Gateways whose address will be known soon; `None` without any.
    pending: Option<&'a GatewayIndex>,
}

impl Gateways<'_> {
    /// Returns true if gateways lead to an endpoint, but no address of them is known yet.
    fn are_pending(&self, member: &LbEndpoint, crossing: NetworkCrossing) -> bool {
        let are_known = |index: &GatewayIndex| !gateways(index, member, crossing).is_empty();
        self.pending.is_some_and(are_known) && !are_known(self.known)
    }
}

/// Returns the gateways of a service; `None` without any.
pub(super) fn gateways_for<'a>(ctx: &BuildContext<'a>, service: &Service) -> Option<Gateways<'a>> {
    let networks = ctx.mesh.networks.get(ctx.cx, &())?;
    let (known, pending) = if service.resolution.is_dns() {
        (&networks.unresolved, None)
    } else {
        (&networks.resolved, Some(&networks.pending))
    };
    let pending = pending.filter(|pending| pending.is_multi_network());
    (known.is_multi_network() || pending.is_some()).then_some(Gateways { known, pending })
}

/// Replaces endpoints by gateways. Weights are multiplied first, so that they can be divided among the gateways of a
/// network.
pub(super) fn through_gateways(
    ctx: &BuildContext,
    target: Destination,
    client: &NetworkProxyView,
    groups: Vec<LocalityEndpoints>,
) -> Vec<LocalityEndpoints> {
    let none = GatewayIndex::default();
    let networks = match gateways_for(ctx, target.service) {
        None if client.crossing == NetworkCrossing::MutualTls => return groups,
        found => found.unwrap_or(Gateways {
            known: &none,
            pending: None,
        }),
    };
    let split = |group| split(ctx, target, networks, client, group);
    groups.into_iter().map(split).collect()
}

fn split(
    ctx: &BuildContext,
    target: Destination,
    networks: Gateways,
    client: &NetworkProxyView,
    mut group: LocalityEndpoints,
) -> LocalityEndpoints {
    let crossing = client.crossing;
    let features = &ctx.mesh.installation.features;
    let mut shares: BTreeMap<(&str, u32, &NetworkGateway), u32> = BTreeMap::new();
    let mut kept = Vec::with_capacity(group.endpoints.len());
    for mut member in group.endpoints {
        let weight = member.weight.saturating_mul(networks.known.scale.max(1));
        // Without its gateways, the endpoint would count as one that is reached directly.
        if member.network != client.network && networks.are_pending(&member, crossing) {
            continue;
        }
        let gateways = gateways(networks.known, &member, crossing);
        if !is_shared(&member.network, &client.network) {
            let has_gateway = || gateways.iter().any(|gateway| is_reachable(client, gateway));
            // Parity (pilot/pkg/xds/endpoints/ep_filters.go): in the ambient mode of several networks, sidecars do not
            // try endpoints of networks without a gateway either.
            let is_unreachable = match crossing {
                NetworkCrossing::MutualTls => features.ambient_enable_multi_network && !has_gateway(),
                NetworkCrossing::Tunnels => !has_gateway(),
                NetworkCrossing::Never => true,
            };
            if is_unreachable {
                continue;
            }
        }
        if gateways.is_empty() || member.network.is_empty() || member.network == client.network {
            if member.has_address {
                member.weight = weight;
                kept.push(member);
            }
            continue;
        }
        let gateways: Vec<_> = gateways
            .into_iter()
            .filter(|gateway| is_reachable(client, gateway))
            .collect();
        // The gateway finds the service by the SNI of mutual TLS; plaintext cannot pass. A tunnel names the service.
        if (member.mtls || crossing != NetworkCrossing::MutualTls) && !gateways.is_empty() {
            let share = weight / u32::try_from(gateways.len()).unwrap_or(u32::MAX);
            for gateway in gateways {
                let sum = shares
                    .entry((gateway.address.as_str(), gateway.port, gateway))
                    .or_default();
                *sum = sum.saturating_add(share);
            }
        }
    }
    let through = shares.into_iter().map(|((_, _, gateway), weight)| {
        let encoded = match crossing {
            NetworkCrossing::Tunnels | NetworkCrossing::Never => tunnelled(features, target, gateway),
            NetworkCrossing::MutualTls => {
                let workload = format!(";;;;{}", gateway.cluster);
                peer(features, &gateway.address, gateway.port, &workload)
            }
        };
        LbEndpoint {
            // Parity (pilot/pkg/xds/endpoints/ep_filters.go): gateways that pass mutual TLS through use no tunnels.
            mtls: crossing == NetworkCrossing::MutualTls,
            ..gateway_member(encoded, gateway, weight.max(1))
        }
    });
    kept.extend(through);
    group.endpoints = kept;
    group.refresh_weight();
    group
}

/// Returns true if two networks are the same, as far as is known.
fn is_shared(one: &NetworkId, other: &NetworkId) -> bool {
    one == other || one.is_empty() || other.is_empty()
}

/// Returns the gateways to an endpoint: those of its network in its cluster, or else all of its network.
fn gateways<'a>(networks: &'a GatewayIndex, member: &LbEndpoint, crossing: NetworkCrossing) -> Vec<&'a NetworkGateway> {
    let of_cluster = networks
        .by_network_and_cluster
        .get(&(member.network.clone(), member.cluster.clone()));
    let candidates = of_cluster
        .filter(|gateways| !gateways.is_empty())
        .or_else(|| networks.by_network.get(&member.network));
    candidates
        .into_iter()
        .flatten()
        .filter(|gateway| match crossing {
            NetworkCrossing::MutualTls => gateway.port != 0,
            NetworkCrossing::Tunnels | NetworkCrossing::Never => gateway.hbone_port != 0,
        })
        .collect()
}

/// Returns true if the proxy can reach the gateway: it has both address families, or they share one. The family of a
/// host name is unknown.
fn is_reachable(client: &NetworkProxyView, gateway: &NetworkGateway) -> bool {
    client.ip_mode == IpMode::Dual
        || cidr::parse_ip(&gateway.address).is_some_and(|ip| client.ip_mode.serves(&ip.to_canonical()))
}

/// Returns an endpoint that leads through the listener which originates the inner tunnel, whose target is the service.
/// The outer one leads to the gateway.
fn tunnelled(features: &Features, target: Destination, gateway: &NetworkGateway) -> Encoded<EnvoyLbEndpoint> {
    let address = host_port(&gateway.address, gateway.hbone_port);
    let service = format!("{}:{}", target.service.key.hostname, target.port);
    let entry = |name: &str, fields: Vec<(&str, Value)>| (name.to_owned(), structure(fields));
    let tunnel = object([("hbone_target_address".to_owned(), text(service))].into());
    let mut workload = vec![("double_hbone", tunnel)];
    if features.pilot_enable_telemetry_label && features.pilot_endpoint_telemetry_label {
        workload.push(("workload", text(format!(";;;;{}", gateway.cluster))));
    }
    let socket = (!target.is_vip).then(|| entry(SOCKET_METADATA, vec![("tunnel", text("http"))]));
    let metadata = [
        entry(DESTINATION_METADATA, vec![("local", text(address.as_str()))]),
        entry(ISTIO_METADATA, workload),
    ];
    Encoded::of(&EnvoyLbEndpoint {
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
            address: Some(internal_address(INNER_CONNECT_ORIGINATE, &address)),
            ..Default::default()
        })),
        metadata: Some(Metadata {
            filter_metadata: metadata.into_iter().chain(socket).collect(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

fn gateway_member(encoded: Encoded<EnvoyLbEndpoint>, gateway: &NetworkGateway, weight: u32) -> LbEndpoint {
    let labels: Labels = [
        ("topology.istio.io/cluster", gateway.cluster.as_str()),
        (label::NETWORK, gateway.network.as_str()),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(key, value)| (key.into(), value.into()))
    .collect();
    LbEndpoint {
        encoded,
        weight,
        labels: Shared::new(labels),
        mtls: true,
        network: gateway.network.clone(),
        cluster: gateway.cluster.clone(),
        has_address: true,
    }
}
