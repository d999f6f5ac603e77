//! Merging a patch into a message, by the rule that EnvoyFilters have: fields that the patch sets replace, messages
//! recurse, lists grow, map entries are replaced.
//!
//! That is what decoding the patch's bytes on top of the message does, so nothing is compared field by field and the
//! message is not taken apart. Three results of the rule surprise: a field set to its default (`0`, `""`) changes
//! nothing unless it has presence, a wrapper of a default value leaves the wrapper that is there, and a packed message
//! without content changes only the type's name. A `Duration` is an exception: replaced whole, never half of it.

use prost::{Message, Name, encoding};
use prost_reflect::{DynamicMessage, FieldDescriptor, ReflectMessage, Value};

use crate::proto::{Any, json};

const DURATION: &str = "google.protobuf.Duration";

/// Why two messages cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The patch is another kind of message.
    #[error("a {patch} cannot be merged into a {base}")]
    TypeMismatch {
        /// The message's full name.
        base: String,
        /// The patch's full name.
        patch: String,
    },
    /// A packed message is of a type that is not known here.
    #[error("unknown type {0:?}")]
    UnknownType(String),
    /// Bytes that are not what their type says.
    #[error("{0} cannot be decoded")]
    Broken(String),
}

/// The message with the patch merged into it.
///
/// # Errors
/// When the patch is of another type.
pub fn merge<M: Message + Name + Default + Clone>(base: &M, patch: &DynamicMessage) -> Result<M, MergeError> {
    let mut merged = base.clone();
    merge_into(&mut merged, patch)?;
    Ok(merged)
}

/// Merges the patch into the message, which stays as it is when that fails.
///
/// # Errors
/// When the patch is of another type.
pub fn merge_into<M: Message + Name + Default>(base: &mut M, patch: &DynamicMessage) -> Result<(), MergeError> {
    expect_type(&M::full_name(), patch.descriptor().full_name())?;
    base.merge(encode(patch).as_slice())
        .map_err(|_| MergeError::Broken(M::full_name()))
}

/// Merges two packed messages of one type.
///
/// # Errors
/// When they are of different types, of an unknown one, or cannot be decoded.
pub fn merge_any(base: &Any, patch: &Any) -> Result<Any, MergeError> {
    let mut merged = unpack(base)?;
    let patch = unpack(patch)?;
    expect_type(merged.descriptor().full_name(), patch.descriptor().full_name())?;
    merged
        .merge(encode(&patch).as_slice())
        .map_err(|_| MergeError::Broken(base.type_name().to_owned()))?;
    Ok(Any {
        type_url: base.type_url.clone(),
        value: merged.encode_to_vec().into(),
    })
}

/// The patch as a typed message.
///
/// # Errors
/// When it is of another type.
pub fn read<M: Message + Name + Default>(patch: &DynamicMessage) -> Result<M, MergeError> {
    expect_type(&M::full_name(), patch.descriptor().full_name())?;
    M::decode(patch.encode_to_vec().as_slice()).map_err(|_| MergeError::Broken(M::full_name()))
}

/// Decodes a packed message of any type that has a descriptor.
///
/// # Errors
/// When the type is unknown or the bytes are no such message.
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

/// The patch's bytes, with both halves of every duration that may meet another one. What stands in lists and maps meets
/// none: it is added as it is.
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
    // Numbers of the fields as every `Duration` has them.
    let seconds = duration.get_field_by_number(1).and_then(|value| value.as_i64());
    let nanos = duration.get_field_by_number(2).and_then(|value| value.as_i32());
    encoding::int64::encode(1, &seconds.unwrap_or_default(), &mut bytes);
    encoding::int32::encode(2, &nanos.unwrap_or_default(), &mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
