//! Tables that combine the rows of several tables, for instance written objects with converted ones.

use super::{Key, RelationId, Table, TableWriter, Transaction};

/// A table with the rows of several sources under keys of their own. Rows are shared with the sources, and nothing is
/// recorded per row. No two sources may have rows with one key.
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

    /// Starts a transaction: clears the row changes.
    pub fn begin(&mut self) {
        self.rows.begin();
    }

    /// Applies the row changes of a source, whose own keys may be others.
    pub fn apply<S: Key>(&mut self, tx: &mut Transaction, source: &TableWriter<S, V>, key: impl Fn(&V) -> K) {
        for (_, old, new) in source.changes() {
            let new = new.as_ref().map(|row| (key(row), row));
            if let Some(old) = old.as_ref().map(|row| key(row))
                && new.as_ref().is_none_or(|(new, _)| *new != old)
            {
                self.rows.remove(tx, &old);
            }
            if let Some((key, row)) = new {
                self.rows.put(tx, key, row.clone());
            }
        }
    }
}
