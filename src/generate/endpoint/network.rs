//! Split horizon: replaces endpoints in other networks by the gateways to these networks.

use std::collections::BTreeMap;

use super::{
    NetworkProxyView,
    lb_endpoint::{LbEndpoint, LocalityEndpoints, peer},
};
use crate::{
    base::{
        Labels, Shared,
        cidr::{self, IpMode},
    },
    generate::BuildContext,
    model::{
        Service,
        features::Features,
        network::{GatewayIndex, NetworkGateway},
        service::Resolution,
    },
};

/// Returns the gateways of a service: as declared if the proxy resolves names itself, otherwise those with an address.
pub(super) fn gateways_for<'a>(ctx: &BuildContext<'a>, service: &Service) -> Option<&'a GatewayIndex> {
    let networks = ctx.mesh.networks.get(ctx.cx, &())?;
    let index = match service.resolution {
        Resolution::DnsLb | Resolution::DnsRoundRobinLb => &networks.unresolved,
        _ => &networks.resolved,
    };
    index.is_multi_network().then_some(index)
}

/// Replaces endpoints by gateways. Weights are multiplied first, so that they can be divided among the gateways of a
/// network.
pub(super) fn through_gateways(
    ctx: &BuildContext,
    service: &Service,
    client: &NetworkProxyView,
    groups: Vec<LocalityEndpoints>,
) -> Vec<LocalityEndpoints> {
    let Some(networks) = gateways_for(ctx, service) else {
        return groups;
    };
    let features = &ctx.mesh.installation.features;
    let split = |group| split(features, networks, client, group);
    groups.into_iter().map(split).collect()
}

fn split(
    features: &Features,
    networks: &GatewayIndex,
    client: &NetworkProxyView,
    mut group: LocalityEndpoints,
) -> LocalityEndpoints {
    let mut shares: BTreeMap<(&str, u32, &NetworkGateway), u32> = BTreeMap::new();
    let mut kept = Vec::with_capacity(group.endpoints.len());
    for mut member in group.endpoints {
        let weight = member.weight.saturating_mul(networks.scale.max(1));
        let gateways = gateways(networks, &member);
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
        // The gateway finds the service by the SNI of mutual TLS; plaintext cannot pass.
        if member.mtls && !gateways.is_empty() {
            let share = weight / u32::try_from(gateways.len()).unwrap_or(u32::MAX);
            for gateway in gateways {
                let sum = shares
                    .entry((gateway.address.as_str(), gateway.port, gateway))
                    .or_default();
                *sum = sum.saturating_add(share);
            }
        }
    }
    let through = shares
        .into_iter()
        .map(|((_, _, gateway), weight)| gateway_member(features, gateway, weight.max(1)));
    kept.extend(through);
    group.endpoints = kept;
    group.refresh_weight();
    group
}

/// Returns the gateways to an endpoint: those of its network in its cluster, or else all of its network.
fn gateways<'a>(networks: &'a GatewayIndex, member: &LbEndpoint) -> Vec<&'a NetworkGateway> {
    let of_cluster = networks
        .by_network_and_cluster
        .get(&(member.network.clone(), member.cluster.clone()));
    let candidates = of_cluster
        .filter(|gateways| !gateways.is_empty())
        .or_else(|| networks.by_network.get(&member.network));
    candidates
        .into_iter()
        .flatten()
        .filter(|gateway| gateway.port != 0)
        .collect()
}

/// Returns true if the proxy can reach the gateway: they share an address family, or the gateway has a host name, whose
/// family is unknown.
fn is_reachable(client: &NetworkProxyView, gateway: &NetworkGateway) -> bool {
    client.ip_mode == IpMode::Dual
        || cidr::parse_ip(&gateway.address).is_some_and(|ip| client.ip_mode.serves(&ip.to_canonical()))
}

fn gateway_member(features: &Features, gateway: &NetworkGateway, weight: u32) -> LbEndpoint {
    let labels: Labels = [
        ("topology.istio.io/cluster", gateway.cluster.as_str()),
        ("topology.istio.io/network", gateway.network.as_str()),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(key, value)| (key.into(), value.into()))
    .collect();
    LbEndpoint {
        encoded: peer(
            features,
            &gateway.address,
            gateway.port,
            &format!(";;;;{}", gateway.cluster),
        ),
        weight,
        labels: Shared::new(labels),
        mtls: true,
        network: gateway.network.clone(),
        cluster: gateway.cluster.clone(),
        has_address: true,
    }
}
