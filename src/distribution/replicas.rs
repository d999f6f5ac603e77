//! One answer of all replicas of the control plane.
//!
//! A query goes to every replica at once. Each sends its report whenever that changes, for as long as the query is
//! open, so nothing polls, and without a query replicas exchange nothing. A replica that cannot be reached is asked
//! again with growing delays; until it answers, its proxies are unknown.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::{
    StreamExt,
    future::{BoxFuture, FutureExt},
    stream::{BoxStream, FuturesUnordered},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    Distribution, ObjectQuery, PushTiming,
    merge::{self, Answer, OfReplica, ReplicaAnswer},
    overview::Overview,
    report::{ObjectReport, ReplicaReport},
};
use crate::{
    api::Kind,
    base::{Namespace, address::host_port},
    task,
};

/// The time limit of one answer, with its connection. A replica that is busy with a push answers afterwards.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that other replicas have for their last report after the end of a query.
const GRACE: Duration = Duration::from_secs(2);
/// The delay before a replica is asked again; it doubles.
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// The longest time of a query.
const MAX_TIME: Duration = Duration::from_hours(1);
/// The number of other replicas that are asked at a time.
const MAX_ASKED: usize = 64;
/// The reason for which nothing is known of replicas beyond that.
const TOO_MANY: &str = "there are too many replicas";
/// The reason for which nothing is known before the replicas are.
const UNKNOWN: &str = "the replicas of this control plane are not known yet";

/// A replica of the control plane.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// The name of the pod; empty if unknown.
    pub name: SmolStr,
    /// The host of its secure port.
    pub host: SmolStr,
    /// The secure port.
    pub port: u16,
    /// True if it is ready.
    pub is_ready: bool,
    /// True if it serves clients: it is ready, or it terminates and clients still use it.
    pub serves: bool,
}

impl Replica {
    /// Returns host and port.
    pub fn address(&self) -> SmolStr {
        host_port(&self.host, self.port.into()).into()
    }
}

/// All replicas, with this one; `None` while they are unknown.
pub type Replicas = Option<Arc<BTreeSet<Replica>>>;

/// The reason why another replica does not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// Its secure port is closed, so it serves no proxies.
    #[error("{0}")]
    Closed(String),
    /// Any other reason.
    #[error("{0}")]
    Failed(String),
}

/// The reports of another replica, as JSON. They are complete if they end without an error.
pub type Reports = BoxStream<'static, Result<Bytes, PeerError>>;

/// Access to the other replicas.
pub trait Peers: Send + Sync {
    /// Returns the replicas, whenever they change.
    fn replicas(&self) -> watch::Receiver<Replicas>;
    /// Sends a query to a replica, and returns its reports.
    fn ask(&self, replica: &Replica, query: String) -> BoxFuture<'static, Result<Reports, PeerError>>;
}

/// The replicas that a query goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// All replicas.
    ControlPlane,
    /// Only this one.
    Replica,
}

/// A query from one replica to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PeerQuery {
    /// The object; none for the mesh.
    object: Option<QueriedObject>,
    /// The namespace whose proxies are visible; none for all.
    visible: Option<String>,
    /// The time for which reports are sent; zero for one report, none for no limit.
    milliseconds: Option<u64>,
}

/// The object of a query.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct QueriedObject {
    /// The kinds that it may be of, `plural.group`.
    kinds: Vec<String>,
    namespace: String,
    name: String,
    resource_version: Option<u64>,
    proxy: String,
    /// True if it waits for the push that is due anyway, instead of causing one.
    debounced: bool,
}

impl PeerQuery {
    /// Returns the query about an object.
    fn about(query: &ObjectQuery, time: Duration, timing: PushTiming) -> Self {
        let kinds = query.kinds.iter();
        let kinds = kinds.map(|kind| match kind.group() {
            "" => kind.plural().to_owned(),
            group => format!("{}.{group}", kind.plural()),
        });
        Self {
            object: Some(QueriedObject {
                kinds: kinds.collect(),
                namespace: query.namespace.clone(),
                name: query.name.clone(),
                resource_version: query.resource_version,
                proxy: query.proxy.clone(),
                debounced: timing == PushTiming::Debounced,
            }),
            visible: query.visible.as_ref().map(ToString::to_string),
            milliseconds: Some(milliseconds(time)),
        }
    }

    /// Returns the query about the mesh.
    pub(super) fn about_mesh(visible: Option<&Namespace>, time: Option<Duration>) -> Self {
        Self {
            object: None,
            visible: visible.map(ToString::to_string),
            milliseconds: time.map(milliseconds),
        }
    }

