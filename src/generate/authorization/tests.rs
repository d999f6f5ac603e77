use serde_json::{Value, json};

use crate::{
    generate::{ResourceType, fixture, store::ConfigStore},
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

fn store(ambient: bool, policies: &str) -> ConfigStore {
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
    fixture::store(installation, &[("policies.yaml", policies)], vec![ztunnel])
}

fn names(ambient: bool) -> Vec<String> {
    fixture::names(&store(ambient, POLICIES), 0, ResourceType::Authorization)
}

/// Returns the groups of a policy with this specification; null if there are none.
fn groups(spec: &str) -> Value {
    let policy = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p, namespace: a}}\n\
         spec: {spec}\n"
    );
    let resource = fixture::resource(&store(true, &policy), 0, ResourceType::Authorization, "a/p");
    assert_eq!(resource["name"], "p");
    resource["groups"].clone()
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

#[test]
fn allow_rules_with_trust_domains_are_omitted() {
    let web = json!([{"rules": [{"matches": [{"namespaces": [{"exact": "web"}]}]}]}]);
    let source = |source: &str| groups(&format!("{{rules: [{{from: [{{source: {{{source}}}}}]}}]}}"));
    assert_eq!(source("namespaces: [web]"), web);
    assert_eq!(source("namespaces: [web], trustDomains: [td]"), Value::Null);
    assert_eq!(source("namespaces: [web], notTrustDomains: [td]"), Value::Null);
    let deny = "{action: DENY, rules: [{from: [{source: {namespaces: [web], trustDomains: [td]}}]}]}";
    assert_eq!(groups(deny), web);
}

#[test]
fn policies_with_empty_selectors_apply_to_all_workloads() {
    let scope = |namespace: &str, spec: &str| {
        let policy = format!(
            "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
             metadata: {{name: p, namespace: {namespace}}}\nspec: {{{spec}}}\n"
        );
        let name = format!("{namespace}/p");
        let resource = fixture::resource(&store(true, &policy), 0, ResourceType::Authorization, &name);
        assert_eq!(resource["name"], "p");
        resource["scope"].clone()
    };
    let selecting = "selector: {matchLabels: {app: a}}";
    assert_eq!(scope("a", selecting), "WORKLOAD_SELECTOR");
    assert_eq!(scope("istio-system", selecting), "WORKLOAD_SELECTOR");
    for spec in ["", "selector: {}", "selector: {matchLabels: {}}"] {
        assert_eq!(scope("a", spec), "NAMESPACE", "{spec}");
        // The value of `GLOBAL` is the default.
        assert_eq!(scope("istio-system", spec), Value::Null, "{spec}");
    }
}
