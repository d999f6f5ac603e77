//! The names of subscriptions. Thousands of proxies ask for the same thousands of names, and repeat them all with each
//! ACK; so lists that came as the same bytes are read once and shared.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use bytes::Bytes;
use imbl::OrdSet;
use prost::{DecodeError, encoding};
use rustc_hash::FxHashMap;
use smol_str::SmolStr;
use xxhash_rust::xxh3::xxh3_64;

/// Shorter lists are not worth the look whether somebody else has them.
const SMALL_BYTES: usize = 1 << 10;
/// With fewer lists nobody looks which of them are still used.
const FEW: usize = 64;

/// The name that means everything.
const WILDCARD: &str = "*";

/// Names as they came in one request.
#[derive(Clone, Default)]
pub struct Names {
    /// What they were read from, if others may have the same.
    fields: Bytes,
    wildcard: bool,
    set: OrdSet<SmolStr>,
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.wildcard.then_some(WILDCARD))
            .entries(self.set.iter())
            .finish()
    }
}

impl FromIterator<SmolStr> for Names {
    fn from_iter<I: IntoIterator<Item = SmolStr>>(names: I) -> Self {
        let mut result = Self::default();
        result.set = names
            .into_iter()
            .filter(|name| {
                let is_wildcard = name == WILDCARD;
                result.wildcard |= is_wildcard;
                !is_wildcard
            })
            .collect();
        result
    }
}

impl Names {
    /// True if nothing was named, not even everything.
    pub fn is_empty(&self) -> bool {
        !self.wildcard && self.set.is_empty()
    }

    /// True if `*` is among them.
    pub fn wildcard(&self) -> bool {
        self.wildcard
    }

    /// The names but for `*`.
    pub fn set(&self) -> &OrdSet<SmolStr> {
        &self.set
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = SmolStr> {
        let wildcard = self.wildcard.then_some(SmolStr::new_static(WILDCARD));
        wildcard.into_iter().chain(self.set.iter().cloned())
    }

    /// Reads fields of strings, tags included.
    fn read(mut rest: &[u8]) -> Result<Self, DecodeError> {
        let mut names = Vec::new();
        while !rest.is_empty() {
            let (_, wire_type) = encoding::decode_key(&mut rest)?;
            let mut name = String::new();
            encoding::string::merge(wire_type, &mut name, &mut rest, encoding::DecodeContext::default())?;
            names.push(SmolStr::from(name));
        }
        Ok(names.into_iter().collect())
    }
}

/// The lists that some connection has, by the hash of their bytes.
#[derive(Default)]
pub(super) struct KnownNames {
    /// Locked for one look or one insertion.
    lists: Mutex<FxHashMap<u64, Weak<Names>>>,
}

impl KnownNames {
    /// Reads fields of strings, tags included, or finds that they were read already.
    pub(super) fn read(&self, fields: Bytes) -> Result<Arc<Names>, DecodeError> {
        if fields.len() < SMALL_BYTES {
            return Names::read(&fields).map(Arc::new);
        }
        let hash = xxh3_64(&fields);
        let known = self.lock().get(&hash).and_then(Weak::upgrade);
        match known {
            Some(known) if known.fields == fields => return Ok(known),
            // Another list of the same hash stays; that costs only the sharing.
            Some(_) => return Names::read(&fields).map(Arc::new),
            None => {}
        }
        // A copy, lest the request that they came in be held for as long as they are.
        let names = Arc::new(Names {
            fields: Bytes::copy_from_slice(&fields),
            ..Names::read(&fields)?
        });
        let mut lists = self.lock();
        if lists.len() >= FEW && lists.len() == lists.capacity() {
            lists.retain(|_, names| names.strong_count() > 0);
        }
        lists.insert(hash, Arc::downgrade(&names));
        Ok(names)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FxHashMap<u64, Weak<Names>>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(names: &[String]) -> Bytes {
        let mut bytes = Vec::new();
        encoding::string::encode_repeated(3, names, &mut bytes);
        bytes.into()
    }

    fn many(prefix: &str) -> Vec<String> {
        (0..100)
            .map(|number| format!("{prefix}-{number}.default.svc"))
            .collect()
    }

    #[test]
    fn equal_lists_are_shared_while_somebody_has_them() {
        let known = KnownNames::default();
        let read = |names: &[String]| known.read(fields(names)).expect("well-formed");
        let (a, b) = (many("a"), many("b"));
        let first = read(&a);
        assert!(Arc::ptr_eq(&first, &read(&a)));
        assert!(!Arc::ptr_eq(&first, &read(&b)));
        assert_eq!(first.set().len(), 100);
        drop(first);
        assert_eq!(read(&a).set().len(), 100);
        for number in 0..10 * FEW {
            read(&many(&number.to_string()));
        }
        assert!(known.lock().len() <= 4 * FEW, "what nobody has is forgotten");
    }

    #[test]
    fn everything_is_no_name() {
        let known = KnownNames::default();
        let names = known.read(fields(&["*".into(), "a".into()])).expect("well-formed");
        assert!(names.wildcard() && !names.is_empty());
        assert_eq!(names.set().iter().collect::<Vec<_>>(), ["a"]);
        assert!(known.read(Bytes::new()).expect("well-formed").is_empty());
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let known = KnownNames::default();
        assert!(known.read(Bytes::from_static(&[0x1a, 1, 0xff])).is_err());
        assert!(known.read(Bytes::from_static(&[0x1a, 9, b'a'])).is_err());
    }
}
