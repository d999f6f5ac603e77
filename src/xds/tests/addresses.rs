//! A model ztunnel: whatever it requests, accepts, rejects or loses, it ends with exactly what its requests refer to.

use std::{collections::BTreeMap, sync::Arc};

use smol_str::SmolStr;

use super::{initial_versions, names};
use crate::{
    base::Shared,
    generate::{
        RequestedResources, ResourceSnapshot, ResourceType,
        address::tests::{
            ambient,
            churn::{REQUESTED, Random, random_change},
            ztunnel,
        },
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, World, fixture},
    table::ChangeSet,
    xds::{
        Connection, Protocol, Request, Response,
        connection::SubscriptionChange,
        share::{initial_versions::InitialVersions, names::Names},
    },
};

const TYPE: ResourceType = ResourceType::Address;
const CLIENT: ConnectionId = ConnectionId(0);

/// A control plane with one client.
struct Rig {
    world: World,
    store: ConfigStore,
    requested: Option<RequestedResources>,
    connection: Connection,
    /// Held resources with their versions.
    held: BTreeMap<SmolStr, String>,
    inbox: Vec<Response>,
    nonce: SmolStr,
    is_wildcard: bool,
    names: Vec<&'static str>,
}

impl Rig {
    fn new(is_wildcard: bool) -> Self {
        let mut rig = Self {
            world: World::new(ambient()),
            store: ConfigStore::default(),
            requested: None,
            connection: Connection::new(Protocol::Delta),
            held: BTreeMap::new(),
            inbox: Vec::new(),
            nonce: SmolStr::default(),
            is_wildcard,
            names: Vec::new(),
        };
        let connected = ProxyEvents {
            connected: vec![(CLIENT, Arc::new(ztunnel()))],
            ..ProxyEvents::default()
        };
        rig.store
            .update(&rig.world.snapshot(), &ChangeSet::default(), connected, &Serial);
        rig
    }

    fn snapshot(&self) -> Arc<ResourceSnapshot> {
        let group = self.store.group_of(CLIENT).expect("the client has a group");
        self.store.snapshot(group).expect("the group has a snapshot").clone()
    }

    fn change(&mut self, text: &str, removes: bool) {
        self.change_file("change.yaml", text, removes);
    }

    fn change_file(&mut self, name: &str, text: &str, removes: bool) {
        let rows = fixture::folder(&ambient(), &[(name, text)]).into_iter();
        let changes = rows.map(|row| {
            if removes {
                Change::Remove(row.kind(), row.key().clone())
            } else {
                Change::Upsert(row)
            }
        });
        let commit = self.world.commit(changes.collect());
        let none = ProxyEvents::default();
        self.store.update(&commit.snapshot, &commit.changes, none, &Serial);
        self.publish();
    }

    fn publish(&mut self) {
        let responses = self.connection.on_snapshot(self.snapshot());
        self.receive(responses);
    }

    fn receive(&mut self, responses: Vec<Response>) {
        self.inbox
            .extend(responses.into_iter().filter(|response| response.resource_type == TYPE));
        assert!(self.inbox.len() <= 1, "one response is in flight");
    }

    fn send(&mut self, nonce: SmolStr, error: Option<String>, change: SubscriptionChange) {
        let request = Request {
            resource_type: TYPE,
            nonce,
            error,
            change,
        };
        let reaction = self.connection.on_request(request).expect("few names");
        self.receive(reaction.responses);
        let requested = self.connection.requested_resources();
        if self.requested != requested {
            let event = requested.clone().map(|requested| (CLIENT, Shared::new(requested)));
            self.requested = requested;
            let events = ProxyEvents {
                requested: event.into_iter().collect(),
                ..ProxyEvents::default()
            };
            self.store
                .update(&self.world.snapshot(), &ChangeSet::default(), events, &Serial);
            self.publish();
        }
    }

    fn subscribe(&mut self, subscribe: &[&str], unsubscribe: &[&str], initial: InitialVersions) {
        let change = SubscriptionChange::Change {
            subscribe: Arc::new(subscribe.iter().map(SmolStr::new).collect::<Names>()),
            unsubscribe: unsubscribe.iter().map(SmolStr::new).collect(),
            initial_versions: initial,
        };
        self.send(SmolStr::default(), None, change);
    }

    fn connect(&mut self) {
        self.connection = Connection::new(Protocol::Delta);
        self.inbox.clear();
        self.requested = None;
        let held = self
            .held
            .iter()
            .map(|(name, version)| (name.to_string(), version.clone()));
        let initial = initial_versions(held.collect::<Vec<_>>().into_iter());
        if self.is_wildcard {
            self.subscribe(&[], &[], initial);
            return;
        }
        let mut subscribe = self.names.clone();
        subscribe.push("*");
        self.subscribe(&subscribe, &["*"], initial);
    }

