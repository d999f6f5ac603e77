use std::{any::TypeId, cell::RefCell};

use serde_json::{Value, json};

use super::*;
use crate::{
    api::Kind,
    generate::{fixture, plan::Part, proxy_class::ProxyClassKey, resource::UnknownRoutes},
    model::{Batch, Change, Installation, World, fixture as model},
};

/// A second service.
const MORE: &str = "
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, selector: {app: b}, ports: [{name: http, port: 80}]}
";

/// A world with a store.
struct Harness {
    world: World,
    store: ConfigStore,
    /// The evaluations of the last update.
    evaluated: Evaluations,
    /// The connections that the last update moved.
    moved: Vec<u64>,
}

impl Default for Harness {
    fn default() -> Self {
        Self {
            world: World::new(Installation::default()),
            store: ConfigStore::default(),
            evaluated: Evaluations::default(),
            moved: Vec::new(),
        }
    }
}

/// Runs on the calling thread and records the types of the keys.
#[derive(Default)]
struct Evaluations(RefCell<Vec<TypeId>>);

impl Executor for Evaluations {
    fn map<T: Send + 'static, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        self.0.borrow_mut().extend(items.iter().map(|_| TypeId::of::<T>()));
        Serial.map(items, function)
    }
}

impl Evaluations {
    fn of<T: 'static>(&self) -> usize {
        self.0.borrow().iter().filter(|id| **id == TypeId::of::<T>()).count()
    }
}

impl Harness {
    fn commit(&mut self, batch: Batch) {
        let commit = self.world.commit(batch);
        self.update(&commit.snapshot, &commit.changes, ProxyEvents::default());
    }

    fn connect(&mut self, number: u64, namespace: &str) {
        self.connect_with(number, namespace, &json!({}));
    }

    fn connect_with(&mut self, number: u64, namespace: &str, metadata: &Value) {
        let node = format!("sidecar~10.9.0.{number}~p-{number}.{namespace}~{namespace}.svc.cluster.local");
        let proxy = Arc::new(fixture::client(&node, metadata));
        self.apply(ProxyEvents {
            connected: vec![(ConnectionId(number), proxy)],
            ..ProxyEvents::default()
        });
    }

    fn disconnect(&mut self, number: u64) {
        self.apply(ProxyEvents {
            disconnected: vec![ConnectionId(number)],
            ..ProxyEvents::default()
        });
    }

    fn apply(&mut self, events: ProxyEvents) {
        let mesh = self.world.snapshot();
        self.update(&mesh, &ChangeSet::default(), events);
    }

    /// Updates the store and checks its totals by counting.
    fn update(&mut self, mesh: &MeshSnapshot, changes: &ChangeSet, events: ProxyEvents) {
        self.evaluated = Evaluations::default();
        let update = self.store.update(mesh, changes, events, &self.evaluated);
        assert!(update.panics.is_empty(), "{:?}", update.panics);
        self.moved = update.moved.iter().map(|(id, _)| id.0).collect();
        let rows = self.store.resources.table().rows(&Cx::untracked()).clone();
        let counted: usize = rows.iter().map(|(_, built)| built.bytes()).sum();
        let size = self.store.size();
        assert_eq!((size.resources, size.bytes), (rows.len(), counted));
    }
}

fn rows(file: &str) -> Batch {
    let rows = model::folder(&Installation::default(), &[("file.yaml", file)]);
    rows.into_iter().map(Change::Upsert).collect()
}

