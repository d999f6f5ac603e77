//! Security filters: JWT, RBAC and external authorization. The builder of a filter stack decides their position.
//!
//! Note: none of them may be omitted because the proxy cannot run it. A chain whose policies cannot be enforced denies
//! all traffic ([`SecurityFilters::denied`]).

mod custom;
mod item;
pub(crate) mod jwt;
mod matcher;
mod permission;
mod principal;
mod rbac;
mod rule;
mod trust_domain;

pub use rbac::proxyless_filters;

use prost::Message;

use super::{
    FilterStack,
    chain_limit::{self, Excess},
    memo::Noted,
    proxy_view::ListenerClass,
    security_filters::{PeerSource, SecurityFilters},
};
use crate::{
    api::Config,
    generate::BuildContext,
    proto::{
        envoy::{
            config::{
                listener::v3::Filter,
                route::v3::{
                    DirectResponseAction, Route, RouteConfiguration, RouteMatch, VirtualHost, route,
                    route_match::PathSpecifier,
                },
            },
            extensions::filters::network::http_connection_manager::v3::HttpFilter,
        },
        istio::security::v1beta1::{
            AuthorizationPolicy,
            authorization_policy::{Action, ActionDetail},
        },
    },
    table::Memoized,
};

/// RBAC filter of HTTP chains.
const HTTP_RBAC: &str = "envoy.filters.http.rbac";

/// RBAC filter of TCP chains.
const NETWORK_RBAC: &str = "envoy.filters.network.rbac";

/// External authorization filter of HTTP chains.
const HTTP_EXT_AUTHZ: &str = "envoy.filters.http.ext_authz";

/// External authorization filter of TCP chains.
const NETWORK_EXT_AUTHZ: &str = "envoy.filters.network.ext_authz";

/// JWT filter. The claims of valid tokens are dynamic metadata under this name.
pub(crate) const JWT_FILTER: &str = "envoy.filters.http.jwt_authn";

/// Matcher of path templates inside an RBAC filter.
const URI_TEMPLATE_MATCHER: &str = "envoy.path.match.uri_template.uri_template_matcher";

/// Statistics prefix of network filters.
const NETWORK_STAT_PREFIX: &str = "tcp.";

/// Traffic of a chain; requests have attributes that connections lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    Http,
    Tcp,
}

impl Traffic {
    /// Returns the maximum number of chains of an inbound port: one without a declared protocol has all of them.
    fn chains_of_a_port(self) -> usize {
        match self {
            Self::Http => chain_limit::HTTP_CHAINS,
            Self::Tcp => chain_limit::TCP_CHAINS,
        }
    }
}

/// Code of the note about security filters beyond the limit of all chains.
const TOO_LARGE: &str = "security_filters_too_large";

