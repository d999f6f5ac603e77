//! Who is calling: what a request shows of its caller, and who may say what that is worth.
//!
//! A chain of authenticators is asked in order; the first that knows the caller wins. Nothing here trusts an address, but for
//! those that are configured to.

pub mod chain;
mod client_certificate;
pub mod forwarded;
mod kubernetes;
mod oidc;
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

/// What a request shows of its caller.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// The address of the other side of the connection; none where it is not known.
    pub address: Option<SocketAddr>,
    /// The connection is encrypted.
    pub is_tls: bool,
    /// The client certificate of the connection, verified.
    pub certificate: Option<&'a Arc<PeerCertificate>>,
    /// The headers of the request.
    pub headers: &'a HeaderMap,
}

/// By what a caller is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallerSource {
    /// A client certificate.
    ClientCertificate,
    /// A token.
    IdToken,
    /// What a trusted gateway says of the client certificate of a connection to it.
    Forwarded,
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// By what it is known.
    pub source: CallerSource,
    /// Its names as a certificate would hold them; SPIFFE ids for workloads. Never empty.
    pub identities: Vec<SmolStr>,
    /// What Kubernetes says of it, where its API server was asked.
    pub kubernetes: Option<KubernetesInfo>,
    /// When what it showed becomes worthless; none if nothing says so.
    pub expires_at: Option<SystemTime>,
}

/// What a TokenReview says of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesInfo {
    /// The cluster whose API server was asked.
    pub cluster: ClusterId,
    /// The namespace.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
    /// The pod that the token is bound to; empty if to none.
    pub pod_name: SmolStr,
    /// Its uid; empty if unknown.
    pub pod_uid: SmolStr,
}

/// Why an authenticator does not vouch for a caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing was shown that it could look at.
    #[error("no {0} was presented")]
    Absent(&'static str),
    /// What was shown is not good. Not worth trying again with the same.
    #[error("{0}")]
    Invalid(String),
    /// Who could tell cannot be asked now. Worth trying again.
    #[error("{0}")]
    Unavailable(String),
}

/// Nobody vouches for a caller: what each authenticator said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unauthenticated(pub Vec<(&'static str, Refusal)>);

/// One way of knowing callers.
pub trait Authenticator: Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &'static str;
    /// Says who calls.
    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, Refusal>>;
}

impl<T: Authenticator + ?Sized> Authenticator for Arc<T> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, Refusal>> {
        (**self).authenticate(credentials)
    }
}

/// The chain. Cheap to clone.
#[derive(Clone, Default)]
pub struct Authenticators(Arc<[Box<dyn Authenticator>]>);

impl Authenticators {
    /// A chain, the first one first.
    pub fn new(chain: Vec<Box<dyn Authenticator>>) -> Self {
        Self(chain.into())
    }

    /// Asks each in order.
    pub async fn authenticate(&self, credentials: Credentials<'_>) -> Result<Caller, Unauthenticated> {
        let mut refusals = Vec::new();
        for authenticator in self.0.iter() {
            match authenticator.authenticate(credentials).await {
                Ok(caller) => return Ok(caller),
                Err(refusal) => refusals.push((authenticator.name(), refusal)),
            }
        }
        Err(Unauthenticated(refusals))
    }
}

impl Unauthenticated {
    /// Somebody who might know the caller could not be asked.
    pub fn is_unavailable(&self) -> bool {
        self.0
            .iter()
            .any(|(_, refusal)| matches!(refusal, Refusal::Unavailable(_)))
    }
}

impl std::fmt::Display for Unauthenticated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (name, refusal)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{name}: {refusal}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Unauthenticated {}

/// How long somebody else (an API server) may take to say who a caller is.
pub const REVIEW_PATIENCE: Duration = Duration::from_secs(5);
