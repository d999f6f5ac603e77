//! `exportTo`, resolved with the mesh's default.

use std::collections::BTreeSet;

use crate::base::Namespace;

/// Visibility of a config object, from `exportTo`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExportTo {
    /// `*`.
    Public,
    /// `~`: no namespace.
    None,
    /// These namespaces (with `.` replaced by the own namespace).
    Namespaces(BTreeSet<Namespace>),
}

impl ExportTo {
    /// Returns true if the namespace sees the object.
    pub fn visible_to(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Public => true,
            Self::None => false,
            Self::Namespaces(namespaces) => namespaces.contains(namespace),
        }
    }
}

/// Returns the visibility of an object: `*` takes precedence over `~`, and `~` over all others; `.` is the own
/// namespace. An empty list means the mesh's default; if that is empty, public. An empty element, as in the annotation
/// `a,`, names no namespace.
pub fn read(written: &[String], default: &[String], own: &Namespace) -> ExportTo {
    let values = if written.is_empty() { default } else { written };
    let has = |expected: &str| values.iter().any(|value| value == expected);
    if values.is_empty() || has("*") {
        return ExportTo::Public;
    }
    if has("~") {
        return ExportTo::None;
    }
    let namespaces = namespaces(values, own);
    if namespaces.is_empty() {
        return ExportTo::None;
    }
    ExportTo::Namespaces(namespaces)
}

/// Returns the namespaces in a list, with `.` replaced. Empty elements must not become namespaces, because the scope
/// that most namespaces have in common is that of the empty one.
fn namespaces(values: &[String], own: &Namespace) -> BTreeSet<Namespace> {
    let resolved = |value: &String| match value.as_str() {
        "." => own.clone(),
        namespace => Namespace::new(namespace),
    };
    let named = values.iter().filter(|value| !value.is_empty());
    named.map(resolved).collect()
}
