//! The scopes that live groups use. Namespaces that see the same take over a common scope, which is evaluated once.

use super::{Evaluator, Executor, relation};
use crate::{
    generate::ScopeTables,
    model::{
        MeshSnapshot, ScopeKey, SidecarScope,
        sidecar_scope::{self, CommonScope, ScopePool},
    },
    table::{Cx, Derived, Key, Refcounts, Table, Transaction},
};

/// See the module's documentation.
pub(super) struct Scopes {
    common: Derived<ScopeKey, CommonScope>,
    all: Derived<ScopeKey, SidecarScope>,
    /// The same scopes without the VirtualServices that only route HTTP.
    tcp: Derived<ScopeKey, SidecarScope>,
    /// Users of each scope: its groups count once, and it counts for the common one.
    users: Refcounts<ScopeKey>,
    pool: ScopePool,
}

impl Default for Scopes {
    fn default() -> Self {
        Self {
            common: Derived::new(relation::COMMON_SCOPES),
            all: Derived::new(relation::SCOPES),
            tcp: Derived::new(relation::TCP_SCOPES),
            users: Refcounts::default(),
            pool: ScopePool::default(),
        }
    }
}

impl Scopes {
    /// Brings the scopes up to date, with new ones.
    pub(super) fn update(&mut self, evaluator: &mut Evaluator<impl Executor>, mesh: &MeshSnapshot, new: &[ScopeKey]) {
        let new = new.iter().flat_map(with_common);
        let new: Vec<ScopeKey> = new.filter(|key| self.users.add(key)).collect();
        let new_common = common_among(&new);
        let pool = &self.pool;
        let function = |cx: &Cx, key: &ScopeKey| CommonScope::of(cx, mesh, key, pool);
        evaluator.update(&mut self.common, &new_common, function);
        let common = self.common.table().clone();
        let function = |cx: &Cx, key: &ScopeKey| scope(cx, mesh, key, &common, pool);
        evaluator.update(&mut self.all, &new, function);
        let all = self.all.table().clone();
        let function = |cx: &Cx, key: &ScopeKey| tcp_scope(cx, mesh, key, &common, &all);
        evaluator.update(&mut self.tcp, &new, function);
    }

    /// Returns the scopes as they would be after an update of the mesh, with new ones.
    pub(super) fn preview(
        &self,
        evaluator: &mut Evaluator<impl Executor>,
        mesh: &MeshSnapshot,
        new: &[ScopeKey],
    ) -> ScopeTables {
        let absent = |key: &ScopeKey| !contains(self.all.table(), key);
        let new: Vec<ScopeKey> = new.iter().flat_map(with_common).filter(absent).collect();
        let new_common = common_among(&new);
        let function = |cx: &Cx, key: &ScopeKey| CommonScope::of(cx, mesh, key, &self.pool);
        let common = evaluator.preview(&self.common, &new_common, function);
        let function = |cx: &Cx, key: &ScopeKey| scope(cx, mesh, key, common.table(), &self.pool);
        let all = evaluator.preview(&self.all, &new, function);
        let function = |cx: &Cx, key: &ScopeKey| tcp_scope(cx, mesh, key, common.table(), all.table());
        let tcp = evaluator.preview(&self.tcp, &new, function);
        ScopeTables {
            all: all.table().clone(),
            tcp: tcp.table().clone(),
        }
    }

    /// Drops a scope without users.
    pub(super) fn forget(&mut self, tx: &mut Transaction, key: &ScopeKey) {
        for key in with_common(key) {
            if self.users.remove(&key) {
                self.all.forget(tx, &key);
                self.tcp.forget(tx, &key);
                self.common.forget(tx, &key);
            }
        }
    }

    /// Ends an update.
    pub(super) fn begin(&mut self) {
        self.common.begin();
        self.all.begin();
        self.tcp.begin();
    }

    /// Returns the scopes.
    pub(super) fn tables(&self) -> ScopeTables {
        ScopeTables {
            all: self.all.table().clone(),
            tcp: self.tcp.table().clone(),
        }
    }

    /// Returns the scopes with all their VirtualServices.
    pub(super) fn all(&self) -> &Table<ScopeKey, SidecarScope> {
        self.all.table()
    }

    /// Returns the number of recorded dependencies.
    pub(super) fn recorded_reads(&self) -> usize {
        self.common.recorded_reads() + self.all.recorded_reads() + self.tcp.recorded_reads()
    }
}

/// Returns a key and that of its common scope.
fn with_common(key: &ScopeKey) -> impl Iterator<Item = ScopeKey> + use<> {
    std::iter::once(key.clone()).chain(key.common())
}

/// Returns the keys of common scopes.
fn common_among(keys: &[ScopeKey]) -> Vec<ScopeKey> {
    let keys = keys.iter().filter(|key| key.common().as_ref() == Some(*key));
    keys.cloned().collect()
}

fn scope(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &ScopeKey,
    common: &Table<ScopeKey, CommonScope>,
    pool: &ScopePool,
) -> Option<SidecarScope> {
    let own = |cx: &Cx| Some(pool.share(sidecar_scope::scope(cx, mesh, key)?));
    let common = key
        .common()
        .and_then(|common_key| common.get(cx, &common_key)?.all(key));
    debug_assert!(
        common.is_none() || common == own(&Cx::untracked()),
        "the common scope is not that of {key:?}"
    );
    common.or_else(|| own(cx))
}

fn tcp_scope(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &ScopeKey,
    common: &Table<ScopeKey, CommonScope>,
    all: &Table<ScopeKey, SidecarScope>,
) -> Option<SidecarScope> {
    let common = key
        .common()
        .and_then(|common_key| common.get(cx, &common_key)?.tcp(key));
    common.or_else(|| Some(all.get(cx, key)?.without_http_routes(cx, mesh)))
}

/// Returns true if a table has a row.
pub(super) fn contains<K: Key, V>(table: &Table<K, V>, key: &K) -> bool {
    table.get(&Cx::untracked(), key).is_some()
}
