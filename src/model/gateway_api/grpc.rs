//! Rules of GRPCRoutes.

use super::{
    Mistake,
    backend::{Backends, has_weight, reason},
    filter,
    http::{self, Converted, string},
};
use crate::{
    api::gateway_api::route::{GrpcMatch, GrpcRule, MethodMatch},
    proto::istio::networking::v1alpha3::{
        HttpDirectResponse, HttpMatchRequest, HttpRoute, StringMatch, string_match::MatchType,
    },
};

/// Converts a rule, for one of its matches.
///
/// # Errors
/// A mistake because of which the route as a whole does not apply.
pub(super) fn rule(
    backends: &Backends,
    position: usize,
    rule: &GrpcRule,
    matched: Option<&GrpcMatch>,
) -> Result<Converted<HttpRoute>, Mistake> {
    let mut route = HttpRoute {
        name: http::name(backends, rule.name.as_ref(), position),
        r#match: matched.map(request).transpose()?.into_iter().collect(),
        ..Default::default()
    };
    for filter in &rule.filters {
        if filter::apply_headers(filter, &mut route.headers)? {
            continue;
        }
        match (filter.filter_type.as_str(), &filter.request_mirror) {
            ("RequestMirror", mirror) => {
                let mirror = mirror.as_ref().map(|mirror| filter::mirror(backends, mirror));
                route.mirrors.extend(mirror.transpose()?);
            }
            _ => return Err(filter::unsupported(filter)),
        }
    }
    if !has_weight(&rule.backend_refs) {
        let refusal = HttpDirectResponse {
            status: 500,
            body: None,
        };
        route.direct_response = Some(refusal.into());
        return Ok((route, None));
    }
    let (destinations, mistake) = http::destinations(backends, &rule.backend_refs)?;
    route.route = destinations;
    Ok((route, mistake))
}

fn request(matched: &GrpcMatch) -> Result<HttpMatchRequest, Mistake> {
    Ok(HttpMatchRequest {
        uri: matched.method.as_ref().map(path).transpose()?,
        headers: http::values(&matched.headers, "HeaderMatch")?,
        ..Default::default()
    })
}

/// Returns the match of a method's path, `/service/method`.
fn path(method: &MethodMatch) -> Result<StringMatch, Mistake> {
    let is_exact = match method.match_type.as_deref() {
        None | Some("Exact") => true,
        Some("RegularExpression") => false,
        Some(other) => return Err(http::unknown_type(other, "Path match")),
    };
    let matched = match (&method.service, &method.method) {
        (None, None) => {
            let message = "gRPC match must have method or service defined";
            return Err(Mistake::new(reason::INVALID_CONFIGURATION, message));
        }
        (Some(service), None) if is_exact => MatchType::Prefix(format!("/{service}/")),
        (Some(service), None) => MatchType::Regex(format!("/{service}/.+")),
        (None, Some(method)) => MatchType::Regex(format!("/[^/]+/{method}")),
        (Some(service), Some(method)) if is_exact => MatchType::Exact(format!("/{service}/{method}")),
        (Some(service), Some(method)) => MatchType::Regex(format!("/{service}/{method}")),
    };
    Ok(string(matched))
}
