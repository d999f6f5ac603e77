//! Bearer tokens: extraction from headers, and their unverified claims.

use std::time::{Duration, SystemTime};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, header::AUTHORIZATION};
use serde::Deserialize;
use smol_str::SmolStr;

use super::AuthenticationError;
use crate::base::Namespace;

/// The maximum length of a token in bytes. Kubernetes tokens have about 1 KiB.
pub const MAX_TOKEN: usize = 16 << 10;

/// The header with the cluster id of a caller.
const CLUSTER: &str = "clusterid";

/// The JWT claims that are used. Others are ignored.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct Claims {
    /// The issuer.
    #[serde(default)]
    pub iss: String,
    /// The subject.
    #[serde(default)]
    pub sub: String,
    /// The audiences.
    #[serde(default)]
    pub aud: Audience,
    /// The expiry, in seconds since 1970.
    #[serde(default)]
    pub exp: Option<f64>,
    /// The start of the validity, in seconds since 1970.
    #[serde(default)]
    pub nbf: Option<f64>,
}

/// One or more audiences.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
pub enum Audience {
    /// A string.
    One(String),
    /// A list of strings.
    Many(Vec<String>),
}

impl Default for Audience {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl Audience {
    /// The audiences.
    pub fn all(&self) -> &[String] {
        match self {
            Self::One(audience) => std::slice::from_ref(audience),
            Self::Many(audiences) => audiences,
        }
    }
}

impl Claims {
    /// Returns the expiry; none if it is missing or out of range.
    pub fn expires_at(&self) -> Option<SystemTime> {
        self.exp.and_then(epoch_seconds)
    }

