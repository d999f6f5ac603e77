//! Extensions of a small mesh through the store, as in serving.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::{Value, json};

use crate::{
    generate::{
        Proxy, ResourceType, fixture,
        proxy::Identity,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, World, fixture as rows, installation::Installation},
    table::ChangeSet,
};

const MESH: &str = "proxyListenPort: 15001\nproxyInboundListenPort: 15006\ntrustDomain: cluster.local\n";

const SECRET: &str = "
apiVersion: v1
kind: Secret
metadata: {name: registry}
type: kubernetes.io/dockerconfigjson
stringData: {.dockerconfigjson: '{\"auths\":{}}'}
";

const PREFIX: &str = "extensions.istio.io/trafficextension/";

/// Returns a document of a kind; `spec` is in flow style.
fn extension(kind: &str, name: &str, created: u32, spec: &str) -> String {
    let (namespace, name) = name.split_once('/').expect("a namespace and a name");
    format!(
        "---\napiVersion: extensions.istio.io/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}, \
         creationTimestamp: '2024-01-0{created}T00:00:00Z'}}\nspec: {spec}\n"
    )
}

fn plugin(name: &str, created: u32, more: &str) -> String {
    extension(
        "WasmPlugin",
        name,
        created,
        &format!("{{url: example.com/{name}, {more}}}"),
    )
}

/// Returns a sidecar of the workload; without `extensions` it has all of them.
fn sidecar(extensions: Option<&[&str]>) -> Proxy {
    proxy("sidecar", extensions)
}

fn proxy(kind: &str, extensions: Option<&[&str]>) -> Proxy {
    let metadata = json!({"SERVICE_ACCOUNT": "a", "LABELS": {"app": "a"}, "INSTANCE_IPS": "10.1.0.1"});
    let node = format!("{kind}~10.1.0.1~a-0.default~default.svc.cluster.local");
    Proxy {
        identity: Identity::from_spiffe("spiffe://cluster.local/ns/default/sa/a"),
        ..fixture::changed(fixture::client(&node, &metadata), |kind| {
            kind.extensions = fixture::extensions(extensions);
        })
    }
}

fn store(config: &str, proxy: Proxy) -> ConfigStore {
    let objects = [fixture::APP, SECRET].join("---");
    let files = [
        ("mesh.yaml", MESH),
        ("kube.yaml", objects.as_str()),
        ("config.yaml", config),
    ];
    fixture::store(Installation::default(), &files, vec![proxy])
}

/// Returns the user filters of each chain of the listeners whose name contains a text, without duplicates.
fn user_filters(store: &ConfigStore, listener: &str) -> BTreeSet<Vec<String>> {
    let listener = fixture::resource(store, 0, ResourceType::Listener, listener);
    let chains = listener["filterChains"].as_array().cloned().unwrap_or_default();
    chains.iter().map(|chain| names(&chain["filters"])).collect()
}

/// Returns the names of user filters in a list and in its connection managers.
fn names(filters: &Value) -> Vec<String> {
    let filters = filters.as_array().cloned().unwrap_or_default();
    let own = |filter: &Value| {
        let name = filter["name"].as_str().expect("a name");
        let of_requests = names(&filter["typedConfig"]["httpFilters"]);
        let name = name.strip_prefix(PREFIX).map(str::to_owned);
        name.into_iter().chain(of_requests).collect::<Vec<_>>()
    };
    filters.iter().flat_map(own).collect()
}

/// Returns the variables of a plugin of the first proxy.
fn environment(store: &ConfigStore, name: &str) -> Value {
    let resource = fixture::resource(store, 0, ResourceType::Extension, &format!("{PREFIX}{name}"));
    resource["typedConfig"]["config"]["vmConfig"]["environmentVariables"].clone()
}

#[test]
fn phases_then_priorities_then_namespaces_then_age() {
    let config = [
        plugin("istio-system/root", 1, "phase: AUTHN"),
        plugin("default/late", 3, "phase: AUTHN"),
        plugin("default/early", 2, "phase: AUTHN"),
        plugin("istio-system/high", 4, "phase: AUTHN, priority: 1"),
        plugin("default/negative", 1, "phase: AUTHN, priority: -1"),
        plugin("default/last", 1, "priority: 9"),
        plugin("default/stats", 1, "phase: STATS"),
        plugin("default/other", 1, "selector: {matchLabels: {app: b}}"),
        plugin("elsewhere/other", 1, "phase: AUTHN"),
        extension(
            "TrafficExtension",
            "default/script",
            1,
            "{lua: {inlineCode: x()}, phase: AUTHZ}",
        ),
    ];
    let store = store(&config.concat(), sidecar(None));
    let expected = ["default.last~", "default.stats~"];
    let found = user_filters(&store, "virtualInbound");
    let all = found.iter().max_by_key(|names| names.len()).expect("a chain");
    let short: Vec<_> = all
        .iter()
        .map(|name| name.trim_end_matches("istio-translated-wasmplugin"))
        .collect();
    assert_eq!(
        short,
        [
            "istio-system.high~",
            "default.negative~",
            "default.early~",
            "default.late~",
            "istio-system.root~",
            "default.script",
            expected[1],
            expected[0],
        ]
    );
    let served = fixture::names(&store, 0, ResourceType::Extension);
    assert!(served.contains(&format!("{PREFIX}default.other~istio-translated-wasmplugin")));
    assert!(
        !served
            .iter()
            .any(|name| name.contains("elsewhere") || name.ends_with("script"))
    );
}

