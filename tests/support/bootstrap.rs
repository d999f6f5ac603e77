//! The bootstrap that istio-agent writes for its Envoy: ADS and SDS over Unix sockets, which network namespaces share.

use std::path::Path;

use serde_json::{Value, json};

const HTTP: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// Number of static clusters in the bootstrap.
pub(crate) const CLUSTERS: u64 = 4;

/// Returns a bootstrap for an Envoy with its admin socket at `admin`, and with an agent at `sds` and `xds`.
pub(crate) fn sidecar(node: &Value, admin: &Path, sds: &Path, xds: &Path) -> Value {
    let over_ads = json!({ "ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s" });
    let local = |name: &str, port: u16| {
        let address = json!({ "socket_address": { "address": "127.0.0.1", "port_value": port } });
        cluster(name, address, json!({}))
    };
    let agent = |name: &str, socket: &Path| {
        let options = json!({ "typed_extension_protocol_options": { HTTP: {
            "@type": format!("type.googleapis.com/{HTTP}"),
            "explicit_http_config": { "http2_protocol_options": {} },
        } } });
        cluster(name, json!({ "pipe": { "path": socket } }), options)
    };
    json!({
        "node": node,
        "admin": { "address": { "pipe": { "path": admin } } },
        "layered_runtime": { "layers": [{ "name": "fixed", "static_layer": {
            "re2.max_program_size.error_level": 32768,
            "envoy.reloadable_features.http_reject_path_with_fragment": false,
        } }] },
        "bootstrap_extensions": [{
            "name": "envoy.bootstrap.internal_listener",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
            },
        }],
        "dynamic_resources": {
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": true,
                "grpc_services": [{ "envoy_grpc": { "cluster_name": "xds-grpc" } }],
            },
            "cds_config": over_ads,
            "lds_config": over_ads,
        },
        "static_resources": { "clusters": [
            local("prometheus_stats", 15000),
            local("agent", 15020),
            agent("sds-grpc", sds),
            agent("xds-grpc", xds),
        ] },
    })
}

fn cluster(name: &str, address: Value, more: Value) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
        },
    });
    if let (Some(cluster), Value::Object(more)) = (cluster.as_object_mut(), more) {
        cluster.extend(more);
    }
    cluster
}
