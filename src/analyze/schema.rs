//! The rules of each kind: what parsing reports, also to the validation webhook.
//!
//! Parity (pkg/config/analysis/analyzers/schema/validation.go).

use super::{
    mesh::Mesh,
    message::{Report, SCHEMA_ERROR, SCHEMA_WARNING},
    unreachable,
};
use crate::{
    api::{Diagnostic, Kind, Severity, diagnostics::REFUSED, document},
    base::ClusterId,
};

/// Reports the findings of parsing, and rules of VirtualServices without effect.
pub(super) fn validation(kind: Kind, mesh: &Mesh, report: &mut Report) {
    for object in mesh.of(kind) {
        let parsed = document::parse_object(&ClusterId::default(), kind, &object.manifest);
        for found in &parsed.diagnostics {
            let is_refused = found.severity == Severity::Error || found.code == REFUSED;
            let code = if is_refused { SCHEMA_ERROR } else { SCHEMA_WARNING };
            report.add(code, object, text(found));
        }
        if kind == Kind::VirtualService {
            for (code, text) in unreachable::findings(object) {
                report.add(code, object, text);
            }
        }
    }
}

fn text(found: &Diagnostic) -> String {
    match found.field.as_str() {
        "" => found.message.clone(),
        field => format!("{field}: {}", found.message),
    }
}
