//! Validation of the regular expressions in routes.

use std::cell::RefCell;

use smol_str::SmolStr;

use super::route::{GrpcRoute, HttpRoute, ValueMatch};
use crate::api::{
    FieldError,
    istio::{ErrorPolicy, RegexUsage, Validation, field_path::FieldPath},
};

/// Returns the errors in the expressions of an HTTPRoute.
pub fn http_route(route: &HttpRoute) -> Vec<FieldError> {
    errors(|at| {
        at.each("rules", &route.rules, |at, rule| {
            at.each("matches", &rule.matches, |at, matched| {
                if let Some(path) = &matched.path {
                    value(&at.field("path"), path.match_type.as_ref(), path.value.as_ref());
                }
                at.each("headers", &matched.headers, value_match);
                at.each("queryParams", &matched.query_params, value_match);
            });
        });
    })
}

/// Returns the errors in the expressions of a GRPCRoute.
pub fn grpc_route(route: &GrpcRoute) -> Vec<FieldError> {
    errors(|at| {
        at.each("rules", &route.rules, |at, rule| {
            at.each("matches", &rule.matches, |at, matched| {
                if let Some(method) = &matched.method {
                    let at = at.field("method");
                    for (name, text) in [("service", &method.service), ("method", &method.method)] {
                        expression(&at.field(name), method.match_type.as_ref(), text.as_ref());
                    }
                }
                at.each("headers", &matched.headers, value_match);
            });
        });
    })
}

fn errors(check: impl FnOnce(&FieldPath<'_>)) -> Vec<FieldError> {
    let validation = RefCell::<Validation>::default();
    check(&FieldPath::root("spec", ErrorPolicy::Reject, &validation));
    validation.into_inner().errors
}

fn value_match(at: &FieldPath<'_>, matched: &ValueMatch) {
    value(at, matched.match_type.as_ref(), Some(&matched.value));
}

fn value(at: &FieldPath<'_>, match_type: Option<&SmolStr>, text: Option<&SmolStr>) {
    expression(&at.field("value"), match_type, text);
}

fn expression(at: &FieldPath<'_>, match_type: Option<&SmolStr>, text: Option<&SmolStr>) {
    if match_type.is_some_and(|name| name == "RegularExpression")
        && let Some(text) = text
    {
        at.regex(text, RegexUsage::Proxy);
    }
}
