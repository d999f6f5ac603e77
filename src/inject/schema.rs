//! The types of Kubernetes' API as injection needs them: which fields a struct has, how lists merge, and what Go's JSON
//! omits. One table (`schema/types.txt`) serves templates, merging and output.

mod canonical;
mod quantity;

use std::{collections::BTreeMap, sync::LazyLock};

pub use canonical::TypeError;
pub(super) use canonical::{Form, canonical};
pub(super) use quantity::{canonical as canonical_quantity, in_nanos as quantity_in_nanos};

/// A struct of Kubernetes' API.
pub(super) struct Struct {
    /// Name in Go, such as `Container`.
    pub(super) name: &'static str,
    /// Fields in the order of Go's struct, with those of embedded structs.
    pub(super) fields: Vec<Field>,
    /// Structs that Go embeds, whose fields are also those of this one.
    pub(super) embedded: Vec<Struct>,
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
    Struct(StructRef),
    Pointer(Box<Type>),
    List(Box<Type>),
    Map(Box<Type>),
}

/// A reference to a struct of the table, by its position: conversions follow references for each value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StructRef(usize);

impl StructRef {
    fn find(name: &str) -> Option<Self> {
        TABLE.positions.get(name).copied()
    }

    /// Returns the struct.
    pub(super) fn get(self) -> &'static Struct {
        &TABLE.structs[self.0]
    }
}

impl Struct {
    /// Returns the field of a name in JSON.
    pub(super) fn field(&self, json: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.json == json)
    }

    fn new(name: &'static str) -> Self {
        Self {
            name,
            fields: Vec::new(),
            embedded: Vec::new(),
        }
    }

    /// Adds a field, or begins or ends an embedded struct.
    fn add(&mut self, word: &'static str, is_embedded: &mut bool, positions: &Positions) {
        if let Some(name) = word.strip_suffix('(') {
            self.embedded.push(Self::new(name));
            *is_embedded = true;
        }
        *is_embedded &= word != ")";
        self.fields.extend(Field::parse(word, positions));
        if let Some(part) = self.embedded.last_mut().filter(|_| *is_embedded) {
            part.fields.extend(Field::parse(word, positions));
        }
    }
}

impl Type {
    /// Returns the struct behind pointers, lists and maps.
    pub(super) fn target(&self) -> Option<&'static Struct> {
        match self {
            Self::Struct(kind) => Some(kind.get()),
            Self::Pointer(inner) | Self::List(inner) | Self::Map(inner) => inner.target(),
            _ => None,
        }
    }

    fn parse(text: &'static str, positions: &Positions) -> Self {
        let boxed = |inner| Box::new(Self::parse(inner, positions));
        if let Some(inner) = text.strip_prefix('*') {
            return Self::Pointer(boxed(inner));
        }
        if let Some(inner) = text.strip_prefix("[]") {
            return Self::List(boxed(inner));
        }
        if let Some(inner) = text.strip_prefix("map.") {
            return Self::Map(boxed(inner));
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
            name => Self::Struct(
                *positions
                    .get(name)
                    .expect("because a test resolves all types of the table"),
            ),
        }
    }
}

/// The structs by name.
type Positions = BTreeMap<&'static str, StructRef>;

/// All structs.
struct Table {
    positions: Positions,
    structs: Vec<Struct>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| Table::parse(include_str!("schema/types.txt")));

/// Returns a struct of the table.
///
/// # Panics
/// If the table does not have it; names are constants.
pub(super) fn of(name: &str) -> &'static Struct {
    find(name).expect("because a test resolves all types of the table")
}

/// Returns a struct of the table, if it has one of the name.
pub(super) fn find(name: &str) -> Option<&'static Struct> {
    StructRef::find(name).map(StructRef::get)
}

impl Table {
    fn parse(text: &'static str) -> Self {
        let lines = || text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let begins = |line: &str| !line.starts_with(' ');
        let names = lines()
            .filter(|line| begins(line))
            .filter_map(|line| line.split_whitespace().next());
        let positions: Positions = names
            .enumerate()
            .map(|(index, name)| (name, StructRef(index)))
            .collect();
        let mut structs: Vec<Struct> = Vec::new();
        let mut is_embedded = false;
        for line in lines() {
            let mut words = line.split_whitespace();
            if begins(line) {
                structs.extend(words.next().map(Struct::new));
            }
            if let Some(current) = structs.last_mut() {
                for word in words {
                    current.add(word, &mut is_embedded, &positions);
                }
            }
        }
        Self { positions, structs }
    }
}

impl Field {
    fn parse(text: &'static str, positions: &Positions) -> Option<Self> {
        let (name, type_text) = text.split_once(':')?;
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
            of: Type::parse(type_text, positions),
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

    #[test]
    fn all_types_resolve() {
        assert!(TABLE.structs.len() > 50, "{}", TABLE.structs.len());
        assert_eq!(TABLE.structs.len(), TABLE.positions.len(), "no struct is there twice");
        for field in TABLE.structs.iter().flat_map(|it| &it.fields) {
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
