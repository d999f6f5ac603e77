//! A proxy without a data plane: it subscribes to everything over delta ADS, as Envoy does, and keeps the resources.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use istiod::proto::envoy::config::cluster::v3::Cluster;
use istiod::proto::envoy::config::cluster::v3::cluster::{ClusterDiscoveryType, DiscoveryType};
use istiod::proto::envoy::config::core::v3;
use istiod::proto::envoy::config::endpoint::v3::ClusterLoadAssignment;
use istiod::proto::envoy::config::listener::v3::Listener;
use istiod::proto::envoy::config::listener::v3::filter::ConfigType;
use istiod::proto::envoy::extensions::filters::network::http_connection_manager::v3::{
    HttpConnectionManager, http_connection_manager::RouteSpecifier,
};
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use istiod::proto::json::struct_from_json;
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Endpoint;

use super::envoy::Node;
use super::http::RUNTIME;
use super::wait;

/// The resource types of a subscription, in Envoy's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Type {
    Cluster,
    Endpoints,
    Listener,
    Route,
}

impl Type {
    pub(crate) const ALL: [Type; 4] = [Type::Cluster, Type::Endpoints, Type::Listener, Type::Route];

    pub(crate) fn url(self) -> &'static str {
        match self {
            Type::Cluster => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Type::Endpoints => "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            Type::Listener => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Type::Route => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        }
    }
}

/// A resource as received.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) version: String,
    pub(crate) body: Bytes,
}

impl fmt::Debug for Resource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({} bytes)", self.version, self.body.len())
    }
}

/// All resources of a proxy.
pub(crate) type Resources = BTreeMap<(Type, String), Resource>;

/// Fails with the names of the resources that differ between two proxies.
pub(crate) fn same(expected: &Resources, given: &Resources) -> Result<(), String> {
    let names: BTreeSet<_> = expected.keys().chain(given.keys()).collect();
    let differing: Vec<String> = names
        .into_iter()
        .filter(|name| expected.get(*name) != given.get(*name))
        .map(|name| format!("{name:?}: expected {:?}, not {:?}", expected.get(name), given.get(name)))
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    let count = differing.len();
    Err(format!(
        "{count} resources differ:\n{}",
        differing[..count.min(20)].join("\n")
    ))
}

#[derive(Default)]
struct State {
    resources: Resources,
    /// Resource names with an explicit subscription.
    requested: BTreeSet<(Type, String)>,
    /// The names that each cluster and listener refers to.
    references: BTreeMap<(Type, String), Vec<(Type, String)>>,
    /// The number of references to each name.
    referrers: BTreeMap<(Type, String), usize>,
    /// Names whose references have changed since the last request for their type.
    changed: BTreeSet<(Type, String)>,
    /// Types that have had at least one response.
    answered: BTreeSet<Type>,
    /// Resources and endpoints removed since [`AdsClient::mark`], as text.
    lost: Vec<String>,
    /// The types whose responses the proxy refuses, with the error.
    refuses: BTreeMap<Type, String>,
    ended: Option<String>,
    /// The requests of the present stream.
    outbox: Option<mpsc::Sender<DeltaDiscoveryRequest>>,
}

/// The proxy. Dropping it closes its connection.
pub(crate) struct AdsClient {
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

/// The reason why a stream has ended.
enum Ended {
    /// The daemon closed the stream.
    Closed,
    /// The daemon has no room for another first configuration, and asks proxies to try again.
    Busy,
}

impl Drop for AdsClient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl AdsClient {
    /// Connects to the daemon on this port of 127.0.0.1.
    pub(crate) fn connect(xds: u16, node: &Node) -> AdsClient {
        AdsClient::connect_with_extensions(xds, node, Vec::new())
    }

    /// Connects as a proxy that lists these extensions in its node.
    pub(crate) fn connect_with_extensions(xds: u16, node: &Node, extensions: Vec<String>) -> AdsClient {
        AdsClient::connect_holding(xds, node, extensions, Resources::new())
    }

