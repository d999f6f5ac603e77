use std::fmt::Write;

use super::*;

fn folder(files: &[(&str, &str)]) -> Folder {
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec()))
        .collect();
    read(&files, &cluster(), &mesh_key())
}

fn cluster() -> ClusterId {
    ClusterId::new_static("Kubernetes")
}

fn mesh_key() -> ObjectKey {
    ObjectKey::new(&cluster(), "istio-system", "istio")
}

fn names(folder: &Folder, cluster: &str) -> Vec<String> {
    assert!(folder.rows.contains_key(cluster), "{:?}", messages(folder));
    folder.rows[cluster]
        .iter()
        .map(|row| format!("{} {}", row.kind().name(), row.key()))
        .collect()
}

fn messages(folder: &Folder) -> Vec<String> {
    folder.diagnostics.iter().map(ToString::to_string).collect()
}

const SIDECAR: &str =
    "apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: a}\nspec: {egress: [{hosts: ['*/*']}]}\n";

#[test]
fn file_names_decide_roles() {
    assert_eq!(Role::of("kube.yaml"), Role::Objects(None));
    assert_eq!(Role::of("kube-west.yml"), Role::Objects(Some(ClusterId::new("west"))));
    assert_eq!(Role::of("mesh.yaml"), Role::Mesh);
    for other in [".hidden.yaml", "notes.txt", "scenario.yaml", "a.yaml~", "yaml"] {
        assert_eq!(Role::of(other), Role::Ignored, "{other}");
        assert_eq!(Role::of(&format!("apps/web/{other}")), Role::Ignored, "{other}");
    }
    // Files in subfolders contain objects only.
    for name in [
        "mesh.yaml",
        "meshnetworks.yaml",
        "env.yaml",
        "proxies.yaml",
        "kube.yaml",
    ] {
        assert_eq!(Role::of(&format!("apps/{name}")), Role::Objects(None), "{name}");
    }
    let west = Role::Objects(Some(ClusterId::new("west")));
    assert_eq!(Role::of("apps/kube-west.yaml"), west);
}

#[test]
fn folder_is_parsed() {
    let folder = folder(&[
        ("config.yaml", SIDECAR),
        (
            "kube.yaml",
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\napiVersion: apps/v1\nkind: Deployment\n",
        ),
        (
            "kube-west.yaml",
            &format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: off, labels: {{version: 1.10, n: 7}}}}\n---\n{SIDECAR}"
            ),
        ),
        ("mesh.yaml", "enableAutoMtls: false\ndefaultConfig: {meshId: m}\n"),
        (
            "meshnetworks.yaml",
            "networks: {n1: {endpoints: [{fromRegistry: west}]}}\n",
        ),
        (
            "env.yaml",
            "PILOT_HTTP10: 'true'\nMAX_CONNECTIONS_PER_SOCKET_EVENT_LOOP: 3\n",
        ),
        ("proxies.yaml", "proxies: [{name: p}]\n"),
        ("scenario.yaml", "description: [\n"),
    ]);
    assert_eq!(
        names(&folder, "Kubernetes"),
        [
            "Namespace a",
            "Sidecar default/a",
            "MeshConfig istio-system/istio",
            "MeshNetworks istio-system/istio"
        ]
    );
    assert_eq!(names(&folder, "west"), ["Node false"], "{:?}", messages(&folder));
    assert_eq!(
        messages(&folder),
        [
            "kube-west.yaml:4: Sidecar default/a: config counts only in the config cluster",
            "kube.yaml:4: objects of kind Deployment (apps/v1) are not read"
        ]
    );
    let Row::Node(node) = &folder.rows["west"][0] else {
        panic!()
    };
    assert_eq!(
        (
            node.meta.labels.get("version").map(SmolStr::as_str),
            node.meta.labels.get("n").map(SmolStr::as_str)
        ),
        (Some("1.1"), Some("7"))
    );
    assert_eq!(folder.env["MAX_CONNECTIONS_PER_SOCKET_EVENT_LOOP"], "3");
    assert_eq!(folder.proxies.len(), 1);
    let Row::MeshConfig(config) = &folder.rows["Kubernetes"][2] else {
        panic!()
    };
    let proxy_config = config.spec.default_config.as_ref().unwrap();
    assert_eq!(
        (config.spec.enable_auto_mtls, proxy_config.mesh_id.as_str()),
        (Some(false), "m")
    );
    assert_eq!(proxy_config.status_port, 15020);
}

