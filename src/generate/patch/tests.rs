//! Patches through the store, as in serving.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::set;
use crate::{
    generate::{RequestedResources, ResourceType, fixture, proxy::Extensions, resource::Note, store::ConfigStore},
    model::{fixture::folder_world, installation::Installation},
};

const MESH: &str = "proxyListenPort: 15001\nproxyInboundListenPort: 15006\n";

const OUTBOUND_TCP: &str = "10.0.0.1_90";

/// Returns a store with a sidecar of the app `a` and one EnvoyFilter with these patches (a YAML list).
fn patched(patches: &str) -> ConfigStore {
    patched_for(patches, Extensions::default())
}

fn patched_for(patches: &str, extensions: Extensions) -> ConfigStore {
    let metadata = json!({"SERVICE_ACCOUNT": "a", "LABELS": {"app": "a"}, "ISTIO_VERSION": "1.30.3"});
    let client = fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", &metadata);
    let proxy = fixture::changed(client, |kind| kind.extensions = extensions);
    let filter = format!(
        "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: ef}}
spec:
  configPatches: {patches}
"
    );
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", fixture::APP),
        ("config.yaml", filter.as_str()),
    ];
    fixture::store(Installation::default(), &files, vec![proxy])
}

fn listener(store: &ConfigStore, name: &str) -> Value {
    fixture::resource(store, 0, ResourceType::Listener, name)
}

fn names(store: &ConfigStore) -> BTreeSet<String> {
    fixture::names(store, 0, ResourceType::Listener).into_iter().collect()
}

fn names_of(filters: &Value) -> Vec<&str> {
    let filters = filters.as_array().map(Vec::as_slice).unwrap_or_default();
    filters.iter().filter_map(|filter| filter["name"].as_str()).collect()
}

fn filters(store: &ConfigStore, name: &str) -> Vec<String> {
    let listener = listener(store, name);
    let filters = &listener["filterChains"][0]["filters"];
    names_of(filters).into_iter().map(str::to_owned).collect()
}

/// Returns the HTTP filters of the inbound listener's chain for a port.
fn http_filters(store: &ConfigStore, port: u32) -> Vec<Value> {
    let listener = listener(store, "virtualInbound");
    let chains = listener["filterChains"].as_array().expect("filter chains");
    let chain = chains
        .iter()
        .find(|chain| chain["filterChainMatch"]["destinationPort"] == port)
        .expect("a chain of the port");
    let filters = chain["filters"].as_array().expect("a list of filters");
    let manager = filters.last().expect("a filter");
    manager["typedConfig"]["httpFilters"]
        .as_array()
        .cloned()
        .unwrap_or_default()
}

fn has_note(store: &ConfigStore, code: &str, text: &str) -> bool {
    let notes = store.notes();
    notes.iter().any(|note| note.code == code && note.detail.contains(text))
}

const ECHO: &str =
    "{name: NAME, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.network.echo.v3.Echo}}";
const LUA: &str = "{name: NAME, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua}}";

fn echo(name: &str) -> String {
    ECHO.replace("NAME", name)
}

fn lua(name: &str) -> String {
    LUA.replace("NAME", name)
}

#[test]
fn network_filters_have_an_order() {
    let of = |operation: &str, name: &str, filter: &str| {
        format!(
            "\n  - applyTo: NETWORK_FILTER
    match: {{context: SIDECAR_OUTBOUND, listener: {{portNumber: 90{filter}}}}}
    patch: {{operation: {operation}, value: {}}}",
            echo(name)
        )
    };
    let beside = ", filterChain: {filter: {name: envoy.filters.network.tcp_proxy}}";
    let base = filters(&patched("[]"), OUTBOUND_TCP);
    let tcp = base.last().expect("a filter").clone();
    let cases = [
        (of("ADD", "x", ""), [base.clone(), vec!["x".into()]].concat()),
        (
            of("INSERT_FIRST", "x", beside),
            [vec!["x".into()], base.clone()].concat(),
        ),
        (of("INSERT_BEFORE", "x", ""), [vec!["x".into()], base.clone()].concat()),
        (of("INSERT_AFTER", "x", ""), [base.clone(), vec!["x".into()]].concat()),
        (
            of("INSERT_BEFORE", "x", beside),
            [&base[..base.len() - 1], &["x".into(), tcp]].concat(),
        ),
        (
            of("REPLACE", "x", beside),
            [&base[..base.len() - 1], &["x".into()]].concat(),
        ),
        (of("REPLACE", "x", ""), base.clone()),
        (of("REMOVE", "x", ""), base.clone()),
        (of("REMOVE", "x", beside), base[..base.len() - 1].to_vec()),
    ];
    for (patch, expected) in cases {
        assert_eq!(filters(&patched(&patch), OUTBOUND_TCP), expected, "{patch}");
    }
}

