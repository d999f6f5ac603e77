use std::{convert::Infallible, sync::Mutex, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::Frame;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::{
    api::Diagnostic,
    environment::Environment,
    ingest::{diagnostics::Report, source::RunningSource},
    kube::health::WatchMetrics,
    model::Change,
    settings::{DiscoveryFlags, Settings},
};

/// A small API server: lists that can be set, watches to which lines can be sent. A list that is not set is not
/// answered.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    lists: BTreeMap<String, Value>,
    /// Paths whose lists are refused.
    forbidden: BTreeSet<String>,
    watches: BTreeMap<String, mpsc::Sender<Result<Frame<Bytes>, Infallible>>>,
}

const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const SIDECARS: &str = "/apis/networking.istio.io/v1/sidecars";
const DISCOVERY: &str = "/apis/networking.istio.io/v1";
const MESH: &str = "/api/v1/namespaces/istio-system/configmaps";

impl Server {
    fn set(&self, path: &str, items: Value) {
        let list = json!({"metadata": {"resourceVersion": "1"}, "items": items});
        let mut state = self.0.lock().unwrap();
        state.forbidden.remove(path);
        state.lists.insert(path.to_owned(), list);
    }

    fn forbid(&self, path: &str) {
        self.0.lock().unwrap().forbidden.insert(path.to_owned());
    }

    fn serves(&self, path: &str, plurals: &[&str]) {
        let resource =
            |plural: &&str| json!({"name": plural, "kind": "", "namespaced": true, "singularName": "", "verbs": []});
        let resources: Vec<Value> = plurals.iter().map(resource).collect();
        let list = json!({"kind": "APIResourceList", "groupVersion": "g/v1", "resources": resources});
        self.0.lock().unwrap().lists.insert(path.to_owned(), list);
    }

