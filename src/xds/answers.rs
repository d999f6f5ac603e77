//! First answers, which are long and alike: a thousand proxies that ask for the same names of the same views are sent the same
//! list, so it is made once, and laid end to end once for all who are being sent it.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicU64, Ordering},
};

use bytes::{Bytes, BytesMut};
use smol_str::SmolStr;

use super::{body::frame, connection::Protocol, names::Names};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType, group::TypeView};

/// So many answers are kept; proxies that connect at a time are of few kinds.
const KEPT: usize = 32;

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

/// A list of resources laid end to end, for as long as somebody is being sent it. The transport takes few pieces at a time, and
/// thousands of resources are small.
#[derive(Debug, Default)]
pub struct Laid {
    /// By protocol. Locked while it is made: whoever comes meanwhile would only make the same.
    blocks: [Mutex<Option<Weak<[Bytes]>>>; 2],
}

impl Laid {
    /// Blocks of equal size but for the last.
    pub(super) fn blocks(&self, protocol: Protocol, resources: &[Arc<EncodedResource>]) -> Arc<[Bytes]> {
        let mut blocks = self.blocks[protocol as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(blocks) = blocks.as_ref().and_then(Weak::upgrade) {
            return blocks;
        }
        let made = lay(resources.iter().map(|resource| frame(protocol, resource)));
        *blocks = Some(Arc::downgrade(&made));
        made
    }
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
    /// Locked for a look or an insertion, never while an answer is made.
    kept: Mutex<Vec<Kept>>,
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
            self.lock().clear();
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
        if let Some(kept) = self.lock().iter().find(|kept| is_same(kept)) {
            return kept.answer.clone();
        }
        let answer = match names {
            None => Answer {
                resources: view.iter().cloned().collect(),
                missing: Arc::default(),
                laid: Arc::default(),
            },
            Some(names) => named(resource_type, latest, names),
        };
        let mut kept = self.lock();
        let is_used = |names: &Weak<Names>| names.strong_count() > 0;
        kept.retain(|kept| kept.names.as_ref().is_none_or(is_used));
        let more = (kept.len() + 1).saturating_sub(KEPT);
        kept.drain(..more);
        kept.push(Kept {
            resource_type,
            view: view.clone(),
            answers_unknown_routes: latest.answers_unknown_routes,
            names: names.map(Arc::downgrade),
            answer: answer.clone(),
        });
        answer
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn named(resource_type: ResourceType, latest: &ResourceSnapshot, names: &Names) -> Answer {
    let view = latest.view(resource_type);
    let (mut resources, mut missing) = (Vec::with_capacity(names.set().len()), Vec::new());
    for name in names.set() {
        let absent = || latest.absent(resource_type, name).map(Arc::new);
        match view.get(name).cloned().or_else(absent) {
            Some(resource) => resources.push(resource),
            None => missing.push(name.clone()),
        }
    }
    Answer {
        resources: resources.into(),
        missing: missing.into(),
        laid: Arc::default(),
    }
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
    fn nothing_is_held_that_nobody_is_sent() {
        let resource = EncodedResource::new("a", &crate::proto::envoy::config::cluster::v3::Cluster::default());
        let (laid, resources) = (Laid::default(), [Arc::new(resource)]);
        let first = laid.blocks(Protocol::Delta, &resources);
        assert!(Arc::ptr_eq(&first, &laid.blocks(Protocol::Delta, &resources)));
        assert_eq!(first.concat(), *resources[0].delta_frame());
        assert_eq!(
            laid.blocks(Protocol::Sotw, &resources).concat(),
            *resources[0].sotw_frame()
        );
        let block = first[0].clone();
        drop(first);
        let held = laid.blocks[Protocol::Delta as usize].lock().expect("sound").clone();
        assert!(held.is_some_and(|held| held.upgrade().is_none()));
        drop(block);
    }
}
