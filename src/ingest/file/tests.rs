use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::{Arc, Mutex},
};

use super::*;

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 80}]}\n";

/// A folder, what it reported, and its source once it is open.
struct Fixture {
    folder: tempfile::TempDir,
    reported: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    fn new(files: &[(&str, &str)]) -> Self {
        let fixture = Self {
            folder: tempfile::tempdir().unwrap(),
            reported: Arc::default(),
        };
        for (name, text) in files {
            fixture.write(name, text);
        }
        fixture
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    fn settings(&self) -> FileSettings {
        let cluster = ClusterId::new_static("Kubernetes");
        FileSettings {
            folder: Some(self.path().to_owned()),
            only: None,
            mesh_key: ObjectKey::new(&cluster, "istio-system", "istio"),
            cluster,
            objects: Objects::All,
            mesh_file: None,
            networks_file: None,
        }
    }

    fn source(&self, settings: FileSettings) -> FileSource {
        let reported = self.reported.clone();
        let report = move |diagnostic: &Diagnostic| reported.lock().unwrap().push(diagnostic.to_string());
        FileSource::open(settings, Arc::new(report)).unwrap()
    }

    /// A source, and the changes of the initial state.
    fn open(&self, settings: FileSettings) -> (FileSource, Vec<Change>) {
        let mut source = self.source(settings);
        let initial = std::mem::take(&mut source.initial);
        (source, initial)
    }

    fn reported(&self) -> Vec<String> {
        std::mem::take(&mut self.reported.lock().unwrap())
    }
}

fn summary(changes: &[Change]) -> Vec<String> {
    let describe = |change: &Change| match change {
        Change::Replace(source, rows) => {
            let names: Vec<_> = rows.iter().map(|row| row.key().to_string()).collect();
            format!("{} {}: {}", source.cluster, source.kind.name(), names.join(" "))
        }
        Change::Upsert(row) => format!("{} {}: +{}", row.key().cluster, row.kind().name(), row.key()),
        Change::Remove(kind, key) => format!("{} {}: -{key}", key.cluster, kind.name()),
        Change::RemoveCluster(cluster) => cluster.to_string(),
    };
    changes.iter().map(describe).collect()
}

#[test]
fn the_first_scan_sends_everything_and_later_ones_only_changes() {
    let fixture = Fixture::new(&[
        ("kube.yaml", SERVICE),
        ("kube-west.yaml", SERVICE),
        ("env.yaml", "A: b"),
    ]);
    let (mut source, changes) = fixture.open(fixture.settings());
    let mesh = "Kubernetes MeshConfig: istio-system/istio";
    assert_eq!(
        summary(&changes),
        [mesh, "Kubernetes Service: default/a", "west Service: default/a"]
    );
    assert_eq!(source.env()["A"], "b");
    assert!(source.look(&Noticed::any()).is_empty());
    fixture.write("kube.yaml", &format!("# A comment is not a change.\n{SERVICE}"));
    assert!(source.look(&Noticed::default()).is_empty());
    fixture.write("mesh.yaml", "enableTracing: true\n");
    assert!(
        source.look(&Noticed::any()).is_empty(),
        "an explicit default is not a change"
    );
    fixture.write("mesh.yaml", "enableTracing: false\n");
    assert_eq!(summary(&source.look(&Noticed::any())), [mesh]);
    fs::remove_file(fixture.path().join("kube-west.yaml")).unwrap();
    assert_eq!(summary(&source.look(&Noticed::default())), ["west Service: "]);
    assert!(fixture.reported().is_empty());
}

#[test]
fn a_bad_edit_is_reported_once_and_changes_nothing() {
    let fixture = Fixture::new(&[("kube.yaml", SERVICE), ("mesh.yaml", "enableTracing: false\n")]);
    let (mut source, _) = fixture.open(fixture.settings());
    fixture.write("kube.yaml", "a: [\n");
    fixture.write("mesh.yaml", "enableTracing: maybe\n");
    fixture.write("large.yaml", &" ".repeat(MAX_FILE_BYTES + 1));
    assert!(source.look(&Noticed::any()).is_empty() && source.look(&Noticed::any()).is_empty());
    let reported = fixture.reported();
    assert_eq!(reported.len(), 3, "{reported:?}");
    assert!(
        reported
            .iter()
            .any(|line| line.starts_with("mesh.yaml:1: MeshConfig istio: enableTracing: ")),
        "{reported:?}"
    );
    assert!(
        reported.iter().any(|line| line.contains("more than 33554432 bytes")),
        "{reported:?}"
    );
    fixture.write("kube.yaml", &SERVICE.replace("80", "81"));
    assert_eq!(
        summary(&source.look(&Noticed::any())),
        ["Kubernetes Service: +default/a"]
    );
    fixture.write("env.yaml", "PILOT_HTTP10: true");
    assert!(source.look(&Noticed::any()).is_empty() && source.look(&Noticed::any()).is_empty());
    assert_eq!(fixture.reported().len(), 1);
}

#[test]
fn a_folder_with_kubernetes_contributes_only_config() {
    let sidecar =
        "apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: s}\nspec: {egress: [{hosts: ['*/*']}]}\n";
    let fixture = Fixture::new(&[
        ("a.yaml", &format!("{SERVICE}---\n{sidecar}")),
        ("kube-west.yaml", SERVICE),
    ]);
    fixture.write("mesh.yaml", "trustDomain: from.folder");
    fixture.write("other", "trustDomain: from.flag");
    let settings = FileSettings {
        objects: Objects::IstioOnly,
        mesh_file: Some(fixture.path().join("other")),
        ..fixture.settings()
    };
    let (mut source, changes) = fixture.open(settings);
    let want = [
        "Kubernetes MeshConfig: istio-system/istio",
        "Kubernetes Sidecar: default/s",
    ];
    assert_eq!(summary(&changes), want);
    let Change::Replace(_, rows) = &changes[0] else {
        panic!()
    };
    let Row::MeshConfig(config) = &rows[0] else { panic!() };
    assert_eq!(config.spec.trust_domain, "from.flag");
    fixture.write("other", "trustDomain: new");
    assert_eq!(summary(&source.look(&Noticed::default())), want[..1]);
}

#[test]
fn a_missing_folder_is_an_error() {
    let fixture = Fixture::new(&[]);
    let settings = FileSettings {
        folder: Some(fixture.path().join("none")),
        ..fixture.settings()
    };
    let error = FileSource::open(settings, Arc::new(|_: &Diagnostic| {})).err().unwrap();
    assert!(error.to_string().contains("--configDir"));
}

/// Follows a folder while edits are made to it; each must arrive before the next is made.
#[tokio::test(flavor = "multi_thread")]
async fn edits_arrive() {
    let fixture = Fixture::new(&[]);
    for version in ["v1", "v2"] {
        fs::create_dir(fixture.path().join(format!("..{version}"))).unwrap();
        let text = SERVICE.replace("name: a", &format!("name: {version}"));
        fs::write(fixture.path().join(format!("..{version}/mounted.yaml")), text).unwrap();
    }
    symlink("..v1", fixture.path().join("..data")).unwrap();
    symlink("..data/mounted.yaml", fixture.path().join("mounted.yaml")).unwrap();
    let source = fixture.source(fixture.settings());
    let (sender, mut changes) = mpsc::channel(4);
    let follow = source.run(sender);
    let edit = async {
        assert_eq!(
            summary(&changes.recv().await.unwrap())[1],
            "Kubernetes Service: default/v1"
        );
        // As the kubelet updates a mounted ConfigMap.
        symlink("..v2", fixture.path().join("..data_tmp")).unwrap();
        fs::rename(fixture.path().join("..data_tmp"), fixture.path().join("..data")).unwrap();
        assert_eq!(
            summary(&changes.recv().await.unwrap()),
            ["Kubernetes Service: +default/v2", "Kubernetes Service: -default/v1"]
        );
        // As editors save.
        fixture.write(".b.yaml.swp", SERVICE);
        fs::rename(fixture.path().join(".b.yaml.swp"), fixture.path().join("b.yaml")).unwrap();
        assert_eq!(
            summary(&changes.recv().await.unwrap()),
            ["Kubernetes Service: +default/a"]
        );
        fixture.write("mesh.yaml", "enableTracing: false");
        assert_eq!(
            summary(&changes.recv().await.unwrap()),
            ["Kubernetes MeshConfig: istio-system/istio"]
        );
        fs::remove_file(fixture.path().join("b.yaml")).unwrap();
        assert_eq!(
            summary(&changes.recv().await.unwrap()),
            ["Kubernetes Service: -default/a"]
        );
    };
    let finished = tokio::time::timeout(Duration::from_mins(1), async {
        tokio::select! {
            () = follow => panic!("it ended by itself"),
            () = edit => {}
        }
    });
    finished.await.unwrap();
}

/// The rows that changes lead to.
#[derive(Default)]
struct Rows(BTreeMap<(ClusterId, Kind), BTreeMap<ObjectKey, Row>>);

impl Rows {
    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Replace(source, rows) => {
                    let rows = rows.into_iter().map(|row| (row.key().clone(), row)).collect();
                    self.0.insert((source.cluster, source.kind), rows);
                }
                Change::Upsert(row) => {
                    let rows = self.0.entry((row.key().cluster.clone(), row.kind())).or_default();
                    rows.insert(row.key().clone(), row);
                }
                Change::Remove(kind, key) => {
                    let rows = self.0.entry((key.cluster.clone(), kind)).or_default();
                    assert!(rows.remove(&key).is_some(), "{key} is not there");
                }
                Change::RemoveCluster(cluster) => panic!("{cluster} is not removed"),
            }
        }
        self.0.retain(|_, rows| !rows.is_empty());
    }
}

