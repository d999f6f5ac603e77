//! TLS as a server: what is presented, and what a client's certificate says.

use std::{sync::Arc, time::SystemTime};

use bytes::Bytes;
use rustls::sign::CertifiedKey;
use smol_str::SmolStr;

/// What the control plane presents to its clients. Swapped as a whole; connections keep what they began with.
#[derive(Clone)]
pub struct ServingCertificate {
    /// The chain and its key.
    pub key: Arc<CertifiedKey>,
    /// What clients verify the chain against, as PEM: published in ConfigMaps and webhooks.
    pub roots: Bytes,
    /// When the leaf expires.
    pub expires_at: SystemTime,
}

/// The certificate of a client, verified when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCertificate {
    /// The URI, DNS and IP names of the leaf, in its order.
    pub identities: Vec<SmolStr>,
    /// When the leaf expires.
    pub expires_at: SystemTime,
}
