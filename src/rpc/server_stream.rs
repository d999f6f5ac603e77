//! Methods that answer one request with a stream of messages, such as a watch.
//!
//! Callers need not be authenticated, so a connection may have few of these streams. They end with the connection. A
//! method that requires authentication checks the credentials of the call.

use std::sync::Arc;

use bytes::Bytes;
use futures::{
    StreamExt,
    future::{self, BoxFuture, Either},
    stream::{self, BoxStream},
};
use http::{Request, Response, header};
use tonic::Status;

use super::{Call, GRPC, UnauthenticatedConnection, body::Body, connection::Draining, framing, headers, trailers_only};

/// The encoded messages that answer a call.
pub type Messages = BoxStream<'static, Bytes>;

/// A method whose request is answered with a stream of encoded messages.
pub trait ServerStream: Send + Sync {
    /// Returns the path: `/package.Service/Method`.
    fn path(&self) -> &'static str;
    /// Returns the messages that answer a call.
    fn open(&self, call: Call) -> BoxFuture<'_, Result<Messages, Status>>;
}

/// Returns the response of a stream.
pub(super) async fn respond<M, B>(method: &dyn ServerStream, request: Request<B>) -> Response<Body<M>>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let extensions = request.extensions();
    let connection = extensions.get::<Arc<UnauthenticatedConnection>>().cloned();
    let draining = extensions.get::<Draining>().cloned();
    let messages = match method.open(Call::new(request)).await {
        Ok(messages) => messages,
        Err(status) => return trailers_only(&status),
    };
    if let (Some(connection), Some(draining)) = (&connection, &draining)
        && connection.is_admitted()
    {
        draining.hand_off_to_stream_runtime();
    }
    let draining = draining.map(|draining| draining.token().clone().cancelled_owned());
    let handle = match connection.map(|connection| connection.serve_long_stream()) {
        Some(None) => {
            return trailers_only(&Status::resource_exhausted(
                "the connection has too many streams of this kind",
            ));
        }
        Some(handle) => handle,
        None => None,
    };
    let framed = |message: Bytes| framing::framed(&message).map_err(|error| Status::internal(error.to_string()));
    let closing = draining.map_or(Either::Left(future::pending()), Either::Right);
    let end = stream::once(async { Err(Status::unavailable("the connection is closing")) });
    let answers = messages.map(framed).take_until(closing).chain(end);
    let answers = answers.map(move |answer| {
        // The stream counts until its body is dropped.
        let _ = &handle;
        answer.map_err(|status| headers(&status))
    });
    let mut response = Response::new(Body::of_answers(Box::pin(answers)));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use http_body_util::{BodyExt, Full};
    use tonic::Code;

    use super::*;
    use crate::rpc::{
        body::{BufList, Message},
        pre_auth::{MAX_LONG_STREAMS, PreAuthLimiter},
    };

    /// Answers with each byte of the request, then waits.
    struct Bytewise;

    impl ServerStream for Bytewise {
        fn path(&self) -> &'static str {
            "/a.B/C"
        }

        fn open(&self, mut call: Call) -> BoxFuture<'_, Result<Messages, Status>> {
            async move {
                let request = call.message(64).await?;
                if request.is_empty() {
                    return Err(Status::invalid_argument("empty"));
                }
                let messages: Vec<Bytes> = request.chunks(1).map(Bytes::copy_from_slice).collect();
                Ok(stream::iter(messages).chain(stream::pending()).boxed())
            }
            .boxed()
        }
    }

    #[derive(Debug)]
    struct Never;

    impl Message for Never {
        fn next_data(&mut self) -> Option<BufList> {
            None
        }
    }

    async fn call(connection: &Arc<UnauthenticatedConnection>, request: &'static [u8]) -> Response<Body<Never>> {
        let mut request = Request::new(Full::new(Bytes::from_static(request)));
        request.extensions_mut().insert(connection.clone());
        respond(&Bytewise, request).await
    }

    fn code(response: &Response<Body<Never>>) -> Option<Code> {
        let status = response.headers().get(Status::GRPC_STATUS)?;
        Some(Code::from_bytes(status.as_bytes()))
    }

    #[tokio::test]
    async fn r3_streams_of_a_connection_are_bounded() {
        let connection = PreAuthLimiter::new(1)
            .register([10, 0, 0, 1].into())
            .expect("an empty limiter");
        assert_eq!(
            code(&call(&connection, b"\0\0\0\0\0").await),
            Some(Code::InvalidArgument)
        );
        let mut open = Vec::new();
        for _ in 0..MAX_LONG_STREAMS {
            let mut response = call(&connection, b"\0\0\0\0\x02ab").await;
            for expected in ["a", "b"] {
                let frame = response.body_mut().frame().await.expect("a frame").expect("no error");
                let mut data = frame.into_data().expect("a message");
                let message = bytes::Buf::copy_to_bytes(&mut data, framing::PREFIX_LEN + 1);
                assert_eq!(message[framing::PREFIX_LEN..], *expected.as_bytes());
            }
            open.push(response);
        }
        let full = call(&connection, b"\0\0\0\0\x01a").await;
        assert_eq!(code(&full), Some(Code::ResourceExhausted));
        open.pop();
        assert_eq!(code(&call(&connection, b"\0\0\0\0\x01a").await), None);
    }
}
