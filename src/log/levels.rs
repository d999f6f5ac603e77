//! Levels, and the syntax of `--log_output_level` and `--log_stacktrace_level`.

use tracing::Metadata;

/// The name that stands for every scope.
pub(super) const ALL: &str = "all";

/// A log level, the quietest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    None,
    /// Reasons why the process ends; nothing has this level at present.
    Fatal,
    /// Failures that need an operator.
    Error,
    /// Failures that may pass.
    Warn,
    /// Important events.
    Info,
    /// Everything.
    Debug,
}

impl Level {
    /// All levels by their number.
    pub(super) const ORDERED: [Self; 6] = [
        Self::None,
        Self::Fatal,
        Self::Error,
        Self::Warn,
        Self::Info,
        Self::Debug,
    ];

    /// Returns the level with this name.
    ///
    /// Parity (pkg/log/options.go): names are lower case.
    pub fn named(name: &str) -> Option<Self> {
        Self::ORDERED.into_iter().find(|level| level.name() == name)
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fatal => "fatal",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    /// Returns the level of an event; `None` for traces, which only libraries have, by the thousand.
    pub(super) fn of(metadata: &Metadata<'_>) -> Option<Self> {
        match *metadata.level() {
            tracing::Level::ERROR => Some(Self::Error),
            tracing::Level::WARN => Some(Self::Warn),
            tracing::Level::INFO => Some(Self::Info),
            tracing::Level::DEBUG => Some(Self::Debug),
            _ => None,
        }
    }
}

/// An invalid list of levels.
///
/// Parity (pkg/log/options.go): the texts are Istio's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LevelError {
    /// More than one colon.
    #[error("invalid output level format '{0}'")]
    Format(String),
    /// An unknown level.
    #[error("invalid output level '{0}'")]
    Unknown(String),
}

/// Parses `scope:level` pairs, separated by commas. A level alone is that of the scope `default`.
pub fn pairs(text: &str) -> Result<Vec<(&str, Level)>, LevelError> {
    text.split(',').map(pair).collect()
}

/// Parses `--log_output_level`, which may be empty.
///
/// Parity (pkg/log/config.go): the flag comes after the defaults. That is not so for stack traces.
pub fn output_pairs(text: &str) -> Result<Vec<(&str, Level)>, LevelError> {
    if text.is_empty() { Ok(Vec::new()) } else { pairs(text) }
}

fn pair(text: &str) -> Result<(&str, Level), LevelError> {
    let (scope, level) = text.split_once(':').unwrap_or(("default", text));
    if level.contains(':') {
        return Err(LevelError::Format(text.to_owned()));
    }
    match Level::named(level) {
        Some(level) => Ok((scope, level)),
        None => Err(LevelError::Unknown(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_as_in_istio() {
        assert_eq!(pairs("debug"), Ok(vec![("default", Level::Debug)]));
        assert_eq!(
            pairs("ads:none,all:fatal"),
            Ok(vec![("ads", Level::None), ("all", Level::Fatal)])
        );
        for (text, message) in [
            ("bogus", "invalid output level 'bogus'"),
            ("ads:INFO", "invalid output level 'ads:INFO'"),
            ("info,", "invalid output level ''"),
            ("ads:debug:x", "invalid output level format 'ads:debug:x'"),
        ] {
            assert_eq!(pairs(text).map_err(|error| error.to_string()), Err(message.to_owned()));
        }
    }

    #[test]
    fn an_empty_list_of_output_levels_changes_nothing() {
        assert_eq!(output_pairs(""), Ok(Vec::new()));
        assert_eq!(output_pairs("debug"), pairs("debug"));
        assert_eq!(output_pairs(","), Err(LevelError::Unknown(String::new())));
        assert_eq!(pairs(""), Err(LevelError::Unknown(String::new())));
    }
}
