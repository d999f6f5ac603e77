//! Types of Go as templates see them: in the signatures of functions, and in the texts of errors.

use std::{fmt, sync::Arc};

/// The sizes of signed integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum IntType {
    /// `int`, of 64 bits.
    Int,
    /// `int8`.
    Int8,
    /// `int16`.
    Int16,
    /// `int32`.
    Int32,
    /// `int64`.
    Int64,
}

/// The sizes of unsigned integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UintType {
    /// `uint`, of 64 bits.
    Uint,
    /// `uint8`.
    Uint8,
    /// `uint16`.
    Uint16,
    /// `uint32`.
    Uint32,
    /// `uint64`.
    Uint64,
}

/// A type of Go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `interface {}`: any value, also nil.
    Any,
    /// `reflect.Value`, as a parameter: any value, also a missing one.
    Reflect,
    /// `bool`.
    Bool,
    /// A signed integer.
    Int(IntType),
    /// An unsigned integer.
    Uint(UintType),
    /// `float32`.
    Float32,
    /// `float64`.
    Float64,
    /// `complex128`.
    Complex,
    /// `string`.
    String,
    /// A slice with elements of a type.
    List(Arc<Type>),
    /// A map from strings to values of a type.
    Map(Arc<Type>),
    /// A pointer to a type.
    Pointer(Arc<Type>),
    /// A type by its name, such as `v1.Pod`.
    Named(Arc<str>),
    /// A function by its signature, such as `func(string) bool`.
    Function(Arc<str>),
}

impl Type {
    /// `int`.
    pub const INT: Self = Self::Int(IntType::Int);
    /// `int64`.
    pub const INT64: Self = Self::Int(IntType::Int64);

    /// Returns the type of slices with elements of this type.
    pub fn list(self) -> Self {
        Self::List(Arc::new(self))
    }

    /// Returns the type of maps from strings to this type.
    pub fn map(self) -> Self {
        Self::Map(Arc::new(self))
    }

    /// Returns the type of pointers to this type.
    pub fn pointer(self) -> Self {
        Self::Pointer(Arc::new(self))
    }

    /// Returns a type by its name.
    pub fn named(name: &str) -> Self {
        Self::Named(name.into())
    }

    /// Returns true for types whose zero value is nil.
    pub(super) fn can_be_nil(&self) -> bool {
        matches!(
            self,
            Self::Any | Self::Reflect | Self::List(_) | Self::Map(_) | Self::Pointer(_) | Self::Function(_)
        )
    }

    /// Returns true if a value of this type can be assigned to a variable of another.
    pub(super) fn assignable_to(&self, target: &Self) -> bool {
        matches!(target, Self::Any | Self::Reflect) || self == target
    }
}

impl fmt::Display for Type {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => formatter.write_str("interface {}"),
            Self::Reflect => formatter.write_str("reflect.Value"),
            Self::Bool => formatter.write_str("bool"),
            Self::Int(size) => formatter.write_str(size.name()),
            Self::Uint(size) => formatter.write_str(size.name()),
            Self::Float32 => formatter.write_str("float32"),
            Self::Float64 => formatter.write_str("float64"),
            Self::Complex => formatter.write_str("complex128"),
            Self::String => formatter.write_str("string"),
            Self::List(element) => write!(formatter, "[]{element}"),
            Self::Map(element) => write!(formatter, "map[string]{element}"),
            Self::Pointer(target) => write!(formatter, "*{target}"),
            Self::Named(name) | Self::Function(name) => formatter.write_str(name),
        }
    }
}

impl IntType {
    /// Returns Go's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int => "int",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
        }
    }

    /// Returns the low bits of a number, as a conversion in Go does.
    pub(super) fn wrap(self, number: i64) -> i64 {
        match self {
            Self::Int | Self::Int64 => number,
            Self::Int8 => i64::from(number as i8),
            Self::Int16 => i64::from(number as i16),
            Self::Int32 => i64::from(number as i32),
        }
    }
}

impl UintType {
    /// Returns Go's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uint => "uint",
            Self::Uint8 => "uint8",
            Self::Uint16 => "uint16",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
        }
    }

    /// Returns the low bits of a number, as a conversion in Go does.
    pub(super) fn wrap(self, number: u64) -> u64 {
        match self {
            Self::Uint | Self::Uint64 => number,
            Self::Uint8 => u64::from(number as u8),
            Self::Uint16 => u64::from(number as u16),
            Self::Uint32 => u64::from(number as u32),
        }
    }
}