    fn visible(&self) -> Option<Namespace> {
        self.visible.as_deref().map(Namespace::new)
    }

    fn timing(&self) -> PushTiming {
        match &self.object {
            Some(object) if object.debounced => PushTiming::Debounced,
            _ => PushTiming::AtOnce,
        }
    }

    fn time(&self) -> Option<Duration> {
        self.milliseconds.map(|time| Duration::from_millis(time).min(MAX_TIME))
    }

    /// Returns the query about an object, if there is one. Fails if its kind is not known.
    fn object_query(&self) -> Result<Option<ObjectQuery>, String> {
        let Some(object) = &self.object else { return Ok(None) };
        let kinds: Vec<Kind> = object.kinds.iter().flat_map(|kind| Kind::named(kind)).collect();
        if kinds.is_empty() {
            return Err(format!("no kind of {:?} is known", object.kinds));
        }
        Ok(Some(ObjectQuery {
            kinds,
            namespace: object.namespace.clone(),
            name: object.name.clone(),
            resource_version: object.resource_version,
            proxy: object.proxy.clone(),
            visible: self.visible(),
        }))
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A member of the control plane, in the order of reports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    Own,
    /// Stands for the other replicas while they are unknown.
    Unknown,
    Peer(Replica),
}

/// News of a member.
enum Update<T> {
    Report(T),
    /// It is asked again.
    Waiting,
    Failed(PeerError),
    /// It has sent all reports of the query.
    Ended,
}

/// A query to all replicas (scatter-gather), with their answers while they arrive.
pub(super) struct FanOut<'a, T> {
    distribution: &'a Distribution,
    query: PeerQuery,
    deadline: Option<Instant>,
    replicas: Option<watch::Receiver<Replicas>>,
    answers: BTreeMap<Member, Answer<T>>,
    ended: BTreeSet<Member>,
    /// Ends the query of each other replica.
    stops: BTreeMap<Replica, CancellationToken>,
    running: FuturesUnordered<BoxFuture<'a, ()>>,
    sender: mpsc::Sender<(Member, Update<T>)>,
    updates: mpsc::Receiver<(Member, Update<T>)>,
}

