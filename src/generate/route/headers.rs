//! Header operations.

use std::collections::BTreeMap;

use crate::{
    api::istio::{common::is_header_part, format_string},
    proto::{
        envoy::config::core::v3::{HeaderValue, HeaderValueOption, header_value_option::HeaderAppendAction},
        istio::networking::v1alpha3::{Headers, headers::HeaderOperations},
    },
};

/// Header operations in Envoy's form.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HeaderChanges {
    /// Headers to set, followed by headers to add.
    pub(super) request_add: Vec<HeaderValueOption>,
    /// Headers to remove.
    pub(super) request_remove: Vec<String>,
    /// Headers to set, followed by headers to add.
    pub(super) response_add: Vec<HeaderValueOption>,
    /// Headers to remove.
    pub(super) response_remove: Vec<String>,
    /// Value of `host` or `:authority`: a rewrite of the host, not a header operation.
    pub(crate) authority: Option<String>,
}

impl HeaderChanges {
    /// Translates declared operations.
    pub(crate) fn of(declared: Option<&Headers>) -> Self {
        let none = HeaderOperations::default();
        let request = declared.and_then(|headers| headers.request.as_ref()).unwrap_or(&none);
        let response = declared.and_then(|headers| headers.response.as_ref()).unwrap_or(&none);
        Self {
            request_add: additions(request),
            request_remove: removals(request),
            response_add: additions(response),
            response_remove: removals(response),
            authority: authority(request),
        }
    }
}

/// Returns a header to set or add.
pub(crate) fn header(key: &str, value: &str, action: HeaderAppendAction) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: key.to_owned(),
            value: value.to_owned(),
            ..Default::default()
        }),
        append_action: action.into(),
        ..Default::default()
    }
}

/// Returns headers to set, then headers to add, each sorted by key. A value that is not a format string is literal.
fn additions(operations: &HeaderOperations) -> Vec<HeaderValueOption> {
    let set = operations
        .set
        .iter()
        .map(|pair| (pair, HeaderAppendAction::OverwriteIfExistsOrAdd));
    let add = operations
        .add
        .iter()
        .map(|pair| (pair, HeaderAppendAction::AppendIfExistsOrAdd));
    set.chain(add)
        .filter(|((key, _), _)| !is_internal(key))
        .map(|((key, value), action)| (key, format_string::accepted(value), action))
        // Escapes may make a value longer than Envoy accepts.
        .filter(|(_, value, _)| is_header_part(value))
        .map(|(key, value, action)| header(key, &value, action))
        .collect()
}

fn removals(operations: &HeaderOperations) -> Vec<String> {
    operations
        .remove
        .iter()
        .filter(|key| !is_internal(key))
        .cloned()
        .collect()
}

fn authority(operations: &HeaderOperations) -> Option<String> {
    let find = |map: &BTreeMap<String, String>| {
        let mut values = map.iter().filter(|(key, _)| is_authority(key)).map(|(_, value)| value);
        values.next_back().filter(|value| !value.is_empty()).cloned()
    };
    find(&operations.set).or_else(|| find(&operations.add))
}

/// Returns true for pseudo headers and `host`: Envoy refuses operations on them.
fn is_internal(key: &str) -> bool {
    key.starts_with(':') || key.eq_ignore_ascii_case("host")
}

fn is_authority(key: &str) -> bool {
    key.eq_ignore_ascii_case(":authority") || key.eq_ignore_ascii_case("host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_envoy_refuses_are_literal_or_left_out() {
        let values = [
            ("a", "50%".to_owned()),
            ("b", "%REQ(x)%".to_owned()),
            ("c", "%".repeat(16_383)),
        ];
        let set = values.into_iter().map(|(name, value)| (name.to_owned(), value));
        let request = HeaderOperations {
            set: set.collect(),
            ..Default::default()
        };
        let declared = Headers {
            request: Some(request),
            ..Default::default()
        };
        let added = HeaderChanges::of(Some(&declared)).request_add;
        let added: Vec<_> = added.into_iter().filter_map(|option| option.header).collect();
        let pairs: Vec<_> = added.iter().map(|header| (&*header.key, &*header.value)).collect();
        assert_eq!(pairs, [("a", "50%%"), ("b", "%REQ(x)%")]);
    }
}
