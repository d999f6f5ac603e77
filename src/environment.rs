//! The dependencies shared by all I/O modules. Pure layers do not import it.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use prometheus::Registry;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use crate::{log::scope::Scopes, settings::Settings, task::Tasks};

/// The shared dependencies: settings, tasks, metrics, readiness and start time.
pub struct Environment {
    /// Flags and variables.
    pub settings: Settings,
    /// The task tracker.
    pub tasks: Tasks,
    /// The metrics registry.
    pub registry: Registry,
    /// True once every source is synced and the first snapshot exists.
    pub ready: watch::Sender<bool>,
    /// The levels of the log.
    pub scopes: Arc<Scopes>,
    /// When the process started.
    pub started: Instant,
}

impl Environment {
    /// Creates an environment without tasks.
    pub fn new(settings: Settings) -> Self {
        let (tasks, registry) = (Tasks::default(), Registry::new());
        let registered = registry.register(Box::new(tasks.panics().clone()));
        registered.expect("because the registry is empty");
        Self {
            settings,
            tasks,
            registry,
            ready: watch::Sender::new(false),
            scopes: Arc::default(),
            started: now(),
        }
    }
}

/// Returns the monotonic time.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the clock that everything else is handed"
)]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns the wall clock time, for output and for comparison with other processes.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the clock that everything else is handed"
)]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Returns the CPU time that the calling thread has used.
pub fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}
