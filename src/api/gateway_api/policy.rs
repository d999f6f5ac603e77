//! BackendTLSPolicy, XBackendTrafficPolicy and ReferenceGrant.

use serde::Deserialize;
use serde_json::Value;
use smol_str::SmolStr;

use super::common::{ObjectReference, Options, SessionPersistence, TargetReference};
use crate::{
    api::{Config, FieldError, Meta, typed},
    base::Shared,
};

/// TLS towards backends.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendTlsPolicy {
    /// The targets.
    pub target_refs: Vec<TargetReference>,
    /// The validation of backends.
    pub validation: BackendValidation,
    /// Implementation-specific options.
    #[serde(default)]
    pub options: Options,
    /// `metadata.uid`, which distinguishes policies; empty in files.
    #[serde(skip)]
    pub uid: SmolStr,
}

impl Config<BackendTlsPolicy> {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let mut policy: Self = typed::parse(meta, object)?;
        policy.spec.uid = object["metadata"]["uid"].as_str().unwrap_or_default().into();
        Ok(policy)
    }
}

/// The validation of backend certificates.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendValidation {
    /// The CA certificates: ConfigMaps or Secrets.
    #[serde(default)]
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// `System` in place of referenced CA certificates.
    #[serde(rename = "wellKnownCACertificates")]
    pub well_known_ca_certificates: Option<SmolStr>,
    /// The name for SNI and, without `subject_alt_names`, for the certificate.
    pub hostname: SmolStr,
    /// Subject alternative names; the certificate must have one of them.
    #[serde(default)]
    pub subject_alt_names: Vec<SubjectAltName>,
}

/// A subject alternative name.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct SubjectAltName {
    /// `Hostname` or `URI`.
    #[serde(rename = "type")]
    pub name_type: SmolStr,
    /// The name for `Hostname`.
    pub hostname: Option<SmolStr>,
    /// The name for `URI`.
    pub uri: Option<SmolStr>,
}

/// Traffic policy towards backends (experimental).
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendTrafficPolicy {
    /// The targets.
    pub target_refs: Vec<TargetReference>,
    /// The retry limit.
    pub retry_constraint: Option<RetryConstraint>,
    /// Session persistence: a client stays with one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// A limit of retries.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RetryConstraint {
    /// The limit as a percentage of requests.
    pub budget: Option<RetryBudget>,
    /// The rate of retries that is always allowed.
    pub min_retry_rate: Option<RequestRate>,
}

/// Retries as a percentage of requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct RetryBudget {
    /// The percentage; 20 if absent.
    pub percent: Option<u32>,
    /// The interval of the measurement, as a duration; 10s if absent.
    pub interval: Option<SmolStr>,
}

/// A number of requests per interval.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct RequestRate {
    /// The number; 10 if absent.
    pub count: Option<u32>,
    /// The interval, as a duration; 1s if absent.
    pub interval: Option<SmolStr>,
}

/// Permits references from other namespaces to objects of its own.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ReferenceGrant {
    /// The permitted referrers.
    pub from: Vec<GrantFrom>,
    /// The permitted targets.
    pub to: Vec<GrantTo>,
}

/// A permitted referrer.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct GrantFrom {
    /// The group of the referring object.
    pub group: SmolStr,
    /// The kind of the referring object.
    pub kind: SmolStr,
    /// The namespace of the referring object.
    pub namespace: SmolStr,
}

/// A permitted target.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct GrantTo {
    /// The group, empty for core.
    pub group: SmolStr,
    /// The kind.
    pub kind: SmolStr,
    /// The name; all objects if absent.
    pub name: Option<SmolStr>,
}
