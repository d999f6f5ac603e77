//! Values as text: the verbs of Go's package `fmt`.

use std::borrow::Cow;

use super::{
    limits::Failure,
    number::FloatType,
    quote::{Charset, can_backquote, char_of, quote, quote_char},
    text::{Text, chars, first_char, push_char},
    types::Type,
    value::{Context, List, Map, Object, Value},
};

mod directive;
mod numeric;

/// The largest width or precision.
const MAX_WIDTH: usize = 1_000_000;

/// Returns values as `Sprint` does: with a space between two values of which none is a string.
pub fn print(context: &mut Context<'_>, values: &[&Value]) -> Result<Vec<u8>, Failure> {
    let mut printer = Printer::new(context);
    let mut after_string = true;
    for (position, value) in values.iter().enumerate() {
        let is_string = matches!(value.to_basic(), Value::String(_));
        if position > 0 && !is_string && !after_string {
            printer.write(b" ")?;
        }
        printer.argument(value, 'v')?;
        after_string = is_string;
    }
    Ok(printer.out)
}

/// Returns values as `Sprintln` does: with spaces between them, and a line break.
pub(super) fn print_line(context: &mut Context<'_>, values: &[&Value]) -> Result<Vec<u8>, Failure> {
    let mut printer = Printer::new(context);
    for (position, value) in values.iter().enumerate() {
        if position > 0 {
            printer.write(b" ")?;
        }
        printer.argument(value, 'v')?;
    }
    printer.write(b"\n")?;
    Ok(printer.out)
}

/// Returns values as `Sprintf` does.
pub fn printf(context: &mut Context<'_>, format: &[u8], values: &[&Value]) -> Result<Vec<u8>, Failure> {
    let mut printer = Printer::new(context);
    directive::run(&mut printer, format, values)?;
    Ok(printer.out)
}

/// Returns one value as `%v` shows it.
pub fn display(context: &mut Context<'_>, value: &Value) -> Result<Vec<u8>, Failure> {
    print(context, &[value])
}

/// Returns the value that an action prints: pointers are followed, and a missing value has a text.
pub(super) fn printable(value: &Value) -> Cow<'_, Value> {
    match value {
        Value::Missing => Cow::Owned("<no value>".into()),
        Value::Pointer(target) => printable(target),
        value => Cow::Borrowed(value),
    }
}

/// The syntax of `%v`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Syntax {
    /// `{1 a}`.
    #[default]
    Plain,
    /// `%+v`: `{Number:1 Name:a}`.
    Names,
    /// `%#v`: `main.T{Number:1, Name:"a"}`.
    Go,
}

/// The flags of a directive.
#[derive(Clone, Debug, Default)]
struct Flags {
    plus: bool,
    minus: bool,
    sharp: bool,
    space: bool,
    zero: bool,
    width: Option<usize>,
    precision: Option<usize>,
    syntax: Syntax,
}

impl Flags {
    fn is_empty(&self) -> bool {
        let is_set = self.plus || self.minus || self.sharp || self.space || self.zero;
        !is_set && self.width.is_none() && self.precision.is_none() && self.syntax == Syntax::Plain
    }
}

struct Printer<'a, 'b> {
    context: &'a mut Context<'b>,
    out: Vec<u8>,
    flags: Flags,
    /// True inside the message about a wrong verb: methods of the value are not called.
    in_error: bool,
    depth: usize,
}

