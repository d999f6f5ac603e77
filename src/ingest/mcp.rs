//! MCP over xDS: Istio's own objects from another control plane (`meshConfig.configSources` with `xds://`).
//!
//! The last good state stays while the server is unreachable or answers nonsense, and over a restart if a folder for it
//! is given. Only a complete answer of a server removes objects.

mod cache;
mod connect;
mod objects;
mod stream;

use std::{path::PathBuf, sync::Arc, time::Duration};

use serde_json::json;
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use self::{
    cache::Cache,
    connect::Server,
    objects::Objects,
    stream::{McpStream, StreamEnd, Variant},
};
use super::{
    backoff::Backoff,
    diagnostics::{ActiveDiagnostics, Report},
    registry_metrics::OfRegistry,
    source::{Readiness, Source},
};
use crate::{
    base::ClusterId,
    environment::wall_clock,
    model::change::{Batch, Change},
    proto::{envoy::config::core::v3::Node, istio::networking::v1alpha3::ClientTlsSettings, json::struct_from_json},
    task,
};
pub use connect::{IssueCertificate, MeshCertificate, ReadRoots};

/// Parameters of connections.
struct ConnectionParameters {
    keepalive_interval: Duration,
    keepalive_timeout: Duration,
    window_bytes: u32,
    /// The largest response.
    max_message_bytes: usize,
    /// The time in which a server must answer all types. A server that ignores a type, or that supports only one
    /// variant of ADS and ignores the other, is asked in the other variant next.
    answers: Duration,
    /// The first and the longest delay before a new connection.
    first_delay: Duration,
    longest_delay: Duration,
    /// The delay of writing the state to disk.
    store_delay: Duration,
    /// The interval at which a stored state is recorded as current.
    confirm_interval: Duration,
}

/// Parity (pkg/adsc/adsc.go): windows and delays are those of Istio's client.
const CONNECTION: ConnectionParameters = ConnectionParameters {
    keepalive_interval: Duration::from_secs(10),
    keepalive_timeout: Duration::from_secs(10),
    window_bytes: 1 << 20,
    max_message_bytes: 256 << 20,
    answers: Duration::from_secs(20),
    first_delay: Duration::from_millis(500),
    longest_delay: Duration::from_mins(1),
    store_delay: Duration::from_secs(1),
    confirm_interval: Duration::from_secs(30),
};

/// The version that the client reports, which no release has.
const CLIENT_VERSION: &str = "65536.65536.65536";

/// Settings of a config source.
#[derive(Clone)]
pub struct McpSettings {
    /// The address as configured, for logs and metrics.
    pub address: String,
    /// Host of the server.
    pub host: String,
    /// Port of the server.
    pub port: u16,
    /// TLS; plaintext without.
    pub tls: Option<ClientTlsSettings>,
    /// Config cluster, to which the objects belong.
    pub cluster: ClusterId,
    /// Revision of this control plane.
    pub revision: SmolStr,
    /// Namespace of this control plane.
    pub namespace: SmolStr,
    /// Name of the pod, or of this instance.
    pub instance: SmolStr,
    /// Service account of this control plane; empty if unknown.
    pub service_account: SmolStr,
    /// Folder for the last good state, with the age at which it no longer serves.
    pub state: Option<(PathBuf, Duration)>,
    /// Issues certificates for `ISTIO_MUTUAL`.
    pub issue: IssueCertificate,
    /// Reads the roots of `credentialName`.
    pub read_roots: ReadRoots,
}

/// The source of one server.
pub struct McpSource {
    settings: McpSettings,
    metrics: OfRegistry,
    findings: ActiveDiagnostics<()>,
    is_synced: watch::Sender<bool>,
}

impl McpSource {
    /// Returns the source.
    pub fn new(settings: McpSettings, metrics: OfRegistry, report: Report) -> Self {
        Self {
            settings,
            metrics,
            findings: ActiveDiagnostics::new(report),
            is_synced: watch::Sender::new(false),
        }
    }

    /// Returns the node that the client reports.
    fn node(&self) -> Node {
        let McpSettings {
            revision,
            namespace,
            instance,
            service_account,
            ..
        } = &self.settings;
        let metadata = json!({
            "GENERATOR": "api",
            "ISTIO_REVISION": revision.as_str(),
            "ISTIO_VERSION": CLIENT_VERSION,
            "NAMESPACE": namespace.as_str(),
            "SERVICE_ACCOUNT": service_account.as_str(),
        });
        Node {
            id: format!("sidecar~127.0.0.1~{instance}.{namespace}~{namespace}.svc.cluster.local"),
            metadata: metadata.as_object().map(struct_from_json),
            ..Default::default()
        }
    }
}

