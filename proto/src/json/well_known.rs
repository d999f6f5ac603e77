//! Scalar JSON forms of durations, timestamps, field masks and numbers.

use serde_json::Value;

const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// Parses a duration as Go's `time.ParseDuration`: signed decimal numbers with units, as in `1h30m` or `1.5s`.
///
/// Returns `None` for other text and for more than 292 years, the limit of Go. Istio accepts this form for every
/// `google.protobuf.Duration`.
pub fn parse_go_duration(text: &str) -> Option<prost_types::Duration> {
    let (negative, rest) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let nanos = if rest == "0" { 0 } else { unsigned_nanos(rest)? };
    let nanos = if negative { nanos.checked_neg()? } else { nanos };
    Some(prost_types::Duration {
        seconds: nanos / NANOS_PER_SECOND,
        nanos: i32::try_from(nanos % NANOS_PER_SECOND).ok()?,
    })
}

fn unsigned_nanos(text: &str) -> Option<i64> {
    let mut rest = text;
    let mut total: i64 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let (whole, after) = split_digits(rest);
        let (fraction, after) = after.strip_prefix('.').map_or(("", after), split_digits);
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let end = after
            .find(|c: char| c == '.' || c.is_ascii_digit())
            .unwrap_or(after.len());
        let unit = unit_nanos(&after[..end])?;
        let whole = if whole.is_empty() {
            0
        } else {
            whole.parse::<i64>().ok()?
        };
        total = total.checked_add(whole.checked_mul(unit)?)?;
        total = total.checked_add(fraction_nanos(fraction, unit))?;
        rest = &after[end..];
    }
    Some(total)
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

fn unit_nanos(unit: &str) -> Option<i64> {
    Some(match unit {
        "ns" => 1,
        // Go accepts both the micro sign and the Greek letter.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => NANOS_PER_SECOND,
        "m" => 60 * NANOS_PER_SECOND,
        "h" => 3600 * NANOS_PER_SECOND,
        _ => return None,
    })
}

/// Returns the fraction of `unit` that the decimal digits express. Digits after the eighteenth are below a nanosecond.
fn fraction_nanos(digits: &str, unit: i64) -> i64 {
    let digits = &digits[..digits.len().min(18)];
    let scale = 10_i128.pow(digits.len() as u32);
    let value: i128 = digits.parse().unwrap_or(0);
    i64::try_from(value * i128::from(unit) / scale).unwrap_or(0)
}

/// Formats a duration in seconds with 0, 3, 6 or 9 decimals, as in `1.500s`.
pub(super) fn duration_text(seconds: i64, nanos: i32) -> String {
    let sign = if seconds < 0 || nanos < 0 { "-" } else { "" };
    format!(
        "{sign}{}{}s",
        seconds.unsigned_abs(),
        fraction_text(nanos.unsigned_abs())
    )
}

fn fraction_text(nanos: u32) -> String {
    match nanos {
        0 => String::new(),
        n if n % 1_000_000 == 0 => format!(".{:03}", n / 1_000_000),
        n if n % 1_000 == 0 => format!(".{:06}", n / 1_000),
        n => format!(".{n:09}"),
    }
}

/// Formats a timestamp by RFC 3339, in UTC, with 0, 3, 6 or 9 decimals.
pub(super) fn timestamp_text(seconds: i64, nanos: i32) -> String {
    let whole = prost_types::Timestamp { seconds, nanos: 0 }.to_string();
    let whole = whole.trim_end_matches('Z');
    format!("{whole}{}Z", fraction_text(nanos.unsigned_abs()))
}

/// Parses a timestamp by RFC 3339, with any offset.
pub(super) fn parse_timestamp(text: &str) -> Option<prost_types::Timestamp> {
    text.parse().ok()
}

/// Returns the paths of a field mask: `userName,address` becomes `user_name` and `address`.
pub(super) fn field_mask_paths(text: &str) -> Vec<String> {
    text.split(',')
        .filter(|path| !path.is_empty())
        .map(snake_case)
        .collect()
}

/// Formats the paths of a field mask as one text, in camel case.
pub(super) fn field_mask_text<'a>(paths: impl Iterator<Item = &'a str>) -> String {
    paths.map(camel_case).collect::<Vec<_>>().join(",")
}

fn snake_case(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

fn camel_case(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut raise = false;
    for c in name.chars() {
        if c == '_' {
            raise = true;
        } else {
            out.push(if raise { c.to_ascii_uppercase() } else { c });
            raise = false;
        }
    }
    out
}

/// Returns a double as JSON: integral numbers without a fraction, as in Go, and the three values that JSON lacks as
/// text.
pub(super) fn number(value: f64) -> Value {
    // Above 2^53 a double has no fraction, and Go uses an exponent.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.is_nan() {
        Value::from("NaN")
    } else if value.is_infinite() {
        Value::from(if value > 0.0 { "Infinity" } else { "-Infinity" })
    } else if value.fract() == 0.0 && value.abs() <= EXACT {
        Value::from(value as i64)
    } else {
        Value::from(value)
    }
}

/// Returns a float as JSON with the fewest digits that identify it, not those of the equal double.
pub(super) fn float(value: f32) -> Value {
    number(value.to_string().parse().unwrap_or_else(|_| f64::from(value)))
}
