//! Istio's kinds: `spec` as a protobuf message of the API, validated with the rules of Istio's admission webhook.

pub mod common;
pub mod destination_rule;
pub mod envoy_filter;
pub mod extension;
pub mod field_path;
pub mod format_string;
pub mod gateway;
pub mod proxy_config;
pub mod security;
pub mod service_entry;
pub mod sidecar;
pub mod telemetry;
pub mod traffic_policy;
pub mod virtual_service;
pub mod workload;

use std::{cell::RefCell, collections::BTreeMap};

use serde_json::Value;

use self::field_path::FieldPath;
use super::{
    Config, Diagnostic, FieldError, Kind, Meta, Severity,
    diagnostics::{INVALID, MALFORMED, REFUSED, SUSPICIOUS},
    regex::{self, RegexError},
    unknown::unknown_fields,
};
use crate::{
    base::{Shared, boolean},
    proto::{
        json::{Unknown, from_json},
        message_descriptor,
    },
};

/// The treatment of objects of a kind that have errors, such as one that was created without the admission webhook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorPolicy {
    /// The object is ignored.
    Reject,
    /// The object applies without the parts that cannot be translated. Ignoring a security policy would leave open what
    /// it protects; parts that generation cannot express allow less traffic, never more.
    Tolerate,
}

/// The errors and warnings of one object.
#[derive(Debug, Default)]
pub struct Validation {
    /// Errors; the kind's [`ErrorPolicy`] decides if the object applies.
    pub errors: Vec<FieldError>,
    /// Violations that only admission refuses: the object applies.
    pub refusals: Vec<FieldError>,
    /// Problems of an object that applies, but likely not as the user meant.
    pub warnings: Vec<FieldError>,
    /// Warnings with codes of their own.
    coded_warnings: Vec<(&'static str, FieldError)>,
    /// True if a field has a wrong type.
    is_malformed: bool,
    /// The regular expressions that were checked, with their errors.
    regexes: BTreeMap<String, Option<RegexError>>,
}

/// The limit of errors, refusals and warnings of an object, each. An object has room for a million, and a user reads
/// the first ones.
const MAX_FINDINGS: usize = 1000;
/// The limit of different regular expressions of an object that are compiled. Compiling one may take a millisecond, and
/// an object has room for ten thousand.
const MAX_REGEXES: usize = 64;

/// The component that evaluates a regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegexUsage {
    /// Proxies compile it. After [`MAX_REGEXES`] of these only length, syntax and the least size of the program are
    /// checked. Because of an invalid one, Envoy refuses all routes of a port.
    Proxy,
    /// The control plane keeps it compiled. More than [`MAX_REGEXES`] of these are an error.
    ControlPlane,
}

impl Validation {
    /// Records an error of a field.
    pub fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        add(&mut self.errors, field, message);
    }

    /// Records a violation that only admission refuses.
    pub fn refusal(&mut self, field: impl Into<String>, message: impl Into<String>) {
        add(&mut self.refusals, field, message);
    }

    /// Records a warning about a field.
    pub fn warning(&mut self, field: impl Into<String>, message: impl Into<String>) {
        add(&mut self.warnings, field, message);
    }

    /// Records a warning about a field with a code of its own.
    pub fn warning_with_code(&mut self, code: &'static str, field: impl Into<String>, message: impl Into<String>) {
        if self.coded_warnings.len() < MAX_FINDINGS {
            let (field, message) = (field.into(), message.into());
            self.coded_warnings.push((code, FieldError { field, message }));
        }
    }

    /// Checks a regular expression. Repeated ones are compiled once.
    pub fn regex(&mut self, expression: &str, usage: RegexUsage) -> Result<(), RegexError> {
        regex::check_length(expression)?;
        if let Some(known) = self.regexes.get(expression) {
            return known.clone().map_or(Ok(()), Err);
        }
        if self.regexes.len() >= MAX_REGEXES {
            return match usage {
                RegexUsage::Proxy => regex::check_program(expression),
                RegexUsage::ControlPlane => Err(RegexError::TooMany(MAX_REGEXES)),
            };
        }
        let checked = match usage {
            RegexUsage::Proxy => regex::check(expression),
            RegexUsage::ControlPlane => regex::compile(expression).map(drop),
        };
        self.regexes.insert(expression.to_owned(), checked.clone().err());
        checked
    }

    /// Returns warnings and refusals, for what admission does not check.
    pub fn into_warnings(mut self) -> Vec<FieldError> {
        self.warnings.append(&mut self.refusals);
        self.warnings
            .extend(self.coded_warnings.into_iter().map(|(_, found)| found));
        self.warnings
    }

    /// Returns the diagnostics of the object.
    pub fn diagnostics(self, meta: &Meta) -> Vec<Diagnostic> {
        let diagnostic =
            |severity, code, problem| Diagnostic::of_object(meta.kind, meta.key.clone(), severity, code, problem);
        let invalid = if self.is_malformed { MALFORMED } else { INVALID };
        let all = [
            (self.errors, Severity::Error, invalid),
            (self.refusals, Severity::Warning, REFUSED),
            (self.warnings, Severity::Warning, SUSPICIOUS),
        ];
        let all = all.into_iter().flat_map(|(found, severity, code)| {
            let found = found.into_iter();
            found.map(move |found| (severity, code, found))
        });
        let coded = self.coded_warnings.into_iter();
        let coded = coded.map(|(code, found)| (Severity::Warning, code, found));
        all.chain(coded)
            .map(|(severity, code, found)| diagnostic(severity, code, found))
            .collect()
    }
}

