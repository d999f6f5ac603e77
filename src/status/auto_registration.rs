//! WorkloadEntries of connected virtual machines: creates them, records connection and health, and cleans up after a
//! machine's absence. Every replica does this for its own connections, without a leader.
//!
//! Operations on one entry are serial. Each reads the object from the API server, decides by the functions of
//! [`entry`], and writes with the resource version that it read.

pub mod entry;
mod work_queue;
mod writer;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::pending,
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use prometheus::{IntCounter, Registry};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until},
};

use self::{
    entry::{Limits, OwnershipRecord},
    work_queue::{KeyedWorkQueue, Operation},
    writer::{Outcome, Writer},
};
use super::NamespacedName;
use crate::{
    base::ObjectKey,
    environment, metrics,
    model::snapshot::MeshSnapshot,
    table::Cx,
    xds::events::{Binding, Event, Health, Machine, Rejection},
};

/// Pause between clean-ups.
const CLEAN_UP_PAUSE: Duration = Duration::from_millis(50);
/// Interval of sweeps, in grace periods.
const SWEEP: u32 = 10;
/// Shortest interval of sweeps: there may be no grace period.
const SHORTEST_SWEEP: Duration = Duration::from_secs(1);
/// First retry delay of a failed operation; doubled each time.
const RETRY: Duration = Duration::from_millis(100);
/// Longest retry delay.
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// Options of auto-registration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Pod name of this replica.
    pub instance: SmolStr,
    /// `ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY`.
    pub validate_identity: bool,
    /// Limits after which an entry is orphaned.
    pub limits: Limits,
}

/// Istio's counters.
#[derive(Clone)]
pub struct Metrics {
    success: IntCounter,
    updates: IntCounter,
    unregister: IntCounter,
    deletes: IntCounter,
    errors: IntCounter,
}

impl Metrics {
    /// Registers the counters; fails if a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter =
            |name: &str, help: &str| metrics::counter(registry, &format!("auto_registration_{name}_total"), help);
        Ok(Self {
            success: counter("success", "Total number of successful auto registrations.")?,
            updates: counter("updates", "Total number of auto registration updates.")?,
            unregister: counter("unregister", "Total number of unregistrations.")?,
            deletes: counter(
                "deletes",
                "Total number of auto registration cleaned up by periodic timer.",
            )?,
            errors: counter("errors", "Total number of auto registration errors.")?,
        })
    }
}

/// Maintains WorkloadEntries until the event queue is closed.
pub async fn run(
    client: ::kube::Client,
    options: Options,
    metrics: Metrics,
    events: mpsc::Receiver<Event>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
) {
    let sweep = sweep_interval(options.limits.grace);
    let controller = AutoRegistrationController::new(client, options, metrics, mesh);
    controller.run(events, sweep).await;
}

/// A stream of a machine.
struct Connection {
    machine: Arc<Machine>,
    at: std::time::SystemTime,
    key: NamespacedName,
    /// True if the entry belongs to this machine; false if there is no entry to maintain.
    bound: bool,
    /// The last report, which agents send only on a change.
    health: Option<Health>,
    /// Latest connection time of the streams of the entry that ended before this one; `None` without any.
    ended_before: Option<std::time::SystemTime>,
}

/// Delayed actions.
enum Timer {
    CleanUp(NamespacedName),
    Retry(NamespacedName, Operation),
}

