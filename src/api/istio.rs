//! Istio's kinds: `spec` as the API's message, checked as Istio's admission checks it.

pub mod check;
pub mod common;
pub mod destination_rule;
pub mod envoy_filter;
pub mod extension;
pub mod gateway;
pub mod security;
pub mod service_entry;
pub mod sidecar;
pub mod telemetry;
pub mod traffic_policy;
pub mod virtual_service;
pub mod workload;

use std::{cell::RefCell, collections::BTreeMap};

use serde_json::Value;

use self::check::At;
use super::{
    Config, Diagnostic, FieldError, Kind, Meta, Row, Severity,
    regex::{self, RegexError},
    unknown::unknown_fields,
};
use crate::{
    base::Shared,
    proto::{
        descriptor_pool,
        istio::networking::v1beta1 as networking_v1beta1,
        json::{Unknown, from_json},
    },
};

/// What checks find out about one object.
#[derive(Debug, Default)]
pub struct Findings {
    /// The object does not count; of policies, the named part does not.
    pub errors: Vec<FieldError>,
    /// It counts, but likely not as it was meant.
    pub warnings: Vec<FieldError>,
    /// The object counts in spite of errors, so that they can tell all that admission refuses.
    pub counts_with_errors: bool,
    /// The regular expressions that were compiled, with what is wrong with them.
    expressions: BTreeMap<String, Option<RegexError>>,
}

/// How many different regular expressions of an object are compiled: each may cost a millisecond, and an object has room
/// for ten thousand.
const MAX_EXPRESSIONS: usize = 64;

/// What becomes of a regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Proxies compile it; after [`MAX_EXPRESSIONS`] of these only the length is checked.
    Sent,
    /// It is kept compiled; there may be no more than [`MAX_EXPRESSIONS`] of these.
    Kept,
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

    /// Checks a regular expression, each only once.
    pub fn expression(&mut self, expression: &str, usage: Usage) -> Result<(), RegexError> {
        regex::check_length(expression)?;
        if let Some(known) = self.expressions.get(expression) {
            return known.clone().map_or(Ok(()), Err);
        }
        if self.expressions.len() >= MAX_EXPRESSIONS {
            return match usage {
                Usage::Sent => Ok(()),
                Usage::Kept => Err(RegexError::TooMany(MAX_EXPRESSIONS)),
            };
        }
        let checked = match usage {
            Usage::Sent => regex::check(expression),
            Usage::Kept => regex::compile(expression).map(drop),
        };
        self.expressions.insert(expression.to_owned(), checked.clone().err());
        checked
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

/// Parses and checks an object of an Istio kind (its whole manifest). No row: there is an error among the diagnostics. The
/// reverse does not hold for policies, which stand in spite of errors that concern a part of them.
///
/// # Panics
/// When the kind is not one of Istio's.
pub fn parse(meta: Shared<Meta>, object: &Value) -> (Option<Row>, Vec<Diagnostic>) {
    macro_rules! by_kind {
        ($($kind:ident: $check:path,)*) => {
            match meta.kind {
                $(Kind::$kind => config(meta, object, |config| Row::$kind(Shared::new(config)), $check),)*
                other => unreachable!("{} is none of Istio's kinds", other.name()),
            }
        };
    }
    by_kind! {
        DestinationRule: destination_rule::check,
        EnvoyFilter: envoy_filter::check,
        Gateway: gateway::check,
        ProxyConfig: proxy_config,
        ServiceEntry: service_entry::check,
        Sidecar: sidecar::check,
        VirtualService: virtual_service::check,
        WorkloadEntry: workload::entry,
        WorkloadGroup: workload::group,
        AuthorizationPolicy: security::authorization_policy,
        PeerAuthentication: security::peer_authentication,
        RequestAuthentication: security::request_authentication,
        Telemetry: telemetry::check,
        WasmPlugin: extension::wasm_plugin,
        TrafficExtension: extension::traffic_extension,
    }
}

fn proxy_config(at: &At<'_>, config: &networking_v1beta1::ProxyConfig, _meta: &Meta) {
    common::selector(at, config.selector.as_ref());
    at.field("concurrency")
        .require(config.concurrency.unwrap_or_default() >= 0, "must not be negative");
}

fn config<M: prost::Message + prost::Name + Clone + Default>(
    meta: Shared<Meta>,
    object: &Value,
    row: impl FnOnce(Config<M>) -> Row,
    check: fn(&At<'_>, &M, &Meta),
) -> (Option<Row>, Vec<Diagnostic>) {
    let findings = RefCell::new(Findings {
        counts_with_errors: protects(meta.kind),
        ..Findings::default()
    });
    let empty = Value::Object(serde_json::Map::new());
    let spec = match &object["spec"] {
        Value::Null => &empty,
        spec => spec,
    };
    let descriptor = descriptor_pool()
        .get_message_by_name(&M::full_name())
        .expect("because every message of the API is in the pool");
    for path in unknown_fields(&descriptor, spec) {
        let message = "is no field of this kind and has no effect";
        findings.borrow_mut().warning(format!("spec.{path}"), message);
    }
    let row = match from_json::<M>(spec, Unknown::Ignore) {
        Ok(spec) => {
            check(&At::root("spec", &findings), &spec, &meta);
            let status = meta.kind.status_of(object);
            let counts = findings.borrow().errors.is_empty() || findings.borrow().counts_with_errors;
            counts.then(|| {
                // Decoding leaves room for more in every list; a copy has none, and rows are kept for long.
                row(Config {
                    meta: meta.clone(),
                    spec: spec.clone(),
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
            findings.borrow_mut().error(field, error.message);
            None
        }
    };
    (row, findings.into_inner().diagnostics(&meta))
}

/// True for kinds that are obeyed as far as they can be read: without a policy that got past admission, what it protects
/// would be open. What generation cannot express of them lets less through, never more.
fn protects(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::AuthorizationPolicy | Kind::PeerAuthentication | Kind::RequestAuthentication
    )
}

#[cfg(test)]
mod tests;
