//! What streams tell whoever keeps WorkloadEntries: that a machine connected, how it is, that it is gone. A stream waits
//! for the answer to its arrival; the queue is bounded, and leaving cannot be lost, since it is a dropped handle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::{mpsc, oneshot};

use crate::{
    base::{Labels, Namespace, NetworkId},
    generate::proxy::Proxy,
};

/// Events that wait to be taken; a stream with one more waits itself.
const QUEUE: usize = 1024;
/// How long a stream waits for the answer to its arrival.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(15);

/// How a machine is bound to its WorkloadEntry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Binding {
    /// `AUTO_REGISTER_GROUP`: the WorkloadEntry is made from this WorkloadGroup.
    Group(SmolStr),
    /// `WORKLOAD_ENTRY`: the WorkloadEntry of this name was made by somebody.
    Entry(SmolStr),
}

/// Who a client is, as its certificate or token says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The namespace.
    pub namespace: SmolStr,
    /// The service account.
    pub service_account: SmolStr,
}

/// What matters of a client that stands for a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The proxy's id, for messages.
    pub proxy: SmolStr,
    /// Its WorkloadEntry.
    pub binding: Binding,
    /// The namespace of group and entry.
    pub namespace: Namespace,
    /// Its first address.
    pub address: SmolStr,
    /// Its network.
    pub network: NetworkId,
    /// `LABELS` of the node metadata.
    pub labels: Labels,
    /// `region/zone/subzone` of the node; may be empty.
    pub locality: SmolStr,
    /// It takes HBONE.
    pub hbone: bool,
    /// Its agent probes it and tells its health.
    pub probed: bool,
    /// Who it is; `None` where nothing was verified.
    pub identity: Option<Identity>,
}

/// Why a machine is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// What it refers to is not there (yet).
    #[error("{0}")]
    Missing(String),
    /// It may not have this WorkloadEntry.
    #[error("{0}")]
    Forbidden(String),
    /// The WorkloadEntry could not be written now. Worth trying again.
    #[error("{0}")]
    Failed(String),
}

/// How a workload is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Its probe succeeds.
    pub healthy: bool,
    /// What the probe said if not.
    pub message: String,
    /// When it was told.
    pub at: SystemTime,
}

/// One event.
#[derive(Debug)]
pub enum Event {
    /// A machine opened a stream. Its first answer waits for `answer`.
    Connected {
        /// Tells streams apart.
        connection: u64,
        /// Who came.
        machine: Arc<Machine>,
        /// When.
        at: SystemTime,
        /// Whether it is served.
        answer: oneshot::Sender<Result<(), Rejection>>,
        /// EndSignals, without a value, when the stream does.
        gone: oneshot::Receiver<()>,
    },
    /// An agent told the health of its workload.
    Health {
        /// The stream on which it did.
        connection: u64,
        /// What it told.
        health: Health,
    },
}

/// Where streams put events. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::Sender<Event>,
    connections: Arc<AtomicU64>,
    registration: bool,
    health: bool,
}

/// What turns proxies into machines: the variables of auto-registration.
#[derive(Clone, Copy, Debug)]
pub struct EventOptions {
    /// `PILOT_ENABLE_WORKLOAD_ENTRY_AUTOREGISTRATION`.
    pub registration: bool,
    /// `PILOT_ENABLE_WORKLOAD_ENTRY_HEALTHCHECKS`.
    pub health: bool,
}

impl Events {
    /// A queue, and its end.
    pub fn channel(options: EventOptions) -> (Self, mpsc::Receiver<Event>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let events = Self {
            sender,
            connections: Arc::default(),
            registration: options.registration,
            health: options.health,
        };
        (events, receiver)
    }

    /// What the proxy's node says of a machine; `None` for all other proxies.
    pub fn machine(&self, proxy: &Proxy, identity: Option<Identity>) -> Option<Machine> {
        let group = proxy.text("AUTO_REGISTER_GROUP");
        let entry = proxy.text("WORKLOAD_ENTRY");
        let binding = if self.registration && !group.is_empty() {
            Binding::Group(group)
        } else if self.health && !entry.is_empty() {
            Binding::Entry(entry)
        } else {
            return None;
        };
        let config = proxy.json("PROXY_CONFIG");
        let probe = config.as_ref().and_then(|config| config.get("readinessProbe"));
        Some(Machine {
            proxy: proxy.id.clone(),
            binding,
            namespace: proxy.namespace.clone(),
            address: proxy.addresses.first()?.clone(),
            network: proxy.network.clone(),
            labels: proxy.node_labels.clone(),
            locality: proxy.node_locality.clone(),
            hbone: proxy.flag("ENABLE_HBONE"),
            probed: probe.is_some_and(|probe| *probe != Value::Null),
            identity,
        })
    }

    /// Tells of a machine and waits for the answer.
    pub(super) async fn connect(&self, machine: Machine, at: SystemTime) -> Result<Attachment, Rejection> {
        let connection = self.connections.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let (held, gone) = oneshot::channel();
        let event = Event::Connected {
            connection,
            machine: Arc::new(machine),
            at,
            answer,
            gone,
        };
        let told = async {
            let ended = |_| Rejection::Failed("WorkloadEntries are not kept any more: the control plane ends".into());
            self.sender
                .send(event)
                .await
                .map_err(|error| ended(error.to_string()))?;
            answered.await.map_err(|error| ended(error.to_string()))?
        };
        match tokio::time::timeout(REGISTRATION_TIMEOUT, told).await {
            Ok(answer) => answer?,
            Err(_) => {
                return Err(Rejection::Failed(
                    "the WorkloadEntry could not be written in time".into(),
                ));
            }
        }
        Ok(Attachment {
            events: self.clone(),
            connection,
            _held: held,
        })
    }
}

/// A machine's place, given back when dropped.
#[derive(Debug)]
pub(super) struct Attachment {
    events: Events,
    connection: u64,
    _held: oneshot::Sender<()>,
}

impl Attachment {
    /// Tells the health of the workload; waits while the queue is full.
    pub(super) async fn health(&self, health: Health) {
        if self.events.health {
            let connection = self.connection;
            // At shutdown nobody listens, and nobody needs to.
            let _ = self.events.sender.send(Event::Health { connection, health }).await;
        }
    }
}
