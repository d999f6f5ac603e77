//! A folder of YAML files as source of config and services, read at start and watched.
//!
//! What a reader would get wrong: a file that cannot be read does not take away what it declared. Its last good content
//! stays until it can be read again, so that a slip in an editor does not empty the mesh. A file that is deleted does.

mod changes;
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
    changes::{Changes, Rows, Touched},
    disk::{Entry, Fingerprint},
    watch::{Noticed, Watch},
};
use super::diagnostics::ActiveDiagnostics;
pub use super::diagnostics::Report;
use crate::{
    api::{
        Diagnostic, Kind, Row, Severity,
        folder::{self, FileContent, Role},
        yaml::MAX_FILE_BYTES,
    },
    base::{ClusterId, ObjectKey, Shared, Version},
    model::change::Change,
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
    #[error("cannot read folder {folder} (--configDir): {error}")]
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
    standing: ActiveDiagnostics<()>,
    watch: Watch,
    files: BTreeMap<String, File>,
    rows: Rows,
    /// What is to be said of objects that are declared more than once.
    twice: BTreeMap<(Kind, ObjectKey), Vec<Diagnostic>>,
    /// The folder could not be listed when it was looked at last.
    is_unreadable: bool,
    env: Option<BTreeMap<String, String>>,
    proxies: Vec<Value>,
}

/// A file as it was read last.
#[derive(Clone, Default)]
struct File {
    fingerprint: Fingerprint,
    /// None if it could not be read.
    hash: Option<Version>,
    content: Shared<FileContent>,
}

impl FileSource {
    /// Begins to watch the folder and reads it. The changes are those that make up the first state.
    pub fn open(settings: FileSettings, report: Report) -> Result<(Self, Vec<Change>), FileError> {
        let mut source = Self {
            watch: Watch::new(),
            settings,
            standing: ActiveDiagnostics::new(report),
            files: BTreeMap::new(),
            rows: Rows::default(),
            twice: BTreeMap::new(),
            is_unreadable: false,
            env: None,
            proxies: Vec::new(),
        };
        // Watched before it is read, so that no edit falls in between.
        source.watch.follow(source.watched_folders());
        let entries = source.entries().map_err(|error| FileError::Folder {
            folder: source.settings.folder.clone(),
            error,
        })?;
        let changes = source.take(entries, &Noticed::default());
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
                let changes = self.look(&noticed);
                (self, changes)
            });
            let found;
            (self, found) = match read.await {
                Ok(result) => result,
                Err(error) => {
                    tracing::error!(%error, "failed to read config folder, no longer watching it");
                    return;
                }
            };
            if !found.is_empty() && changes.send(found).await.is_err() {
                return;
            }
        }
    }

    /// Looks at the folder: at the files of which something was noticed, and at those that look different.
    fn look(&mut self, noticed: &Noticed) -> Vec<Change> {
        self.watch.follow(self.watched_folders());
        match self.entries() {
            Ok(entries) => self.take(entries, noticed),
            Err(error) => {
                self.is_unreadable = true;
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
    fn take(&mut self, entries: Vec<Entry>, noticed: &Noticed) -> Vec<Change> {
        let mut touched = Touched::default();
        let mut is_same = !std::mem::take(&mut self.is_unreadable);
        let mut files = BTreeMap::new();
        for entry in entries {
            let known = self.files.remove(&entry.name).unwrap_or_default();
            // What could not be read may be readable now, however it looks.
            let looks_same = known.hash.is_some() && known.fingerprint == entry.fingerprint;
            let file = if looks_same && !noticed.has(&entry.path) {
                known
            } else {
                is_same = false;
                let file = self.read(&entry, &known);
                touched.compare(&known.content, &file.content);
                file
            };
            files.insert(entry.name, file);
        }
        for gone in std::mem::replace(&mut self.files, files).into_values() {
            is_same = false;
            touched.compare(&gone.content, &FileContent::default());
        }
        if is_same { Vec::new() } else { self.compare(&touched) }
    }

    fn read(&self, entry: &Entry, known: &File) -> File {
        let cluster = &self.settings.cluster;
        let (hash, content) = match disk::read(&entry.path, MAX_FILE_BYTES) {
            Ok(bytes) => {
                let hash = Some(Version::of(&bytes));
                let is_same = hash == known.hash;
                let read = || FileContent::read_as(&entry.role, &entry.name, &bytes, cluster, &known.content);
                (hash, (!is_same).then(read))
            }
            Err(error) => (None, Some(FileContent::absent(&entry.name, &error.to_string()))),
        };
        let content = content.map(|content| Shared::new(content.after(&known.content)));
        File {
            fingerprint: entry.fingerprint,
            hash,
            content: content.unwrap_or_else(|| known.content.clone()),
        }
    }

    /// Tells what is different about the touched objects, and about what is declared beside objects.
    fn compare(&mut self, touched: &Touched) -> Vec<Change> {
        let files = || self.files.values().map(|file| &*file.content);
        let mut changes = Changes::default();
        if !touched.0.is_empty() {
            let declared = folder::declared(files(), |row| touched.has(row));
            for (kind, key) in touched.keys() {
                let object = declared.get(&(&key.cluster, kind, key));
                let row = object.map(|object| object.row).filter(|row| self.counts(row));
                self.rows.put(kind, key, row, &mut changes);
                self.twice.remove(&(kind, key.clone()));
                if let Some(object) = object.filter(|object| !object.twice.is_empty()) {
                    self.twice.insert((kind, key.clone()), object.twice.clone());
                }
            }
        }
        let settings = folder::Settings::of(files(), &self.settings.mesh_key);
        for kind in [Kind::MeshConfig, Kind::MeshNetworks] {
            let rows = settings.rows.iter();
            let rows = rows.filter(|row| row.kind() == kind && self.counts(row));
            let source = (self.settings.cluster.clone(), kind);
            self.rows.replace(source, rows.cloned().collect(), &mut changes);
        }
        let in_files = files().flat_map(|content| &content.diagnostics);
        let mut standing: BTreeSet<_> = in_files.chain(self.twice.values().flatten()).cloned().collect();
        match &self.env {
            None => self.env = Some(settings.env),
            Some(env) if *env != settings.env => {
                let mut restart = Diagnostic::of_document(
                    "env.yaml",
                    "NeedsRestart",
                    "feature variables changed; restart istiod to apply the new values",
                );
                restart.severity = Severity::Warning;
                standing.insert(restart);
            }
            Some(_) => {}
        }
        self.proxies = settings.proxies;
        self.standing.set((), standing);
        self.rows.told(changes)
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

#[cfg(test)]
mod tests;
