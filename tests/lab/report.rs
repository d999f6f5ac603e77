//! The steps of a run, each with its expected and observed state.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::kube::tenant::TIMEOUT;
use crate::support::wait::now;
use crate::support::{variable, wait};

/// The report of a run. It is written to a file, and to the terminal with `LAB=show`.
pub(crate) struct Report {
    file: File,
    is_shown: bool,
    started_at: Instant,
}

/// True if the observed state is as expected, and its text.
pub(crate) type Observed = (bool, String);

impl Report {
    pub(crate) fn start(title: &str, folder: &Path) -> Result<Report, String> {
        let file = File::create(folder.join("report.txt")).map_err(|error| error.to_string())?;
        let mut report = Report {
            file,
            is_shown: variable("LAB").is_some_and(|value| value == "show"),
            started_at: now(),
        };
        report.say(&format!("=== {title}"));
        Ok(report)
    }

    /// True if the report is shown, which implies that nothing else runs on the machine.
    pub(crate) fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Writes a line of free text.
    pub(crate) fn say(&mut self, text: &str) {
        let stamped = format!("{text}\n");
        // A failure to write the report must not end a successful run.
        let _ = self.file.write_all(stamped.as_bytes());
        if self.is_shown {
            let _ = std::io::stdout().write_all(stamped.as_bytes());
        }
    }

    /// Polls until the observed state is as expected.
    pub(crate) fn step(
        &mut self,
        what: &str,
        expected: &dyn Display,
        look: impl FnMut() -> Result<Observed, String>,
    ) -> Result<(), String> {
        self.step_within(TIMEOUT, what, expected, look)
    }

    /// Like [`Self::step`], with a time limit of its own.
    pub(crate) fn step_within(
        &mut self,
        limit: Duration,
        what: &str,
        expected: &dyn Display,
        mut look: impl FnMut() -> Result<Observed, String>,
    ) -> Result<(), String> {
        let started_at = now();
        let mut seen = String::new();
        let outcome = wait::until(what, limit, || {
            let (is_good, text) = look().unwrap_or_else(|error| (false, error));
            seen = text;
            is_good.then_some(())
        });
        let took = format!("{what} ({:.1} s)", started_at.elapsed().as_secs_f64());
        self.line(&took, expected, outcome.is_ok(), &seen);
        outcome.map_err(|error| format!("{error}: expected {expected}, seen {seen}"))
    }

    /// Records a state that has already been observed.
    pub(crate) fn fact(&mut self, what: &str, expected: &dyn Display, seen: Observed) -> Result<(), String> {
        let (is_good, seen) = seen;
        self.line(what, expected, is_good, &seen);
        if is_good {
            return Ok(());
        }
        Err(format!("{what}: expected {expected}, seen {seen}"))
    }

    fn line(&mut self, what: &str, expected: &dyn Display, is_good: bool, seen: &str) {
        let word = if is_good { "ok    " } else { "FAILED" };
        let since = self.started_at.elapsed().as_secs_f64();
        self.say(&format!(
            "{since:>6.1} s  {word}  {what} | expected: {expected} | seen: {seen}"
        ));
    }

    /// Polls until the observed value equals the expected one.
    pub(crate) fn equal<T: PartialEq + Display>(
        &mut self,
        what: &str,
        expected: &T,
        mut look: impl FnMut() -> Result<T, String>,
    ) -> Result<(), String> {
        self.step(what, expected, || {
            let seen = look()?;
            Ok((seen == *expected, seen.to_string()))
        })
    }
}
