//! Connected proxies of the store: each has a class, and each class a group.
//!
//! Only the class is computed for each proxy. Selection runs once for each class and is kept while a proxy has the
//! class. A proxy therefore records only the reads of its class, and a change that selection reads costs one
//! evaluation for each class.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{BuildInputs, ConnectionId, Evaluator, Executor, ProxyEvents};
use crate::{
    base::{Shared, pool::Pool},
    generate::{
        Proxy, ProxyGroupKey, RequestedResources,
        plan::{self, GroupSpec, PartKey},
        proxy_class::{ProxyClass, ProxyClassKey},
        resource::{RoutePlaceholders, UnknownRoutes},
    },
    table::{Cx, Derived, Evaluated, Outcome, Reads, RelationId, Users},
};

/// See the module documentation.
pub(super) struct Connections {
    all: FxHashMap<ConnectionId, Connection>,
    /// The reads of the classes.
    reads: Reads<ConnectionId>,
    groups: Derived<ProxyClassKey, ProxyGroupKey>,
    classes: Users<ProxyClassKey, ConnectionId>,
    /// Most groups have the same placeholders of route configurations, of about 400 bytes.
    placeholders: Pool<Shared<RoutePlaceholders>>,
    /// The request of connections that have sent none.
    no_request: Shared<RequestedResources>,
}

struct Connection {
    proxy: Arc<Proxy>,
    requested: Shared<RequestedResources>,
    /// `None` until the class is computed without a panic.
    class: Option<ProxyClassKey>,
    /// `None` until selection succeeds without a panic.
    group: Option<ProxyGroupKey>,
}

/// Users that were removed in an update.
#[derive(Default)]
struct Released {
    /// Groups that lost a connection, once for each lost connection.
    groups: Vec<ProxyGroupKey>,
    /// Classes that lost their last connection. They may have new ones by the end of the update.
    classes: Vec<ProxyClassKey>,
}

