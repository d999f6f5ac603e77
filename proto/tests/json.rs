//! The JSON form: the forms that Istio accepts, the written form, and canonical bytes.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Name};
use prost_reflect::DynamicMessage;
use prost_types::{Duration, Timestamp};
use serde_json::{Value, json};

use istiod_proto::{
    Any,
    envoy::{
        config::{
            cluster::v3::{Cluster, cluster},
            core::v3::{DataSource, HealthStatus, Metadata, data_source::Specifier},
            endpoint::v3::LbEndpoint,
        },
        extensions::transport_sockets::tls::v3::UpstreamTlsContext,
    },
    istio::networking::v1alpha3::VirtualService,
    json::{
        JsonError, Unknown, any_from_json, any_to_json, descriptor_by_url, from_json, from_json_any, parse_go_duration,
        struct_from_json, to_json,
    },
    message_descriptor,
};

fn service(value: Value) -> Result<VirtualService, JsonError> {
    from_json(&value, Unknown::Deny)
}

fn error_of(value: Value) -> String {
    service(value).expect_err("an error was expected").to_string()
}

fn cluster() -> Cluster {
    Cluster {
        name: "outbound|80||a.example".to_owned(),
        connect_timeout: Some(Duration {
            seconds: 1,
            nanos: 500_000_000,
        }),
        per_connection_buffer_limit_bytes: Some(0),
        cluster_discovery_type: Some(cluster::ClusterDiscoveryType::Type(cluster::DiscoveryType::Eds.into())),
        metadata: Some(Metadata {
            filter_metadata: BTreeMap::from([(
                "istio".to_owned(),
                struct_from_json(
                    json!({"weight": 5, "share": 0.25, "tags": ["a", null, true]})
                        .as_object()
                        .unwrap(),
                ),
            )]),
            ..Metadata::default()
        }),
        typed_extension_protocol_options: BTreeMap::from([(
            "tls".to_owned(),
            Any::pack(&UpstreamTlsContext {
                sni: "a.example".to_owned(),
                ..UpstreamTlsContext::default()
            }),
        )]),
        ..Cluster::default()
    }
}

#[test]
fn writes_the_strict_mapping() {
    let expected = json!({
        "name": "outbound|80||a.example",
        "type": "EDS",
        "connectTimeout": "1.500s",
        "perConnectionBufferLimitBytes": 0,
        "metadata": {"filterMetadata": {"istio": {"weight": 5, "share": 0.25, "tags": ["a", null, true]}}},
        "typedExtensionProtocolOptions": {"tls": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "a.example",
        }},
    });
    assert_eq!(to_json(&cluster()), expected);
    assert_eq!(
        to_json(&cluster())["metadata"]["filterMetadata"]["istio"]["weight"].to_string(),
        "5"
    );
}

#[test]
fn json_round_trips() {
    let cluster = cluster();
    assert_eq!(
        from_json::<Cluster>(&to_json(&cluster), Unknown::Deny).unwrap(),
        cluster
    );
}

#[test]
fn bytes_are_those_of_the_generated_type() {
    // A packed message is not encoded again, so reading must return canonical bytes.
    let value = json!({
        "type": "STATIC", "name": "b", "lbPolicy": 0, "altStatName": "",
        "metadata": {"typedFilterMetadata": {}, "filterMetadata": {"z": {}, "y": {"k": ""}, "a": {"n": 0}}},
        "circuitBreakers": {"thresholds": [{}, {"maxRequests": 0}]},
    });
    let typed: Cluster = from_json(&value, Unknown::Deny).unwrap();
    let any = from_json_any(&Cluster::type_url(), &value, Unknown::Deny).unwrap();
    assert_eq!(any.value, typed.encode_to_vec());
    assert_eq!(any.unpack::<Cluster>().unwrap(), Some(typed));
}

