//! The steps, with their world and store.

use std::any::Any;
use std::sync::Arc;

use futures::FutureExt as _;
use http_body::Body as _;
use istiod::generate::store::{ConfigStore, ConnectionId, ProxyEvents, Serial, StoreUpdate};
use istiod::generate::{EncodedResource, Proxy, ResourceSnapshot, ResourceType};
use istiod::model::gateway_api::status::{Revisions, Statuses};
use istiod::model::{Batch, Change, Installation, World, world::Commit};
use istiod::proto::envoy::config::cluster::v3::Cluster;
use istiod::proto::envoy::config::listener::v3::Listener;
use istiod::proto::envoy::config::route::v3::RouteConfiguration;
use istiod::table::ChangeSet;
use istiod::xds::message::{Body, Message};
use istiod::xds::{connection::Response, protocol::Protocol};
use prost::Name;
use serde_json::{Value, json};

use crate::fixture;
use crate::scale::mesh::Mesh;

const MESH: Mesh = Mesh {
    services: 1000,
    endpoints: 5,
    namespaces: 50,
};
/// Proxies in each namespace, all with the same configuration.
const PROXIES: u64 = 40;
/// The service whose objects change, and the namespace whose proxies change groups.
const CHANGED: usize = 7;
const NAMESPACE: &str = "ns-3";
/// A proxy that connects and disconnects.
const EXTRA_PROXY: ConnectionId = ConnectionId(1 << 20);

/// A step; only `run` is measured.
pub(super) struct Step {
    /// `verb: object`.
    pub(super) name: &'static str,
    pub(super) prepare: fn(&mut Work) -> Result<(), String>,
    pub(super) run: fn(&mut Work),
}

impl Step {
    /// The folder of criterion's figures.
    pub(super) fn folder(&self) -> String {
        self.name
            .replace([':', '/', '*', '?', '"', '\\', '^', '<', '>', '|'], "_")
    }
}

pub(super) const STEPS: &[Step] = &[
    Step {
        name: "commit: a mesh of 1,000 services from scratch",
        prepare: |work| {
            work.batch = work.all.clone();
            Ok(())
        },
        run: |work| {
            let mut world = World::new(Installation::default());
            let commit = world.commit(std::mem::take(&mut work.batch));
            work.keep((world, commit));
        },
    },
    Step {
        name: "commit: one EndpointSlice",
        prepare: Work::moved_endpoint,
        run: Work::commit,
    },
    Step {
        name: "commit: one VirtualService",
        prepare: Work::moved_route,
        run: Work::commit,
    },
    Step {
        name: "commit: one of 5,000 HTTPRoutes of a Gateway",
        prepare: |work| {
            work.settle()?;
            work.routed.moved_route();
            Ok(())
        },
        run: |work| {
            let commit = work.routed.commit();
            work.keep(commit);
        },
    },
    Step {
        name: "status: one of 5,000 HTTPRoutes of a Gateway",
        prepare: |work| {
            work.settle()?;
            work.routed.moved_route();
            work.routed.commit();
            Ok(())
        },
        run: |work| {
            if work.routed.update_statuses() != 1 {
                work.wrong = Some("one status is another".into());
            }
        },
    },
    Step {
        name: "select: a further proxy of a group",
        prepare: |work| work.extra_proxy(NAMESPACE),
        run: Work::update,
    },
    Step {
        name: "select: the first proxy of a namespace",
        prepare: |work| work.extra_proxy("elsewhere"),
        run: Work::update,
    },
    Step {
        name: "regroup: 40 proxies after a new Sidecar",
        prepare: |work| work.with_sidecar(&["./*", "ns-4/*"]),
        run: Work::push,
    },
    Step {
        name: "encode: a cluster",
        prepare: Work::settle,
        run: |work| {
            let (name, message) = &work.cluster;
            let encoded = EncodedResource::new(name.clone(), message);
            work.keep(encoded);
        },
    },
    Step {
        name: "encode: a listener",
        prepare: Work::settle,
        run: |work| {
            let (name, message) = &work.listener;
            let encoded = EncodedResource::new(name.clone(), message);
            work.keep(encoded);
        },
    },
    Step {
        name: "encode: routes of 1,000 hosts",
        prepare: Work::settle,
        run: |work| {
            let (name, message) = &work.routes;
            let encoded = EncodedResource::new(name.clone(), message);
            work.keep(encoded);
        },
    },
    Step {
        name: "encode: a response of all clusters",
        prepare: Work::settle,
        run: Work::respond,
    },
    Step {
        name: "push: one EndpointSlice to 50 groups",
        prepare: Work::moved_endpoint,
        run: Work::push,
    },
    Step {
        name: "push: one VirtualService to 50 groups",
        prepare: Work::moved_route,
        run: Work::push,
    },
    Step {
        name: "push: one new Service to 50 groups",
        prepare: Work::without_service,
        run: Work::push,
    },
    Step {
        name: "push: one new host to a group with 10,000 hosts",
        prepare: |work| {
            work.settle()?;
            work.wide()?.prepare()
        },
        run: |work| {
            if let Some(wide) = &mut work.wide {
                work.wrong = wide.push().err();
            }
        },
    },
    Step {
        name: "compare: snapshots before and after the new host",
        prepare: |work| {
            work.settle()?;
            work.wide()?.prepare()?;
            work.wide()?.push()
        },
        run: |work| {
            if let Some(wide) = &mut work.wide {
                work.wrong = wide.compare().err();
            }
        },
    },
];