/// State of the task, used by the task alone.
struct AutoRegistrationController {
    writer: Writer,
    connections: BTreeMap<u64, Connection>,
    /// Connections by their entries, whose names machines choose.
    by_entry: BTreeMap<NamespacedName, BTreeSet<u64>>,
    /// Connections by their groups.
    by_group: BTreeMap<ObjectKey, BTreeSet<u64>>,
    /// Groups of live connections, with their version in the previous snapshot.
    groups: BTreeMap<ObjectKey, Option<SmolStr>>,
    work_queue: KeyedWorkQueue,
    working: FuturesUnordered<BoxFuture<'static, (NamespacedName, Outcome)>>,
    leaving: FuturesUnordered<BoxFuture<'static, u64>>,
    timers: FuturesUnordered<BoxFuture<'static, Timer>>,
    /// Entries to clean up, one after the other.
    clean_ups: VecDeque<NamespacedName>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

impl AutoRegistrationController {
    fn new(
        client: ::kube::Client,
        options: Options,
        metrics: Metrics,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ) -> Self {
        Self {
            writer: Writer::new(client, options, metrics, mesh.clone()),
            connections: BTreeMap::new(),
            by_entry: BTreeMap::new(),
            by_group: BTreeMap::new(),
            groups: BTreeMap::new(),
            work_queue: KeyedWorkQueue::default(),
            working: FuturesUnordered::new(),
            leaving: FuturesUnordered::new(),
            timers: FuturesUnordered::new(),
            clean_ups: VecDeque::new(),
            mesh,
        }
    }

