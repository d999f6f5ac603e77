//! A model client of the control plane, and the content that it is served.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use prost::Message;
use smol_str::{SmolStr, format_smolstr};

use crate::{
    base::Shared,
    generate::{
        EncodedResource, RequestedResources, ResourceSnapshot, ResourceType,
        requested::ON_DEMAND,
        resource::{PartResources, TypeResources, UnknownRoutes},
    },
    model::Revision,
    proto::envoy::{
        config::cluster::v3::Cluster,
        service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse},
    },
    xds::{
        Connection, Protocol, Request, Response,
        connection::SubscriptionChange,
        share::{
            initial_versions::InitialVersions,
            names::Names,
            quarantine::{Build, Quarantine},
        },
    },
};

pub(super) const TYPES: [ResourceType; 5] = [
    ResourceType::Cluster,
    ResourceType::Endpoint,
    ResourceType::Listener,
    ResourceType::Route,
    ResourceType::Extension,
];

/// The content of one type: name → generation. Odd names are in the second part.
pub(super) type Content = BTreeMap<u8, u8>;

pub(super) fn resource(name: u8, generation: u8) -> Arc<EncodedResource> {
    let name = format_smolstr!("r{name}");
    let message = Cluster {
        name: name.to_string(),
        alt_stat_name: generation.to_string(),
        ..Default::default()
    };
    Arc::new(EncodedResource::new(name, &message))
}

/// The content that the control plane serves. Parts that do not change keep their allocation.
#[derive(Default)]
pub(super) struct World {
    pub(super) contents: [Content; TYPES.len()],
    pub(super) revision: u64,
}

impl World {
    pub(super) fn snapshot(&self) -> Arc<ResourceSnapshot> {
        let views = ResourceType::ALL.iter().map(|resource_type| {
            let content = TYPES
                .iter()
                .position(|t| t == resource_type)
                .map(|index| &self.contents[index]);
            let parts = (0..2).map(|part| {
                let resources = content.into_iter().flatten().filter(|(name, _)| **name % 2 == part);
                let mut view = PartResources::default();
                for (name, generation) in resources {
                    let resource = resource(*name, *generation);
                    view.digest = view.digest.wrapping_add(resource.version.value());
                    view.resources.insert(resource.name.clone(), resource);
                }
                Arc::new(view)
            });
            TypeResources {
                parts: parts.collect(),
                ..TypeResources::default()
            }
        });
        Arc::new(ResourceSnapshot::new(
            Revision(self.revision),
            views.collect(),
            UnknownRoutes::Omitted,
        ))
    }

    /// Returns the snapshot of a client that is served on demand: only the requested resources.
    fn snapshot_for(&self, demand: RequestedResources) -> Arc<ResourceSnapshot> {
        let as_single_list = self.snapshot();
        let views = ResourceType::ALL.iter().map(|resource_type| {
            if !ON_DEMAND.contains(resource_type) {
                return as_single_list.resources(*resource_type).clone();
            }
            let mut view = PartResources::default();
            let requested = demand.iter().find(|(requested, _)| requested == resource_type);
            for name in requested.iter().flat_map(|(_, names)| names.iter()) {
                if let Some(resource) = as_single_list.resources(*resource_type).get(name) {
                    view.digest = view.digest.wrapping_add(resource.version.value());
                    view.resources.insert(name.clone(), resource.clone());
                }
            }
            TypeResources {
                parts: [Arc::new(view)].into(),
                ..TypeResources::default()
            }
        });
        let snapshot = ResourceSnapshot::new(as_single_list.revision, views.collect(), UnknownRoutes::Omitted);
        Arc::new(snapshot.with_requested(Some(Shared::new(demand))))
    }
}

/// A client: the resources that it holds, the names that it requested, and the responses that it has not answered yet.
pub(super) struct Client {
    pub(super) protocol: Protocol,
    /// True if it is served on demand.
    pub(super) on_demand: bool,
    pub(super) quarantine: Option<(Arc<Quarantine>, Build)>,
    pub(super) connection: Connection,
    pub(super) held: [BTreeMap<SmolStr, Arc<EncodedResource>>; TYPES.len()],
    pub(super) names: [BTreeSet<SmolStr>; TYPES.len()],
    nonces: [SmolStr; TYPES.len()],
    pub(super) inbox: VecDeque<Response>,
    /// The clusters that changed since their endpoints arrived: Envoy does not use them before.
    pub(super) warming: BTreeSet<SmolStr>,
    /// The request for clusters that waits until none of them warms.
    pub(super) paused: Option<Paused>,
    /// A state-of-the-world request without a nonce starts a new subscription, even while a response is in flight.
    asked_again: [bool; TYPES.len()],
}

/// A request for clusters that Envoy sends later.
pub(super) enum Paused {
    /// The first one of a connection.
    Subscription,
    /// The answer to the response with this nonce, and an error.
    Answer(SmolStr, Option<String>),
}

