use std::sync::Mutex;

use super::*;
use crate::proto::istio::mesh::v1alpha1::MeshConfig;

struct Fixture {
    reader: Reader,
    texts: BTreeMap<Part, Text>,
    reported: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    fn new() -> Self {
        let cluster = ClusterId::new_static("Kubernetes");
        let settings = MeshSettings {
            mesh_key: ObjectKey::new(&cluster, "istio-system", "istio"),
            cluster,
            namespace: Namespace::new_static("istio-system"),
            revision: "default".into(),
            shared_map: None,
            mesh_file: PathBuf::new(),
            networks_file: PathBuf::new(),
        };
        let reported = Arc::<Mutex<Vec<String>>>::default();
        let reports = reported.clone();
        let report: Report =
            Arc::new(move |diagnostic: &Diagnostic| reports.lock().unwrap().push(diagnostic.to_string()));
        let mut reader = Reader::new(&settings, report);
        reader.places.insert(Part::Mesh, "here".into());
        Self {
            reader,
            texts: BTreeMap::new(),
            reported,
        }
    }

    fn set(&mut self, part: Part, text: &str) -> Vec<Change> {
        self.texts.insert(part, Text::Is(text.to_owned()));
        self.reader.read(&self.texts)
    }
}

fn mesh_config(changes: &[Change]) -> &MeshConfig {
    let rows = changes.iter().find_map(|change| match change {
        Change::Replace(source, rows) if source.kind == Kind::MeshConfig => Some(rows),
        _ => None,
    });
    match &rows.expect("a mesh config")[..] {
        [Row::MeshConfig(row)] => &row.spec,
        other => panic!("{other:?}"),
    }
}

#[test]
fn absent_documents_use_the_defaults() {
    let mut fixture = Fixture::new();
    let changes = fixture.reader.read(&fixture.texts);
    assert_eq!(mesh_config(&changes).trust_domain, "cluster.local");
    assert!(
        matches!(&changes[1], Change::Replace(source, rows) if source.kind == Kind::MeshNetworks && rows.is_empty())
    );
    assert!(
        fixture.reader.read(&fixture.texts).is_empty(),
        "unchanged rows are not sent again"
    );
}

#[test]
fn the_own_config_overrides_the_shared_config() {
    let mut fixture = Fixture::new();
    fixture.set(Part::Shared, "trustDomain: shared\nenableTracing: false\n");
    let changes = fixture.set(Part::Mesh, "trustDomain: own\n");
    let config = mesh_config(&changes);
    assert_eq!((config.trust_domain.as_str(), config.enable_tracing), ("own", false));
}

#[test]
fn the_shared_config_applies_below_an_invalid_own_one() {
    let mut fixture = Fixture::new();
    let own = Text::Is("enableTracing: maybe\n".to_owned());
    fixture.texts.insert(Part::Mesh, own);
    for domain in ["shared", "edited"] {
        let changes = fixture.set(Part::Shared, &format!("trustDomain: {domain}\n"));
        assert_eq!(mesh_config(&changes).trust_domain, domain);
    }
    fixture.set(Part::Mesh, "trustDomain: own\n");
    fixture.set(Part::Mesh, "enableTracing: maybe\n");
    let changes = fixture.set(Part::Shared, "trustDomain: late\n");
    assert!(changes.is_empty(), "the last valid one stays: {changes:?}");
}

#[test]
fn shared_networks_replace_the_own_ones() {
    let mut fixture = Fixture::new();
    let names = |changes: &[Change]| {
        let rows = changes.iter().find_map(|change| match change {
            Change::Replace(source, rows) if source.kind == Kind::MeshNetworks => Some(rows),
            _ => None,
        });
        match &rows.expect("networks")[..] {
            [Row::MeshNetworks(row)] => row.spec.networks.keys().cloned().collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        }
    };
    let network = |name: &str| format!("networks: {{{name}: {{endpoints: [{{fromRegistry: c}}]}}}}\n");
    assert_eq!(names(&fixture.set(Part::Networks, &network("own"))), ["own"]);
    assert_eq!(
        names(&fixture.set(Part::SharedNetworks, &network("shared"))),
        ["shared"]
    );
    assert!(fixture.set(Part::Networks, &network("edited")).is_empty());
    fixture.texts.insert(Part::SharedNetworks, Text::Absent);
    assert_eq!(names(&fixture.reader.read(&fixture.texts)), ["edited"]);
}

