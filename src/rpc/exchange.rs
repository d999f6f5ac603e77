//! Bidirectional methods that answer each request message with one message.
//!
//! The body of the response reads the next request when the transport has room for an answer, so a stream needs no task
//! and holds one message. Callers need not be authenticated, so all of it is bounded.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use futures::stream;
use http::{Request, Response, header};
use http_body_util::BodyExt;
use tokio::time::timeout;
use tonic::Status;

use super::{
    GRPC, UnauthenticatedConnection,
    body::Body,
    framing::{self, PREFIX_LEN, Prefix},
    headers,
};

/// The time limit for the arrival of a request message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum size of a request message.
const MAX_MESSAGE_BYTES: usize = 4 << 10;
/// The maximum number of messages of a stream.
const MAX_MESSAGES: usize = 1000;

/// A method whose requests are answered one by one.
pub trait Exchange: Send + Sync {
    /// Returns true if this path is a method.
    fn has_method(&self, path: &str) -> bool;
    /// Answers an encoded message with another.
    fn answer(&self, request: Bytes) -> Result<Bytes, Status>;
}

type Requests = Pin<Box<dyn http_body::Body<Data = Bytes, Error = String> + Send>>;

/// Returns the response of a stream.
pub(super) fn respond<M, B>(exchange: Arc<dyn Exchange>, request: Request<B>) -> Response<Body<M>>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: fmt::Display,
{
    let (mut parts, body) = request.into_parts();
    let reader = Reader {
        exchange,
        requests: Box::pin(body.map_err(|error| error.to_string())),
        buffer: BytesMut::new(),
        left: MAX_MESSAGES,
        pre_auth: parts.extensions.remove(),
    };
    let answers = stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        Some(match reader.next().await {
            Ok(Some(answer)) => (Ok(answer), Some(reader)),
            Ok(None) => (Err(headers(&Status::ok(""))), None),
            Err(status) => (Err(headers(&status)), None),
        })
    });
    let mut response = Response::new(Body::of_answers(Box::pin(answers)));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

struct Reader {
    exchange: Arc<dyn Exchange>,
    requests: Requests,
    buffer: BytesMut,
    left: usize,
    /// The connection, whose consumed bytes are counted.
    pre_auth: Option<Arc<UnauthenticatedConnection>>,
}

impl Reader {
    /// Returns the answer to the next request; `None` when the client has closed its side.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let late = |_| Status::deadline_exceeded("the request did not arrive in time");
        let Some(request) = timeout(MESSAGE_TIMEOUT, self.message()).await.map_err(late)?? else {
            return Ok(None);
        };
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| Status::resource_exhausted("the stream has too many requests; open another"))?;
        let answer = self.exchange.answer(request)?;
        let framed = framing::framed(&answer).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Some(framed))
    }

    async fn message(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(prefix) = Prefix::read(&self.buffer) {
                if prefix.is_compressed {
                    return Err(Status::unimplemented("compressed requests are not supported"));
                }
                if prefix.size_bytes > MAX_MESSAGE_BYTES {
                    let message = format!("the request has more than {MAX_MESSAGE_BYTES} bytes");
                    return Err(Status::resource_exhausted(message));
                }
                if self.buffer.len() >= PREFIX_LEN + prefix.size_bytes {
                    self.buffer.advance(PREFIX_LEN);
                    return Ok(Some(self.buffer.split_to(prefix.size_bytes).freeze()));
                }
            }
            match self.requests.frame().await {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Status::internal("the request ends in the middle of a message")),
                Some(Err(error)) => return Err(Status::cancelled(format!("the request ended early: {error}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        if let Some(pre_auth) = &self.pre_auth {
                            pre_auth.record_consumed(data.len());
                        }
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{Full, combinators::UnsyncBoxBody};
    use tonic::Code;

    use super::*;
    use crate::rpc::body::{BufList, Message};

    struct Upper;

    impl Exchange for Upper {
        fn has_method(&self, path: &str) -> bool {
            path == "/a.B/C"
        }

        fn answer(&self, request: Bytes) -> Result<Bytes, Status> {
            match &request[..] {
                b"bad" => Err(Status::invalid_argument("bad")),
                text => Ok(text.to_ascii_uppercase().into()),
            }
        }
    }

    #[derive(Debug)]
    struct Never;

    impl Message for Never {
        fn next_data(&mut self) -> Option<BufList> {
            None
        }
    }

    /// Returns the messages and the status of the answer to these bytes.
    async fn answered(requests: &'static [u8]) -> (Vec<Bytes>, i32) {
        let body = Full::new(Bytes::from_static(requests)).boxed_unsync();
        let request: Request<UnsyncBoxBody<Bytes, std::convert::Infallible>> = Request::new(body);
        let response: Response<Body<Never>> = respond(Arc::new(Upper), request);
        let collected = response.into_body().collect().await.expect("cannot fail");
        let status = collected.trailers().expect("trailers")[Status::GRPC_STATUS].clone();
        let status = status.to_str().expect("a number").parse().expect("a number");
        let mut bytes = collected.to_bytes();
        let mut messages = Vec::new();
        while let Some(prefix) = Prefix::read(&bytes) {
            bytes.advance(PREFIX_LEN);
            messages.push(bytes.split_to(prefix.size_bytes));
        }
        (messages, status)
    }

    #[tokio::test]
    async fn each_message_is_answered() {
        assert_eq!(
            answered(b"\0\0\0\0\x01a\0\0\0\0\x02bc").await,
            (vec!["A".into(), "BC".into()], 0)
        );
        assert_eq!(answered(b"").await, (Vec::new(), 0));
        let invalid = Code::InvalidArgument as i32;
        assert_eq!(
            answered(b"\0\0\0\0\x01a\0\0\0\0\x03bad").await,
            (vec!["A".into()], invalid)
        );
        assert_eq!(answered(b"\0\0\0\0\x02a").await, (Vec::new(), Code::Internal as i32));
        assert_eq!(
            answered(b"\x01\0\0\0\x01a").await,
            (Vec::new(), Code::Unimplemented as i32)
        );
        assert_eq!(
            answered(b"\0\0\x01\0\0a").await,
            (Vec::new(), Code::ResourceExhausted as i32)
        );
    }
}
