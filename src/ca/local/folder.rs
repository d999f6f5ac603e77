//! Notices of changes in the folder of a CA.

use std::{path::PathBuf, time::Duration};

use notify::{Config, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

/// How long changes are gathered: several files make a bundle.
const QUIET: Duration = Duration::from_millis(100);
/// How often it is looked without a notice: the folder may come later, or be put in place of another.
const POLL: Duration = Duration::from_secs(5);

/// See the module's text.
pub(super) struct FolderWatch {
    folder: PathBuf,
    watcher: Option<RecommendedWatcher>,
    is_watched: bool,
    notices: mpsc::Receiver<()>,
}

impl FolderWatch {
    pub(super) fn new(folder: PathBuf) -> Self {
        let (sender, notices) = mpsc::channel(1);
        let tell = move |event: notify::Result<notify::Event>| {
            // Reading is no change; an error may hide one. A full queue says already that there is something to look at.
            if !event.is_ok_and(|event| matches!(event.kind, EventKind::Access(_))) {
                let _ = sender.try_send(());
            }
        };
        let watcher = RecommendedWatcher::new(tell, Config::default());
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "changes of the CA's folder cannot be watched; it is looked at every few seconds");
        });
        let mut watch = Self {
            folder,
            watcher: watcher.ok(),
            is_watched: false,
            notices,
        };
        watch.begin();
        watch
    }

    fn begin(&mut self) {
        if let Some(watcher) = &mut self.watcher
            && !self.is_watched
        {
            self.is_watched = watcher.watch(&self.folder, RecursiveMode::NonRecursive).is_ok();
        }
    }

    /// Completes when it is time to look.
    pub(super) async fn changed(&mut self) {
        if self.watcher.is_none() {
            return sleep(POLL).await;
        }
        if timeout(POLL, self.notices.recv()).await.is_err() {
            self.begin();
            return;
        }
        sleep(QUIET).await;
        let _ = self.notices.try_recv();
    }
}
