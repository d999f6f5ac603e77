//! Tests of resources that clients refuse: they are withheld until they change, or until clients of the same build
//! accept them.

use super::*;
use crate::xds::{
    admission::Source,
    share::quarantine::{Build, Quarantine, Refusal},
    watched::{Awaited, InFlight, WatchedResource},
};

fn quarantine() -> (Quarantine, Build) {
    let gauges = prometheus::IntGaugeVec::new(prometheus::Opts::new("quarantined", "help"), &["type"]);
    let node = "sidecar~10.0.0.1~a.default~default.svc.cluster.local";
    let proxy = crate::generate::fixture::client(node, &serde_json::json!({}));
    let build = Build::of(&proxy.node, &Source::Address(None));
    (Quarantine::new(gauges.expect("a valid metric")), build)
}

/// Clusters r0 and r1 with these generations, at the next revision.
fn clusters(world: &mut World, generations: [u8; 2]) -> Arc<ResourceSnapshot> {
    world.revision += 1;
    world.contents[0] = [(0, generations[0]), (1, generations[1])].into();
    world.snapshot()
}

#[test]
fn a_refused_resource_is_withheld_until_it_changes() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let (quarantine, build) = quarantine();
        let mut connection = Connection::new(protocol).with_quarantine(Some((Arc::new(quarantine), build)));
        let mut world = World::default();
        let request = |nonce: &SmolStr, error: Option<&str>| Request {
            resource_type: ResourceType::Cluster,
            nonce: nonce.clone(),
            error: error.map(str::to_owned),
            change: match protocol {
                Protocol::Sotw => SubscriptionChange::Names(Arc::default()),
                Protocol::Delta => SubscriptionChange::Change {
                    subscribe: Arc::default(),
                    unsubscribe: Vec::new(),
                    initial_versions: InitialVersions::default(),
                },
            },
        };
        let sent = |responses: &[Response], expected: &[(u8, u8)]| -> SmolStr {
            let [response] = responses else {
                panic!("{protocol:?}: {} responses instead of {expected:?}", responses.len());
            };
            let given: Vec<_> = response.resources.iter().map(|resource| resource.version).collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|(name, number)| resource(*name, *number).version)
                .collect();
            assert_eq!(given, expected, "{protocol:?}");
            response.nonce.clone()
        };
        // State of the world repeats what did not change.
        let sotw = |mut all: Vec<(u8, u8)>, delta: &[(u8, u8)]| -> Vec<(u8, u8)> {
            if protocol == Protocol::Delta {
                all = delta.to_vec();
            }
            all
        };
        connection.on_snapshot(clusters(&mut world, [1, 1]));
        let first = connection
            .on_request(request(&SmolStr::default(), None))
            .expect("a subscription");
        let nonce = sent(&first.responses, &[(0, 1), (1, 1)]);
        connection.on_request(request(&nonce, None)).expect("an ACK");

        let nonce = sent(&connection.on_snapshot(clusters(&mut world, [2, 2])), &[(0, 2), (1, 2)]);
        let error = "Error adding/updating cluster(s) r0: bad";
        let refused = connection.on_request(request(&nonce, Some(error))).expect("a NACK");
        let names: Vec<_> = refused
            .refused
            .iter()
            .map(|refusal| (refusal.name.as_str(), &*refusal.reason))
            .collect();
        assert_eq!(names, [("r0", "bad")]);
        let nonce = sent(&refused.responses, &sotw(vec![(0, 1), (1, 2)], &[(1, 2)]));
        let acked = connection.on_request(request(&nonce, None)).expect("an ACK");
        assert!(acked.responses.is_empty() && connection.is_settled());
        let progress = |connection: &Connection, name: u8, number: u8| {
            let watched = connection.watched(ResourceType::Cluster).expect("a subscription");
            let wanted = resource(name, number);
            watched.progress(&wanted.name, Some(wanted.version))
        };
        assert!(matches!(progress(&connection, 0, 2), Progress::Refused(_)));
        assert!(matches!(progress(&connection, 1, 2), Progress::Acknowledged));

        let nonce = sent(
            &connection.on_snapshot(clusters(&mut world, [2, 3])),
            &sotw(vec![(0, 1), (1, 3)], &[(1, 3)]),
        );
        connection.on_request(request(&nonce, None)).expect("an ACK");
        assert!(matches!(progress(&connection, 0, 2), Progress::Refused(_)));

        // A second version is refused, too: the client still holds the first one.
        let nonce = sent(
            &connection.on_snapshot(clusters(&mut world, [3, 3])),
            &sotw(vec![(0, 3), (1, 3)], &[(0, 3)]),
        );
        let again = connection.on_request(request(&nonce, Some(error))).expect("a NACK");
        assert_eq!((again.responses.len(), again.refused.len()), (0, 1));
        assert!(matches!(progress(&connection, 0, 3), Progress::Refused(_)));
        let nonce = sent(
            &connection.on_snapshot(clusters(&mut world, [3, 5])),
            &sotw(vec![(0, 1), (1, 5)], &[(1, 5)]),
        );
        connection.on_request(request(&nonce, None)).expect("an ACK");

        let nonce = sent(
            &connection.on_snapshot(clusters(&mut world, [4, 5])),
            &sotw(vec![(0, 4), (1, 5)], &[(0, 4)]),
        );
        assert!(matches!(progress(&connection, 0, 4), Progress::Sent));
        connection.on_request(request(&nonce, None)).expect("an ACK");
        assert!(matches!(progress(&connection, 0, 4), Progress::Acknowledged));
        assert!(connection.is_settled());
    }
}

