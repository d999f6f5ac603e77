//! Tests of the connection with a model client: whatever it accepts, rejects, drops or requests, it ends with exactly
//! the resources of a full generation.

mod addresses;
mod quarantine;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;
use smol_str::{SmolStr, format_smolstr};

use super::{
    connection::SubscriptionChange,
    share::{
        initial_versions::InitialVersions,
        names::Names,
        quarantine::{Build, Quarantine},
    },
    watched::Progress,
    *,
};
use crate::{
    base::Shared,
    generate::{
        EncodedResource, RequestedResources, ResourceSnapshot, ResourceType,
        requested::ON_DEMAND,
        resource::{PartResources, RoutePlaceholders, TypeResources, UnknownRoutes},
    },
    model::Revision,
    proto::envoy::{
        config::cluster::v3::Cluster,
        service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse},
    },
};

const TYPES: [ResourceType; 5] = [
    ResourceType::Cluster,
    ResourceType::Endpoint,
    ResourceType::Listener,
    ResourceType::Route,
    ResourceType::Extension,
];

/// The content of one type: name → generation. Odd names are in the second part.
type Content = BTreeMap<u8, u8>;

#[derive(Clone, Debug)]
enum Step {
    Snapshot(usize, Content),
    Answer {
        accept: bool,
    },
    Watch(usize, BTreeSet<u8>),
    Publish,
    /// The client connects again, after the content has changed.
    Reconnect(usize, Content),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let content = prop::collection::btree_map(0u8..8, 0u8..4, 0..6);
    let names = prop::collection::btree_set(0u8..8, 0..5);
    let step = prop_oneof![
        3 => (0..TYPES.len(), content.clone()).prop_map(|(index, content)| Step::Snapshot(index, content)),
        6 => prop::bool::weighted(0.8).prop_map(|accept| Step::Answer { accept }),
        2 => (0..TYPES.len(), names).prop_map(|(index, names)| Step::Watch(index, names)),
        2 => Just(Step::Publish),
        1 => (0..TYPES.len(), content).prop_map(|(index, content)| Step::Reconnect(index, content)),
    ];
    prop::collection::vec(step, 1..60)
}

