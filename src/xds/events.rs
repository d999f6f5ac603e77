//! Events of machines for the controller of WorkloadEntries: connected, health, disconnected. A stream waits for the
//! answer to its connect event. The queue is bounded. A disconnect cannot be lost, since it is a dropped handle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use smol_str::SmolStr;
use tokio::sync::{mpsc, oneshot};

use crate::{
    base::{Labels, Namespace, NetworkId},
    generate::proxy::{Proxy, ProxyType},
};

/// The size of the queue. A stream waits while it is full.
const QUEUE: usize = 1024;
/// The maximum wait for the answer to a connect event.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(15);

/// The WorkloadEntry of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Binding {
    /// `AUTO_REGISTER_GROUP`: the WorkloadEntry is created from this WorkloadGroup.
    Group(SmolStr),
    /// `WORKLOAD_ENTRY`: an existing WorkloadEntry with this name.
    Entry(SmolStr),
}

/// The authenticated identity of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The namespace.
    pub namespace: SmolStr,
    /// The service account.
    pub service_account: SmolStr,
}

/// A client that represents a machine, usually a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The id of the proxy, for messages.
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
    /// True if it accepts HBONE.
    pub hbone: bool,
    /// True if its agent probes it and reports its health.
    pub probed: bool,
    /// Its identity, if it is authenticated.
    pub identity: Option<Identity>,
}

/// The reason why a machine is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// An object that it refers to does not exist (yet).
    #[error("{0}")]
    Missing(String),
    /// It has no access to this WorkloadEntry.
    #[error("{0}")]
    Forbidden(String),
    /// The WorkloadEntry could not be written. May be retried.
    #[error("{0}")]
    Failed(String),
}

/// The health of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// True if its probe succeeds.
    pub healthy: bool,
    /// The error of the probe.
    pub message: String,
    /// The time of the report.
    pub at: SystemTime,
}

/// An event of a machine.
#[derive(Debug)]
pub enum Event {
    /// A machine opened a stream. Its first response waits for `answer`.
    Connected {
        /// The number of the stream.
        connection: u64,
        /// The machine.
        machine: Arc<Machine>,
        /// The time of the event.
        at: SystemTime,
        /// The answer: served or rejected.
        answer: oneshot::Sender<Result<(), Rejection>>,
        /// Closes, without a value, when the stream ends.
        gone: oneshot::Receiver<()>,
    },
    /// An agent reported the health of its workload.
    Health {
        /// The number of the stream.
        connection: u64,
        /// The health.
        health: Health,
    },
}

/// The sending half of the event queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::Sender<Event>,
    connections: Arc<AtomicU64>,
    options: EventOptions,
}

/// The feature variables of auto-registration.
#[derive(Clone, Copy, Debug)]
pub struct EventOptions {
    /// `PILOT_ENABLE_WORKLOAD_ENTRY_AUTOREGISTRATION`.
    pub registration: bool,
    /// `PILOT_ENABLE_WORKLOAD_ENTRY_HEALTHCHECKS`.
    pub health: bool,
    /// `PILOT_ENABLE_SIDECAR_LISTENING_HBONE`.
    pub sidecars_accept_hbone: bool,
}

impl Events {
    /// Creates the queue and its receiver.
    pub fn channel(options: EventOptions) -> (Self, mpsc::Receiver<Event>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let events = Self {
            sender,
            connections: Arc::default(),
            options,
        };
        (events, receiver)
    }

    /// Returns the machine that the proxy represents; `None` for all other proxies.
    pub fn machine(&self, proxy: &Proxy, identity: Option<Identity>) -> Option<Machine> {
        let metadata = proxy.machine.as_deref()?;
        let binding = if self.options.registration && !metadata.group.is_empty() {
            Binding::Group(metadata.group.clone())
        } else if self.options.health && !metadata.entry.is_empty() {
            Binding::Entry(metadata.entry.clone())
        } else {
            return None;
        };
        let is_ambient = matches!(proxy.node.proxy_type, ProxyType::Ztunnel | ProxyType::Waypoint);
        Some(Machine {
            proxy: proxy.id.clone(),
            binding,
            namespace: proxy.node.namespace.clone(),
            address: proxy.addresses.first()?.clone(),
            network: proxy.node.network.clone(),
            labels: Labels::clone(&proxy.node_labels),
            locality: proxy.node_locality.clone(),
            hbone: is_ambient || (self.options.sidecars_accept_hbone && metadata.accepts_hbone),
            probed: metadata.is_probed,
            identity,
        })
    }

    /// Sends a connect event and waits for the answer.
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
        let answer = async {
            let ended =
                |_| Rejection::Failed("cannot register the workload: the control plane is shutting down".into());
            self.sender
                .send(event)
                .await
                .map_err(|error| ended(error.to_string()))?;
            answered.await.map_err(|error| ended(error.to_string()))?
        };
        match tokio::time::timeout(REGISTRATION_TIMEOUT, answer).await {
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

/// The attachment of a machine, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Attachment {
    events: Events,
    connection: u64,
    _held: oneshot::Sender<()>,
}

impl Attachment {
    /// Sends the health of the workload; waits while the queue is full.
    pub(super) async fn health(&self, health: Health) {
        if self.events.options.health {
            let connection = self.connection;
            // The queue is closed at shutdown.
            let _ = self.events.sender.send(Event::Health { connection, health }).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::generate::fixture;

    #[test]
    fn machines_accept_hbone_if_their_proxies_do() {
        let accepts = |kind: &str, enabled: &str, sidecars_accept_hbone: bool| {
            let node = format!("{kind}~10.0.0.9~vm.vms~vms.svc.cluster.local");
            let proxy = fixture::client(&node, &json!({"AUTO_REGISTER_GROUP": "web", "ENABLE_HBONE": enabled}));
            let (events, _received) = Events::channel(EventOptions {
                registration: true,
                health: false,
                sidecars_accept_hbone,
            });
            events.machine(&proxy, None).expect("a machine").hbone
        };
        assert!(accepts("sidecar", "true", true) && !accepts("sidecar", "false", true));
        assert!(!accepts("sidecar", "true", false), "the mesh does not permit it");
        assert!(accepts("ztunnel", "false", false));
    }
}