#[test]
fn modes_and_ports_choose_listeners() {
    let wasm = |more: &str| format!("{{wasm: {{url: a}}, match: [{more}]}}");
    let traffic = |name: &str, more: &str| extension("TrafficExtension", name, 1, &wasm(more));
    let config = [
        traffic("default/client", "{mode: CLIENT}"),
        traffic("default/server", "{mode: SERVER, ports: [{number: 8080}]}"),
        traffic(
            "default/eighty",
            "{mode: CLIENT_AND_SERVER, ports: [{number: 81}, {number: 80}]}",
        ),
        traffic("default/none", "{ports: [{number: 81}]}"),
    ];
    let store = store(&config.concat(), sidecar(None));
    let outbound = user_filters(&store, "0.0.0.0_80");
    assert_eq!(
        outbound,
        [vec!["default.client".to_owned(), "default.eighty".to_owned()]].into()
    );
    let inbound = user_filters(&store, "virtualInbound");
    assert_eq!(inbound, [vec![], vec!["default.server".to_owned()]].into());
}

#[test]
fn network_plugins_are_in_all_chains() {
    let config = extension(
        "TrafficExtension",
        "default/n",
        1,
        "{wasm: {url: a, type: NETWORK}, match: [{mode: SERVER, ports: [{number: 8080}, {number: 90}]}]}",
    );
    let store = store(&config, sidecar(None));
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "virtualInbound");
    let chains = listener["filterChains"].as_array().expect("filter chains");
    let with = chains.iter().filter(|chain| !names(&chain["filters"]).is_empty());
    // Chains of requests match the workload's port, others the service's.
    let ports: BTreeSet<_> = with
        .map(|chain| chain["filterChainMatch"]["destinationPort"].to_string())
        .collect();
    assert_eq!(ports, ["8080".to_owned(), "9090".to_owned()].into());
    let discovery = chains.iter().find_map(|chain| {
        let filters = chain["filters"].as_array()?;
        filters.iter().find_map(|filter| filter.get("configDiscovery"))
    });
    assert_eq!(
        discovery.expect("a filter")["typeUrls"],
        json!([
            "type.googleapis.com/envoy.extensions.filters.network.wasm.v3.Wasm",
            "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC"
        ])
    );
}

#[test]
fn gateways_have_network_plugins_in_the_first_request_chain() {
    let server = |host: &str| {
        let tls = "tls: {mode: SIMPLE, serverCertificate: /c, privateKey: /k}";
        format!("  - {{port: {{number: 443, name: {host}, protocol: HTTPS}}, hosts: [{host}.com], {tls}}}\n")
    };
    let found = |first: &str, more: &str| {
        let gateway = format!(
            "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: g}}\nspec:\n  \
             selector: {{app: a}}\n  servers:\n{first}{}{}{more}",
            server("one"),
            server("two")
        );
        let config =
            gateway + &plugin("default/n", 1, "type: NETWORK") + &plugin("default/h", 1, "match: [{mode: CLIENT}]");
        let store = store(&config, proxy("router", None));
        let listener = fixture::resource(&store, 0, ResourceType::Listener, "0.0.0.0_443");
        let chains = listener["filterChains"].as_array().expect("filter chains");
        let found = chains.iter().map(|chain| names(&chain["filters"]).len());
        found.collect::<Vec<_>>()
    };
    assert_eq!(found("", ""), [2, 1]);
    let passthrough = "  - {port: {number: 443, name: tls, protocol: TLS}, hosts: ['*'], tls: {mode: PASSTHROUGH}}\n";
    let route = "---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: v}
spec:
  hosts: [one.com]
  gateways: [g]
  tls: [{match: [{sniHosts: [one.com]}], route: [{destination: {host: a.default.svc.cluster.local}}]}]
";
    let message = "the server that passes TLS through has the name of the first chain";
    assert_eq!(found(passthrough, route), [1, 2], "{message}");
}

