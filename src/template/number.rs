//! Numbers in Go's notation.

/// The notation of a number with a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    /// `1.5e+06`.
    Exponent,
    /// `1500000`.
    Plain,
    /// The exponent only for large and small numbers.
    General,
}

/// The type of a number with a fraction, which decides how many digits identify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FloatType {
    Float32,
    Float64,
}

/// Reads an integer without sign, in the base of its prefix (`0x`, `0o`, `0b`, `0`).
pub(super) fn parse_uint(text: &str) -> Option<u64> {
    if !underscores_fit(text) {
        return None;
    }
    let lower = text.to_ascii_lowercase();
    let (digits, base) = if let Some(rest) = lower.strip_prefix("0x") {
        (rest, 16)
    } else if let Some(rest) = lower.strip_prefix("0o") {
        (rest, 8)
    } else if let Some(rest) = lower.strip_prefix("0b") {
        (rest, 2)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (&lower[1..], 8)
    } else {
        (lower.as_str(), 10)
    };
    let digits: String = digits.chars().filter(|character| *character != '_').collect();
    if digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(&digits, base).ok()
}

/// Reads an integer in the base of its prefix.
pub(super) fn parse_int(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let number = i128::from(parse_uint(digits)?);
    i64::try_from(if is_negative { -number } else { number }).ok()
}

/// Reads a decimal integer without underscores, as `strconv.Atoi` does.
pub(super) fn parse_decimal(text: &str) -> Option<i64> {
    text.parse().ok()
}

/// Reads a number with a fraction; `None` for wrong syntax and for numbers that are too large.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    let (sign, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (-1.0, &text[1..]),
        Some(b'+') => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    let lower = unsigned.to_ascii_lowercase();
    match lower.as_str() {
        "inf" | "infinity" => return Some(sign * f64::INFINITY),
        "nan" => return Some(f64::NAN),
        _ => {}
    }
    if !underscores_fit(unsigned) {
        return None;
    }
    let digits: String = lower.chars().filter(|character| *character != '_').collect();
    if let Some(hexadecimal) = digits.strip_prefix("0x") {
        return parse_hexadecimal(hexadecimal).map(|number| sign * number);
    }
    let is_decimal = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'+' | b'-');
    if digits.starts_with(['+', '-', 'e']) || !digits.bytes().all(is_decimal) {
        return None;
    }
    digits
        .parse::<f64>()
        .ok()
        .filter(|number| number.is_finite())
        .map(|number| sign * number)
}

/// Reads the digits, the fraction and the required binary exponent of a hexadecimal number.
fn parse_hexadecimal(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once('p')?;
    let exponent: i32 = exponent.parse().ok()?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut number = 0.0_f64;
    for digit in whole.chars().chain(fraction.chars()) {
        number = number * 16.0 + f64::from(digit.to_digit(16)?);
    }
    let scale = exponent.checked_sub(i32::try_from(fraction.len()).ok()?.checked_mul(4)?)?;
    let scaled = number * 2.0_f64.powi(scale);
    scaled.is_finite().then_some(scaled)
}

/// Returns true if each underscore is between digits, or between a prefix and a digit.
fn underscores_fit(text: &str) -> bool {
    if !text.contains('_') {
        return true;
    }
    let bytes = text.as_bytes();
    let has_prefix = bytes.len() >= 2 && bytes[0] == b'0' && b"bBoOxX".contains(&bytes[1]);
    let is_hexadecimal = has_prefix && matches!(bytes[1], b'x' | b'X');
    // An octal number such as 0_7 has a prefix too: its zero is a digit.
    let mut last = if has_prefix { b'0' } else { b'^' };
    for byte in &bytes[if has_prefix { 2 } else { 0 }..] {
        let is_digit = byte.is_ascii_digit() || is_hexadecimal && byte.is_ascii_hexdigit();
        last = match byte {
            _ if is_digit => b'0',
            b'_' if last == b'0' => b'_',
            b'_' => return false,
            _ if last == b'_' => return false,
            _ => b'!',
        };
    }
    last != b'_'
}

/// The digits of a `float64` behind the point; all further ones are zeros.
const MAX_DIGITS: usize = 1100;

/// The decimal digits of a number that is finite and not negative: `0.d₁d₂… · 10^point`.
struct Digits {
    digits: Vec<u8>,
    point: i32,
}

impl Digits {
    /// Returns the fewest digits that identify the number.
    fn shortest(number: f64, of_type: FloatType) -> Self {
        Self::read(&match of_type {
            FloatType::Float32 => format!("{:e}", number as f32),
            FloatType::Float64 => format!("{number:e}"),
        })
    }

