//! A signing CA: its certificate and key, the chain to the roots, and the trusted roots. Immutable; a change creates a
//! new one. No I/O, no waiting, and time is a parameter.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use smol_str::SmolStr;

use super::{
    bundle::{BundleError, CaBundle, ExpiryCheck, VerifiedBundle},
    certificate::{self, Certificate, ParsedCsr, SubjectAltNames, Validity},
    key::{self, KeyKind, PrivateKey},
    signing::{SignError, SignErrorKind, SignedCertificate, SigningRequest},
};
use crate::base::{Sensitive, duration};

/// The tolerated clock skew of workloads: certificates are valid from this long before now.
/// Parity (security/pkg/pki/util/generate_cert.go).
pub const CLOCK_SKEW: Duration = Duration::from_mins(2);
/// The maximum size of a CSR. One with an RSA key of 8192 bits has about 3 kB.
const CSR_BYTES_MAX: usize = 64 * 1024;

/// The lifetimes of certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlLimits {
    /// `DEFAULT_WORKLOAD_CERT_TTL`: for requests without a lifetime.
    pub default: Duration,
    /// `MAX_WORKLOAD_CERT_TTL`: the longest lifetime that may be requested.
    pub max: Duration,
}

/// A serving certificate with its generated key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServingKeyPair {
    /// The leaf and the chain to the roots, as PEM.
    pub chain: String,
    /// The key as PEM (PKCS#8).
    pub key: Sensitive,
    /// The expiry of the leaf.
    pub expires_at: SystemTime,
}

/// A root of an earlier CA, or a certificate on the cross-signed path to one, and the time until which it is
/// distributed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpiringRoot {
    pub(super) certificate: Certificate,
    pub(super) until: SystemTime,
}

/// A signing CA with the roots that the mesh trusts.
#[doc(alias = "IstioCA")]
#[derive(Clone)]
pub struct Authority {
    bundle: CaBundle,
    certificate: Certificate,
    key: Arc<PrivateKey>,
    own_chain: Vec<Certificate>,
    roots: Vec<Certificate>,
    root: Certificate,
    path_expires_at: SystemTime,
    /// Roots of earlier CAs that are still trusted.
    retained_roots: Vec<ExpiringRoot>,
    /// Certificates for this CA by earlier CAs (cross-signed), for peers that trust only those.
    cross_certs: Vec<ExpiringRoot>,
    /// The chain that follows every leaf: PEM blocks, each ending in a newline.
    chain: Vec<String>,
    /// All trusted roots of the mesh, as PEM.
    trusted_roots: Bytes,
}

impl Authority {
    /// Creates a CA after verifying that the parts of the bundle match and are valid now.
    pub fn new(bundle: CaBundle, now: SystemTime) -> Result<Self, BundleError> {
        Self::with_expiry_check(bundle, now, ExpiryCheck::Enforced)
    }

    /// Like [`Self::new`], with a choice of how expired certificates are treated.
    pub fn with_expiry_check(
        bundle: CaBundle,
        now: SystemTime,
        expiry_check: ExpiryCheck,
    ) -> Result<Self, BundleError> {
        let verified = bundle.verify(now, expiry_check)?;
        let VerifiedBundle {
            certificate,
            key,
            chain,
            roots,
            path_expires_at,
            root,
        } = verified;
        Ok(Self {
            chain: chain.iter().map(Certificate::pem).collect(),
            trusted_roots: bundle.roots.pem.clone(),
            bundle,
            certificate,
            key: Arc::new(key),
            own_chain: chain,
            roots,
            root,
            path_expires_at,
            retained_roots: Vec::new(),
            cross_certs: Vec::new(),
        })
    }

    /// Returns the CA with these retained roots and cross-signed certificates, without expired ones.
    pub(super) fn with_retained(
        mut self,
        mut retained_roots: Vec<ExpiringRoot>,
        mut cross_certs: Vec<ExpiringRoot>,
        now: SystemTime,
    ) -> Self {
        retained_roots.retain(|expiring| now < expiring.until && !self.roots.contains(&expiring.certificate));
        cross_certs.retain(|expiring| now < expiring.until);
        let mut trusted_roots = self.bundle.roots.pem.to_vec();
        if !retained_roots.is_empty() && !trusted_roots.ends_with(b"\n") {
            trusted_roots.push(b'\n');
        }
        trusted_roots.extend(
            retained_roots
                .iter()
                .flat_map(|expiring| expiring.certificate.pem().into_bytes()),
        );
        // A self-signed root in the chain would hide the cross-signed certificate, which has the same name and key.
        let own = self
            .own_chain
            .iter()
            .filter(|certificate| cross_certs.is_empty() || !certificate.is_self_issued());
        let chain = own.chain(cross_certs.iter().map(|expiring| &expiring.certificate));
        self.chain = chain.map(Certificate::pem).collect();
        self.trusted_roots = Bytes::from(trusted_roots);
        self.retained_roots = retained_roots;
        self.cross_certs = cross_certs;
        self
    }

