//! Route configurations.
//!
//! A part lists the route configurations, with the services and VirtualServices that each consists of. A key contains
//! only references to these rows, so building one configuration reads few rows. Note: the key of a sidecar's route
//! configuration contains no routes, only the rows that they come from.

mod action;
mod assembly;
pub(crate) mod destination;
pub(crate) mod domains;
pub(crate) mod filters;
pub mod fragment;
mod gateway;
mod hash;
mod headers;
mod host_names;
mod http;
mod matches;
mod name_set;
mod retry;
pub mod routes;
pub(crate) mod sidecar;
pub(crate) mod surplus;
#[cfg(test)]
mod tests;
mod translation;
mod virtual_host;
pub(crate) mod waypoint;

pub use gateway::GatewayPieces;
pub(super) use host_names::HostNamesMemo;
pub(super) use http::DefaultRoutesMemo;
pub(super) use sidecar::BindingPool;
pub use sidecar::CommonRouteList;
pub(super) use sidecar::CommonRoutesMemo;

use super::{
    BuildContext, EncodedResource, ProxyType, VipView, labels,
    resource::{Built, UnknownRoutes},
    selected::Selected,
};
use crate::{
    base::{Hashed, Labels, Namespace, Shared, SmolStr},
    proto::envoy::config::route::v3::{RouteConfiguration, VirtualHost},
    table::LastPieces,
};

/// Inputs of the selection of a route part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RoutePart {
    /// Outbound routes of a sidecar.
    Sidecar(sidecar::SidecarPart),
    /// Routes of a gateway.
    Gateway(gateway::GatewayPart),
}

/// Inputs of one route configuration, besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RouteKey {
    /// Route configuration of a sidecar.
    Sidecar(sidecar::SidecarRoutes),
    /// Route configuration of a gateway.
    Gateway(gateway::GatewayRoutes),
}

/// Attributes of a proxy that route configurations depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteConfigProxyView {
    /// Attributes that single routes depend on.
    routes: RouteProxyView,
    /// `<namespace>.svc.<suffix>`, which decides the short names.
    dns_domain: SmolStr,
    /// Visibility of service addresses.
    vip: VipView,
    /// True if upstream requests carry the attempt count.
    include_attempt_count: bool,
}

/// Attributes of a proxy that single routes depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteProxyView {
    /// Namespace of the proxy.
    namespace: Namespace,
    /// Labels of the proxy that some rule selects by.
    labels: Shared<Labels>,
    /// True if a rewritten host is kept in `x-forwarded-host`.
    append_forwarded_host: bool,
    /// True if it is a proxyless gRPC client, which distinguishes ports in `Host` and has another field for timeouts.
    proxyless: bool,
}

impl RouteConfigProxyView {
    /// Returns the view of a client in a namespace without objects; `None` outside Kubernetes.
    fn without_source(&self) -> Option<Self> {
        Some(Self {
            routes: self.routes.without_source(),
            dns_domain: host_names::dns_domain_of_others(&self.dns_domain)?,
            ..self.clone()
        })
    }

    /// Returns the view of a selected proxy.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let headers = selected.proxy_config.proxy_headers.as_ref();
        let attempts = headers.and_then(|headers| headers.attempt_count.as_ref());
        let forwarded = headers.and_then(|headers| headers.x_forwarded_host.as_ref());
        Self {
            routes: RouteProxyView {
                namespace: selected.scope.namespace().clone(),
                labels: labels::relevant(ctx, selected),
                append_forwarded_host: forwarded.and_then(|forwarded| forwarded.enabled) == Some(true),
                proxyless: selected.proxy.is_proxyless(),
            },
            dns_domain: selected.proxy.dns_domain.clone(),
            vip: VipView::of(selected.proxy, &ctx.mesh.installation.features),
            include_attempt_count: attempts.and_then(|attempts| attempts.disabled) != Some(true),
        }
    }
}

/// Returns the route parts of a proxy.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<RoutePart> {
    let client = Hashed::new(RouteConfigProxyView::of(ctx, selected));
    match selected.proxy.proxy_type {
        ProxyType::Sidecar => vec![RoutePart::Sidecar(sidecar::SidecarPart::of(selected, client))],
        ProxyType::Router => vec![RoutePart::Gateway(gateway::GatewayPart::of(ctx, selected, client))],
        ProxyType::Waypoint | ProxyType::Ztunnel | ProxyType::Agentgateway => Vec::new(),
    }
}

/// Returns the answer to names of route configurations that do not exist.
pub fn unknown(ctx: &BuildContext, selected: &Selected) -> UnknownRoutes {
    match selected.proxy.proxy_type {
        _ if selected.proxy.is_proxyless() => UnknownRoutes::Omitted,
        ProxyType::Sidecar => {
            let client = RouteConfigProxyView::of(ctx, selected);
            UnknownRoutes::Sidecar(sidecar::placeholders(ctx, selected, &client).into())
        }
        ProxyType::Router | ProxyType::Waypoint => UnknownRoutes::Empty,
        ProxyType::Ztunnel | ProxyType::Agentgateway => UnknownRoutes::Omitted,
    }
}

impl RoutePart {
    /// Returns the part that lists what parts of several namespaces have in common; `None` if this one is that part, or
    /// shares nothing.
    pub fn common(&self) -> Option<Self> {
        match self {
            Self::Sidecar(part) => part.common().map(Self::Sidecar),
            Self::Gateway(_) => None,
        }
    }

    /// Lists what parts of several namespaces have in common; `None` if there is nothing.
    pub fn list_common(&self, ctx: &BuildContext) -> Option<CommonRouteList> {
        match self {
            Self::Sidecar(part) => part.list_common(ctx),
            Self::Gateway(_) => None,
        }
    }

    /// Lists the resources of the part, in order, with the pieces that the list was made in, if it was. A common list
    /// changes nothing but the cost.
    pub fn list(
        &self,
        ctx: &BuildContext,
        last: LastPieces<GatewayPieces>,
        common: Option<&CommonRouteList>,
    ) -> (Vec<RouteKey>, Option<GatewayPieces>) {
        match self {
            Self::Sidecar(part) => {
                let routes = common.and_then(|common| part.list_from(ctx, common));
                let routes = routes.unwrap_or_else(|| part.list(ctx));
                (routes.into_iter().map(RouteKey::Sidecar).collect(), None)
            }
            Self::Gateway(part) => {
                let (routes, pieces) = part.list(ctx, last);
                (routes.into_iter().map(RouteKey::Gateway).collect(), Some(pieces))
            }
        }
    }
}

impl RouteKey {
    /// Returns the fragments that the resource consists of.
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

/// Returns the route configuration of one host for a proxyless gRPC client.
fn plain_configuration(name: &str, virtual_hosts: Vec<VirtualHost>) -> EncodedResource {
    let message = RouteConfiguration {
        name: name.to_owned(),
        virtual_hosts,
        ..Default::default()
    };
    EncodedResource::new(name, &message)
}

/// Returns a route configuration for outbound traffic.
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
