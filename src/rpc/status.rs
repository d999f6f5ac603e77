//! gRPC statuses as HTTP headers and responses.

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
