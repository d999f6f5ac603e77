use prost::{Message, Name};
use serde_json::json;

use super::*;
use crate::{
    generate::{
        ResourceType, constant,
        fixture::{self, APP},
        store::{ConfigStore, ConnectionId},
    },
    model::Installation,
    proto::{
        Any,
        envoy::{
            config::{
                accesslog::v3::AccessLog,
                cluster::v3::Cluster,
                core::v3::{SocketAddress, TransportSocket, socket_address::PortSpecifier, transport_socket},
                endpoint::v3::{ClusterLoadAssignment, LbEndpoint},
                listener::v3::{Filter, Listener, filter},
                route::v3::{RouteConfiguration, VirtualHost},
            },
            extensions::{
                filters::network::{
                    http_connection_manager::v3::HttpConnectionManager,
                    tcp_proxy::v3::{
                        TcpProxy,
                        tcp_proxy::{ClusterSpecifier, WeightedCluster, weighted_cluster::ClusterWeight},
                    },
                },
                transport_sockets::tls::v3::UpstreamTlsContext,
                upstreams::http::v3::HttpProtocolOptions,
            },
        },
        istio::networking::nds::v1::NameTable,
    },
};

#[test]
fn lengths_of_every_size() {
    for size in [0, 1, 126, 127, 128, 129, 16_383, 16_384, 70_000] {
        let plain = VirtualHost {
            name: "x".repeat(size),
            ..Default::default()
        };
        let written = Encoded::write(0, |out: &mut Writer<RouteConfiguration>| {
            out.nested(field::route_configuration::VIRTUAL_HOSTS, |out| {
                out.text(field::virtual_host::NAME, &plain.name);
            });
        });
        let expected = RouteConfiguration {
            virtual_hosts: vec![plain],
            ..Default::default()
        };
        assert_eq!(written.as_bytes(), expected.encode_to_vec(), "{size}");
        assert_eq!(written.decode(), expected, "{size}");
    }
}

#[test]
fn kinds_of_fields_decide_which_default_values_are_written() {
    let written = Encoded::write(0, |out: &mut Writer<Cluster>| out.text(field::cluster::NAME, ""));
    assert!(written.is_empty());
    let written = Encoded::write(0, |out: &mut Writer<SocketAddress>| {
        out.text(field::socket_address::ADDRESS, "");
        out.number(field::socket_address::PORT_VALUE, 0);
    });
    let expected = SocketAddress {
        port_specifier: Some(PortSpecifier::PortValue(0)),
        ..Default::default()
    };
    assert_eq!(written.as_bytes(), expected.encode_to_vec());
    let written = Encoded::write(0, |out: &mut Writer<LbEndpoint>| {
        out.wrapper(field::lb_endpoint::LOAD_BALANCING_WEIGHT, 0);
    });
    let expected = LbEndpoint {
        load_balancing_weight: Some(0),
        ..Default::default()
    };
    assert_eq!(written.as_bytes(), expected.encode_to_vec());
    let written = Encoded::write(0, |out: &mut Writer<VirtualHost>| {
        out.text(field::virtual_host::DOMAINS, "");
    });
    let expected = VirtualHost {
        domains: vec![String::new()],
        ..Default::default()
    };
    assert_eq!(written.as_bytes(), expected.encode_to_vec());
}

#[test]
fn empty_map_values_and_contents_are_omitted() {
    let written = Encoded::write(0, |out: &mut Writer<Cluster>| {
        out.entry(field::cluster::TYPED_EXTENSION_PROTOCOL_OPTIONS, "empty", |_| {});
        out.entry(field::cluster::TYPED_EXTENSION_PROTOCOL_OPTIONS, "options", |out| {
            out.pack(|_: &mut Writer<HttpProtocolOptions>| {});
        });
    });
    let expected = Cluster {
        typed_extension_protocol_options: [
            ("empty".to_owned(), Any::default()),
            ("options".to_owned(), Any::pack(&HttpProtocolOptions::default())),
        ]
        .into(),
        ..Default::default()
    };
    assert_eq!(written.as_bytes(), expected.encode_to_vec());
}

#[test]
fn pieces_are_inserted_where_prost_encodes_them() {
    let specifiers = [
        None,
        Some(ClusterSpecifier::Cluster("one".to_owned())),
        // Field 10, which is encoded at the position of field 2.
        Some(ClusterSpecifier::WeightedClusters(WeightedCluster {
            clusters: vec![ClusterWeight::default()],
        })),
    ];
    let logs = || vec![AccessLog::default(), AccessLog::default()];
    for cluster_specifier in specifiers {
        let proxy = TcpProxy {
            cluster_specifier,
            max_connect_attempts: Some(3),
            ..Default::default()
        };
        let prefix = Encoded::of(&TcpProxy {
            stat_prefix: "prefix".to_owned(),
            ..Default::default()
        });
        let access_log = Encoded::of(&TcpProxy {
            access_log: logs(),
            ..Default::default()
        });
        let spliced = Encoded::write(0, |out| out.spliced(&proxy, [&prefix, &Encoded::empty(), &access_log]));
        let expected = TcpProxy {
            stat_prefix: "prefix".to_owned(),
            access_log: logs(),
            ..proxy
        };
        assert_eq!(spliced.as_bytes(), expected.encode_to_vec());
    }
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "not in the order of encoding")]
fn fields_out_of_order_are_detected() {
    let _ = Encoded::write(0, |out: &mut Writer<Cluster>| {
        out.text(field::cluster::ALT_STAT_NAME, "stat");
        out.text(field::cluster::NAME, "name");
    });
}

