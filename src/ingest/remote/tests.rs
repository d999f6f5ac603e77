mod stored;

use std::{
    io,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use ::kube::client::Body;
use base64::{Engine, engine::general_purpose::STANDARD};
use proptest::prelude::*;
use serde_json::json;
use tokio::task::JoinHandle;

use super::{
    origin::{of_file, of_secret},
    *,
};
use crate::{api::Diagnostic, ingest::diagnostics::Reports, kube::Object};

/// The source of one cluster, as the test plays it.
struct Played {
    cluster: ClusterId,
    server: String,
    changes: mpsc::Sender<Vec<Change>>,
    ended: Arc<Mutex<bool>>,
}

impl Played {
    async fn says(&self, kinds: &[Kind]) {
        let replace = |kind: &Kind| {
            let source = SourceId {
                cluster: self.cluster.clone(),
                kind: *kind,
            };
            Change::Replace(source, Vec::new())
        };
        self.changes
            .send(kinds.iter().map(replace).collect())
            .await
            .expect("the receiver is open");
    }

    fn is_ended(&self) -> bool {
        *self.ended.lock().unwrap()
    }
}

/// All findings, and those that are active.
#[derive(Clone, Default)]
struct Noted {
    all: Arc<Mutex<Vec<String>>>,
    active: Arc<Mutex<BTreeSet<String>>>,
}

impl Reports for Noted {
    fn found(&self, diagnostic: &Diagnostic) {
        self.all.lock().unwrap().push(diagnostic.to_string());
        self.active.lock().unwrap().insert(diagnostic.to_string());
    }

    fn resolved(&self, diagnostic: &Diagnostic) {
        self.active.lock().unwrap().remove(&diagnostic.to_string());
    }
}

/// Never waited for in full when all is well.
const LONG: Duration = Duration::from_mins(1);

/// A controller, and the world around it.
struct Fixture {
    events: mpsc::Sender<WatchEvent>,
    played: mpsc::Receiver<Played>,
    changes: mpsc::Receiver<Vec<Change>>,
    shown: watch::Receiver<Arc<RemoteClusters>>,
    findings: Arc<Mutex<Vec<String>>>,
    active_findings: Arc<Mutex<BTreeSet<String>>>,
    /// The number of starts of sources that fail.
    failures: Arc<AtomicUsize>,
    registry: Registry,
    _task: JoinHandle<()>,
}

impl Fixture {
    fn new(timeout: Duration) -> Self {
        Self::storing(timeout, |_| None)
    }

    /// A controller with stored states.
    fn storing(timeout: Duration, stored: impl FnOnce(&Registry) -> Option<StoredStates>) -> Self {
        Self::with(timeout, REPLACE_INTERVAL, stored, Declarations::Secrets)
    }

    /// A controller with this time between two changes of a kubeconfig.
    fn replacing(timeout: Duration, interval: Duration) -> Self {
        Self::with(timeout, interval, |_| None, Declarations::Secrets)
    }

    #[expect(clippy::disallowed_methods, reason = "the test ends with its runtime")]
    fn with(
        timeout: Duration,
        interval: Duration,
        stored: impl FnOnce(&Registry) -> Option<StoredStates>,
        declarations: impl FnOnce(mpsc::Receiver<WatchEvent>) -> Declarations,
    ) -> Self {
        let (events, events_in) = mpsc::channel(8);
        let (played_out, played) = mpsc::channel(8);
        let (changes_out, changes) = mpsc::channel(8);
        let registry = Registry::new();
        let stored = stored(&registry);
        let noted = Noted::default();
        let failures = Arc::new(AtomicUsize::new(0));
        let failing = failures.clone();
        let start: Start = Arc::new(move |start| {
            let (played_out, failing) = (played_out.clone(), failing.clone());
            Box::pin(async move {
                let fewer = failing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                if fewer.is_ok() {
                    return Err("no credentials".to_owned());
                }
                let config = start
                    .kubeconfig
                    .client_config()
                    .await
                    .map_err(|error| error.to_string())?;
                let ended = Arc::new(Mutex::new(false));
                let played = Played {
                    cluster: start.cluster,
                    server: config.cluster_url.host().unwrap_or_default().to_owned(),
                    changes: start.changes,
                    ended: ended.clone(),
                };
                played_out.send(played).await.map_err(|error| error.to_string())?;
                let refused =
                    |_: http::Request<Body>| async { Err::<http::Response<Body>, _>(io::Error::other("down")) };
                let client = ::kube::Client::new(tower::service_fn(refused), "default");
                Ok(RunningCluster::new(Some(client), move || *ended.lock().unwrap() = true))
            })
        });
        let settings = RemoteSettings {
            own: ClusterId::new("own"),
            timeout,
            allowed: BTreeSet::new(),
        };
        let report: Report = Arc::new(noted.clone());
        let (mut remote, shown) = Remote::new(&registry, settings, start, report, stored).unwrap();
        remote.replace_interval = interval;
        let task = tokio::spawn(remote.run(declarations(events_in), changes_out));
        Self {
            events,
            played,
            changes,
            shown,
            findings: noted.all,
            active_findings: noted.active,
            failures,
            registry,
            _task: task,
        }
    }

    async fn secrets(&self, secrets: &[Object]) {
        self.events.send(WatchEvent::Restarted(secrets.to_vec())).await.unwrap();
    }

    async fn applied(&self, secret: Object) {
        self.events.send(WatchEvent::Applied(secret)).await.unwrap();
    }

    async fn deleted(&self, secret: Object) {
        self.events.send(WatchEvent::Deleted(secret)).await.unwrap();
    }

    async fn started(&mut self, server: &str) -> Played {
        let played = self.played.recv().await.expect("a source starts");
        assert_eq!(played.server, server);
        played
    }

    /// Changes that were passed on: `r` a replacement, `x` a removal of the cluster.
    async fn passed(&mut self) -> Vec<String> {
        let changes = self.changes.recv().await.expect("changes are passed on");
        let word = |change: &Change| match change {
            Change::Replace(source, _) => format!("r {} {}", source.cluster, source.kind.name()),
            Change::RemoveCluster(cluster) => format!("x {cluster}"),
            other => format!("{other:?}"),
        };
        changes.iter().map(word).collect()
    }

    async fn shows(&mut self, cluster: &str, status: Option<SyncStatus>) -> Arc<RemoteClusters> {
        let is = |shown: &Arc<RemoteClusters>| shown.clusters.get(cluster).map(|shown| shown.status) == status;
        let wait = self.shown.wait_for(is);
        let shown = time::timeout(LONG, wait).await;
        shown.expect("a state").expect("a running controller").clone()
    }

    fn metric(&self, name: &str, labels: &str) -> Option<f64> {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name)?;
        let metric = family.get_metric().iter().find(|metric| {
            let pairs = metric
                .get_label()
                .iter()
                .map(|pair| format!("{}={}", pair.name(), pair.value()));
            pairs.collect::<Vec<_>>().join(",") == labels
        })?;
        Some(metric.get_gauge().get_value() + metric.get_counter().get_value())
    }
}

