//! A folder of YAML files as source of config and services, read at start and watched.
//!
//! What a reader would get wrong: a file that cannot be read does not take away what it declared. Its last good content
//! stays until it can be read again, so that a slip in an editor does not empty the mesh. A file that is deleted does.

pub(super) mod disk;
pub(super) mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use serde_json::Value;
use tokio::sync::mpsc;

use self::{
    disk::{Entry, Fingerprint},
    watch::Watch,
};
pub use super::findings::Report;
use super::findings::Standing;
use crate::{
    api::{
        Diagnostic, Kind, Row, Severity,
        folder::{FileContent, Folder, Role},
        yaml::MAX_FILE_BYTES,
    },
    base::{ClusterId, ObjectKey, Version},
    model::change::{Change, SourceId},
};

/// How long objects must be quiet before they are read: an editor's save is several events.
pub const OBJECTS_QUIET: Duration = Duration::from_millis(20);
/// How long mesh config and networks must be quiet before they are read.
pub const MESH_QUIET: Duration = Duration::from_millis(100);
/// How often the folder is looked at for what no event tells: targets of links, a folder put in place of another.
pub const POLL: Duration = Duration::from_secs(5);

/// What of the folder counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objects {
    /// Everything: the folder is the whole mesh.
    All,
    /// Config with mesh config and networks; services come from Kubernetes.
    IstioOnly,
    /// Config without mesh config and networks, which come from Kubernetes as services do.
    ConfigOnly,
}

/// What is read.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// `--configDir`.
    pub folder: PathBuf,
    /// The config cluster.
    pub cluster: ClusterId,
    /// The key of mesh config and networks.
    pub mesh_key: ObjectKey,
    /// What counts.
    pub objects: Objects,
    /// `--meshConfig`: stands in place of the folder's `mesh.yaml`.
    pub mesh_file: Option<PathBuf>,
    /// `--networksConfig`: stands in place of the folder's `meshnetworks.yaml`.
    pub networks_file: Option<PathBuf>,
}

/// Why there is nothing to start with. Not retryable: the path is wrong.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder cannot be listed.
    #[error("cannot read the folder {folder}: {error} (it is named by --configDir)")]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// A watched folder.
pub struct FileSource {
    settings: FileSettings,
    standing: Standing<()>,
    watch: Watch,
    files: BTreeMap<String, FileContent>,
    hashes: BTreeMap<String, Version>,
    fingerprints: Vec<(String, Fingerprint)>,
    rows: BTreeMap<(ClusterId, Kind), Vec<Row>>,
    env: Option<BTreeMap<String, String>>,
    proxies: Vec<Value>,
}

impl FileSource {
    /// Begins to watch the folder and reads it. The changes are those that make up the first state.
    pub fn open(settings: FileSettings, report: Report) -> Result<(Self, Vec<Change>), FileError> {
        let mut source = Self {
            watch: Watch::new(),
            settings,
            standing: Standing::new(report),
            files: BTreeMap::new(),
            hashes: BTreeMap::new(),
            fingerprints: Vec::new(),
            rows: BTreeMap::new(),
            env: None,
            proxies: Vec::new(),
        };
        // Watched before it is read, so that no edit falls in between.
        source.watch.follow(source.watched_folders());
        let entries = source.entries().map_err(|error| FileError::Folder {
            folder: source.settings.folder.clone(),
            error,
        })?;
        let changes = source.take(entries);
        Ok((source, changes))
    }

    /// `env.yaml` as it was at the start; later edits need a restart.
    pub fn env(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.env.as_ref().unwrap_or(&NONE)
    }

    /// `proxies.yaml` as it is now.
    pub fn proxies(&self) -> &[Value] {
        &self.proxies
    }

    /// Follows the folder until the receiver is gone.
    pub async fn run(mut self, changes: mpsc::Sender<Vec<Change>>) {
        loop {
            let noticed = self.watch.quiet(OBJECTS_QUIET, MESH_QUIET, POLL).await;
            // Reading and parsing megabytes is no work for a thread that serves sockets.
            let read = tokio::task::spawn_blocking(move || {
                let changes = self.look(noticed);
                (self, changes)
            });
            let found;
            (self, found) = match read.await {
                Ok(result) => result,
                Err(error) => {
                    tracing::error!(%error, "reading the folder failed; it is followed no longer");
                    return;
                }
            };
            if !found.is_empty() && changes.send(found).await.is_err() {
                return;
            }
        }
    }

    /// Looks at the folder; without notice only if something about its files is different.
    fn look(&mut self, noticed: bool) -> Vec<Change> {
        self.watch.follow(self.watched_folders());
        match self.entries() {
            Ok(entries) if noticed || disk::fingerprints(&entries) != self.fingerprints => self.take(entries),
            Ok(_) => Vec::new(),
            Err(error) => {
                let place = self.settings.folder.display().to_string();
                let message = format!("the folder cannot be read, what it declared stays: {error}");
                self.standing
                    .set((), [Diagnostic::of_document(place, "UnreadableFolder", message)].into());
                Vec::new()
            }
        }
    }

    fn watched_folders(&self) -> Vec<PathBuf> {
        let beside = |file: &PathBuf| file.parent().map(|parent| parent.join("."));
        let files = [&self.settings.mesh_file, &self.settings.networks_file];
        let mut folders = vec![self.settings.folder.clone()];
        folders.extend(files.into_iter().flatten().filter_map(beside));
        folders
    }

