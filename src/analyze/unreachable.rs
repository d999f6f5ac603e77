//! Rules of VirtualServices that earlier rules hide.
//!
//! Parity (pkg/config/validation/validation.go).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::{
    json::{indexed, items, text},
    message::{Code, INEFFECTIVE_MATCH, UNREACHABLE_RULE},
    object::Object,
};

/// The maximum number of matches with a prefix that are compared with each other.
const MAX_COMPARED: usize = 500;

/// A finding with its text.
pub(super) type Finding = (Code, String);

/// Returns the rules and matches of a VirtualService that have no effect.
pub(super) fn findings(service: &Object) -> Vec<Finding> {
    let mut found = Vec::new();
    for protocol in ["http", "tcp", "tls"] {
        rules(&format!("spec.{protocol}"), service.spec(protocol), &mut found);
    }
    covered(service.spec("http"), &mut found);
    found
}

/// Finds rules after one that matches everything, and repeated matches.
fn rules(path: &str, rules: &Value, found: &mut Vec<Finding>) {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let mut catches_all = false;
    for (path, rule) in indexed(path, rules) {
        let matches = items(&rule["match"]);
        if matches.is_empty() {
            if catches_all {
                found.push((UNREACHABLE_RULE, format!("{path}: an earlier rule matches everything")));
            }
            catches_all = true;
            continue;
        }
        if catches_all {
            found.push((
                UNREACHABLE_RULE,
                format!("{path}: an earlier rule without matches comes first"),
            ));
            continue;
        }
        let mut repeated = 0;
        for (place, condition) in indexed(&format!("{path}.match"), &rule["match"]) {
            match known.get(&normal(condition)) {
                Some(earlier) => {
                    found.push((INEFFECTIVE_MATCH, format!("{place} repeats {earlier}")));
                    repeated += 1;
                }
                None => {
                    known.insert(normal(condition), place);
                }
            }
        }
        if repeated == matches.len() {
            found.push((
                UNREACHABLE_RULE,
                format!("{path}: earlier rules have all of its matches"),
            ));
        }
    }
}

/// Returns a match without its name, as text.
fn normal(condition: &Value) -> String {
    match condition {
        Value::Object(fields) => {
            let mut fields: Map<String, Value> = fields.clone();
            fields.remove("name");
            Value::Object(fields).to_string()
        }
        other => other.to_string(),
    }
}

/// A match by the beginning of the path, with its other conditions.
struct Prefix<'a> {
    place: String,
    prefix: &'a str,
    condition: &'a Value,
}

/// Finds matches by longer prefixes than an earlier one has.
fn covered(rules: &Value, found: &mut Vec<Finding>) {
    let mut prefixes: Vec<Prefix<'_>> = Vec::new();
    let mut known: BTreeSet<String> = BTreeSet::new();
    for (path, rule) in indexed("spec.http", rules) {
        if items(&rule["match"]).is_empty() {
            break;
        }
        for (place, condition) in indexed(&format!("{path}.match"), &rule["match"]) {
            let is_new = known.insert(normal(condition));
            let prefix = text(&condition["uri"]["prefix"]);
            if is_new && !prefix.is_empty() {
                prefixes.push(Prefix {
                    place,
                    prefix,
                    condition,
                });
            }
        }
    }
    prefixes.truncate(MAX_COMPARED);
    for (position, earlier) in prefixes.iter().enumerate() {
        for later in &prefixes[position + 1..] {
            let is_longer = later.prefix != earlier.prefix && later.prefix.starts_with(earlier.prefix);
            if is_longer && covers(earlier.condition, later.condition) {
                let text = format!(
                    "{} is covered by the prefix {} of {}",
                    later.place, earlier.prefix, earlier.place
                );
                found.push((INEFFECTIVE_MATCH, text));
            }
        }
    }
}

/// Returns true if the other conditions of the later match are not known to be weaker than those of the earlier one.
fn covers(earlier: &Value, later: &Value) -> bool {
    let maps = ["headers", "queryParams", "withoutHeaders"];
    earlier["port"] == later["port"]
        && method(earlier).starts_with(&method(later))
        && begins(&earlier["authority"], &later["authority"])
        && maps.iter().all(|field| {
            let (Some(earlier), Some(later)) = (entries(&earlier[*field]), entries(&later[*field])) else {
                return false;
            };
            let has = |(key, value): (&String, &Value)| later.get(key).is_some_and(|other| begins(value, other));
            earlier.len() == later.len() && earlier.iter().all(has)
        })
}

/// Returns the condition for the method, which is GET if it is not set.
fn method(condition: &Value) -> String {
    match form(&condition["method"]) {
        form if form.is_empty() => "exact GET".to_owned(),
        form => form,
    }
}

/// Returns a map; empty if it is not set.
fn entries(value: &Value) -> Option<Map<String, Value>> {
    match value {
        Value::Null => Some(Map::new()),
        Value::Object(map) => Some(map.clone()),
        _ => None,
    }
}

/// Returns true if the earlier condition begins with the later one.
fn begins(earlier: &Value, later: &Value) -> bool {
    form(earlier).starts_with(&form(later))
}

/// Returns an exact or a prefix condition as text; empty for others.
fn form(condition: &Value) -> String {
    let (exact, prefix) = (text(&condition["exact"]), text(&condition["prefix"]));
    match (exact, prefix) {
        ("", "") => String::new(),
        ("", prefix) => format!("prefix {prefix}"),
        (exact, _) => format!("exact {exact}"),
    }
}