#[test]
fn a_refusal_that_may_pass_is_retried_with_the_next_change() {
    let port = "Error adding/updating cluster(s) r0: cannot bind '0.0.0.0:80': Address already in use";
    let content = "Error adding/updating cluster(s) r0: bad";
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        for (is_quarantined, error) in [(true, port), (false, content)] {
            let mut client = NamingClient::new(protocol, ResourceType::Cluster, quarantine());
            if !is_quarantined {
                client.connection = Connection::new(protocol);
            }
            let mut world = World::default();
            client.connection.on_snapshot(clusters(&mut world, [1, 1]));
            let first = client.request(&SmolStr::default(), None, &[]);
            let nonce = sent(&first.responses, &[(0, 1), (1, 1)]);
            let rejected = client.request(&nonce, Some(error), &[]);
            assert_eq!(refused(&rejected), ["r0"], "{protocol:?}");
            if is_quarantined {
                let nonce = sent(&rejected.responses, &[(1, 1)]);
                assert!(client.ack(&nonce).is_empty(), "{protocol:?}");
            } else {
                assert!(rejected.responses.is_empty(), "{protocol:?}");
            }
            let changed = client.connection.on_snapshot(clusters(&mut world, [1, 2]));
            let nonce = sent(&changed, &[(0, 1), (1, 2)]);
            assert!(client.ack(&nonce).is_empty(), "{protocol:?}");
            assert!(
                matches!(client.progress(0, 1), Progress::Acknowledged),
                "{protocol:?} {error}"
            );
        }
    }
}

