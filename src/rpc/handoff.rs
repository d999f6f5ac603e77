//! Moves a connection to another runtime. A connection starts on the runtime that accepted it. When it turns out to
//! carry streams, its tasks move to the runtime for streams.
//!
//! The secure port serves both certificate requests, which are short and for which a workload waits at startup, and xDS
//! streams, which keep threads busy during pushes. The first request tells which of the two a connection is for. So
//! connections are accepted on a runtime that never runs pushes, and those with streams leave it. During constant
//! pushes this halves the 99th percentile of certificate requests (13 instead of 29 ms with an ECDSA CA; bench `ca`).

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use futures::future::BoxFuture;
use tokio::runtime::Handle;

use crate::task::Tasks;

/// The runtime of one connection's tasks. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct RuntimeHandoff {
    tasks: Tasks,
    /// The runtime for streams; `None` if streams stay on the runtime that accepted them.
    stream_runtime: Option<Handle>,
    moved: Arc<AtomicBool>,
}

impl RuntimeHandoff {
    pub(super) fn new(tasks: Tasks, stream_runtime: Option<Handle>) -> Self {
        Self {
            tasks,
            stream_runtime,
            moved: Arc::default(),
        }
    }

    /// Marks the connection as one with streams. Each of its tasks moves when it is polled next.
    pub(super) fn hand_off(&self) {
        self.moved.store(true, Ordering::Release);
    }

    /// Spawns a task of the connection.
    pub(super) fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_boxed(name, Box::pin(task));
    }

    fn spawn_boxed(&self, name: &'static str, mut task: BoxFuture<'static, ()>) {
        let Some(stream_runtime) = self.stream_runtime.clone() else {
            return self.tasks.spawn_boxed(name, task);
        };
        if self.moved.load(Ordering::Acquire) {
            return self.tasks.spawn_boxed_on(&stream_runtime, name, task);
        }
        let handoff = self.clone();
        self.tasks.spawn(name, async move {
            let ended = poll_fn(|cx| match task.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(true),
                Poll::Pending if handoff.moved.load(Ordering::Acquire) => Poll::Ready(false),
                Poll::Pending => Poll::Pending,
            });
            if !ended.await {
                // A new task is polled at once, so no wake-up is lost.
                handoff.tasks.spawn_boxed_on(&stream_runtime, name, task);
            }
        });
    }
}

impl<F> hyper::rt::Executor<F> for RuntimeHandoff
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn("request", task);
    }
}