    async fn run(mut self, mut events: mpsc::Receiver<Event>, sweep: Duration) {
        // An empty `FuturesUnordered` completes at once; a pending future keeps its `select!` arm idle.
        self.working.push(pending().boxed());
        self.leaving.push(pending().boxed());
        self.timers.push(pending().boxed());
        let mut next_clean_up = Instant::now();
        let mut next_sweep = Instant::now() + sweep;
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.on_event(event),
                    None => return,
                },
                Some((key, outcome)) = self.working.next() => self.on_outcome(key, outcome),
                Some(connection) = self.leaving.next() => self.on_gone(connection),
                Some(due) = self.timers.next() => match due {
                    Timer::CleanUp(key) => self.clean_ups.push_back(key),
                    Timer::Retry(key, operation) => self.retry(key, operation),
                },
                changed = self.mesh.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.on_snapshot();
                }
                () = sleep_until(next_clean_up), if !self.clean_ups.is_empty() => {
                    next_clean_up = Instant::now() + CLEAN_UP_PAUSE;
                    if let Some(key) = self.clean_ups.pop_front() {
                        self.enqueue(key, Operation::CleanUp);
                    }
                }
                () = sleep_until(next_sweep) => {
                    next_sweep = Instant::now() + sweep;
                    self.sweep();
                }
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Connected {
                connection,
                machine,
                at,
                answer,
                gone,
            } => self.on_connected(connection, machine, at, answer, gone),
            Event::Health { connection, health } => {
                let Some(live) = self.connections.get_mut(&connection) else {
                    return;
                };
                live.health = Some(health.clone());
                if live.bound {
                    let key = live.key.clone();
                    self.enqueue(key, Operation::Health { health, attempt: 0 });
                }
            }
        }
    }

    fn on_connected(
        &mut self,
        connection: u64,
        machine: Arc<Machine>,
        at: std::time::SystemTime,
        answer: oneshot::Sender<Result<(), Rejection>>,
        gone: oneshot::Receiver<()>,
    ) {
        let key = NamespacedName::new(machine.namespace.as_str(), entry::name(&machine));
        self.leaving.push(
            async move {
                // The sender is dropped without sending.
                let _ = gone.await;
                connection
            }
            .boxed(),
        );
        if let Binding::Group(group) = &machine.binding {
            let group = self.group_key(&machine, group);
            let version = version_of(&self.mesh.borrow(), &group);
            self.groups.entry(group).or_insert(version);
        }
        self.add(
            connection,
            Connection {
                machine: machine.clone(),
                at,
                key: key.clone(),
                bound: true,
                health: None,
                ended_before: None,
            },
        );
        let connect = Operation::Connect {
            connection,
            machine,
            at,
            answer: Some(answer),
            attempt: 0,
        };
        self.enqueue(key, connect);
    }

    /// Adds a connection of a machine.
    fn add(&mut self, id: u64, connection: Connection) {
        self.by_entry.entry(connection.key.clone()).or_default().insert(id);
        if let Binding::Group(group) = &connection.machine.binding {
            let group = self.group_key(&connection.machine, group);
            self.by_group.entry(group).or_default().insert(id);
        }
        self.connections.insert(id, connection);
    }

    fn on_gone(&mut self, connection: u64) {
        let Some(gone) = self.connections.remove(&connection) else {
            return;
        };
        if let Binding::Group(group) = &gone.machine.binding {
            let group = self.group_key(&gone.machine, group);
            if remove(&mut self.by_group, &group, connection) {
                self.groups.remove(&group);
            }
        }
        remove(&mut self.by_entry, &gone.key, connection);
        // A machine may have several streams; it is disconnected with the last one. That need not be the newest, and it
        // may have no entry, because it was rejected.
        let connected_at = gone.bound.then_some(gone.at).max(gone.ended_before);
        let Some(connected_at) = connected_at else { return };
        let remaining = self.by_entry.get(&gone.key).and_then(BTreeSet::first).copied();
        match remaining.and_then(|other| self.connections.get_mut(&other)) {
            Some(other) => other.ended_before = other.ended_before.max(Some(connected_at)),
            None => {
                let disconnect = Operation::Disconnect {
                    connected_at,
                    at: environment::wall_clock(),
                    registered: matches!(gone.machine.binding, Binding::Group(_)),
                    attempt: 0,
                };
                self.enqueue(gone.key, disconnect);
            }
        }
    }

    /// Repeats a failed operation, unless the stream that it registers, or that reported the health, has ended or has
    /// reported another one.
    fn retry(&mut self, key: NamespacedName, operation: Operation) {
        let is_current = match &operation {
            Operation::Connect { connection, .. } => self.connections.contains_key(connection),
            Operation::Health { health, .. } => {
                let connections = self.by_entry.get(&key).into_iter().flatten();
                let mut live = connections.filter_map(|connection| self.connections.get(connection));
                live.any(|live| live.health.as_ref() == Some(health))
            }
            Operation::Disconnect { .. } | Operation::CleanUp => true,
        };
        if is_current {
            self.enqueue(key, operation);
        }
    }

    fn enqueue(&mut self, key: NamespacedName, operation: Operation) {
        self.work_queue.push(key.clone(), operation);
        self.proceed(key);
    }

    /// Starts the next operation of an entry, unless one is running.
    fn proceed(&mut self, key: NamespacedName) {
        if let Some(operation) = self.work_queue.start(&key) {
            let writer = self.writer.clone();
            self.working.push(
                async move {
                    let outcome = writer.perform(&key, operation).await;
                    (key, outcome)
                }
                .boxed(),
            );
        }
    }

    fn on_outcome(&mut self, key: NamespacedName, outcome: Outcome) {
        self.work_queue.end(&key);
        match outcome {
            Outcome::Done => {}
            Outcome::Unbound(connection) => {
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.bound = false;
                }
            }
            Outcome::Registered(connection) => {
                if let Some(live) = self.connections.get_mut(&connection) {
                    live.bound = true;
                    // A new entry has no health.
                    if let Some(health) = live.health.clone() {
                        self.enqueue(key.clone(), Operation::Health { health, attempt: 0 });
                    }
                }
            }
            Outcome::Away => {
                let grace = self.writer.options().limits.grace;
                let due = key.clone();
                self.timers.push(sleep(grace).map(|()| Timer::CleanUp(due)).boxed());
            }
            Outcome::Failed(operation) => {
                if let Some((wait, operation)) = again(operation) {
                    let due = key.clone();
                    self.timers
                        .push(sleep(wait).map(|()| Timer::Retry(due, operation)).boxed());
                }
            }
        }
        self.proceed(key);
    }

    fn group_key(&self, machine: &Machine, group: &SmolStr) -> ObjectKey {
        let cluster = self.mesh.borrow().installation.cluster.clone();
        ObjectKey::new(&cluster, machine.namespace.clone(), group.clone())
    }

    /// Registers machines again whose group was deleted and recreated, because their entries are deleted with it. A
    /// changed group is treated like a recreated one, which costs a read of the entries.
    fn on_snapshot(&mut self) {
        let mesh = self.mesh.borrow_and_update().clone();
        let mut again = BTreeSet::new();
        for (key, known) in &mut self.groups {
            let version = version_of(&mesh, key);
            if version.is_some() && version != *known {
                again.insert(key.clone());
            }
            *known = version;
        }
        if again.is_empty() {
            return;
        }
        let operations: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, live)| match &live.machine.binding {
                Binding::Group(group) => again
                    .iter()
                    .any(|key| key.name == *group && key.namespace == live.machine.namespace),
                Binding::Entry(_) => false,
            })
            .map(|(connection, live)| {
                let connect = Operation::Connect {
                    connection: *connection,
                    machine: live.machine.clone(),
                    at: live.at,
                    answer: None,
                    attempt: 0,
                };
                (live.key.clone(), connect)
            })
            .collect();
        for (key, operation) in operations {
            self.enqueue(key, operation);
        }
    }

    /// Finds orphaned entries of all replicas.
    fn sweep(&mut self) {
        let mesh = self.mesh.borrow().clone();
        let now = environment::wall_clock();
        let limits = self.writer.options().limits;
        let cx = Cx::untracked();
        let queued: BTreeSet<NamespacedName> = self.clean_ups.iter().cloned().collect();
        let rows = mesh.workload_entries.iter(&cx);
        for (key, row) in rows.filter(|(key, _)| key.cluster == mesh.installation.cluster) {
            let traces = OwnershipRecord::of_row(&row.meta.annotations, row.status.as_deref());
            let key = NamespacedName::new(key.namespace.as_str(), key.name.clone());
            if traces.clean_up(now, limits).is_some() && !queued.contains(&key) {
                self.clean_ups.push_back(key);
            }
        }
    }
}