    /// Returns the start of the validity.
    pub fn not_before(&self) -> Option<SystemTime> {
        self.nbf.and_then(epoch_seconds)
    }
}

fn epoch_seconds(seconds: f64) -> Option<SystemTime> {
    let since = Duration::try_from_secs_f64(seconds).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(since)
}

/// The schemes of `authorization` headers with a token.
///
/// Parity (pkg/security/security.go): `Istio` is a scheme for debug pages. Here it is one for all requests.
const SCHEMES: [&str; 2] = ["bearer", "istio"];

/// Returns the bearer token in the first `authorization` header that has one.
pub fn bearer(headers: &HeaderMap) -> Result<&str, AuthenticationError> {
    let mut values = headers
        .get_all(AUTHORIZATION)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let token = values.find_map(|value| {
        let (scheme, token) = value.split_once(' ')?;
        let is_known = SCHEMES.iter().any(|known| scheme.eq_ignore_ascii_case(known));
        is_known.then(|| token.trim())
    });
    match token {
        None | Some("") => Err(AuthenticationError::Missing("bearer token")),
        Some(token) if token.len() > MAX_TOKEN => Err(AuthenticationError::Invalid(format!(
            "the token has {} bytes, want at most {MAX_TOKEN}",
            token.len()
        ))),
        Some(token) => Ok(token),
    }
}

/// Returns the `clusterid` of a request; empty unless there is exactly one.
pub fn cluster(headers: &HeaderMap) -> &str {
    let mut values = headers.get_all(CLUSTER).iter();
    match (values.next(), values.next()) {
        (Some(only), None) => only.to_str().unwrap_or_default(),
        _ => "",
    }
}

/// Parses the claims of a token without verifying its signature.
pub fn unverified_claims(token: &str) -> Result<Claims, AuthenticationError> {
    let parts: Vec<&str> = token.splitn(4, '.').collect();
    let &[_, payload, _] = parts.as_slice() else {
        return Err(AuthenticationError::Invalid(
            "the token is not a JWT: want three parts".into(),
        ));
    };
    let bytes = BASE64_URL_SAFE_NO_PAD
        .decode(payload.trim_end_matches('='))
        .map_err(|_| AuthenticationError::Invalid("the token is not a JWT: the payload is not base64url".into()))?;
    // serde would parse a JSON array as a struct.
    let claims = bytes.starts_with(b"{").then(|| serde_json::from_slice(&bytes).ok());
    let unreadable = || AuthenticationError::Invalid("the token is not a JWT: the claims cannot be parsed".into());
    claims.flatten().ok_or_else(unreadable)
}

/// Parses `system:serviceaccount:NAMESPACE:NAME`.
pub fn service_account(name: &str) -> Option<(Namespace, SmolStr)> {
    let parts: Vec<&str> = name.splitn(5, ':').collect();
    match *parts.as_slice() {
        ["system", "serviceaccount", namespace, account] if is_label(namespace) && is_label(account) => {
            Some((namespace.into(), account.into()))
        }
        _ => None,
    }
}

/// Returns true if the text is a safe segment of a SPIFFE id: not empty, and without separators.
fn is_label(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            let name: HeaderName = name.parse().expect("a name");
            (name, HeaderValue::from_str(value).expect("a value"))
        });
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    #[test]
    fn the_first_bearer_token_is_used() {
        let shown = headers(&[
            ("authorization", "Basic x"),
            ("Authorization", "Bearer a.b.c"),
            ("authorization", "Bearer d"),
        ]);
        assert_eq!(bearer(&shown), Ok("a.b.c"));
        assert_eq!(bearer(&headers(&[("authorization", "Istio a.b.c")])), Ok("a.b.c"));
        for none in [
            &[][..],
            &[("authorization", "Bearer ")],
            &[("authorization", "Bearer")],
            &[("x", "Bearer a")],
        ] {
            assert_eq!(
                bearer(&headers(none)),
                Err(AuthenticationError::Missing("bearer token"))
            );
        }
        let long = format!("Bearer {}", "a".repeat(MAX_TOKEN + 1));
        assert!(matches!(
            bearer(&headers(&[("authorization", &long)])),
            Err(AuthenticationError::Invalid(_))
        ));
    }

    #[test]
    fn ambiguous_cluster_ids_are_ignored() {
        assert_eq!(cluster(&headers(&[("clusterid", "one")])), "one");
        assert_eq!(cluster(&headers(&[("clusterid", "one"), ("clusterid", "two")])), "");
        assert_eq!(cluster(&headers(&[])), "");
    }

    #[test]
    fn hostile_claims_are_parsed_safely() {
        let token = |claims: &str| format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims));
        let claims = unverified_claims(&token(r#"{"sub":"s","aud":"a","exp":12.5,"x":[1]}"#)).expect("valid claims");
        assert_eq!(claims.aud.all(), ["a"]);
        assert_eq!(
            claims.expires_at(),
            Some(SystemTime::UNIX_EPOCH + Duration::from_millis(12_500))
        );
        let odd = unverified_claims(&token(r#"{"exp":-1e300,"nbf":1e300,"aud":["a","b"]}"#)).expect("valid claims");
        assert_eq!((odd.expires_at(), odd.not_before()), (None, None));
        let deep = "[".repeat(1_000_000);
        for bad in [
            "",
            "a",
            "a.b",
            "a.b.c",
            "a.b.c.d",
            "e30.!.c",
            &token("[]"),
            &token(&deep),
        ] {
            assert!(unverified_claims(bad).is_err());
        }
    }

    #[test]
    fn service_account_names_have_four_valid_parts() {
        let account = service_account("system:serviceaccount:default:reviews");
        assert_eq!(account, Some(("default".into(), "reviews".into())));
        for bad in [
            "",
            "system:serviceaccount:default",
            "system:serviceaccount:default:a:b",
            "system:serviceaccount::reviews",
            "system:serviceaccount:default:",
            "system:serviceaccount:default:a/b",
            "system:serviceaccount:a/sa/b:c",
            "system:node:default:reviews",
        ] {
            assert_eq!(service_account(bad), None, "{bad}");
        }
    }
}
