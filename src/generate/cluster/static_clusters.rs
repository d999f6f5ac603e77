//! Clusters that do not depend on services, for traffic of no service.

use super::{
    ClusterKey, TunnelCluster, builder::ClusterBuilder, connection_pool, finished, tunnel::PASSTHROUGH_IDLE_SECONDS,
};
use crate::{
    base::{Shared, SmolStr, cidr::IpMode},
    generate::{
        BuildContext,
        constant::{self, EXTERNAL_SDS_CLUSTER, METADATA_EXCHANGE, passthrough_sources, socket_address},
        filter::tls::ServerCertificates,
        name::{BLACK_HOLE, INBOUND_PASSTHROUGH, PASSTHROUGH},
        patch::{self, PatchContext, PatchRef, cluster::ClusterPatches, set},
        proxy::{MetadataKey, ProxyType},
        proxy_view::{self, Baggage},
        resource::{Built, Note},
        selected::Selected,
        tunnel,
    },
    model::waypoint::ServingRole,
    proto::envoy::config::{
        cluster::v3::cluster::{DiscoveryType, LbPolicy},
        core::v3::{BindConfig, ExtraSourceAddress},
        endpoint::v3::{ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier},
    },
};

/// Socket of the SDS provider next to the proxy.
const EXTERNAL_SDS_SOCKET: &str = "./var/run/secrets/credential-uds/socket";

/// Static clusters of a proxy, with the attributes that they depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StaticPart {
    /// Clusters.
    pub kinds: Vec<StaticCluster>,
    /// Patch context of the passthrough cluster.
    pub outward: PatchContext,
    /// EnvoyFilter patches of clusters that apply, in order.
    pub patches: Shared<[PatchRef]>,
    /// Omitted patches with the filter that the proxy lacks; the first cluster reports them.
    pub lacking: Shared<[(PatchRef, SmolStr)]>,
}

/// One static cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StaticKey {
    /// Kind.
    pub kind: StaticCluster,
    /// EnvoyFilter patches that apply, in order.
    pub patches: Shared<[PatchRef]>,
    /// Omitted patches to report.
    pub lacking: Shared<[(PatchRef, SmolStr)]>,
}

/// Kind of a static cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StaticCluster {
    /// [`BLACK_HOLE`].
    BlackHole,
    /// [`PASSTHROUGH`], with metadata exchange or without.
    Passthrough {
        /// True if the proxy runs the TCP metadata exchange.
        metadata_exchange: bool,
        /// True if HTTP/1.1 header names keep their case.
        keeps_header_case: bool,
    },
    /// [`INBOUND_PASSTHROUGH`].
    InboundPassthrough {
        /// Address families.
        ip_mode: IpMode,
        /// True if HTTP/1.1 header names keep their case.
        keeps_header_case: bool,
    },
    /// SDS provider next to the proxy.
    ExternalSds,
    /// Cluster of a tunnel.
    Tunnel(TunnelCluster),
}

impl StaticCluster {
    fn name(&self) -> &'static str {
        match self {
            Self::BlackHole => BLACK_HOLE,
            Self::Passthrough { .. } => PASSTHROUGH,
            Self::InboundPassthrough { .. } => INBOUND_PASSTHROUGH,
            Self::ExternalSds => EXTERNAL_SDS_CLUSTER,
            Self::Tunnel(tunnel) => tunnel.name(),
        }
    }
}

impl StaticPart {
    /// Selects the part of a proxy.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Self {
        let (kinds, outward) = match selected.proxy.proxy_type {
            ProxyType::Sidecar => (of_sidecar(ctx, selected), PatchContext::SidecarOutbound),
            ProxyType::Waypoint => (of_waypoint(ctx, selected), PatchContext::SidecarOutbound),
            _ => (of_gateway(ctx, selected), PatchContext::Gateway),
        };
        let socket = proxy_view::has_credential_socket(selected.proxy).then_some(StaticCluster::ExternalSds);
        Self {
            kinds: kinds.into_iter().chain(socket).collect(),
            outward,
            patches: selected.patches.clusters.clone(),
            lacking: selected.patches.lacking.clone(),
        }
    }

    /// Lists the clusters of the part.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterKey> {
        let outward = ClusterPatches::of(ctx, &self.patches, self.outward);
        let inward = ClusterPatches::of(ctx, &self.patches, PatchContext::SidecarInbound);
        let keys = self.kinds.iter().enumerate().map(|(at, kind)| {
            ClusterKey::Static(StaticKey {
                kind: kind.clone(),
                lacking: match at {
                    0 => self.lacking.clone(),
                    _ => Vec::new().into(),
                },
                patches: match kind {
                    StaticCluster::InboundPassthrough { .. } => inward.concerning(kind.name(), &[]),
                    // Parity (pilot/pkg/networking/core/cluster.go): patches do not apply to the SDS provider and
                    // tunnels.
                    StaticCluster::ExternalSds | StaticCluster::Tunnel(_) => Vec::new().into(),
                    StaticCluster::BlackHole | StaticCluster::Passthrough { .. } => {
                        outward.concerning(kind.name(), &[])
                    }
                },
            })
        });
        keys.collect()
    }
}

