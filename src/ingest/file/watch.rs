//! Notifications of changes in folders.

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

/// Largest number of files that are named individually.
const MOST_FILES: usize = 256;
/// Continuous writes are read after this many debounce times.
const BURST_PERIODS: u32 = 5;

/// Changes in the folders.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::ingest) struct Noticed {
    /// Names of files in any folder.
    files: BTreeSet<String>,
    /// True if unnamed files may have changed.
    any: bool,
    /// True if mesh config or networks may have changed, which have a longer debounce time.
    mesh: bool,
}

impl Noticed {
    /// Returns a notification without names.
    #[cfg(test)]
    pub(super) fn any() -> Self {
        Self {
            any: true,
            ..Self::default()
        }
    }

    /// Returns true if that file may have changed.
    pub(super) fn has(&self, file: &Path) -> bool {
        self.any || self.files.contains(name_of(file))
    }

    /// Adds an event. Reading a file is not a change; an error of the watcher may hide one. Returns false if nothing
    /// changed.
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

/// Notifications that were not taken yet. Locked to add to them or to take them.
#[derive(Default)]
struct Notices {
    waiting: Mutex<Noticed>,
    added: Notify,
}

impl Notices {
    fn add(&self, event: &notify::Result<notify::Event>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.add(event) {
            self.added.notify_one();
        }
    }

    /// Returns the notifications once there are any. Cancel safe.
    async fn next(&self) -> Noticed {
        self.added.notified().await;
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Watches folders, each while it is the one that its path leads to.
pub(in crate::ingest) struct Watch {
    watcher: Option<RecommendedWatcher>,
    notices: Arc<Notices>,
    /// Watched folders, with the identity of each at the start of its watch.
    watched: BTreeMap<PathBuf, (u64, u64)>,
}

impl Watch {
    pub(in crate::ingest) fn new() -> Self {
        let notices = Arc::<Notices>::default();
        let shared = notices.clone();
        let on_event = move |event: notify::Result<notify::Event>| shared.add(&event);
        let watcher = RecommendedWatcher::new(on_event, Config::default());
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "file watch unavailable, polling instead");
        });
        Self {
            watcher: watcher.ok(),
            notices,
            watched: BTreeMap::new(),
        }
    }

    /// Watches these folders, and restarts the watches of replaced ones.
    pub(in crate::ingest) fn follow(&mut self, folders: Vec<PathBuf>) {
        let Some(watcher) = &mut self.watcher else { return };
        for folder in folders {
            let identity = disk::identity(&folder);
            if self.watched.get(&folder).copied() == identity {
                continue;
            }
            if self.watched.remove(&folder).is_some() {
                // The watched folder may be gone, and its watch with it.
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

    /// Waits for changes and then for the debounce time. Returns nothing if there was no change within `poll`.
    pub(in crate::ingest) async fn quiet(&mut self, objects: Duration, mesh: Duration, poll: Duration) -> Noticed {
        // Without a watcher there are no events, so only polling remains.
        let Ok(mut noticed) = time::timeout(poll, self.notices.next()).await else {
            return Noticed::default();
        };
        let first = time::Instant::now();
        loop {
            let quiet = if noticed.mesh { mesh } else { objects };
            // Continuous writes must not delay the reading forever.
            let until = (first + BURST_PERIODS * quiet).min(time::Instant::now() + quiet);
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
