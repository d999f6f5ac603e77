//! The trust domains of the mesh.

use smol_str::SmolStr;

use crate::base::{Namespace, spiffe::SpiffeId};

/// The trust domain of the mesh and its aliases, from the mesh config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustDomains {
    /// `trustDomain`; default `cluster.local`.
    pub own: SmolStr,
    /// `trustDomainAliases`.
    pub aliases: Vec<SmolStr>,
}

impl Default for TrustDomains {
    fn default() -> Self {
        Self {
            own: SmolStr::new_static("cluster.local"),
            aliases: Vec::new(),
        }
    }
}

impl TrustDomains {
    /// Returns the SPIFFE id of a service account in the mesh's own trust domain.
    pub fn id(&self, namespace: Namespace, service_account: SmolStr) -> SpiffeId {
        SpiffeId::new(&self.own, namespace, service_account)
    }

    /// Returns true if a domain, as written in SPIFFE ids, is the own trust domain or an alias.
    pub fn contains(&self, domain: &str) -> bool {
        let mut known = std::iter::once(&self.own).chain(&self.aliases);
        known.any(|known| known.replace('@', ".") == domain)
    }
}
