//! Registrations that are repeated without a stream that waits for them.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::*;
use crate::{
    api::document,
    model::{Change, Installation, World},
    status::fake_api::FakeApi,
};

const GROUP: &str = "/apis/networking.istio.io/v1/namespaces/vms/workloadgroups/web";
const ENTRY: &str = "/apis/networking.istio.io/v1/namespaces/vms/workloadentries/web-10.0.0.7";

fn group(uid: &str) -> Value {
    json!({"metadata": {"name": "web", "namespace": "vms", "uid": uid}, "spec": {"template": {}}})
}

fn controller(api: &FakeApi) -> AutoRegistrationController {
    controller_of(api, World::new(Installation::default()).snapshot())
}

fn controller_of(api: &FakeApi, mesh: Arc<MeshSnapshot>) -> AutoRegistrationController {
    let options = Options {
        instance: "istiod-a".into(),
        validate_identity: false,
        limits: Limits {
            grace: Duration::from_secs(10),
            connection: None,
        },
    };
    let metrics = Metrics::new(&Registry::new()).expect("unused names");
    AutoRegistrationController::new(api.client(), options, metrics, watch::channel(mesh).1)
}

/// Adds the stream 1 of a machine. Returns the key of its entry and the operation that registers it again.
fn connected(controller: &mut AutoRegistrationController) -> (NamespacedName, Operation) {
    let machine = Arc::new(Machine {
        proxy: "vm-1.vms".into(),
        binding: Binding::Group("web".into()),
        namespace: "vms".into(),
        address: "10.0.0.7".into(),
        network: Default::default(),
        labels: Default::default(),
        locality: "".into(),
        hbone: false,
        probed: true,
        identity: None,
    });
    let key = NamespacedName::new("vms", entry::name(&machine));
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let health = Health {
        healthy: true,
        message: String::new(),
        at,
    };
    let connection = Connection {
        machine: machine.clone(),
        at,
        key: key.clone(),
        bound: true,
        health: Some(health),
        ended_before: None,
    };
    controller.add(1, connection);
    let connect = Operation::Connect {
        connection: 1,
        machine,
        at,
        answer: None,
        attempt: 0,
    };
    (key, connect)
}

/// Adds the stream 2 of the same machine, which is newer. Returns the operation that registers it.
fn connected_again(controller: &mut AutoRegistrationController) -> Operation {
    let first = &controller.connections[&1];
    let (machine, key) = (first.machine.clone(), first.key.clone());
    let at = first.at + Duration::from_secs(10);
    let connection = Connection {
        machine: machine.clone(),
        at,
        key,
        bound: true,
        health: None,
        ended_before: None,
    };
    controller.add(2, connection);
    Operation::Connect {
        connection: 2,
        machine,
        at,
        answer: None,
        attempt: 0,
    }
}

/// Runs the operation that is under way to its end.
async fn finish(controller: &mut AutoRegistrationController) {
    let (key, outcome) = controller.working.next().await.expect("an operation");
    controller.on_outcome(key, outcome);
}

fn owner(api: &FakeApi) -> Value {
    let entry = api.get(ENTRY).expect("the entry");
    entry["metadata"]["ownerReferences"][0]["uid"].clone()
}

#[tokio::test]
async fn an_entry_of_a_deleted_group_is_replaced() {
    let api = FakeApi::default();
    let mut controller = controller(&api);
    for uid in ["u-1", "u-2"] {
        // Kubernetes has not deleted the entry of the first group yet.
        api.put(GROUP, group(uid));
        let (key, connect) = connected(&mut controller);
        controller.enqueue(key, connect);
        finish(&mut controller).await;
        assert_eq!(owner(&api), uid);
        // The agent does not report the health again.
        finish(&mut controller).await;
        let entry = api.get(ENTRY).expect("the entry");
        assert_eq!(entry["status"]["conditions"][0]["status"], "True");
    }
}

#[tokio::test]
async fn a_machine_is_disconnected_with_the_last_of_its_streams() {
    for is_rejected in [false, true] {
        let api = FakeApi::default();
        api.put(GROUP, group("u-1"));
        let mut controller = controller(&api);
        let (key, connect) = connected(&mut controller);
        controller.enqueue(key.clone(), connect);
        finish(&mut controller).await;
        finish(&mut controller).await;
        let connect = connected_again(&mut controller);
        if is_rejected {
            // The first stream ends before the answer to the second one.
            controller.on_gone(1);
            controller.on_outcome(key, Outcome::Unbound(2));
        } else {
            controller.enqueue(key, connect);
            finish(&mut controller).await;
            controller.on_gone(2);
        }
        assert!(controller.working.is_empty(), "the other stream is open");
        controller.on_gone(if is_rejected { 2 } else { 1 });
        finish(&mut controller).await;
        let entry = api.get(ENTRY).expect("the entry");
        let annotations = &entry["metadata"]["annotations"];
        assert!(annotations[entry::CONNECTED_AT].is_null(), "{annotations}");
        assert!(annotations[entry::DISCONNECTED_AT].is_string(), "{annotations}");
        assert!(controller.by_entry.is_empty() && controller.by_group.is_empty());
    }
}