#[test]
fn sizes_follow_additions_changes_and_removals() {
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    assert_eq!(harness.store.size(), StoreSize::default(), "no proxy is connected");
    harness.connect(1, "default");
    let one = harness.store.size();
    assert!(one.bytes > 0 && one.reads > 0, "{one:?}");
    harness.connect(2, "default");
    harness.connect(3, "elsewhere");
    harness.commit(rows(MORE));
    let more = harness.store.size();
    assert!(more.bytes > one.bytes && more.groups > one.groups, "{more:?}");
    harness.commit(rows(&MORE.replace("port: 80", "port: 8080, appProtocol: http2")));
    let gone = rows(MORE).into_iter().filter_map(|change| match change {
        Change::Upsert(row) if row.kind() == Kind::Service => Some(Change::Remove(row.kind(), row.key().clone())),
        _ => None,
    });
    harness.commit(gone.collect());
    let (cx, lists) = (Cx::untracked(), harness.store.parts.table());
    let is_full = |(_, list): (&PartKey, &Shared<List>)| list.capacity() == list.len();
    assert!(lists.iter(&cx).all(is_full), "lists of known keys have no spare room");
    harness.disconnect(3);
    harness.disconnect(2);
    assert_eq!(harness.store.size(), one, "the size from before");
    harness.disconnect(1);
    assert_eq!(harness.store.size(), StoreSize::default(), "the store is empty");
}

/// Selects a proxy by its node.
const SIDECAR: &str = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: one}
spec: {workloadSelector: {labels: {kubernetes.io/hostname: n1}}, egress: [{hosts: ['./*']}]}
";

/// Selects a proxy by its name.
const FILTER: &str = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: one}
spec:
  configPatches:
  - applyTo: CLUSTER
    match: {proxy: {metadata: {NAME: p-2}}}
    patch: {operation: MERGE, value: {connect_timeout: 3s}}
";

/// Has a listener at an address of the workload.
const LISTENER: &str = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: one}
spec:
  ingress: [{port: {number: 80, protocol: TCP, name: tcp}, defaultEndpoint: '0.0.0.0:8080'}]
  egress: [{hosts: ['*/*']}]
";

/// Two replicas of one workload.
fn replicas() -> Harness {
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    for number in [1, 2] {
        let labels = json!({"app": "a", "apps.kubernetes.io/pod-index": number.to_string()});
        let metadata = json!({"NAME": format!("p-{number}"), "NODE_NAME": format!("n{number}"), "LABELS": labels});
        harness.connect_with(number, "default", &metadata);
    }
    harness
}

#[test]
fn workloads_whose_listeners_differ_share_all_other_resources() {
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    for number in [1, 2] {
        // A tag of traces.
        let labels = json!({"service.istio.io/canonical-name": format!("w-{number}")});
        harness.connect_with(number, "default", &json!({"LABELS": labels}));
    }
    assert_eq!(harness.store.size().groups, 2);
    let snapshot = |number: u64| {
        let group = harness.store.group_of(ConnectionId(number)).expect("a group");
        harness.store.snapshot(group).expect("a snapshot")
    };
    let (one, other) = (snapshot(1), snapshot(2));
    for resource_type in ResourceType::ALL {
        let is_same = one.resources(*resource_type).ptr_eq(other.resources(*resource_type));
        assert_eq!(is_same, *resource_type != ResourceType::Listener, "{resource_type:?}");
        let resources = one.resources(*resource_type);
        let is_empty = resources.iter().next().is_none();
        assert_eq!(
            resources.parts.is_empty(),
            is_empty,
            "{resource_type:?} has maps for nothing"
        );
    }
    let group = |number: u64| harness.store.group_of(ConnectionId(number)).expect("a group");
    let pairs = group(1).parts.iter().zip(&group(2).parts);
    let equal: Vec<_> = pairs.filter(|(part, other)| part == other).collect();
    assert!(equal.len() > 1, "only the parts of listeners differ");
    assert!(equal.iter().all(|(part, other)| part.ptr_eq(other)), "{equal:?}");
    assert!(matches!(
        (&group(1).unknown_routes, &group(2).unknown_routes),
        (UnknownRoutes::Sidecar(one), UnknownRoutes::Sidecar(other)) if one.ptr_eq(other)
    ));
}

