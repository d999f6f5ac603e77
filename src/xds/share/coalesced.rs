//! Coalesced resources: long lists of small resources, copied into large blocks. The transport takes few buffers at a
//! time and thousands of resources are small, so lists are copied once for all streams that are sent them at about the
//! same time. Otherwise the configuration of 2,000 sidecars costs 66 % more CPU time (bench `scale delta`).
//!
//! Lists of different groups are mostly the same: a few resources of the group's own among thousands that all groups
//! have. So a list is cut into content-defined chunks, and a chunk is copied once for all lists that have it. The
//! resources themselves decide where a chunk ends, so an additional resource does not move the ends of the chunks after
//! it.

use std::{
    collections::VecDeque,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

use bytes::Bytes;
use rustc_hash::{FxHashMap, FxHasher};

use crate::{generate::EncodedResource, xds::protocol::Protocol};

/// The size of the lists that are kept while no stream is sent them.
const CACHE_BYTES: usize = 32 << 20;
/// A chunk ends after one in this many resources, chosen by their versions.
const CHUNK_RESOURCES: u128 = 32;
/// A chunk ends at this size: a few HTTP/2 frames, which have 16 KiB each.
const CHUNK_BYTES: usize = 128 << 10;

/// Consecutive resources of a list and their encoding.
#[derive(Debug)]
struct Chunk {
    protocol: Protocol,
    resources: Box<[Arc<EncodedResource>]>,
    bytes: Box<[u8]>,
}

impl Chunk {
    fn new(protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Self {
        let mut bytes = Vec::with_capacity(protocol.size(resources));
        let bufs = resources.iter().flat_map(|resource| protocol.frame(resource).bufs());
        bufs.for_each(|buf| bytes.extend_from_slice(buf));
        Self {
            protocol,
            resources: resources.into(),
            bytes: bytes.into(),
        }
    }

    fn is(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> bool {
        let same = |(one, other): (&Arc<_>, &Arc<_>)| Arc::ptr_eq(one, other);
        self.protocol == protocol
            && self.resources.len() == resources.len()
            && self.resources.iter().zip(resources).all(same)
    }
}

/// A chunk as the owner of its bytes.
struct ChunkBytes(Arc<Chunk>);

impl AsRef<[u8]> for ChunkBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// Returns the chunks of a list, in order.
fn chunks(protocol: Protocol, mut resources: &[Arc<EncodedResource>]) -> impl Iterator<Item = &[Arc<EncodedResource>]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let is_last = |resource: &Arc<EncodedResource>| {
            bytes += protocol.frame(resource).size();
            bytes >= CHUNK_BYTES || resource.version.value().is_multiple_of(CHUNK_RESOURCES)
        };
        let len = resources
            .iter()
            .position(is_last)
            .map_or(resources.len(), |last| last + 1);
        let (chunk, rest) = resources.split_at(len);
        resources = rest;
        (len > 0).then_some(chunk)
    })
}

/// The coalesced form of a list. It exists while a stream is sent it or the [`ChunkCache`] holds it.
#[derive(Debug, Default)]
pub struct CoalescedResources {
    /// By protocol. Locked while it is built, so that concurrent streams do not build it twice.
    blocks: [Mutex<Option<Weak<[Bytes]>>>; 2],
    /// By protocol. Adding it up for each stream would read all of its thousands of resources.
    sizes: [OnceLock<usize>; 2],
    cache: Arc<ChunkCache>,
}

impl CoalescedResources {
    pub(super) fn with_cache(cache: Arc<ChunkCache>) -> Self {
        Self {
            cache,
            ..Self::default()
        }
    }

    /// Returns the size of the encoded list. The list must be the same in each call.
    pub(in crate::xds) fn size(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> usize {
        *self.sizes[protocol as usize].get_or_init(|| protocol.size(resources))
    }

    /// Returns the encoded list in blocks. The list must be the same in each call.
    pub(in crate::xds) fn blocks(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut cached = lock(&self.blocks[protocol as usize]);
        let known = cached.as_ref().and_then(Weak::upgrade);
        let blocks = known.unwrap_or_else(|| {
            let blocks = self.cache.coalesce(protocol, resources);
            *cached = Some(Arc::downgrade(&blocks));
            blocks
        });
        self.cache.put(&blocks);
        blocks
    }
}

/// The chunks that are in use, and the lists that were coalesced last. Proxies rarely connect at exactly the same time,
/// so at most [`CACHE_BYTES`] of these lists are kept.
#[derive(Debug, Default)]
pub(super) struct ChunkCache {
    /// By a hash of their resources. Locked while a list is built.
    chunks: Mutex<FxHashMap<u64, Vec<Weak<Chunk>>>>,
    /// With their sizes; the most recently used comes last. Locked for a scan of the few entries.
    lists: Mutex<VecDeque<(Arc<[Bytes]>, usize)>>,
}

impl ChunkCache {
    /// Drops everything that no stream is being sent.
    pub(super) fn clear(&self) {
        lock(&self.lists).clear();
        lock(&self.chunks).retain(|_, chunks| {
            chunks.retain(|chunk| chunk.strong_count() > 0);
            !chunks.is_empty()
        });
    }

