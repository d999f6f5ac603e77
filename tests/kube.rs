//! The daemon with a real Kubernetes API server.

mod cluster;
mod remote_secret;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [cluster::trials(), remote_secret::trials()]
        .into_iter()
        .flatten()
        .collect()
}
