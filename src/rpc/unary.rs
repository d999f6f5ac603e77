//! Methods that answer one message with one.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::future::BoxFuture;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use tonic::Status;

use super::{Guest, Peer, credentials};
use crate::auth::Credentials;

/// Of a gRPC message: one byte that says whether it is compressed, four of length.
const PREFIX_LEN: usize = 5;
/// How long a message may take to come.
const MESSAGE_PATIENCE: Duration = Duration::from_secs(10);

/// A method.
pub trait Unary: Send + Sync {
    /// `/package.Service/Method`.
    fn path(&self) -> &'static str;
    /// Answers a message with the bytes of another.
    fn call(&self, call: Call) -> BoxFuture<'_, Result<Bytes, Status>>;
}

type Body = Pin<Box<dyn http_body::Body<Data = Bytes, Error = String> + Send>>;

/// A call. Nothing of its message is read before [`Self::message`] is asked for.
pub struct Call {
    peer: Option<Peer>,
    headers: HeaderMap,
    guest: Option<Arc<Guest>>,
    body: Body,
}

impl Call {
    /// The call that a request makes.
    pub fn new<B>(request: Request<B>) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let (mut parts, body) = request.into_parts();
        Self {
            peer: parts.extensions.remove(),
            guest: parts.extensions.remove(),
            headers: parts.headers,
            body: Box::pin(body.map_err(|error| error.to_string())),
        }
    }

    /// What the call shows of its caller.
    pub fn credentials(&self) -> Credentials<'_> {
        credentials(self.peer.as_ref(), &self.headers)
    }

    /// The caller is known: its connection is not a stranger's any more.
    pub fn admit(&self) {
        if let Some(guest) = &self.guest {
            guest.admit();
            guest.serve();
        }
    }

    /// The caller is not known: a connection that makes many such calls ends.
    pub fn offend(&self) {
        if let Some(guest) = &self.guest {
            guest.offend();
        }
    }

    /// The message, which may have so many bytes.
    pub async fn message(&mut self, limit_bytes: usize) -> Result<Bytes, Status> {
        tokio::time::timeout(MESSAGE_PATIENCE, self.read(limit_bytes))
            .await
            .map_err(|_| Status::deadline_exceeded("the request did not come in time"))?
    }

    async fn read(&mut self, limit_bytes: usize) -> Result<Bytes, Status> {
        let mut buffer = BytesMut::new();
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| Status::cancelled(format!("the request broke off: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if buffer.len() + data.len() > PREFIX_LEN + limit_bytes {
                let message = format!("the request has more than {limit_bytes} bytes");
                return Err(Status::resource_exhausted(message));
            }
            buffer.extend_from_slice(&data);
        }
        let short = || Status::internal("the request ends in the middle of a message");
        let compressed = buffer.try_get_u8().map_err(|_| short())?;
        let size_bytes = buffer.try_get_u32().map_err(|_| short())?;
        if compressed != 0 {
            return Err(Status::unimplemented("compressed requests are not offered"));
        }
        if size_bytes as usize != buffer.len() {
            return Err(short());
        }
        Ok(buffer.freeze())
    }
}

/// A message with its prefix.
pub fn framed(message: &[u8]) -> Result<Bytes, Status> {
    let len = u32::try_from(message.len()).map_err(|_| Status::internal("the response is too large"))?;
    let mut bytes = BytesMut::with_capacity(PREFIX_LEN + message.len());
    bytes.put_u8(0);
    bytes.put_u32(len);
    bytes.put_slice(message);
    Ok(bytes.freeze())
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
    async fn one_message_and_no_more() {
        assert_eq!(read(b"\0\0\0\0\x02ab").await, Ok(Bytes::from_static(b"ab")));
        assert_eq!(read(b"\0\0\0\0\0").await, Ok(Bytes::new()));
        for short in [&b""[..], b"\0", b"\0\0\0\0", b"\0\0\0\0\x03ab", b"\0\0\0\0\x01ab"] {
            assert_eq!(read(short).await, Err(Code::Internal), "{short:?}");
        }
        assert_eq!(read(b"\0\0\0\0\x05abcde").await, Err(Code::ResourceExhausted));
        assert_eq!(read(b"\x01\0\0\0\x01a").await, Err(Code::Unimplemented));
    }
}
