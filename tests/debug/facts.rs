//! Shapes of JSON documents as facts: `page path type`, one for each field and type.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use libtest_mimic::Failed;
use serde_json::Value;

/// Objects whose keys are data, by the name of their field.
const MAPS: [&str; 14] = [
    "Addresses",
    "LabelSelectors",
    "Labels",
    "ServiceAccounts",
    "Shards",
    "annotations",
    "destinationRules",
    "labels",
    "namespace_to_policies",
    "namespace_to_telemetries",
    "resources",
    "servicesByHostname",
    "table",
    "watches",
];
/// Pages whose outer objects have data as keys, with the number of these objects.
const OUTER_MAPS: [(&str, usize); 5] = [
    ("cachez", 1),
    ("endpointShardz", 2),
    ("endpointz", 2),
    ("instancesz", 1),
    ("push_status", 2),
];
/// Contents that other tests compare, or that are a client's own.
const OPAQUE: [&str; 7] = [
    "cluster",
    "endpointConfig",
    "inputs",
    "listener",
    "metadata",
    "outputs",
    "routeConfig",
];

/// A fact: the page, the path of a field, and a type that it has.
type Fact = (String, String, String);

/// A set of facts.
#[derive(Default)]
pub(super) struct Facts(BTreeSet<Fact>);

impl Facts {
    pub(super) fn read(file: &Path) -> Result<Self, Failed> {
        let text = std::fs::read_to_string(file)?;
        let fact = |line: &str| {
            let mut parts = line.split(' ').map(str::to_owned);
            Some((parts.next()?, parts.next()?, parts.next()?))
        };
        Ok(Self(text.lines().filter_map(fact).collect()))
    }

    pub(super) fn write(&self, file: &Path) -> Result<(), Failed> {
        let lines = self.0.iter().map(|(page, path, kind)| format!("{page} {path} {kind}"));
        let lines: Vec<String> = lines.collect();
        Ok(std::fs::write(file, lines.join("\n") + "\n")?)
    }

    /// Adds the facts of a page.
    pub(super) fn add(&mut self, page: &str, document: &Value) {
        let of_page = OUTER_MAPS.iter().find(|(name, _)| page.split('?').next() == Some(name));
        let maps = of_page.map_or(0, |(_, maps)| *maps);
        self.follow(page, "", document, maps);
    }

    fn follow(&mut self, page: &str, path: &str, value: &Value, outer_maps: usize) {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let shown = if path.is_empty() { "." } else { path };
        self.0.insert((page.to_owned(), shown.to_owned(), kind.to_owned()));
        let field = path.rsplit('.').next().unwrap_or_default();
        // In configz, metadata is a structure of Kubernetes.
        let is_opaque = OPAQUE.contains(&field) && !(field == "metadata" && page == "configz");
        let is_resource = page.contains("types=") && path == ".configs[]";
        match value {
            _ if is_opaque || is_resource => {}
            Value::Array(elements) => {
                for element in elements {
                    self.follow(page, &format!("{path}[]"), element, outer_maps);
                }
            }
            Value::Object(fields) => {
                let is_map = outer_maps > 0 || MAPS.contains(&field);
                for (name, value) in fields {
                    let name = if is_map { "*" } else { name };
                    self.follow(page, &format!("{path}.{name}"), value, outer_maps.saturating_sub(1));
                }
            }
            _ => {}
        }
    }
}

/// The listed deviations from Istio's shapes: `± page path type reason`. A page or path may end with `*`.
pub(super) struct Deviations(Vec<(char, [String; 3])>);

impl Deviations {
    pub(super) fn read(file: &Path) -> Result<Self, Failed> {
        let text = std::fs::read_to_string(file)?;
        let mut rows = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let parts: Vec<&str> = line.splitn(5, ' ').collect();
            let [sign @ ("+" | "-"), page, path, kind, _reason] = parts[..] else {
                return Err(format!("{}: {line:?} is not `± page path type reason`", file.display()).into());
            };
            let sign = if sign == "+" { '+' } else { '-' };
            rows.push((sign, [page, path, kind].map(str::to_owned)));
        }
        Ok(Self(rows))
    }

    /// Fails with the facts that differ without a reason, and with the reasons without a difference.
    pub(super) fn explain(&self, expected: &Facts, given: &Facts) -> Result<(), Failed> {
        let lacking = expected.0.difference(&given.0).map(|fact| ('-', fact));
        let additional = given.0.difference(&expected.0).map(|fact| ('+', fact));
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        let mut problems = Vec::new();
        for (sign, (page, path, kind)) in lacking.chain(additional) {
            let of_fact = |(of, [on, at, a]): &(char, [String; 3])| {
                *of == sign && fits(on, page) && fits(at, path) && fits(a, kind)
            };
            match self.0.iter().position(of_fact) {
                Some(row) => *used.entry(row).or_default() += 1,
                None => problems.push(format!("{sign} {page} {path} {kind}")),
            }
        }
        let unused = self.0.iter().enumerate().filter(|(row, _)| !used.contains_key(row));
        problems.extend(unused.map(|(_, (sign, row))| format!("no longer true: {sign} {}", row.join(" "))));
        if problems.is_empty() {
            return Ok(());
        }
        Err(format!(
            "{} differences (- Istio has it, + only here):\n{}",
            problems.len(),
            problems.join("\n")
        )
        .into())
    }
}

fn fits(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => text.starts_with(beginning),
        None => pattern == text,
    }
}
