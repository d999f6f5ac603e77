//! Typed writers of encoded messages, for messages that a resource contains by the hundred.
//!
//! Creating, measuring and dropping the Rust types instead takes longer (bench `suite`): 3.3 times as long for load
//! assignments of 1,000 endpoints, and a third longer each for clusters with TLS and for default routes (case `auto`).
//!
//! Note: fields must be written in the order in which prost encodes them. The bytes of a resource then do not depend on
//! how it was encoded. In debug builds each [`Encoded`] message, and each resource, is compared with prost's encoding.
//!
//! Note: prost's decoders are generic over the buffer, and those of Envoy's messages are large. The generators always
//! decode [`Bytes`], so that each decoder is compiled once.

use std::{any::type_name, cell::RefCell, collections::BTreeSet, fmt, marker::PhantomData};

use bytes::Bytes;
use prost::{Message, encoding};
use prost_types::Struct;

use crate::{
    base::Version,
    proto::{
        Any,
        field::{self, Blob, Field, Map, MessageFields, NumberKind, TextKind, Wrapper},
    },
};

/// A message as bytes, or some of its fields in the order of encoding.
pub struct Encoded<M> {
    bytes: Vec<u8>,
    message: PhantomData<fn() -> M>,
}

impl<M: MessageFields> Encoded<M> {
    /// Encodes a message.
    pub fn of(message: &M) -> Self {
        Self::from_bytes(message.encode_to_vec())
    }

    /// Encodes a message by a function, into a buffer of this capacity in bytes.
    pub fn write(capacity: usize, write: impl FnOnce(&mut Writer<M>)) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        write(&mut Writer::new(&mut bytes));
        debug_assert_canonical::<M>(&bytes);
        Self::from_bytes(bytes)
    }

    /// Adds fields after those that are there.
    pub fn append(&mut self, write: impl FnOnce(&mut Writer<M>)) {
        write(&mut Writer::new(&mut self.bytes));
    }

    /// Decodes the message.
    pub fn decode(&self) -> M {
        M::decode(Bytes::copy_from_slice(&self.bytes)).expect("because the encoder wrote it")
    }
}

impl<M> Encoded<M> {
    const fn from_bytes(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            message: PhantomData,
        }
    }

    /// Returns no fields, and allocates nothing.
    pub const fn empty() -> Self {
        Self::from_bytes(Vec::new())
    }

    /// Returns no fields, with a buffer of this capacity in bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        Self::from_bytes(Vec::with_capacity(capacity))
    }

    /// Returns true without fields.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes without copying them.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl<M: MessageFields> Encoded<M> {
    /// Wraps the message in an `Any`.
    pub fn into_any(self) -> Any {
        Any {
            type_url: M::TYPE_URL.to_owned(),
            value: self.bytes.into(),
        }
    }
}

impl<M> Clone for Encoded<M> {
    fn clone(&self) -> Self {
        Self::from_bytes(self.bytes.clone())
    }
}

impl<M> Default for Encoded<M> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<M> PartialEq for Encoded<M> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl<M> Eq for Encoded<M> {}

impl<M> fmt::Debug for Encoded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes.len(), type_name::<M>())
    }
}

/// Fails in debug builds if prost would encode the message in other bytes.
pub fn debug_assert_canonical<M: Message + Default>(bytes: &[u8]) {
    debug_assert!(
        is_canonical::<M>(bytes),
        "fields of {} are not in the order of encoding",
        type_name::<M>()
    );
}

/// Returns true if prost would encode the message in these bytes. The last results of the thread are kept, since tests
/// generate most messages many times.
fn is_canonical<M: Message + Default>(bytes: &[u8]) -> bool {
    const KEPT: usize = 1 << 16;
    thread_local! {
        static CANONICAL: RefCell<BTreeSet<(Version, &'static str)>> = RefCell::default();
    }
    let message = (Version::of(bytes), type_name::<M>());
    CANONICAL.with_borrow_mut(|canonical| {
        if canonical.contains(&message) {
            return true;
        }
        let decoded = M::decode(Bytes::copy_from_slice(bytes));
        let equal = decoded.is_ok_and(|message| message.encode_to_vec() == bytes);
        if equal {
            if canonical.len() == KEPT {
                canonical.clear();
            }
            canonical.insert(message);
        }
        equal
    })
}

/// Returns the length of a field with its tag and length, for a text or message of `len` bytes.
pub fn field_len<M, K>(field: Field<M, K>, len: usize) -> usize {
    encoding::key_len(field.number()) + encoding::encoded_len_varint(len as u64) + len
}

/// Writes the fields of a message `M` at the end of a buffer.
pub struct Writer<'a, M> {
    out: &'a mut Vec<u8>,
    message: PhantomData<fn(M)>,
}