impl Source for McpSource {
    fn name(&self) -> &'static str {
        "config source (xds)"
    }

    /// The first snapshot waits until each kind was answered, or until the state of the last run was read.
    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let settings = &self.settings;
        let state = settings.state.as_ref();
        let cache = state.map(|(folder, max_age)| Cache::new(folder, &settings.address, *max_age));
        let objects = Objects::new(settings.cluster.clone(), settings.revision.clone(), cache.is_some());
        let mut client = Client {
            node: self.node(),
            server: Server {
                host: settings.host.clone(),
                port: settings.port,
                tls: settings.tls.clone(),
                issue: settings.issue.clone(),
                read_roots: settings.read_roots.clone(),
            },
            address: settings.address.clone(),
            cache: cache.map(Arc::new),
            objects,
            changes,
            metrics: self.metrics,
            findings: self.findings,
            is_synced: self.is_synced,
            store_at: None,
            confirm_at: None,
        };
        client.restore().await;
        client.follow().await;
    }
}

/// The running client of one server.
struct Client {
    node: Node,
    server: Server,
    address: String,
    cache: Option<Arc<Cache>>,
    objects: Objects,
    changes: mpsc::Sender<Batch>,
    metrics: OfRegistry,
    findings: ActiveDiagnostics<()>,
    is_synced: watch::Sender<bool>,
    /// The time at which the state is to be written to disk.
    store_at: Option<Instant>,
    /// The time at which the stored state is to be recorded as current; `None` while the server does not answer.
    confirm_at: Option<Instant>,
}

/// The reason why a client no longer reads from a server.
enum Lost {
    /// The stream ended.
    Stream(StreamEnd),
    /// The server did not answer all types in time.
    Silent,
    /// The receiver of changes is closed.
    Closed,
}

impl From<StreamEnd> for Lost {
    fn from(end: StreamEnd) -> Self {
        Self::Stream(end)
    }
}

impl Lost {
    /// Returns the variant to ask for next. A proxy in front of a server that is away may answer that no variant is
    /// supported, so neither is given up.
    fn next_variant(&self, variant: Variant) -> Variant {
        match (self, variant) {
            (Self::Silent | Self::Stream(StreamEnd::Unsupported), Variant::Delta) => Variant::Sotw,
            (Self::Silent | Self::Stream(StreamEnd::Unsupported), Variant::Sotw) => Variant::Delta,
            (Self::Stream(_) | Self::Closed, variant) => variant,
        }
    }
}

