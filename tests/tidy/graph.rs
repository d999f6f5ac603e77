//! Import graphs of the modules of a folder: levels and cycles.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Source, sources};

/// The folders whose graphs `make graph` prints, and the ones that must have no cycles.
pub(super) const FOLDERS: &[&str] = &[
    "",
    "base",
    "convert",
    "table",
    "template",
    "template/sprig",
    "inject",
    "inject/data",
    "inject/functions",
    "inject/schema",
    "api",
    "model",
    "analyze",
    "generate",
    "generate/proxy_class",
    "generate/patch",
    "generate/filter",
    "generate/filter/security",
    "generate/endpoint",
    "generate/cluster",
    "generate/route",
    "generate/listener",
    "generate/extension",
    "generate/secret",
    "generate/grpc",
    "log",
    "kube",
    "fetch",
    "ingest",
    "push",
    "otlp",
    "auth",
    "rpc",
    "xds",
    "distribution",
    "ca",
    "status",
    "admin",
    "webhook",
    "app",
    "cli",
];

/// Modules with a type that their whole folder uses, by folder. Imports of them are not edges of the graph: the
/// snapshot names the row types of all tables, and each derive function takes the snapshot.
const HUBS: &[(&str, &str)] = &[("model", "snapshot")];

/// The modules of one folder, each with the modules of the same folder that it imports.
pub(super) struct Graph {
    pub(super) imports: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    /// Reads the graph of a folder below `src/`; the empty folder is the crate.
    pub(super) fn of(folder: &str, sources: &[Source]) -> Self {
        let prefix: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
        let inside =
            |module: &[String]| module.len() > prefix.len() && prefix.iter().eq(module.iter().take(prefix.len()));
        let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for source in sources.iter().filter(|source| inside(&source.module)) {
            imports.entry(source.module[prefix.len()].clone()).or_default();
        }
        let root = sources.iter().find(|source| prefix.iter().eq(&source.module));
        let reexports = root.map(Source::reexports).unwrap_or_default();
        let modules: BTreeSet<String> = imports.keys().cloned().collect();
        for source in sources.iter().filter(|source| inside(&source.module)) {
            let own = &source.module[prefix.len()];
            for (_, path) in source.imports().into_iter().filter(|(_, path)| inside(path)) {
                let name = &path[prefix.len()];
                let target = if modules.contains(name) {
                    Some(name)
                } else {
                    reexports.get(name)
                };
                let is_edge = |target: &&String| {
                    *target != own && modules.contains(*target) && !HUBS.contains(&(folder, target.as_str()))
                };
                if let Some(target) = target.filter(is_edge) {
                    imports.entry(own.clone()).or_default().insert(target.clone());
                }
            }
        }
        Self { imports }
    }

    /// Returns everything that a module imports directly or through others.
    fn reachable(&self, module: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut pending = vec![module];
        while let Some(next) = pending.pop() {
            for import in self.imports.get(next).into_iter().flatten() {
                if found.insert(import.as_str()) {
                    pending.push(import);
                }
            }
        }
        found
    }

    /// Returns the groups of modules that import each other in a cycle.
    pub(super) fn cycles(&self) -> Vec<BTreeSet<&str>> {
        let mut cycles: Vec<BTreeSet<&str>> = Vec::new();
        for module in self.imports.keys() {
            if cycles.iter().any(|cycle| cycle.contains(module.as_str())) {
                continue;
            }
            let reachable = self.reachable(module);
            if reachable.contains(module.as_str()) {
                let in_cycle = |other: &&str| self.reachable(other).contains(module.as_str());
                cycles.push(reachable.into_iter().filter(in_cycle).collect());
            }
        }
        cycles
    }

    /// Returns the modules by level: a module of level 0 imports no other, and the others import lower levels only. The
    /// modules of a cycle have the same level.
    fn levels(&self) -> BTreeMap<usize, Vec<&str>> {
        let cycles = self.cycles();
        let mut level_of: BTreeMap<&str, usize> = BTreeMap::new();
        while level_of.len() < self.imports.len() {
            for module in self.imports.keys() {
                let alone = BTreeSet::from([module.as_str()]);
                let group = cycles
                    .iter()
                    .find(|cycle| cycle.contains(module.as_str()))
                    .unwrap_or(&alone);
                let below = group.iter().flat_map(|member| &self.imports[*member]);
                let below: Vec<&str> = below.map(String::as_str).filter(|name| !group.contains(name)).collect();
                if below.iter().all(|name| level_of.contains_key(name)) {
                    let level = below.iter().map(|name| level_of[name] + 1).max().unwrap_or(0);
                    level_of.extend(group.iter().map(|member| (*member, level)));
                }
            }
        }
        let mut levels: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for (module, level) in level_of {
            levels.entry(level).or_default().push(module);
        }
        levels
    }
}

/// Prints the graph of every folder, bottom up.
pub(crate) fn print() {
    let sources = sources();
    for folder in FOLDERS {
        let graph = Graph::of(folder, &sources);
        println!("\nsrc/{folder}");
        for (level, modules) in graph.levels() {
            for module in modules {
                let imports: Vec<&str> = graph.imports[module].iter().map(String::as_str).collect();
                println!(
                    "{level:>4}  {module}{}{}",
                    if imports.is_empty() { "" } else { ": " },
                    imports.join(", ")
                );
            }
        }
        let cycles = graph.cycles();
        if cycles.is_empty() {
            println!("      no cycles");
        }
        for cycle in cycles {
            println!("      cycle: {}", cycle.into_iter().collect::<Vec<_>>().join(", "));
        }
    }
}