#[test]
fn in_virtual_listeners_a_port_matches_the_chain() {
    let patch = format!(
        "
  - applyTo: HTTP_FILTER
    match:
      context: SIDECAR_INBOUND
      listener:
        portNumber: 8080
        filterChain: {{filter: {{name: envoy.filters.network.http_connection_manager, subFilter: {{name: envoy.filters.http.router}}}}}}
    patch: {{operation: INSERT_BEFORE, value: {}}}
  - applyTo: LISTENER
    match: {{listener: {{portNumber: 15006}}}}
    patch: {{operation: MERGE, value: {{per_connection_buffer_limit_bytes: 7}}}}
",
        lua("own")
    );
    let store = patched(&patch);
    let filters = Value::Array(http_filters(&store, 8080));
    let names = names_of(&filters);
    assert_eq!(names[names.len() - 2..], ["own", "envoy.filters.http.router"]);
    assert_eq!(listener(&store, "virtualInbound")["perConnectionBufferLimitBytes"], 7);
    assert!(has_note(&store, set::STATUS, "default/ef configPatches[0] HTTP_FILTER"));
}

#[test]
fn packed_configurations_are_merged_inside() {
    let store = patched(
        "
  - applyTo: HTTP_FILTER
    match:
      context: SIDECAR_INBOUND
      listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager, subFilter: {name: envoy.filters.http.router}}}}
    patch:
      operation: MERGE
      value: {name: renamed, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router, start_child_span: true}}
",
    );
    let filters = http_filters(&store, 8080);
    let router = filters
        .iter()
        .find(|filter| filter["name"] == "renamed")
        .expect("the router");
    assert_eq!(router["typedConfig"]["startChildSpan"], true);
}

