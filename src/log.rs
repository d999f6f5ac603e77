//! The log, in Istio's forms and scopes.
//!
//! Statements are those of `tracing`. [`layer`] turns an event into a line of the scope of its module, and a thread
//! ([`writer`]) counts repetitions, encodes and writes. Levels change at run time; a statement that is off costs a
//! load.

mod format;
mod layer;
pub mod levels;
mod output;
mod repetition;
pub mod scope;
mod writer;

#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::SystemTime};

use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

pub use self::{format::Encoding, output::RotationLimits};
use self::{
    layer::LogLayer,
    levels::LevelError,
    output::{Output, OutputError, RotatedFile},
    scope::Scopes,
    writer::{Queue, Writer},
};

/// The flags of logging.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--log_output_level`
    pub output_levels: String,
    /// `--log_stacktrace_level`
    pub stack_trace_levels: String,
    /// `--log_caller`
    pub callers: String,
    /// `--log_target`
    pub targets: Vec<String>,
    /// `--log_rotate` and its limits; a target in addition to the others.
    pub rotated: Option<(PathBuf, RotationLimits)>,
    /// The form of lines.
    pub encoding: Encoding,
    /// The wall clock.
    pub clock: fn() -> SystemTime,
}

/// Reason why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A flag with levels is invalid.
    #[error(transparent)]
    Levels(#[from] LevelError),
    /// A target cannot be opened.
    #[error(transparent)]
    Target(#[from] OutputError),
    /// The thread that writes cannot be started.
    #[error("failed to start the log thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// The running log. Dropping it writes the lines that wait.
pub struct Logging {
    scopes: Arc<Scopes>,
    queue: Arc<Queue>,
}

impl Logging {
    /// Opens the targets and receives the events of the process from now on.
    pub fn start(options: &Options) -> Result<Self, LogError> {
        let (logging, layer) = Self::prepared(options)?;
        // Fails if a test has a subscriber already, which then stays.
        let _ = tracing_subscriber::registry().with(layer).try_init();
        Ok(logging)
    }

    fn prepared(options: &Options) -> Result<(Self, LogLayer), LogError> {
        let scopes = Arc::new(Scopes::of_flags(
            &options.output_levels,
            &options.stack_trace_levels,
            &options.callers,
        )?);
        let opened = options.targets.iter().map(|target| Output::open(target));
        let mut outputs = opened.collect::<Result<Vec<_>, _>>()?;
        if let Some((path, limits)) = &options.rotated {
            outputs.push(Output::Rotated(RotatedFile::open(path, *limits)?));
        }
        let queue = Arc::new(Queue::default());
        let writer = Writer {
            queue: queue.clone(),
            encoding: options.encoding,
            outputs,
            clock: options.clock,
        };
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || writer.run())?;
        let layer = LogLayer {
            scopes: scopes.clone(),
            queue: queue.clone(),
            clock: options.clock,
        };
        Ok((Self { scopes, queue }, layer))
    }

    /// Returns the levels, which may be changed.
    pub fn scopes(&self) -> Arc<Scopes> {
        self.scopes.clone()
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        self.queue.finish();
    }
}
