//! A model for tests of sources.

use std::collections::BTreeMap;

use crate::{
    base::ObjectKey,
    model::{change::Change, inputs::Row},
};

/// Applies changes as the model does.
pub(super) fn commit(model: &mut BTreeMap<ObjectKey, Row>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Upsert(row) => drop(model.insert(row.key().clone(), row)),
            Change::Remove(_, key) => drop(model.remove(&key)),
            Change::Replace(_, rows) => *model = rows.into_iter().map(|row| (row.key().clone(), row)).collect(),
            other @ Change::RemoveCluster(_) => panic!("{other:?}"),
        }
    }
}