#[test]
fn an_impossible_merge_ends_the_patching_of_a_listener() {
    let store = patched(
        "
  - applyTo: LISTENER
    match: {context: SIDECAR_INBOUND}
    patch: {operation: MERGE, value: {freebind: true}}
  - applyTo: NETWORK_FILTER
    match: {context: SIDECAR_INBOUND}
    patch:
      operation: MERGE
      value: {name: renamed, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  - applyTo: HTTP_FILTER
    match: {context: SIDECAR_INBOUND, listener: {filterChain: {filter: {name: envoy.filters.network.http_connection_manager}}}}
    patch: {operation: INSERT_FIRST, value: {name: late}}
",
    );
    assert_eq!(listener(&store, "virtualInbound")["freebind"], true);
    let filters = Value::Array(http_filters(&store, 8080));
    assert!(!names_of(&filters).contains(&"late"));
    assert!(
        has_note(&store, set::PROBLEM, "configPatches[1]"),
        "{:?}",
        store.notes()
    );
    assert!(!has_note(&store, set::STATUS, "configPatches[2]"));
}

#[test]
fn listeners_are_added_and_removed() {
    let add = |context: &str, name: &str| {
        format!(
            "
  - applyTo: LISTENER
    match: {{context: {context}}}
    patch: {{operation: ADD, value: {{name: {name}, filter_chains: [{{filters: [{}]}}]}}}}",
            echo("e")
        )
    };
    let patches = [
        add("ANY", "any"),
        add("SIDECAR_INBOUND", "inbound"),
        add("GATEWAY", "gateway"),
        "\n  - applyTo: LISTENER\n    match: {listener: {name: virtualOutbound}}\n    patch: {operation: REMOVE}\n"
            .into(),
    ];
    let names = names(&patched(&patches.concat()));
    assert!(names.contains("any") && names.contains("inbound"), "{names:?}");
    assert!(!names.contains("gateway") && !names.contains("virtualOutbound"));
}

#[test]
fn chains_are_added_and_removed() {
    let patches = format!(
        "
  - applyTo: FILTER_CHAIN
    match: {{context: SIDECAR_INBOUND, listener: {{name: virtualInbound, filterChain: {{name: virtualInbound-blackhole}}}}}}
    patch: {{operation: REMOVE}}
  - applyTo: FILTER_CHAIN
    match: {{context: SIDECAR_INBOUND, listener: {{name: virtualInbound}}}}
    patch: {{operation: ADD, value: {{name: own, filters: [{}]}}}}
  - applyTo: FILTER_CHAIN
    match: {{context: SIDECAR_INBOUND, listener: {{name: virtualInbound}}}}
    patch: {{operation: ADD, value: {{name: empty}}}}
",
        echo("e")
    );
    let store = patched(&patches);
    let listener = listener(&store, "virtualInbound");
    let names = names_of(&listener["filterChains"]);
    assert_eq!(names.last(), Some(&"own"));
    assert!(!names.contains(&"virtualInbound-blackhole"));
    assert!(has_note(&store, set::PROBLEM, "configPatches[2]"));
}

#[test]
fn unsupported_filters_are_omitted_except_security() {
    let listed = |names: &[&str]| fixture::extensions(Some(names));
    let patch = format!(
        "
  - applyTo: HTTP_FILTER
    match: {{context: SIDECAR_INBOUND}}
    patch: {{operation: INSERT_FIRST, value: {}}}
  - applyTo: HTTP_FILTER
    match: {{context: SIDECAR_INBOUND}}
    patch: {{operation: INSERT_FIRST, value: {{name: envoy.filters.http.ext_authz}}}}
",
        lua("own")
    );
    let upstream = patched_for(&patch, listed(&["envoy.filters.http.router"]));
    let filters = Value::Array(http_filters(&upstream, 8080));
    assert!(!names_of(&filters).contains(&"own"));
    assert!(names_of(&filters).contains(&"envoy.filters.http.ext_authz"));
    assert!(has_note(&upstream, set::PROBLEM, "lacks the extension own"));
    let able = patched_for(&patch, listed(&["envoy.filters.http.lua"]));
    assert!(names_of(&Value::Array(http_filters(&able, 8080))).contains(&"own"));
}

#[test]
fn a_transport_socket_patch_merges_nothing_else() {
    let patch = "
  - applyTo: FILTER_CHAIN
    match: {context: SIDECAR_INBOUND, listener: {filterChain: {transportProtocol: tls, destinationPort: 8080}}}
    patch:
      operation: MERGE
      value:
        name: not merged
        transport_socket:
          name: envoy.transport_sockets.tls
          typed_config:
            '@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
            session_timeout: 5s
";
    let listener = listener(&patched(patch), "virtualInbound");
    let chains = listener["filterChains"].as_array().expect("filter chains");
    let merged: Vec<_> = chains
        .iter()
        .filter(|chain| chain["transportSocket"]["typedConfig"]["sessionTimeout"] == "5s")
        .collect();
    assert_eq!(merged.len(), 1);
    let config = &merged[0]["transportSocket"]["typedConfig"];
    assert!(config["commonTlsContext"].is_object(), "what was there stays");
    assert_ne!(merged[0]["name"], "not merged");
}

#[test]
fn notes_become_the_metric() {
    let store = patched("[{applyTo: LISTENER, patch: {operation: MERGE, value: {freebind: true}}}]");
    let notes = store.notes();
    let all: BTreeSet<_> = notes.iter().filter_map(set::status).collect();
    assert_eq!(all, BTreeSet::from([("default/ef", "listener", "applied")]));
}

#[test]
fn a_resource_keeps_few_of_many_notes_about_patches() {
    let note = |code, number: usize| Note {
        code,
        detail: format!("default/ef configPatches[{number}] CLUSTER: text {number}").into(),
    };
    let mut notes: Vec<Note> = (0..2000).map(|number| note(set::PROBLEM, number)).collect();
    notes.extend((0..2000).map(|number| note("other", number)));
    set::compact(&mut notes);
    let of_patches: Vec<&Note> = notes.iter().filter(|note| note.code == set::PROBLEM).collect();
    assert!(of_patches.len() < 300 && notes.len() > 2000, "{} notes", notes.len());
    let results: BTreeSet<_> = of_patches.into_iter().filter_map(set::status).collect();
    assert_eq!(results, BTreeSet::from([("default/ef", "cluster", "error")]));
}

#[test]
fn none_of_many_patches_with_effect_is_unused() {
    let matched = "{listener: {name: virtualOutbound}}";
    let patch = format!(
        "\n  - {{applyTo: LISTENER, match: {matched}, patch: {{operation: MERGE, value: {{freebind: true}}}}}}"
    );
    let other = "\n  - {applyTo: CLUSTER, match: {cluster: {name: none}}, patch: {operation: REMOVE}}";
    let filter = format!(
        "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: ef}}
spec:
  configPatches: {}{other}
",
        patch.repeat(260)
    );
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", fixture::APP),
        ("config.yaml", filter.as_str()),
    ];
    let world = folder_world(Installation::default(), &files);
    let client = fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", &json!({}));
    let store = fixture::store_of_world(&world, vec![client], &RequestedResources::default());
    let notes = store.notes();
    assert!(notes.len() < 300, "{} notes", notes.len());
    let unused = set::unused(&world.snapshot(), &notes);
    let unused: Vec<&str> = unused.iter().map(|note| note.detail.as_str()).collect();
    assert_eq!(unused, ["default/ef configPatches[260] CLUSTER"]);
}

