//! Connections of clients: the handshake, within bounds of time and memory, and who the client is by its certificate.

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
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{PeerCertificate, PeerCertificateError, ServingCertificate, TlsOptions, verify::LiveVerifier};
use crate::auth::trust::TrustPools;

/// How long a client may take to introduce itself.
pub const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// How much it may send to do so, in bytes. A chain of four RSA certificates takes about 6 KiB.
pub const HANDSHAKE_BYTES: usize = 32 << 10;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// There is nothing to present yet.
    #[error("the control plane has no serving certificate yet")]
    NoCertificate,
    /// The client took too long.
    #[error("no TLS handshake within {} s", HANDSHAKE_PATIENCE.as_secs())]
    Slow,
    /// The other side is gone, speaks no TLS, or is not to be believed.
    #[error("TLS handshake: {0}")]
    Handshake(#[from] io::Error),
    /// A certificate that was verified and says nothing.
    #[error(transparent)]
    Certificate(#[from] PeerCertificateError),
}

/// Makes TLS connections. What is presented and who is believed are those of the moment; nothing of earlier connections is
/// kept, so a client cannot resume one whose certificate is not good any more. Cheap to clone.
#[derive(Clone)]
pub struct Acceptor {
    serving: watch::Receiver<Option<Arc<ServingCertificate>>>,
    tls: TlsAcceptor,
    pub(super) patience: Duration,
}

impl Acceptor {
    /// An acceptor that presents what `serving` holds and believes what `pools` holds.
    pub fn new(
        options: &TlsOptions,
        serving: watch::Receiver<Option<Arc<ServingCertificate>>>,
        pools: watch::Receiver<Arc<TrustPools>>,
    ) -> Result<Self, rustls::Error> {
        let verifier = LiveVerifier::new(pools, options.provider.clone());
        let mut config = ServerConfig::builder_with_provider(options.provider.clone())
            .with_protocol_versions(&options.versions)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(LiveCertificate(serving.clone())));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self {
            serving,
            tls: TlsAcceptor::from(Arc::new(config)),
            patience: HANDSHAKE_PATIENCE,
        })
    }

    /// Waits until there is something to present. False: there never will be.
    pub async fn ready(&mut self) -> bool {
        self.serving.wait_for(Option::is_some).await.is_ok()
    }

    /// Makes a connection of `stream`. Gives the client's certificate, verified, if it showed one.
    pub async fn accept<S>(
        &self,
        stream: S,
    ) -> Result<(TlsStream<Metered<S>>, Option<Arc<PeerCertificate>>), AcceptError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        if self.serving.borrow().is_none() {
            return Err(AcceptError::NoCertificate);
        }
        let metered = Metered {
            inner: stream,
            left: Some(HANDSHAKE_BYTES),
        };
        let mut stream = timeout(self.patience, self.tls.accept(metered))
            .await
            .map_err(|_| AcceptError::Slow)??;
        let (metered, connection) = stream.get_mut();
        metered.left = None;
        let leaf = connection.peer_certificates().and_then(|chain| chain.first());
        let peer = leaf.map(|leaf| PeerCertificate::of_leaf(leaf)).transpose()?;
        Ok((stream, peer.map(Arc::new)))
    }
}

/// Presents what there is.
struct LiveCertificate(watch::Receiver<Option<Arc<ServingCertificate>>>);

impl fmt::Debug for LiveCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LiveCertificate")
    }
}

impl ResolvesServerCert for LiveCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|serving| serving.key.clone())
    }
}

/// A stream of which only so much is read before its handshake is done.
#[derive(Debug)]
pub struct Metered<S> {
    inner: S,
    left: Option<usize>,
}

impl<S> Metered<S> {
    /// The stream underneath.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(left) = this.left else {
            return Pin::new(&mut this.inner).poll_read(cx, buf);
        };
        if left == 0 {
            let text = format!("more than {HANDSHAKE_BYTES} bytes before its end");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        // One read may pass the bound; the library reads a few KiB at a time.
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.left = Some(left.saturating_sub(buf.filled().len() - before));
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
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
