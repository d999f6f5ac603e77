//! The daemon with a real Kubernetes API server.

mod authority;
mod callers;
mod cluster;
mod conditions;
mod distribution;
mod edits;
mod faults;
mod gateway_status;
mod gateways;
mod inference;
mod mesh;
mod remote;
mod remote_secret;
mod replicas;
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
        conditions::trials(),
        callers::trials(),
        distribution::trials(),
        mesh::trials(),
        edits::trials(),
        faults::trials(),
        gateway_status::trials(),
        gateways::trials(),
        inference::trials(),
        remote::trials(),
        remote_secret::trials(),
        replicas::trials(),
        signers::trials(),
        status::trials(),
        stored_state::trials(),
        tokens::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