impl Connections {
    pub(super) fn new(id: RelationId) -> Self {
        Self {
            all: FxHashMap::default(),
            reads: Reads::default(),
            groups: Derived::new(id),
            classes: Users::default(),
            placeholders: Pool::default(),
            no_request: Shared::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the number of classes.
    pub(super) fn classes(&self) -> usize {
        self.classes.len()
    }

    pub(super) fn recorded_reads(&self) -> usize {
        self.reads.recorded() + self.groups.recorded_reads()
    }

    pub(super) fn proxy(&self, id: ConnectionId) -> Option<&Arc<Proxy>> {
        self.all.get(&id).map(|connection| &connection.proxy)
    }

    pub(super) fn group(&self, id: ConnectionId) -> Option<&ProxyGroupKey> {
        self.all.get(&id).and_then(|connection| connection.group.as_ref())
    }

    pub(super) fn proxies(&self) -> impl Iterator<Item = (ConnectionId, &Arc<Proxy>, Option<&ProxyClassKey>)> {
        let all = self.all.iter();
        all.map(|(id, connection)| (*id, &connection.proxy, connection.class.as_ref()))
    }

    pub(super) fn class(&self, id: ConnectionId) -> Option<&ProxyClassKey> {
        self.all.get(&id).and_then(|connection| connection.class.as_ref())
    }

    /// Ends an update.
    pub(super) fn forget_changes(&mut self) {
        self.groups.begin();
    }

    /// Updates the groups of all connections. Adds the connections that have another group than before to `moved`.
    /// Returns the groups that lost a connection, once for each lost connection. `used` are the parts in use.
    pub(super) fn update(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
        used: &Users<PartKey, ProxyGroupKey>,
        events: ProxyEvents,
        moved: &mut Vec<(ConnectionId, ProxyGroupKey)>,
    ) -> Vec<ProxyGroupKey> {
        let mut released = Released::default();
        let candidates = self.apply(events, &mut released);
        let (new, mut changed) = self.classify(evaluator, inputs, &candidates, &mut released);
        let select = |cx: &Cx, class: &ProxyClassKey| Some(plan::select(&inputs.ctx(cx), class));
        let mut shared = FxHashSet::default();
        let placeholders = &mut self.placeholders;
        let finish = |evaluated: Evaluated<ProxyClassKey, GroupSpec>| {
            evaluated.map(|mut group| {
                if let UnknownRoutes::Sidecar(of_group) = &mut group.unknown_routes {
                    *of_group = placeholders.share(of_group);
                }
                ProxyGroupKey::new(group.sharing(|part| share(part, &mut shared, used)))
            })
        };
        evaluator.update_each(&mut self.groups, &new, select, finish);
        for (class, ..) in self.groups.writer().changes() {
            changed.extend(self.classes.get(class));
        }
        changed.sort_unstable();
        changed.dedup();
        for id in changed {
            self.move_to_group_of_class(id, &mut released, moved);
        }
        for class in released.classes {
            if !self.classes.contains(&class) {
                self.groups.forget(&mut evaluator.tx, &class);
            }
        }
        released.groups
    }

    /// Returns the present group of each connection with the one that it would have in another mesh.
    pub(super) fn preview(
        &self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
    ) -> FxHashMap<(ProxyGroupKey, ProxyGroupKey), Vec<ConnectionId>> {
        let class_of = |cx: &Cx, id: &ConnectionId| {
            let connection = self.all.get(id)?;
            let class = ProxyClass::of(&inputs.ctx(cx), &connection.proxy, &connection.requested);
            Some(ProxyClassKey::new(class))
        };
        let mut others: FxHashMap<ConnectionId, ProxyClassKey> = FxHashMap::default();
        let dirty = self.reads.dirty(&evaluator.tx, &[]);
        for evaluated in evaluator.executor.map(dirty, |id| Evaluated::guarded(id, class_of)) {
            if let (id, Outcome::Row(Some(class))) = evaluated.into_outcome() {
                others.insert(id, class);
            }
        }
        let new = others.values().filter(|class| !self.classes.contains(class));
        let new: Vec<ProxyClassKey> = new.cloned().collect();
        let select = |cx: &Cx, class: &ProxyClassKey| Some(ProxyGroupKey::new(plan::select(&inputs.ctx(cx), class)));
        let groups = evaluator.preview(&self.groups, &new, select);
        let changed: FxHashSet<&ProxyClassKey> = groups.changes().iter().map(|(class, ..)| class).collect();
        let mut pairs: FxHashMap<(ProxyGroupKey, ProxyGroupKey), Vec<ConnectionId>> = FxHashMap::default();
        for (id, connection) in &self.all {
            let Some(group) = &connection.group else { continue };
            let own = connection.class.as_ref().filter(|class| changed.contains(class));
            let other = others.get(id).or(own);
            let other = other.and_then(|class| groups.table().get(&Cx::untracked(), class));
            let other = other.map_or_else(|| group.clone(), |other| ProxyGroupKey::clone(other));
            pairs.entry((group.clone(), other)).or_default().push(*id);
        }
        pairs
    }

    /// Applies connects, disconnects and changed requests. Returns the connections that need a class.
    fn apply(&mut self, events: ProxyEvents, released: &mut Released) -> Vec<ConnectionId> {
        for id in events.disconnected {
            let Some(connection) = self.all.remove(&id) else {
                continue;
            };
            self.reads.forget(&id);
            released.groups.extend(connection.group);
            if let Some(class) = connection.class {
                self.release_class(id, class, released);
            }
        }
        let mut candidates = Vec::with_capacity(events.connected.len());
        self.all.reserve(events.connected.len());
        for (id, proxy) in events.connected {
            candidates.push(id);
            let connection = Connection {
                proxy,
                requested: self.no_request.clone(),
                class: None,
                group: None,
            };
            self.all.insert(id, connection);
        }
        for (id, requested) in events.requested {
            if let Some(connection) = self.all.get_mut(&id) {
                connection.requested = requested;
                candidates.push(id);
            }
        }
        candidates
    }

    /// Computes classes. Returns the classes that are new and the connections whose class changed.
    fn classify(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
        candidates: &[ConnectionId],
        released: &mut Released,
    ) -> (Vec<ProxyClassKey>, Vec<ConnectionId>) {
        let (mut new, mut changed) = (Vec::new(), Vec::new());
        let dirty = self.reads.dirty(&evaluator.tx, candidates);
        self.reads.reserve(candidates.len());
        let all = &self.all;
        let class_of = |cx: &Cx, id: &ConnectionId| {
            let connection = all.get(id)?;
            let class = ProxyClass::of(&inputs.ctx(cx), &connection.proxy, &connection.requested);
            Some(ProxyClassKey::new(class))
        };
        for evaluated in evaluator.executor.map(dirty, |id| Evaluated::guarded(id, class_of)) {
            let (id, outcome) = self.reads.apply(evaluated);
            let class = match outcome {
                Outcome::Row(class) => class,
                Outcome::Panicked => {
                    evaluator.tx.note_panic(format!("{id:?}"));
                    None
                }
            };
            let (Some(class), Some(connection)) = (class, self.all.get_mut(&id)) else {
                continue;
            };
            if connection.class.as_ref() == Some(&class) {
                continue;
            }
            changed.push(id);
            let class = if let Some(held) = self.classes.key(&class) {
                held.clone()
            } else {
                new.push(class.clone());
                class
            };
            self.classes.add(&class, id);
            if let Some(old) = connection.class.replace(class) {
                self.release_class(id, old, released);
            }
        }
        (new, changed)
    }

    fn release_class(&mut self, id: ConnectionId, class: ProxyClassKey, released: &mut Released) {
        if self.classes.remove(&class, &id) {
            released.classes.push(class);
        }
    }

    /// Moves a connection to the group of its class. If selection of the class panicked, the connection keeps its
    /// group.
    fn move_to_group_of_class(
        &mut self,
        id: ConnectionId,
        released: &mut Released,
        moved: &mut Vec<(ConnectionId, ProxyGroupKey)>,
    ) {
        let Some(connection) = self.all.get_mut(&id) else {
            return;
        };
        let Some(class) = &connection.class else { return };
        let group = self.groups.table().get(&Cx::untracked(), class);
        let Some(group) = group.map(|group| ProxyGroupKey::clone(group)) else {
            return;
        };
        if connection.group.as_ref() != Some(&group) {
            moved.push((id, group.clone()));
            released.groups.extend(connection.group.replace(group));
        }
    }
}

/// Returns the equal part that is in use, or that another new group has. A part takes 384 bytes, and most parts of a
/// group are also those of other groups.
fn share(part: &PartKey, new: &mut FxHashSet<PartKey>, used: &Users<PartKey, ProxyGroupKey>) -> PartKey {
    if let Some(known) = used.key(part).or_else(|| new.get(part)) {
        return known.clone();
    }
    new.insert(part.clone());
    part.clone()
}
