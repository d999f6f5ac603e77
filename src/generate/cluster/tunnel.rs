//! Clusters at both ends of HBONE tunnels: internal listeners, and the peers of tunnels.

use std::sync::LazyLock;

use super::{
    builder::ClusterBuilder,
    connection_pool,
    tls::{TlsOrigin, plaintext_match},
};
use crate::{
    base::Namespace,
    generate::{
        BuildContext,
        constant::{self, ISTIO_METADATA, PEER_METADATA, socket},
        filter::tls::ServerCertificates,
        proxy_view::Baggage,
        tunnel::{
            CONNECT_ORIGINATE, DESTINATION_METADATA, ENCAP, FORWARD_INNER_CONNECT, HBONE_PORT, INNER_CONNECT_ORIGINATE,
            MAIN_INTERNAL, OUTER_CONNECT_ORIGINATE, internal_address, tls_context,
        },
        wire::Encoded,
    },
    model::workload::TUNNEL_HTTP,
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::{
                    Cluster,
                    cluster::{DiscoveryType, LbConfig, LbPolicy, OriginalDstLbConfig, TransportSocketMatch},
                },
                core::v3::{Http2ProtocolOptions, TransportSocket},
                endpoint::v3::{
                    ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier,
                },
            },
            extensions::{
                transport_sockets::{
                    internal_upstream::v3::{
                        InternalUpstreamTransport, internal_upstream_transport::MetadataValueSource,
                    },
                    raw_buffer::v3::RawBuffer,
                    tls::v3::UpstreamTlsContext,
                },
                upstreams::http::v3::http_protocol_options::{
                    ExplicitHttpConfig, UpstreamProtocolOptions, explicit_http_config::ProtocolConfig,
                },
            },
            r#type::{
                matcher::v3::{StringMatcher, string_matcher::MatchPattern},
                metadata::v3::{
                    MetadataKey, MetadataKind,
                    metadata_key::{PathSegment, path_segment::Segment},
                    metadata_kind,
                },
            },
        },
    },
};

/// Idle timeout of connections to unknown destinations, in seconds.
pub(super) const PASSTHROUGH_IDLE_SECONDS: i64 = 300;

/// Default idle timeout of a tunnel without streams, in seconds.
const IDLE_SECONDS: i64 = 3600;
/// Time after which a cluster forgets an unused peer, in seconds.
const CLEANUP_SECONDS: i64 = 60;
/// Metadata field with the waypoint of a tunnel.
const WAYPOINT: &str = "waypoint";

/// Kind of a tunnel cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TunnelCluster {
    /// [`CONNECT_ORIGINATE`]: the peers of tunnels.
    Originate {
        /// Namespace of which any workload may be the peer, besides the workloads of the mesh's trust domains. `None`
        /// adds no peers; with `PILOT_SKIP_VALIDATE_TRUST_DOMAIN` the list must stay empty, which accepts all.
        peers_of: Option<Namespace>,
        /// Certificates of the proxy.
        certificates: ServerCertificates,
    },
    /// [`MAIN_INTERNAL`]: connections out of a tunnel.
    Main,
    /// [`ENCAP`]: connections that continue to a workload.
    Encap {
        /// Use of baggage.
        baggage: Baggage,
    },
    /// [`ENCAP`] of a gateway between networks: connections that are tunnels already.
    EncapForward,
    /// [`FORWARD_INNER_CONNECT`]: the destinations of these.
    Forward,
    /// [`INNER_CONNECT_ORIGINATE`]: the inner tunnel, with the certificates of the proxy.
    Inner(ServerCertificates),
    /// [`OUTER_CONNECT_ORIGINATE`]: the outer tunnel, with the certificates of the proxy.
    Outer(ServerCertificates),
}

