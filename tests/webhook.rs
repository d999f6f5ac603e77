//! The admission webhooks: verdicts about objects, the HTTPS server, and real API servers that call them.

mod cluster;
mod files;
mod injection;
mod server;
mod verdicts;

use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    [
        verdicts::trials(),
        server::trials(),
        cluster::trials(),
        files::trials(),
        injection::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
