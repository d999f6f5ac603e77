//! Whom a client certificate may be signed by: roots for each trust domain.
//!
//! What a reader would get wrong: there is no pool of all roots. A root vouches only for the trust domains it was given for,
//! so that a federated mesh cannot sign for ours.

use std::collections::BTreeMap;

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use smol_str::SmolStr;

/// The roots at one time. Swapped as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustPools {
    /// Roots by trust domain as it stands in SPIFFE ids, sorted and unique. A domain that is not here is trusted by nobody.
    pub domains: BTreeMap<SmolStr, Vec<CertificateDer<'static>>>,
    /// What was revoked. A list counts for certificates that its issuer signed.
    pub revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl TrustPools {
    /// The roots of a trust domain; empty if it is unknown.
    pub fn roots(&self, trust_domain: &str) -> &[CertificateDer<'static>] {
        self.domains.get(trust_domain).map_or(&[], Vec::as_slice)
    }
}