    fn coalesce(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut known = lock(&self.chunks);
        let coalesced = chunks(protocol, resources).map(|chunk| {
            let mut hasher = FxHasher::default();
            for resource in chunk {
                Arc::as_ptr(resource).hash(&mut hasher);
            }
            let alike = known.entry(hasher.finish()).or_default();
            let found = alike
                .iter()
                .filter_map(Weak::upgrade)
                .find(|known| known.is(protocol, chunk));
            let chunk = found.unwrap_or_else(|| {
                alike.retain(|chunk| chunk.strong_count() > 0);
                let chunk = Arc::new(Chunk::new(protocol, chunk));
                alike.push(Arc::downgrade(&chunk));
                chunk
            });
            Bytes::from_owner(ChunkBytes(chunk))
        });
        coalesced.collect()
    }

    fn put(&self, blocks: &Arc<[Bytes]>) {
        let size = blocks.iter().map(Bytes::len).sum();
        if size > CACHE_BYTES {
            return;
        }
        let mut lists = lock(&self.lists);
        lists.retain(|(held, _)| !Arc::ptr_eq(held, blocks));
        lists.push_back((blocks.clone(), size));
        let mut bytes = 0;
        let fitting = lists.iter().rev().take_while(|(_, size)| {
            bytes += size;
            bytes <= CACHE_BYTES
        });
        let surplus = lists.len() - fitting.count();
        lists.drain(..surplus);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::envoy::config::cluster::v3::Cluster;

    fn resources(count: usize, bytes: usize) -> Vec<Arc<EncodedResource>> {
        let resource = |number| {
            let message = Cluster {
                alt_stat_name: format!("{number}").repeat(bytes),
                ..Default::default()
            };
            Arc::new(EncodedResource::new(format!("c{number}"), &message))
        };
        (0..count).map(resource).collect()
    }

    fn pointers(blocks: &[Bytes]) -> Vec<*const u8> {
        blocks.iter().map(|block| block.as_ptr()).collect()
    }

    #[test]
    fn blocks_are_the_concatenated_frames() {
        let mut all = resources(500, 100);
        all.extend(resources(3, CHUNK_BYTES));
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let frames: Vec<Bytes> = all.iter().map(|resource| protocol.frame(resource).to_bytes()).collect();
            let blocks = ChunkCache::default().coalesce(protocol, &all);
            assert_eq!(blocks.concat(), frames.concat());
            assert!((8..100).contains(&blocks.len()), "{}", blocks.len());
        }
        assert!(ChunkCache::default().coalesce(Protocol::Sotw, &[]).is_empty());
    }

    #[test]
    fn lists_share_their_common_chunks() {
        let cache = ChunkCache::default();
        let all = resources(500, 100);
        let mut other = resources(5, 10);
        other.extend(all.iter().cloned());
        other.remove(300);
        let blocks = cache.coalesce(Protocol::Sotw, &all);
        assert_eq!(pointers(&blocks), pointers(&cache.coalesce(Protocol::Sotw, &all)));
        let other = cache.coalesce(Protocol::Sotw, &other);
        let own = pointers(&other)
            .into_iter()
            .filter(|block| !pointers(&blocks).contains(block));
        assert!(own.count() <= 3, "chunks around the difference");
        assert_ne!(pointers(&blocks), pointers(&cache.coalesce(Protocol::Delta, &all)));
    }

    #[test]
    fn coalesced_lists_live_while_sent_or_cached() {
        let (coalesced, resources) = (CoalescedResources::default(), resources(1, 1));
        let first = coalesced.blocks(Protocol::Delta, &resources);
        assert!(Arc::ptr_eq(&first, &coalesced.blocks(Protocol::Delta, &resources)));
        let held = Arc::downgrade(&first);
        drop(first);
        assert!(held.upgrade().is_some());
        let list = |bytes: usize| Arc::from([Bytes::from(vec![0; bytes])]);
        coalesced.cache.put(&list(CACHE_BYTES));
        assert!(held.upgrade().is_none());
        coalesced.cache.put(&list(CACHE_BYTES + 1));
        assert_eq!(
            lock(&coalesced.cache.lists).len(),
            1,
            "too large to displace other lists"
        );
        coalesced.cache.clear();
        assert!(lock(&coalesced.cache.lists).is_empty() && lock(&coalesced.cache.chunks).is_empty());
    }
}
