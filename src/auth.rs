//! Authentication of callers: credentials of a request, and the chain of authenticators that verify them.
//!
//! The authenticators run in order; the first one that returns a caller wins. No address is trusted unless it is
//! configured.

pub mod chain;
mod client_certificate;
pub mod forwarded;
mod kubernetes;
mod oidc;
pub mod shares;
pub mod tls;
pub mod token;
pub mod trust;
mod trust_domain;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::future::BoxFuture;
use http::HeaderMap;
use smol_str::SmolStr;

use crate::base::{ClusterId, Namespace};
use tls::PeerCertificate;

pub use client_certificate::ClientCertificates;
pub use forwarded::ForwardedCertificates;
pub use kubernetes::KubernetesTokens;
pub use oidc::{JwtRule, OidcTokens};
pub use trust_domain::TrustDomains;

/// The credentials of a request.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// The peer address of the connection; none if unknown.
    pub address: Option<SocketAddr>,
    /// True if the connection uses TLS.
    pub is_tls: bool,
    /// The verified client certificate of the connection.
    pub certificate: Option<&'a Arc<PeerCertificate>>,
    /// The headers of the request.
    pub headers: &'a HeaderMap,
}

/// The kind of credential that authenticated a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallerSource {
    /// A client certificate.
    ClientCertificate,
    /// A bearer token (JWT).
    IdToken,
    /// A client certificate that a trusted gateway forwarded (`x-forwarded-client-cert`).
    Forwarded,
}

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The credential that authenticated it.
    pub source: CallerSource,
    /// Its identities as in a certificate's subject alternative names; SPIFFE ids for workloads. Never empty.
    pub identities: Vec<SmolStr>,
    /// The result of a TokenReview, if an API server authenticated the caller.
    pub kubernetes: Option<KubernetesInfo>,
    /// The expiry of its credential; none if the credential has none.
    pub expires_at: Option<SystemTime>,
}

/// The service account and pod of a caller, from a TokenReview.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesInfo {
    /// The cluster whose API server reviewed the token.
    pub cluster: ClusterId,
    /// The namespace.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
    /// The pod that the token is bound to; empty if unbound.
    pub pod_name: SmolStr,
    /// The UID of that pod; empty if unknown.
    pub pod_uid: SmolStr,
}

/// The reason why an authenticator rejects a caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthenticationError {
    /// The request has no credential of this kind.
    #[error("no {0} was presented")]
    Missing(&'static str),
    /// The credential is invalid. Not retryable with the same credential.
    #[error("{0}")]
    Invalid(String),
    /// The authority that verifies the credential is unavailable. Retryable.
    #[error("{0}")]
    Unavailable(String),
}

/// The failure of every authenticator of a chain, with the error of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unauthenticated(pub Vec<(&'static str, AuthenticationError)>);

/// One method of authentication.
pub trait Authenticator: Send + Sync {
    /// The name for messages.
    fn name(&self) -> &'static str;
    /// Authenticates the caller.
    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>>;
}

impl<T: Authenticator + ?Sized> Authenticator for Arc<T> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        (**self).authenticate(credentials)
    }
}

/// A chain of authenticators. Cheap to clone.
#[derive(Clone, Default)]
pub struct Authenticators(Arc<[Box<dyn Authenticator>]>);

impl Authenticators {
    /// Creates a chain that runs the authenticators in this order.
    pub fn new(chain: Vec<Box<dyn Authenticator>>) -> Self {
        Self(chain.into())
    }

    /// Returns the caller of the first authenticator that accepts the credentials.
    pub async fn authenticate(&self, credentials: Credentials<'_>) -> Result<Caller, Unauthenticated> {
        let mut errors = Vec::new();
        for authenticator in self.0.iter() {
            match authenticator.authenticate(credentials).await {
                Ok(caller) => return Ok(caller),
                Err(error) => errors.push((authenticator.name(), error)),
            }
        }
        Err(Unauthenticated(errors))
    }
}

impl Unauthenticated {
    /// Returns true if an authenticator that might have accepted the caller was unavailable.
    pub fn is_unavailable(&self) -> bool {
        self.0
            .iter()
            .any(|(_, error)| matches!(error, AuthenticationError::Unavailable(_)))
    }
}

impl std::fmt::Display for Unauthenticated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (name, error)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{name}: {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Unauthenticated {}

/// The timeout of a TokenReview.
pub const TOKEN_REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
