//! Named tasks, joined at shutdown, and what tasks have in common. The only caller of `tokio::spawn`, so that shutdown
//! waits for every task.

use std::{
    future::{Future, pending},
    hash::{BuildHasher, RandomState},
    panic::AssertUnwindSafe,
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use prometheus::{IntCounterVec, Opts};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Notify, Semaphore, watch},
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Starts tasks and waits for them. Cheap to clone.
///
/// Tasks run in boxes, so that all have one type: the runtime's code for a type of task has dozens of functions, and
/// there are more than a hundred tasks.
#[derive(Clone, Debug)]
pub struct Tasks {
    tracker: TaskTracker,
    shutdown: CancellationToken,
    panics: IntCounterVec,
}

impl Default for Tasks {
    fn default() -> Self {
        let panics = Opts::new("istiod_task_panics_total", "Tasks that ended by a panic.");
        Self {
            tracker: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            panics: IntCounterVec::new(panics, &["task"]).expect("because its names are valid"),
        }
    }
}

impl Tasks {
    /// Starts a task. A panic in it ends the task alone, and is logged and counted with its name.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_boxed(name, Box::pin(task));
    }

    /// [`Self::spawn`] of a task in a box.
    pub fn spawn_boxed(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        self.tracker.spawn(self.guarded(name, task));
    }

    /// [`Self::spawn`] on another runtime, which lives as long as this one.
    pub fn spawn_on(&self, runtime: &Handle, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_boxed_on(runtime, name, Box::pin(task));
    }

    /// [`Self::spawn_on`] of a task in a box.
    pub fn spawn_boxed_on(&self, runtime: &Handle, name: &'static str, task: BoxFuture<'static, ()>) {
        self.tracker.spawn_on(self.guarded(name, task), runtime);
    }

    /// Starts a task that is cancelled at shutdown.
    pub fn spawn_until_shutdown(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_boxed_until_shutdown(name, Box::pin(task));
    }

    fn spawn_boxed_until_shutdown(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        let shutdown = self.shutdown.clone();
        self.spawn(name, async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// [`Self::spawn_until_shutdown`] for a task that is started again, after a delay, whenever it panics.
    pub fn spawn_again_after_panics<T: Future<Output = ()> + Send + 'static>(
        &self,
        name: &'static str,
        delay: Duration,
        mut start: impl FnMut() -> T + Send + 'static,
    ) {
        let tasks = self.clone();
        self.spawn_until_shutdown(name, async move {
            while !tasks.guarded(name, start()).await {
                tracing::error!(task = name, restart_in = ?delay, "task panicked, starting it again");
                sleep(delay).await;
            }
        });
    }

    /// Returns the number of running tasks.
    pub fn running(&self) -> usize {
        self.tracker.len()
    }

    /// Returns the counter of panics.
    pub fn panics(&self) -> &IntCounterVec {
        &self.panics
    }

    /// The token that is cancelled at shutdown.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Cancels the token and waits for all tasks until the timeout. Returns true if all ended.
    pub async fn end(&self, timeout: Duration) -> bool {
        self.shutdown.cancel();
        self.tracker.close();
        tokio::time::timeout(timeout, self.tracker.wait()).await.is_ok()
    }

    /// Returns a task that logs and counts its panic, and returns false after one. An async function would hold the
    /// task twice: as its argument and where it awaits the task.
    fn guarded<T: Future<Output = ()>>(&self, name: &'static str, task: T) -> impl Future<Output = bool> + use<T> {
        let panics = self.panics.clone();
        AssertUnwindSafe(task).catch_unwind().map(move |ended| {
            if ended.is_err() {
                panics.with_label_values(&[name]).inc();
                tracing::error!(task = name, "task panicked");
            }
            ended.is_ok()
        })
    }
}

/// Waits until an instant; forever without one.
pub async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => pending().await,
    }
}

/// Returns 90 % to 110 % of a duration, so that what begins at the same time does not end at the same time.
pub fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(0.9) + random_part(duration.mul_f64(0.2))
}

/// Returns a random part of a duration.
pub fn random_part(whole: Duration) -> Duration {
    // A `RandomState` has random keys; nothing else here needs randomness.
    let part = RandomState::new().hash_one(0) % 10_001;
    whole.mul_f64(part as f64 / 10_000.0)
}

