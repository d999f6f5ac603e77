//! Tests of the connection with a model client: whatever it accepts, rejects, drops or requests, it ends with exactly
//! the resources of a full generation.

mod addresses;
mod client;
mod quarantine;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use proptest::prelude::*;
use smol_str::{SmolStr, format_smolstr};

use self::client::{Client, Content, TYPES, World, initial_versions, resource};
use super::{
    connection::SubscriptionChange,
    share::{initial_versions::InitialVersions, names::Names, response_cache::ResponseCache},
    watched::Progress,
    *,
};
use crate::{
    base::Shared,
    generate::{
        EncodedResource, ResourceSnapshot, ResourceType,
        resource::{PartResources, RoutePlaceholders, TypeResources, UnknownRoutes},
    },
    model::Revision,
};

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

/// Returns the type, the names and the number of removed names of each response.
fn summaries(responses: &[Response]) -> Vec<(ResourceType, Vec<&str>, usize)> {
    responses
        .iter()
        .map(|response| (response.resource_type, names(response), response.removed.len()))
        .collect()
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

/// Answers clusters and returns what the answer means.
fn acked(connection: &mut Connection, nonce: &SmolStr) -> Outcome {
    let request = Request {
        resource_type: ResourceType::Cluster,
        nonce: nonce.clone(),
        error: None,
        change: delta(&[]),
    };
    connection.on_request(request).expect("a valid request").outcome
}

fn progress_of_cluster(connection: &Connection, name: &str, wanted: Option<&Arc<EncodedResource>>) -> Progress {
    let watched = connection.watched(ResourceType::Cluster).expect("a subscription");
    watched.progress(&SmolStr::from(name), wanted.map(|resource| resource.version))
}

/// Envoy answers no clusters while one of them warms, which may last until it changes again.
#[test]
fn unanswered_clusters_are_superseded() {
    let (mut world, client) = settled();
    let mut connection = client.connection;
    world.contents[0].insert(0, 1);
    let first = connection.on_snapshot(world.snapshot());
    assert_eq!(
        (first[0].resource_type, names(&first[0])),
        (ResourceType::Cluster, vec!["r0"])
    );
    assert!(!connection.holds_back_clusters(), "nothing has changed since");
    world.contents[0].insert(1, 1);
    assert!(connection.on_snapshot(world.snapshot()).is_empty());
    assert!(connection.holds_back_clusters());
    let second = connection.supersede_clusters();
    let sent: Vec<_> = second.iter().map(|r| (r.resource_type, names(r))).collect();
    // The client may have rejected the first ones.
    assert_eq!(sent, [(ResourceType::Cluster, vec!["r0", "r1"])]);
    assert!(!connection.holds_back_clusters());
    assert_eq!(acked(&mut connection, &first[0].nonce), Outcome::Stale);
    assert_eq!(acked(&mut connection, &second[0].nonce), Outcome::Acked);
    for (name, wanted) in [("r0", resource(0, 1)), ("r1", resource(1, 1))] {
        let progress = progress_of_cluster(&connection, name, Some(&wanted));
        assert!(matches!(progress, Progress::Acknowledged), "{name}: {progress:?}");
    }
}

#[test]
fn clusters_are_removed_while_others_warm() {
    let (mut world, client) = settled();
    let mut connection = client.connection;
    world.contents[0].insert(0, 1);
    connection.on_snapshot(world.snapshot());
    world.contents[0].remove(&1);
    assert!(connection.on_snapshot(world.snapshot()).is_empty());
    let again = connection.supersede_clusters();
    let sent: Vec<_> = again.iter().map(|r| (names(r), r.removed.len())).collect();
    assert_eq!(sent, [(vec!["r0"], 0)]);
    assert!(connection.holds_back_clusters(), "the removal follows");
    let removal = connection.supersede_clusters();
    assert_eq!(removal.len(), 1);
    assert_eq!(
        (names(&removal[0]), removal[0].removed.as_slice()),
        (vec![], &["r1".into()][..])
    );
    let progress = progress_of_cluster(&connection, "r0", Some(&resource(0, 1)));
    assert!(matches!(progress, Progress::Sent), "{progress:?}");
    assert_eq!(acked(&mut connection, &removal[0].nonce), Outcome::Acked);
    for (name, wanted) in [("r0", Some(resource(0, 1))), ("r1", None)] {
        let progress = progress_of_cluster(&connection, name, wanted.as_ref());
        assert!(matches!(progress, Progress::Acknowledged), "{name}: {progress:?}");
    }
}

#[test]
fn listeners_and_routes_wait_for_new_clusters() {
    let (mut world, mut client) = settled();
    client.watch(3, &[5].into());
    client.settle(&world);
    let mut connection = client.connection;
    world.contents[0].insert(0, 1);
    let first = connection.on_snapshot(world.snapshot());
    assert_eq!(first[0].resource_type, ResourceType::Cluster);
    world.contents[0].insert(1, 1);
    world.contents[3].insert(5, 0);
    let routes = connection.on_snapshot(world.snapshot());
    let expected = [(ResourceType::Route, vec!["r5"], 0)];
    assert_eq!(summaries(&routes), expected, "the client knows all clusters");
    world.contents[0].insert(2, 0);
    world.contents[2].insert(2, 0);
    world.contents[3].insert(5, 1);
    assert!(connection.on_snapshot(world.snapshot()).is_empty());
    let mut answer = |response: &Response| {
        let request = Request {
            resource_type: response.resource_type,
            nonce: response.nonce.clone(),
            error: None,
            change: delta(&[]),
        };
        connection.on_request(request).expect("an ACK").responses
    };
    assert!(answer(&routes[0]).is_empty());
    let expected = [
        (ResourceType::Cluster, vec!["r1", "r2"], 0),
        (ResourceType::Listener, vec!["r2"], 0),
        (ResourceType::Route, vec!["r5"], 0),
    ];
    assert_eq!(summaries(&answer(&first[0])), expected);
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
    let sent = summaries(&responses);
    assert_eq!(
        sent,
        [(ResourceType::Route, vec!["r5"], 0), (ResourceType::Cluster, vec![], 1)]
    );
}

#[test]
fn a_wildcard_client_is_sent_the_removal_of_a_name_that_it_drops() {
    let (mut world, mut client) = settled();
    client.watch(3, &[5].into());
    client.settle(&world);
    let mut connection = client.connection;
    world.contents[3].insert(5, 0);
    let routes = connection.on_snapshot(world.snapshot());
    // The removal waits for the next routes, which wait for the answer to the last ones.
    world.contents[3].insert(5, 1);
    world.contents[0].remove(&1);
    assert!(connection.on_snapshot(world.snapshot()).is_empty());
    let mut request = |resource_type: ResourceType, nonce: SmolStr, unsubscribe: &[&str]| {
        let request = Request {
            resource_type,
            nonce,
            error: None,
            change: SubscriptionChange::Change {
                subscribe: Arc::default(),
                unsubscribe: unsubscribe.iter().map(SmolStr::new).collect(),
                initial_versions: InitialVersions::default(),
            },
        };
        connection.on_request(request).expect("a valid request").responses
    };
    assert!(request(ResourceType::Cluster, SmolStr::default(), &["r1"]).is_empty());
    let rest = request(ResourceType::Route, routes[0].nonce.clone(), &[]);
    let expected = [(ResourceType::Route, vec!["r5"], 0), (ResourceType::Cluster, vec![], 1)];
    assert_eq!(summaries(&rest), expected);
}

/// A cluster is removed while the control plane restarts. The routes that the client holds refer to it.
#[test]
fn clusters_removed_before_a_reconnect_wait_for_routes() {
    let (mut world, mut client) = settled();
    client.watch(3, &[5].into());
    client.settle(&world);
    world.contents[3].insert(5, 1);
    world.contents[0].remove(&1);
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent = summaries(&responses);
    assert_eq!(
        sent,
        [
            (ResourceType::Cluster, vec![], 0),
            (ResourceType::Endpoint, vec![], 0),
            (ResourceType::Listener, vec![], 0),
            (ResourceType::Route, vec!["r5"], 0)
        ]
    );
    client.receive(responses);
    client.answer(true);
    let removal = client.inbox.back().expect("a removal");
    assert_eq!(
        (removal.resource_type, removal.removed.as_slice()),
        (ResourceType::Cluster, &["r1".into()][..])
    );
    client.settle(&world);
    assert!(!client.held[0].contains_key("r1"));
}

/// The endpoints of a ServiceEntry become names of DNS. Envoy uses the cluster from before the change until the other
/// one is warm.
#[test]
fn removed_endpoints_of_a_changed_cluster_are_not_replaced() {
    let (mut world, mut client) = settled();
    world.contents[0].insert(1, 1);
    world.contents[1].remove(&1);
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent = summaries(&responses);
    assert_eq!(
        sent,
        [
            (ResourceType::Cluster, vec!["r1"], 0),
            (ResourceType::Endpoint, vec![], 1)
        ]
    );
}

#[test]
fn a_reconnect_with_versions_sends_only_the_difference() {
    let (mut world, mut client) = settled();
    world.contents[1].insert(0, 1);
    client.connect();
    let responses = client.connection.on_snapshot(world.snapshot());
    let sent = summaries(&responses);
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

/// Envoy sends an error of its last stream with the first request of the next one.
#[test]
fn a_first_request_with_an_error_is_a_subscription() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let mut connection = Connection::new(protocol);
        let mut world = World::default();
        world.contents[0] = [(0, 0)].into();
        let _ = connection.on_snapshot(world.snapshot());
        let first = connection.on_request(Request {
            resource_type: ResourceType::Cluster,
            nonce: SmolStr::default(),
            error: Some("nacked".to_owned()),
            change: match protocol {
                Protocol::Sotw => sotw(&[]),
                Protocol::Delta => delta(&[]),
            },
        });
        let sent: Vec<_> = first.expect("a subscription").responses;
        assert_eq!(sent.iter().map(names).collect::<Vec<_>>(), [["r0"]], "{protocol:?}");
    }
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
    client.request(2, SmolStr::default(), None, sotw(&["r0"]));
    client.publish(&world);
    let sent: Vec<_> = client.inbox.iter().map(names).collect();
    assert_eq!(sent, [["r0"]], "what is named is sent");
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
fn a_name_that_waits_for_its_resource_counts_once() {
    let mut connection = Connection::new(Protocol::Delta);
    let added: Vec<SmolStr> = (0..60_000).map(|index| format_smolstr!("name-{index}")).collect();
    for subscribe in [vec![SmolStr::new("first")], added] {
        let request = Request {
            resource_type: ResourceType::Endpoint,
            nonce: SmolStr::default(),
            error: None,
            change: SubscriptionChange::Change {
                subscribe: Arc::new(subscribe.into_iter().collect()),
                unsubscribe: Vec::new(),
                initial_versions: InitialVersions::default(),
            },
        };
        connection.on_request(request).expect("names within the limit");
    }
}

#[test]
fn r20_few_long_names_are_charged_and_limited() {
    let cache = Arc::new(ResponseCache::default());
    let mut connection = Connection::new(Protocol::Delta).sharing(cache.clone());
    let name = |number: usize| format_smolstr!("{number}{}", "x".repeat(1 << 20));
    let mut subscribe = |number: usize, unsubscribe: Vec<SmolStr>| {
        let request = Request {
            resource_type: ResourceType::Endpoint,
            nonce: SmolStr::default(),
            error: None,
            change: SubscriptionChange::Change {
                subscribe: Arc::new([name(number)].into_iter().collect()),
                unsubscribe,
                initial_versions: InitialVersions::default(),
            },
        };
        connection.on_request(request).map(|_| cache.held().get())
    };
    let held: Vec<_> = (0..15).map(|number| subscribe(number, Vec::new())).collect();
    assert_eq!(
        held.first(),
        Some(&Ok(0)),
        "the names of the last list are charged with it"
    );
    let all = held.last().and_then(|held| held.clone().ok()).unwrap_or_default();
    assert!(all >= 14 << 20, "{all} bytes");
    assert_eq!(subscribe(15, vec![name(14)]), Ok(all));
    let refused = subscribe(16, Vec::new());
    assert!(matches!(
        refused,
        Err(SubscriptionError::TooManyNames { names: 16, .. })
    ));
}

#[test]
fn r20_announced_names_are_charged_until_their_removal_is_acknowledged() {
    let cache = Arc::new(ResponseCache::default());
    let mut connection = Connection::new(Protocol::Delta).sharing(cache.clone());
    assert!(connection.on_snapshot(World::default().snapshot()).is_empty());
    let gone = (0..30_000).map(|number| (format!("gone-{number}"), "1".to_owned()));
    let request = Request {
        resource_type: ResourceType::Cluster,
        nonce: SmolStr::default(),
        error: None,
        change: SubscriptionChange::Change {
            subscribe: Arc::default(),
            unsubscribe: Vec::new(),
            initial_versions: initial_versions(gone),
        },
    };
    let reaction = connection.on_request(request).expect("no names");
    assert_eq!(summaries(&reaction.responses), [(ResourceType::Cluster, vec![], 0)]);
    assert!(cache.held().get() > 1 << 20);
    assert_eq!(acked(&mut connection, &reaction.responses[0].nonce), Outcome::Acked);
    let watched = connection.watched(ResourceType::Cluster).expect("a subscription");
    let removal = watched.nonce_sent.clone();
    let removed = watched.in_flight.as_ref().map(|in_flight| in_flight.removed.len());
    assert_eq!(removed, Some(30_000), "clusters are removed after the others");
    assert!(cache.held().get() > 1 << 20);
    assert_eq!(acked(&mut connection, &removal), Outcome::Acked);
    assert_eq!(cache.held().get(), 0);
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
