//! The secure port of the daemon: certificates for authenticated callers, and configuration for proxies with matching
//! identities.

pub(crate) mod authority;
mod folder;
mod kubernetes;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [folder::trials(), kubernetes::trials()].into_iter().flatten().collect()
}
