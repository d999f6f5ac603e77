//! The number of instructions of a step: the bench runs itself under callgrind, which counts inside one function only.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::work::{Step, Work};

/// The argument that makes the bench run each step once, for the count.
pub(super) const COUNTED: &str = "--counted";
/// Callgrind's pattern of the only counted function, [`counted_step`].
const FUNCTION: &str = "*counted_step*";

/// Runs each step once to warm up, and once for the count.
pub(super) fn run(work: &mut Work, steps: &[&Step]) -> Result<(), String> {
    for step in steps {
        (step.prepare)(work)?;
        (step.run)(work);
        (step.prepare)(work)?;
        counted_step(step, work);
        work.check()?;
    }
    Ok(())
}

#[inline(never)]
fn counted_step(step: &Step, work: &mut Work) {
    (step.run)(std::hint::black_box(work));
}

/// Returns the counts of these steps, in order; empty, with a message, if valgrind is missing.
pub(super) fn under_valgrind(steps: &[&Step]) -> Result<Vec<u64>, String> {
    let silent = |command: &mut Command| command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !silent(Command::new("valgrind").arg("--version")).is_ok_and(|status| status.success()) {
        println!("valgrind is not installed: instructions are not counted");
        return Ok(Vec::new());
    }
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/bench/counts");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
    }
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    println!("counting instructions; this takes a few minutes");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let done = AtomicUsize::new(0);
    // Counts do not depend on other processes, so they run in parallel.
    let count = |(at, step): (usize, &&Step)| {
        let out = folder.join(at.to_string());
        let status = Command::new("valgrind")
            .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
            .arg(format!("--toggle-collect={FUNCTION}"))
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(&program)
            .args(["steps", COUNTED, step.name])
            .status()
            .map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("{} under valgrind: {status}", step.name));
        }
        let number = 1 + done.fetch_add(1, Ordering::Relaxed);
        println!("{number} of {}: {}", steps.len(), step.name);
        total(&out)
    };
    steps.par_iter().enumerate().map(count).collect()
}

/// Returns the total count of a dump.
fn total(dump: &Path) -> Result<u64, String> {
    let text = std::fs::read_to_string(dump).map_err(|error| format!("{}: {error}", dump.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let total = line.and_then(|line| line.trim().parse().ok());
    total.ok_or_else(|| format!("{}: no total", dump.display()))
}