fn of_sidecar(ctx: &BuildContext, selected: &Selected) -> Vec<StaticCluster> {
    let (proxy, features) = (selected.proxy, &ctx.mesh.installation.features);
    let keeps_header_case = proxy_view::keeps_header_case(selected);
    let mut kinds = vec![
        StaticCluster::BlackHole,
        StaticCluster::Passthrough {
            metadata_exchange: features.pilot_enable_metadata_exchange && proxy.extensions.has(METADATA_EXCHANGE),
            keeps_header_case,
        },
        StaticCluster::InboundPassthrough {
            ip_mode: proxy.ip_mode,
            keeps_header_case,
        },
    ];
    if tunnel::ends_at_sidecar(features, proxy) {
        kinds.push(StaticCluster::Tunnel(TunnelCluster::Main));
    }
    kinds.extend(originate(ctx, selected));
    kinds
}

/// Returns the clusters of a gateway, which has no original destinations.
fn of_gateway(ctx: &BuildContext, selected: &Selected) -> Vec<StaticCluster> {
    let features = &ctx.mesh.installation.features;
    let certificates = ServerCertificates::of(selected.proxy);
    let crosses = proxy_view::gateway_spans_networks(features, selected.proxy, &selected.labels);
    let nested = crosses.then(|| crossing(certificates).map(StaticCluster::Tunnel));
    std::iter::once(StaticCluster::BlackHole)
        .chain(nested.into_iter().flatten())
        .chain(originate(ctx, selected))
        .collect()
}

/// Returns the clusters of a waypoint, where all traffic comes out of tunnels.
fn of_waypoint(ctx: &BuildContext, selected: &Selected) -> Vec<StaticCluster> {
    if selected.serves == ServingRole::EastWest {
        let tunnels = [TunnelCluster::Main, TunnelCluster::EncapForward, TunnelCluster::Forward];
        let tunnels = tunnels.into_iter().map(StaticCluster::Tunnel);
        return std::iter::once(StaticCluster::BlackHole).chain(tunnels).collect();
    }
    let features = &ctx.mesh.installation.features;
    // Parity (pilot/pkg/networking/core/cluster_waypoint.go): with any identity accepted, none may be listed.
    let names_peers = !features.pilot_skip_validate_trust_domain;
    let peers_of = names_peers.then(|| selected.proxy.namespace.clone());
    let certificates = ServerCertificates::of(selected.proxy);
    let originate = TunnelCluster::Originate {
        peers_of,
        certificates: certificates.clone(),
    };
    let encap = TunnelCluster::Encap {
        baggage: Baggage::of(features, selected.proxy),
    };
    let mut tunnels = vec![TunnelCluster::Main, encap, originate];
    if proxy_view::waypoint_spans_networks(features, &selected.labels) {
        tunnels.extend(crossing(certificates));
    }
    tunnels.into_iter().map(StaticCluster::Tunnel).collect()
}

/// Returns the clusters of nested tunnels.
fn crossing(certificates: ServerCertificates) -> [TunnelCluster; 2] {
    [
        TunnelCluster::Inner(certificates.clone()),
        TunnelCluster::Outer(certificates),
    ]
}

fn originate(ctx: &BuildContext, selected: &Selected) -> Option<StaticCluster> {
    let originate = || TunnelCluster::Originate {
        peers_of: None,
        certificates: ServerCertificates::of(selected.proxy),
    };
    let features = &ctx.mesh.installation.features;
    let sends = features.pilot_enable_sending_hbone && !selected.proxy.has(MetadataKey::DisableHboneSend);
    sends.then(|| StaticCluster::Tunnel(originate()))
}

