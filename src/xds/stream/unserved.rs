//! Requests for types that are not served. They are answered without resources, because a client may wait for all types
//! that it requests.
//!
//! Parity (pilot/pkg/networking/apigen/apigen.go): Istio answers unknown types with an empty list. Note: some types are
//! not answered, because Istio has resources of them, and an empty list would mean that there are none.

use smol_str::{SmolStr, format_smolstr};

use crate::xds::{protocol::Protocol, request::UnservedRequest};

/// The maximum number of types of a stream whose requests are answered.
const MAX_TYPES: usize = 16;
/// The maximum length of a type that is remembered.
const MAX_TYPE_BYTES: usize = 256;

/// The answered types of one stream.
#[derive(Debug, Default)]
pub(super) struct UnservedTypes {
    types: Vec<Watched>,
    answers: u64,
}

#[derive(Debug)]
struct Watched {
    type_url: String,
    nonce: SmolStr,
    names: u64,
}

/// An answer without resources.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) nonce: SmolStr,
    /// The names that do not exist.
    pub(super) removed: Vec<String>,
}

impl UnservedTypes {
    /// Returns the answer to a request; `None` if it is an acknowledgement, or if the type has resources in Istio.
    pub(super) fn answer(&mut self, protocol: Protocol, type_url: &str, request: UnservedRequest) -> Option<Answer> {
        if request.error.is_some() || type_url.len() > MAX_TYPE_BYTES || has_resources(type_url) {
            return None;
        }
        let is_full = self.types.len() >= MAX_TYPES;
        let known = self.types.iter_mut().find(|watched| watched.type_url == type_url);
        if let Some(known) = &known {
            let is_first = protocol == Protocol::Sotw && request.nonce.is_empty();
            let is_stale = !request.nonce.is_empty() && request.nonce != known.nonce;
            let is_same = match protocol {
                Protocol::Sotw => request.names_hash == known.names,
                Protocol::Delta => request.names.is_empty(),
            };
            if !is_first && (is_stale || is_same) {
                return None;
            }
        }
        self.answers += 1;
        let nonce = format_smolstr!("0-{}", self.answers);
        match known {
            Some(known) => (known.nonce, known.names) = (nonce.clone(), request.names_hash),
            None if is_full => return None,
            None => self.types.push(Watched {
                type_url: type_url.to_owned(),
                nonce: nonce.clone(),
                names: request.names_hash,
            }),
        }
        Some(Answer {
            nonce,
            removed: match protocol {
                Protocol::Sotw => Vec::new(),
                Protocol::Delta => request.names,
            },
        })
    }
}

/// Returns true for types of which Istio has resources: `group/version/Kind`, which is configuration for other control
/// planes.
fn has_resources(type_url: &str) -> bool {
    type_url.split('/').count() >= 3
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: &str = "type.googleapis.com/envoy.config.bootstrap.v3.Bootstrap";

    fn request(nonce: &str, names: &[&str]) -> UnservedRequest {
        UnservedRequest {
            nonce: nonce.into(),
            error: None,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            names_hash: names.len() as u64,
        }
    }

    #[test]
    fn each_subscription_is_answered_once() {
        let mut types = UnservedTypes::default();
        let mut ask = |type_url: &str, nonce: &str, names: &[&str]| {
            let answer = types.answer(Protocol::Sotw, type_url, request(nonce, names));
            answer.map(|answer| answer.nonce.to_string())
        };
        assert_eq!(ask(UNKNOWN, "", &[]).as_deref(), Some("0-1"));
        assert_eq!(ask(UNKNOWN, "0-1", &[]), None);
        assert_eq!(ask(UNKNOWN, "0-0", &["a"]), None);
        assert_eq!(ask(UNKNOWN, "0-1", &["a"]).as_deref(), Some("0-2"));
        assert_eq!(ask("istio.io/connections", "", &[]).as_deref(), Some("0-3"));
        assert_eq!(ask("networking.istio.io/v1/ServiceEntry", "", &[]), None);
    }

    #[test]
    fn delta_clients_are_told_that_names_do_not_exist() {
        let mut types = UnservedTypes::default();
        let mut ask = |nonce: &str, names: &[&str]| {
            let answer = types.answer(Protocol::Delta, UNKNOWN, request(nonce, names));
            answer.map(|answer| answer.removed)
        };
        assert_eq!(ask("", &["a"]), Some(vec!["a".to_owned()]));
        assert_eq!(ask("0-1", &[]), None);
        assert_eq!(ask("", &["b"]), Some(vec!["b".to_owned()]));
    }

    #[test]
    fn a_stream_remembers_few_types() {
        let mut types = UnservedTypes::default();
        for number in 0..100 {
            types.answer(
                Protocol::Sotw,
                &format!("type.googleapis.com/t{number}"),
                request("", &[]),
            );
        }
        assert_eq!(types.types.len(), MAX_TYPES);
    }
}
