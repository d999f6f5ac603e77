//! EnvoyFilters whose patches depend on their order, or have no effect.
//!
//! Parity (pkg/config/analysis/analyzers/envoyfilter/envoyfilter.go).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    deployment::number,
    json::{is_set, items, text},
    mesh::Mesh,
    message::{Code, RELATIVE_PATCH, RELATIVE_PATCH_OF_VERSION, Report, WRONG_ADD, WRONG_REMOVE, WRONG_REPLACE},
};
use crate::api::Kind;

/// Reports patches that are likely mistakes.
pub(super) fn patches(mesh: &Mesh, report: &mut Report) {
    // Names of filters that a patch for a version of the proxy changes.
    let mut versioned: BTreeSet<FilterName<'_>> = BTreeSet::new();
    for filter in mesh.of(Kind::EnvoyFilter) {
        let has_priority = number(filter.spec("priority")) != 0;
        for patch in items(filter.spec("configPatches")) {
            if !is_set(&patch["patch"]) {
                break;
            }
            let name = filter_name(patch);
            if let Some((code, text)) = mistake(patch, has_priority, versioned.contains(&name)) {
                report.add(code, filter, text);
            }
            if !text(&patch["match"]["proxy"]["proxyVersion"]).is_empty() {
                versioned.insert(name);
            }
        }
    }
}

/// The name of a filter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FilterName<'a> {
    None,
    /// Of the filter that a patch adds or changes.
    Own(&'a str),
    /// Of the filter that it matches.
    Matched(&'a str),
}

fn filter_name(patch: &Value) -> FilterName<'_> {
    let value = &patch["patch"]["value"];
    let listener = &patch["match"]["listener"];
    match (&value["name"], value.is_object()) {
        (Value::Null, true) => match text(&listener["filterChain"]["filter"]["name"]) {
            "" => FilterName::None,
            name => FilterName::Matched(name),
        },
        (name, true) => FilterName::Own(text(name)),
        (_, false) => FilterName::None,
    }
}

fn mistake(patch: &Value, has_priority: bool, is_versioned: bool) -> Option<(Code, String)> {
    let target = text(&patch["applyTo"]);
    let is_route = matches!(target, "ROUTE_CONFIGURATION" | "HTTP_ROUTE");
    let is_replaceable = matches!(target, "NETWORK_FILTER" | "HTTP_FILTER" | "VIRTUAL_HOST");
    let operation = text(&patch["patch"]["operation"]);
    let without_effect = |code| Some((code, format!("operation {operation} has no effect on {target}")));
    match operation {
        "ADD" if is_route => without_effect(WRONG_ADD),
        "REMOVE" if is_route => without_effect(WRONG_REMOVE),
        "REPLACE" if !is_replaceable => without_effect(WRONG_REPLACE),
        "REMOVE" | "REPLACE" | "INSERT_BEFORE" | "INSERT_AFTER" if !has_priority => {
            let hint = "EnvoyFilters may apply in another order; set priority, or use INSERT_FIRST or ADD";
            Some(if is_versioned {
                let text = format!("a patch relative to another one for a proxyVersion has no priority: {hint}");
                (RELATIVE_PATCH_OF_VERSION, text)
            } else {
                (RELATIVE_PATCH, format!("a relative patch has no priority: {hint}"))
            })
        }
        _ => None,
    }
}
