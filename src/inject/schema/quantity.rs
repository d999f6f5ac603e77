//! Quantities of Kubernetes (`100m`, `1Gi`) in their canonical form.

/// Multiples of the smallest unit, a nano.
const NANOS: i128 = 1_000_000_000;

/// The suffixes of powers of ten, from nano on, in steps of three.
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

/// The suffixes of powers of 1024, from one on.
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

#[derive(Clone, Copy, PartialEq)]
enum Format {
    Decimal,
    Binary,
    Exponent,
}

/// Returns the canonical form of a quantity; `None` if the text is not one.
///
/// Parity (k8s.io/apimachinery/pkg/api/resource/quantity.go): the suffix is the largest with an integer before it, in
/// the family of suffixes that the text uses.
pub(in crate::inject) fn canonical(text: &str) -> Option<String> {
    let (signed, format) = parse(text)?;
    let nanos = signed.abs();
    let sign = if signed < 0 { "-" } else { "" };
    let format = match format {
        // Without a binary suffix that fits, decimal ones are exact.
        Format::Binary if nanos < 1024 * NANOS || nanos % NANOS != 0 => Format::Decimal,
        format => format,
    };
    Some(format!("{sign}{}", written(nanos, format)))
}

/// Returns a quantity in nanos, rounded away from zero; `None` if the text is not one.
pub(in crate::inject) fn in_nanos(text: &str) -> Option<i128> {
    parse(text).map(|(nanos, _)| nanos)
}

/// Returns the nanos of a quantity, and the family of its suffix.
fn parse(text: &str) -> Option<(i128, Format)> {
    let text = text.trim();
    let (sign, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|character: char| !character.is_ascii_digit() && character != '.');
    let (number, suffix) = unsigned.split_at(end.unwrap_or(unsigned.len()));
    let (format, numerator, denominator) = scale(suffix)?;
    Some((sign * nanos(number, numerator, denominator)?, format))
}

/// Returns the family of a suffix, and its factor as a fraction.
fn scale(suffix: &str) -> Option<(Format, i128, i128)> {
    if let Some(power) = BINARY.iter().skip(1).position(|known| *known == suffix) {
        return Some((Format::Binary, 1_i128 << (10 * (power + 1)), 1));
    }
    if let Some(step) = DECIMAL.iter().position(|known| *known == suffix) {
        let (up, down) = if step >= 3 { (step - 3, 0) } else { (0, 3 - step) };
        return Some((Format::Decimal, 1000_i128.pow(up as u32), 1000_i128.pow(down as u32)));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
    if exponent >= 0 {
        Some((Format::Exponent, power, 1))
    } else {
        Some((Format::Exponent, 1, power))
    }
}

/// Returns a number in nanos, rounded up.
fn nanos(number: &str, numerator: i128, denominator: i128) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() && fraction.is_empty() || !is_digits(whole) || !is_digits(fraction) || number.len() > 30 {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let divisor = 10_i128.checked_pow(fraction.len() as u32)?.checked_mul(denominator)?;
    let product = digits.checked_mul(numerator)?.checked_mul(NANOS)?;
    Some(product / divisor + i128::from(product % divisor != 0))
}

fn written(nanos: i128, format: Format) -> String {
    if nanos == 0 {
        return "0".to_owned();
    }
    if format == Format::Binary {
        let (mut value, mut step) = (nanos / NANOS, 0);
        while value % 1024 == 0 && step + 1 < BINARY.len() {
            value /= 1024;
            step += 1;
        }
        return format!("{value}{}", BINARY[step]);
    }
    let (mut value, mut step) = (nanos, 0);
    while value % 1000 == 0 && step + 1 < DECIMAL.len() {
        value /= 1000;
        step += 1;
    }
    match format {
        Format::Exponent if step != 3 => format!("{value}e{}", 3 * (step as i32 - 3)),
        _ => format!("{value}{}", DECIMAL[step]),
    }
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn quantities_are_canonical() {
        for (text, expected) in [
            ("2000m", "2"),
            ("1024Mi", "1Gi"),
            ("128Mi", "128Mi"),
            ("100m", "100m"),
            ("0.5", "500m"),
            ("1000", "1k"),
            ("1.5Gi", "1536Mi"),
            ("0", "0"),
            ("0Mi", "0"),
            ("-0", "0"),
            ("1e3", "1e3"),
            ("1E", "1E"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("0.1n", "1n"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_not_quantities() {
        for text in ["", "Mi", "1Q", "1 Gi", "--1", "1..2", "1e", "0x10"] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }
}
