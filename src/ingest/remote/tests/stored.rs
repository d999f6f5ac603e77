//! Clusters with stored states.

use std::{fs, path::Path};

use super::*;
use crate::{
    api::{Row, document::parse_object},
    ingest::{
        discovery_filter::Filters,
        kinds::Rules,
        remote::stored::{StateWriter, StoredSettings, StoredStates},
    },
    kube::health::WatchMetrics,
};

const DAY: Duration = Duration::from_hours(24);
const FILE: &str = "c1.remote-state";

/// A controller whose states are in a folder, and what writes them.
struct Storing {
    fixture: Fixture,
    writer: StateWriter,
    _filters: watch::Sender<Option<Filters>>,
}

impl Storing {
    fn new(folder: &Path, timeout: Duration, max_age: Duration) -> Self {
        let (filters, filters_in) = watch::channel(Some(Filters::default()));
        let mut writer = None;
        let fixture = Fixture::storing(timeout, |registry| {
            let settings = StoredSettings {
                folder: folder.to_owned(),
                max_age,
            };
            let watches = WatchMetrics::new(registry).unwrap();
            let (states, made) = StoredStates::new(registry, settings, &Rules::default(), filters_in, watches).unwrap();
            writer = Some(made);
            Some(states)
        });
        Self {
            fixture,
            writer: writer.unwrap(),
            _filters: filters,
        }
    }

    /// Returns a controller of a Secret for the cluster `c1`, and the cluster's source.
    async fn of_c1(folder: &Path, timeout: Duration, max_age: Duration) -> (Self, Played) {
        let mut storing = Self::new(folder, timeout, max_age);
        storing.fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
        let played = storing.fixture.started("one").await;
        (storing, played)
    }

    fn reads(&self, result: &str) -> Option<f64> {
        self.fixture
            .metric("istiod_remote_state_reads_total", &format!("result={result}"))
    }
}

fn service(name: &str) -> Row {
    let object = json!({ "metadata": { "name": name, "namespace": "shop" }, "spec": { "ports": [{ "port": 80 }] } });
    let parsed = parse_object(&ClusterId::new("c1"), Kind::Service, &object);
    parsed.rows.into_iter().next().unwrap()
}

fn mesh_config() -> Row {
    let metadata = json!({ "name": "istio", "namespace": "istio-system" });
    let object = json!({ "metadata": metadata, "data": { "mesh": "trustDomain: td2" } });
    let parsed = parse_object(&ClusterId::new("c1"), Kind::MeshConfig, &object);
    parsed.rows.into_iter().next().unwrap()
}

impl Played {
    /// Sends the complete list of Services.
    async fn lists(&self, services: &[&str]) {
        let rows = services.iter().map(|name| service(name)).collect();
        self.lists_of(Kind::Service, rows).await;
    }

    async fn lists_of(&self, kind: Kind, rows: Vec<Row>) {
        let cluster = self.cluster.clone();
        let change = Change::Replace(SourceId { cluster, kind }, rows);
        self.changes.send(vec![change]).await.unwrap();
    }
}

/// Returns the Services of the next batch.
async fn services(fixture: &mut Fixture) -> Vec<Row> {
    rows(fixture, Kind::Service).await
}

/// Returns all objects of a kind in the next batch.
async fn rows(fixture: &mut Fixture, kind: Kind) -> Vec<Row> {
    let batch = fixture.changes.recv().await.unwrap();
    let rows = batch.into_iter().find_map(|change| match change {
        Change::Replace(source, rows) if source.kind == kind => Some(rows),
        _ => None,
    });
    rows.expect("all objects of the kind")
}

/// Stores a state of `c1` with these Services.
async fn store(folder: &Path, names: &[&str]) {
    let (mut storing, played) = Storing::of_c1(folder, LONG, DAY).await;
    played.lists(names).await;
    services(&mut storing.fixture).await;
    storing.fixture.shows("c1", Some(SyncStatus::Synced)).await;
    storing.writer.save();
}

