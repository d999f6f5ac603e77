//! The connection breaks between a changed cluster and its endpoints, for which a real Envoy waits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libtest_mimic::Failed;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{Fixture, TIMEOUT, WEB, answered_by};
use crate::support::envoy::Protocol;
use crate::support::http::RUNTIME;
use crate::support::wait;

/// The start of a resource in a response with endpoints.
const ENDPOINTS: &[u8] = b"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// A TCP proxy that closes a connection instead of passing endpoints on, once.
struct Relay {
    port: u16,
    is_armed: Arc<AtomicBool>,
}

impl Relay {
    fn start(server: u16) -> Result<Relay, Failed> {
        let listener = RUNTIME.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let port = listener.local_addr()?.port();
        let is_armed = Arc::new(AtomicBool::new(false));
        let armed = Arc::clone(&is_armed);
        RUNTIME.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // Either side may close at any time.
                RUNTIME.spawn(carry(client, server, Arc::clone(&armed)));
            }
        });
        Ok(Relay { port, is_armed })
    }

    fn arm(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
    }

    fn has_cut(&self) -> bool {
        !self.is_armed.load(Ordering::Relaxed)
    }
}

async fn carry(client: TcpStream, server: u16, is_armed: Arc<AtomicBool>) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", server)).await?;
    let (mut requests, mut to_client) = client.into_split();
    let (mut responses, mut to_server) = server.into_split();
    let answering = async {
        let (mut seen, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let len = responses.read(&mut buffer).await?;
            if len == 0 {
                return Ok(());
            }
            if is_armed.load(Ordering::Relaxed) {
                let before = seen.len();
                seen.extend_from_slice(&buffer[..len]);
                if let Some(at) = seen.windows(ENDPOINTS.len()).position(|part| part == ENDPOINTS) {
                    to_client.write_all(&seen[before.min(at)..at]).await?;
                    is_armed.store(false, Ordering::Relaxed);
                    return Ok(());
                }
            }
            to_client.write_all(&buffer[..len]).await?;
        }
    };
    tokio::select! {
        asked = tokio::io::copy(&mut requests, &mut to_server) => asked.map(|_| ()),
        answered = answering => answered,
    }
}

/// Envoy sends no request for clusters while one of them warms, and announces that it holds the endpoints.
pub(super) fn endpoints_that_were_lost_are_sent_again(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let relay = Relay::start(fixture.daemon.xds)?;
    let sidecar = fixture.sidecar_of(relay.port, Protocol::Delta)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    let modified = || sidecar.sum(r"^cluster_manager\.cluster_modified$");
    let before = modified();

    relay.arm();
    fixture.limit_connections(77);
    wait::until("a response without its endpoints", TIMEOUT, || {
        relay.has_cut().then_some(())
    })?;
    let limit = || {
        let cluster = sidecar.cluster(&fixture.cluster("v1"))?;
        cluster["circuit_breakers"]["thresholds"][0]["max_connections"].as_u64()
    };
    wait::until("the changed cluster", TIMEOUT, || (limit()? == 77).then_some(()))?;
    assert_eq!(sidecar.sum(r"^cluster_manager\.warming_clusters$"), 0);
    assert_eq!(
        modified() - before,
        3,
        "each cluster of the service must have arrived once"
    );

    // Clusters go on to change.
    fixture.limit_connections(78);
    wait::until("another change", TIMEOUT, || (limit()? == 78).then_some(()))?;
    answered_by("v1", fixture.outbound(), WEB)?;
    Ok(())
}
