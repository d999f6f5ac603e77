//! The cost of full generation as a mesh grows: for each kind of growth, the CPU time of the model and of all resources
//! of a sidecar and a gateway, at sizes that double. A doubling should at most double the cost.
//!
//! `generation` prints a table and compares the last size with `benches/figures.json`. It fails where a doubling costs
//! more than [`MAX_RATIO`] times as much, in the mean of its curve. `--keep` writes the figures there. Another argument
//! selects curves by a part of their names.

mod curves;
mod objects;

use std::collections::BTreeMap;
use std::sync::Arc;

use istiod::{
    generate::store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    model::{Installation, MeshSnapshot, World},
    table::ChangeSet,
};
use serde_json::{Value, json};

use crate::fixture::{self, cpu};
use crate::support::figures::{self, Figure};
use curves::CURVES;

/// Number of runs of each figure, which is their minimum: disturbances only add to it.
const RUNS: usize = 5;
const DOUBLINGS: u32 = 4;
/// The most that a doubling may cost, in the geometric mean of all doublings of a curve; single ones depend too much on
/// other load. It is above 2 because caches hold less of a larger mesh, maps are deeper and lists are sorted.
const MAX_RATIO: f64 = 2.4;

/// Milliseconds of CPU.
#[derive(Clone, Copy)]
struct Cost {
    model: f64,
    sidecar: f64,
    gateway: f64,
}

impl Cost {
    const NONE: Cost = Cost {
        model: f64::INFINITY,
        sidecar: f64::INFINITY,
        gateway: f64::INFINITY,
    };

    fn least(self, other: Cost) -> Cost {
        Cost {
            model: self.model.min(other.model),
            sidecar: self.sidecar.min(other.sidecar),
            gateway: self.gateway.min(other.gateway),
        }
    }

    fn all(self) -> f64 {
        self.model + self.sidecar + self.gateway
    }
}

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let keep = arguments.iter().any(|argument| argument == "--keep");
    let name_filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let name_filter = name_filter.map_or("", String::as_str);
    println!(
        "CPU milliseconds of the model and of all resources of one sidecar and one gateway, minimum of {RUNS} runs"
    );
    println!(
        "on {}; kept figures are from {}\n",
        figures::machine(),
        figures::kept_on("generation")
    );
    let header = ["size", "model", "sidecar", "gateway", "all", "ratio", "kept"];
    let kept = figures::kept("generation");
    let mut measured = BTreeMap::new();
    let mut seen = Vec::new();
    let mut steep = Vec::new();
    for curve in CURVES.iter().filter(|curve| curve.name.contains(name_filter)) {
        println!("{}", curve.name);
        println!("  {}", header.map(|name| format!("{name:>9}")).join(""));
        let (mut before, mut first) = (None, None);
        let mut row = BTreeMap::new();
        for doubling in 0..=DOUBLINGS {
            let size = curve.first << doubling;
            let cost = cost(&(curve.mesh)(size))?;
            let ratio = before.map(|before| cost.all() / before);
            let values = [cost.model, cost.sidecar, cost.gateway, cost.all()].map(|value| format!("{value:>9.1}"));
            let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            let old = kept[curve.name][size.to_string()].as_f64();
            let old = old.map_or("-".to_owned(), |old| format!("{old:.1}"));
            println!("  {size:>9}{}{ratio:>9}{old:>9}", values.join(""));
            before = Some(cost.all());
            first = first.or(before);
            let all = (cost.all() * 10.0).round() / 10.0;
            seen.push(Figure::new(curve.name, size.to_string(), all));
            row.insert(size.to_string(), all);
        }
        let growth = before.zip(first).map_or(1.0, |(last, first)| last / first);
        let mean = growth.powf(1.0 / f64::from(DOUBLINGS));
        println!("  {:>9}{:>45}", "mean", format!("{mean:.2}"));
        if mean > MAX_RATIO {
            steep.push(format!("{}: {mean:.2}", curve.name));
        }
        measured.insert(curve.name, row);
    }
    figures::seen("generation", &seen)?;
    if keep {
        figures::keep("generation", json!(measured))?;
    }
    if steep.is_empty() {
        return Ok(());
    }
    Err(format!(
        "\na doubling costs more than {MAX_RATIO} times as much in the mean:\n{}",
        steep.join("\n")
    ))
}

fn cost(objects: &[Value]) -> Result<Cost, String> {
    let mut least = Cost::NONE;
    for _ in 0..RUNS {
        let changes = fixture::changes(objects, None);
        let mut world = World::new(Installation::default());
        let started_at = cpu();
        let mesh = world.commit(changes).snapshot;
        let model = cpu() - started_at;
        let once = Cost {
            model,
            sidecar: generation(&mesh, "sidecar", "10.1.0.0", "app-0")?,
            gateway: generation(&mesh, "router", "10.3.0.1", "edge")?,
        };
        least = least.least(once);
    }
    Ok(least)
}

/// Returns the cost of the first configuration of one proxy.
fn generation(mesh: &MeshSnapshot, kind: &str, ip: &str, app: &str) -> Result<f64, String> {
    let metadata = json!({ "NAMESPACE": "shop", "CLUSTER_ID": "Kubernetes", "ISTIO_VERSION": "1.30.3",
        "SERVICE_ACCOUNT": "sa",
        "LABELS": { "app": app, "istio": app } });
    let node = format!("{kind}~{ip}~{app}.shop~shop.svc.cluster.local");
    let proxy = fixture::proxy(&node, &metadata, "")?;
    let membership = ProxyEvents {
        connected: vec![(ConnectionId(0), Arc::new(proxy))],
        ..ProxyEvents::default()
    };
    let mut store = ConfigStore::default();
    let started_at = cpu();
    let update = store.update(mesh, &ChangeSet::default(), membership, &Serial);
    let cost = cpu() - started_at;
    if update.panics.is_empty() {
        Ok(cost)
    } else {
        Err(update.panics.join("\n"))
    }
}