impl FilterStack<'_> {
    /// Returns the security filters of HTTP chains.
    fn shared_http_security(&self, peer_source: PeerSource) -> Memoized<Noted<SecurityFilters<HttpFilter>>> {
        let memo = &self.memo().http_security;
        self.shared(memo, (self.key(), peer_source), |stack| {
            stack.make_http_security(peer_source)
        })
    }

    /// Returns the security filters of TCP chains.
    fn shared_network_security(&self, peer_source: PeerSource) -> Memoized<Noted<SecurityFilters<Filter>>> {
        let memo = &self.memo().network_security;
        self.shared(memo, (self.key(), peer_source), |stack| {
            stack.make_network_security(peer_source)
        })
    }

    /// Returns the security filters of HTTP chains.
    pub fn http_security(&self, peer_source: PeerSource) -> &SecurityFilters<HttpFilter> {
        let built = self.security.http[peer_source as usize].get_or_init(|| self.shared_http_security(peer_source));
        &built.value
    }

    /// Builds [`Self::http_security`].
    fn make_http_security(&self, peer_source: PeerSource) -> SecurityFilters<HttpFilter> {
        self.checked(Traffic::Http, || SecurityFilters {
            custom: custom::http_filters(self, peer_source),
            authentication: jwt::filter(self).into_iter().collect(),
            authorization: rbac::http_filters(self, peer_source),
            denied: false,
        })
    }

    /// Returns the security filters of TCP chains.
    pub fn network_security(&self, peer_source: PeerSource) -> &SecurityFilters<Filter> {
        let built =
            self.security.network[peer_source as usize].get_or_init(|| self.shared_network_security(peer_source));
        &built.value
    }

    /// Builds [`Self::network_security`].
    fn make_network_security(&self, peer_source: PeerSource) -> SecurityFilters<Filter> {
        self.checked(Traffic::Tcp, || SecurityFilters {
            custom: custom::network_filters(self, peer_source),
            authentication: Vec::new(),
            authorization: rbac::network_filters(self, peer_source),
            denied: false,
        })
    }

    /// Returns the filters of the connection manager that terminates HBONE tunnels. They apply the policies of
    /// connections to each tunnel, before those of the traffic inside.
    ///
    /// Parity (pilot/pkg/security/authz/builder/builder.go): an HTTP filter enforces them, so that a refused CONNECT
    /// request gets a response; there are no `CUSTOM` policies.
    pub fn tunnel_security(&self) -> SecurityFilters<HttpFilter> {
        if !self.features().enable_layered_waypoint_authorization_policies {
            return SecurityFilters::default();
        }
        self.checked(Traffic::Tcp, || SecurityFilters {
            authorization: rbac::connection_filters(self),
            ..SecurityFilters::default()
        })
    }

    /// Returns the filters if the proxy supports all of them and they are not too large. Outbound traffic of sidecars
    /// is secured at its destination.
    fn checked<F: Named + Message + Default>(
        &self,
        traffic: Traffic,
        build: impl FnOnce() -> SecurityFilters<F>,
    ) -> SecurityFilters<F> {
        if self.class == ListenerClass::SidecarOutbound {
            return SecurityFilters::default();
        }
        let filters = build();
        let all = [&filters.custom, &filters.authentication, &filters.authorization];
        let mut needed: Vec<&str> = all.into_iter().flatten().map(Named::name).collect();
        if traffic == Traffic::Http && self.authorization_policies().any(rule::has_path_template) {
            needed.push(URI_TEMPLATE_MATCHER);
        }
        let missing = needed.into_iter().filter(|name| !self.client.extensions.has(name));
        let mut denied = false;
        for name in missing {
            self.note("security_extension_missing", name);
            denied = true;
        }
        let size = || all.into_iter().flatten().map(Message::encoded_len).sum();
        if let Some(excess) = self.inbound_excess(traffic.chains_of_a_port(), size) {
            self.note(TOO_LARGE, too_large(self.authorization_policies(), &excess));
            denied = true;
        }
        if denied {
            return SecurityFilters {
                denied,
                ..SecurityFilters::default()
            };
        }
        filters
    }

    /// Returns the AuthorizationPolicies of the proxy, in order.
    fn authorization_policies(&self) -> impl Iterator<Item = &Config<AuthorizationPolicy>> {
        let BuildContext { cx, mesh, .. } = self.ctx;
        let keys = self.client.security.authorization.iter();
        let rows = keys.filter_map(|key| mesh.authorization_policies.get(cx, key));
        let read = self.security.policies.get_or_init(|| rows.cloned().collect());
        read.iter().map(|row| &**row)
    }

    /// Returns the policies of an action.
    fn policies_with(&self, action: Action) -> Vec<&Config<AuthorizationPolicy>> {
        self.authorization_policies()
            .filter(|policy| policy.spec.action() == action)
            .collect()
    }
}

/// Returns the detail of a note with the code [`TOO_LARGE`], which names the largest policy.
fn too_large<'a>(policies: impl Iterator<Item = &'a Config<AuthorizationPolicy>>, excess: &Excess) -> String {
    let largest = policies.max_by_key(|row| row.spec.encoded_len());
    let name = largest.map(|row| format!("{}/{}: ", row.meta.namespace(), row.meta.name()));
    format!("{}{excess}", name.unwrap_or_default())
}

/// Returns the provider of a `CUSTOM` policy; empty if it names none.
fn provider_name(policy: &AuthorizationPolicy) -> &str {
    match &policy.action_detail {
        Some(ActionDetail::Provider(provider)) => &provider.name,
        None => "",
    }
}

/// A filter whose name is that of the extension it needs.
trait Named {
    /// Returns the name.
    fn name(&self) -> &str;
}

impl Named for HttpFilter {
    fn name(&self) -> &str {
        &self.name
    }
}

impl Named for Filter {
    fn name(&self) -> &str {
        &self.name
    }
}

/// Returns routes that answer every request with 403, for proxies that cannot enforce their policies.
pub fn denied_routes() -> RouteConfiguration {
    let route = Route {
        r#match: Some(RouteMatch {
            path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
            ..Default::default()
        }),
        action: Some(route::Action::DirectResponse(DirectResponseAction {
            status: 403,
            ..Default::default()
        })),
        ..Default::default()
    };
    RouteConfiguration {
        name: "denied".to_owned(),
        virtual_hosts: vec![VirtualHost {
            name: "denied".to_owned(),
            domains: vec!["*".to_owned()],
            routes: vec![route],
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
