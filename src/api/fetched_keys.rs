//! The keys of an issuer of tokens, fetched from its server: no object that anybody writes, but an input like others.

use std::fmt;

use smol_str::SmolStr;

use super::{Kind, meta::Keyed};
use crate::{
    base::{ClusterId, ObjectKey},
    proto::istio::security::v1beta1::JwtRule,
};

/// Where OpenID Connect Discovery puts an issuer's own description.
const DISCOVERY_PATH: &str = "/.well-known/openid-configuration";

/// Where the keys of an issuer are to be had.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeySource {
    /// The URL of the key set.
    Keys(SmolStr),
    /// An issuer, whose description (OpenID Connect Discovery) names that URL.
    Discovery(SmolStr),
}

impl KeySource {
    /// Where the keys of a rule are; none if the rule holds them itself.
    pub fn of(rule: &JwtRule) -> Option<Self> {
        if !rule.jwks.is_empty() {
            None
        } else if rule.jwks_uri.is_empty() {
            Some(Self::Discovery(SmolStr::new(&rule.issuer)))
        } else {
            Some(Self::Keys(SmolStr::new(&rule.jwks_uri)))
        }
    }

    /// What is fetched first.
    pub fn url(&self) -> String {
        match self {
            Self::Keys(url) => url.to_string(),
            Self::Discovery(issuer) => format!("{}{DISCOVERY_PATH}", issuer.strip_suffix('/').unwrap_or(issuer)),
        }
    }
}

/// What is fetched first, without a password.
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

/// The last good key set of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedKeys {
    /// The config cluster, no namespace, the source.
    pub key: ObjectKey,
    /// The key set as its server wrote it; empty if it has no key that Envoy can use.
    pub keys: SmolStr,
}

impl FetchedKeys {
    /// The kind of such rows.
    pub const KIND: Kind = Kind::FetchedKeys;

    /// The key of a source. A space tells issuers from URLs.
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
    fn keys_that_are_written_count_first_then_the_url_then_the_issuer() {
        assert_eq!(KeySource::of(&rule("https://i", "https://k", "{}")), None);
        let url = KeySource::of(&rule("https://i", "https://k", "")).expect("to be fetched");
        assert_eq!(url.url(), "https://k");
        for issuer in ["https://i/a", "https://i/a/"] {
            let discovery = KeySource::of(&rule(issuer, "", "")).expect("to be fetched");
            assert_eq!(discovery.url(), "https://i/a/.well-known/openid-configuration");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let source = KeySource::Keys("https://user:word@keys.test/a@b".into());
        assert_eq!(source.to_string(), "https://…@keys.test/a@b");
    }
}