#[test]
fn many_scans_equal_one_scan() {
    let fixture = Fixture::new(&[]);
    let (mut source, changes) = fixture.open(fixture.settings());
    let mut rows = Rows::default();
    rows.apply(changes);
    let mut random = 7_u32;
    let mut below = |bound: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) % bound
    };
    for _ in 0..300 {
        let file = ["a.yaml", "b.yaml", "kube-west.yaml", "mesh.yaml"][below(4) as usize];
        let text = if file == "mesh.yaml" {
            format!("enableTracing: {}\n", below(2) == 0)
        } else {
            // Names are declared in several files, and several times in one. 20 changes at once replace the kind.
            let names = (0..[1, 3, 20][below(3) as usize])
                .map(|_| below(30))
                .collect::<Vec<_>>();
            let service = |name: &u32| SERVICE.replace("name: a", &format!("name: s{name}"));
            let services = names
                .iter()
                .map(|name| service(name).replace("80", &format!("8{}", name % 2)));
            services.collect::<Vec<_>>().join("---\n")
        };
        if below(5) == 0 {
            let _ = fs::remove_file(fixture.path().join(file));
        } else {
            fixture.write(file, &text);
        }
        rows.apply(source.look(&Noticed::any()));
        let (fresh, changes) = fixture.open(fixture.settings());
        let mut expected = Rows::default();
        expected.apply(changes);
        assert_eq!(rows.0, expected.0);
        assert_eq!(source.duplicates, fresh.duplicates);
    }
}