/// A mesh of many hosts in one group of proxies.
struct WideMesh {
    world: World,
    store: ConfigStore,
    /// The latest snapshot of the group, and the one before.
    snapshots: [Arc<ResourceSnapshot>; 2],
    has_new_host: bool,
}

impl WideMesh {
    const HOSTS: usize = 10_000;

    fn new() -> Result<Self, String> {
        let objects: Vec<Value> = (0..Self::HOSTS).map(Self::host).collect();
        let mut world = World::new(Installation::default());
        let mesh = world.commit(fixture::changes(&objects, None)).snapshot;
        let mut store = ConfigStore::default();
        let membership = ProxyEvents {
            connected: vec![(ConnectionId(0), Arc::new(proxy(0, "ns-0")?))],
            ..ProxyEvents::default()
        };
        let update = store.update(&mesh, &ChangeSet::default(), membership, &Serial);
        failed(&update)?;
        let (_, snapshot) = update.groups.into_iter().next().ok_or("no group")?;
        Ok(Self {
            world,
            store,
            snapshots: [snapshot.clone(), snapshot],
            has_new_host: false,
        })
    }

    fn host(index: usize) -> Value {
        json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": format!("host-{index}"), "namespace": "ns-0" },
            "spec": { "hosts": [format!("host-{index}.example.com")], "resolution": "STATIC",
                "ports": [{ "number": 80, "name": "http", "protocol": "HTTP" }],
                "endpoints": [{ "address": "10.2.0.1" }] } })
    }

    /// Removes the new host.
    fn prepare(&mut self) -> Result<(), String> {
        if std::mem::take(&mut self.has_new_host) {
            self.apply(removals(fixture::changes(&[Self::host(Self::HOSTS)], None)))?;
        }
        Ok(())
    }

    fn push(&mut self) -> Result<(), String> {
        self.has_new_host = true;
        self.apply(fixture::changes(&[Self::host(Self::HOSTS)], None))
    }

    fn apply(&mut self, batch: Batch) -> Result<(), String> {
        let commit = self.world.commit(batch);
        let none = ProxyEvents::default();
        let update = self.store.update(&commit.snapshot, &commit.changes, none, &Serial);
        failed(&update)?;
        let (_, snapshot) = update.groups.into_iter().next().ok_or("no group has changed")?;
        self.snapshots.swap(0, 1);
        self.snapshots[0] = snapshot;
        Ok(())
    }

    /// Finds what a connection is sent.
    fn compare(&self) -> Result<(), String> {
        let [now, before] = &self.snapshots;
        let types = ResourceType::ALL.iter();
        let changed = types.map(|of| before.resources(*of).difference(now.resources(*of)).changed.len());
        match changed.sum::<usize>() {
            3 => Ok(()),
            other => Err(format!(
                "{other} changes in place of a cluster, its endpoints and the routes"
            )),
        }
    }
}

/// Returns the removals of the added objects. The mesh config, which is in every batch, stays.
fn removals(batch: Batch) -> Batch {
    let gone = batch.into_iter().filter_map(|change| match change {
        Change::Upsert(row) if row.kind().is_object() => Some(Change::Remove(row.kind(), row.key().clone())),
        _ => None,
    });
    gone.collect()
}

/// A Gateway with many routes, and the statuses of all.
struct RoutedMesh {
    world: World,
    statuses: Statuses,
    batch: Batch,
    round: usize,
}

impl RoutedMesh {
    const ROUTES: usize = 5000;

