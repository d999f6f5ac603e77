//! The daemon with a real Kubernetes API server.

mod authority;
mod callers;
mod cluster;
mod edits;
mod faults;
mod gateways;
mod mesh;
mod remote;
mod remote_secret;
mod signers;
mod status;
mod stored_state;
pub(crate) mod tenant;
mod tokens;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [
        authority::trials(),
        cluster::trials(),
        callers::trials(),
        mesh::trials(),
        edits::trials(),
        faults::trials(),
        gateways::trials(),
        remote::trials(),
        remote_secret::trials(),
        signers::trials(),
        status::trials(),
        stored_state::trials(),
        tokens::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
