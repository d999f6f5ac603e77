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
const PATH_MAX: usize = 10;

/// Where a part of a bundle stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// A file or a key of a Secret, for messages.
    pub name: SmolStr,
    /// The text.
    pub pem: Bytes,
}

/// The parts of a CA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// Where they stand: `folder ./etc/cacerts`, `Secret istio-system/cacerts`.
    pub place: SmolStr,
    /// The certificate that signs; further ones in the text do not count.
    pub certificate: Part,
    /// The file or key that the private key stands in.
    pub key_name: SmolStr,
    /// Its private key.
    pub key: Sensitive,
    /// What leads from the signing certificate to a root; empty for a root that signs itself.
    pub chain: Part,
    /// What the mesh trusts.
    pub roots: Part,
    /// What was revoked.
    pub revoked: Option<Part>,
}

/// Why the parts are no CA. Not retryable: somebody has to mend them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {name}: {problem}")]
pub struct BundleError {
    /// Where the parts stand.
    pub place: SmolStr,
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
    NoAuthority,
    /// The private key cannot be used.
    Key(KeyError),
    /// The key is that of another certificate.
    OtherKey,
    /// No path leads to a root, or what does is not valid now.
    NoPath(String),
    /// A certificate of the chain has signed no list of what was revoked.
    NoList(SmolStr),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "incomplete signing CA bundle detected: it is missing"),
            Self::Unreadable(why) => write!(f, "{why}"),
            Self::Empty(what) => write!(f, "there is no {what} in it"),
            Self::NoAuthority => write!(
                f,
                "the certificate is not authorized to sign other certificates; hint: basicConstraints CA:TRUE and keyUsage keyCertSign"
            ),
            Self::Key(error) => write!(f, "{error}"),
            Self::OtherKey => write!(f, "the cert does not match the key"),
            Self::NoPath(why) => write!(f, "cannot verify the cert with the provided root and chain: {why}"),
            Self::NoList(name) => write!(
                f,
                "missing CRL signed by {name}; hint: proxies want a list of every CA in the chain"
            ),
        }
    }
}

/// Whether the time spans of certificates count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// What does not hold now is an error.
    Counts,
    /// An expired certificate is accepted: it is about to be renewed.
    Ignored,
}

/// A bundle whose parts belong together.
#[derive(Debug)]
pub(super) struct Verified {
    pub(super) certificate: Certificate,
    pub(super) key: PrivateKey,
    pub(super) chain: Vec<Certificate>,
    pub(super) roots: Vec<Certificate>,
    /// The first instant at which the path to the root holds no longer.
    pub(super) holds_until: SystemTime,
    /// The root that the path leads to.
    pub(super) root: Certificate,
}

impl Material {
    /// Checks every part and how they fit.
    pub(super) fn verify(&self, now: SystemTime, expiry: Expiry) -> Result<Verified, BundleError> {
        let certificate = self.certificates(&self.certificate)?;
        let certificate = certificate.into_iter().next();
        let certificate =
            certificate.ok_or_else(|| self.error(&self.certificate.name, Problem::Empty("certificate")))?;
        if !certificate.is_ca {
            return Err(self.error(&self.certificate.name, Problem::NoAuthority));
        }
        let key = PrivateKey::from_pem(&self.key).map_err(|error| self.error(&self.key_name, Problem::Key(error)))?;
        if key.public() != certificate.public_key {
            return Err(self.error(&self.key_name, Problem::OtherKey));
        }
        let chain = self.certificates(&self.chain)?;
        let roots = self.certificates(&self.roots)?;
        if roots.is_empty() {
            return Err(self.error(&self.roots.name, Problem::Empty("certificate")));
        }
        let path = path(&certificate, &chain, &roots, now, expiry)
            .map_err(|why| self.error(&self.certificate.name, Problem::NoPath(why)))?;
        if let Some(revoked) = &self.revoked {
            self.verify_lists(revoked, &chain)?;
        }
        let holds_until = path.iter().map(|one| one.not_after).min();
        let root = path.last().map_or_else(|| certificate.clone(), |root| (*root).clone());
        Ok(Verified {
            holds_until: holds_until.unwrap_or(certificate.not_after),
            root,
            certificate,
            key,
            chain,
            roots,
        })
    }

    fn certificates(&self, part: &Part) -> Result<Vec<Certificate>, BundleError> {
        Certificate::all_from_pem(&part.pem).map_err(|why| self.error(&part.name, Problem::Unreadable(why)))
    }

    /// Envoy takes a list for one CA of a chain to mean that there is one for each; if not, it refuses everybody.
    fn verify_lists(&self, revoked: &Part, chain: &[Certificate]) -> Result<(), BundleError> {
        let mut lists = Vec::new();
        for list in CertificateRevocationListDer::pem_slice_iter(&revoked.pem) {
            lists.push(list.map_err(|error| self.error(&revoked.name, Problem::Unreadable(error.to_string())))?);
        }
        if lists.is_empty() {
            return Err(self.error(&revoked.name, Problem::Empty("X509 CRL")));
        }
        match chain
            .iter()
            .find(|one| !lists.iter().any(|list| one.has_signed_list(list)))
        {
            Some(without) => Err(self.error(&revoked.name, Problem::NoList(without.name.clone()))),
            None => Ok(()),
        }
    }

    pub(super) fn error(&self, name: &SmolStr, problem: Problem) -> BundleError {
        BundleError {
            place: self.place.clone(),
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
    expiry: Expiry,
) -> Result<Vec<&'a Certificate>, String> {
    let counts = |one: &Certificate| expiry == Expiry::Ignored || one.holds_at(now);
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
        if path.len() >= PATH_MAX || last.is_self_issued() && path.len() > 1 {
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
