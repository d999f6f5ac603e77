//! Where the work of a connection is done. It begins on the runtime that accepted it; a connection that turns out to carry
//! streams moves to another one with all its tasks, so that much work for streams is not in the way of short calls.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use tokio::runtime::Handle;

use crate::task::Tasks;

/// The place of one connection. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Place {
    tasks: Tasks,
    /// The runtime for streams; none if streams stay where they came.
    other: Option<Handle>,
    moved: Arc<AtomicBool>,
}

impl Place {
    pub(super) fn new(tasks: Tasks, other: Option<Handle>) -> Self {
        Self {
            tasks,
            other,
            moved: Arc::default(),
        }
    }

    /// The connection carries streams: its tasks move when each is polled next.
    pub(super) fn shift(&self) {
        self.moved.store(true, Ordering::Release);
    }

    /// Starts a task of the connection.
    pub(super) fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let Some(other) = self.other.clone() else {
            return self.tasks.spawn(name, task);
        };
        if self.moved.load(Ordering::Acquire) {
            return self.tasks.spawn_on(&other, name, task);
        }
        let place = self.clone();
        self.tasks.spawn(name, async move {
            let mut task: Pin<Box<_>> = Box::pin(task);
            let ended = poll_fn(|cx| match task.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(true),
                Poll::Pending if place.moved.load(Ordering::Acquire) => Poll::Ready(false),
                Poll::Pending => Poll::Pending,
            });
            if !ended.await {
                // Polled there at once, so that no wake is lost.
                place.tasks.spawn_on(&other, name, task);
            }
        });
    }
}

impl<F> hyper::rt::Executor<F> for Place
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn("request", task);
    }
}
