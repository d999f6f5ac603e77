//! Dates and durations. The local zone is UTC, as in containers, and other zones count as UTC.

use super::{
    super::{
        limits::Failure,
        quote::{Charset, quote},
        types::{IntType, Type},
        value::{Context, Function, Value},
    },
    bytes,
    calendar::{Time, formatted, of_value, parse},
    of_strings,
};

const SECOND: i64 = 1_000_000_000;

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, String};
    let time = || Type::named("time.Time");
    vec![
        Function::new("now", &[], time(), |context, _| Ok(Value::object(now(context)))),
        Function::new("date", &[String, Any], String, |context, arguments| {
            let time = time_of(context, arguments[1]);
            formatted(context, time, bytes(arguments, 0))
        }),
        Function::new("date_in_zone", &[String, Any, String], String, |context, arguments| {
            let time = time_of(context, arguments[1]);
            formatted(context, time, bytes(arguments, 0))
        }),
        Function::new("htmlDate", &[Any], String, |context, arguments| {
            let time = time_of(context, arguments[0]);
            formatted(context, time, b"2006-01-02")
        }),
        Function::new("htmlDateInZone", &[Any, String], String, |context, arguments| {
            let time = time_of(context, arguments[0]);
            formatted(context, time, b"2006-01-02")
        }),
        Function::new("date_modify", &[String, time()], time(), |_, arguments| {
            let time = of_value(arguments[1]).unwrap_or(Time::ZERO);
            let duration = parse_duration(bytes(arguments, 0)).unwrap_or(0);
            Ok(Value::object(time.plus(duration)))
        }),
        Function::new("must_date_modify", &[String, time()], time(), |_, arguments| {
            let time = of_value(arguments[1]).unwrap_or(Time::ZERO);
            let duration = parse_duration(bytes(arguments, 0)).map_err(Failure::Message)?;
            Ok(Value::object(time.plus(duration)))
        }),
        of_strings("toDate", 2, time(), |context, arguments| {
            context.step(bytes(arguments, 0).len())?;
            let time = parse(bytes(arguments, 0), bytes(arguments, 1));
            Ok(Value::object(time.unwrap_or(Time::ZERO)))
        }),
        of_strings("mustToDate", 2, time(), |context, arguments| {
            context.step(bytes(arguments, 0).len())?;
            let time = parse(bytes(arguments, 0), bytes(arguments, 1));
            time.map(Value::object).map_err(Failure::Message)
        }),
        Function::new("unixEpoch", &[time()], String, |_, arguments| {
            let time = of_value(arguments[0]).unwrap_or(Time::ZERO);
            Ok(time.seconds.to_string().into())
        }),
        Function::new("ago", &[Any], String, |context, arguments| {
            let passed = since(context, time_of(context, arguments[0]));
            // Halves of seconds are rounded away from zero.
            let seconds = (passed + passed.signum() * SECOND / 2) / SECOND;
            Ok(duration_text(seconds.wrapping_mul(SECOND)).into())
        }),
        Function::new("duration", &[Any], String, |_, arguments| {
            let seconds = match arguments[0] {
                Value::String(text) => decimal(&text.to_str()),
                Value::Int(IntType::Int64, seconds) => *seconds,
                _ => 0,
            };
            Ok(duration_text(seconds.wrapping_mul(SECOND)).into())
        }),
        Function::new("durationRound", &[Any], String, |context, arguments| {
            let duration = match arguments[0] {
                Value::String(text) => parse_duration(text.bytes()).unwrap_or(0),
                Value::Int(IntType::Int64, nanoseconds) => *nanoseconds,
                value => of_value(value).map_or(0, |time| since(context, time)),
            };
            Ok(rounded(duration).into())
        }),
    ]
}

fn now(context: &Context<'_>) -> Time {
    Time::of_nanoseconds(context.host.now())
}

/// Returns the nanoseconds since a time, or the largest number of them.
fn since(context: &Context<'_>, time: Time) -> i64 {
    let passed = context.host.now() - time.nanoseconds_since_1970();
    i64::try_from(passed).unwrap_or(if passed < 0 { i64::MIN } else { i64::MAX })
}

/// Returns the time that a value means: seconds since 1970, or now.
fn time_of(context: &Context<'_>, value: &Value) -> Time {
    match value {
        Value::Int(IntType::Int | IntType::Int64 | IntType::Int32, seconds) => Time::utc(*seconds),
        value => of_value(value).unwrap_or_else(|| now(context)),
    }
}

