//! Security filters: JWT, RBAC and external authorization. Where they stand in a filter stack is decided by its builder.
//!
//! What one would get wrong: none of them may be left out because the client cannot run it. A chain whose policies
//! cannot be enforced lets nothing through ([`SecurityFilters::denied`]).

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

use super::{FilterStack, memo::Noted, proxy_view::ListenerClass, security_filters::SecurityFilters};
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

/// The RBAC filter of HTTP chains.
const HTTP_RBAC: &str = "envoy.filters.http.rbac";

/// The RBAC filter of TCP chains.
const NETWORK_RBAC: &str = "envoy.filters.network.rbac";

/// The external authorization filter of HTTP chains.
const HTTP_EXT_AUTHZ: &str = "envoy.filters.http.ext_authz";

/// The external authorization filter of TCP chains.
const NETWORK_EXT_AUTHZ: &str = "envoy.filters.network.ext_authz";

/// The filter that checks JWTs; the claims of valid ones are dynamic metadata under this name.
pub(crate) const JWT_FILTER: &str = "envoy.filters.http.jwt_authn";

/// What matches path templates inside an RBAC filter.
const URI_TEMPLATE_MATCHER: &str = "envoy.path.match.uri_template.uri_template_matcher";

/// The prefix of the statistics of network filters.
const NETWORK_STAT_PREFIX: &str = "tcp.";

/// What a chain carries; requests have attributes that connections have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    Http,
    Tcp,
}

impl FilterStack<'_> {
    /// The security filters of HTTP chains.
    fn shared_http_security(&self, tunneled: bool) -> Memoized<Noted<SecurityFilters<HttpFilter>>> {
        let memo = &self.memo().http_security;
        self.shared(memo, (self.key(), tunneled), |stack| stack.make_http_security(tunneled))
    }

    /// The security filters of TCP chains.
    fn shared_network_security(&self, tunneled: bool) -> Memoized<Noted<SecurityFilters<Filter>>> {
        let memo = &self.memo().network_security;
        self.shared(memo, (self.key(), tunneled), |stack| {
            stack.make_network_security(tunneled)
        })
    }

    /// The security filters of HTTP chains. `tunneled`: the peer is known from an HBONE tunnel, not from TLS.
    pub fn http_security(&self, tunneled: bool) -> &SecurityFilters<HttpFilter> {
        let built = self.security.http[usize::from(tunneled)].get_or_init(|| self.shared_http_security(tunneled));
        &built.value
    }

    /// See [`Self::http_security`].
    fn make_http_security(&self, tunneled: bool) -> SecurityFilters<HttpFilter> {
        self.checked(Traffic::Http, || SecurityFilters {
            custom: custom::http_filters(self, tunneled),
            authentication: jwt::filter(self).into_iter().collect(),
            authorization: rbac::http_filters(self, tunneled),
            denied: false,
        })
    }

    /// The security filters of TCP chains.
    pub fn network_security(&self, tunneled: bool) -> &SecurityFilters<Filter> {
        let built = self.security.network[usize::from(tunneled)].get_or_init(|| self.shared_network_security(tunneled));
        &built.value
    }

    /// See [`Self::network_security`].
    fn make_network_security(&self, tunneled: bool) -> SecurityFilters<Filter> {
        self.checked(Traffic::Tcp, || SecurityFilters {
            custom: custom::network_filters(self, tunneled),
            authentication: Vec::new(),
            authorization: rbac::network_filters(self, tunneled),
            denied: false,
        })
    }

    /// The filters, if the client has them all. Outbound traffic of sidecars is secured where it arrives.
    fn checked<F: Named + Default>(
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
        if denied {
            return SecurityFilters {
                denied,
                ..SecurityFilters::default()
            };
        }
        filters
    }

    /// The AuthorizationPolicies of the client, in order.
    fn authorization_policies(&self) -> impl Iterator<Item = &Config<AuthorizationPolicy>> {
        let BuildContext { cx, mesh, .. } = self.ctx;
        let keys = self.client.security.authorization.iter();
        let rows = keys.filter_map(|key| mesh.authorization_policies.get(cx, key));
        let read = self.security.policies.get_or_init(|| rows.cloned().collect());
        read.iter().map(|row| &**row)
    }

    /// Those of an action.
    fn policies_with(&self, action: Action) -> Vec<&Config<AuthorizationPolicy>> {
        self.authorization_policies()
            .filter(|policy| policy.spec.action() == action)
            .collect()
    }
}

/// The provider of a `CUSTOM` policy; empty if it names none.
fn provider_name(policy: &AuthorizationPolicy) -> &str {
    match &policy.action_detail {
        Some(ActionDetail::Provider(provider)) => &provider.name,
        None => "",
    }
}

/// A filter that is called as the extension that it needs.
trait Named {
    /// The name.
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

/// Routes that answer every request with 403, for clients that cannot enforce their policies.
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