#[test]
fn replicas_are_selected_once() {
    let mut harness = replicas();
    assert_eq!(
        (
            harness.evaluated.of::<ConnectionId>(),
            harness.evaluated.of::<ProxyClassKey>()
        ),
        (1, 0)
    );
    assert_eq!((harness.moved.as_slice(), harness.store.size().classes), (&[2][..], 1));
    let everywhere = SIDECAR.replace("workloadSelector: {labels: {kubernetes.io/hostname: n1}}, ", "");
    harness.commit(rows(&everywhere));
    assert_eq!(
        (
            harness.evaluated.of::<ConnectionId>(),
            harness.evaluated.of::<ProxyClassKey>()
        ),
        (0, 1)
    );
    assert_eq!(harness.moved, [1, 2], "one evaluation moves both");

    harness.connect_with(3, "default", &json!({"LABELS": {"app": "other"}}));
    assert_eq!(
        harness.evaluated.of::<ProxyClassKey>(),
        1,
        "other labels make another class"
    );
    assert_eq!(harness.store.size().classes, 2);
    harness.disconnect(3);
    assert_eq!(harness.store.size().classes, 1);
    harness.disconnect(1);
    assert_eq!(harness.store.size().classes, 1, "a connection still has the class");
    harness.disconnect(2);
    assert_eq!(harness.store.size(), StoreSize::default(), "the store is empty");
}

#[test]
fn replicas_differ_if_config_depends_on_their_attributes() {
    for asking in [SIDECAR, FILTER, LISTENER] {
        let mut harness = replicas();
        let before = harness.store.size();
        harness.commit(rows(asking));
        assert_eq!(
            (harness.store.size().classes, harness.store.size().groups),
            (2, 2),
            "{asking}"
        );
        let gone = rows(asking).into_iter().filter_map(|change| match change {
            Change::Upsert(row) if [Kind::Sidecar, Kind::EnvoyFilter].contains(&row.kind()) => {
                Some(Change::Remove(row.kind(), row.key().clone()))
            }
            _ => None,
        });
        harness.commit(gone.collect());
        assert_eq!(harness.store.size(), before, "the size from before, without {asking}");
    }
}

/// A VirtualService for the first service, with routes of one protocol.
fn routes(name: &str, protocol: &str) -> Batch {
    rows(&format!(
        "
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: {name}}}
spec: {{hosts: [a.default.svc.cluster.local], {protocol}: [{{route: [{{destination: {{host: a}}}}]}}]}}
"
    ))
}

#[test]
fn http_routes_do_not_list_clusters_and_listeners() {
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    harness.connect(1, "default");
    let parts = harness.store.parts.table().len();
    harness.commit(routes("http", "http"));
    let evaluated = |harness: &Harness| {
        let of = &harness.evaluated;
        (of.of::<ProxyClassKey>(), of.of::<PartKey>())
    };
    assert_eq!(
        evaluated(&harness),
        (0, 2),
        "only the routes are listed, for all namespaces and for this one"
    );
    harness.commit(routes("tcp", "tcp"));
    let (classes, listed) = evaluated(&harness);
    assert_eq!(classes, 0, "no proxy is selected again");
    assert!(
        listed > 2 && listed <= 2 * parts,
        "listeners are listed: {listed} of {parts}"
    );
}

