//! Processes in network namespaces. A namespace has no name, so it ends with its process. Inside it, any address can be
//! bound, so the addresses of a scenario need no interface.

use std::path::Path;
use std::process::Command;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

/// Maximum number of namespaces at a time.
const MAX_NAMESPACES: usize = 4;

/// Script that runs inside the new namespace and then executes the program. The second file is missing in a kernel
/// without IPv6.
const ENTER: &str = "ip link set lo up && echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind || exit 125
if [ -e /proc/sys/net/ipv6/ip_nonlocal_bind ]; then echo 1 > /proc/sys/net/ipv6/ip_nonlocal_bind || exit 125; fi
exec \"$@\"";

/// Returns why namespaces cannot be created here, if so. Tried once.
pub(crate) fn unavailable() -> Option<&'static str> {
    static UNAVAILABLE: LazyLock<Option<String>> = LazyLock::new(|| {
        let outcome = in_namespace(Path::new("true")).output();
        let reason = match outcome {
            Ok(output) if output.status.success() => return None,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        Some(format!("network namespaces cannot be created (unshare, ip): {reason}"))
    });
    UNAVAILABLE.as_deref()
}

/// Returns a command that runs `program` in a new namespace; arguments may follow. The process id stays the same.
pub(crate) fn in_namespace(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", ENTER, "sh"]).arg(program);
    command
}

static IN_USE: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

fn in_use() -> MutexGuard<'static, usize> {
    // The value is a plain number, so it is valid even if its holder panicked.
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A permit for one namespace, until it is dropped.
pub(crate) struct Permit;

/// Waits for a permit.
pub(crate) fn permit() -> Permit {
    let mut in_use = FREED
        .wait_while(in_use(), |in_use| *in_use >= MAX_NAMESPACES)
        .unwrap_or_else(PoisonError::into_inner);
    *in_use += 1;
    Permit
}

impl Drop for Permit {
    fn drop(&mut self) {
        *in_use() -= 1;
        FREED.notify_one();
    }
}
