//! Code that the tests share: folders of the project, child processes, ports, waiting and HTTP.

pub(crate) mod ads;
pub(crate) mod agent;
pub(crate) mod authority;
pub(crate) mod bootstrap;
pub(crate) mod browser;
pub(crate) mod daemon;
pub(crate) mod envoy;
pub(crate) mod fault_proxy;
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
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Completion, Failed};

/// Replaces a file as a whole, so that a daemon does not read half of it. Folders of meshes do not read the draft.
pub(crate) fn replace_file(folder: &Path, name: &str, text: &str) -> std::io::Result<()> {
    let draft = folder.join(format!(".{name}.draft"));
    std::fs::write(&draft, text)?;
    std::fs::rename(&draft, folder.join(name))
}

/// The project's root folder.
pub(crate) fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns an empty folder below `target/` for the files of a test. It stays after the run, for debugging.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = project().join("target/integration").join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("files of an earlier run can be removed");
    }
    std::fs::create_dir_all(&folder).expect("target/ is writable");
    folder
}

/// Returns a folder with a short path for sockets, whose paths are limited to about a hundred characters.
pub(crate) fn sockets() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    scratch(&format!("sockets/{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Returns an environment variable of the test run.
#[expect(
    clippy::disallowed_methods,
    reason = "variables of the test run are the tests' settings"
)]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns `go run` with the flags of the Makefile, so that packages which `make tools` has compiled are not compiled
/// again.
pub(crate) fn go_run() -> Command {
    let mut command = Command::new("go");
    command.envs([("CGO_ENABLED", "0"), ("GOGC", "400")]);
    command.args(["run", "-gcflags=all=-dwarf=false"]);
    command
}

/// Reports a missing component: the test counts as skipped, or as failed where `CI=true`.
pub(crate) fn missing(what: &str) -> Result<Completion, Failed> {
    if variable("CI").is_some_and(|value| value == "true") {
        return Err(Failed::from(format!("{what}; with CI=true this is a failure")));
    }
    Ok(Completion::ignored_with(what))
}
