//! Messages written field by field, for what a resource has by the hundred: the bytes alone, where the message would
//! cost many times as much to make, to measure and to drop.
//!
//! What one would get wrong: the order of fields is that of their numbers, as the encoder of messages has it, and fields
//! with their default value are left out; so that it cannot be told how a resource was made.

use std::cell::Cell;

use prost::{Message, encoding};

/// A number as keys, lengths and values have it: nearly all take one byte.
fn varint(out: &mut Vec<u8>, value: u64) {
    match u8::try_from(value) {
        Ok(short @ ..0x80) => out.push(short),
        _ => encoding::encode_varint(value, out),
    }
}

fn key(out: &mut Vec<u8>, field: u32, kind: encoding::WireType) {
    varint(out, u64::from(field << 3 | kind as u32));
}

/// A text or message that is encoded already.
pub fn bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    header(out, field, value.len());
    out.extend_from_slice(value);
}

/// What stands before a text or message of this length.
pub fn header(out: &mut Vec<u8>, field: u32, length: usize) {
    key(out, field, encoding::WireType::LengthDelimited);
    varint(out, length as u64);
}

/// A text, unless it is empty.
pub fn text(out: &mut Vec<u8>, field: u32, value: &str) {
    if !value.is_empty() {
        bytes(out, field, value.as_bytes());
    }
}

/// A text that is put together from these.
pub fn joined(out: &mut Vec<u8>, field: u32, parts: &[&str]) {
    header(out, field, parts.iter().map(|part| part.len()).sum());
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

/// A number, an enum or a boolean, even if it is 0.
pub fn number(out: &mut Vec<u8>, field: u32, value: u32) {
    key(out, field, encoding::WireType::Varint);
    varint(out, u64::from(value));
}

/// A wrapped number.
pub fn wrapped(out: &mut Vec<u8>, field: u32, value: u32) {
    nested(out, field, |out| {
        if value != 0 {
            number(out, 1, value);
        }
    });
}

/// A message that a function writes.
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

/// An entry of a map from texts to messages.
pub fn entry(out: &mut Vec<u8>, field: u32, key: &str, write: impl FnOnce(&mut Vec<u8>)) {
    nested(out, field, |out| {
        text(out, 1, key);
        nested(out, 2, write);
    });
}

thread_local! {
    /// Room for a message that others are spliced into; empty between two uses.
    static ROOM: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// As [`spliced`], with a message that is not encoded yet.
pub fn spliced_message<'p>(
    out: &mut Vec<u8>,
    message: &impl Message,
    pieces: impl IntoIterator<Item = (u32, &'p [u8])>,
    place: impl Fn(u32) -> u32,
) {
    let mut encoded = ROOM.take();
    message.encode_raw(&mut encoded);
    spliced(out, &encoded, pieces, place);
    encoded.clear();
    ROOM.set(encoded);
}

/// A message with fields put in that are encoded by themselves, each before the first field that comes later. `place`: where
/// a field stands, which is another than its number says if it is one of several that exclude each other. The pieces
/// are in order.
pub fn spliced<'p>(
    out: &mut Vec<u8>,
    message: &[u8],
    pieces: impl IntoIterator<Item = (u32, &'p [u8])>,
    place: impl Fn(u32) -> u32,
) {
    let (mut copied, mut at) = (0, 0);
    for (field, piece) in pieces {
        while at < message.len() {
            let mut rest = &message[at..];
            let (next, kind) = encoding::decode_key(&mut rest).expect("because the encoder wrote it");
            if place(next) > field {
                break;
            }
            let context = encoding::DecodeContext::default();
            encoding::skip_field(kind, next, &mut rest, context).expect("because the encoder wrote it");
            at = message.len() - rest.len();
        }
        out.extend_from_slice(&message[copied..at]);
        copied = at;
        out.extend_from_slice(piece);
    }
    out.extend_from_slice(&message[copied..]);
}

const FIELDS: u32 = 1;

/// A field of a struct: a text.
pub fn text_field(out: &mut Vec<u8>, key: &str, value: &str) {
    entry(out, FIELDS, key, |out| bytes(out, 3, value.as_bytes()));
}

/// A field of a struct: true.
pub fn true_field(out: &mut Vec<u8>, key: &str) {
    entry(out, FIELDS, key, |out| number(out, 4, 1));
}

/// A field of a struct: a list of structs.
pub fn list_field<T>(
    out: &mut Vec<u8>,
    key: &str,
    structs: impl IntoIterator<Item = T>,
    write: impl Fn(&mut Vec<u8>, T),
) {
    entry(out, FIELDS, key, |out| {
        nested(out, 6, |out| {
            for one in structs {
                nested(out, 1, |out| nested(out, 5, |out| write(out, one)));
            }
        });
    });
}

#[cfg(test)]
mod tests;
