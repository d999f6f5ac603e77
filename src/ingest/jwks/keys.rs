//! Parses key documents.

use base64::{
    Engine,
    prelude::{BASE64_URL_SAFE, BASE64_URL_SAFE_NO_PAD},
};
use serde_json::{Map, Value};
use smol_str::SmolStr;

/// First line of a PEM certificate.
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";
/// Memory of a parsed JSON object with fields, in bytes, without their content.
const OBJECT: usize = 640;
/// Memory of another parsed JSON value.
const VALUE: usize = 64;

/// A key set in one of Envoy's forms: a JWKS, or certificates by key id. Two are equal if they have the same keys, in
/// any order and formatting.
#[derive(Clone, Debug)]
pub struct KeySet {
    text: SmolStr,
    /// Memory of the document and the parsed keys, in bytes.
    size: usize,
    /// Keys, sorted.
    keys: Vec<(String, Value)>,
}

/// The document is not a key set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the document is not a JWKS; hint: want {{\"keys\": [...]}}")]
pub struct NoKeySet;

impl KeySet {
    /// Parses a document. A set without usable keys is valid: its issuer has withdrawn all of them.
    pub fn parse(document: &[u8]) -> Result<Self, NoKeySet> {
        let text = std::str::from_utf8(document).map_err(|_| NoKeySet)?;
        let parsed: Map<String, Value> = serde_json::from_str(text).map_err(|_| NoKeySet)?;
        let mut keys: Vec<(String, Value)> = match parsed.get("keys") {
            Some(Value::Array(keys)) if keys.iter().all(Value::is_object) => {
                keys.iter().map(|key| (id(key), key.clone())).collect()
            }
            None if is_certificates(&parsed) => parsed.into_iter().collect(),
            _ => return Err(NoKeySet),
        };
        sort(&mut keys);
        let is_usable = keys.iter().any(|(_, key)| key.is_string() || is_usable(key));
        Ok(Self {
            text: if is_usable {
                SmolStr::new(text)
            } else {
                SmolStr::default()
            },
            size: size(document),
            keys,
        })
    }

    /// Returns the memory that the key set takes, in bytes.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Returns the original document; empty if Envoy can use none of its keys, because it would refuse the listener.
    pub fn text(&self) -> &SmolStr {
        &self.text
    }

    /// Returns the ids of the keys, empty for keys without one.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(|(id, _)| id.as_str())
    }
}

impl PartialEq for KeySet {
    fn eq(&self, other: &Self) -> bool {
        self.keys == other.keys
    }
}

impl Eq for KeySet {}

/// Estimates the memory of a document and its parsed values. Those of `[{},{},{}]` take many times its length.
fn size(document: &[u8]) -> usize {
    let parsed = document.iter().map(|byte| match byte {
        b'{' => OBJECT,
        b'[' | b',' => VALUE,
        _ => 0,
    });
    document.len() + parsed.sum::<usize>()
}

fn id(key: &Value) -> String {
    key["kid"].as_str().unwrap_or_default().to_owned()
}

fn is_certificates(parsed: &Map<String, Value>) -> bool {
    let is_one = |value: &Value| {
        value
            .as_str()
            .is_some_and(|text| text.trim_start().starts_with(CERTIFICATE))
    };
    !parsed.is_empty() && parsed.values().all(is_one)
}

/// Returns true for keys of the types that Envoy supports (RFC 7517), with all fields. Envoy accepts padding too.
fn is_usable(key: &Value) -> bool {
    let part = |name: &str| {
        let text = key[name].as_str()?;
        let decoded = BASE64_URL_SAFE_NO_PAD.decode(text);
        decoded.or_else(|_| BASE64_URL_SAFE.decode(text)).ok()
    };
    let has = |names: &[&str]| {
        names
            .iter()
            .all(|name| part(name).is_some_and(|bytes| !bytes.is_empty()))
    };
    match (key["kty"].as_str(), key["crv"].as_str()) {
        (Some("RSA"), _) => has(&["n", "e"]),
        (Some("EC"), Some("P-256" | "P-384" | "P-521")) => has(&["x", "y"]),
        (Some("OKP"), Some("Ed25519")) => has(&["x"]),
        (Some("oct"), _) => has(&["k"]),
        _ => false,
    }
}

fn sort(keys: &mut [(String, Value)]) {
    keys.sort_by_cached_key(|(id, key)| (id.clone(), key.to_string()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_space_are_no_difference() {
        let one = br#"{"keys":[{"kty":"oct","kid":"a","k":"AAAA"},{"kid":"b","n":"2"}]}"#;
        let same = br#" {"keys": [{"n": "2", "kid": "b"}, {"kid": "a", "k": "AAAA", "kty": "oct"}]} "#;
        let other = br#"{"keys":[{"kty":"oct","kid":"a","k":"AAAA"},{"kid":"b","n":"3"}]}"#;
        let [one, same, other] = [&one[..], same, other].map(|text| KeySet::parse(text).expect("a key set"));
        assert_eq!(one, same);
        assert_ne!(one, other);
        assert_eq!(one.ids().collect::<Vec<_>>(), ["a", "b"]);
        assert!(same.text().starts_with(' '), "the text is the server's");
    }

    #[test]
    fn a_set_that_envoy_would_refuse_is_empty() {
        for text in [
            r#"{"keys":[]}"#,
            r#"{"keys":[{"kty":"future","kid":"a"}]}"#,
            r#"{"keys":[{"kty":"RSA","n":"AAAA"}]}"#,
            r#"{"keys":[{"kty":"RSA","n":"not base64!","e":"AQAB"}]}"#,
            r#"{"keys":[{"kty":"EC","crv":"secp256k1","x":"AAAA","y":"AAAA"}]}"#,
        ] {
            assert_eq!(KeySet::parse(text.as_bytes()).expect("a set").text(), "", "{text}");
        }
        for text in [
            r#"{"keys":[{"kty":"future"},{"kty":"OKP","crv":"Ed25519","x":"AAAA"}]}"#,
            r#"{"keys":[{"kty":"RSA","n":"AAAAAA==","e":"AQAB"}]}"#,
        ] {
            assert_eq!(KeySet::parse(text.as_bytes()).expect("a set").text(), text);
        }
    }

    #[test]
    fn the_size_of_many_small_keys_is_that_of_their_parsed_form() {
        let of = |keys: &str| KeySet::parse(format!(r#"{{"keys":[{keys}]}}"#).as_bytes()).map(|set| set.size());
        let many = vec!["{}"; 1000].join(",");
        assert!(of(&many).is_ok_and(|size| size > 1000 * OBJECT));
        assert!(of(&format!(r#"{{"kid":"{}"}}"#, "a".repeat(10_000))).is_ok_and(|size| size < 12_000));
    }

    #[test]
    fn malformed_key_sets_are_refused() {
        let certificates = br#"{"a": "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"}"#;
        for good in [&br#"{"keys":[]}"#[..], certificates] {
            assert!(KeySet::parse(good).is_ok(), "{}", String::from_utf8_lossy(good));
        }
        for bad in [
            "",
            "{}",
            "[]",
            "null",
            "<html>sign in first</html>",
            r#"{"keys":{}}"#,
            r#"{"keys":["a"]}"#,
            r#"{"error":"no"}"#,
            "\u{0}",
        ] {
            assert_eq!(KeySet::parse(bad.as_bytes()), Err(NoKeySet), "{bad}");
        }
        assert!(KeySet::parse(b"\xff\xfe").is_err());
        let deep = "[".repeat(1_000_000);
        assert!(KeySet::parse(format!(r#"{{"keys":{deep}"#).as_bytes()).is_err());
    }
}
