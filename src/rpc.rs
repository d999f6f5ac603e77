//! gRPC over HTTP/2: connections, credentials of their peers, routing by path, and simple methods. The messages of
//! streaming methods belong to the services that implement them.
//!
//! A connection is unauthenticated until one of its streams is admitted. Until then it holds little memory, has a short
//! timeout, and is evicted first when there are too many of its kind.

pub mod accept;
pub mod body;
mod call_metrics;
pub mod connection;
mod data_parts;
mod exchange;
mod frame;
mod frame_budget;
pub mod framing;
mod handoff;
pub mod pre_auth;
pub mod router;
mod server_stream;
mod socket;
mod status;
mod transport;
pub mod unary;

use std::{net::SocketAddr, sync::Arc};

use http::{HeaderMap, HeaderValue, header};

use crate::auth::{Credentials, tls::PeerCertificate};

pub use accept::{Accepting, Established};
pub use call_metrics::{CallMetrics, Measured};
pub use connection::{Connections, Service, Shedding};
pub use exchange::Exchange;
pub use pre_auth::{PreAuthLimiter, ServedStream, UnauthenticatedConnection};
pub use router::{Router, StreamService};
pub use server_stream::{Messages, ServerStream};
pub use status::{code_name, headers, trailers_only};
pub use unary::{Call, Unary};

/// The content type of gRPC responses.
pub const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// The peer of a connection, in the extensions of its requests. A request without it has an unknown peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// True if the connection is encrypted.
    pub is_tls: bool,
    /// Its verified certificate.
    pub certificate: Option<Arc<PeerCertificate>>,
}

impl Peer {
    /// Returns the peer of a connection that is not encrypted.
    pub fn plaintext(address: SocketAddr) -> Self {
        Self {
            address,
            is_tls: false,
            certificate: None,
        }
    }
}

/// Returns the credentials that a request carries.
pub fn credentials<'a>(peer: Option<&'a Peer>, headers: &'a HeaderMap) -> Credentials<'a> {
    Credentials {
        address: peer.map(|peer| peer.address),
        is_tls: peer.is_some_and(|peer| peer.is_tls),
        certificate: peer.and_then(|peer| peer.certificate.as_ref()),
        headers,
    }
}

/// Returns true if the content type is that of a gRPC request.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = content_type.and_then(|content_type| content_type.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest, [] | b"+proto" | [b';', ..]))
}
