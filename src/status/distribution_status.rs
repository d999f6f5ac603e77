//! Writes the condition `Reconciled` of Istio's objects (`PILOT_ENABLE_STATUS`): how many proxies of all replicas run
//! the object's last generation.
//!
//! The leader follows an object that has changed until all proxies have answered, as `istiod status --wait` does, but
//! it waits for the push, so that debouncing stays as it is. It does nothing more: proxies that connect later receive
//! the object with their first configuration. So the cost follows the changes of objects. An object whose answer was no
//! success is followed again after each push, which may have helped. Objects without the condition, such as after it
//! was switched on, are followed when no object has changed. Progress is written seldom, and nothing is written that
//! the status says already.
//!
//! Parity (pilot/pkg/status/distribution/state.go of release 1.15): type, status and the first sentence of the message.

mod turns;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::Arc,
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, join},
    stream::FuturesUnordered,
};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use self::turns::{MAX_FOLLOWED, ObjectTurns, Rank};
use super::{
    leader::{Election, Lock},
    object_status::{Observed, ServedKinds, Statuses, Writer},
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    distribution::{
        Distribution, ObjectQuery,
        replicas::Scope,
        report::{ObjectReport, ObjectState},
    },
    model::{
        gateway_api::status::{StatusKey, Written},
        snapshot::MeshSnapshot,
    },
};

/// The kinds with the condition: Istio's, but for those that describe workloads.
pub const KINDS: &[Kind] = &[
    Kind::VirtualService,
    Kind::DestinationRule,
    Kind::Gateway,
    Kind::ServiceEntry,
    Kind::Sidecar,
    Kind::EnvoyFilter,
    Kind::AuthorizationPolicy,
    Kind::PeerAuthentication,
    Kind::RequestAuthentication,
    Kind::Telemetry,
    Kind::WasmPlugin,
    Kind::TrafficExtension,
    Kind::ProxyConfig,
];
/// The type of the condition.
const CONDITION: &str = "Reconciled";
/// The longest time for which an object is followed without a pause.
const MAX_TURN: Duration = Duration::from_mins(10);
/// The time in which most changes arrive, before which no progress is written.
const FIRST_PROGRESS: Duration = Duration::from_secs(1);
/// The interval at which progress is written.
const PROGRESS: Duration = Duration::from_secs(5);

/// The inputs of the writer.
#[derive(Clone)]
pub struct Inputs {
    /// Watches in the config cluster.
    pub watches: Watches,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Starts to follow which of [`KINDS`] are served.
    pub served: Arc<dyn Fn() -> ServedKinds + Send + Sync>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
    /// The status of objects.
    pub distribution: Arc<Distribution>,
}

/// Writes while this replica leads.
pub async fn run(election: &Election, inputs: Inputs) {
    election
        .run(Lock::DISTRIBUTION, |token| {
            let inputs = inputs.clone();
            async move {
                let conditions = Conditions::new(inputs.distribution);
                let served = (inputs.served)();
                let writer = Writer::new(inputs.watches, inputs.mesh, served, inputs.only, conditions);
                token.run_until_cancelled(Box::pin(writer.run())).await;
            }
        })
        .await;
}

/// A condition about one generation of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Condition {
    generation: i64,
    status: &'static str,
    reason: &'static str,
    message: String,
}

impl Condition {
    /// Returns the condition that a report says; `None` if this control plane does not know the object, which may
    /// belong to another one.
    fn of(generation: i64, report: &ObjectReport) -> Option<Self> {
        let (status, reason) = match report.state {
            ObjectState::Unknown | ObjectState::Removed => return None,
            ObjectState::Acknowledged => ("True", "Acknowledged"),
            ObjectState::Unused => ("True", "Unused"),
            ObjectState::Incomplete => ("Unknown", "Incomplete"),
            ObjectState::Awaited => ("False", "Awaited"),
            ObjectState::Pending => ("False", "Pending"),
            ObjectState::Invalid => ("False", "Invalid"),
            ObjectState::Refused => ("False", "Refused"),
        };
        let counts = &report.counts;
        let mut message = format!("{}/{} proxies up to date.", counts.acknowledged, counts.proxies);
        if counts.refused > 0 {
            let _ = write!(message, " {} refused it.", counts.refused);
        }
        if report.state == ObjectState::Invalid {
            message.push_str(" The object is invalid; its last valid version applies, if there was one.");
        }
        let missing = report.replicas.iter().filter(|replica| !replica.answered).count();
        if missing > 0 {
            let _ = write!(message, " Replicas of istiod that did not answer: {missing}.");
        }
        Some(Self {
            generation,
            status,
            reason,
            message,
        })
    }

