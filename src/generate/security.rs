//! Security filters: JWT, RBAC and external authorization. Where they stand in a filter stack is decided by its builder.

use super::{View, listener::FilterStack};
use crate::{
    base::{ObjectKey, Shared},
    model::policy::{self, Subject},
    proto::envoy::{
        config::listener::v3::Filter, extensions::filters::network::http_connection_manager::v3::HttpFilter,
    },
};

/// The security policies that concern a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecurityPolicies {
    /// AuthorizationPolicies: of the root namespace first, oldest first.
    pub authorization: Shared<[ObjectKey]>,
    /// RequestAuthentications: of the root namespace first, oldest first.
    pub request_authentication: Shared<[ObjectKey]>,
}

impl SecurityPolicies {
    /// The policies that concern a workload.
    pub fn of(view: &View, subject: &Subject) -> Self {
        let (cx, mesh) = (view.cx, view.mesh);
        let authorization = policy::attached(cx, mesh, &mesh.authorization_policies_by_namespace, subject);
        let authentication = policy::attached(cx, mesh, &mesh.request_authentications_by_namespace, subject);
        Self {
            authorization: authorization.into(),
            request_authentication: authentication.into(),
        }
    }
}

/// The places of security filters in a stack, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SecurityStage {
    /// `CUSTOM` policies: an external service decides.
    Custom,
    /// JWTs are checked.
    Authentication,
    /// `AUDIT`, `DENY` and `ALLOW` policies.
    Authorization,
}

/// The HTTP filters of a stage. `tunneled`: the peer is known from an HBONE tunnel, not from TLS.
pub fn http_filters(_stack: &FilterStack, _stage: SecurityStage, _tunneled: bool) -> Vec<HttpFilter> {
    Vec::new()
}

/// The network filters of a stage; there are none for [`SecurityStage::Authentication`].
pub fn network_filters(_stack: &FilterStack, _stage: SecurityStage, _tunneled: bool) -> Vec<Filter> {
    Vec::new()
}
