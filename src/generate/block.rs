//! Blocks: runs of encoded fields that many resources have in common, held once.
//!
//! The route configurations of a port differ between namespaces in the virtual hosts of a namespace's own services, and
//! a changed VirtualService concerns a single virtual host. So a route configuration is cut into blocks by its content,
//! and equal blocks are one allocation. A block is known by the hashes of its parts, so one that exists is not written
//! again.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::base::Version;

/// A run of encoded fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// The hash of the bytes, or of the parts that they consist of.
    pub version: Version,
    /// The fields.
    pub bytes: Bytes,
}

impl Block {
    /// Returns a run with the hash of its bytes.
    pub fn new(bytes: Bytes) -> Self {
        Self {
            version: Version::of(&bytes),
            bytes,
        }
    }
}

/// The blocks in use.
#[derive(Debug, Default)]
pub struct BlockPool {
    /// Locked for a look-up or an insertion.
    blocks: Mutex<FxHashMap<Version, Bytes>>,
    has_new: AtomicBool,
}

impl BlockPool {
    /// Returns the block with this hash of its parts, which is written if there is none yet.
    pub fn share(&self, version: Version, write: impl Fn() -> Vec<u8>) -> Block {
        let lock = || self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let held = lock().get(&version).cloned();
        let bytes = held.unwrap_or_else(|| {
            let written = Bytes::from(write().into_boxed_slice());
            self.has_new.store(true, Ordering::Relaxed);
            lock().entry(version).or_insert(written).clone()
        });
        debug_assert!(*bytes == *write(), "equal parts have equal bytes");
        Block { version, bytes }
    }

    /// Drops the blocks that no resource has any more.
    pub fn collect(&self) {
        if self.has_new.swap(false, Ordering::Relaxed) {
            let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.retain(|_, block| !block.is_unique());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_blocks_are_held_once_while_they_are_used() {
        let pool = BlockPool::default();
        let share = |text: &str| pool.share(Version::of(text.as_bytes()), || text.into());
        let (one, same, other) = (share("one"), share("one"), share("other"));
        assert_eq!(one.bytes.as_ptr(), same.bytes.as_ptr());
        assert_eq!((one.version, &*other.bytes), (Version::of(b"one"), &b"other"[..]));
        drop((same, other));
        pool.collect();
        let blocks = pool.blocks.lock().expect("no panic");
        assert_eq!(blocks.keys().collect::<Vec<_>>(), [&one.version]);
    }
}
