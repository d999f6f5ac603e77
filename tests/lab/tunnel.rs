//! The ADS proxy of istio-agent: its Envoy uses plaintext on a socket, and the control plane mutual TLS. Both sides are
//! HTTP/2, so the bytes are copied unchanged.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsConnector;

use super::agent::CertificateWatch;
use crate::support::agent::{Agent, Certificate, Trust};
use crate::support::http::RUNTIME;

/// The tunnel. Dropping it closes its socket and its connections.
pub(crate) struct Tunnel {
    listening: JoinHandle<()>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Tunnel {
    /// Connects `socket` to the control plane, with the certificate that is current at the time of each connection.
    pub(crate) fn open(socket: &Path, control_plane: Agent, known: CertificateWatch) -> Result<Tunnel, String> {
        let _runtime = RUNTIME.enter();
        let listener = UnixListener::bind(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        let listening = RUNTIME.spawn(async move {
            // The connections end with this task.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (certificate, control_plane) = (known.borrow().clone(), control_plane.clone());
                connections.spawn(async move {
                    // Envoy reconnects; the cause is in the control plane's log.
                    let _ = pass(stream, control_plane, &certificate).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Tunnel { listening })
    }
}

async fn pass(mut inside: UnixStream, mut control_plane: Agent, certificate: &Certificate) -> Result<(), String> {
    control_plane.trust = Trust::Roots(certificate.roots.clone());
    let connector = TlsConnector::from(Arc::new(control_plane.tls(Some(certificate))?));
    let error_text = |error: std::io::Error| error.to_string();
    let outside = TcpStream::connect(control_plane.address).await.map_err(error_text)?;
    let name = ServerName::try_from(control_plane.server).map_err(|error| error.to_string())?;
    let mut outside = connector.connect(name, outside).await.map_err(error_text)?;
    copy_bidirectional(&mut inside, &mut outside)
        .await
        .map_err(error_text)?;
    Ok(())
}
