//! Methods that answer one request with a stream of messages, such as a watch.
//!
//! Callers need not be authenticated, so a connection may have few of these streams. A stream ends with its last
//! message, with an error, or unavailable with the connection: a client takes messages for complete only in the first
//! case. A method that requires authentication checks the credentials of the call.

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

/// The encoded messages that answer a call. The first error ends them.
pub type Messages = BoxStream<'static, Result<Bytes, Status>>;

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
    let framed = |message: Result<Bytes, Status>| {
        message.and_then(|message| framing::framed(&message).map_err(|error| Status::internal(error.to_string())))
    };
    let closing = draining.map_or(Either::Left(future::pending()), Either::Right);
    let end = |status: Status| stream::once(future::ready(Err(status)));
    // The body ends with the first status.
    let answers = messages.map(framed).chain(end(Status::ok("")));
    let answers = answers.take_until(closing);
    let answers = answers.chain(end(Status::unavailable("the connection is closing")));
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
    use tokio_util::sync::CancellationToken;
    use tonic::Code;

    use super::*;
    use crate::rpc::{
        body::{BufList, Message},
        pre_auth::{MAX_LONG_STREAMS, PreAuthLimiter},
    };

    /// Answers with each byte of the request: `.` ends the messages, `!` is an error, and otherwise they stay open.
    struct Bytewise;

    impl ServerStream for Bytewise {
        fn path(&self) -> &'static str {
            "/a.B/C"
        }

        fn open(&self, mut call: Call) -> BoxFuture<'_, Result<Messages, Status>> {
            async move {
                let request = call.message(64).await?;
                let (last, sent) = match request.split_last() {
                    None => return Err(Status::invalid_argument("empty")),
                    Some((b'.', sent)) => (stream::empty().boxed(), sent),
                    Some((b'!', sent)) => {
                        let expired = Err(Status::unauthenticated("expired"));
                        (stream::iter([expired, Ok(Bytes::new())]).boxed(), sent)
                    }
                    Some(_) => (stream::pending().boxed(), &request[..]),
                };
                let messages: Vec<_> = sent.chunks(1).map(|byte| Ok(Bytes::copy_from_slice(byte))).collect();
                Ok(stream::iter(messages).chain(last).boxed())
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

    fn connection() -> Arc<UnauthenticatedConnection> {
        let limiter = PreAuthLimiter::new(1);
        limiter.register([10, 0, 0, 1].into()).expect("an empty limiter")
    }

    /// Calls the method with a message, on a connection that closes when the token is cancelled.
    async fn call(
        connection: &Arc<UnauthenticatedConnection>,
        text: &str,
        token: &CancellationToken,
    ) -> Response<Body<Never>> {
        let framed = framing::framed(text.as_bytes()).expect("a short message");
        let mut request = Request::new(Full::new(framed));
        request.extensions_mut().insert(connection.clone());
        request.extensions_mut().insert(Draining::of(token.clone()));
        respond(&Bytewise, request).await
    }

    /// Returns the status of a response without messages.
    fn code(response: &Response<Body<Never>>) -> Option<Code> {
        let status = response.headers().get(Status::GRPC_STATUS)?;
        Some(Code::from_bytes(status.as_bytes()))
    }

    /// Reads the next message.
    async fn message(response: &mut Response<Body<Never>>) -> Bytes {
        let frame = response.body_mut().frame().await.expect("a frame").expect("no error");
        let mut data = frame.into_data().expect("a message");
        let length = bytes::Buf::remaining(&data);
        bytes::Buf::copy_to_bytes(&mut data, length).slice(framing::PREFIX_LEN..)
    }

    /// Reads the status after the last message, and the end.
    async fn end(mut response: Response<Body<Never>>) -> Code {
        let frame = response.body_mut().frame().await.expect("a frame").expect("no error");
        let trailers = frame.into_trailers().expect("trailers");
        assert!(
            response.body_mut().frame().await.is_none(),
            "nothing follows the trailers"
        );
        Code::from_bytes(trailers[Status::GRPC_STATUS].as_bytes())
    }

    #[tokio::test]
    async fn r3_streams_of_a_connection_are_bounded() {
        let (connection, token) = (connection(), CancellationToken::new());
        assert_eq!(code(&call(&connection, "", &token).await), Some(Code::InvalidArgument));
        let mut open = Vec::new();
        for _ in 0..MAX_LONG_STREAMS {
            let mut response = call(&connection, "ab", &token).await;
            for expected in ["a", "b"] {
                assert_eq!(message(&mut response).await, expected);
            }
            open.push(response);
        }
        let full = call(&connection, "a", &token).await;
        assert_eq!(code(&full), Some(Code::ResourceExhausted));
        open.pop();
        assert_eq!(code(&call(&connection, "a", &token).await), None);
    }

    #[tokio::test]
    async fn only_whole_streams_end_with_ok() {
        let (connection, token) = (connection(), CancellationToken::new());
        for (text, expected) in [("a.", Code::Ok), (".", Code::Ok), ("a!", Code::Unauthenticated)] {
            let mut response = call(&connection, text, &token).await;
            if text.starts_with('a') {
                assert_eq!(message(&mut response).await, "a");
            }
            assert_eq!(end(response).await, expected, "{text}");
        }
        let mut cut = call(&connection, "a", &token).await;
        assert_eq!(message(&mut cut).await, "a");
        assert!(cut.body_mut().frame().now_or_never().is_none(), "the stream is open");
        token.cancel();
        assert_eq!(end(cut).await, Code::Unavailable);
    }
}
