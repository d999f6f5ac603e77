//! `Environment`: what all IO parts share, in one `Arc`. Pure layers never see it.

use std::time::{Instant, SystemTime};

use prometheus::Registry;
use tokio::sync::watch;

use crate::{settings::Settings, task::Tasks};

/// See the module's text.
pub struct Environment {
    /// Flags and variables.
    pub settings: Settings,
    /// Where tasks are started.
    pub tasks: Tasks,
    /// Where metrics are registered.
    pub registry: Registry,
    /// True once every source is synced and the first snapshot stands.
    pub ready: watch::Sender<bool>,
    /// When the process started.
    pub started: Instant,
}

impl Environment {
    /// A new environment: nothing runs yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            tasks: Tasks::default(),
            registry: Registry::new(),
            ready: watch::Sender::new(false),
            started: now(),
        }
    }
}

/// The clock of the process.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the clock that everything else is handed"
)]
pub fn now() -> Instant {
    Instant::now()
}

/// The calendar of the process, for what people read and what other processes compare.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the clock that everything else is handed"
)]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}
