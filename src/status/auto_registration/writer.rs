//! Performs operations on entries: reads the object, decides by [`entry`](super::entry), writes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use super::{
    Metrics, Options,
    entry::{self, CleanUp, OwnershipRecord},
    version_of,
    work_queue::Operation,
};
use crate::{
    base::ObjectKey,
    environment,
    model::snapshot::MeshSnapshot,
    status::{
        NamespacedName,
        store::{Store, WriteError},
    },
    table::Cx,
    xds::events::{Binding, Health, Machine, Rejection},
};

/// Concurrent operations.
const MAX_CONCURRENT: usize = 32;
/// Attempts of an operation after conflicts.
const ATTEMPTS: u32 = 5;

/// Result of an operation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Nothing remains to do.
    Done,
    /// The machine of this stream, which did not wait for the result, has its entry.
    Registered(u64),
    /// The machine of this stream has no entry to maintain.
    Unbound(u64),
    /// The machine is recorded as disconnected: the entry may need a clean-up.
    Away,
    /// It failed for now.
    Failed(Operation),
}

/// A machine that may connect.
enum Connected {
    /// Its entry exists, and this control plane maintains it.
    WithEntry,
    /// There is no entry to maintain.
    WithoutEntry,
}

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct Writer {
    shared: Arc<Shared>,
}

struct Shared {
    entries: Store,
    groups: Store,
    /// `metadata` of WorkloadGroups with its name, UID and version, as last read. Rows of the mesh have no UID.
    read_groups: Mutex<BTreeMap<ObjectKey, Value>>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    options: Options,
    metrics: Metrics,
    permits: Semaphore,
}

impl Writer {
    pub(super) fn new(
        client: ::kube::Client,
        options: Options,
        metrics: Metrics,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ) -> Self {
        let store = |kind: &str, plural: &str| Store::new(client.clone(), "networking.istio.io", "v1", kind, plural);
        Self {
            shared: Arc::new(Shared {
                entries: store("WorkloadEntry", "workloadentries"),
                groups: store("WorkloadGroup", "workloadgroups"),
                read_groups: Mutex::default(),
                mesh,
                options,
                metrics,
                permits: Semaphore::new(MAX_CONCURRENT),
            }),
        }
    }

    pub(super) fn options(&self) -> &Options {
        &self.shared.options
    }

    pub(super) async fn perform(&self, key: &NamespacedName, operation: Operation) -> Outcome {
        let permit = self.shared.permits.acquire().await;
        let outcome = self.shared.perform(key, operation).await;
        drop(permit);
        outcome
    }
}

/// Returns the rejection of a machine whose entry does not exist.
fn missing(NamespacedName { namespace, name }: &NamespacedName) -> Rejection {
    Rejection::Missing(format!(
        "WORKLOAD_ENTRY of the proxy names WorkloadEntry {namespace}/{name}, which does not exist"
    ))
}