    async fn event(&self, path: &str, kind: &str, object: Value) {
        let sender = loop {
            if let Some(sender) = self.0.lock().unwrap().watches.get(path) {
                break sender.clone();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        sender.send(Ok(Frame::data(line.into()))).await.unwrap();
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<BoxBody<Bytes, Infallible>>, Infallible> {
        let (path, query) = (
            request.uri().path().to_owned(),
            request.uri().query().unwrap_or_default(),
        );
        if query.contains("watch=true") {
            let (sender, receiver) = mpsc::channel(4);
            self.0.lock().unwrap().watches.insert(path, sender);
            return Ok(Response::new(BodyExt::boxed(StreamBody::new(ReceiverStream::new(
                receiver,
            )))));
        }
        loop {
            if self.0.lock().unwrap().forbidden.contains(&path) {
                let body = json!({"code": 403, "message": "forbidden"}).to_string();
                let mut response = Response::new(Full::new(Bytes::from(body)).boxed());
                *response.status_mut() = http::StatusCode::FORBIDDEN;
                return Ok(response);
            }
            if let Some(list) = self.0.lock().unwrap().lists.get(&path) {
                return Ok(Response::new(Full::new(Bytes::from(list.to_string())).boxed()));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn client(&self) -> Client {
        let server = self.clone();
        Client::new(
            tower::service_fn(move |request| server.clone().answer(request)),
            "default",
        )
    }
}

/// A source that does not run yet, and its inputs.
struct Idle {
    source: ClusterSource,
    server: Server,
    filters: watch::Sender<Option<Filters>>,
    environment: Arc<Environment>,
    reported: Arc<Mutex<Vec<String>>>,
}

impl Idle {
    /// A config cluster without Ingresses, of whose custom kinds Sidecars are read.
    fn new(config_kinds: bool) -> Self {
        Self::of_role(Role::Config, config_kinds)
    }

    fn of_role(role: Role, config_kinds: bool) -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            flags: DiscoveryFlags,
        }
        let settings = Settings {
            flags: <Line as clap::Parser>::parse_from(["istiod"]).flags,
            variables: BTreeMap::new(),
        };
        let environment = Arc::new(Environment::new(settings));
        let ignored = [
            "virtualservices",
            "gateways",
            "destinationrules",
            "envoyfilters",
            "proxyconfigs",
            "serviceentries",
            "workloadentries",
            "workloadgroups",
        ];
        let ignored = ignored
            .iter()
            .map(|plural| SmolStr::from(format!("{plural}.networking.istio.io")));
        let others = ["*.security.istio.io", "*.telemetry.istio.io", "*.extensions.istio.io"];
        let rules = Rules {
            system_namespace: "istio-system".into(),
            revision: "default".into(),
            config_kinds,
            ignored: ignored.chain(others.iter().map(SmolStr::new)).collect(),
            ..Rules::default()
        };
        let reported = Arc::<Mutex<Vec<String>>>::default();
        let reports = reported.clone();
        let report: Report =
            Arc::new(move |diagnostic: &Diagnostic| reports.lock().unwrap().push(diagnostic.to_string()));
        let metrics = WatchMetrics::new(&environment.registry).unwrap();
        let shared = Arc::new(IngestContext::new(&environment, rules, report, metrics).unwrap());
        let server = Server::default();
        for path in ["ingresses", "ingressclasses"] {
            server.set(&format!("/apis/networking.k8s.io/v1/{path}"), json!([]));
        }
        let (filters, filters_in) = watch::channel(None);
        let settings = ClusterSettings {
            id: ClusterId::new_static("c"),
            client: server.client(),
            role,
            filters: filters_in,
        };
        Self {
            source: ClusterSource::new(settings, &shared),
            server,
            filters,
            environment,
            reported,
        }
    }
}

struct Fixture {
    server: Server,
    filters: watch::Sender<Option<Filters>>,
    changes: mpsc::Receiver<Vec<Change>>,
    state: watch::Receiver<SyncState>,
    running: RunningSource,
    reported: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    fn new(config_kinds: bool) -> Self {
        Self::of(Idle::new(config_kinds))
    }

    /// A remote cluster without objects, of which all lists but the mesh config are known.
    fn remote() -> Self {
        let fixture = Self::of(Idle::of_role(Role::Remote, false));
        for path in ["namespaces", "nodes", "pods", "secrets", "services"] {
            fixture.server.set(&format!("/api/v1/{path}"), json!([]));
        }
        fixture
            .server
            .set("/apis/discovery.k8s.io/v1/endpointslices", json!([]));
        fixture.filters.send_replace(Some(Filters::default()));
        fixture
    }

    fn of(idle: Idle) -> Self {
        let (changes_out, changes) = mpsc::channel(8);
        Self {
            state: idle.source.state.subscribe(),
            running: RunningSource::start(idle.source, &idle.environment.tasks, changes_out),
            server: idle.server,
            filters: idle.filters,
            changes,
            reported: idle.reported,
        }
    }

    /// The next batch: the kinds and how many rows they have, or single changes.
    async fn summary(&mut self) -> Vec<String> {
        let batch = tokio::time::timeout(Duration::from_secs(20), self.changes.recv()).await;
        let describe = |change: &Change| match change {
            Change::Upsert(row) => format!("+{}", row.key()),
            Change::Remove(_, key) => format!("-{key}"),
            Change::Replace(source, rows) => format!("{} {}", source.kind.name(), rows.len()),
            Change::RemoveCluster(_) => "everything".to_owned(),
        };
        batch.unwrap().unwrap().iter().map(describe).collect()
    }

    async fn nothing(&mut self) {
        let more = tokio::time::timeout(Duration::from_millis(100), self.changes.recv()).await;
        assert!(more.is_err(), "{more:?}");
        assert_eq!(*self.state.borrow(), SyncState::Syncing);
    }
}

fn service(name: &str, port: &Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "n", "resourceVersion": "2"}, "spec": {"ports": [{"port": port}]}})
}

#[tokio::test]
async fn a_cluster_is_sent_as_a_whole_and_then_by_changes() {
    let mut fixture = Fixture::new(true);
    for path in [
        "/api/v1/configmaps",
        "/api/v1/namespaces",
        "/api/v1/nodes",
        "/api/v1/pods",
        "/api/v1/secrets",
        "/apis/discovery.k8s.io/v1/endpointslices",
    ] {
        fixture.server.set(path, json!([]));
    }
    fixture.server.set(CRDS, json!([]));
    fixture.filters.send_replace(Some(Filters::default()));
    fixture.nothing().await;
    fixture.server.set(
        "/api/v1/services",
        json!([service("a", &json!(80)), service("b", &json!("many"))]),
    );
    let whole = [
        "Namespace 0",
        "Node 0",
        "Pod 0",
        "Service 1",
        "EndpointSlice 0",
        "Secret 0",
        "ConfigMap 0",
        "Sidecar 0",
        "Ingress 0",
        "IngressClass 0",
    ];
    assert_eq!(fixture.summary().await, whole);
    fixture
        .state
        .wait_for(|state| *state == SyncState::Synced)
        .await
        .unwrap();
    assert_eq!(fixture.reported.lock().unwrap().len(), 1, "what is wrong with b");
    // An object that becomes invalid keeps its last valid form; a new version alone is not a change.
    let services = "/api/v1/services";
    fixture
        .server
        .event(services, "MODIFIED", service("a", &json!("many")))
        .await;
    fixture
        .server
        .event(services, "MODIFIED", service("a", &json!(80)))
        .await;
    fixture
        .server
        .event(services, "MODIFIED", service("b", &json!(81)))
        .await;
    assert_eq!(fixture.summary().await, ["+n/b"]);
    fixture
        .server
        .event(services, "DELETED", service("a", &json!(80)))
        .await;
    assert_eq!(fixture.summary().await, ["-n/a"]);
    // A kind that appears and disappears.
    let sidecar = json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"egress": [{"hosts": ["*/*"]}]}});
    fixture.server.serves(DISCOVERY, &["sidecars"]);
    fixture.server.set(SIDECARS, json!([sidecar]));
    let definition = json!({"metadata": {"name": "sidecars.networking.istio.io"}});
    fixture.server.event(CRDS, "ADDED", definition.clone()).await;
    assert_eq!(fixture.summary().await, ["+n/s"]);
    fixture.server.event(CRDS, "DELETED", definition).await;
    assert_eq!(fixture.summary().await, ["-n/s"]);
    drop(fixture.running);
    assert!(
        fixture.changes.recv().await.is_none(),
        "nothing comes of a cluster that has ended"
    );
}

