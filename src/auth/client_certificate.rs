//! Authentication by the client certificate of the TLS connection.

use futures::{FutureExt, future::BoxFuture};

use super::{AuthenticationError, Authenticator, Caller, CallerSource, Credentials};

/// Accepts verified client certificates of TLS connections.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientCertificates;

impl ClientCertificates {
    fn caller(credentials: Credentials<'_>) -> Result<Caller, AuthenticationError> {
        let certificate = credentials.certificate.filter(|_| credentials.is_tls);
        let Some(certificate) = certificate else {
            return Err(AuthenticationError::Missing("client certificate"));
        };
        if certificate.identities.is_empty() {
            return Err(AuthenticationError::Invalid(
                "the client certificate has no identity".into(),
            ));
        }
        Ok(Caller {
            source: CallerSource::ClientCertificate,
            identities: certificate.identities.clone(),
            kubernetes: None,
            expires_at: Some(certificate.expires_at),
        })
    }
}

impl Authenticator for ClientCertificates {
    fn name(&self) -> &'static str {
        "client certificate"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        std::future::ready(Self::caller(credentials)).boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::SystemTime};

    use http::HeaderMap;

    use super::*;
    use crate::auth::tls::PeerCertificate;

    #[test]
    fn certificates_are_accepted_on_tls_connections_only() {
        let headers = HeaderMap::new();
        let certificate = Arc::new(PeerCertificate {
            identities: vec!["spiffe://cluster.local/ns/default/sa/reviews".into()],
            expires_at: SystemTime::UNIX_EPOCH,
        });
        let shown = Credentials {
            address: None,
            is_tls: true,
            certificate: Some(&certificate),
            headers: &headers,
        };
        let caller = ClientCertificates::caller(shown).expect("a caller");
        assert_eq!(caller.identities, certificate.identities);
        assert_eq!(caller.expires_at, Some(SystemTime::UNIX_EPOCH));
        let plain = Credentials { is_tls: false, ..shown };
        assert!(matches!(
            ClientCertificates::caller(plain),
            Err(AuthenticationError::Missing(_))
        ));
        let none = Credentials {
            certificate: None,
            ..shown
        };
        assert!(matches!(
            ClientCertificates::caller(none),
            Err(AuthenticationError::Missing(_))
        ));
        let nameless = Arc::new(PeerCertificate {
            identities: Vec::new(),
            ..(*certificate).clone()
        });
        let nameless = Credentials {
            certificate: Some(&nameless),
            ..shown
        };
        assert!(matches!(
            ClientCertificates::caller(nameless),
            Err(AuthenticationError::Invalid(_))
        ));
    }
}