    /// Signs a workload certificate. Its SANs are `request.identities`; names in the CSR are ignored, so that a caller
    /// cannot obtain another identity.
    pub fn issue(
        &self,
        request: &SigningRequest,
        now: SystemTime,
        limits: TtlLimits,
    ) -> Result<SignedCertificate, SignError> {
        if request.csr.len() > CSR_BYTES_MAX {
            let text = format!("the CSR is longer than {CSR_BYTES_MAX} bytes");
            return Err(error(SignErrorKind::Csr, text));
        }
        let read = ParsedCsr::from_pem(&request.csr).map_err(|why| error(SignErrorKind::Csr, why))?;
        let lifetime = match request.lifetime {
            None | Some(Duration::ZERO) => limits.default,
            Some(asked) if asked > limits.max => {
                let (asked, max) = (duration::format_seconds(asked), duration::format_seconds(limits.max));
                let text = format!("requested TTL {asked} is greater than the max allowed TTL {max}");
                return Err(error(SignErrorKind::Ttl, text));
            }
            Some(asked) => asked,
        };
        let (leaf, _) = self.leaf(&read, &request.identities, lifetime, now)?;
        Ok(SignedCertificate {
            chain: std::iter::once(leaf).chain(self.chain.iter().cloned()).collect(),
            roots: String::from_utf8_lossy(&self.trusted_roots).into_owned(),
        })
    }

    /// Issues a serving certificate of the control plane with a new key: RSA 2048 if the CA's key is RSA, P-384 if it
    /// is P-384, else P-256. Workload TTL limits do not apply. Parity (security/pkg/pki/ca/ca.go, GenKeyCert).
    pub fn issue_serving(
        &self,
        names: &[SmolStr],
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<ServingKeyPair, SignError> {
        let kind = match self.key.kind() {
            KeyKind::Rsa(_) => KeyKind::Rsa(2048),
            KeyKind::P384 => KeyKind::P384,
            KeyKind::P256 | KeyKind::P521 | KeyKind::Ed25519 => KeyKind::P256,
        };
        let key = PrivateKey::generate(kind).map_err(|why| error(SignErrorKind::Generation, why))?;
        let request = ParsedCsr {
            public_key: key.public(),
            has_common_name: false,
        };
        let (leaf, expires_at) = self.leaf(&request, names, lifetime, now)?;
        Ok(ServingKeyPair {
            chain: std::iter::once(&leaf).chain(&self.chain).map(String::as_str).collect(),
            key: key.pem().clone(),
            expires_at,
        })
    }

    fn leaf(
        &self,
        request: &ParsedCsr,
        names: &[SmolStr],
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<(String, SystemTime), SignError> {
        let names = SubjectAltNames::new(names).map_err(|why| error(SignErrorKind::Generation, why))?;
        if now >= self.path_expires_at {
            let text = format!("signing certificate {} has expired", self.certificate.name);
            return Err(error(SignErrorKind::Generation, text));
        }
        let requested_end = now.checked_add(lifetime).unwrap_or(self.path_expires_at);
        let until = requested_end.min(self.path_expires_at);
        let validity = Validity {
            not_before: now.checked_sub(CLOCK_SKEW).unwrap_or(now),
            not_after: until,
        };
        let der = certificate::leaf(request, &names, validity, &self.certificate, &self.key)
            .map_err(|why| error(SignErrorKind::Generation, why))?;
        Ok((key::pem("CERTIFICATE", &der), until))
    }

    /// The bundle that the CA was created from.
    pub fn bundle(&self) -> &CaBundle {
        &self.bundle
    }

    /// The signing certificate.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// The chain that follows every leaf: PEM blocks, each ending in a newline.
    pub fn chain(&self) -> &[String] {
        &self.chain
    }

    /// All trusted roots of the mesh, as PEM.
    pub fn trusted_roots(&self) -> &Bytes {
        &self.trusted_roots
    }

    /// The expiry of the first trusted root.
    pub fn root_expires_at(&self) -> SystemTime {
        self.roots.first().map_or(self.root.not_after, |root| root.not_after)
    }

    /// The expiry of the first certificate of the chain; none if the chain is empty.
    pub fn chain_expires_at(&self) -> Option<SystemTime> {
        self.own_chain.first().map(|first| first.not_after)
    }

    /// The earliest expiry on the path to the root. From then on nothing can be signed.
    pub fn path_expires_at(&self) -> SystemTime {
        self.path_expires_at
    }

    /// The roots of its own bundle.
    pub fn roots(&self) -> &[Certificate] {
        &self.roots
    }

    /// The root at the end of its path.
    pub fn root(&self) -> &Certificate {
        &self.root
    }

    /// The certificates of its chain, its own first.
    pub fn own_chain(&self) -> &[Certificate] {
        &self.own_chain
    }

    pub(super) fn retained_roots(&self) -> &[ExpiringRoot] {
        &self.retained_roots
    }

    pub(super) fn cross_certs(&self) -> &[ExpiringRoot] {
        &self.cross_certs
    }

    pub(super) fn key(&self) -> &PrivateKey {
        &self.key
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CA {} of {}", self.certificate.name, self.bundle.location)
    }
}

fn error(kind: SignErrorKind, why: impl fmt::Display) -> SignError {
    SignError {
        kind,
        text: why.to_string(),
    }
}

#[cfg(test)]
mod tests;
