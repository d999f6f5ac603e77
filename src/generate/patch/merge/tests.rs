use prost_types::Duration;
use serde_json::json;

use super::*;
use crate::proto::{
    envoy::{
        config::{
            cluster::v3::{Cluster, cluster::ClusterDiscoveryType},
            core::v3::{TransportSocket, transport_socket},
            route::v3::{Route, RouteAction, VirtualHost, route, route_action},
        },
        extensions::{filters::network::tcp_proxy::v3::TcpProxy, transport_sockets::tls::v3::UpstreamTlsContext},
    },
    json::{Unknown, encode_json, from_json},
};

fn read_as<M: Message + Name + Default>(value: serde_json::Value) -> M {
    from_json(&value, Unknown::Deny).expect("a valid message")
}

fn patch<M: Message + Name + Default>(value: serde_json::Value) -> DynamicMessage {
    let descriptor = json::descriptor_by_url(&M::full_name()).expect("descriptor");
    let bytes = encode_json(&descriptor, &value, Unknown::Deny).expect("a valid patch");
    DynamicMessage::decode(descriptor, bytes).expect("a valid patch")
}

fn merged<M: Message + Name + Default + Clone>(base: serde_json::Value, value: serde_json::Value) -> M {
    merge(&read_as::<M>(base), &patch::<M>(value)).expect("a merged message")
}

fn config(socket: TransportSocket) -> Any {
    let Some(transport_socket::ConfigType::TypedConfig(config)) = socket.config_type else {
        panic!("no config")
    };
    config
}

#[test]
fn durations_are_replaced_whole() {
    let base = || json!({"connectTimeout": "10.5s"});
    let seconds: Cluster = merged(base(), json!({"connect_timeout": "3s"}));
    assert_eq!(seconds.connect_timeout, Some(Duration { seconds: 3, nanos: 0 }));
    let nanos: Cluster = merged(base(), json!({"connect_timeout": "0.25s"}));
    let quarter = Duration {
        seconds: 0,
        nanos: 250_000_000,
    };
    assert_eq!(nanos.connect_timeout, Some(quarter));
    let zero: Cluster = merged(base(), json!({"connect_timeout": "0s"}));
    assert_eq!(zero.connect_timeout, Some(Duration::default()));
    let nested: VirtualHost = merged(
        json!({"retryPolicy": {"perTryTimeout": "1.5s"}}),
        json!({"retry_policy": {"per_try_timeout": "2s"}}),
    );
    let timeout = nested.retry_policy.and_then(|policy| policy.per_try_timeout);
    assert_eq!(timeout, Some(Duration { seconds: 2, nanos: 0 }));
}

#[test]
fn wrappers_of_defaults_keep_existing_values() {
    let base = json!({"circuitBreakers": {"thresholds": [{"maxRetries": 3}]}, "perConnectionBufferLimitBytes": 7});
    let result: Cluster = merged(base, json!({"per_connection_buffer_limit_bytes": 0, "name": ""}));
    assert_eq!(result.per_connection_buffer_limit_bytes, Some(7));
    let new: Cluster = merged(json!({}), json!({"per_connection_buffer_limit_bytes": 0}));
    assert_eq!(new.per_connection_buffer_limit_bytes, Some(0));
}

#[test]
fn lists_grow_and_maps_are_replaced_by_key() {
    let result: Cluster = merged(
        json!({
            "transportSocketMatches": [{"name": "a"}],
            "metadata": {"filterMetadata": {"istio": {"a": 1, "b": 2}, "other": {"x": 1}}},
        }),
        json!({
            "transport_socket_matches": [{"name": "b"}],
            "metadata": {"filter_metadata": {"istio": {"a": 3}}},
        }),
    );
    let names: Vec<&str> = result
        .transport_socket_matches
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
    let metadata = result.metadata.expect("metadata").filter_metadata;
    assert_eq!(metadata.len(), 2);
    assert_eq!(metadata["istio"].fields.len(), 1);
}

