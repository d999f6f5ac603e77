//! Templates of Go: the language of `text/template` with the functions of sprig, for templates that users write.
//!
//! A template renders what Go would render, and its errors have Go's texts with the name of the template, the line and
//! the column. The module knows nothing of the data: callers register functions ([`Functions`]) and pass values
//! ([`Value`]), which may be typed structs with methods ([`Object`]).
//!
//! Templates are not trusted. [`Limits`] bound everything that a template can consume, and no input panics. Functions
//! reach the clock, randomness and the environment only through a [`Host`].

use std::{collections::BTreeMap, fmt, sync::Arc};

mod builtin;
mod execute;
mod format;
mod json;
mod lexer;
mod limits;
mod node;
mod number;
mod parser;
mod quote;
mod sprig;
mod text;
mod types;
mod value;

pub use format::{display, print, printf};
pub use json::{Escapes, Layout, decode as decode_json, encode as encode_json};
pub use limits::{Exceeded, Failure, Host, Limits, NoHost};
pub use sprig::duration_text;
pub use text::Text;
pub use types::{IntType, Type, UintType};
pub use value::{Context, Entries, Function, Functions, Kind, List, Map, Object, Value};

/// Returns the functions of `text/template`.
pub fn builtin_functions() -> Functions {
    builtin::functions()
}

/// Returns the functions of `text/template` and sprig. Where both have a function, sprig's takes its place.
pub fn sprig_functions() -> Functions {
    let mut functions = builtin_functions();
    sprig::add(&mut functions);
    functions
}

/// The value of a key that a map does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingKey {
    /// No value, which prints as `<no value>`: Go's default.
    #[default]
    Invalid,
    /// The zero value of the map's type.
    Zero,
    /// An error.
    Error,
}

/// The reason why a template cannot be parsed or rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The text is no template.
    Parse,
    /// The template does not fit its data, or a function failed.
    Execute,
    /// The template exceeded a limit.
    Limit(Exceeded),
}

/// An error of parsing or rendering. It prints as in Go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The reason.
    pub kind: ErrorKind,
    /// The text.
    pub message: String,
    /// The name of the template whose text has the error.
    pub template: String,
    /// The line in the text, from 1; 0 if the error has no place.
    pub line: usize,
    /// The column in bytes, from 0. Errors of parsing have none.
    pub column: usize,
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// A template, ready for rendering.
struct Tree {
    name: Text,
    list: node::List,
    source: Arc<node::Source>,
}

/// Templates that can call each other by name. They do not change while they render, so threads may share them.
pub struct Templates {
    functions: Functions,
    limits: Limits,
    missing_key: MissingKey,
    trees: BTreeMap<Text, Arc<Tree>>,
    /// The name of the variable that has the data.
    root: Text,
}

impl Templates {
    /// Creates an empty group. Functions have to be known before templates are parsed.
    pub fn new(functions: Functions, limits: Limits) -> Self {
        Self {
            functions,
            limits,
            missing_key: MissingKey::default(),
            trees: BTreeMap::new(),
            root: "$".into(),
        }
    }

    /// Sets the value of keys that maps do not have.
    #[must_use]
    pub fn with_missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Returns the limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Parses a text as the template of a name, with all templates that it defines. On an error nothing changes. An
    /// empty template does not replace another one.
    pub fn parse(&mut self, name: &str, text: &str) -> Result<(), Error> {
        let source = Arc::new(node::Source {
            name: name.into(),
            text: text.into(),
        });
        let definitions = parser::parse(&source, &self.functions, &self.limits).map_err(|error| Error {
            kind: error.limit.map_or(ErrorKind::Parse, ErrorKind::Limit),
            message: error.message,
            template: name.to_owned(),
            line: error.line,
            column: 0,
        })?;
        for definition in definitions {
            if definition.is_empty() && self.trees.contains_key(&definition.name) {
                continue;
            }
            let tree = Tree {
                name: definition.name.clone(),
                list: definition.list,
                source: source.clone(),
            };
            self.trees.insert(definition.name, Arc::new(tree));
        }
        Ok(())
    }

    /// Returns the names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &Text> {
        self.trees.keys()
    }

    /// Renders a template with data as `.` and `$`. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// Functions such as `set` change maps of the data, as in Go, but only for this rendering.
    pub fn render(&self, name: &str, data: &Value, host: &dyn Host) -> Result<String, Error> {
        let Some(tree) = self.trees.get(name.as_bytes()) else {
            let shown = quote::quote(name.as_bytes(), quote::Charset::Unicode);
            return Err(Error {
                kind: ErrorKind::Execute,
                message: format!("template: no template {shown}"),
                template: name.to_owned(),
                line: 0,
                column: 0,
            });
        };
        let mut context = Context::new(&self.limits, host);
        let bytes = execute::render(self, tree, data, &mut context)?;
        Ok(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        })
    }

    fn tree(&self, name: &Text) -> Option<&Tree> {
        self.trees.get(name).map(AsRef::as_ref)
    }
}
