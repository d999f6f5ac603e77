//! The gRPC router: maps the path of a request to a simple method or to the service with streaming methods.

use std::{future::Future, panic::AssertUnwindSafe, sync::Arc};

use bytes::Bytes;
use futures::FutureExt;
use http::{Method, Request, Response, StatusCode, header};
use tonic::Status;

use super::{
    Call, Exchange, GRPC, ServerStream, Service, Unary, UnauthenticatedConnection,
    body::{Body, BufList, Message},
    exchange, framing, headers, is_grpc, server_stream, trailers_only,
};

/// A service with streaming methods.
pub trait StreamService: Clone + Send + Sync + 'static {
    /// A message of a response.
    type Message: Message;

    /// Returns true if this path is a method of the service.
    fn has_method(&self, path: &str) -> bool;

    /// Starts a call of a method for which [`Self::has_method`] is true. The stream continues after the response is
    /// returned.
    fn call<B>(&self, request: Request<B>) -> impl Future<Output = Response<Body<Self::Message>>> + Send
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display;
}

/// A gRPC router. Cheap to clone.
#[derive(Clone)]
pub struct Router<S> {
    streams: S,
    methods: Arc<[Arc<dyn Unary>]>,
    exchange: Option<Arc<dyn Exchange>>,
    server_streams: Arc<[Arc<dyn ServerStream>]>,
}

impl<S: StreamService> Router<S> {
    /// Creates a router to a streaming service and unary methods.
    pub fn new(streams: S, methods: Vec<Arc<dyn Unary>>) -> Self {
        Self {
            streams,
            methods: methods.into(),
            exchange: None,
            server_streams: Arc::default(),
        }
    }

    /// Returns the same router, with a bidirectional service.
    #[must_use]
    pub fn with_exchange(mut self, exchange: Arc<dyn Exchange>) -> Self {
        self.exchange = Some(exchange);
        self
    }

    /// Returns the same router, with a method that answers with a stream.
    #[must_use]
    pub fn with_server_stream(mut self, method: Arc<dyn ServerStream>) -> Self {
        self.server_streams = self.server_streams.iter().cloned().chain([method]).collect();
        self
    }

    /// Returns the streaming service.
    pub fn streams(&self) -> &S {
        &self.streams
    }

    /// Answers a request. Works under any HTTP/2 server; [`FlatBody`](super::body::FlatBody) is for those that need
    /// plain `Bytes`.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Body<S::Message>>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display,
    {
        if request.method() != Method::POST || !is_grpc(request.headers()) {
            record_violation(&request);
            let mut response = Response::new(Body::default());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return response;
        }
        let path = request.uri().path();
        if self.streams.has_method(path) {
            return self.streams.call(request).await;
        }
        if let Some(pre_auth) = connection(&request) {
            // Only the streams of the service wait for room.
            pre_auth.allow_large_data();
        }
        if let Some(exchange) = self.exchange.as_ref().filter(|exchange| exchange.has_method(path)) {
            return exchange::respond(exchange.clone(), request);
        }
        if let Some(method) = self.server_streams.iter().find(|method| method.path() == path) {
            return server_stream::respond(method.as_ref(), request).await;
        }
        match self.methods.iter().find(|method| method.path() == path) {
            Some(method) => call_unary(method.as_ref(), request).await,
            None => {
                record_violation(&request);
                trailers_only(&Status::unimplemented(format!("unknown method {path}")))
            }
        }
    }
}

impl<S: StreamService> Service for Router<S> {
    type Data = BufList;
    type Body = Body<S::Message>;

    fn handle(&self, request: Request<hyper::body::Incoming>) -> impl Future<Output = Response<Self::Body>> + Send {
        Self::handle(self, request)
    }
}

/// Records a request that nothing here answers. Many of these end the connection.
fn record_violation<B>(request: &Request<B>) {
    if let Some(pre_auth) = connection(request) {
        pre_auth.record_violation();
    }
}

fn connection<B>(request: &Request<B>) -> Option<&Arc<UnauthenticatedConnection>> {
    request.extensions().get()
}

/// Calls a unary method. A panic ends this call only.
async fn call_unary<M, B>(method: &dyn Unary, request: Request<B>) -> Response<Body<M>>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: std::fmt::Display,
{
    let answered = AssertUnwindSafe(method.call(Call::new(request))).catch_unwind().await;
    let answered = answered.unwrap_or_else(|_| {
        tracing::error!(method = method.path(), "call panicked; this is a bug in istiod");
        Err(Status::internal(
            "the call failed because of a bug in the control plane",
        ))
    });
    let framed = |message: Bytes| framing::framed(&message).map_err(|error| Status::internal(error.to_string()));
    match answered.and_then(framed) {
        Ok(message) => {
            let mut response = Response::new(Body::whole(message, headers(&Status::ok(""))));
            response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
            response
        }
        Err(status) => trailers_only(&status),
    }
}
