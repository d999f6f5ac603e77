//! R1: the cost of regular expressions in objects.

use std::time::Duration;

use istiod::{
    api::{document, regex},
    base::ClusterId,
};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use crate::support::wait;

/// Time limit for one object of a megabyte, in the unoptimised build of the tests and on a busy machine. The released
/// daemon compiles expressions fifty times as fast.
const LONGEST: Duration = Duration::from_mins(2);
/// Time limit for an expression that is not compiled.
const REFUSED: Duration = Duration::from_secs(1);

fn virtual_service(expressions: impl Iterator<Item = String>) -> Value {
    let matches: Vec<Value> = expressions.map(|one| json!({"uri": {"regex": one}})).collect();
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "name": "v", "namespace": "a" },
        "spec": { "hosts": ["a"], "http": [{ "match": matches, "route": [{ "destination": { "host": "a" } }] }] } })
}

fn envoy_filter(expressions: impl Iterator<Item = String>) -> Value {
    let patch = |one| {
        json!({ "applyTo": "CLUSTER", "match": { "proxy": { "proxyVersion": one } },
        "patch": { "operation": "MERGE", "value": {} } })
    };
    let patches: Vec<Value> = expressions.map(patch).collect();
    json!({ "apiVersion": "networking.istio.io/v1alpha3", "kind": "EnvoyFilter",
        "metadata": { "name": "e", "namespace": "a" }, "spec": { "configPatches": patches } })
}

/// A megabyte-long expression is rejected before it is compiled, and an object full of expressions takes seconds at
/// most.
pub(super) fn costly_expressions_are_bounded() -> Result<(), Failed> {
    for text in ["a".repeat(1 << 20), "(".repeat(1 << 20), "a{1000}".repeat(150_000)] {
        let started_at = wait::now();
        let refused = regex::compile(&text);
        let elapsed = started_at.elapsed();
        if !matches!(refused, Err(regex::RegexError::TooLong(_))) || elapsed > REFUSED {
            return Err(format!("{} bytes: {:?} after {elapsed:?}", text.len(), refused.err()).into());
        }
    }
    let costly = |number: usize| format!("\\pL{{9}}{number}(?:\\pL{{30}}){{30}}");
    for (what, object) in [
        ("a VirtualService", virtual_service((0..5000).map(costly))),
        ("an EnvoyFilter", envoy_filter((0..5000).map(costly))),
    ] {
        let started_at = wait::now();
        let parsed = document::parse(&ClusterId::new("c"), &object);
        let mut found = parsed.diagnostics.iter();
        if !found.any(|found| found.message.contains("regular expression")) {
            let found = parsed.diagnostics.first();
            return Err(format!("{what} full of costly expressions was accepted: {found:?}").into());
        }
        if started_at.elapsed() > LONGEST {
            return Err(format!("{what} full of costly expressions took {:?}", started_at.elapsed()).into());
        }
    }
    Ok(())
}
