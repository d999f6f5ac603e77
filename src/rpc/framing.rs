//! The framing of gRPC messages: each has a prefix of one byte (the compression flag) and four bytes (the length).

use bytes::{BufMut, Bytes, BytesMut};

/// The length of the prefix.
pub const PREFIX_LEN: usize = 5;

/// The prefix of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// True if the message is compressed.
    pub is_compressed: bool,
    /// The length of the message, without the prefix.
    pub size_bytes: usize,
}

impl Prefix {
    /// Reads the prefix at the start of a buffer; `None` if the buffer is too short.
    pub fn read(buffer: &[u8]) -> Option<Self> {
        let [flag, size @ ..] = *buffer.first_chunk::<PREFIX_LEN>()?;
        Some(Self {
            is_compressed: flag != 0,
            size_bytes: u32::from_be_bytes(size) as usize,
        })
    }
}

/// A message of 4 GiB or more, which cannot be a gRPC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the response has {0} bytes, which is more than a gRPC message can have")]
pub struct TooLarge(pub usize);

/// Returns the prefix of an uncompressed message of this size.
pub fn prefix(size_bytes: usize) -> Result<[u8; PREFIX_LEN], TooLarge> {
    let [a, b, c, d] = u32::try_from(size_bytes)
        .map_err(|_| TooLarge(size_bytes))?
        .to_be_bytes();
    Ok([0, a, b, c, d])
}

/// Returns a message with its prefix.
pub fn framed(message: &[u8]) -> Result<Bytes, TooLarge> {
    let prefix = prefix(message.len())?;
    let mut bytes = BytesMut::with_capacity(PREFIX_LEN + message.len());
    bytes.put_slice(&prefix);
    bytes.put_slice(message);
    Ok(bytes.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_read_as_written() {
        let bytes = framed(b"abc").expect("a message within the size limit");
        assert_eq!(bytes, "\0\0\0\0\x03abc");
        let read = Prefix::read(&bytes).expect("a complete prefix");
        assert!(!read.is_compressed && read.size_bytes == 3);
        assert!(
            Prefix::read(b"\x01\0\0\x01\0")
                .expect("a complete prefix")
                .is_compressed
        );
        assert_eq!(Prefix::read(b"\0\0\0\0"), None);
        assert_eq!(prefix(1 << 32), Err(TooLarge(1 << 32)));
    }
}