/// Publishes a value, unless it equals the last one. Returns true if it was published.
pub fn publish<T: PartialEq>(sender: &watch::Sender<T>, value: T) -> bool {
    sender.send_if_modified(|last| {
        let is_changed = *last != value;
        if is_changed {
            *last = value;
        }
        is_changed
    })
}

/// Does work that takes long. Other tasks of this thread continue on another thread in the meantime.
pub fn aside<R>(work: impl FnOnce() -> R) -> R {
    let runtime = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    match runtime {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// Lets few tasks at a time do work that takes long.
///
/// A semaphore would reserve a free turn for the future that has waited longest, even while its task does something
/// else, such as the work of another branch of a `select!`, and all others would wait for that. Here those that are
/// polled compete.
pub struct Turns {
    free: Semaphore,
    ended: Notify,
}

impl Turns {
    /// Returns this number of turns.
    pub const fn new(number: usize) -> Self {
        Self {
            free: Semaphore::const_new(number),
            ended: Notify::const_new(),
        }
    }

    /// Waits for a turn and does the work, see [`aside`].
    pub async fn aside<R>(&self, work: impl FnOnce() -> R) -> R {
        loop {
            // Before the attempt, so that no end of a turn after it is missed.
            let ended = self.ended.notified();
            if let Some(_turn) = self.begin() {
                return aside(work);
            }
            ended.await;
        }
    }

    fn begin(&self) -> Option<Turn<'_>> {
        self.free.try_acquire().ok()?.forget();
        Some(Turn(self))
    }
}

/// A turn, which ends when it is dropped.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.free.add_permits(1);
        self.0.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail() {
        panic!("on purpose");
    }

    #[tokio::test]
    async fn panics_are_counted() {
        let tasks = Tasks::default();
        tasks.spawn("a", async {
            fail();
        });
        tasks.spawn_until_shutdown("b", std::future::ready(()));
        assert!(tasks.end(Duration::from_mins(1)).await);
        let counts = ["a", "b"].map(|task| tasks.panics().with_label_values(&[task]).get());
        assert_eq!(counts, [1, 0]);
    }

    #[tokio::test]
    async fn a_task_that_panics_is_started_again_until_it_ends() {
        let tasks = Tasks::default();
        let (out, mut started) = tokio::sync::mpsc::channel(8);
        let mut runs = 0;
        tasks.spawn_again_after_panics("a", Duration::ZERO, move || {
            runs += 1;
            out.try_send(runs).expect("a receiver");
            async move {
                if runs < 3 {
                    fail();
                }
            }
        });
        for run in 1..=3 {
            assert_eq!(started.recv().await, Some(run));
        }
        assert_eq!(started.recv().await, None);
        assert_eq!(tasks.panics().with_label_values(&["a"]).get(), 2);
    }

    #[test]
    fn a_turn_is_not_reserved_for_what_is_not_polled() {
        let turns = Turns::new(1);
        let turn = turns.begin().expect("a free turn");
        let mut first = Box::pin(turns.aside(|| 1));
        let mut second = Box::pin(turns.aside(|| 2));
        assert_eq!(first.as_mut().now_or_never(), None);
        assert_eq!(second.as_mut().now_or_never(), None);
        drop(turn);
        assert_eq!(second.as_mut().now_or_never(), Some(2));
        assert_eq!(first.as_mut().now_or_never(), Some(1));
        assert!(turns.begin().is_some());
    }

    #[test]
    fn parts_of_durations_are_random() {
        let longest = Duration::from_secs(5);
        let parts: Vec<Duration> = (0..100).map(|_| random_part(longest)).collect();
        assert!(parts.iter().all(|part| *part <= longest));
        let early = parts.iter().filter(|part| **part < longest / 2).count();
        assert!((10..=90).contains(&early), "{early} of 100 parts are in the first half");
        let mut jittered = (0..100).map(|_| jittered(longest));
        assert!(jittered.all(|duration| duration >= longest * 9 / 10 && duration <= longest * 11 / 10));
    }

    #[test]
    fn only_other_values_are_published() {
        let (sender, mut receiver) = watch::channel(1);
        assert!(!publish(&sender, 1) && !receiver.has_changed().expect("a sender"));
        assert!(publish(&sender, 2) && receiver.has_changed().expect("a sender"));
        assert_eq!(*receiver.borrow_and_update(), 2);
    }
}
