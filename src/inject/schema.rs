//! The types of Kubernetes' API as injection needs them: which fields a struct has, how lists merge, and what Go's JSON
//! omits. One table (`schema/types.txt`) serves templates, merging and output.

mod canonical;
mod quantity;

use std::{collections::BTreeMap, sync::LazyLock};

pub use canonical::TypeError;
pub(super) use canonical::{Form, canonical};
pub(super) use quantity::canonical as canonical_quantity;

/// A struct of Kubernetes' API.
pub(super) struct Struct {
    /// Name in Go, such as `Container`.
    pub(super) name: &'static str,
    /// Fields in the order of Go's struct.
    pub(super) fields: Vec<Field>,
}

/// A field of a struct.
pub(super) struct Field {
    /// Name in JSON.
    pub(super) json: &'static str,
    /// Name in Go.
    pub(super) go: String,
    /// Type.
    pub(super) of: Type,
    /// The treatment in a strategic merge patch.
    pub(super) merge: Merge,
    /// Presence in JSON.
    pub(super) presence: Presence,
}

/// Presence of an empty field in Go's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// Omitted if empty.
    Optional,
    /// Always written.
    Required,
}

/// The treatment of a field in a strategic merge patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merge {
    /// The patch replaces it.
    Replace,
    /// Elements are merged by a key.
    Key(&'static str),
    /// Scalars are united.
    Scalars,
    /// An object that the patch replaces.
    Whole,
}

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Type {
    String,
    Bool,
    Int32,
    Int64,
    Quantity,
    IntOrString,
    Time,
    Any,
    Struct(&'static str),
    Pointer(Box<Type>),
    List(Box<Type>),
    Map(Box<Type>),
}

impl Struct {
    /// Returns the field of a name in JSON.
    pub(super) fn field(&self, json: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.json == json)
    }
}

impl Type {
    /// Returns the struct behind pointers, lists and maps.
    pub(super) fn target(&self) -> Option<&'static Struct> {
        match self {
            Self::Struct(name) => Some(of(name)),
            Self::Pointer(inner) | Self::List(inner) | Self::Map(inner) => inner.target(),
            _ => None,
        }
    }

    fn parse(text: &'static str) -> Self {
        if let Some(inner) = text.strip_prefix('*') {
            return Self::Pointer(Box::new(Self::parse(inner)));
        }
        if let Some(inner) = text.strip_prefix("[]") {
            return Self::List(Box::new(Self::parse(inner)));
        }
        if let Some(inner) = text.strip_prefix("map.") {
            return Self::Map(Box::new(Self::parse(inner)));
        }
        match text {
            "string" => Self::String,
            "bool" => Self::Bool,
            "int32" => Self::Int32,
            "int64" => Self::Int64,
            "quantity" => Self::Quantity,
            "intOrString" => Self::IntOrString,
            "time" => Self::Time,
            "any" => Self::Any,
            name => Self::Struct(name),
        }
    }
}

/// Returns a struct of the table.
///
/// # Panics
/// If the table does not have it; names are constants.
pub(super) fn of(name: &str) -> &'static Struct {
    find(name).expect("because a test resolves all types of the table")
}

/// Returns a struct of the table, if it has one of the name.
pub(super) fn find(name: &str) -> Option<&'static Struct> {
    static TYPES: LazyLock<BTreeMap<&'static str, Struct>> = LazyLock::new(|| parse(include_str!("schema/types.txt")));
    TYPES.get(name)
}

fn parse(text: &'static str) -> BTreeMap<&'static str, Struct> {
    let mut types: BTreeMap<&'static str, Struct> = BTreeMap::new();
    let mut current = "";
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        if !line.starts_with(' ') {
            current = words.next().unwrap_or(current);
        }
        if current.is_empty() {
            continue;
        }
        let fields = &mut types
            .entry(current)
            .or_insert_with(|| Struct {
                name: current,
                fields: Vec::new(),
            })
            .fields;
        fields.extend(words.filter_map(Field::parse));
    }
    types
}

impl Field {
    fn parse(text: &'static str) -> Option<Self> {
        let (name, of) = text.split_once(':')?;
        let (name, presence) = match name.strip_suffix('!') {
            Some(name) => (name, Presence::Required),
            None => (name, Presence::Optional),
        };
        let (name, merge) = if let Some((name, key)) = name.split_once('@') {
            (name, Merge::Key(key))
        } else if let Some(name) = name.strip_suffix('+') {
            (name, Merge::Scalars)
        } else if let Some(name) = name.strip_suffix('^') {
            (name, Merge::Whole)
        } else {
            (name, Merge::Replace)
        };
        let (json, go) = match name.split_once('=') {
            Some((json, go)) => (json, go.to_owned()),
            None => (name, capitalized(name)),
        };
        Some(Self {
            json,
            go,
            of: Type::parse(of),
            merge,
            presence,
        })
    }
}

fn capitalized(name: &str) -> String {
    let mut characters = name.chars();
    let first = characters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(characters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(of: &Type) {
        match of {
            Type::Struct(name) => assert!(find(name).is_some(), "{name} is not in the table"),
            Type::Pointer(inner) | Type::List(inner) | Type::Map(inner) => resolve(inner),
            _ => {}
        }
    }

    #[test]
    fn all_types_resolve() {
        let types = parse(include_str!("schema/types.txt"));
        assert!(types.len() > 50, "{}", types.len());
        for field in types.values().flat_map(|it| &it.fields) {
            resolve(&field.of);
            if let Merge::Key(key) = field.merge {
                let element = field.of.target().expect("lists with keys hold structs");
                assert!(element.field(key).is_some(), "{}: no {key}", field.json);
            }
        }
    }

    #[test]
    fn fields_have_names_of_go() {
        let container = of("Container");
        assert_eq!(container.field("tty").map(|field| field.go.as_str()), Some("TTY"));
        assert_eq!(
            container.field("imagePullPolicy").map(|field| field.go.as_str()),
            Some("ImagePullPolicy")
        );
        assert_eq!(
            container.field("env").map(|field| field.merge),
            Some(Merge::Key("name"))
        );
    }
}
