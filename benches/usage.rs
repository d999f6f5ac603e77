//! CPU time and memory of a process.

use crate::support::process;

/// The resources that a process has used so far.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    /// User and system time of all cores.
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_mib: f64,
    pub(crate) highest_mib: f64,
}

impl Usage {
    pub(crate) fn of(process: &process::Process) -> Result<Usage, String> {
        Self::at(&process.id.to_string())
    }

    /// The resources that this process has used so far.
    pub(crate) fn of_this_process() -> Result<Usage, String> {
        Self::at("self")
    }

    fn at(id: &str) -> Result<Usage, String> {
        /// `USER_HZ`, which is the same on every Linux machine.
        const TICKS: f64 = 100.0;
        let read = |name: &str| {
            let path = format!("/proc/{id}/{name}");
            std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))
        };
        let (stat, status) = (read("stat")?, read("status")?);
        // The command name is in parentheses and may contain spaces.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .map_or("", |(_, rest)| rest)
            .split_whitespace()
            .collect();
        let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok());
        let mib = |name: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<f64>().ok());
            kib.map(|kib| kib / 1024.0)
                .ok_or_else(|| format!("no {name} in {status}"))
        };
        let (user, system) = ticks(11).zip(ticks(12)).ok_or_else(|| format!("no times in {stat}"))?;
        Ok(Usage {
            cpu_seconds: (user + system) / TICKS,
            resident_mib: mib("VmRSS")?,
            highest_mib: mib("VmHWM")?,
        })
    }
}
