//! First answers, which are long and alike: a thousand proxies that ask for the same names of the same views are sent the same
//! list, so it is made once, and laid end to end once for all who are sent it at about the same time.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::{Bytes, BytesMut};
use smol_str::SmolStr;

use super::{body::frame, connection::Protocol, names::Names};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType, group::TypeView};

/// So many answers are kept, those that were asked for last; proxies that connect at a time are of few kinds.
const KEPT: usize = 32;
/// Answers of fewer resources are made anew as fast as they are found.
const LONG: usize = 16;
/// What is kept of lists that were laid end to end and that nobody is being sent just now.
const SHELF_BYTES: usize = 32 << 20;

/// Some frames of HTTP/2, which have 16 KiB each.
const BLOCK_BYTES: usize = 64 << 10;

/// Everything that a subscription is owed.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// What there is, by name; for everything, as the view has it.
    pub(super) resources: Arc<[Arc<EncodedResource>]>,
    /// Names that were asked for and are nothing.
    pub(super) missing: Arc<[SmolStr]>,
    /// The resources on the wire.
    pub(super) laid: Arc<Laid>,
}

/// A list of resources laid end to end, for as long as somebody is being sent it or it is on the [`Shelf`]. The transport takes
/// few pieces at a time, and thousands of resources are small.
#[derive(Debug, Default)]
pub struct Laid {
    /// By protocol. Locked while it is made: whoever comes meanwhile would only make the same.
    blocks: [Mutex<Option<Weak<[Bytes]>>>; 2],
    shelf: Arc<Shelf>,
}

impl Laid {
    /// Blocks of equal size but for the last.
    pub(super) fn blocks(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut held = lock(&self.blocks[protocol as usize]);
        let known = held.as_ref().and_then(Weak::upgrade);
        let blocks = known.unwrap_or_else(|| {
            let made = lay(resources.iter().map(|resource| frame(protocol, resource)));
            *held = Some(Arc::downgrade(&made));
            made
        });
        self.shelf.put(&blocks);
        blocks
    }
}

/// Holds what was laid end to end last, since proxies rarely come at the very same time; at most [`SHELF_BYTES`].
#[derive(Debug, Default)]
struct Shelf {
    /// What was asked for last comes last. Locked for a look through the few that there are.
    lists: Mutex<VecDeque<Arc<[Bytes]>>>,
}

impl Shelf {
    fn put(&self, blocks: &Arc<[Bytes]>) {
        if blocks.len() * BLOCK_BYTES > SHELF_BYTES {
            return;
        }
        let mut lists = lock(&self.lists);
        lists.retain(|held| !Arc::ptr_eq(held, blocks));
        lists.push_back(blocks.clone());
        let mut bytes = 0;
        let fitting = lists.iter().rev().take_while(|list| {
            bytes += list.len() * BLOCK_BYTES;
            bytes <= SHELF_BYTES
        });
        let surplus = lists.len() - fitting.count();
        lists.drain(..surplus);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lay<'a>(frames: impl Iterator<Item = &'a Bytes>) -> Arc<[Bytes]> {
    let mut blocks = Vec::new();
    let mut block = BytesMut::new();
    for mut frame in frames.map(|frame| &**frame) {
        while !frame.is_empty() {
            if block.capacity() == 0 {
                block.reserve(BLOCK_BYTES);
            }
            let (now, later) = frame.split_at(frame.len().min(BLOCK_BYTES - block.len()));
            block.extend_from_slice(now);
            frame = later;
            if block.len() == BLOCK_BYTES {
                blocks.push(std::mem::take(&mut block).freeze());
            }
        }
    }
    if !block.is_empty() {
        blocks.push(block.freeze());
    }
    blocks.into()
}

/// Answers of the newest revision.
#[derive(Debug, Default)]
pub(super) struct Answers {
    newest: AtomicU64,
    /// What was asked for last comes last. Locked for a look or an insertion, never while an answer is made.
    kept: Mutex<VecDeque<Kept>>,
    shelf: Arc<Shelf>,
}

#[derive(Debug)]
struct Kept {
    resource_type: ResourceType,
    view: TypeView,
    answers_unknown_routes: bool,
    /// None: everything.
    names: Option<Weak<Names>>,
    answer: Answer,
}

impl Answers {
    /// There is this snapshot: what was made before its revision is not kept any longer.
    pub(super) fn advance(&self, latest: &ResourceSnapshot) {
        let revision = latest.revision.0;
        if self.newest.fetch_max(revision, Ordering::AcqRel) < revision {
            lock(&self.kept).clear();
            lock(&self.shelf.lists).clear();
        }
    }