fn resource(name: u8, generation: u8) -> Arc<EncodedResource> {
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
struct World {
    contents: [Content; TYPES.len()],
    revision: u64,
}

impl World {
    fn snapshot(&self) -> Arc<ResourceSnapshot> {
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
struct Client {
    protocol: Protocol,
    /// True if it is served on demand.
    on_demand: bool,
    quarantine: Option<(Arc<Quarantine>, Build)>,
    connection: Connection,
    held: [BTreeMap<SmolStr, Arc<EncodedResource>>; TYPES.len()],
    names: [BTreeSet<SmolStr>; TYPES.len()],
    nonces: [SmolStr; TYPES.len()],
    inbox: VecDeque<Response>,
    /// The clusters that changed since their endpoints arrived: Envoy does not use them before.
    warming: BTreeSet<SmolStr>,
    /// The request for clusters that waits until none of them warms.
    paused: Option<Paused>,
    /// A state-of-the-world request without a nonce starts a new subscription, even while a response is in flight.
    asked_again: [bool; TYPES.len()],
}

/// A request for clusters that Envoy sends later.
enum Paused {
    /// The first one of a connection.
    Subscription,
    /// The answer to the response with this nonce, and an error.
    Answer(SmolStr, Option<String>),
}

impl Client {
    fn new(protocol: Protocol) -> Self {
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

    fn on_demand(protocol: Protocol) -> Self {
        Self {
            on_demand: true,
            connection: Connection::on_demand(protocol),
            ..Self::new(protocol)
        }
    }

    /// Returns a client from which resources are withheld that it, or others of its build, refused.
    fn quarantined(protocol: Protocol, quarantine: Quarantine, build: Build) -> Self {
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
    fn is_wildcard(&self, index: usize) -> bool {
        TYPES[index].is_wildcard() && !self.on_demand
    }

    /// Publishes the current content to the client.
    fn publish(&mut self, world: &World) {
        let snapshot = match self.connection.requested_resources() {
            Some(demand) => world.snapshot_for(demand),
            None => world.snapshot(),
        };
        let responses = self.connection.on_snapshot(snapshot);
        self.receive(responses);
    }

    fn request(&mut self, index: usize, nonce: SmolStr, error: Option<String>, change: SubscriptionChange) {
        let request = Request {
            resource_type: TYPES[index],
            nonce,
            error,
            change,
        };
        let reaction = self.connection.on_request(request).expect("names within the limit");
        self.receive(reaction.responses);
    }

    fn receive(&mut self, responses: Vec<Response>) {
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

    fn connect(&mut self) {
        self.connection = self.new_connection();
        // The server may have been killed: the next one does not know what was lost with the connection.
        self.inbox.clear();
        self.subscribe();
    }

    /// Sends the first requests of a connection. Late answers to the last one precede them.
    fn subscribe(&mut self) {
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

    fn watch(&mut self, index: usize, names: &BTreeSet<u8>) {
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
    fn answer(&mut self, accept: bool) -> bool {
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

    fn remove(&mut self, index: usize, response: &Response) {
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

    fn apply(&mut self, index: usize, response: &Response) {
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

    fn settle(&mut self, world: &World) {
        for _ in 0..1000 {
            if !self.answer(true) {
                // The requested resources may not be generated yet.
                self.publish(world);
                if self.inbox.is_empty() {
                    return;
                }
            }
        }
        panic!("client and server do not converge");
    }
}

fn run(mut client: Client, steps: Vec<Step>) {
    let protocol = client.protocol;
    let mut world = World::default();
    client.connect();
    client.publish(&world);
    for step in steps {
        match step {
            Step::Snapshot(index, content) => {
                world.revision += 1;
                world.contents[index] = content;
                client.publish(&world);
            }
            Step::Publish => client.publish(&world),
            Step::Answer { accept } => {
                client.answer(accept);
            }
            Step::Watch(index, names) => client.watch(index, &names),
            Step::Reconnect(index, content) => {
                world.revision += 1;
                world.contents[index] = content;
                client.connect();
                client.publish(&world);
            }
        }
    }
    client.settle(&world);
    let served = world.snapshot();
    let exists = |name: &SmolStr| served.resources(ResourceType::Endpoint).get(name).is_some();
    let warming: Vec<_> = client.warming.iter().filter(|name| exists(name)).collect();
    assert!(
        warming.is_empty(),
        "clusters still wait for their endpoints: {warming:?}"
    );
    assert_nothing_is_lost(&client, &served);
    // Rejected resources are sent again with the next change of the type.
    world.revision += 1;
    for content in &mut world.contents {
        for name in 0..8 {
            content
                .entry(name)
                .and_modify(|generation| *generation += 100)
                .or_insert(200);
        }
        content.remove(&7);
    }
    client.publish(&world);
    client.settle(&world);
    let latest = world.snapshot();
    for (index, resource_type) in TYPES.iter().enumerate() {
        let view = latest.resources(*resource_type);
        let expected: BTreeMap<SmolStr, String> = view
            .iter()
            .filter(|resource| client.is_wildcard(index) || client.names[index].contains(&resource.name))
            .map(|resource| (resource.name.clone(), resource.version.to_string()))
            .collect();
        let held: BTreeMap<SmolStr, String> = client.held[index]
            .iter()
            .filter(|(name, _)| client.is_wildcard(index) || view.get(name).is_some())
            .map(|(name, resource)| (name.clone(), resource.version.to_string()))
            .collect();
        assert_eq!(held, expected, "{resource_type:?} over {protocol:?}");
    }
}

/// Checks that a client holds all requested resources, except those that it rejected or that are withheld.
fn assert_nothing_is_lost(client: &Client, latest: &ResourceSnapshot) {
    for (index, resource_type) in TYPES.iter().enumerate() {
        let Some(watched) = client.connection.watched(*resource_type) else {
            continue;
        };
        // A rejected list removes resources by omission, which is not tracked. A client that waits for endpoints does
        // not answer clusters.
        let is_list = client.protocol == Protocol::Sotw && resource_type.is_wildcard();
        let is_paused = index == 0 && client.paused.is_some();
        if client.on_demand || is_list || is_paused {
            continue;
        }
        for resource in latest.resources(*resource_type).iter() {
            let name = &resource.name;
            let held = client.held[index].get(name);
            let is_held = held.is_some_and(|held| held.version == resource.version);
            if is_held || !(client.is_wildcard(index) || client.names[index].contains(name)) {
                continue;
            }
            let progress = watched.progress(name, Some(resource.version));
            assert!(
                matches!(progress, Progress::Refused(_) | Progress::Rejected(_)),
                "{resource_type:?} over {:?}: {name} is lost: {progress:?}",
                client.protocol
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_delta_client_ends_with_the_full_set(steps in steps()) {
        run(Client::new(Protocol::Delta), steps);
    }

    #[test]
    fn a_sotw_client_ends_with_the_full_set(steps in steps()) {
        run(Client::new(Protocol::Sotw), steps);
    }

    #[test]
    fn a_quarantined_delta_client_ends_with_the_full_set(steps in steps()) {
        quarantine::run(Protocol::Delta, steps);
    }

    #[test]
    fn a_quarantined_sotw_client_ends_with_the_full_set(steps in steps()) {
        quarantine::run(Protocol::Sotw, steps);
    }

    #[test]
    fn a_delta_client_on_demand_ends_with_the_requested_resources(steps in steps()) {
        run(Client::on_demand(Protocol::Delta), steps);
    }

    #[test]
    fn a_sotw_client_on_demand_ends_with_the_requested_resources(steps in steps()) {
        run(Client::on_demand(Protocol::Sotw), steps);
    }
}

fn names(response: &Response) -> Vec<&str> {
    response
        .resources
        .iter()
        .map(|resource| resource.name.as_str())
        .collect()
}

fn delta(subscribe: &[&str]) -> SubscriptionChange {
    SubscriptionChange::Change {
        subscribe: Arc::new(subscribe.iter().map(SmolStr::new).collect()),
        unsubscribe: Vec::new(),
        initial_versions: InitialVersions::default(),
    }
}

/// Returns a client that holds clusters r0 and r1 and their endpoints.
fn settled() -> (World, Client) {
    settle(Client::new(Protocol::Delta))
}

/// As [`settled`], with this client.
fn settle(mut client: Client) -> (World, Client) {
    let mut world = World::default();
    world.contents[0] = [(0, 0), (1, 0)].into();
    world.contents[1] = [(0, 0), (1, 0)].into();
    client.names[1] = ["r0".into(), "r1".into()].into();
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    client.settle(&world);
    (world, client)
}

#[test]
fn only_changes_are_sent() {
    let (mut world, mut client) = settled();
    world.contents[1].insert(1, 1);
    let responses = client.connection.on_snapshot(world.snapshot());
    assert_eq!(responses.len(), 1);
    assert_eq!(
        (responses[0].resource_type, names(&responses[0])),
        (ResourceType::Endpoint, vec!["r1"])
    );
}

#[test]
fn a_changed_cluster_is_warmed_with_its_endpoints() {
    let (mut world, mut client) = settled();
    world.contents[0].insert(1, 1);
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent: Vec<_> = responses.iter().map(|r| (r.resource_type, names(r))).collect();
    assert_eq!(
        sent,
        [
            (ResourceType::Cluster, vec!["r1"]),
            (ResourceType::Endpoint, vec!["r1"])
        ]
    );
}

#[test]
fn a_cluster_warms_until_its_endpoints_are_sent() {
    let (mut world, mut client) = settled();
    world.contents[1].insert(1, 1);
    client.publish(&world);
    assert!(!client.connection.is_warming(), "only endpoints changed");
    world.revision += 1;
    world.contents[0].insert(0, 1);
    client.publish(&world);
    assert!(client.connection.is_warming());
    client.settle(&world);
    assert!(!client.connection.is_warming());
}

/// A control plane restarts while a cluster changes. Envoy warms the cluster, although it announces that it holds the
/// endpoints, in either order of its subscriptions.
#[test]
fn a_cluster_that_changed_before_a_reconnect_is_warmed() {
    for is_published_first in [false, true] {
        let (mut world, mut client) = settled();
        world.contents[0].insert(1, 1);
        let held = client.held.clone();
        client.connection = Connection::new(Protocol::Delta);
        client.inbox.clear();
        if is_published_first {
            client.publish(&world);
        }
        for (index, subscribe) in [(0, &[][..]), (1, &["r0", "r1"])] {
            let held = held[index].iter();
            let change = SubscriptionChange::Change {
                subscribe: Arc::new(subscribe.iter().map(SmolStr::new).collect()),
                unsubscribe: Vec::new(),
                initial_versions: initial_versions(held.map(|(name, r)| (name.to_string(), r.version.to_string()))),
            };
            client.request(index, SmolStr::default(), None, change);
        }
        if !is_published_first {
            client.publish(&world);
        }
        let sent: Vec<_> = client.inbox.iter().map(|r| (r.resource_type, names(r))).collect();
        let expected = [
            (ResourceType::Cluster, vec!["r1"]),
            (ResourceType::Endpoint, vec!["r1"]),
        ];
        assert_eq!(sent, expected, "published first: {is_published_first}");
    }
}

/// A control plane is killed after it has sent a changed cluster, and before the endpoints. Envoy asks the next one for
/// endpoints only, all of which it holds, and for clusters when those of the changed one have arrived.
#[test]
fn a_cluster_that_warms_during_a_reconnect_gets_its_endpoints() {
    let (mut world, mut client) = settled();
    world.contents[0].insert(1, 1);
    client.publish(&world);
    client.inbox.truncate(1);
    client.answer(true);
    assert_eq!(client.warming, [SmolStr::from("r1")].into());
    client.connect();
    client.publish(&world);
    assert!(client.connection.watched(ResourceType::Cluster).is_none());
    client.settle(&world);
    assert!(client.warming.is_empty(), "{:?}", client.warming);
    assert!(client.connection.watched(ResourceType::Cluster).is_some());
}

/// A client that holds endpoints and no cluster is sent its first clusters. Then the control plane is killed.
#[test]
fn the_first_clusters_of_held_endpoints_are_warmed() {
    run(
        Client::new(Protocol::Delta),
        vec![
            Step::Snapshot(1, [(1, 0)].into()),
            Step::Watch(1, [1].into()),
            Step::Answer { accept: true },
            Step::Answer { accept: true },
            Step::Answer { accept: true },
            Step::Reconnect(0, [(1, 0)].into()),
            Step::Answer { accept: true },
            Step::Reconnect(2, [].into()),
        ],
    );
}

#[test]
fn removed_clusters_wait_for_routes() {
    let (mut world, mut client) = settled();
    client.request(3, SmolStr::default(), None, delta(&["r5"]));
    client.settle(&world);
    world.contents[3].insert(5, 1);
    world.contents[0].remove(&1);
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent: Vec<_> = responses
        .iter()
        .map(|r| (r.resource_type, names(r), r.removed.len()))
        .collect();
    assert_eq!(
        sent,
        [(ResourceType::Route, vec!["r5"], 0), (ResourceType::Cluster, vec![], 1)]
    );
}

#[test]
fn a_reconnect_with_versions_sends_only_the_difference() {
    let (mut world, mut client) = settled();
    world.contents[1].insert(0, 1);
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent: Vec<_> = responses
        .iter()
        .map(|r| (r.resource_type, names(r), r.removed.len()))
        .collect();
    let expected = [
        (ResourceType::Cluster, vec![], 0),
        (ResourceType::Endpoint, vec!["r0"], 0),
        (ResourceType::Listener, vec![], 0),
    ];
    assert_eq!(sent, expected);
}

#[test]
fn a_late_rejection_is_not_a_subscription() {
    let mut connection = Connection::new(Protocol::Delta);
    let mut world = World::default();
    world.contents[0] = [(0, 0)].into();
    let _ = connection.on_snapshot(world.snapshot());
    let request = |nonce: &str, error: Option<&str>| Request {
        resource_type: ResourceType::Cluster,
        nonce: nonce.into(),
        error: error.map(str::to_owned),
        change: delta(&[]),
    };
    let late = connection.on_request(request("0-1", Some("nacked"))).expect("a NACK");
    assert_eq!((late.outcome, late.responses.len()), (Outcome::Stale, 0));
    let first = connection.on_request(request("", None)).expect("a subscription");
    assert_eq!(first.outcome, Outcome::Subscribed);
    let sent: Vec<_> = first.responses.iter().map(names).collect();
    assert_eq!(sent, [["r0"]]);
}

#[test]
fn a_late_rejection_changes_the_subscription() {
    let (_, mut client) = settled();
    let request = Request {
        resource_type: ResourceType::Endpoint,
        nonce: "0-0".into(),
        error: Some("nacked".to_owned()),
        change: delta(&["r5"]),
    };
    let reaction = client.connection.on_request(request).expect("a NACK");
    assert_eq!(reaction.outcome, Outcome::Stale);
    let sent: Vec<_> = reaction.responses.iter().map(names).collect();
    assert_eq!(sent, [["r5"]]);
}

/// Returns content with listeners r0 and r1, and a client on demand without requests.
fn idle(protocol: Protocol) -> (World, Client) {
    let mut world = World::default();
    world.contents[2] = [(0, 0), (1, 0)].into();
    let mut client = Client::on_demand(protocol);
    client.publish(&world);
    (world, client)
}

fn sotw(names: &[&str]) -> SubscriptionChange {
    SubscriptionChange::Names(Arc::new(names.iter().map(SmolStr::new).collect()))
}

#[test]
fn a_response_waits_for_resources_on_demand() {
    let (world, mut client) = idle(Protocol::Sotw);
    client.request(2, SmolStr::default(), None, sotw(&["r0", "missing"]));
    assert!(client.inbox.is_empty(), "r0 is not generated yet");
    client.publish(&world);
    let response = client.inbox.pop_front().expect("a response");
    assert_eq!(names(&response), ["r0"]);
    client.request(2, response.nonce, None, sotw(&["r0", "missing"]));
    assert!(client.inbox.is_empty(), "nothing is new");
}

#[test]
fn an_empty_request_on_demand_is_not_a_wildcard() {
    let (world, mut client) = idle(Protocol::Sotw);
    client.request(2, SmolStr::default(), None, sotw(&[]));
    client.publish(&world);
    assert!(client.inbox.is_empty());
    let (world, mut client) = idle(Protocol::Delta);
    client.request(2, SmolStr::default(), None, delta(&["*"]));
    client.publish(&world);
    let responses: Vec<_> = client.inbox.drain(..).collect();
    assert!(responses.iter().all(|response| response.resources.is_empty()));
}

#[test]
fn unknown_names_are_removed_on_demand() {
    let (world, mut client) = idle(Protocol::Delta);
    client.request(2, SmolStr::default(), None, delta(&["r0", "missing"]));
    client.publish(&world);
    let response = client.inbox.pop_front().expect("a response");
    assert_eq!(
        (names(&response), response.removed.as_slice()),
        (vec!["r0"], &["missing".into()][..])
    );
}

#[test]
fn unsubscribing_is_not_answered_on_demand() {
    let (world, mut client) = idle(Protocol::Sotw);
    client.watch(2, &[0, 1].into());
    client.settle(&world);
    client.watch(2, &[1].into());
    client.publish(&world);
    assert!(client.inbox.is_empty());
}

#[test]
fn extensions_are_never_removed() {
    let (mut world, mut client) = settled();
    world.contents[4] = [(0, 0), (1, 0)].into();
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    client.request(4, SmolStr::default(), None, delta(&["r0", "r1"]));
    let response = client.inbox.pop_front().expect("a response");
    assert_eq!(names(&response), ["r0", "r1"]);
    world.contents[4] = [(0, 1)].into();
    client.request(4, response.nonce, None, delta(&[]));
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent: Vec<_> = responses.iter().map(|r| (names(r), r.removed.len())).collect();
    assert_eq!(sent, [(vec!["r0"], 0)]);
}

#[test]
fn unknown_endpoints_are_answered_with_an_empty_assignment() {
    let (_, mut client) = settled();
    client.request(1, SmolStr::default(), None, delta(&["missing"]));
    let response = client.inbox.pop_front().expect("a response");
    assert_eq!(names(&response), ["missing"]);
}

/// An EnvoyFilter may patch route configurations that only its own listeners request.
#[test]
fn changed_placeholders_of_routes_are_sent() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let snapshot = |revision: u64, unknown_routes: UnknownRoutes| {
            let types = ResourceType::ALL.iter().map(|_| TypeResources::default());
            Arc::new(ResourceSnapshot::new(
                Revision(revision),
                types.collect(),
                unknown_routes,
            ))
        };
        let placeholders = |of_port: &'static [u8]| {
            UnknownRoutes::Sidecar(Shared::new(RoutePlaceholders {
                of_port: Bytes::from_static(of_port),
                ..Default::default()
            }))
        };
        let mut connection = Connection::new(protocol);
        assert!(connection.on_snapshot(snapshot(1, placeholders(b""))).is_empty());
        let request = |nonce: SmolStr| Request {
            resource_type: ResourceType::Route,
            change: match protocol {
                Protocol::Sotw => sotw(&["81"]),
                Protocol::Delta if nonce.is_empty() => delta(&["81"]),
                Protocol::Delta => delta(&[]),
            },
            nonce,
            error: None,
        };
        let first = connection
            .on_request(request(SmolStr::default()))
            .expect("a valid request");
        let nonce = first.responses[0].nonce.clone();
        assert!(
            connection
                .on_request(request(nonce))
                .expect("an ACK")
                .responses
                .is_empty()
        );
        assert!(connection.on_snapshot(snapshot(2, placeholders(b""))).is_empty());
        // `ignore_port_in_host_matching: true`.
        let responses = connection.on_snapshot(snapshot(3, placeholders(b"\x70\x01")));
        let sent: Vec<_> = responses.iter().map(names).collect();
        assert_eq!(sent, [["81"]], "{protocol:?}");
    }
}

/// Istio sends nothing where a secret does not exist or is not allowed, rather than an empty response.
#[test]
fn secrets_that_do_not_exist_are_not_answered() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let (secret, mut part) = (ResourceType::Secret, PartResources::default());
        let snapshot = |revision: u64, part: &PartResources| {
            let types = ResourceType::ALL.iter().map(|of| TypeResources {
                parts: if *of == secret {
                    [Arc::new(part.clone())].into()
                } else {
                    [].into()
                },
                ..TypeResources::default()
            });
            let types = types.collect();
            Arc::new(ResourceSnapshot::new(Revision(revision), types, UnknownRoutes::Omitted))
        };
        let mut connection = Connection::new(protocol);
        assert!(connection.on_snapshot(snapshot(1, &part)).is_empty());
        let subscribed: Arc<Names> = Arc::new([SmolStr::new("r1")].into_iter().collect());
        let change = match protocol {
            Protocol::Sotw => SubscriptionChange::Names(subscribed),
            Protocol::Delta => SubscriptionChange::Change {
                subscribe: subscribed,
                unsubscribe: Vec::new(),
                initial_versions: InitialVersions::default(),
            },
        };
        let request = Request {
            resource_type: secret,
            nonce: SmolStr::default(),
            error: None,
            change,
        };
        let reaction = connection.on_request(request).expect("a valid request");
        assert!(reaction.responses.is_empty(), "{protocol:?}");
        assert!(connection.is_up_to_date());
        part.resources.insert("r1".into(), resource(1, 0));
        let responses = connection.on_snapshot(snapshot(2, &part));
        assert_eq!(
            responses.iter().map(names).collect::<Vec<_>>(),
            [["r1"]],
            "{protocol:?}"
        );
    }
}

/// Istio ignores the names of clusters and listeners.
#[test]
fn names_do_not_restrict_wildcard_types() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let mut world = World::default();
        world.contents[0] = [(0, 0), (1, 0)].into();
        let mut connection = Connection::new(protocol);
        let _ = connection.on_snapshot(world.snapshot());
        let change = match protocol {
            Protocol::Sotw => sotw(&["r0"]),
            Protocol::Delta => delta(&["r0"]),
        };
        let request = Request {
            resource_type: ResourceType::Cluster,
            nonce: SmolStr::default(),
            error: None,
            change,
        };
        let reaction = connection.on_request(request).expect("a valid request");
        let sent: Vec<_> = reaction.responses.iter().map(names).collect();
        assert_eq!(sent, [["r0", "r1"]], "{protocol:?}");
    }
}

#[test]
fn too_many_names_are_rejected() {
    let mut connection = Connection::new(Protocol::Sotw);
    let names = (0..200_000).map(|index| format_smolstr!("name-{index}")).collect();
    let change = SubscriptionChange::Names(Arc::new(names));
    let request = Request {
        resource_type: ResourceType::Endpoint,
        nonce: SmolStr::default(),
        error: None,
        change,
    };
    assert!(matches!(
        connection.on_request(request),
        Err(SubscriptionError::TooManyNames { .. })
    ));
}

/// Returns the version of a resource as the client was sent it.
fn version_sent(resource: &EncodedResource) -> String {
    let response = DeltaDiscoveryResponse::decode(resource.delta_frame().to_bytes()).expect("a resource");
    response.resources[0].version.clone()
}

/// Returns the initial versions of a reconnecting client.
fn initial_versions(held: impl Iterator<Item = (String, String)>) -> InitialVersions {
    let request = DeltaDiscoveryRequest {
        initial_resource_versions: held.collect(),
        ..Default::default()
    };
    InitialVersions::read(&request.encode_to_vec()).expect("a valid request")
}
