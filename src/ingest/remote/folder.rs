//! `PILOT_MULTICLUSTER_KUBECONFIG_PATH`: a folder with a kubeconfig for each remote cluster, watched.

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

/// How long the folder must be quiet before it is read.
const QUIET: Duration = Duration::from_millis(250);
/// How often it is looked at for what no event tells.
const POLL: Duration = Duration::from_secs(5);
/// How deep folders below it are looked into.
const MAX_DEPTH: usize = 8;

/// The folder as it was last seen.
pub(super) struct Folder {
    path: PathBuf,
    own: ClusterId,
    allowed: Allowed,
    origins: BTreeMap<ObjectKey, Origin>,
    /// Why the folder cannot be read; told once.
    problem: Option<String>,
}

impl Folder {
    pub(super) fn new(path: PathBuf, own: ClusterId, allowed: Allowed) -> Self {
        Self {
            path,
            own,
            allowed,
            origins: BTreeMap::new(),
            problem: None,
        }
    }

    /// Tells what the folder declares, at once and whenever it is different, until the receiver is gone.
    pub(super) async fn run(mut self, out: mpsc::Sender<Declared>) {
        let mut watch = Watch::new();
        let mut told = None;
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
            let is_first_watch = told.is_none();
            watch.follow(folders);
            if told.as_ref() != Some(&self.origins) {
                told = Some(self.origins.clone());
                if out.send(Declared::All(self.origins.clone())).await.is_err() {
                    return;
                }
            }
            // What was written between the first look and the watch would tell nothing.
            if !is_first_watch {
                tokio::select! {
                    _ = watch.quiet(QUIET, QUIET, POLL) => {}
                    () = out.closed() => return,
                }
            }
        }
    }

    /// Reads everything; gives the folders to watch.
    fn look(&mut self) -> Vec<PathBuf> {
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        if let Err(error) = walk(&self.path, MAX_DEPTH, &mut folders, &mut files) {
            let problem = format!(
                "the folder of kubeconfigs {} cannot be read: {error}",
                self.path.display()
            );
            if self.problem.as_ref() != Some(&problem) {
                tracing::error!("{problem}; keeping its last clusters");
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

/// The kubeconfigs below a folder. Links are followed, as mounted Secrets consist of them, but not into what begins with a
/// dot, where mounts keep their former states.
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