    /// Returns a number of digits, rounded.
    fn rounded(number: f64, count: usize) -> Self {
        Self::read(&format!("{number:.*e}", count.saturating_sub(1).min(MAX_DIGITS)))
    }

    fn read(text: &str) -> Self {
        let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
        let mut digits: Vec<u8> = mantissa.bytes().filter(u8::is_ascii_digit).collect();
        while digits.last() == Some(&b'0') {
            digits.pop();
        }
        let exponent: i32 = exponent.parse().unwrap_or_default();
        Self {
            point: if digits.is_empty() { 0 } else { exponent + 1 },
            digits,
        }
    }

    fn digit(&self, position: i32) -> char {
        let digit = usize::try_from(position)
            .ok()
            .and_then(|position| self.digits.get(position));
        digit.map_or('0', |digit| char::from(*digit))
    }

    fn exponent_form(&self, precision: usize) -> String {
        let mut out = String::from(self.digit(0));
        if precision > 0 {
            out.push('.');
            out.extend((1..=precision as i32).map(|position| self.digit(position)));
        }
        let exponent = if self.digits.is_empty() { 0 } else { self.point - 1 };
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{out}e{sign}{:02}", exponent.abs())
    }

    fn plain_form(&self, precision: usize) -> String {
        let mut out = String::new();
        if self.point > 0 {
            out.extend((0..self.point).map(|position| self.digit(position)));
        } else {
            out.push('0');
        }
        if precision > 0 {
            out.push('.');
            out.extend((0..precision as i32).map(|position| self.digit(self.point + position)));
        }
        out
    }
}

/// Returns a number as text. Without a precision, it has the fewest digits that identify the number. The precision of
/// the general notation counts all digits, that of the others those of the fraction.
pub(super) fn format_float(number: f64, notation: Notation, precision: Option<usize>, of_type: FloatType) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    let sign = if number.is_sign_negative() { "-" } else { "" };
    let number = number.abs();
    if number.is_infinite() {
        return if sign.is_empty() { "+Inf" } else { "-Inf" }.to_owned();
    }
    let text = match (notation, precision) {
        (Notation::Plain, Some(precision)) => {
            let known = precision.min(MAX_DIGITS);
            format!("{number:.known$}{}", "0".repeat(precision - known))
        }
        (Notation::Plain, None) => {
            let digits = Digits::shortest(number, of_type);
            let fraction = (digits.digits.len() as i32 - digits.point).max(0);
            digits.plain_form(fraction as usize)
        }
        (Notation::Exponent, Some(precision)) => Digits::rounded(number, precision + 1).exponent_form(precision),
        (Notation::Exponent, None) => {
            let digits = Digits::shortest(number, of_type);
            let precision = digits.digits.len().saturating_sub(1);
            digits.exponent_form(precision)
        }
        (Notation::General, precision) => general(number, precision, of_type),
    };
    format!("{sign}{text}")
}

fn general(number: f64, precision: Option<usize>, of_type: FloatType) -> String {
    if precision.is_none() && number < 1e6 && number.fract() == 0.0 {
        return (number as i64).to_string();
    }
    let (digits, limit) = match precision {
        None => (Digits::shortest(number, of_type), 6),
        Some(precision) => {
            let digits = Digits::rounded(number, precision.max(1));
            let count = digits.digits.len() as i32;
            let limit = precision.max(1) as i32;
            // A large precision must not show an integer with an exponent, nor a small one with trailing zeros.
            let limit = if limit > count && count >= digits.point {
                count
            } else {
                limit
            };
            (digits, limit)
        }
    };
    let exponent = if digits.digits.is_empty() { 0 } else { digits.point - 1 };
    if exponent < -4 || exponent >= limit {
        let precision = digits.digits.len().saturating_sub(1);
        return digits.exponent_form(precision);
    }
    let fraction = (digits.digits.len() as i32 - digits.point).max(0);
    digits.plain_form(fraction as usize)
}

/// Returns the digits of an integer in a base, in lower case.
pub(super) fn format_radix(mut number: u64, base: u64) -> String {
    let mut digits = Vec::new();
    loop {
        let digit = u32::try_from(number % base).unwrap_or_default();
        digits.push(char::from_digit(digit, 36).unwrap_or('0'));
        number /= base;
        if number == 0 {
            break;
        }
    }
    digits.iter().rev().collect()
}
