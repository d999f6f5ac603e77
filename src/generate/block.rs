//! Blocks: runs of encoded fields that many resources have in common, held once.
//!
//! The route configurations of a port differ between namespaces in the virtual hosts of a namespace's own services, and
//! a changed VirtualService concerns a single virtual host. So a route configuration is cut into blocks by its content,
//! and equal blocks are one allocation.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::base::Version;

/// A run of encoded fields.
#[derive(Clone, Debug)]
pub struct Block {
    /// The hash of the bytes.
    pub version: Version,
    /// The fields.
    pub bytes: Bytes,
}

/// The blocks in use.
#[derive(Debug, Default)]
pub struct BlockPool {
    /// Locked for a look-up or an insertion.
    blocks: Mutex<FxHashMap<Version, Bytes>>,
    has_new: AtomicBool,
}

impl BlockPool {
    /// Returns the block with these bytes.
    pub fn share(&self, bytes: &[u8]) -> Block {
        let version = Version::of(bytes);
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let held = blocks.entry(version).or_insert_with(|| {
            self.has_new.store(true, Ordering::Relaxed);
            Bytes::copy_from_slice(bytes)
        });
        Block {
            version,
            bytes: held.clone(),
        }
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
        let (one, same, other) = (pool.share(b"one"), pool.share(b"one"), pool.share(b"other"));
        assert_eq!(one.bytes.as_ptr(), same.bytes.as_ptr());
        assert_eq!((one.version, &*other.bytes), (Version::of(b"one"), &b"other"[..]));
        drop((same, other));
        pool.collect();
        let blocks = pool.blocks.lock().expect("no panic");
        assert_eq!(blocks.keys().collect::<Vec<_>>(), [&one.version]);
    }
}
