//! Trust domains: identities of the mesh's own domain and of its aliases are equivalent.

use std::collections::BTreeSet;

use crate::proto::istio::mesh::v1alpha1::MeshConfig;

/// Refers to the mesh's own trust domain, whatever its name.
const LOCAL: &str = "cluster.local";

/// Trust domains of the mesh, its own first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MeshTrustDomains<'m>(Vec<&'m str>);

impl<'m> MeshTrustDomains<'m> {
    /// Returns the trust domains of a mesh.
    pub(crate) fn of(mesh: &'m MeshConfig) -> Self {
        let own = std::iter::once(&mesh.trust_domain);
        Self(own.chain(&mesh.trust_domain_aliases).map(String::as_str).collect())
    }

    /// Returns no domains: identities have no equivalents.
    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    /// Adds equivalent principals (`<trust domain>/ns/<namespace>/sa/<account>`). Principals of other forms, of any
    /// domain (`*/ns/…`) and of foreign domains stay unchanged.
    pub(super) fn expand_principals(&self, principals: &[String]) -> Vec<String> {
        principals
            .iter()
            .flat_map(|principal| self.expanded(principal))
            .collect()
    }

    fn expanded(&self, principal: &str) -> Vec<String> {
        let has_domain = principal.split('/').count() == 5;
        let parts = principal.split_once('/').filter(|_| has_domain);
        let Some((domain, rest)) = parts.filter(|(domain, _)| *domain != "*" && !self.0.is_empty()) else {
            return vec![principal.to_owned()];
        };
        let is_known = domain == LOCAL
            || self
                .0
                .iter()
                .any(|own| *own == domain || covers(domain, own) || covers(own, domain));
        if !is_known {
            return vec![principal.to_owned()];
        }
        let mut expanded = Vec::new();
        for own in &self.0 {
            // A principal that the star covers needs no entry of its own.
            let name = if ends_as(own, domain) {
                principal.to_owned()
            } else {
                format!("{own}/{rest}")
            };
            if !expanded.contains(&name) {
                expanded.push(name);
            }
        }
        expanded
    }

    /// Adds the mesh's other trust domains to those that are named, without duplicates. A policy may name very many.
    pub(super) fn expand_domains(&self, domains: &[String]) -> Vec<String> {
        let (mut known, mut expanded) = (BTreeSet::new(), Vec::new());
        for domain in domains {
            let is_own = self.0.contains(&domain.as_str());
            let names = if is_own { self.0.clone() } else { vec![domain.as_str()] };
            let new = names.into_iter().filter(|name| known.insert(*name));
            expanded.extend(new.map(str::to_owned));
        }
        expanded
    }
}

/// Returns true if a domain matches a pattern with a star at its end.
fn begins_as(domain: &str, pattern: &str) -> bool {
    pattern
        .strip_suffix('*')
        .is_some_and(|prefix| domain.starts_with(prefix))
}

/// Returns true if a pattern with a star at one end covers a domain. Aliases may be patterns too.
fn covers(pattern: &str, domain: &str) -> bool {
    begins_as(domain, pattern) || ends_as(domain, pattern)
}

/// Returns true if a domain matches a pattern with a star at its start.
fn ends_as(domain: &str, pattern: &str) -> bool {
    pattern.strip_prefix('*').is_some_and(|suffix| domain.ends_with(suffix))
}
