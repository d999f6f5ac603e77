//! JSON to the wire form, guided by descriptors.
//!
//! The result is canonical: fields in the order of their numbers, map entries in the order of their keys, no defaults.
//! Equal input therefore has equal bytes, also within packed messages, which are never encoded again.

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint},
};
use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor};
use serde_json::{Map, Value};

use super::{JsonError, Unknown, descriptor_by_url, struct_from_json, value_from_json, well_known, write};

type Result<T> = std::result::Result<T, JsonError>;

/// Decodes both alphabets (the URL alphabet is translated first), with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

pub(super) fn message(descriptor: &MessageDescriptor, value: &Value, unknown: Unknown) -> Result<Vec<u8>> {
    let mut reader = Reader {
        unknown,
        path: Vec::new(),
    };
    let mut out = Vec::new();
    reader.message(descriptor, value, &mut out)?;
    Ok(out)
}

/// A step of the current path, for error messages.
enum Step<'v> {
    Name(&'v str),
    Index(usize),
    Key(&'v str),
}

struct Reader<'v> {
    unknown: Unknown,
    path: Vec<Step<'v>>,
}

impl<'v> Reader<'v> {
    fn message(&mut self, descriptor: &MessageDescriptor, value: &'v Value, out: &mut Vec<u8>) -> Result<()> {
        let name = descriptor.full_name();
        if value.is_null() && name != "google.protobuf.Value" {
            return Ok(());
        }
        match name {
            "google.protobuf.Any" => return self.any(value, out),
            "google.protobuf.Duration" => {
                let text = self.text(value, "a duration")?;
                let duration = well_known::parse_go_duration(text);
                append(
                    &duration.ok_or_else(|| self.error(format!("{text:?} is no duration; write 1h30m or 1.5s")))?,
                    out,
                );
            }
            "google.protobuf.Timestamp" => {
                let text = self.text(value, "a timestamp")?;
                let timestamp = well_known::parse_timestamp(text);
                append(
                    &timestamp.ok_or_else(|| self.error(format!("{text:?} is no timestamp in RFC 3339")))?,
                    out,
                );
            }
            "google.protobuf.FieldMask" => {
                let paths = well_known::field_mask_paths(self.text(value, "a field mask")?);
                append(&prost_types::FieldMask { paths }, out);
            }
            "google.protobuf.Value" => append(&value_from_json(value), out),
            "google.protobuf.Struct" => append(&struct_from_json(self.object(value)?), out),
            "google.protobuf.ListValue" => {
                let values = self.array(value)?.iter().map(value_from_json).collect();
                append(&prost_types::ListValue { values }, out);
            }
            name if write::is_wrapper(name) => {
                let field = descriptor
                    .get_field(1)
                    .expect("because every wrapper has the one field");
                self.single(&field, value, false, out)?;
            }
            _ => {
                let object = self.object(value)?;
                self.fields(descriptor, object, None, out)?;
            }
        }
        Ok(())
    }

    /// Reads all members of the object except `skip`.
    fn fields(
        &mut self,
        descriptor: &MessageDescriptor,
        object: &'v Map<String, Value>,
        skip: Option<&str>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let mut encoded: Vec<(FieldDescriptor, Vec<u8>)> = Vec::with_capacity(object.len());
        for (name, value) in object {
            if skip == Some(name) {
                continue;
            }
            let field = descriptor
                .get_field_by_json_name(name)
                .or_else(|| descriptor.get_field_by_name(name));
            let Some(field) = field else {
                if self.unknown == Unknown::Deny {
                    return Err(self.error(format!("unknown field {name:?} in {}", descriptor.full_name())));
                }
                continue;
            };
            if value.is_null() && !takes_null(&field.kind()) {
                continue;
            }
            self.path.push(Step::Name(name));
            self.check_once(&field, &encoded)?;
            let mut bytes = Vec::new();
            self.field(&field, value, &mut bytes)?;
            self.path.pop();
            encoded.push((field, bytes));
        }
        encoded.sort_by_key(|(field, _)| field.number());
        for (_, bytes) in encoded {
            out.extend_from_slice(&bytes);
        }
        Ok(())
    }

