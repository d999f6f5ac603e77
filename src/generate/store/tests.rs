use std::{any::TypeId, cell::RefCell};

use serde_json::{Value, json};

use super::*;
use crate::{
    api::Kind,
    generate::{fixture, proxy_class::ProxyClassKey},
    model::{Batch, Change, Installation, World, fixture as model},
};

/// One more service beside [`fixture::APP`].
const MORE: &str = "
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, selector: {app: b}, ports: [{name: http, port: 80}]}
";

/// A world with a store that follows it.
struct Bed {
    world: World,
    store: ConfigStore,
    /// What the last update evaluated.
    evaluated: Evaluations,
    /// The members that it moved.
    moved: Vec<u64>,
}

impl Default for Bed {
    fn default() -> Self {
        Self {
            world: World::new(Installation::default()),
            store: ConfigStore::default(),
            evaluated: Evaluations::default(),
            moved: Vec::new(),
        }
    }
}

/// Runs on the calling thread, and keeps the types of the keys.
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

impl Bed {
    fn commit(&mut self, batch: Batch) {
        let commit = self.world.commit(batch);
        self.update(&commit.snapshot, &commit.changes, ProxyEvents::default());
    }

    fn joins(&mut self, number: u64, namespace: &str) {
        self.joins_with(number, namespace, &json!({}));
    }

    fn joins_with(&mut self, number: u64, namespace: &str, metadata: &Value) {
        let node = format!("sidecar~10.9.0.{number}~p-{number}.{namespace}~{namespace}.svc.cluster.local");
        let proxy = Arc::new(fixture::client(&node, metadata));
        self.membership(ProxyEvents {
            connected: vec![(ConnectionId(number), proxy)],
            ..ProxyEvents::default()
        });
    }

    fn leaves(&mut self, number: u64) {
        self.membership(ProxyEvents {
            disconnected: vec![ConnectionId(number)],
            ..ProxyEvents::default()
        });
    }

    fn membership(&mut self, membership: ProxyEvents) {
        let mesh = self.world.snapshot();
        self.update(&mesh, &ChangeSet::default(), membership);
    }

    /// The totals that are kept are those that are counted.
    fn update(&mut self, mesh: &MeshSnapshot, changes: &ChangeSet, membership: ProxyEvents) {
        self.evaluated = Evaluations::default();
        let update = self.store.update(mesh, changes, membership, &self.evaluated);
        assert!(update.panics.is_empty(), "{:?}", update.panics);
        self.moved = update.moved.iter().map(|(member, _)| member.0).collect();
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
fn totals_follow_what_comes_changes_and_goes() {
    let mut bed = Bed::default();
    bed.commit(rows(fixture::APP));
    assert_eq!(bed.store.size(), StoreSize::default(), "nobody wants anything");
    bed.joins(1, "default");
    let one = bed.store.size();
    assert!(one.bytes > 0 && one.reads > 0, "{one:?}");
    bed.joins(2, "default");
    bed.joins(3, "elsewhere");
    bed.commit(rows(MORE));
    let more = bed.store.size();
    assert!(more.bytes > one.bytes && more.groups > one.groups, "{more:?}");
    bed.commit(rows(&MORE.replace("port: 80", "port: 8080, appProtocol: http2")));
    let gone = rows(MORE).into_iter().filter_map(|change| match change {
        Change::Upsert(row) if row.kind() == Kind::Service => Some(Change::Remove(row.kind(), row.key().clone())),
        _ => None,
    });
    bed.commit(gone.collect());
    bed.leaves(3);
    bed.leaves(2);
    assert_eq!(bed.store.size(), one, "as it was");
    bed.leaves(1);
    assert_eq!(bed.store.size(), StoreSize::default(), "nothing is left");
}

/// Selects a member by its node.
const SIDECAR: &str = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: one}
spec: {workloadSelector: {labels: {kubernetes.io/hostname: n1}}, egress: [{hosts: ['./*']}]}
";

/// For a member with this name.
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

/// Has a listener at an address of the workload's.
const LISTENER: &str = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: one}
spec:
  ingress: [{port: {number: 80, protocol: TCP, name: tcp}, defaultEndpoint: '0.0.0.0:8080'}]
  egress: [{hosts: ['*/*']}]
";

/// Two replicas of one workload.
fn replicas() -> Bed {
    let mut bed = Bed::default();
    bed.commit(rows(fixture::APP));
    for number in [1, 2] {
        let labels = json!({"app": "a", "apps.kubernetes.io/pod-index": number.to_string()});
        let metadata = json!({"NAME": format!("p-{number}"), "NODE_NAME": format!("n{number}"), "LABELS": labels});
        bed.joins_with(number, "default", &metadata);
    }
    bed
}

#[test]
fn replicas_are_selected_once() {
    let mut bed = replicas();
    assert_eq!(
        (bed.evaluated.of::<ConnectionId>(), bed.evaluated.of::<ProxyClassKey>()),
        (1, 0)
    );
    assert_eq!((bed.moved.as_slice(), bed.store.size().profiles), (&[2][..], 1));
    let everywhere = SIDECAR.replace("workloadSelector: {labels: {kubernetes.io/hostname: n1}}, ", "");
    bed.commit(rows(&everywhere));
    assert_eq!(
        (bed.evaluated.of::<ConnectionId>(), bed.evaluated.of::<ProxyClassKey>()),
        (0, 1)
    );
    assert_eq!(bed.moved, [1, 2], "both go where the one evaluation leads");

    bed.joins_with(3, "default", &json!({"LABELS": {"app": "other"}}));
    assert_eq!(
        bed.evaluated.of::<ProxyClassKey>(),
        1,
        "other labels are another profile"
    );
    assert_eq!(bed.store.size().profiles, 2);
    bed.leaves(3);
    assert_eq!(bed.store.size().profiles, 1);
    bed.leaves(1);
    assert_eq!(bed.store.size().profiles, 1, "somebody has it");
    bed.leaves(2);
    assert_eq!(bed.store.size(), StoreSize::default(), "nothing is left");
}

#[test]
fn replicas_are_told_apart_where_something_asks_for_it() {
    for asking in [SIDECAR, FILTER, LISTENER] {
        let mut bed = replicas();
        let before = bed.store.size();
        bed.commit(rows(asking));
        assert_eq!((bed.store.size().profiles, bed.store.size().groups), (2, 2), "{asking}");
        let gone = rows(asking).into_iter().filter_map(|change| match change {
            Change::Upsert(row) if [Kind::Sidecar, Kind::EnvoyFilter].contains(&row.kind()) => {
                Some(Change::Remove(row.kind(), row.key().clone()))
            }
            _ => None,
        });
        bed.commit(gone.collect());
        assert_eq!(bed.store.size(), before, "as it was, without {asking}");
    }
}
