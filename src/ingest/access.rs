//! Reviews of access to Secrets, by the API server of each reader's cluster (SubjectAccessReview). The readers
//! follow from the connected proxies; a result is a change like others.
//!
//! Results are reviewed again soon, because permissions may be revoked or granted. While an API server does not
//! respond, its last result stays: an unreachable API server neither revokes nor grants.

mod kubernetes;

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, BuildHasherDefault},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use imbl::OrdSet;
use prometheus::{IntCounterVec, Registry};
use rustc_hash::FxHasher;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};

use super::{in_flight::InFlight, source::Source};
use crate::{
    api::access_review::{Access, AccessReview, Subject},
    base::ClusterId,
    kube::clients::Clients,
    metrics,
    model::change::{Batch, Change},
};

/// Time after which a permission is reviewed again.
const AGAIN_IF_ALLOWED: Duration = Duration::from_mins(5);
/// Time after which a refusal or a failure is reviewed again.
const AGAIN_IF_NOT: Duration = Duration::from_mins(1);

/// Reason why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviewError {
    /// The cluster does not exist, so access is denied.
    #[error("{0}")]
    UnknownCluster(SmolStr),
    /// Its API server does not respond; for people.
    #[error("{0}")]
    Failed(SmolStr),
}

/// Reviews access to Secrets.
pub trait Review: Send + Sync + 'static {
    /// Reviews a service account after a delay.
    fn review(self: Arc<Self>, subject: Subject, wait: Duration) -> BoxFuture<'static, Result<Access, ReviewError>>;
}

/// The source of access reviews.
pub struct AccessReviews {
    clients: Clients,
    subjects: watch::Receiver<OrdSet<Subject>>,
    counts: Counts,
}

impl AccessReviews {
    /// Returns the source of reviews of the subjects. Fails if a metric's name is in use.
    pub fn new(
        registry: &Registry,
        clients: Clients,
        subjects: watch::Receiver<OrdSet<Subject>>,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            clients,
            subjects,
            counts: Counts::new(registry)?,
        })
    }
}

impl Source for AccessReviews {
    fn name(&self) -> &'static str {
        "access reviews"
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let review = Arc::new(kubernetes::ApiServers(self.clients.clone()));
        let reviewer = Reviewer::new(self.clients.own().clone(), review, changes, self.counts);
        let (known_out, known) = watch::channel(0);
        tokio::select! {
            () = reviewer.run(self.subjects, known) => {}
            () = count_changes(self.clients, known_out) => {}
        }
    }
}

/// Counts changes of the set of clusters.
async fn count_changes(mut clients: Clients, out: watch::Sender<u64>) {
    while clients.changed().await {
        out.send_modify(|changes| *changes += 1);
    }
    // No more changes of clusters; the known ones stay.
    out.closed().await;
}

/// Counters of results.
#[derive(Clone)]
struct Counts(IntCounterVec);

impl Counts {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counts = metrics::counters(
            registry,
            "istiod_access_reviews_total",
            "Reviews of access to Secrets by API servers; result failed means no answer.",
            &["result"],
        )?;
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

/// Readers and their results.
struct Reviewer<R> {
    config_cluster: ClusterId,
    review: Arc<R>,
    changes: mpsc::Sender<Vec<Change>>,
    counts: Counts,
    readers: BTreeMap<Subject, Reader>,
    /// Next result of each: a delay, then a review.
    in_flight: InFlight<Subject, Result<Access, ReviewError>>,
}

/// One reader.
#[derive(Default)]
struct Reader {
    /// Published result.
    published: Option<Access>,
    /// True if the last review failed.
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

    /// Runs until an input or the receiver of changes is closed. `known` changes with the set of clusters.
    async fn run(mut self, mut subjects: watch::Receiver<OrdSet<Subject>>, mut known: watch::Receiver<u64>) {
        loop {
            let now = subjects.borrow_and_update().clone();
            if !self.update_readers(&now).await {
                return;
            }
            loop {
                let (subject, answer) = tokio::select! {
                    changed = subjects.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    Ok(()) = known.changed() => {
                        self.review_all();
                        continue;
                    }
                    answered = self.in_flight.next() => answered,
                };
                if !self.handle_result(subject, answer).await {
                    return;
                }
            }
        }
    }

    /// Updates the readers. Returns false if the receiver of changes is closed.
    async fn update_readers(&mut self, subjects: &OrdSet<Subject>) -> bool {
        for subject in subjects {
            if !self.readers.contains_key(subject) {
                self.schedule_review(subject.clone(), Duration::ZERO);
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
            if !keep && reader.published.is_some() {
                let key = AccessReview::key(config_cluster, subject);
                gone.push(Change::Remove(AccessReview::KIND, key));
            }
            keep
        });
        gone.is_empty() || self.changes.send(gone).await.is_ok()
    }

    /// Reviews all readers at once: their clusters may have appeared or disappeared.
    fn review_all(&mut self) {
        let subjects: Vec<Subject> = self.readers.keys().cloned().collect();
        for subject in subjects {
            self.schedule_review(subject, Duration::ZERO);
        }
    }

    fn schedule_review(&mut self, subject: Subject, wait: Duration) {
        let answer = self.review.clone().review(subject.clone(), wait);
        self.in_flight.insert(subject, answer);
    }

    /// Publishes a new result and schedules the next review. Returns false if the receiver of changes is closed.
    async fn handle_result(&mut self, subject: Subject, answer: Result<Access, ReviewError>) -> bool {
        self.counts.count(&answer);
        self.schedule_review(subject.clone(), wait(&subject, &answer));
        let Some(reader) = self.readers.get_mut(&subject) else {
            return true;
        };
        let access = match answer {
            Ok(access) => access,
            Err(ReviewError::UnknownCluster(reason)) => Access::Denied(reason),
            Err(ReviewError::Failed(reason)) => {
                if !std::mem::replace(&mut reader.failing, true) {
                    tracing::warn!(
                        %subject,
                        %reason,
                        kept = ?reader.published,
                        "access review failed, keeping last result"
                    );
                }
                match &reader.published {
                    Some(Access::Allowed | Access::Denied(_)) => return true,
                    Some(Access::Unknown(_)) | None => Access::Unknown(reason),
                }
            }
        };
        if !matches!(access, Access::Unknown(_)) {
            reader.failing = false;
        }
        if reader.published.as_ref() == Some(&access) {
            return true;
        }
        tracing::info!(%subject, ?access, before = ?reader.published, "access to Secrets reviewed");
        reader.published = Some(access.clone());
        let key = AccessReview::key(&self.config_cluster, &subject);
        let change = Change::Upsert(AccessReview { key, access }.into());
        self.changes.send(vec![change]).await.is_ok()
    }
}

/// Returns the delay until the next review: slightly less than its time, with jitter by subject, so that readers that
/// connected together are not reviewed together.
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
