//! What a CA is made of, as it comes from a folder or a Secret, and whether its parts belong together.

use std::{fmt, time::SystemTime};

use bytes::Bytes;
use rustls::pki_types::{CertificateRevocationListDer, pem::PemObject};
use smol_str::SmolStr;

use super::{
    certificate::Certificate,
    key::{KeyError, PrivateKey},
};
use crate::base::Sensitive;

/// How many certificates a path may have: more is a mistake.
const PATH_LEN_MAX: usize = 10;

/// Where a part of a bundle stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundlePart {
    /// A file or a key of a Secret, for messages.
    pub name: SmolStr,
    /// The text.
    pub pem: Bytes,
}

/// The parts of a CA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaBundle {
    /// Where they stand: `folder ./etc/cacerts`, `Secret istio-system/cacerts`.
    pub location: SmolStr,
    /// The certificate that signs; further ones in the text do not count.
    pub certificate: BundlePart,
    /// The file or key that the private key stands in.
    pub key_name: SmolStr,
    /// Its private key.
    pub key: Sensitive,
    /// What leads from the signing certificate to a root; empty for a root that signs itself.
    pub chain: BundlePart,
    /// What the mesh trusts.
    pub roots: BundlePart,
    /// What was revoked.
    pub crl: Option<BundlePart>,
}

/// Why the parts are no CA. Not retryable: somebody has to mend them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{location}: {name}: {problem}")]
pub struct BundleError {
    /// Where the parts stand.
    pub location: SmolStr,
    /// Which one is wrong.
    pub name: SmolStr,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What can be wrong with a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The bundle has some parts but not this one.
    Missing,
    /// It cannot be read.
    Unreadable(String),
    /// It holds nothing of what it should.
    Empty(&'static str),
    /// The certificate may not sign others.
    NotCa,
    /// The private key cannot be used.
    Key(KeyError),
    /// The key is that of another certificate.
    KeyMismatch,
    /// No path leads to a root, or what does is not valid now.
    NoPath(String),
    /// A certificate of the chain has signed no list of what was revoked.
    MissingCrl(SmolStr),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "incomplete signing CA bundle detected: it is missing"),
            Self::Unreadable(why) => write!(f, "{why}"),
            Self::Empty(what) => write!(f, "there is no {what} in it"),
            Self::NotCa => write!(
                f,
                "the certificate is not authorized to sign other certificates; hint: basicConstraints CA:TRUE and keyUsage keyCertSign"
            ),
            Self::Key(error) => write!(f, "{error}"),
            Self::KeyMismatch => write!(f, "the cert does not match the key"),
            Self::NoPath(why) => write!(f, "cannot verify the cert with the provided root and chain: {why}"),
            Self::MissingCrl(name) => write!(
                f,
                "missing CRL signed by {name}; hint: proxies want a list of every CA in the chain"
            ),
        }
    }
}

/// Whether the time spans of certificates count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryCheck {
    /// What does not hold now is an error.
    Enforced,
    /// An expired certificate is accepted: it is about to be renewed.
    Skipped,
}

/// A bundle whose parts belong together.
#[derive(Debug)]
pub(super) struct VerifiedBundle {
    pub(super) certificate: Certificate,
    pub(super) key: PrivateKey,
    pub(super) chain: Vec<Certificate>,
    pub(super) roots: Vec<Certificate>,
    /// The first instant at which the path to the root holds no longer.
    pub(super) path_expires_at: SystemTime,
    /// The root that the path leads to.
    pub(super) root: Certificate,
}

impl CaBundle {
    /// Checks every part and how they fit.
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
        let path_expires_at = path.iter().map(|one| one.not_after).min();
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
        Certificate::all_from_pem(&part.pem).map_err(|why| self.error(&part.name, Problem::Unreadable(why)))
    }

    /// Envoy takes a list for one CA of a chain to mean that there is one for each; if not, it refuses everybody.
    fn verify_crls(&self, crl: &BundlePart, chain: &[Certificate]) -> Result<(), BundleError> {
        let mut crls = Vec::new();
        for list in CertificateRevocationListDer::pem_slice_iter(&crl.pem) {
            crls.push(list.map_err(|error| self.error(&crl.name, Problem::Unreadable(error.to_string())))?);
        }
        if crls.is_empty() {
            return Err(self.error(&crl.name, Problem::Empty("X509 CRL")));
        }
        match chain
            .iter()
            .find(|one| !crls.iter().any(|list| one.has_signed_crl(list)))
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

/// The certificates from one to a root, both included.
pub(super) fn path<'a>(
    from: &'a Certificate,
    chain: &'a [Certificate],
    roots: &'a [Certificate],
    now: SystemTime,
    expiry_check: ExpiryCheck,
) -> Result<Vec<&'a Certificate>, String> {
    let counts = |one: &Certificate| expiry_check == ExpiryCheck::Skipped || one.is_valid_at(now);
    let mut expired = None;
    // Depth first; each entry is a path that may become longer.
    let mut open = vec![vec![from]];
    while let Some(path) = open.pop() {
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
        let further = chain.iter().chain(roots.iter()).filter(|one| !path.contains(one));
        for issuer in further.filter(|one| last.is_issued_by(one)) {
            open.push(path.iter().copied().chain([issuer]).collect());
        }
    }
    Err(match expired {
        Some(one) => format!("certificate {} does not hold now", one.name),
        None => format!("nothing leads from {} to a root", from.name),
    })
}

#[cfg(test)]
mod tests;
