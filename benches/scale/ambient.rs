//! Ztunnels of a large ambient mesh, in this process: the model, generation and the state machines of the streams, but
//! no sockets. One ztunnel serves each of many nodes, and all subscribe to everything; one more requests names.

use std::sync::Arc;

use istiod::{
    api::document,
    base::Shared,
    generate::{
        Proxy, RequestedResources, ResourceSnapshot, ResourceType,
        proxy::Extensions,
        requested::WILDCARD,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, Installation, MeshSnapshot, World, features::Features},
    table::ChangeSet,
    xds::{
        Connection, Protocol, Request, Response,
        connection::SubscriptionChange,
        share::{initial_versions::InitialVersions, names::Names, response_cache::ResponseCache},
    },
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use smol_str::SmolStr;

use super::report::Report;
use crate::usage::Usage;

const PODS: usize = 100_000;
const SERVICES: usize = 1_000;
const NAMESPACES: usize = 100;
const NODES: usize = 2_000;
/// Number of changed pods.
const ROUNDS: usize = 20;
const CASE: &str = "100000 pods, 1000 services, 2000 ztunnels, in process";

/// Measures all figures.
pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    let installation = Installation {
        features: Features {
            pilot_enable_ambient: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let started = cpu();
    let mut world = World::new(installation.clone());
    let rows = objects().flat_map(|object| document::parse(&installation.cluster, &object).rows);
    let commit = world.commit(rows.map(Change::Upsert).collect());
    report.note(CASE, "CPU-s of the first model", cpu() - started);
    let mut store = ConfigStore::default();
    let connected = (0..NODES).map(|node| Ok((ConnectionId(node as u64), Arc::new(ztunnel(node)?))));
    let everything = requested(&[WILDCARD]);
    let events = ProxyEvents {
        connected: connected.collect::<Result<_, String>>()?,
        requested: (0..NODES)
            .map(|node| (ConnectionId(node as u64), everything.clone()))
            .collect(),
        ..ProxyEvents::default()
    };
    let started = cpu();
    store.update(&commit.snapshot, &ChangeSet::default(), events, &Serial);
    report.note(CASE, "CPU-s of the first generation", cpu() - started);
    let snapshot = self::snapshot(&store, ConnectionId(0))?;
    let started = cpu();
    let cache = Arc::new(ResponseCache::default());
    let first = Ztunnel::connect(&[], &snapshot, &cache)?;
    report.goal(CASE, "CPU-s of one first response", 2.0, cpu() - started);
    report.note(CASE, "resources of one ztunnel", first.resources as f64);
    let mut ztunnels: Vec<Ztunnel> = vec![first];
    for _ in 1..NODES {
        ztunnels.push(Ztunnel::connect(&[], &snapshot, &cache)?);
    }
    let usage = Usage::of_this_process()?;
    report.goal(CASE, "MiB with all ztunnels", 1024.0, usage.resident_mib);
    report.note(CASE, "MiB peak", usage.highest_mib);
    let mut costs = Vec::new();
    for round in 1..=ROUNDS {
        // A pod that becomes unready, and ready again.
        let changed = pod(round.div_ceil(2) * 37 % PODS, round % 2 == 0);
        let rows = document::parse(&installation.cluster, &changed).rows.into_iter();
        let started = cpu();
        let commit = world.commit(rows.map(Change::Upsert).collect());
        store.update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
        let snapshot = self::snapshot(&store, ConnectionId(0))?;
        for ztunnel in &mut ztunnels {
            let sent = ztunnel.publish(&snapshot)?;
            if sent != 1 {
                return Err(format!("a change of one pod sends {sent} resources"));
            }
        }
        costs.push(cpu() - started);
    }
    costs.sort_by(f64::total_cmp);
    report.goal(
        CASE,
        "CPU-s of one pod change",
        0.1,
        costs.iter().sum::<f64>() / costs.len() as f64,
    );
    report.goal(
        CASE,
        "CPU-s of one pod change, most",
        0.2,
        costs.last().copied().unwrap_or_default(),
    );
    on_demand(report, &world.snapshot(), &mut store)
}

/// Measures a ztunnel that requests one service.
fn on_demand(report: &mut Report, mesh: &MeshSnapshot, store: &mut ConfigStore) -> Result<(), String> {
    let client = ConnectionId(NODES as u64);
    let name = "ns-0/svc-0.ns-0.svc.cluster.local";
    let started = cpu();
    let events = ProxyEvents {
        connected: vec![(client, Arc::new(ztunnel(NODES)?))],
        requested: vec![(client, requested(&[name]))],
        ..ProxyEvents::default()
    };
    store.update(mesh, &ChangeSet::default(), events, &Serial);
    let ztunnel = Ztunnel::connect(&[name], &snapshot(store, client)?, &Arc::default())?;
    report.note(CASE, "CPU-s of one service on demand", cpu() - started);
    report.note(CASE, "resources of one service", ztunnel.resources as f64);
    Ok(())
}

/// The stream of a ztunnel that acknowledges all responses.
struct Ztunnel {
    connection: Connection,
    /// Number of received resources.
    resources: usize,
}

impl Ztunnel {
    fn connect(
        names: &[&str],
        snapshot: &Arc<ResourceSnapshot>,
        cache: &Arc<ResponseCache>,
    ) -> Result<Ztunnel, String> {
        let mut ztunnel = Ztunnel {
            connection: Connection::new(Protocol::Delta).sharing(cache.clone()),
            resources: 0,
        };
        ztunnel.request(SmolStr::default(), names)?;
        ztunnel.publish(snapshot)?;
        Ok(ztunnel)
    }

    fn request(&mut self, nonce: SmolStr, names: &[&str]) -> Result<Vec<Response>, String> {
        let request = Request {
            resource_type: ResourceType::Address,
            nonce,
            error: None,
            change: SubscriptionChange::Change {
                subscribe: Arc::new(names.iter().map(SmolStr::new).collect::<Names>()),
                unsubscribe: Vec::new(),
                initial_versions: InitialVersions::default(),
            },
        };
        let reaction = self.connection.on_request(request).map_err(|error| error.to_string())?;
        Ok(reaction.responses)
    }

    /// Returns the number of resources that are sent.
    fn publish(&mut self, snapshot: &Arc<ResourceSnapshot>) -> Result<usize, String> {
        let mut sent = 0;
        for response in self.connection.on_snapshot(snapshot.clone()) {
            sent += response.resources.len();
            self.request(response.nonce, &[])?;
        }
        self.resources += sent;
        Ok(sent)
    }
}

fn snapshot(store: &ConfigStore, client: ConnectionId) -> Result<Arc<ResourceSnapshot>, String> {
    let group = store.group_of(client).ok_or("the client has no group")?;
    store
        .snapshot(group)
        .cloned()
        .ok_or_else(|| "the group has no snapshot".to_owned())
}

fn requested(names: &[&str]) -> Shared<RequestedResources> {
    let names = names.iter().map(SmolStr::new).collect();
    Shared::new(RequestedResources::new([(ResourceType::Address, names)]))
}

fn ztunnel(node: usize) -> Result<Proxy, String> {
    let (third, fourth) = (node >> 8, node & 255);
    let id = format!("ztunnel~10.1.{third}.{fourth}~z-{node}.istio-system~istio-system.svc.cluster.local");
    let metadata = json!({ "NAMESPACE": "istio-system", "CLUSTER_ID": "Kubernetes", "NODE_NAME": format!("n-{node}") });
    let metadata = metadata.as_object().into_iter().flatten();
    let metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
    Proxy::new(&id, "", metadata, "".into(), Extensions::default()).map_err(|error| error.to_string())
}

fn objects() -> impl Iterator<Item = Value> {
    let namespaces = (0..NAMESPACES)
        .map(|index| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": format!("ns-{index}") } }));
    let nodes = (0..NODES).map(|index| {
        let labels =
            json!({ "topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": format!("z{}", index % 3) });
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": format!("n-{index}"), "labels": labels } })
    });
    let services = (0..SERVICES).map(|index| {
        let metadata = json!({ "name": format!("svc-{index}"), "namespace": format!("ns-{}", index % NAMESPACES) });
        let spec = json!({ "clusterIP": format!("10.96.{}.{}", index >> 8, index & 255),
            "selector": { "app": format!("svc-{index}") }, "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }] });
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec })
    });
    namespaces
        .chain(nodes)
        .chain(services)
        .chain((0..PODS).map(|index| pod(index, true)))
}

fn pod(index: usize, ready: bool) -> Value {
    let service = index % SERVICES;
    let labels =
        json!({ "app": format!("svc-{service}"), "version": "v1", "pod-template-hash": format!("{service:08x}") });
    let annotations = json!({ "ambient.istio.io/redirection": "enabled" });
    let ready = if ready { "True" } else { "False" };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": format!("svc-{service}-{service:08x}-{index:05x}"),
            "namespace": format!("ns-{}", service % NAMESPACES), "labels": labels, "annotations": annotations },
        "spec": { "serviceAccountName": format!("svc-{service}"), "nodeName": format!("n-{}", index % NODES) },
        "status": { "phase": "Running", "podIP": format!("10.{}.{}.{}", 64 + (index >> 16), (index >> 8) & 255, index & 255),
            "conditions": [{ "type": "Ready", "status": ready }] },
    })
}

/// Returns the CPU seconds of this process.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
