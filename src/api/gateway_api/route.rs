//! HTTPRoute, GRPCRoute, TLSRoute, TCPRoute and UDPRoute.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::{ObjectReference, ParentReference, SessionPersistence};

/// Routes of HTTP requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRoute {
    /// What it attaches to.
    pub parent_refs: Vec<ParentReference>,
    /// The hosts; those of the listener when empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<HttpRule>,
}

/// One rule of an HTTPRoute.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRule {
    /// Its name.
    pub name: Option<SmolStr>,
    /// Which requests; all when empty.
    pub matches: Vec<HttpMatch>,
    /// What is done with requests and responses.
    pub filters: Vec<Filter>,
    /// Where requests go.
    pub backend_refs: Vec<BackendReference>,
    /// Time limits.
    pub timeouts: Option<Timeouts>,
    /// Retries.
    pub retry: Option<Retry>,
    /// How long a client keeps to one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// Which requests: all that is given must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatch {
    /// The path; prefix `/` when absent.
    pub path: Option<PathMatch>,
    /// Headers.
    pub headers: Vec<ValueMatch>,
    /// Parameters of the query.
    pub query_params: Vec<ValueMatch>,
    /// The method.
    pub method: Option<SmolStr>,
}

/// A path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct PathMatch {
    /// `Exact`, `PathPrefix` or `RegularExpression`; `PathPrefix` when absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// The value; `/` when absent.
    pub value: Option<SmolStr>,
}

/// A header or a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ValueMatch {
    /// `Exact` or `RegularExpression`; `Exact` when absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// Its name.
    pub name: SmolStr,
    /// Its value.
    pub value: SmolStr,
}

/// What is done with requests and responses: the field that `type` names is set.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Filter {
    /// The kind of filter.
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

/// Changes of headers.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HeaderModifier {
    /// Headers that get this value.
    pub set: Vec<Header>,
    /// Headers that get this further value.
    pub add: Vec<Header>,
    /// Headers that go.
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

/// Copies of requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestMirror {
    /// Where they go.
    pub backend_ref: BackendReference,
    /// How many of a hundred requests; all when neither this nor `fraction` is given.
    pub percent: Option<u32>,
    /// How many of all requests.
    pub fraction: Option<Fraction>,
}

/// A share.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct Fraction {
    /// So many …
    pub numerator: u32,
    /// … of so many; 100 when absent.
    pub denominator: Option<u32>,
}

/// An answer that sends the client elsewhere.
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
    /// The status; 302 when absent.
    pub status_code: Option<u32>,
}

/// Changes of host and path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct UrlRewrite {
    /// The host.
    pub hostname: Option<SmolStr>,
    /// The path.
    pub path: Option<PathModifier>,
}

/// A change of the path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathModifier {
    /// `ReplaceFullPath` or `ReplacePrefixMatch`.
    #[serde(rename = "type")]
    pub modifier_type: SmolStr,
    /// The whole path.
    pub replace_full_path: Option<SmolStr>,
    /// What takes the place of the prefix.
    pub replace_prefix_match: Option<SmolStr>,
}

/// Cross-origin requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cors {
    /// Origins that may.
    pub allow_origins: Vec<SmolStr>,
    /// Whether they may send credentials.
    pub allow_credentials: Option<bool>,
    /// Methods that they may use.
    pub allow_methods: Vec<SmolStr>,
    /// Headers that they may send.
    pub allow_headers: Vec<SmolStr>,
    /// Headers that they may read.
    pub expose_headers: Vec<SmolStr>,
    /// How long a browser may remember, in seconds; 5 when absent.
    pub max_age: Option<u32>,
}

/// Where requests go.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendReference {
    /// The group; core when absent.
    pub group: Option<SmolStr>,
    /// The kind; `Service` when absent.
    pub kind: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The namespace; the route's when absent.
    pub namespace: Option<SmolStr>,
    /// The port of the Service.
    pub port: Option<u16>,
    /// Its share among the backends; 1 when absent.
    pub weight: Option<u32>,
    /// What is done with the requests that go there.
    #[serde(default)]
    pub filters: Vec<Filter>,
}

/// Time limits, as durations.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    /// For the request as a whole.
    pub request: Option<SmolStr>,
    /// For one attempt.
    pub backend_request: Option<SmolStr>,
}

/// Retries.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Retry {
    /// The statuses after which to try again.
    pub codes: Vec<u32>,
    /// How often.
    pub attempts: Option<u32>,
    /// The time between, as a duration.
    pub backoff: Option<SmolStr>,
}

/// Routes of gRPC calls.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRoute {
    /// What it attaches to.
    pub parent_refs: Vec<ParentReference>,
    /// The hosts; those of the listener when empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<GrpcRule>,
}

/// One rule of a GRPCRoute.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRule {
    /// Its name.
    pub name: Option<SmolStr>,
    /// Which calls; all when empty.
    pub matches: Vec<GrpcMatch>,
    /// What is done with calls and answers.
    pub filters: Vec<Filter>,
    /// Where calls go.
    pub backend_refs: Vec<BackendReference>,
    /// How long a client keeps to one backend.
    pub session_persistence: Option<SessionPersistence>,
}

/// Which calls: all that is given must hold.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GrpcMatch {
    /// Service and method.
    pub method: Option<MethodMatch>,
    /// Headers.
    pub headers: Vec<ValueMatch>,
}

/// A gRPC method.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct MethodMatch {
    /// `Exact` or `RegularExpression`; `Exact` when absent.
    #[serde(rename = "type")]
    pub match_type: Option<SmolStr>,
    /// The service; any when absent.
    pub service: Option<SmolStr>,
    /// The method; any when absent.
    pub method: Option<SmolStr>,
}

/// Routes of TLS connections.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsRoute {
    /// What it attaches to.
    pub parent_refs: Vec<ParentReference>,
    /// The server names; those of the listener when empty.
    pub hostnames: Vec<SmolStr>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// Routes of TCP connections.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TcpRoute {
    /// What it attaches to.
    pub parent_refs: Vec<ParentReference>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// Routes of UDP datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UdpRoute {
    /// What it attaches to.
    pub parent_refs: Vec<ParentReference>,
    /// The rules.
    pub rules: Vec<ConnectionRule>,
}

/// One rule about connections.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionRule {
    /// Its name.
    pub name: Option<SmolStr>,
    /// Where connections go.
    pub backend_refs: Vec<BackendReference>,
}