impl<'a, M> Writer<'a, M> {
    /// Returns a writer at the end of a buffer.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self {
            out,
            message: PhantomData,
        }
    }

    /// Returns the length of the buffer in bytes.
    pub fn position(&self) -> usize {
        self.out.len()
    }

    /// Makes room for further bytes.
    pub fn reserve(&mut self, len: usize) {
        self.out.reserve(len);
    }

    /// Writes a text.
    pub fn text<K: TextKind>(&mut self, field: Field<M, K>, value: &str) {
        if K::EXPLICIT || !value.is_empty() {
            self.bytes(field, value.as_bytes());
        }
    }

    /// Writes a text that consists of these parts.
    pub fn joined<K: TextKind>(&mut self, field: Field<M, K>, parts: &[&str]) {
        let len = parts.iter().map(|part| part.len()).sum();
        if K::EXPLICIT || len > 0 {
            self.header(field, len);
            for part in parts {
                self.out.extend_from_slice(part.as_bytes());
            }
        }
    }

    /// Writes a number, an enum or a boolean.
    pub fn number<K: NumberKind>(&mut self, field: Field<M, K>, value: u32) {
        if K::EXPLICIT || value != 0 {
            varint_field(self.out, field.number(), value);
        }
    }

    /// Writes a wrapped number or boolean.
    pub fn wrapper(&mut self, field: Field<M, Wrapper>, value: u32) {
        length_delimited(self.out, field.number(), |out| {
            if value != 0 {
                varint_field(out, WRAPPED_VALUE, value);
            }
        });
    }

    /// Writes a message.
    pub fn message<T: Message>(&mut self, field: Field<M, T>, message: &T) {
        length_delimited(self.out, field.number(), |out| message.encode_raw(out));
    }

    /// Writes a message by a function.
    pub fn nested<T: MessageFields>(&mut self, field: Field<M, T>, write: impl FnOnce(&mut Writer<T>)) {
        length_delimited(self.out, field.number(), |out| write(&mut Writer::new(out)));
    }

    /// Writes a message of a known length in bytes by a function. This saves moving its bytes.
    pub fn nested_of_length<T: MessageFields>(
        &mut self,
        field: Field<M, T>,
        len: usize,
        write: impl FnOnce(&mut Writer<T>),
    ) {
        self.header(field, len);
        let begin = self.out.len();
        write(&mut Writer::new(self.out));
        debug_assert_eq!(self.out.len() - begin, len, "length of field {}", field.number());
    }

    /// Writes an encoded message.
    pub fn encoded<T>(&mut self, field: Field<M, T>, message: &Encoded<T>) {
        self.bytes(field, &message.bytes);
    }

    /// Continues with the fields of another message.
    pub fn of<T>(self) -> Writer<'a, T> {
        Writer::new(self.out)
    }

    /// Writes the bytes of a text or of an encoded message.
    pub fn bytes<K>(&mut self, field: Field<M, K>, value: &[u8]) {
        self.header(field, value.len());
        self.out.extend_from_slice(value);
    }

    /// Writes a message by a function, wrapped in an `Any`.
    pub fn any<T: MessageFields>(&mut self, field: Field<M, Any>, write: impl FnOnce(&mut Writer<T>)) {
        self.nested(field, |out| out.pack(write));
    }

    /// Writes an entry of a map.
    pub fn entry<V: MessageFields>(&mut self, field: Field<M, Map<V>>, key: &str, write: impl FnOnce(&mut Writer<V>)) {
        length_delimited(self.out, field.number(), |out| {
            if !key.is_empty() {
                header(out, MAP_KEY, key.len());
                out.extend_from_slice(key.as_bytes());
            }
            length_delimited_unless_empty(out, MAP_VALUE, |out| write(&mut Writer::new(out)));
        });
    }

    /// Writes bytes by a function, unless they are empty.
    fn blob(&mut self, field: Field<M, Blob>, write: impl FnOnce(&mut Vec<u8>)) {
        length_delimited_unless_empty(self.out, field.number(), write);
    }

    /// Copies encoded fields.
    pub fn fields(&mut self, fields: &Encoded<M>) {
        self.out.extend_from_slice(&fields.bytes);
    }

    /// Copies fields that are encoded in a shared buffer.
    pub fn raw(&mut self, fields: &[u8]) {
        self.out.extend_from_slice(fields);
    }

    /// Writes the beginning of a text or message of this length in bytes. The caller writes the rest.
    pub fn header<K>(&mut self, field: Field<M, K>, len: usize) {
        header(self.out, field.number(), len);
    }
}

