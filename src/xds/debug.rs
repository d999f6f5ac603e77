//! Debug information over xDS, as `istioctl` asks for it: types that are no configuration, each request answered once.
//! What is shown to whom is up to whoever answers.

use std::sync::Arc;

use futures::future::BoxFuture;
use smol_str::SmolStr;

use crate::{auth::Caller, generate::EncodedResource};

/// A debug page, named by the request; and what all of these types begin with.
pub const PAGE: &str = "istio.io/debug";
/// What each client was sent and has acknowledged.
pub const SYNC_STATUS: &str = "istio.io/debug/syncz";
/// The configuration of the one client that is named.
pub const CONFIG_DUMP: &str = "istio.io/debug/config_dump";

/// Names that a request may have; each is a page or a client, and one is served.
pub(super) const MAX_NAMES: usize = 8;

/// True for types that tell of the control plane.
pub(super) fn is_debug(type_url: &str) -> bool {
    type_url
        .strip_prefix(PAGE)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What is asked, and by whom.
#[derive(Clone, Debug)]
pub struct DebugRequest {
    /// The type.
    pub type_url: String,
    /// The names that the request has.
    pub names: Vec<SmolStr>,
    /// Who asks; none where that is not known.
    pub caller: Option<Caller>,
}

/// What is told.
#[derive(Clone, Debug, Default)]
pub struct DebugResponse {
    /// Who answers, as `control_plane.identifier` has it.
    pub control_plane: Option<String>,
    /// The version of what is told.
    pub version: String,
    /// What is told.
    pub resources: Vec<Arc<EncodedResource>>,
}

/// Why nothing is told; ends the stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DebugError {
    /// Who asks is not known.
    #[error(
        "authentication required; hint: debug information is for callers with a certificate or a token, at the secure port"
    )]
    Unauthenticated,
    /// The request makes no sense.
    #[error("{0}")]
    Malformed(&'static str),
    /// Not for this caller.
    #[error("the debug info is not available for current identity: {0:?}")]
    Forbidden(Vec<SmolStr>),
}

/// ResponseCache.
pub trait DebugHandler: Send + Sync + 'static {
    /// ResponseCache a question; a client that is not here is an answer without resources.
    fn answer(&self, question: DebugRequest) -> BoxFuture<'static, Result<DebugResponse, DebugError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_types_have_one_beginning() {
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
}
