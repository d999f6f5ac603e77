use std::{net::IpAddr, time::Duration};

use futures::FutureExt;
use rustix::process::{Signal, getpid, kill_process};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::*;
use crate::{
    api::resolved_host::ResolvedHost,
    base::ObjectKey,
    ingest::source::{Readiness, Source, Sources},
    model::{Batch, Change, external_dependencies::ExternalDependencies},
    push::push_loop::{Observer, PushReport},
    table::Cx,
    task::Tasks,
};

/// Never reached when the test passes.
const LONG: Duration = Duration::from_mins(1);
const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn key() -> ObjectKey {
    ResolvedHost::key(&Installation::default().cluster, "gateway.example.com")
}

#[test]
fn a_thread_that_blocks_does_not_keep_the_process() {
    let runtimes = [(); 3].map(|()| Runtime::new().expect("threads"));
    let (release, released) = std::sync::mpsc::sync_channel::<()>(0);
    let (sender, has_started) = std::sync::mpsc::sync_channel(1);
    runtimes[0].spawn_blocking(move || {
        sender.send(()).expect("the test waits");
        _ = released.recv();
    });
    has_started.recv().expect("a thread that blocks");
    close(runtimes, Duration::ZERO);
    drop(release);
}

/// A source of one row, which it sends when the test permits it.
struct OneRow {
    may_send: watch::Receiver<bool>,
    is_synced: watch::Sender<bool>,
}

impl Source for OneRow {
    fn name(&self) -> &'static str {
        "one row"
    }

    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    fn is_vital(&self) -> bool {
        true
    }

    async fn run(mut self, changes: mpsc::Sender<Batch>) {
        if self.may_send.wait_for(|may_send| *may_send).await.is_err() {
            return;
        }
        let addresses = vec![ADDRESS];
        let row = ResolvedHost { key: key(), addresses };
        if changes.send(vec![Change::Upsert(row.into())]).await.is_ok() {
            self.is_synced.send_replace(true);
            // Ends when the test drops its sender.
            while self.may_send.changed().await.is_ok() {}
        }
    }
}

/// A source that answers the dependencies of the first snapshot.
struct Answers(watch::Sender<usize>);

impl Source for Answers {
    fn name(&self) -> &'static str {
        "answers"
    }

    fn readiness(&self) -> Readiness {
        let asked = self.0.clone();
        Readiness::Answered(Box::new(move |dependencies| {
            async move { asked.send_modify(|asked| *asked += 1 + dependencies.hosts.len()) }.boxed()
        }))
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        changes.closed().await;
    }
}

struct NoMetrics;

impl Observer for NoMetrics {
    fn pushed(&self, _: &PushReport) {}
}

#[tokio::test]
async fn a_registered_source_reaches_the_snapshot_and_delays_readiness() {
    let tasks = Tasks::default();
    let installation = Installation::default();
    let debounce = debounce_options(&installation.features);
    let (push, run) = PushHandle::new(World::new(installation), debounce, environment::now);
    tasks.spawn("push loop", run.run(NoMetrics));
    let mut sources = Sources::new(&tasks, push.changes.clone());
    let (permit, may_send) = watch::channel(false);
    let is_synced = watch::Sender::new(false);
    sources.start(OneRow { may_send, is_synced });
    let asked = watch::Sender::new(0);
    sources.start(Answers(asked.clone()));

    let early = timeout(Duration::from_millis(50), sources.synced()).await;
    assert!(early.is_err(), "it must wait for the source");
    assert!(sources.ended().now_or_never().is_none());
    permit.send_replace(true);
    timeout(LONG, sources.synced()).await.unwrap().unwrap();
    assert!(push.flushes.flush().await);
    let mesh = push.mesh.borrow().clone();
    let row = mesh.resolved_hosts.get(&Cx::untracked(), &key()).unwrap();
    assert_eq!(row.addresses, [ADDRESS]);

    assert_eq!(*asked.borrow(), 0, "nothing is asked before the first snapshot");
    sources.answered(ExternalDependencies::default()).await;
    assert_eq!(*asked.borrow(), 1);

    drop(permit);
    assert_eq!(timeout(LONG, sources.ended()).await.unwrap().0, "one row");
}

#[tokio::test]
async fn a_source_that_ends_before_it_is_synced_fails_the_start() {
    let (changes, _receiver) = mpsc::channel(1);
    let mut sources = Sources::new(&Tasks::default(), changes);
    let (_, may_send) = watch::channel(false);
    let is_synced = watch::Sender::new(false);
    sources.start(OneRow { may_send, is_synced });
    let error = timeout(LONG, sources.synced()).await.unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"source "one row" ended unexpectedly; this is a bug in istiod"#
    );
}

#[tokio::test]
async fn a_signal_ends_the_start() {
    let starting = async {
        kill_process(getpid(), Signal::TERM).expect("a signal of this process");
        std::future::pending().await
    };
    let ended = timeout(LONG, until_signal(starting)).await;
    assert!(matches!(ended, Ok(Ok(()))), "{ended:?}");
}
