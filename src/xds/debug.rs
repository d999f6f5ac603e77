//! Debug information over xDS, as `istioctl` requests it: types that are not configuration, each request answered once.
//! The handler decides about access.

use std::sync::Arc;

use futures::future::BoxFuture;
use smol_str::SmolStr;

use crate::{auth::Caller, generate::EncodedResource};

/// The type of debug pages, which the request names; also the prefix of all debug types.
pub const PAGE: &str = "istio.io/debug";
/// The type of the sync status of all clients.
pub const SYNC_STATUS: &str = "istio.io/debug/syncz";
/// The type of the configuration of the named client.
pub const CONFIG_DUMP: &str = "istio.io/debug/config_dump";

/// The maximum number of names of a request. Each is a page or a client, and only one is served.
pub(super) const MAX_NAMES: usize = 8;

/// Returns true for debug types.
pub(super) fn is_debug(type_url: &str) -> bool {
    type_url
        .strip_prefix(PAGE)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns a debug type as metrics name it. Clients choose the type, so unknown ones count as pages.
pub(super) fn metric_label(type_url: &str) -> &'static str {
    let known = [SYNC_STATUS, CONFIG_DUMP].into_iter().find(|known| *known == type_url);
    known.unwrap_or(PAGE)
}

/// A debug request.
#[derive(Clone, Debug)]
pub struct DebugRequest {
    /// The type.
    pub type_url: String,
    /// The names of the request.
    pub names: Vec<SmolStr>,
    /// The caller, if it is authenticated.
    pub caller: Option<Caller>,
}

/// A debug response.
#[derive(Clone, Debug, Default)]
pub struct DebugResponse {
    /// `control_plane.identifier`.
    pub control_plane: Option<String>,
    /// The version, which is also the nonce.
    pub version: String,
    /// The resources.
    pub resources: Vec<Arc<EncodedResource>>,
}

/// A rejected debug request, which ends the stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DebugError {
    /// The caller is not authenticated.
    #[error("authentication required; hint: use the secure port with a certificate or a token")]
    Unauthenticated,
    /// The request is malformed.
    #[error("{0}")]
    Malformed(&'static str),
    /// The caller has no access.
    #[error("the debug info is not available for current identity: {0:?}")]
    Forbidden(Vec<SmolStr>),
    /// Too many debug requests are waiting.
    #[error("too many debug requests are being answered; try again")]
    Busy,
}

/// A handler of debug requests.
pub trait DebugHandler: Send + Sync + 'static {
    /// Answers a request. For a client that is not connected here, the response has no resources.
    fn answer(&self, request: DebugRequest) -> BoxFuture<'static, Result<DebugResponse, DebugError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_types_have_a_common_prefix() {
        for (url, is) in [
            (PAGE, true),
            (SYNC_STATUS, true),
            (CONFIG_DUMP, true),
            ("istio.io/debug_handler", false),
            ("type.googleapis.com/envoy.config.cluster.v3.Cluster", false),
        ] {
            assert_eq!(is_debug(url), is, "{url}");
        }
    }

    #[test]
    fn unknown_types_have_no_label_of_their_own() {
        for (url, label) in [
            (PAGE, PAGE),
            (SYNC_STATUS, SYNC_STATUS),
            (CONFIG_DUMP, CONFIG_DUMP),
            ("istio.io/debug/other", PAGE),
        ] {
            assert_eq!(metric_label(url), label, "{url}");
        }
    }
}
