//! Route configurations.
//!
//! A part finds out which route configurations there are and which services and VirtualServices each of them is made
//! of; a key then names just these, so that building one reads few rows. What one would get wrong: the key of a
//! sidecar's route does not hold routes, only the rows that they come from.

mod action;
mod assembly;
pub(crate) mod destination;
pub(crate) mod domains;
pub(crate) mod filters;
pub mod fragment;
mod gateway;
mod hash;
mod headers;
mod http;
mod matches;
mod retry;
pub(crate) mod sidecar;
#[cfg(test)]
mod tests;
mod virtual_host;
pub(crate) mod waypoint;

pub(super) use http::DefaultRoutes;

use super::{
    BuildContext, EncodedResource, ProxyType, ResourceType, VipView,
    group::{Built, ListedResource, Resource},
    labels,
    select::Selected,
};
use crate::{
    base::{Hashed, Labels, Namespace, Shared, SmolStr},
    proto::envoy::config::route::v3::{RouteConfiguration, VirtualHost},
};

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RoutePart {
    /// The outbound routes of a sidecar.
    Sidecar(sidecar::SidecarPart),
    /// The routes of a gateway.
    Gateway(gateway::GatewayPart),
}

/// What one route configuration is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RouteKey {
    /// A sidecar's.
    Sidecar(sidecar::SidecarRoutes),
    /// A gateway's.
    Gateway(gateway::GatewayRoutes),
}

/// What route configurations depend on of a client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client {
    /// What the routes in them depend on.
    routes: RouteProxyView,
    /// `<namespace>.svc.<suffix>`: decides about short names.
    dns_domain: SmolStr,
    /// How it sees addresses.
    vip: VipView,
    /// Upstreams are told how often a request was tried.
    include_attempt_count: bool,
}

/// What single routes depend on of a client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteProxyView {
    /// Its namespace.
    namespace: Namespace,
    /// Its labels that some rule asks for.
    labels: Shared<Labels>,
    /// A rewritten host is kept in `x-forwarded-host`.
    append_forwarded_host: bool,
    /// It is a gRPC client without a proxy: it tells ports apart in `Host`, and knows time limits by another name.
    proxyless: bool,
}

impl Client {
    /// What routes depend on of a selected proxy.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let headers = selected.proxy_config.proxy_headers.as_ref();
        let attempts = headers.and_then(|headers| headers.attempt_count.as_ref());
        let forwarded = headers.and_then(|headers| headers.x_forwarded_host.as_ref());
        Self {
            routes: RouteProxyView {
                namespace: selected.scope.namespace().clone(),
                labels: labels::asked(ctx, selected),
                append_forwarded_host: forwarded.and_then(|forwarded| forwarded.enabled) == Some(true),
                proxyless: selected.proxy.is_proxyless(),
            },
            dns_domain: selected.proxy.dns_domain.clone(),
            vip: VipView::of(selected.proxy, &ctx.mesh.installation.features),
            include_attempt_count: attempts.and_then(|attempts| attempts.disabled) != Some(true),
        }
    }
}

/// The parts of this kind that a proxy gets.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<RoutePart> {
    let client = Hashed::new(Client::of(ctx, selected));
    match selected.proxy.proxy_type {
        ProxyType::Sidecar => vec![RoutePart::Sidecar(sidecar::SidecarPart::of(selected, client))],
        ProxyType::Router => vec![RoutePart::Gateway(gateway::GatewayPart::of(ctx, selected, client))],
        ProxyType::Waypoint | ProxyType::Ztunnel | ProxyType::Agentgateway => Vec::new(),
    }
}

impl RoutePart {
    /// The resources of the part, in order.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListedResource> {
        let keys = match self {
            Self::Sidecar(part) => part.list(ctx).into_iter().map(RouteKey::Sidecar).collect::<Vec<_>>(),
            Self::Gateway(part) => part.list(ctx).into_iter().map(RouteKey::Gateway).collect(),
        };
        keys.into_iter()
            .map(|key| ListedResource::new(ResourceType::Route, Resource::Route(key)))
            .collect()
    }
}

impl RouteKey {
    /// The fragments that the resource is made of.
    pub fn fragments(&self) -> impl Iterator<Item = &fragment::FragmentKey> {
        let (sidecar, gateway) = match self {
            Self::Sidecar(routes) => (Some(routes), None),
            Self::Gateway(routes) => (None, Some(routes)),
        };
        let of_sidecar = sidecar.into_iter().flat_map(sidecar::SidecarRoutes::fragments);
        of_sidecar.chain(gateway.into_iter().flat_map(gateway::GatewayRoutes::fragments))
    }

    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Sidecar(routes) => routes.build(ctx),
            Self::Gateway(routes) => routes.build(ctx),
        }
    }
}

const MAX_DIRECT_RESPONSE_BYTES: u32 = 1024 * 1024;

/// The route configuration of one host, for a gRPC client without a proxy.
fn plain_configuration(name: &str, virtual_hosts: Vec<VirtualHost>) -> EncodedResource {
    let message = RouteConfiguration {
        name: name.to_owned(),
        virtual_hosts,
        ..Default::default()
    };
    EncodedResource::new(name, &message)
}

/// A route configuration for outbound traffic.
fn configuration(name: &str, virtual_hosts: Vec<VirtualHost>) -> RouteConfiguration {
    RouteConfiguration {
        name: name.to_owned(),
        virtual_hosts,
        validate_clusters: Some(false),
        max_direct_response_body_size_bytes: Some(MAX_DIRECT_RESPONSE_BYTES),
        ignore_port_in_host_matching: true,
        ..Default::default()
    }
}

/// What gateways are sent for a name that no server has.
pub(super) fn empty_configuration(name: &str) -> RouteConfiguration {
    RouteConfiguration {
        name: name.to_owned(),
        validate_clusters: Some(false),
        ..Default::default()
    }
}
