//! Security policies in the listeners of a sidecar, and limits of what all chains repeat.

use std::{collections::BTreeMap, sync::Arc};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};

use super::{Fixture, HTTP, MESH, Value, WORKLOAD, chains, json, names_of, sidecar};
use crate::{
    api::fetched_keys::{FetchedKeys, KeySource},
    generate::{
        ResourceType,
        filter::{
            chain_limit::{HTTP_CHAINS, TCP_CHAINS},
            security::JWT_FILTER,
            stack::LOOKUP_FAILURE,
        },
        fixture,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{
        Change,
        features::{Features, RemoteJwks},
        fixture::folder_world,
        installation::Installation,
    },
    table::ChangeSet,
};

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

fn fixture(mesh: &str, config: &str, extensions: Option<&[&str]>) -> Fixture {
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config)];
    Fixture::new(mesh, &files, vec![sidecar("10.1.0.1", json!({}), extensions)])
}

/// A listener that exists, as text.
fn text(fixture: &Fixture, name: &str) -> String {
    let listener = fixture.get(name);
    assert!(listener.is_object(), "no listener {name}");
    listener.to_string()
}

/// The filters of every inbound chain that ends in a workload's port or passes through.
fn inbound(fixture: &Fixture) -> Vec<Value> {
    let listener = fixture.get("virtualInbound");
    let chains = listener["filterChains"].as_array().expect("chains");
    let chains = chains
        .iter()
        .filter(|chain| chain["name"] != "virtualInbound-blackhole");
    let filters: Vec<Value> = chains.map(|chain| chain["filters"].clone()).collect();
    assert!(!filters.is_empty(), "{listener}");
    filters
}

fn connection_manager(filters: &Value) -> Option<&Value> {
    let last = filters.as_array()?.last()?;
    (last["name"] == HTTP).then(|| &last["typedConfig"])
}

fn has_note(fixture: &Fixture, code: &str, detail: &str) -> bool {
    let notes = fixture.store.notes();
    notes.iter().any(|note| note.code == code && note.detail == detail)
}

