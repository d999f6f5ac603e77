//! Elections with a model clock, and the bytes of records.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use serde_json::json;
use time::{OffsetDateTime, macros::datetime};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Election, Lock, Timing,
    elector::{Candidate, Elector, Step},
    record::{KEY_ANNOTATION, LockForm, RECORD_ANNOTATION, Record},
};
use crate::{environment, status::fake_api::FakeApi};

const LEASE: Duration = Duration::from_secs(30);
const WALL: OffsetDateTime = datetime!(2026-01-02 03:04:05.678901 UTC);

fn candidate(identity: &str, revision: &str) -> Candidate {
    Candidate {
        identity: identity.into(),
        revision: revision.into(),
        remote: false,
        prioritised: true,
        lease: LEASE,
    }
}

/// One lock object and a clock.
struct World {
    record: Option<Record>,
    start: Instant,
    seconds: u64,
    default_revision: String,
}

impl World {
    fn new() -> Self {
        Self {
            record: None,
            start: environment::now(),
            seconds: 0,
            default_revision: String::new(),
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds)
    }

    /// Makes one attempt; returns true if the elector leads after it.
    fn attempt(&mut self, elector: &mut Elector) -> bool {
        let now = self.now();
        let wall = WALL + Duration::from_secs(self.seconds);
        match elector.step(self.record.as_ref(), now, wall, &self.default_revision) {
            Step::Wait => false,
            Step::Create(record) | Step::Update(record) => {
                self.record = Some(record.clone());
                elector.wrote(record, now);
                true
            }
        }
    }
}

#[test]
fn a_config_map_lock_has_istios_format() {
    let mut elector = Elector::new(candidate("istiod-5d8f-x", "default"));
    let Step::Create(record) = elector.step(None, environment::now(), WALL, "") else {
        panic!("there is no lock yet");
    };
    let object = LockForm::ConfigMap.object("istio-system", "istio-leader", &record);
    let text = concat!(
        r#"{"holderIdentity":"istiod-5d8f-x","holderKey":"default","leaseDurationSeconds":30,"#,
        r#""acquireTime":"2026-01-02T03:04:05Z","renewTime":"2026-01-02T03:04:05Z","leaderTransitions":0}"#
    );
    assert_eq!(
        object,
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "istio-leader",
                "namespace": "istio-system",
                "annotations": {RECORD_ANNOTATION: text},
            },
        })
    );
    let read = LockForm::ConfigMap.read(&object).expect("a valid lock record");
    assert_eq!(read.holder_identity, "istiod-5d8f-x");
    assert_eq!(read.acquire_time, Some(datetime!(2026-01-02 03:04:05 UTC)));
}

#[test]
fn a_lease_lock_has_istios_format() {
    let mut elector = Elector::new(candidate("istiod-a", "canary"));
    let Step::Create(record) = elector.step(None, environment::now(), WALL, "") else {
        panic!("there is no lock yet");
    };
    let mut object = LockForm::Lease.object("istio-system", "istio-status-leader", &record);
    assert_eq!(
        object,
        json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": "istio-status-leader",
                "namespace": "istio-system",
                "annotations": {KEY_ANNOTATION: "canary"},
            },
            "spec": {
                "holderIdentity": "istiod-a",
                "leaseDurationSeconds": 30,
                "acquireTime": "2026-01-02T03:04:05.678901Z",
                "renewTime": "2026-01-02T03:04:05.678901Z",
                "leaseTransitions": 0,
            },
        })
    );
    assert_eq!(LockForm::Lease.read(&object).expect("a lease"), record);
    let released = elector.release(&record, WALL).expect("this replica holds the lock");
    LockForm::Lease.write(&mut object, &released);
    assert_eq!(object["spec"]["holderIdentity"], "");
    assert!(
        object["metadata"]["annotations"]
            .as_object()
            .is_none_or(serde_json::Map::is_empty)
    );
}

#[test]
fn records_of_other_holders_are_parsed() {
    let with = |text: &str| json!({"metadata": {"annotations": {RECORD_ANNOTATION: text}}});
    let zero =
        r#"{"holderIdentity":"x","leaseDurationSeconds":15,"acquireTime":null,"renewTime":null,"leaderTransitions":2}"#;
    let record = LockForm::ConfigMap.read(&with(zero)).expect("a valid record");
    assert_eq!((record.holder_key.as_str(), record.leader_transitions), ("", 2));
    assert_eq!(LockForm::ConfigMap.read(&json!({})), Ok(Record::default()));
    assert!(LockForm::ConfigMap.read(&with("nonsense")).is_err());
}

