//! Tracing of requests from a sidecar, through the store as in serving.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::join_path;
use crate::{
    generate::{ResourceType, fixture},
    model::Installation,
};

const MESH: &str = "proxyListenPort: 15001\nproxyInboundListenPort: 15006\ntrustDomain: cluster.local\n";

const TELEMETRY: &str = "
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: mesh, namespace: istio-system}
spec: {tracing: [{providers: [{name: collector}]}]}
";

/// Returns the installation with a variable.
fn installation() -> Installation {
    let variables = [("OTEL_TOKEN".to_owned(), "token-of-the-test\n".to_owned())];
    Installation {
        variables: BTreeMap::from(variables).into(),
        ..Installation::default()
    }
}

/// Returns the tracing of requests to a service. `more` is added to the mesh config and to the node's metadata.
fn tracing(more: &str, config: &str, metadata: &Value) -> Value {
    let mesh = format!("{MESH}enableTracing: true\n{more}");
    let files = [
        ("mesh.yaml", mesh.as_str()),
        ("kube.yaml", fixture::APP),
        ("config.yaml", config),
    ];
    let proxy = fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", metadata);
    let store = fixture::store(installation(), &files, vec![proxy]);
    let listener = fixture::resource(&store, 0, ResourceType::Listener, "0.0.0.0_80");
    let chains = listener["filterChains"].as_array().expect("filter chains");
    let filters = chains
        .iter()
        .flat_map(|chain| chain["filters"].as_array().expect("filters"));
    let mut managers = filters.filter(|filter| filter["name"] == "envoy.filters.network.http_connection_manager");
    managers.next().expect("a connection manager")["typedConfig"]["tracing"].clone()
}

/// Returns the configuration of the tracer of an OpenTelemetry provider with these settings.
fn open_telemetry(settings: &str) -> Value {
    let provider = format!("opentelemetry: {{service: a.default.svc.cluster.local, port: 80, {settings}}}");
    let mesh = format!("extensionProviders: [{{name: collector, {provider}}}]\n");
    tracing(&mesh, TELEMETRY, &json!({}))["provider"]["typedConfig"].clone()
}

#[test]
fn paths_are_joined_as_in_go() {
    for (path, joined) in [
        ("", Some("h")),
        ("/", Some("h/")),
        ("//v1/./a/../traces", Some("h/v1/traces")),
        ("/a(b)/c%2Fd", Some("h/a(b)/c%2Fd")),
        ("/v1 (a)?b=c%20d&e", Some("h/v1%20%28a%29%3Fb=c%20d&e")),
        ("/%zz", None),
        ("/a%", None),
        ("/%zz/../b", Some("h/b")),
    ] {
        assert_eq!(join_path("h", path).as_deref(), joined, "{path}");
    }
}

#[test]
fn collectors_with_invalid_paths_are_not_used() {
    assert!(open_telemetry("http: {path: /v1/traces}")["httpService"].is_object());
    assert!(open_telemetry("http: {path: '/%zz'}").is_null());
}

#[test]
fn tags_of_a_proxy_config_need_a_type_and_a_text() {
    let tags = json!({
        "empty": {},
        "environment": {"environment": {"name": "REGION"}},
        "formatter": {"formatter": {"value": "%X%"}},
        "header": {"header": {"name": ""}},
        "literal": {"literal": {"value": "x"}},
    });
    let config = json!({"tracing": {"enableIstioTags": false, "customTags": tags}});
    let found = tracing("", "", &json!({"PROXY_CONFIG": config}));
    let tags = found["customTags"].as_array().expect("tags");
    let names: Vec<_> = tags.iter().map(|tag| &tag["tag"]).collect();
    assert_eq!(names, ["environment", "literal"]);
}

/// Envoy refuses the whole listener because of one such tag.
#[test]
fn tags_that_envoy_refuses_are_literal_or_left_out() {
    let tags = json!({
        "header": {"header": {"name": "x\n"}},
        "known": {"formatter": {"value": "%PROTOCOL%"}},
        "unknown": {"formatter": {"value": "%VERSION%"}},
    });
    let entry = json!({"providers": [{"name": "collector"}], "enableIstioTags": false, "customTags": tags});
    let telemetry = json!({"apiVersion": "telemetry.istio.io/v1", "kind": "Telemetry",
        "metadata": {"name": "mesh", "namespace": "istio-system"}, "spec": {"tracing": [entry]}});
    let provider = "opentelemetry: {service: a.default.svc.cluster.local, port: 80, http: {path: /v1/traces}}";
    let mesh = format!("extensionProviders: [{{name: collector, {provider}}}]\n");
    let found = tracing(&mesh, &telemetry.to_string(), &json!({"ISTIO_VERSION": "1.30.0"}));
    let tags = found["customTags"].as_array().expect("tags");
    let texts = |tag: &Value| ["tag", "value"].map(|field| tag[field].as_str().unwrap_or_default().to_owned());
    let tags: Vec<[String; 2]> = tags.iter().map(texts).collect();
    assert_eq!(tags, [["known", "%PROTOCOL%"], ["unknown", "%%VERSION%%"]]);
}

#[test]
fn sampling_of_a_proxy_config_is_a_percentage() {
    for (declared, want) in [(0.0, 1.0), (-5.0, 1.0), (2.5, 2.5), (100.0, 100.0), (101.0, 1.0)] {
        let config = json!({"tracing": {"sampling": declared}});
        let found = tracing("", "", &json!({"PROXY_CONFIG": config}));
        assert_eq!(found["randomSampling"]["value"].as_f64(), Some(want), "{declared}");
    }
}

#[test]
fn collectors_have_a_timeout() {
    for (declared, expected) in [("", "5s"), ("timeout: -1s, ", "5s"), ("timeout: 3s, ", "3s")] {
        let settings = format!("http: {{{declared}path: /v1/traces}}, dynatraceSampler: {{tenant: t, clusterId: 1}}");
        let config = open_telemetry(&settings);
        for service in [&config["httpService"], &config["sampler"]["typedConfig"]["httpService"]] {
            assert_eq!(service["httpUri"]["timeout"], expected, "{declared}: {service}");
        }
    }
}

#[test]
fn headers_have_values_of_the_environment() {
    let value = |header: &Value| header["value"].as_str().unwrap_or_default().to_owned();
    let headers = r#"[{name: a, envName: OTEL_TOKEN}, {name: b, envName: UNKNOWN}, {name: c, value: "text\n"}]"#;
    let config = open_telemetry(&format!("http: {{path: /v1/traces, headers: {headers}}}"));
    let added = config["httpService"]["requestHeadersToAdd"]
        .as_array()
        .expect("headers");
    let values: Vec<_> = added.iter().map(|added| value(&added["header"])).collect();
    assert_eq!(values, ["token-of-the-test", "", "text"]);
    let config = open_telemetry(&format!("grpc: {{initialMetadata: {headers}}}"));
    let metadata = config["grpcService"]["initialMetadata"].as_array().expect("headers");
    let values: Vec<_> = metadata.iter().map(value).collect();
    assert_eq!(values, ["token-of-the-test", "", "text"]);
    assert!(!format!("{:?}", installation()).contains("token-of-the-test"));
}
