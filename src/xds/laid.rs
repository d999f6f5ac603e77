//! Resources laid end to end. The transport takes few pieces at a time, and thousands of resources are small; so long lists are
//! copied into large blocks, once for all who are sent them at about the same time.
//!
//! Lists of different groups are the same for the most part: a few resources of the group's own stand among thousands that all
//! have. So a list is cut into runs, and a run is laid once for all lists that have it. Where a run ends is decided by the
//! resources themselves; then what comes before a resource does not move the ends after it.

use std::{
    collections::VecDeque,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;
use rustc_hash::{FxHashMap, FxHasher};

use super::{body::frame, connection::Protocol};
use crate::generate::EncodedResource;

/// What is kept of lists that nobody is being sent just now.
const SHELF_BYTES: usize = 32 << 20;
/// A run ends after one in so many resources, by their versions.
const RUN_RESOURCES: u128 = 32;
/// A run ends when it has as much as this: some frames of HTTP/2, which have 16 KiB each.
const RUN_BYTES: usize = 128 << 10;

/// Resources that follow one another in some list, and what they are on the wire.
#[derive(Debug)]
struct Run {
    protocol: Protocol,
    resources: Box<[Arc<EncodedResource>]>,
    bytes: Box<[u8]>,
}

impl Run {
    fn new(protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Self {
        let frames = || resources.iter().map(|resource| frame(protocol, resource));
        let mut bytes = Vec::with_capacity(frames().map(Bytes::len).sum());
        frames().for_each(|frame| bytes.extend_from_slice(frame));
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

/// A run as an owner of bytes.
struct Held(Arc<Run>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// The runs of a list, the next one first.
fn runs(protocol: Protocol, mut resources: &[Arc<EncodedResource>]) -> impl Iterator<Item = &[Arc<EncodedResource>]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let is_last = |resource: &Arc<EncodedResource>| {
            bytes += frame(protocol, resource).len();
            bytes >= RUN_BYTES || resource.version.value().is_multiple_of(RUN_RESOURCES)
        };
        let len = resources
            .iter()
            .position(is_last)
            .map_or(resources.len(), |last| last + 1);
        let (run, rest) = resources.split_at(len);
        resources = rest;
        (len > 0).then_some(run)
    })
}

/// How a list is laid end to end, for as long as somebody is being sent it or it is on the [`Shelf`].
#[derive(Debug, Default)]
pub struct Laid {
    /// By protocol. Locked while it is made: whoever comes meanwhile would only make the same.
    blocks: [Mutex<Option<Weak<[Bytes]>>>; 2],
    shelf: Arc<Shelf>,
}

impl Laid {
    pub(super) fn on(shelf: Arc<Shelf>) -> Self {
        Self {
            shelf,
            ..Self::default()
        }
    }

    /// The list on the wire, in some blocks. It has to be the same list each time.
    pub(super) fn blocks(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut held = lock(&self.blocks[protocol as usize]);
        let known = held.as_ref().and_then(Weak::upgrade);
        let blocks = known.unwrap_or_else(|| {
            let made = self.shelf.lay(protocol, resources);
            *held = Some(Arc::downgrade(&made));
            made
        });
        self.shelf.put(&blocks);
        blocks
    }
}

/// The runs that are held by anybody, and the lists that were laid end to end last, since proxies rarely come at the very same
/// time: at most [`SHELF_BYTES`] of these.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    /// By a hash of their resources. Locked while a list is made.
    runs: Mutex<FxHashMap<u64, Vec<Weak<Run>>>>,
    /// With their sizes. What was asked for last comes last. Locked for a look through the few that there are.
    lists: Mutex<VecDeque<(Arc<[Bytes]>, usize)>>,
}

impl Shelf {
    /// Nothing is kept any longer that nobody is being sent.
    pub(super) fn clear(&self) {
        lock(&self.lists).clear();
        lock(&self.runs).retain(|_, runs| {
            runs.retain(|run| run.strong_count() > 0);
            !runs.is_empty()
        });
    }

    fn lay(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut known = lock(&self.runs);
        let laid = runs(protocol, resources).map(|run| {
            let mut hasher = FxHasher::default();
            for resource in run {
                Arc::as_ptr(resource).hash(&mut hasher);
            }
            let alike = known.entry(hasher.finish()).or_default();
            let found = alike
                .iter()
                .filter_map(Weak::upgrade)
                .find(|known| known.is(protocol, run));
            let run = found.unwrap_or_else(|| {
                alike.retain(|run| run.strong_count() > 0);
                let made = Arc::new(Run::new(protocol, run));
                alike.push(Arc::downgrade(&made));
                made
            });
            Bytes::from_owner(Held(run))
        });
        laid.collect()
    }

    fn put(&self, blocks: &Arc<[Bytes]>) {
        let size = blocks.iter().map(Bytes::len).sum();
        if size > SHELF_BYTES {
            return;
        }
        let mut lists = lock(&self.lists);
        lists.retain(|(held, _)| !Arc::ptr_eq(held, blocks));
        lists.push_back((blocks.clone(), size));
        let mut bytes = 0;
        let fitting = lists.iter().rev().take_while(|(_, size)| {
            bytes += size;
            bytes <= SHELF_BYTES
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
    fn blocks_are_the_frames_end_to_end() {
        let mut all = resources(500, 100);
        all.extend(resources(3, RUN_BYTES));
        for protocol in [Protocol::Sotw, Protocol::Delta] {
            let frames: Vec<&[u8]> = all.iter().map(|resource| &**frame(protocol, resource)).collect();
            let blocks = Shelf::default().lay(protocol, &all);
            assert_eq!(blocks.concat(), frames.concat());
            assert!((8..100).contains(&blocks.len()), "{}", blocks.len());
        }
        assert!(Shelf::default().lay(Protocol::Sotw, &[]).is_empty());
    }

    #[test]
    fn lists_share_what_they_have_in_common() {
        let shelf = Shelf::default();
        let all = resources(500, 100);
        let mut other = resources(5, 10);
        other.extend(all.iter().cloned());
        other.remove(300);
        let blocks = shelf.lay(Protocol::Sotw, &all);
        assert_eq!(pointers(&blocks), pointers(&shelf.lay(Protocol::Sotw, &all)));
        let other = shelf.lay(Protocol::Sotw, &other);
        let own = pointers(&other)
            .into_iter()
            .filter(|block| !pointers(&blocks).contains(block));
        assert!(own.count() <= 3, "those around what is different");
        assert_ne!(pointers(&blocks), pointers(&shelf.lay(Protocol::Delta, &all)));
    }

    #[test]
    fn what_was_laid_is_held_while_it_is_sent_or_on_the_shelf() {
        let (laid, resources) = (Laid::default(), resources(1, 1));
        let first = laid.blocks(Protocol::Delta, &resources);
        assert!(Arc::ptr_eq(&first, &laid.blocks(Protocol::Delta, &resources)));
        let held = Arc::downgrade(&first);
        drop(first);
        assert!(held.upgrade().is_some());
        let list = |bytes: usize| Arc::from([Bytes::from(vec![0; bytes])]);
        laid.shelf.put(&list(SHELF_BYTES));
        assert!(held.upgrade().is_none());
        laid.shelf.put(&list(SHELF_BYTES + 1));
        assert_eq!(lock(&laid.shelf.lists).len(), 1, "too large to displace others");
        laid.shelf.clear();
        assert!(lock(&laid.shelf.lists).is_empty() && lock(&laid.shelf.runs).is_empty());
    }
}
