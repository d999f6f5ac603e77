//! A model client against the connection: whatever it accepts, refuses, drops or asks for, it ends with exactly what a
//! full generation gives.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use proptest::prelude::*;
use smol_str::{SmolStr, format_smolstr};

use super::{connection::Wish, *};
use crate::{
    generate::{
        EncodedResource, ResourceSnapshot, ResourceType,
        group::{PartView, TypeView},
    },
    model::Revision,
    proto::envoy::config::cluster::v3::Cluster,
};

const TYPES: [ResourceType; 5] = [
    ResourceType::Cluster,
    ResourceType::Endpoint,
    ResourceType::Listener,
    ResourceType::Route,
    ResourceType::Extension,
];

/// Content of one type: name → generation; odd names stand in the second part.
type Content = BTreeMap<u8, u8>;

#[derive(Clone, Debug)]
enum Step {
    Snapshot(usize, Content),
    Answer { accept: bool },
    Watch(usize, BTreeSet<u8>),
    Reconnect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let content = prop::collection::btree_map(0u8..8, 0u8..4, 0..6);
    let step = prop_oneof![
        3 => (0..TYPES.len(), content).prop_map(|(index, content)| Step::Snapshot(index, content)),
        6 => prop::bool::weighted(0.8).prop_map(|accept| Step::Answer { accept }),
        2 => (0..TYPES.len(), prop::collection::btree_set(0u8..8, 0..5)).prop_map(|(index, names)| Step::Watch(index, names)),
        1 => Just(Step::Reconnect),
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

/// The world that the control plane serves; parts that do not change keep their allocation.
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
                let mut view = PartView::default();
                for (name, generation) in resources {
                    let resource = resource(*name, *generation);
                    view.digest = view.digest.wrapping_add(resource.version.value());
                    view.resources.insert(resource.name.clone(), resource);
                }
                Arc::new(view)
            });
            TypeView { parts: parts.collect() }
        });
        Arc::new(ResourceSnapshot::new(Revision(self.revision), views.collect(), false))
    }
}

/// The client: what it holds, what it asked for, and the responses that it has not answered yet.
struct Client {
    protocol: Protocol,
    connection: Connection,
    held: [BTreeMap<SmolStr, Arc<EncodedResource>>; TYPES.len()],
    names: [BTreeSet<SmolStr>; TYPES.len()],
    nonces: [SmolStr; TYPES.len()],
    inbox: VecDeque<Response>,
    /// A state-of-the-world request without a nonce begins a new watch, whatever is in flight.
    asked_again: bool,
}

impl Client {
    fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            connection: Connection::new(protocol),
            held: Default::default(),
            names: Default::default(),
            nonces: Default::default(),
            inbox: VecDeque::new(),
            asked_again: false,
        }
    }

    fn request(&mut self, index: usize, nonce: SmolStr, error: Option<String>, wish: Wish) {
        let request = Request {
            resource_type: TYPES[index],
            nonce,
            error,
            wish,
        };
        let reaction = self.connection.on_request(request).expect("few names");
        self.receive(reaction.responses);
    }

    fn receive(&mut self, responses: Vec<Response>) {
        for response in responses {
            let waiting = self
                .inbox
                .iter()
                .filter(|other| other.resource_type == response.resource_type)
                .count();
            let again = self.asked_again;
            assert!(waiting == 0 || again, "one response of a type is in flight at a time");
            self.inbox.push_back(response);
        }
    }

    fn connect(&mut self) {
        self.connection = Connection::new(self.protocol);
        self.inbox.clear();
        self.nonces = Default::default();
        for (index, resource_type) in TYPES.iter().enumerate() {
            let names: Vec<SmolStr> = self.names[index].iter().cloned().collect();
            let wildcard = resource_type.is_wildcard();
            match self.protocol {
                Protocol::Sotw if wildcard || !names.is_empty() => {
                    self.request(index, SmolStr::default(), None, Wish::Names(names));
                }
                Protocol::Delta if wildcard || !names.is_empty() => {
                    let initial = self.held[index]
                        .iter()
                        .map(|(name, r)| (name.clone(), r.version.to_string()))
                        .collect();
                    let wish = Wish::Change {
                        subscribe: names,
                        unsubscribe: Vec::new(),
                        initial,
                    };
                    self.request(index, SmolStr::default(), None, wish);
                }
                _ => {}
            }
        }
    }

    fn watch(&mut self, index: usize, wanted: &BTreeSet<u8>) {
        if TYPES[index].is_wildcard() {
            return;
        }
        let wanted: BTreeSet<SmolStr> = wanted.iter().map(|name| format_smolstr!("r{name}")).collect();
        let before = std::mem::replace(&mut self.names[index], wanted.clone());
        self.held[index].retain(|name, _| wanted.contains(name));
        match self.protocol {
            Protocol::Sotw => {
                let nonce = if before.is_empty() {
                    SmolStr::default()
                } else {
                    self.nonces[index].clone()
                };
                self.asked_again = nonce.is_empty();
                self.request(index, nonce, None, Wish::Names(wanted.into_iter().collect()));
                self.asked_again = false;
            }
            Protocol::Delta => {
                let subscribe = wanted.difference(&before).cloned().collect();
                let unsubscribe = before.difference(&wanted).cloned().collect();
                let wish = Wish::Change {
                    subscribe,
                    unsubscribe,
                    initial: Vec::new(),
                };
                self.request(index, SmolStr::default(), None, wish);
            }
        }
    }

    /// Answers the oldest response.
    fn answer(&mut self, accept: bool) -> bool {
        let Some(response) = self.inbox.pop_front() else {
            return false;
        };
        let index = TYPES
            .iter()
            .position(|t| *t == response.resource_type)
            .expect("a type that was asked for");
        self.nonces[index] = response.nonce.clone();
        let error = (!accept).then(|| "refused".to_owned());
        if accept {
            self.apply(index, &response);
        }
        let wish = match self.protocol {
            Protocol::Sotw => Wish::Names(self.names[index].iter().cloned().collect()),
            Protocol::Delta => Wish::Change {
                subscribe: Vec::new(),
                unsubscribe: Vec::new(),
                initial: Vec::new(),
            },
        };
        self.request(index, response.nonce, error, wish);
        true
    }

    fn apply(&mut self, index: usize, response: &Response) {
        let wildcard = TYPES[index].is_wildcard();
        if self.protocol == Protocol::Sotw && wildcard {
            self.held[index].clear();
        }
        for resource in response.resources.iter() {
            if wildcard || self.names[index].contains(&resource.name) {
                self.held[index].insert(resource.name.clone(), resource.clone());
            }
        }
        for name in &response.removed {
            self.held[index].remove(name);
        }
    }

    fn settle(&mut self) {
        for _ in 0..1000 {
            if !self.answer(true) {
                return;
            }
        }
        panic!("client and server never come to rest");
    }
}

