//! `Version`: the content hash of a resource, as sent on the wire. Equal bytes have equal versions on every replica.

use std::fmt;

/// A 128-bit content hash (xxh3). Not cryptographic: it distinguishes versions of trusted content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(u128);

impl Version {
    /// The length of the text form.
    pub const TEXT_LEN: usize = 32;

    /// Returns the version of bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128(bytes))
    }

    /// Parses the text of `Display`; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != Self::TEXT_LEN {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(Self)
    }

    /// Returns the text, as `Display` writes it.
    pub fn text(self) -> [u8; Self::TEXT_LEN] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; Self::TEXT_LEN];
        for (byte, pair) in self.0.to_be_bytes().into_iter().zip(text.chunks_exact_mut(2)) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        text
    }

    /// Returns true for a text with capital letters, as in
    /// [`EncodedResource::unconfirmed`](crate::generate::EncodedResource::unconfirmed). It parses as the same version.
    pub fn is_in_capitals(text: &str) -> bool {
        Self::parse(text).is_some() && text.bytes().any(|byte| byte.is_ascii_uppercase())
    }

    /// Returns the hash.
    pub fn value(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_text_forms_are_the_same() {
        let version = Version::of(b"some bytes");
        assert_eq!(version.text(), version.to_string().as_bytes());
        assert_eq!(Version::parse(&version.to_string()), Some(version));
        assert!(!Version::is_in_capitals(&version.to_string()));
        let capitals = version.to_string().to_uppercase();
        assert_eq!(Version::parse(&capitals), Some(version));
        assert!(Version::is_in_capitals(&capitals) && !Version::is_in_capitals("A"));
    }
}
