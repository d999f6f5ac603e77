//! Comparison with istiod's own benchmark suite: meshes of the same shapes, and for each the CPU time of the model, of
//! every resource type for one proxy from scratch, and of each further proxy of the same kind.
//!
//! `suite` prints a table with istiod's times and those in `benches/figures.json`; `--keep` writes the figures there.
//! `--meshes FOLDER` measures the meshes of a folder (one folder for each case, in the format of `istiod render`)
//! instead. `--counted` only runs the code, for other tools (`valgrind --tool=callgrind
//! --toggle-collect='*counted_update*'`). Another argument selects cases by a part of their names.

mod cases;
mod measure;
mod meshes;

use std::{collections::BTreeMap, path::Path};

use istiod::{
    api::folder,
    generate::{Proxy, ResourceType},
    model::{Change, Installation},
};
use serde_json::json;

use crate::fixture;
use crate::support::figures::{self, Figure};
use cases::{CASES, Case, Istiod};
use measure::{Generation, Measured, count, measure};

/// The goal for a proxy from scratch, for each type by itself: this many times as fast as istiod.
const FROM_NOTHING: f64 = 5.0;
/// The goal for a proxy that shares everything with another, for all types together: this many times as fast as istiod.
const SHARED: f64 = 100.0;

#[derive(Default)]
struct Arguments {
    keep: bool,
    counted: bool,
    meshes: Option<String>,
    case_filter: String,
}

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    measure_all(&parse(arguments))
}

fn parse(given: &[String]) -> Arguments {
    let mut arguments = Arguments::default();
    let mut all = given.iter();
    while let Some(argument) = all.next() {
        match argument.as_str() {
            "--keep" => arguments.keep = true,
            "--counted" => arguments.counted = true,
            "--meshes" => arguments.meshes = all.next().cloned(),
            option if option.starts_with('-') => {}
            filter => arguments.case_filter = filter.to_owned(),
        }
    }
    arguments
}

fn measure_all(arguments: &Arguments) -> Result<(), String> {
    println!("CPU milliseconds of generation on {};", figures::machine());
    println!(
        "istiod's are those of istiod 1.30.3 on a machine with two cores (~: published by its project, of another machine),"
    );
    println!("kept figures are from {}\n", figures::kept_on("suite"));
    println!("{}", Row::HEADER);
    let kept = figures::kept("suite");
    let mut all_kept = if kept.is_object() { kept.clone() } else { json!({}) };
    let (mut missed, mut seen) = (Vec::new(), Vec::new());
    for case in CASES.iter().filter(|case| case.name.contains(&arguments.case_filter)) {
        let Some((changes, proxies)) = input(case, arguments.meshes.as_deref())? else {
            continue;
        };
        let installation = case.installation();
        if arguments.counted {
            let first = proxies.into_iter().next();
            count(&installation, &changes, first.ok_or("no proxy")?)?;
            continue;
        }
        let measured = measure(&installation, &changes, proxies).map_err(|error| format!("{}: {error}", case.name))?;
        let mut figures = BTreeMap::new();
        for row in rows(case, &measured) {
            let old = kept[case.name][row.what].as_f64();
            println!("{}", row.text(case, old));
            if row.is_missed() {
                missed.push(format!("{}, {}", case.name, row.what));
            }
            let ours = (row.ours * 1e4).round() / 1e4;
            figures.insert(row.what, ours);
            seen.push(Figure {
                goal: row.istiod.zip(row.goal).map(|(istiod, times)| istiod / times),
                ..Figure::new(case.name, row.what, ours)
            });
        }
        all_kept[case.name] = json!(figures);
    }
    if arguments.meshes.is_none() {
        figures::seen("suite", &seen)?;
    }
    if arguments.keep {
        figures::keep("suite", all_kept)?;
    }
    if !missed.is_empty() {
        println!("\nbelow the goal:\n{}", missed.join("\n"));
    }
    Ok(())
}

type Input = (Vec<Change>, Vec<Proxy>);

/// Number of proxies of one kind in each case.
const PROXIES: usize = 17;