impl<'a, T> FanOut<'a, T>
where
    T: OfReplica + DeserializeOwned + Clone + Send + 'static,
{
    /// Sends a query. `own` sends the reports of this replica.
    pub(super) fn new(
        distribution: &'a Distribution,
        query: PeerQuery,
        scope: Scope,
        own: impl FnOnce(mpsc::Sender<T>) -> BoxFuture<'a, ()>,
    ) -> Self {
        let (sender, updates) = mpsc::channel(1);
        let peers = distribution
            .inputs
            .peers
            .as_ref()
            .filter(|_| scope == Scope::ControlPlane);
        let running = FuturesUnordered::new();
        let (report, reports) = mpsc::channel(1);
        running.push(forward(own(report), reports, sender.clone()).boxed());
        let mut fan_out = Self {
            distribution,
            deadline: query.time().map(|time| Instant::now() + time),
            query,
            replicas: peers.map(|peers| peers.replicas()),
            answers: BTreeMap::from([(Member::Own, Answer::Waiting)]),
            ended: BTreeSet::new(),
            stops: BTreeMap::new(),
            running,
            sender,
            updates,
        };
        fan_out.update_replicas();
        fan_out
    }

    /// Asks new replicas, and forgets those that are gone.
    fn update_replicas(&mut self) {
        let Some(replicas) = &mut self.replicas else { return };
        let Some(all) = replicas.borrow_and_update().clone() else {
            self.answers.insert(Member::Unknown, Answer::Waiting);
            return;
        };
        self.answers.remove(&Member::Unknown);
        let others: BTreeSet<Replica> = all
            .iter()
            .filter(|replica| !self.distribution.is_own(replica))
            .cloned()
            .collect();
        let known = self.answers.keys().filter_map(|member| match member {
            Member::Peer(replica) => Some(replica),
            Member::Own | Member::Unknown => None,
        });
        let gone: Vec<Replica> = known.filter(|known| !others.contains(*known)).cloned().collect();
        for replica in gone {
            self.forget(replica);
        }
        for replica in others {
            let member = Member::Peer(replica.clone());
            if self.answers.contains_key(&member) {
                continue;
            }
            if self.stops.len() >= MAX_ASKED {
                self.answers.insert(member, Answer::Failed(TOO_MANY.to_owned()));
                continue;
            }
            let Some(peers) = self.distribution.inputs.peers.clone() else {
                continue;
            };
            self.answers.insert(member, Answer::Waiting);
            let stop = CancellationToken::new();
            self.stops.insert(replica.clone(), stop.clone());
            let (query, deadline, sender) = (self.query.clone(), self.deadline, self.sender.clone());
            let asking = async move {
                let asking = query_peer(peers, replica, query, deadline, sender);
                stop.run_until_cancelled_owned(asking).await;
            };
            self.running.push(asking.boxed());
        }
    }

    fn forget(&mut self, replica: Replica) {
        if let Some(stop) = self.stops.remove(&replica) {
            stop.cancel();
        }
        let member = Member::Peer(replica);
        self.answers.remove(&member);
        self.ended.remove(&member);
    }

    /// Waits for news. Loses nothing if it is cancelled.
    pub(super) async fn next(&mut self) {
        loop {
            let replicas = async {
                match &mut self.replicas {
                    Some(replicas) => replicas.changed().await.is_ok(),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(()) = self.running.next() => {}
                Some((member, update)) = self.updates.recv() => {
                    self.apply(member, update);
                    return;
                }
                is_open = replicas => {
                    if is_open {
                        self.update_replicas();
                    } else {
                        // At shutdown, the last known replicas stay.
                        self.replicas = None;
                    }
                    return;
                }
            }
        }
    }

    fn apply(&mut self, member: Member, update: Update<T>) {
        // News of a replica that is gone may still be on their way.
        if !self.answers.contains_key(&member) {
            return;
        }
        let answer = match update {
            Update::Ended => {
                self.ended.insert(member);
                return;
            }
            Update::Waiting => Answer::Waiting,
            Update::Report(report) => {
                if let Member::Peer(replica) = &member
                    && report
                        .replica()
                        .is_some_and(|own| own.id == self.distribution.inputs.replica.id)
                {
                    self.distribution.remember_own(replica);
                    self.forget(replica.clone());
                    return;
                }
                Answer::Report(report)
            }
            Update::Failed(error) => {
                if let Member::Peer(replica) = &member
                    && !replica.serves
                    && matches!(error, PeerError::Closed(_))
                {
                    // It is starting or has ended: there are no proxies to know of.
                    self.forget(replica.clone());
                    return;
                }
                Answer::Failed(error.to_string())
            }
        };
        self.answers.insert(member, answer);
    }

    /// Returns true if this replica has answered.
    pub(super) fn has_own(&self) -> bool {
        matches!(self.answers.get(&Member::Own), Some(Answer::Report(_)))
    }

    /// Returns true if this replica has sent its last report.
    fn has_own_ended(&self) -> bool {
        self.ended.contains(&Member::Own)
    }

    /// Returns true if a replica has neither answered nor failed.
    pub(super) fn is_waiting(&self) -> bool {
        self.answers.values().any(|answer| matches!(answer, Answer::Waiting))
    }

    /// Returns true if each replica has sent its last report or has failed.
    fn has_ended(&self) -> bool {
        let mut answers = self.answers.iter();
        answers.all(|(member, answer)| self.ended.contains(member) || matches!(answer, Answer::Failed(_)))
    }

    /// Waits until each replica has answered or failed.
    async fn complete(&mut self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while self.is_waiting() {
            tokio::select! {
                () = self.next() => {}
                () = sleep_until(deadline) => break,
            }
        }
        for (member, answer) in &mut self.answers {
            if matches!(answer, Answer::Waiting) {
                *answer = Answer::Failed(match member {
                    Member::Unknown => UNKNOWN.to_owned(),
                    Member::Own | Member::Peer(_) => no_answer(),
                });
            }
        }
    }

    /// Returns the answers, this replica's first.
    pub(super) fn answers(&self) -> Vec<ReplicaAnswer<'_, T>> {
        let answers = self.answers.iter();
        answers
            .map(|(member, answer)| {
                let (name, address) = match member {
                    Member::Own => (self.distribution.inputs.replica.name.to_string(), String::new()),
                    Member::Unknown => (String::new(), String::new()),
                    Member::Peer(replica) => (replica.name.to_string(), replica.address().to_string()),
                };
                ReplicaAnswer { name, address, answer }
            })
            .collect()
    }
}

/// Passes the reports of this replica on, which `own` sends.
async fn forward<T: Send>(
    own: BoxFuture<'_, ()>,
    mut reports: mpsc::Receiver<T>,
    updates: mpsc::Sender<(Member, Update<T>)>,
) {
    let passing = async {
        while let Some(report) = reports.recv().await {
            if updates.send((Member::Own, Update::Report(report))).await.is_err() {
                return;
            }
        }
        // The receiver may be gone, too.
        let _ = updates.send((Member::Own, Update::Ended)).await;
    };
    tokio::join!(own, passing);
}

