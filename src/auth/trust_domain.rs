//! Which trust domains are ours.

use smol_str::SmolStr;

use crate::base::{Namespace, spiffe::SpiffeId};

/// The trust domains of the mesh, as the mesh config has them. Live: whoever needs them holds a `watch::Receiver` of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustDomains {
    /// `trustDomain`; `cluster.local` if nothing says so.
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
    /// The id of an account of ours.
    pub fn id(&self, namespace: Namespace, service_account: SmolStr) -> SpiffeId {
        SpiffeId::new(&self.own, namespace, service_account)
    }

    /// Whether a domain, as it stands in ids, is the own one or an alias.
    pub fn holds(&self, domain: &str) -> bool {
        let mut known = std::iter::once(&self.own).chain(&self.aliases);
        known.any(|known| known.replace('@', ".") == domain)
    }
}