impl Client {
    /// Reads the state of the last run.
    async fn restore(&mut self) {
        let Some(cache) = self.cache.clone() else { return };
        let read = tokio::task::spawn_blocking(move || {
            // The folder may not exist.
            let _ = cache.remove_abandoned();
            cache.read(wall_clock())
        });
        let read = read.await;
        // Unless a state is restored, the first complete one is written, even if it has no objects.
        self.store_at = Some(Instant::now());
        match read {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(answers))) => {
                let mut batch = Batch::new();
                for (kind, answer) in answers {
                    batch.extend(self.objects.apply(kind, answer).changes);
                }
                tracing::info!(
                    source = self.address,
                    objects = self.objects.len(),
                    "restored config source"
                );
                if self.publish(batch).await.is_ok() {
                    self.is_synced.send_replace(true);
                }
                // The file has the same state already. Writing it again would make it look current.
                self.store_at = None;
            }
            Ok(Err(error)) => {
                self.metrics.failed("stored_state", 1);
                tracing::warn!(source = self.address, %error, "failed to read the stored state of a config source");
            }
            Err(error) => tracing::error!(%error, "failed to read the stored state of a config source"),
        }
    }

    /// Reads from the server until the receiver of changes is closed.
    async fn follow(&mut self) {
        let mut backoff = Backoff::new(CONNECTION.first_delay, CONNECTION.longest_delay);
        let mut variant = Variant::Delta;
        loop {
            let Err(lost) = self.stream(variant, &mut backoff).await;
            self.metrics.connected(false);
            self.confirm_at = None;
            let next = lost.next_variant(variant);
            let asked = std::mem::replace(&mut variant, next);
            let delay = match lost {
                Lost::Closed => return,
                Lost::Stream(StreamEnd::Unsupported) if asked == Variant::Delta => {
                    tracing::info!(source = self.address, "config source has no incremental protocol");
                    continue;
                }
                Lost::Silent => {
                    self.metrics.failed("silent", 1);
                    tracing::warn!(
                        source = self.address,
                        variant = ?asked,
                        "config source did not answer all kinds"
                    );
                    backoff.next()
                }
                Lost::Stream(end) => {
                    self.metrics.failed(end.label(), 1);
                    let delay = backoff.next();
                    tracing::warn!(source = self.address, error = %end, retry_in = ?delay, "config source disconnected");
                    delay
                }
            };
            tokio::select! {
                () = sleep(delay) => {}
                () = self.changes.closed() => return,
            }
            self.store_if_due().await;
        }
    }

    /// Reads one stream until it ends.
    async fn stream(&mut self, variant: Variant, backoff: &mut Backoff) -> Result<std::convert::Infallible, Lost> {
        let opening = async {
            let channel = self.server.connect().await?;
            McpStream::open(channel, variant, self.node.clone()).await
        };
        let opened = timeout(CONNECTION.answers, opening).await;
        let mut stream = opened.unwrap_or_else(|_| Err(StreamEnd::Ended("no connection in time".to_owned())))?;
        self.objects.begin_stream();
        let answered_by = Instant::now() + CONNECTION.answers;
        loop {
            let (store_at, confirm_at) = (self.store_at(), self.confirm_at);
            let pending = tokio::select! {
                pending = stream.next() => pending?,
                () = self.changes.closed() => return Err(Lost::Closed),
                () = sleep_until(answered_by), if !stream.is_answered() => return Err(Lost::Silent),
                () = sleep_until(store_at.unwrap_or(answered_by)), if store_at.is_some() => {
                    self.store_if_due().await;
                    continue;
                }
                () = sleep_until(confirm_at.unwrap_or(answered_by)), if confirm_at.is_some() => {
                    self.confirm().await;
                    continue;
                }
            };
            let (kind, answer, receipt) = pending.into_parts();
            let effect = task::aside(|| self.objects.apply(kind, answer));
            if !effect.unusable.is_empty() {
                self.metrics.failed("unusable_resource", effect.unusable.len());
                let example = &effect.unusable[0];
                let count = effect.unusable.len();
                tracing::warn!(
                    source = self.address,
                    kind = kind.name(),
                    count,
                    example,
                    "unusable objects ignored"
                );
            }
            if effect.refused > 0 {
                self.metrics.failed("refused_object", effect.refused);
            }
            let rejected = effect.unusable.into_iter().next();
            self.publish(effect.changes).await?;
            stream.acknowledge(receipt, rejected).await?;
            if stream.is_answered() {
                if self
                    .is_synced
                    .send_if_modified(|is_synced| !std::mem::replace(is_synced, true))
                {
                    tracing::info!(
                        source = self.address,
                        objects = self.objects.len(),
                        "config source synced"
                    );
                }
                self.metrics.connected(true);
                self.confirm_at.get_or_insert_with(Instant::now);
                backoff.reset();
            }
        }
    }

    /// Sends changes and updates what depends on them.
    async fn publish(&mut self, changes: Vec<Change>) -> Result<(), Lost> {
        self.findings.set((), self.objects.diagnostics());
        self.metrics.objects(self.objects.len());
        if changes.is_empty() {
            return Ok(());
        }
        if self.cache.is_some() {
            self.store_at.get_or_insert(Instant::now() + CONNECTION.store_delay);
        }
        self.changes.send(changes).await.map_err(|_| Lost::Closed)
    }

    /// Returns the time of the next write to disk. Before all kinds are known there is none: what a state lacks counts
    /// as deleted when it is read back.
    fn store_at(&self) -> Option<Instant> {
        self.store_at.filter(|_| *self.is_synced.borrow())
    }

    /// Records that the stored state is current, unless a newer one is about to be written.
    async fn confirm(&mut self) {
        self.confirm_at = Some(Instant::now() + CONNECTION.confirm_interval);
        let Some(cache) = self.cache.clone().filter(|_| self.store_at.is_none()) else {
            return;
        };
        let confirmed = tokio::task::spawn_blocking(move || cache.confirm(wall_clock())).await;
        if !matches!(confirmed, Ok(Ok(()))) {
            // The file is missing, for instance of a source that never had an object.
            self.store_at = Some(Instant::now());
        }
    }

    /// Writes the state to disk, if it has changed for long enough.
    async fn store_if_due(&mut self) {
        let (Some(cache), Some(at)) = (self.cache.clone(), self.store_at()) else {
            return;
        };
        if at > Instant::now() {
            return;
        }
        self.store_at = None;
        let answers = self.objects.answers();
        let written = tokio::task::spawn_blocking(move || cache.write(answers, wall_clock())).await;
        let failed = match written {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.store_at = Some(Instant::now() + CONNECTION.confirm_interval);
        self.metrics.failed("stored_state", 1);
        tracing::warn!(
            source = self.address,
            error = failed,
            "failed to write the state of a config source"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_variant_is_given_up() {
        for lost in [Lost::Silent, Lost::Stream(StreamEnd::Unsupported)] {
            assert_eq!(lost.next_variant(Variant::Delta), Variant::Sotw);
            assert_eq!(lost.next_variant(Variant::Sotw), Variant::Delta);
        }
        let ended = Lost::Stream(StreamEnd::Ended("closed".to_owned()));
        assert_eq!(ended.next_variant(Variant::Sotw), Variant::Sotw);
    }
}
