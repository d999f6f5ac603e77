//! HTTPRoute, GRPCRoute, TLSRoute, TCPRoute and UDPRoute.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::{ObjectReference, ParentReference, SessionPersistence};

/// Routes for HTTP requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRoute {
    /// The parents.
    pub parent_refs: Vec<ParentReference>,
    /// The hosts; those of the listener if empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<HttpRule>,
}

/// A rule of an HTTPRoute.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRule {
    /// The name.
    pub name: Option<SmolStr>,
    /// The matching requests; all if empty.
    pub matches: Vec<HttpMatch>,
    /// The filters of requests and responses.
    pub filters: Vec<Filter>,
    /// The backends.
    pub backend_refs: Vec<BackendReference>,
    /// Timeouts.
    pub timeouts: Option<Timeouts>,
    /// Retries.
    pub retry: Option<Retry>,
    /// Session persistence: a client stays with one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// A match of requests; all conditions must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatch {
    /// The path; prefix `/` if absent.
    pub path: Option<PathMatch>,
    /// Headers.
    pub headers: Vec<ValueMatch>,
    /// Query parameters.
    pub query_params: Vec<ValueMatch>,
    /// The method.
    pub method: Option<SmolStr>,
}

/// A match of paths.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct PathMatch {
    /// `Exact`, `PathPrefix` or `RegularExpression`; `PathPrefix` if absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// The value; `/` if absent.
    pub value: Option<SmolStr>,
}

/// A match of a header or a query parameter.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ValueMatch {
    /// `Exact` or `RegularExpression`; `Exact` if absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The value.
    pub value: SmolStr,
}

/// A filter of requests or responses. The field named by `type` is set.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Filter {
    /// The filter type.
    #[serde(rename = "type")]
    pub filter_type: SmolStr,
    /// `RequestHeaderModifier`.
    pub request_header_modifier: Option<HeaderModifier>,
    /// `ResponseHeaderModifier`.
    pub response_header_modifier: Option<HeaderModifier>,
    /// `RequestMirror`.
    pub request_mirror: Option<RequestMirror>,
    /// `RequestRedirect`.
    pub request_redirect: Option<RequestRedirect>,
    /// `URLRewrite`.
    pub url_rewrite: Option<UrlRewrite>,
    /// `CORS`.
    pub cors: Option<Cors>,
    /// `ExtensionRef`.
    pub extension_ref: Option<ObjectReference>,
}

/// Modifications of headers.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HeaderModifier {
    /// Headers to set.
    pub set: Vec<Header>,
    /// Headers to add.
    pub add: Vec<Header>,
    /// Headers to remove.
    pub remove: Vec<SmolStr>,
}

/// A header and its value.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct Header {
    /// The name.
    pub name: SmolStr,
    /// The value.
    pub value: SmolStr,
}

/// Mirroring of requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestMirror {
    /// The backend of the mirrored requests.
    pub backend_ref: BackendReference,
    /// The percentage of requests; 100 if neither this nor `fraction` is set.
    pub percent: Option<u32>,
    /// The fraction of requests.
    pub fraction: Option<Fraction>,
}

/// A fraction.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct Fraction {
    /// The numerator.
    pub numerator: u32,
    /// The denominator; 100 if absent.
    pub denominator: Option<u32>,
}

/// A redirect.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestRedirect {
    /// The scheme.
    pub scheme: Option<SmolStr>,
    /// The host.
    pub hostname: Option<SmolStr>,
    /// The path.
    pub path: Option<PathModifier>,
    /// The port.
    pub port: Option<u16>,
    /// The status; 302 if absent.
    pub status_code: Option<u32>,
}

/// Rewrites of host and path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct UrlRewrite {
    /// The host.
    pub hostname: Option<SmolStr>,
    /// The path.
    pub path: Option<PathModifier>,
}

/// A modification of the path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathModifier {
    /// `ReplaceFullPath` or `ReplacePrefixMatch`.
    #[serde(rename = "type")]
    pub modifier_type: SmolStr,
    /// The new path.
    pub replace_full_path: Option<SmolStr>,
    /// The replacement of the matched prefix.
    pub replace_prefix_match: Option<SmolStr>,
}

/// Cross-origin requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cors {
    /// Allowed origins.
    pub allow_origins: Vec<SmolStr>,
    /// True if credentials are allowed.
    pub allow_credentials: Option<bool>,
    /// Allowed methods.
    pub allow_methods: Vec<SmolStr>,
    /// Allowed headers.
    pub allow_headers: Vec<SmolStr>,
    /// Headers exposed to clients.
    pub expose_headers: Vec<SmolStr>,
    /// The maximum age of a cached preflight response in seconds; 5 if absent.
    pub max_age: Option<u32>,
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendReference {
    /// The group; core if absent.
    pub group: Option<SmolStr>,
    /// The kind; `Service` if absent.
    pub kind: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The namespace; that of the route if absent.
    pub namespace: Option<SmolStr>,
    /// The port of the Service.
    pub port: Option<u16>,
    /// The weight; 1 if absent.
    pub weight: Option<u32>,
    /// Filters of requests to this backend.
    #[serde(default)]
    pub filters: Vec<Filter>,
}

/// Timeouts, as durations.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    /// The timeout of the request with all retries.
    pub request: Option<SmolStr>,
    /// The timeout of one attempt.
    pub backend_request: Option<SmolStr>,
}

/// Retries.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Retry {
    /// The statuses to retry.
    pub codes: Vec<u32>,
    /// The number of retries; a negative one means none.
    pub attempts: Option<i64>,
    /// The backoff between retries, as a duration.
    pub backoff: Option<SmolStr>,
}

/// Routes for gRPC calls.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRoute {
    /// The parents.
    pub parent_refs: Vec<ParentReference>,
    /// The hosts; those of the listener if empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<GrpcRule>,
}

/// A rule of a GRPCRoute.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRule {
    /// The name.
    pub name: Option<SmolStr>,
    /// The matching calls; all if empty.
    pub matches: Vec<GrpcMatch>,
    /// The filters of calls and responses.
    pub filters: Vec<Filter>,
    /// The backends.
    pub backend_refs: Vec<BackendReference>,
    /// Session persistence: a client stays with one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// A match of calls; all conditions must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GrpcMatch {
    /// Service and method.
    pub method: Option<MethodMatch>,
    /// Headers.
    pub headers: Vec<ValueMatch>,
}

/// A match of a gRPC method.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct MethodMatch {
    /// `Exact` or `RegularExpression`; `Exact` if absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// The service; any if absent.
    pub service: Option<SmolStr>,
    /// The method; any if absent.
    pub method: Option<SmolStr>,
}

/// Routes for TLS connections.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsRoute {
    /// The parents.
    pub parent_refs: Vec<ParentReference>,
    /// The server names; those of the listener if empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// Routes for TCP connections.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TcpRoute {
    /// The parents.
    pub parent_refs: Vec<ParentReference>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// Routes for UDP datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UdpRoute {
    /// The parents.
    pub parent_refs: Vec<ParentReference>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// A rule for connections or datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionRule {
    /// The name.
    pub name: Option<SmolStr>,
    /// The backends.
    pub backend_refs: Vec<BackendReference>,
}