#[test]
fn an_invalid_shared_config_does_not_freeze_the_own_one() {
    let mut fixture = Fixture::new();
    fixture.reader.places.insert(Part::Shared, "shared".into());
    fixture.set(Part::Shared, "enableTracing: false\n");
    fixture.set(Part::Mesh, "trustDomain: first\n");
    for bad in ["enableTracing: [\n", "enableTracing: maybe\n"] {
        fixture.set(Part::Shared, bad);
        let changes = fixture.set(Part::Mesh, &format!("trustDomain: d{}\n", bad.len()));
        let config = mesh_config(&changes);
        assert_eq!(config.trust_domain, format!("d{}", bad.len()));
        assert!(!config.enable_tracing, "the last valid shared config stays");
    }
    let reported = fixture.reported.lock().unwrap().clone();
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(
        reported.iter().all(|report| report.starts_with("shared: ")),
        "{reported:?}"
    );
    let changes = fixture.set(Part::Shared, "enableTracing: true\n");
    assert!(mesh_config(&changes).enable_tracing);
}

#[test]
fn an_invalid_document_keeps_the_last_valid_one() {
    let mut fixture = Fixture::new();
    fixture.set(Part::Mesh, "trustDomain: good\n");
    let networks = "networks: {n: {endpoints: [{fromRegistry: c}]}}\n";
    assert_eq!(fixture.set(Part::Networks, networks).len(), 1);
    for bad in ["trustDomain: [\n", "enableTracing: maybe\n", "enableTracing: maybe\n"] {
        assert!(fixture.set(Part::Mesh, bad).is_empty());
    }
    assert!(
        fixture
            .set(Part::Networks, "networks: {n: {endpoints: [{fromCidr: x}]}}\n")
            .is_empty()
    );
    let reported = fixture.reported.lock().unwrap().clone();
    assert_eq!(reported.len(), 3, "{reported:?}");
    assert!(
        reported[0].starts_with("here: MeshConfig istio-system/istio: "),
        "{reported:?}"
    );
    let changes = fixture.set(Part::Mesh, "trustDomain: new\n");
    assert_eq!(mesh_config(&changes).trust_domain, "new");
    fixture.texts.insert(Part::Networks, Text::Absent);
    assert_eq!(
        fixture.reader.read(&fixture.texts).len(),
        1,
        "deleted networks are removed"
    );
}

#[test]
fn of_invalid_discovery_selectors_the_last_valid_ones_stay() {
    let mut fixture = Fixture::new();
    let selecting = "discoverySelectors: [{matchLabels: {env: x}}]\n";
    let selectors = |changes: &[Change]| mesh_config(changes).discovery_selectors.clone();
    let first = selectors(&fixture.set(Part::Mesh, selecting));
    assert_eq!(first.len(), 1);
    for domain in ["edited", "again"] {
        let invalid = format!("trustDomain: {domain}\ndiscoverySelectors: [{{matchLabels: {{env: a b}}}}]\n");
        let changes = fixture.set(Part::Mesh, &invalid);
        assert_eq!(mesh_config(&changes).trust_domain, domain);
        assert_eq!(selectors(&changes), first);
    }
    assert!(selectors(&fixture.set(Part::Mesh, "trustDomain: third\n")).is_empty());
}

#[test]
fn without_a_valid_document_the_defaults_apply() {
    let mut fixture = Fixture::new();
    let changes = fixture.set(Part::Mesh, "enableTracing: maybe\n");
    assert!(mesh_config(&changes).enable_tracing);
    assert_eq!(fixture.reported.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_config_map_is_absent_only_after_a_successful_list() {
    let (sender, events) = mpsc::channel(4);
    let (out, mut texts) = mpsc::channel(8);
    let tasks = crate::task::Tasks::default();
    tasks.spawn("map", follow_map(events, vec![Part::Mesh, Part::Networks], out));
    assert!(texts.try_recv().is_err());
    sender.send(WatchEvent::Restarted(vec![])).await.unwrap();
    assert_eq!(texts.recv().await, Some((Part::Mesh, Text::Absent)));
    assert_eq!(texts.recv().await, Some((Part::Networks, Text::Absent)));
    let value = serde_json::json!({"metadata": {"name": "istio"}, "data": {"mesh": "a: b"}});
    let object = crate::kube::Object::from_value(value).unwrap();
    sender.send(WatchEvent::Applied(object.clone())).await.unwrap();
    assert_eq!(texts.recv().await, Some((Part::Mesh, Text::Is("a: b".into()))));
    assert_eq!(texts.recv().await, Some((Part::Networks, Text::Absent)));
    sender.send(WatchEvent::Deleted(object)).await.unwrap();
    assert_eq!(texts.recv().await, Some((Part::Mesh, Text::Absent)));
}
