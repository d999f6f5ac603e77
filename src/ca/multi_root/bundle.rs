//! Parser of SPIFFE bundles: JSON Web Key Sets whose keys with use `x509-svid` hold one root each
//! (SPIFFE Trust Domain and Bundle specification, section 4).

use base64::{DecodeError, Engine, prelude::BASE64_STANDARD};
use rustls::pki_types::CertificateDer;
use serde::Deserialize;

use crate::ca::certificate::{Certificate, CertificateError};

/// The maximum number of roots in a bundle.
const ROOTS_MAX: usize = 100;

#[derive(Deserialize)]
struct Document {
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Key {
    #[serde(default, rename = "use")]
    usage: String,
    #[serde(default)]
    x5c: Vec<String>,
}

/// Reason why a document is not a usable SPIFFE bundle.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpiffeBundleError {
    /// It does not have the form of a bundle.
    #[error("not a SPIFFE bundle: {0}")]
    Json(#[source] serde_json::Error),
    /// It has no root.
    #[error("no key with use x509-svid")]
    NoRoot,
    /// It has too many roots.
    #[error("{0} roots, more than {ROOTS_MAX}")]
    TooManyRoots(usize),
    /// A key does not have exactly one certificate.
    #[error("keys[{index}].x5c holds {count} certificates, want exactly 1")]
    Count {
        /// The index of the key.
        index: usize,
        /// The number of its certificates.
        count: usize,
    },
    /// A certificate is not base64.
    #[error("keys[{index}].x5c: {error}")]
    Base64 {
        /// The index of the key.
        index: usize,
        /// The cause.
        #[source]
        error: DecodeError,
    },
    /// A certificate cannot be parsed.
    #[error("keys[{index}].x5c: {error}")]
    Certificate {
        /// The index of the key.
        index: usize,
        /// The cause.
        #[source]
        error: CertificateError,
    },
    /// A certificate is not a CA.
    #[error("keys[{index}].x5c: the certificate is no CA")]
    NotCa {
        /// The index of the key.
        index: usize,
    },
}

/// Returns the roots of a bundle; at least one.
pub(super) fn roots(document: &[u8]) -> Result<Vec<Certificate>, SpiffeBundleError> {
    let document: Document = serde_json::from_slice(document).map_err(SpiffeBundleError::Json)?;
    // Keys with another use (`jwt-svid`) verify tokens.
    let keys = document.keys.iter().enumerate();
    let roots = keys.filter(|(_, key)| key.usage == "x509-svid");
    let roots: Vec<Certificate> = roots.map(|(index, key)| root(index, key)).collect::<Result<_, _>>()?;
    match roots.len() {
        0 => Err(SpiffeBundleError::NoRoot),
        1..=ROOTS_MAX => Ok(roots),
        many => Err(SpiffeBundleError::TooManyRoots(many)),
    }
}

fn root(index: usize, key: &Key) -> Result<Certificate, SpiffeBundleError> {
    let [text] = key.x5c.as_slice() else {
        let count = key.x5c.len();
        return Err(SpiffeBundleError::Count { index, count });
    };
    let der = BASE64_STANDARD
        .decode(text)
        .map_err(|error| SpiffeBundleError::Base64 { index, error })?;
    let root = Certificate::from_der(CertificateDer::from(der))
        .map_err(|error| SpiffeBundleError::Certificate { index, error })?;
    if !root.is_ca {
        return Err(SpiffeBundleError::NotCa { index });
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::ca::multi_root::tests::{der, leaf, root};

    fn key(usage: &str, certificates: &[&[u8]]) -> Value {
        let x5c: Vec<String> = certificates.iter().map(|der| BASE64_STANDARD.encode(der)).collect();
        json!({ "use": usage, "kty": "EC", "crv": "P-256", "x": "x", "y": "y", "x5c": x5c })
    }

    fn read(keys: &[Value]) -> Result<Vec<Certificate>, String> {
        let document = json!({ "spiffe_sequence": 1, "spiffe_refresh_hint": 600, "keys": keys });
        roots(document.to_string().as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_for_certificates_are_roots() {
        let (one, other) = (der(&root("one")), der(&root("other")));
        let keys = [
            key("x509-svid", &[&one]),
            key("jwt-svid", &[]),
            key("x509-svid", &[&other]),
        ];
        let roots = read(&keys).expect("root certificates");
        let ders: Vec<&[u8]> = roots.iter().map(|root| root.der.as_ref()).collect();
        assert_eq!(ders, [one.as_slice(), &other]);
    }

    #[test]
    fn other_documents_are_refused() {
        let root = der(&root("one"));
        let refused = |keys: &[Value], why: &str| {
            let error = read(keys).expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        refused(&[], "x509-svid");
        refused(&[key("jwt-svid", &[&root])], "x509-svid");
        refused(&[key("x509-svid", &[])], "keys[0].x5c holds 0 certificates");
        refused(&[key("x509-svid", &[&root, &root])], "holds 2 certificates");
        refused(&[key("x509-svid", &[&root]), key("x509-svid", &[b"x"])], "keys[1].x5c");
        refused(&[key("x509-svid", &[&leaf()])], "no CA");
        refused(&vec![key("x509-svid", &[&root]); ROOTS_MAX + 1], "more than");
        for text in [
            "",
            "[]",
            "{}",
            r#"{"keys": 1}"#,
            r#"{"keys": [{"use": "x509-svid", "x5c": ["*"]}]}"#,
        ] {
            assert!(roots(text.as_bytes()).is_err(), "{text}");
        }
    }
}