impl TunnelCluster {
    /// Returns the cluster name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Originate { .. } => CONNECT_ORIGINATE,
            Self::Main => MAIN_INTERNAL,
            Self::Encap { .. } | Self::EncapForward => ENCAP,
            Self::Forward => FORWARD_INNER_CONNECT,
            Self::Inner(_) => INNER_CONNECT_ORIGINATE,
            Self::Outer(_) => OUTER_CONNECT_ORIGINATE,
        }
    }

    /// Returns the cluster.
    pub(super) fn builder(&self, ctx: &BuildContext) -> ClusterBuilder {
        match self {
            Self::Originate { peers_of, certificates } => {
                let mut builder = self.peers(ctx, certificates, peers_of.as_ref());
                prefer_waypoints(&mut builder);
                builder
            }
            Self::Forward => {
                let mut builder = self.destinations(ctx);
                prefer_waypoints(&mut builder);
                builder
            }
            Self::EncapForward => self.raw(ctx, FORWARD_INNER_CONNECT),
            Self::Outer(certificates) => {
                let mut builder = self.peers(ctx, certificates, None);
                builder.common_http().max_requests_per_connection = Some(1);
                builder
            }
            Self::Main => self.passing(ctx, MAIN_INTERNAL),
            Self::Encap { baggage } => {
                let mut builder = self.passing(ctx, CONNECT_ORIGINATE);
                if baggage.is_exchanged() {
                    builder.read_baggage();
                }
                builder
            }
            Self::Inner(certificates) => {
                let mut builder = self.inside(ctx, OUTER_CONNECT_ORIGINATE);
                let tls = InternalUpstreamTransport {
                    transport_socket: Some(peer_socket(ctx, certificates, None)),
                    ..Default::default()
                };
                builder.cluster.transport_socket = Some(socket("internal_upstream_with_tls", Any::pack(&tls)));
                open_streams(&mut builder, ctx);
                builder.common_http().max_requests_per_connection = Some(1);
                builder
            }
        }
    }

    /// Returns the cluster of the original destinations as peers of tunnels.
    fn peers(
        &self,
        ctx: &BuildContext,
        certificates: &ServerCertificates,
        peers_of: Option<&Namespace>,
    ) -> ClusterBuilder {
        let mut builder = self.destinations(ctx);
        builder.cluster.transport_socket = Some(peer_socket(ctx, certificates, peers_of));
        open_streams(&mut builder, ctx);
        builder
    }

    /// Returns the cluster of the original destinations, at the HBONE port.
    fn destinations(&self, ctx: &BuildContext) -> ClusterBuilder {
        let mut builder = ClusterBuilder::new(self.name().to_owned(), DiscoveryType::OriginalDst);
        connection_pool::apply(&mut builder, ctx, &Default::default(), None);
        let cluster = &mut builder.cluster;
        cluster.upstream_connection_options = None;
        cluster.set_lb_policy(LbPolicy::ClusterProvided);
        cluster.cleanup_interval = Some(seconds(CLEANUP_SECONDS));
        cluster.lb_config = Some(LbConfig::OriginalDstLbConfig(OriginalDstLbConfig {
            upstream_port_override: Some(HBONE_PORT),
            ..Default::default()
        }));
        builder
    }

    /// Returns the cluster of an internal listener.
    fn inside(&self, ctx: &BuildContext, listener: &str) -> ClusterBuilder {
        let mut builder = ClusterBuilder::new(self.name().to_owned(), DiscoveryType::Static);
        connection_pool::apply(&mut builder, ctx, &Default::default(), None);
        let cluster = &mut builder.cluster;
        cluster.connect_timeout = None;
        cluster.upstream_connection_options = None;
        cluster.load_assignment = Some(ClusterLoadAssignment {
            cluster_name: self.name().to_owned(),
            endpoints: vec![LocalityLbEndpoints {
                lb_endpoints: vec![LbEndpoint {
                    host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
                        address: Some(internal_address(listener, "")),
                        ..Default::default()
                    })),
                    ..Default::default()
                }],
                ..Default::default()
            }],
            ..Default::default()
        });
        builder
    }

    /// Returns the cluster of an internal listener for bytes.
    fn raw(&self, ctx: &BuildContext, listener: &str) -> ClusterBuilder {
        let mut builder = self.inside(ctx, listener);
        let transport = InternalUpstreamTransport {
            transport_socket: Some(raw_buffer()),
            ..Default::default()
        };
        builder.cluster.transport_socket = Some(socket(INTERNAL_UPSTREAM, Any::pack(&transport)));
        builder
    }

    /// Returns the cluster of an internal listener for connections that pass unchanged.
    fn passing(&self, ctx: &BuildContext, listener: &str) -> ClusterBuilder {
        let mut builder = self.raw(ctx, listener);
        builder.use_client_protocol();
        builder.common_http().idle_timeout = Some(seconds(PASSTHROUGH_IDLE_SECONDS));
        builder
    }
}

