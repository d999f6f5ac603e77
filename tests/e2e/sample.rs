//! The sample of `make run`, run once.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Failed;

use crate::support::process::Process;
use crate::support::{project, scratch};

/// Runs the sample to its end, with this build's daemon.
pub(super) fn runs_once(name: &str) -> Result<(), Failed> {
    let mut command = Command::new("python3");
    command
        .current_dir(project())
        .arg("samples/helloworld/run.py")
        .arg("--once");
    command.arg("--istiod").arg(env!("CARGO_BIN_EXE_istiod"));
    let process = Process::start(&mut command, &scratch(name).join("run.log"));
    let status = process.end_of(Duration::from_mins(3))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{status}\n{}", process.log_tail()).into())
}
