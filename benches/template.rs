//! The time of rendering a template for pods in one thread, compared with Go's text/template and sprig on this machine.
//!
//! `template` prints a table with the figures and those in `benches/figures.json`; `--keep` writes them there. It
//! needs Go.

use std::process::Command;

use istiod::template::{Limits, NoHost, Templates, Value, sprig_functions};

use crate::support;

use support::figures::{self, Figure};
use support::{project, wait};

/// The fastest of several batches is the one that other processes disturb least.
const BATCHES: usize = 20;
/// Renderings of a batch.
const ROUNDS: u32 = 500;
/// The least factor by which a rendering is faster than Go's.
const GOAL: f64 = 5.0;

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    report(&measure()?, arguments.iter().any(|argument| argument == "--keep"))
}

fn measure() -> Result<Vec<Figure>, String> {
    let folder = project().join("benches/template");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).map_err(|error| error.to_string());
    let (text, data) = (read("pod.txt")?, read("data.json")?);
    let (of_go, by_go) = measured_in_go()?;
    let mut templates = Templates::new(sprig_functions(), Limits::default());
    templates.parse("main", &text).map_err(|error| error.to_string())?;
    let data: serde_json::Value = serde_json::from_str(&data).map_err(|error| error.to_string())?;
    let data = Value::from_json(&data);
    let render = || {
        templates
            .render("main", &data, &NoHost)
            .map_err(|error| error.to_string())
    };
    if render()? != by_go {
        return Err("the output differs from Go's".into());
    }
    let mut own = f64::MAX;
    for _ in 0..BATCHES {
        let started_at = wait::now();
        for _ in 0..ROUNDS {
            render()?;
        }
        own = own.min(started_at.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
    }
    Ok(vec![
        Figure::new("", "µs for a rendering", own),
        Figure::new("", "µs for a rendering in Go", of_go),
        Figure::new("", "times faster than Go", of_go / own),
    ])
}

/// Returns the microseconds of a rendering in Go, and its output.
fn measured_in_go() -> Result<(f64, String), String> {
    let mut go = Command::new("go");
    go.current_dir(project().join("tests/template"));
    go.args([
        "run",
        ".",
        "../../benches/template/pod.txt",
        "../../benches/template/data.json",
    ]);
    let output = go.output().map_err(|error| format!("go: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let text = String::from_utf8(output.stdout).map_err(|error| error.to_string())?;
    let (nanoseconds, text) = text.split_once('\n').ok_or("Go printed nothing")?;
    let nanoseconds: f64 = nanoseconds.parse().map_err(|error| format!("{nanoseconds}: {error}"))?;
    Ok((nanoseconds / 1e3, text.to_owned()))
}

fn report(seen: &[Figure], keep: bool) -> Result<(), String> {
    let kept = figures::kept("template");
    println!(
        "on {}; kept figures are from {}; goal: {GOAL} times faster than Go\n",
        figures::machine(),
        figures::kept_on("template")
    );
    println!("{:<32} {:>10} {:>10}", "template", "now", "kept");
    for figure in seen {
        let before = figures::kept_of(&kept, &figure.case, &figure.name);
        let before = before.map_or("-".to_owned(), |before| format!("{before:.1}"));
        println!("{:<32} {:>10.1} {before:>10}", figure.name, figure.seen);
    }
    figures::seen("template", seen)?;
    if keep {
        figures::keep_seen("template", seen)?;
    }
    Ok(())
}
