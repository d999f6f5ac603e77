//! A folder of YAML files as source of configuration and services, read at the start and watched.
//!
//! Note: a file that cannot be parsed does not remove its objects. Its last valid content stays until it can be parsed
//! again, so that a slip in an editor does not empty the mesh. Deleting a file does remove its objects.

mod changes;
pub(super) mod disk;
pub(super) mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use tokio::sync::mpsc;

use self::{
    changes::{Changes, Rows, Touched},
    disk::{Entry, Fingerprint},
    watch::{Noticed, Watch},
};
pub use super::diagnostics::Report;
use super::{
    defect,
    diagnostics::ActiveDiagnostics,
    source::{Readiness, Source},
};
use crate::{
    api::{
        Diagnostic, Kind, Row, Severity,
        folder::{self, FileContent, Role, SelectedNamespaces},
        hidden_gateway::HiddenGateway,
        yaml::MAX_FILE_BYTES,
    },
    base::{ClusterId, ObjectKey, Shared, Version},
    model::change::{Batch, Change},
    proto::istio::mesh::v1alpha1::MeshConfig,
};

/// Debounce time of objects: saving in an editor causes several events.
pub const OBJECTS_QUIET: Duration = Duration::from_millis(20);
/// Debounce time of mesh config and networks.
pub const MESH_QUIET: Duration = Duration::from_millis(100);
/// Poll interval, for changes without events: targets of links, a replaced folder.
pub const POLL: Duration = Duration::from_secs(5);

/// Part of the folder that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objects {
    /// The whole folder.
    All,
    /// Configuration with mesh config and networks; services come from Kubernetes.
    IstioOnly,
    /// Configuration without mesh config and networks, which come from Kubernetes like services.
    ConfigOnly,
    /// All objects of the config cluster, without mesh config and networks, which come from another folder.
    ObjectsOnly,
    /// Mesh config and networks; objects come from `meshConfig.configSources`.
    MeshOnly,
}

/// Settings of a folder.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// `--configDir`; none if there are only mesh config and networks.
    pub folder: Option<PathBuf>,
    /// The one file of the folder that is used; none for all.
    pub only: Option<String>,
    /// Config cluster.
    pub cluster: ClusterId,
    /// Key of mesh config and networks.
    pub mesh_key: ObjectKey,
    /// Part that is used.
    pub objects: Objects,
    /// `--meshConfig`, which replaces the folder's `mesh.yaml`.
    pub mesh_file: Option<PathBuf>,
    /// `--networksConfig`, which replaces the folder's `meshnetworks.yaml`.
    pub networks_file: Option<PathBuf>,
}

/// Reason why the start fails. Not retryable: the path is wrong.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder cannot be listed.
    #[error("cannot read folder {folder} (--configDir): {error}")]
    Folder {
        /// Folder.
        folder: PathBuf,
        /// Reason.
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
    /// Namespaces whose objects count; all of them unless the whole folder is used.
    selected: SelectedNamespaces,
    /// Diagnostics of objects that are declared more than once.
    duplicates: BTreeMap<(Kind, ObjectKey), Vec<Diagnostic>>,
    /// True if the last listing of the folder failed.
    is_unreadable: bool,
    env: Option<BTreeMap<String, String>>,
    proxies: Vec<Value>,
    /// Changes of the initial state.
    initial: Batch,
    is_synced: tokio::sync::watch::Sender<bool>,
}

/// A file at its last reading.
#[derive(Clone, Default)]
struct File {
    fingerprint: Fingerprint,
    /// Hash; `None` if it could not be read.
    hash: Option<Version>,
    content: Shared<FileContent>,
}

/// Returns the files of a mesh folder by their names in it, in order.
pub fn files(folder: &Path) -> std::io::Result<Vec<(String, PathBuf)>> {
    let entries = disk::list(folder)?;
    Ok(entries.into_iter().map(|entry| (entry.name, entry.path)).collect())
}

impl FileSource {
    /// Starts watching the folder and reads it.
    pub fn open(settings: FileSettings, report: Report) -> Result<Self, FileError> {
        let mut source = Self {
            watch: Watch::new(),
            settings,
            standing: ActiveDiagnostics::new(report),
            files: BTreeMap::new(),
            rows: Rows::default(),
            selected: SelectedNamespaces::default(),
            duplicates: BTreeMap::new(),
            is_unreadable: false,
            env: None,
            proxies: Vec::new(),
            initial: Batch::new(),
            is_synced: tokio::sync::watch::Sender::new(false),
        };
        // The watch starts before the first reading, so that no edit is missed.
        source.watch.follow(source.watched_folders());
        let entries = source.entries().map_err(|error| FileError::Folder {
            folder: source.settings.folder.clone().unwrap_or_default(),
            error,
        })?;
        source.initial = source.take(entries, &Noticed::default());
        Ok(source)
    }

    /// Returns `env.yaml` at the start; later edits need a restart.
    pub fn env(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.env.as_ref().unwrap_or(&NONE)
    }

    /// Returns the mesh config at the start; `None` if it is not read here.
    pub fn mesh_config(&self) -> Option<&MeshConfig> {
        let rows = self.initial.iter().filter_map(|change| match change {
            Change::Replace(_, rows) => Some(rows),
            _ => None,
        });
        rows.flatten().find_map(|row| match row {
            Row::MeshConfig(config) => Some(&config.spec),
            _ => None,
        })
    }

    /// Returns the present `proxies.yaml`.
    pub fn proxies(&self) -> &[Value] {
        &self.proxies
    }

