//! SPIFFE identities of service accounts.

use smol_str::SmolStr;

use crate::base::{Namespace, SpiffeId};

/// Returns the SPIFFE identity of a service account. Parity (pkg/spiffe/spiffe.go): returned even for an empty account.
pub fn spiffe_id(trust_domain: &str, namespace: &Namespace, account: &str) -> SmolStr {
    let id = SpiffeId::new(trust_domain, namespace.clone(), SmolStr::new(account));
    SmolStr::from(id.to_string())
}