#[test]
fn problems_are_reported_and_hide_nothing() {
    let folder = folder(&[
        ("a.yaml", &format!("a: 1\n---\nb:\n - c\nd\n---\n{SIDECAR}")),
        (
            "b.yaml",
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: bad}\nspec:\n  http: [{timeout: soon}]\n",
        ),
        (
            "c.yaml",
            "apiVersion: networking.istio.io/v2\nkind: Gateway\nmetadata: {name: g, namespace: x}\n",
        ),
        (
            "d.yaml",
            "apiVersion: networking.istio.io/v1\nkind: Gatewey\nmetadata: {name: g}\n",
        ),
    ]);
    assert_eq!(
        names(&folder, "Kubernetes"),
        ["Sidecar default/a", "MeshConfig istio-system/istio"]
    );
    let messages = messages(&folder);
    assert_eq!(messages[0], "a.yaml:1: the document has no apiVersion and kind");
    assert!(messages[1].starts_with("a.yaml:"), "{messages:?}");
    assert!(
        messages[2].starts_with("b.yaml:1: VirtualService default/bad: spec.http[0].timeout: "),
        "{messages:?}"
    );
    assert!(messages[3].starts_with("c.yaml:1: Gateway x/g: apiVersion: networking.istio.io/v2 is not served"));
    assert!(messages[4].contains("has no kind Gatewey"));
}

#[test]
fn last_file_wins_for_duplicate_objects() {
    let other = SIDECAR.replace("*/*", "./*");
    let folder = folder(&[("b.yaml", SIDECAR), ("a.yaml", &other)]);
    let Row::Sidecar(sidecar) = &folder.rows["Kubernetes"][0] else {
        panic!()
    };
    assert_eq!(sidecar.spec.egress[0].hosts, ["*/*"]);
    assert_eq!(
        messages(&folder),
        ["b.yaml:1: Sidecar default/a: is declared twice; b.yaml:1 counts, a.yaml:1 does not"]
    );
}

#[test]
fn invalid_edit_keeps_previous_objects() {
    let read = |text: &str| FileContent::read("a.yaml", text.as_bytes(), &cluster());
    let two = format!("{SIDECAR}---\n{}", SIDECAR.replace("name: a", "name: b"));
    let good = read(&two);
    let unreadable = read(&two.replace("kind", "\tkind")).after(&good);
    assert_eq!(unreadable.objects, good.objects);
    assert!(unreadable.unreadable && !unreadable.diagnostics.is_empty());
    let invalid = read(&SIDECAR.replace("egress", "outboundTrafficPolicy")).after(&good);
    assert_eq!(invalid.objects, good.objects[..1]);
    assert_eq!(read(SIDECAR).after(&invalid).diagnostics, []);
}

#[test]
fn only_changed_documents_are_parsed_again() {
    let text = format!("{SIDECAR}---\n{}", SIDECAR.replace("name: a", "name: b"));
    let first = FileContent::read("a.yaml", text.as_bytes(), &cluster());
    let edited = format!("# A line more.\n---\n{}", text.replace("name: a", "name: c"));
    let second = FileContent::read_as(&Role::Objects(None), "a.yaml", edited.as_bytes(), &cluster(), &first);
    let (Row::Sidecar(before), Row::Sidecar(after)) = (&first.objects[1].0, &second.objects[1].0) else {
        panic!()
    };
    assert!(before.ptr_eq(after));
    assert_eq!(
        (second.objects[0].0.key().name.as_str(), second.objects[1].1.as_str()),
        ("c", "a.yaml:7")
    );
}

