//! The TLS handshake with clients, bounded in time and bytes.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rustls::{
    ServerConfig,
    server::{ClientHello, NoServerSessionStorage, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{PeerCertificate, PeerCertificateError, ServingCertificate, TlsOptions, verify::TrustPoolVerifier};
use crate::auth::trust::TrustPools;

/// The timeout of a handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum bytes read during a handshake. A chain of four RSA certificates takes about 6 KiB.
pub const MAX_HANDSHAKE_BYTES: usize = 32 << 10;

/// A failed TLS connection.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// There is no serving certificate yet.
    #[error("the control plane has no serving certificate yet")]
    NoCertificate,
    /// The handshake timed out.
    #[error("no TLS handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Timeout,
    /// The peer closed the connection, does not speak TLS, or its certificate was rejected.
    #[error("TLS handshake: {0}")]
    Handshake(#[from] io::Error),
    /// The verified certificate has unusable content.
    #[error(transparent)]
    Certificate(#[from] PeerCertificateError),
}

/// Accepts TLS connections with the current serving certificate and trust pools. Sessions are not resumable, so a
/// client with a revoked or expired certificate cannot resume one. Cheap to clone.
#[derive(Clone)]
pub struct Acceptor {
    serving: watch::Receiver<Option<Arc<ServingCertificate>>>,
    tls: TlsAcceptor,
    pub(super) timeout: Duration,
}

impl Acceptor {
    /// Creates an acceptor with the serving certificate in `serving` and the trusted roots in `pools`.
    pub fn new(
        options: &TlsOptions,
        serving: watch::Receiver<Option<Arc<ServingCertificate>>>,
        pools: watch::Receiver<Arc<TrustPools>>,
    ) -> Result<Self, rustls::Error> {
        let verifier = TrustPoolVerifier::new(pools, options.provider.clone());
        let mut config = ServerConfig::builder_with_provider(options.provider.clone())
            .with_protocol_versions(&options.versions)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(CurrentCertificate(serving.clone())));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self::of(config, serving))
    }

    /// Creates an acceptor of the webhooks: HTTP/1.1, and no client certificates.
    ///
    /// Parity (pilot/pkg/bootstrap/server.go): certificates are not requested, since that of an API server may be of
    /// any CA.
    pub fn of_webhooks(
        options: &TlsOptions,
        serving: watch::Receiver<Option<Arc<ServingCertificate>>>,
    ) -> Result<Self, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(options.provider.clone())
            .with_protocol_versions(&options.versions)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(CurrentCertificate(serving.clone())));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self::of(config, serving))
    }

    fn of(mut config: ServerConfig, serving: watch::Receiver<Option<Arc<ServingCertificate>>>) -> Self {
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Self {
            serving,
            tls: TlsAcceptor::from(Arc::new(config)),
            timeout: HANDSHAKE_TIMEOUT,
        }
    }

    /// Waits for a serving certificate. Returns false if there will never be one.
    pub async fn ready(&mut self) -> bool {
        self.serving.wait_for(Option::is_some).await.is_ok()
    }

    /// Performs the handshake on `stream`. Returns the verified client certificate, if the client sent one.
    pub async fn accept<S>(
        &self,
        stream: S,
    ) -> Result<(TlsStream<HandshakeReadLimit<S>>, Option<Arc<PeerCertificate>>), AcceptError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        if self.serving.borrow().is_none() {
            return Err(AcceptError::NoCertificate);
        }
        let limited = HandshakeReadLimit {
            inner: stream,
            left: Some(MAX_HANDSHAKE_BYTES),
        };
        let mut stream = tokio::time::timeout(self.timeout, self.tls.accept(limited))
            .await
            .map_err(|_| AcceptError::Timeout)??;
        let (limited, connection) = stream.get_mut();
        limited.left = None;
        let leaf = connection.peer_certificates().and_then(|chain| chain.first());
        let peer = leaf.map(|leaf| PeerCertificate::of_leaf(leaf)).transpose()?;
        Ok((stream, peer.map(Arc::new)))
    }
}

/// Resolves to the current serving certificate.
struct CurrentCertificate(watch::Receiver<Option<Arc<ServingCertificate>>>);

impl fmt::Debug for CurrentCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CurrentCertificate")
    }
}

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|serving| serving.key.clone())
    }
}

/// A stream that limits the bytes read until the handshake is complete.
#[derive(Debug)]
pub struct HandshakeReadLimit<S> {
    inner: S,
    left: Option<usize>,
}

impl<S: AsyncRead + Unpin> AsyncRead for HandshakeReadLimit<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(left) = this.left else {
            return Pin::new(&mut this.inner).poll_read(cx, buf);
        };
        if left == 0 {
            let text = format!("more than {MAX_HANDSHAKE_BYTES} bytes before its completion");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        // One read may exceed the limit; rustls reads a few KiB at a time.
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.left = Some(left.saturating_sub(buf.filled().len() - before));
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HandshakeReadLimit<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}
