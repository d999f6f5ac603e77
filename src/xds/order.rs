//! The order in which types are sent, and the resources that Envoy must be sent again.
//!
//! Types go in the order of `ResourceType::ALL`: clusters before their endpoints, listeners before their routes, so
//! that no resource refers to one that the client does not have yet. Removals come last, when nothing refers to the
//! resource.

use crate::generate::ResourceType;

/// Envoy warms a changed cluster until it gets its endpoints again, even if they did not change
/// (<https://github.com/envoyproxy/envoy/issues/13009>).
///
/// As long as a cluster warms, Envoy sends no request for clusters. So a client that connects and asks for endpoints
/// first waits for some of them, whatever it announces to hold: the control plane was killed, or the connection broke,
/// after it had sent a changed cluster and before the endpoints.
pub(super) const WARMED_BY_CLUSTERS: ResourceType = ResourceType::Endpoint;

/// Types whose removals wait until listeners and routes of the same revision were sent.
pub(super) fn removed_last(resource_type: ResourceType) -> bool {
    matches!(resource_type, ResourceType::Cluster | ResourceType::Endpoint)
}

/// Types that refer to clusters: while one of them is not up to date, no cluster is removed. None of them is sent while
/// a new cluster waits for the answer to earlier ones.
pub(super) const REFERRING: [ResourceType; 2] = [ResourceType::Listener, ResourceType::Route];

/// Envoy never recovers from the removal of an extension that a filter chain still refers to, so those are not removed
/// (<https://github.com/envoyproxy/envoy/issues/32823>).
pub(super) fn is_removed(resource_type: ResourceType) -> bool {
    resource_type != ResourceType::Extension
}
