//! The subscriptions of a ztunnel: workloads and services (WDS) and policies (WADS) over delta ADS. It reconnects, and
//! names what it has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use istiod::proto::envoy::config::core::v3::Node;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource};
use istiod::proto::google::rpc::Status;
use istiod::proto::istio::security::Authorization;
use istiod::proto::istio::workload::{Address, Workload};
use istiod::proto::json::struct_from_json;
use prost::Message;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

use super::addresses::{Addresses, NoRoute, Request, Route, alias};
use super::policy::{self, Connection};
use super::{Spec, start};
use crate::support::agent::{Agent, ClientCredentials};

const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";
/// The pause before the next connection.
const RECONNECT: Duration = Duration::from_millis(200);
/// Time limit of an answer to a requested name, and of the knowledge of an own pod.
const ANSWERED: Duration = Duration::from_secs(10);

/// The subscription of a ztunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subscription {
    /// All workloads and services.
    Wildcard,
    /// Those that its pods connect to.
    OnDemand,
}

/// Everything that a ztunnel has received.
#[derive(Debug)]
pub(super) struct View {
    pub(super) addresses: Addresses,
    /// Policies by resource name.
    policies: BTreeMap<String, Authorization>,
    /// The last reason for the end of a connection.
    pub(super) ended: String,
    subscription: Subscription,
    /// Types that have had a response.
    answered: BTreeSet<&'static str>,
    /// Requested names, each with true once it has been answered.
    requested: BTreeMap<String, bool>,
    /// Versions of the held resources.
    versions: BTreeMap<(&'static str, String), String>,
}

impl View {
    fn new(subscription: Subscription) -> View {
        View {
            addresses: Addresses::default(),
            policies: BTreeMap::new(),
            ended: String::new(),
            subscription,
            answered: BTreeSet::new(),
            requested: BTreeMap::new(),
            versions: BTreeMap::new(),
        }
    }

    /// Reports whether each first subscription has been answered.
    pub(super) fn is_initialized(&self) -> bool {
        let is_answered = |type_url| self.answered.contains(type_url);
        is_answered(AUTHORIZATION) && (self.subscription == Subscription::OnDemand || is_answered(ADDRESS))
    }

    /// Returns the way to a destination.
    pub(super) fn route(&self, request: Request<'_>) -> Result<Route, NoRoute> {
        let is_settled = |name: &str| {
            self.subscription == Subscription::Wildcard || self.requested.get(name).is_some_and(|answered| *answered)
        };
        self.addresses.route(request, &is_settled)
    }

    /// Decides whether the policies admit a connection to a workload.
    pub(super) fn verdict(&self, workload: &Workload, connection: &Connection) -> Result<(), String> {
        policy::verdict(self.policies.iter(), workload, connection)
    }

    /// Applies a response. The error is the reason of a NACK.
    fn apply(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), String> {
        let type_url = match response.type_url.as_str() {
            ADDRESS => ADDRESS,
            AUTHORIZATION => AUTHORIZATION,
            other => return Err(format!("{other} was not requested")),
        };
        for resource in &response.resources {
            self.insert(type_url, resource)?;
        }
        for name in &response.removed_resources {
            self.versions.remove(&(type_url, name.clone()));
            if type_url == ADDRESS {
                self.addresses.remove(name);
                self.answer(name);
            } else {
                self.policies.remove(name);
            }
        }
        self.answered.insert(type_url);
        Ok(())
    }

    fn insert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        let name = &resource.name;
        let body = &resource
            .resource
            .as_ref()
            .ok_or_else(|| format!("{name} is empty"))?
            .value;
        let unreadable = |error: prost::DecodeError| format!("{name}: {error}");
        if type_url == ADDRESS {
            let address = Address::decode(body.clone()).map_err(unreadable)?;
            self.addresses.insert(name, address)?;
            for answered in resource.aliases.iter().chain([name]) {
                self.answer(answered);
            }
        } else {
            let policy = Authorization::decode(body.clone()).map_err(unreadable)?;
            self.policies.insert(name.clone(), policy);
        }
        self.versions.insert((type_url, name.clone()), resource.version.clone());
        Ok(())
    }

    fn answer(&mut self, name: &str) {
        if let Some(answered) = self.requested.get_mut(name) {
            *answered = true;
        }
    }

    /// Returns the requests of a new connection.
    fn first_requests(&self, node: Node) -> Vec<DeltaDiscoveryRequest> {
        let held = |type_url: &str| {
            let of_type = self.versions.iter().filter(|((held, _), _)| *held == type_url);
            of_type
                .map(|((_, name), version)| (name.clone(), version.clone()))
                .collect()
        };
        let requested: Vec<String> = self.requested.keys().cloned().collect();
        let mut request = DeltaDiscoveryRequest {
            node: Some(node),
            type_url: ADDRESS.to_owned(),
            initial_resource_versions: held(ADDRESS),
            ..Default::default()
        };
        if self.subscription == Subscription::OnDemand {
            // The protocol has no subscription to nothing: a name that is unsubscribed at once.
            request.resource_names_subscribe = requested.into_iter().chain([String::new()]).collect();
            request.resource_names_unsubscribe = vec![String::new()];
        }
        let policies = DeltaDiscoveryRequest {
            type_url: AUTHORIZATION.to_owned(),
            initial_resource_versions: held(AUTHORIZATION),
            ..Default::default()
        };
        vec![request, policies]
    }
}

