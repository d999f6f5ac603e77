//! Rows for tests.

use super::{Change, Commit, Installation, World, inputs::Row};
use crate::{
    api::{Config, Kind, Meta, Severity, folder},
    base::{ClusterId, Labels, ObjectKey, Shared},
};

/// Cluster of all rows.
pub(crate) const CLUSTER: ClusterId = ClusterId::new_static("Kubernetes");

/// Returns metadata of an object of the config cluster; `name` is `namespace/name`, `age` its creation time.
pub(crate) fn meta(kind: Kind, name: &str, age: i64) -> Shared<Meta> {
    let (namespace, name) = name.split_once('/').expect("because a name is namespace/name");
    Shared::new(Meta {
        kind,
        key: ObjectKey::new(&CLUSTER, namespace, name),
        labels: Shared::default(),
        annotations: Labels::new(),
        creation: age,
        generation: 0,
        resource_version: "1".into(),
    })
}

/// Returns an Istio object.
pub(crate) fn config<T>(kind: Kind, name: &str, age: i64, spec: T) -> Config<T> {
    Config {
        meta: meta(kind, name, age),
        spec,
        status: None,
    }
}

/// Returns the key of an object of the config cluster, from `namespace/name`.
pub(crate) fn key(name: &str) -> ObjectKey {
    meta(Kind::Pod, name, 0).key.clone()
}

/// Commits rows to an empty world.
pub(crate) fn world(rows: Vec<Row>) -> Commit {
    World::new(Installation::default()).commit(rows.into_iter().map(Change::Upsert).collect())
}

/// Returns the rows of a mesh folder.
pub(crate) fn folder(installation: &Installation, files: &[(&str, &str)]) -> Vec<Row> {
    let files: Vec<(String, &[u8])> = files
        .iter()
        .map(|(name, text)| ((*name).into(), text.as_bytes()))
        .collect();
    let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
    let errors: Vec<_> = folder
        .diagnostics
        .iter()
        .filter(|found| found.severity == Severity::Error)
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    folder.rows.into_values().flatten().collect()
}

/// Returns a world with a mesh folder.
pub(crate) fn folder_world(installation: Installation, files: &[(&str, &str)]) -> World {
    let rows = folder(&installation, files);
    let mut world = World::new(installation);
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    world
}

/// Returns labels from pairs.
pub(crate) fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs
        .iter()
        .map(|(key, value)| ((*key).into(), (*value).into()))
        .collect()
}
