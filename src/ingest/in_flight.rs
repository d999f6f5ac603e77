//! Requests in flight, at most one for each key.
//!
//! `tokio_util::task::JoinMap` does not fit: it spawns each future as a task outside `task::Tasks`, so shutdown would
//! not join it. These futures run inside the task of their source and end with it.

use std::{
    collections::BTreeMap,
    future::{Future, pending},
};

use futures::{
    FutureExt, StreamExt,
    future::{AbortHandle, Abortable, BoxFuture},
    stream::FuturesUnordered,
};

/// The requests in flight. A new request cancels the previous one with the same key.
#[doc(alias = "JoinMap")]
pub(super) struct InFlight<K, A> {
    responses: FuturesUnordered<Abortable<BoxFuture<'static, (K, A)>>>,
    handles: BTreeMap<K, AbortHandle>,
}

impl<K, A> Default for InFlight<K, A> {
    fn default() -> Self {
        Self {
            responses: FuturesUnordered::new(),
            handles: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone + Send + 'static, A: Send + 'static> InFlight<K, A> {
    /// Starts a request.
    pub(super) fn insert(&mut self, key: K, answer: impl Future<Output = A> + Send + 'static) {
        let (handle, registration) = AbortHandle::new_pair();
        let answered = key.clone();
        let answer = async move { (answered, answer.await) }.boxed();
        self.responses.push(Abortable::new(answer, registration));
        if let Some(before) = self.handles.insert(key, handle) {
            before.abort();
        }
    }

    /// Cancels the request of a key.
    pub(super) fn cancel(&mut self, key: &K) {
        if let Some(handle) = self.handles.remove(key) {
            handle.abort();
        }
    }

    /// Returns the next response; pending while nothing is in flight. Cancel safe.
    pub(super) async fn next(&mut self) -> (K, A) {
        loop {
            match self.responses.next().await {
                Some(Ok(answered)) => return answered,
                // It was cancelled or replaced.
                Some(Err(_)) => {}
                None => pending().await,
            }
        }
    }
}
