//! A simulated sidecar: it subscribes to what its clusters and listeners refer to, ACKs everything and applies nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use istiod::proto::envoy::config::core::v3::Node;
use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use istiod::proto::json::struct_from_json;
use prost::Message;
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use super::ads_stream::AdsStream;
use super::fleet::Fleet;
use super::wire::{Response, put};
use crate::support::ads::Type;
use crate::support::wait;

/// A proxy, and what it remembers over its connections.
pub(crate) struct Proxy {
    pub(crate) number: usize,
    node: Node,
    memory: Mutex<Memory>,
}

/// The resources held, by type and hash of the name.
#[derive(Default)]
struct Memory {
    held: [FxHashMap<u64, Arc<HeldResource>>; 4],
    /// Subscribed names of each type, as a field of a request.
    asked: [Vec<u8>; 4],
}

/// A resource at a version, shared by all proxies that hold it.
pub(crate) struct HeldResource {
    version: u64,
    /// Name and version as an entry of `initial_resource_versions`.
    entry: Vec<u8>,
}

/// The state of a connection.
struct Session {
    began: Instant,
    answered: [bool; 4],
    /// Hashes of the names subscribed on this connection.
    names: [FxHashSet<u64>; 4],
    is_ready: bool,
}

const NAMES: u8 = 3;
const INITIAL: u8 = 5;