impl Shared {
    async fn perform(&self, key: &NamespacedName, operation: Operation) -> Outcome {
        match operation {
            Operation::Connect {
                connection,
                machine,
                at,
                answer: Some(answer),
                ..
            } => {
                let connected = self.connect(key, &machine, at).await;
                let has_entry = matches!(connected, Ok(Connected::WithEntry));
                // A closed stream reports its end separately.
                let _ = answer.send(connected.map(|_| ()));
                if has_entry {
                    Outcome::Done
                } else {
                    Outcome::Unbound(connection)
                }
            }
            Operation::Connect {
                connection,
                machine,
                at,
                answer: None,
                attempt,
            } => match self.connect(key, &machine, at).await {
                Ok(Connected::WithEntry) => Outcome::Registered(connection),
                Err(Rejection::Failed(_)) => Outcome::Failed(Operation::Connect {
                    connection,
                    machine,
                    at,
                    answer: None,
                    attempt,
                }),
                Ok(Connected::WithoutEntry) | Err(_) => Outcome::Unbound(connection),
            },
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
                    tracing::info!(namespace = %key.namespace, entry = %key.name, "WorkloadEntry disconnected");
                    Outcome::Away
                }
                Ok(false) => Outcome::Done,
                Err(error) => {
                    self.log_failure(key, &error, "record the disconnection");
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
                    self.log_failure(key, &error, "record the health");
                    Outcome::Failed(Operation::Health { health, attempt })
                }
            },
            Operation::CleanUp => {
                if let Err(error) = self.clean_up(key).await {
                    self.log_failure(key, &error, "clean up");
                }
                Outcome::Done
            }
        }
    }

    fn log_failure(&self, key: &NamespacedName, error: &WriteError, operation: &str) {
        self.metrics.errors.inc();
        tracing::warn!(namespace = %key.namespace, entry = %key.name, %error, operation, "failed to write WorkloadEntry");
    }

    /// Records that a machine connected, and logs why it is rejected.
    async fn connect(&self, key: &NamespacedName, machine: &Machine, at: SystemTime) -> Result<Connected, Rejection> {
        let connected = self.bind(key, machine, at).await;
        if let Err(rejection) = &connected {
            tracing::debug!(
                namespace = %key.namespace,
                entry = %key.name,
                %rejection,
                "WorkloadEntry registration rejected"
            );
        }
        connected
    }

    /// Creates or updates the entry of a machine that connected.
    async fn bind(&self, key: &NamespacedName, machine: &Machine, at: SystemTime) -> Result<Connected, Rejection> {
        if self.options.validate_identity && machine.identity.is_none() {
            return self.without_identity(key, machine);
        }
        for _ in 0..ATTEMPTS {
            let found = self
                .entries
                .get(&key.namespace, &key.name)
                .await
                .map_err(|error| self.failed(key, &error))?;
            let written = match (&machine.binding, found) {
                (Binding::Entry(_), None) => return Err(missing(key)),
                (Binding::Entry(_), Some(found)) if !entry::takes_health(&found) => {
                    return Ok(Connected::WithoutEntry);
                }
                (Binding::Group(group), None) => self.register(key, machine, group, at).await?,
                (binding, Some(found)) => {
                    entry::permit(self.options.validate_identity, machine, &found)?;
                    if let Binding::Group(group) = binding
                        && self.is_left_over(key, group, &found).await?
                    {
                        let version = entry::resource_version(&found);
                        match self.entries.delete(&key.namespace, &key.name, version).await {
                            Ok(()) | Err(WriteError::Conflict(_) | WriteError::NotFound(_)) => continue,
                            Err(error) => return Err(self.failed(key, &error)),
                        }
                    }
                    let Some(new) = entry::connected(&found, &self.options.instance, at) else {
                        return Ok(Connected::WithEntry);
                    };
                    let replaced = self.entries.replace(&key.namespace, &key.name, &new).await;
                    if replaced.is_ok() && matches!(machine.binding, Binding::Group(_)) {
                        self.metrics.updates.inc();
                    }
                    replaced
                }
            };
            match written {
                Ok(_) => {
                    tracing::info!(
                        namespace = %key.namespace,
                        entry = %key.name,
                        proxy = %machine.proxy,
                        "WorkloadEntry connected"
                    );
                    return Ok(Connected::WithEntry);
                }
                Err(WriteError::Conflict(_) | WriteError::NotFound(_)) => {}
                Err(error) => return Err(self.failed(key, &error)),
            }
        }
        self.metrics.errors.inc();
        Err(Rejection::Failed(format!(
            "WorkloadEntry {}/{} changes all the time",
            key.namespace, key.name
        )))
    }

    /// Answers a machine that needs an identity and has none. Any client may claim to be a machine, so nothing is read
    /// from the API server for it.
    fn without_identity(&self, key: &NamespacedName, machine: &Machine) -> Result<Connected, Rejection> {
        if let Binding::Entry(_) = &machine.binding {
            let mesh = self.mesh.borrow().clone();
            let found = ObjectKey::new(&mesh.installation.cluster, key.namespace.clone(), key.name.clone());
            let found = mesh.workload_entries.get(&Cx::untracked(), &found);
            let entry = found.ok_or_else(|| missing(key))?;
            if !entry.meta.annotations.contains_key(entry::HEALTH_CHECKED) {
                return Ok(Connected::WithoutEntry);
            }
        }
        entry::permit(true, machine, &Value::Null).map(|()| Connected::WithoutEntry)
    }

    /// Returns true if an entry belongs to an earlier group of this name. Reads the group only if it has changed since
    /// it was last read, or if the entry is not of the group that was read: many machines reconnect at a time.
    async fn is_left_over(&self, key: &NamespacedName, group: &str, found: &Value) -> Result<bool, Rejection> {
        if let Some(known) = self.known_group(key, group)
            && !entry::is_left_over(found, &known)
        {
            return Ok(false);
        }
        let group = self.read_group(key, group).await?;
        Ok(group.is_some_and(|group| entry::is_left_over(found, &group)))
    }

    /// Returns what is known of a group; `None` if the mesh has another version of it, or none.
    fn known_group(&self, key: &NamespacedName, group: &str) -> Option<Value> {
        let mesh = self.mesh.borrow().clone();
        let group = ObjectKey::new(&mesh.installation.cluster, key.namespace.clone(), group);
        let version = version_of(&mesh, &group)?;
        let read = self.read_groups.lock().unwrap_or_else(PoisonError::into_inner);
        let known = read.get(&group)?;
        (known["metadata"]["resourceVersion"] == version.as_str()).then(|| known.clone())
    }

    async fn read_group(&self, key: &NamespacedName, group: &str) -> Result<Option<Value>, Rejection> {
        let found = self.groups.get(&key.namespace, group).await;
        let found = found.map_err(|error| self.failed(key, &error))?;
        let mesh = self.mesh.borrow().clone();
        let group = ObjectKey::new(&mesh.installation.cluster, key.namespace.clone(), group);
        let mut read = self.read_groups.lock().unwrap_or_else(PoisonError::into_inner);
        read.retain(|group, _| version_of(&mesh, group).is_some());
        if let Some(found) = &found {
            let metadata = &found["metadata"];
            let (name, uid, version) = (&metadata["name"], &metadata["uid"], &metadata["resourceVersion"]);
            let known = json!({"metadata": {"name": name, "uid": uid, "resourceVersion": version}});
            read.insert(group, known);
        }
        Ok(found)
    }

    /// Creates the entry. The outer error concerns the machine, the inner one the write.
    async fn register(
        &self,
        key: &NamespacedName,
        machine: &Machine,
        group: &str,
        at: SystemTime,
    ) -> Result<Result<Value, WriteError>, Rejection> {
        let Some(found) = self.read_group(key, group).await? else {
            self.metrics.errors.inc();
            return Err(Rejection::Missing(format!(
                "auto-registration of {} failed: there is no WorkloadGroup {}/{group}",
                machine.proxy, key.namespace
            )));
        };
        let new = entry::of_group(&key.name, machine, &found, &self.options.instance, at);
        entry::permit(self.options.validate_identity, machine, &new)?;
        let created = self.entries.create(&key.namespace, &new).await;
        if created.is_ok() {
            self.metrics.success.inc();
        }
        Ok(created)
    }

    fn failed(&self, key: &NamespacedName, error: &WriteError) -> Rejection {
        self.metrics.errors.inc();
        Rejection::Failed(format!(
            "WorkloadEntry {}/{} could not be written: {error}",
            key.namespace, key.name
        ))
    }

    /// Returns true if the entry now records that its machine is disconnected.
    async fn disconnect(
        &self,
        key: &NamespacedName,
        connected_at: SystemTime,
        at: SystemTime,
    ) -> Result<bool, WriteError> {
        let decide = |found: &Value| entry::disconnected(found, &self.options.instance, connected_at, at);
        let replaced = self.change(key, decide, WriteTarget::Object).await?;
        Ok(replaced)
    }

    async fn health(&self, key: &NamespacedName, health: &Health) -> Result<(), WriteError> {
        let decide = |found: &Value| entry::with_health(found, &self.options.instance, health);
        self.change(key, decide, WriteTarget::Status).await?;
        Ok(())
    }

    async fn clean_up(&self, key: &NamespacedName) -> Result<(), WriteError> {
        let Some(found) = self.entries.get(&key.namespace, &key.name).await? else {
            return Ok(());
        };
        match OwnershipRecord::of_object(&found).clean_up(environment::wall_clock(), self.options.limits) {
            None => return Ok(()),
            Some(CleanUp::Delete) => {
                let version = entry::resource_version(&found);
                match self.entries.delete(&key.namespace, &key.name, version).await {
                    Ok(()) => self.metrics.deletes.inc(),
                    // It changed because its machine reconnected, or it no longer exists, as intended.
                    Err(WriteError::Conflict(_) | WriteError::NotFound(_)) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            Some(CleanUp::ForgetHealth) => {
                let limits = self.options.limits;
                let decide = |found: &Value| {
                    let left = OwnershipRecord::of_object(found).clean_up(environment::wall_clock(), limits);
                    (left == Some(CleanUp::ForgetHealth)).then(|| entry::without_health(found))
                };
                self.change(key, decide, WriteTarget::Status).await?;
            }
        }
        tracing::info!(namespace = %key.namespace, entry = %key.name, "orphaned WorkloadEntry cleaned up");
        Ok(())
    }

    /// Changes an entry as `decide` returns; true if it was written.
    async fn change(
        &self,
        key: &NamespacedName,
        decide: impl Fn(&Value) -> Option<Value>,
        target: WriteTarget,
    ) -> Result<bool, WriteError> {
        let mut last = WriteError::Conflict("no attempt was made".into());
        for _ in 0..ATTEMPTS {
            let Some(found) = self.entries.get(&key.namespace, &key.name).await? else {
                return Ok(false);
            };
            let Some(new) = decide(&found) else { return Ok(false) };
            let written = match target {
                WriteTarget::Object => self.entries.replace(&key.namespace, &key.name, &new).await,
                WriteTarget::Status => self.entries.replace_status(&key.namespace, &key.name, &new).await,
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

/// Part of an object to write.
#[derive(Clone, Copy, Debug)]
enum WriteTarget {
    Object,
    Status,
}