#[test]
fn a_client_that_cannot_enforce_its_policies_accepts_no_traffic() {
    let fixture = fixture("", DENY, Some(&["envoy.filters.http.router"]));
    for filters in inbound(&fixture) {
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
    assert!(!text(&fixture, "virtualInbound").contains("rbac.v3"));
    assert!(has_note(
        &fixture,
        "security_extension_missing",
        "envoy.filters.http.rbac"
    ));
    assert!(has_note(
        &fixture,
        "security_extension_missing",
        "envoy.filters.network.rbac"
    ));
    // Outbound listeners are unaffected.
    assert!(!text(&fixture, "0.0.0.0_80").contains("directResponse"));
}

/// A policy of this many address ranges.
fn denying(ranges: usize) -> String {
    let range = |number: usize| format!("192.{}.{}.0/24", number >> 8, number & 0xff);
    let ranges = (0..ranges).map(range).collect::<Vec<_>>().join(", ");
    DENY.replace("192.0.2.0/24", &ranges)
}

/// A Sidecar of this many ports.
fn ingress(ports: usize) -> String {
    let ports = (10_000_u32..).take(ports).map(|port| {
        format!("  - {{port: {{number: {port}, protocol: HTTP, name: h}}, defaultEndpoint: '127.0.0.1:{port}'}}\n")
    });
    let sidecar = "apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: a}\nspec:\n  ingress:\n";
    sidecar.to_owned() + &ports.collect::<String>()
}

/// A policy of this many address ranges, and a Sidecar of this many ports.
fn large_policy(ranges: usize, ports: usize) -> Fixture {
    let config = denying(ranges) + &ingress(ports);
    fixture("", &config, None)
}

/// Asserts that each inbound chain answers with 403 or closes connections.
fn denies_inbound(fixture: &Fixture) {
    for filters in inbound(fixture) {
        match connection_manager(&filters) {
            Some(manager) => {
                let route = &manager["routeConfig"]["virtualHosts"][0]["routes"][0];
                assert_eq!(route["directResponse"]["status"], 403);
            }
            None => assert!(filters.to_string().contains("BlackHoleCluster")),
        }
    }
}

/// Each chain repeats the filters of its policies, so one large policy and one Sidecar would produce gigabytes.
#[test]
fn r21_policies_that_are_too_large_for_all_chains_deny_everything() {
    let is_noted = |fixture: &Fixture| {
        let notes = fixture.store.notes();
        let mut large = notes.iter().filter(|note| note.code == "security_filters_too_large");
        large.any(|note| note.detail.starts_with("default/d: "))
    };
    let denied = large_policy(10_000, 600);
    let listener = denied.get("virtualInbound").to_string();
    assert!(!listener.contains("rbac.v3"));
    denies_inbound(&denied);
    assert!(is_noted(&denied));
    // Outbound listeners are unaffected.
    assert!(!text(&denied, "0.0.0.0_80").contains("directResponse"));

    let few_ports = large_policy(10_000, 2);
    let listener = few_ports.get("virtualInbound").to_string();
    assert!(listener.contains("rbac.v3") && !listener.contains("directResponse"));
    assert!(!is_noted(&few_ports));
}

/// The limit multiplies the filters of a chain with these numbers.
#[test]
fn r21_ports_have_at_most_as_many_chains_as_the_limit_counts() {
    let tcp = "{name: tcp, port: 90,";
    let workload = WORKLOAD.replace(tcp, &format!("{{name: any, port: 100, targetPort: 7070}}, {tcp}"));
    let files = [("kube.yaml", workload.as_str())];
    let fixture = Fixture::new("", &files, vec![sidecar("10.1.0.1", json!({}), None)]);
    let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (matched, last) in chains(&fixture.get("virtualInbound")) {
        let (http, tcp) = counts.entry(matched["destinationPort"].to_string()).or_default();
        *(if last == HTTP { http } else { tcp }) += 1;
    }
    assert_eq!(counts["null"], (HTTP_CHAINS, TCP_CHAINS), "what passes through");
    for port in ["8080", "9090", "7070"] {
        let (http, tcp) = counts[port];
        assert!(http <= HTTP_CHAINS && tcp <= TCP_CHAINS, "{port}: {http} and {tcp}");
    }
}

/// A Telemetry of 3,000 tags, and a Sidecar of this many ports.
fn large_telemetry(ports: usize) -> Fixture {
    let mesh = "defaultProviders: {metrics: [prometheus]}\nextensionProviders: [{name: prometheus, prometheus: {}}]\n";
    let value = "x".repeat(100);
    let tags = (0..3000).map(|number| format!("        t{number}: {{value: '\"{value}\"'}}\n"));
    let telemetry = "
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: t}
spec:
  metrics:
  - overrides:
    - match: {metric: REQUEST_COUNT, mode: SERVER}
      tagOverrides:
";
    let config = telemetry.to_owned() + &tags.collect::<String>() + "---\n" + &ingress(ports);
    fixture(mesh, &config, None)
}

/// Each chain repeats the filters of Telemetries and extensions, too.
#[test]
fn r21_filters_that_are_too_large_for_all_chains_deny_everything() {
    let is_noted = |fixture: &Fixture| {
        let notes = fixture.store.notes();
        notes.iter().any(|note| note.code == "filter_chains_too_large")
    };
    let is_large = |filters: &Value| filters.to_string().len() > 300_000;
    let denied = large_telemetry(600);
    assert!(!inbound(&denied).iter().any(is_large));
    denies_inbound(&denied);
    assert!(is_noted(&denied));
    // Outbound listeners are unaffected.
    assert!(!text(&denied, "0.0.0.0_80").contains("directResponse"));

    let few_ports = large_telemetry(2);
    assert!(inbound(&few_ports).iter().all(is_large));
    assert!(!text(&few_ports, "virtualInbound").contains("directResponse"));
    assert!(!is_noted(&few_ports));
}

