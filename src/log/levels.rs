//! The syntax of `--log_output_level` and `--log_stacktrace_level`.

use super::scope::Level;

/// The name that stands for every scope.
pub(super) const ALL: &str = "all";

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
}
