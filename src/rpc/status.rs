//! gRPC statuses as HTTP headers, responses and labels of metrics.

use http::{HeaderMap, HeaderValue, Response, header};
use tonic::{Code, Status};

use super::{GRPC, body::Body};

/// Returns the headers or trailers that carry a status.
pub fn headers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        headers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Internal as i32));
    }
    headers
}

/// Returns a response without messages whose status is in its headers (a gRPC "Trailers-Only" response).
pub fn trailers_only<M>(status: &Status) -> Response<Body<M>> {
    let mut response = Response::new(Body::default());
    *response.headers_mut() = headers(status);
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

/// Returns the name of a code as in Go, for labels of metrics.
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
