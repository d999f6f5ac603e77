//! A model and an outside world for tests of sources.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{
    sync::{mpsc, watch},
    task::yield_now,
};

use crate::{
    base::ObjectKey,
    model::{
        change::{Batch, Change},
        inputs::Row,
    },
};

/// Applies changes as the model does.
pub(super) fn commit(model: &mut BTreeMap<ObjectKey, Row>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Upsert(row) => drop(model.insert(row.key().clone(), row)),
            Change::Remove(_, key) => drop(model.remove(&key)),
            Change::Replace(_, rows) => *model = rows.into_iter().map(|row| (row.key().clone(), row)).collect(),
            other @ Change::RemoveCluster(_) => panic!("{other:?}"),
        }
    }
}

/// Answers from a table that tests change, by a clock that they set.
pub(super) struct AnswerTable<Q, A> {
    /// The time in seconds.
    clock: watch::Sender<u64>,
    answers: Mutex<BTreeMap<Q, A>>,
    asked: AtomicUsize,
}

impl<Q, A> Default for AnswerTable<Q, A> {
    fn default() -> Self {
        Self {
            clock: watch::Sender::default(),
            answers: Mutex::default(),
            asked: AtomicUsize::new(0),
        }
    }
}

impl<Q, A> AnswerTable<Q, A> {
    /// Returns the number of questions that were answered.
    pub(super) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Sets the clock forward.
    pub(super) fn advance(&self, seconds: u64) {
        self.clock.send_modify(|now| *now += seconds);
    }

    /// Lets time pass, second by second.
    pub(super) async fn sleep(&self, seconds: u64) {
        settle().await;
        for _ in 0..seconds {
            self.advance(1);
            settle().await;
        }
    }

    /// Lets time pass until the next change; returns it and the seconds until it came.
    pub(super) async fn next(&self, changes: &mut mpsc::Receiver<Batch>) -> (Batch, u64) {
        let mut waited = 0;
        settle().await;
        loop {
            if let Ok(batch) = changes.try_recv() {
                return (batch, waited);
            }
            self.sleep(1).await;
            waited += 1;
            assert!(waited < 1_000_000, "nothing comes");
        }
    }
}

impl<Q, A> AnswerTable<Q, A>
where
    Q: Ord + Send + 'static,
    A: Clone + Send + 'static,
{
    /// Sets the answer to a question.
    pub(super) fn insert(&self, question: Q, answer: A) {
        self.answers.lock().unwrap().insert(question, answer);
    }

    /// Answers a question after a delay, which begins now.
    pub(super) fn answer(self: Arc<Self>, question: Q, wait: Duration) -> BoxFuture<'static, A> {
        let mut clock = self.clock.subscribe();
        let due = *clock.borrow() + wait.as_secs();
        Box::pin(async move {
            clock.wait_for(|now| *now >= due).await.unwrap();
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.answers.lock().unwrap()[&question].clone()
        })
    }
}

/// Lets everything happen that can happen now.
pub(super) async fn settle() {
    for _ in 0..30 {
        yield_now().await;
    }
}