#[test]
fn listener_filters_are_patched_by_name() {
    let of = |operation: &str, condition: &str, value: &str| {
        format!(
            "
  - applyTo: LISTENER_FILTER
    match: {{context: SIDECAR_INBOUND, listener: {{name: virtualInbound{condition}}}}}
    patch: {{operation: {operation}, value: {{name: {value}}}}}"
        )
    };
    let named = |patches: &str| {
        let listener = listener(&patched(patches), "virtualInbound");
        let names = names_of(&listener["listenerFilters"]).into_iter().map(str::to_owned);
        names.collect::<Vec<_>>()
    };
    let base = named("[]");
    let condition = format!(", listenerFilter: {}", base[1]);
    let mut after = base.clone();
    after.insert(2, "x".into());
    let mut replaced = base.clone();
    replaced[1] = "x".into();
    let mut removed = base.clone();
    removed.remove(1);
    let cases = [
        (of("ADD", &condition, "x"), [base.clone(), vec!["x".into()]].concat()),
        (of("INSERT_BEFORE", "", "x"), [vec!["x".into()], base.clone()].concat()),
        (of("INSERT_AFTER", &condition, "x"), after),
        (of("REPLACE", &condition, "x"), replaced),
        (of("REMOVE", &condition, "x"), removed),
        (of("REMOVE", "", "x"), base.clone()),
    ];
    for (patch, expected) in cases {
        assert_eq!(named(&patch), expected, "{patch}");
    }
}

#[test]
fn unsupported_added_listeners_are_omitted() {
    let patch = format!(
        "
  - applyTo: LISTENER
    patch: {{operation: ADD, value: {{name: own, filter_chains: [{{filters: [{}]}}]}}}}
",
        echo("e")
    );
    let listed = fixture::extensions(Some(&["envoy.filters.http.router"]));
    let store = patched_for(&patch, listed);
    assert!(!names(&store).contains("own"));
    assert!(has_note(&store, set::PROBLEM, "lacks the extension e"));
}
