//! gRPC over HTTP/2: connections, who is on their other side, and methods that answer one message with one. What streams
//! say is up to those who serve them.
//!
//! A connection is a stranger until a stream of it was admitted: then it holds little memory, is not waited for long, and
//! gives way to newer ones when there are many of its kind.

pub mod connection;
mod gate;
pub mod lobby;
mod place;
mod socket;
pub mod unary;

use std::{net::SocketAddr, sync::Arc};

use http::{HeaderMap, HeaderValue, header};
use tonic::{Code, Status};

use crate::auth::{Credentials, tls::PeerCertificate};

pub use connection::{Connections, Service};
pub use lobby::Guest;
pub use unary::{Call, Unary};

/// The content type of answers.
pub const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// What is known of the other side of a connection; a request without it in its extensions has an unknown peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// The connection is encrypted.
    pub is_tls: bool,
    /// Its certificate, verified.
    pub certificate: Option<Arc<PeerCertificate>>,
}

impl Peer {
    /// The other side of a connection that is not encrypted.
    pub fn plaintext(address: SocketAddr) -> Self {
        Self {
            address,
            is_tls: false,
            certificate: None,
        }
    }
}

/// What a request shows of its caller.
pub fn credentials<'a>(peer: Option<&'a Peer>, headers: &'a HeaderMap) -> Credentials<'a> {
    Credentials {
        address: peer.map(|peer| peer.address),
        is_tls: peer.is_some_and(|peer| peer.is_tls),
        certificate: peer.and_then(|peer| peer.certificate.as_ref()),
        headers,
    }
}

/// A status as the headers or trailers that carry it.
pub fn headers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        headers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Internal as i32));
    }
    headers
}

/// True for gRPC requests, as their content type says.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = content_type.and_then(|content_type| content_type.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest, [] | b"+proto" | [b';', ..]))
}
