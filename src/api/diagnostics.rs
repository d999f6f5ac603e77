//! What is wrong with users' config, as data beside the rows.

use std::fmt;

use smol_str::SmolStr;

use super::Kind;
use crate::base::ObjectKey;

/// How bad a diagnostic is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The object counts, but something in it is likely not what the user meant.
    Warning,
    /// The object, or the named part of it, does not count.
    Error,
}

/// One finding about one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Diagnostic {
    /// The kind of the object; `None` when the document does not tell.
    pub kind: Option<Kind>,
    /// The object.
    pub key: ObjectKey,
    /// The field, as a path like `spec.http[0].route`; empty for the object as a whole.
    pub field: String,
    /// A short stable word for programs, such as `InvalidField`.
    pub code: SmolStr,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong, for people.
    pub message: String,
    /// Where it was read: `file.yaml:12`; empty for objects that do not come from a file.
    pub place: SmolStr,
}

impl Diagnostic {
    /// A finding about a document whose kind and name are not known.
    pub fn of_document(place: impl Into<SmolStr>, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: None,
            key: ObjectKey::default(),
            field: String::new(),
            code: SmolStr::new_static(code),
            severity: Severity::Error,
            message: message.into(),
            place: place.into(),
        }
    }

    /// A finding about an object.
    pub fn of_object(
        kind: Kind,
        key: ObjectKey,
        severity: Severity,
        code: &'static str,
        finding: super::FieldError,
    ) -> Self {
        Self {
            kind: Some(kind),
            key,
            field: finding.field,
            code: SmolStr::new_static(code),
            severity,
            message: finding.message,
            place: SmolStr::default(),
        }
    }

    /// The same finding, read at a place.
    pub fn at(mut self, place: &SmolStr) -> Self {
        self.place = place.clone();
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        if let Some(kind) = self.kind {
            write!(f, "{} {}: ", kind.name(), self.key)?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}
