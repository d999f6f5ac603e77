//! Security policies in the listeners of a sidecar.

use super::{Bed, HTTP, Value, WORKLOAD, json, names_of, sidecar};
use crate::generate::security::JWT_FILTER;

const DENY: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: d}
spec: {action: DENY, rules: [{from: [{source: {ipBlocks: [192.0.2.0/24]}}]}]}
---
";

const CUSTOM: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: c}
spec: {action: CUSTOM, provider: {name: p}, rules: [{to: [{operation: {ports: ['80']}}]}]}
---
";

const TOKENS: &str = "
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: r}
spec: {jwtRules: [{issuer: i, jwksUri: 'https://nowhere.example.com/keys'}]}
---
";

fn bed(mesh: &str, config: &str, extensions: Option<&[&str]>) -> Bed {
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    Bed::new(mesh, &files, vec![sidecar("10.1.0.1", json!({}), extensions)])
}

/// The filters of every inbound chain that ends in a workload's port or passes through.
fn inbound(bed: &Bed) -> Vec<Value> {
    let listener = bed.get("virtualInbound");
    let chains = listener["filterChains"].as_array().expect("chains");
    let chains = chains
        .iter()
        .filter(|chain| chain["name"] != "virtualInbound-blackhole");
    chains.map(|chain| chain["filters"].clone()).collect()
}

fn connection_manager(filters: &Value) -> Option<&Value> {
    let last = filters.as_array()?.last()?;
    (last["name"] == HTTP).then(|| &last["typedConfig"])
}

fn has_note(bed: &Bed, code: &str, detail: &str) -> bool {
    let notes = bed.store.notes();
    notes.iter().any(|note| note.code == code && note.detail == detail)
}

#[test]
fn a_client_that_cannot_enforce_its_policies_lets_nothing_in() {
    let bed = bed("", DENY, Some(&["envoy.filters.http.router"]));
    for filters in inbound(&bed) {
        match connection_manager(&filters) {
            Some(manager) => {
                let route = &manager["routeConfig"]["virtualHosts"][0]["routes"][0];
                assert_eq!(route["directResponse"]["status"], 403, "{manager}");
            }
            None => assert_eq!(
                filters.as_array().and_then(|filters| filters.last()).expect("a filter")["typedConfig"]["cluster"],
                "BlackHoleCluster"
            ),
        }
    }
    assert!(!bed.get("virtualInbound").to_string().contains("rbac.v3"));
    assert!(has_note(&bed, "security_extension_missing", "envoy.filters.http.rbac"));
    assert!(has_note(
        &bed,
        "security_extension_missing",
        "envoy.filters.network.rbac"
    ));
    // What goes out is not concerned.
    assert!(!bed.get("0.0.0.0_80").to_string().contains("directResponse"));
}

#[test]
fn tokens_of_an_issuer_without_keys_are_refused() {
    let bed = bed("", TOKENS, None);
    let managers = inbound(&bed);
    let managers: Vec<&Value> = managers.iter().filter_map(connection_manager).collect();
    assert!(!managers.is_empty());
    for manager in managers {
        let filters = manager["httpFilters"].as_array().expect("filters");
        let filter = filters.iter().find(|filter| filter["name"] == JWT_FILTER);
        let provider = &filter.expect("the filter")["typedConfig"]["providers"]["origins-0"];
        let keys = provider["localJwks"]["inlineString"].as_str().expect("keys");
        let keys: Value = serde_json::from_str(keys).expect("JSON");
        assert_eq!(keys["keys"][0]["kid"], "unavailable");
    }
    assert!(has_note(&bed, "jwks_unavailable", "i"));
}

#[test]
fn a_provider_is_asked_about_what_a_custom_policy_picks() {
    let provider = |service: &str| {
        format!("extensionProviders: [{{name: p, envoyExtAuthzGrpc: {{service: {service}, port: 9000}}}}]\n")
    };
    let (rbac, ask) = ("envoy.filters.network.rbac", "envoy.filters.network.ext_authz");
    let tcp = |bed: &Bed| {
        let chains = inbound(bed);
        let tcp = chains.iter().find(|filters| connection_manager(filters).is_none());
        tcp.expect("a TCP chain").clone()
    };
    let known = bed(&provider("a.default.svc.cluster.local"), CUSTOM, None);
    let filters = tcp(&known);
    let names = names_of(&filters);
    let first = names.iter().position(|name| *name == rbac).expect("a shadow filter");
    assert_eq!(names[first + 1], ask);
    assert_eq!(filters[first]["typedConfig"]["rules"], Value::Null);
    let unknown = bed(&provider("nobody.example.com"), CUSTOM, None);
    let filters = tcp(&unknown);
    let names = names_of(&filters);
    let first = names.iter().position(|name| *name == rbac).expect("a filter");
    assert!(!names.contains(&ask));
    assert_eq!(filters[first]["typedConfig"]["rules"]["action"], "DENY");
    assert!(has_note(&unknown, "authorization_provider_unusable", "p"));
}

#[test]
fn a_provider_whose_name_is_no_label_cannot_be_asked() {
    let mesh =
        "extensionProviders: [{name: P_1, envoyExtAuthzGrpc: {service: a.default.svc.cluster.local, port: 9000}}]\n";
    let bed = bed(mesh, &CUSTOM.replace("name: p}", "name: P_1}"), None);
    assert!(!bed.get("virtualInbound").to_string().contains("ext_authz\","));
    assert!(has_note(&bed, "authorization_provider_unusable", "P_1"));
}
