//! Who may read Secrets, asked of the API server of each reader's cluster (SubjectAccessReview). Who reads comes from the
//! proxies that are connected; an answer is a change like others.
//!
//! An answer is asked for again before long: permission may be taken away, and what was missing may be granted. As long as
//! an API server does not answer, its last word stands: an API server that is away takes nothing away and gives nothing.

mod kubernetes;

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, BuildHasherDefault},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use imbl::OrdSet;
use prometheus::{IntCounterVec, Opts, Registry};
use rustc_hash::FxHasher;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};

use super::in_flight::InFlight;
use crate::{
    api::access_review::{Access, AccessReview, Subject},
    base::ClusterId,
    environment::Environment,
    kube::clients::Clients,
    model::change::Change,
};

/// How long a permission holds before it is asked for again.
const AGAIN_IF_ALLOWED: Duration = Duration::from_mins(5);
/// The same for a refusal, or where there was no answer.
const AGAIN_IF_NOT: Duration = Duration::from_mins(1);

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviewError {
    /// There is no such cluster, so nobody there may read anything.
    #[error("{0}")]
    UnknownCluster(SmolStr),
    /// Its API server gives no answer; for people.
    #[error("{0}")]
    Failed(SmolStr),
}

/// Asks who may read Secrets.
pub trait Review: Send + Sync + 'static {
    /// Whether a service account may, asked after a wait.
    fn ask(self: Arc<Self>, subject: Subject, wait: Duration) -> BoxFuture<'static, Result<Access, ReviewError>>;
}

/// Starts to ask for those who read. An error means that a metric's name is taken.
pub fn start(
    environment: &Environment,
    clients: Clients,
    subjects: watch::Receiver<OrdSet<Subject>>,
    changes: mpsc::Sender<Vec<Change>>,
) -> Result<(), prometheus::Error> {
    let counts = Counts::new(&environment.registry)?;
    let (review, clusters) = (Arc::new(kubernetes::ApiServers(clients.clone())), clients.clone());
    let reviewer = Reviewer::new(clients.own().clone(), review, changes, counts);
    let known = follow(environment, clusters);
    environment
        .tasks
        .spawn_until_shutdown("access reviews", reviewer.run(subjects, known));
    Ok(())
}

/// Counts how often clusters came or went.
fn follow(environment: &Environment, mut clients: Clients) -> watch::Receiver<u64> {
    let (out, known) = watch::channel(0);
    environment
        .tasks
        .spawn_until_shutdown("clusters of access reviews", async move {
            while clients.changed().await {
                out.send_modify(|changes| *changes += 1);
            }
            // No cluster comes any more; what is known stands.
            out.closed().await;
        });
    known
}

/// How reviews ended.
#[derive(Clone)]
struct Counts(IntCounterVec);

impl Counts {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counts = IntCounterVec::new(
            Opts::new(
                "istiod_access_reviews_total",
                "Answers of API servers about who may read Secrets, and questions without an answer (failed).",
            ),
            &["result"],
        )?;
        registry.register(Box::new(counts.clone()))?;
        Ok(Self(counts))
    }

    fn count(&self, answer: &Result<Access, ReviewError>) {
        let result = match answer {
            Ok(Access::Allowed) => "allowed",
            Ok(Access::Denied(_)) | Err(ReviewError::UnknownCluster(_)) => "denied",
            Ok(Access::Unknown(_)) | Err(ReviewError::Failed(_)) => "failed",
        };
        self.0.with_label_values(&[result]).inc();
    }
}

/// Those who read, and what is known of them.
struct Reviewer<R> {
    config_cluster: ClusterId,
    review: Arc<R>,
    changes: mpsc::Sender<Vec<Change>>,
    counts: Counts,
    readers: BTreeMap<Subject, Reader>,
    /// The next answer about each: a wait, then a question.
    in_flight: InFlight<Subject, Result<Access, ReviewError>>,
}

/// One who reads.
#[derive(Default)]
struct Reader {
    /// What was told.
    told: Option<Access>,
    /// The last question had no answer.
    failing: bool,
}