    fn entries(&self) -> std::io::Result<Vec<Entry>> {
        let mut entries = disk::list(&self.settings.folder)?;
        let instead = [
            (Role::Mesh, &self.settings.mesh_file),
            (Role::Networks, &self.settings.networks_file),
        ];
        for (role, file) in instead {
            if let Some(file) = file {
                entries.retain(|entry| entry.role != role);
                entries.push(Entry::new(file.display().to_string(), role, file.clone()));
            }
        }
        Ok(entries)
    }

    /// Reads what is new and tells what became different.
    fn take(&mut self, entries: Vec<Entry>) -> Vec<Change> {
        self.fingerprints = disk::fingerprints(&entries);
        let mut files = BTreeMap::new();
        let mut hashes = BTreeMap::new();
        for entry in entries {
            let previous = self.files.remove(&entry.name).unwrap_or_default();
            let content = match disk::read(&entry.path, MAX_FILE_BYTES) {
                Ok(bytes) => {
                    let hash = Version::of(&bytes);
                    let same = self.hashes.get(&entry.name) == Some(&hash);
                    hashes.insert(entry.name.clone(), hash);
                    if same {
                        previous
                    } else {
                        self.read(&entry, &bytes, &previous)
                    }
                }
                Err(error) => FileContent::absent(&entry.name, &error.to_string()).after(&previous),
            };
            files.insert(entry.name, content);
        }
        self.files = files;
        self.hashes = hashes;
        let folder = Folder::of(&self.files, &self.settings.cluster, &self.settings.mesh_key);
        self.compare(folder)
    }

    fn read(&self, entry: &Entry, bytes: &[u8], previous: &FileContent) -> FileContent {
        FileContent::read_as(&entry.role, &entry.name, bytes, &self.settings.cluster, previous).after(previous)
    }

    fn compare(&mut self, folder: Folder) -> Vec<Change> {
        let mut standing: BTreeSet<Diagnostic> = folder.diagnostics.into_iter().collect();
        match &self.env {
            None => self.env = Some(folder.env),
            Some(env) if *env != folder.env => {
                let mut restart = Diagnostic::of_document(
                    "env.yaml",
                    "NeedsRestart",
                    "the feature variables were edited; istiod needs a restart for the new values to count",
                );
                restart.severity = Severity::Warning;
                standing.insert(restart);
            }
            Some(_) => {}
        }
        self.proxies = folder.proxies;
        self.standing.set((), standing);
        let mut rows: BTreeMap<(ClusterId, Kind), Vec<Row>> = BTreeMap::new();
        for (cluster, row) in folder
            .rows
            .into_iter()
            .flat_map(|(cluster, rows)| rows.into_iter().map(move |row| (cluster.clone(), row)))
        {
            if self.counts(&row) {
                rows.entry((cluster, row.kind())).or_default().push(row);
            }
        }
        let changes = differences(&self.rows, &rows);
        self.rows = rows;
        changes
    }

    fn counts(&self, row: &Row) -> bool {
        let own = row.key().cluster == self.settings.cluster;
        match self.settings.objects {
            Objects::All => true,
            Objects::IstioOnly => own && (row.kind().is_config() || !row.kind().is_object()),
            Objects::ConfigOnly => own && row.kind().is_config(),
        }
    }
}

/// More rows of a kind than this are told as a whole.
const FEW_ROWS: usize = 16;

/// For every kind of a cluster the rows that differ, if they are few, else one replacement; a kind that is gone is replaced
/// by nothing.
fn differences(
    before: &BTreeMap<(ClusterId, Kind), Vec<Row>>,
    after: &BTreeMap<(ClusterId, Kind), Vec<Row>>,
) -> Vec<Change> {
    let sources: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let changed = sources
        .into_iter()
        .filter(|source| before.get(source) != after.get(source));
    changed
        .flat_map(|source| {
            let (cluster, kind) = source.clone();
            let (before, after) = (before.get(source), after.get(source));
            let single = before.zip(after).filter(|_| kind.is_object());
            single
                .and_then(|(before, after)| few_differences(before, after))
                .unwrap_or_else(|| {
                    let rows = after.cloned().unwrap_or_default();
                    vec![Change::Replace(SourceId { cluster, kind }, rows)]
                })
        })
        .collect()
}

/// What turns the rows of one kind into others, if it is little; nothing where a key stands twice, since then the order of
/// all rows counts.
fn few_differences(before: &[Row], after: &[Row]) -> Option<Vec<Change>> {
    let by_key = |rows: &'_ [Row]| {
        let map: BTreeMap<ObjectKey, Row> = rows.iter().map(|row| (row.key().clone(), row.clone())).collect();
        (map.len() == rows.len()).then_some(map)
    };
    let (mut before, after) = (by_key(before)?, by_key(after)?);
    let mut changes = Vec::new();
    for (key, row) in after {
        if before.remove(&key).as_ref() != Some(&row) {
            changes.push(Change::Upsert(row));
        }
    }
    let gone = before.into_iter().map(|(key, row)| Change::Remove(row.kind(), key));
    changes.extend(gone);
    (changes.len() <= FEW_ROWS).then_some(changes)
}

#[cfg(test)]
mod tests;
