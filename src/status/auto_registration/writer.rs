//! Performs operations on entries: reads the object, lets [`entry`](super::entry) decide, writes.

use std::{sync::Arc, time::SystemTime};

use serde_json::Value;
use tokio::sync::Semaphore;

use super::{
    EntryKey, Metrics, Rules,
    entry::{self, CleanUp, Traces},
    lanes::Operation,
};
use crate::{
    environment,
    status::store::{Store, WriteError},
    xds::events::{Binding, Health, Machine, Rejection},
};

/// Operations under way at once.
const AT_ONCE: usize = 32;
/// How often an operation reads and decides again because somebody else wrote in between.
const ATTEMPTS: u32 = 5;

/// How an operation ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// There is nothing more to do.
    Done,
    /// The machine of this stream has no entry that is kept.
    Unbound(u64),
    /// The machine is marked as away: the entry may have to be cleaned up.
    Away,
    /// It could not be done now.
    Failed(Operation),
}

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct Writer {
    shared: Arc<Shared>,
}

struct Shared {
    entries: Store,
    groups: Store,
    rules: Rules,
    metrics: Metrics,
    places: Semaphore,
}

impl Writer {
    pub(super) fn new(client: ::kube::Client, rules: Rules, metrics: Metrics) -> Self {
        let store = |kind: &str, plural: &str| Store::new(client.clone(), "networking.istio.io", "v1", kind, plural);
        Self {
            shared: Arc::new(Shared {
                entries: store("WorkloadEntry", "workloadentries"),
                groups: store("WorkloadGroup", "workloadgroups"),
                rules,
                metrics,
                places: Semaphore::new(AT_ONCE),
            }),
        }
    }

    pub(super) fn rules(&self) -> &Rules {
        &self.shared.rules
    }

    pub(super) async fn perform(&self, key: &EntryKey, operation: Operation) -> Outcome {
        let place = self.shared.places.acquire().await;
        let outcome = self.shared.perform(key, operation).await;
        drop(place);
        outcome
    }
}