/// Reads a decimal integer; numbers that are too large become the largest one.
fn decimal(text: &str) -> i64 {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return 0;
    }
    text.parse()
        .unwrap_or(if text.starts_with('-') { i64::MIN } else { i64::MAX })
}

/// Returns the largest unit with a number, such as `3h`.
fn rounded(duration: i64) -> String {
    let magnitude = duration.unsigned_abs();
    let hour = 3600 * SECOND as u64;
    let units = [
        (365 * 24 * hour, "y"),
        (30 * 24 * hour, "mo"),
        (24 * hour, "d"),
        (hour, "h"),
        (60 * SECOND as u64, "m"),
        (SECOND as u64, "s"),
    ];
    let unit = units.into_iter().find(|(length, _)| magnitude > *length);
    unit.map_or("0s".to_owned(), |(length, name)| {
        format!("{}{name}", magnitude / length)
    })
}

/// Returns a duration in nanoseconds as Go writes it, such as `1h2m3.5s`.
pub fn duration_text(duration: i64) -> String {
    let sign = if duration < 0 { "-" } else { "" };
    let magnitude = duration.unsigned_abs();
    if magnitude == 0 {
        return "0s".to_owned();
    }
    let fraction = |number: u64, unit: u64| {
        let digits = unit.ilog10() as usize;
        let text = format!("{:0digits$}", number % unit);
        let cut = text.trim_end_matches('0');
        let point = if cut.is_empty() { "" } else { "." };
        format!("{}{point}{cut}", number / unit)
    };
    let text = match magnitude {
        0..1_000 => format!("{magnitude}ns"),
        1_000..1_000_000 => format!("{}µs", fraction(magnitude, 1_000)),
        1_000_000..1_000_000_000 => format!("{}ms", fraction(magnitude, 1_000_000)),
        _ => {
            let second = SECOND as u64;
            let minutes = magnitude / (60 * second);
            let seconds = format!("{}s", fraction(magnitude % (60 * second), second));
            match (minutes / 60, minutes % 60) {
                (0, 0) => seconds,
                (0, minutes) => format!("{minutes}m{seconds}"),
                (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
            }
        }
    };
    format!("{sign}{text}")
}

/// Reads a duration such as `-1h30m` in nanoseconds. The error is Go's.
fn parse_duration(text: &[u8]) -> Result<i64, String> {
    let shown = || quote(text, Charset::Unicode);
    let invalid = || format!("time: invalid duration {}", shown());
    let (is_negative, mut rest) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    if rest == b"0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let digits = |rest: &[u8]| rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let whole = digits(rest);
        let has_point = rest.get(whole) == Some(&b'.');
        let fraction = if has_point { digits(&rest[whole + 1..]) } else { 0 };
        if whole == 0 && fraction == 0 || whole > 20 {
            return Err(invalid());
        }
        let number = |digits: &[u8]| {
            digits
                .iter()
                .fold(0_i128, |number, byte| number * 10 + i128::from(byte - b'0'))
        };
        let end = whole + usize::from(has_point) + fraction;
        let name = rest[end..]
            .iter()
            .take_while(|byte| **byte != b'.' && !byte.is_ascii_digit())
            .count();
        let unit: i128 = match &rest[end..end + name] {
            b"" => return Err(format!("time: missing unit in duration {}", shown())),
            b"ns" => 1,
            b"us" => 1_000,
            unit if unit == "µs".as_bytes() || unit == "μs".as_bytes() => 1_000,
            b"ms" => 1_000_000,
            b"s" => i128::from(SECOND),
            b"m" => 60 * i128::from(SECOND),
            b"h" => 3600 * i128::from(SECOND),
            unit => {
                let unit = quote(unit, Charset::Unicode);
                return Err(format!("time: unknown unit {unit} in duration {}", shown()));
            }
        };
        total += number(&rest[..whole]) * unit;
        // Digits behind the eighteenth are below a nanosecond.
        let digits = &rest[end - fraction..end - fraction + fraction.min(18)];
        total += number(digits) * unit / 10_i128.pow(u32::try_from(digits.len()).unwrap_or(0));
        rest = &rest[end + name..];
    }
    i64::try_from(if is_negative { -total } else { total }).map_err(|_| invalid())
}