/// Asks a replica until it has sent all reports, or failed to answer a query for one report.
async fn query_peer<T: DeserializeOwned + Send>(
    peers: Arc<dyn Peers>,
    replica: Replica,
    query: PeerQuery,
    deadline: Option<Instant>,
    updates: mpsc::Sender<(Member, Update<T>)>,
) {
    let is_single = query.milliseconds == Some(0);
    let member = Member::Peer(replica.clone());
    let mut delay = FIRST_DELAY;
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let query = PeerQuery {
            milliseconds: left.map(milliseconds),
            ..query.clone()
        };
        let (has_answered, exchanged) = exchange(&*peers, &replica, &query, &updates).await;
        let is_over =
            left.is_some_and(|left| left.is_zero()) || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let update = match exchanged {
            Ok(()) if has_answered => Update::Ended,
            Ok(()) => Update::Failed(PeerError::Failed("it has sent no report".to_owned())),
            // The connection ended, perhaps because of its age.
            Err(_) if has_answered && !is_over => Update::Waiting,
            Err(error) => Update::Failed(error),
        };
        let is_last = matches!(update, Update::Ended) || is_single;
        if updates.send((member.clone(), update)).await.is_err() || is_last {
            return;
        }
        if has_answered {
            delay = FIRST_DELAY;
        }
        sleep(delay).await;
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Sends a query and passes the reports on, until the replica has sent all of them. Returns true if there was one, and
/// how it ended.
async fn exchange<T: DeserializeOwned + Send>(
    peers: &dyn Peers,
    replica: &Replica,
    query: &PeerQuery,
    updates: &mpsc::Sender<(Member, Update<T>)>,
) -> (bool, Result<(), PeerError>) {
    let mut reports = match open(peers, replica, query).await {
        Ok(reports) => reports,
        Err(error) => return (false, Err(error)),
    };
    let mut has_answered = false;
    while let Some(bytes) = reports.next().await {
        let parsed = bytes.and_then(|bytes| task::aside(|| serde_json::from_slice(&bytes)).map_err(malformed));
        let report = match parsed {
            Ok(report) => report,
            Err(error) => return (has_answered, Err(error)),
        };
        has_answered = true;
        let update = (Member::Peer(replica.clone()), Update::Report(report));
        if updates.send(update).await.is_err() {
            break;
        }
    }
    (has_answered, Ok(()))
}

async fn open(peers: &dyn Peers, replica: &Replica, query: &PeerQuery) -> Result<Reports, PeerError> {
    let query = serde_json::to_string(query).map_err(malformed)?;
    let asking = timeout(ANSWER_TIMEOUT, peers.ask(replica, query)).await;
    asking.map_err(|_| PeerError::Failed(no_answer()))?
}

fn no_answer() -> String {
    format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())
}

fn malformed(error: serde_json::Error) -> PeerError {
    PeerError::Failed(format!("malformed report: {error}"))
}

impl Distribution {
    /// Returns the entry of this replica in its reports.
    pub(super) fn own_replica(&self) -> ReplicaReport {
        let OwnReplica { name, id } = &self.inputs.replica;
        ReplicaReport {
            name: name.to_string(),
            id: id.to_string(),
            answered: true,
            ..ReplicaReport::default()
        }
    }

    /// Returns true if a replica is this one.
    fn is_own(&self, replica: &Replica) -> bool {
        let own = &self.inputs.replica.name;
        (!own.is_empty() && *own == replica.name) || self.own_addresses().contains(&replica.address())
    }

    fn remember_own(&self, replica: &Replica) {
        self.own_addresses().insert(replica.address());
    }

    /// Returns the present status of an object.
    pub async fn ask(&self, query: &ObjectQuery, scope: Scope) -> ObjectReport {
        let peer_query = PeerQuery::about(query, Duration::ZERO, PushTiming::AtOnce);
        let mut fan_out = FanOut::new(self, peer_query, scope, |reports| {
            self.follow_own(query, Duration::ZERO, PushTiming::AtOnce, reports)
                .boxed()
        });
        fan_out.complete().await;
        task::aside(|| merge::object(&fan_out.answers()))
    }

    /// Reports the status of an object whenever it changes, until it is final or the time is over. The last report is
    /// complete; earlier ones have no rows.
    pub async fn follow(&self, query: &ObjectQuery, time: Duration, scope: Scope, reports: mpsc::Sender<ObjectReport>) {
        let peer_query = PeerQuery::about(query, time, PushTiming::AtOnce);
        self.follow_query(query, peer_query, time, scope, reports).await;
    }

