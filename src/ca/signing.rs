//! The interface of signers of workload certificates.

use std::time::Duration;

use futures::future::BoxFuture;
use smol_str::SmolStr;

/// A signing request of an authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    /// The CSR as PEM. Only its key, and the presence of a common name, are used.
    pub csr: Vec<u8>,
    /// The identities to certify: those of the caller, never those in the CSR.
    pub identities: Vec<SmolStr>,
    /// The requested lifetime; none: the default.
    pub lifetime: Option<Duration>,
    /// The requested Kubernetes signer (metadata `CertSigner`); empty: none.
    pub signer: SmolStr,
}

/// A signed certificate with its chain and roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedCertificate {
    /// PEM blocks, the leaf first, each ending in a newline.
    pub chain: Vec<String>,
    /// All trusted roots as PEM; empty if the chain already ends with them.
    pub roots: String,
}

/// The type of a signing error: determines the label of `citadel_server_csr_sign_err_count` and the status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignErrorKind {
    /// The CSR is not acceptable.
    Csr,
    /// The requested lifetime is too long.
    Ttl,
    /// There is no valid signing certificate yet.
    NotReady,
    /// Signing failed.
    Generation,
}

impl SignErrorKind {
    /// Istio's name of the error type. Parity (security/pkg/pki/error).
    pub fn label(self) -> &'static str {
        match self {
            Self::Csr => "CSR_ERROR",
            Self::Ttl => "TTL_ERROR",
            Self::NotReady => "CA_NOT_READY",
            Self::Generation => "CERT_GEN_ERROR",
        }
    }
}

/// A signing error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CSR signing error ({text})")]
pub struct SignError {
    /// The type.
    pub kind: SignErrorKind,
    /// The message.
    pub text: String,
}

/// Signs workload certificates: the own CA, or a Kubernetes signer.
#[doc(alias = "CertificateAuthority")]
pub trait Signer: Send + Sync {
    /// Signs a certificate.
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>>;
}
