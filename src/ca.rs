//! The certificate authority of the mesh: trusted roots, signing, and the certificate service for workloads.

pub mod authority;
pub mod authority_selector;
pub mod bundle;
pub mod certificate;
mod channel;
mod der;
pub mod files;
#[cfg(test)]
mod fixture;
pub mod impersonation;
pub mod key;
pub mod local;
pub mod mesh_trust;
pub mod metrics;
pub mod multi_root;
pub mod plugged_in;
pub mod registration;
pub mod rotate;
pub mod secrets;
pub mod self_signed;
pub mod server;
pub mod serving;
pub mod signing;

use bytes::Bytes;

/// The trusted roots of the mesh at one point in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    /// All roots, as PEM.
    pub roots: Bytes,
    /// The certificate revocation lists as PEM (`ca-crl.pem`); empty if there are none, `None` while they are unknown.
    pub crl: Option<Bytes>,
}
