//! A realistic mesh. Every pod is a network namespace with an address, an application and a sidecar, and iptables rules
//! redirect its traffic. Kubernetes is real, and so are the tokens with which agents request certificates.

mod agent;
mod ambient;
mod app;
mod cluster;
mod convergence;
mod endpoints;
mod hbone;
mod host;
mod identity;
mod injected;
mod mesh;
mod pods;
mod proxy;
mod report;
mod rules;
mod scenario;
mod sds;
mod soak;
mod state;
mod tunnel;
mod ztunnel;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [
        identity::trials(),
        hbone::trials(),
        ambient::trials(),
        scenario::trials(),
        soak::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the missing component of the lab, if there is one.
fn missing_component() -> Option<&'static str> {
    if crate::support::envoy::binary().is_none() {
        return Some("Envoy is missing; `make tools` installs it");
    }
    if !crate::support::helm::is_installed() {
        return Some("Helm is missing; `make tools` installs it");
    }
    if !rules::is_installed() {
        return Some("iptables is missing; `make tools` installs it");
    }
    crate::support::netns::unavailable()
}