/// Connects to the waypoint in the metadata of the endpoint, if there is one.
fn prefer_waypoints(builder: &mut ClusterBuilder) {
    if let Some(LbConfig::OriginalDstLbConfig(config)) = &mut builder.cluster.lb_config {
        config.metadata_key = Some(MetadataKey {
            key: DESTINATION_METADATA.to_owned(),
            path: vec![PathSegment {
                segment: Some(Segment::Key(WAYPOINT.to_owned())),
            }],
        });
    }
}

const INTERNAL_UPSTREAM: &str = "internal_upstream";

fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}

fn raw_buffer() -> TransportSocket {
    socket("raw_buffer", Any::pack(&RawBuffer {}))
}

fn peer_socket(ctx: &BuildContext, certificates: &ServerCertificates, peers_of: Option<&Namespace>) -> TransportSocket {
    let domain = &ctx.mesh_config().trust_domain;
    let of_namespace = peers_of.map(|namespace| StringMatcher {
        match_pattern: Some(MatchPattern::Prefix(format!("spiffe://{domain}/ns/{namespace}/sa/"))),
        ..Default::default()
    });
    let context = UpstreamTlsContext {
        common_tls_context: Some(tls_context(ctx, certificates.secrets(), of_namespace)),
        ..Default::default()
    };
    socket("tls", Any::pack(&context))
}

/// Uses HTTP/2, where each connection is a stream.
fn open_streams(builder: &mut ClusterBuilder, ctx: &BuildContext) {
    let features = &ctx.mesh.installation.features;
    let window = |bytes: u32| (bytes > 0).then_some(bytes);
    builder.http_mut().upstream_protocol_options =
        Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
            protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(Http2ProtocolOptions {
                allow_connect: true,
                initial_stream_window_size: window(features.pilot_hbone_initial_stream_window_size),
                initial_connection_window_size: window(features.pilot_hbone_initial_connection_window_size),
                ..Default::default()
            })),
        }));
    let idle = ctx.mesh_config().hbone_idle_timeout;
    builder.common_http().idle_timeout = Some(idle.unwrap_or(seconds(IDLE_SECONDS)));
}

/// Sends a cluster's connections through the listener that originates tunnels, together with the metadata of its
/// endpoints.
pub(super) fn originate(builder: &mut ClusterBuilder, baggage: Baggage) {
    static PLAIN: LazyLock<[Encoded<Cluster>; 2]> = LazyLock::new(|| {
        Baggage::ALL.map(|baggage| {
            Encoded::of(&Cluster {
                transport_socket: Some(internal_upstream(raw_buffer(), baggage)),
                ..Default::default()
            })
        })
    });
    match builder.cluster.transport_socket.take() {
        None => builder.set_socket(&PLAIN[baggage as usize]),
        Some(inner) => builder.cluster.transport_socket = Some(internal_upstream(inner, baggage)),
    }
}

/// Sends a cluster's connections through the listener that forwards tunnels, together with the metadata of the cluster
/// and of its endpoints.
pub(super) fn forward(builder: &mut ClusterBuilder, baggage: Baggage) {
    let transport = InternalUpstreamTransport {
        passthrough_metadata: all_metadata(baggage),
        transport_socket: Some(raw_buffer()),
    };
    builder.cluster.transport_socket = Some(socket(INTERNAL_UPSTREAM, Any::pack(&transport)));
}

/// Refers to the metadata of the cluster and of its endpoints.
fn all_metadata(baggage: Baggage) -> Vec<MetadataValueSource> {
    let usual = [
        of_host(DESTINATION_METADATA),
        of_cluster(ISTIO_METADATA),
        of_host(ISTIO_METADATA),
    ];
    usual.into_iter().chain(peer_metadata(baggage)).collect()
}

