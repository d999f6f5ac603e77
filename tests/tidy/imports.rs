//! Imports between top-level modules. The table below is the architecture: it is acyclic, and data flows down it.

use std::collections::BTreeSet;

use libtest_mimic::{Failed, Trial};

use super::source::sources;
use super::verdict;

/// The imports of one top-level module.
struct Rule {
    module: &'static str,
    /// Permitted modules, or parts of modules.
    may: &'static [&'static str],
    /// Forbidden parts of permitted modules.
    not: &'static [&'static str],
}

const fn rule(module: &'static str, may: &'static [&'static str]) -> Rule {
    Rule { module, may, not: &[] }
}

/// Every top-level module, each below the modules that it may import.
const TABLE: &[Rule] = &[
    rule("proto", &[]),
    rule("base", &[]),
    rule("table", &["base"]),
    rule("template", &["base"]),
    rule("api", &["base", "proto"]),
    rule("convert", &["base", "api"]),
    rule("inject", &["base", "proto", "api", "template"]),
    rule("model", &["base", "proto", "api", "table"]),
    rule(
        "analyze",
        &["base", "api", "inject::annotation_error", "model::service"],
    ),
    // The engine's read side records what a generator reads, and its memos are derived tables.
    Rule {
        module: "generate",
        may: &["base", "proto", "api", "table", "model"],
        not: &["model::world"],
    },
    rule("log", &["base"]),
    rule("settings", &["base", "log"]),
    rule("task", &[]),
    rule("metrics", &[]),
    rule(
        "environment",
        &["base", "log", "settings", "task", "model::snapshot", "model::change"],
    ),
    rule("kube", &["base", "settings", "task", "metrics"]),
    rule("fetch", &["base"]),
    rule(
        "ingest",
        &[
            "base",
            "proto",
            "api",
            "settings",
            "task",
            "metrics",
            "environment",
            "fetch",
            "kube",
            "model::change",
            "model::external_dependencies",
        ],
    ),
    rule(
        "push",
        &[
            "base",
            "api::Kind",
            "api::access_review",
            "table::ChangeSet",
            "settings",
            "task",
            "environment",
            "model",
            "generate",
        ],
    ),
    rule("otlp", &["push::delivery", "settings", "task", "metrics"]),
    rule(
        "auth",
        &["base", "proto", "settings", "task", "environment", "fetch", "kube"],
    ),
    rule("rpc", &["base", "task", "metrics", "auth"]),
    rule(
        "xds",
        &[
            "base",
            "proto",
            "settings",
            "task",
            "metrics",
            "environment",
            "auth",
            "rpc",
            "generate::RequestedResources",
            "generate::EncodedResource",
            "generate::Proxy",
            "generate::ResourceSnapshot",
            "generate::ResourceType",
            "generate::requested",
            "generate::encoded",
            "generate::resource",
            "generate::proxy",
            "push::groups",
            "push::testing",
        ],
    ),
    rule(
        "distribution",
        &[
            "base",
            "api",
            "table::Cx",
            "task",
            "environment",
            "model",
            "generate",
            "ingest::diagnostics",
            "push",
            "xds",
        ],
    ),
    rule(
        "ca",
        &[
            "base",
            "proto",
            "api",
            "settings",
            "task",
            "metrics",
            "environment",
            "fetch",
            "kube",
            "auth",
            "rpc",
            "model::snapshot",
            "model::features",
            "table::Cx",
        ],
    ),
    rule(
        "status",
        &[
            "base",
            "proto",
            "api",
            "settings",
            "task",
            "metrics",
            "environment",
            "kube",
            "analyze",
            "template::Host",
            "inject",
            "model::snapshot",
            "model::ambient_status",
            "model::features",
            "model::gateway_api",
            "model::ingress",
            "table::Cx",
            "table::Table",
            "distribution",
            "xds::events",
        ],
    ),
    rule(
        "admin",
        &[
            "base",
            "log",
            "proto",
            "table",
            "api",
            "model",
            "generate",
            "settings",
            "task",
            "metrics",
            "environment",
            "kube",
            "ingest",
            "push",
            "auth",
            "rpc",
            "xds",
            "ca",
            "distribution",
            "status",
        ],
    ),
    rule(
        "webhook",
        &[
            "base",
            "api",
            "task",
            "metrics",
            "auth::shares",
            "rpc",
            "environment",
            "template",
            "inject",
            "kube",
            "ca",
            "table",
            "model",
        ],
    ),
    Rule {
        module: "app",
        may: EVERYTHING,
        not: &["app", "cli", "main"],
    },
    Rule {
        module: "cli",
        may: EVERYTHING,
        not: &["main"],
    },
    rule("main", EVERYTHING),
];

const EVERYTHING: &[&str] = &["*"];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("tidy::imports::table_is_acyclic", table_is_acyclic),
        Trial::test("tidy::imports::sources_keep_to_the_table", sources_keep_to_the_table),
        Trial::test("tidy::imports::no_mod_rs", no_mod_rs),
    ]
}

fn table_is_acyclic() -> Result<(), Failed> {
    let mut above = BTreeSet::new();
    let mut breaches = Vec::new();
    for rule in TABLE {
        for named in rule.may.iter().filter(|named| **named != "*") {
            let module = named.split("::").next().unwrap_or(named);
            if !above.contains(module) {
                breaches.push(format!("{} may import {named}, which is not above it", rule.module));
            }
        }
        above.insert(rule.module);
    }
    verdict("each module may import only modules above it in the table", breaches)
}

fn sources_keep_to_the_table() -> Result<(), Failed> {
    let mut breaches = Vec::new();
    for source in sources() {
        let Some(layer) = source.layer() else { continue };
        let Some(rule) = TABLE.iter().find(|rule| rule.module == layer) else {
            breaches.push(format!(
                "{}: module {layer} is not in the table of tests/tidy/imports.rs",
                source.path
            ));
            continue;
        };
        for (position, path) in source.imports() {
            if path[0] != layer && !rule.allows(&path) {
                breaches.push(format!(
                    "{}: {layer} may not import {}",
                    source.place(position),
                    path.join("::")
                ));
            }
        }
    }
    verdict("the import table of tests/tidy/imports.rs", breaches)
}

fn no_mod_rs() -> Result<(), Failed> {
    let found = sources().into_iter().filter(|source| source.path.ends_with("/mod.rs"));
    verdict(
        "a module is x.rs and x/, never x/mod.rs",
        found.map(|source| source.path).collect(),
    )
}

impl Rule {
    fn allows(&self, path: &[String]) -> bool {
        let covers = |named: &&&str| **named == "*" || named.split("::").zip(path).all(|(want, have)| want == have);
        // `use crate::model;` alone would permit all of it, so an import must name a permitted part.
        let names_it = |named: &&&str| **named == "*" || named.split("::").count() <= path.len();
        self.may.iter().filter(names_it).any(|named| covers(&named))
            && !self.not.iter().filter(names_it).any(|named| covers(&named))
    }
}