/// An EnvoyFilter adds a tracer to a listener, and another one adds its cluster later.
#[test]
fn a_listener_is_sent_again_with_the_cluster_that_it_lacks() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let (quarantine, build) = quarantine();
        let mut client = Client::quarantined(protocol, quarantine, build);
        let mut world = World::default();
        world.contents[2] = [(1, 0)].into();
        client.connect();
        client.publish(&world);
        assert!(client.answer(true), "clusters");
        let listeners = client.inbox.pop_front().expect("a response");
        let error = "Error adding/updating listener(s) r1: envoy.tracers.zipkin: unknown cluster 'r5'";
        let change = match protocol {
            Protocol::Sotw => sotw(&[]),
            Protocol::Delta => delta(&[]),
        };
        client.request(2, listeners.nonce, Some(error.to_owned()), change);
        assert!(client.inbox.is_empty(), "{protocol:?}");
        for (cluster, expected) in [
            (4, vec![ResourceType::Cluster]),
            (5, vec![ResourceType::Cluster, ResourceType::Listener]),
        ] {
            world.contents[0].insert(cluster, 0);
            client.publish(&world);
            let sent: Vec<_> = client.inbox.iter().map(|response| response.resource_type).collect();
            assert_eq!(sent, expected, "{protocol:?}");
            while client.answer(true) {}
        }
        let watched = client.connection.watched(ResourceType::Listener);
        let wanted = resource(1, 0);
        let progress = watched.map(|watched| watched.progress(&wanted.name, Some(wanted.version)));
        assert!(matches!(progress, Some(Progress::Acknowledged)), "{progress:?}");
    }
}

/// Puts a resource into quarantine, which takes the refusals of several clients of a build. It lasts as long as these.
fn refuse_thrice(
    (quarantine, build): &(Quarantine, Build),
    resource_type: ResourceType,
    refused: &EncodedResource,
    held: Option<&Arc<EncodedResource>>,
) -> [Arc<Refusal>; 3] {
    std::array::from_fn(|_| {
        let refusal = Refusal::new(resource_type, refused, "bad".to_owned(), held.cloned());
        quarantine.add(*build, Arc::new(refusal))
    })
}

/// Runs a client while some endpoints and routes are in quarantine.
pub(super) fn run(protocol: Protocol, steps: Vec<Step>) {
    let quarantine = quarantine();
    let refused = [
        (ResourceType::Endpoint, 1, None),
        (ResourceType::Endpoint, 2, Some(resource(2, 0))),
        (ResourceType::Route, 1, None),
        (ResourceType::Route, 2, None),
    ];
    let _refusals = refused.map(|(of, name, held)| refuse_thrice(&quarantine, of, &resource(name, 1), held.as_ref()));
    let (quarantine, build) = quarantine;
    super::run(Client::quarantined(protocol, quarantine, build), steps);
}

#[test]
fn resources_that_others_accept_are_no_longer_withheld() {
    let quarantine = quarantine();
    let refused = resource(0, 1);
    let refusals = refuse_thrice(&quarantine, ResourceType::Cluster, &refused, None);
    let (quarantine, build) = quarantine;
    let mut watched = WatchedResource {
        wildcard: true,
        ..WatchedResource::default()
    };
    let resources: Vec<Arc<EncodedResource>> = vec![refused.clone()];
    let content = InFlight {
        resources: resources.into(),
        ..InFlight::default()
    };
    let sent = watched.withhold(
        ResourceType::Cluster,
        content,
        &Awaited::default(),
        Protocol::Sotw,
        &quarantine.withheld(build, ResourceType::Cluster),
    );
    assert!(sent.is_some_and(|sent| sent.resources.is_empty()));
    watched.release();
    assert!(watched.pending.is_empty() && watched.refused.contains_key(&refused.name));
    quarantine.accept(build, ResourceType::Cluster, std::slice::from_ref(&refused));
    watched.release();
    assert!(watched.pending.contains(&refused.name) && watched.refused.is_empty());
    drop(refusals);
}

#[test]
fn a_response_that_fails_because_of_held_resources_is_not_repeated() {
    let mut world = World::default();
    let held = clusters(&mut world, [1, 1]);
    let view = held.resources(ResourceType::Cluster);
    let mut watched = WatchedResource {
        wildcard: true,
        acknowledged: Some(view.clone()),
        in_flight: Some(Box::new(InFlight {
            resources: view.iter().cloned().collect(),
            ..InFlight::default()
        })),
        ..WatchedResource::default()
    };
    let error = "Error adding/updating cluster(s) r0: bad".to_owned();
    let refusals = watched.nack(ResourceType::Cluster, error, true);
    assert!(refusals.is_empty() && watched.refused.is_empty() && watched.pending.is_empty());
    assert_eq!(watched.nacked.len(), 2);
}