#[test]
fn a_lock_expires_one_lease_after_the_last_observed_renewal() {
    let mut world = World::new();
    let mut first = Elector::new(candidate("a", "default"));
    let mut second = Elector::new(candidate("b", "default"));
    assert!(world.attempt(&mut first));
    // The first candidate stops renewing. The second one's observation counts, not the time in the record.
    world.seconds = 3600;
    assert!(!world.attempt(&mut second));
    world.seconds += 29;
    assert!(!world.attempt(&mut second));
    world.seconds += 1;
    assert!(world.attempt(&mut second));
    let record = world.record.clone().expect("a held lock");
    assert_eq!((record.holder_identity.as_str(), record.leader_transitions), ("b", 1));
    assert!(
        !world.attempt(&mut first),
        "the first candidate detects that it has lost the lock"
    );
    assert!(!first.is_leader());
}

#[test]
fn renewing_keeps_the_time_of_the_win() {
    let mut world = World::new();
    let mut elector = Elector::new(candidate("a", "default"));
    assert!(world.attempt(&mut elector));
    world.seconds = 8;
    assert!(world.attempt(&mut elector));
    let record = world.record.expect("a held lock");
    assert_eq!(record.acquire_time, Some(WALL));
    assert_eq!(record.renew_time, Some(WALL + Duration::from_secs(8)));
    assert_eq!(record.leader_transitions, 0);
}

#[test]
fn a_released_lock_is_free_at_once() {
    let mut world = World::new();
    let mut first = Elector::new(candidate("a", "default"));
    let mut second = Elector::new(candidate("b", "default"));
    assert!(world.attempt(&mut first));
    assert!(!world.attempt(&mut second));
    world.record = first.release(&world.record.clone().expect("a lock record"), WALL);
    assert!(world.attempt(&mut second));
    assert_eq!(first.release(&world.record.clone().expect("a lock record"), WALL), None);
}

#[test]
fn the_default_revision_evicts_others() {
    let mut world = World::new();
    let mut canary = Elector::new(candidate("a", "canary"));
    let mut stable = Elector::new(candidate("b", "stable"));
    assert!(world.attempt(&mut canary));
    assert!(!world.attempt(&mut stable));
    world.default_revision = "stable".into();
    assert!(world.attempt(&mut stable));
    assert!(!world.attempt(&mut canary));
    let mut of_revision = Elector::new(Candidate {
        prioritised: false,
        ..candidate("c", "other")
    });
    world.default_revision = "other".into();
    assert!(!world.attempt(&mut of_revision), "locks of a revision are never taken");
}

#[test]
fn a_local_instance_evicts_a_remote_one_of_its_revision() {
    let mut world = World::new();
    let mut remote = Elector::new(Candidate {
        remote: true,
        ..candidate("a", "default")
    });
    let mut local = Elector::new(candidate("b", "default"));
    let mut other = Elector::new(candidate("c", "canary"));
    assert!(world.attempt(&mut remote));
    assert_eq!(world.record.as_ref().expect("a lock record").holder_key, "^default");
    assert!(!world.attempt(&mut other));
    assert!(world.attempt(&mut local));
    assert!(!world.attempt(&mut remote));
}

#[tokio::test]
async fn work_that_panics_is_started_again() {
    for enabled in [true, false] {
        let shutdown = CancellationToken::new();
        let election = Election {
            client: FakeApi::default().client(),
            namespace: "istio-system".into(),
            identity: "istiod-a".into(),
            revision: "default".into(),
            remote: false,
            enabled,
            default_revision: watch::channel("default".into()).1,
            shutdown: shutdown.clone(),
            timing: Timing {
                retry: Duration::ZERO,
                ..Timing::default()
            },
        };
        let starts = AtomicUsize::new(0);
        let (starts, shutdown) = (&starts, &shutdown);
        let work = |_: CancellationToken| async move {
            assert!(starts.fetch_add(1, Ordering::Relaxed) > 0, "the first start fails");
            shutdown.cancel();
        };
        election.run(Lock::ANALYSIS, work).await;
        assert_eq!(starts.load(Ordering::Relaxed), 2, "{enabled}");
    }
}

proptest! {
    /// Attempts in any order, at any time: no candidate takes a lock from a holder that renews within its lease.
    #[test]
    fn there_is_one_leader_at_a_time(steps in prop::collection::vec((0_usize..3, 0_u64..20), 1..200)) {
        let mut world = World::new();
        let mut electors: Vec<Elector> = ["a", "b", "c"].map(|name| Elector::new(candidate(name, "default"))).into();
        // Time of each one's last write; a candidate assumes that it leads until half a lease after that.
        let mut wrote = [None::<u64>; 3];
        for (who, wait) in steps {
            world.seconds += wait;
            let leads = world.attempt(&mut electors[who]);
            wrote[who] = leads.then_some(world.seconds);
            let leaders = wrote.iter().flatten().filter(|at| world.seconds - **at < LEASE.as_secs() / 2 + 8);
            prop_assert!(leaders.count() <= 1);
        }
    }
}