    fn new() -> Self {
        let listener = json!({ "name": "http", "port": 80, "protocol": "HTTP" });
        let gateway = json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
            "metadata": { "name": "edge", "namespace": "ns-0" },
            "spec": { "gatewayClassName": "istio", "listeners": [listener] } });
        let mut objects = vec![gateway];
        objects.extend((0..Self::ROUTES).map(|index| Self::route(index, 0)));
        let mut world = World::new(Installation::default());
        world.commit(fixture::changes(&objects, None));
        let mut routed = Self {
            world,
            statuses: Statuses::new(Revisions::default()),
            batch: Batch::new(),
            round: 0,
        };
        routed.update_statuses();
        routed
    }

    /// A route; its status tells the round, because its backend does not exist.
    fn route(index: usize, round: usize) -> Value {
        json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": { "name": format!("route-{index}"), "namespace": "ns-0" },
            "spec": { "parentRefs": [{ "name": "edge" }], "hostnames": [format!("route-{index}.example.com")],
                "rules": [{ "backendRefs": [{ "name": format!("backend-{round}"), "port": 80 }] }] } })
    }

    fn moved_route(&mut self) {
        self.round += 1;
        self.batch = fixture::changes(&[Self::route(CHANGED, self.round)], None);
    }

    fn commit(&mut self) -> Commit {
        self.world.commit(std::mem::take(&mut self.batch))
    }

    /// Returns the number of changed statuses.
    fn update_statuses(&mut self) -> usize {
        self.statuses.update(&self.world.snapshot(), Vec::new()).len()
    }
}

/// The state that the steps work on.
pub(super) struct Work {
    routed: RoutedMesh,
    /// Made for the first step that uses it.
    wide: Option<WideMesh>,
    world: World,
    store: ConfigStore,
    /// The initial content of the world.
    all: Batch,
    /// Commits that the store has not seen.
    unseen: ChangeSet,
    /// Number of changes so far.
    round: usize,
    batch: Batch,
    membership: ProxyEvents,
    has_extra_proxy: bool,
    cluster: (String, Cluster),
    listener: (String, Listener),
    routes: (String, RouteConfiguration),
    snapshot: Arc<ResourceSnapshot>,
    /// The result of the last run, so that its drop is not measured.
    output: Option<Box<dyn Any>>,
    /// The error of the last update.
    wrong: Option<String>,
}

impl Work {
    pub(super) fn new() -> Result<Work, String> {
        let objects = [MESH.namespaces(), MESH.objects()].concat();
        let all = fixture::changes(&objects, None);
        let mut world = World::new(Installation::default());
        let mesh = world.commit(all.clone()).snapshot;
        let mut store = ConfigStore::default();
        let names: Vec<String> = (0..MESH.namespaces).map(|index| format!("ns-{index}")).collect();
        let mut connected = Vec::new();
        for number in 0..PROXIES {
            for (at, namespace) in (0..).zip(&names) {
                let member = number * MESH.namespaces as u64 + at;
                connected.push((ConnectionId(member), Arc::new(proxy(member, namespace)?)));
            }
        }
        let membership = ProxyEvents {
            connected,
            ..ProxyEvents::default()
        };
        let update = store.update(&mesh, &ChangeSet::default(), membership, &Serial);
        failed(&update)?;
        if update.groups.len() != MESH.namespaces {
            return Err(format!(
                "{} groups in place of {}",
                update.groups.len(),
                MESH.namespaces
            ));
        }
        let snapshot = update.groups[0].1.clone();
        Ok(Work {
            routed: RoutedMesh::new(),
            wide: None,
            world,
            store,
            all,
            unseen: ChangeSet::default(),
            round: 0,
            batch: Batch::new(),
            membership: ProxyEvents::default(),
            has_extra_proxy: false,
            cluster: largest(&snapshot, ResourceType::Cluster)?,
            listener: largest(&snapshot, ResourceType::Listener)?,
            routes: largest(&snapshot, ResourceType::Route)?,
            snapshot,
            output: None,
            wrong: None,
        })
    }

    /// Fails if the last step did not have its expected effect.
    pub(super) fn check(&mut self) -> Result<(), String> {
        self.wrong.take().map_or(Ok(()), Err)
    }

    fn keep(&mut self, output: impl Any) {
        self.output = Some(Box::new(output));
    }

    fn commit(&mut self) {
        let commit = self.world.commit(std::mem::take(&mut self.batch));
        if commit.changes.is_empty() {
            self.wrong = Some("nothing changed".into());
        }
        self.unseen.extend(&commit.changes);
        self.keep(commit);
    }

    /// Brings the store up to date.
    fn update(&mut self) {
        let mesh = self.world.snapshot();
        let membership = std::mem::take(&mut self.membership);
        let update = self.store.update(&mesh, &self.unseen, membership, &Serial);
        self.unseen = ChangeSet::default();
        self.wrong = failed(&update).err().or(self.wrong.take());
        self.keep(update);
    }

    fn push(&mut self) {
        let commit = self.world.commit(std::mem::take(&mut self.batch));
        let none = ProxyEvents::default();
        let update = self.store.update(&commit.snapshot, &commit.changes, none, &Serial);
        self.wrong = failed(&update).err();
        if update.groups.is_empty() {
            self.wrong = Some("no group has changed".into());
        }
        self.keep((commit, update));
    }

