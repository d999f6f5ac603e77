//! Actions of routes: forward, redirect, direct response.

use super::{
    destination, filters, hash,
    headers::HeaderChanges,
    matches,
    retry::{self, Balancing},
    translation::Translation,
};
use crate::{
    base::{Shared, re2::quoted},
    generate::name::ClusterMode,
    model::{Service, virtual_service::Semantics},
    proto::{
        envoy::{
            config::{
                core::v3::{DataSource, RuntimeFractionalPercent, data_source::Specifier},
                route::v3::{
                    DirectResponseAction, RedirectAction, Route, RouteAction, RouteMatch, WeightedCluster,
                    redirect_action::{PathRewriteSpecifier, RedirectResponseCode, SchemeRewriteSpecifier},
                    route::Action,
                    route_action::{
                        ClusterNotFoundResponseCode, ClusterSpecifier, HostRewriteSpecifier, MaxStreamDuration,
                        RequestMirrorPolicy,
                    },
                    route_match::PathSpecifier,
                    weighted_cluster::{ClusterWeight, cluster_weight},
                },
            },
            r#type::matcher::v3::RegexMatchAndSubstitute,
        },
        istio::networking::v1alpha3::{
            Destination, HttpDirectResponse, HttpRedirect, HttpRewrite, HttpRoute, HttpRouteDestination, Percent,
            http_body,
            http_redirect::{RedirectPort, RedirectPortSelection},
            load_balancer_settings::ConsistentHashLb,
        },
    },
};

/// Returns a redirect, or `None` for codes that Envoy does not know.
pub(crate) fn redirect(declared: &HttpRedirect, translation: &Translation, semantics: Semantics) -> Option<Action> {
    let response_code = match declared.redirect_code {
        0 | 301 => RedirectResponseCode::MovedPermanently,
        302 => RedirectResponseCode::Found,
        303 => RedirectResponseCode::SeeOther,
        307 => RedirectResponseCode::TemporaryRedirect,
        308 => RedirectResponseCode::PermanentRedirect,
        _ => return None,
    };
    let prefix = declared.uri.strip_prefix("%PREFIX()%");
    let path = match prefix.filter(|_| semantics == Semantics::Gateway) {
        Some(prefix) => PathRewriteSpecifier::PrefixRewrite(prefix.to_owned()),
        None => PathRewriteSpecifier::PathRedirect(declared.uri.clone()),
    };
    let scheme = (!declared.scheme.is_empty()).then(|| declared.scheme.clone());
    Some(Action::Redirect(RedirectAction {
        host_redirect: declared.authority.clone(),
        port_redirect: redirect_port(declared, translation),
        response_code: response_code.into(),
        scheme_rewrite_specifier: scheme.map(SchemeRewriteSpecifier::SchemeRedirect),
        path_rewrite_specifier: Some(path),
        ..Default::default()
    }))
}

/// Returns the port to redirect to; 0 means the default port of the scheme.
fn redirect_port(declared: &HttpRedirect, translation: &Translation) -> u32 {
    let port = match declared.redirect_port {
        None => return 0,
        Some(RedirectPort::Port(port)) => port,
        // Envoy cannot derive the port, but the routes are built for one port anyway.
        Some(RedirectPort::DerivePort(selection)) if selection == RedirectPortSelection::FromRequestPort as i32 => {
            translation.port
        }
        Some(RedirectPort::DerivePort(_)) => 0,
    };
    let scheme = match declared.scheme.as_str() {
        "" if translation.tls => "https",
        "" => "http",
        scheme => scheme,
    };
    match (port, scheme) {
        (80, "http") | (443, "https") => 0,
        _ => port,
    }
}

