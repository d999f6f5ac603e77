//! The daemon with a real Kubernetes API server.

mod cluster;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    cluster::trials()
}
