//! Failures of the API server: it stops, loses its history, or breaks connections. Proxies must not notice, and no
//! change may be lost.

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::mesh::{MESH, service};
use super::tenant::{TIMEOUT, Tenant};
use crate::support::ads::{self, AdsClient, Type};
use crate::support::fault_proxy::FaultProxy;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{http, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::faults::api_server_outage_with_lost_history",
            api_server_outage_with_lost_history,
        ),
        kubernetes::trial(
            "kube::faults::watches_recover_from_broken_connections",
            watches_recover_from_broken_connections,
        ),
    ]
}

/// Returns the resources from a fresh daemon.
fn fresh(tenant: &Tenant, proxy: &crate::support::envoy::Node) -> Result<ads::Resources, String> {
    let daemon = tenant.daemon("fresh")?;
    AdsClient::connect(daemon.xds, proxy).first()
}

/// No resource is removed while the API server is down. Changes made meanwhile arrive afterwards, even though etcd's
/// history is gone.
fn api_server_outage_with_lost_history(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(&format!("{name}/cluster"))?;
    let tenant = Tenant::within(&cluster, name)?;
    tenant.apply(MESH)?;
    tenant.apply(&(service("going", "{app}", 11) + &service("staying", "{app}", 12)))?;
    let fault_proxy = FaultProxy::to(cluster.port());
    let daemon = tenant.daemon_with_kubeconfig(&tenant.kubeconfig_through(fault_proxy.port), "istiod", |_| {})?;
    let node = tenant.sidecar(&json!({}));
    let proxy = AdsClient::connect(daemon.xds, &node);
    let before = proxy.first()?;
    let going = (Type::Cluster, tenant.outbound(80, "going"));
    assert!(before.contains_key(&going), "{:?}", before.keys());
    proxy.mark();

    cluster.stop_server();
    let connections = fault_proxy.connections();
    wait::until("attempts to reach the API server", TIMEOUT, || {
        (fault_proxy.connections() > connections + 2).then_some(())
    })?;
    let late = AdsClient::connect(daemon.xds, &node);
    assert_eq!(late.first()?, before, "a proxy that connects now must get the same");
    assert!(daemon.is_ready(), "the daemon must stay ready with its last good state");

    fault_proxy.cut();
    cluster.start_server()?;
    tenant.delete(&service("going", "{app}", 11))?;
    tenant.apply(&service("coming", "{app}", 13))?;
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &tenant.app, "staying-a");
    let address = tenant.fill("10.{n}.3.99");
    cluster.api.patch(
        &slice,
        &json!({ "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }] }),
    )?;
    cluster.compact()?;
    assert_eq!(proxy.lost(), [""; 0], "no resources may be lost");
    assert_eq!(proxy.complete().as_ref(), Some(&before), "no resources may change");

    fault_proxy.open();
    let expected = fresh(&tenant, &node)?;
    assert!(!expected.contains_key(&going), "{:?}", expected.keys());
    proxy.until_same(&expected, TIMEOUT)?;
    late.until_same(&expected, TIMEOUT)?;
    let lost = proxy.lost();
    assert!(
        lost.iter().all(|lost| lost.contains("going")),
        "only deleted resources may be removed: {lost:?}"
    );

    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    assert!(
        metrics
            .lines()
            .any(|line| line.starts_with("istiod_watch_restarts_total{") && !line.ends_with(" 0")),
        "expected a relist after the loss of the history: {metrics}"
    );

    // A change after the relist must arrive as well.
    tenant.apply(&service("last", "{app}", 14))?;
    let last = (Type::Cluster, tenant.outbound(80, "last"));
    proxy.until("a change after the outage", TIMEOUT, |resources| {
        resources.contains_key(&last).then_some(())
    })?;
    Ok(())
}

const CHURNS: u32 = 1_000;
/// Maximum number of pods at a time.
const PODS: u32 = 25;

/// Pods are created, changed and deleted while connections to the API server break again and again.
fn watches_recover_from_broken_connections(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(1, name)?;
    tenant.apply(MESH)?;
    let fault_proxy = FaultProxy::to(tenant.cluster.port());
    let daemon = tenant.daemon_with_kubeconfig(&tenant.kubeconfig_through(fault_proxy.port), "istiod", |_| {})?;
    let node = tenant.sidecar(&json!({}));
    let proxy = AdsClient::connect(daemon.xds, &node);
    proxy.first()?;
    let connected = fault_proxy.connections();
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &tenant.app, "web-a");
    let mut present = vec![false; PODS as usize];
    for churn in 0..CHURNS {
        let index = (churn * 7) % PODS;
        let reference = Reference::new("v1", "Pod", &tenant.app, &format!("churned-{index}"));
        let present = &mut present[index as usize];
        match (*present, churn % 3) {
            (false, _) => {
                tenant.cluster.api.create(&pod(&tenant, index, churn))?;
                *present = true;
            }
            (true, 0) => {
                tenant.cluster.api.delete(&reference)?;
                *present = false;
            }
            (true, _) => {
                let labels = json!({ "metadata": { "labels": { "version": format!("v{}", churn % 5) } } });
                tenant.cluster.api.patch(&reference, &labels)?;
            }
        }
        if churn % 10 == 0 {
            tenant
                .cluster
                .api
                .patch(&slice, &json!({ "endpoints": endpoints(&tenant, churn) }))?;
        }
        if churn % 25 == 0 {
            fault_proxy.sever();
        }
    }
    let expected = fresh(&tenant, &node)?;
    let assignment = &expected[&(Type::Endpoints, tenant.outbound(80, "web"))];
    assert!(!ads::endpoints(assignment)?.is_empty(), "some endpoints must remain");
    proxy.until_same(&expected, TIMEOUT)?;
    let recovered = fault_proxy.connections() - connected;
    eprintln!("{recovered} connections for {CHURNS} churns");
    assert!(recovered > 0, "the connections must have been broken");
    Ok(())
}

fn pod(tenant: &Tenant, index: u32, churn: u32) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": tenant.app, "name": format!("churned-{index}"),
            "labels": { "app": "web", "version": format!("v{}", churn % 5) } },
        "spec": { "serviceAccountName": format!("account-{}", churn % 3), "nodeName": format!("{}-node", tenant.trial),
            "containers": [{ "name": "web", "image": "web" }] } })
}

/// Some of the pods, ready or not.
fn endpoints(tenant: &Tenant, churn: u32) -> Value {
    let chosen = (0..PODS).filter(|index| !(index + churn / 10).is_multiple_of(3));
    chosen
        .map(|index| {
            json!({ "addresses": [tenant.fill(&format!("10.{{n}}.4.{}", index + 1))],
                "conditions": { "ready": !(index + churn).is_multiple_of(5) },
                "targetRef": { "kind": "Pod", "namespace": tenant.app, "name": format!("churned-{index}") } })
        })
        .collect()
}
