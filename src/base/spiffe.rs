//! SPIFFE ids of service accounts: `spiffe://TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.

use std::{fmt, str::FromStr};

use smol_str::SmolStr;

use super::Namespace;

/// Prefix of every id.
pub const SCHEME: &str = "spiffe://";

/// The id of a service account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpiffeId {
    /// Trust domain as in ids: `@` of the mesh config's domain becomes `.`.
    pub trust_domain: SmolStr,
    /// The namespace.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
}

/// Reason why a text is not an id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the id of a service account, want spiffe://TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT")]
pub struct SpiffeError(pub String);

impl SpiffeId {
    /// Returns the id of an account in a trust domain of the mesh config.
    pub fn new(trust_domain: &str, namespace: Namespace, service_account: SmolStr) -> Self {
        Self {
            trust_domain: trust_domain.replace('@', ".").into(),
            namespace,
            service_account,
        }
    }
}

impl FromStr for SpiffeId {
    type Err = SpiffeError;

    fn from_str(id: &str) -> Result<Self, SpiffeError> {
        let parts: Option<Vec<&str>> = id.strip_prefix(SCHEME).map(|path| path.split('/').collect());
        match parts.as_deref() {
            Some(&[trust_domain, "ns", namespace, "sa", account]) => Ok(Self {
                trust_domain: trust_domain.into(),
                namespace: Namespace::new(namespace),
                service_account: account.into(),
            }),
            _ => Err(SpiffeError(id.to_owned())),
        }
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            trust_domain,
            namespace,
            service_account,
        } = self;
        write!(f, "{SCHEME}{trust_domain}/ns/{namespace}/sa/{service_account}")
    }
}

/// Returns the trust domain of any SPIFFE id, even one without a service account.
pub fn trust_domain(id: &str) -> Option<&str> {
    id.strip_prefix(SCHEME)?
        .split('/')
        .next()
        .filter(|domain| !domain.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_five_parts() {
        let id: SpiffeId = "spiffe://cluster.local/ns/default/sa/reviews".parse().expect("an id");
        assert_eq!(id.to_string(), "spiffe://cluster.local/ns/default/sa/reviews");
        for bad in [
            "",
            "spiffe://cluster.local/ns/default/sa",
            "spiffe://cluster.local/ns/default/sa/a/b",
            "spiffe://cluster.local/sa/a/ns/b",
            "https://cluster.local/ns/default/sa/a",
        ] {
            assert!(bad.parse::<SpiffeId>().is_err(), "{bad}");
        }
        assert_eq!(trust_domain("spiffe://other/workload"), Some("other"));
        assert_eq!(trust_domain("spiffe:///x"), None);
    }

    #[test]
    fn the_domain_of_the_mesh_config_is_written_without_at() {
        let id = SpiffeId::new("user@project", Namespace::new("a"), "b".into());
        assert_eq!(id.to_string(), "spiffe://user.project/ns/a/sa/b");
    }
}
