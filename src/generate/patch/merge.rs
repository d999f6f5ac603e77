//! Merges a patch into a message by EnvoyFilter's rule: fields that the patch sets replace, messages recurse, lists
//! grow, map entries are replaced.
//!
//! Decoding the patch's bytes on top of the message does exactly this, so no field is compared. Three results of the
//! rule surprise: a field set to its default (`0`, `""`) changes nothing unless it has presence; a wrapper of a default
//! value leaves the existing wrapper; a packed message without content changes only the type name. A `Duration` is the
//! exception: it is replaced as a whole.

use bytes::Bytes;
use prost::{Message, Name, encoding};
use prost_reflect::{DynamicMessage, FieldDescriptor, ReflectMessage, Value};

use crate::proto::{Any, json};

const DURATION: &str = "google.protobuf.Duration";

/// Reason why two messages cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The patch is a message of another type.
    #[error("a {patch} cannot be merged into a {base}")]
    TypeMismatch {
        /// Full name of the message.
        base: String,
        /// Full name of the patch.
        patch: String,
    },
    /// A packed message has an unknown type.
    #[error("unknown type {0:?}")]
    UnknownType(String),
    /// The bytes do not match their type.
    #[error("{0} cannot be decoded")]
    Broken(String),
}

/// Returns the message with the patch merged into it.
///
/// # Errors
/// If the patch has another type.
pub fn merge<M: Message + Name + Default + Clone>(base: &M, patch: &DynamicMessage) -> Result<M, MergeError> {
    let mut merged = base.clone();
    merge_into(&mut merged, patch)?;
    Ok(merged)
}

/// Merges the patch into the message, which stays unchanged on failure.
///
/// # Errors
/// If the patch has another type.
pub fn merge_into<M: Message + Name + Default>(base: &mut M, patch: &DynamicMessage) -> Result<(), MergeError> {
    expect_type(&M::full_name(), patch.descriptor().full_name())?;
    let mut fields = Bytes::from(encode(patch));
    base.merge(&mut fields).map_err(|_| MergeError::Broken(M::full_name()))
}

/// Merges two packed messages of one type.
///
/// # Errors
/// If they have different or unknown types, or cannot be decoded.
pub fn merge_any(base: &Any, patch: &Any) -> Result<Any, MergeError> {
    let mut merged = unpack(base)?;
    let patch = unpack(patch)?;
    expect_type(merged.descriptor().full_name(), patch.descriptor().full_name())?;
    let mut fields = Bytes::from(encode(&patch));
    merged
        .merge(&mut fields)
        .map_err(|_| MergeError::Broken(base.type_name().to_owned()))?;
    Ok(Any {
        type_url: base.type_url.clone(),
        value: merged.encode_to_vec().into(),
    })
}

/// Returns the patch as a typed message.
///
/// # Errors
/// If it has another type.
pub fn read<M: Message + Name + Default>(patch: &DynamicMessage) -> Result<M, MergeError> {
    expect_type(&M::full_name(), patch.descriptor().full_name())?;
    M::decode(Bytes::from(patch.encode_to_vec())).map_err(|_| MergeError::Broken(M::full_name()))
}

/// Decodes a packed message of any type with a descriptor.
///
/// # Errors
/// If the type is unknown or the bytes do not match it.
pub fn unpack(any: &Any) -> Result<DynamicMessage, MergeError> {
    let descriptor =
        json::descriptor_by_url(&any.type_url).ok_or_else(|| MergeError::UnknownType(any.type_url.clone()))?;
    DynamicMessage::decode(descriptor, any.value.clone()).map_err(|_| MergeError::Broken(any.type_name().to_owned()))
}

fn expect_type(base: &str, patch: &str) -> Result<(), MergeError> {
    if base == patch {
        return Ok(());
    }
    Err(MergeError::TypeMismatch {
        base: base.to_owned(),
        patch: patch.to_owned(),
    })
}

/// Encodes the patch, with both fields of every duration that may replace another one. Durations in lists and maps
/// replace none.
fn encode(patch: &DynamicMessage) -> Vec<u8> {
    let nested: Vec<(FieldDescriptor, DynamicMessage)> = patch
        .fields()
        .filter_map(|(field, value)| match value {
            Value::Message(message) => Some((field, message.clone())),
            _ => None,
        })
        .collect();
    let mut flat = patch.clone();
    for (field, _) in &nested {
        flat.clear_field(field);
    }
    let mut bytes = flat.encode_to_vec();
    for (field, message) in nested {
        let body = if message.descriptor().full_name() == DURATION {
            encode_duration(&message)
        } else {
            encode(&message)
        };
        encoding::bytes::encode(field.number(), &body, &mut bytes);
    }
    bytes
}

fn encode_duration(duration: &DynamicMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Field numbers of `google.protobuf.Duration`.
    let seconds = duration.get_field_by_number(1).and_then(|value| value.as_i64());
    let nanos = duration.get_field_by_number(2).and_then(|value| value.as_i32());
    encoding::int64::encode(1, &seconds.unwrap_or_default(), &mut bytes);
    encoding::int32::encode(2, &nanos.unwrap_or_default(), &mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