#[test]
fn a_oneof_is_replaced_unless_it_is_the_same() {
    let same: Route = merged(
        json!({"route": {"cluster": "a", "timeout": "5s"}}),
        json!({"route": {"timeout": "1s"}}),
    );
    let Some(route::Action::Route(RouteAction {
        cluster_specifier: Some(route_action::ClusterSpecifier::Cluster(cluster)),
        timeout,
        ..
    })) = same.action
    else {
        panic!("not routed to a cluster")
    };
    assert_eq!(
        (cluster.as_str(), timeout.map(|timeout| timeout.seconds)),
        ("a", Some(1))
    );
    let other: Route = merged(
        json!({"route": {"cluster": "a"}}),
        json!({"direct_response": {"status": 503}}),
    );
    assert!(matches!(other.action, Some(route::Action::DirectResponse(_))));
    let kind: Cluster = merged(json!({"type": "EDS"}), json!({"cluster_type": {"name": "x"}}));
    assert!(matches!(
        kind.cluster_discovery_type,
        Some(ClusterDiscoveryType::ClusterType(_))
    ));
}

#[test]
fn packed_fields_of_messages_are_replaced() {
    let base = json!({"name": "tls", "typedConfig": {"@type": UpstreamTlsContext::type_url(), "sni": "a"}});
    let value = json!({"typed_config": {"@type": UpstreamTlsContext::type_url(), "maxSessionKeys": 4}});
    let socket: TransportSocket = merged(base.clone(), value);
    let tls: UpstreamTlsContext = config(socket).unpack().expect("a TLS context").expect("a TLS context");
    assert_eq!((tls.sni.as_str(), tls.max_session_keys), ("", Some(4)));
    // Only the type URL is set, so the content stays.
    let empty: TransportSocket = merged(base, json!({"typed_config": {"@type": TcpProxy::type_url()}}));
    let config = config(empty);
    assert!(config.is::<TcpProxy>() && !config.value.is_empty());
}

#[test]
fn packed_messages_are_merged_inside() {
    let base: UpstreamTlsContext = read_as(json!({"sni": "a", "commonTlsContext": {"alpnProtocols": ["h2"]}}));
    let value: UpstreamTlsContext = read_as(json!({"commonTlsContext": {"alpnProtocols": ["http/1.1"]}}));
    let any = merge_any(&Any::pack(&base), &Any::pack(&value)).expect("a merged message");
    let tls: UpstreamTlsContext = any.unpack().expect("a TLS context").expect("a TLS context");
    assert_eq!(tls.sni, "a");
    let alpn = tls.common_tls_context.expect("context").alpn_protocols;
    assert_eq!(alpn, ["h2", "http/1.1"]);
}

#[test]
fn packed_messages_of_different_or_unknown_types_are_not_merged() {
    let tls = Any::pack(&UpstreamTlsContext::default());
    let other = Any::pack(&TcpProxy::default());
    assert!(matches!(merge_any(&tls, &other), Err(MergeError::TypeMismatch { .. })));
    let unknown = Any {
        type_url: "type.googleapis.com/a.B".into(),
        ..Any::default()
    };
    assert_eq!(
        merge_any(&unknown, &unknown),
        Err(MergeError::UnknownType("type.googleapis.com/a.B".into()))
    );
    let broken = Any {
        value: vec![0xff].into(),
        ..tls.clone()
    };
    assert!(matches!(merge_any(&tls, &broken), Err(MergeError::Broken(_))));
}

#[test]
fn a_type_mismatch_is_an_error() {
    let value = patch::<VirtualHost>(json!({"name": "a"}));
    let error = merge(&Cluster::default(), &value).expect_err("types differ");
    assert!(
        error
            .to_string()
            .starts_with("a envoy.config.route.v3.VirtualHost cannot")
    );
    assert_eq!(read::<VirtualHost>(&value).expect("a virtual host").name, "a");
    assert!(read::<Cluster>(&value).is_err());
}