#[tokio::test]
async fn an_unsynced_kind_delays_the_whole_cluster() {
    let mut fixture = Fixture::new(true);
    for path in [
        "/api/v1/configmaps",
        "/api/v1/namespaces",
        "/api/v1/nodes",
        "/api/v1/pods",
        "/api/v1/secrets",
        "/api/v1/services",
    ] {
        fixture.server.set(path, json!([]));
    }
    fixture
        .server
        .set("/apis/discovery.k8s.io/v1/endpointslices", json!([]));
    fixture
        .server
        .set(CRDS, json!([{"metadata": {"name": "sidecars.networking.istio.io"}}]));
    fixture.nothing().await;
    fixture.filters.send_replace(Some(Filters::default()));
    fixture.nothing().await;
    fixture.server.serves(DISCOVERY, &["sidecars"]);
    fixture.nothing().await;
    fixture.server.set(SIDECARS, json!([]));
    assert_eq!(fixture.summary().await.len(), 10);
}

/// The lists of built-in kinds may arrive between the report of the served kinds and the start of their watches.
#[tokio::test]
async fn a_cluster_is_complete_only_after_its_custom_kinds_were_listed() {
    let idle = Idle::new(true);
    let (changes, _received) = mpsc::channel(8);
    let mut cluster = Cluster::new(idle.source, changes);
    let (served, served_in) = watch::channel(None);
    cluster.served = served_in;
    let mut output = FilterOutput::default();
    idle.filters.send_replace(Some(Filters::default()));
    cluster.update_filters(&mut output);
    cluster.watch(Kind::Service, &cluster.shared.rules.resource(Kind::Service));
    let listed = WatchEvent::Restarted(Vec::new());
    cluster.apply_event(&(Kind::Service, None), listed, &mut output);
    assert!(!cluster.is_complete(), "the served kinds are unknown");

    let resource = cluster.shared.rules.resource(Kind::Sidecar);
    served.send_replace(Some([(Kind::Sidecar, resource)].into()));
    assert!(!cluster.is_complete(), "Sidecars are not watched yet");
    cluster.update_served(&mut output);
    assert!(!cluster.is_complete(), "Sidecars are not listed yet");
    let listed = WatchEvent::Restarted(Vec::new());
    cluster.apply_event(&(Kind::Sidecar, None), listed, &mut output);
    assert!(cluster.is_complete());
}

