//! A model ztunnel: the proxy of a node's ambient pods. It follows workloads, services and policies over delta ADS,
//! obtains certificates for its pods with its own token, and carries their connections in tunnels (HBONE). Its sockets
//! are in the network namespaces of the pods, as those of a real ztunnel.
//!
//! The model has what the lab needs. It has no DNS, no UDP, no PROXY protocol and no telemetry.

mod addresses;
mod discovery;
mod inbound;
mod outbound;
mod policy;
mod socket;
mod tls;
mod tunnel;

pub(crate) use discovery::Subscription;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use istiod::proto::istio::workload::{Workload, WorkloadStatus};
use tokio::task::JoinHandle;

use super::agent::Agent;
use super::host::Host;
use super::rules;
use crate::kube::tenant::TIMEOUT;
use crate::support::agent::ClientCredentials;
use crate::support::http::RUNTIME;
use crate::support::{self, wait};
use discovery::Discovery;
use tunnel::Pool;

/// The port of HBONE.
pub(super) const HBONE: u16 = 15008;
/// The port to which outbound traffic of a pod is redirected.
const OUTBOUND: u16 = 15001;
/// The port to which inbound plaintext of a pod is redirected.
const PLAINTEXT: u16 = 15006;

/// The description of a ztunnel.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// The name of its pod.
    pub(crate) name: String,
    /// The namespace of its pod.
    pub(crate) namespace: String,
    /// The address of its pod.
    pub(crate) address: IpAddr,
    pub(crate) node: String,
    pub(crate) cluster: String,
    /// Empty if networks have no names.
    pub(crate) network: String,
    pub(crate) subscription: Subscription,
}

/// Events of a ztunnel, counted.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Tunnels that it opened.
    pub(crate) opened: AtomicUsize,
    /// Tunnels that it accepted.
    pub(crate) accepted: AtomicUsize,
    /// Plaintext connections that it opened.
    pub(crate) direct: AtomicUsize,
    /// Plaintext connections that it accepted.
    pub(crate) plaintext: AtomicUsize,
    /// Connections and tunnels that policies denied.
    pub(crate) denied: AtomicUsize,
}

/// A running ztunnel. Dropping it closes its ports and ends its connections, as the loss of its node does.
pub(crate) struct Ztunnel {
    shared: Arc<Shared>,
    servers: BTreeMap<String, Vec<JoinHandle<()>>>,
}

/// The parts of a ztunnel that its connections share.
struct Shared {
    spec: Spec,
    control_plane: support::agent::Agent,
    token: ClientCredentials,
    discovery: Discovery,
    pool: Pool,
    counts: Counts,
    /// Distributes connections over endpoints.
    turn: AtomicUsize,
    /// The peers whose tunnels were accepted, each with the pod that it reached.
    peers: Mutex<BTreeSet<(String, String)>>,
    log: Mutex<File>,
}

/// A pod whose traffic the ztunnel carries.
struct Member {
    name: String,
    address: IpAddr,
    host: Arc<Host>,
    agent: Agent,
}

impl Drop for Ztunnel {
    fn drop(&mut self) {
        for server in self.servers.values().flatten() {
            server.abort();
        }
    }
}

impl Ztunnel {
    /// Starts a ztunnel with a token of its pod, and waits until it has received what it subscribes to at first. Its
    /// log is in `folder`.
    pub(crate) fn start(
        spec: Spec,
        control_plane: support::agent::Agent,
        token: ClientCredentials,
        folder: &Path,
    ) -> Result<Ztunnel, String> {
        let log = File::create(folder.join(format!("{}.log", spec.name))).map_err(|error| error.to_string())?;
        let discovery = Discovery::start(&spec, control_plane.clone(), token.clone());
        let shared = Arc::new(Shared {
            spec,
            control_plane,
            token,
            discovery,
            pool: Pool::default(),
            counts: Counts::default(),
            turn: AtomicUsize::new(0),
            peers: Mutex::default(),
            log: Mutex::new(log),
        });
        let ready = wait::until("the first responses to a ztunnel", TIMEOUT, || {
            shared.discovery.view().is_initialized().then_some(())
        });
        ready.map_err(|error| format!("{}: {error}; {}", shared.spec.name, shared.discovery.view().ended))?;
        Ok(Ztunnel {
            shared,
            servers: BTreeMap::new(),
        })
    }

    /// Takes over the traffic of a pod on its node: obtains a certificate of the pod's identity, opens the ports in the
    /// pod's network namespace, and redirects its traffic there.
    pub(crate) fn adopt(
        &mut self,
        name: &str,
        host: &Arc<Host>,
        address: IpAddr,
        identity: &str,
    ) -> Result<(), String> {
        let Shared {
            control_plane, token, ..
        } = &*self.shared;
        let mut refused = String::new();
        // The control plane refuses the identity until it knows the pod.
        let agent = wait::until("a certificate for a pod", TIMEOUT, || {
            let started = Agent::start_for(control_plane.clone(), token.clone(), Some(identity.to_owned()));
            started.map_err(|error| refused = error).ok()
        });
        let agent = agent.map_err(|error| format!("{identity}: {error}: {refused}"))?;
        let member = Arc::new(Member {
            name: name.to_owned(),
            address,
            host: Arc::clone(host),
            agent,
        });
        let servers = [
            outbound::serve(&self.shared, &member)?,
            inbound::serve_tunnels(&self.shared, &member)?,
            inbound::serve_plaintext(&self.shared, &member)?,
        ];
        self.servers.insert(name.to_owned(), servers.into());
        rules::capture(host, socket::MARK)
    }

    /// Gives up the traffic of a pod that has ended.
    pub(crate) fn release(&mut self, name: &str) {
        for server in self.servers.remove(name).into_iter().flatten() {
            server.abort();
        }
    }

    /// Reports whether connections may be sent to the workload with this address.
    pub(crate) fn uses(&self, address: IpAddr) -> bool {
        let view = self.shared.discovery.view();
        let workload = view.addresses.workload_at(&self.shared.spec.network, address);
        workload.is_some_and(|workload| workload.status() == WorkloadStatus::Healthy)
    }

    /// The counted events.
    pub(crate) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Reports whether a peer with this identity has opened a tunnel to a pod.
    pub(crate) fn has_accepted(&self, pod: &str, identity: &str) -> bool {
        lock(&self.shared.peers).contains(&(pod.to_owned(), identity.to_owned()))
    }
}

impl Shared {
    /// Returns a pod's workload, waiting for it if needed.
    async fn workload(&self, member: &Member) -> Result<Arc<Workload>, String> {
        self.discovery
            .workload_at(&self.spec.network, member.address)
            .await
            .map_err(|error| format!("{}: {error}", member.name))
    }

    /// Returns a number for the choice among endpoints.
    fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes a line to the log.
    fn say(&self, text: &str) {
        // The log only helps to debug failures.
        let _ = writeln!(lock(&self.log), "{text}");
    }
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a task of a connection. It ends with its sockets.
fn start(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    RUNTIME.spawn(task)
}
