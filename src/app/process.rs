//! Process limits and thread priorities.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

/// The nice value of threads that build and send configuration. A push uses all cores for a while and must not delay
/// the threads that sign certificates. This halves the 99th percentile of certificate requests during constant pushes
/// (13 instead of 26 ms with an ECDSA CA; bench `ca`).
const GIVES_WAY: i32 = 5;
/// The nice value of threads that render debug pages and metrics, which must not delay configuration either.
const IN_THE_BACKGROUND: i32 = 15;

/// Raises the soft limit of open files to the hard limit. Each connection needs one.
pub(super) fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, current = ?limit.current, "failed to raise the open file limit");
    }
}

/// Ignores SIGUSR1 and SIGUSR2, which would end the process.
///
/// Parity (pkg/ctrlz): Istio's ControlZ uses SIGUSR1, and the Go runtime ignores SIGUSR2.
pub(super) fn ignore_user_signals() -> io::Result<()> {
    for kind in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
        // The handler stays when the receiver is dropped.
        drop(signal(kind)?);
    }
    Ok(())
}

/// Lowers the priority of this thread and of threads that it starts.
pub(super) fn give_way() {
    lower_priority(GIVES_WAY);
}

/// Lowers the priority of this thread below that of all threads that serve clients.
pub(super) fn run_in_background() {
    lower_priority(IN_THE_BACKGROUND);
}

fn lower_priority(increment: i32) {
    if let Err(error) = nice(increment) {
        tracing::debug!(%error, "failed to lower thread priority");
    }
}