#[tokio::test]
async fn a_stored_state_serves_until_the_cluster_is_synced() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a", "b"]).await;
    let (mut storing, played) = Storing::of_c1(folder.path(), LONG, DAY).await;
    let fixture = &mut storing.fixture;
    assert_eq!(services(fixture).await, [service("a"), service("b")]);
    let shown = fixture.shown.wait_for(|shown| shown.ready).await.unwrap().clone();
    let row = shown.dump()[0].clone();
    assert_eq!(row["syncStatus"], "syncing", "the start must not wait for the cluster");
    assert!(
        row["staleSince"].as_str().is_some_and(|since| since.ends_with('Z')),
        "{row}"
    );
    let since = fixture.metric("istiod_remote_cluster_stale_since_seconds", "cluster=c1");
    assert!(since.is_some_and(|since| since > 1e9), "{since:?}");

    // A stale state is not stored again: its age counts from the time at which it was current.
    let written = fs::metadata(folder.path().join(FILE)).unwrap().modified().unwrap();
    storing.writer.save();
    assert_eq!(
        fs::metadata(folder.path().join(FILE)).unwrap().modified().unwrap(),
        written
    );

    played.lists(&["b"]).await;
    let fixture = &mut storing.fixture;
    assert_eq!(services(fixture).await, [service("b")]);
    let shown = fixture.shows("c1", Some(SyncStatus::Synced)).await;
    assert_eq!(shown.clusters["c1"].stale_since, None);
    assert_eq!(
        fixture.metric("istiod_remote_cluster_stale_since_seconds", "cluster=c1"),
        None
    );
    storing.writer.save();
    drop((storing, played));

    let (mut storing, _played) = Storing::of_c1(folder.path(), LONG, DAY).await;
    assert_eq!(services(&mut storing.fixture).await, [service("b")]);
    assert_eq!(storing.reads("success"), Some(1.0));
}

#[tokio::test]
async fn the_first_list_removes_stored_kinds_that_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let (mut storing, played) = Storing::of_c1(folder.path(), LONG, DAY).await;
    assert_eq!(services(&mut storing.fixture).await, [service("a")]);
    played.says(&[Kind::Node]).await;
    let passed = storing.fixture.passed().await;
    assert!(passed.contains(&"r c1 Service".to_owned()), "{passed:?}");
}

#[tokio::test]
async fn a_stored_mesh_config_stays_while_reading_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut storing, played) = Storing::of_c1(folder.path(), LONG, DAY).await;
    played.lists_of(Kind::MeshConfig, vec![mesh_config()]).await;
    assert_eq!(rows(&mut storing.fixture, Kind::MeshConfig).await, [mesh_config()]);
    storing.fixture.shows("c1", Some(SyncStatus::Synced)).await;
    storing.writer.save();
    // The second start reads what the first one wrote.
    for _ in 0..2 {
        let (mut storing, played) = Storing::of_c1(folder.path(), LONG, DAY).await;
        assert_eq!(rows(&mut storing.fixture, Kind::MeshConfig).await, [mesh_config()]);
        played.lists(&["a"]).await;
        assert_eq!(rows(&mut storing.fixture, Kind::MeshConfig).await, [mesh_config()]);
        storing.fixture.shows("c1", Some(SyncStatus::Synced)).await;
        storing.writer.save();
    }
    let (mut storing, played) = Storing::of_c1(folder.path(), LONG, DAY).await;
    assert_eq!(rows(&mut storing.fixture, Kind::MeshConfig).await, [mesh_config()]);
    played.lists_of(Kind::MeshConfig, Vec::new()).await;
    let left = rows(&mut storing.fixture, Kind::MeshConfig).await;
    assert!(left.is_empty(), "it does not exist any more: {left:?}");
}

#[tokio::test]
async fn a_synced_cluster_does_not_return_to_its_stored_state() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let (filters, filters_in) = watch::channel(None);
    let mut storing = Storing::new(folder.path(), LONG, DAY);
    // Filters that are not known yet delay the stored state.
    storing.fixture = Fixture::storing(LONG, |registry| {
        let settings = StoredSettings {
            folder: folder.path().to_owned(),
            max_age: DAY,
        };
        let watches = WatchMetrics::new(registry).unwrap();
        Some(
            StoredStates::new(registry, settings, &Rules::default(), filters_in, watches)
                .unwrap()
                .0,
        )
    });
    let fixture = &mut storing.fixture;
    fixture.secrets(&[secret("s", OLD, &[("c1", "one")])]).await;
    let played = fixture.started("one").await;
    played.lists(&["b"]).await;
    assert_eq!(services(fixture).await, [service("b")]);
    filters.send_replace(Some(Filters::default()));
    played.lists(&["c"]).await;
    assert_eq!(
        services(fixture).await,
        [service("c")],
        "the next batch must be of the source"
    );
}

