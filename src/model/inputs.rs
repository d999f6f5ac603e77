//! One raw table for each kind of input.

use crate::{
    api::{Kind, kinds::with_kinds, meta::Keyed, row::types},
    base::{ClusterId, ObjectKey},
    table::{Cx, RelationId, Table, TableWriter, Transaction},
};

pub use crate::api::Row;

/// The keys of a table or index, for debug pages.
pub struct RelationKeys<'a> {
    /// The name.
    pub name: &'static str,
    /// Its identity.
    pub id: RelationId,
    /// The table that it is made of, if it is one.
    pub source: Option<&'static str>,
    /// Returns the keys as text. Those of all relations at once would take hundreds of megabytes in a large mesh.
    pub keys: Box<dyn Fn() -> Vec<String> + 'a>,
}

macro_rules! input_tables {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { table: $table:ident, $($column:tt)* })*) => {
        /// The input tables of one revision, to be read.
        #[derive(Clone)]
        pub struct InputTables {
            $($(#[$doc])* pub $table: Table<ObjectKey, types::$kind>,)*
        }

        /// The writers of the input tables.
        pub struct InputWriters {
            $(pub(super) $table: TableWriter<ObjectKey, types::$kind>,)*
        }

        impl Default for InputWriters {
            fn default() -> Self {
                Self { $($table: TableWriter::new(RelationId(Kind::$kind as u32)),)* }
            }
        }

        impl InputTables {
            /// Returns the keys of every table.
            pub fn relations(&self) -> Vec<RelationKeys<'_>> {
                vec![$(RelationKeys {
                    name: stringify!($table),
                    id: RelationId(Kind::$kind as u32),
                    source: None,
                    keys: Box::new(move || self.$table.keys(&Cx::untracked()).map(ToString::to_string).collect()),
                },)*]
            }

            /// Returns the keys of all objects of a kind, untracked.
            pub fn keys(&self, kind: Kind) -> Vec<ObjectKey> {
                let cx = Cx::untracked();
                match kind { $(Kind::$kind => self.$table.keys(&cx).cloned().collect(),)* }
            }

            /// Returns an object, untracked.
            pub fn object(&self, kind: Kind, key: &ObjectKey) -> Option<Row> {
                let cx = Cx::untracked();
                match kind { $(Kind::$kind => self.$table.get(&cx, key).cloned().map(Row::$kind),)* }
            }
        }

        impl InputTables {
            /// Marks the rows that differ from those of an earlier revision as changed.
            pub fn mark_differences(&self, earlier: &Self, tx: &mut Transaction) {
                $(self.$table.mark_differences(&earlier.$table, tx);)*
            }
        }

        impl InputWriters {
            /// Returns the current tables.
            pub fn tables(&self) -> InputTables {
                InputTables { $($table: self.$table.table().clone(),)* }
            }

            /// Forgets the row changes of the last transaction.
            pub fn begin(&mut self) {
                $(self.$table.begin();)*
            }

            /// Puts a row. Returns true if this changed anything.
            pub fn put(&mut self, tx: &mut Transaction, row: Row) -> bool {
                match row { $(Row::$kind(row) => {
                    let key = Keyed::key(&*row).clone();
                    self.$table.put(tx, key, row)
                })* }
            }

            /// Removes a row. Returns true if the row existed.
            pub fn remove(&mut self, tx: &mut Transaction, kind: Kind, key: &ObjectKey) -> bool {
                match kind { $(Kind::$kind => self.$table.remove(tx, key),)* }
            }

            /// Returns the keys of a cluster's objects of a kind.
            pub fn keys(&self, kind: Kind, cluster: &ClusterId) -> Vec<ObjectKey> {
                let cx = Cx::untracked();
                match kind { $(Kind::$kind => self.$table.table().iter(&cx)
                    .map(|(key, _)| key).filter(|key| key.cluster == *cluster).cloned().collect(),)* }
            }
        }
    };
}

with_kinds!(input_tables);