#[tokio::test]
async fn r20_nothing_is_read_for_machines_without_identity() {
    let api = FakeApi::default();
    api.put(GROUP, group("u-1"));
    let mut controller = controller(&api);
    let options = Options {
        validate_identity: true,
        ..controller.writer.options().clone()
    };
    let metrics = Metrics::new(&Registry::new()).expect("unused names");
    controller.writer = Writer::new(api.client(), options, metrics, controller.mesh.clone());
    for binding in [Binding::Group("web".into()), Binding::Entry("web-10.0.0.7".into())] {
        let (key, connect) = connected(&mut controller);
        let Operation::Connect { machine, at, .. } = connect else {
            panic!("a registration");
        };
        let machine = Arc::new(Machine {
            binding,
            ..Machine::clone(&machine)
        });
        let connect = Operation::Connect {
            connection: 1,
            machine,
            at,
            answer: None,
            attempt: 0,
        };
        let outcome = controller.writer.perform(&key, connect).await;
        assert!(matches!(outcome, Outcome::Unbound(1)), "{outcome:?}");
        assert_eq!((api.requests(GROUP), api.requests(ENTRY)), (0, 0));
    }
}

#[tokio::test]
async fn the_group_of_an_entry_is_read_once_per_version() {
    let api = FakeApi::default();
    api.put(GROUP, group("u-1"));
    let mut stored = api.get(GROUP).expect("the group");
    stored["apiVersion"] = "networking.istio.io/v1".into();
    stored["kind"] = "WorkloadGroup".into();
    let mut world = World::new(Installation::default());
    let rows = document::parse(&Installation::default().cluster, &stored).rows;
    let mesh = world.commit(rows.into_iter().map(Change::Upsert).collect()).snapshot;
    let mut controller = controller_of(&api, mesh);
    for _ in 0..3 {
        let (key, connect) = connected(&mut controller);
        let outcome = controller.writer.perform(&key, connect).await;
        assert!(matches!(outcome, Outcome::Registered(1)), "{outcome:?}");
        assert_eq!(api.requests(GROUP), 1);
    }
    // The mesh still has the first group.
    api.put(GROUP, group("u-2"));
    let mut entry = api.get(ENTRY).expect("the entry");
    entry["metadata"]["ownerReferences"][0]["uid"] = "u-2".into();
    api.put(ENTRY, entry);
    let (key, connect) = connected(&mut controller);
    let outcome = controller.writer.perform(&key, connect).await;
    assert!(matches!(outcome, Outcome::Registered(1)), "{outcome:?}");
    assert_eq!((api.requests(GROUP), owner(&api)), (2, "u-2".into()));
}

#[tokio::test]
async fn a_failed_registration_is_repeated_while_the_machine_is_connected() {
    let api = FakeApi::default();
    api.put(GROUP, group("u-1"));
    let mut controller = controller(&api);
    let (key, connect) = connected(&mut controller);
    let failed = async |operation| {
        api.fail(1);
        match controller.writer.perform(&key, operation).await {
            Outcome::Failed(operation) => again(operation).expect("another attempt"),
            outcome => panic!("{outcome:?}"),
        }
    };
    let (first, connect) = failed(connect).await;
    let (second, connect) = failed(connect).await;
    assert_eq!((first, second), (RETRY, 2 * RETRY));
    controller.retry(key.clone(), connect);
    finish(&mut controller).await;
    assert_eq!(owner(&api), "u-1");
    finish(&mut controller).await;

    controller.connections.clear();
    let (key, connect) = connected(&mut controller);
    controller.connections.clear();
    controller.retry(key, connect);
    assert!(controller.working.is_empty(), "the stream has ended");
}

#[tokio::test]
async fn health_waits_for_the_end_of_an_outage() {
    let api = FakeApi::default();
    api.put(GROUP, group("u-1"));
    let mut controller = controller(&api);
    let (key, connect) = connected(&mut controller);
    controller.enqueue(key.clone(), connect);
    finish(&mut controller).await;
    finish(&mut controller).await;

    let live = controller.connections.get_mut(&1).expect("a stream");
    let health = Health {
        healthy: false,
        message: "no answer".to_owned(),
        at: live.at + Duration::from_secs(1),
    };
    live.health = Some(health.clone());
    let mut operation = Operation::Health {
        health: health.clone(),
        attempt: 0,
    };
    for _ in 0..10 {
        api.fail(1);
        operation = match controller.writer.perform(&key, operation).await {
            Outcome::Failed(operation) => again(operation).expect("another attempt").1,
            outcome => panic!("{outcome:?}"),
        };
    }
    controller.retry(key.clone(), operation);
    finish(&mut controller).await;
    let entry = api.get(ENTRY).expect("the entry");
    assert_eq!(entry["status"]["conditions"][0]["status"], "False");

    controller.connections.clear();
    controller.retry(key, Operation::Health { health, attempt: 1 });
    assert!(controller.working.is_empty(), "the stream has ended");
}

#[test]
fn entries_are_not_swept_all_the_time_without_a_grace_period() {
    assert_eq!(sweep_interval(Duration::ZERO), SHORTEST_SWEEP);
    assert_eq!(sweep_interval(Duration::from_secs(10)), Duration::from_secs(100));
}
