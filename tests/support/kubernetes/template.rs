//! The state with which clusters start.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::{Cluster, binary, crds, server};
use crate::support::{project, scratch};

/// Returns the folder of the state that an empty cluster has after its first start and with the CRDs of the charts.
/// Starting with a copy saves two fifths of the CPU time of a start: 2.2 of 5.5 s. The state is kept until the CRDs or
/// the programs change.
pub(super) fn state() -> Result<&'static Path, String> {
    static STATE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let state = STATE.get_or_init(find_or_make).as_ref();
    state.map(PathBuf::as_path).map_err(Clone::clone)
}

fn find_or_make() -> Result<PathBuf, String> {
    let definitions = crds::of_charts()?;
    let mut hasher = DefaultHasher::new();
    // The state depends on the options of the processes, too.
    (&definitions, include_str!("server.rs")).hash(&mut hasher);
    for name in ["etcd", "kube-apiserver"] {
        let metadata = binary(name).and_then(|path| path.metadata().ok());
        metadata
            .map(|file| (file.len(), file.modified().ok()))
            .hash(&mut hasher);
    }
    let states = project().join("target/integration/kube/states");
    let state = states.join(format!("{:016x}", hasher.finish()));
    if state.exists() {
        return Ok(state);
    }
    let folder = scratch(&format!("kube/state-{}", std::process::id()));
    let cluster = Cluster::start_in(folder.clone())?;
    crds::apply(&cluster.api, &definitions)?;
    drop(cluster);
    fs::create_dir_all(&states).map_err(|error| error.to_string())?;
    // Another run may have been faster.
    let moved = fs::rename(folder.join(server::STATE), &state);
    if let Err(error) = moved
        && !state.exists()
    {
        return Err(error.to_string());
    }
    fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
    Ok(state)
}

/// Copies a state without the zeros of etcd's preallocated files: 1 of 62 MiB.
pub(super) fn copy(state: &Path, to: &Path) -> Result<(), String> {
    let mut copy = Command::new("cp");
    copy.args(["--recursive", "--sparse=always", "--"]).arg(state).arg(to);
    let output = copy.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}