/// A client lost the endpoints of a changed cluster with its last connection. It gets them, also if the first response
/// lacks a resource that others refused.
#[test]
fn endpoints_of_unconfirmed_clusters_are_sent_beside_withheld_resources() {
    let (mut world, mut client) = settled();
    client.publish(&World {
        contents: [
            [(0, 1), (1, 0)].into(),
            world.contents[1].clone(),
            Content::new(),
            Content::new(),
            Content::new(),
        ],
        revision: 1,
    });
    // The control plane is killed before the endpoints are sent.
    let lost = client.inbox.pop_front().expect("the changed cluster");
    client.apply(0, &lost);
    world.revision = 2;
    world.contents[0] = [(0, 1), (1, 1)].into();

    let quarantine = quarantine();
    let _refusals = refuse_thrice(&quarantine, ResourceType::Cluster, &resource(1, 1), None);
    let (quarantine, build) = quarantine;
    client.connection = Connection::new(Protocol::Delta).with_quarantine(Some((Arc::new(quarantine), build)));
    client.inbox.clear();
    client.subscribe();
    client.publish(&world);
    client.settle(&world);
    assert!(
        client.warming.is_empty(),
        "clusters still wait for their endpoints: {:?}",
        client.warming
    );
    assert_eq!(
        client.held[0]["r1"].version,
        resource(1, 0).version,
        "the refused version is withheld"
    );
}

/// A client that requests resources by name, without a model of what it holds.
struct NamingClient {
    connection: Connection,
    protocol: Protocol,
    resource_type: ResourceType,
    names: Vec<&'static str>,
}

impl NamingClient {
    fn new(protocol: Protocol, resource_type: ResourceType, (quarantine, build): (Quarantine, Build)) -> Self {
        Self {
            connection: Connection::new(protocol).with_quarantine(Some((Arc::new(quarantine), build))),
            protocol,
            resource_type,
            names: Vec::new(),
        }
    }

    /// Sends a request that adds these names.
    fn request(&mut self, nonce: &SmolStr, error: Option<&str>, added: &[&'static str]) -> Reaction {
        self.names.extend(added);
        let request = Request {
            resource_type: self.resource_type,
            nonce: nonce.clone(),
            error: error.map(str::to_owned),
            change: match self.protocol {
                Protocol::Sotw => sotw(&self.names),
                Protocol::Delta => delta(added),
            },
        };
        self.connection.on_request(request).expect("few names")
    }

    fn ack(&mut self, nonce: &SmolStr) -> Vec<Response> {
        self.request(nonce, None, &[]).responses
    }

    fn progress(&self, name: u8, generation: u8) -> Progress {
        let watched = self.connection.watched(self.resource_type).expect("a subscription");
        let wanted = resource(name, generation);
        watched.progress(&wanted.name, Some(wanted.version))
    }

    fn last_error(&self) -> Option<&str> {
        let watched = self.connection.watched(self.resource_type).expect("a subscription");
        watched.last_error.as_deref()
    }
}

/// Checks the resources of the only response and returns its nonce.
fn sent(responses: &[Response], expected: &[(u8, u8)]) -> SmolStr {
    let [response] = responses else {
        panic!("{} responses instead of {expected:?}", responses.len());
    };
    let given: Vec<_> = response.resources.iter().map(|resource| resource.version).collect();
    let expected = expected.iter().map(|(name, number)| resource(*name, *number).version);
    assert_eq!(given, expected.collect::<Vec<_>>());
    response.nonce.clone()
}

/// Publishes routes with these generations at the next revision.
fn routes(world: &mut World, routes: &[(u8, u8)]) -> Arc<ResourceSnapshot> {
    world.revision += 1;
    world.contents[3] = routes.iter().copied().collect();
    world.snapshot()
}

fn refused(reaction: &Reaction) -> Vec<&str> {
    let names = reaction.refused.iter().map(|refusal| refusal.name.as_str());
    names.collect()
}

/// Envoy waits without a time limit for the routes of its listeners (`initial_fetch_timeout: 0s`).
#[test]
fn a_client_that_waits_is_sent_what_others_refused() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let quarantine = quarantine();
        let _refusals = refuse_thrice(&quarantine, ResourceType::Route, &resource(0, 1), None);
        let mut client = NamingClient::new(protocol, ResourceType::Route, quarantine);
        let mut world = World::default();
        client.connection.on_snapshot(routes(&mut world, &[(0, 1), (1, 1)]));
        let first = client.request(&SmolStr::default(), None, &["r0", "r1"]);
        let nonce = sent(&first.responses, &[(1, 1)]);
        assert!(!client.connection.is_up_to_date(), "{protocol:?}: r0 is sent later");
        let nonce = sent(&client.ack(&nonce), &[(0, 1)]);
        let rejected = client.request(&nonce, Some("bad"), &[]);
        assert_eq!(
            (refused(&rejected), rejected.responses.len()),
            (vec!["r0"], 0),
            "{protocol:?}"
        );
        assert!(client.connection.is_settled());
        // The client waits no longer.
        let nonce = sent(
            &client.connection.on_snapshot(routes(&mut world, &[(0, 1), (1, 2)])),
            &[(1, 2)],
        );
        assert!(client.ack(&nonce).is_empty() && client.connection.is_settled());
        assert!(matches!(client.progress(0, 1), Progress::Refused(_)));
    }
}

