//! The directives of a format: flags, width, precision, index of the argument, verb.

use crate::template::{limits::Failure, value::Value};

use super::{Flags, MAX_WIDTH, Printer, Syntax, verb_of};

/// The state of a format: the position in its text, and the next argument.
struct Cursor<'a> {
    format: &'a [u8],
    position: usize,
    values: &'a [&'a Value],
    next: usize,
    /// True if an explicit index was used, so unused arguments are not an error.
    reordered: bool,
    /// True if the last index is valid.
    index_fits: bool,
    /// True if an index precedes the position.
    after_index: bool,
}

/// Writes a format with its arguments.
pub(super) fn run(printer: &mut Printer<'_, '_>, format: &[u8], values: &[&Value]) -> Result<(), Failure> {
    let mut cursor = Cursor {
        format,
        position: 0,
        values,
        next: 0,
        reordered: false,
        index_fits: true,
        after_index: false,
    };
    while cursor.position < format.len() {
        let rest = &format[cursor.position..];
        let literal = rest.iter().position(|byte| *byte == b'%').unwrap_or(rest.len());
        printer.write(&rest[..literal])?;
        cursor.position += literal;
        if cursor.position < format.len() {
            cursor.position += 1;
            directive(printer, &mut cursor)?;
        }
    }
    printer.flags = Flags::default();
    if !cursor.reordered && cursor.next < values.len() {
        extra(printer, &values[cursor.next..])?;
    }
    Ok(())
}

fn extra(printer: &mut Printer<'_, '_>, values: &[&Value]) -> Result<(), Failure> {
    printer.write(b"%!(EXTRA ")?;
    for (position, value) in values.iter().enumerate() {
        if position > 0 {
            printer.write(b", ")?;
        }
        if !matches!(value, Value::Nil | Value::Missing) {
            printer.write_str(&format!("{}=", value.type_of()))?;
        }
        printer.argument(value, 'v')?;
    }
    printer.write(b")")
}

fn directive(printer: &mut Printer<'_, '_>, cursor: &mut Cursor<'_>) -> Result<(), Failure> {
    printer.flags = Flags::default();
    cursor.index_fits = true;
    cursor.after_index = false;
    cursor.flags(&mut printer.flags);
    cursor.index();
    cursor.width(printer)?;
    cursor.precision(printer)?;
    if !cursor.after_index {
        cursor.index();
    }
    if cursor.position >= cursor.format.len() {
        return printer.write(b"%!(NOVERB)");
    }
    let (verb, length) = verb_of(&cursor.format[cursor.position..]);
    cursor.position += length;
    if verb == '%' {
        return printer.write(b"%");
    }
    if !cursor.index_fits {
        return printer.write_str(&format!("%!{verb}(BADINDEX)"));
    }
    let Some(value) = cursor.values.get(cursor.next) else {
        return printer.write_str(&format!("%!{verb}(MISSING)"));
    };
    cursor.next += 1;
    if verb == 'v' {
        let flags = &mut printer.flags;
        if flags.sharp {
            flags.syntax = Syntax::Go;
        } else if flags.plus {
            flags.syntax = Syntax::Names;
        }
        flags.sharp = false;
        flags.plus = false;
    }
    printer.argument(value, verb)
}

impl Cursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.format.get(self.position).copied()
    }

    fn flags(&mut self, flags: &mut Flags) {
        while let Some(byte) = self.peek() {
            match byte {
                b'#' => flags.sharp = true,
                b'0' => flags.zero = true,
                b'+' => flags.plus = true,
                b'-' => flags.minus = true,
                b' ' => flags.space = true,
                _ => return,
            }
            self.position += 1;
        }
    }

    /// Reads `[n]`.
    fn index(&mut self) {
        if self.peek() != Some(b'[') {
            return;
        }
        self.reordered = true;
        let rest = &self.format[self.position..];
        let Some(end) = rest.iter().position(|byte| *byte == b']') else {
            self.index_fits = false;
            self.position += 1;
            return;
        };
        let number = std::str::from_utf8(&rest[1..end]).ok().and_then(|text| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse::<usize>().ok()).flatten()
        });
        self.position += end + 1;
        match number {
            Some(number) if (1..=self.values.len()).contains(&number) => {
                self.next = number - 1;
                self.after_index = true;
            }
            Some(_) | None => {
                self.index_fits = false;
                self.after_index = number.is_some();
            }
        }
    }

    /// Reads a number; `None` if there is none or if it is too large.
    fn number(&mut self) -> Option<usize> {
        let mut number = None;
        while let Some(byte) = self.peek().filter(u8::is_ascii_digit) {
            let before = number.unwrap_or(0);
            if before > MAX_WIDTH {
                // Go gives up behind a number that is too large: the rest of the format is not read.
                self.position = self.format.len();
                return None;
            }
            number = Some(before * 10 + usize::from(byte - b'0'));
            self.position += 1;
        }
        number
    }

    /// Takes an argument as a width or precision.
    fn starred(&mut self) -> Option<i64> {
        self.position += 1;
        let value = self.values.get(self.next)?;
        self.next += 1;
        self.after_index = false;
        let number = match value.to_basic() {
            Value::Int(_, number) => number,
            Value::Uint(_, number) => i64::try_from(number).ok()?,
            _ => return None,
        };
        (number.unsigned_abs() <= MAX_WIDTH as u64).then_some(number)
    }

    fn width(&mut self, printer: &mut Printer<'_, '_>) -> Result<(), Failure> {
        if self.peek() == Some(b'*') {
            match self.starred() {
                Some(number) => {
                    printer.flags.width = usize::try_from(number.unsigned_abs()).ok();
                    if number < 0 {
                        printer.flags.minus = true;
                        printer.flags.zero = false;
                    }
                }
                None => printer.write(b"%!(BADWIDTH)")?,
            }
            return Ok(());
        }
        printer.flags.width = self.number();
        if self.after_index && printer.flags.width.is_some() {
            self.index_fits = false;
        }
        Ok(())
    }

    fn precision(&mut self, printer: &mut Printer<'_, '_>) -> Result<(), Failure> {
        if self.peek() != Some(b'.') {
            return Ok(());
        }
        self.position += 1;
        if self.after_index {
            self.index_fits = false;
        }
        self.index();
        if self.peek() == Some(b'*') {
            match self.starred() {
                Some(number) if number >= 0 => printer.flags.precision = usize::try_from(number).ok(),
                _ => printer.write(b"%!(BADPREC)")?,
            }
            return Ok(());
        }
        printer.flags.precision = Some(self.number().unwrap_or(0));
        Ok(())
    }
}
