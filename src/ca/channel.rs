//! Waiting on watch channels, and combining two of them.

use tokio::sync::watch;

use crate::task;

/// Completes at the next change. Never completes once the sender is gone.
pub(super) async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Publishes `merge` of two channels whenever one of them changes, until nothing listens. While `merge` returns `None`,
/// the last value stays published: trust that was distributed is not withdrawn because a source is missing.
pub(super) async fn combine<A, B, T: PartialEq>(
    mut first: watch::Receiver<A>,
    mut second: watch::Receiver<B>,
    out: watch::Sender<Option<T>>,
    merge: impl Fn(&A, &B) -> Option<T>,
) {
    loop {
        let merged = merge(&first.borrow_and_update(), &second.borrow_and_update());
        if merged.is_some() {
            task::publish(&out, merged);
        }
        tokio::select! {
            () = changed(&mut first) => {}
            () = changed(&mut second) => {}
            () = out.closed() => return,
        }
    }
}