#[test]
fn agrees_with_reflection() {
    let mut value = to_json(&cluster());
    value["circuitBreakers"] = json!({"thresholds": [{"retryBudget": {"budgetPercent": {"value": 1.25}}}]});
    let reflected =
        DynamicMessage::deserialize(descriptor_by_url(&Cluster::type_url()).unwrap(), value.clone()).unwrap();
    let reflected: Cluster = reflected.transcode_to().unwrap();
    assert_eq!(from_json::<Cluster>(&value, Unknown::Deny).unwrap(), reflected);
}

#[test]
fn reads_both_spellings_and_null() {
    let camel = service(json!({"exportTo": ["."], "http": [{"route": [{"destination": {"host": "a"}}]}]})).unwrap();
    let snake = service(
        json!({"export_to": ["."], "tcp": null, "http": [{"timeout": null, "route": [{"destination": {"host": "a"}}]}]}),
    );
    assert_eq!(snake.unwrap(), camel);
    assert_eq!(service(Value::Null).unwrap(), VirtualService::default());
}

#[test]
fn durations_parse_as_in_go() {
    for (text, seconds, nanos) in [
        ("1h30m", 5400, 0),
        ("100ms", 0, 100_000_000),
        ("1.5h", 5400, 0),
        ("5s", 5, 0),
        (".5s", 0, 500_000_000),
        ("-1.5s", -1, -500_000_000),
        ("1m0.000000001s", 60, 1),
        ("3\u{b5}s2ns", 0, 3002),
        ("0", 0, 0),
        ("24h", 86_400, 0),
    ] {
        let read = service(json!({"http": [{"timeout": text}]})).unwrap();
        assert_eq!(read.http[0].timeout, Some(Duration { seconds, nanos }), "{text}");
    }
    for text in ["", "5", "s", "-", "1d", "1.s.", "1 s", "9223372036854775807h", "1e3s"] {
        assert_eq!(parse_go_duration(text), None, "{text}");
    }
}

#[test]
fn names_the_place_of_an_error() {
    assert_eq!(
        error_of(json!({"http": [{}, {"timeout": "soon"}]})),
        "http[1].timeout: \"soon\" is no duration; write 1h30m or 1.5s"
    );
    assert_eq!(
        error_of(json!({"http": [{"retrys": {}}]})),
        "http[0]: unknown field \"retrys\" in istio.networking.v1alpha3.HTTPRoute"
    );
    assert_eq!(error_of(json!({"hosts": "a"})), "hosts: expected an array, found \"a\"");
    assert_eq!(
        error_of(json!({"hosts": [8080]})),
        "hosts[0]: expected a string, found 8080"
    );
    assert_eq!(error_of(json!([])), "expected an object, found an array");
    let header = json!({"http": [{"match": [{"headers": {"x-a": {"exact": "1", "prefix": "2"}}}]}]});
    assert_eq!(
        error_of(header),
        "http[0].match[0].headers[\"x-a\"].prefix: exact is already set, and only one of them may be"
    );
}

#[test]
fn unknown_fields_can_be_ignored() {
    let value = json!({"hosts": ["a"], "novel": {"deep": [1]}});
    assert!(from_json::<VirtualService>(&value, Unknown::Deny).is_err());
    assert_eq!(
        from_json::<VirtualService>(&value, Unknown::Ignore).unwrap().hosts,
        ["a"]
    );
}

#[test]
fn r2_deep_nesting_is_an_error() {
    let read = |depth: usize| {
        let object = (0..depth).fold(json!({}), |inner, _| json!({ "a": inner }));
        from_json::<Metadata>(&json!({"filterMetadata": {"istio": object}}), Unknown::Deny)
    };
    let metadata = read(30).expect("little nesting");
    assert_eq!(from_json(&to_json(&metadata), Unknown::Deny), Ok(metadata));
    let error = read(40).expect_err("deep nesting");
    assert_eq!(error.to_string(), "the value is nested too deeply");
}

