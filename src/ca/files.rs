//! Watches files that may be replaced at any time, such as those of a mounted Secret.
//!
//! Note: the folders are watched, not the files. The kubelet updates a mounted Secret by swapping a symbolic link next
//! to the file, which a watch of the file would not see.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{Config, Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

/// The debounce interval: a certificate and its key are two writes.
pub const DEBOUNCE: Duration = Duration::from_millis(100);
/// The poll interval, for changes without events: a folder that did not exist, the target of a link.
pub const POLL: Duration = Duration::from_secs(5);
/// The capacity of the event queue.
const EVENT_QUEUE_LEN: usize = 16;

/// A watch on files.
pub struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
    folders: BTreeSet<PathBuf>,
    watched: BTreeSet<PathBuf>,
}

impl FileWatch {
    /// Watches these files, which need not exist yet.
    pub fn new<'a>(files: impl IntoIterator<Item = &'a Path>) -> Self {
        let (sender, events) = mpsc::channel(EVENT_QUEUE_LEN);
        let notify = move |event: notify::Result<Event>| {
            // An error may hide a change; read accesses are not changes.
            if !event.is_ok_and(|event| is_read_access(event.kind)) {
                // A full queue already signals a change.
                let _ = sender.try_send(());
            }
        };
        let watcher = RecommendedWatcher::new(notify, Config::default()).inspect_err(|error| {
            tracing::warn!(%error, "file watch unavailable, polling instead");
        });
        let mut watch = Self {
            watcher: watcher.ok(),
            events,
            folders: files.into_iter().map(folder).collect(),
            watched: BTreeSet::new(),
        };
        watch.watch_folders();
        watch
    }

    /// Waits until a file may have changed and the debounce interval has passed, or for [`POLL`]. The caller reads the
    /// files and compares.
    pub async fn changed(&mut self) {
        self.watch_folders();
        if timeout(POLL, next(&mut self.events)).await.is_err() {
            // The watch of a replaced folder ends silently, so all are renewed.
            self.unwatch_folders();
            return;
        }
        // Continuous writes must not postpone the reload for ever.
        let latest = Instant::now() + 10 * DEBOUNCE;
        while timeout_at(latest.min(Instant::now() + DEBOUNCE), next(&mut self.events))
            .await
            .is_ok()
        {}
    }

    fn watch_folders(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        for folder in &self.folders {
            if !self.watched.contains(folder) && watcher.watch(folder, RecursiveMode::NonRecursive).is_ok() {
                self.watched.insert(folder.clone());
            }
        }
    }

    fn unwatch_folders(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        for folder in std::mem::take(&mut self.watched) {
            let _ = watcher.unwatch(&folder);
        }
    }
}

fn folder(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

async fn next(events: &mut mpsc::Receiver<()>) {
    if events.recv().await.is_none() {
        // Without a watcher, polling remains.
        std::future::pending::<()>().await;
    }
}

fn is_read_access(kind: EventKind) -> bool {
    use notify::event::{AccessKind, AccessMode};
    matches!(kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn noticed(watch: &mut FileWatch) -> bool {
        timeout(DEBOUNCE * 20, watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn a_file_and_the_link_beside_it_are_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tls.crt");
        let mut watch = FileWatch::new([file.as_path()]);
        std::fs::write(&file, "one").expect("a file");
        assert!(noticed(&mut watch).await, "a new file");
        std::os::unix::fs::symlink("..one", folder.path().join("..tmp")).expect("a link");
        std::fs::rename(folder.path().join("..tmp"), folder.path().join("..data")).expect("a link");
        assert!(noticed(&mut watch).await, "an exchanged link");
    }
}