impl<'a, 'b> Printer<'a, 'b> {
    fn new(context: &'a mut Context<'b>) -> Self {
        Self {
            context,
            out: Vec::new(),
            flags: Flags::default(),
            in_error: false,
            depth: 0,
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.context.allocate(bytes.len())?;
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn write_str(&mut self, text: &str) -> Result<(), Failure> {
        self.write(text.as_bytes())
    }

    /// Writes a text, filled up to the width.
    fn pad(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(width) = self.flags.width else {
            return self.write(bytes);
        };
        let missing = width.saturating_sub(chars(bytes).count());
        let filler = if self.flags.zero && !self.flags.minus {
            b'0'
        } else {
            b' '
        };
        self.context.allocate(missing)?;
        if self.flags.minus {
            self.write(bytes)?;
            self.out.extend(std::iter::repeat_n(filler, missing));
            return Ok(());
        }
        self.out.extend(std::iter::repeat_n(filler, missing));
        self.write(bytes)
    }

    /// Writes an argument with a verb.
    fn argument(&mut self, value: &Value, verb: char) -> Result<(), Failure> {
        match (value, verb) {
            (Value::Nil | Value::Missing, 'T' | 'v') => self.pad(b"<nil>"),
            (Value::Nil | Value::Missing, _) => self.wrong_verb(value, verb),
            (value, 'T') => self.string(value.type_of().to_string().as_bytes(), 's'),
            (value, 'p') => self.pointer(value, verb),
            (value, verb) => self.value(value, verb, 0),
        }
    }

    /// Writes a value. `level` counts the containers around it.
    fn value(&mut self, value: &Value, verb: char, level: usize) -> Result<(), Failure> {
        self.context.step(1)?;
        let before = self.depth;
        self.depth = self.context.deeper(before)?;
        let written = match value {
            Value::Int(_, number) if verb == 'v' && self.flags.is_empty() => {
                self.write_str(itoa::Buffer::new().format(*number))
            }
            Value::Float(number) if verb == 'v' && is_short_integer(*number) && self.flags.is_empty() => {
                self.write_str(itoa::Buffer::new().format(*number as i64))
            }
            Value::String(text) if matches!(verb, 'v' | 's') && self.flags.is_empty() => self.write(text.bytes()),
            Value::Missing | Value::Nil if self.flags.syntax == Syntax::Go => self.write(b"interface {}(nil)"),
            Value::Missing | Value::Nil => self.write(b"<nil>"),
            Value::Bool(truth) if matches!(verb, 't' | 'v') => self.pad(if *truth { b"true" } else { b"false" }),
            Value::Bool(_) => self.wrong_verb(value, verb),
            Value::Int(_, number) => self.integer(value, number.unsigned_abs(), *number < 0, verb),
            Value::Uint(_, number) => self.integer(value, *number, false, verb),
            Value::Float32(number) => self.float(value, f64::from(*number), FloatType::Float32, verb),
            Value::Float(number) => self.float(value, *number, FloatType::Float64, verb),
            Value::Complex(real, imaginary) => self.complex(value, *real, *imaginary, verb),
            Value::String(text) => self.string_value(value, text, verb),
            Value::List(list) => self.list(list, verb, level),
            Value::Map(map) => self.map(map, verb, level),
            Value::Pointer(target) if level == 0 && target.is_container() => {
                self.write(b"&")?;
                self.value(target, verb, level + 1)
            }
            Value::Object(object) => self.object(value, object.as_ref(), verb, level),
            Value::Pointer(_) | Value::NilPointer(_) | Value::Function(_) => self.pointer(value, verb),
        };
        self.depth = before;
        written
    }

    /// Writes a note that a verb does not fit the type of the value.
    fn wrong_verb(&mut self, value: &Value, verb: char) -> Result<(), Failure> {
        self.in_error = true;
        self.write_str(&format!("%!{verb}("))?;
        match value {
            Value::Nil | Value::Missing => self.write(b"<nil>")?,
            value => {
                self.write_str(&format!("{}=", value.type_of()))?;
                self.argument(value, 'v')?;
            }
        }
        self.in_error = false;
        self.write(b")")
    }

    fn pointer(&mut self, value: &Value, verb: char) -> Result<(), Failure> {
        let has_address = matches!(
            value,
            Value::Pointer(_) | Value::NilPointer(_) | Value::Function(_) | Value::List(_) | Value::Map(_)
        ) || matches!(value, Value::Object(object) if matches!(object.type_of(), Type::Pointer(_)));
        match verb {
            _ if !has_address => self.wrong_verb(value, verb),
            'v' if self.flags.syntax == Syntax::Go => {
                let address = if value.is_nil() { "nil" } else { NO_ADDRESS };
                self.write_str(&format!("({})({address})", value.type_of()))
            }
            'v' if value.is_nil() => self.pad(b"<nil>"),
            'd' | 'o' | 'b' | 'x' | 'X' if value.is_nil() => self.integer(&Value::int(0), 0, false, verb),
            'v' | 'p' => self.pad(if value.is_nil() { b"0x0" } else { NO_ADDRESS.as_bytes() }),
            _ => self.wrong_verb(value, verb),
        }
    }

    fn string_value(&mut self, value: &Value, text: &Text, verb: char) -> Result<(), Failure> {
        if matches!(verb, 'v' | 's' | 'x' | 'X' | 'q') {
            self.string(text.bytes(), verb)
        } else {
            self.wrong_verb(value, verb)
        }
    }

    fn string(&mut self, bytes: &[u8], verb: char) -> Result<(), Failure> {
        match verb {
            'x' | 'X' => return self.hexadecimal(bytes, verb),
            _ => {}
        }
        let cut = match self.flags.precision {
            Some(precision) => &bytes[..chars(bytes).take(precision).map(|(_, length)| length).sum()],
            None => bytes,
        };
        if verb == 'q' || verb == 'v' && self.flags.syntax == Syntax::Go {
            self.context.allocate(cut.len())?;
            let quoted = if self.flags.sharp && can_backquote(cut) {
                [b"`", cut, b"`"].concat()
            } else if self.flags.plus {
                quote(cut, Charset::Ascii).into_bytes()
            } else {
                quote(cut, Charset::Unicode).into_bytes()
            };
            return self.pad(&quoted);
        }
        self.pad(cut)
    }

    fn hexadecimal(&mut self, bytes: &[u8], verb: char) -> Result<(), Failure> {
        let length = self.flags.precision.unwrap_or(usize::MAX).min(bytes.len());
        self.context.allocate(length.saturating_mul(5))?;
        let prefix = if verb == 'X' { "0X" } else { "0x" };
        let mut out = String::new();
        for (position, byte) in bytes[..length].iter().enumerate() {
            if self.flags.space && position > 0 {
                out.push(' ');
            }
            if self.flags.sharp && (self.flags.space || position == 0) {
                out.push_str(prefix);
            }
            let digits = if verb == 'X' {
                format!("{byte:02X}")
            } else {
                format!("{byte:02x}")
            };
            out.push_str(&digits);
        }
        self.pad(out.as_bytes())
    }

    fn list(&mut self, list: &List, verb: char, level: usize) -> Result<(), Failure> {
        if self.flags.syntax == Syntax::Go {
            self.write_str(&list.element().clone().list().to_string())?;
            if list.is_nil() {
                return self.write(b"(nil)");
            }
        }
        let (open, between, close) = match self.flags.syntax {
            Syntax::Go => ("{", ", ", "}"),
            _ => ("[", " ", "]"),
        };
        self.write_str(open)?;
        for (position, item) in list.items().iter().enumerate() {
            if position > 0 {
                self.write_str(between)?;
            }
            self.value(item, verb, level + 1)?;
        }
        self.write_str(close)
    }

    fn map(&mut self, map: &Map, verb: char, level: usize) -> Result<(), Failure> {
        if self.flags.syntax == Syntax::Go {
            self.write_str(&map.element().clone().map().to_string())?;
            if map.is_nil() {
                return self.write(b"(nil)");
            }
        }
        let (open, between, close) = match self.flags.syntax {
            Syntax::Go => ("{", ", ", "}"),
            _ => ("map[", " ", "]"),
        };
        self.write_str(open)?;
        for (position, (key, value)) in self.context.snapshot(map).iter().enumerate() {
            if position > 0 {
                self.write_str(between)?;
            }
            self.value(&Value::String(key.clone()), verb, level + 1)?;
            self.write(b":")?;
            self.value(value, verb, level + 1)?;
        }
        self.write_str(close)
    }

    fn object(&mut self, value: &Value, object: &dyn Object, verb: char, level: usize) -> Result<(), Failure> {
        let shows_text = !self.in_error && self.flags.syntax != Syntax::Go && "vsxXq".contains(verb);
        if let Some(text) = object.to_text().filter(|_| shows_text) {
            return self.string(text.as_bytes(), verb);
        }
        if let Some(basic) = object.basic() {
            return self.value(&basic, verb, level);
        }
        let is_pointer = matches!(object.type_of(), Type::Pointer(_));
        if object.is_nil() || is_pointer && level > 0 {
            return self.pointer(value, verb);
        }
        if is_pointer {
            self.write(b"&")?;
        }
        self.fields(object, verb, level)
    }

    fn fields(&mut self, object: &dyn Object, verb: char, level: usize) -> Result<(), Failure> {
        if self.flags.syntax == Syntax::Go {
            let name = object.type_of().to_string();
            self.write_str(name.trim_start_matches('*'))?;
        }
        self.write(b"{")?;
        for (position, name) in object.field_names().into_iter().enumerate() {
            if position > 0 {
                self.write_str(if self.flags.syntax == Syntax::Go { ", " } else { " " })?;
            }
            if self.flags.syntax != Syntax::Plain {
                self.write_str(&format!("{name}:"))?;
            }
            let field = object.field(name).unwrap_or(Value::Nil);
            self.value(&field, verb, level + 1)?;
        }
        self.write(b"}")
    }

    fn character(&mut self, code: u64) -> Result<(), Failure> {
        let mut bytes = Vec::new();
        push_char(&mut bytes, char_of(i64::try_from(code).unwrap_or(-1)));
        self.pad(&bytes)
    }

    fn quoted_character(&mut self, code: u64) -> Result<(), Failure> {
        let charset = if self.flags.plus {
            Charset::Ascii
        } else {
            Charset::Unicode
        };
        let quoted = quote_char(i64::try_from(code).unwrap_or(-1), charset);
        self.pad(quoted.as_bytes())
    }
}

/// Returns true for a number that `%v` shows as an integer, without sign and exponent.
fn is_short_integer(number: f64) -> bool {
    (0.0..1e6).contains(&number) && number.is_sign_positive() && number.fract() == 0.0
}

/// Printed in place of an address of memory.
const NO_ADDRESS: &str = "0xc000000000";

/// Returns the first character of a format and its length.
fn verb_of(format: &[u8]) -> (char, usize) {
    first_char(format).unwrap_or((char::REPLACEMENT_CHARACTER, 0))
}