#[test]
fn reads_numbers_and_enums_in_every_form() {
    let read = |value: Value| from_json::<LbEndpoint>(&value, Unknown::Deny);
    let full = read(json!({"healthStatus": "DRAINING", "loadBalancingWeight": 3})).unwrap();
    assert_eq!(full.health_status, i32::from(HealthStatus::Draining));
    assert_eq!(
        read(json!({"health_status": 3, "loadBalancingWeight": "3"})).unwrap(),
        full
    );
    assert_eq!(
        read(json!({"health_status": 3.0, "loadBalancingWeight": 3e0})).unwrap(),
        full
    );
    assert!(read(json!({"healthStatus": "FINE"})).is_err());
    for weight in [json!(-1), json!(1.5), json!(4_294_967_296_u64), json!("x"), json!(true)] {
        assert!(read(json!({ "loadBalancingWeight": weight })).is_err());
    }
}

#[test]
fn reads_base64_of_both_alphabets() {
    for text in ["+/8=", "-_8", "-_8=", "+/8"] {
        let read: DataSource = from_json(&json!({ "inlineBytes": text }), Unknown::Deny).unwrap();
        assert_eq!(
            read.specifier,
            Some(Specifier::InlineBytes(Bytes::from_static(&[0xfb, 0xff]))),
            "{text}"
        );
    }
}

#[test]
fn packs_types_with_their_own_form_under_value() {
    let any = any_from_json(
        &json!({"@type": "type.googleapis.com/google.protobuf.Duration", "value": "1m"}),
        Unknown::Deny,
    )
    .unwrap();
    assert_eq!(Duration::decode(any.value.clone()).unwrap().seconds, 60);
    assert_eq!(any_to_json(&any)["value"], "60s");
    let typed_struct = json!({
        "@type": "type.googleapis.com/udpa.type.v1.TypedStruct",
        "typeUrl": "type.googleapis.com/a.B",
        "value": {"limit": 10},
    });
    assert_eq!(
        any_to_json(&any_from_json(&typed_struct, Unknown::Deny).unwrap()),
        typed_struct
    );
}

#[test]
fn unknown_any_values_are_kept() {
    let unknown = Any {
        type_url: "type.googleapis.com/a.B".to_owned(),
        value: Bytes::from_static(b"\x01"),
    };
    assert_eq!(
        any_to_json(&unknown),
        json!({"@type": "type.googleapis.com/a.B", "value": "AQ=="})
    );
    assert!(any_from_json(&json!({"@type": "type.googleapis.com/a.B"}), Unknown::Ignore).is_err());
    assert!(any_from_json(&json!({"value": 1}), Unknown::Ignore).is_err());
    // Protobuf's own form of a message without a type, which Istio and Envoy refuse in configuration.
    assert!(any_from_json(&json!({}), Unknown::Ignore).is_err());
}

#[test]
fn extensions_without_a_rust_type_have_json() {
    let value = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.zookeeper_proxy.v3.ZooKeeperProxy",
        "statPrefix": "z",
        "defaultLatencyThreshold": "0.100s",
    });
    assert_eq!(any_to_json(&any_from_json(&value, Unknown::Deny).unwrap()), value);
}

#[test]
fn timestamps_keep_their_fraction() {
    let any = Any::pack(&Timestamp {
        seconds: 1,
        nanos: 20_000_000,
    });
    let value = any_to_json(&any);
    assert_eq!(value["value"], "1970-01-01T00:00:01.020Z");
    assert_eq!(any_from_json(&value, Unknown::Deny).unwrap(), any);
}

#[test]
fn every_type_is_described_under_its_own_name() {
    assert!(message_descriptor(&Cluster::full_name()).is_some());
    assert!(descriptor_by_url("xds.type.matcher.v3.IPMatcher").is_some());
    assert!(descriptor_by_url("type.googleapis.com/google.rpc.Status").is_some());
}
