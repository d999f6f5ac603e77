//! A mesh as it runs: every pod is a network namespace with an address, an application and a sidecar to which iptables
//! lead its traffic; Kubernetes is real, and so are the tokens by which agents get their certificates.

mod agent;
mod app;
mod convergence;
mod endpoints;
mod host;
mod identity;
mod mesh;
mod proxy;
mod report;
mod rules;
mod scenario;
mod sds;
mod site;
mod soak;
mod state;
mod tunnel;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [identity::trials(), scenario::trials(), soak::trials()]
        .into_iter()
        .flatten()
        .collect()
}

/// What the lab needs and is not here, if so.
fn lacking() -> Option<&'static str> {
    if crate::support::envoy::binary().is_none() {
        return Some("there is no Envoy; `make tools` installs it");
    }
    if !rules::is_installed() {
        return Some("there is no iptables; `make tools` installs it");
    }
    crate::support::netns::lacking()
}