fn add(findings: &mut Vec<FieldError>, field: impl Into<String>, message: impl Into<String>) {
    if findings.len() < MAX_FINDINGS {
        findings.push(FieldError {
            field: field.into(),
            message: message.into(),
        });
    }
}

/// Parses and validates a manifest of an Istio kind. Returns no object if it does not apply; the diagnostics then
/// contain an error. An object with [`ErrorPolicy::Tolerate`] may have errors and still apply.
pub fn parse<M: prost::Message + prost::Name + Clone + Default>(
    meta: Shared<Meta>,
    object: &Value,
    check: fn(&FieldPath<'_>, &M, &Meta),
    error_policy: ErrorPolicy,
) -> (Option<Config<M>>, Vec<Diagnostic>) {
    let validation = RefCell::<Validation>::default();
    let empty = Value::Object(serde_json::Map::new());
    let spec = match &object["spec"] {
        Value::Null => &empty,
        spec => spec,
    };
    annotations(&FieldPath::root("metadata", error_policy, &validation), &meta);
    let descriptor = message_descriptor(&M::full_name()).expect("because the pool has every message of the API");
    for path in unknown_fields(&descriptor, spec) {
        let message = "is not a field of this kind and has no effect";
        validation.borrow_mut().warning(format!("spec.{path}"), message);
    }
    let config = match from_json::<M>(spec, Unknown::Ignore) {
        Ok(spec) => {
            check(&FieldPath::root("spec", error_policy, &validation), &spec, &meta);
            let applies = error_policy == ErrorPolicy::Tolerate || validation.borrow().errors.is_empty();
            applies.then(|| Config {
                meta: meta.clone(),
                // The clone frees the spare capacity of the decoded lists; rows live long.
                spec: spec.clone(),
                status: meta.kind.status_of(object),
            })
        }
        Err(error) => {
            let field = if error.path.is_empty() {
                "spec".to_owned()
            } else {
                format!("spec.{}", error.path)
            };
            let mut validation = validation.borrow_mut();
            validation.is_malformed = true;
            validation.error(field, error.message);
            None
        }
    };
    (config, validation.into_inner().diagnostics(&meta))
}

/// Annotations that istiod sets on objects that it generates. Users must not.
const INTERNAL_ANNOTATIONS: [&str; 3] = [
    ALWAYS_REJECTED,
    "internal.istio.io/parent-namespace",
    "internal.istio.io/parents",
];
/// Annotation of an object that the validation webhook refuses, which shows that the webhook works.
pub const ALWAYS_REJECTED: &str = "internal.istio.io/webhook-always-reject";
/// Annotation of a policy whose decisions are only reported.
pub const DRY_RUN: &str = "istio.io/dry-run";

/// Checks the annotations that all kinds share.
///
/// Parity (pkg/config/validation/validation.go, ValidateConfig and validateAnnotations).
fn annotations(metadata: &FieldPath<'_>, meta: &Meta) {
    let at = metadata.field("annotations");
    for name in INTERNAL_ANNOTATIONS {
        if meta.annotations.contains_key(name) {
            at.field(name).refuse("is set by istiod only");
        }
    }
    if let Some(value) = meta.annotations.get(DRY_RUN) {
        let at = at.field(DRY_RUN);
        at.require_on_admission(
            meta.kind == Kind::AuthorizationPolicy,
            "is allowed on AuthorizationPolicies only",
        );
        at.require_on_admission(boolean::parse(value).is_some(), "want true or false");
    }
}

#[cfg(test)]
mod tests;
