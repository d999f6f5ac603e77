//! Facts of the process, with the members of Go's structures. There is no garbage collector, so its members are zero.

use std::{fs, time::UNIX_EPOCH};

use rustix::process::{getegid, geteuid, getgid, getpid, getppid, getuid};
use serde_json::{Value, json};

use crate::{
    admin::metrics::process::{memory_bytes, read, status},
    environment::{self, Environment},
};

/// Entries of the histories in Go's MemStats.
const HISTORY: usize = 256;

fn hostname() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Returns the supplementary groups, from `/proc/self/status`.
fn groups(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    let words = line.unwrap_or_default().split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Parity (pkg/ctrlz/topics/proc.go): tasks are what goroutines are to istiod.
pub(super) fn process(environment: &Environment) -> Value {
    let text = read("status");
    let directory = std::env::current_dir().unwrap_or_default();
    json!({
        "egid": getegid().as_raw(),
        "euid": geteuid().as_raw(),
        "gid": getgid().as_raw(),
        "groups": groups(&text),
        "pid": getpid().as_raw_nonzero(),
        "ppid": getppid().map_or(0, |pid| pid.as_raw_nonzero().get()),
        "uid": getuid().as_raw(),
        "wd": directory.display().to_string(),
        "hostname": hostname(),
        "tempdir": std::env::temp_dir().display().to_string(),
        "threads": status(&text, "Threads").unwrap_or_default() as u64,
        "goroutines": environment.tasks.running(),
    })
}

/// Parity (runtime.MemStats): the names. The heap is resident anonymous memory.
pub(super) fn memory() -> Value {
    let memory = memory_bytes();
    let mut stats = json!({
        "Alloc": memory.heap, "TotalAlloc": memory.heap, "Sys": memory.all, "Lookups": 0, "Mallocs": 0, "Frees": 0,
        "HeapAlloc": memory.heap, "HeapSys": memory.reserved, "HeapIdle": memory.reserved.saturating_sub(memory.heap),
        "HeapInuse": memory.heap, "HeapReleased": 0, "HeapObjects": 0, "StackInuse": memory.stack,
        "StackSys": memory.stack, "MSpanInuse": 0, "MSpanSys": 0, "MCacheInuse": 0, "MCacheSys": 0, "BuckHashSys": 0,
        "GCSys": 0, "OtherSys": 0, "NextGC": 0, "LastGC": 0, "PauseTotalNs": 0, "NumGC": 0, "NumForcedGC": 0,
        "GCCPUFraction": 0, "EnableGC": false, "DebugGC": false, "BySize": [],
    });
    stats["PauseNs"] = json!(vec![0; HISTORY]);
    stats["PauseEnd"] = json!(vec![0; HISTORY]);
    stats
}

/// Parity (pkg/ctrlz/home.go).
pub(super) fn home() -> Value {
    let now = environment::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "ProcessName": std::env::args().next().unwrap_or_default(),
        "HeapSize": memory_bytes().heap,
        "NumGC": 0,
        "CurrentTime": now.as_nanos() as u64,
        "Hostname": hostname(),
        "IP": own_address().unwrap_or_default(),
    })
}

/// Returns the first address of this machine that is not a loopback address, from the routing table of the kernel.
fn own_address() -> Option<String> {
    let table = read("net/fib_trie");
    let mut address = None;
    for line in table.lines().map(str::trim) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            address = Some(leaf);
        }
        let is_host = line.starts_with("/32 host LOCAL");
        if is_host && let Some(found) = address.filter(|found| !found.starts_with("127.")) {
            return Some(found.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_numbers() {
        assert_eq!(groups("Uid:\t0\nGroups:\t0 4 27 \n"), [0, 4, 27]);
        assert_eq!(groups(""), [0; 0]);
    }
}
