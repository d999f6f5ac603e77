//! `grpc.health.v1.Health`: SERVING once the first snapshot exists.

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use prost::Message;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;

use super::DISCOVERY;
use crate::rpc::{Call, Messages, ServerStream, Unary};

/// The maximum size of a request: the name of a service.
const MAX_REQUEST_BYTES: usize = 1024;
/// `HealthCheckResponse.ServingStatus`.
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;
const SERVICE_UNKNOWN: i32 = 3;

#[derive(Clone, PartialEq, Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, PartialEq, Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The methods `Check` and `Watch`.
pub(in crate::app) struct Health {
    /// True once the process is ready.
    pub(in crate::app) ready: watch::Receiver<bool>,
}

impl Health {
    fn answer(&self, request: &[u8]) -> Result<Bytes, Status> {
        if is_known(request)? {
            Ok(response(status(*self.ready.borrow())))
        } else {
            Err(Status::not_found("unknown service"))
        }
    }

    /// Returns the status and each change of it. As the protocol requires, the stream of an unknown service stays open,
    /// since the service may appear.
    fn changes(&self, request: &[u8]) -> Result<Messages, Status> {
        if !is_known(request)? {
            let unknown = stream::once(async { Ok(response(SERVICE_UNKNOWN)) });
            return Ok(unknown.chain(stream::pending()).boxed());
        }
        // A watch is never complete: it ends with its connection.
        Ok(WatchStream::new(self.ready.clone())
            .map(|is_ready| Ok(response(status(is_ready))))
            .chain(stream::pending())
            .boxed())
    }
}

impl Unary for Health {
    fn path(&self) -> &'static str {
        "/grpc.health.v1.Health/Check"
    }

    fn call(&self, mut call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
        async move { self.answer(&call.message(MAX_REQUEST_BYTES).await?) }.boxed()
    }
}

impl ServerStream for Health {
    fn path(&self) -> &'static str {
        "/grpc.health.v1.Health/Watch"
    }

    fn open(&self, mut call: Call) -> BoxFuture<'_, Result<Messages, Status>> {
        async move { self.changes(&call.message(MAX_REQUEST_BYTES).await?) }.boxed()
    }
}

/// Returns true if a request names a service of the ports, or the whole server.
fn is_known(request: &[u8]) -> Result<bool, Status> {
    let request = HealthCheckRequest::decode(request)
        .map_err(|error| Status::invalid_argument(format!("cannot decode the request: {error}")))?;
    Ok(matches!(request.service.as_str(), "" | DISCOVERY))
}

fn status(is_ready: bool) -> i32 {
    if is_ready { SERVING } else { NOT_SERVING }
}

fn response(status: i32) -> Bytes {
    HealthCheckResponse { status }.encode_to_vec().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_that_of_readiness() {
        let (ready, receiver) = watch::channel(false);
        let health = Health { ready: receiver };
        let status = |service: &str| {
            let service = service.to_owned();
            let answer = health.answer(&HealthCheckRequest { service }.encode_to_vec())?;
            Ok::<_, Status>(HealthCheckResponse::decode(answer).expect("a response").status)
        };
        assert_eq!(status("").expect("a status"), NOT_SERVING);
        ready.send_replace(true);
        assert_eq!(status("").expect("a status"), SERVING);
        assert_eq!(status(DISCOVERY).expect("a status"), SERVING);
        assert_eq!(status("a.B").expect_err("no status").code(), tonic::Code::NotFound);
    }

    #[tokio::test]
    async fn changes_of_health_are_sent() {
        let (ready, receiver) = watch::channel(false);
        let health = Health { ready: receiver };
        let open = |service: &str| {
            let service = service.to_owned();
            let messages = health.changes(&HealthCheckRequest { service }.encode_to_vec())?;
            let status = |message: Result<Bytes, Status>| {
                HealthCheckResponse::decode(message.expect("a message"))
                    .expect("a response")
                    .status
            };
            Ok::<_, Status>(messages.map(status))
        };
        let mut known = open(DISCOVERY).expect("a stream");
        assert_eq!(known.next().await, Some(NOT_SERVING));
        ready.send_replace(true);
        assert_eq!(known.next().await, Some(SERVING));
        assert_eq!(known.next().now_or_never(), None);
        let mut unknown = open("a.B").expect("a stream");
        assert_eq!(unknown.next().await, Some(SERVICE_UNKNOWN));
        assert_eq!(unknown.next().now_or_never(), None);
    }
}
