//! Certificates by the time of their expiry: roots of the mesh, the CA's own, and those in Secrets.

use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::moment;
use crate::{
    api::Kind,
    ca::{
        authority::Authority,
        certificate::{Certificate, CertificateError},
    },
    distribution::report::ObjectName,
    model::MeshSnapshot,
    table::Cx,
};

/// The most certificates on the page.
const MAX_ROWS: usize = 500;
/// Keys of Secrets with the certificate of a server, and those with CA certificates.
const KEYS: [&str; 4] = ["tls.crt", "cert", "ca.crt", "cacert"];

/// A certificate, or one that cannot be read.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    /// `root`, `CA` or `Secret`.
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<ObjectName>,
    /// The key of the Secret.
    #[serde(skip_serializing_if = "str::is_empty")]
    key: &'static str,
    subject: String,
    expires: Value,
    /// Negative after the expiry.
    expires_in_seconds: Option<i64>,
    /// The reason why it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Row {
    fn new(kind: &'static str, certificate: &Certificate, now: SystemTime) -> Self {
        let expires = OffsetDateTime::from(certificate.not_after);
        Self {
            kind,
            object: None,
            key: "",
            subject: certificate.name.to_string(),
            expires: moment(expires),
            expires_in_seconds: Some((expires - OffsetDateTime::from(now)).whole_seconds()),
            error: None,
        }
    }

    fn unreadable(kind: &'static str, error: &CertificateError) -> Self {
        Self {
            kind,
            object: None,
            key: "",
            subject: String::new(),
            expires: Value::Null,
            expires_in_seconds: None,
            error: Some(error.to_string()),
        }
    }
}

/// Returns the certificates, those that cannot be read first and then by expiry: the roots that workloads trust, those
/// between the CA and its root, and the first one of each key in Secrets.
pub(in crate::admin::debug) fn certificates(
    mesh: &MeshSnapshot,
    authority: Option<&Authority>,
    anchors: &[String],
    now: SystemTime,
) -> Value {
    let mut rows: Vec<Row> = Vec::new();
    for pem in anchors {
        match Certificate::all_from_pem(pem.as_bytes()) {
            Ok(roots) => rows.extend(roots.iter().map(|root| Row::new("root", root, now))),
            Err(error) => rows.push(Row::unreadable("root", &error)),
        }
    }
    let own = authority.map(Authority::own_chain).unwrap_or_default();
    rows.extend(own.iter().map(|certificate| Row::new("CA", certificate, now)));
    for (key, secret) in mesh.secrets.iter(&Cx::untracked()) {
        for name in KEYS {
            let Some(content) = secret.data.get(name) else {
                continue;
            };
            let row = match Certificate::all_from_pem(content.reveal()) {
                Ok(certificates) => certificates.first().map(|first| Row::new("Secret", first, now)),
                Err(error) => Some(Row::unreadable("Secret", &error)),
            };
            rows.extend(row.map(|row| Row {
                object: Some(ObjectName::of(Kind::Secret, key)),
                key: name,
                ..row
            }));
        }
    }
    rows.sort_by_key(|row| row.expires_in_seconds);
    rows.truncate(MAX_ROWS);
    json!(rows)
}
