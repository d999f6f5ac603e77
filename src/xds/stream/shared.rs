//! The state and the time limits that all streams have in common.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime},
};

use tokio::{sync::mpsc, time::timeout};

use super::end::EndReason;
use crate::{
    base::ClusterId,
    generate::proxy::{NodeMetadataPool, Proxy},
    push::groups::Groups,
    xds::{
        admission::{Admission, Source},
        config_objects::ConfigObjects,
        debug::DebugHandler,
        events::Events,
        message::{Message, ResponseSender, Sent},
        metrics::{Metrics, SentResponse},
        registry::{ConnectionRegistry, LiveConnection, RefusedResource},
        share::{Interners, quarantine::Refusal},
    },
};

/// The time limits of a stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamTimeouts {
    /// A first configuration that is not written by then after it was generated loses its permit: the reader is slow.
    pub first_permit: Duration,
    /// A response that is not written by then loses its permit: the reader is slow.
    pub permit: Duration,
    /// A response that is not written by then is counted (`pilot_xds_write_timeout`).
    pub write: Duration,
    /// A first configuration that is not sent by then loses its permit.
    pub first_configuration: Duration,
    /// Clusters that are not answered by then no longer hold up newer ones.
    pub clusters: Duration,
    /// The limit for the first request of a stream.
    pub first_request: Duration,
    /// An answer to a debug request that is not written by then ends its stream.
    pub debug_answer: Duration,
}

impl Default for StreamTimeouts {
    fn default() -> Self {
        Self {
            first_permit: Duration::from_millis(20),
            permit: Duration::from_millis(250),
            write: Duration::from_secs(5),
            first_configuration: Duration::from_secs(10),
            clusters: Duration::from_secs(10),
            first_request: Duration::from_secs(30),
            debug_answer: Duration::from_mins(1),
        }
    }
}

/// Ambient mode. Without it, ztunnels are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::xds) enum Ambient {
    Off,
    On,
}

/// The state that all streams share.
pub(in crate::xds) struct Shared {
    pub(in crate::xds) groups: Groups,
    pub(in crate::xds) registry: Arc<ConnectionRegistry>,
    pub(in crate::xds) metrics: Metrics,
    pub(in crate::xds) admission: Arc<Admission>,
    pub(in crate::xds) timeouts: StreamTimeouts,
    pub(in crate::xds) max_message_bytes: usize,
    /// The memory that the subscriptions of all clients may hold.
    pub(in crate::xds) max_held_bytes: usize,
    pub(in crate::xds) clock: fn() -> Instant,
    pub(in crate::xds) wall_clock: fn() -> SystemTime,
    /// The queue of refusals; set once there is a reader.
    pub(in crate::xds) refusals: Arc<OnceLock<mpsc::Sender<RefusedResource>>>,
    /// The queue to the controller of WorkloadEntries, if that is enabled.
    pub(in crate::xds) events: Option<Events>,
    /// The handler of debug requests; set once it exists.
    pub(in crate::xds) debug_handler: Arc<OnceLock<Arc<dyn DebugHandler>>>,
    /// The handler of requests for objects of configuration; set once it exists.
    pub(in crate::xds) config_objects: Arc<OnceLock<Arc<dyn ConfigObjects>>>,
    /// The name lists of requests: equal lists are stored once.
    pub(in crate::xds) interners: Arc<Interners>,
    /// The node metadata of clients: equal metadata is stored once.
    pub(in crate::xds) node_metadata: NodeMetadataPool,
    /// Ambient mode (`PILOT_ENABLE_AMBIENT`).
    pub(in crate::xds) ambient: Ambient,
    /// True until the first stream was refused.
    ///
    /// Parity (pilot/pkg/xds/ads.go): with `K_REVISION` the first request warms the server up.
    pub(in crate::xds) refuses_first: AtomicBool,
    /// The clusters of aliases (`--clusterAliases`).
    pub(in crate::xds) aliases: BTreeMap<ClusterId, ClusterId>,
}

impl Shared {
    /// Reports a refused resource. A full queue drops the report; the connection knows the refusal, too.
    pub(super) fn refused(&self, connection: &Arc<LiveConnection>, refusal: Arc<Refusal>) {
        if let Some(refusals) = self.refusals.get() {
            let connection = connection.clone();
            let _ = refusals.try_send(RefusedResource { connection, refusal });
        }
    }

    /// Writes a response that was made for one stream, and returns what it took since `rendering`.
    pub(super) async fn write(
        &self,
        source: &Source,
        sender: &ResponseSender,
        (message, mut sent): (Message, Sent),
        rendering: Instant,
    ) -> Result<SentResponse, EndReason> {
        let permit = self.admission.response(source, sent.size_bytes).await;
        let sending = (self.clock)();
        sender.send(message).await?;
        // A slow reader loses its permit. `written` always completes with an error.
        if timeout(self.timeouts.permit, &mut sent.written).await.is_err() {
            drop(permit);
            let _ = sent.written.await;
        }
        let now = (self.clock)();
        Ok(SentResponse {
            size_bytes: sent.size_bytes,
            sending: now.saturating_duration_since(sending),
            pushing: now.saturating_duration_since(rendering),
        })
    }

    /// Replaces an alias that the proxy reports as its cluster.
    ///
    /// Parity (pilot/pkg/xds/ads.go): all that depends on the cluster uses the real id.
    pub(super) fn resolve_alias(&self, proxy: &mut Proxy) {
        if let Some(cluster) = self.aliases.get(&proxy.node.cluster) {
            proxy.set_cluster(cluster.clone());
        }
    }
}
