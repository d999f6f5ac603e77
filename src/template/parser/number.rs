//! Literals of numbers and characters.

use crate::template::{
    lexer::{Kind, Token},
    node::Number,
    number::{parse_float, parse_int, parse_uint},
    quote::{Charset, quote, unquote_char},
    value::Value,
};

impl Number {
    /// Reads a literal with every type that it fits. The error is the message.
    pub(super) fn parse(token: &Token) -> Result<Self, String> {
        let mut number = Self::read(token)?;
        number.constant = number.untyped();
        Ok(number)
    }

    fn read(token: &Token) -> Result<Self, String> {
        let text = token.text.as_str();
        let mut number = Self {
            text: text.to_owned(),
            constant: None,
            int: None,
            uint: None,
            float: None,
            complex: None,
        };
        match token.kind {
            Kind::CharConstant => {
                let (code, tail) = unquote_char(text).ok_or("invalid syntax")?;
                if tail != "'" {
                    return Err(format!("malformed character constant: {text}"));
                }
                number.int = Some(i64::from(code));
                number.uint = Some(u64::from(code));
                number.float = Some(f64::from(code));
                return Ok(number);
            }
            Kind::Complex => {
                let (real, imaginary) = complex(text).ok_or("syntax error scanning complex number")?;
                number.set_complex(real, imaginary);
                return Ok(number);
            }
            _ => {}
        }
        if let Some(imaginary) = text.strip_suffix('i').and_then(parse_float) {
            number.set_complex(0.0, imaginary);
            return Ok(number);
        }
        number.uint = parse_uint(text);
        number.int = parse_int(text);
        if number.int == Some(0) {
            // Negative zero.
            number.uint = Some(0);
        }
        if let Some(int) = number.int {
            number.float = Some(int as f64);
        } else if let Some(uint) = number.uint {
            number.float = Some(uint as f64);
        } else if let Some(float) = parse_float(text) {
            if !text.contains(['.', 'e', 'E', 'p', 'P']) {
                return Err(format!(
                    "integer overflow: {}",
                    quote(text.as_bytes(), Charset::Unicode)
                ));
            }
            number.set_float(float);
        } else {
            return Err(format!(
                "illegal number syntax: {}",
                quote(text.as_bytes(), Charset::Unicode)
            ));
        }
        Ok(number)
    }

    /// Returns the value where nothing asks for a type.
    fn untyped(&self) -> Option<Value> {
        if let Some((real, imaginary)) = self.complex {
            return Some(Value::Complex(real, imaginary));
        }
        let text = &self.text;
        let is_char = text.starts_with('\'');
        let has_prefix = text.len() > 2 && text.to_ascii_lowercase().starts_with("0x");
        let is_hexadecimal = has_prefix && !text.contains(['p', 'P']);
        if let Some(float) = self.float
            && !is_char
            && !is_hexadecimal
            && text.contains(['.', 'e', 'E', 'p', 'P'])
        {
            return Some(Value::Float(float));
        }
        self.int.map(Value::int)
    }

    fn set_complex(&mut self, real: f64, imaginary: f64) {
        self.complex = Some((real, imaginary));
        if imaginary == 0.0 {
            self.set_float(real);
        }
    }

    /// Sets the fraction, and the integers that are equal to it.
    fn set_float(&mut self, float: f64) {
        const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
        self.float = Some(float);
        if float.fract() == 0.0 && (-TWO_TO_63..TWO_TO_63).contains(&float) {
            self.int = Some(float as i64);
        }
        if float.fract() == 0.0 && (0.0..2.0 * TWO_TO_63).contains(&float) {
            self.uint = Some(float as u64);
        }
    }
}

/// Reads `1+2i`.
fn complex(text: &str) -> Option<(f64, f64)> {
    let digits = text.strip_suffix('i')?;
    let bytes = digits.as_bytes();
    let is_cut = |position: &usize| {
        matches!(bytes[*position], b'+' | b'-') && !matches!(bytes[position - 1], b'e' | b'E' | b'p' | b'P')
    };
    let cut = (1..bytes.len()).rev().find(is_cut)?;
    Some((parse_float(&digits[..cut])?, parse_float(&digits[cut..])?))
}
