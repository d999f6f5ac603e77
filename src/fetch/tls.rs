//! Verification of document servers.

use std::sync::Arc;

use rustls::{
    ClientConfig, Error, RootCertStore,
    client::danger::{ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};

use super::FetchOptions;
use crate::base::handshake::verify_signatures;

/// Returns the configuration: TLS 1.2 and later, the system's roots and those of the options.
pub(super) fn config(options: &FetchOptions) -> Arc<ClientConfig> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("because the provider supports both versions");
    let mut config = if options.insecure_skip_verify {
        let verifier = Arc::new(UnverifiedServer(provider));
        builder
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth()
    } else {
        builder
            .with_root_certificates(roots(&options.extra_roots))
            .with_no_client_auth()
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// Returns the roots; invalid ones are ignored, so that the others still work.
pub(super) fn roots(extra: &[u8]) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    for error in &system.errors {
        tracing::warn!(%error, "failed to load some system root certificates");
    }
    let (taken, _) = roots.add_parsable_certificates(system.certs);
    let mut added = 0;
    for certificate in CertificateDer::pem_slice_iter(extra) {
        match certificate {
            Ok(certificate) => added += roots.add_parsable_certificates([certificate]).0,
            Err(error) => tracing::warn!(%error, "failed to load some additional root certificates"),
        }
    }
    if taken + added == 0 {
        tracing::warn!("no root certificates found, https fetches will fail");
    }
    roots
}

/// A verifier that accepts any certificate. The server must still prove possession of its key.
#[derive(Debug)]
pub struct UnverifiedServer(pub Arc<CryptoProvider>);

impl ServerCertVerifier for UnverifiedServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!(0);
}