/// Removes a connection of a key. Returns true if it was the last.
fn remove<K: Ord>(connections: &mut BTreeMap<K, BTreeSet<u64>>, key: &K, connection: u64) -> bool {
    let Some(of_key) = connections.get_mut(key) else {
        return false;
    };
    of_key.remove(&connection);
    let is_last = of_key.is_empty();
    if is_last {
        connections.remove(key);
    }
    is_last
}

/// Returns the interval of sweeps.
fn sweep_interval(grace: Duration) -> Duration {
    grace.saturating_mul(SWEEP).max(SHORTEST_SWEEP)
}

/// Returns the version of a WorkloadGroup, if it exists.
fn version_of(mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SmolStr> {
    let group = mesh.workload_groups.get(&Cx::untracked(), key)?;
    Some(group.meta.resource_version.clone())
}

/// Returns a failed operation with its retry delay; `None` if it is abandoned.
fn again(operation: Operation) -> Option<(Duration, Operation)> {
    let wait = |attempt: u32| (RETRY * 2_u32.saturating_pow(attempt.min(16))).min(LONGEST_RETRY);
    match operation {
        Operation::Disconnect {
            connected_at,
            at,
            registered,
            attempt,
        } => {
            let next = Operation::Disconnect {
                connected_at,
                at,
                registered,
                attempt: attempt + 1,
            };
            Some((wait(attempt), next))
        }
        Operation::Connect {
            connection,
            machine,
            at,
            answer,
            attempt,
        } => {
            let next = Operation::Connect {
                connection,
                machine,
                at,
                answer,
                attempt: attempt + 1,
            };
            Some((wait(attempt), next))
        }
        // Agents report health only when it changes.
        Operation::Health { health, attempt } => {
            let next = Operation::Health {
                health,
                attempt: attempt + 1,
            };
            Some((wait(attempt), next))
        }
        // The sweep finds what is left to clean up.
        Operation::CleanUp => None,
    }
}

#[cfg(test)]
mod tests;
