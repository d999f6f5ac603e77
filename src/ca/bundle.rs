//! The bundle of a CA (certificate, key, chain, roots, CRL) from a folder or a Secret, and its verification.

use std::time::SystemTime;

use bytes::Bytes;
use rustls::pki_types::{
    CertificateRevocationListDer,
    pem::{self, PemObject},
};
use smol_str::SmolStr;

use super::{
    certificate::{Certificate, CertificateError},
    key::{KeyError, PrivateKey},
};
use crate::base::Sensitive;

/// The maximum number of certificates on a path.
const PATH_LEN_MAX: usize = 10;

/// A file or Secret key of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundlePart {
    /// The name of the file or key, for messages.
    pub name: SmolStr,
    /// The content.
    pub pem: Bytes,
}

/// The parts of a CA bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaBundle {
    /// The source, for messages: `folder ./etc/cacerts`, `Secret istio-system/cacerts`.
    pub location: SmolStr,
    /// The signing certificate; further certificates in this part are ignored.
    pub certificate: BundlePart,
    /// The name of the file or key with the private key.
    pub key_name: SmolStr,
    /// Its private key.
    pub key: Sensitive,
    /// The chain from the signing certificate to a root; empty for a self-signed root.
    pub chain: BundlePart,
    /// The trusted roots.
    pub roots: BundlePart,
    /// The certificate revocation lists.
    pub crl: Option<BundlePart>,
}

/// An unusable CA bundle. Not retryable: an operator must fix it.
#[derive(Debug, thiserror::Error)]
#[error("{location}: {name}: {problem}")]
pub struct BundleError {
    /// The source of the bundle.
    pub location: SmolStr,
    /// The part with the problem.
    pub name: SmolStr,
    /// The problem.
    #[source]
    pub problem: Problem,
}

/// A problem of a bundle part.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The part is missing.
    #[error("incomplete signing CA bundle detected: it is missing")]
    Missing,
    /// One of its certificates cannot be parsed.
    #[error(transparent)]
    Certificate(CertificateError),
    /// One of its CRLs cannot be parsed.
    #[error(transparent)]
    Crl(pem::Error),
    /// It does not contain what it should.
    #[error("there is no {0} in it")]
    Empty(&'static str),
    /// The certificate is not a CA.
    #[error(
        "the certificate is not authorized to sign other certificates; \
         hint: basicConstraints CA:TRUE and keyUsage keyCertSign"
    )]
    NotCa,
    /// The private key cannot be used.
    #[error(transparent)]
    Key(KeyError),
    /// The key does not match the certificate.
    #[error("the cert does not match the key")]
    KeyMismatch,
    /// There is no valid path to a root.
    #[error("cannot verify the cert with the provided root and chain: {0}")]
    NoPath(#[source] PathError),
    /// A CA of the chain has no CRL.
    #[error(
        "missing CRL signed by {0}; \
         hint: Envoy requires one of every CA in the chain, each with keyUsage cRLSign"
    )]
    MissingCrl(SmolStr),
}

/// Reason why no path leads from a certificate to a root.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// This certificate would be on the path.
    #[error("certificate {0} is expired or not yet valid")]
    Expired(SmolStr),
    /// No issuer of this certificate is known.
    #[error("no path from {0} to a root")]
    Incomplete(SmolStr),
}

/// The treatment of expired certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryCheck {
    /// A certificate outside its validity is an error.
    Enforced,
    /// Expired certificates are accepted, because the root is renewed next.
    Skipped,
}

/// A verified bundle.
#[derive(Debug)]
pub(super) struct VerifiedBundle {
    pub(super) certificate: Certificate,
    pub(super) key: PrivateKey,
    pub(super) chain: Vec<Certificate>,
    pub(super) roots: Vec<Certificate>,
    /// The earliest expiry on the path to the root.
    pub(super) path_expires_at: SystemTime,
    /// The root at the end of the path.
    pub(super) root: Certificate,
}

