//! `exportTo` as written, read against the mesh's default.

use std::collections::BTreeSet;

use super::service::ExportTo;
use crate::base::Namespace;

/// The audience of an object: `*` outweighs `~`, and `~` all the rest; `.` is the own namespace. An empty list means the
/// mesh's default, and that, when empty, everybody.
pub fn read(written: &[String], default: &[String], own: &Namespace) -> ExportTo {
    let values = if written.is_empty() { default } else { written };
    let has = |wanted: &str| values.iter().any(|value| value == wanted);
    if values.is_empty() || has("*") {
        return ExportTo::Public;
    }
    if has("~") {
        return ExportTo::Nobody;
    }
    ExportTo::Namespaces(namespaces(values, own))
}

/// The namespaces in a list, `.` replaced.
pub fn namespaces(values: &[String], own: &Namespace) -> BTreeSet<Namespace> {
    let resolved = |value: &String| match value.as_str() {
        "." => own.clone(),
        namespace => Namespace::new(namespace),
    };
    values.iter().map(resolved).collect()
}
