//! The bytes of the next request, without the name lists that it repeats.
//!
//! A state-of-the-world client repeats all names of its subscription with each ACK. While the names that arrive equal
//! those of a list that this stream has sent before, they are compared and not stored, and the list is neither hashed
//! nor decoded again. So an ACK needs memory for its other fields only: less than 1,000 bytes for 1,000 names, which
//! have about 60 KiB (test `repeated_lists_are_not_stored`). Thousands of proxies acknowledge at once after a push.

use std::sync::{Arc, Weak};

use bytes::{Buf, Bytes, BytesMut};
use prost::encoding::{self, DecodeContext};

use super::{RequestError, parts::NAMES};
use crate::{
    rpc::framing::{PREFIX_LEN, Prefix},
    xds::share::names::Names,
};

/// The minimum size of the common start of two lists; fewer bytes do not show that a list is repeated.
const MIN_REPEATED_BYTES: usize = 256;
/// The number of lists that are remembered: one for each type that is requested by name.
const RECENT_LISTS: usize = 4;

/// See the module's documentation.
pub(super) struct RequestBuffer {
    /// The bytes of the next request that have arrived, except those that `repeated` stands for.
    bytes: BytesMut,
    /// The names of the next request that equal a recent list.
    repeated: Option<Repeated>,
    /// Lists of this stream that other streams may have too; the most recent comes last.
    recent: Vec<Weak<Names>>,
    limit_bytes: usize,
}

/// A complete message.
#[derive(Debug)]
pub(super) struct Received {
    /// The message, without `repeated`.
    pub(super) message: Bytes,
    /// The names that it repeats.
    pub(super) repeated: Option<Arc<Names>>,
}

/// Names of a message that equal a list which its stream has sent before.
struct Repeated {
    names: Arc<Names>,
    /// Their position in the message.
    at: usize,
    /// The number of their bytes that have arrived.
    len: usize,
}

impl RequestBuffer {
    pub(super) fn new(limit_bytes: usize) -> Self {
        Self {
            bytes: BytesMut::new(),
            repeated: None,
            recent: Vec::new(),
            limit_bytes,
        }
    }

    /// Returns the number of bytes that are stored.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns true if no part of a request is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Drops all bytes.
    pub(super) fn clear(&mut self) {
        self.bytes = BytesMut::new();
    }

    /// Returns the size of the next request, or 0 if it is not known yet.
    fn size_bytes(&self) -> usize {
        Prefix::read(&self.bytes).map_or(0, |prefix| prefix.size_bytes)
    }

    /// Returns the size of the next request, of which these bytes have arrived last; 0 if it is not known yet.
    pub(super) fn size_bytes_with(&self, arrived: &[u8]) -> usize {
        if self.bytes.is_empty() {
            Prefix::read(arrived).map_or(0, |prefix| prefix.size_bytes)
        } else {
            self.size_bytes()
        }
    }

    /// Returns true if the next request may repeat a list, which is not stored again.
    pub(super) fn may_repeat(&self) -> bool {
        !self.recent.is_empty()
    }

    /// Reserves memory for the rest of a request of this size, so that it is not copied as it grows.
    pub(super) fn reserve(&mut self, size_bytes: usize) {
        let missing = (PREFIX_LEN + size_bytes).saturating_sub(self.bytes.len());
        self.bytes.reserve(missing.min(self.limit_bytes));
    }

    /// Remembers a list that was requested.
    pub(super) fn remember(&mut self, names: &Arc<Names>) {
        if !names.fields().is_empty() {
            self.recent.retain(|recent| recent.as_ptr() != Arc::as_ptr(names));
            self.recent.push(Arc::downgrade(names));
            let surplus = self.recent.len().saturating_sub(RECENT_LISTS);
            self.recent.drain(..surplus);
        }
    }

    /// Appends bytes that have arrived.
    pub(super) fn append(&mut self, mut data: &[u8]) {
        let (missing, stored) = (self.missing_bytes(), self.bytes.len());
        if let Some(repeated) = &mut self.repeated
            && stored == PREFIX_LEN + repeated.at
        {
            let rest = &repeated.names.fields()[repeated.len..];
            let len = rest.len().min(data.len()).min(missing);
            if rest[..len] == data[..len] {
                repeated.len += len;
                data = &data[len..];
            } else {
                self.unfold();
            }
        }
        self.bytes.extend_from_slice(data);
        if stored == 0 {
            self.look_for_repetition();
        }
    }

