//! Tables that combine the rows of several tables, for instance written objects with converted ones.

use super::{Cx, Key, RelationId, Table, TableWriter, Transaction};

/// A table with the rows of several sources under keys of their own. Rows are shared with the sources, and nothing is
/// recorded per row. After an update, no two rows of the sources may have one key: which of them the table has would
/// depend on the order of their changes.
pub struct Union<K, V> {
    rows: TableWriter<K, V>,
}

impl<K: Key, V: PartialEq> Union<K, V> {
    /// Returns an empty table with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            rows: TableWriter::new(id),
        }
    }

    /// Returns the present table.
    pub fn table(&self) -> &Table<K, V> {
        self.rows.table()
    }

    /// Returns the table with the row changes of this transaction.
    pub fn writer(&self) -> &TableWriter<K, V> {
        &self.rows
    }

    /// Starts or ends a transaction: drops the row changes.
    pub fn begin(&mut self) {
        self.rows.begin();
    }

    /// Removes the rows that a source no longer has under their keys. That precedes [`Self::put`] for all sources, so
    /// that a key may pass from one source to another. A transaction may change a row several times; the last change
    /// counts.
    pub fn remove<S: Key>(&mut self, tx: &mut Transaction, source: &TableWriter<S, V>, key: impl Fn(&V) -> K) {
        let cx = Cx::untracked();
        for (own, old, _) in source.changes() {
            let Some((old, row)) = old.as_ref().map(|row| (key(row), row)) else {
                continue;
            };
            let stays = source.table().get(&cx, own).is_some_and(|now| key(now) == old);
            // The row of the key may be that of another source.
            if !stays && self.rows.table().get(&cx, &old) == Some(row) {
                self.rows.remove(tx, &old);
            }
        }
    }

    /// Puts the changed rows of a source.
    pub fn put<S: Key>(&mut self, tx: &mut Transaction, source: &TableWriter<S, V>, key: impl Fn(&V) -> K) {
        for (own, ..) in source.changes() {
            if let Some(row) = source.table().get(&Cx::untracked(), own) {
                self.rows.put(tx, key(row), row.clone());
            }
        }
    }

    /// Checks after an update that every row of the sources has a key of its own, given their number.
    pub fn check(&self, source_rows: usize) {
        debug_assert_eq!(self.rows.table().len(), source_rows, "rows of a union have one key");
    }
}
