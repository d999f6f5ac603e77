//! Trust domains: identities of the mesh's own domain and of its aliases mean the same.

use crate::proto::istio::mesh::v1alpha1::MeshConfig;

/// Stands for the mesh's own trust domain, whatever its name.
const LOCAL: &str = "cluster.local";

/// The domains of the mesh, its own first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrustDomains<'m>(Vec<&'m str>);

impl<'m> TrustDomains<'m> {
    /// Those of a mesh.
    pub(crate) fn of(mesh: &'m MeshConfig) -> Self {
        let own = std::iter::once(&mesh.trust_domain);
        Self(own.chain(&mesh.trust_domain_aliases).map(String::as_str).collect())
    }

    /// No domains: identities mean what is written.
    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    /// Principals (`<trust domain>/ns/<namespace>/sa/<account>`) with those of the other domains beside them. Principals
    /// of other forms, of any domain (`*/ns/…`) and of foreign domains stay as they are.
    pub(crate) fn expand_principals(&self, principals: &[String]) -> Vec<String> {
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
            // What the star covers needs no entry of its own.
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

    /// Names of trust domains with the others beside those of the mesh.
    pub(crate) fn expand_domains(&self, domains: &[String]) -> Vec<String> {
        let mut expanded: Vec<String> = Vec::new();
        for domain in domains {
            let is_own = self.0.contains(&domain.as_str());
            let names = if is_own { self.0.clone() } else { vec![domain.as_str()] };
            for name in names {
                if !expanded.iter().any(|known| known == name) {
                    expanded.push(name.to_owned());
                }
            }
        }
        expanded
    }
}

/// True if a domain matches a pattern that ends with a star.
fn begins_as(domain: &str, pattern: &str) -> bool {
    pattern
        .strip_suffix('*')
        .is_some_and(|prefix| domain.starts_with(prefix))
}

/// True if a pattern with a star at one end covers a domain. Aliases may be patterns too.
fn covers(pattern: &str, domain: &str) -> bool {
    begins_as(domain, pattern) || ends_as(domain, pattern)
}

/// True if a domain matches a pattern that begins with a star.
fn ends_as(domain: &str, pattern: &str) -> bool {
    pattern.strip_prefix('*').is_some_and(|suffix| domain.ends_with(suffix))
}
