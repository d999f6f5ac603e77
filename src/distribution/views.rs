//! The status of the mesh for clients that follow it, such as the page: as text, made once for all clients that may see
//! the same.
//!
//! A text has a row for each proxy of all replicas, so each costs time and bytes in proportion to the mesh. It is made
//! when something has changed, seldom, and only while a client follows it. A client that reads slowly skips texts.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    Distribution, PAGE_INTERVAL, REST, TOGETHER, merge,
    overview::Overview,
    replicas::{FanOut, PeerQuery, Scope},
};
use crate::{
    base::Namespace,
    environment,
    task::{self, Tasks},
};

/// The time per byte of a text before the next one. So a client receives at most a megabyte in a second.
const TIME_PER_BYTE: Duration = Duration::from_micros(1);

/// The status of the mesh as JSON; `None` before the first report.
pub type Text = Option<Arc<str>>;

/// A view: the namespace whose proxies are visible, `None` for all, and the replicas.
type View = (Option<Namespace>, Scope);

/// The views that clients follow now.
pub(super) struct Views {
    tasks: Tasks,
    /// The runtime with low priority that makes texts.
    runtime: Handle,
    /// Locked for one look-up, insertion or removal.
    texts: Mutex<BTreeMap<View, watch::Sender<Text>>>,
}

impl Views {
    pub(super) fn new(tasks: Tasks, runtime: Handle) -> Self {
        Self {
            tasks,
            runtime,
            texts: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<View, watch::Sender<Text>>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A view whose texts are made until this is dropped. Then clients that still follow it see the end.
struct Publication {
    distribution: Arc<Distribution>,
    view: View,
    text: watch::Sender<Text>,
}

impl Drop for Publication {
    fn drop(&mut self) {
        let mut texts = self.distribution.views.lock();
        if texts.get(&self.view).is_some_and(|text| text.same_channel(&self.text)) {
            texts.remove(&self.view);
        }
    }
}

impl Publication {
    /// Publishes texts while a client follows them.
    async fn run(self) {
        let shutdown = self.distribution.views.tasks.shutdown();
        loop {
            tokio::select! {
                () = self.publish() => {}
                () = self.text.closed() => {}
                () = shutdown.cancelled() => return,
            }
            let mut texts = self.distribution.views.lock();
            // A client may have come since.
            if self.text.receiver_count() == 0 {
                texts.remove(&self.view);
                return;
            }
        }
    }

    async fn publish(&self) {
        let (visible, scope) = &self.view;
        let distribution = &*self.distribution;
        let query = PeerQuery::about_mesh(visible.as_ref(), None);
        let mut fan_out = FanOut::<Overview>::new(distribution, query, *scope, |reports| {
            distribution.follow_own_mesh(visible.as_ref(), reports).boxed()
        });
        let mut last = None;
        // No text is made before this time.
        let mut rests_until = Instant::now();
        loop {
            fan_out.next().await;
            // Replicas report a change at about the same time.
            let due = rests_until.max(Instant::now() + TOGETHER);
            loop {
                tokio::select! {
                    () = fan_out.next() => {}
                    () = sleep_until(due) => break,
                }
            }
            if !fan_out.has_own() {
                continue;
            }
            let started = environment::now();
            let text = task::aside(|| text(merge::overview(&fan_out.answers()), &mut last));
            let took = environment::now().saturating_duration_since(started);
            rests_until = Instant::now() + took * REST;
            let Some(text) = text else { continue };
            if !fan_out.is_waiting() {
                rests_until = rests_until.max(Instant::now() + PAGE_INTERVAL.max(transfer_time(text.len())));
            }
            self.text.send_replace(Some(text));
        }
    }
}

fn transfer_time(bytes: usize) -> Duration {
    TIME_PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the text of an overview, unless it equals the last one, whose ages are taken.
fn text(mut overview: Overview, last: &mut Option<Overview>) -> Option<Arc<str>> {
    let ages = overview.take_ages();
    if last.as_ref() == Some(&overview) {
        return None;
    }
    overview.set_ages(ages);
    let text = serde_json::to_string(&overview).ok();
    overview.take_ages();
    *last = Some(overview);
    text.map(Arc::from)
}

impl Distribution {
    /// Returns the status of the mesh, only of the proxies of one namespace if one is given, and whenever it changes.
    pub fn follow_mesh(self: &Arc<Self>, visible: Option<Namespace>, scope: Scope) -> watch::Receiver<Text> {
        let view = (visible, scope);
        let mut texts = self.views.lock();
        if let Some(text) = texts.get(&view) {
            return text.subscribe();
        }
        let (text, receiver) = watch::channel(None);
        texts.insert(view.clone(), text.clone());
        let publication = Publication {
            distribution: self.clone(),
            view,
            text,
        };
        let Views { tasks, runtime, .. } = &self.views;
        tasks.spawn_on(runtime, "mesh status", publication.run());
        receiver
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::overview::{ConnectedProxy, PushSummary};

    fn overview(revision: u64, age_seconds: f64) -> Overview {
        Overview {
            revision,
            pushes: vec![PushSummary {
                revision,
                age_seconds,
                ..PushSummary::default()
            }],
            ..Overview::default()
        }
    }

    #[test]
    fn equal_overviews_make_one_text() {
        let mut last = None;
        let first = text(overview(1, 0.5), &mut last).expect("a text");
        let parsed: Overview = serde_json::from_str(&first).expect("an overview");
        assert_eq!(parsed, overview(1, 0.5));
        assert_eq!(text(overview(1, 0.75), &mut last), None, "only ages differ");
        assert!(text(overview(2, 0.0), &mut last).is_some());
    }

    #[test]
    fn the_rate_of_texts_follows_their_size() {
        let proxy = |number: usize| ConnectedProxy {
            proxy: format!("reviews-v1-5d8f7c9b4-{number:05}.bookinfo"),
            proxy_type: "sidecar".to_owned(),
            namespace: "bookinfo".to_owned(),
            cluster: "Kubernetes".to_owned(),
            version: "1.30.3".to_owned(),
            replica: "istiod-5c9f4d7b8-x7k2p".to_owned(),
            ..ConnectedProxy::default()
        };
        let bytes = |proxies| {
            let proxies = (0..proxies).map(proxy).collect();
            let overview = Overview {
                proxies,
                ..Overview::default()
            };
            text(overview, &mut None).expect("a text").len()
        };
        assert!(
            transfer_time(bytes(2_000)) < PAGE_INTERVAL,
            "2,000 proxies: {} bytes",
            bytes(2_000)
        );
        assert!(
            transfer_time(bytes(10_000)) > 3 * PAGE_INTERVAL,
            "10,000 proxies: {} bytes",
            bytes(10_000)
        );
    }
}
