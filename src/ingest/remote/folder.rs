//! `PILOT_MULTICLUSTER_KUBECONFIG_PATH`: a watched folder with a kubeconfig per remote cluster.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::{
    Declared,
    origin::{self, Allowed},
    reconcile::Origin,
};
use crate::{
    base::{ClusterId, Namespace, ObjectKey},
    ingest::file::{disk, watch::Watch},
    kube::kubeconfig::MAX_KUBECONFIG_BYTES,
};

/// Debounce time of the folder.
const QUIET: Duration = Duration::from_millis(250);
/// Poll interval, for changes without events.
const POLL: Duration = Duration::from_secs(5);
/// Depth of subfolders.
const MAX_DEPTH: usize = 8;

/// State of the folder at its last reading.
pub(super) struct Folder {
    path: PathBuf,
    own: ClusterId,
    allowed: Allowed,
    origins: BTreeMap<ObjectKey, Origin>,
    /// The declarations that were sent last.
    sent: Option<BTreeMap<ObjectKey, Origin>>,
    /// Reason why the folder cannot be read; logged once.
    problem: Option<String>,
}

impl Folder {
    pub(super) fn new(path: PathBuf, own: ClusterId, allowed: Allowed) -> Self {
        Self {
            path,
            own,
            allowed,
            origins: BTreeMap::new(),
            sent: None,
            problem: None,
        }
    }

    /// Sends the declarations of the folder, once it was read and after changes, until the receiver is closed.
    pub(super) async fn run(mut self, out: mpsc::Sender<Declared>) {
        let mut watch = Watch::new();
        let mut is_watched = false;
        loop {
            let looked = tokio::task::spawn_blocking(move || {
                let folders = self.look();
                (self, folders)
            });
            let folders;
            (self, folders) = match looked.await {
                Ok(looked) => looked,
                Err(error) => {
                    tracing::error!(%error, "failed to read kubeconfig folder, no longer watching it");
                    return;
                }
            };
            watch.follow(folders);
            if let Some(declared) = self.changed()
                && out.send(declared).await.is_err()
            {
                return;
            }
            // Writes between the first reading and the watch cause no event.
            if std::mem::replace(&mut is_watched, true) {
                tokio::select! {
                    _ = watch.quiet(QUIET, QUIET, POLL) => {}
                    () = out.closed() => return,
                }
            }
        }
    }

    /// Returns the declarations, if they differ from those sent last. Those of a folder that was never read are
    /// unknown.
    pub(super) fn changed(&mut self) -> Option<Declared> {
        if self.problem.is_some() || self.sent.as_ref() == Some(&self.origins) {
            return None;
        }
        self.sent = Some(self.origins.clone());
        Some(Declared::All(self.origins.clone()))
    }

    /// Reads everything; returns the folders to watch.
    pub(super) fn look(&mut self) -> Vec<PathBuf> {
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        if let Err(error) = walk(&self.path, MAX_DEPTH, &mut folders, &mut files) {
            let problem = error.to_string();
            if self.problem.as_ref() != Some(&problem) {
                let folder = self.path.display();
                tracing::error!(%folder, error = problem, "failed to read kubeconfig folder, keeping its last clusters");
                self.problem = Some(problem);
            }
            return vec![self.path.clone()];
        }
        self.problem = None;
        let read = files.into_iter().map(|path| {
            let name = path.strip_prefix(&self.path).unwrap_or(&path).display().to_string();
            let key = ObjectKey::new(&self.own, Namespace::default(), name);
            let content = disk::read(&path, MAX_KUBECONFIG_BYTES)
                .map(Bytes::from)
                .map_err(|error| error.to_string());
            let origin = origin::of_file(content, self.origins.get(&key), &self.allowed);
            (key, origin)
        });
        self.origins = read.collect();
        folders
    }
}

/// Finds the kubeconfigs below a folder. Links are followed, because mounted Secrets consist of them, except into names
/// with a leading dot, where mounts keep previous versions.
fn walk(folder: &Path, depth: usize, folders: &mut Vec<PathBuf>, files: &mut Vec<PathBuf>) -> io::Result<()> {
    folders.push(folder.to_owned());
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() && depth > 0 => walk(&path, depth - 1, folders, files)?,
            Ok(metadata) if metadata.is_dir() => {}
            _ if path
                .extension()
                .is_some_and(|extension| extension == "yaml" || extension == "yml") =>
            {
                files.push(path);
            }
            _ => {}
        }
    }
    Ok(())
}
