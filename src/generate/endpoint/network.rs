//! Split horizon: endpoints in other networks are reached through the gateways that lead there.

use std::collections::BTreeMap;

use super::{
    NetworkClient,
    assignment::{Group, Member, metadata},
};
use crate::{
    base::{Labels, Shared, cidr},
    generate::{View, constant},
    model::network::{NetworkGateway, Networks},
    proto::envoy::config::endpoint::v3::{Endpoint as EnvoyEndpoint, LbEndpoint, lb_endpoint::HostIdentifier},
};

/// Replaces endpoints by gateways. Weights are multiplied, so that they can be divided among the gateways of a network.
pub(super) fn through_gateways(view: &View, client: &NetworkClient, groups: Vec<Group>) -> Vec<Group> {
    match view.mesh.networks.get(view.cx, &()) {
        Some(networks) if networks.is_multi_network() => {
            groups.into_iter().map(|group| split(networks, client, group)).collect()
        }
        _ => groups,
    }
}

fn split(networks: &Networks, client: &NetworkClient, mut group: Group) -> Group {
    let mut shares: BTreeMap<(&str, u32, &NetworkGateway), u32> = BTreeMap::new();
    let mut kept = Vec::with_capacity(group.endpoints.len());
    for mut member in group.endpoints {
        let weight = member.weight().saturating_mul(networks.scale.max(1));
        let gateways = gateways(networks, client, &member);
        if gateways.is_empty() || member.network.is_empty() || member.network == client.network {
            if member.has_address {
                member.message.load_balancing_weight = Some(weight);
                kept.push(member);
            }
        } else if member.mtls {
            // The gateway finds the service by the SNI of mutual TLS; plaintext cannot pass.
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
        .map(|((_, _, gateway), weight)| gateway_member(gateway, weight.max(1)));
    kept.extend(through);
    group.endpoints = kept;
    group.refresh_weight();
    group
}

/// The gateways that lead to an endpoint: those of its network in its cluster, else all of its network.
fn gateways<'a>(networks: &'a Networks, client: &NetworkClient, member: &Member) -> Vec<&'a NetworkGateway> {
    let of_cluster = networks
        .by_network_and_cluster
        .get(&(member.network.clone(), member.cluster.clone()));
    let candidates = of_cluster
        .filter(|gateways| !gateways.is_empty())
        .or_else(|| networks.by_network.get(&member.network));
    let reachable = |gateway: &&NetworkGateway| {
        gateway.port != 0 && cidr::parse_ip(&gateway.address).is_none_or(|ip| client.ip_mode.serves(&ip))
    };
    candidates.into_iter().flatten().filter(reachable).collect()
}

fn gateway_member(gateway: &NetworkGateway, weight: u32) -> Member {
    let labels: Labels = [
        ("topology.istio.io/cluster", gateway.cluster.as_str()),
        ("topology.istio.io/network", gateway.network.as_str()),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(key, value)| (key.into(), value.into()))
    .collect();
    Member {
        message: LbEndpoint {
            host_identifier: Some(HostIdentifier::Endpoint(EnvoyEndpoint {
                address: Some(constant::address(&gateway.address, gateway.port)),
                ..Default::default()
            })),
            load_balancing_weight: Some(weight),
            metadata: Some(metadata(Some("istio"), Some(format!(";;;;{}", gateway.cluster)))),
            ..Default::default()
        },
        labels: Shared::new(labels),
        mtls: true,
        network: gateway.network.clone(),
        cluster: gateway.cluster.clone(),
        has_address: true,
    }
}
