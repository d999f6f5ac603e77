//! Tests of resources that clients refuse: they are withheld until they change, or until clients of the same build
//! accept them.

use super::*;
use crate::xds::{
    share::quarantine::{Build, Quarantine, Refusal},
    watched::{InFlight, Progress, WatchedResource},
};

fn quarantine() -> (Quarantine, Build) {
    let gauges = prometheus::IntGaugeVec::new(prometheus::Opts::new("quarantined", "help"), &["type"]);
    let node = "sidecar~10.0.0.1~a.default~default.svc.cluster.local";
    let proxy = crate::generate::fixture::client(node, &serde_json::json!({}));
    (Quarantine::new(gauges.expect("a valid metric")), Build::of(&proxy.node))
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

/// Puts a cluster into quarantine, which takes the refusals of several clients of a build. It lasts as long as these.
fn refuse_thrice(quarantine: &Quarantine, build: Build, refused: &EncodedResource) -> [Arc<Refusal>; 3] {
    std::array::from_fn(|_| {
        let refusal = Refusal::new(ResourceType::Cluster, refused, "bad".to_owned(), None);
        quarantine.add(build, Arc::new(refusal))
    })
}

#[test]
fn resources_that_others_accept_are_no_longer_withheld() {
    let (quarantine, build) = quarantine();
    let refused = resource(0, 1);
    let refusals = refuse_thrice(&quarantine, build, &refused);
    let mut watched = WatchedResource {
        wildcard: true,
        ..WatchedResource::default()
    };
    let resources: Vec<Arc<EncodedResource>> = vec![refused.clone()];
    let content = InFlight {
        resources: resources.into(),
        ..InFlight::default()
    };
    let sent = watched.withhold(ResourceType::Cluster, content, Protocol::Sotw, (&quarantine, build));
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
        in_flight: Some(InFlight {
            resources: view.iter().cloned().collect(),
            ..InFlight::default()
        }),
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

    let (quarantine, build) = quarantine();
    let _refusals = refuse_thrice(&quarantine, build, &resource(1, 1));
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
