//! Failures of the API server: it stops, loses its history, or breaks connections. Proxies must not notice, and no
//! change may be lost.

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::mesh::{MESH, service};
use super::place::{Place, SOON};
use crate::support::ads::{self, Ads, Type};
use crate::support::detour::Detour;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{http, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial("kube::faults::server_dies_and_forgets", server_dies_and_forgets),
        kubernetes::trial("kube::faults::watches_drop_in_a_storm", watches_drop_in_a_storm),
    ]
}

/// Returns the resources from a fresh daemon.
fn fresh(place: &Place, proxy: &crate::support::envoy::Node) -> Result<ads::Resources, String> {
    let daemon = place.daemon("fresh")?;
    Ads::connect(daemon.xds, proxy).first()
}

/// No resource is removed while the API server is down. Changes made meanwhile arrive afterwards, even though etcd's
/// history is gone.
fn server_dies_and_forgets(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(&format!("{name}/cluster"))?;
    let place = Place::within(&cluster, name)?;
    place.apply(MESH)?;
    place.apply(&(service("going", "{app}", 11) + &service("staying", "{app}", 12)))?;
    let detour = Detour::to(cluster.port());
    let daemon = place.daemon_by(&place.kubeconfig_by_way_of(detour.port), "istiod", |_| {})?;
    let node = place.sidecar(&json!({}));
    let proxy = Ads::connect(daemon.xds, &node);
    let before = proxy.first()?;
    let going = (Type::Cluster, place.outbound(80, "going"));
    assert!(before.contains_key(&going), "{:?}", before.keys());
    proxy.mark();

    cluster.stop_server();
    let arrivals = detour.arrivals();
    wait::until("attempts to reach the API server", SOON, || {
        (detour.arrivals() > arrivals + 2).then_some(())
    })?;
    let late = Ads::connect(daemon.xds, &node);
    assert_eq!(late.first()?, before, "a proxy that connects now must get the same");
    assert!(daemon.is_ready(), "the daemon must stay ready with its last good state");

    detour.cut();
    cluster.start_server()?;
    place.delete(&service("going", "{app}", 11))?;
    place.apply(&service("coming", "{app}", 13))?;
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &place.app, "staying-a");
    let address = place.fill("10.{n}.3.99");
    cluster.api.patch(
        &slice,
        &json!({ "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }] }),
    )?;
    cluster.compact()?;
    assert_eq!(proxy.lost(), [""; 0], "no resources may be lost");
    assert_eq!(proxy.complete().as_ref(), Some(&before), "no resources may change");

    detour.open();
    let expected = fresh(&place, &node)?;
    assert!(!expected.contains_key(&going), "{:?}", expected.keys());
    proxy.until_same(&expected, SOON)?;
    late.until_same(&expected, SOON)?;
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
    place.apply(&service("last", "{app}", 14))?;
    let last = (Type::Cluster, place.outbound(80, "last"));
    proxy.until("a change after the outage", SOON, |resources| {
        resources.contains_key(&last).then_some(())
    })?;
    Ok(())
}

const CHURNS: u32 = 1_000;
/// Maximum number of pods at a time.
const PODS: u32 = 25;

/// Pods are created, changed and deleted while connections to the API server break again and again.
fn watches_drop_in_a_storm(name: &str) -> Result<(), Failed> {
    let place = Place::shared(1, name)?;
    place.apply(MESH)?;
    let detour = Detour::to(place.cluster.port());
    let daemon = place.daemon_by(&place.kubeconfig_by_way_of(detour.port), "istiod", |_| {})?;
    let node = place.sidecar(&json!({}));
    let proxy = Ads::connect(daemon.xds, &node);
    proxy.first()?;
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &place.app, "web-a");
    let mut present = vec![false; PODS as usize];
    for churn in 0..CHURNS {
        let index = (churn * 7) % PODS;
        let reference = Reference::new("v1", "Pod", &place.app, &format!("churned-{index}"));
        let present = &mut present[index as usize];
        match (*present, churn % 3) {
            (false, _) => {
                place.cluster.api.create(&pod(&place, index, churn))?;
                *present = true;
            }
            (true, 0) => {
                place.cluster.api.delete(&reference)?;
                *present = false;
            }
            (true, _) => {
                let labels = json!({ "metadata": { "labels": { "version": format!("v{}", churn % 5) } } });
                place.cluster.api.patch(&reference, &labels)?;
            }
        }
        if churn % 10 == 0 {
            place
                .cluster
                .api
                .patch(&slice, &json!({ "endpoints": endpoints(&place, churn) }))?;
        }
        if churn % 25 == 0 {
            detour.sever();
        }
    }
    let expected = fresh(&place, &node)?;
    let assignment = &expected[&(Type::Endpoints, place.outbound(80, "web"))];
    assert!(!ads::endpoints(assignment)?.is_empty(), "some endpoints must remain");
    proxy.until_same(&expected, SOON)?;
    eprintln!("{} connections for {CHURNS} churns", detour.arrivals());
    Ok(())
}

fn pod(place: &Place, index: u32, churn: u32) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": place.app, "name": format!("churned-{index}"),
            "labels": { "app": "web", "version": format!("v{}", churn % 5) } },
        "spec": { "serviceAccountName": format!("account-{}", churn % 3), "nodeName": format!("{}-node", place.trial),
            "containers": [{ "name": "web", "image": "web" }] } })
}

/// Some of the pods, ready or not.
fn endpoints(place: &Place, churn: u32) -> Value {
    let chosen = (0..PODS).filter(|index| !(index + churn / 10).is_multiple_of(3));
    chosen
        .map(|index| {
            json!({ "addresses": [place.fill(&format!("10.{{n}}.4.{}", index + 1))],
                "conditions": { "ready": !(index + churn).is_multiple_of(5) },
                "targetRef": { "kind": "Pod", "namespace": place.app, "name": format!("churned-{index}") } })
        })
        .collect()
}
