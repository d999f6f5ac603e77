//! A mesh as it runs: every pod is a network namespace with an address, an application and a sidecar to which iptables
//! lead its traffic; Kubernetes is real, and so are the tokens by which agents get their certificates.

mod agent;
mod app;
mod capture;
mod host;
mod identity;
mod pod;
mod sds;
mod tunnel;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    identity::trials()
}

/// What the lab needs and is not here, if so.
fn lacking() -> Option<&'static str> {
    if crate::support::envoy::binary().is_none() {
        return Some("there is no Envoy; `make tools` installs it");
    }
    if !capture::is_installed() {
        return Some("there is no iptables; `make tools` installs it");
    }
    crate::support::netns::lacking()
}
