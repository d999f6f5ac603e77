//! Doc comments of the public items of the lowest layers, and documents of what operators read.

use std::collections::BTreeSet;

use libtest_mimic::{Failed, Trial};

use super::{
    source::{Source, sources},
    verdict,
};
use crate::support::project;

const DOCUMENTED: &[&str] = &["base", "table", "template", "model"];

/// The beginnings of public items. `pub mod` is excluded: a module is documented in its own file.
const ITEMS: &[&str] = &[
    "pub fn ",
    "pub const ",
    "pub static ",
    "pub struct ",
    "pub enum ",
    "pub trait ",
    "pub type ",
    "pub macro ",
];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "tidy::documentation::public_items_are_documented",
            public_items_are_documented,
        ),
        Trial::test("tidy::documentation::metrics_are_described", metrics_are_described),
    ]
}

/// Beginnings of the names of metrics.
const METRICS: &[&str] = &[
    "auto_registration_",
    "citadel_",
    "controller_",
    "endpoint_no_pod",
    "galley_",
    "go_",
    "grpc_server_",
    "istio_build",
    "istiod_",
    "pilot_",
    "process_",
    "provider_",
    "remote_cluster_",
    "sidecar_injection_",
    "webhook_",
    "xds_cache_",
];

/// Returns the text of a file of the project.
fn read(path: &str) -> String {
    std::fs::read_to_string(project().join(path)).unwrap_or_default()
}

/// Returns the text of the string literals of a source, except those of its test module.
fn literals(source: &Source) -> impl Iterator<Item = &str> {
    let text = source.text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    text.split('"').skip(1).step_by(2)
}

fn metrics_are_described() -> Result<(), Failed> {
    let document = read("docs/metrics.md");
    let sources = sources();
    let exporters = sources
        .iter()
        .filter(|source| source.words("prometheus").next().is_some());
    let is_metric = |text: &&str| {
        let is_name = text
            .chars()
            .all(|character| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_');
        is_name && !text.ends_with('_') && METRICS.iter().any(|prefix| text.starts_with(prefix))
    };
    let names: BTreeSet<&str> = exporters.flat_map(literals).filter(is_metric).collect();
    let is_missing = |name: &&&str| !document.contains(&format!("`{name}`"));
    let mut breaches: Vec<String> = names.iter().filter(is_missing).map(|name| (*name).to_owned()).collect();
    if names.is_empty() {
        breaches.push("no metric was found".to_owned());
    }
    verdict("docs/metrics.md describes every metric", breaches)
}

fn public_items_are_documented() -> Result<(), Failed> {
    let breaches = sources()
        .iter()
        .filter(|source| source.layer().is_some_and(|layer| DOCUMENTED.contains(&layer)))
        .flat_map(undocumented)
        .collect();
    verdict(
        "public items of base, table, template and model have a doc comment",
        breaches,
    )
}

fn undocumented(source: &Source) -> Vec<String> {
    let lines: Vec<&str> = source.text.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    let is_item = |line: &str| ITEMS.iter().any(|item| line.trim_start().starts_with(item));
    (0..lines.len())
        .filter(|&number| code.get(number).is_some_and(|line| is_item(line)) && !documented(&lines[..number]))
        .map(|number| format!("{}:{}: {}", source.path, number + 1, lines[number].trim()))
        .collect()
}

/// Returns true if the lines before an item end in a doc comment, except for attributes.
fn documented(before: &[&str]) -> bool {
    let mut in_attribute = false;
    for line in before.iter().rev().map(|line| line.trim()) {
        if line.starts_with("///") || line.starts_with("#[doc") || line.starts_with("$(#[") || line.ends_with("*/") {
            return true;
        }
        // An attribute may span lines; its last one closes a bracket.
        let begins = line.starts_with("#[");
        if !(in_attribute || begins || line.ends_with(")]") || line == "]") {
            return false;
        }
        in_attribute = !begins;
    }
    false
}
