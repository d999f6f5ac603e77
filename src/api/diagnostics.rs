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
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.map_or("object", Kind::name);
        write!(f, "{kind} {}: ", self.key)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}
