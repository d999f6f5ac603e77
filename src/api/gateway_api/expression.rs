//! The regular expressions of routes, within the limits that all expressions have.

use std::cell::RefCell;

use smol_str::SmolStr;

use super::route::{GrpcRoute, HttpRoute, ValueMatch};
use crate::api::{
    FieldError,
    istio::{Findings, Usage, check::At},
};

/// What is wrong with the expressions of an HTTPRoute.
pub fn of_http(route: &HttpRoute) -> Vec<FieldError> {
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

/// What is wrong with the expressions of a GRPCRoute.
pub fn of_grpc(route: &GrpcRoute) -> Vec<FieldError> {
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

fn errors(check: impl FnOnce(&At<'_>)) -> Vec<FieldError> {
    let findings = RefCell::<Findings>::default();
    check(&At::root("spec", &findings));
    findings.into_inner().errors
}

fn value_match(at: &At<'_>, matched: &ValueMatch) {
    value(at, matched.match_type.as_ref(), Some(&matched.value));
}

fn value(at: &At<'_>, match_type: Option<&SmolStr>, text: Option<&SmolStr>) {
    expression(&at.field("value"), match_type, text);
}

fn expression(at: &At<'_>, match_type: Option<&SmolStr>, text: Option<&SmolStr>) {
    if match_type.is_some_and(|name| name == "RegularExpression")
        && let Some(text) = text
    {
        at.expression(text, Usage::Sent);
    }
}
