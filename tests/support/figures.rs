//! Figures of benches that are kept with the project, in `benches/figures.json`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/figures.json")
}

fn all() -> Value {
    let text = std::fs::read_to_string(path()).ok();
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
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
    let text = serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?;
    std::fs::write(path(), text + "\n").map_err(|error| error.to_string())
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