impl<R: Review> Reviewer<R> {
    fn new(config_cluster: ClusterId, review: Arc<R>, changes: mpsc::Sender<Vec<Change>>, counts: Counts) -> Self {
        Self {
            config_cluster,
            review,
            changes,
            counts,
            readers: BTreeMap::new(),
            in_flight: InFlight::default(),
        }
    }

    /// Runs until nobody tells who reads or takes changes. `known` changes when clusters come or go.
    async fn run(mut self, mut subjects: watch::Receiver<OrdSet<Subject>>, mut known: watch::Receiver<u64>) {
        loop {
            let now = subjects.borrow_and_update().clone();
            if !self.take(&now).await {
                return;
            }
            loop {
                let (subject, answer) = tokio::select! {
                    changed = subjects.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    Ok(()) = known.changed() => {
                        self.ask_all();
                        continue;
                    }
                    answered = self.in_flight.next() => answered,
                };
                if !self.learn(subject, answer).await {
                    return;
                }
            }
        }
    }

    /// Takes over who reads now. False if nobody takes changes any more.
    async fn take(&mut self, subjects: &OrdSet<Subject>) -> bool {
        for subject in subjects {
            if !self.readers.contains_key(subject) {
                self.ask(subject.clone(), Duration::ZERO);
                self.readers.insert(subject.clone(), Reader::default());
            }
        }
        let config_cluster = &self.config_cluster;
        let mut gone = Vec::new();
        self.readers.retain(|subject, reader| {
            let keep = subjects.contains(subject);
            if !keep {
                self.in_flight.cancel(subject);
            }
            if !keep && reader.told.is_some() {
                let key = AccessReview::key(config_cluster, subject);
                gone.push(Change::Remove(AccessReview::KIND, key));
            }
            keep
        });
        gone.is_empty() || self.changes.send(gone).await.is_ok()
    }

    /// Asks everywhere at once: who could not be asked may be there now, and who could may be gone.
    fn ask_all(&mut self) {
        let subjects: Vec<Subject> = self.readers.keys().cloned().collect();
        for subject in subjects {
            self.ask(subject, Duration::ZERO);
        }
    }

    fn ask(&mut self, subject: Subject, wait: Duration) {
        let answer = self.review.clone().ask(subject.clone(), wait);
        self.in_flight.insert(subject, answer);
    }

    /// Tells an answer that is news, and plans the next question. False if nobody takes changes any more.
    async fn learn(&mut self, subject: Subject, answer: Result<Access, ReviewError>) -> bool {
        self.counts.count(&answer);
        self.ask(subject.clone(), wait(&subject, &answer));
        let Some(reader) = self.readers.get_mut(&subject) else {
            return true;
        };
        let access = match answer {
            Ok(access) => access,
            Err(ReviewError::UnknownCluster(reason)) => Access::Denied(reason),
            Err(ReviewError::Failed(reason)) => {
                if !std::mem::replace(&mut reader.failing, true) {
                    tracing::warn!(%subject, %reason, kept = ?reader.told, "access review failed, keeping last result");
                }
                match &reader.told {
                    Some(Access::Allowed | Access::Denied(_)) => return true,
                    Some(Access::Unknown(_)) | None => Access::Unknown(reason),
                }
            }
        };
        if !matches!(access, Access::Unknown(_)) {
            reader.failing = false;
        }
        if reader.told.as_ref() == Some(&access) {
            return true;
        }
        tracing::info!(%subject, ?access, before = ?reader.told, "access to Secrets reviewed");
        reader.told = Some(access.clone());
        let key = AccessReview::key(&self.config_cluster, &subject);
        let change = Change::Upsert(AccessReview { key, access }.into());
        self.changes.send(vec![change]).await.is_ok()
    }
}

/// How long an answer is taken for granted: a little less than its time, not for all alike, so that those who came together
/// are not asked for together.
fn wait(subject: &Subject, answer: &Result<Access, ReviewError>) -> Duration {
    let longest = match answer {
        Ok(Access::Allowed) => AGAIN_IF_ALLOWED,
        _ => AGAIN_IF_NOT,
    };
    let hash = BuildHasherDefault::<FxHasher>::default().hash_one(subject);
    longest.mul_f64(1.0 - (hash % 100) as f64 / 1000.0)
}

#[cfg(test)]
mod tests;
