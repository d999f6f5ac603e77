//! Istio's kinds: `spec` as the API's message, checked as Istio's admission checks it.

use serde_json::Value;

use super::{Config, Diagnostic, FieldError, Kind, Meta, Row, Severity, unknown::unknown_fields};
use crate::{
    base::Shared,
    proto::{
        descriptor_pool,
        json::{Unknown, from_json},
    },
};

/// The served versions of an Istio kind; empty for other kinds.
pub fn served_versions(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::DestinationRule
        | Kind::Gateway
        | Kind::ServiceEntry
        | Kind::Sidecar
        | Kind::VirtualService
        | Kind::WorkloadEntry
        | Kind::WorkloadGroup => &["v1", "v1beta1", "v1alpha3"],
        Kind::EnvoyFilter => &["v1alpha3"],
        Kind::ProxyConfig => &["v1beta1"],
        Kind::AuthorizationPolicy | Kind::PeerAuthentication | Kind::RequestAuthentication => &["v1", "v1beta1"],
        Kind::Telemetry => &["v1", "v1alpha1"],
        Kind::WasmPlugin | Kind::TrafficExtension => &["v1alpha1"],
        _ => &[],
    }
}

/// What checks find out about one object.
#[derive(Debug, Default)]
pub struct Findings {
    /// The object does not count.
    pub errors: Vec<FieldError>,
    /// It counts, but likely not as it was meant.
    pub warnings: Vec<FieldError>,
}

impl Findings {
    /// Records why the object does not count.
    pub fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.errors.push(FieldError {
            field: field.into(),
            message: message.into(),
        });
    }

    /// Records what is likely a mistake.
    pub fn warning(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(FieldError {
            field: field.into(),
            message: message.into(),
        });
    }

    /// The findings as diagnostics of an object.
    pub fn diagnostics(self, meta: &Meta) -> Vec<Diagnostic> {
        let of = |severity, code, finding| Diagnostic::of_object(meta.kind, meta.key.clone(), severity, code, finding);
        let errors = self
            .errors
            .into_iter()
            .map(|error| of(Severity::Error, "InvalidField", error));
        let warnings = self
            .warnings
            .into_iter()
            .map(|warning| of(Severity::Warning, "Suspicious", warning));
        errors.chain(warnings).collect()
    }
}

/// Parses and checks an object of an Istio kind (its whole manifest). No row: there is an error among the diagnostics.
///
/// # Panics
/// When the kind is not one of Istio's.
pub fn parse(meta: Shared<Meta>, object: &Value) -> (Option<Row>, Vec<Diagnostic>) {
    macro_rules! by_kind {
        ($($kind:ident,)*) => {
            match meta.kind {
                $(Kind::$kind => config(meta, object, |config| Row::$kind(Shared::new(config)), |_, _, _| {}),)*
                other => unreachable!("{} is none of Istio's kinds", other.name()),
            }
        };
    }
    by_kind! {
        DestinationRule, EnvoyFilter, Gateway, ProxyConfig, ServiceEntry, Sidecar, VirtualService, WorkloadEntry,
        WorkloadGroup, AuthorizationPolicy, PeerAuthentication, RequestAuthentication, Telemetry, WasmPlugin,
        TrafficExtension,
    }
}

fn config<M: prost::Message + prost::Name + Default>(
    meta: Shared<Meta>,
    object: &Value,
    row: impl FnOnce(Config<M>) -> Row,
    check: impl FnOnce(&M, &Meta, &mut Findings),
) -> (Option<Row>, Vec<Diagnostic>) {
    let mut findings = Findings::default();
    let empty = Value::Object(serde_json::Map::new());
    let spec = match &object["spec"] {
        Value::Null => &empty,
        spec => spec,
    };
    let descriptor = descriptor_pool()
        .get_message_by_name(&M::full_name())
        .expect("because every message of the API is in the pool");
    for path in unknown_fields(&descriptor, spec) {
        findings.warning(format!("spec.{path}"), "is no field of this kind and has no effect");
    }
    let row = match from_json::<M>(spec, Unknown::Ignore) {
        Ok(spec) => {
            check(&spec, &meta, &mut findings);
            let status = Some(&object["status"]).filter(|status| !status.is_null() && reads_status(meta.kind));
            let status = status.cloned().map(Shared::new);
            findings.errors.is_empty().then(|| {
                row(Config {
                    meta: meta.clone(),
                    spec,
                    status,
                })
            })
        }
        Err(error) => {
            let field = if error.path.is_empty() {
                "spec".to_owned()
            } else {
                format!("spec.{}", error.path)
            };
            findings.error(field, error.message);
            None
        }
    };
    (row, findings.diagnostics(&meta))
}

/// True for kinds whose `status` the model reads: addresses given to ServiceEntries, health of WorkloadEntries.
fn reads_status(kind: Kind) -> bool {
    matches!(kind, Kind::ServiceEntry | Kind::WorkloadEntry)
}
