//! Metrics of the process beside those of the `prometheus` crate, from `/proc/self`, and analogues of the Go runtime's,
//! which dashboards of Istio read.

use std::num::NonZero;

use prometheus::{
    Gauge, IntCounter, IntGauge, Registry,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use crate::task::Tasks;

/// The unit of sizes in `/proc/self/status`.
const KIB: f64 = 1024.0;
/// The size of a page. All supported platforms use it by default.
const PAGE_BYTES: u64 = 4096;

/// Reads a file of `/proc/self`; empty where there is none.
pub(in crate::admin) fn read(file: &str) -> String {
    std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default()
}

/// Returns a field of `/proc/self/status` in bytes, or as a number if it has no unit.
pub(in crate::admin) fn status(text: &str, field: &str) -> Option<f64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?
        .trim();
    match value.strip_suffix("kB") {
        Some(kib) => kib.trim().parse::<f64>().ok().map(|kib| kib * KIB),
        None => value.parse().ok(),
    }
}

/// The memory of the process in bytes.
pub(in crate::admin) struct Memory {
    /// Resident anonymous memory.
    pub(in crate::admin) heap: u64,
    /// Reserved private memory.
    pub(in crate::admin) reserved: u64,
    /// The stack of the main thread.
    pub(in crate::admin) stack: u64,
    /// All reserved memory.
    pub(in crate::admin) all: u64,
}

/// Reads the memory of the process.
pub(in crate::admin) fn memory_bytes() -> Memory {
    let text = read("status");
    let bytes = |field: &str| status(&text, field).unwrap_or_default() as u64;
    Memory {
        heap: bytes("RssAnon"),
        reserved: bytes("VmData"),
        stack: bytes("VmStk"),
        all: bytes("VmSize"),
    }
}

/// Returns the number of page faults, from `/proc/self/stat`.
fn faults(stat: &str) -> Option<u64> {
    // The name of the process, in parentheses, may contain spaces.
    let after_name = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let (minor, major) = (fields.get(7)?, fields.get(9)?);
    Some(minor.parse::<u64>().ok()? + major.parse::<u64>().ok()?)
}

/// Returns the bytes that the network namespace has received and sent, from `/proc/self/net/netstat`.
fn traffic(netstat: &str) -> Option<(u64, u64)> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let field = |name: &str| {
        let at = names.split_whitespace().position(|column| column == name)?;
        values.split_whitespace().nth(at)?.parse::<u64>().ok()
    };
    Some((field("InOctets")?, field("OutOctets")?))
}

/// Returns the limit of the address space in bytes; the largest number if there is none.
fn address_space(limits: &str) -> Option<f64> {
    let values = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let soft = values.split_whitespace().next()?;
    Some(soft.parse().unwrap_or(u64::MAX as f64))
}

/// Metrics that are read when they are collected.
pub(super) struct ProcessMetrics {
    tasks: Tasks,
    tasks_gauge: IntGauge,
    threads: Gauge,
    processors: IntGauge,
    heap: [Gauge; 3],
    heap_reserved: Gauge,
    stack: Gauge,
    all: Gauge,
    faults: IntCounter,
    faulted_bytes: IntCounter,
    received: IntCounter,
    sent: IntCounter,
    address_space: Gauge,
}