#[test]
fn lists_yield_their_items() {
    let folder = folder(&[(
        "list.yaml",
        "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- {metadata: {name: b}}\n\
         ---\napiVersion: v1\nkind: NamespaceList\nitems: [{metadata: {name: c}}]\n",
    )]);
    assert_eq!(names(&folder, "Kubernetes")[..2], ["Namespace a", "Namespace c"]);
    assert_eq!(messages(&folder), ["list.yaml:1: items[1] has no apiVersion and kind"]);
}

#[test]
fn a_file_of_20_000_documents_loads() {
    let mut text = String::new();
    let filler = "x".repeat(600);
    for number in 0..10_000 {
        let _ = write!(
            text,
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: service-{number}\n  namespace: n{}\n  annotations: {{note: {filler}}}\n\
             spec:\n  clusterIP: 10.{}.{}.1\n  selector: {{app: service-{number}}}\n  ports:\n  - {{name: http, port: 80, targetPort: 8080}}\n---\n",
            number % 100,
            number / 250,
            number % 250,
        );
        let _ = write!(
            text,
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata:\n  name: service-{number}\n  annotations: {{note: {filler}}}\n\
             spec:\n  hosts: [service-{number}.n{}.svc.cluster.local]\n  http:\n  - route:\n    - destination: {{host: service-{number}}}\n      weight: 100\n---\n",
            number % 100,
        );
    }
    assert!(text.len() > 16_000_000, "{}", text.len());
    let folder = folder(&[("mesh-of-10000.yaml", &text)]);
    assert_eq!(folder.rows["Kubernetes"].len(), 20_001);
    assert!(folder.diagnostics.is_empty(), "{:?}", folder.diagnostics.first());
}

#[test]
fn discovery_selectors_hide_objects_of_other_namespaces() {
    let namespaces = "
apiVersion: v1
kind: Namespace
metadata: {name: a, labels: {env: x}}
---
apiVersion: v1
kind: Namespace
metadata: {name: b}
";
    let in_namespace = |namespace: &str| SIDECAR.replace("name: a", &format!("name: a, namespace: {namespace}"));
    let objects = [in_namespace("a"), in_namespace("b"), in_namespace("unknown")].join("---\n");
    let sidecars = |mesh: &str| {
        let files = [
            ("kube.yaml", namespaces),
            ("config.yaml", objects.as_str()),
            ("mesh.yaml", mesh),
        ];
        let mut names = names(&folder(&files), "Kubernetes");
        names.retain(|name| name.starts_with("Sidecar"));
        names
    };
    assert_eq!(sidecars("{}").len(), 3);
    let selected = sidecars("discoverySelectors: [{matchLabels: {env: x}}]");
    assert_eq!(selected, ["Sidecar a/a"]);
}

#[test]
fn of_invalid_discovery_selectors_the_last_valid_ones_stay() {
    let read = |text: &str, previous: &FileContent| {
        FileContent::read_as(&Role::Mesh, "mesh.yaml", text.as_bytes(), &cluster(), previous).after(previous)
    };
    let selectors = |content: &FileContent| {
        let config = content.mesh_config.as_ref().expect("a mesh config");
        config.discovery_selectors.clone()
    };
    let invalid = "trustDomain: edited\ndiscoverySelectors: [{matchLabels: {env: a b}}]\n";
    let first = read(
        "discoverySelectors: [{matchLabels: {env: x}}]\n",
        &FileContent::default(),
    );
    let edited = read(invalid, &first);
    assert_eq!(selectors(&edited), selectors(&first));
    assert_eq!(
        edited.mesh_config.as_ref().expect("a mesh config").trust_domain,
        "edited"
    );
    assert!(selectors(&read("{}\n", &edited)).is_empty());
    assert!(
        selectors(&read(invalid, &FileContent::default())).is_empty(),
        "all namespaces count at the start"
    );
}