fn kubeconfig(server: &str) -> String {
    format!(
        "current-context: c\ncontexts: [{{name: c, context: {{cluster: in-{server}, user: u}}}}]\n\
         clusters: [{{name: in-{server}, cluster: {{server: 'https://{server}'}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\n"
    )
}

fn secret_with(name: &str, created: &str, data: &[(&str, &str)]) -> Object {
    let data: serde_json::Map<_, _> = data
        .iter()
        .map(|(cluster, text)| ((*cluster).to_owned(), json!(STANDARD.encode(text))))
        .collect();
    Object::from_value(json!({
        "metadata": { "name": name, "namespace": "istio-system", "creationTimestamp": created },
        "data": data,
    }))
    .unwrap()
}

fn secret(name: &str, created: &str, clusters: &[(&str, &str)]) -> Object {
    let texts: Vec<_> = clusters
        .iter()
        .map(|(cluster, server)| (*cluster, kubeconfig(server)))
        .collect();
    let data: Vec<_> = texts.iter().map(|(cluster, text)| (*cluster, text.as_str())).collect();
    secret_with(name, created, &data)
}

const OLD: &str = "2026-01-01T00:00:00Z";
const NEW: &str = "2026-02-01T00:00:00Z";

#[tokio::test]
async fn clusters_are_added_changed_and_removed() {
    let mut fixture = Fixture::new(LONG);
    fixture
        .secrets(&[secret("s", OLD, &[("c1", "one"), ("c2", "two"), ("own", "self")])])
        .await;
    let first = fixture.started("one").await;
    let second = fixture.started("two").await;
    assert!(!fixture.shows("c1", Some(SyncStatus::Syncing)).await.ready);
    first.says(&[Kind::Service, Kind::Pod]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service", "r c1 Pod"]);
    second.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c2 Service"]);
    let shown = fixture.shows("c2", Some(SyncStatus::Synced)).await;
    assert!(shown.ready && shown.clusters.len() == 2);
    let row = json!({ "id": "c1", "secretName": "istio-system/s", "syncStatus": "synced" });
    assert_eq!(shown.dump()[0], row);

    // The old source provides the rows until the new one is synced.
    fixture
        .applied(secret("s", OLD, &[("c1", "three"), ("c2", "two")]))
        .await;
    let third = fixture.started("three").await;
    fixture.shows("c1", Some(SyncStatus::Syncing)).await;
    first.says(&[Kind::Node]).await;
    assert_eq!(fixture.passed().await, ["r c1 Node"]);
    assert!(!first.is_ended());
    third.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service", "r c1 Node", "r c1 Pod"]);
    fixture.shows("c1", Some(SyncStatus::Synced)).await;
    assert!(
        first.is_ended() && first.changes.is_closed(),
        "changes of the old source are ignored"
    );

    fixture.applied(secret("s", OLD, &[("c1", "three")])).await;
    assert_eq!(fixture.passed().await, ["x c2"]);
    fixture.shows("c2", None).await;
    assert!(second.is_ended() && !third.is_ended());
    fixture.deleted(secret("s", OLD, &[])).await;
    assert_eq!(fixture.passed().await, ["x c1"]);
    fixture.shows("c1", None).await;
    assert_eq!(
        fixture.metric("istiod_managed_clusters", "cluster_type=remote"),
        Some(0.0)
    );
    for (event, count) in [("add", 1.0), ("update", 2.0), ("delete", 1.0)] {
        assert_eq!(
            fixture.metric("remote_cluster_secret_events_total", &format!("event={event}")),
            Some(count)
        );
    }
    let synced = "cluster=c1,cluster_type=remote,status=synced";
    assert_eq!(fixture.metric("istiod_remote_cluster_sync_status", synced), None);
    assert!(fixture.findings.lock().unwrap().is_empty());
}

#[tokio::test]
async fn known_secrets_stay_if_the_next_source_may_not_read_them() {
    let mut fixture = Fixture::new(LONG);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let first = fixture.started("one").await;
    first.says(&[Kind::Service, Kind::Node, Kind::Secret]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service", "r c1 Node", "r c1 Secret"]);
    fixture.applied(secret("s", OLD, &[("c1", "two")])).await;
    let second = fixture.started("two").await;
    second.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service", "r c1 Node"]);
}

#[tokio::test]
async fn an_unreachable_cluster_does_not_delay_the_start_and_joins_later() {
    let mut fixture = Fixture::new(Duration::from_millis(50));
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let source = fixture.started("one").await;
    assert!(fixture.shows("c1", Some(SyncStatus::Timeout)).await.ready);
    assert_eq!(
        fixture.metric("remote_cluster_sync_timeouts_total", "cluster=c1"),
        Some(1.0)
    );
    let timeout = "cluster=c1,cluster_type=remote,status=timeout";
    assert_eq!(fixture.metric("istiod_remote_cluster_sync_status", timeout), Some(1.0));
    source.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    fixture.shows("c1", Some(SyncStatus::Synced)).await;
}

#[tokio::test]
async fn without_clusters_the_source_is_ready_after_the_first_list() {
    let mut fixture = Fixture::new(LONG);
    assert!(!fixture.shown.borrow().ready);
    fixture.secrets(&[]).await;
    fixture.shown.wait_for(|shown| shown.ready).await.unwrap();
}

#[tokio::test]
async fn an_unreadable_folder_delays_the_start_for_a_limited_time() {
    let folder = tempfile::tempdir().unwrap().path().join("absent");
    let declarations = |_| Declarations::Folder(folder);
    let mut fixture = Fixture::with(Duration::from_millis(1), REPLACE_INTERVAL, |_| None, declarations);
    let ready = fixture.shown.wait_for(|shown| shown.ready);
    assert!(time::timeout(LONG, ready).await.is_ok_and(|ready| ready.is_ok()));
}

#[tokio::test]
async fn a_bad_kubeconfig_is_reported_and_removes_nothing() {
    let mut fixture = Fixture::new(LONG);
    let exec = kubeconfig("one").replace("{token: t}", "{exec: {command: sh}}");
    fixture.secrets(&[secret_with("s", OLD, &[("c1", &exec)])]).await;
    let shown = fixture.shows("c1", Some(SyncStatus::Closed)).await;
    assert!(shown.ready, "no cluster is pending");
    assert_eq!(
        shown.dump()[0]["error"],
        "the kubeconfig is not allowed: exec is not allowed; hint: PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS permits it"
    );

    fixture.applied(secret("s", OLD, &[("c1", "one")])).await;
    let first = fixture.started("one").await;
    first.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);

    fixture.applied(secret_with("s", OLD, &[("c1", "{")])).await;
    fixture
        .shown
        .wait_for(|shown| shown.clusters["c1"].problem.is_some())
        .await
        .unwrap();
    assert_eq!(fixture.shown.borrow().clusters["c1"].status, SyncStatus::Synced);
    // Unchanged text needs no action.
    fixture.applied(secret("s", OLD, &[("c1", "one")])).await;
    fixture
        .shown
        .wait_for(|shown| shown.clusters["c1"].problem.is_none())
        .await
        .unwrap();
    assert!(!first.is_ended() && fixture.played.is_empty());
    assert!(fixture.active_findings.lock().unwrap().is_empty(), "it is valid again");

    // An invalid certificate authority is detected only when the client is created.
    let broken = kubeconfig("two").replace("cluster: {server", "cluster: {certificate-authority-data: '%', server");
    fixture.applied(secret_with("s", OLD, &[("c1", &broken)])).await;
    let shown = fixture
        .shown
        .wait_for(|shown| shown.clusters["c1"].problem.is_some())
        .await
        .unwrap();
    assert_eq!(shown.clusters["c1"].status, SyncStatus::Synced);
    drop(shown);
    assert!(!first.is_ended());
    assert_eq!(fixture.active_findings.lock().unwrap().len(), 1);
    fixture.deleted(secret("s", OLD, &[])).await;
    assert_eq!(fixture.passed().await, ["x c1"]);
    assert!(fixture.active_findings.lock().unwrap().is_empty(), "its Secret is gone");
    let findings = fixture.findings.lock().unwrap();
    assert_eq!(findings.len(), 3, "{findings:?}");
    assert!(
        findings
            .iter()
            .all(|text| text.starts_with("Secret istio-system/s: data.c1: ")),
        "{findings:?}"
    );
}

#[tokio::test]
async fn the_second_secret_of_a_cluster_applies_after_the_first_is_removed() {
    let mut fixture = Fixture::new(LONG);
    fixture.secrets(&[secret("b", OLD, &[("c1", "one")])]).await;
    let first = fixture.started("one").await;
    first.says(&[Kind::Service]).await;
    fixture.passed().await;
    fixture.applied(secret("a", NEW, &[("c1", "two")])).await;
    // A separate cluster shows that the Secret before was processed.
    fixture.applied(secret("z", NEW, &[("c2", "three")])).await;
    let other = fixture.started("three").await;
    assert!(!first.is_ended() && fixture.findings.lock().unwrap()[0].contains("istio-system/b"));
    fixture.deleted(secret("b", OLD, &[])).await;
    let second = fixture.started("two").await;
    second.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    assert!(first.is_ended() && !other.is_ended());
}

#[tokio::test]
async fn an_invalid_kubeconfig_of_an_older_secret_stops_nothing() {
    let mut fixture = Fixture::new(LONG);
    let other = kubeconfig("three");
    fixture
        .secrets(&[
            secret_with("b", OLD, &[("c2", &other)]),
            secret("a", NEW, &[("c1", "one")]),
        ])
        .await;
    let mut sources = [
        fixture.played.recv().await.unwrap(),
        fixture.played.recv().await.unwrap(),
    ];
    sources.sort_by_key(|source| source.server.clone());
    let [first, _] = &sources;
    first.says(&[Kind::Service]).await;
    fixture.passed().await;
    fixture
        .applied(secret_with("b", OLD, &[("c2", &other), ("c1", "{")]))
        .await;
    // A separate cluster shows that the Secret before was processed.
    fixture.applied(secret("z", NEW, &[("c3", "four")])).await;
    fixture.started("four").await;
    assert!(!first.is_ended() && fixture.changes.is_empty());
    assert_eq!(fixture.shown.borrow().clusters["c1"].status, SyncStatus::Synced);
    let findings = fixture.findings.lock().unwrap().clone();
    assert!(
        findings.len() == 1 && findings[0].starts_with("Secret istio-system/b: data.c1: "),
        "{findings:?}"
    );
}

#[tokio::test]
async fn a_source_that_fails_to_start_is_started_again() {
    let mut fixture = Fixture::new(LONG);
    fixture.failures.store(2, Ordering::Relaxed);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let shown = fixture.shows("c1", Some(SyncStatus::Closed)).await;
    assert!(!shown.ready && shown.clusters["c1"].client.is_none());
    assert_eq!(shown.clusters["c1"].problem.as_deref(), Some("no credentials"));
    let source = fixture.started("one").await;
    let shown = fixture.shows("c1", Some(SyncStatus::Syncing)).await;
    assert!(shown.clusters["c1"].problem.is_none());
    source.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    assert!(fixture.shows("c1", Some(SyncStatus::Synced)).await.ready);
    let findings = fixture.findings.lock().unwrap();
    assert_eq!(findings.len(), 1, "equal failures are reported once: {findings:?}");
}

#[tokio::test]
async fn a_source_that_fails_to_start_delays_the_start_for_a_limited_time() {
    let mut fixture = Fixture::new(Duration::from_millis(50));
    fixture.failures.store(usize::MAX, Ordering::Relaxed);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let shown = fixture.shows("c1", Some(SyncStatus::Timeout)).await;
    assert!(shown.ready);
    assert_eq!(shown.clusters["c1"].problem.as_deref(), Some("no credentials"));
    fixture.failures.store(0, Ordering::Relaxed);
    let source = fixture.started("one").await;
    source.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    let shown = fixture.shows("c1", Some(SyncStatus::Synced)).await;
    assert!(shown.clusters["c1"].problem.is_none());
}

#[tokio::test]
async fn a_kubeconfig_that_changes_all_the_time_does_not_end_its_sources() {
    let mut fixture = Fixture::replacing(LONG, LONG);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let first = fixture.started("one").await;
    first.says(&[Kind::Service]).await;
    fixture.passed().await;
    // One change takes effect at once, further ones do not.
    fixture.applied(secret("s", OLD, &[("c1", "two")])).await;
    let second = fixture.started("two").await;
    for server in ["three", "four", "five"] {
        fixture.applied(secret("s", OLD, &[("c1", server)])).await;
    }
    // A separate cluster shows that the changes before were processed.
    fixture.applied(secret("z", NEW, &[("c2", "other")])).await;
    fixture.started("other").await;
    assert!(!second.is_ended());
    second.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    fixture.shows("c1", Some(SyncStatus::Synced)).await;
    fixture.deleted(secret("s", OLD, &[])).await;
    assert_eq!(fixture.passed().await, ["x c1"]);
    assert!(fixture.played.is_empty());
}

#[tokio::test]
async fn the_last_of_several_kubeconfigs_takes_effect() {
    let mut fixture = Fixture::replacing(LONG, Duration::from_millis(100));
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    fixture.started("one").await;
    for server in ["two", "three", "four"] {
        fixture.applied(secret("s", OLD, &[("c1", server)])).await;
    }
    let source = loop {
        let source = fixture.played.recv().await.expect("a source starts");
        if source.server == "four" {
            break source;
        }
    };
    source.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
}

#[tokio::test]
async fn a_kubeconfig_that_changes_all_the_time_delays_the_start_for_a_limited_time() {
    let mut fixture = Fixture::replacing(Duration::from_millis(100), Duration::ZERO);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let mut sources = vec![fixture.started("one").await];
    let changing = async {
        while !fixture.shown.borrow().ready {
            let server = format!("s{}", sources.len());
            fixture.applied(secret("s", OLD, &[("c1", &server)])).await;
            sources.push(fixture.started(&server).await);
            time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(time::timeout(LONG, changing).await.is_ok());
}

#[tokio::test]
async fn a_source_that_ends_is_started_again() {
    let mut fixture = Fixture::new(LONG);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    drop(fixture.started("one").await);
    let first = fixture.started("one").await;
    assert!(
        !fixture.shown.borrow().ready,
        "the start waits for the cluster as before"
    );
    first.says(&[Kind::Service]).await;
    assert_eq!(fixture.passed().await, ["r c1 Service"]);
    fixture.shows("c1", Some(SyncStatus::Synced)).await;
    let is_first_stopped = first.ended.clone();
    drop(first);
    let second = fixture.started("one").await;
    assert!(!*is_first_stopped.lock().unwrap(), "its client stays in use");
    second.says(&[Kind::Node]).await;
    assert_eq!(fixture.passed().await, ["r c1 Node", "r c1 Service"]);
    fixture.shows("c1", Some(SyncStatus::Synced)).await;
    let restarts = fixture.metric("istiod_remote_cluster_restarts_total", "cluster=c1");
    assert_eq!(restarts, Some(2.0));
    fixture.deleted(secret("s", OLD, &[])).await;
    assert_eq!(fixture.passed().await, ["x c1"]);
}

#[tokio::test]
async fn a_cluster_has_a_client_before_it_is_synced() {
    let mut fixture = Fixture::new(LONG);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let source = fixture.started("one").await;
    let has_client = |shown: &Arc<RemoteClusters>| shown.clusters.get("c1").is_some_and(|shown| shown.client.is_some());
    let before = fixture.shown.wait_for(has_client).await.unwrap().clusters["c1"].clone();
    assert_eq!(before.status, SyncStatus::Syncing);
    source.says(&[Kind::Service]).await;
    let after = fixture.shows("c1", Some(SyncStatus::Synced)).await.clusters["c1"].clone();
    assert!(
        after.client.is_some() && after.source == before.source,
        "its users need not start again"
    );
}

#[tokio::test]
async fn a_cluster_removed_before_sync_leaves_nothing() {
    let mut fixture = Fixture::new(LONG);
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let source = fixture.started("one").await;
    fixture.secrets(&[]).await;
    assert_eq!(fixture.passed().await, ["x c1"]);
    fixture.shows("c1", None).await;
    assert!(source.is_ended() && source.changes.is_closed());
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    fixture.started("one").await;
}

#[test]
fn a_kubeconfig_file_names_its_cluster_and_keeps_its_last_valid_content() {
    let allowed = Allowed::default();
    let good = of_file(Ok(kubeconfig("one").into()), None, &allowed);
    let names = |origin: &Origin| origin.claims.keys().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!((names(&good), &good.problem), (vec!["in-one".to_owned()], &None));
    for text in ["", "{", "users: []"] {
        let bad = of_file(Ok(text.into()), Some(&good), &allowed);
        assert_eq!(names(&bad), ["in-one"], "{text}");
        assert!(
            bad.problem.is_some() && bad.claims.values().all(|claim| claim.reading.is_ok()),
            "{text}"
        );
    }
    let unread = of_file(Err("no permission".to_owned()), None, &allowed);
    assert!(unread.claims.is_empty() && unread.problem.is_some());
}

#[test]
fn of_several_files_of_a_cluster_the_first_by_name_counts() {
    let own = ClusterId::new("own");
    let key = |name: &str| ObjectKey::new(&own, "", name);
    let file = |comment: &str| {
        let text = format!("# {comment}\n{}", kubeconfig("one"));
        of_file(Ok(text.into()), None, &Allowed::default())
    };
    let cluster = ClusterId::new("in-one");
    let origin = |reconciler: &Reconciler| reconciler.running()[&cluster].0.clone();
    let (first, second) = (key("a.yaml"), key("b.yaml"));
    // In any order of arrival, so that replicas agree.
    for order in [[&first, &second], [&second, &first]] {
        let mut reconciler = Reconciler::new(own.clone());
        for key in order {
            reconciler.put(key.clone(), file(&key.name));
            reconciler.reconcile();
        }
        assert_eq!(origin(&reconciler), first);
        // An edit of the file that counts is applied.
        reconciler.put(first.clone(), file("edited"));
        let (actions, problems) = reconciler.reconcile();
        assert!(matches!(&actions[&cluster], (_, Action::Replace(_))));
        let problem = &problems[&(second.clone(), Some(cluster.clone()))];
        assert_eq!((problem.code, problems.len()), ("DuplicateCluster", 1));
        reconciler.remove(&first);
        let (actions, problems) = reconciler.reconcile();
        assert!(matches!(&actions[&cluster], (_, Action::Replace(_))) && problems.is_empty());
        assert_eq!(origin(&reconciler), second);
    }
}

#[test]
fn a_folder_declares_nothing_until_it_was_read() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("clusters");
    let mut folder = folder::Folder::new(path.clone(), ClusterId::new("own"), Allowed::default());
    let mut declared = move || {
        folder.look();
        folder.changed().map(|declared| match declared {
            Declared::All(origins) => origins.len(),
            _ => panic!("a folder tells all that it has"),
        })
    };
    assert_eq!(declared(), None, "no clusters is not the same as unknown clusters");
    std::fs::create_dir(&path).unwrap();
    assert_eq!((declared(), declared()), (Some(0), None));
    std::fs::write(path.join("a.yaml"), kubeconfig("one")).unwrap();
    assert_eq!(declared(), Some(1));
    std::fs::remove_dir_all(&path).unwrap();
    assert_eq!(declared(), None, "the last clusters stay");
}

#[tokio::test]
async fn changes_of_a_folder_are_applied() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let draft = folder.path().join(".draft");
        std::fs::write(&draft, text).unwrap();
        std::fs::rename(draft, folder.path().join(name)).unwrap();
    };
    put("a.yaml", &kubeconfig("one"));
    put("notes.txt", "nothing");
    let (out, mut declared) = mpsc::channel(4);
    let watched = folder::Folder::new(folder.path().to_owned(), ClusterId::new("own"), Allowed::default()).run(out);
    let follow = async {
        let mut next = async || match declared.recv().await {
            Some(Declared::All(origins)) => origins
                .iter()
                .map(|(key, origin)| (key.to_string(), origin.claims.keys().map(ToString::to_string).collect()))
                .collect::<Vec<(String, Vec<String>)>>(),
            _ => panic!("a folder tells all that it has"),
        };
        assert_eq!(next().await, [("a.yaml".to_owned(), vec!["in-one".to_owned()])]);
        put("b.yml", &kubeconfig("two"));
        assert_eq!(next().await.len(), 2);
        std::fs::remove_file(folder.path().join("a.yaml")).unwrap();
        assert_eq!(next().await, [("b.yml".to_owned(), vec!["in-two".to_owned()])]);
    };
    let both = async {
        tokio::select! { () = watched => panic!("it follows"), () = follow => {} }
    };
    time::timeout(LONG, both).await.expect("changes are noticed");
}

