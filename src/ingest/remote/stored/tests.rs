use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt};

use serde_json::{Value, json};

use super::{folder::Folder, objects::Objects, *};
use crate::{
    api::{Row, document::parse_object, hidden_gateway::HiddenGateway},
    base::select::LabelSelector,
    model::change::{Change, SourceId},
};

fn row(kind: Kind, object: &Value) -> Row {
    let parsed = parse_object(&cluster(), kind, object);
    parsed.rows.into_iter().next().expect("a row")
}

fn cluster() -> ClusterId {
    ClusterId::new_static("c1")
}

fn named(kind: Kind, namespace: &str, name: &str) -> Row {
    row(
        kind,
        &json!({ "metadata": { "namespace": namespace, "name": name, "labels": { "team": name } } }),
    )
}

fn mesh_config() -> Row {
    let metadata = json!({ "namespace": "istio-system", "name": "istio", "labels": { "a": "b" } });
    row(
        Kind::MeshConfig,
        &json!({ "metadata": metadata, "data": { "mesh": "trustDomain: td2" } }),
    )
}

/// A cluster with some objects, one of them a Secret.
fn rows() -> Vec<Row> {
    let secret =
        json!({ "metadata": { "namespace": "a", "name": "credential" }, "stringData": { "tls.key": "PRIVATE" } });
    vec![
        mesh_config(),
        named(Kind::Namespace, "", "a"),
        named(Kind::Namespace, "", "b"),
        named(Kind::Service, "a", "s"),
        named(Kind::Service, "b", "s"),
        named(Kind::Pod, "b", "p"),
        row(Kind::Secret, &secret),
    ]
}

fn objects(rows: &[Row]) -> Objects {
    let mut live = LiveStates::default();
    let upserts: Vec<Change> = rows.iter().cloned().map(Change::Upsert).collect();
    live.apply(&cluster(), &upserts);
    live.clusters.remove(&cluster()).expect("the cluster")
}

fn written(rows: &[Row]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let size = file::write(&mut bytes, &cluster(), &objects(rows)).expect("memory takes everything");
    assert_eq!(size, bytes.len() as u64);
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<Row>, String> {
    let objects = file::read(bytes, &cluster()).map_err(|error| error.to_string())?;
    Ok(objects.into_iter().filter_map(|object| object.row).collect())
}

#[test]
fn a_state_is_read_as_it_was_written_without_secrets() {
    let mut rows = rows();
    let bytes = written(&rows);
    let text = String::from_utf8(bytes.clone()).expect("text");
    assert!(!text.contains("credential") && !text.contains("PRIVATE"), "{text}");
    let read = read(&bytes).expect("a state");
    rows.retain(|row| row.kind() != Kind::Secret);
    rows.sort_by(|left, right| (left.kind(), left.key()).cmp(&(right.kind(), right.key())));
    assert_eq!(read, rows);
    rows.reverse();
    assert_eq!(written(&rows), bytes, "the order of arrival must not count");
}

#[test]
fn damaged_and_foreign_files_are_errors() {
    let bytes = written(&rows());
    for length in 0..bytes.len() {
        assert!(read(&bytes[..length]).is_err(), "the first {length} bytes");
    }
    for position in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[position] ^= 1;
        assert!(read(&damaged).is_err(), "a wrong byte at {position}");
    }
    let text = String::from_utf8(bytes).expect("text");
    let error = |text: &str| read(text.as_bytes()).expect_err("an error");
    assert_eq!(error(""), "line 1: it is not a stored state of a remote cluster");
    assert_eq!(error("apiVersion: v1\nkind: Pod\n"), error(""));
    assert_eq!(error("{}\n"), error(""));
    let later = text.replacen("\"version\":1", "\"version\":2", 1);
    assert!(
        error(&later).starts_with("line 1: version 2 is not supported, want 1"),
        "{}",
        error(&later)
    );
    let other = text.replacen("\"cluster\":\"c1\"", "\"cluster\":\"c2\"", 1);
    assert_eq!(error(&other), "line 1: cluster: it is a state of the cluster \"c2\"");
    let secret = text.replacen("\"kind\":\"Pod\"", "\"kind\":\"Secret\"", 1);
    assert!(
        error(&secret).contains("kind: \"Secret\" is not stored"),
        "{}",
        error(&secret)
    );
    assert!(error(&format!("{text}{{}}\n")).contains("checksum"));
    let last = text.trim_end().rfind('\n').expect("several lines");
    assert!(error(&text[..=last]).contains("truncated"));
}

