//! TLS between the ends of tunnels: both prove an identity of the mesh.

use std::sync::Arc;

use istiod::auth::tls::PeerCertificate;
use istiod::base::Sensitive;
use istiod::fetch::ClientTls;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::support::agent::{Certificate, certificates};

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// Returns the configuration of a client whose server must have one of these identities.
pub(super) fn client(certificate: &Certificate, peers: &[String]) -> Result<Arc<ClientConfig>, String> {
    if peers.is_empty() {
        return Err("the peer has no identity".to_owned());
    }
    let tls = ClientTls {
        roots: Some(certificate.roots.clone().into()),
        identity: Some((
            certificate.chain.clone().into(),
            Sensitive::new(certificate.key.clone().into()),
        )),
        subject_alt_names: peers.to_vec(),
        alpn: vec![b"h2".to_vec()],
        ..ClientTls::default()
    };
    tls.config().map_err(text)
}

/// Returns the configuration of a server whose clients must have a certificate of the mesh.
pub(super) fn server(certificate: &Certificate) -> Result<ServerConfig, String> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    for root in certificates(&certificate.roots)? {
        roots.add(root).map_err(text)?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).map_err(text)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(text)?
        .with_client_cert_verifier(verifier.map_err(text)?)
        .with_single_cert(certificates(&certificate.chain)?, key)
        .map_err(text)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// Returns the identity of a client.
pub(super) fn peer(stream: &TlsStream<TcpStream>) -> Result<String, String> {
    let (_, connection) = stream.get_ref();
    let leaf = connection.peer_certificates().and_then(<[_]>::first);
    let leaf = PeerCertificate::of_leaf(leaf.ok_or("no client certificate")?).map_err(text)?;
    let mut identities = leaf.identities.iter().filter(|name| name.starts_with("spiffe://"));
    let identity = identities.next().ok_or("the client has no SPIFFE id")?;
    Ok(identity.to_string())
}
