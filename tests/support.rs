//! What the trials share: the places of the project, child processes, ports, waiting and HTTP.

pub(crate) mod ads;
pub(crate) mod agent;
pub(crate) mod authority;
pub(crate) mod bootstrap;
pub(crate) mod daemon;
pub(crate) mod detour;
pub(crate) mod envoy;
#[allow(dead_code, reason = "for the benches")]
pub(crate) mod figures;
pub(crate) mod helm;
pub(crate) mod http;
pub(crate) mod kubernetes;
pub(crate) mod netns;
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod random;
pub(crate) mod remote_secret;
pub(crate) mod signer;
pub(crate) mod wait;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Completion, Failed};

/// The folder of the project.
pub(crate) fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A fresh folder below `target/` for what a trial writes; it stays after the run, for a look at a failure.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = project().join("target/integration").join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("the trial may remove what it wrote last time");
    }
    std::fs::create_dir_all(&folder).expect("target/ is writable");
    folder
}

/// A short folder for sockets: their paths may have about a hundred characters.
pub(crate) fn sockets() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    scratch(&format!("sockets/{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// A variable of the environment that the run was started with.
#[expect(
    clippy::disallowed_methods,
    reason = "the tests are told what to do by those who start them"
)]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A component that a trial needs is not there: the trial counts as skipped, or as failed where `CI=true` promises it.
pub(crate) fn missing(what: &str) -> Result<Completion, Failed> {
    if variable("CI").is_some_and(|value| value == "true") {
        return Err(Failed::from(format!("{what}, and CI=true makes that a failure")));
    }
    Ok(Completion::ignored_with(what))
}
