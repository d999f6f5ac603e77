//! Errors of fetching documents.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

/// Reason why a document could not be fetched, for the author of the URL. It contains no text of a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The URL is invalid.
    #[error("invalid URL: {0}")]
    Url(String),
    /// The host has no address.
    #[error("cannot resolve {host}: {reason}")]
    Resolve {
        /// Host.
        host: String,
        /// Error of the resolver.
        reason: String,
    },
    /// Every address of the host is blocked.
    #[error("{host} resolves to blocked address {address} ({range})")]
    Blocked {
        /// Host as in the URL.
        host: String,
        /// Address.
        address: IpAddr,
        /// Range that blocks it.
        range: IpNet,
    },
    /// The connection failed.
    #[error("cannot connect to {host}: {reason}")]
    Connect {
        /// Host, or the proxy.
        host: String,
        /// Reason.
        reason: String,
    },
    /// The server could not be verified, or TLS failed otherwise.
    #[error("TLS with {host} failed: {reason}")]
    Tls {
        /// Host.
        host: String,
        /// Reason.
        reason: String,
    },
    /// The response was not HTTP, or ended early.
    #[error("invalid HTTP response: {0}")]
    Http(String),
    /// The response was not the document.
    #[error("server returned status {0}")]
    Status(u16),
    /// A redirect that is not followed.
    #[error("refused to follow a redirect: {0}")]
    Redirect(String),
    /// The body exceeds its limit in bytes.
    #[error("document exceeds {0} bytes")]
    TooLarge(usize),
    /// The timeout expired.
    #[error("no response within {0:?}")]
    Timeout(Duration),
}
