//! Why a document could not be had.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

/// Why a document could not be had; the text is for whoever wrote the URL. It holds nothing that a server said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The URL makes no sense.
    #[error("invalid URL: {0}")]
    Url(String),
    /// The host has no address.
    #[error("cannot resolve {host}: {reason}")]
    Resolve {
        /// The host.
        host: String,
        /// What the resolver said.
        reason: String,
    },
    /// Every address of the host is one that must not be connected to.
    #[error("{host} resolves to blocked address {address} ({range})")]
    Blocked {
        /// The host as the URL names it.
        host: String,
        /// Its address.
        address: IpAddr,
        /// The range that blocks it.
        range: IpNet,
    },
    /// No connection could be made.
    #[error("cannot connect to {host}: {reason}")]
    Connect {
        /// The host, or the proxy on the way to it.
        host: String,
        /// What went wrong.
        reason: String,
    },
    /// The server could not be verified, or TLS failed otherwise.
    #[error("TLS with {host} failed: {reason}")]
    Tls {
        /// The host.
        host: String,
        /// What went wrong.
        reason: String,
    },
    /// The server does not speak HTTP, or stopped in the middle.
    #[error("invalid HTTP response: {0}")]
    Http(String),
    /// The server answered, but not with the document.
    #[error("server returned status {0}")]
    Status(u16),
    /// A redirect that is not followed.
    #[error("refused to follow a redirect: {0}")]
    Redirect(String),
    /// The body is larger than it may be, in bytes.
    #[error("document exceeds {0} bytes")]
    TooLarge(usize),
    /// It took longer than it may.
    #[error("no response within {0:?}")]
    Timeout(Duration),
}