    /// Connects as a proxy that was connected before and still has these resources, whose versions it reports.
    pub(crate) fn reconnect(xds: u16, node: &Node, held: &Resources) -> AdsClient {
        AdsClient::connect_holding(xds, node, Vec::new(), held.clone())
    }

    fn connect_holding(xds: u16, node: &Node, extensions: Vec<String>, held: Resources) -> AdsClient {
        let by_name = |(resource_type, _): &&(Type, String)| matches!(resource_type, Type::Endpoints | Type::Route);
        let requested: BTreeSet<_> = held.keys().filter(by_name).cloned().collect();
        let mut state = State {
            changed: requested.clone(),
            requested,
            ..State::default()
        };
        for (key, resource) in &held {
            state.refer(key, Some(resource)).expect("resources that were received");
        }
        state.resources = held;
        let state = Arc::new(Mutex::new(state));
        let metadata = node.metadata.as_object().map(struct_from_json);
        let extension = |name| v3::Extension {
            name,
            ..Default::default()
        };
        let node = v3::Node {
            id: node.id.clone(),
            metadata,
            extensions: extensions.into_iter().map(extension).collect(),
            ..Default::default()
        };
        let kept = Arc::clone(&state);
        let task = RUNTIME.spawn(async move {
            let ended = loop {
                match follow(xds, node.clone(), &kept).await {
                    Ok(Ended::Busy) => {}
                    Ok(Ended::Closed) => break "the daemon closed the stream".to_owned(),
                    Err(error) => break error,
                }
            };
            lock(&kept).ended = Some(ended);
        });
        AdsClient { state, task }
    }

    /// Returns why the connection ended, if it did.
    pub(crate) fn ended(&self) -> Option<String> {
        self.state().ended.clone()
    }

