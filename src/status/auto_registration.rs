//! WorkloadEntries of machines that connect: made, marked with who is connected to whom, cleaned up when a machine stays
//! away, and told its health. Every instance does this for the machines that are connected to it; nobody leads.
//!
//! One entry is worked on by one operation at a time, each of which reads the object from the API server, decides by the
//! functions of [`entry`] and writes with the resource version that it read.

pub mod entry;
mod lanes;
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
    entry::{Limits, Traces},
    lanes::{Lanes, Operation},
    writer::{Outcome, Writer},
};
use crate::{
    base::ObjectKey,
    environment,
    model::snapshot::MeshSnapshot,
    table::Cx,
    xds::events::{Binding, Event, Machine, Rejection},
};

/// Clean-ups a second.
const CLEAN_UP_PAUSE: Duration = Duration::from_millis(50);
/// The sweep comes round after so many times the grace period.
const SWEEP: u32 = 10;
/// The first wait before a failed operation is tried again; each next one is twice as long.
const RETRY: Duration = Duration::from_millis(100);
/// The longest such wait.
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How often health is tried to be told; its next change will be told anyway.
const HEALTH_ATTEMPTS: u32 = 5;

/// Namespace and name.
type EntryKey = (SmolStr, SmolStr);

/// How machines are kept.
#[derive(Clone, Debug)]
pub struct Rules {
    /// This instance of the control plane: the pod's name.
    pub instance: SmolStr,
    /// `ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY`.
    pub validate_identity: bool,
    /// When an entry counts as left behind.
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
    /// Registers the counters. An error means that a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("auto_registration_{name}_total"), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
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

/// Keeps WorkloadEntries until streams are told of no longer.
pub async fn run(
    client: ::kube::Client,
    rules: Rules,
    metrics: Metrics,
    events: mpsc::Receiver<Event>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
) {
    let sweep = rules.limits.grace * SWEEP;
    let keeper = Keeper {
        writer: Writer::new(client, rules, metrics),
        connections: BTreeMap::new(),
        groups: BTreeMap::new(),
        lanes: Lanes::default(),
        working: FuturesUnordered::new(),
        leaving: FuturesUnordered::new(),
        timers: FuturesUnordered::new(),
        clean_ups: VecDeque::new(),
        mesh,
    };
    keeper.run(events, sweep).await;
}

/// One stream of a machine.
struct Connection {
    machine: Arc<Machine>,
    at: std::time::SystemTime,
    key: EntryKey,
    /// The entry is this machine's; false where it was found that nothing is to be kept.
    bound: bool,
}

/// What is due after a while.
enum Due {
    CleanUp(EntryKey),
    Retry(EntryKey, Operation),
}

/// The state of the task. Only the task touches it.
struct Keeper {
    writer: Writer,
    connections: BTreeMap<u64, Connection>,
    /// Groups of live connections, with the version that the snapshot had last.
    groups: BTreeMap<ObjectKey, Option<SmolStr>>,
    lanes: Lanes,
    working: FuturesUnordered<BoxFuture<'static, (EntryKey, Outcome)>>,
    leaving: FuturesUnordered<BoxFuture<'static, u64>>,
    timers: FuturesUnordered<BoxFuture<'static, Due>>,
    /// Entries to be cleaned up, one after the other.
    clean_ups: VecDeque<EntryKey>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

impl Keeper {
    async fn run(mut self, mut events: mpsc::Receiver<Event>, sweep: Duration) {
        // Sets that are empty say so; they are not to be asked.
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
                    Due::CleanUp(key) => self.clean_ups.push_back(key),
                    Due::Retry(key, operation) => self.enqueue(key, operation),
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
                if let Some(connection) = self.connections.get(&connection).filter(|connection| connection.bound) {
                    let key = connection.key.clone();
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
        let key: EntryKey = (machine.namespace.as_str().into(), entry::name(&machine).into());
        self.leaving.push(
            async move {
                // The sender is dropped, never used.
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
        self.connections.insert(
            connection,
            Connection {
                machine: machine.clone(),
                at,
                key: key.clone(),
                bound: true,
            },
        );
        let connect = Operation::Connect {
            connection,
            machine,
            at,
            answer: Some(answer),
        };
        self.enqueue(key, connect);
    }

    fn on_gone(&mut self, connection: u64) {
        let Some(gone) = self.connections.remove(&connection) else {
            return;
        };
        if let Binding::Group(group) = &gone.machine.binding {
            let same = |other: &Connection| {
                other.machine.binding == gone.machine.binding && other.machine.namespace == gone.machine.namespace
            };
            if !self.connections.values().any(same) {
                self.groups.remove(&self.group_key(&gone.machine, group));
            }
        }
        // A machine may have several streams; it is gone when the last one is.
        let others = self.connections.values().any(|other| other.key == gone.key);
        if gone.bound && !others {
            let disconnect = Operation::Disconnect {
                connected_at: gone.at,
                at: environment::wall_clock(),
                registered: matches!(gone.machine.binding, Binding::Group(_)),
                attempt: 0,
            };
            self.enqueue(gone.key, disconnect);
        }
    }

    fn enqueue(&mut self, key: EntryKey, operation: Operation) {
        self.lanes.push(key.clone(), operation);
        self.proceed(key);
    }

    /// Starts the next operation of an entry, unless one is under way.
    fn proceed(&mut self, key: EntryKey) {
        if let Some(operation) = self.lanes.start(&key) {
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

    fn on_outcome(&mut self, key: EntryKey, outcome: Outcome) {
        self.lanes.end(&key);
        match outcome {
            Outcome::Done => {}
            Outcome::Unbound(connection) => {
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.bound = false;
                }
            }
            Outcome::Away => {
                let grace = self.writer.rules().limits.grace;
                let due = key.clone();
                self.timers.push(sleep(grace).map(|()| Due::CleanUp(due)).boxed());
            }
            Outcome::Failed(operation) => {
                if let Some((wait, operation)) = again(operation) {
                    let due = key.clone();
                    self.timers
                        .push(sleep(wait).map(|()| Due::Retry(due, operation)).boxed());
                }
            }
        }
        self.proceed(key);
    }

    fn group_key(&self, machine: &Machine, group: &SmolStr) -> ObjectKey {
        let cluster = self.mesh.borrow().installation.cluster.clone();
        ObjectKey::new(&cluster, machine.namespace.clone(), group.clone())
    }

    /// Machines whose group was deleted and made again lost their entries with it: they are registered again. A group
    /// that was only changed is taken for one that was made again, which costs a look at the entries.
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
                };
                (live.key.clone(), connect)
            })
            .collect();
        for (key, operation) in operations {
            self.enqueue(key, operation);
        }
    }