    /// Returns true if this condition says nothing new after an earlier one. Of success, the number of proxies does not
    /// count: it may change all the time.
    fn repeats(&self, earlier: &Self) -> bool {
        let result = |condition: &Self| (condition.generation, condition.status, condition.reason);
        result(self) == result(earlier) && (self.status == "True" || self.message == earlier.message)
    }

    /// Returns the conditions to write in the place of the present ones; `None` if they say the same. The list is
    /// replaced as a whole, so conditions of others are repeated.
    fn applied(&self, status: &Value, now: &str) -> Option<Value> {
        let conditions = status["conditions"].as_array();
        let (own, mut others): (Vec<Value>, Vec<Value>) = conditions
            .into_iter()
            .flatten()
            .cloned()
            .partition(|condition| condition["type"] == CONDITION);
        let mut written = json!({
            "type": CONDITION, "status": self.status, "reason": self.reason, "message": self.message,
            "observedGeneration": self.generation, "lastTransitionTime": now,
        });
        if let [own] = own.as_slice() {
            if own["status"] == self.status {
                written["lastTransitionTime"] = own["lastTransitionTime"].clone();
            }
            if *own == written {
                return None;
            }
        }
        others.push(written);
        Some(others.into())
    }
}

/// An object of the API server, as far as its condition is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    generation: i64,
    version: u64,
    condition: Present,
}

/// The present condition of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Present {
    /// There is none.
    Absent,
    /// It is about an earlier generation.
    Earlier,
    /// It is about this generation, and no success.
    Open,
    /// All proxies run this generation.
    Done,
}

impl Seen {
    fn of(observed: &Observed) -> Self {
        let mut conditions = observed.status["conditions"].as_array().into_iter().flatten();
        let condition = match conditions.find(|condition| condition["type"] == CONDITION) {
            None => Present::Absent,
            Some(own) if own["observedGeneration"] != observed.generation => Present::Earlier,
            Some(own) if own["status"] == "True" => Present::Done,
            Some(_) => Present::Open,
        };
        Self {
            generation: observed.generation,
            version: observed.version().parse().unwrap_or_default(),
            condition,
        }
    }
}

/// Conditions that other programs have removed, and the objects whose wanted condition repeats the removed one.
#[derive(Default)]
struct Removals {
    conditions: BTreeMap<StatusKey, Condition>,
    restored: BTreeSet<StatusKey>,
}

impl Removals {
    fn removed(&mut self, key: &StatusKey, condition: Condition) {
        self.conditions.insert(key.clone(), condition);
    }

    fn wanted(&mut self, key: &StatusKey, condition: &Condition) {
        let removed = self.conditions.remove(key);
        if removed.is_some_and(|removed| condition.repeats(&removed)) {
            self.restored.insert(key.clone());
        } else {
            self.restored.remove(key);
        }
    }

    fn forget(&mut self, key: &StatusKey) {
        self.conditions.remove(key);
        self.restored.remove(key);
    }
}

/// A report about an object, with the number of its turn.
type News = (StatusKey, u64, ObjectReport);

/// The conditions of all objects that this leader has followed.
struct Conditions {
    distribution: Arc<Distribution>,
    objects: BTreeMap<StatusKey, Seen>,
    wanted: BTreeMap<StatusKey, Condition>,
    removals: Removals,
    /// Conditions that are not written before this time.
    progress: BTreeMap<StatusKey, (Instant, Condition)>,
    /// When the condition of an object was wanted last.
    last: BTreeMap<StatusKey, Instant>,
    /// Objects whose final answer was no success.
    failed: BTreeSet<StatusKey>,
    turns: ObjectTurns,
    running: FuturesUnordered<BoxFuture<'static, (StatusKey, u64)>>,
    sender: mpsc::Sender<News>,
    news: mpsc::Receiver<News>,
}

impl Conditions {
    fn new(distribution: Arc<Distribution>) -> Self {
        let (sender, news) = mpsc::channel(MAX_FOLLOWED);
        Self {
            distribution,
            objects: BTreeMap::new(),
            wanted: BTreeMap::new(),
            removals: Removals::default(),
            progress: BTreeMap::new(),
            last: BTreeMap::new(),
            failed: BTreeSet::new(),
            turns: ObjectTurns::new(Instant::now()),
            running: FuturesUnordered::new(),
            sender,
            news,
        }
    }

