//! Notices of changes in folders.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use notify::{Config, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{sync::Notify, time};

use super::disk;
use crate::api::folder::Role;

/// More files than this are not told one by one.
const MOST_FILES: usize = 256;

/// What changed in the folders.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::ingest) struct Noticed {
    /// Names of files, in whatever folder.
    files: BTreeSet<String>,
    /// It cannot be told which files.
    any: bool,
    /// It may concern mesh config or networks, which wait longer.
    mesh: bool,
}

impl Noticed {
    /// Any file may have changed.
    #[cfg(test)]
    pub(super) fn any() -> Self {
        Self {
            any: true,
            ..Self::default()
        }
    }

    /// True if that file may have changed.
    pub(super) fn has(&self, file: &Path) -> bool {
        self.any || self.files.contains(name_of(file))
    }

    /// Adds what an event tells. Reading a file is no change; an error of the watcher may hide one. False: it tells nothing.
    fn add(&mut self, event: &notify::Result<notify::Event>) -> bool {
        let Ok(event) = event else {
            (self.any, self.mesh) = (true, true);
            return true;
        };
        if matches!(event.kind, EventKind::Access(kind) if !is_write_end(kind)) {
            return false;
        }
        self.any |= event.need_rescan() || event.paths.is_empty();
        self.mesh |= self.any;
        for path in &event.paths {
            self.add_path(path);
        }
        true
    }

    fn add_path(&mut self, path: &Path) {
        let name = name_of(path);
        // Links to files that are replaced together lead through such a folder (a mounted ConfigMap).
        let is_hidden = name.is_empty() || name.starts_with("..");
        self.any |= is_hidden || self.files.len() >= MOST_FILES;
        self.mesh |= is_hidden || !matches!(Role::of(name), Role::Objects(_) | Role::Ignored);
        if !self.any {
            self.files.insert(name.to_owned());
        }
    }

    fn merge(&mut self, mut later: Self) {
        self.files.append(&mut later.files);
        self.any |= later.any;
        self.mesh |= later.mesh;
    }
}

fn name_of(file: &Path) -> &str {
    file.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// What was noticed and not asked for yet. Locked to add to it or to take it.
#[derive(Default)]
struct Notices {
    waiting: Mutex<Noticed>,
    told: Notify,
}

impl Notices {
    fn add(&self, event: &notify::Result<notify::Event>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.add(event) {
            self.told.notify_one();
        }
    }

    /// What there is, as soon as there is anything. Nothing is lost if the future is dropped.
    async fn next(&self) -> Noticed {
        self.told.notified().await;
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Watches folders, each as long as it is the one that its path leads to.
pub(in crate::ingest) struct Watch {
    watcher: Option<RecommendedWatcher>,
    notices: Arc<Notices>,
    /// The watched folders, and which folder stood there when the watch began.
    watched: BTreeMap<PathBuf, (u64, u64)>,
}

impl Watch {
    pub(in crate::ingest) fn new() -> Self {
        let notices = Arc::<Notices>::default();
        let told = notices.clone();
        let tell = move |event: notify::Result<notify::Event>| told.add(&event);
        let watcher = RecommendedWatcher::new(tell, Config::default());
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "file watch unavailable, polling instead");
        });
        Self {
            watcher: watcher.ok(),
            notices,
            watched: BTreeMap::new(),
        }
    }

    /// Watches these folders, and anew those that were replaced.
    pub(in crate::ingest) fn follow(&mut self, folders: Vec<PathBuf>) {
        let Some(watcher) = &mut self.watcher else { return };
        for folder in folders {
            let identity = disk::identity(&folder);
            if self.watched.get(&folder).copied() == identity {
                continue;
            }
            if self.watched.remove(&folder).is_some() {
                // The folder that was watched may be gone, and its watch with it.
                let _ = watcher.unwatch(&folder);
            }
            let Some(identity) = identity else { continue };
            match watcher.watch(&folder, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.watched.insert(folder, identity);
                }
                Err(error) => tracing::warn!(folder = %folder.display(), %error, "failed to watch folder"),
            }
        }
    }

    /// Waits for changes and for the quiet after them; nothing if none was noticed for the length of `poll`.
    pub(in crate::ingest) async fn quiet(&mut self, objects: Duration, mesh: Duration, poll: Duration) -> Noticed {
        // Without a watcher nothing is ever told, and only polling is left.
        let Ok(mut noticed) = time::timeout(poll, self.notices.next()).await else {
            return Noticed::default();
        };
        // Whoever writes without end is read in between.
        let latest = time::Instant::now() + 10 * mesh;
        loop {
            let quiet = if noticed.mesh { mesh } else { objects };
            let until = latest.min(time::Instant::now() + quiet);
            match time::timeout_at(until, self.notices.next()).await {
                Ok(more) => noticed.merge(more),
                Err(_) => return noticed,
            }
        }
    }
}

fn is_write_end(kind: notify::event::AccessKind) -> bool {
    kind == notify::event::AccessKind::Close(notify::event::AccessMode::Write)
}