    /// Returns how much of the next message has not arrived, as far as its size is known.
    fn missing_bytes(&self) -> usize {
        let here = self.bytes.len() + self.repeated.as_ref().map_or(0, |repeated| repeated.len);
        (PREFIX_LEN + self.size_bytes()).saturating_sub(here)
    }

    /// Checks if the names of the message that has begun to arrive may equal a recent list.
    fn look_for_repetition(&mut self) {
        let Some(prefix) = Prefix::read(&self.bytes) else {
            return;
        };
        let start = &self.bytes[PREFIX_LEN..];
        // The rest may belong to the next message.
        let start = &start[..start.len().min(prefix.size_bytes)];
        if start.len() < MIN_REPEATED_BYTES {
            return;
        }
        let Some(at) = names_at(start) else { return };
        self.recent.retain(|names| names.strong_count() > 0);
        let recent = self.recent.iter().rev().filter_map(Weak::upgrade);
        let begins = |names: &Arc<Names>| {
            let fields = names.fields();
            let len = fields.len().min(start.len() - at);
            len >= MIN_REPEATED_BYTES && fields[..len] == start[at..at + len]
        };
        let Some(names) = recent.into_iter().find(begins) else {
            return;
        };
        let len = names.fields().len().min(start.len() - at);
        let rest = self.bytes.split_off(PREFIX_LEN + at + len);
        self.bytes.truncate(PREFIX_LEN + at);
        self.bytes.unsplit(rest);
        self.repeated = Some(Repeated { names, at, len });
    }

    /// Stores the repeated names, as if they had not been compared.
    fn unfold(&mut self) {
        let Some(repeated) = self.repeated.take() else { return };
        let rest = self.bytes.split_off(PREFIX_LEN + repeated.at);
        self.bytes.extend_from_slice(&repeated.names.fields()[..repeated.len]);
        self.bytes.extend_from_slice(&rest);
    }

    /// Removes the next message from the buffer, if all of it has arrived.
    pub(super) fn next_message(&mut self) -> Result<Option<Received>, RequestError> {
        let Some(Prefix {
            is_compressed,
            size_bytes,
        }) = Prefix::read(&self.bytes)
        else {
            return Ok(None);
        };
        if is_compressed {
            return Err(RequestError::Compressed);
        }
        if size_bytes > self.limit_bytes {
            return Err(RequestError::TooLarge {
                size_bytes,
                limit_bytes: self.limit_bytes,
            });
        }
        if self.missing_bytes() > 0 {
            return Ok(None);
        }
        let mut repeated = self.repeated.take();
        if let Some(found) = &repeated {
            let rest = &self.bytes[PREFIX_LEN + found.at..PREFIX_LEN + size_bytes - found.len];
            // More names that follow belong to the list.
            if found.len < found.names.fields().len() || names_at(rest).is_some() {
                self.repeated = repeated.take();
                self.unfold();
            }
        }
        self.bytes.advance(PREFIX_LEN);
        let omitted = repeated.as_ref().map_or(0, |repeated| repeated.len);
        let message = self.bytes.split_to(size_bytes - omitted).freeze();
        if self.bytes.is_empty() {
            // Otherwise the stream would keep the memory of its largest request.
            self.bytes = BytesMut::new();
        } else {
            self.look_for_repetition();
        }
        Ok(Some(Received {
            message,
            repeated: repeated.map(|repeated| repeated.names),
        }))
    }
}

/// Returns the position of the first name in a message, as far as it has arrived.
fn names_at(message: &[u8]) -> Option<usize> {
    let mut left = message;
    while !left.is_empty() {
        let at = message.len() - left.len();
        let (tag, wire_type) = encoding::decode_key(&mut left).ok()?;
        if tag == NAMES {
            return Some(at);
        }
        encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default()).ok()?;
    }
    None
}