/// Each server with TLS repeats the filters of a gateway. One tenant's servers must not deny those of others.
#[test]
fn r21_servers_beyond_the_limit_of_their_namespace_deny_everything() {
    let server = |port: u32, protocol: &str, host: &str| {
        format!(
            "  - {{port: {{number: {port}, name: p{port}, protocol: {protocol}}}, hosts: [{host}], \
             tls: {{mode: SIMPLE, credentialName: c}}}}\n"
        )
    };
    let plaintext = "  - {port: {number: 8080, name: p8080, protocol: HTTP}, hosts: [one.com]}\n";
    let gateway = |namespace: &str, day: u32, servers: &str| {
        let meta = format!("{{name: g, namespace: {namespace}, creationTimestamp: '2024-01-0{day}T00:00:00Z'}}");
        let spec = format!("spec:\n  selector: {{istio: edge}}\n  servers:\n{servers}");
        format!("apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {meta}\n{spec}---\n")
    };
    let fixture = |others: usize| {
        // Servers without routes have no chains, but count.
        let mut servers: Vec<String> = (0..others)
            .map(|number| server(8443, "TLS", &format!("h{number}.com")))
            .collect();
        servers.extend([server(443, "HTTPS", "one.com"), plaintext.to_owned()]);
        let policy = denying(20_000).replace("{name: d}", "{name: d, namespace: edge}");
        let config = [
            policy,
            gateway("one", 1, &servers.concat()),
            gateway("two", 2, &server(443, "HTTPS", "two.com")),
        ]
        .concat();
        let metadata = json!({"SERVICE_ACCOUNT": "edge", "LABELS": {"istio": "edge"}});
        let router = fixture::client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
        let files = [("kube.yaml", WORKLOAD), ("config.yaml", config.as_str())];
        Fixture::new("", &files, vec![router])
    };
    // The names of chains, and whether each serves requests.
    let chains = |fixture: &Fixture| -> Vec<(Value, bool)> {
        let listener = fixture.get("0.0.0.0_443");
        let chains = listener["filterChains"].as_array().expect("chains").iter();
        let served = |chain: &Value| {
            assert!(chain["transportSocket"].is_object(), "{chain}");
            let manager = connection_manager(&chain["filters"]).expect("a connection manager");
            let served = manager["rds"].is_object();
            assert_eq!(manager.to_string().contains("rbac.v3"), served);
            let route = &manager["routeConfig"]["virtualHosts"][0]["routes"][0];
            assert_eq!(route["directResponse"]["status"] == 403, !served);
            (chain["filterChainMatch"]["serverNames"][0].clone(), served)
        };
        chains.map(served).collect()
    };
    // The Gateway, field and port of each note.
    let noted = |fixture: &Fixture| -> Vec<String> {
        let notes = fixture.store.notes();
        let limits = notes.iter().filter(|note| note.code == "OutputLimitExceeded");
        let place = |detail: &str| detail.rsplit_once(": ").map_or("", |(place, _)| place).to_owned();
        limits.map(|note| place(&note.detail)).collect()
    };
    let many = fixture(600);
    assert_eq!(chains(&many), [(json!("one.com"), false), (json!("two.com"), true)]);
    let denied = ["one/g: spec.servers: port 443", "one/g: spec.servers: port 8080"];
    assert_eq!(noted(&many), denied);
    let few = fixture(60);
    assert_eq!(chains(&few), [(json!("one.com"), true), (json!("two.com"), true)]);
    assert_eq!(noted(&few), [""; 0]);
}

/// A listener has one chain for each match of a VirtualService, however many of its servers have the VirtualService.
#[test]
fn r21_matches_count_once_for_all_servers_of_a_port() {
    let hosts: Vec<String> = (0..100).map(|number| format!("h{number}.com")).collect();
    let servers = hosts.iter().map(|host| {
        format!("  - {{port: {{number: 443, name: p, protocol: TLS}}, hosts: [{host}], tls: {{mode: PASSTHROUGH}}}}\n")
    });
    let gateway = "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {name: g, namespace: one}\nspec:\n  \
                   selector: {istio: edge}\n  servers:\n";
    let destination = "{destination: {host: web.one.svc.cluster.local}}";
    let routes = hosts
        .iter()
        .map(|host| format!("  - {{match: [{{sniHosts: [{host}]}}], route: [{destination}]}}\n"));
    let virtual_service = format!(
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v, namespace: one}}\n\
         spec:\n  gateways: [one/g]\n  hosts: [{}]\n  tls:\n",
        hosts.join(", ")
    );
    let config = [
        denying(1500).replace("{name: d}", "{name: d, namespace: edge}"),
        gateway.to_owned(),
        servers.collect(),
        virtual_service,
        routes.collect(),
    ]
    .concat();
    let metadata = json!({"SERVICE_ACCOUNT": "edge", "LABELS": {"istio": "edge"}});
    let router = fixture::client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config.as_str())];
    let fixture = Fixture::new("", &files, vec![router]);
    let listener = fixture.get("0.0.0.0_443");
    let chains = listener["filterChains"].as_array().expect("chains");
    assert_eq!(chains.len(), 100);
    let is_served = |chain: &Value| chain["filters"].to_string().contains("rbac.v3");
    assert!(chains.iter().all(is_served));
}

