//! The members of the store: each has a profile, and each profile a group.
//!
//! Only the profile is looked up for each member; what follows from it is selected once for all that have it, and kept
//! while somebody has it. So a member holds no more than the reads of its profile, and a change that selection reads costs
//! one evaluation for each profile.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{ConnectionId, Executor, ProxyEvents, Source, StoreUpdate, evaluate};
use crate::{
    base::Shared,
    generate::{
        Proxy, ProxyGroupKey, RequestedResources,
        proxy_class::{ProxyClass, ProxyClassKey},
    },
    table::{Cx, Derived, Evaluated, Outcome, Reads, RelationId, Transaction},
};

/// See the module's text.
pub(super) struct Members {
    all: FxHashMap<ConnectionId, Member>,
    /// What the profiles were looked up in.
    reads: Reads<ConnectionId>,
    selections: Derived<ProxyClassKey, ProxyGroupKey>,
    users: FxHashMap<ProxyClassKey, FxHashSet<ConnectionId>>,
    /// What members ask for that have not said so.
    nothing: Shared<RequestedResources>,
}

struct Member {
    proxy: Arc<Proxy>,
    demand: Shared<RequestedResources>,
    /// None until the first look-up has succeeded.
    profile: Option<ProxyClassKey>,
    /// None until the first selection has succeeded.
    group: Option<ProxyGroupKey>,
}

impl Members {
    pub(super) fn new(id: RelationId) -> Self {
        Self {
            all: FxHashMap::default(),
            reads: Reads::default(),
            selections: Derived::new(id),
            users: FxHashMap::default(),
            nothing: Shared::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// How many profiles there are.
    pub(super) fn profiles(&self) -> usize {
        self.users.len()
    }

    pub(super) fn recorded_reads(&self) -> usize {
        self.reads.recorded() + self.selections.recorded_reads()
    }

    pub(super) fn proxy(&self, member: ConnectionId) -> Option<&Arc<Proxy>> {
        self.all.get(&member).map(|member| &member.proxy)
    }

    pub(super) fn group(&self, member: ConnectionId) -> Option<&ProxyGroupKey> {
        self.all.get(&member).and_then(|member| member.group.as_ref())
    }

    /// Ends an update.
    pub(super) fn forget_changes(&mut self) {
        self.selections.begin();
    }

    /// Brings groups up to date; gives those that lost a member, once for each member lost.
    pub(super) fn update(
        &mut self,
        tx: &mut Transaction,
        source: Source,
        membership: ProxyEvents,
        executor: &impl Executor,
        update: &mut StoreUpdate,
    ) -> Vec<ProxyGroupKey> {
        let (mut abandoned, mut left) = (Vec::new(), Vec::new());
        let candidates = self.admit(membership, &mut abandoned, &mut left);
        let (new, mut moved) = self.look_up(tx, source, &candidates, executor, update, &mut left);
        let select = |cx: &Cx, profile: &ProxyClassKey| Some(crate::generate::plan::select(&source.ctx(cx), profile));
        evaluate(&mut self.selections, tx, &new, executor, &mut update.panics, select);
        for (profile, ..) in self.selections.writer().changes() {
            moved.extend(self.users.get(profile).into_iter().flatten());
        }
        moved.sort_unstable();
        moved.dedup();
        for id in moved {
            self.follow(id, &mut abandoned, update);
        }
        for profile in left {
            if !self.users.contains_key(&profile) {
                self.selections.forget(tx, &profile);
            }
        }
        abandoned
    }

    /// Takes note of who came, went or asks for something else; gives those to look up.
    fn admit(
        &mut self,
        membership: ProxyEvents,
        abandoned: &mut Vec<ProxyGroupKey>,
        left: &mut Vec<ProxyClassKey>,
    ) -> Vec<ConnectionId> {
        for id in membership.disconnected {
            let Some(member) = self.all.remove(&id) else { continue };
            self.reads.forget(&id);
            abandoned.extend(member.group);
            if let Some(profile) = member.profile {
                self.leave(id, profile, left);
            }
        }
        let mut candidates = Vec::with_capacity(membership.connected.len());
        self.all.reserve(membership.connected.len());
        for (id, proxy) in membership.connected {
            candidates.push(id);
            let member = Member {
                proxy,
                demand: self.nothing.clone(),
                profile: None,
                group: None,
            };
            self.all.insert(id, member);
        }
        for (id, demand) in membership.requested {
            if let Some(member) = self.all.get_mut(&id) {
                member.demand = demand;
                candidates.push(id);
            }
        }
        candidates
    }

    /// Looks profiles up; gives those that nobody had before, and the members that have another one now.
    fn look_up(
        &mut self,
        tx: &Transaction,
        source: Source,
        candidates: &[ConnectionId],
        executor: &impl Executor,
        update: &mut StoreUpdate,
        left: &mut Vec<ProxyClassKey>,
    ) -> (Vec<ProxyClassKey>, Vec<ConnectionId>) {
        let (mut new, mut changed) = (Vec::new(), Vec::new());
        let dirty = self.reads.dirty(tx, candidates);
        self.reads.reserve(candidates.len());
        let all = &self.all;
        let look_up = |cx: &Cx, id: &ConnectionId| {
            let member = all.get(id)?;
            let profile = ProxyClass::of(&source.ctx(cx), &member.proxy, &member.demand);
            Some(ProxyClassKey::new(profile))
        };
        for evaluated in executor.map(dirty, |id| Evaluated::guarded(id, look_up)) {
            let (id, outcome) = self.reads.apply(evaluated);
            let profile = match outcome {
                Outcome::Row(profile) => profile,
                Outcome::Panicked => {
                    update.panics.push(format!("{id:?}"));
                    None
                }
            };
            let (Some(profile), Some(member)) = (profile, self.all.get_mut(&id)) else {
                continue;
            };
            if member.profile.as_ref() == Some(&profile) {
                continue;
            }
            changed.push(id);
            let profile = if let Some((held, _)) = self.users.get_key_value(&profile) {
                held.clone()
            } else {
                new.push(profile.clone());
                profile
            };
            self.users.entry(profile.clone()).or_default().insert(id);
            if let Some(old) = member.profile.replace(profile) {
                self.leave(id, old, left);
            }
        }
        (new, changed)
    }

    /// Takes a profile from a member; `left` are those that may have no other.
    fn leave(&mut self, id: ConnectionId, profile: ProxyClassKey, left: &mut Vec<ProxyClassKey>) {
        if super::remove_user(&mut self.users, &profile, &id) {
            left.push(profile);
        }
    }

    /// Moves a member to the group of its profile. A profile whose selection panicked has none: its members stay.
    fn follow(&mut self, id: ConnectionId, abandoned: &mut Vec<ProxyGroupKey>, update: &mut StoreUpdate) {
        let Some(member) = self.all.get_mut(&id) else { return };
        let Some(profile) = &member.profile else { return };
        let group = self.selections.table().get(&Cx::untracked(), profile);
        let Some(group) = group.map(|group| ProxyGroupKey::clone(group)) else {
            return;
        };
        if member.group.as_ref() != Some(&group) {
            update.moved.push((id, group.clone()));
            abandoned.extend(member.group.replace(group));
        }
    }
}