    /// Follows the objects whose turn has come.
    fn follow(&mut self) {
        let now = Instant::now();
        while let Some((key, turn)) = self.turns.begin(now) {
            let (number, stop) = (turn.number, turn.stop.clone());
            let query = ObjectQuery {
                kinds: vec![key.kind],
                namespace: key.object.namespace.to_string(),
                name: key.object.name.to_string(),
                resource_version: self.objects.get(&key).map(|seen| seen.version),
                proxy: String::new(),
                visible: None,
            };
            let (distribution, sender) = (self.distribution.clone(), self.sender.clone());
            let following = async move {
                let (reports, mut received) = mpsc::channel(1);
                let following = distribution.follow_debounced(&query, MAX_TURN, Scope::ControlPlane, reports);
                let passing = async {
                    while let Some(report) = received.recv().await {
                        if sender.send((key.clone(), number, report)).await.is_err() {
                            return;
                        }
                    }
                };
                stop.run_until_cancelled(join(following, passing)).await;
                (key, number)
            };
            self.running.push(following.boxed());
        }
    }

    /// Handles a report. Returns the object if its condition must be compared now.
    fn handle_report(&mut self, (key, number, report): News) -> Option<StatusKey> {
        let now = Instant::now();
        // An answer that waits for the object took no computation.
        let is_computed = report.state != ObjectState::Awaited;
        let since = self.turns.report(&key, number, now, is_computed)?;
        let condition = Condition::of(self.objects.get(&key)?.generation, &report);
        if report.is_final {
            self.turns.stop(&key);
            self.progress.remove(&key);
            let condition = condition?;
            if condition.status == "True" {
                self.failed.remove(&key);
            } else {
                self.failed.insert(key.clone());
            }
            return Some(self.want(key, condition));
        }
        let last = self.last.get(&key).map(|last| *last + PROGRESS);
        let due = (since + FIRST_PROGRESS).max(last.unwrap_or(since));
        match condition {
            Some(condition) => drop(self.progress.insert(key, (due, condition))),
            None => drop(self.progress.remove(&key)),
        }
        None
    }

    /// Returns the next condition whose time has come.
    fn next_progress(&mut self, now: Instant) -> Option<StatusKey> {
        let due = self.progress.iter().find(|(_, (due, _))| *due <= now);
        let key = due.map(|(key, _)| key.clone())?;
        let (_, condition) = self.progress.remove(&key)?;
        Some(self.want(key, condition))
    }

    fn want(&mut self, key: StatusKey, condition: Condition) -> StatusKey {
        self.last.insert(key.clone(), Instant::now());
        self.removals.wanted(&key, &condition);
        self.wanted.insert(key.clone(), condition);
        key
    }

    /// Forgets what is known of an object and its proxies.
    fn forget(&mut self, key: &StatusKey) {
        self.turns.forget(key);
        self.wanted.remove(key);
        self.removals.forget(key);
        self.progress.remove(key);
        self.failed.remove(key);
    }
}

impl Statuses for Conditions {
    fn update(&mut self, _: &Arc<MeshSnapshot>, _: Vec<Written>) -> Vec<StatusKey> {
        for key in &self.failed {
            self.turns.queue(key, Rank::Unfinished);
        }
        Vec::new()
    }

    fn fields(&self, key: &StatusKey, observed: &Observed, now: &str) -> Option<Value> {
        let wanted = self.wanted.get(key);
        let wanted = wanted.filter(|wanted| wanted.generation == observed.generation)?;
        let conditions = wanted.applied(&observed.status, now)?;
        Some(json!({ "conditions": conditions }))
    }

    fn depend_on(&self, _: Kind) -> bool {
        false
    }

    fn is_correction(&self, key: &StatusKey) -> bool {
        self.removals.restored.contains(key)
    }

    fn observe(&mut self, key: &StatusKey, observed: Option<&Observed>, is_first: bool) {
        let Some(observed) = observed else {
            self.forget(key);
            self.objects.remove(key);
            self.last.remove(key);
            return;
        };
        let seen = Seen::of(observed);
        let before = self.objects.insert(key.clone(), seen);
        match before.filter(|before| before.generation == seen.generation) {
            None => {
                self.forget(key);
                match seen.condition {
                    Present::Done => {}
                    Present::Earlier => self.turns.queue(key, Rank::Changed),
                    Present::Absent | Present::Open if !is_first => self.turns.queue(key, Rank::Changed),
                    Present::Absent | Present::Open => self.turns.queue(key, Rank::Other),
                }
            }
            // Another writer has replaced the list, or the object is another one of this name.
            Some(before) if seen.condition == Present::Absent && before.condition != Present::Absent => {
                if let Some(condition) = self.wanted.remove(key) {
                    self.removals.removed(key, condition);
                }
                self.turns.queue(key, Rank::Other);
            }
            // The object was not known when it was followed.
            Some(_) if seen.condition == Present::Absent && !self.wanted.contains_key(key) => {
                self.turns.queue(key, Rank::Other);
            }
            Some(_) => {}
        }
    }