/// All namespaces declare services, and their chains have no policies.
#[test]
fn r21_services_that_are_passed_through_deny_no_other_servers() {
    let hosts: Vec<String> = (0..600).map(|number| format!("h{number}.example.com")).collect();
    let services = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: many, namespace: two}
spec:
  hosts: [HOSTS]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 80, name: t, protocol: TCP}]
";
    let services = services.replace("HOSTS", &hosts.join(", "));
    let gateway = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: g, namespace: one}
spec:
  selector: {istio: edge}
  servers:
  - {port: {number: 15443, name: t, protocol: TLS}, hosts: ['*.example.com'], tls: {mode: AUTO_PASSTHROUGH}}
  - {port: {number: 443, name: h, protocol: HTTPS}, hosts: [one.com], tls: {mode: SIMPLE, credentialName: c}}
---
";
    let policy = denying(20_000).replace("{name: d}", "{name: d, namespace: edge}");
    let config = [policy.as_str(), gateway, &services].concat();
    let metadata = json!({"SERVICE_ACCOUNT": "edge", "LABELS": {"istio": "edge"}});
    let router = fixture::client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config.as_str())];
    let fixture = Fixture::new("", &files, vec![router]);
    let passed_through = fixture.get("0.0.0.0_15443");
    assert_eq!(passed_through["filterChains"].as_array().map(Vec::len), Some(600));
    let served = fixture.get("0.0.0.0_443")["filterChains"][0]["filters"].clone();
    let manager = connection_manager(&served).expect("a connection manager");
    assert!(manager["rds"].is_object(), "{:?}", fixture.store.notes());
    assert!(manager.to_string().contains("rbac.v3"));
}

/// The first services count first, and any namespace may export its own to that of a gateway.
#[test]
fn r21_older_services_are_passed_through_first() {
    let service = |name: &str, day: u32, export_to: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, namespace: two, creationTimestamp: '2024-01-0{day}T00:00:00Z'}}
spec:
  hosts: [{name}.example.com]
  exportTo: [{export_to}]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{{number: 80, name: t, protocol: TCP}}]
---"
        )
    };
    let gateway = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: g, namespace: one}
spec:
  selector: {istio: edge}
  servers:
  - {port: {number: 15443, name: t, protocol: TLS}, hosts: ['*.example.com'], tls: {mode: AUTO_PASSTHROUGH}}
";
    let config = [
        service("new", 2, "edge").as_str(),
        service("old", 1, "'*'").as_str(),
        gateway,
    ]
    .concat();
    let metadata = json!({"SERVICE_ACCOUNT": "edge", "LABELS": {"istio": "edge"}});
    let router = fixture::client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", config.as_str())];
    let listener = Fixture::new("", &files, vec![router]).get("0.0.0.0_15443");
    let chains = listener["filterChains"].as_array().expect("chains").iter();
    let names: Vec<&Value> = chains
        .map(|chain| &chain["filterChainMatch"]["serverNames"][0])
        .collect();
    assert_eq!(
        names,
        ["outbound_.80_._.old.example.com", "outbound_.80_._.new.example.com"]
    );
}

/// The keys that the filter of every inbound chain checks tokens with.
fn token_keys(virtual_inbound: &Value) -> Vec<String> {
    let filters = virtual_inbound["filterChains"].as_array().expect("chains").iter();
    let managers = filters.filter_map(|chain| connection_manager(&chain["filters"]));
    let filters = managers.flat_map(|manager| manager["httpFilters"].as_array().expect("filters"));
    let checks = filters.filter(|filter| filter["name"] == JWT_FILTER);
    checks
        .map(|filter| &filter["typedConfig"]["providers"]["origins-0"]["localJwks"]["inlineString"])
        .map(|keys| keys.as_str().expect("keys").to_owned())
        .collect()
}