impl ProcessMetrics {
    /// Registers the metrics.
    pub(super) fn register(registry: &Registry, tasks: Tasks) -> Result<(), prometheus::Error> {
        let resident = "Resident anonymous memory in bytes: the heap.";
        registry.register(Box::new(Self {
            tasks,
            tasks_gauge: IntGauge::new(
                "go_goroutines",
                "Number of tasks, which are what goroutines are to istiod.",
            )?,
            threads: Gauge::new("go_threads", "Number of OS threads.")?,
            processors: IntGauge::new(
                "go_sched_gomaxprocs_threads",
                "Number of processors available to the process.",
            )?,
            heap: [
                Gauge::new("go_memstats_alloc_bytes", resident)?,
                Gauge::new("go_memstats_heap_alloc_bytes", resident)?,
                Gauge::new("go_memstats_heap_inuse_bytes", resident)?,
            ],
            heap_reserved: Gauge::new("go_memstats_heap_sys_bytes", "Reserved private memory in bytes.")?,
            stack: Gauge::new("go_memstats_stack_inuse_bytes", "Stack of the main thread in bytes.")?,
            all: Gauge::new("go_memstats_sys_bytes", "Reserved memory in bytes.")?,
            faults: IntCounter::new(
                "go_memstats_mallocs_total",
                "Page faults: memory taken from the system.",
            )?,
            faulted_bytes: IntCounter::new(
                "go_memstats_alloc_bytes_total",
                "Page faults in bytes: memory taken from the system.",
            )?,
            received: IntCounter::new(
                "process_network_receive_bytes_total",
                "Number of bytes received by the process over the network.",
            )?,
            sent: IntCounter::new(
                "process_network_transmit_bytes_total",
                "Number of bytes sent by the process over the network.",
            )?,
            address_space: Gauge::new(
                "process_virtual_memory_max_bytes",
                "Maximum amount of virtual memory available in bytes.",
            )?,
        }))
    }

    fn collectors(&self) -> Vec<&dyn Collector> {
        let mut collectors: Vec<&dyn Collector> = vec![
            &self.tasks_gauge,
            &self.threads,
            &self.processors,
            &self.heap_reserved,
            &self.stack,
            &self.all,
            &self.faults,
            &self.faulted_bytes,
            &self.received,
            &self.sent,
            &self.address_space,
        ];
        collectors.extend(self.heap.iter().map(|gauge| gauge as &dyn Collector));
        collectors
    }

    fn update(&self) {
        self.tasks_gauge.set(self.tasks.running() as i64);
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        self.processors.set(processors as i64);
        self.threads.set(status(&read("status"), "Threads").unwrap_or_default());
        let memory = memory_bytes();
        self.heap_reserved.set(memory.reserved as f64);
        self.stack.set(memory.stack as f64);
        self.all.set(memory.all as f64);
        for gauge in &self.heap {
            gauge.set(memory.heap as f64);
        }
        let faults = faults(&read("stat")).unwrap_or_default();
        raise(&self.faults, faults);
        raise(&self.faulted_bytes, faults * PAGE_BYTES);
        let (received, sent) = traffic(&read("net/netstat")).unwrap_or_default();
        raise(&self.received, received);
        raise(&self.sent, sent);
        self.address_space
            .set(address_space(&read("limits")).unwrap_or_default());
    }
}

/// Raises a counter to a number that the system counts.
fn raise(counter: &IntCounter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

impl Collector for ProcessMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.collectors()
            .iter()
            .flat_map(|collector| collector.desc())
            .collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.update();
        self.collectors()
            .iter()
            .flat_map(|collector| collector.collect())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_system_are_read() {
        let text = "Name:\tistiod\nVmSize:\t  2048 kB\nRssAnon:\t      12 kB\nThreads:\t9\n";
        assert_eq!(status(text, "RssAnon"), Some(12288.0));
        assert_eq!(status(text, "Threads"), Some(9.0));
        assert_eq!(status(text, "VmStk"), None);
        let stat = "7 (a b) c) S 1 2 3 4 5 6 70 8 9 10 11 12";
        assert_eq!(faults(stat), Some(79));
        let netstat = "TcpExt: A\nTcpExt: 1\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 5 6\n";
        assert_eq!(traffic(netstat), Some((5, 6)));
        assert_eq!(traffic("TcpExt: A\n"), None);
        let limits = |value: &str| format!("Limit  Soft Limit\nMax address space         {value}  unlimited  bytes\n");
        assert_eq!(address_space(&limits("4096")), Some(4096.0));
        assert_eq!(address_space(&limits("unlimited")), Some(u64::MAX as f64));
    }
}