#[test]
fn objects_come_and_go_with_the_labels_of_their_namespace() {
    let namespace =
        |labels: &str| format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: default, labels: {labels}}}\n");
    let gateway = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: g, labels: \
                   {topology.istio.io/network: n2}}\nspec: {gatewayClassName: istio-remote, listeners: []}\n";
    let fixture = Fixture::new(&[
        ("kube.yaml", SERVICE),
        ("gateway.yaml", gateway),
        ("mesh.yaml", "discoverySelectors: [{matchLabels: {env: x}}]"),
        ("namespace.yaml", &namespace("{}")),
    ]);
    let (mut source, changes) = fixture.open(fixture.settings());
    let service = "Kubernetes Service: default/a".to_owned();
    let gateway = "Kubernetes HiddenGateway: default/g".to_owned();
    let first = summary(&changes);
    assert!(!first.contains(&service) && first.contains(&gateway), "{first:?}");
    fixture.write("namespace.yaml", &namespace("{env: x}"));
    let selected = summary(&source.look(&Noticed::any()));
    assert!(selected.contains(&service) && selected.contains(&"Kubernetes HiddenGateway: ".to_owned()));
    fixture.write("namespace.yaml", &namespace("{env: y}"));
    let hidden = summary(&source.look(&Noticed::any()));
    assert!(hidden.contains(&"Kubernetes Service: ".to_owned()) && hidden.contains(&gateway));
}

#[test]
fn subfolders_are_read_and_watched() {
    let fixture = Fixture::new(&[("kube.yaml", SERVICE)]);
    let inner = fixture.path().join("apps/web");
    fs::create_dir_all(&inner).unwrap();
    fs::write(inner.join("mesh.yaml"), SERVICE.replace("name: a", "name: b")).unwrap();
    fs::create_dir(fixture.path().join(".git")).unwrap();
    fs::write(
        fixture.path().join(".git/x.yaml"),
        SERVICE.replace("name: a", "name: hidden"),
    )
    .unwrap();
    // A link to a folder could lead around in a circle.
    symlink(fixture.path(), inner.join("circle")).unwrap();
    let (mut source, changes) = fixture.open(fixture.settings());
    assert!(summary(&changes).contains(&"Kubernetes Service: default/a default/b".to_owned()));
    assert!(source.watched_folders().contains(&inner));
    fs::write(inner.join("more.yaml"), SERVICE.replace("name: a", "name: c")).unwrap();
    assert_eq!(
        summary(&source.look(&Noticed::default())),
        ["Kubernetes Service: +default/c"]
    );
    fs::remove_dir_all(fixture.path().join("apps")).unwrap();
    assert_eq!(
        summary(&source.look(&Noticed::default())),
        ["Kubernetes Service: -default/b", "Kubernetes Service: -default/c"]
    );
    assert!(fixture.reported().is_empty());
}

#[test]
fn unknown_kinds_are_reported_once_for_each_file() {
    let deployment = "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: NAME}\n";
    let two = deployment.replace("NAME", "a") + &deployment.replace("NAME", "b");
    let fixture = Fixture::new(&[("kube.yaml", &two), ("more.yaml", &two)]);
    fixture.open(fixture.settings());
    let reported = fixture.reported();
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(
        reported[0].contains("kube.yaml:1: objects of kind Deployment (apps/v1) are not read"),
        "{reported:?}"
    );
}