#[test]
fn namespaces_that_see_the_same_share_their_lists() {
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    for (number, namespace) in [(1, "one"), (2, "other"), (3, "third")] {
        harness.connect(number, namespace);
    }
    let list_of = |harness: &Harness, number: u64| -> Vec<List> {
        let group = harness.store.group_of(ConnectionId(number)).expect("a group");
        let parts = group.parts.iter().filter(|part| matches!(***part, Part::Clusters(_)));
        let lists = parts.filter_map(|part| harness.store.parts.table().get(&Cx::untracked(), part));
        lists.map(|list| (**list).clone()).collect()
    };
    let are_shared = |harness: &Harness, one: u64, other: u64| {
        let (one, other) = (list_of(harness, one), list_of(harness, other));
        !one.is_empty() && one.iter().zip(&other).all(|(one, other)| one.ptr_eq(other))
    };
    assert!(are_shared(&harness, 1, 2) && are_shared(&harness, 1, 3));
    harness.connect(4, "fourth");
    harness.commit(rows(MORE));
    assert!(are_shared(&harness, 1, 2) && are_shared(&harness, 1, 4));

    let rule = "
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: own, namespace: other}
spec: {host: a.default.svc.cluster.local, subsets: [{name: v1}]}
---
apiVersion: v1
kind: Service
metadata: {name: private, namespace: third, annotations: {networking.istio.io/exportTo: .}}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
";
    harness.commit(rows(rule));
    let number = |number| list_of(&harness, number)[0].len();
    let resources_of_a_port = 2;
    assert_eq!(number(2), number(1) + 2 * resources_of_a_port, "a subset of both ports");
    assert_eq!(number(3), number(1) + resources_of_a_port, "a private port");
    assert!(are_shared(&harness, 1, 4));
}

#[test]
fn common_routes_are_kept_for_later_proxies() {
    let config = fixture::crowd(99);
    let built = |harness: &Harness| -> Vec<Shared<Built>> {
        let rows = harness.store.resources().rows(&Cx::untracked()).clone();
        rows.iter().map(|(_, built)| built.clone()).collect()
    };
    let connected = |config: &str, namespaces: &[&str]| {
        let mut harness = Harness::default();
        harness.commit(rows(config));
        for (number, namespace) in (1..).zip(namespaces) {
            harness.connect(number, namespace);
        }
        harness
    };

    let mut harness = connected(&config, &["one"]);
    let kept = harness.store.common_routes.clone();
    let hosts = kept.hosts();
    assert!(hosts >= 99 && harness.store.keeps_common_routes(), "{hosts}");
    harness.connect(2, "crowd");
    assert!(Arc::ptr_eq(&kept, &harness.store.common_routes));
    assert_eq!(kept.hosts(), hosts, "both proxies use the same");
    assert_eq!(built(&harness), built(&connected(&config, &["one", "crowd"])));

    let path = routes("all", "http");
    harness.commit(path.clone());
    assert!(
        !Arc::ptr_eq(&kept, &harness.store.common_routes),
        "they were of another mesh"
    );
    harness.connect(3, "third");
    let mut other = connected(&config, &["one", "crowd", "third"]);
    other.commit(path);
    assert_eq!(built(&harness), built(&other));

    harness.store.release_common_routes();
    assert!(!harness.store.keeps_common_routes());
    harness.connect(4, "fourth");
    other.connect(4, "fourth");
    assert_eq!(built(&harness), built(&other));
}

#[test]
fn unknown_routes_follow_the_outbound_policy() {
    let policy = |mode: &str| {
        rows(&format!(
            "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: default}}
spec: {{outboundTrafficPolicy: {{mode: {mode}}}}}
"
        ))
    };
    let mut harness = Harness::default();
    harness.commit(rows(fixture::APP));
    harness.commit(policy("REGISTRY_ONLY"));
    harness.connect(1, "default");
    let refuses = |harness: &Harness| {
        let group = harness.store.group_of(ConnectionId(1)).expect("a group");
        let snapshot = harness.store.snapshot(group).expect("a snapshot");
        let routes = snapshot.absent(ResourceType::Route, "9999").expect("an answer");
        routes.any().value.windows(9).any(|text| text == b"block_all")
    };
    assert!(refuses(&harness), "also for the first proxy of a scope");
    harness.commit(policy("ALLOW_ANY"));
    assert!(!refuses(&harness));
    harness.commit(policy("REGISTRY_ONLY"));
    assert!(refuses(&harness));
}