    fn answer(&mut self, accepts: bool) -> bool {
        let Some(response) = self.inbox.pop() else {
            return false;
        };
        self.nonce = response.nonce.clone();
        if accepts {
            for resource in response.resources.iter() {
                self.held.insert(resource.name.clone(), resource.version.to_string());
            }
            for name in &response.removed {
                self.held.remove(name);
            }
        }
        let change = SubscriptionChange::Change {
            subscribe: Arc::default(),
            unsubscribe: Vec::new(),
            initial_versions: InitialVersions::default(),
        };
        self.send(self.nonce.clone(), (!accepts).then(|| "no".to_owned()), change);
        true
    }

    fn check(&mut self, seed: u64) {
        while self.answer(true) {}
        self.publish();
        while self.answer(true) {}
        let snapshot = self.snapshot();
        let view = snapshot.resources(TYPE).iter();
        let view = view.map(|resource| (resource.name.clone(), resource.version.to_string()));
        assert_eq!(self.held, view.collect(), "seed {seed}");
    }
}

#[test]
fn a_ztunnel_ends_with_what_it_requests() {
    follow(24);
}

#[test]
#[ignore = "a minute: `make fuzz-ambient`"]
fn ten_thousand_changes_reach_every_ztunnel() {
    follow(140);
}

/// Follows this number of clients through 150 events each, of which half are changes.
fn follow(clients: u64) {
    for seed in 0..clients {
        let mut random = Random(seed);
        let mut rig = Rig::new(seed % 3 == 0);
        rig.connect();
        for _ in 0..150 {
            match random.below(8) {
                0..=3 => {
                    let (text, removes) = random_change(&mut random);
                    rig.change(&text, removes);
                }
                4 | 5 => _ = rig.answer(random.below(4) > 0),
                6 if !rig.is_wildcard => {
                    let name = REQUESTED[random.below(REQUESTED.len())];
                    if rig.names.contains(&name) {
                        rig.names.retain(|known| *known != name);
                        rig.subscribe(&[], &[name], InitialVersions::default());
                    } else {
                        rig.names.push(name);
                        rig.subscribe(&[name], &[], InitialVersions::default());
                    }
                }
                _ if random.below(6) == 0 => rig.connect(),
                _ => {}
            }
        }
        // A rejected resource is sent again with the next change.
        while rig.answer(true) {}
        rig.change_file("mesh.yaml", "trustDomain: other", false);
        for number in 0..4 {
            for namespace in ["a", "b", "istio-system"] {
                rig.change(
                    &format!(
                        "apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: {namespace}}}\n\
                         spec: {{clusterIP: 10.7.0.{number}, ports: [{{port: 81}}]}}\n"
                    ),
                    false,
                );
                while rig.answer(true) {}
            }
        }
        // This one is on the node of the ztunnel, so every client is sent a change.
        rig.change(
            "apiVersion: v1\nkind: Pod\nmetadata: {name: last, namespace: a}\nspec: {nodeName: n1}\n\
             status: {phase: Running, podIP: 10.9.9.9}\n",
            false,
        );
        rig.check(seed);
    }
}

#[test]
fn r20_names_of_a_client_that_answers_nothing_are_forgotten() {
    let mut rig = Rig::new(false);
    rig.connect();
    assert_eq!(rig.inbox.len(), 1, "a response without an answer");
    for number in 0..10 {
        let name = format!("/10.1.0.{number}");
        rig.subscribe(&[name.as_str()], &[], InitialVersions::default());
        rig.subscribe(&[], &[name.as_str()], InitialVersions::default());
    }
    let watched = rig.connection.watched(TYPE).expect("a subscription");
    assert!(watched.names.is_empty() && watched.unacknowledged.is_empty());
}

/// Names that nothing has are removed in the answer, and arrive once something has them.
#[test]
fn unknown_names_are_answered() {
    let mut rig = Rig::new(false);
    rig.connect();
    let first = rig.inbox.pop().expect("an answer without resources");
    assert!(first.resources.is_empty() && first.removed.is_empty());
    rig.inbox.push(first);
    rig.answer(true);
    rig.subscribe(&["/10.1.0.9"], &[], InitialVersions::default());
    let answer = rig.inbox.pop().expect("an answer");
    assert_eq!(
        (names(&answer), answer.removed.as_slice()),
        (vec![], &["/10.1.0.9".into()][..])
    );
    rig.inbox.push(answer);
    rig.answer(true);
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: a}\nspec: {nodeName: n9}\n\
               status: {phase: Running, podIP: 10.1.0.9}\n";
    rig.change(pod, false);
    let push = rig.inbox.pop().expect("a push");
    assert_eq!(names(&push), ["Kubernetes//Pod/a/p"]);
    rig.inbox.push(push);
    rig.answer(true);
    rig.change(
        &pod.replace("name: p,", "name: q,").replace("10.1.0.9", "10.1.0.8"),
        false,
    );
    assert!(rig.inbox.is_empty(), "a pod that was not requested");
    rig.change(pod, true);
    let push = rig.inbox.pop().expect("a push");
    assert_eq!(push.removed, ["Kubernetes//Pod/a/p"]);
}