#[test]
fn removed_objects_are_not_written() {
    let mut live = LiveStates::default();
    let upserts: Vec<Change> = rows().into_iter().map(Change::Upsert).collect();
    live.apply(&cluster(), &upserts);
    let change = live.clusters["c1"].change;
    let secret = named(Kind::Secret, "a", "credential");
    live.apply(&cluster(), &[Change::Remove(Kind::Secret, secret.key().clone())]);
    assert_eq!(live.clusters["c1"].change, change, "a Secret changes nothing");
    let pod = named(Kind::Pod, "b", "p");
    let services = SourceId {
        cluster: cluster(),
        kind: Kind::Service,
    };
    let changes = [
        Change::Remove(Kind::Pod, pod.key().clone()),
        Change::Replace(services, Vec::new()),
    ];
    live.apply(&cluster(), &changes);
    assert_ne!(live.clusters["c1"].change, change);
    let kinds: Vec<Kind> = live.clusters["c1"].rows().map(Row::kind).collect();
    assert_eq!(kinds, [Kind::MeshConfig, Kind::Namespace, Kind::Namespace]);
}

#[test]
fn files_of_all_cluster_ids_are_in_the_folder() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = Folder::new(parent.path().join("states"));
    let long = "x".repeat(500);
    let longer = format!("{long}y");
    let ids = [
        "c1",
        "c_1-a",
        "../c1",
        "..",
        ".",
        "a/b",
        "/etc/passwd",
        "a\0b",
        "ü",
        "C 1",
        "a.b",
        &long,
        &longer,
    ];
    let mut files = BTreeMap::new();
    for id in ids {
        let id = ClusterId::new(id);
        let file = folder.file(&id);
        assert_eq!(file.parent(), Some(parent.path().join("states").as_path()), "{id}");
        folder
            .write(&id, &objects(&rows()), wall_clock())
            .expect("a written file");
        assert_eq!(folder.read(&id).expect("a state").expect("a file").1.len(), 6, "{id}");
        let mode = fs::metadata(&file).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        files.insert(file, id);
    }
    assert_eq!(files.len(), ids.len(), "each cluster has its file");
    let entries = fs::read_dir(parent.path().join("states")).expect("a folder").count();
    assert_eq!(entries, ids.len(), "nothing else remains");
    let kept = [ClusterId::new("a/b")].into();
    assert_eq!(folder.keep_only(&kept).expect("a folder").len(), ids.len() - 1);
    assert!(folder.file(&ClusterId::new("a/b")).exists());
}

#[test]
fn only_regular_files_are_read() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = Folder::new(parent.path().to_owned());
    assert!(folder.read(&cluster()).expect("no error").is_none());
    fs::create_dir(folder.file(&cluster())).expect("a folder");
    assert!(matches!(folder.read(&cluster()), Err(FileError::NotRegular)));
    let linked = ClusterId::new("linked");
    std::os::unix::fs::symlink("/dev/zero", folder.file(&linked)).expect("a link");
    assert!(matches!(folder.read(&linked), Err(FileError::NotRegular)));
    // A folder that cannot be written is an error of each write.
    assert!(folder.write(&cluster(), &objects(&rows()), wall_clock()).is_err());
}

