//! First answers, which are long and alike: a thousand proxies that ask for the same names of the same views are sent the same
//! list, so it is made once, and laid end to end once for all who are sent it at about the same time.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use smol_str::SmolStr;

use super::{
    laid::{Laid, Shelf, lock},
    names::Names,
};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType, resource::TypeResources};

/// So many answers are kept, those that were asked for last; proxies that connect at a time are of few kinds.
const KEPT: usize = 32;
/// Answers of fewer resources are made anew as fast as they are found.
const LONG: usize = 16;

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
    view: TypeResources,
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
            self.clear();
        }
    }

    /// Nothing is kept any longer.
    pub(super) fn clear(&self) {
        lock(&self.kept).clear();
        self.shelf.clear();
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
        let answer = Answer {
            resources,
            missing,
            laid: Arc::new(Laid::on(self.shelf.clone())),
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
pub(super) mod tests {
    use super::*;
    use crate::{generate::resource::PartResources, model::Revision, proto::envoy::config::cluster::v3::Cluster};

    /// A snapshot of which an answer is kept.
    pub(in crate::xds) fn long_snapshot() -> ResourceSnapshot {
        snapshot(1, LONG)
    }

    /// A snapshot with so many clusters.
    fn snapshot(revision: u64, clusters: usize) -> ResourceSnapshot {
        let cluster = |number: usize| {
            let name = SmolStr::from(format!("c{number}"));
            let message = Cluster::default();
            (name.clone(), Arc::new(EncodedResource::new(name, &message)))
        };
        let part = PartResources {
            resources: (0..clusters).map(cluster).collect(),
            digest: 0,
        };
        let view = |resource_type: &ResourceType| match resource_type {
            ResourceType::Cluster => TypeResources {
                parts: [Arc::new(part.clone())].into(),
            },
            _ => TypeResources::default(),
        };
        ResourceSnapshot::new(Revision(revision), ResourceType::ALL.iter().map(view).collect(), false)
    }

    fn answer(answers: &Answers, snapshot: &ResourceSnapshot) -> Arc<[Arc<EncodedResource>]> {
        answers.all(ResourceType::Cluster, snapshot, None).resources
    }

    #[test]
    fn those_asked_for_last_are_kept() {
        let answers = Answers::default();
        let groups: Vec<_> = (0..=KEPT).map(|_| snapshot(1, LONG)).collect();
        let made: Vec<_> = groups[..KEPT].iter().map(|group| answer(&answers, group)).collect();
        // The first is asked for again, so the second gives way to one more.
        assert!(Arc::ptr_eq(&answer(&answers, &groups[0]), &made[0]));
        answer(&answers, &groups[KEPT]);
        assert!(Arc::ptr_eq(&answer(&answers, &groups[0]), &made[0]));
        assert!(Arc::ptr_eq(&answer(&answers, &groups[2]), &made[2]));
        assert!(!Arc::ptr_eq(&answer(&answers, &groups[1]), &made[1]));
    }

    #[test]
    fn short_answers_displace_nothing() {
        let answers = Answers::default();
        let long = snapshot(1, LONG);
        let made = answer(&answers, &long);
        for _ in 0..=KEPT {
            answer(&answers, &snapshot(1, LONG - 1));
        }
        assert!(Arc::ptr_eq(&answer(&answers, &long), &made));
    }

    #[test]
    fn a_newer_revision_ends_what_is_kept() {
        let answers = Answers::default();
        let old = snapshot(1, LONG);
        answers.advance(&old);
        let made = Arc::downgrade(&answer(&answers, &old));
        answers.advance(&old);
        assert!(made.upgrade().is_some());
        answers.advance(&snapshot(2, LONG));
        assert!(made.upgrade().is_none());
    }
}
