//! Figures of benches. The kept figures are in `benches/figures.json`. The figures of the last run are in
//! `target/bench`, one file per bench; the bench `report` makes its table from them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// One figure of a bench.
pub(crate) struct Figure {
    /// The benched case; empty where the name is enough.
    pub(crate) case: String,
    /// The quantity, with its unit in front.
    pub(crate) name: String,
    /// The upper limit, if there is a goal.
    pub(crate) goal: Option<f64>,
    pub(crate) seen: f64,
}

impl Figure {
    /// A figure without a goal.
    pub(crate) fn new(case: impl Into<String>, name: impl Into<String>, seen: f64) -> Figure {
        Figure {
            case: case.into(),
            name: name.into(),
            goal: None,
            seen,
        }
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/figures.json")
}

fn all() -> Value {
    read(&path())
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).ok();
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
}

fn write(path: &Path, value: &Value) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value).map_err(|error| error.to_string())?;
    std::fs::write(path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))
}

/// The folder for the figures of the last run.
pub(crate) fn seen_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench")
}

/// Records the figures of a bench for the report. Figures of other cases stay.
pub(crate) fn seen(bench: &str, figures: &[Figure]) -> Result<(), String> {
    let folder = seen_folder();
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join(format!("{bench}.json"));
    let mut all = read(&path);
    if all["machine"] != json!(machine()) {
        all = json!({ "machine": machine(), "figures": {} });
    }
    for figure in figures {
        all["figures"][&figure.case][&figure.name] = json!({ "seen": figure.seen, "goal": figure.goal });
    }
    write(&path, &all)
}

/// Returns a kept figure, from all kept figures of its bench.
pub(crate) fn kept_of(kept: &Value, case: &str, name: &str) -> Option<f64> {
    let case = if case.is_empty() { kept } else { &kept[case] };
    case[name].as_f64()
}

/// Stores these figures of a bench in the kept ones. Its other figures stay.
pub(crate) fn keep_seen(bench: &str, figures: &[Figure]) -> Result<(), String> {
    let mut kept = kept(bench);
    if !kept.is_object() {
        kept = json!({});
    }
    for figure in figures {
        let case = if figure.case.is_empty() {
            &mut kept
        } else {
            &mut kept[&figure.case]
        };
        case[&figure.name] = json!(figure.seen);
    }
    keep(bench, kept)
}

/// Returns the kept figures of a bench; null if there are none.
pub(crate) fn kept(bench: &str) -> Value {
    all()[bench].clone()
}

/// The machine on which the kept figures of a bench were measured.
pub(crate) fn kept_on(bench: &str) -> String {
    all()["machines"][bench].as_str().unwrap_or("nowhere").to_owned()
}

/// Stores the figures of a bench with this machine's description. Other benches' figures stay.
pub(crate) fn keep(bench: &str, figures: Value) -> Result<(), String> {
    let mut all = all();
    if !all.is_object() {
        all = json!({});
    }
    all[bench] = figures;
    all["machines"][bench] = json!(machine());
    write(&path(), &all)
}

/// A short description of this machine.
pub(crate) fn machine() -> String {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let value = text.lines().find_map(|line| {
            line.strip_prefix(name)?
                .split_once(':')
                .map(|(_, value)| value.trim().to_owned())
        });
        value.unwrap_or_else(|| "unknown".to_owned())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{cores} cores ({}), {} of memory",
        field("/proc/cpuinfo", "model name"),
        field("/proc/meminfo", "MemTotal")
    )
}
