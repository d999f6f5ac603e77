//! The key set of a token issuer, fetched from its server: an input that is not a manifest.

use std::fmt;

use smol_str::SmolStr;

use super::{Kind, meta::Keyed};
use crate::{
    base::{ClusterId, ObjectKey},
    proto::istio::security::v1beta1::JwtRule,
};

/// The path of an issuer's metadata (OpenID Connect Discovery).
const DISCOVERY_PATH: &str = "/.well-known/openid-configuration";

/// The source of a token issuer's keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeySource {
    /// The URL of the key set.
    Keys(SmolStr),
    /// The URL of an issuer, whose metadata (OpenID Connect Discovery) contains the URL of the key set.
    Discovery(SmolStr),
}

impl KeySource {
    /// Returns the key source of a rule; `None` if the rule contains the keys.
    pub fn of(rule: &JwtRule) -> Option<Self> {
        if !rule.jwks.is_empty() {
            None
        } else if rule.jwks_uri.is_empty() {
            Some(Self::Discovery(SmolStr::new(&rule.issuer)))
        } else {
            Some(Self::Keys(SmolStr::new(&rule.jwks_uri)))
        }
    }

    /// Returns the URL of the first request.
    pub fn url(&self) -> String {
        match self {
            Self::Keys(url) => url.to_string(),
            Self::Discovery(issuer) => format!("{}{DISCOVERY_PATH}", issuer.strip_suffix('/').unwrap_or(issuer)),
        }
    }
}

/// Formats the URL of the first request without credentials.
impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.url();
        let authority = url.find("://").map_or(0, |at| at + 3);
        let end = url[authority..].find('/').map_or(url.len(), |at| authority + at);
        match url[authority..end].rfind('@') {
            Some(at) => write!(f, "{}…{}", &url[..authority], &url[authority + at..]),
            None => f.write_str(&url),
        }
    }
}

/// The last valid key set of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedKeys {
    /// The key: config cluster, no namespace, the source as the name.
    pub key: ObjectKey,
    /// The key set as the server sent it; empty if Envoy can use none of its keys.
    pub keys: SmolStr,
}

impl FetchedKeys {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::FetchedKeys;

    /// Returns the key of a source. A space distinguishes issuers from URLs.
    pub fn key(cluster: &ClusterId, source: &KeySource) -> ObjectKey {
        let name = match source {
            KeySource::Keys(url) => url.clone(),
            KeySource::Discovery(issuer) => SmolStr::new(format!("issuer {issuer}")),
        };
        ObjectKey::new(cluster, "", name)
    }
}

impl Keyed for FetchedKeys {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(issuer: &str, uri: &str, keys: &str) -> JwtRule {
        JwtRule {
            issuer: issuer.into(),
            jwks_uri: uri.into(),
            jwks: keys.into(),
            ..JwtRule::default()
        }
    }

    #[test]
    fn inline_keys_take_precedence_over_url_and_issuer() {
        assert_eq!(KeySource::of(&rule("https://i", "https://k", "{}")), None);
        let url = KeySource::of(&rule("https://i", "https://k", "")).expect("a key source");
        assert_eq!(url.url(), "https://k");
        for issuer in ["https://i/a", "https://i/a/"] {
            let discovery = KeySource::of(&rule(issuer, "", "")).expect("a key source");
            assert_eq!(discovery.url(), "https://i/a/.well-known/openid-configuration");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let source = KeySource::Keys("https://user:word@keys.test/a@b".into());
        assert_eq!(source.to_string(), "https://…@keys.test/a@b");
    }
}
