//! The single steps of the control plane, in a mesh of 1,000 services with routing and 2,000 sidecars in 50 groups,
//! without I/O: commit, select, regroup, encode, and the cost of a changed EndpointSlice and VirtualService from commit
//! to the last group.
//!
//! `steps` measures the CPU time of each step on one thread with criterion, counts its instructions with valgrind
//! (independent of other load), and prints a table with those in `benches/figures.json`; `--keep` writes the figures
//! there. Another argument selects steps by a part of their names.

mod count;
mod work;

use std::path::PathBuf;
use std::time::Duration;

use criterion::Criterion;
use serde_json::Value;

use crate::fixture;
use crate::support::figures::{self, Figure};
use work::{STEPS, Step, Work};

/// The figures of each step, by their names in the tables.
const TIME: &str = "µs of CPU";
const INSTRUCTIONS: &str = "instructions";

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let is = |name: &str| arguments.iter().any(|argument| argument == name);
    let part = arguments.iter().find(|argument| !argument.starts_with('-'));
    let part = part.map(String::as_str);
    let is_selected = |step: &&Step| part.is_none_or(|part| step.name.contains(part));
    let steps: Vec<&Step> = STEPS.iter().filter(is_selected).collect();
    if is(count::COUNTED) {
        count::run(&mut Work::new()?, &steps)
    } else {
        measure(&steps, is("--keep"))
    }
}

fn measure(steps: &[&Step], keep: bool) -> Result<(), String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/criterion");
    let mut work = Work::new()?;
    let mut criterion = Criterion::default().without_plots().output_directory(&folder);
    for step in steps {
        let mut group = criterion.benchmark_group(step.name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_secs(1))
            .measurement_time(Duration::from_secs(3));
        let mut failed = None;
        group.bench_function("time", |bencher| {
            bencher.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    if let Err(error) = (step.prepare)(&mut work) {
                        failed = Some(error);
                    }
                    let started_at = fixture::cpu();
                    (step.run)(&mut work);
                    spent += Duration::from_secs_f64((fixture::cpu() - started_at) / 1e3);
                }
                // Criterion needs a time above zero.
                spent.max(Duration::from_nanos(1))
            });
        });
        group.finish();
        if let Some(error) = failed {
            return Err(format!("{}: {error}", step.name));
        }
        work.check().map_err(|error| format!("{}: {error}", step.name))?;
    }
    drop(work);
    let counts = count::under_valgrind(steps)?;
    let mut seen = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        let estimates = folder.join(step.folder()).join("time/new/estimates.json");
        let text = std::fs::read_to_string(&estimates).map_err(|error| format!("{}: {error}", estimates.display()))?;
        let estimates: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let nanoseconds = estimates["median"]["point_estimate"].as_f64();
        let time = nanoseconds.ok_or("criterion's estimates have no median")? / 1e3;
        seen.push(Figure::new(step.name, TIME, (time * 100.0).round() / 100.0));
        if let Some(count) = counts.get(at) {
            seen.push(Figure::new(step.name, INSTRUCTIONS, *count as f64));
        }
    }
    print(steps, &seen);
    figures::seen("steps", &seen)?;
    if keep {
        figures::keep_seen("steps", &seen)?;
    }
    Ok(())
}

fn print(steps: &[&Step], seen: &[Figure]) {
    println!(
        "\none thread of {}; kept figures are from {}\n",
        figures::machine(),
        figures::kept_on("steps")
    );
    println!(
        "{:<52}{:>12}{:>8}{:>16}{:>8}",
        "step", TIME, "ratio", INSTRUCTIONS, "ratio"
    );
    let kept = figures::kept("steps");
    for step in steps {
        let cell = |name: &str| {
            let figure = seen
                .iter()
                .find(|figure| figure.case == step.name && figure.name == name);
            let before = kept[step.name][name].as_f64();
            let ratio = figure.zip(before).map(|(figure, before)| figure.seen / before);
            let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
            let digits = usize::from(name == TIME);
            (
                or_dash(figure.map(|figure| format!("{:.digits$}", figure.seen))),
                or_dash(ratio.map(|ratio| format!("{ratio:.3}"))),
            )
        };
        let ((time, than), (count, less)) = (cell(TIME), cell(INSTRUCTIONS));
        println!("{:<52}{time:>12}{than:>8}{count:>16}{less:>8}", step.name);
    }
}