    /// As [`Self::follow`], but a change is reported only when it is pushed anyway. For queries about every change:
    /// pushes before their time would end debouncing, in all replicas.
    pub async fn follow_debounced(
        &self,
        query: &ObjectQuery,
        time: Duration,
        scope: Scope,
        reports: mpsc::Sender<ObjectReport>,
    ) {
        let peer_query = PeerQuery::about(query, time, PushTiming::Debounced);
        self.follow_query(query, peer_query, time, scope, reports).await;
    }

    async fn follow_query(
        &self,
        query: &ObjectQuery,
        peer_query: PeerQuery,
        time: Duration,
        scope: Scope,
        reports: mpsc::Sender<ObjectReport>,
    ) {
        let timing = peer_query.timing();
        let mut fan_out = FanOut::new(self, peer_query, scope, |reports| {
            self.follow_own(query, time, timing, reports).boxed()
        });
        let deadline = Instant::now() + time;
        let mut last: Option<ObjectReport> = None;
        loop {
            let now = Instant::now();
            let is_last = fan_out.has_ended() || (fan_out.has_own_ended() && now >= deadline + GRACE);
            let is_over = now >= deadline && is_last;
            if fan_out.has_own() {
                let mut report = task::aside(|| merge::object(&fan_out.answers()));
                report.timed_out = is_over && !report.is_final;
                if report.is_final || is_over {
                    // A client that has left needs no report.
                    let _ = reports.send(report).await;
                    return;
                }
                let summary = report.into_summary();
                if last.as_ref() != Some(&summary) {
                    if reports.send(summary.clone()).await.is_err() {
                        return;
                    }
                    last = Some(summary);
                }
            }
            let ends = [deadline, deadline + GRACE];
            let next_end = ends.into_iter().find(|end| *end > now);
            tokio::select! {
                () = fan_out.next() => {}
                () = reports.closed() => return,
                () = sleep_until(next_end.unwrap_or(now)), if next_end.is_some() => {}
            }
        }
    }

    /// Returns the status of the mesh, only of the proxies of one namespace if one is given.
    pub async fn overview(&self, visible: Option<&Namespace>, scope: Scope) -> Overview {
        let query = PeerQuery::about_mesh(visible, Some(Duration::ZERO));
        let mut fan_out = FanOut::new(self, query, scope, |reports| {
            self.report_own_mesh(visible, reports).boxed()
        });
        fan_out.complete().await;
        task::aside(|| merge::overview(&fan_out.answers()))
    }

    /// Answers the query of another replica with reports as JSON. Ends early if the receiver is dropped. Fails if the
    /// query is malformed.
    pub fn answer(self: Arc<Self>, query: &str, out: mpsc::Sender<Bytes>) -> Result<BoxFuture<'static, ()>, String> {
        let query: PeerQuery = serde_json::from_str(query).map_err(|error| error.to_string())?;
        let object = query.object_query()?;
        let answering = async move {
            match object {
                Some(object) => {
                    let (sender, reports) = mpsc::channel(1);
                    let time = query.time().unwrap_or_default();
                    let following = self.follow_own(&object, time, query.timing(), sender);
                    tokio::join!(following, encode(reports, out));
                }
                None => {
                    let (sender, reports) = mpsc::channel(1);
                    let visible = query.visible();
                    let reporting = async {
                        if query.time().is_some() {
                            self.report_own_mesh(visible.as_ref(), sender).await;
                        } else {
                            self.follow_own_mesh(visible.as_ref(), sender).await;
                        }
                    };
                    tokio::join!(reporting, encode(reports, out));
                }
            }
        };
        Ok(answering.boxed())
    }
}

/// Writes reports as JSON, while there is a reader.
async fn encode<T: Serialize>(mut reports: mpsc::Receiver<T>, out: mpsc::Sender<Bytes>) {
    loop {
        let report = tokio::select! {
            report = reports.recv() => report,
            () = out.closed() => return,
        };
        let Some(report) = report else { return };
        let Ok(bytes) = task::aside(|| serde_json::to_vec(&report)) else {
            return;
        };
        if out.send(bytes.into()).await.is_err() {
            return;
        }
    }
}

/// This replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnReplica {
    /// The name of the pod; empty if unknown.
    pub name: SmolStr,
    /// The identity of this process, by which it recognises itself among the replicas.
    pub id: SmolStr,
}

#[cfg(test)]
mod tests;
