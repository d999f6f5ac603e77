//! Protobuf messages inside keys: compared and hashed by their bytes, since messages are neither `Eq` nor `Hash`.

use std::{fmt, hash, ops};

use bytes::Bytes;
use prost::Message;

use super::Shared;

/// A message with its encoding, which is used for comparisons. Maps are ordered, so equal messages have equal bytes.
pub struct MessageKey<M> {
    bytes: Bytes,
    message: Shared<M>,
}

impl<M: Message> MessageKey<M> {
    /// Encodes and shares a message.
    pub fn new(message: M) -> Self {
        Self {
            bytes: message.encode_to_vec().into(),
            message: message.into(),
        }
    }
}

impl<M> Clone for MessageKey<M> {
    fn clone(&self) -> Self {
        Self {
            bytes: self.bytes.clone(),
            message: self.message.clone(),
        }
    }
}

impl<M> ops::Deref for MessageKey<M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.message
    }
}

impl<M> PartialEq for MessageKey<M> {
    fn eq(&self, other: &Self) -> bool {
        self.message.ptr_eq(&other.message) || self.bytes == other.bytes
    }
}

impl<M> Eq for MessageKey<M> {}

impl<M> hash::Hash for MessageKey<M> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

impl<M: fmt::Debug> fmt::Debug for MessageKey<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self.message).fmt(f)
    }
}