fn internal_upstream(inner: TransportSocket, baggage: Baggage) -> TransportSocket {
    let usual = [of_host(DESTINATION_METADATA), of_host(ISTIO_METADATA)];
    let transport = InternalUpstreamTransport {
        passthrough_metadata: usual.into_iter().chain(peer_metadata(baggage)).collect(),
        transport_socket: Some(inner),
    };
    socket(INTERNAL_UPSTREAM, Any::pack(&transport))
}

/// Refers to the metadata that the filters for baggage use.
fn peer_metadata(baggage: Baggage) -> impl Iterator<Item = MetadataValueSource> {
    let sources = || [of_cluster(PEER_METADATA), of_host(PEER_METADATA)];
    baggage.is_exchanged().then(sources).into_iter().flatten()
}

/// Refers to metadata of the cluster.
fn of_cluster(name: &str) -> MetadataValueSource {
    metadata_of(metadata_kind::Kind::Cluster(metadata_kind::Cluster {}), name)
}

/// Refers to metadata of the endpoint.
fn of_host(name: &str) -> MetadataValueSource {
    metadata_of(metadata_kind::Kind::Host(metadata_kind::Host {}), name)
}

fn metadata_of(kind: metadata_kind::Kind, name: &str) -> MetadataValueSource {
    MetadataValueSource {
        kind: Some(MetadataKind { kind: Some(kind) }),
        name: name.to_owned(),
    }
}

/// Uses tunnels for the endpoints that accept them; other endpoints are reached as before.
///
/// Parity (pilot/pkg/networking/core/cluster_tls.go): a tunnel replaces mutual TLS of the mesh. Any other TLS is meant
/// for the workload and stays inside the tunnel.
pub(super) fn prefer(builder: &mut ClusterBuilder, origin: TlsOrigin, baggage: Baggage) {
    static PLAIN: LazyLock<[Encoded<Cluster>; 2]> =
        LazyLock::new(|| Baggage::ALL.map(|baggage| tunnel_match(constant::raw_buffer(), baggage)));
    let plain = &PLAIN[baggage as usize];
    // An original-destination cluster speaks TLS to whatever is at the address.
    if builder.is_original_dst() && origin != TlsOrigin::None {
        return;
    }
    let always = |name: &str, socket| TransportSocketMatch {
        name: name.to_owned(),
        transport_socket: Some(socket),
        ..Default::default()
    };
    let otherwise = match (origin, builder.cluster.transport_socket.take()) {
        (TlsOrigin::Automatic, _) => return builder.prefer_socket(plain),
        (_, None) => plaintext_match(),
        (TlsOrigin::MeshRule, Some(socket)) => always("tlsMode-istio", socket),
        (TlsOrigin::None | TlsOrigin::User, Some(socket)) => {
            builder.cluster.transport_socket_matches = vec![always("user", socket.clone())];
            if baggage.is_exchanged() {
                builder.disable_baggage();
            }
            return builder.prefer_socket(&tunnel_match(socket, baggage));
        }
    };
    builder.cluster.transport_socket_matches = vec![otherwise];
    builder.prefer_socket(plain);
}

/// Encodes the transport socket match of tunnels as a field of a cluster. `inner` is the socket inside a tunnel.
fn tunnel_match(inner: TransportSocket, baggage: Baggage) -> Encoded<Cluster> {
    let transport = InternalUpstreamTransport {
        passthrough_metadata: all_metadata(baggage),
        transport_socket: Some(inner),
    };
    let choice = TransportSocketMatch {
        name: "hbone".to_owned(),
        r#match: Some(constant::structure([("tunnel", constant::text(TUNNEL_HTTP))])),
        transport_socket: Some(socket(
            "envoy.transport_sockets.internal_upstream",
            Any::pack(&transport),
        )),
    };
    Encoded::of(&Cluster {
        transport_socket_matches: vec![choice],
        ..Default::default()
    })
}
