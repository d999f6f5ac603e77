//! What the process asks of the system: open files, and whose threads give way to whose.

use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};

/// How much the threads that make and send configuration give way to those that sign certificates: a push takes all cores
/// for a while, and nobody is to wait for its end to get a certificate.
const GIVES_WAY: i32 = 5;

/// As many files may be open as the system lets the process have: each connection is one.
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
        tracing::warn!(%error, current = ?limit.current, "the limit of open files cannot be raised");
    }
}

/// This thread, and those that it starts, give way to others of the process.
pub(super) fn give_way() {
    if let Err(error) = nice(GIVES_WAY) {
        tracing::debug!(%error, "a thread cannot give way to others");
    }
}
