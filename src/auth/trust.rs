//! The trusted roots of each trust domain.
//!
//! Note: there is no pool of all roots. A root is valid only for the trust domains it is configured for, so that a
//! federated mesh cannot issue identities of this mesh.

use std::collections::BTreeMap;

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use smol_str::SmolStr;

/// The trusted roots at one point in time. Replaced as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustPools {
    /// Sorted, unique roots by trust domain as written in SPIFFE ids. Other trust domains are not trusted.
    pub domains: BTreeMap<SmolStr, Vec<CertificateDer<'static>>>,
    /// The CRLs. Each one applies to certificates of its issuer.
    pub crls: Vec<CertificateRevocationListDer<'static>>,
}

impl TrustPools {
    /// Returns the roots of a trust domain; empty if it is unknown.
    pub fn roots(&self, trust_domain: &str) -> &[CertificateDer<'static>] {
        self.domains.get(trust_domain).map_or(&[], Vec::as_slice)
    }
}
