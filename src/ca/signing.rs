//! What is asked of whoever signs certificates of workloads, and what is answered.

use std::time::Duration;

use futures::future::BoxFuture;
use smol_str::SmolStr;

/// A certificate that is asked for, by a caller who is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    /// The certificate signing request, as PEM. Only its key counts, and whether it has a common name.
    pub csr: Vec<u8>,
    /// What the certificate is to say of its holder: the caller's names, never those that the request asks for.
    pub identities: Vec<SmolStr>,
    /// How long it is to hold; none: the default.
    pub lifetime: Option<Duration>,
    /// The Kubernetes signer that is asked for (metadata `CertSigner`); empty: none.
    pub signer: SmolStr,
}

/// A certificate with what leads to the roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedCertificate {
    /// PEM blocks, the leaf first, each ending in a newline.
    pub chain: Vec<String>,
    /// All trusted roots as PEM; empty if there is no more to say than the chain does.
    pub roots: String,
}

/// What kind of thing went wrong; the label of `citadel_server_csr_sign_err_count` and the code of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignErrorKind {
    /// The request is not acceptable.
    Csr,
    /// The lifetime that is asked for is not acceptable.
    Ttl,
    /// There is no (valid) signing certificate now.
    NotReady,
    /// Signing failed.
    Generation,
}

impl SignErrorKind {
    /// Istio's name of the kind.
    pub fn label(self) -> &'static str {
        match self {
            Self::Csr => "CSR_ERROR",
            Self::Ttl => "TTL_ERROR",
            Self::NotReady => "CA_NOT_READY",
            Self::Generation => "CERT_GEN_ERROR",
        }
    }
}

/// Why nothing was signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CSR signing error ({text})")]
pub struct SignError {
    /// What kind of thing went wrong.
    pub kind: SignErrorKind,
    /// For people.
    pub text: String,
}

/// Signs certificates of workloads: this process, or a signer of Kubernetes.
pub trait Signer: Send + Sync {
    /// Signs one.
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>>;
}