    /// Refuses a field in both spellings and a second member of a oneof.
    fn check_once(&self, field: &FieldDescriptor, encoded: &[(FieldDescriptor, Vec<u8>)]) -> Result<()> {
        let oneof = field.containing_oneof().filter(|oneof| !oneof.is_synthetic());
        for (earlier, _) in encoded {
            if earlier.number() == field.number() {
                return Err(self.ambiguity("the field is given twice, in two spellings".to_owned()));
            }
            if oneof.is_some() && earlier.containing_oneof() == oneof {
                return Err(self.ambiguity(format!(
                    "{} is already set, and only one of them may be",
                    earlier.json_name()
                )));
            }
        }
        Ok(())
    }

    fn field(&mut self, field: &FieldDescriptor, value: &'v Value, out: &mut Vec<u8>) -> Result<()> {
        if field.is_map() {
            self.map(field, self.object(value)?, out)
        } else if field.is_list() {
            self.list(field, self.array(value)?, out)
        } else {
            self.single(field, value, field.supports_presence(), out)
        }
    }

    fn list(&mut self, field: &FieldDescriptor, items: &'v [Value], out: &mut Vec<u8>) -> Result<()> {
        let mut packed = Vec::new();
        for (index, item) in items.iter().enumerate() {
            self.path.push(Step::Index(index));
            if field.is_packed() {
                self.scalar(&field.kind(), item, &mut packed)?;
            } else {
                self.single(field, item, true, out)?;
            }
            self.path.pop();
        }
        if !packed.is_empty() {
            append_delimited(field.number(), &packed, out);
        }
        Ok(())
    }

    fn map(&mut self, field: &FieldDescriptor, object: &'v Map<String, Value>, out: &mut Vec<u8>) -> Result<()> {
        let Kind::Message(entry) = field.kind() else {
            return Err(self.error("the field is no map".to_owned()));
        };
        let (key_field, value_field) = (entry.map_entry_key_field(), entry.map_entry_value_field());
        let mut entries: Vec<(MapKey, Vec<u8>)> = Vec::with_capacity(object.len());
        for (key, value) in object {
            self.path.push(Step::Key(key));
            let (order, mut bytes) = self.map_key(&key_field, key)?;
            self.single(&value_field, value, false, &mut bytes)?;
            self.path.pop();
            entries.push((order, bytes));
        }
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (_, bytes) in entries {
            append_delimited(field.number(), &bytes, out);
        }
        Ok(())
    }

    /// Returns the key for ordering, and its encoded field of the entry.
    fn map_key(&self, field: &FieldDescriptor, text: &str) -> Result<(MapKey, Vec<u8>)> {
        let invalid = || self.error(format!("{text:?} is no key of this map"));
        let (key, value) = match field.kind() {
            Kind::String => (MapKey::String(text.to_owned()), Value::from(text)),
            Kind::Bool => {
                let key = text.parse().map_err(|_| invalid())?;
                (MapKey::Bool(key), Value::from(key))
            }
            Kind::Uint32 | Kind::Fixed32 | Kind::Uint64 | Kind::Fixed64 => {
                let key: u64 = text.parse().map_err(|_| invalid())?;
                (MapKey::U64(key), Value::from(key))
            }
            _ => {
                let key: i64 = text.parse().map_err(|_| invalid())?;
                (MapKey::I64(key), Value::from(key))
            }
        };
        let mut bytes = Vec::new();
        let mut scalar = Vec::new();
        if !self.scalar(&field.kind(), &value, &mut scalar)? {
            encode_key(field.number(), field.kind().wire_type(), &mut bytes);
            bytes.extend_from_slice(&scalar);
        }
        Ok((key, bytes))
    }

