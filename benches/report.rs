//! One table of the benches' last figures and those in `benches/figures.json`.
//!
//! `report` prints it, after any of the other benches. `-o json` prints it as JSON, and `--keep` writes all new figures
//! to `benches/figures.json`. Every goal is an upper bound.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::support::figures::{self, Figure};

/// The benches, in the order of the table.
const BENCHES: [&str; 6] = ["steps", "generation", "suite", "kubernetes", "ca", "scale"];
/// The units with which names of figures begin.
const UNITS: [&str; 10] = [
    "µs of CPU",
    "instructions",
    "CPU-ms",
    "CPU-s",
    "ms",
    "s",
    "MiB",
    "KiB",
    "a second",
    "p99",
];

/// The figures of a bench, as in its file.
#[derive(Deserialize)]
struct Seen {
    machine: String,
    figures: BTreeMap<String, BTreeMap<String, Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    seen: f64,
    goal: Option<f64>,
}

/// A line of the table.
#[derive(Serialize)]
struct Row {
    bench: &'static str,
    case: String,
    figure: String,
    unit: &'static str,
    now: f64,
    kept: Option<f64>,
    /// The ratio of the new to the kept figure.
    ratio: Option<f64>,
    goal: Option<f64>,
    #[serde(skip)]
    name: String,
}

/// The machines of a bench.
#[derive(Serialize)]
struct Machines {
    now: String,
    kept: String,
}

#[derive(Serialize)]
struct Report {
    machines: BTreeMap<&'static str, Machines>,
    figures: Vec<Row>,
}

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let report = read()?;
    if arguments.windows(2).any(|pair| pair == ["-o", "json"]) {
        println!(
            "{}",
            serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?
        );
    } else {
        print(&report);
    }
    if arguments.iter().any(|argument| argument == "--keep") {
        keep(&report)
    } else {
        Ok(())
    }
}

fn read() -> Result<Report, String> {
    let mut report = Report {
        machines: BTreeMap::new(),
        figures: Vec::new(),
    };
    for bench in BENCHES {
        let path = figures::seen_folder().join(format!("{bench}.json"));
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let seen: Seen = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let kept = figures::kept(bench);
        for (case, entries) in seen.figures {
            let mut rows: Vec<Row> = entries
                .into_iter()
                .map(|(name, entry)| row(bench, &case, name, &entry, &kept))
                .collect();
            // Sizes are sorted as numbers.
            rows.sort_by_key(|row| row.name.parse().unwrap_or(u64::MAX));
            report.figures.append(&mut rows);
        }
        let machines = Machines {
            now: seen.machine,
            kept: figures::kept_on(bench),
        };
        report.machines.insert(bench, machines);
    }
    if report.figures.is_empty() {
        return Err("no bench has run yet; `make bench` runs all".into());
    }
    Ok(report)
}

fn row(bench: &'static str, case: &str, name: String, entry: &Entry, kept: &serde_json::Value) -> Row {
    let kept = figures::kept_of(kept, case, &name);
    let of_bench = match bench {
        "generation" | "suite" => Some("CPU-ms"),
        _ => None,
    };
    let unit = UNITS
        .into_iter()
        .find(|unit| name == *unit || name.strip_prefix(unit).is_some_and(|rest| rest.starts_with(' ')));
    let figure = unit.and_then(|unit| name.strip_prefix(unit)).unwrap_or(&name).trim();
    Row {
        bench,
        case: case.to_owned(),
        figure: figure.to_owned(),
        unit: of_bench.or(unit).unwrap_or_default(),
        now: entry.seen,
        kept,
        ratio: kept.filter(|kept| *kept > 0.0).map(|kept| entry.seen / kept),
        goal: entry.goal,
        name,
    }
}

fn print(report: &Report) {
    println!("\nall figures of the benches that have run; goals are upper bounds, and ! marks a figure above its goal");
    for (bench, Machines { now, kept }) in &report.machines {
        println!("{bench:<11} on {now}; kept from {kept}");
    }
    println!(
        "\n{:<11}{:<64}{:<40}{:<13}{:>14}{:>14}{:>7}{:>12}",
        "bench", "case", "figure", "unit", "now", "kept", "ratio", "goal"
    );
    let number = |number: f64| match number {
        whole if whole.fract() == 0.0 => format!("{whole:.0}"),
        small if small < 1.0 => format!("{small:.4}"),
        other => format!("{other:.2}"),
    };
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for row in &report.figures {
        let is_missed = row.goal.is_some_and(|goal| row.now > goal);
        println!(
            "{:<11}{:<64}{:<40}{:<13}{:>14}{:>14}{:>7}{:>12}{}",
            row.bench,
            row.case,
            row.figure,
            row.unit,
            number(row.now),
            or_dash(row.kept.map(number)),
            or_dash(row.ratio.map(|ratio| format!("{ratio:.2}"))),
            or_dash(row.goal.map(number)),
            if is_missed { " !" } else { "" }
        );
    }
}

fn keep(report: &Report) -> Result<(), String> {
    for bench in report.machines.keys() {
        let rows = report.figures.iter().filter(|row| row.bench == *bench);
        let figures: Vec<Figure> = rows.map(|row| Figure::new(&row.case, &row.name, row.now)).collect();
        figures::keep_seen(bench, &figures)?;
    }
    Ok(())
}