#[test]
fn secrets_come_from_the_plugins_namespace() {
    let config = [
        plugin("default/own", 1, "imagePullSecret: elsewhere/registry"),
        plugin("default/missing", 1, "imagePullSecret: none"),
        plugin(
            "default/other",
            1,
            "imagePullSecret: registry, selector: {matchLabels: {app: b}}",
        ),
        plugin(
            "default/crafted",
            1,
            "vmConfig: {env: [{name: ISTIO_META_WASM_IMAGE_PULL_SECRET, value: 'kubernetes://default/registry'}]}",
        ),
        plugin("default/builtin", 1, "imagePullSecret: 'builtin://'"),
    ]
    .concat();
    let secret = |store: &ConfigStore, name: &str| {
        environment(store, &format!("default.{name}~istio-translated-wasmplugin"))["keyValues"]
            ["ISTIO_META_WASM_IMAGE_PULL_SECRET"]
            .clone()
    };
    let known = store(&config, sidecar(None));
    assert_eq!(secret(&known, "own"), "{\"auths\":{}}");
    for name in ["missing", "other", "crafted"] {
        assert_eq!(secret(&known, name), "", "{name}");
    }
    assert_eq!(secret(&known, "builtin"), Value::Null);
    assert!(known.notes().iter().any(|note| note.code == "wasm_pull_secret_missing"));
    let unauthenticated = Proxy {
        identity: None,
        ..sidecar(None)
    };
    assert_eq!(secret(&store(&config, unauthenticated), "own"), "");
}

#[test]
fn unsupported_plugins_are_omitted_or_deny() {
    let has = ["envoy.filters.http.rbac"];
    let open = plugin("default/open", 1, "failStrategy: FAIL_OPEN");
    let script = extension("TrafficExtension", "default/script", 1, "{lua: {inlineCode: x()}}");
    let lenient = store(&(open + &script), sidecar(Some(&has)));
    assert_eq!(user_filters(&lenient, "virtualInbound"), [vec![]].into());
    let listener = fixture::resource(&lenient, 0, ResourceType::Listener, "virtualInbound").to_string();
    assert!(!listener.contains("\"denied\""));
    let code = |store: &ConfigStore, code: &str| store.notes().iter().filter(|note| note.code == code).count();
    assert!(code(&lenient, "proxy_extension_missing") >= 2);
    assert_eq!(code(&lenient, "security_extension_missing"), 0);

    let network = extension(
        "TrafficExtension",
        "default/n",
        1,
        "{wasm: {url: a, type: NETWORK}, match: [{ports: [{number: 90}]}]}",
    );
    let config = plugin("default/closed", 1, "match: [{mode: SERVER, ports: [{number: 8080}]}]") + &network;
    let strict = store(&config, sidecar(Some(&has)));
    let listener = fixture::resource(&strict, 0, ResourceType::Listener, "virtualInbound");
    let chains = listener["filterChains"].as_array().expect("filter chains");
    for chain in chains {
        let denies = match chain["filterChainMatch"]["destinationPort"].as_u64() {
            Some(8080) => chain.to_string().contains("\"denied\""),
            Some(9090) => chain.to_string().contains("BlackHoleCluster"),
            _ => continue,
        };
        assert!(denies, "{chain}");
    }
    assert!(code(&strict, "security_extension_missing") >= 2);
}

#[test]
fn plugin_settings_change_no_listener() {
    let files = |value: u32| {
        let config = plugin("default/p", 1, &format!("pluginConfig: {{value: {value}}}"));
        let files = [
            ("mesh.yaml", MESH),
            ("kube.yaml", fixture::APP),
            ("config.yaml", config.as_str()),
        ];
        let rows = rows::folder(&Installation::default(), &files);
        rows.into_iter().map(Change::Upsert).collect::<Vec<_>>()
    };
    let mut world = World::new(Installation::default());
    let mut store = ConfigStore::default();
    let membership = ProxyEvents {
        connected: vec![(ConnectionId(0), Arc::new(sidecar(None)))],
        ..ProxyEvents::default()
    };
    let mesh = world.commit(files(1)).snapshot;
    store.update(&mesh, &ChangeSet::default(), membership, &Serial);
    let commit = world.commit(files(2));
    let update = store.update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
    assert_eq!(update.built, 1);
    let name = format!("{PREFIX}default.p~istio-translated-wasmplugin");
    let resource = fixture::resource(&store, 0, ResourceType::Extension, &name);
    assert_eq!(
        resource["typedConfig"]["config"]["configuration"]["value"],
        "{\"value\":2}"
    );
}

#[test]
fn envoy_filters_add_extensions_in_any_context() {
    let config = "
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: f}
spec:
  configPatches:
  - applyTo: EXTENSION_CONFIG
    match: {context: GATEWAY}
    patch:
      operation: ADD
      value:
        name: mine
        typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua, inlineCode: x()}
  - applyTo: EXTENSION_CONFIG
    patch: {operation: MERGE, value: {name: merged}}
";
    let store = store(config, sidecar(None));
    assert_eq!(fixture::names(&store, 0, ResourceType::Extension), ["mine"]);
}
