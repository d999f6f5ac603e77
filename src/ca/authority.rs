//! What signs: a certificate with its key, what leads from it to the roots, and the roots. Immutable; whatever changes
//! makes a new one. Nothing here waits, reads a file or asks what time it is.

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

/// How far the clocks of workloads may be behind ours.
pub const CLOCK_SKEW: Duration = Duration::from_mins(2);
/// More than any request needs: one with an RSA key of 8192 bits has about 3 kB.
const CSR_BYTES_MAX: usize = 64 * 1024;

/// How long certificates hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlLimits {
    /// `DEFAULT_WORKLOAD_CERT_TTL`: if nobody asks for anything.
    pub default: Duration,
    /// `MAX_WORKLOAD_CERT_TTL`: what may be asked for.
    pub max: Duration,
}

/// A certificate with a key that was made for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServingKeyPair {
    /// The leaf and what leads to the roots, as PEM.
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

/// See the module's text.
#[derive(Clone)]
pub struct Authority {
    bundle: CaBundle,
    certificate: Certificate,
    key: Arc<PrivateKey>,
    own_chain: Vec<Certificate>,
    roots: Vec<Certificate>,
    root: Certificate,
    path_expires_at: SystemTime,
    /// Roots of CAs before this one that are trusted still.
    retained_roots: Vec<ExpiringRoot>,
    /// By what those who trust only CAs before this one trust it.
    cross_certs: Vec<ExpiringRoot>,
    /// What is sent after every leaf: PEM blocks, each ending in a newline.
    chain: Vec<String>,
    /// All that the mesh trusts, as PEM.
    trusted_roots: Bytes,
}

impl Authority {
    /// Puts the parts together after checking that they fit and that all hold now.
    pub fn new(bundle: CaBundle, now: SystemTime) -> Result<Self, BundleError> {
        Self::with_expiry_check(bundle, now, ExpiryCheck::Enforced)
    }

    /// As [`Self::new`], with a say in what expired certificates mean.
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

    /// The same with roots that are trusted beside its own, and with what vouches for it, as far as they have not
    /// passed.
    pub(super) fn with_retained(
        mut self,
        mut retained_roots: Vec<ExpiringRoot>,
        mut cross_certs: Vec<ExpiringRoot>,
        now: SystemTime,
    ) -> Self {
        retained_roots.retain(|one| now < one.until && !self.roots.contains(&one.certificate));
        cross_certs.retain(|one| now < one.until);
        let mut trusted_roots = self.bundle.roots.pem.to_vec();
        if !retained_roots.is_empty() && !trusted_roots.ends_with(b"\n") {
            trusted_roots.push(b'\n');
        }
        trusted_roots.extend(retained_roots.iter().flat_map(|one| one.certificate.pem().into_bytes()));
        // A root in the chain would hide the certificate by which others vouch for it: both have its name and key.
        let own = self
            .own_chain
            .iter()
            .filter(|one| cross_certs.is_empty() || !one.is_self_issued());
        let chain = own.chain(cross_certs.iter().map(|one| &one.certificate));
        self.chain = chain.map(Certificate::pem).collect();
        self.trusted_roots = Bytes::from(trusted_roots);
        self.retained_roots = retained_roots;
        self.cross_certs = cross_certs;
        self
    }

    /// Signs a request of a workload. The names are those of `request.identities`; those in the CSR do not count.
    pub fn issue(
        &self,
        request: &SigningRequest,
        now: SystemTime,
        limits: TtlLimits,
    ) -> Result<SignedCertificate, SignError> {
        if request.csr.len() > CSR_BYTES_MAX {
            let text = format!("the request is longer than {CSR_BYTES_MAX} bytes");
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

    /// A certificate for a server of the control plane, with a new key of the CA's own kind: RSA of 2048 bits, P-384 if
    /// the CA has that, else P-256. The limits of workloads do not count.
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
        let wanted = now.checked_add(lifetime).unwrap_or(self.path_expires_at);
        let until = wanted.min(self.path_expires_at);
        let validity = Validity {
            not_before: now.checked_sub(CLOCK_SKEW).unwrap_or(now),
            not_after: until,
        };
        let der = certificate::leaf(request, &names, validity, &self.certificate, &self.key)
            .map_err(|why| error(SignErrorKind::Generation, why))?;
        Ok((key::pem("CERTIFICATE", &der), until))
    }

    /// What it was made of.
    pub fn bundle(&self) -> &CaBundle {
        &self.bundle
    }

    /// The signing certificate.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// What is sent after every leaf: PEM blocks, each ending in a newline.
    pub fn chain(&self) -> &[String] {
        &self.chain
    }

    /// All roots that the mesh trusts, as PEM.
    pub fn trusted_roots(&self) -> &Bytes {
        &self.trusted_roots
    }

    /// When the first trusted root expires.
    pub fn root_expires_at(&self) -> SystemTime {
        self.roots.first().map_or(self.root.not_after, |root| root.not_after)
    }

    /// When the first certificate of the chain expires; none if the chain is empty.
    pub fn chain_expires_at(&self) -> Option<SystemTime> {
        self.own_chain.first().map(|first| first.not_after)
    }

    /// The first instant at which nothing can be signed any more: the earliest end on the path to the root.
    pub fn path_expires_at(&self) -> SystemTime {
        self.path_expires_at
    }

    /// The roots that it trusts by itself.
    pub fn roots(&self) -> &[Certificate] {
        &self.roots
    }

    /// The root that its path leads to.
    pub fn root(&self) -> &Certificate {
        &self.root
    }

    pub(super) fn own_chain(&self) -> &[Certificate] {
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

    /// What its key is.
    pub fn key_kind(&self) -> KeyKind {
        self.key.kind()
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