impl<M: MessageFields> Writer<'_, M> {
    /// Writes a whole message.
    pub fn whole(&mut self, message: &M) {
        message.encode_raw(self.out);
    }

    /// Writes a message with encoded fields inserted where prost encodes them. `pieces` are in the order of encoding.
    pub fn spliced<'p>(&mut self, message: &M, pieces: impl IntoIterator<Item = &'p Encoded<M>>)
    where
        M: 'p,
    {
        self.spliced_bytes(&message.encode_to_vec(), pieces);
    }

    /// As [`Self::spliced`], with an encoded message.
    pub fn spliced_bytes<'p>(&mut self, message: &[u8], pieces: impl IntoIterator<Item = &'p Encoded<M>>)
    where
        M: 'p,
    {
        let (mut copied, mut at) = (0, 0);
        for piece in pieces {
            let Some(first) = first_position::<M>(&piece.bytes) else {
                continue;
            };
            while at < message.len() {
                let mut rest = &message[at..];
                let (next, kind) = encoding::decode_key(&mut rest).expect("because the encoder wrote it");
                if M::position(next) > first {
                    break;
                }
                let context = encoding::DecodeContext::default();
                encoding::skip_field(kind, next, &mut rest, context).expect("because the encoder wrote it");
                at = message.len() - rest.len();
            }
            self.out.extend_from_slice(&message[copied..at]);
            copied = at;
            self.out.extend_from_slice(&piece.bytes);
        }
        self.out.extend_from_slice(&message[copied..]);
    }
}

impl Writer<'_, Any> {
    /// Writes the type URL and the content of an `Any`.
    pub fn pack<T: MessageFields>(&mut self, write: impl FnOnce(&mut Writer<T>)) {
        self.text(field::any::TYPE_URL, T::TYPE_URL);
        self.blob(field::any::VALUE, |out| write(&mut Writer::new(out)));
    }
}

impl Writer<'_, Struct> {
    /// Writes a text field.
    pub fn text_field(&mut self, key: &str, value: &str) {
        self.entry(field::r#struct::FIELDS, key, |out| {
            out.text(field::value::STRING_VALUE, value);
        });
    }

    /// Writes a field with the value `true`.
    pub fn true_field(&mut self, key: &str) {
        self.entry(field::r#struct::FIELDS, key, |out| {
            out.number(field::value::BOOL_VALUE, 1);
        });
    }

    /// Writes a list of structs as a field.
    pub fn list_field<T>(
        &mut self,
        key: &str,
        structs: impl IntoIterator<Item = T>,
        write: impl Fn(&mut Writer<Struct>, T),
    ) {
        self.entry(field::r#struct::FIELDS, key, |out| {
            out.nested(field::value::LIST_VALUE, |out| {
                for item in structs {
                    out.nested(field::list_value::VALUES, |out| {
                        out.nested(field::value::STRUCT_VALUE, |out| write(out, item));
                    });
                }
            });
        });
    }
}

/// Field of `BoolValue` and `UInt32Value`.
const WRAPPED_VALUE: u32 = 1;
/// Fields of the entries of every map.
const MAP_KEY: u32 = 1;
const MAP_VALUE: u32 = 2;

/// Returns the place of the first field in the order of encoding; `None` without fields.
fn first_position<M: MessageFields>(mut fields: &[u8]) -> Option<u32> {
    let first = (!fields.is_empty()).then(|| encoding::decode_key(&mut fields))?;
    let (number, _) = first.expect("because the encoder wrote it");
    Some(M::position(number))
}

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

/// Writes the tag and length of a text or message.
fn header(out: &mut Vec<u8>, field: u32, len: usize) {
    key(out, field, encoding::WireType::LengthDelimited);
    varint(out, len as u64);
}

fn varint_field(out: &mut Vec<u8>, field: u32, value: u32) {
    key(out, field, encoding::WireType::Varint);
    varint(out, u64::from(value));
}

/// Writes a field by a function, and its length before it.
fn length_delimited(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    key(out, field, encoding::WireType::LengthDelimited);
    let at = out.len();
    // Most messages are short: their length takes one byte.
    out.push(0);
    write(out);
    write_length(out, at);
}

/// Writes the length of what follows a byte into this byte, and into further ones if it needs them.
fn write_length(out: &mut Vec<u8>, at: usize) {
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

/// Writes a field with a number below 16 by a function, unless the function writes nothing.
fn length_delimited_unless_empty(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let begin = out.len();
    length_delimited(out, field, write);
    // The tag and the length 0 are two bytes.
    if out.len() == begin + 2 {
        out.truncate(begin);
    }
}

#[cfg(test)]
mod tests;
