//! Typed field numbers, for messages that are encoded without their Rust types. The build makes the constants from the
//! descriptors; a field cannot be written into another message, nor with a value of another kind.

use std::marker::PhantomData;

use prost::Message;

/// A field of the message `M` with values of the kind `K`: one of the kinds below, or a message.
pub struct Field<M, K> {
    number: u32,
    position: u32,
    types: PhantomData<fn(M) -> K>,
}

impl<M, K> Field<M, K> {
    const fn new(number: u32, position: u32) -> Self {
        Self {
            number,
            position,
            types: PhantomData,
        }
    }

    /// Returns the field number.
    pub const fn number(self) -> u32 {
        self.number
    }

    /// Returns the field's place in the order of encoding: see [`MessageFields::position`].
    pub const fn position(self) -> u32 {
        self.position
    }
}

impl<M, K> Clone for Field<M, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M, K> Copy for Field<M, K> {}

/// A message with field constants.
pub trait MessageFields: Message + Default {
    /// The type URL in an `Any`.
    const TYPE_URL: &'static str;

    /// Returns a field's place in the order of encoding: its number, or the lowest number of its oneof.
    fn position(number: u32) -> u32;
}

/// A text that is not encoded if it is empty.
pub enum Text {}
/// A text that is encoded even if it is empty: a member of a oneof, or an element of a list.
pub enum ExplicitText {}
/// A `uint32`, an enum or a boolean that is not encoded if it is 0.
pub enum Number {}
/// A `uint32`, an enum or a boolean that is encoded even if it is 0: a member of a oneof.
pub enum ExplicitNumber {}
/// A `google.protobuf.UInt32Value` or `BoolValue`.
pub enum Wrapper {}
/// Bytes that are not encoded if they are empty.
pub enum Blob {}
/// A map from texts to messages.
pub struct Map<V>(PhantomData<V>);
/// A kind that nothing writes without the Rust type.
pub enum Unsupported {}

/// Kinds of texts.
pub trait TextKind {
    /// True if empty texts are encoded.
    const EXPLICIT: bool;
}

impl TextKind for Text {
    const EXPLICIT: bool = false;
}

impl TextKind for ExplicitText {
    const EXPLICIT: bool = true;
}

/// Kinds of numbers.
pub trait NumberKind {
    /// True if 0 is encoded.
    const EXPLICIT: bool;
}

impl NumberKind for Number {
    const EXPLICIT: bool = false;
}

impl NumberKind for ExplicitNumber {
    const EXPLICIT: bool = true;
}

pub use constants::*;

// Generated code has the generator's style.
#[allow(clippy::all, clippy::pedantic, unreachable_pub)]
mod constants {
    use super::{Blob, ExplicitNumber, ExplicitText, Field, Map, MessageFields, Number, Text, Unsupported, Wrapper};

    include!(concat!(env!("OUT_DIR"), "/fields.rs"));
}