#[tokio::test]
async fn a_watch_that_ends_is_started_again() {
    let idle = Idle::new(true);
    let (changes, _received) = mpsc::channel(8);
    let mut cluster = Cluster::new(idle.source, changes);
    let key = (Kind::Service, None);
    cluster.watch(Kind::Service, &cluster.shared.rules.resource(Kind::Service));
    // Its sender is gone, as after a panic, and no other watch has events.
    let (_, ended) = mpsc::channel(1);
    cluster.events.insert(key.clone(), events_of(ended));
    let Step::Events(events) = cluster.next().await else {
        panic!("the end of the watch is not noticed");
    };
    cluster.apply_events(events, &mut FilterOutput::default());
    assert!(!cluster.events.contains_key(&key));
    cluster.restart_ended_watches();
    assert!(cluster.events.contains_key(&key));
}

#[tokio::test]
async fn a_cluster_without_custom_kinds_is_read_as_well() {
    let mut fixture = Fixture::new(false);
    for path in ["configmaps", "namespaces", "nodes", "pods", "secrets", "services"] {
        fixture.server.set(&format!("/api/v1/{path}"), json!([]));
    }
    fixture
        .server
        .set("/apis/discovery.k8s.io/v1/endpointslices", json!([]));
    fixture.filters.send_replace(Some(Filters::default()));
    assert_eq!(fixture.summary().await.len(), 7);
    fixture
        .server
        .event("/api/v1/services", "ADDED", service("a", &json!(80)))
        .await;
    assert_eq!(fixture.summary().await, ["+n/a"]);
}

#[tokio::test]
async fn a_kind_is_read_in_the_best_version_that_is_served() {
    let mut fixture = Fixture::new(true);
    for path in ["configmaps", "namespaces", "nodes", "pods", "secrets", "services"] {
        fixture.server.set(&format!("/api/v1/{path}"), json!([]));
    }
    fixture
        .server
        .set("/apis/discovery.k8s.io/v1/endpointslices", json!([]));
    fixture.filters.send_replace(Some(Filters::default()));
    let definition = json!({"metadata": {"name": "sidecars.networking.istio.io"}});
    let sidecar =
        |name| json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"egress": [{"hosts": ["*/*"]}]}});
    fixture.server.serves(DISCOVERY, &[]);
    fixture
        .server
        .serves("/apis/networking.istio.io/v1beta1", &["sidecars"]);
    fixture
        .server
        .set("/apis/networking.istio.io/v1beta1/sidecars", json!([sidecar("a")]));
    fixture.server.set(CRDS, json!([definition]));
    assert!(fixture.summary().await.contains(&"Sidecar 1".to_owned()));
    // A new version is read in place of the old one, and nothing is lost in between.
    fixture.server.serves(DISCOVERY, &["sidecars"]);
    fixture.server.set(SIDECARS, json!([sidecar("a"), sidecar("b")]));
    fixture.server.event(CRDS, "MODIFIED", definition).await;
    assert_eq!(fixture.summary().await, ["+n/b"]);
}