/// Returns a response without a backend.
pub(crate) fn direct_response(declared: &HttpDirectResponse) -> Action {
    let specifier = declared.body.as_ref().and_then(|body| body.specifier.as_ref());
    let body = specifier.map(|specifier| match specifier {
        http_body::Specifier::String(text) => Specifier::InlineString(text.clone()),
        http_body::Specifier::Bytes(bytes) => Specifier::InlineBytes(bytes.clone()),
    });
    Action::DirectResponse(DirectResponseAction {
        status: declared.status,
        body: body.map(|specifier| DataSource {
            specifier: Some(specifier),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// Makes a route forward to its destinations. `authority` is the host that its header operations set, `matched` its
/// match. Returns the destination services in order.
pub(crate) fn forward(
    route: &mut Route,
    declared: &HttpRoute,
    translation: &Translation,
    semantics: Semantics,
    authority: Option<String>,
    matched: impl FnOnce() -> RouteMatch,
) -> Vec<Option<Shared<Service>>> {
    let timeout = declared.timeout.unwrap_or_default();
    let mut action = RouteAction {
        timeout: Some(timeout),
        ..Default::default()
    };
    if translation.client.proxyless {
        action.max_stream_duration = Some(MaxStreamDuration {
            max_stream_duration: Some(timeout),
            ..Default::default()
        });
    } else {
        action.max_grpc_timeout = Some(timeout);
    }
    if semantics == Semantics::Gateway {
        action.cluster_not_found_response_code = ClusterNotFoundResponseCode::InternalServerError.into();
    }
    let mut authority = authority;
    if let Some(declared) = &declared.rewrite {
        rewrite(&mut action, declared, &matched(), semantics);
        action.append_x_forwarded_host = translation.client.append_forwarded_host;
        if !declared.authority.is_empty() {
            authority = Some(declared.authority.clone());
        }
    }
    action.host_rewrite_specifier = authority.map(HostRewriteSpecifier::HostRewriteLiteral);
    action.request_mirror_policies = mirrors(declared, translation);

    let balancing = match declared.route.as_slice() {
        [single] => one_destination(route, &mut action, single, translation),
        several => {
            weighted_destinations(&mut action, several, translation);
            Balancing::Free
        }
    };
    let mesh_default = translation.ctx.mesh_config().default_http_retry_policy.as_ref();
    action.retry_policy = retry::policy(declared.retries.as_deref().or(mesh_default), balancing);
    route.action = Some(Action::Route(action));

    let reached = declared
        .route
        .iter()
        .filter(|weighted| declared.route.len() == 1 || weighted.weight != 0);
    reached
        .map(|weighted| {
            let host = weighted
                .destination
                .as_ref()
                .map_or("", |destination| destination.host.as_str());
            translation.targets.get(host).and_then(|rows| rows.service.clone())
        })
        .collect()
}

fn rewrite(action: &mut RouteAction, declared: &HttpRewrite, matched: &RouteMatch, semantics: Semantics) {
    if let Some(declared) = &declared.uri_regex_rewrite {
        action.regex_rewrite = Some(substitution(&declared.r#match, &declared.rewrite));
    } else if declared.uri == "/" && semantics == Semantics::Gateway {
        // Removing a prefix must leave a slash even if nothing else of the path remains.
        let prefix = match &matched.path_specifier {
            Some(PathSpecifier::PathSeparatedPrefix(prefix)) => prefix.as_str(),
            _ => "",
        };
        action.regex_rewrite = Some(substitution(&format!("^{}(/?)(.*)", quoted(prefix)), r"/\2"));
    } else {
        action.prefix_rewrite.clone_from(&declared.uri);
    }
}

fn substitution(pattern: &str, replacement: &str) -> RegexMatchAndSubstitute {
    RegexMatchAndSubstitute {
        pattern: Some(matches::regex(pattern)),
        substitution: replacement.to_owned(),
    }
}

fn mirrors(declared: &HttpRoute, translation: &Translation) -> Vec<RequestMirrorPolicy> {
    let mut policies = Vec::new();
    if let Some(destination) = &declared.mirror {
        #[allow(deprecated, reason = "it counts without the field that replaces it")]
        let fraction = match (declared.mirror_percentage, declared.mirror_percent) {
            (None, Some(whole)) => (whole > 0).then(|| filters::whole_percent(whole)),
            (percentage, _) => mirrored(percentage),
        };
        policies.extend(fraction.map(|fraction| mirror(destination, fraction, translation)));
    }
    for declared in &declared.mirrors {
        if let (Some(destination), Some(fraction)) = (&declared.destination, mirrored(declared.percentage)) {
            policies.push(mirror(destination, fraction, translation));
        }
    }
    policies
}

/// Returns the mirrored share: all requests by default, `None` for an explicit zero.
fn mirrored(percentage: Option<Percent>) -> Option<crate::proto::envoy::r#type::v3::FractionalPercent> {
    match percentage {
        None => Some(filters::whole_percent(100)),
        Some(percentage) => (percentage.value > 0.0).then(|| filters::percent(percentage)),
    }
}

fn mirror(
    destination: &Destination,
    fraction: crate::proto::envoy::r#type::v3::FractionalPercent,
    translation: &Translation,
) -> RequestMirrorPolicy {
    RequestMirrorPolicy {
        cluster: cluster(destination, translation),
        runtime_fraction: Some(RuntimeFractionalPercent {
            default_value: Some(fraction),
            ..Default::default()
        }),
        trace_sampled: Some(false),
        disable_shadow_host_suffix_append: translation.features().disable_shadow_host_suffix,
        ..Default::default()
    }
}

fn cluster(destination: &Destination, translation: &Translation) -> String {
    let rows = translation.targets.get(destination.host.as_str());
    let service = rows.and_then(|rows| rows.service.as_deref());
    let mode = rows.map_or_else(ClusterMode::default, |rows| rows.mode);
    destination::cluster(destination, service, translation.port, translation.inference, mode)
}

fn consistent_hash<'a>(destination: &Destination, translation: &'a Translation) -> Option<&'a ConsistentHashLb> {
    let rows = translation.targets.get(destination.host.as_str())?;
    hash::of_destination(rows.rule.as_ref()?, destination)
}

/// Adds the only destination; its header operations become those of the route.
fn one_destination(
    route: &mut Route,
    action: &mut RouteAction,
    declared: &HttpRouteDestination,
    translation: &Translation,
) -> Balancing {
    let none = Destination::default();
    let destination = declared.destination.as_ref().unwrap_or(&none);
    action.cluster_specifier = Some(ClusterSpecifier::Cluster(cluster(destination, translation)));
    let changes = HeaderChanges::of(declared.headers.as_deref());
    route.request_headers_to_add.extend(changes.request_add);
    route.request_headers_to_remove.extend(changes.request_remove);
    route.response_headers_to_add.extend(changes.response_add);
    route.response_headers_to_remove.extend(changes.response_remove);
    if action.host_rewrite_specifier.is_none() {
        action.host_rewrite_specifier = changes.authority.map(HostRewriteSpecifier::HostRewriteLiteral);
    }
    let hash = consistent_hash(destination, translation);
    action.hash_policy.extend(hash.and_then(hash::policy));
    if hash.is_some() {
        Balancing::ConsistentHash
    } else {
        Balancing::Free
    }
}

/// Adds several destinations; those without weight are omitted.
fn weighted_destinations(action: &mut RouteAction, declared: &[HttpRouteDestination], translation: &Translation) {
    let mut clusters = Vec::new();
    let none = Destination::default();
    for declared in declared.iter().filter(|declared| declared.weight != 0) {
        let destination = declared.destination.as_ref().unwrap_or(&none);
        let changes = HeaderChanges::of(declared.headers.as_deref());
        clusters.push(ClusterWeight {
            name: cluster(destination, translation),
            weight: Some(u32::try_from(declared.weight).unwrap_or_default()),
            request_headers_to_add: changes.request_add,
            request_headers_to_remove: changes.request_remove,
            response_headers_to_add: changes.response_add,
            response_headers_to_remove: changes.response_remove,
            host_rewrite_specifier: changes
                .authority
                .map(cluster_weight::HostRewriteSpecifier::HostRewriteLiteral),
            ..Default::default()
        });
        let hash = consistent_hash(destination, translation);
        action.hash_policy.extend(hash.and_then(hash::policy));
    }
    action.cluster_specifier = Some(ClusterSpecifier::WeightedClusters(WeightedCluster {
        clusters,
        ..Default::default()
    }));
}
