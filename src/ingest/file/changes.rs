//! Objects of a folder and their changes.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    api::{Kind, Row, folder::FileContent},
    base::{ClusterId, ObjectKey},
    model::change::{Change, SourceId},
};

/// Largest number of changed rows per kind that are sent individually.
const FEW_ROWS: usize = 16;

/// Objects whose declarations changed and may differ.
#[derive(Default)]
pub(super) struct Touched(pub(super) BTreeMap<Kind, BTreeSet<ObjectKey>>);

impl Touched {
    /// Adds the differences between two versions of a file.
    pub(super) fn compare(&mut self, before: &FileContent, after: &FileContent) {
        let (mut before, mut after) = (&before.objects[..], &after.objects[..]);
        while let (Some((old, left)), Some((new, right))) = (before.split_first(), after.split_first())
            && old == new
        {
            (before, after) = (left, right);
        }
        while let (Some((old, left)), Some((new, right))) = (before.split_last(), after.split_last())
            && old == new
        {
            (before, after) = (left, right);
        }
        for (row, _) in before.iter().chain(after) {
            self.0.entry(row.kind()).or_default().insert(row.key().clone());
        }
    }

    pub(super) fn has(&self, row: &Row) -> bool {
        self.0.get(&row.kind()).is_some_and(|keys| keys.contains(row.key()))
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = (Kind, &ObjectKey)> {
        self.0
            .iter()
            .flat_map(|(kind, keys)| keys.iter().map(move |key| (*kind, key)))
    }
}

/// Effective rows by cluster and kind, in the order of their keys.
#[derive(Default)]
pub(super) struct Rows(BTreeMap<(ClusterId, Kind), Vec<Row>>);

/// Changed rows by cluster and kind.
#[derive(Default)]
pub(super) struct Changes(BTreeMap<(ClusterId, Kind), Different>);

#[derive(Default)]
struct Different {
    upserts: Vec<Row>,
    removed: Vec<ObjectKey>,
    /// True if all rows are sent, because most changed.
    whole: bool,
}

impl Rows {
    /// Puts the present row of an object, if it has one.
    pub(super) fn put(&mut self, kind: Kind, key: &ObjectKey, row: Option<&Row>, changes: &mut Changes) {
        let source = (key.cluster.clone(), kind);
        let rows = self.0.entry(source.clone()).or_default();
        let is_first = rows.is_empty();
        match (rows.binary_search_by(|row| row.key().cmp(key)), row) {
            (Err(_), None) => return,
            (Ok(at), Some(row)) if rows[at] == *row => return,
            (Ok(at), Some(row)) => rows[at] = row.clone(),
            (Err(at), Some(row)) => rows.insert(at, row.clone()),
            (Ok(at), None) => {
                rows.remove(at);
            }
        }
        let different = changes.0.entry(source).or_insert_with(|| Different {
            whole: is_first,
            ..Different::default()
        });
        match row {
            Some(row) => different.upserts.push(row.clone()),
            None => different.removed.push(key.clone()),
        }
    }

    /// Puts all rows of a kind.
    pub(super) fn replace(&mut self, source: (ClusterId, Kind), rows: Vec<Row>, changes: &mut Changes) {
        let before = self.0.entry(source.clone()).or_default();
        if *before != rows {
            *before = rows;
            changes.0.entry(source).or_default().whole = true;
        }
    }

    /// Returns the changes: the changed rows of a kind if they are few, otherwise all its rows; new and removed kinds
    /// as a whole.
    pub(super) fn take(&mut self, changes: Changes) -> Vec<Change> {
        let mut sent = Vec::new();
        for (source, different) in changes.0 {
            let rows = self.0.get(&source).map_or(&[][..], Vec::as_slice);
            let (cluster, kind) = source;
            if different.whole || rows.is_empty() || different.upserts.len() + different.removed.len() > FEW_ROWS {
                sent.push(Change::Replace(SourceId { cluster, kind }, rows.to_vec()));
                continue;
            }
            sent.extend(different.upserts.into_iter().map(Change::Upsert));
            sent.extend(different.removed.into_iter().map(|key| Change::Remove(kind, key)));
        }
        self.0.retain(|_, rows| !rows.is_empty());
        sent
    }
}
