//! The lists of the parts that live groups use. Parts of namespaces that see the same take over a common list, which is
//! made once.

use rustc_hash::{FxHashMap, FxHashSet};

use super::{BuildInputs, Evaluator, Executor, lists::Lists, relation, scopes::contains};
use crate::{
    generate::{
        BuildContext,
        plan::{CommonList, CommonLists, LastList, List, ListPieces, ListedResource, PartKey, PartList},
    },
    table::{ChangeSet, Cx, Derived, Refcounts, RelationId, Table, TableWriter, Transaction},
};

/// See the module's documentation.
pub(super) struct Parts {
    common: PieceMemo<CommonList>,
    /// Parts by the common one.
    users: Refcounts<PartKey>,
    lists: PieceMemo<List>,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            common: PieceMemo::new(relation::COMMON_LISTS),
            users: Refcounts::default(),
            lists: PieceMemo::new(relation::LISTS),
        }
    }
}

impl Parts {
    /// Brings the lists up to date, with those of new parts. Lists and keys that are in use are shared.
    pub(super) fn update(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
        new: &[PartKey],
        used: &Lists,
    ) {
        let changes = evaluator.tx.so_far();
        let mut shared = FxHashSet::default();
        let new_common = new.iter().filter_map(|part| part.common());
        let new_common: Vec<PartKey> = new_common.filter(|common| self.users.add(common)).collect();
        let evaluations = Evaluations {
            inputs,
            changes: &changes,
        };
        let finish = |common: CommonList| common.shared(|list| share(list, &mut shared, used));
        self.common.update(evaluator, evaluations, &new_common, finish);
        let memo = inputs.memo.clone().with(self.common_lists());
        let inputs = BuildInputs { memo: &memo, ..inputs };
        let evaluations = Evaluations {
            inputs,
            changes: &changes,
        };
        let finish = |list| share(list, &mut shared, used);
        self.lists.update(evaluator, evaluations, new, finish);
    }

    /// Returns the lists as they would be after an update, with those of new parts.
    pub(super) fn preview(
        &self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
        new: &[PartKey],
    ) -> TableWriter<PartKey, List> {
        let changes = evaluator.tx.so_far();
        let absent = |common: &PartKey| !contains(self.common.rows.table(), common);
        let new_common = new.iter().filter_map(|part| part.common()).filter(absent);
        let new_common: Vec<PartKey> = new_common.collect();
        let evaluations = Evaluations {
            inputs,
            changes: &changes,
        };
        let common = self.common.preview(evaluator, evaluations, &new_common);
        let memo = inputs.memo.clone().with(common.table().clone());
        let inputs = BuildInputs { memo: &memo, ..inputs };
        let evaluations = Evaluations {
            inputs,
            changes: &changes,
        };
        self.lists.preview(evaluator, evaluations, new)
    }

    /// Drops a part without users.
    pub(super) fn forget(&mut self, tx: &mut Transaction, part: &PartKey) {
        self.lists.forget(tx, part);
        if let Some(common) = part.common()
            && self.users.remove(&common)
        {
            self.common.forget(tx, &common);
        }
    }

    /// Ends an update.
    pub(super) fn begin(&mut self) {
        self.common.rows.begin();
        self.lists.rows.begin();
    }

    /// Returns the lists by part.
    pub(super) fn table(&self) -> &Table<PartKey, List> {
        self.lists.rows.table()
    }

    /// Returns the lists by part, with the changes of this update.
    pub(super) fn writer(&self) -> &TableWriter<PartKey, List> {
        self.lists.rows.writer()
    }

    /// Returns the common lists.
    pub(super) fn common_lists(&self) -> CommonLists {
        self.common.rows.table().clone()
    }

    /// Returns the number of recorded dependencies.
    pub(super) fn recorded_reads(&self) -> usize {
        self.common.rows.recorded_reads() + self.lists.rows.recorded_reads()
    }
}

/// Inputs of the evaluations of lists.
#[derive(Clone, Copy)]
struct Evaluations<'a> {
    inputs: BuildInputs<'a>,
    /// The changes since the last update.
    changes: &'a ChangeSet,
}