    /// Everything of the type, or what has these names.
    pub(super) fn all(
        &self,
        resource_type: ResourceType,
        latest: &ResourceSnapshot,
        names: Option<&Arc<Names>>,
    ) -> Answer {
        let view = latest.view(resource_type);
        let is_same = |kept: &Kept| {
            kept.resource_type == resource_type
                && kept.answers_unknown_routes == latest.answers_unknown_routes
                && kept.names.as_ref().map(Weak::as_ptr) == names.map(Arc::as_ptr)
                && kept.view.same(view)
        };
        let find = || {
            let mut kept = lock(&self.kept);
            let at = kept.iter().position(is_same)?;
            let found = kept.remove(at)?;
            let answer = found.answer.clone();
            kept.push_back(found);
            Some(answer)
        };
        if let Some(answer) = find() {
            return answer;
        }
        let (resources, missing) = match names {
            None => (view.iter().cloned().collect(), Arc::default()),
            Some(names) => named(resource_type, latest, names),
        };
        let laid = Laid {
            shelf: self.shelf.clone(),
            ..Laid::default()
        };
        let answer = Answer {
            resources,
            missing,
            laid: Arc::new(laid),
        };
        if answer.resources.len() + answer.missing.len() < LONG {
            return answer;
        }
        let mut kept = lock(&self.kept);
        let is_used = |names: &Weak<Names>| names.strong_count() > 0;
        kept.retain(|kept| kept.names.as_ref().is_none_or(is_used));
        let more = (kept.len() + 1).saturating_sub(KEPT);
        kept.drain(..more);
        kept.push_back(Kept {
            resource_type,
            view: view.clone(),
            answers_unknown_routes: latest.answers_unknown_routes,
            names: names.map(Arc::downgrade),
            answer: answer.clone(),
        });
        answer
    }
}

/// What has these names, and the names of what there is not.
fn named(
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    names: &Names,
) -> (Arc<[Arc<EncodedResource>]>, Arc<[SmolStr]>) {
    let view = latest.view(resource_type);
    let (mut resources, mut missing) = (Vec::with_capacity(names.set().len()), Vec::new());
    for name in names.set() {
        let absent = || latest.absent(resource_type, name).map(Arc::new);
        match view.get(name).cloned().or_else(absent) {
            Some(resource) => resources.push(resource),
            None => missing.push(name.clone()),
        }
    }
    (resources.into(), missing.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_frames_end_to_end() {
        let frames: Vec<Bytes> = [0, 1, 1000, 3 * BLOCK_BYTES, 7, BLOCK_BYTES - 1008]
            .iter()
            .map(|len| (0..*len).map(|byte| byte as u8).collect())
            .collect();
        let blocks = lay(frames.iter());
        assert_eq!(blocks.concat(), frames.concat());
        assert!(
            blocks.iter().all(|block| block.len() == BLOCK_BYTES),
            "the sum is a multiple"
        );
        assert!(lay([].iter()).is_empty());
    }

    #[test]
    fn what_was_laid_is_held_while_it_is_sent_or_on_the_shelf() {
        let resource = EncodedResource::new("a", &crate::proto::envoy::config::cluster::v3::Cluster::default());
        let (laid, resources) = (Laid::default(), [Arc::new(resource)]);
        let first = laid.blocks(Protocol::Delta, &resources);
        assert!(Arc::ptr_eq(&first, &laid.blocks(Protocol::Delta, &resources)));
        assert_eq!(first.concat(), *resources[0].delta_frame());
        assert_eq!(
            laid.blocks(Protocol::Sotw, &resources).concat(),
            *resources[0].sotw_frame()
        );
        let held = lock(&laid.blocks[Protocol::Delta as usize])
            .clone()
            .expect("it was made");
        drop(first);
        assert!(held.upgrade().is_some());
        let lists = (0..SHELF_BYTES / BLOCK_BYTES).map(|_| Arc::from([Bytes::new()]));
        lists.for_each(|other| laid.shelf.put(&other));
        assert!(held.upgrade().is_none());
        let most = SHELF_BYTES / BLOCK_BYTES;
        assert_eq!(lock(&laid.shelf.lists).len(), most);
        laid.shelf.put(&std::iter::repeat_n(Bytes::new(), most + 1).collect());
        assert_eq!(lock(&laid.shelf.lists).len(), most, "too large to displace others");
    }
}
