//! Entries equal Istio's, and move between replicas by the times recorded on them.

use super::*;
use crate::xds::events::Identity;

fn machine() -> Machine {
    Machine {
        proxy: "vm-1.vms".into(),
        binding: Binding::Group("web".into()),
        namespace: "vms".into(),
        address: "10.0.0.7".into(),
        network: "net1".into(),
        labels: Labels::from_iter([("app".into(), "web".into()), ("istio-locality".into(), "r/z".into())]),
        locality: "r/z".into(),
        hbone: false,
        probed: true,
        identity: None,
    }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000 + seconds, 120_000_000)
}

fn group() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "vms", "uid": "u-1"},
        "spec": {
            "metadata": {"labels": {"app": "group", "tier": "front"}, "annotations": {"note": "x"}},
            "template": {
                "serviceAccount": "web-sa",
                "ports": {"http": 8080},
                "labels": {"app": "template", "class": "vm"},
                "network": "other",
                "locality": "from/template",
            },
        },
    })
}

fn entry() -> Value {
    of_group("web-10.0.0.7-net1", &machine(), &group(), "istiod-a", at(0))
}

#[test]
fn names_are_of_group_address_and_network() {
    assert_eq!(name(&machine()), "web-10.0.0.7-net1");
    let v6 = Machine {
        address: "fe80::1".into(),
        network: Default::default(),
        ..machine()
    };
    assert_eq!(name(&v6), "web-fe80--1");
    let long = Machine {
        binding: Binding::Group("g".repeat(300).into()),
        ..v6
    };
    assert_eq!(name(&long).len(), 253);
    assert!(name(&long).ends_with("g-fe80--1"));
    let bound = Machine {
        binding: Binding::Entry("mine".into()),
        ..machine()
    };
    assert_eq!(name(&bound), "mine");
}

#[test]
fn an_entry_is_the_template_with_the_machines_metadata() {
    let labels = json!({"app": "web", "class": "vm", "tier": "front"});
    assert_eq!(
        entry(),
        json!({
            "apiVersion": "networking.istio.io/v1",
            "kind": "WorkloadEntry",
            "metadata": {
                "name": "web-10.0.0.7-net1",
                "namespace": "vms",
                "labels": labels,
                "annotations": {
                    "istio.io/autoRegistrationGroup": "web",
                    "istio.io/connectedAt": "2023-11-14T22:13:20.12Z",
                    "istio.io/workloadController": "istiod-a",
                    "note": "x",
                    "proxy.istio.io/health-checks-enabled": "true",
                },
                "ownerReferences": [{
                    "apiVersion": "networking.istio.io/v1",
                    "kind": "WorkloadGroup",
                    "name": "web",
                    "uid": "u-1",
                    "controller": true,
                }],
            },
            "spec": {
                "address": "10.0.0.7",
                "labels": labels,
                "locality": "r/z",
                "network": "net1",
                "ports": {"http": 8080},
                "serviceAccount": "web-sa",
            },
        })
    );
    let hbone = Machine {
        hbone: true,
        ..machine()
    };
    let entry = of_group("x", &hbone, &group(), "istiod-a", at(0));
    assert_eq!(entry["spec"]["labels"]["networking.istio.io/tunnel"], "http");
}

#[test]
fn identities_must_match_the_group() {
    let with = |namespace: &str, account: &str| Machine {
        identity: Some(Identity {
            namespace: namespace.into(),
            service_account: account.into(),
        }),
        ..machine()
    };
    assert!(permit(true, &with("vms", "web-sa"), &entry()).is_ok());
    let wrong = [machine(), with("other", "web-sa"), with("vms", "other")];
    for machine in wrong {
        assert!(matches!(permit(true, &machine, &entry()), Err(Rejection::Forbidden(_))));
        assert!(permit(false, &machine, &entry()).is_ok());
    }
    let mut open = entry();
    open["spec"]["serviceAccount"] = Value::Null;
    assert!(permit(true, &with("vms", "any"), &open).is_ok());
}