    /// Prepares a step: nothing is pending.
    fn settle(&mut self) -> Result<(), String> {
        self.output = None;
        if self.has_extra_proxy {
            self.membership.disconnected.push(EXTRA_PROXY);
            self.has_extra_proxy = false;
        }
        self.update();
        self.output = None;
        self.check()
    }

    fn next(&mut self) -> Result<usize, String> {
        self.settle()?;
        self.round += 1;
        Ok(1 + self.round % 200)
    }

    fn moved_endpoint(&mut self) -> Result<(), String> {
        let round = self.next()?;
        self.batch = fixture::changes(&[MESH.slice(CHANGED, round)], None);
        Ok(())
    }

    fn moved_route(&mut self) -> Result<(), String> {
        let round = self.next()?;
        self.batch = fixture::changes(&[MESH.virtual_service(CHANGED, round)], None);
        Ok(())
    }

    fn without_service(&mut self) -> Result<(), String> {
        self.settle()?;
        self.without(fixture::changes(&[MESH.service(MESH.services)], None))
    }

    /// Removes what a batch adds, so that adding it is a change.
    fn without(&mut self, batch: Vec<Change>) -> Result<(), String> {
        self.batch = removals(batch.clone());
        self.commit();
        self.wrong = None;
        self.settle()?;
        self.batch = batch;
        Ok(())
    }

    fn wide(&mut self) -> Result<&mut WideMesh, String> {
        if self.wide.is_none() {
            self.wide = Some(WideMesh::new()?);
        }
        self.wide.as_mut().ok_or_else(|| "no mesh".to_owned())
    }

    fn extra_proxy(&mut self, namespace: &str) -> Result<(), String> {
        self.settle()?;
        let extra_proxy = proxy(EXTRA_PROXY.0, namespace)?;
        self.membership.connected.push((EXTRA_PROXY, Arc::new(extra_proxy)));
        self.has_extra_proxy = true;
        Ok(())
    }

    fn with_sidecar(&mut self, hosts: &[&str]) -> Result<(), String> {
        self.settle()?;
        self.without(fixture::changes(&[sidecar(hosts)], None))
    }

    /// Encodes all clusters of a group as one response.
    fn respond(&mut self) {
        let view = self.snapshot.resources(ResourceType::Cluster);
        let response = Response {
            resource_type: ResourceType::Cluster,
            nonce: "nonce".into(),
            version: view.version(),
            resources: view.iter().cloned().collect(),
            coalesced: None,
            removed: Vec::new(),
            held: None,
        };
        let Ok((message, sent)) = Message::new(Protocol::Delta, response) else {
            self.wrong = Some("the response is too large".into());
            return;
        };
        let (mut body, sender) = Body::channel();
        let handed = sender.send(message).now_or_never();
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let mut pieces = Vec::new();
        while let std::task::Poll::Ready(Some(Ok(frame))) = std::pin::Pin::new(&mut body).poll_frame(&mut cx) {
            pieces.extend(frame.into_data());
        }
        let bytes: usize = pieces.iter().map(bytes::Buf::remaining).sum();
        if handed.is_none() || bytes != sent.size_bytes {
            self.wrong = Some(format!("{bytes} bytes of {}", sent.size_bytes));
        }
        self.keep((body, pieces, sent));
    }
}

fn failed(update: &StoreUpdate) -> Result<(), String> {
    if update.panics.is_empty() {
        Ok(())
    } else {
        Err(update.panics.join("\n"))
    }
}

fn proxy(number: u64, namespace: &str) -> Result<Proxy, String> {
    let ip = format!(
        "10.{}.{}.{}",
        128 + ((number >> 16) & 63),
        (number >> 8) & 255,
        number & 255
    );
    let metadata = json!({ "NAMESPACE": namespace, "SERVICE_ACCOUNT": "default", "CLUSTER_ID": "Kubernetes",
        "ISTIO_VERSION": "1.30.3", "LABELS": { "app": "load" }, "INSTANCE_IPS": ip, "WORKLOAD_NAME": "load" });
    let node = format!("sidecar~{ip}~load-{number}.{namespace}~{namespace}.svc.cluster.local");
    fixture::proxy(&node, &metadata, "")
}

fn sidecar(hosts: &[&str]) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "Sidecar",
        "metadata": { "name": "default", "namespace": NAMESPACE }, "spec": { "egress": [{ "hosts": hosts }] } })
}

/// Returns the largest resource of a type, decoded.
fn largest<M: prost::Message + Name + Default>(
    snapshot: &ResourceSnapshot,
    resource_type: ResourceType,
) -> Result<(String, M), String> {
    let view = snapshot.resources(resource_type);
    let resource = view.iter().max_by_key(|resource| resource.delta_frame().size());
    let resource = resource.ok_or_else(|| format!("no resource of {resource_type:?}"))?;
    let message = M::decode(resource.any().value).map_err(|error| error.to_string())?;
    Ok((resource.name.to_string(), message))
}
