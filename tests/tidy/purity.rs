//! Purity of the lower layers: no runtime, clock, environment, files or randomness. Results of pure code can be shared
//! between proxies, recomputed for comparison and tested without a clock. And the same code in tests.

use libtest_mimic::{Failed, Trial};

use super::source::sources;
use super::verdict;

const PURE: &[&str] = &[
    "proto", "base", "api", "convert", "table", "template", "inject", "model", "analyze", "generate",
];

/// Names that pure code must not contain, with what they give access to.
const IMPURE: &[(&str, &str)] = &[
    ("tokio", "the runtime"),
    ("kube_runtime", "Kubernetes' API"),
    ("Instant::now", "the clock"),
    ("SystemTime::now", "the clock"),
    ("now_utc", "the clock"),
    ("std::env", "the environment"),
    ("env::var", "the environment"),
    ("std::fs", "files"),
    ("std::process", "processes"),
    ("std::thread", "threads"),
    ("TcpStream", "sockets"),
    ("TcpListener", "sockets"),
    ("UdpSocket", "sockets"),
    ("rand", "randomness"),
    ("fastrand", "randomness"),
    ("getrandom", "randomness"),
    ("RandomState", "randomness"),
    ("println", "the terminal"),
    ("eprintln", "the terminal"),
    ("debug!", "logging"),
    ("info!", "logging"),
    ("warn!", "logging"),
    ("error!", "logging"),
];

/// The key of hashes, which nothing that leaves the process depends on.
const KEYED: &str = "src/base/keyed.rs";

/// Collections without an order of keys, which could make output differ between replicas.
const UNORDERED: &[&str] = &["HashMap", "HashSet", "FxHashMap", "FxHashSet", "KeyedMap", "KeyedSet"];

/// Files of generation whose unordered maps are only looked up by key, or sorted before use.
const MEMOS: [&str; 11] = [
    "src/generate/block.rs",
    "src/generate/route/gateway/build.rs",
    "src/generate/route/host_names.rs",
    "src/generate/route/sidecar/egress_view.rs",
    "src/generate/route/name_set.rs",
    "src/generate/route/virtual_host.rs",
    "src/generate/store.rs",
    "src/generate/store/connections.rs",
    "src/generate/store/effect.rs",
    "src/generate/store/lists.rs",
    "src/generate/store/parts.rs",
];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "tidy::purity::pure_layers_have_no_side_effects",
            pure_layers_have_no_side_effects,
        ),
        Trial::test("tidy::purity::generation_is_ordered", generation_is_ordered),
        Trial::test("tidy::purity::tests_have_all_code", tests_have_all_code),
    ]
}

fn pure_layers_have_no_side_effects() -> Result<(), Failed> {
    let mut breaches = Vec::new();
    for source in sources()
        .iter()
        .filter(|source| source.layer().is_some_and(|layer| PURE.contains(&layer)) && source.path != KEYED)
    {
        for (name, what) in IMPURE {
            breaches.extend(
                source
                    .words(name)
                    .map(|position| format!("{}: {name} ({what})", source.place(position))),
            );
        }
    }
    verdict("pure layers get their inputs as parameters", breaches)
}

fn generation_is_ordered() -> Result<(), Failed> {
    let mut breaches = Vec::new();
    for source in sources()
        .iter()
        .filter(|source| source.layer() == Some("generate") && !MEMOS.contains(&source.path.as_str()))
    {
        for name in UNORDERED {
            breaches.extend(
                source
                    .words(name)
                    .map(|position| format!("{}: {name}", source.place(position))),
            );
        }
    }
    verdict("src/generate uses ordered collections only", breaches)
}

/// Clippy checks the code of the library in its tests only (`.ci/rustc`).
fn tests_have_all_code() -> Result<(), Failed> {
    let mut breaches = Vec::new();
    for source in sources() {
        let conditions = source.words("not").filter(|position| {
            let condition = source.code[*position..].lines().next().unwrap_or_default();
            condition.starts_with("not(") && condition.contains("test")
        });
        breaches.extend(conditions.map(|position| source.place(position)));
    }
    verdict("no code of src is left out of tests", breaches)
}