/// A step of the property below: a Secret is there with these clusters, or it is gone.
type Step = (usize, Option<Vec<(usize, usize)>>);

fn step() -> impl Strategy<Value = Step> {
    let clusters = prop::collection::vec((0..3_usize, 0..3_usize), 0..3);
    (0..3_usize, prop::option::weighted(0.7, clusters))
}

proptest! {
    #[test]
    fn the_order_of_events_does_not_matter(steps in prop::collection::vec(step(), 0..12)) {
        let own = ClusterId::new("own");
        let key = |number: usize| ObjectKey::new(&own, "ns", format!("s{number}"));
        // The age of a Secret decides conflicts. Here the later names are older.
        let origin = |number: usize, clusters: &[(usize, usize)]| {
            let clusters: Vec<_> = clusters
                .iter()
                .map(|(id, server)| (format!("c{id}"), format!("h{server}")))
                .collect();
            let named: Vec<_> = clusters.iter().map(|(id, server)| (id.as_str(), server.as_str())).collect();
            of_secret(&secret("s", &format!("2026-01-0{}T00:00:00Z", 9 - number), &named), &Allowed::default())
        };
        let mut reconciler = Reconciler::new(own.clone());
        let mut declared = BTreeMap::new();
        let mut running: BTreeMap<ClusterId, ObjectKey> = BTreeMap::new();
        for (number, clusters) in steps {
            match clusters {
                Some(clusters) => {
                    declared.insert(number, clusters.clone());
                    reconciler.put(key(number), origin(number, &clusters));
                }
                None => {
                    declared.remove(&number);
                    reconciler.remove(&key(number));
                }
            }
            // The actions lead to the requested state, and each fits the running sources.
            for (cluster, (origin, action)) in reconciler.reconcile().0 {
                let before = match action {
                    Action::Stop => running.remove(&cluster),
                    _ => running.insert(cluster, origin),
                };
                prop_assert_eq!(before.is_some(), !matches!(action, Action::Start(_)));
            }
            let reported = reconciler.running().into_iter();
            let reported: BTreeMap<_, _> = reported.map(|(id, (origin, _))| (id, origin)).collect();
            prop_assert_eq!(&running, &reported);
            prop_assert!(reconciler.reconcile().0.is_empty(), "nothing is done twice");
        }
        let mut fresh = Reconciler::new(own.clone());
        fresh.replace(declared.iter().map(|(number, clusters)| (key(*number), origin(*number, clusters))).collect());
        let problems = fresh.reconcile().1;
        prop_assert_eq!(fresh.running(), reconciler.running());
        prop_assert_eq!(problems, reconciler.reconcile().1);
    }
}

#[test]
fn debug_shows_no_credentials() {
    let origin = of_secret(&secret("s", OLD, &[("c1", "one")]), &Allowed::default());
    assert!(origin.claims[&ClusterId::new("c1")].reading.is_ok());
    let shown = format!("{origin:?}");
    assert!(shown.contains("in-one") && !shown.contains("token"), "{shown}");
}
