//! Notices of changes in folders.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use notify::{Config, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{sync::mpsc, time};

use super::disk;
use crate::api::folder::Role;

/// How many notices wait at most. One would do: each means "look again".
const NOTICES: usize = 64;

/// Something in a folder changed.
#[derive(Clone, Copy)]
struct Notice {
    /// It may concern mesh config or networks, which wait longer.
    mesh: bool,
}

/// Watches folders, each as long as it is the one that its path leads to.
pub(in crate::ingest) struct Watch {
    watcher: Option<RecommendedWatcher>,
    notices: mpsc::Receiver<Notice>,
    /// The watched folders, and which folder stood there when the watch began.
    watched: BTreeMap<PathBuf, (u64, u64)>,
}

impl Watch {
    pub(in crate::ingest) fn new() -> Self {
        let (sender, notices) = mpsc::channel(NOTICES);
        let tell = move |event: notify::Result<notify::Event>| {
            if let Some(notice) = notice(&event) {
                // A full queue says already that something is there to look at.
                let _ = sender.try_send(notice);
            }
        };
        let watcher = RecommendedWatcher::new(tell, Config::default());
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "changes of files cannot be watched; they are looked for every few seconds");
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
                Err(error) => tracing::warn!(folder = %folder.display(), %error, "the folder cannot be watched"),
            }
        }
    }

    /// Waits for changes and for the quiet after them. False: nothing was noticed for the length of `poll`.
    pub(in crate::ingest) async fn quiet(&mut self, objects: Duration, mesh: Duration, poll: Duration) -> bool {
        let mut quiet = match time::timeout(poll, self.next()).await {
            Err(_) => return false,
            Ok(notice) => wait_after(notice, objects, mesh),
        };
        // Whoever writes without end is read in between.
        let latest = time::Instant::now() + 10 * mesh;
        while let Ok(notice) = time::timeout_at(latest.min(time::Instant::now() + quiet), self.next()).await {
            quiet = quiet.max(wait_after(notice, objects, mesh));
        }
        true
    }

    async fn next(&mut self) -> Notice {
        match self.notices.recv().await {
            Some(notice) => notice,
            // No watcher: only polling is left.
            None => std::future::pending().await,
        }
    }
}

fn wait_after(notice: Notice, objects: Duration, mesh: Duration) -> Duration {
    if notice.mesh { mesh } else { objects }
}

/// Reading a file is no change. An error of the watcher may hide one.
fn notice(event: &notify::Result<notify::Event>) -> Option<Notice> {
    let Ok(event) = event else {
        return Some(Notice { mesh: true });
    };
    if matches!(event.kind, EventKind::Access(kind) if !is_write_end(kind)) {
        return None;
    }
    let objects_only = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        !name.starts_with("..") && matches!(Role::of(name), Role::Objects(_) | Role::Ignored)
    };
    let mesh = event.paths.is_empty() || !event.paths.iter().all(objects_only);
    Some(Notice { mesh })
}

fn is_write_end(kind: notify::event::AccessKind) -> bool {
    kind == notify::event::AccessKind::Close(notify::event::AccessMode::Write)
}
