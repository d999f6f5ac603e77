//! What a client says it holds when it connects again (`initial_resource_versions`). Thousands do so at once, each with
//! thousands of names, so it is kept as it came until it is compared.

use std::fmt;

use bytes::Bytes;
use prost::{
    DecodeError,
    encoding::{self, DecodeContext, WireType},
};
use rustc_hash::FxHashMap;

use crate::base::Version;

/// Entries of a protobuf map from names to versions, with their tags.
#[derive(Clone, Default)]
pub struct Claims(Bytes);

impl Claims {
    /// Takes entries that can be read.
    pub(super) fn read(fields: Bytes) -> Result<Self, DecodeError> {
        let mut rest: &[u8] = &fields;
        while !rest.is_empty() {
            entry(&mut rest)?;
        }
        Ok(Self(fields))
    }

    /// True if nothing is claimed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What is claimed, by name: the version, if it is one of ours. Of a name that is said twice, the last counts.
    pub(super) fn versions(&self) -> FxHashMap<&str, Option<Version>> {
        let mut rest: &[u8] = &self.0;
        let mut versions = FxHashMap::default();
        while let Ok((name, version)) = entry(&mut rest) {
            versions.insert(name, Version::parse(version));
        }
        versions
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.versions()).finish()
    }
}

/// The next entry: name and version.
fn entry<'a>(rest: &mut &'a [u8]) -> Result<(&'a str, &'a str), DecodeError> {
    let (_, wire_type) = encoding::decode_key(rest)?;
    let mut fields = piece(wire_type, rest)?;
    let (mut name, mut version) = ("", "");
    while !fields.is_empty() {
        let (tag, wire_type) = encoding::decode_key(&mut fields)?;
        match tag {
            1 => name = text(wire_type, &mut fields)?,
            2 => version = text(wire_type, &mut fields)?,
            _ => encoding::skip_field(wire_type, tag, &mut fields, DecodeContext::default())?,
        }
    }
    Ok((name, version))
}

fn text<'a>(wire_type: WireType, rest: &mut &'a [u8]) -> Result<&'a str, DecodeError> {
    std::str::from_utf8(piece(wire_type, rest)?).map_err(|_| malformed())
}

fn piece<'a>(wire_type: WireType, rest: &mut &'a [u8]) -> Result<&'a [u8], DecodeError> {
    encoding::check_wire_type(WireType::LengthDelimited, wire_type)?;
    let len = encoding::decode_varint(rest)?;
    let len = usize::try_from(len).ok().filter(|len| *len <= rest.len());
    let (piece, after) = rest.split_at(len.ok_or_else(malformed)?);
    *rest = after;
    Ok(piece)
}

fn malformed() -> DecodeError {
    // The library has no other way to say so.
    encoding::string::merge(
        WireType::LengthDelimited,
        &mut String::new(),
        &mut &[1, 0xff][..],
        DecodeContext::default(),
    )
    .expect_err("because that is no text")
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;

    #[test]
    fn entries_are_those_of_the_message() {
        let version = "00000000000000000000000000000abc";
        let request = DeltaDiscoveryRequest {
            initial_resource_versions: [("a", version), ("b", "1"), ("", "")]
                .map(|(name, version)| (name.to_owned(), version.to_owned()))
                .into(),
            ..Default::default()
        };
        let claims = Claims::read(request.encode_to_vec().into()).expect("well-formed");
        let expected = [("a", Version::parse(version)), ("b", None), ("", None)];
        assert_eq!(claims.versions(), expected.into_iter().collect());
        assert!(!claims.is_empty() && Claims::default().is_empty());
    }

    #[test]
    fn what_is_no_entry_is_refused() {
        for bytes in [
            &[0x2a][..],
            &[0x2a, 5],
            &[0x2a, 3, 0x0a, 1, 0xff],
            &[0x2a, 2, 0x0a, 9],
            &[0x28, 1],
        ] {
            assert!(Claims::read(Bytes::from_static(bytes)).is_err(), "{bytes:?}");
        }
    }
}