impl StaticKey {
    fn lacking_notes(&self, ctx: &BuildContext) -> Vec<Note> {
        let note = |(reference, filter): &(PatchRef, SmolStr)| {
            let patch = patch::resolve(ctx, std::slice::from_ref(reference))
                .into_iter()
                .next()?;
            Some(set::missing(patch, filter))
        };
        self.lacking.iter().filter_map(note).collect()
    }

    /// Builds the cluster.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let cluster = match &self.kind {
            StaticCluster::BlackHole => black_hole(ctx),
            &StaticCluster::Passthrough {
                metadata_exchange,
                keeps_header_case,
            } => {
                let mut builder = passthrough(ctx, PASSTHROUGH, keeps_header_case);
                if metadata_exchange {
                    builder.exchange_metadata(&ctx.mesh.installation.features.pilot_mx_additional_labels);
                }
                builder
            }
            &StaticCluster::InboundPassthrough {
                ip_mode,
                keeps_header_case,
            } => {
                let mut builder = passthrough(ctx, INBOUND_PASSTHROUGH, keeps_header_case);
                builder.cluster.upstream_bind_config = Some(bind_config(ip_mode, true));
                builder
            }
            StaticCluster::ExternalSds => external_sds(ctx),
            StaticCluster::Tunnel(tunnel) => tunnel.builder(ctx),
        }
        .finish();
        finished(ctx, &self.patches, &[], cluster, self.lacking_notes(ctx))
    }
}

/// Returns the source address of connections to the workload, which interception ignores; `extra` adds the second
/// family.
pub(super) fn bind_config(ip_mode: IpMode, extra: bool) -> BindConfig {
    let sources = passthrough_sources(ip_mode);
    let more = sources
        .iter()
        .skip(1)
        .filter(|_| extra)
        .map(|source| ExtraSourceAddress {
            address: Some(socket_address(source, 0)),
            socket_options: None,
        });
    BindConfig {
        source_address: Some(socket_address(sources[0], 0)),
        extra_source_addresses: more.collect(),
        ..Default::default()
    }
}

fn black_hole(ctx: &BuildContext) -> ClusterBuilder {
    let mut builder = ClusterBuilder::new(BLACK_HOLE.to_owned(), DiscoveryType::Static);
    builder.cluster.connect_timeout = ctx.mesh_config().connect_timeout;
    builder
}

fn passthrough(ctx: &BuildContext, name: &str, keeps_header_case: bool) -> ClusterBuilder {
    // Parity (pilot/pkg/networking/core/cluster_builder.go): both have the statistics name of the outbound cluster.
    let mut builder = ClusterBuilder::new(PASSTHROUGH.to_owned(), DiscoveryType::OriginalDst);
    name.clone_into(&mut builder.cluster.name);
    builder.cluster.set_lb_policy(LbPolicy::ClusterProvided);
    connection_pool::apply(&mut builder, ctx, &Default::default(), None);
    if keeps_header_case {
        builder.keep_header_case();
    }
    builder.use_client_protocol();
    builder.common_http().idle_timeout = Some(prost_types::Duration {
        seconds: PASSTHROUGH_IDLE_SECONDS,
        nanos: 0,
    });
    builder
}

fn external_sds(ctx: &BuildContext) -> ClusterBuilder {
    let mut builder = ClusterBuilder::new(EXTERNAL_SDS_CLUSTER.to_owned(), DiscoveryType::Static);
    builder.cluster.connect_timeout = ctx.mesh_config().connect_timeout;
    builder.cluster.load_assignment = Some(fixed_endpoint(EXTERNAL_SDS_CLUSTER, EXTERNAL_SDS_SOCKET, 0));
    builder.use_http2();
    builder
}

/// Returns a load assignment with one address.
pub(super) fn fixed_endpoint(cluster: &str, address: &str, port: u32) -> ClusterLoadAssignment {
    let endpoint = Endpoint {
        address: Some(constant::address(address, port)),
        ..Default::default()
    };
    ClusterLoadAssignment {
        cluster_name: cluster.to_owned(),
        endpoints: vec![LocalityLbEndpoints {
            lb_endpoints: vec![LbEndpoint {
                host_identifier: Some(HostIdentifier::Endpoint(endpoint)),
                ..Default::default()
            }],
            ..Default::default()
        }],
        ..Default::default()
    }
}