#[test]
fn the_last_connection_owns_the_entry() {
    let first = entry();
    assert_eq!(
        connected(&first, "istiod-a", at(0)),
        None,
        "the entry records it already"
    );
    let taken = connected(&first, "istiod-b", at(5)).expect("a newer connection");
    assert_eq!(annotation(&taken, CONTROLLER), "istiod-b");
    assert_eq!(
        connected(&taken, "istiod-a", at(3)),
        None,
        "an older connection, reported late"
    );
    assert_eq!(
        disconnected(&taken, "istiod-a", at(0), at(6)),
        None,
        "the first instance has lost it"
    );
    let away = disconnected(&taken, "istiod-b", at(5), at(9)).expect("its own connection ended");
    assert_eq!(annotation_time(&away, DISCONNECTED_AT), Some(at(9)));
    assert_eq!(annotation_time(&away, CONNECTED_AT), None);
    assert_eq!(
        connected(&away, "istiod-a", at(7)),
        None,
        "connected and disconnected before the report"
    );
    let back = connected(&away, "istiod-b", at(10)).expect("a reconnected machine");
    assert_eq!(annotation(&back, DISCONNECTED_AT), "");
    assert_eq!(
        disconnected(&back, "istiod-b", at(5), at(9)),
        None,
        "the end of an older connection"
    );
}

#[test]
fn entries_are_left_over_from_a_deleted_group() {
    let mut created_again = group();
    created_again["metadata"]["uid"] = "u-2".into();
    assert!(!is_left_over(&entry(), &group()));
    assert!(is_left_over(&entry(), &created_again));
    let mut shared = entry();
    let owners = [&entry(), &of_group("x", &machine(), &created_again, "istiod-a", at(0))]
        .map(|entry| entry["metadata"]["ownerReferences"][0].clone());
    shared["metadata"]["ownerReferences"] = json!(owners);
    assert!(!is_left_over(&shared, &created_again), "Kubernetes keeps it");
    shared["metadata"]["ownerReferences"] = Value::Null;
    assert!(!is_left_over(&shared, &created_again), "it has no owner");
}

#[test]
fn orphaned_entries_are_deleted_after_the_grace_period() {
    let limits = Limits {
        grace: Duration::from_secs(10),
        connection: Some(Duration::from_secs(100)),
    };
    let clean = |entry: &Value, seconds: u64| OwnershipRecord::of_object(entry).clean_up(at(seconds), limits);
    let entry = entry();
    assert_eq!(clean(&entry, 100), None);
    assert_eq!(
        clean(&entry, 101),
        Some(CleanUp::Delete),
        "no disconnection is recorded"
    );
    let away = disconnected(&entry, "istiod-a", at(0), at(9)).expect("the entry belongs to this replica");
    assert_eq!(clean(&away, 18), None);
    assert_eq!(clean(&away, 19), Some(CleanUp::Delete));
    let mut bound = away.clone();
    annotate(&mut bound, GROUP, None);
    assert_eq!(clean(&bound, 50), None, "nothing of ours is on it");
    let health = Health {
        healthy: true,
        message: String::new(),
        at: at(1),
    };
    let marked = with_health(&bound, "istiod-a", &health).expect("the entry belongs to this replica");
    assert_eq!(clean(&marked, 50), Some(CleanUp::ForgetHealth));
    assert_eq!(clean(&without_health(&marked), 50), None);
    let unmarked = json!({"metadata": {"name": "x"}});
    assert_eq!(clean(&unmarked, 5000), None);
}

#[test]
fn health_is_a_condition() {
    let entry = entry();
    let health = |healthy: bool, message: &str, seconds: u64| Health {
        healthy,
        message: message.into(),
        at: at(seconds),
    };
    let sick =
        with_health(&entry, "istiod-a", &health(false, "refused", 3)).expect("the entry belongs to this replica");
    assert_eq!(
        sick["status"]["conditions"],
        json!([{
            "type": "Healthy",
            "status": "False",
            "message": "refused",
            "lastProbeTime": "2023-11-14T22:13:23.12Z",
            "lastTransitionTime": "2023-11-14T22:13:23.12Z",
        }])
    );
    assert_eq!(with_health(&sick, "istiod-a", &health(true, "", 2)), None, "older news");
    assert_eq!(
        with_health(&sick, "istiod-a", &health(false, "refused", 3)),
        None,
        "the same report"
    );
    assert_eq!(
        with_health(&sick, "istiod-b", &health(true, "", 9)),
        None,
        "not its entry"
    );
    let well = with_health(&sick, "istiod-a", &health(true, "", 4)).expect("the health is newer");
    assert_eq!(well["status"]["conditions"][0]["status"], "True");
    assert!(takes_health(&entry) && !takes_health(&json!({})));
}