impl Proxy {
    /// Proxy `number`, which belongs to a workload in one of the namespaces.
    pub(crate) fn new(number: usize, workload: usize, namespaces: usize) -> Proxy {
        let ip = format!(
            "10.{}.{}.{}",
            128 + ((number >> 16) & 63),
            (number >> 8) & 255,
            number & 255
        );
        let (namespace, app) = (format!("ns-{}", workload % namespaces), format!("load-{workload}"));
        let metadata = json!({
            "NAMESPACE": namespace, "SERVICE_ACCOUNT": "default", "CLUSTER_ID": "Kubernetes", "ISTIO_VERSION": "1.30.3",
            "LABELS": { "app": app, "service.istio.io/canonical-name": app },
            "INSTANCE_IPS": ip, "WORKLOAD_NAME": app, "MESH_ID": "cluster.local", "NAME": app,
            "PILOT_SAN": ["istiod.istio-system.svc"], "PROXY_CONFIG": {}, "INTERCEPTION_MODE": "REDIRECT" });
        let node = Node {
            id: format!("sidecar~{ip}~{app}-{number}.{namespace}~{namespace}.svc.cluster.local"),
            cluster: format!("{app}.{namespace}"),
            metadata: metadata.as_object().map(struct_from_json),
            ..Default::default()
        };
        Proxy {
            number,
            node,
            memory: Mutex::default(),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one connection until it ends, and returns the reason.
    pub(crate) async fn connect(&self, fleet: &Fleet) -> String {
        let session = Session {
            began: wait::now(),
            answered: [false; 4],
            names: Default::default(),
            is_ready: false,
        };
        let ended = if fleet.is_delta {
            self.delta(fleet, session).await
        } else {
            self.sotw(fleet, session).await
        };
        ended.err().unwrap_or_default()
    }

    /// The state-of-the-world protocol.
    async fn sotw(&self, fleet: &Fleet, mut session: Session) -> Result<(), String> {
        let request = |kind: Type, node: Option<Node>, last: Option<&(String, String)>, names: &[u8]| {
            let (version_info, response_nonce) = last.cloned().unwrap_or_default();
            let type_url = kind.url().to_owned();
            let mut request = DiscoveryRequest {
                version_info,
                node,
                type_url,
                response_nonce,
                ..Default::default()
            }
            .encode_to_vec();
            request.extend_from_slice(names);
            request
        };
        let mut last: [Option<(String, String)>; 4] = Default::default();
        let mut asked: [Vec<u8>; 4] = Default::default();
        let first = request(Type::Cluster, Some(self.node.clone()), None, &[]);
        let mut ads_stream = AdsStream::open(fleet.address, false, first).await?;
        loop {
            let message = ads_stream.next().await?;
            let Some(response) = Response::read(&message, false) else {
                continue;
            };
            let kind = response.kind;
            fleet.note(self.number, &response);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            last[kind as usize] = Some((text(response.version), text(response.nonce)));
            let ack = request(kind, None, last[kind as usize].as_ref(), &asked[kind as usize]);
            ads_stream.send(ack).await?;
            if let Some(referred) = kind.referred() {
                let added = names(&response, &mut FxHashSet::default());
                if added != asked[referred as usize] {
                    asked[referred as usize] = added;
                    let (last, names) = (last[referred as usize].as_ref(), &asked[referred as usize]);
                    ads_stream.send(request(referred, None, last, names)).await?;
                }
            }
            if kind == Type::Cluster && !session.answered[kind as usize] {
                ads_stream.send(request(Type::Listener, None, None, &[])).await?;
            }
            session.answered[kind as usize] = true;
            session.check(fleet, |kind| !asked[kind as usize].is_empty());
        }
    }

    /// The delta protocol.
    async fn delta(&self, fleet: &Fleet, mut session: Session) -> Result<(), String> {
        let request = |kind: Type, node: Option<Node>, response_nonce: String, fields: &[u8]| {
            let type_url = kind.url().to_owned();
            let mut request = DeltaDiscoveryRequest {
                node,
                type_url,
                response_nonce,
                ..Default::default()
            }
            .encode_to_vec();
            request.extend_from_slice(fields);
            request
        };
        let first = request(
            Type::Cluster,
            Some(self.node.clone()),
            String::new(),
            &self.known(Type::Cluster),
        );
        let mut ads_stream = AdsStream::open(fleet.address, true, first).await?;
        let is_again = !self.memory().held[Type::Cluster as usize].is_empty();
        if is_again {
            // Like Envoy, which sends all its subscriptions and versions at once.
            for kind in [Type::Endpoints, Type::Listener, Type::Route] {
                session.names[kind as usize] = self.memory().held[kind as usize].keys().copied().collect();
                ads_stream
                    .send(request(kind, None, String::new(), &self.known(kind)))
                    .await?;
            }
        }
        loop {
            let message = ads_stream.next().await?;
            let Some(response) = Response::read(&message, true) else {
                continue;
            };
            let kind = response.kind;
            fleet.note(self.number, &response);
            self.remember(fleet, &response);
            let nonce = String::from_utf8_lossy(response.nonce).into_owned();
            ads_stream.send(request(kind, None, nonce, &[])).await?;
            if let Some(referred) = kind.referred() {
                let added = names(&response, &mut session.names[referred as usize]);
                if !added.is_empty() {
                    ads_stream.send(request(referred, None, String::new(), &added)).await?;
                    self.memory().asked[referred as usize].extend_from_slice(&added);
                }
            }
            if kind == Type::Cluster && !session.answered[kind as usize] && !is_again {
                ads_stream
                    .send(request(Type::Listener, None, String::new(), &[]))
                    .await?;
            }
            session.answered[kind as usize] = true;
            let memory = self.memory();
            session.check(fleet, |kind| !memory.asked[kind as usize].is_empty());
        }
    }

    /// The subscriptions and versions of a type, as fields of the first request of a connection.
    fn known(&self, kind: Type) -> Vec<u8> {
        let memory = self.memory();
        let mut fields = memory.asked[kind as usize].clone();
        for held in memory.held[kind as usize].values() {
            put(INITIAL, &held.entry, &mut fields);
        }
        fields
    }

    fn remember(&self, fleet: &Fleet, response: &Response) {
        let mut memory = self.memory();
        let held = &mut memory.held[response.kind as usize];
        for resource in &response.resources {
            let version = xxh3_64(resource.version);
            let name = xxh3_64(resource.name);
            let same = held.get(&name).is_some_and(|held| held.version == version);
            if same {
                fleet.note_resent(resource.body.len());
            } else {
                let entry = || HeldResource::new(resource.name, resource.version);
                held.insert(name, fleet.shared(name ^ version.rotate_left(32), entry));
            }
        }
        for name in &response.removed {
            held.remove(&xxh3_64(name));
        }
    }
}

impl HeldResource {
    fn new(name: &[u8], version: &[u8]) -> HeldResource {
        let mut entry = Vec::with_capacity(name.len() + version.len() + 8);
        put(1, name, &mut entry);
        put(2, version, &mut entry);
        HeldResource {
            version: xxh3_64(version),
            entry,
        }
    }
}

impl Session {
    /// Informs the fleet once all requests have been answered.
    fn check(&mut self, fleet: &Fleet, asks: impl Fn(Type) -> bool) {
        let is_answered = |kind: Type| self.answered[kind as usize] || (kind.is_named() && !asks(kind));
        if !self.is_ready && Type::ALL.into_iter().all(is_answered) {
            self.is_ready = true;
            fleet.ready(self.began);
        }
    }
}

/// Time before a proxy reconnects after its connection broke.
pub(crate) const PAUSE: Duration = Duration::from_millis(500);

/// Returns the names that the resources refer to and that are not in `known` yet, as fields of a request of either
/// protocol.
fn names(response: &Response, known: &mut FxHashSet<u64>) -> Vec<u8> {
    let mut names = Vec::new();
    for resource in &response.resources {
        response.kind.references(resource.body, |name| {
            if known.insert(xxh3_64(name)) {
                put(NAMES, name, &mut names);
            }
        });
    }
    names
}