    /// Reports the health of the workload, as an agent does: an error message, or none if healthy.
    pub(crate) fn report_health(&self, complaint: Option<&str>) -> Result<(), String> {
        let request = DeltaDiscoveryRequest {
            type_url: "type.googleapis.com/istio.v1.HealthInformation".into(),
            error_detail: complaint.map(|message| istiod::proto::google::rpc::Status {
                message: message.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let outbox = self.state().outbox.clone().ok_or("no stream is open")?;
        outbox.try_send(request).map_err(|error| error.to_string())
    }

    /// Returns the proxy's resources once every request has been answered.
    pub(crate) fn complete(&self) -> Option<Resources> {
        let state = self.state();
        state.is_complete().then(|| state.resources.clone())
    }

    /// Describes what [`Self::complete`] still waits for.
    pub(crate) fn outstanding(&self) -> String {
        let state = self.state();
        let named = state
            .requested
            .iter()
            .filter(|name| !state.resources.contains_key(*name));
        format!(
            "answered {:?}, without {:?}, ended {:?}",
            state.answered,
            named.collect::<Vec<_>>(),
            state.ended
        )
    }

    /// Waits until `condition` returns a value for the proxy's resources. It must not use this client.
    pub(crate) fn until<T>(
        &self,
        what: &str,
        deadline: Duration,
        mut condition: impl FnMut(&Resources) -> Option<T>,
    ) -> Result<T, String> {
        wait::until(what, deadline, || {
            let state = self.state();
            if let Some(ended) = &state.ended {
                return Some(Err(format!("the connection ended: {ended}")));
            }
            if !state.is_complete() {
                return None;
            }
            condition(&state.resources).map(Ok)
        })
        .flatten()
    }

    /// Waits until the proxy has a resource. Unlike [`Self::until`], it does not wait for what the resource refers to.
    pub(crate) fn until_received(&self, resource: &(Type, String), deadline: Duration) -> Result<(), String> {
        wait::until(&resource.1, deadline, || {
            let state = self.state();
            if let Some(ended) = &state.ended {
                return Some(Err(format!("the connection ended: {ended}")));
            }
            state.resources.contains_key(resource).then_some(Ok(()))
        })
        .flatten()
    }

    /// Waits until the proxy has exactly these resources.
    pub(crate) fn until_same(&self, expected: &Resources, deadline: Duration) -> Result<(), String> {
        let reached = self.until("the expected resources", deadline, |given| {
            (given == expected).then_some(())
        });
        reached.map_err(|error| match same(expected, &self.complete().unwrap_or_default()) {
            Err(difference) => format!("{error}; {difference}"),
            Ok(()) => error,
        })
    }

    /// Waits for the first complete configuration.
    pub(crate) fn first(&self) -> Result<Resources, String> {
        self.until("a configured proxy", Duration::from_mins(1), |resources| {
            Some(resources.clone())
        })
    }

    /// Refuses all further responses of a type with this error.
    pub(crate) fn refuse(&self, resource_type: Type, error: &str) {
        self.state().refuses.insert(resource_type, error.to_owned());
    }

    /// Starts the recording that [`Self::lost`] returns.
    pub(crate) fn mark(&self) {
        self.state().lost.clear();
    }

    /// Returns resources removed since [`Self::mark`], and load assignments that lost endpoints.
    pub(crate) fn lost(&self) -> Vec<String> {
        self.state().lost.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Follows one stream until it ends.
async fn follow(xds: u16, node: v3::Node, state: &Mutex<State>) -> Result<Ended, String> {
    let (requests, outbox) = mpsc::channel(16);
    lock(state).outbox = Some(requests.clone());
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{xds}")).map_err(|error| error.to_string())?;
    let channel = endpoint.connect().await.map_err(|error| format!("{error:?}"))?;
    let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(1 << 30);
    let closed = |_| "stream is closed".to_owned();
    let first = first_requests(&lock(state), node);
    for request in first {
        requests.send(request).await.map_err(closed)?;
    }
    let stream = client.delta_aggregated_resources(ReceiverStream::new(outbox)).await;
    let mut responses = stream.map_err(|status| status.to_string())?.into_inner();
    loop {
        let response = match responses.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return Ok(Ended::Closed),
            Err(status) if status.code() == Code::ResourceExhausted && lock(state).answered.is_empty() => {
                return Ok(Ended::Busy);
            }
            Err(status) => return Err(status.to_string()),
        };
        let refused = lock(state)
            .refuses
            .iter()
            .find(|(refused, _)| refused.url() == response.type_url)
            .map(|(_, error)| error.clone());
        let is_refused = refused.is_some();
        let ack = DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            error_detail: refused.map(|message| istiod::proto::google::rpc::Status {
                code: 13,
                message,
                ..Default::default()
            }),
            ..Default::default()
        };
        requests.send(ack).await.map_err(closed)?;
        if is_refused {
            continue;
        }
        let subscription = lock(state).take_in(response)?;
        if let Some(subscription) = subscription {
            requests.send(subscription).await.map_err(closed)?;
        }
    }
}

/// Returns the requests of a new stream: clusters and listeners, and everything else that the proxy has.
fn first_requests(state: &State, node: v3::Node) -> Vec<DeltaDiscoveryRequest> {
    let mut node = Some(node);
    let mut requests = Vec::new();
    for resource_type in Type::ALL {
        let of_type = |key: &&(Type, String)| key.0 == resource_type;
        let names: Vec<String> = state
            .requested
            .iter()
            .filter(of_type)
            .map(|key| key.1.clone())
            .collect();
        let held = state.resources.iter().filter(|(key, _)| key.0 == resource_type);
        let versions = held.map(|(key, resource)| (key.1.clone(), resource.version.clone()));
        if matches!(resource_type, Type::Cluster | Type::Listener) || !names.is_empty() {
            requests.push(DeltaDiscoveryRequest {
                node: node.take(),
                type_url: resource_type.url().into(),
                resource_names_subscribe: names,
                initial_resource_versions: versions.collect(),
                ..Default::default()
            });
        }
    }
    requests
}

impl State {
    /// Returns true once every request has been answered.
    fn is_complete(&self) -> bool {
        let answered = self.answered.contains(&Type::Cluster) && self.answered.contains(&Type::Listener);
        answered && self.requested.iter().all(|name| self.resources.contains_key(name))
    }

    /// Stores the resources of a response. Returns a request for names that are new or gone, if there are any.
    fn take_in(&mut self, response: DeltaDiscoveryResponse) -> Result<Option<DeltaDiscoveryRequest>, String> {
        let known = Type::ALL.into_iter().find(|known| known.url() == response.type_url);
        let resource_type = known.ok_or_else(|| format!("{}: response without a subscription", response.type_url))?;
        self.answered.insert(resource_type);
        for resource in response.resources {
            let body = resource.resource.ok_or("resource without a body")?.value;
            let key = (resource_type, resource.name);
            let new = Resource {
                // A version in capital letters is the same; they matter to clients that warm clusters.
                version: resource.version.to_lowercase(),
                body,
            };
            self.refer(&key, Some(&new))?;
            let old = self.resources.insert(key.clone(), new.clone());
            if let (Type::Endpoints, Some(old)) = (resource_type, old) {
                let (before, after) = (endpoints(&old)?.len(), endpoints(&new)?.len());
                if after < before {
                    self.lost.push(format!("{}: {before} endpoints, then {after}", key.1));
                }
            }
        }
        for name in response.removed_resources {
            let key = (resource_type, name);
            self.refer(&key, None)?;
            self.lose(&key);
        }
        Ok(match resource_type {
            Type::Cluster => self.ask(Type::Endpoints),
            Type::Listener => self.ask(Type::Route),
            Type::Endpoints | Type::Route => None,
        })
    }

    /// Records what a resource refers to; nothing if it is gone.
    fn refer(&mut self, key: &(Type, String), resource: Option<&Resource>) -> Result<(), String> {
        let (referred, names) = match (key.0, resource) {
            (Type::Cluster, Some(resource)) => (Type::Endpoints, load_assignment_name(resource)?),
            (Type::Listener, Some(resource)) => (Type::Route, route_names(resource)?),
            (Type::Endpoints | Type::Route, _) => return Ok(()),
            (of, None) => (of, Vec::new()),
        };
        let names: Vec<_> = names.into_iter().map(|name| (referred, name)).collect();
        for name in &names {
            *self.referrers.entry(name.clone()).or_default() += 1;
        }
        self.changed.extend(names.iter().cloned());
        let before = self.references.insert(key.clone(), names).unwrap_or_default();
        for name in &before {
            if let Some(count) = self.referrers.get_mut(name) {
                *count -= 1;
            }
        }
        self.changed.extend(before);
        Ok(())
    }

    fn lose(&mut self, key: &(Type, String)) {
        if self.resources.remove(key).is_some() {
            self.lost.push(format!("{key:?}"));
        }
    }

    /// Subscribes to the resources of a type that others name, and unsubscribes from the others.
    fn ask(&mut self, referred: Type) -> Option<DeltaDiscoveryRequest> {
        let of_type = |key: &(Type, String)| key.0 == referred;
        let changed: Vec<_> = self.changed.extract_if(.., of_type).collect();
        let is_named = |key: &&(Type, String)| self.referrers.get(*key).is_some_and(|count| *count > 0);
        let (named, unnamed): (Vec<_>, Vec<_>) = changed.iter().partition(is_named);
        let subscribe: Vec<_> = named.into_iter().filter(|key| !self.requested.contains(*key)).collect();
        let unsubscribe: Vec<_> = unnamed
            .into_iter()
            .filter(|key| self.requested.contains(*key))
            .collect();
        for key in &unsubscribe {
            self.requested.remove(*key);
            self.lose(key);
        }
        self.requested.extend(subscribe.iter().copied().cloned());
        let texts = |keys: Vec<&(Type, String)>| keys.into_iter().map(|(_, name)| name.clone()).collect();
        let request = DeltaDiscoveryRequest {
            type_url: referred.url().into(),
            resource_names_subscribe: texts(subscribe),
            resource_names_unsubscribe: texts(unsubscribe),
            ..Default::default()
        };
        let empty = request.resource_names_subscribe.is_empty() && request.resource_names_unsubscribe.is_empty();
        (!empty).then_some(request)
    }
}

fn decode<M: Message + Default>(resource: &Resource) -> Result<M, String> {
    M::decode(resource.body.clone()).map_err(|error| error.to_string())
}

fn load_assignment_name(cluster: &Resource) -> Result<Vec<String>, String> {
    let cluster: Cluster = decode(cluster)?;
    let by_eds = cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(DiscoveryType::Eds as i32));
    let name = cluster
        .eds_cluster_config
        .map(|config| config.service_name)
        .filter(|name| !name.is_empty());
    Ok(by_eds.then(|| name.unwrap_or(cluster.name)).into_iter().collect())
}

fn route_names(listener: &Resource) -> Result<Vec<String>, String> {
    let listener: Listener = decode(listener)?;
    let chains = listener.filter_chains.into_iter().chain(listener.default_filter_chain);
    let mut names = Vec::new();
    for filter in chains.flat_map(|chain| chain.filters) {
        let Some(ConfigType::TypedConfig(any)) = filter.config_type else {
            continue;
        };
        let manager: Option<HttpConnectionManager> = any.unpack().map_err(|error| error.to_string())?;
        if let Some(RouteSpecifier::Rds(rds)) = manager.and_then(|manager| manager.route_specifier) {
            names.push(rds.route_config_name);
        }
    }
    Ok(names)
}

/// Returns the addresses with ports in a load assignment, sorted.
pub(crate) fn endpoints(assignment: &Resource) -> Result<Vec<String>, String> {
    let mut addresses: Vec<_> = all_endpoints(assignment)?
        .into_iter()
        .map(|(_, address, _)| address)
        .collect();
    addresses.sort();
    Ok(addresses)
}

/// Returns the endpoints of a load assignment with priorities and weights, in one line.
pub(crate) fn weighted_endpoints(assignment: &Resource) -> Result<String, String> {
    let shown = |(priority, address, weight)| format!("{address} priority {priority} weight {weight}");
    let mut rows: Vec<_> = all_endpoints(assignment)?.into_iter().map(shown).collect();
    rows.sort();
    Ok(rows.join(" "))
}

/// Returns priority, address with port, and weight of each endpoint.
fn all_endpoints(assignment: &Resource) -> Result<Vec<(u32, String, u32)>, String> {
    use istiod::proto::envoy::config::core::v3::address::Address;
    use istiod::proto::envoy::config::core::v3::socket_address::PortSpecifier;
    use istiod::proto::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
    let assignment: ClusterLoadAssignment = decode(assignment)?;
    let mut rows = Vec::new();
    for locality in assignment.endpoints {
        for endpoint in locality.lb_endpoints {
            let weight = endpoint.load_balancing_weight.unwrap_or(1);
            let Some(HostIdentifier::Endpoint(endpoint)) = endpoint.host_identifier else {
                continue;
            };
            let Some(Address::SocketAddress(socket)) = endpoint.address.and_then(|address| address.address) else {
                continue;
            };
            let port = match socket.port_specifier {
                Some(PortSpecifier::PortValue(port)) => port,
                _ => 0,
            };
            rows.push((locality.priority, format!("{}:{port}", socket.address), weight));
        }
    }
    Ok(rows)
}
