use serde_json::json;

use crate::{
    generate::{ResourceType, fixture},
    model::{features::Features, installation::Installation},
};

const POLICIES: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: global, namespace: istio-system}
spec: {rules: [{from: [{source: {namespaces: [a]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: http, namespace: a}
spec: {action: DENY, selector: {matchLabels: {app: a}}, rules: [{to: [{operation: {methods: [GET]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: targeted, namespace: a}
spec: {targetRefs: [{kind: Service, group: '', name: a}], rules: [{}]}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: ports, namespace: a}
spec: {selector: {matchLabels: {app: a}}, mtls: {mode: STRICT}, portLevelMtls: {80: {mode: DISABLE}}}
";

fn names(ambient: bool) -> Vec<String> {
    let installation = Installation {
        features: Features {
            pilot_enable_ambient: ambient,
            ..Features::default()
        },
        ..Installation::default()
    };
    let ztunnel = fixture::client(
        "ztunnel~10.0.0.1~z.istio-system~istio-system.svc.cluster.local",
        &json!({}),
    );
    let store = fixture::store(installation, &[("policies.yaml", POLICIES)], vec![ztunnel]);
    fixture::names(&store, 0, ResourceType::Authorization)
}

#[test]
fn ztunnels_receive_the_policies_that_they_enforce() {
    let want = [
        "a/converted_peer_authentication_ports",
        "a/http",
        "istio-system/global",
        "istio-system/istio_converted_static_strict",
    ];
    assert_eq!(names(true), want);
    assert_eq!(names(false), [""; 0], "without ambient mode");
}
