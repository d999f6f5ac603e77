//! Clusters by which HBONE tunnels are entered and left: listeners inside the proxy, and the peers that tunnels lead to.

use std::sync::LazyLock;

use prost::Message;

use super::{connection_pool, draft::Draft, tls::plaintext_match};
use crate::{
    base::Namespace,
    generate::{
        BuildContext,
        constant::{self, ISTIO_METADATA, socket},
        tunnel::{
            CONNECT_ORIGINATE, DESTINATION_METADATA, ENCAP, HBONE_PORT, INNER_CONNECT_ORIGINATE, MAIN_INTERNAL,
            OUTER_CONNECT_ORIGINATE, internal_address, tls_context,
        },
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

/// How long connections to unknown destinations may be idle, in seconds.
pub(super) const PASSTHROUGH_IDLE_SECONDS: i64 = 300;

/// How long a tunnel without streams stays open, where the mesh says nothing, in seconds.
const IDLE_SECONDS: i64 = 3600;
/// How long a cluster remembers a peer that nobody connects to any more, in seconds.
const CLEANUP_SECONDS: i64 = 60;
/// The field of metadata by which a tunnel leads to a waypoint.
const WAYPOINT: &str = "waypoint";

/// Which cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TunnelCluster {
    /// [`CONNECT_ORIGINATE`]: the peers that tunnels lead to.
    Originate {
        /// Peers may be any workload of this namespace, whatever their trust domain.
        peers_of: Option<Namespace>,
    },
    /// [`MAIN_INTERNAL`]: what came out of a tunnel.
    Main,
    /// [`ENCAP`]: what goes on to a workload.
    Encap,
    /// [`INNER_CONNECT_ORIGINATE`]: the tunnel within.
    Inner,
    /// [`OUTER_CONNECT_ORIGINATE`]: the tunnel around it.
    Outer,
}

impl TunnelCluster {
    /// The cluster's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Originate { .. } => CONNECT_ORIGINATE,
            Self::Main => MAIN_INTERNAL,
            Self::Encap => ENCAP,
            Self::Inner => INNER_CONNECT_ORIGINATE,
            Self::Outer => OUTER_CONNECT_ORIGINATE,
        }
    }

    /// The cluster.
    pub(super) fn draft(&self, ctx: &BuildContext) -> Draft {
        match self {
            Self::Originate { peers_of } => {
                let mut draft = self.peers(ctx, peers_of.as_ref());
                if let Some(LbConfig::OriginalDstLbConfig(config)) = &mut draft.cluster.lb_config {
                    config.metadata_key = Some(MetadataKey {
                        key: DESTINATION_METADATA.to_owned(),
                        path: vec![PathSegment {
                            segment: Some(Segment::Key(WAYPOINT.to_owned())),
                        }],
                    });
                }
                draft
            }
            Self::Outer => {
                let mut draft = self.peers(ctx, None);
                draft.common_http().max_requests_per_connection = Some(1);
                draft
            }
            Self::Main => self.passing(ctx, MAIN_INTERNAL),
            Self::Encap => self.passing(ctx, CONNECT_ORIGINATE),
            Self::Inner => {
                let mut draft = self.inside(ctx, OUTER_CONNECT_ORIGINATE);
                let tls = InternalUpstreamTransport {
                    transport_socket: Some(peer_socket(ctx, None)),
                    ..Default::default()
                };
                draft.cluster.transport_socket = Some(socket("internal_upstream_with_tls", Any::pack(&tls)));
                open_streams(&mut draft, ctx);
                draft.common_http().max_requests_per_connection = Some(1);
                draft
            }
        }
    }

    /// Whoever the connection was for, at the port of tunnels.
    fn peers(&self, ctx: &BuildContext, peers_of: Option<&Namespace>) -> Draft {
        let mut draft = Draft::new(self.name().to_owned(), DiscoveryType::OriginalDst);
        connection_pool::apply(&mut draft, ctx, &Default::default(), None);
        let cluster = &mut draft.cluster;
        cluster.set_lb_policy(LbPolicy::ClusterProvided);
        cluster.cleanup_interval = Some(seconds(CLEANUP_SECONDS));
        cluster.lb_config = Some(LbConfig::OriginalDstLbConfig(OriginalDstLbConfig {
            upstream_port_override: Some(HBONE_PORT),
            ..Default::default()
        }));
        cluster.transport_socket = Some(peer_socket(ctx, peers_of));
        open_streams(&mut draft, ctx);
        draft
    }

    /// A listener inside the proxy.
    fn inside(&self, ctx: &BuildContext, listener: &str) -> Draft {
        let mut draft = Draft::new(self.name().to_owned(), DiscoveryType::Static);
        connection_pool::apply(&mut draft, ctx, &Default::default(), None);
        let cluster = &mut draft.cluster;
        cluster.connect_timeout = None;
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
        draft
    }

    /// The same for connections that are passed on as they are.
    fn passing(&self, ctx: &BuildContext, listener: &str) -> Draft {
        let mut draft = self.inside(ctx, listener);
        let transport = InternalUpstreamTransport {
            transport_socket: Some(raw_buffer()),
            ..Default::default()
        };
        draft.cluster.transport_socket = Some(socket(INTERNAL_UPSTREAM, Any::pack(&transport)));
        draft.use_client_protocol();
        draft.common_http().idle_timeout = Some(seconds(PASSTHROUGH_IDLE_SECONDS));
        draft
    }
}