fn run(protocol: Protocol, steps: Vec<Step>) {
    let mut world = World::default();
    let mut client = Client::new(protocol);
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    for step in steps {
        match step {
            Step::Snapshot(index, content) => {
                world.revision += 1;
                world.contents[index] = content;
                let responses = client.connection.on_snapshot(world.snapshot());
                client.receive(responses);
            }
            Step::Answer { accept } => {
                client.answer(accept);
            }
            Step::Watch(index, names) => client.watch(index, &names),
            Step::Reconnect => {
                client.connect();
                let responses = client.connection.on_snapshot(world.snapshot());
                client.receive(responses);
            }
        }
    }
    client.settle();
    // What was refused is sent again with the next change of the type.
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
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    client.settle();
    let latest = world.snapshot();
    for (index, resource_type) in TYPES.iter().enumerate() {
        let view = latest.view(*resource_type);
        let expected: BTreeMap<SmolStr, String> = view
            .iter()
            .filter(|resource| resource_type.is_wildcard() || client.names[index].contains(&resource.name))
            .map(|resource| (resource.name.clone(), resource.version.to_string()))
            .collect();
        let held: BTreeMap<SmolStr, String> = client.held[index]
            .iter()
            .filter(|(name, _)| resource_type.is_wildcard() || view.get(name).is_some())
            .map(|(name, resource)| (name.clone(), resource.version.to_string()))
            .collect();
        assert_eq!(held, expected, "{resource_type:?} over {protocol:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_delta_client_ends_with_the_full_set(steps in steps()) {
        run(Protocol::Delta, steps);
    }

    #[test]
    fn a_sotw_client_ends_with_the_full_set(steps in steps()) {
        run(Protocol::Sotw, steps);
    }
}

fn names(response: &Response) -> Vec<&str> {
    response
        .resources
        .iter()
        .map(|resource| resource.name.as_str())
        .collect()
}

fn delta(subscribe: &[&str]) -> Wish {
    Wish::Change {
        subscribe: subscribe.iter().map(SmolStr::new).collect(),
        unsubscribe: Vec::new(),
        initial: Vec::new(),
    }
}

/// A client that holds clusters r0 and r1 and their endpoints.
fn settled() -> (World, Client) {
    let mut world = World::default();
    world.contents[0] = [(0, 0), (1, 0)].into();
    world.contents[1] = [(0, 0), (1, 0)].into();
    let mut client = Client::new(Protocol::Delta);
    client.names[1] = ["r0".into(), "r1".into()].into();
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    client.settle();
    (world, client)
}

#[test]
fn only_what_changed_is_sent() {
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
fn removed_clusters_wait_for_routes() {
    let (mut world, mut client) = settled();
    client.request(3, SmolStr::default(), None, delta(&["r5"]));
    client.settle();
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
fn extensions_are_never_removed() {
    let (mut world, mut client) = settled();
    world.contents[4] = [(0, 0), (1, 0)].into();
    let responses = client.connection.on_snapshot(world.snapshot());
    client.receive(responses);
    client.request(4, SmolStr::default(), None, delta(&["r0", "r1"]));
    let response = client.inbox.pop_front().expect("an answer");
    assert_eq!(names(&response), ["r0", "r1"]);
    world.contents[4] = [(0, 1)].into();
    client.request(4, response.nonce, None, delta(&[]));
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent: Vec<_> = responses.iter().map(|r| (names(r), r.removed.len())).collect();
    assert_eq!(sent, [(vec!["r0"], 0)]);
}

#[test]
fn unknown_endpoints_are_answered_with_none() {
    let (_, mut client) = settled();
    client.request(1, SmolStr::default(), None, delta(&["missing"]));
    let response = client.inbox.pop_front().expect("an answer");
    assert_eq!(names(&response), ["missing"]);
}

#[test]
fn too_many_names_are_refused() {
    let mut connection = Connection::new(Protocol::Sotw);
    let names = (0..200_000).map(|index| format_smolstr!("name-{index}")).collect();
    let wish = Wish::Names(names);
    let request = Request {
        resource_type: ResourceType::Endpoint,
        nonce: SmolStr::default(),
        error: None,
        wish,
    };
    assert!(matches!(
        connection.on_request(request),
        Err(Refusal::TooManyNames { .. })
    ));
}
