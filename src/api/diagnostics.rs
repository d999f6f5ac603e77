//! Diagnostics of users' configuration, as data.

use std::fmt;

use smol_str::SmolStr;

use super::Kind;
use crate::base::ObjectKey;

/// Code of an error in a field: it breaks a rule of its kind.
pub const INVALID: &str = "InvalidField";
/// Code of an error in a field: it has a wrong type.
pub const MALFORMED: &str = "MalformedField";
/// Code of a warning: the object applies, but admission refuses it.
pub const REFUSED: &str = "RefusedOnAdmission";
/// Code of a warning: the object applies, but likely not as the user meant.
pub const SUSPICIOUS: &str = "Suspicious";
/// Code of a warning: a rule that no request reaches.
pub const UNREACHABLE: &str = "UnreachableRule";
/// Code of a warning: a match that earlier ones cover.
pub const INEFFECTIVE: &str = "IneffectiveMatch";

/// The severity of a diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The object applies, but likely not as the user meant.
    Warning,
    /// The object, or the named part of it, does not apply.
    Error,
}

/// A problem of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Diagnostic {
    /// The kind of the object; `None` if the document does not state it.
    pub kind: Option<Kind>,
    /// The object.
    pub key: ObjectKey,
    /// The field, as a path like `spec.http[0].route`; empty for the object as a whole.
    pub field: String,
    /// A short stable code for programs, such as `InvalidField`.
    pub code: SmolStr,
    /// The severity.
    pub severity: Severity,
    /// The reason, for people.
    pub message: String,
    /// The position `file.yaml:12`; empty for objects that do not come from a file.
    pub place: SmolStr,
}

impl Diagnostic {
    /// Returns a diagnostic of a document whose kind and name are unknown.
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

    /// Returns a diagnostic of an object.
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

    /// Sets the position.
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