/// A list of resources that is evaluated in pieces.
trait PiecewiseList: PartialEq + Send + Sync + Sized {
    /// Makes the list of a part; `None` if it has none.
    fn list(ctx: &BuildContext, part: &PartKey, last: LastList) -> Option<(Self, Option<ListPieces>)>;

    fn resources(&self) -> &[ListedResource];
}

impl PiecewiseList for CommonList {
    fn list(ctx: &BuildContext, part: &PartKey, last: LastList) -> Option<(Self, Option<ListPieces>)> {
        part.list_common(ctx, last)
    }

    fn resources(&self) -> &[ListedResource] {
        self.resources()
    }
}

impl PiecewiseList for List {
    fn list(ctx: &BuildContext, part: &PartKey, last: LastList) -> Option<(Self, Option<ListPieces>)> {
        let PartList { resources, pieces } = part.list(ctx, last);
        Some((Self::new(resources), pieces))
    }

    fn resources(&self) -> &[ListedResource] {
        self
    }
}

/// Lists with the pieces of each, from which its next evaluation takes what is the same.
struct PieceMemo<V> {
    rows: Derived<PartKey, V>,
    pieces: FxHashMap<PartKey, ListPieces>,
}

impl<V: PiecewiseList> PieceMemo<V> {
    fn new(id: RelationId) -> Self {
        Self {
            rows: Derived::new(id),
            pieces: FxHashMap::default(),
        }
    }

    /// Brings the lists up to date. `finish` makes the rows from the results, on the calling thread.
    fn update(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        evaluations: Evaluations,
        new: &[PartKey],
        mut finish: impl FnMut(V) -> V,
    ) {
        let last = self.rows.table().clone();
        let pieces = &self.pieces;
        let function = |cx: &Cx, part: &PartKey| evaluations.list(cx, part, &last, pieces);
        let mut relisted = Vec::new();
        evaluator.update_each(&mut self.rows, new, function, |evaluated| {
            let (part, mut pieces) = (evaluated.key().clone(), None);
            let evaluated = evaluated.map(|(list, listed)| {
                pieces = listed;
                finish(list)
            });
            relisted.push((part, pieces));
            evaluated
        });
        for (part, pieces) in relisted {
            // After a panic, the pieces lack what has changed.
            match pieces {
                Some(pieces) => self.pieces.insert(part, pieces),
                None => self.pieces.remove(&part),
            };
        }
    }

    fn preview(
        &self,
        evaluator: &mut Evaluator<impl Executor>,
        evaluations: Evaluations,
        new: &[PartKey],
    ) -> TableWriter<PartKey, V> {
        let last = self.rows.table();
        evaluator.preview(&self.rows, new, |cx, part| {
            Some(evaluations.list::<V>(cx, part, last, &self.pieces)?.0)
        })
    }

    fn forget(&mut self, tx: &mut Transaction, part: &PartKey) {
        self.rows.forget(tx, part);
        self.pieces.remove(part);
    }
}

impl Evaluations<'_> {
    fn list<V: PiecewiseList>(
        &self,
        cx: &Cx,
        part: &PartKey,
        last: &Table<PartKey, V>,
        pieces: &FxHashMap<PartKey, ListPieces>,
    ) -> Option<(V, Option<ListPieces>)> {
        let list = last.get(&Cx::untracked(), part);
        let last = LastList {
            resources: list.map_or(&[], |list| list.resources()),
            pieces: pieces.get(part),
            changes: self.changes,
        };
        V::list(&self.inputs.ctx(cx), part, last)
    }
}

/// Returns an equal list that is in use, or else the list with equal keys that are in use. Most parts list the same
/// resources: this saves 9 % of the peak memory of bench `steps` (1,000 services, 50 groups).
fn share(mut list: List, new: &mut FxHashSet<List>, lists: &Lists) -> List {
    if let Some(known) = lists.known(&list).or_else(|| new.get(&list)) {
        return known.clone();
    }
    // Keys of the last list are in use.
    if !list.iter().all(|listed| listed.key.is_shared()) {
        let shared = list.iter().map(|listed| ListedResource {
            resource_type: listed.resource_type,
            key: lists.known_resource(&listed.key).unwrap_or(&listed.key).clone(),
        });
        list = List::new(shared.collect());
    }
    new.insert(list.clone());
    list
}
