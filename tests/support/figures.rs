//! Figures of benches: those that are kept with the project, in `benches/figures.json`, and those that were seen last, a
//! file for each bench in `target/bench`, from which `cargo bench --bench report` makes its table.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// One figure of a bench, whatever it is of.
pub(crate) struct Figure {
    /// Empty where the name says it all.
    pub(crate) case: String,
    /// What it is, with its unit in front.
    pub(crate) name: String,
    /// At most so much, if there is a goal.
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

/// Where the benches put what they see.
pub(crate) fn seen_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench")
}

/// Notes what a bench has seen, for the report; what it saw of other cases before stays.
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

/// What is kept of a figure among all that is kept of its bench.
pub(crate) fn kept_of(kept: &Value, case: &str, name: &str) -> Option<f64> {
    let case = if case.is_empty() { kept } else { &kept[case] };
    case[name].as_f64()
}

/// Keeps these figures of a bench; other figures of it stay.
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

/// What is kept of that bench; null if nothing is.
pub(crate) fn kept(bench: &str) -> Value {
    all()[bench].clone()
}

/// The machine that the figures of that bench are from.
pub(crate) fn kept_on(bench: &str) -> String {
    all()["machines"][bench].as_str().unwrap_or("nowhere").to_owned()
}

/// Keeps the figures of that bench as those of this machine; others stay.
pub(crate) fn keep(bench: &str, figures: Value) -> Result<(), String> {
    let mut all = all();
    if !all.is_object() {
        all = json!({});
    }
    all[bench] = figures;
    all["machines"][bench] = json!(machine());
    write(&path(), &all)
}

/// This machine in a few words.
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
