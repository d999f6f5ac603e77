//! The connection breaks between a changed cluster and its endpoints, for which a real Envoy waits.

use libtest_mimic::Failed;

use super::fixture::{Fixture, TIMEOUT, WEB, answered_by};
use crate::support::envoy::Protocol;
use crate::support::fault_proxy::FaultProxy;
use crate::support::wait;

/// The start of a resource in a response with endpoints.
const ENDPOINTS: &[u8] = b"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// Envoy sends no request for clusters while one of them warms, and announces that it holds the endpoints.
pub(super) fn endpoints_that_were_lost_are_sent_again(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let fault_proxy = FaultProxy::to(fixture.daemon.xds);
    let sidecar = fixture.sidecar_of(fault_proxy.port, Protocol::Delta)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    let modified = || sidecar.sum(r"^cluster_manager\.cluster_modified$");
    let before = modified();

    fault_proxy.sever_before(ENDPOINTS);
    fixture.limit_connections(77);
    wait::until("a response without its endpoints", TIMEOUT, || {
        fault_proxy.has_severed().then_some(())
    })?;
    let limit = || {
        let cluster = sidecar.cluster(&fixture.cluster("v1"))?;
        cluster["circuit_breakers"]["thresholds"][0]["max_connections"].as_u64()
    };
    wait::until("the changed cluster", TIMEOUT, || (limit()? == 77).then_some(()))?;
    assert_eq!(sidecar.sum(r"^cluster_manager\.warming_clusters$"), 0);
    assert_eq!(
        modified() - before,
        3,
        "each cluster of the service must have arrived once"
    );

    // Clusters go on to change.
    fixture.limit_connections(78);
    wait::until("another change", TIMEOUT, || (limit()? == 78).then_some(()))?;
    answered_by("v1", fixture.outbound(), WEB)?;
    Ok(())
}
