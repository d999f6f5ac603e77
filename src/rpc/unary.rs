//! Unary methods: one request message, one response message.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use futures::future::BoxFuture;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use prometheus::IntCounter;
use tonic::Status;

use super::{
    Peer, UnauthenticatedConnection, credentials,
    framing::{PREFIX_LEN, Prefix},
};
use crate::auth::Credentials;

/// The time limit for the arrival of a request message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// A unary method.
pub trait Unary: Send + Sync {
    /// Returns the path: `/package.Service/Method`.
    fn path(&self) -> &'static str;
    /// Answers a call with an encoded message.
    fn call(&self, call: Call) -> BoxFuture<'_, Result<Bytes, Status>>;
}

type Body = Pin<Box<dyn http_body::Body<Data = Bytes, Error = String> + Send>>;

/// A call. Its message is not read before [`Self::message`] is called.
pub struct Call {
    peer: Option<Peer>,
    headers: HeaderMap,
    pre_auth: Option<Arc<UnauthenticatedConnection>>,
    body: Body,
    /// Counts the message when it is read.
    received: Option<IntCounter>,
}

impl Call {
    /// Creates a call from a request.
    pub fn new<B>(request: Request<B>) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let (mut parts, body) = request.into_parts();
        Self {
            peer: parts.extensions.remove(),
            pre_auth: parts.extensions.remove(),
            headers: parts.headers,
            body: Box::pin(body.map_err(|error| error.to_string())),
            received: None,
        }
    }

    /// Counts the message when it is read.
    pub(super) fn count_message(&mut self, received: IntCounter) {
        self.received = Some(received);
    }

    /// Returns the credentials of the caller.
    pub fn credentials(&self) -> Credentials<'_> {
        credentials(self.peer.as_ref(), &self.headers)
    }

    /// Records that the caller is authenticated: its connection leaves the pre-authentication limits.
    pub fn admit(&self) {
        if let Some(pre_auth) = &self.pre_auth {
            pre_auth.admit();
            pre_auth.lift_read_limit();
        }
    }

    /// Records a call with invalid credentials. Many of these end the connection.
    pub fn record_violation(&self) {
        if let Some(pre_auth) = &self.pre_auth {
            pre_auth.record_violation();
        }
    }

    /// Reads the message, which may have at most `limit_bytes` bytes.
    pub async fn message(&mut self, limit_bytes: usize) -> Result<Bytes, Status> {
        tokio::time::timeout(MESSAGE_TIMEOUT, self.read(limit_bytes))
            .await
            .map_err(|_| Status::deadline_exceeded("the request did not arrive in time"))?
    }

    async fn read(&mut self, limit_bytes: usize) -> Result<Bytes, Status> {
        let mut buffer = BytesMut::new();
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| Status::cancelled(format!("the request ended early: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if buffer.len() + data.len() > PREFIX_LEN + limit_bytes {
                let message = format!("the request has more than {limit_bytes} bytes");
                return Err(Status::resource_exhausted(message));
            }
            buffer.extend_from_slice(&data);
        }
        let short = || Status::internal("the request ends in the middle of a message");
        let prefix = Prefix::read(&buffer).ok_or_else(short)?;
        if prefix.is_compressed {
            return Err(Status::unimplemented("compressed requests are not supported"));
        }
        buffer.advance(PREFIX_LEN);
        if prefix.size_bytes != buffer.len() {
            return Err(short());
        }
        if let Some(received) = &self.received {
            received.inc();
        }
        Ok(buffer.freeze())
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use tonic::Code;

    use super::*;

    async fn read(bytes: &'static [u8]) -> Result<Bytes, Code> {
        let mut call = Call::new(Request::new(Full::new(Bytes::from_static(bytes))));
        call.message(4).await.map_err(|status| status.code())
    }

    #[tokio::test]
    async fn a_call_has_exactly_one_message() {
        assert_eq!(read(b"\0\0\0\0\x02ab").await, Ok(Bytes::from_static(b"ab")));
        assert_eq!(read(b"\0\0\0\0\0").await, Ok(Bytes::new()));
        for short in [&b""[..], b"\0", b"\0\0\0\0", b"\0\0\0\0\x03ab", b"\0\0\0\0\x01ab"] {
            assert_eq!(read(short).await, Err(Code::Internal), "{short:?}");
        }
        assert_eq!(read(b"\0\0\0\0\x05abcde").await, Err(Code::ResourceExhausted));
        assert_eq!(read(b"\x01\0\0\0\x01a").await, Err(Code::Unimplemented));
    }
}