    async fn changed(&mut self) -> Vec<StatusKey> {
        loop {
            self.follow();
            let now = Instant::now();
            if let Some(key) = self.next_progress(now) {
                return vec![key];
            }
            let progress = self.progress.values().map(|(due, _)| *due).min();
            let next = [progress, self.turns.next_time()].into_iter().flatten().min();
            tokio::select! {
                Some((key, number)) = self.running.next() => {
                    // The last report was sent before the turn ended.
                    let mut due = Vec::new();
                    while let Ok(news) = self.news.try_recv() {
                        due.extend(self.handle_report(news));
                    }
                    self.turns.ended(&key, number);
                    if !due.is_empty() {
                        return due;
                    }
                }
                Some(news) = self.news.recv() => if let Some(key) = self.handle_report(news) {
                    return vec![key];
                },
                () = sleep_until(next.unwrap_or(now)), if next.is_some() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{ClusterId, ObjectKey},
        distribution::report::{Counts, ReplicaReport},
    };

    fn report(state: ObjectState, acknowledged: usize, refused: usize) -> ObjectReport {
        ObjectReport {
            state,
            counts: Counts {
                proxies: acknowledged + refused,
                acknowledged,
                refused,
                ..Counts::default()
            },
            ..ObjectReport::default()
        }
    }

    #[test]
    fn a_condition_counts_the_proxies_of_all_replicas() {
        let of = |report: &ObjectReport| Condition::of(3, report).map(|it| (it.status, it.reason, it.message));
        let expected = |status, reason, message: &str| Some((status, reason, message.to_owned()));
        assert_eq!(
            of(&report(ObjectState::Acknowledged, 4, 0)),
            expected("True", "Acknowledged", "4/4 proxies up to date.")
        );
        assert_eq!(
            of(&report(ObjectState::Refused, 3, 1)),
            expected("False", "Refused", "3/4 proxies up to date. 1 refused it.")
        );
        let incomplete = ObjectReport {
            replicas: vec![ReplicaReport::default()],
            ..report(ObjectState::Incomplete, 2, 0)
        };
        let message = "2/2 proxies up to date. Replicas of istiod that did not answer: 1.";
        assert_eq!(of(&incomplete), expected("Unknown", "Incomplete", message));
        assert_eq!(
            of(&report(ObjectState::Unknown, 0, 0)),
            None,
            "it belongs to another revision"
        );
    }

    #[test]
    fn a_removed_condition_that_is_wanted_again_is_restored() {
        let object = ObjectKey::new(&ClusterId::new("c"), "shop", "a");
        let (kind, mut removals) = (Kind::VirtualService, Removals::default());
        let key = StatusKey { kind, object };
        let of = |state, acknowledged| Condition::of(3, &report(state, acknowledged, 0)).expect("known");
        let all = |acknowledged| of(ObjectState::Acknowledged, acknowledged);
        let some = |acknowledged| of(ObjectState::Pending, acknowledged);
        let mut is_restored = |condition: &Condition, removed: Option<Condition>| {
            if let Some(removed) = removed {
                removals.removed(&key, removed);
            }
            removals.wanted(&key, condition);
            removals.restored.contains(&key)
        };
        assert!(!is_restored(&some(4), None), "nothing was removed");
        assert!(is_restored(&some(4), Some(some(4))));
        assert!(!is_restored(&some(5), Some(some(4))), "more proxies have it");
        assert!(!is_restored(&all(5), Some(some(5))), "all proxies have it");
        assert!(is_restored(&all(6), Some(all(5))), "all have it as before");
        assert!(!is_restored(&all(6), None), "it is wanted for another reason");
    }

    #[test]
    fn conditions_of_others_stay() {
        let of = |acknowledged, refused| {
            let state = if refused > 0 {
                ObjectState::Refused
            } else {
                ObjectState::Acknowledged
            };
            Condition::of(3, &report(state, acknowledged, refused)).expect("a known object")
        };
        let other = json!({ "type": "istio.io/WaypointBound", "status": "True", "observedGeneration": "3" });
        let status = json!({ "conditions": [other] });
        let first = of(3, 1).applied(&status, "t1").expect("a change");
        assert_eq!(first[0], other);
        assert_eq!(
            (&first[1]["status"], &first[1]["lastTransitionTime"]),
            (&json!("False"), &json!("t1"))
        );
        let status = json!({ "conditions": first });
        assert_eq!(of(3, 1).applied(&status, "t2"), None, "the same is not written again");
        let second = of(2, 2).applied(&status, "t2").expect("a change");
        assert_eq!(second[1]["lastTransitionTime"], "t1", "the status is the same");
        let third = of(4, 0).applied(&status, "t3").expect("a change");
        assert_eq!(
            (&third[1]["status"], &third[1]["lastTransitionTime"]),
            (&json!("True"), &json!("t3"))
        );
        assert_eq!(third.as_array().map(Vec::len), Some(2));
    }
}