impl Shared {
    async fn perform(&self, key: &EntryKey, operation: Operation) -> Outcome {
        match operation {
            Operation::Connect {
                connection,
                machine,
                at,
                answer,
            } => {
                let connected = self.connect(key, &machine, at).await;
                let bound = matches!(connected, Ok(true));
                if let Err(rejection) = &connected {
                    tracing::debug!(namespace = %key.0, entry = %key.1, %rejection, "a machine has no WorkloadEntry");
                }
                if let Some(answer) = answer {
                    // If the stream is gone, its end is told on its own.
                    let _ = answer.send(connected.map(|_| ()));
                }
                if bound {
                    Outcome::Done
                } else {
                    Outcome::Unbound(connection)
                }
            }
            Operation::Disconnect {
                connected_at,
                at,
                registered,
                attempt,
            } => match self.disconnect(key, connected_at, at).await {
                Ok(true) => {
                    if registered {
                        self.metrics.unregister.inc();
                    }
                    tracing::info!(namespace = %key.0, entry = %key.1, "the machine of a WorkloadEntry is gone");
                    Outcome::Away
                }
                Ok(false) => Outcome::Done,
                Err(error) => {
                    self.told(key, &error, "its machine is gone");
                    Outcome::Failed(Operation::Disconnect {
                        connected_at,
                        at,
                        registered,
                        attempt,
                    })
                }
            },
            Operation::Health { health, attempt } => match self.health(key, &health).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    self.told(key, &error, "its health");
                    Outcome::Failed(Operation::Health { health, attempt })
                }
            },
            Operation::CleanUp => {
                if let Err(error) = self.clean_up(key).await {
                    self.told(key, &error, "it is left behind");
                }
                Outcome::Done
            }
        }
    }

    fn told(&self, key: &EntryKey, error: &WriteError, what: &str) {
        self.metrics.errors.inc();
        tracing::warn!(namespace = %key.0, entry = %key.1, %error, what, "a WorkloadEntry could not be written");
    }

    /// True if the entry is the machine's now; false if nothing is to be kept of it.
    async fn connect(&self, key: &EntryKey, machine: &Machine, at: SystemTime) -> Result<bool, Rejection> {
        for _ in 0..ATTEMPTS {
            let found = self
                .entries
                .get(&key.0, &key.1)
                .await
                .map_err(|error| self.failed(key, &error))?;
            let written = match (&machine.binding, found) {
                (Binding::Entry(_), None) => {
                    return Err(Rejection::Missing(format!(
                        "the proxy's WORKLOAD_ENTRY says that it is WorkloadEntry {}/{}, which does not exist",
                        key.0, key.1
                    )));
                }
                (Binding::Entry(_), Some(found)) if !entry::takes_health(&found) => return Ok(false),
                (Binding::Group(group), None) => self.register(key, machine, group, at).await?,
                (_, Some(found)) => {
                    entry::permit(self.rules.validate_identity, machine, &found)?;
                    let Some(new) = entry::connected(&found, &self.rules.instance, at) else {
                        return Ok(true);
                    };
                    let replaced = self.entries.replace(&key.0, &key.1, &new).await;
                    if replaced.is_ok() && matches!(machine.binding, Binding::Group(_)) {
                        self.metrics.updates.inc();
                    }
                    replaced
                }
            };
            match written {
                Ok(_) => {
                    tracing::info!(namespace = %key.0, entry = %key.1, proxy = %machine.proxy, "a machine has its WorkloadEntry");
                    return Ok(true);
                }
                Err(WriteError::Conflict(_) | WriteError::NotFound(_)) => {}
                Err(error) => return Err(self.failed(key, &error)),
            }
        }
        self.metrics.errors.inc();
        Err(Rejection::Failed(format!(
            "WorkloadEntry {}/{} changes all the time",
            key.0, key.1
        )))
    }

    /// Makes the entry. The outer error is about the machine, the inner one about writing.
    async fn register(
        &self,
        key: &EntryKey,
        machine: &Machine,
        group: &str,
        at: SystemTime,
    ) -> Result<Result<Value, WriteError>, Rejection> {
        let found = self
            .groups
            .get(&key.0, group)
            .await
            .map_err(|error| self.failed(key, &error))?;
        let Some(found) = found else {
            self.metrics.errors.inc();
            return Err(Rejection::Missing(format!(
                "auto-registration of {} failed: there is no WorkloadGroup {}/{group}",
                machine.proxy, key.0
            )));
        };
        let new = entry::of_group(&key.1, machine, &found, &self.rules.instance, at);
        entry::permit(self.rules.validate_identity, machine, &new)?;
        let created = self.entries.create(&key.0, &new).await;
        if created.is_ok() {
            self.metrics.success.inc();
        }
        Ok(created)
    }

    fn failed(&self, key: &EntryKey, error: &WriteError) -> Rejection {
        self.metrics.errors.inc();
        Rejection::Failed(format!(
            "WorkloadEntry {}/{} could not be written: {error}",
            key.0, key.1
        ))
    }

    /// True if the entry says now that its machine is away.
    async fn disconnect(&self, key: &EntryKey, connected_at: SystemTime, at: SystemTime) -> Result<bool, WriteError> {
        let decide = |found: &Value| entry::disconnected(found, &self.rules.instance, connected_at, at);
        let replaced = self.change(key, decide, Place::Object).await?;
        Ok(replaced)
    }

    async fn health(&self, key: &EntryKey, health: &Health) -> Result<(), WriteError> {
        let decide = |found: &Value| entry::with_health(found, &self.rules.instance, health);
        self.change(key, decide, Place::Status).await?;
        Ok(())
    }

    async fn clean_up(&self, key: &EntryKey) -> Result<(), WriteError> {
        let Some(found) = self.entries.get(&key.0, &key.1).await? else {
            return Ok(());
        };
        match Traces::of_object(&found).clean_up(environment::wall_clock(), self.rules.limits) {
            None => return Ok(()),
            Some(CleanUp::Delete) => {
                let version = entry::resource_version(&found);
                match self.entries.delete(&key.0, &key.1, version).await {
                    Ok(()) => self.metrics.deletes.inc(),
                    // It was changed, so its machine is back; or it is gone, as it should be.
                    Err(WriteError::Conflict(_) | WriteError::NotFound(_)) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            Some(CleanUp::ForgetHealth) => {
                let limits = self.rules.limits;
                let decide = |found: &Value| {
                    let left = Traces::of_object(found).clean_up(environment::wall_clock(), limits);
                    (left == Some(CleanUp::ForgetHealth)).then(|| entry::without_health(found))
                };
                self.change(key, decide, Place::Status).await?;
            }
        }
        tracing::info!(namespace = %key.0, entry = %key.1, "a WorkloadEntry was left behind and is cleaned up");
        Ok(())
    }

    /// Changes an entry as `decide` says; true if it was written.
    async fn change(
        &self,
        key: &EntryKey,
        decide: impl Fn(&Value) -> Option<Value>,
        place: Place,
    ) -> Result<bool, WriteError> {
        let mut last = WriteError::Conflict("nobody looked".into());
        for _ in 0..ATTEMPTS {
            let Some(found) = self.entries.get(&key.0, &key.1).await? else {
                return Ok(false);
            };
            let Some(new) = decide(&found) else { return Ok(false) };
            let written = match place {
                Place::Object => self.entries.replace(&key.0, &key.1, &new).await,
                Place::Status => self.entries.replace_status(&key.0, &key.1, &new).await,
            };
            match written {
                Ok(_) => return Ok(true),
                Err(WriteError::NotFound(_)) => return Ok(false),
                Err(error @ WriteError::Conflict(_)) => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }
}

/// Which part of an object is written.
#[derive(Clone, Copy, Debug)]
enum Place {
    Object,
    Status,
}