/// The error of a route configuration does not name it.
#[test]
fn a_rejected_response_of_refused_resources_refuses_all_of_them() {
    let quarantine = quarantine();
    let _refusals = [0, 2].map(|name| refuse_thrice(&quarantine, ResourceType::Route, &resource(name, 1), None));
    let mut client = NamingClient::new(Protocol::Delta, ResourceType::Route, quarantine);
    let mut world = World::default();
    client
        .connection
        .on_snapshot(routes(&mut world, &[(0, 1), (1, 1), (2, 1)]));
    let first = client.request(&SmolStr::default(), None, &["r0", "r1", "r2"]);
    let nonce = sent(&first.responses, &[(1, 1)]);
    let nonce = sent(&client.ack(&nonce), &[(0, 1), (2, 1)]);
    let rejected = client.request(&nonce, Some("bad"), &[]);
    assert_eq!((refused(&rejected), rejected.responses.len()), (vec!["r0", "r2"], 0));
    // The client requests one of them again, and refuses it again.
    let again = client.request(&SmolStr::default(), None, &["r0"]);
    let nonce = sent(&again.responses, &[(0, 1)]);
    let rejected = client.request(&nonce, Some("bad"), &[]);
    assert_eq!((refused(&rejected).len(), rejected.responses.len()), (0, 0));
    assert!(client.connection.is_settled());
}

#[test]
fn a_client_that_waits_is_sent_what_others_hold() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let quarantine = quarantine();
        let held = resource(0, 0);
        let _refusals = refuse_thrice(&quarantine, ResourceType::Route, &resource(0, 1), Some(&held));
        let mut client = NamingClient::new(protocol, ResourceType::Route, quarantine);
        let mut world = World::default();
        client.connection.on_snapshot(routes(&mut world, &[(0, 1), (1, 1)]));
        let first = client.request(&SmolStr::default(), None, &["r0", "r1"]);
        let nonce = sent(&first.responses, &[(0, 0), (1, 1)]);
        assert!(client.ack(&nonce).is_empty() && client.connection.is_settled());
        assert!(matches!(client.progress(0, 1), Progress::Refused(_)));
    }
}

