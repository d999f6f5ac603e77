//! JSON as Go's `encoding/json` reads and writes it.

use std::borrow::Cow;

use super::{
    limits::Failure,
    number::{FloatType, Notation, format_float},
    text::{ByteSet, chars, printable_ascii_without, span},
    value::{Context, Map, Object, Value},
};

mod decode;

pub use decode::decode;

/// The layout of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// On one line.
    Compact,
    /// With line breaks, and two spaces for each level.
    Indented,
}

/// The characters that are escaped in strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Escapes {
    /// `<`, `>` and `&` too, as `json.Marshal` does.
    Html,
    /// The necessary ones.
    Necessary,
}

/// Bytes that are not escaped in strings.
const PLAIN: ByteSet = printable_ascii_without(b"\"\\<>&");

/// The size of the buffer for a document at first, in bytes. Most documents of injection fit, such as annotations and
/// the configuration of a proxy.
const DOCUMENT_BYTES: usize = 256;

/// Returns a value as JSON.
pub fn encode(context: &mut Context<'_>, value: &Value, layout: Layout, escapes: Escapes) -> Result<Vec<u8>, Failure> {
    let mut encoder = Encoder {
        context,
        out: Vec::with_capacity(DOCUMENT_BYTES),
        layout,
        escapes,
        depth: 0,
        charged: 0,
    };
    encoder.value(value)?;
    encoder.charge()?;
    Ok(encoder.out)
}

struct Encoder<'a, 'b> {
    context: &'a mut Context<'b>,
    out: Vec<u8>,
    layout: Layout,
    escapes: Escapes,
    depth: usize,
    /// The bytes of `out` that the budget has paid.
    charged: usize,
}

impl Encoder<'_, '_> {
    fn charge(&mut self) -> Result<(), Failure> {
        self.context.allocate(self.out.len() - self.charged)?;
        self.charged = self.out.len();
        Ok(())
    }

    fn write(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    fn value(&mut self, value: &Value) -> Result<(), Failure> {
        self.context.step(1)?;
        self.charge()?;
        match value {
            Value::Missing | Value::Nil | Value::NilPointer(_) => self.write("null"),
            Value::Bool(value) => self.write(if *value { "true" } else { "false" }),
            Value::Int(_, number) => self.write(itoa::Buffer::new().format(*number)),
            Value::Uint(_, number) => self.write(itoa::Buffer::new().format(*number)),
            Value::Float(number) => self.float(*number, FloatType::Float64)?,
            Value::Float32(number) => self.float(f64::from(*number), FloatType::Float32)?,
            Value::String(text) => self.string(text.bytes()),
            Value::List(list) if list.is_nil() => self.write("null"),
            Value::List(list) => {
                let items = list.items().iter().map(|item| (None, Cow::Borrowed(item)));
                self.members('[', items, ']')?;
            }
            Value::Map(map) if map.is_nil() => self.write("null"),
            Value::Map(map) => self.map(map)?,
            Value::Pointer(target) => self.value(target)?,
            Value::Object(object) => self.object(object.as_ref())?,
            Value::Complex(..) | Value::Function(_) => {
                let message = format!("json: unsupported type: {}", value.type_of());
                return Err(Failure::Message(message));
            }
        }
        Ok(())
    }

    fn map(&mut self, map: &Map) -> Result<(), Failure> {
        let entries = self.context.snapshot(map);
        let members = entries
            .iter()
            .map(|(key, value)| (Some(key.bytes()), Cow::Borrowed(value)));
        self.members('{', members, '}')
    }

    fn object(&mut self, object: &dyn Object) -> Result<(), Failure> {
        if let Some(value) = object.to_json().or_else(|| object.basic()) {
            return self.value(&value);
        }
        if object.is_nil() {
            self.write("null");
            return Ok(());
        }
        if let Some(members) = object.json_members(self.context) {
            let members = members
                .into_iter()
                .map(|(name, value)| (Some(name.as_bytes()), Cow::Owned(value)));
            return self.members('{', members, '}');
        }
        let names = object.field_names();
        let fields = names.into_iter().map(|name| {
            let value = object.field(name).unwrap_or(Value::Nil);
            (Some(name.as_bytes()), Cow::Owned(value))
        });
        self.members('{', fields, '}')
    }

    fn members<'v>(
        &mut self,
        open: char,
        members: impl ExactSizeIterator<Item = (Option<&'v [u8]>, Cow<'v, Value>)>,
        close: char,
    ) -> Result<(), Failure> {
        self.write(open.encode_utf8(&mut [0; 4]));
        let is_empty = members.len() == 0;
        let outside = self.depth;
        self.depth = self.context.deeper(outside)?;
        for (position, (key, value)) in members.enumerate() {
            if position > 0 {
                self.write(",");
            }
            self.line_break();
            if let Some(key) = key {
                self.string(key);
                self.write(if self.layout == Layout::Indented { ": " } else { ":" });
            }
            self.value(&value)?;
        }
        self.depth = outside;
        if !is_empty {
            self.line_break();
        }
        self.write(close.encode_utf8(&mut [0; 4]));
        Ok(())
    }

    fn line_break(&mut self) {
        if self.layout == Layout::Indented {
            self.out.push(b'\n');
            self.out.extend(std::iter::repeat_n(b' ', 2 * self.depth));
        }
    }

    fn float(&mut self, number: f64, of_type: FloatType) -> Result<(), Failure> {
        if !number.is_finite() {
            let shown = format_float(number, Notation::General, None, of_type);
            return Err(Failure::Message(format!("json: unsupported value: {shown}")));
        }
        let magnitude = number.abs();
        if (1.0..1e15).contains(&magnitude) && number.fract() == 0.0 {
            self.write(itoa::Buffer::new().format(number as i64));
            return Ok(());
        }
        let is_plain = magnitude < f64::MIN_POSITIVE || (1e-6..1e21).contains(&magnitude);
        if is_plain {
            self.write(&format_float(number, Notation::Plain, None, of_type));
            return Ok(());
        }
        // The exponent has no leading zero.
        let text = format_float(number, Notation::Exponent, None, of_type);
        self.write(&text.replace("e-0", "e-").replace("e+0", "e+"));
        Ok(())
    }

    fn string(&mut self, bytes: &[u8]) {
        self.out.push(b'"');
        let plain = span(bytes, &PLAIN);
        self.out.extend_from_slice(&bytes[..plain]);
        for (character, length) in chars(&bytes[plain..]) {
            match character {
                '"' => self.write("\\\""),
                '\\' => self.write("\\\\"),
                '\n' => self.write("\\n"),
                '\r' => self.write("\\r"),
                '\t' => self.write("\\t"),
                '\u{8}' => self.write("\\b"),
                '\u{c}' => self.write("\\f"),
                '<' | '>' | '&' if self.escapes == Escapes::Html => self.code(character),
                ..' ' | '\u{2028}' | '\u{2029}' => self.code(character),
                char::REPLACEMENT_CHARACTER if length == 1 => self.write("\\ufffd"),
                character => self.write(character.encode_utf8(&mut [0; 4])),
            }
        }
        self.out.push(b'"');
    }

    fn code(&mut self, character: char) {
        self.write(&format!("\\u{:04x}", u32::from(character)));
    }
}
