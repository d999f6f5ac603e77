//! The daemon's binary, as the trials run it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::process::Process;

/// The daemon with an empty environment, so that no variable of the caller reaches its settings.
pub(crate) fn istiod() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_istiod"));
    command.env_clear().current_dir(super::project().join("target"));
    command
}

/// `istiod render FOLDER --out OUT`; the error tells how it ended and its last words.
pub(crate) fn render(folder: &Path, out: &Path) -> Result<(), String> {
    std::fs::create_dir_all(out).expect("the folder for output can be made");
    let log = out.join("render.log");
    let process = Process::start(istiod().arg("render").arg(folder).arg("--out").arg(out), &log);
    let status = process.end_of(Duration::from_mins(2))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{status}\n{}", process.log_tail()))
    }
}
