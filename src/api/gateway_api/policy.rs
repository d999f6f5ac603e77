//! BackendTLSPolicy, XBackendTrafficPolicy and ReferenceGrant.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::{ObjectReference, Options, SessionPersistence, TargetReference};

/// TLS towards backends.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendTlsPolicy {
    /// What it applies to.
    pub target_refs: Vec<TargetReference>,
    /// How backends are checked.
    pub validation: BackendValidation,
    /// Options of the implementation.
    #[serde(default)]
    pub options: Options,
}

/// How the certificates of backends are checked.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendValidation {
    /// The authorities: ConfigMaps or Secrets.
    #[serde(default)]
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// `System` instead of named authorities.
    #[serde(rename = "wellKnownCACertificates")]
    pub well_known_ca_certificates: Option<SmolStr>,
    /// The name for SNI and, without `subject_alt_names`, for the certificate.
    pub hostname: SmolStr,
    /// Names of which the certificate must have one.
    #[serde(default)]
    pub subject_alt_names: Vec<SubjectAltName>,
}

/// A name in a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct SubjectAltName {
    /// `Hostname` or `URI`.
    #[serde(rename = "type")]
    pub name_type: SmolStr,
    /// For `Hostname`.
    pub hostname: Option<SmolStr>,
    /// For `URI`.
    pub uri: Option<SmolStr>,
}

/// How traffic to backends is treated (experimental).
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendTrafficPolicy {
    /// What it applies to.
    pub target_refs: Vec<TargetReference>,
    /// How many retries there may be.
    pub retry_constraint: Option<RetryConstraint>,
    /// How long a client keeps to one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// How many retries there may be.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RetryConstraint {
    /// As a share of all requests.
    pub budget: Option<RetryBudget>,
    /// However small that share is.
    pub min_retry_rate: Option<RequestRate>,
}

/// Retries as a share of all requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct RetryBudget {
    /// The share; 20 when absent.
    pub percent: Option<u32>,
    /// The time over which it counts, as a duration; 10s when absent.
    pub interval: Option<SmolStr>,
}

/// A number of requests in a time.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct RequestRate {
    /// The number; 10 when absent.
    pub count: Option<u32>,
    /// The time, as a duration; 1s when absent.
    pub interval: Option<SmolStr>,
}

/// Permits references from other namespaces into its own.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ReferenceGrant {
    /// Who may refer.
    pub from: Vec<GrantFrom>,
    /// To what.
    pub to: Vec<GrantTo>,
}

/// Who may refer.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct GrantFrom {
    /// The group of the referring object.
    pub group: SmolStr,
    /// Its kind.
    pub kind: SmolStr,
    /// Its namespace.
    pub namespace: SmolStr,
}

/// What may be referred to.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct GrantTo {
    /// The group, empty for core.
    pub group: SmolStr,
    /// The kind.
    pub kind: SmolStr,
    /// One object; all when absent.
    pub name: Option<SmolStr>,
}
