//! The verbs of numbers.

use crate::template::{
    limits::Failure,
    number::{FloatType, Notation, format_float, format_radix},
    value::Value,
};

use super::{Printer, Syntax, char_of};

impl Printer<'_, '_> {
    pub(super) fn integer(
        &mut self,
        value: &Value,
        magnitude: u64,
        is_negative: bool,
        verb: char,
    ) -> Result<(), Failure> {
        let is_unsigned = matches!(value, Value::Uint(..));
        match verb {
            'v' if self.flags.syntax == Syntax::Go && is_unsigned => {
                let sharp = std::mem::replace(&mut self.flags.sharp, true);
                let written = self.digits(magnitude, is_negative, 16, 'v');
                self.flags.sharp = sharp;
                written
            }
            'v' | 'd' => self.digits(magnitude, is_negative, 10, verb),
            'b' => self.digits(magnitude, is_negative, 2, verb),
            'o' | 'O' => self.digits(magnitude, is_negative, 8, verb),
            'x' | 'X' => self.digits(magnitude, is_negative, 16, verb),
            'c' => self.character(signed(magnitude, is_negative)),
            'q' => self.quoted_character(signed(magnitude, is_negative)),
            'U' => self.unicode(signed(magnitude, is_negative)),
            _ => self.wrong_verb(value, verb),
        }
    }

    fn digits(&mut self, magnitude: u64, is_negative: bool, base: u64, verb: char) -> Result<(), Failure> {
        let flags = self.flags.clone();
        let has_sign = is_negative || flags.plus || flags.space;
        let least = match (flags.precision, flags.width) {
            (Some(0), _) if magnitude == 0 => {
                self.flags.zero = false;
                let written = self.pad(b"");
                self.flags = flags;
                return written;
            }
            (Some(precision), _) => precision,
            (None, Some(width)) if flags.zero && !flags.minus => width.saturating_sub(usize::from(has_sign)),
            _ => 0,
        };
        self.context.allocate(least)?;
        let mut digits = format_radix(magnitude, base);
        if verb == 'X' {
            digits.make_ascii_uppercase();
        }
        let mut out = "0".repeat(least.saturating_sub(digits.len())) + &digits;
        if flags.sharp {
            match base {
                2 => out.insert_str(0, "0b"),
                8 if !out.starts_with('0') => out.insert(0, '0'),
                16 => out.insert_str(0, if verb == 'X' { "0X" } else { "0x" }),
                _ => {}
            }
        }
        if verb == 'O' {
            out.insert_str(0, "0o");
        }
        if is_negative {
            out.insert(0, '-');
        } else if flags.plus {
            out.insert(0, '+');
        } else if flags.space {
            out.insert(0, ' ');
        }
        self.flags.zero = false;
        let written = self.pad(out.as_bytes());
        self.flags.zero = flags.zero;
        written
    }

    fn unicode(&mut self, code: u64) -> Result<(), Failure> {
        let least = self.flags.precision.unwrap_or(4).max(4);
        self.context.allocate(least)?;
        let digits = format_radix(code, 16).to_ascii_uppercase();
        let mut out = format!("U+{}{digits}", "0".repeat(least.saturating_sub(digits.len())));
        if self.flags.sharp {
            let character = char_of(i64::try_from(code).unwrap_or(-1));
            if super::super::text::is_printable(character) {
                out = format!("{out} '{character}'");
            }
        }
        let zero = std::mem::replace(&mut self.flags.zero, false);
        let written = self.pad(out.as_bytes());
        self.flags.zero = zero;
        written
    }

    pub(super) fn float(&mut self, value: &Value, number: f64, of_type: FloatType, verb: char) -> Result<(), Failure> {
        let (notation, default) = match verb {
            'v' | 'g' | 'G' => (Notation::General, None),
            'e' | 'E' => (Notation::Exponent, Some(6)),
            'f' | 'F' => (Notation::Plain, Some(6)),
            _ => return self.wrong_verb(value, verb),
        };
        let precision = self.flags.precision.or(default);
        self.context.allocate(precision.unwrap_or(0))?;
        let mut text = format_float(number, notation, precision, of_type);
        if matches!(verb, 'E' | 'G') {
            text.make_ascii_uppercase();
            // Infinities and NaN keep their case.
            text = text.replace("INF", "Inf").replace("NAN", "NaN");
        }
        if number.is_nan() {
            let sign = if self.flags.plus {
                "+"
            } else if self.flags.space {
                " "
            } else {
                ""
            };
            return self.unfilled(&format!("{sign}NaN"));
        }
        if !text.starts_with(['-', '+']) {
            text.insert(0, '+');
        }
        if self.flags.space && text.starts_with('+') && !self.flags.plus {
            text.replace_range(..1, " ");
        }
        if number.is_infinite() {
            return self.unfilled(&text);
        }
        if self.flags.sharp {
            text = keep_point(&text, precision.filter(|_| notation == Notation::General), notation);
        }
        self.signed_number(&text)
    }

    /// Writes a number with its sign, which precedes zeros that fill the width. A plus is written on request only.
    fn signed_number(&mut self, text: &str) -> Result<(), Failure> {
        let shows_sign = self.flags.plus || !text.starts_with('+');
        let text = if shows_sign { text } else { &text[1..] };
        match self.flags.width {
            Some(width) if shows_sign && self.flags.zero && !self.flags.minus && width > text.len() => {
                self.context.allocate(width)?;
                let zeros = "0".repeat(width - text.len());
                self.write_str(&format!("{}{zeros}{}", &text[..1], &text[1..]))
            }
            _ => self.pad(text.as_bytes()),
        }
    }

    /// Writes a text that zeros do not fill.
    fn unfilled(&mut self, text: &str) -> Result<(), Failure> {
        let zero = std::mem::replace(&mut self.flags.zero, false);
        let written = self.pad(text.as_bytes());
        self.flags.zero = zero;
        written
    }

    pub(super) fn complex(&mut self, value: &Value, real: f64, imaginary: f64, verb: char) -> Result<(), Failure> {
        if !"vgGeEfF".contains(verb) {
            return self.wrong_verb(value, verb);
        }
        let plus = self.flags.plus;
        self.write(b"(")?;
        self.float(value, real, FloatType::Float64, verb)?;
        self.flags.plus = true;
        self.float(value, imaginary, FloatType::Float64, verb)?;
        self.flags.plus = plus;
        self.write(b"i)")
    }
}

fn signed(magnitude: u64, is_negative: bool) -> u64 {
    if is_negative { u64::MAX } else { magnitude }
}

/// Adds the decimal point and the zeros that the flag `#` asks for.
fn keep_point(text: &str, precision: Option<usize>, notation: Notation) -> String {
    let (mantissa, exponent) = match text.find(['e', 'E']) {
        Some(position) => text.split_at(position),
        None => (text, ""),
    };
    let mut out = mantissa.to_owned();
    let has_point = out.contains('.');
    if !has_point {
        out.push('.');
    }
    if notation == Notation::General {
        let digits = mantissa.bytes().filter(u8::is_ascii_digit);
        let significant = digits.skip_while(|digit| *digit == b'0').count();
        let significant = significant + usize::from(!has_point && &mantissa[1..] == "0");
        let wanted = precision.unwrap_or(6);
        out.push_str(&"0".repeat(wanted.saturating_sub(significant)));
    }
    out + exponent
}
