//! Processes in network namespaces of their own. A namespace has no name, so it ends with its process and leaves nothing
//! behind, and inside it any address can be bound: those of a scenario need no interface.

use std::path::Path;
use std::process::Command;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

/// How many namespaces there may be at a time.
const MOST: usize = 4;

/// Run inside the new namespace; becomes the program that follows. A kernel without IPv6 lacks the second file.
const ENTER: &str = "ip link set lo up && echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind || exit 125
if [ -e /proc/sys/net/ipv6/ip_nonlocal_bind ]; then echo 1 > /proc/sys/net/ipv6/ip_nonlocal_bind || exit 125; fi
exec \"$@\"";

/// Why namespaces cannot be made here, if so; tried once.
pub(crate) fn lacking() -> Option<&'static str> {
    static LACKING: LazyLock<Option<String>> = LazyLock::new(|| {
        let outcome = in_namespace(Path::new("true")).output();
        let reason = match outcome {
            Ok(output) if output.status.success() => return None,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        Some(format!("no network namespace can be made here (unshare, ip): {reason}"))
    });
    LACKING.as_deref()
}

/// `program` in a new namespace; arguments may follow. The process keeps its id through all of it.
pub(crate) fn in_namespace(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", ENTER, "sh"]).arg(program);
    command
}

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

fn taken() -> MutexGuard<'static, usize> {
    // It is a number, whole whatever happened to its holder.
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to have a namespace, until it is dropped.
pub(crate) struct Place;

/// Waits for its turn: there are so many namespaces at a time and no more.
pub(crate) fn place() -> Place {
    let mut taken = FREED
        .wait_while(taken(), |taken| *taken >= MOST)
        .unwrap_or_else(PoisonError::into_inner);
    *taken += 1;
    Place
}

impl Drop for Place {
    fn drop(&mut self) {
        *taken() -= 1;
        FREED.notify_one();
    }
}
