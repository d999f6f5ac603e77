//! Durations as Go writes them (`time.ParseDuration`): `1h30m`, `100ms`, `1.5s`, `-2us`, `0`.

use std::time::Duration;

/// Reason why a text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid duration {0:?}, want a Go duration such as 100ms, 1.5s or 1h30m")]
pub struct DurationError(String);

/// Parses a Go duration into signed nanoseconds.
pub fn parse_nanos(text: &str) -> Result<i64, DurationError> {
    let error = || DurationError(text.to_owned());
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(error());
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(error)?;
        let (number, tail) = rest.split_at(digits);
        let unit_len = tail
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        let scale: i128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(error()),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || number.len() > 40 {
            return Err(error());
        }
        let whole: i128 = if whole.is_empty() {
            0
        } else {
            whole.parse().map_err(|_| error())?
        };
        total = total
            .checked_add(whole.checked_mul(scale).ok_or_else(error)?)
            .ok_or_else(error)?;
        let mut unit_part = scale;
        for digit in fraction.bytes() {
            if !digit.is_ascii_digit() {
                return Err(error());
            }
            total += i128::from(digit - b'0') * unit_part / 10;
            unit_part /= 10;
        }
        rest = tail;
    }
    i64::try_from(if negative { -total } else { total }).map_err(|_| error())
}

/// Parses a Go duration that must not be negative.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let nanos = parse_nanos(text)?;
    u64::try_from(nanos)
        .map(Duration::from_nanos)
        .map_err(|_| DurationError(text.to_owned()))
}

/// Formats whole seconds as Go does: `2160h0m0s`, `1m30s`, `0s`. Fractions are dropped.
pub fn format_seconds(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_print_as_in_go() {
        let text = |seconds| format_seconds(Duration::from_secs(seconds));
        assert_eq!(
            [text(0), text(90), text(3600), text(7_776_000)],
            ["0s", "1m30s", "1h0m0s", "2160h0m0s"]
        );
    }

    #[test]
    fn durations_parse_as_in_go() {
        assert_eq!(parse_nanos("1h30m"), Ok(5_400_000_000_000));
        assert_eq!(parse_nanos("1.5s"), Ok(1_500_000_000));
        assert_eq!(parse_nanos(".5s"), Ok(500_000_000));
        assert_eq!(parse_nanos("-100ms"), Ok(-100_000_000));
        assert_eq!(parse_nanos("0"), Ok(0));
        assert_eq!(parse("250us"), Ok(Duration::from_micros(250)));
        for bad in ["", "1", "s", "1x", "-", ".s", "1h-3m", "99999999999h"] {
            assert!(parse_nanos(bad).is_err(), "{bad}");
        }
        assert!(parse("-1s").is_err());
    }
}
