//! The names of subscriptions, interned. Thousands of proxies request the same thousands of names, each in its own
//! order, and repeat them with each ACK. So lists with the same names are decoded once and shared. With 200
//! state-of-the-world sidecars and 1,000 services, a changed EndpointSlice would otherwise cost eight times the CPU
//! time, and peak memory would be 65 % higher (bench `scale sotw`).

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;
use imbl::OrdSet;
use prost::{DecodeError, encoding};
use rustc_hash::FxHashMap;
use smol_str::SmolStr;

use super::{
    held::{Charge, HeldBytes, size_of_names},
    set_hash::{SetHash, SetHasher, insert},
};
use crate::base::keyed;

/// Shorter lists are not interned.
const SMALL_BYTES: usize = 1 << 10;

/// The name for all resources.
const WILDCARD: &str = "*";

/// The names of one request.
#[derive(Clone, Default)]
pub struct Names {
    /// Their encoded form, if they are interned.
    fields: Bytes,
    wildcard: bool,
    set: OrdSet<SmolStr>,
    /// The memory that they use, if they are interned.
    held: Option<Arc<Charge>>,
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
    /// Returns true without names and wildcard.
    pub fn is_empty(&self) -> bool {
        !self.wildcard && self.set.is_empty()
    }

    /// Returns true if `*` is among them.
    pub fn wildcard(&self) -> bool {
        self.wildcard
    }

    /// Returns their encoded form, if they are interned; otherwise nothing.
    pub(in crate::xds) fn fields(&self) -> &Bytes {
        &self.fields
    }

    /// Returns the memory that each connection with this list uses.
    pub(in crate::xds) fn share(self: &Arc<Self>) -> usize {
        let held = self.held.as_ref().map_or(0, Charge::share);
        held / Arc::strong_count(self).max(1)
    }

    /// Returns the size of the names; that of their encoded form, which is a little larger, if they are interned.
    pub(in crate::xds) fn size_bytes(&self) -> usize {
        if self.fields.is_empty() {
            self.set.iter().map(SmolStr::len).sum()
        } else {
            self.fields.len()
        }
    }

    /// Returns the names except `*`.
    pub fn set(&self) -> &OrdSet<SmolStr> {
        &self.set
    }

    /// Returns all names, including `*`.
    pub(in crate::xds) fn iter(&self) -> impl Iterator<Item = SmolStr> {
        let wildcard = self.wildcard.then_some(SmolStr::new_static(WILDCARD));
        wildcard.into_iter().chain(self.set.iter().cloned())
    }

    /// Decodes string fields, including their tags.
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

/// The lists that connections use.
#[derive(Default)]
pub(in crate::xds) struct NameListInterner {
    held: Arc<HeldBytes>,
    /// The empty list. A proxy has it for the three types that it requests by wildcard; each would take 96 bytes.
    empty: Arc<Names>,
    /// Locked for one lookup or one insertion.
    lists: Mutex<Lists>,
    hasher: SetHasher,
}

#[derive(Default)]
struct Lists {
    /// By a keyed hash of their encoded form.
    by_bytes: FxHashMap<u64, Weak<Names>>,
    /// By a hash of the set of names.
    by_set: FxHashMap<SetHash, Weak<Names>>,
}

impl NameListInterner {
    /// Creates an interner that charges its lists here.
    pub(in crate::xds) fn new(held: Arc<HeldBytes>) -> Self {
        Self {
            held,
            ..Self::default()
        }
    }

    /// Decodes string fields, including their tags, or returns a list with the same names in any order.
    pub(in crate::xds) fn read(&self, fields: Bytes) -> Result<Arc<Names>, DecodeError> {
        if fields.is_empty() {
            return Ok(self.empty.clone());
        }
        if fields.len() < SMALL_BYTES {
            return Names::read(&fields).map(Arc::new);
        }
        let hash = keyed::hash(&fields);
        let known = self.lock().by_bytes.get(&hash).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|known| known.fields == fields) {
            return Ok(known);
        }
        let set_hash = self.hasher.hash(&fields)?;
        let known = self.lock().by_set.get(&set_hash).and_then(Weak::upgrade);
        if let Some(known) = known {
            return Ok(known);
        }
        // A copy, so that the request is not kept in memory for as long as the names.
        let names = Names::read(&fields)?;
        let size_bytes = fields.len() + size_of_names(names.set.len(), fields.len());
        let names = Arc::new(Names {
            fields: Bytes::copy_from_slice(&fields),
            held: Some(self.held.charge(size_bytes)),
            ..names
        });
        let mut lists = self.lock();
        insert(&mut lists.by_bytes, hash, &names);
        insert(&mut lists.by_set, set_hash, &names);
        Ok(names)
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::share::set_hash::FEW;

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
    fn equal_lists_are_shared_while_in_use() {
        let known = NameListInterner::default();
        let read = |names: &[String]| known.read(fields(names)).expect("valid names");
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
        let lists = known.lock();
        let most = lists.by_bytes.len().max(lists.by_set.len());
        assert!(most <= 4 * FEW, "unused lists are removed");
    }

    #[test]
    fn lists_are_shared_in_any_order() {
        let known = NameListInterner::default();
        let read = |names: &[String]| known.read(fields(names)).expect("valid names");
        let mut names = many("a");
        let first = read(&names);
        names.reverse();
        assert!(Arc::ptr_eq(&first, &read(&names)));
        names[0].push('x');
        assert!(!Arc::ptr_eq(&first, &read(&names)));
        names.truncate(99);
        assert_eq!(read(&names).set().len(), 99);
    }

    #[test]
    fn the_wildcard_is_not_a_name() {
        let known = NameListInterner::default();
        let names = known.read(fields(&["*".into(), "a".into()])).expect("valid names");
        assert!(names.wildcard() && !names.is_empty());
        assert_eq!(names.set().iter().collect::<Vec<_>>(), ["a"]);
        let empty = || known.read(Bytes::new()).expect("valid names");
        assert!(empty().is_empty() && Arc::ptr_eq(&empty(), &empty()));
    }

    #[test]
    fn malformed_names_are_rejected() {
        let known = NameListInterner::default();
        assert!(known.read(Bytes::from_static(&[0x1a, 1, 0xff])).is_err());
        assert!(known.read(Bytes::from_static(&[0x1a, 9, b'a'])).is_err());
    }
}