/// The connection to the control plane. Dropping it closes the connection.
pub(super) struct Discovery {
    view: watch::Sender<View>,
    names: mpsc::Sender<String>,
    task: JoinHandle<()>,
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Discovery {
    /// Connects, again and again.
    pub(super) fn start(spec: &Spec, control_plane: Agent, token: ClientCredentials) -> Discovery {
        let view = watch::Sender::new(View::new(spec.subscription));
        let (names, mut wanted) = mpsc::channel(64);
        let (node, sink) = (node(spec), view.clone());
        let task = start(async move {
            loop {
                let ended = follow(&control_plane, &token, &node, &sink, &mut wanted).await;
                let ended = ended
                    .err()
                    .unwrap_or_else(|| "the control plane closed the stream".to_owned());
                sink.send_modify(|view| view.ended = ended);
                tokio::time::sleep(RECONNECT).await;
            }
        });
        Discovery { view, names, task }
    }

    /// Returns everything received so far.
    pub(super) fn view(&self) -> watch::Ref<'_, View> {
        self.view.borrow()
    }

    /// Requests a name and waits for the answer.
    pub(super) async fn require(&self, name: &str) -> Result<(), String> {
        let mut is_new = false;
        self.view.send_if_modified(|view| {
            is_new = !view.requested.contains_key(name);
            view.requested.entry(name.to_owned()).or_default();
            is_new
        });
        if is_new {
            let sent = self.names.send(name.to_owned()).await;
            sent.map_err(|_| "the ztunnel has ended".to_owned())?;
        }
        let answered = |view: &View| view.requested.get(name).copied().unwrap_or_default();
        self.until(answered)
            .await
            .ok_or_else(|| format!("no answer for {name} in time"))
    }

    /// Returns the workload with this address, and waits until it is known.
    pub(super) async fn workload_at(&self, network: &str, address: IpAddr) -> Result<Arc<Workload>, String> {
        let known = |view: &View| view.addresses.workload_at(network, address).cloned();
        let on_demand = self.view().subscription == Subscription::OnDemand;
        let found = known(&self.view());
        if let Some(found) = found {
            return Ok(found);
        }
        if on_demand {
            self.require(&alias(network, address)).await?;
        }
        let _ = self.until(|view| known(view).is_some()).await;
        let found = known(&self.view());
        found.ok_or_else(|| format!("no workload has the address {address}"))
    }

    /// Waits until policies no longer admit a connection to the workload with this address.
    pub(super) async fn until_denied(&self, (network, address): (&str, IpAddr), connection: &Connection) {
        let mut changes = self.view.subscribe();
        let denied = |view: &View| {
            let workload = view.addresses.workload_at(network, address);
            workload.is_some_and(|workload| view.verdict(workload, connection).is_err())
        };
        // It fails only when the ztunnel ends.
        let _ = changes.wait_for(denied).await;
    }

    /// Waits for a condition, within a time limit.
    async fn until(&self, is_met: impl FnMut(&View) -> bool) -> Option<()> {
        let mut changes = self.view.subscribe();
        let met = tokio::time::timeout(ANSWERED, changes.wait_for(is_met)).await;
        met.is_ok_and(|met| met.is_ok()).then_some(())
    }
}

/// The node of a ztunnel, as its connection names it.
fn node(spec: &Spec) -> Node {
    let Spec {
        name,
        namespace,
        address,
        node,
        cluster,
        network,
        ..
    } = spec;
    let metadata = json!({
        "NAME": name,
        "NAMESPACE": namespace,
        "SERVICE_ACCOUNT": "ztunnel",
        "INSTANCE_IPS": address,
        "ISTIO_VERSION": "1.30.3",
        "NODE_NAME": node,
        "CLUSTER_ID": cluster,
        "NETWORK": network,
    });
    Node {
        id: format!("ztunnel~{address}~{name}.{namespace}~{namespace}.svc.cluster.local"),
        metadata: metadata.as_object().map(struct_from_json),
        ..Default::default()
    }
}

/// Follows one connection to its end.
async fn follow(
    control_plane: &Agent,
    token: &ClientCredentials,
    node: &Node,
    view: &watch::Sender<View>,
    wanted: &mut mpsc::Receiver<String>,
) -> Result<(), String> {
    let channel = control_plane.channel(token).await?;
    let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(64 << 20);
    let (requests, outbox) = mpsc::channel(16);
    let closed = |_| "the stream is closed".to_owned();
    let first = view.borrow().first_requests(node.clone());
    for request in first {
        requests.send(request).await.map_err(closed)?;
    }
    let stream = client
        .delta_aggregated_resources(token.request(ReceiverStream::new(outbox)))
        .await;
    let mut responses = stream.map_err(|status| status.to_string())?.into_inner();
    loop {
        tokio::select! {
            response = responses.message() => {
                let Some(response) = response.map_err(|status| status.to_string())? else {
                    return Ok(());
                };
                let mut applied = Ok(());
                view.send_modify(|view| applied = view.apply(&response));
                let answer = DeltaDiscoveryRequest {
                    type_url: response.type_url,
                    response_nonce: response.nonce,
                    error_detail: applied.err().map(|message| Status { code: 13, message, ..Default::default() }),
                    ..Default::default()
                };
                requests.send(answer).await.map_err(closed)?;
            }
            Some(name) = wanted.recv() => {
                let subscribe = DeltaDiscoveryRequest {
                    type_url: ADDRESS.to_owned(),
                    resource_names_subscribe: vec![name],
                    ..Default::default()
                };
                requests.send(subscribe).await.map_err(closed)?;
            }
        }
    }
}
