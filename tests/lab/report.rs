//! The steps of a run: for each, what was expected and what was seen.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use crate::kube::place::SOON;
use crate::support::wait::now;
use crate::support::{variable, wait};

/// See the module's text. It is kept in a file, and shown as it goes where `LAB=show` asks for that.
pub(crate) struct Report {
    file: File,
    is_shown: bool,
    begun: Instant,
}

/// Whether something is as expected, and what it is.
pub(crate) type Seen = (bool, String);

impl Report {
    pub(crate) fn start(title: &str, folder: &Path) -> Result<Report, String> {
        let file = File::create(folder.join("report.txt")).map_err(|error| error.to_string())?;
        let mut report = Report {
            file,
            is_shown: variable("LAB").is_some_and(|value| value == "show"),
            begun: now(),
        };
        report.say(&format!("=== {title}"));
        Ok(report)
    }

    /// Whether somebody looks on, on a machine that does nothing else.
    pub(crate) fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Text of its own.
    pub(crate) fn say(&mut self, text: &str) {
        let stamped = format!("{text}\n");
        // A report that cannot be kept is no reason to end a run that goes well.
        let _ = self.file.write_all(stamped.as_bytes());
        if self.is_shown {
            let _ = std::io::stdout().write_all(stamped.as_bytes());
        }
    }

    /// Looks until what is seen is as expected.
    pub(crate) fn step(
        &mut self,
        what: &str,
        expected: &dyn Display,
        mut look: impl FnMut() -> Result<Seen, String>,
    ) -> Result<(), String> {
        let begun = now();
        let mut seen = String::new();
        let outcome = wait::until(what, SOON, || {
            let (is_good, text) = look().unwrap_or_else(|error| (false, error));
            seen = text;
            is_good.then_some(())
        });
        let took = format!("{what} ({:.1} s)", begun.elapsed().as_secs_f64());
        self.line(&took, expected, outcome.is_ok(), &seen);
        outcome.map_err(|error| format!("{error}: expected {expected}, seen {seen}"))
    }

    /// What has been seen already, and whether it is as expected.
    pub(crate) fn fact(&mut self, what: &str, expected: &dyn Display, seen: Seen) -> Result<(), String> {
        let (is_good, seen) = seen;
        self.line(what, expected, is_good, &seen);
        if is_good {
            return Ok(());
        }
        Err(format!("{what}: expected {expected}, seen {seen}"))
    }

    fn line(&mut self, what: &str, expected: &dyn Display, is_good: bool, seen: &str) {
        let word = if is_good { "ok    " } else { "FAILED" };
        let since = self.begun.elapsed().as_secs_f64();
        self.say(&format!(
            "{since:>6.1} s  {word}  {what} | expected: {expected} | seen: {seen}"
        ));
    }

    /// Looks until what is seen equals what is expected.
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
