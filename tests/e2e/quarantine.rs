//! A resource that a real Envoy refuses is withheld: everything else goes on, and a correction heals it.

use libtest_mimic::Failed;
use serde_json::{Value, json};

use super::fixture::{Fixture, TIMEOUT, WEB, answered_by, answers};
use crate::support::envoy::Protocol;
use crate::support::{http, wait};

/// Returns an EnvoyFilter that adds a filter to the sidecar's outbound listener.
fn filter(port: u16, library: &str) -> String {
    format!(
        "apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: broken, namespace: shop}}
spec:
  workloadSelector: {{labels: {{app: client}}}}
  configPatches:
  - applyTo: NETWORK_FILTER
    match: {{context: SIDECAR_OUTBOUND, listener: {{portNumber: {port}}}}}
    patch:
      operation: INSERT_FIRST
      value:
        name: added
        typed_config: {library}
"
    )
}

/// A limit of zero, which Envoy refuses: `max_connections` must be at least one.
const INVALID: &str = "{'@type': type.googleapis.com/envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit, \
                       stat_prefix: added, max_connections: 0}";
const VALID: &str = "{'@type': type.googleapis.com/envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit, \
                     stat_prefix: added, max_connections: 1000}";

pub(super) fn refused_listener_is_withheld_until_it_changes(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(protocol)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    let overview = || -> Option<Value> {
        let page = http::get(fixture.daemon.monitoring, "istiod", "/debug/status").ok()?;
        serde_json::from_str(&page.body).ok()
    };
    let rejected = || sidecar.sum(r"^listener_manager\.lds\.update_rejected$");

    fixture.write("broken.yaml", &filter(fixture.outbound().port(), INVALID));
    let refusal = wait::until("the refusal with its cause", TIMEOUT, || {
        let refusals = overview()?["refusals"].take();
        let refusal = refusals.get(0)?.clone();
        refusal["blamed"].get(0).is_some().then_some(refusal)
    })?;
    assert_eq!(
        (&refusal["type"], &refusal["quarantined"]),
        (&json!("lds"), &json!(true)),
        "{refusal:#}"
    );
    let blamed = &refusal["blamed"][0];
    assert_eq!(
        (&blamed["kind"], &blamed["name"]),
        (&json!("EnvoyFilter"), &json!("broken")),
        "{refusal:#}"
    );
    let reason = refusal["reason"].as_str().unwrap_or_default();
    assert!(
        reason.contains("MaxConnections") || reason.contains("max_connections"),
        "{reason}"
    );
    let before = rejected();
    assert!(before >= 1, "Envoy must have refused the listener");

    // The proxy keeps its listener, and everything else goes on.
    assert_eq!(answers(fixture.outbound(), WEB, 5)?, ["v1"; 5]);
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    let port = fixture.outbound().port();
    fixture.write("more.yaml", &more(port));
    wait::until("a cluster that was added later", TIMEOUT, || {
        sidecar
            .cluster(&format!("outbound|{port}||later.shop.svc.cluster.local"))
            .map(|_| ())
    })?;
    assert_eq!(rejected(), before, "what was refused must not be sent again");
    assert_eq!(answers(fixture.outbound(), WEB, 5)?, ["v2"; 5]);

    // A correction is another content, which is sent.
    let accepted = sidecar.sum(r"^listener_manager\.lds\.update_success$");
    fixture.write("broken.yaml", &filter(fixture.outbound().port(), VALID));
    wait::until("the end of the quarantine", TIMEOUT, || {
        overview()?["refusals"].as_array()?.is_empty().then_some(())
    })?;
    wait::until("the corrected listener", TIMEOUT, || {
        (sidecar.sum(r"^listener_manager\.lds\.update_success$") > accepted).then_some(())
    })?;
    answered_by("v2", fixture.outbound(), WEB)?;
    assert_eq!(rejected(), before);
    let state = wait::until("an acknowledged EnvoyFilter", TIMEOUT, || {
        let page = "/debug/status?kind=EnvoyFilter&namespace=shop&name=broken";
        let page = http::get(fixture.daemon.monitoring, "istiod", page).ok()?;
        let report: Value = serde_json::from_str(&page.body).ok()?;
        (report["state"] == "Acknowledged").then_some(report)
    })?;
    assert_eq!(state["counts"]["proxies"], 1, "{state:#}");
    Ok(())
}

/// A service that is added later.
fn more(port: u16) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: later, namespace: shop}}
spec:
  clusterIP: 10.96.0.77
  clusterIPs: [10.96.0.77]
  ports: [{{name: http, port: {port}, targetPort: 8080, protocol: TCP}}]
"
    )
}
