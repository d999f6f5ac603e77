//! Questions to the outside: at most one for each key, whose answer is awaited.

use std::{
    collections::BTreeMap,
    future::{Future, pending},
};

use futures::{
    FutureExt, StreamExt,
    future::{AbortHandle, Abortable, BoxFuture},
    stream::FuturesUnordered,
};

/// The answers that are under way. A question takes the place of the one before with its key.
pub(super) struct Asking<K, A> {
    answers: FuturesUnordered<Abortable<BoxFuture<'static, (K, A)>>>,
    asked: BTreeMap<K, AbortHandle>,
}

impl<K, A> Default for Asking<K, A> {
    fn default() -> Self {
        Self {
            answers: FuturesUnordered::new(),
            asked: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone + Send + 'static, A: Send + 'static> Asking<K, A> {
    /// Asks.
    pub(super) fn ask(&mut self, key: K, answer: impl Future<Output = A> + Send + 'static) {
        let (handle, registration) = AbortHandle::new_pair();
        let of = key.clone();
        let answer = async move { (of, answer.await) }.boxed();
        self.answers.push(Abortable::new(answer, registration));
        if let Some(before) = self.asked.insert(key, handle) {
            before.abort();
        }
    }

    /// Nobody wants to know any more.
    pub(super) fn forget(&mut self, key: &K) {
        if let Some(asked) = self.asked.remove(key) {
            asked.abort();
        }
    }

    /// The next answer; pending for ever while nothing is asked. Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> (K, A) {
        loop {
            match self.answers.next().await {
                Some(Ok(answered)) => return answered,
                // It was forgotten, or another question took its place.
                Some(Err(_)) => {}
                None => pending().await,
            }
        }
    }
}
