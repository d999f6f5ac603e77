//! The parts of an encoded request: the large ones are decoded apart from the rest.

use std::ops::Range;

use bytes::Bytes;
use prost::{
    DecodeError,
    encoding::{self, DecodeContext, WireType},
};

use super::{RequestError, malformed};
use crate::xds::protocol::Protocol;

/// The field number of the requested names: `resource_names` and `resource_names_subscribe`.
pub(super) const NAMES: u32 = 3;
/// The field number of `initial_resource_versions`.
const INITIAL_VERSIONS: u32 = 5;
/// The field numbers of the node.
const SOTW_NODE: u32 = 2;
const DELTA_NODE: u32 = 1;

/// The maximum number of fields of a request: more than any valid request has, and few enough that the decoded request
/// is not much larger than the encoded one.
pub(super) const MAX_FIELDS: usize = 250_000;
/// The maximum number of fields of its node. An Envoy has hundreds, one for each extension; a field of 2 bytes is an
/// extension of 150 bytes once it is decoded.
pub(super) const MAX_NODE_FIELDS: usize = 10_000;

/// A request split into parts; each part consists of fields with their tags.
pub(super) struct Parts {
    /// The requested names.
    pub(super) names: Bytes,
    /// `initial_resource_versions` of an incremental request.
    pub(super) initial_versions: Bytes,
    /// All other fields.
    pub(super) rest: Bytes,
}

impl Parts {
    /// Splits a request into parts, unless it has too many fields at the top level or in its node.
    pub(super) fn of(protocol: Protocol, message: &Bytes) -> Result<Self, RequestError> {
        let mut left: &[u8] = message;
        let (mut names, mut initial_versions, mut rest) = (Ranges::default(), Ranges::default(), Ranges::default());
        let mut node_fields = 0;
        for _ in 0..=MAX_FIELDS {
            if left.is_empty() {
                return Ok(Self {
                    names: names.joined(message),
                    initial_versions: initial_versions.joined(message),
                    rest: rest.joined(message),
                });
            }
            let start = message.len() - left.len();
            let (number, wire_type) = skip_field(&mut left).map_err(malformed)?;
            let field = start..message.len() - left.len();
            let ranges = match (number, protocol) {
                (NAMES, _) => &mut names,
                (INITIAL_VERSIONS, Protocol::Delta) => &mut initial_versions,
                (SOTW_NODE, Protocol::Sotw) | (DELTA_NODE, Protocol::Delta)
                    if wire_type == WireType::LengthDelimited =>
                {
                    // Several nodes are one with the fields of all.
                    node_fields += fields_within(&message[field.clone()]).map_err(malformed)?;
                    if node_fields > MAX_NODE_FIELDS {
                        return Err(RequestError::TooManyOfNode);
                    }
                    &mut rest
                }
                _ => &mut rest,
            };
            ranges.add(field);
        }
        Err(RequestError::TooMany)
    }
}

/// Skips a field and returns its number and wire type.
fn skip_field(left: &mut &[u8]) -> Result<(u32, WireType), DecodeError> {
    let (number, wire_type) = encoding::decode_key(left)?;
    encoding::skip_field(wire_type, number, left, DecodeContext::default())?;
    Ok((number, wire_type))
}

/// Returns the number of fields of the message in a field.
fn fields_within(mut field: &[u8]) -> Result<usize, DecodeError> {
    encoding::decode_key(&mut field)?;
    encoding::decode_varint(&mut field)?;
    let mut fields = 0;
    while !field.is_empty() {
        skip_field(&mut field)?;
        fields += 1;
    }
    Ok(fields)
}

/// Ranges of a message, in order; adjacent ones are merged.
#[derive(Default)]
struct Ranges(Vec<Range<usize>>);

impl Ranges {
    fn add(&mut self, range: Range<usize>) {
        match self.0.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.0.push(range),
        }
    }

    /// Returns the concatenated ranges. A single one is not copied.
    fn joined(self, message: &Bytes) -> Bytes {
        match self.0.as_slice() {
            [] => Bytes::new(),
            [only] => message.slice(only.clone()),
            several => {
                let parts = several.iter().map(|range| &message[range.clone()]);
                parts.collect::<Vec<_>>().concat().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r20_nodes_have_a_limited_number_of_fields() {
        // An empty extension.
        let of_node = |fields: usize| [0x4a_u8, 0].repeat(fields);
        let request = |number: u32, nodes: &[Vec<u8>]| {
            let mut message = Vec::new();
            for node in nodes {
                encoding::bytes::encode(number, node, &mut message);
            }
            Bytes::from(message)
        };
        for (protocol, number) in [(Protocol::Sotw, SOTW_NODE), (Protocol::Delta, DELTA_NODE)] {
            let most = request(number, &[of_node(MAX_NODE_FIELDS - 1), of_node(1)]);
            let parts = Parts::of(protocol, &most).expect("few enough fields");
            assert_eq!(parts.rest, most);
            let more = request(number, &[of_node(MAX_NODE_FIELDS), of_node(1)]);
            let refused = Parts::of(protocol, &more).map(drop);
            assert_eq!(refused, Err(RequestError::TooManyOfNode));
        }
        // The same number is another field in the other protocol.
        let other = request(DELTA_NODE, &[of_node(MAX_NODE_FIELDS + 1)]);
        assert!(Parts::of(Protocol::Sotw, &other).is_ok());
    }
}