    /// Returns one value with its field number. A default is omitted unless `keep_default`.
    fn single(
        &mut self,
        field: &FieldDescriptor,
        value: &'v Value,
        keep_default: bool,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        if let Kind::Message(descriptor) = field.kind() {
            let mut bytes = Vec::new();
            self.message(&descriptor, value, &mut bytes)?;
            if keep_default || !bytes.is_empty() {
                append_delimited(field.number(), &bytes, out);
            }
            return Ok(());
        }
        let mut bytes = Vec::new();
        let is_default = self.scalar(&field.kind(), value, &mut bytes)?;
        if keep_default || !is_default {
            encode_key(field.number(), field.kind().wire_type(), out);
            out.extend_from_slice(&bytes);
        }
        Ok(())
    }

    /// Appends a scalar without its field number. Returns true if it is the default of its type.
    fn scalar(&self, kind: &Kind, value: &Value, out: &mut Vec<u8>) -> Result<bool> {
        let start = out.len();
        match kind {
            Kind::Bool => {
                let value = match value {
                    Value::Null => false,
                    Value::Bool(value) => *value,
                    other => return Err(self.mismatch("a boolean", other)),
                };
                encode_varint(u64::from(value), out);
            }
            Kind::String => append_text(self.text(value, "a string")?.as_bytes(), out),
            Kind::Bytes => {
                let text = self.text(value, "base64 text")?.replace('-', "+").replace('_', "/");
                append_text(
                    &BASE64.decode(text).map_err(|_| self.mismatch("base64 text", value))?,
                    out,
                );
            }
            Kind::Double => out.extend_from_slice(&self.double(value)?.to_le_bytes()),
            Kind::Float => {
                let double = self.double(value)?;
                let float = double as f32;
                if double.is_finite() && !float.is_finite() {
                    return Err(self.mismatch("a 32-bit number", value));
                }
                out.extend_from_slice(&float.to_le_bytes());
            }
            Kind::Enum(descriptor) => encode_varint(i64::from(self.enum_number(descriptor, value)?) as u64, out),
            Kind::Int32 => encode_varint(i64::from(self.integer::<i32>(value)?) as u64, out),
            Kind::Int64 => encode_varint(self.integer::<i64>(value)? as u64, out),
            Kind::Uint32 => encode_varint(u64::from(self.integer::<u32>(value)?), out),
            Kind::Uint64 => encode_varint(self.integer::<u64>(value)?, out),
            Kind::Sint32 => {
                let value = self.integer::<i32>(value)?;
                encode_varint(u64::from(((value << 1) ^ (value >> 31)) as u32), out);
            }
            Kind::Sint64 => {
                let value = self.integer::<i64>(value)?;
                encode_varint(((value << 1) ^ (value >> 63)) as u64, out);
            }
            Kind::Fixed32 => out.extend_from_slice(&self.integer::<u32>(value)?.to_le_bytes()),
            Kind::Fixed64 => out.extend_from_slice(&self.integer::<u64>(value)?.to_le_bytes()),
            Kind::Sfixed32 => out.extend_from_slice(&self.integer::<i32>(value)?.to_le_bytes()),
            Kind::Sfixed64 => out.extend_from_slice(&self.integer::<i64>(value)?.to_le_bytes()),
            Kind::Message(_) => return Err(self.mismatch("a scalar", value)),
        }
        // Every scalar's default is encoded as zeros: an empty text has length zero.
        Ok(out[start..].iter().all(|byte| *byte == 0))
    }

    fn integer<T: TryFrom<i128>>(&self, value: &Value) -> Result<T> {
        let whole = |number: f64| (number.fract() == 0.0 && number.abs() < 1e19).then_some(number as i128);
        let number = match value {
            Value::Null => Some(0),
            Value::Number(number) => {
                let signed = number
                    .as_i64()
                    .map(i128::from)
                    .or_else(|| number.as_u64().map(i128::from));
                signed.or_else(|| number.as_f64().and_then(whole))
            }
            Value::String(text) => text.parse().ok().or_else(|| text.parse().ok().and_then(whole)),
            _ => None,
        };
        let fits = number.and_then(|number| T::try_from(number).ok());
        fits.ok_or_else(|| self.mismatch("a whole number in the range of its type", value))
    }