#[tokio::test]
async fn states_that_are_too_old_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let file = fs::File::options().write(true).open(folder.path().join(FILE)).unwrap();
    let now = crate::environment::wall_clock();
    let aged = |age: Duration| file.set_modified(now - age).unwrap();
    aged(DAY * 2);
    let (mut storing, _played) = Storing::of_c1(folder.path(), Duration::from_millis(50), DAY).await;
    let shown = storing.fixture.shows("c1", Some(SyncStatus::Timeout)).await;
    assert!(shown.ready && storing.fixture.changes.is_empty());
    assert_eq!(storing.reads("expired"), Some(1.0));

    // Without a limit it counts.
    let (mut storing, _played) = Storing::of_c1(folder.path(), LONG, Duration::ZERO).await;
    assert_eq!(services(&mut storing.fixture).await, [service("a")]);
}

#[tokio::test]
async fn a_state_that_becomes_too_old_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let (_filters, filters) = watch::channel(Some(Filters::default()));
    let registry = Registry::new();
    let settings = StoredSettings {
        folder: folder.path().to_owned(),
        max_age: DAY,
    };
    let watches = WatchMetrics::new(&registry).unwrap();
    let (stored, _writer) = StoredStates::new(&registry, settings, &Rules::default(), filters, watches).unwrap();
    let start: Start = Arc::new(|_| Box::pin(std::future::pending()));
    let settings = RemoteSettings {
        own: ClusterId::new("own"),
        timeout: LONG,
        allowed: BTreeSet::new(),
    };
    let (mut remote, _shown) =
        Remote::new(&registry, settings, start, Arc::new(|_: &Diagnostic| {}), Some(stored)).unwrap();
    let origin = of_secret(&secret("s", OLD, &[("c1", "one")]), &Allowed::default());
    let name = ObjectKey::new(&ClusterId::new("own"), "istio-system", "s");
    remote.declare(Declared::All([(name, origin)].into()));
    let (key, read) = remote.reading.next().await.unwrap();
    remote.read(key, read);
    let (key, batch) = remote.batches.next().await.unwrap();
    let batch = batch.expect("a batch of the stored state");
    assert!(!remote.pass(&key, batch).is_empty());
    let now = Instant::now();
    assert!(remote.expire(now).is_empty());
    let removed = remote.expire(now + DAY);
    assert!(
        matches!(&removed[..], [Change::RemoveCluster(cluster)] if *cluster == *"c1"),
        "{removed:?}"
    );
    assert!(!remote.batches.contains_key(&key) && remote.states["c1"].serving.is_none());
}

#[tokio::test]
async fn a_corrupt_state_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let path = folder.path().join(FILE);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    let (mut storing, played) = Storing::of_c1(folder.path(), Duration::from_millis(50), DAY).await;
    assert!(storing.fixture.shows("c1", Some(SyncStatus::Timeout)).await.ready);
    assert_eq!(storing.reads("invalid"), Some(1.0));
    played.lists(&["b"]).await;
    assert_eq!(services(&mut storing.fixture).await, [service("b")]);
    storing.fixture.shows("c1", Some(SyncStatus::Synced)).await;
    storing.writer.save();
    assert!(
        fs::read_to_string(&path).unwrap().contains("\"b\""),
        "the next state replaces it"
    );
}

#[tokio::test]
async fn states_of_clusters_that_no_secret_names_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), &["a"]).await;
    let other = folder.path().join("other.remote-state");
    fs::write(&other, "").unwrap();
    fs::write(folder.path().join("README"), "").unwrap();
    let mut storing = Storing::new(folder.path(), LONG, DAY);
    storing.writer.save();
    assert!(other.exists(), "the Secrets are not known yet");

    // A refused kubeconfig names its cluster all the same.
    storing.fixture.secrets(&[secret_with("s", OLD, &[("c1", "{")])]).await;
    storing.fixture.shows("c1", Some(SyncStatus::Closed)).await;
    storing.writer.save();
    assert!(!other.exists() && folder.path().join(FILE).exists());

    storing.fixture.secrets(&[]).await;
    storing.fixture.shows("c1", None).await;
    storing.writer.save();
    let left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["README"]);
}