fn mesh_config(text: &str) -> Value {
    json!({"metadata": {"name": "istio", "namespace": "istio-system"}, "data": {"mesh": text}})
}

/// Returns the summary of a remote cluster without objects.
fn remote_batch(mesh_configs: usize) -> Vec<String> {
    let others = ["Namespace", "Node", "Pod", "Service", "EndpointSlice", "Secret"].map(|kind| format!("{kind} 0"));
    [format!("MeshConfig {mesh_configs}")]
        .into_iter()
        .chain(others)
        .collect()
}

#[tokio::test]
async fn the_mesh_config_of_a_remote_cluster_is_in_its_first_batch() {
    let mut fixture = Fixture::remote();
    fixture.nothing().await;
    fixture.server.set(MESH, json!([mesh_config("trustDomain: td2\n")]));
    assert_eq!(fixture.summary().await, remote_batch(1));
    // Only the trust domain counts, and an invalid one keeps the last valid one.
    for text in [
        "trustDomain: no domain!",
        "trustDomain: [",
        "enableTracing: maybe\ntrustDomain: td2",
    ] {
        fixture.server.event(MESH, "MODIFIED", mesh_config(text)).await;
    }
    fixture
        .server
        .event(MESH, "MODIFIED", mesh_config("trustDomain: td3"))
        .await;
    assert_eq!(fixture.summary().await, ["+istio-system/istio"]);
    let reported = fixture.reported.lock().unwrap().clone();
    let place = "cluster c, ConfigMap istio-system/istio, key mesh: MeshConfig istio-system/istio: ";
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert_eq!(reported[0], format!("{place}trustDomain: is not a trust domain"));
    assert!(reported[1].starts_with(place), "{reported:?}");
    fixture
        .server
        .event(MESH, "DELETED", mesh_config("trustDomain: td3"))
        .await;
    assert_eq!(fixture.summary().await, ["-istio-system/istio"]);
}

/// The role of an earlier release, to which the right is added later.
#[tokio::test]
async fn a_mesh_config_that_must_not_be_read_does_not_delay_a_remote_cluster() {
    for (items, count) in [(json!([mesh_config("trustDomain: td2")]), 1), (json!([]), 0)] {
        let mut fixture = Fixture::remote();
        fixture.server.forbid(MESH);
        // Unknown is not empty.
        assert_eq!(fixture.summary().await, remote_batch(0)[1..]);
        fixture.server.set(MESH, items);
        assert_eq!(fixture.summary().await, [format!("MeshConfig {count}")]);
    }
}

/// A role without Secrets, to which the right is added later.
#[tokio::test]
async fn secrets_that_must_not_be_read_do_not_delay_a_remote_cluster() {
    let mut fixture = Fixture::remote();
    fixture.server.forbid("/api/v1/secrets");
    fixture.server.set(MESH, json!([]));
    let whole = remote_batch(0);
    assert_eq!(fixture.summary().await, whole[..whole.len() - 1]);
    fixture.server.set("/api/v1/secrets", json!([]));
    assert_eq!(fixture.summary().await, ["Secret 0"]);
}

