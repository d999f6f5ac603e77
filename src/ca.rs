//! The mesh's certificate authority: which roots the mesh trusts, who signs, and the service that workloads ask.

pub mod authority;
pub mod bundle;
pub mod certificate;
mod der;
pub mod files;
#[cfg(test)]
mod fixture;
pub mod impersonation;
pub mod keeper;
pub mod key;
pub mod local;
pub mod mesh_trust;
pub mod metrics;
pub mod multi_root;
pub mod plugged_in;
pub mod registration;
pub mod root;
pub mod rotate;
pub mod secrets;
pub mod self_signed;
pub mod server;
pub mod serving;
pub mod signing;

use bytes::Bytes;
use tokio::sync::watch;

/// What the mesh trusts at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    /// All roots, as PEM.
    pub roots: Bytes,
    /// What was revoked, as PEM (`ca-crl.pem`); none if nothing says so.
    pub revoked: Option<Bytes>,
}

/// Completes when there is news; never if there will be none any more.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