/// As long as a cluster warms, Envoy sends no request for clusters.
#[test]
fn a_changed_cluster_is_warmed_with_the_endpoints_that_the_client_holds() {
    let quarantine = quarantine();
    let _refusals = refuse_thrice(&quarantine, ResourceType::Endpoint, &resource(1, 1), None);
    let (quarantine, build) = quarantine;
    let (mut world, mut client) = settle(Client::quarantined(Protocol::Delta, quarantine, build));
    world.revision += 1;
    world.contents[1].insert(1, 1);
    client.publish(&world);
    assert!(client.inbox.is_empty(), "the client does not wait for endpoints");
    world.revision += 1;
    world.contents[0].insert(1, 1);
    client.publish(&world);
    client.settle(&world);
    assert!(client.warming.is_empty(), "{:?}", client.warming);
    assert_eq!(client.held[1]["r1"].version, resource(1, 0).version);
}

#[test]
fn rejected_resources_are_not_held_after_the_ack_of_others() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let mut client = NamingClient::new(protocol, ResourceType::Route, quarantine());
        let mut world = World::default();
        let content = |first: u8, second: u8, fourth: u8| [(0u8, first), (1, second), (2, 0), (3, fourth)];
        client.connection.on_snapshot(routes(&mut world, &content(0, 0, 0)));
        let first = client.request(&SmolStr::default(), None, &["r0", "r1", "r3"]);
        let nonce = sent(&first.responses, &[(0, 0), (1, 0), (3, 0)]);
        assert!(client.ack(&nonce).is_empty());

        // The error does not say which of them is wrong.
        let changed = client.connection.on_snapshot(routes(&mut world, &content(1, 1, 0)));
        let nonce = sent(&changed, &[(0, 1), (1, 1)]);
        let rejected = client.request(&nonce, Some("bad"), &[]);
        assert_eq!(
            (refused(&rejected), rejected.responses.len()),
            (vec![], 0),
            "{protocol:?}"
        );
        let nonce = sent(&client.request(&nonce, None, &["r2"]).responses, &[(2, 0)]);
        assert!(client.ack(&nonce).is_empty());
        assert!(matches!(client.progress(2, 0), Progress::Acknowledged));
        assert!(matches!(client.progress(1, 1), Progress::Rejected(error) if error == "bad"));
        assert_eq!(client.last_error(), Some("bad"));

        // Any of the three may be wrong.
        let changed = client.connection.on_snapshot(routes(&mut world, &content(1, 1, 1)));
        let nonce = sent(&changed, &[(0, 1), (1, 1), (3, 1)]);
        let rejected = client.request(&nonce, Some("bad"), &[]);
        assert_eq!(
            (refused(&rejected), rejected.responses.len()),
            (vec![], 0),
            "{protocol:?}"
        );
        let changed = client.connection.on_snapshot(routes(&mut world, &content(2, 1, 1)));
        let nonce = sent(&changed, &[(0, 2), (1, 1), (3, 1)]);
        assert!(client.ack(&nonce).is_empty());
        assert!(matches!(client.progress(1, 1), Progress::Acknowledged));
        assert_eq!(client.last_error(), None);
    }
}

/// The view of a group contains resources that the client has not requested.
#[test]
fn new_names_are_not_held_before_they_are_acknowledged() {
    for protocol in [Protocol::Sotw, Protocol::Delta] {
        let mut client = NamingClient::new(protocol, ResourceType::Route, quarantine());
        let mut world = World::default();
        client.connection.on_snapshot(routes(&mut world, &[(0, 0), (1, 0)]));
        let first = client.request(&SmolStr::default(), None, &["r0"]);
        let nonce = sent(&first.responses, &[(0, 0)]);
        assert!(client.ack(&nonce).is_empty());
        let nonce = sent(&client.request(&nonce, None, &["r1"]).responses, &[(1, 0)]);
        assert!(matches!(client.progress(1, 0), Progress::Sent));
        assert_eq!(
            refused(&client.request(&nonce, Some("bad"), &[])),
            ["r1"],
            "{protocol:?}"
        );
    }
}