/// Writes these rows, and returns the changes of the stored state after a start with these rules and filters.
async fn restored(rows: &[Row], rules: &Rules, filters: watch::Receiver<Option<Filters>>) -> BoxStream<'static, Batch> {
    let parent = tempfile::tempdir().expect("a folder");
    let registry = Registry::new();
    let settings = StoredSettings {
        folder: parent.path().to_owned(),
        max_age: Duration::ZERO,
    };
    let watches = WatchMetrics::new(&registry).expect("new metrics");
    let (states, _writer) = StoredStates::new(&registry, settings, rules, filters, watches).expect("new metrics");
    states
        .folder
        .write(&cluster(), &objects(rows), wall_clock())
        .expect("a written file");
    let state = states.read(cluster()).await.expect("a state");
    states.changes(&cluster(), state)
}

/// Returns filters for namespaces of a team.
fn selecting(team: &str) -> Filters {
    let selector: LabelSelector =
        serde_json::from_value(json!({ "matchLabels": { "team": team } })).expect("a selector");
    Filters {
        selectors: vec![selector],
        ..Filters::default()
    }
}

/// Returns all rows of a kind in a batch.
fn of(batch: &[Change], kind: Kind) -> Option<Vec<Row>> {
    batch.iter().find_map(|change| match change {
        Change::Replace(source, rows) if source.kind == kind => Some(rows.clone()),
        _ => None,
    })
}

fn words(batch: &[Change]) -> Vec<String> {
    let word = |change: &Change| match change {
        Change::Upsert(row) => format!("+{}", row.kind().name()),
        Change::Remove(kind, _) => format!("-{}", kind.name()),
        other => format!("{other:?}"),
    };
    batch.iter().map(word).collect()
}

#[tokio::test]
async fn stored_objects_follow_the_filters() {
    let (filters, filters_in) = watch::channel(None);
    let mut changes = restored(&rows(), &Rules::default(), filters_in).await;
    assert!(changes.next().now_or_never().is_none(), "the filters are not known yet");
    filters.send_replace(Some(selecting("a")));
    let first = changes.next().await.expect("a batch");
    assert_eq!(of(&first, Kind::Service), Some(vec![named(Kind::Service, "a", "s")]));
    assert_eq!(
        of(&first, Kind::MeshConfig),
        Some(vec![mesh_config()]),
        "it counts in any namespace"
    );
    filters.send_replace(Some(selecting("b")));
    let second = changes.next().await.expect("a batch");
    assert_eq!(words(&second), ["+Pod", "-Service", "+Service"]);
}

#[tokio::test]
async fn network_gateways_in_other_namespaces_are_stored() {
    let gateway = json!({
        "metadata": { "namespace": "b", "name": "gw", "labels": { "topology.istio.io/network": "n1" } },
        "spec": { "gatewayClassName": "istio-remote", "addresses": [{ "type": "IPAddress", "value": "4.4.4.4" }] },
    });
    let whole = row(Kind::KubeGateway, &gateway);
    let Row::KubeGateway(gateway) = &whole else {
        panic!("not a Gateway");
    };
    let hidden = HiddenGateway::of(gateway).map(Row::from).expect("a network gateway");
    let mut live = rows();
    live.push(hidden.clone());
    let rules = Rules {
        gateway_api: true,
        ..Rules::default()
    };
    let (filters, filters_in) = watch::channel(Some(selecting("a")));
    let mut changes = restored(&live, &rules, filters_in).await;
    let first = changes.next().await.expect("a batch");
    assert_eq!(of(&first, Kind::HiddenGateway), Some(vec![hidden]));
    assert_eq!(of(&first, Kind::KubeGateway), Some(Vec::new()));
    filters.send_replace(Some(selecting("b")));
    let second = changes.next().await.expect("a batch");
    let is_whole = |change: &Change| matches!(change, Change::Upsert(row) if *row == whole);
    assert!(second.iter().any(is_whole), "its namespace is selected now: {second:?}");
    assert!(words(&second).contains(&"-HiddenGateway".to_owned()), "{second:?}");
}
