//! The rules of each kind: what parsing reports, also to the validation webhook.
//!
//! Parity (pkg/config/analysis/analyzers/schema/validation.go).

use super::{
    mesh::Mesh,
    message::{INEFFECTIVE_MATCH, Report, SCHEMA_ERROR, SCHEMA_WARNING, UNREACHABLE_RULE},
};
use crate::{
    api::{
        Diagnostic, Kind, Severity,
        diagnostics::{INEFFECTIVE, REFUSED, UNREACHABLE},
        document,
    },
    base::ClusterId,
};

/// Reports the findings of parsing.
pub(super) fn validation(kind: Kind, mesh: &Mesh, report: &mut Report) {
    for object in mesh.of(kind) {
        let parsed = document::parse_object(&ClusterId::default(), kind, &object.manifest);
        for found in &parsed.diagnostics {
            let code = match found.code.as_str() {
                UNREACHABLE => UNREACHABLE_RULE,
                INEFFECTIVE => INEFFECTIVE_MATCH,
                REFUSED => SCHEMA_ERROR,
                _ if found.severity == Severity::Error => SCHEMA_ERROR,
                _ => SCHEMA_WARNING,
            };
            report.add(code, object, text(found));
        }
    }
}

fn text(found: &Diagnostic) -> String {
    match found.field.as_str() {
        "" => found.message.clone(),
        field => format!("{field}: {}", found.message),
    }
}
