//! Keys that a function extracts from the rows of a table, without the rows.

use super::{Key, Refcounts, RelationId, Table, TableWriter, Transaction, index::Extract};
use crate::base::Shared;

/// A table of the keys that an index would have. A key exists while a row has it. The rows are counted instead of held,
/// and their other changes do not concern readers.
pub struct Distinct<I, K, V> {
    keys: TableWriter<I, ()>,
    extract: Extract<I, K, V>,
    /// Number of rows with each key.
    rows: Refcounts<I>,
}

impl<I: Key, K: Key, V: PartialEq> Distinct<I, K, V> {
    /// Returns an empty table that extracts its keys by a function.
    pub fn new(id: RelationId, extract: Extract<I, K, V>) -> Self {
        Self {
            keys: TableWriter::new(id),
            extract,
            rows: Refcounts::default(),
        }
    }

    /// Returns the present table.
    pub fn table(&self) -> &Table<I, ()> {
        self.keys.table()
    }

    /// Returns the table with the changes of keys of this transaction, as a source of other tables.
    pub fn writer(&self) -> &TableWriter<I, ()> {
        &self.keys
    }

    /// Starts or ends a transaction: drops the changes of keys.
    pub fn begin(&mut self) {
        self.keys.begin();
    }

    /// Applies the row changes of the source.
    pub fn update(&mut self, tx: &mut Transaction, source: &TableWriter<K, V>) {
        self.begin();
        // New rows precede old ones, so that a key that passes from one row to another does not change.
        for (key, _, new) in source.changes() {
            let Some(new) = new else { continue };
            (self.extract)(key, new, &mut |entry| {
                if self.rows.add(&entry) {
                    self.keys.put(tx, entry, Shared::new(()));
                }
            });
        }
        for (key, old, _) in source.changes() {
            let Some(old) = old else { continue };
            (self.extract)(key, old, &mut |entry| {
                if self.rows.remove(&entry) {
                    self.keys.remove(tx, &entry);
                }
            });
        }
    }
}
