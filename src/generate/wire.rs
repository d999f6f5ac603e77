//! Messages written field by field, for messages that a resource contains by the hundred. Creating, measuring and
//! dropping the typed messages would cost many times as much.
//!
//! Note: fields must be written in the order of their numbers and without default values, as prost does. The bytes of a
//! resource then do not depend on how it was encoded.

use std::cell::Cell;

use prost::{Message, encoding};

/// Writes a varint. Nearly all take one byte.
fn varint(out: &mut Vec<u8>, value: u64) {
    match u8::try_from(value) {
        Ok(short @ ..0x80) => out.push(short),
        _ => encoding::encode_varint(value, out),
    }
}

fn key(out: &mut Vec<u8>, field: u32, kind: encoding::WireType) {
    varint(out, u64::from(field << 3 | kind as u32));
}

/// Writes an encoded text or message.
pub fn bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    header(out, field, value.len());
    out.extend_from_slice(value);
}

/// Writes the tag and length of a text or message.
pub fn header(out: &mut Vec<u8>, field: u32, length: usize) {
    key(out, field, encoding::WireType::LengthDelimited);
    varint(out, length as u64);
}

/// Writes a text, unless it is empty.
pub fn text(out: &mut Vec<u8>, field: u32, value: &str) {
    if !value.is_empty() {
        bytes(out, field, value.as_bytes());
    }
}

/// Writes a text that consists of these parts.
pub fn joined(out: &mut Vec<u8>, field: u32, parts: &[&str]) {
    header(out, field, parts.iter().map(|part| part.len()).sum());
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

/// Writes a number, an enum or a boolean, even if it is 0.
pub fn number(out: &mut Vec<u8>, field: u32, value: u32) {
    key(out, field, encoding::WireType::Varint);
    varint(out, u64::from(value));
}

/// Writes a wrapped number (`google.protobuf.UInt32Value`).
pub fn wrapped(out: &mut Vec<u8>, field: u32, value: u32) {
    nested(out, field, |out| {
        if value != 0 {
            number(out, 1, value);
        }
    });
}

/// Writes a message by a function.
pub fn nested(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    key(out, field, encoding::WireType::LengthDelimited);
    let at = out.len();
    // Most messages are short: their length takes one byte.
    out.push(0);
    write(out);
    let length = out.len() - at - 1;
    if let Some(short) = u8::try_from(length).ok().filter(|short| *short < 0x80) {
        out[at] = short;
        return;
    }
    let further = encoding::encoded_len_varint(length as u64) - 1;
    let end = out.len();
    out.resize(end + further, 0);
    out.copy_within(at + 1..end, at + 1 + further);
    encoding::encode_varint(length as u64, &mut &mut out[at..=at + further]);
}

/// Writes an entry of a map from texts to messages.
pub fn entry(out: &mut Vec<u8>, field: u32, key: &str, write: impl FnOnce(&mut Vec<u8>)) {
    nested(out, field, |out| {
        text(out, 1, key);
        nested(out, 2, write);
    });
}

thread_local! {
    /// A buffer for messages that fields are spliced into; empty between two uses. Saves an allocation for each
    /// message.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// As [`spliced`], with a message that it encodes.
pub fn spliced_message<'p>(
    out: &mut Vec<u8>,
    message: &impl Message,
    fields: impl IntoIterator<Item = (u32, &'p [u8])>,
    position: impl Fn(u32) -> u32,
) {
    let mut encoded = BUFFER.take();
    message.encode_raw(&mut encoded);
    spliced(out, &encoded, fields, position);
    encoded.clear();
    BUFFER.set(encoded);
}

/// Writes a message with encoded fields inserted, each before the first field with a higher position. `position`
/// returns the position of a field: its number, except for members of a oneof. The fields to insert must be in order.
pub fn spliced<'p>(
    out: &mut Vec<u8>,
    message: &[u8],
    fields: impl IntoIterator<Item = (u32, &'p [u8])>,
    position: impl Fn(u32) -> u32,
) {
    let (mut copied, mut at) = (0, 0);
    for (field, bytes) in fields {
        while at < message.len() {
            let mut rest = &message[at..];
            let (next, kind) = encoding::decode_key(&mut rest).expect("because the encoder wrote it");
            if position(next) > field {
                break;
            }
            let context = encoding::DecodeContext::default();
            encoding::skip_field(kind, next, &mut rest, context).expect("because the encoder wrote it");
            at = message.len() - rest.len();
        }
        out.extend_from_slice(&message[copied..at]);
        copied = at;
        out.extend_from_slice(bytes);
    }
    out.extend_from_slice(&message[copied..]);
}

const FIELDS: u32 = 1;

/// Writes a text field of a `google.protobuf.Struct`.
pub fn text_field(out: &mut Vec<u8>, key: &str, value: &str) {
    entry(out, FIELDS, key, |out| bytes(out, 3, value.as_bytes()));
}

/// Writes the value `true` as a field of a struct.
pub fn true_field(out: &mut Vec<u8>, key: &str) {
    entry(out, FIELDS, key, |out| number(out, 4, 1));
}

/// Writes a list of structs as a field of a struct.
pub fn list_field<T>(
    out: &mut Vec<u8>,
    key: &str,
    structs: impl IntoIterator<Item = T>,
    write: impl Fn(&mut Vec<u8>, T),
) {
    entry(out, FIELDS, key, |out| {
        nested(out, 6, |out| {
            for value in structs {
                nested(out, 1, |out| nested(out, 5, |out| write(out, value)));
            }
        });
    });
}

#[cfg(test)]
mod tests;