    fn double(&self, value: &Value) -> Result<f64> {
        let number = match value {
            Value::Null => Some(0.0),
            Value::Number(number) => number.as_f64(),
            Value::String(text) => match text.as_str() {
                "NaN" => Some(f64::NAN),
                "Infinity" => Some(f64::INFINITY),
                "-Infinity" => Some(f64::NEG_INFINITY),
                text => text.parse().ok().filter(|number: &f64| number.is_finite()),
            },
            _ => None,
        };
        number.ok_or_else(|| self.mismatch("a number", value))
    }

    fn enum_number(&self, descriptor: &EnumDescriptor, value: &Value) -> Result<i32> {
        match value {
            Value::String(name) => match descriptor.get_value_by_name(name) {
                Some(value) => Ok(value.number()),
                None => Err(self.error(format!("unknown value {name:?} of the enum {}", descriptor.full_name()))),
            },
            Value::Null | Value::Number(_) => self.integer(value),
            other => Err(self.mismatch("the name of an enum's value", other)),
        }
    }

    fn any(&mut self, value: &'v Value, out: &mut Vec<u8>) -> Result<()> {
        let object = self.object(value)?;
        let type_url = match object.get("@type") {
            Some(Value::String(url)) => url,
            Some(other) => return Err(self.mismatch("the URL of a type under @type", other)),
            None => return Err(self.error("@type is missing".to_owned())),
        };
        let descriptor = descriptor_by_url(type_url).ok_or_else(|| self.error(format!("unknown type {type_url:?}")))?;
        let mut bytes = Vec::new();
        if write::has_own_form(descriptor.full_name()) {
            self.path.push(Step::Name("value"));
            self.message(&descriptor, object.get("value").unwrap_or(&Value::Null), &mut bytes)?;
            self.path.pop();
        } else {
            self.fields(&descriptor, object, Some("@type"), &mut bytes)?;
        }
        let any = crate::Any {
            type_url: type_url.clone(),
            value: bytes.into(),
        };
        append(&any, out);
        Ok(())
    }

    fn text(&self, value: &'v Value, expected: &str) -> Result<&'v str> {
        match value {
            Value::Null => Ok(""),
            Value::String(text) => Ok(text),
            other => Err(self.mismatch(expected, other)),
        }
    }

    fn object(&self, value: &'v Value) -> Result<&'v Map<String, Value>> {
        value.as_object().ok_or_else(|| self.mismatch("an object", value))
    }

    fn array(&self, value: &'v Value) -> Result<&'v [Value]> {
        value
            .as_array()
            .map(Vec::as_slice)
            .ok_or_else(|| self.mismatch("an array", value))
    }

    fn mismatch(&self, expected: &str, value: &Value) -> JsonError {
        let found = match value {
            Value::Null => "null".to_owned(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) => value.to_string().chars().take(80).collect(),
            Value::Array(_) => "an array".to_owned(),
            Value::Object(_) => "an object".to_owned(),
        };
        self.error(format!("expected {expected}, found {found}"))
    }

    fn error(&self, message: String) -> JsonError {
        let mut path = String::new();
        for step in &self.path {
            match step {
                Step::Name(name) if path.is_empty() => path.push_str(name),
                Step::Name(name) => path.extend([".", name]),
                Step::Index(index) => path.extend(["[", &index.to_string(), "]"]),
                Step::Key(key) => path.extend(["[\"", key, "\"]"]),
            }
        }
        JsonError {
            path,
            ..JsonError::new(message)
        }
    }

    fn ambiguity(&self, message: String) -> JsonError {
        JsonError {
            is_ambiguous: true,
            ..self.error(message)
        }
    }
}

/// True if `null` is a value of the type rather than its absence.
fn takes_null(kind: &Kind) -> bool {
    match kind {
        Kind::Message(message) => message.full_name() == "google.protobuf.Value",
        Kind::Enum(item) => item.full_name() == "google.protobuf.NullValue",
        _ => false,
    }
}

fn append(message: &impl Message, out: &mut Vec<u8>) {
    message.encode(out).expect("because a vector grows");
}

fn append_text(bytes: &[u8], out: &mut Vec<u8>) {
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn append_delimited(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    append_text(bytes, out);
}