    /// Finds what everybody left behind, this instance or others.
    fn sweep(&mut self) {
        let mesh = self.mesh.borrow().clone();
        let now = environment::wall_clock();
        let limits = self.writer.rules().limits;
        let cx = Cx::untracked();
        let queued: BTreeSet<EntryKey> = self.clean_ups.iter().cloned().collect();
        let rows = mesh.workload_entries.iter(&cx);
        for (key, row) in rows.filter(|(key, _)| key.cluster == mesh.installation.cluster) {
            let traces = Traces::of_row(&row.meta.annotations, row.status.as_deref());
            let key = (key.namespace.as_str().into(), key.name.clone());
            if traces.clean_up(now, limits).is_some() && !queued.contains(&key) {
                self.clean_ups.push_back(key);
            }
        }
    }
}

/// The version of a WorkloadGroup, if it is there.
fn version_of(mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SmolStr> {
    let group = mesh.workload_groups.get(&Cx::untracked(), key)?;
    Some(group.meta.resource_version.clone())
}

/// A failed operation and when to try it again; none if it is given up.
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
        Operation::Health { health, attempt } if attempt + 1 < HEALTH_ATTEMPTS => {
            let next = Operation::Health {
                health,
                attempt: attempt + 1,
            };
            Some((wait(attempt), next))
        }
        // The stream of a machine that could not be registered was ended, and the sweep finds what was left behind.
        Operation::Health { .. } | Operation::Connect { .. } | Operation::CleanUp => None,
    }
}
