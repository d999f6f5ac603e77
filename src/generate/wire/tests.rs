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
                cluster::v3::Cluster,
                core::v3::{TransportSocket, transport_socket},
                endpoint::v3::ClusterLoadAssignment,
                listener::v3::{Filter, Listener, filter},
            },
            extensions::{
                filters::network::{http_connection_manager::v3::HttpConnectionManager, tcp_proxy::v3::TcpProxy},
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
        let content = "x".repeat(size);
        let mut written = Vec::new();
        nested(&mut written, 7, |out| out.extend_from_slice(content.as_bytes()));
        let mut expected = Vec::new();
        bytes(&mut expected, 7, content.as_bytes());
        assert_eq!(written, expected, "{size}");
    }
}

#[test]
fn pieces_stand_in_their_place() {
    let field = |field| {
        let mut out = Vec::new();
        number(&mut out, field, 300 + field);
        out
    };
    let of = |fields: &[u32]| fields.iter().flat_map(|one| field(*one)).collect::<Vec<_>>();
    let (three, nine) = (field(3), field(9));
    for (before, after) in [
        (&[][..], &[3, 9][..]),
        (&[1], &[1, 3, 9]),
        (&[4, 30], &[3, 4, 9, 30]),
        // 38 stands for 2.
        (&[1, 38, 5, 40], &[1, 38, 3, 5, 9, 40]),
    ] {
        let mut out = Vec::new();
        let pieces = [(3, three.as_slice()), (9, nine.as_slice())];
        spliced(
            &mut out,
            &of(before),
            pieces,
            |field| if field == 38 { 2 } else { field },
        );
        assert_eq!(out, of(after));
    }
}

#[test]
fn structs_are_as_the_encoder_has_them() {
    let mut written = Vec::new();
    list_field(&mut written, "all", ["a", ""], |out, name| {
        text_field(out, "name", name);
    });
    text_field(&mut written, "text", "long".repeat(50).as_str());
    true_field(&mut written, "yes");
    let one = |name: &str| constant::object([("name".to_owned(), constant::text(name))].into());
    let fields = [
        ("all", constant::list(vec![one("a"), one("")])),
        ("text", constant::text("long".repeat(50))),
        ("yes", constant::boolean(true)),
    ];
    assert_eq!(written, constant::structure(fields).encode_to_vec());
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

/// The same bytes come out when what was written is read and encoded.
fn assert_canonical<M: Message + Name + Default + std::fmt::Debug>(any: &Any) -> M {
    let message: M = any.unpack().expect("it can be read").expect("it is of its type");
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
fn resources_are_as_the_encoder_has_them() {
    let labels = json!({"LABELS": {"app": "a"}, "DNS_CAPTURE": "true"});
    let proxies = vec![
        fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", &labels),
        fixture::client("router~10.1.0.2~gw-0.default~default.svc.cluster.local", &json!({})),
    ];
    let mesh = format!("{APP}---{OTHERS}");
    let store = fixture::store(Installation::default(), &[("config.yaml", &mesh)], proxies);
    let mut checked = [0; 5];
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
        for any in resources(&store, client, ResourceType::NameTable) {
            checked[4] += assert_canonical::<NameTable>(&any).table.len();
        }
    }
    assert!(checked.iter().all(|count| *count >= 3), "{checked:?}");
}