/// Both lists may be in the queue of the watch before the first one is processed.
#[tokio::test]
async fn a_refused_list_is_not_an_empty_one_when_another_follows() {
    let idle = Idle::of_role(Role::Remote, false);
    let server = idle.server.clone();
    server.forbid(MESH);
    let (changes, _received) = mpsc::channel(8);
    let mut cluster = Cluster::new(idle.source, changes);
    cluster.watch(Kind::MeshConfig, &cluster.shared.rules.resource(Kind::MeshConfig));
    let (key, refused) = cluster.events.next().await.expect("a watch");
    server.set(MESH, json!([mesh_config("trustDomain: td2")]));
    let (_, listed) = cluster.events.next().await.expect("a watch");
    assert!(cluster.watching[&key].health.has_listed());
    let mut output = FilterOutput::default();
    cluster.apply_event(&key, refused.expect("an event"), &mut output);
    assert!(cluster.is_refused(Kind::MeshConfig), "unknown is not empty");
    cluster.apply_event(&key, listed.expect("an event"), &mut output);
    assert!(!cluster.is_refused(Kind::MeshConfig));
}

#[test]
fn resource_versions_distinguish_only_workload_groups() {
    let row = |kind: Kind, version: &str| {
        let value = json!({"metadata": {"name": "a", "namespace": "n", "resourceVersion": version},
            "spec": {"template": {"serviceAccount": "a"}}});
        let object = Object::from_value(value).expect("an object");
        format!("{:?}", item(kind, &"c1".into(), object).row.expect("a row"))
    };
    assert_ne!(row(Kind::WorkloadGroup, "1"), row(Kind::WorkloadGroup, "2"));
    assert_eq!(row(Kind::Service, "1"), row(Kind::Service, "2"));
}

/// Statuses of plugins are written by this control plane. A push for each of them would let agents load the module
/// again.
#[test]
fn statuses_of_plugins_do_not_change_their_versions() {
    let row = |kind: Kind, version: &str, generation: u32, note: &str| {
        let wasm = json!({"url": "oci://example.com/a"});
        let spec = match kind {
            Kind::WasmPlugin => wasm,
            _ => json!({ "wasm": wasm }),
        };
        let metadata = json!({"name": "a", "namespace": "n", "uid": "u", "resourceVersion": version,
            "generation": generation, "annotations": {"note": note}});
        let object = Object::from_value(json!({"metadata": metadata, "spec": spec})).expect("an object");
        format!("{:?}", item(kind, &"c1".into(), object).row.expect("a row"))
    };
    // Behind the metadata whose changes are seen anyway.
    let version = |row: &str| row.split_once("resource_version").expect("a version").1.to_owned();
    for kind in [Kind::WasmPlugin, Kind::TrafficExtension] {
        let first = row(kind, "1", 1, "x");
        assert_eq!(row(kind, "2", 1, "x"), first);
        for changed in [row(kind, "2", 2, "x"), row(kind, "2", 1, "y")] {
            assert_ne!(version(&changed), version(&first));
        }
    }
}

/// Takes events until this is the newest version of Services.
async fn until_received(cluster: &mut Cluster, version: u64) {
    let taking = async {
        while cluster.received.get(&(Kind::Service, None)) != Some(&version) {
            if let Step::Events(events) = cluster.next().await {
                cluster.apply_events(events, &mut FilterOutput::default());
            }
        }
    };
    let taken = tokio::time::timeout(Duration::from_secs(20), taking).await;
    assert!(taken.is_ok(), "not received: {version}");
}

#[tokio::test]
async fn versions_of_a_restored_api_server_go_back() {
    const SERVICES: &str = "/api/v1/services";
    let services = |version: &str| json!([{"metadata": {"name": "a", "namespace": "n", "resourceVersion": version}}]);
    let idle = Idle::new(false);
    idle.server.set(SERVICES, services("9"));
    let (changes, _changes) = mpsc::channel(1);
    let mut cluster = Cluster::new(idle.source, changes);
    let resource = cluster.shared.rules.resource(Kind::Service);
    cluster.watch(Kind::Service, &resource);
    until_received(&mut cluster, 9).await;
    idle.server.set(SERVICES, services("4"));
    idle.server.event(SERVICES, "ERROR", json!({"code": 410})).await;
    until_received(&mut cluster, 4).await;
}