    /// Watches the folder until the receiver is closed.
    async fn follow(mut self, changes: mpsc::Sender<Batch>) {
        loop {
            let noticed = self.watch.quiet(OBJECTS_QUIET, MESH_QUIET, POLL).await;
            // Reading and parsing megabytes would block a thread that serves sockets.
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

    /// Reads the files that events named, and those with another fingerprint.
    fn look(&mut self, noticed: &Noticed) -> Vec<Change> {
        self.watch.follow(self.watched_folders());
        match self.entries() {
            Ok(entries) => self.take(entries, noticed),
            Err(error) => {
                self.is_unreadable = true;
                let place = self.settings.folder.iter().map(|folder| folder.display().to_string());
                let place: String = place.collect();
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
        let mut folders: Vec<PathBuf> = self.settings.folder.iter().cloned().collect();
        let subfolders = self.settings.folder.iter().flat_map(|folder| disk::subfolders(folder));
        folders.extend(subfolders.map(|(path, _)| path));
        folders.extend(files.into_iter().flatten().filter_map(beside));
        folders
    }

    fn entries(&self) -> std::io::Result<Vec<Entry>> {
        let mut entries = match &self.settings.folder {
            Some(folder) => disk::list(folder)?,
            None => Vec::new(),
        };
        if let Some(only) = &self.settings.only {
            entries.retain(|entry| entry.name == *only);
        }
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

    /// Reads changed files and returns the changes.
    fn take(&mut self, entries: Vec<Entry>, noticed: &Noticed) -> Vec<Change> {
        let mut touched = Touched::default();
        let mut is_same = !std::mem::take(&mut self.is_unreadable);
        let mut files = BTreeMap::new();
        for entry in entries {
            let known = self.files.remove(&entry.name).unwrap_or_default();
            // An unreadable file may have become readable without another fingerprint.
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
        // Without a folder, there may be no file at all, and the defaults count.
        let is_first = self.env.is_none() && self.settings.folder.is_none();
        if is_same && !is_first {
            Vec::new()
        } else {
            self.compare(touched)
        }
    }

    fn read(&self, entry: &Entry, known: &File) -> File {
        let cluster = &self.settings.cluster;
        let (hash, content) = match disk::read(&entry.path, MAX_FILE_BYTES) {
            Ok(bytes) => {
                let hash = Some(Version::of(&bytes));
                let is_same = hash == known.hash;
                let read = || FileContent::read_as(&entry.role, &entry.name, &bytes, cluster, &known.content);
                (hash, (!is_same).then(|| defect::file(&entry.name, read)))
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

    /// Compares the touched objects, and declarations besides objects.
    fn compare(&mut self, mut touched: Touched) -> Vec<Change> {
        let files = || self.files.values().map(|file| &*file.content);
        let settings = folder::Settings::of(files(), &self.settings.mesh_key);
        if self.settings.objects == Objects::All {
            let namespaces = folder::declared(files(), |row| row.kind() == Kind::Namespace);
            let selected = SelectedNamespaces::of(&settings.rows, namespaces.values().map(|object| object.row));
            if selected != self.selected {
                self.selected = selected;
                for content in files() {
                    touched.compare(&FileContent::default(), content);
                }
            }
        }
        let mut changes = Changes::default();
        if !touched.0.is_empty() {
            let declared = folder::declared(files(), |row| touched.has(row));
            for (kind, key) in touched.keys() {
                let object = declared.get(&(&key.cluster, kind, key));
                let row = object.map(|object| object.row).filter(|row| self.counts(row));
                self.rows.put(kind, key, row, &mut changes);
                if kind == Kind::KubeGateway && self.settings.objects == Objects::All {
                    let hidden = object.and_then(|object| self.selected.hidden_gateway(object.row));
                    self.rows.put(HiddenGateway::KIND, key, hidden.as_ref(), &mut changes);
                }
                self.duplicates.remove(&(kind, key.clone()));
                if let Some(object) = object.filter(|object| !object.duplicates.is_empty()) {
                    self.duplicates.insert((kind, key.clone()), object.duplicates.clone());
                }
            }
        }
        for kind in [Kind::MeshConfig, Kind::MeshNetworks] {
            let rows = settings.rows.iter();
            let rows = rows.filter(|row| row.kind() == kind && self.counts(row));
            let source = (self.settings.cluster.clone(), kind);
            self.rows.replace(source, rows.cloned().collect(), &mut changes);
        }
        let in_files = files().flat_map(|content| &content.diagnostics);
        let mut standing: BTreeSet<_> = in_files.chain(self.duplicates.values().flatten()).cloned().collect();
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
        self.rows.take(changes)
    }

    fn counts(&self, row: &Row) -> bool {
        let own = row.key().cluster == self.settings.cluster;
        match self.settings.objects {
            Objects::All => self.selected.contain(row),
            Objects::IstioOnly => own && (row.kind().is_config() || !row.kind().is_object()),
            Objects::ConfigOnly => own && row.kind().is_config(),
            Objects::ObjectsOnly => own && row.kind().is_object(),
            Objects::MeshOnly => own && !row.kind().is_object(),
        }
    }
}

impl Source for FileSource {
    fn name(&self) -> &'static str {
        "folder"
    }

    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    /// Sends the initial state, then watches the folder.
    async fn run(mut self, changes: mpsc::Sender<Batch>) {
        if changes.send(std::mem::take(&mut self.initial)).await.is_ok() {
            self.is_synced.send_replace(true);
            self.follow(changes).await;
        }
    }
}

#[cfg(test)]
mod tests;