const INTERNAL_UPSTREAM: &str = "internal_upstream";

fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}

fn raw_buffer() -> TransportSocket {
    socket("raw_buffer", Any::pack(&RawBuffer {}))
}

fn peer_socket(ctx: &BuildContext, peers_of: Option<&Namespace>) -> TransportSocket {
    let domain = &ctx.mesh_config().trust_domain;
    let of_namespace = peers_of.map(|namespace| StringMatcher {
        match_pattern: Some(MatchPattern::Prefix(format!("spiffe://{domain}/ns/{namespace}/sa/"))),
        ..Default::default()
    });
    let context = UpstreamTlsContext {
        common_tls_context: Some(tls_context(ctx, of_namespace)),
        ..Default::default()
    };
    socket("tls", Any::pack(&context))
}

/// Connections are streams of HTTP/2.
fn open_streams(draft: &mut Draft, ctx: &BuildContext) {
    draft.http_mut().upstream_protocol_options =
        Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
            protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(Http2ProtocolOptions {
                allow_connect: true,
                ..Default::default()
            })),
        }));
    let idle = ctx.mesh_config().hbone_idle_timeout;
    draft.common_http().idle_timeout = Some(idle.unwrap_or(seconds(IDLE_SECONDS)));
}

/// Leads a cluster through the listener that opens tunnels: what its endpoints' metadata say of the way goes along.
pub(super) fn lead_through(draft: &mut Draft) {
    static PLAIN: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let cluster = Cluster {
            transport_socket: Some(through(raw_buffer())),
            ..Default::default()
        };
        cluster.encode_to_vec()
    });
    match draft.cluster.transport_socket.take() {
        None => draft.set_socket(&PLAIN),
        Some(inner) => {
            let inner = TransportSocket {
                name: "tls".to_owned(),
                ..inner
            };
            draft.cluster.transport_socket = Some(through(inner));
        }
    }
}

fn through(inner: TransportSocket) -> TransportSocket {
    let transport = InternalUpstreamTransport {
        passthrough_metadata: vec![of_host(DESTINATION_METADATA), of_host(ISTIO_METADATA)],
        transport_socket: Some(inner),
    };
    socket(INTERNAL_UPSTREAM, Any::pack(&transport))
}

/// Metadata of the endpoint.
fn of_host(name: &str) -> MetadataValueSource {
    metadata_of(metadata_kind::Kind::Host(metadata_kind::Host {}), name)
}

fn metadata_of(kind: metadata_kind::Kind, name: &str) -> MetadataValueSource {
    MetadataValueSource {
        kind: Some(MetadataKind { kind: Some(kind) }),
        name: name.to_owned(),
    }
}

/// Leads a cluster's connections to endpoints that take tunnels through these; to others as it is.
pub(super) fn prefer(draft: &mut Draft) {
    static TUNNEL: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let of_cluster = metadata_kind::Kind::Cluster(metadata_kind::Cluster {});
        let transport = InternalUpstreamTransport {
            passthrough_metadata: vec![
                of_host(DESTINATION_METADATA),
                metadata_of(of_cluster, ISTIO_METADATA),
                of_host(ISTIO_METADATA),
            ],
            transport_socket: Some(constant::raw_buffer()),
        };
        let choice = TransportSocketMatch {
            name: "hbone".to_owned(),
            r#match: Some(constant::structure([("tunnel", constant::text(TUNNEL_HTTP))])),
            transport_socket: Some(socket(
                "envoy.transport_sockets.internal_upstream",
                Any::pack(&transport),
            )),
        };
        let cluster = Cluster {
            transport_socket_matches: vec![choice],
            ..Default::default()
        };
        cluster.encode_to_vec()
    });
    if !draft.chooses_sockets() {
        let otherwise = match draft.cluster.transport_socket.take() {
            // Who chooses the address by itself speaks TLS to whatever is there.
            Some(socket) if draft.is_original_dst() => {
                draft.cluster.transport_socket = Some(socket);
                return;
            }
            Some(socket) => TransportSocketMatch {
                name: "user".to_owned(),
                r#match: Some(constant::structure([])),
                transport_socket: Some(socket),
            },
            None => plaintext_match(),
        };
        draft.cluster.transport_socket_matches = vec![otherwise];
    }
    draft.prefer_socket(&TUNNEL);
}
