//! Who may import whom. The table below is the architecture: it is acyclic, and data flows down it.

use std::collections::BTreeSet;

use libtest_mimic::{Failed, Trial};

use super::source::{Source, sources};
use super::verdict;

/// What one top-level module may name of the others.
struct Rule {
    module: &'static str,
    /// Modules, or parts of modules, that may be imported.
    may: &'static [&'static str],
    /// Parts of these that may not.
    not: &'static [&'static str],
}

const fn rule(module: &'static str, may: &'static [&'static str]) -> Rule {
    Rule { module, may, not: &[] }
}

/// Every top-level module, each after all that it may import.
const TABLE: &[Rule] = &[
    rule("proto", &[]),
    rule("base", &[]),
    rule("table", &["base"]),
    rule("api", &["base", "proto"]),
    rule("model", &["base", "proto", "api", "table"]),
    // The engine's read side records what a generator reads, and its memos are derived tables.
    Rule {
        module: "generate",
        may: &["base", "proto", "api", "table", "model"],
        not: &["model::world"],
    },
    rule("template", &["base"]),
    rule("settings", &["base"]),
    rule("task", &[]),
    rule(
        "environment",
        &["base", "settings", "task", "model::snapshot", "model::change"],
    ),
    rule("kube", &["base", "settings", "task"]),
    rule("fetch", &["base"]),
    rule(
        "ingest",
        &[
            "base",
            "api",
            "settings",
            "task",
            "environment",
            "fetch",
            "kube",
            "model::change",
            "model::wants",
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
    rule(
        "auth",
        &["base", "proto", "settings", "task", "environment", "fetch", "kube"],
    ),
    rule("rpc", &["base", "task", "auth"]),
    rule(
        "xds",
        &[
            "base",
            "proto",
            "settings",
            "task",
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
        "ca",
        &[
            "base",
            "proto",
            "api",
            "settings",
            "task",
            "environment",
            "fetch",
            "kube",
            "auth",
            "rpc",
            "model::snapshot",
            "table::Cx",
        ],
    ),
    rule(
        "inject",
        &[
            "base",
            "proto",
            "api",
            "settings",
            "task",
            "environment",
            "kube",
            "template",
            "model::snapshot",
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
            "environment",
            "kube",
            "template",
            "model::snapshot",
            "table::Cx",
            "xds::events",
        ],
    ),
    rule(
        "admin",
        &[
            "base",
            "proto",
            "table",
            "api",
            "model",
            "generate",
            "template",
            "settings",
            "task",
            "environment",
            "kube",
            "ingest",
            "push",
            "auth",
            "xds",
            "ca",
            "inject",
            "status",
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
                breaches.push(format!(
                    "{} may import {named}, which does not stand above it",
                    rule.module
                ));
            }
        }
        above.insert(rule.module);
    }
    verdict(
        "each module may import only what stands above it in the table",
        breaches,
    )
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
        for (position, path) in imports(&source) {
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
        // `use crate::model;` alone would open all of it, so a part that may be named has to be named.
        let names_it = |named: &&&str| **named == "*" || named.split("::").count() <= path.len();
        self.may.iter().filter(names_it).any(|named| covers(&named))
            && !self.not.iter().filter(names_it).any(|named| covers(&named))
    }
}

/// The paths from the crate's root that a file names, at most two segments of each, with their positions.
fn imports(source: &Source) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for position in source.words("crate") {
        if let Some(rest) = source.code[position + "crate".len()..].trim_start().strip_prefix("::") {
            found.extend(paths(rest).into_iter().map(|path| (position, path)));
        }
    }
    for position in source.words("istiod_proto").filter(|_| source.layer() != Some("proto")) {
        found.push((position, vec!["proto".to_owned()]));
    }
    for position in source.words("super") {
        let mut rest = &source.code[position..];
        let mut climbed = 0;
        while let Some(next) = rest
            .trim_start()
            .strip_prefix("super")
            .and_then(|rest| rest.trim_start().strip_prefix("::"))
        {
            climbed += 1;
            rest = next;
        }
        if climbed >= source.module.len() {
            found.extend(paths(rest).into_iter().map(|path| (position, path)));
        }
    }
    found
}

/// Reads `a::b::c` or `{a::b, c::{d, e}}` and gives the first two segments of each path.
fn paths(code: &str) -> Vec<Vec<String>> {
    let code = code.trim_start();
    if let Some(group) = code.strip_prefix('{') {
        return members(group).into_iter().flat_map(paths).collect();
    }
    let name: String = code
        .chars()
        .take_while(|character| character.is_alphanumeric() || *character == '_')
        .collect();
    if name.is_empty() {
        return Vec::new();
    }
    let Some(rest) = code[name.len()..].trim_start().strip_prefix("::") else {
        return vec![vec![name]];
    };
    let inner = paths(rest);
    if inner.is_empty() {
        return vec![vec![name]];
    }
    let seconds: BTreeSet<String> = inner.into_iter().filter_map(|path| path.into_iter().next()).collect();
    seconds.into_iter().map(|second| vec![name.clone(), second]).collect()
}

/// The members of a `{...}` group whose opening brace has been read.
fn members(group: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let mut begin = 0;
    let mut members = Vec::new();
    for (position, byte) in group.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => {
                members.push(&group[begin..position]);
                break;
            }
            b'}' => depth -= 1,
            b',' if depth == 0 => {
                members.push(&group[begin..position]);
                begin = position + 1;
            }
            _ => {}
        }
    }
    members
}