/// The input of a case; none if the folder has no such case.
fn input(case: &Case, meshes: Option<&str>) -> Result<Option<Input>, String> {
    let Some(folder) = meshes else {
        let changes = fixture::changes(&(case.mesh)(), Some(&meshes::mesh_config()));
        let metadata = json!({ "NAMESPACE": "default", "SERVICE_ACCOUNT": "default", "CLUSTER_ID": "Kubernetes",
            "ISTIO_VERSION": "1.30.3", "WORKLOAD_NAME": "measured", "LABELS": { meshes::LABEL: "true" } });
        let proxy = |number: usize| {
            // Two of them are endpoints in the mesh.
            let (kind, address) = (case.proxy, meshes::ADDRESSES[number.min(1)]);
            let node = format!("{kind}~{address}~measured-{number}.default~default.svc.cluster.local");
            fixture::proxy(&node, &metadata, IDENTITY)
        };
        let proxies = (0..PROXIES).map(proxy).collect::<Result<_, _>>()?;
        return Ok(Some((changes, proxies)));
    };
    let path = Path::new(folder).join(case.name);
    let mut files = Vec::new();
    for name in ["config.yaml", "mesh.yaml", "proxies.yaml"] {
        match std::fs::read(path.join(name)) {
            Ok(bytes) => files.push((name.to_owned(), bytes)),
            Err(_) if name == "config.yaml" => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.join(name).display())),
        }
    }
    let installation = Installation::default();
    let read = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
    let proxy = read.proxies.first().cloned().unwrap_or_default();
    let node = proxy["node"].as_str().unwrap_or_default();
    let proxies = (0..PROXIES).map(|_| fixture::proxy(node, &proxy["metadata"], IDENTITY));
    let proxies = proxies.collect::<Result<_, _>>()?;
    let changes = read.rows.into_values().flatten().map(Change::Upsert).collect();
    Ok(Some((changes, proxies)))
}

const IDENTITY: &str = "spiffe://cluster.local/ns/default/sa/default";

/// A line of the table.
struct Row {
    what: &'static str,
    istiod: Option<f64>,
    ours: f64,
    goal: Option<f64>,
    sizes: Option<(Istiod, Generation)>,
}

fn rows(case: &Case, measured: &Measured) -> Vec<Row> {
    let plain = |what, istiod, ours, goal| Row {
        what,
        istiod,
        ours,
        goal,
        sizes: None,
    };
    let mut rows = Vec::new();
    if let Some(istiod) = case.model {
        rows.push(plain("model", Some(istiod), measured.model, None));
        rows.push(plain("selection", None, measured.selection, None));
    }
    for (resource_type, istiod) in case.types {
        let generation = measured.types[resource_type];
        rows.push(Row {
            what: name(*resource_type),
            istiod: Some(istiod.0),
            ours: generation.cost,
            goal: Some(FROM_NOTHING),
            sizes: Some((*istiod, generation)),
        });
    }
    if case.model.is_some() {
        rows.push(plain("second", Some(case.istiod()), measured.second, Some(SHARED)));
    }
    rows
}

fn name(resource_type: ResourceType) -> &'static str {
    match resource_type {
        ResourceType::Cluster => "clusters",
        ResourceType::Endpoint => "endpoints",
        ResourceType::Listener => "listeners",
        ResourceType::Route => "routes",
        ResourceType::Secret => "secrets",
        ResourceType::NameTable => "names",
        other => other.short_name(),
    }
}

impl Row {
    const HEADER: &str = "case                       what         istiod     ours   times   goal       kB of  ours     count of  ours     kept";

    fn times(&self) -> Option<f64> {
        self.istiod.map(|istiod| istiod / self.ours)
    }

    fn is_missed(&self) -> bool {
        self.times().zip(self.goal).is_some_and(|(times, goal)| times < goal)
    }

    fn text(&self, case: &Case, kept: Option<f64>) -> String {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let mark = if case.is_elsewhere { "~" } else { "" };
        let istiod = or_dash(self.istiod.map(|time| format!("{mark}{time:.3}")));
        let times = or_dash(self.times().map(|times| format!("{times:.1}")));
        let goal = or_dash(self.goal.map(|goal| format!("{goal}")));
        let kept = or_dash(kept.map(|kept| format!("{kept:.3}")));
        let sizes = self.sizes.map(|(Istiod(_, size, count), ours)| {
            let bytes = ours.bytes as f64 / 1000.0;
            format!("{size:>12.1}{bytes:>8.1}{count:>11}{:>6}", ours.count)
        });
        format!(
            "{:<27}{:<10}{istiod:>9}{:>9.3}{times:>8}{goal:>6}{}{:<37}{kept:>9}",
            case.name,
            self.what,
            self.ours,
            if self.is_missed() { "!" } else { " " },
            sizes.unwrap_or_default(),
        )
    }
}