/// The substitute for missing keys is a point derived from a hash, so its private key is unknown: finding it means
/// breaking the curve. An issuer with an empty key set gets the same substitute.
#[test]
fn r4_substitute_keys_have_no_private_key() {
    let fixture = fixture("", TOKENS, None);
    let keys = token_keys(&fixture.get("virtualInbound"));
    assert!(!keys.is_empty());
    for keys in keys {
        let keys: Value = serde_json::from_str(&keys).expect("JSON");
        let keys = keys["keys"].as_array().expect("keys");
        assert_eq!(keys.len(), 1, "{keys:?}");
        let x = keys[0]["x"].as_str().expect("a coordinate");
        let sentence = b"istiod: no token of this issuer is valid 3";
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, sentence);
        assert_eq!(x, BASE64_URL_SAFE_NO_PAD.encode(digest));
        assert!(keys[0].get("d").is_none());
    }
    let detail = "default/r: https://nowhere.example.com/keys";
    assert!(
        has_note(&fixture, "jwks_unavailable", detail),
        "{:?}",
        fixture.store.notes()
    );
}

#[test]
fn an_issuer_outside_the_mesh_is_a_failed_lookup_if_proxies_fetch_all_keys() {
    for (fetcher, fails) in [(RemoteJwks::Hybrid, false), (RemoteJwks::Envoy, true)] {
        let mut installation = Installation::default();
        installation.features.pilot_jwt_enable_remote_jwks = fetcher;
        let files = [("mesh.yaml", MESH), ("kube.yaml", WORKLOAD), ("config.yaml", TOKENS)];
        let store = fixture::store(installation, &files, vec![sidecar("10.1.0.1", json!({}), None)]);
        let noted = has_note(&Fixture { store }, LOOKUP_FAILURE, "jwks nowhere.example.com");
        assert_eq!(noted, fails, "{fetcher:?}");
    }
}