#[test]
fn structs_equal_those_of_prost() {
    let written = Encoded::write(0, |out: &mut Writer<Struct>| {
        out.list_field("all", ["a", ""], |out, name| out.text_field("name", name));
        out.text_field("text", &"long".repeat(50));
        out.true_field("yes");
    });
    let one = |name: &str| constant::object([("name".to_owned(), constant::text(name))].into());
    let fields = [
        ("all", constant::list(vec![one("a"), one("")])),
        ("text", constant::text("long".repeat(50))),
        ("yes", constant::boolean(true)),
    ];
    assert_eq!(written.as_bytes(), constant::structure(fields).encode_to_vec());
}

const OTHERS: &str = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: dns}
spec:
  hosts: [dns.example]
  ports: [{number: 443, name: tls, protocol: TLS}, {number: 80, name: http2, protocol: HTTP2}]
  resolution: DNS
  location: MESH_INTERNAL
  endpoints: [{address: one.example, labels: {security.istio.io/tlsMode: istio}}, {address: two.example, weight: 5}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: auto}
spec:
  hosts: [auto.example]
  addresses: [10.0.0.9]
  ports: [{number: 7070, name: auto}]
  resolution: NONE
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: fixed}
spec:
  hosts: [fixed.example]
  addresses: [10.0.0.8]
  ports: [{number: 7070, name: any}]
  resolution: STATIC
  location: MESH_INTERNAL
  endpoints:
  - {address: 10.3.0.1, locality: r1/z1, labels: {security.istio.io/tlsMode: istio, version: v1}}
  - {address: 10.3.0.2, locality: r1/z2, labels: {version: v2}, serviceAccount: fixed}
  - {address: unix:///run/socket}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: fixed}
spec:
  host: fixed.example
  trafficPolicy: {connectionPool: {http: {maxRequestsPerConnection: 3}}, loadBalancer: {consistentHash: {useSourceIp: true}}}
  subsets: [{name: v1, labels: {version: v1}, trafficPolicy: {tls: {mode: ISTIO_MUTUAL}}}]
";

/// Asserts that prost encodes the message in the same bytes.
fn assert_canonical<M: Message + Name + Default + std::fmt::Debug>(any: &Any) -> M {
    let message: M = any.unpack().expect("a valid message").expect("a message of this type");
    assert_eq!(any.value, message.encode_to_vec(), "{message:?}");
    message
}

fn check_filters<'f>(filters: impl IntoIterator<Item = &'f Filter>) -> usize {
    let configs = filters.into_iter().filter_map(|filter| match &filter.config_type {
        Some(filter::ConfigType::TypedConfig(config)) => Some(config),
        _ => None,
    });
    let mut checked = 0;
    for config in configs {
        if config.is::<HttpConnectionManager>() {
            assert_canonical::<HttpConnectionManager>(config);
        } else if config.is::<TcpProxy>() {
            assert_canonical::<TcpProxy>(config);
        } else {
            continue;
        }
        checked += 1;
    }
    checked
}

fn check_socket(socket: &TransportSocket) -> usize {
    match &socket.config_type {
        Some(transport_socket::ConfigType::TypedConfig(config)) if config.is::<UpstreamTlsContext>() => {
            assert_canonical::<UpstreamTlsContext>(config);
            1
        }
        _ => 0,
    }
}

fn resources(store: &ConfigStore, client: u64, resource_type: ResourceType) -> Vec<Any> {
    let group = store.group_of(ConnectionId(client)).expect("the client has a group");
    let snapshot = store.snapshot(group).expect("the group has a snapshot");
    snapshot
        .resources(resource_type)
        .iter()
        .map(|resource| resource.any())
        .collect()
}

#[test]
fn resources_equal_those_of_prost() {
    let labels = json!({"LABELS": {"app": "a"}, "DNS_CAPTURE": "true"});
    let proxies = vec![
        fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", &labels),
        fixture::client("router~10.1.0.2~gw-0.default~default.svc.cluster.local", &json!({})),
    ];
    let mesh = format!("{APP}---{OTHERS}");
    let store = fixture::store(Installation::default(), &[("config.yaml", &mesh)], proxies);
    let mut checked = [0; 6];
    for client in [0, 1] {
        for any in resources(&store, client, ResourceType::Cluster) {
            let cluster: Cluster = assert_canonical(&any);
            let sockets = cluster.transport_socket_matches.iter();
            let sockets = sockets.filter_map(|choice| choice.transport_socket.as_ref());
            checked[0] += sockets
                .chain(&cluster.transport_socket)
                .map(check_socket)
                .sum::<usize>();
            for options in cluster.typed_extension_protocol_options.values() {
                assert_canonical::<HttpProtocolOptions>(options);
                checked[1] += 1;
            }
        }
        for any in resources(&store, client, ResourceType::Endpoint) {
            let assignment: ClusterLoadAssignment = assert_canonical(&any);
            checked[2] += assignment.endpoints.len();
        }
        for any in resources(&store, client, ResourceType::Listener) {
            let listener: Listener = assert_canonical(&any);
            let chains = listener.filter_chains.iter().chain(&listener.default_filter_chain);
            checked[3] += check_filters(chains.flat_map(|chain| &chain.filters));
        }
        for any in resources(&store, client, ResourceType::Route) {
            checked[5] += assert_canonical::<RouteConfiguration>(&any).virtual_hosts.len();
        }
        for any in resources(&store, client, ResourceType::NameTable) {
            checked[4] += assert_canonical::<NameTable>(&any).table.len();
        }
    }
    assert!(checked.iter().all(|count| *count >= 3), "{checked:?}");
}