impl CaBundle {
    /// Verifies every part, and that they match.
    /// Parity (security/pkg/pki/util/keycertbundle.go, Verify).
    pub(super) fn verify(&self, now: SystemTime, expiry_check: ExpiryCheck) -> Result<VerifiedBundle, BundleError> {
        let certificate = self.certificates(&self.certificate)?;
        let certificate = certificate.into_iter().next();
        let certificate =
            certificate.ok_or_else(|| self.error(&self.certificate.name, Problem::Empty("certificate")))?;
        if !certificate.is_ca {
            return Err(self.error(&self.certificate.name, Problem::NotCa));
        }
        let key = PrivateKey::from_pem(&self.key).map_err(|error| self.error(&self.key_name, Problem::Key(error)))?;
        if key.public() != certificate.public_key {
            return Err(self.error(&self.key_name, Problem::KeyMismatch));
        }
        let chain = self.certificates(&self.chain)?;
        let roots = self.certificates(&self.roots)?;
        if roots.is_empty() {
            return Err(self.error(&self.roots.name, Problem::Empty("certificate")));
        }
        let path = path(&certificate, &chain, &roots, now, expiry_check)
            .map_err(|why| self.error(&self.certificate.name, Problem::NoPath(why)))?;
        if let Some(crl) = &self.crl {
            self.verify_crls(crl, &chain)?;
        }
        let path_expires_at = expiry(&path);
        let root = path.last().map_or_else(|| certificate.clone(), |root| (*root).clone());
        Ok(VerifiedBundle {
            path_expires_at: path_expires_at.unwrap_or(certificate.not_after),
            root,
            certificate,
            key,
            chain,
            roots,
        })
    }

    fn certificates(&self, part: &BundlePart) -> Result<Vec<Certificate>, BundleError> {
        Certificate::all_from_pem(&part.pem).map_err(|why| self.error(&part.name, Problem::Certificate(why)))
    }

    /// Verifies that every CA of the chain has a CRL. Given a CRL of one CA, Envoy requires one of each CA in the chain
    /// and otherwise rejects all peers.
    fn verify_crls(&self, crl: &BundlePart, chain: &[Certificate]) -> Result<(), BundleError> {
        let mut crls = Vec::new();
        for list in CertificateRevocationListDer::pem_slice_iter(&crl.pem) {
            crls.push(list.map_err(|why| self.error(&crl.name, Problem::Crl(why)))?);
        }
        if crls.is_empty() {
            return Err(self.error(&crl.name, Problem::Empty("X509 CRL")));
        }
        match chain
            .iter()
            .find(|certificate| !crls.iter().any(|list| certificate.has_signed_crl(list)))
        {
            Some(without) => Err(self.error(&crl.name, Problem::MissingCrl(without.name.clone()))),
            None => Ok(()),
        }
    }

    pub(super) fn error(&self, name: &SmolStr, problem: Problem) -> BundleError {
        BundleError {
            location: self.location.clone(),
            name: name.clone(),
            problem,
        }
    }
}

/// Returns the earliest expiry on a path.
fn expiry(path: &[&Certificate]) -> Option<SystemTime> {
    path.iter().map(|certificate| certificate.not_after).min()
}

/// Returns the position of the path that is valid longest.
fn longest(paths: &[Vec<&Certificate>]) -> Option<usize> {
    let paths = paths.iter().enumerate();
    paths.max_by_key(|(_, path)| expiry(path)).map(|(index, _)| index)
}

/// Returns the path from a certificate to a root, both included. Of several, such as those to an old root and to the
/// renewed one with the same key, it is the one that is valid longest.
pub(super) fn path<'a>(
    from: &'a Certificate,
    chain: &'a [Certificate],
    roots: &'a [Certificate],
    now: SystemTime,
    expiry_check: ExpiryCheck,
) -> Result<Vec<&'a Certificate>, PathError> {
    let counts = |certificate: &Certificate| expiry_check == ExpiryCheck::Skipped || certificate.is_valid_at(now);
    let mut expired = None;
    // Best-first search; each entry is a path to extend.
    let mut open = vec![vec![from]];
    while let Some(index) = longest(&open) {
        let path = open.swap_remove(index);
        let Some(&last) = path.last() else { continue };
        if !counts(last) {
            expired = Some(last);
            continue;
        }
        if roots.iter().any(|root| root.der == last.der) {
            return Ok(path);
        }
        if path.len() >= PATH_LEN_MAX || last.is_self_issued() && path.len() > 1 {
            continue;
        }
        let further = chain
            .iter()
            .chain(roots.iter())
            .filter(|certificate| !path.contains(certificate));
        for issuer in further.filter(|certificate| last.is_issued_by(certificate)) {
            open.push(path.iter().copied().chain([issuer]).collect());
        }
    }
    Err(match expired {
        Some(certificate) => PathError::Expired(certificate.name.clone()),
        None => PathError::Incomplete(from.name.clone()),
    })
}

#[cfg(test)]
mod tests;
