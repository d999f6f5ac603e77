//! `grpc.health.v1.Health/Check`: SERVING once the first snapshot exists. Health is not watched (`Watch`).

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use prost::Message;
use tokio::sync::watch;
use tonic::Status;

use super::DISCOVERY;
use crate::rpc::{Call, Unary};

/// The maximum size of a request: the name of a service.
const MAX_REQUEST_BYTES: usize = 1024;
/// `HealthCheckResponse.ServingStatus`.
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

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

/// The method.
pub(in crate::app) struct Health {
    /// True once the process is ready.
    pub(in crate::app) ready: watch::Receiver<bool>,
}

impl Health {
    fn answer(&self, request: &[u8]) -> Result<Bytes, Status> {
        let request = HealthCheckRequest::decode(request)
            .map_err(|error| Status::invalid_argument(format!("cannot decode the request: {error}")))?;
        if !matches!(request.service.as_str(), "" | DISCOVERY) {
            return Err(Status::not_found("unknown service"));
        }
        let status = if *self.ready.borrow() { SERVING } else { NOT_SERVING };
        Ok(HealthCheckResponse { status }.encode_to_vec().into())
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
}
