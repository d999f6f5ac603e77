//! The sources of changes: their trait, and how they start, become ready and end.

use std::{
    future::{pending, ready},
    sync::Arc,
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, join_all},
    stream::FuturesUnordered,
};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    model::{change::Batch, external_dependencies::ExternalDependencies},
    task::Tasks,
};

/// Delay of the first warning about sources that are not synced; it doubles with each warning.
const SYNC_WARNING_DELAY: Duration = Duration::from_secs(10);
/// Longest delay between two such warnings.
const MAX_SYNC_WARNING_DELAY: Duration = Duration::from_mins(10);

/// An origin of changes: a folder, a cluster, DNS, …
///
/// A source that has a state for debug pages hands out a typed receiver of it before it starts.
#[doc(alias = "Registry")]
pub trait Source: Sized + Send + 'static {
    /// Returns the name, for logs and for its task.
    fn name(&self) -> &'static str;

    /// Returns the part of the start of istiod that waits for the source. Called once, before [`Self::run`].
    fn readiness(&self) -> Readiness {
        Readiness::Immediate
    }

    /// Returns true if the process must end when the source ends.
    fn is_vital(&self) -> bool {
        false
    }

    /// Sends changes until the receiver is closed. Dropping the future stops the source.
    fn run(self, changes: mpsc::Sender<Batch>) -> impl Future<Output = ()> + Send;
}

/// Part of the start of istiod that waits for a source.
pub enum Readiness {
    /// Nothing waits.
    Immediate,
    /// The first snapshot waits until everything known at the start was sent. The future returns false if the source
    /// ended before.
    Synced(BoxFuture<'static, bool>),
    /// Proxies wait until what the first snapshot depends on was answered and sent, or timed out.
    Answered(Answered),
}

impl Readiness {
    /// The first snapshot waits until a source sets its flag.
    pub fn synced(is_synced: &watch::Sender<bool>) -> Self {
        let mut is_synced = is_synced.subscribe();
        Self::Synced(async move { is_synced.wait_for(|is_synced| *is_synced).await.is_ok() }.boxed())
    }

    /// Returns the future of [`Self::Synced`]. Other sources count as synced.
    pub fn into_synced(self) -> BoxFuture<'static, bool> {
        match self {
            Self::Synced(synced) => synced,
            Self::Immediate | Self::Answered(_) => ready(true).boxed(),
        }
    }
}

/// Waits until external dependencies are answered.
pub type Answered = Box<dyn FnOnce(Arc<ExternalDependencies>) -> BoxFuture<'static, ()> + Send>;

/// A running source. Dropping it stops the source.
pub struct RunningSource {
    name: &'static str,
    is_vital: bool,
    /// Closed when the task ends, for any reason.
    ended: watch::Receiver<()>,
    _stop: DropGuard,
}

impl RunningSource {
    /// Starts a source.
    pub fn start(source: impl Source, tasks: &Tasks, changes: mpsc::Sender<Batch>) -> Self {
        let (name, is_vital) = (source.name(), source.is_vital());
        let (ended_out, ended) = watch::channel(());
        let token = CancellationToken::new();
        let stopped = token.clone();
        tasks.spawn_until_shutdown(name, async move {
            // Dropped with the task, even if it panics.
            let _ended = ended_out;
            stopped.run_until_cancelled(source.run(changes)).await;
        });
        Self {
            name,
            is_vital,
            ended,
            _stop: token.drop_guard(),
        }
    }
}

/// A source ended that the process cannot do without, or before it was synced. The process must be restarted.
#[derive(Debug, thiserror::Error)]
#[error("source {0:?} ended unexpectedly; this is a bug in istiod")]
pub struct SourceEnded(pub &'static str);

/// The registry of sources: starts them, and waits for those that the start of istiod depends on.
pub struct Sources {
    tasks: Tasks,
    changes: mpsc::Sender<Batch>,
    running: Vec<RunningSource>,
    syncing: FuturesUnordered<BoxFuture<'static, (&'static str, bool)>>,
    /// Names of the sources in `syncing`.
    late: Vec<&'static str>,
    answers: Vec<Answered>,
}

impl Sources {
    /// Returns a registry without sources. `changes` receives the changes of all sources.
    pub fn new(tasks: &Tasks, changes: mpsc::Sender<Batch>) -> Self {
        Self {
            tasks: tasks.clone(),
            changes,
            running: Vec::new(),
            syncing: FuturesUnordered::new(),
            late: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Registers and starts a source.
    pub fn start(&mut self, source: impl Source) {
        match source.readiness() {
            Readiness::Immediate => {}
            Readiness::Synced(synced) => {
                let name = source.name();
                self.late.push(name);
                self.syncing
                    .push(synced.map(move |is_synced| (name, is_synced)).boxed());
            }
            Readiness::Answered(answered) => self.answers.push(answered),
        }
        let running = RunningSource::start(source, &self.tasks, self.changes.clone());
        self.running.push(running);
    }

    /// Waits until every source is synced, and names late ones in the log.
    pub async fn synced(&mut self) -> Result<(), SourceEnded> {
        let mut delay = SYNC_WARNING_DELAY;
        loop {
            tokio::select! {
                next = self.syncing.next() => match next {
                    Some((name, true)) => self.late.retain(|other| *other != name),
                    Some((name, false)) => return Err(SourceEnded(name)),
                    None => return Ok(()),
                },
                () = sleep(delay) => {
                    delay = (delay * 2).min(MAX_SYNC_WARNING_DELAY);
                    tracing::warn!(sources = self.late.join(", "), "sources not synced yet");
                }
            }
        }
    }

    /// Waits until the dependencies of the first snapshot are answered or timed out.
    pub async fn answered(&mut self, dependencies: ExternalDependencies) {
        let dependencies = Arc::new(dependencies);
        let answers = std::mem::take(&mut self.answers).into_iter();
        join_all(answers.map(|answered| answered(dependencies.clone()))).await;
    }

    /// Completes when a vital source has ended.
    pub fn ended(&self) -> BoxFuture<'static, SourceEnded> {
        let vital = self.running.iter().filter(|source| source.is_vital);
        let mut vital: FuturesUnordered<_> = vital
            .map(|source| {
                let (name, mut ended) = (source.name, source.ended.clone());
                async move {
                    while ended.changed().await.is_ok() {}
                    SourceEnded(name)
                }
            })
            .collect();
        async move {
            match vital.next().await {
                Some(ended) => ended,
                None => pending().await,
            }
        }
        .boxed()
    }
}