impl Client {
    pub(super) fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            on_demand: false,
            quarantine: None,
            connection: Connection::new(protocol),
            held: Default::default(),
            names: Default::default(),
            nonces: Default::default(),
            inbox: VecDeque::new(),
            warming: BTreeSet::new(),
            paused: None,
            asked_again: Default::default(),
        }
    }

    pub(super) fn on_demand(protocol: Protocol) -> Self {
        Self {
            on_demand: true,
            connection: Connection::on_demand(protocol),
            ..Self::new(protocol)
        }
    }

    /// Returns a client from which resources are withheld that it, or others of its build, refused.
    pub(super) fn quarantined(protocol: Protocol, quarantine: Quarantine, build: Build) -> Self {
        let mut client = Self::new(protocol);
        client.quarantine = Some((Arc::new(quarantine), build));
        client.connection = client.new_connection();
        client
    }

    fn new_connection(&self) -> Connection {
        let connection = if self.on_demand {
            Connection::on_demand(self.protocol)
        } else {
            Connection::new(self.protocol)
        };
        connection.with_quarantine(self.quarantine.clone())
    }

    /// Returns true if the client subscribes to all resources of a type.
    pub(super) fn is_wildcard(&self, index: usize) -> bool {
        TYPES[index].is_wildcard() && !self.on_demand
    }

    /// Publishes the current content to the client.
    pub(super) fn publish(&mut self, world: &World) {
        let snapshot = match self.connection.requested_resources() {
            Some(demand) => world.snapshot_for(demand),
            None => world.snapshot(),
        };
        let responses = self.connection.on_snapshot(snapshot);
        self.receive(responses);
    }

    pub(super) fn request(&mut self, index: usize, nonce: SmolStr, error: Option<String>, change: SubscriptionChange) {
        let request = Request {
            resource_type: TYPES[index],
            nonce,
            error,
            change,
        };
        let reaction = self.connection.on_request(request).expect("names within the limit");
        self.receive(reaction.responses);
    }

    pub(super) fn receive(&mut self, responses: Vec<Response>) {
        for response in responses {
            let waiting = self
                .inbox
                .iter()
                .filter(|other| other.resource_type == response.resource_type)
                .count();
            let index = TYPES.iter().position(|t| *t == response.resource_type);
            let again = index.is_some_and(|index| std::mem::take(&mut self.asked_again[index]));
            assert!(waiting == 0 || again, "one response of a type is in flight at a time");
            self.inbox.push_back(response);
        }
    }

    pub(super) fn connect(&mut self) {
        self.connection = self.new_connection();
        // The server may have been killed: the next one does not know what was lost with the connection.
        self.inbox.clear();
        self.subscribe();
    }

    /// Sends the first requests of a connection. Late answers to the last one precede them.
    pub(super) fn subscribe(&mut self) {
        let late = std::mem::take(&mut self.nonces).into_iter().enumerate();
        for (index, nonce) in late.filter(|(_, nonce)| !nonce.is_empty()) {
            self.respond(index, nonce, Some("nacked".to_owned()));
        }
        self.paused = None;
        for (index, resource_type) in TYPES.iter().enumerate() {
            if *resource_type == ResourceType::Cluster && self.is_paused() {
                self.paused = Some(Paused::Subscription);
            } else {
                self.subscribe_to(index);
            }
        }
    }

    /// Returns true if requests for clusters wait. Clients that are served on demand do not warm clusters.
    fn is_paused(&self) -> bool {
        !self.on_demand && !self.warming.is_empty()
    }

    fn subscribe_to(&mut self, index: usize) {
        let names: Arc<Names> = Arc::new(self.names[index].iter().cloned().collect());
        let wildcard = self.is_wildcard(index);
        match self.protocol {
            Protocol::Sotw if wildcard || !names.is_empty() => {
                self.request(index, SmolStr::default(), None, SubscriptionChange::Names(names));
            }
            Protocol::Delta if wildcard || !names.is_empty() => {
                let held = self.held[index].iter();
                let initial_versions = initial_versions(held.map(|(name, r)| (name.to_string(), version_sent(r))));
                let change = SubscriptionChange::Change {
                    subscribe: names,
                    unsubscribe: Vec::new(),
                    initial_versions,
                };
                self.request(index, SmolStr::default(), None, change);
            }
            _ => {}
        }
    }

    /// Sends the request that waited for clusters to warm.
    fn resume(&mut self) {
        if self.is_paused() {
            return;
        }
        match self.paused.take() {
            Some(Paused::Subscription) => self.subscribe_to(0),
            Some(Paused::Answer(nonce, error)) => self.respond(0, nonce, error),
            None => {}
        }
    }

    pub(super) fn watch(&mut self, index: usize, names: &BTreeSet<u8>) {
        if self.is_wildcard(index) {
            return;
        }
        let names: BTreeSet<SmolStr> = names.iter().map(|name| format_smolstr!("r{name}")).collect();
        let before = std::mem::replace(&mut self.names[index], names.clone());
        self.held[index].retain(|name, _| names.contains(name));
        if TYPES[index] == ResourceType::Endpoint {
            self.warming.retain(|name| names.contains(name));
        }
        match self.protocol {
            Protocol::Sotw => {
                let nonce = if before.is_empty() {
                    SmolStr::default()
                } else {
                    self.nonces[index].clone()
                };
                self.asked_again[index] |= nonce.is_empty();
                self.request(
                    index,
                    nonce,
                    None,
                    SubscriptionChange::Names(Arc::new(names.into_iter().collect())),
                );
            }
            Protocol::Delta => {
                let subscribe = Arc::new(names.difference(&before).cloned().collect());
                let unsubscribe = before.difference(&names).cloned().collect();
                let change = SubscriptionChange::Change {
                    subscribe,
                    unsubscribe,
                    initial_versions: InitialVersions::default(),
                };
                self.request(index, SmolStr::default(), None, change);
            }
        }
        self.resume();
    }

    /// Answers the oldest response.
    pub(super) fn answer(&mut self, accept: bool) -> bool {
        let Some(response) = self.inbox.pop_front() else {
            return false;
        };
        let index = TYPES
            .iter()
            .position(|t| *t == response.resource_type)
            .expect("a requested type");
        self.nonces[index] = response.nonce.clone();
        let error = (!accept).then(|| "nacked".to_owned());
        if accept {
            self.apply(index, &response);
        } else {
            // Envoy removes what a response removes even if it rejects the resources of the response.
            self.remove(index, &response);
        }
        if TYPES[index] == ResourceType::Endpoint {
            self.end_warming(&response);
        }
        if TYPES[index] == ResourceType::Cluster && self.is_paused() {
            self.paused = Some(Paused::Answer(response.nonce, error));
        } else {
            self.respond(index, response.nonce, error);
        }
        self.resume();
        true
    }

    /// Sends an ACK, or a NACK with an error.
    fn respond(&mut self, index: usize, nonce: SmolStr, error: Option<String>) {
        let change = match self.protocol {
            Protocol::Sotw => SubscriptionChange::Names(Arc::new(self.names[index].iter().cloned().collect())),
            Protocol::Delta => SubscriptionChange::Change {
                subscribe: Arc::default(),
                unsubscribe: Vec::new(),
                initial_versions: InitialVersions::default(),
            },
        };
        self.request(index, nonce, error, change);
    }

    pub(super) fn remove(&mut self, index: usize, response: &Response) {
        let is_whole = self.protocol == Protocol::Sotw && TYPES[index].is_wildcard();
        let is_removed = |name: &SmolStr| {
            let listed = response.resources.iter().any(|resource| resource.name == *name);
            response.removed.contains(name) || (is_whole && !listed)
        };
        self.held[index].retain(|name, _| !is_removed(name));
        if TYPES[index] == ResourceType::Cluster {
            self.warming.retain(|name| !is_removed(name));
        }
    }

    pub(super) fn apply(&mut self, index: usize, response: &Response) {
        self.remove(index, response);
        let wildcard = self.is_wildcard(index);
        for resource in response.resources.iter() {
            if wildcard || self.names[index].contains(&resource.name) {
                let held = self.held[index].insert(resource.name.clone(), resource.clone());
                let is_changed = held.is_none_or(|held| held.version != resource.version);
                if TYPES[index] == ResourceType::Cluster && is_changed && self.names[1].contains(&resource.name) {
                    self.warming.insert(resource.name.clone());
                }
            }
        }
    }

    /// Ends the warming of clusters whose endpoints arrived, were removed or were rejected.
    fn end_warming(&mut self, response: &Response) {
        let resources = response.resources.iter().map(|resource| &resource.name);
        for name in resources.chain(&response.removed) {
            self.warming.remove(name);
        }
    }

    pub(super) fn settle(&mut self, world: &World) {
        for _ in 0..1000 {
            if !self.answer(true) {
                // The requested resources may not be generated yet.
                self.publish(world);
                if self.inbox.is_empty() && self.connection.holds_back_clusters() {
                    // As the stream does after some seconds.
                    let responses = self.connection.supersede_clusters();
                    self.receive(responses);
                }
                if self.inbox.is_empty() {
                    return;
                }
            }
        }
        panic!("client and server do not converge");
    }
}

/// Returns the version of a resource as the client was sent it.
fn version_sent(resource: &EncodedResource) -> String {
    let response = DeltaDiscoveryResponse::decode(resource.delta_frame().to_bytes()).expect("a resource");
    response.resources[0].version.clone()
}

/// Returns the initial versions of a reconnecting client.
pub(super) fn initial_versions(held: impl Iterator<Item = (String, String)>) -> InitialVersions {
    let request = DeltaDiscoveryRequest {
        initial_resource_versions: held.collect(),
        ..Default::default()
    };
    InitialVersions::read(&request.encode_to_vec()).expect("a valid request")
}