#[test]
fn prefixes_of_tokens_that_envoy_refuses_are_not_sent() {
    let headers = r#"fromHeaders: [{name: a, prefix: "b\n"}, {name: c, prefix: "Bearer "}]"#;
    let tokens = TOKENS.replace("{issuer", &format!("{{{headers}, issuer"));
    let listener = fixture("", &tokens, None).get("virtualInbound").to_string();
    assert!(
        listener.contains(r#""fromHeaders":[{"name":"c","valuePrefix":"Bearer "}]"#),
        "{listener}"
    );
}

#[test]
fn fetched_keys_change_the_listeners_that_use_them_and_nothing_else() {
    let only_a = TOKENS.replace("{jwtRules", "{selector: {matchLabels: {app: a}}, jwtRules");
    let files = [("kube.yaml", WORKLOAD), ("config.yaml", only_a.as_str())];
    let other = fixture::client(
        "sidecar~10.1.0.2~b-0.default~default.svc.cluster.local",
        &json!({ "LABELS": { "app": "b" }, "INSTANCE_IPS": "10.1.0.2" }),
    );
    let proxies = [sidecar("10.1.0.1", json!({}), None), other];
    let mut world = folder_world(Installation::default(), &files);
    let mut store = ConfigStore::default();
    let connected = proxies.into_iter().enumerate();
    let membership = ProxyEvents {
        connected: connected
            .map(|(index, proxy)| (ConnectionId(index as u64), Arc::new(proxy)))
            .collect(),
        ..ProxyEvents::default()
    };
    store.update(&world.snapshot(), &ChangeSet::default(), membership, &Serial);

    let source = KeySource::Keys("https://nowhere.example.com/keys".into());
    let key = FetchedKeys::key(&Installation::default().cluster, &source);
    let mut commit = |keys: &str| {
        let keys = keys.into();
        let commit = world.commit(vec![Change::Upsert(FetchedKeys { key: key.clone(), keys }.into())]);
        let update = store.update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
        let listener = |client| fixture::resource(&store, client, ResourceType::Listener, "virtualInbound");
        (update.built, listener(0), listener(1))
    };
    let (built, first, other) = commit("one");
    assert_eq!(built, 1, "the inbound listener of the one workload");
    let distinct = |listener: &Value| {
        let mut keys = token_keys(listener);
        keys.dedup();
        keys
    };
    assert_eq!(distinct(&first), ["one"]);
    assert!(token_keys(&other).is_empty());
    let (built, second, _) = commit("two");
    assert_eq!(built, 1);
    assert_eq!(distinct(&second), ["two"]);
    let (built, ..) = commit("two");
    assert_eq!(built, 0, "what is equal is no news");
    let (_, withdrawn, _) = commit("");
    let substitutes = token_keys(&withdrawn);
    assert!(!substitutes.is_empty());
    assert!(substitutes.iter().all(|keys| keys.contains("unavailable")));
}

#[test]
fn custom_policies_select_requests_for_the_provider() {
    let provider = |service: &str| {
        format!("extensionProviders: [{{name: p, envoyExtAuthzGrpc: {{service: {service}, port: 9000}}}}]\n")
    };
    let (rbac, ask) = ("envoy.filters.network.rbac", "envoy.filters.network.ext_authz");
    let tcp = |fixture: &Fixture| {
        let chains = inbound(fixture);
        let tcp = chains.iter().find(|filters| connection_manager(filters).is_none());
        tcp.expect("a TCP chain").clone()
    };
    let known = fixture(&provider("a.default.svc.cluster.local"), CUSTOM, None);
    let filters = tcp(&known);
    let names = names_of(&filters);
    let first = names.iter().position(|name| *name == rbac).expect("a shadow filter");
    assert_eq!(names[first + 1], ask);
    assert_eq!(filters[first]["typedConfig"]["rules"], Value::Null);
    let unknown = fixture(&provider("nobody.example.com"), CUSTOM, None);
    let filters = tcp(&unknown);
    let names = names_of(&filters);
    let first = names.iter().position(|name| *name == rbac).expect("a filter");
    assert!(!names.contains(&ask));
    assert_eq!(filters[first]["typedConfig"]["rules"]["action"], "DENY");
    assert!(has_note(&unknown, "authorization_provider_unusable", "p"));
    assert!(has_note(&unknown, LOOKUP_FAILURE, "authz nobody.example.com"));
    assert!(!has_note(&known, LOOKUP_FAILURE, "authz a.default.svc.cluster.local"));
}

#[test]
fn a_provider_with_an_invalid_name_is_not_called() {
    let mesh =
        "extensionProviders: [{name: P_1, envoyExtAuthzGrpc: {service: a.default.svc.cluster.local, port: 9000}}]\n";
    let fixture = fixture(mesh, &CUSTOM.replace("name: p}", "name: P_1}"), None);
    assert!(!text(&fixture, "virtualInbound").contains("ext_authz\","));
    assert!(has_note(&fixture, "authorization_provider_unusable", "P_1"));
}

/// Parity (pilot/pkg/security/authz/builder/extauthz.go).
#[test]
fn a_provider_with_an_invalid_path_prefix_is_not_called() {
    for (prefix, is_valid) in [("/check", true), ("check", false), ("/%zz", false)] {
        let settings = format!("service: a.default.svc.cluster.local, port: 80, pathPrefix: '{prefix}'");
        let mesh = format!("extensionProviders: [{{name: p, envoyExtAuthzHttp: {{{settings}}}}}]\n");
        let fixture = fixture(&mesh, CUSTOM, None);
        assert_eq!(
            has_note(&fixture, "authorization_provider_unusable", "p"),
            !is_valid,
            "{prefix}"
        );
    }
}

#[test]
fn policies_of_tunneled_connections_match_the_peer_of_the_tunnel() {
    let policy = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: p}
spec: {action: DENY, rules: [{from: [{source: {namespaces: [x]}}]}]}
";
    let installation = Installation {
        features: Features {
            pilot_enable_sidecar_listening_hbone: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let files = [("mesh.yaml", MESH), ("kube.yaml", WORKLOAD), ("config.yaml", policy)];
    let proxy = sidecar("10.1.0.1", json!({"ENABLE_HBONE": "true"}), None);
    let store = fixture::store(installation, &files, vec![proxy]);
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "main_internal");
    let chains = listener["filterChains"].as_array().expect("chains");
    let names: Vec<_> = chains.iter().map(|chain| chain["name"].as_str()).collect();
    assert!(names.contains(&Some("virtualInbound")), "{names:?}");
    for chain in chains {
        let text = chain["filters"].to_string();
        let peer = text.contains("io.istio.peer_principal") && !text.contains("authenticated");
        assert!(peer, "{} must match the filter state", chain["name"]);
        assert_eq!(
            text.contains("metadata_exchange"),
            chain["name"] != "0.0.0.0_8080",
            "only HTTP on declared ports lacks the exchange"
        );
    }
}
