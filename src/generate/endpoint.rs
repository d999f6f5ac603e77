//! Endpoints: load assignments of EDS clusters and of DNS clusters, where they are inline.
//!
//! There are four steps: select the endpoints of a port and subset ([`selection`]); group those that a proxy may use by
//! locality ([`assignment`]); replace those in other networks by the gateways to these networks ([`network`]); apply
//! locality load balancing to the groups ([`locality`]).

mod assignment;
mod lb_endpoint;
mod locality;
mod network;
mod selection;

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource,
    name::ClusterMode,
    proxy_view::{NetworkCrossing, ProxyLocation, UpstreamProxyView},
    resource::Built,
    wire::{Encoded, Writer},
};
use crate::{
    base::{ClusterId, Labels, NetworkId, Shared, cidr::IpMode},
    model::{
        Service, ServiceKey,
        destination_rule::{self, RuleRef},
        service::{MergedPort, UNSPECIFIED_IP},
        waypoint,
    },
    proto::{envoy::config::endpoint::v3::ClusterLoadAssignment, field::cluster_load_assignment},
};
pub use assignment::Target;
use lb_endpoint::LocalityEndpoints;
pub use locality::{LocalityLb, LocationDependencies, locality_setting, needs};
pub use selection::EndpointMemo;

/// Inputs of a load assignment, besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointKey {
    /// Service.
    pub service: ServiceKey,
    /// Service port.
    pub port: u32,
    /// Members of the service that the port comes from, if the host has several.
    pub merged: Option<MergedPort>,
    /// Subset, empty for the default cluster.
    pub subset: SmolStr,
    /// Mode of the cluster.
    pub mode: ClusterMode,
    /// DestinationRule, if there is one.
    pub rule: Option<RuleRef>,
    /// Attributes of the proxy.
    pub client: EndpointProxyView,
}

/// Attributes of a proxy that endpoints depend on. Each field is set only if it makes a difference for the service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct EndpointProxyView {
    /// Networks that the proxy requested; empty means all.
    pub network_view: Option<Shared<BTreeSet<NetworkId>>>,
    /// Network of the proxy, if gateways lead to other networks.
    pub network: Option<NetworkProxyView>,
    /// Cluster of the proxy, for services with cluster-local endpoints.
    pub cluster: Option<ClusterId>,
    /// True if all endpoints of the service are cluster-local, not only those that declare it.
    pub cluster_only: bool,
    /// Node of the proxy, for node-local services.
    pub node: Option<SmolStr>,
    /// `region/zone/subzone` of the proxy, for services with locality load balancing.
    pub locality: Option<SmolStr>,
    /// Labels of the proxy that failover priorities compare; `None` without labels or comparison.
    pub labels: Option<Labels>,
    /// Service address for waypoints of clusters in which the service has none of its own, if the proxy reaches the
    /// service through its waypoint.
    pub through_waypoint: Option<SmolStr>,
    /// True if the proxy never sends HBONE, even to endpoints that request it.
    pub no_tunnels: bool,
    /// True if the proxy forwards tunnels instead of originating them.
    pub forwards: bool,
}

/// Attributes of a proxy that the choice of network gateways depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetworkProxyView {
    /// Network, empty if unknown.
    pub network: NetworkId,
    /// Address families.
    pub ip_mode: IpMode,
    /// Way to endpoints of other networks.
    pub crossing: NetworkCrossing,
}

impl EndpointProxyView {
    /// Returns the view of a proxy for one service. `location` is that of the proxy, with what the service's endpoints
    /// depend on; `None` for services that do not depend on it.
    pub fn of(
        ctx: &BuildContext,
        service: &Service,
        client: &UpstreamProxyView,
        location: Option<(&ProxyLocation, &LocationDependencies)>,
    ) -> Self {
        // Without a gateway, other networks are reached directly, but not by tunnels.
        let crosses = client.crossing != NetworkCrossing::MutualTls;
        let is_multi_network = crosses || network::gateways_for(ctx, service).is_some();
        let through_waypoint = address_through_waypoint(ctx, service, client);
        // Clusters that resolve names do not use the waypoint.
        let uses_waypoint = through_waypoint.is_some() && !service.resolution.is_dns();
        let cluster_local = is_local(ctx, service)
            || is_confined(ctx, service)
            || uses_waypoint && waypoint_service(ctx, service).is_some_and(|waypoint| is_local(ctx, waypoint));
        let mut view = Self {
            network_view: (!client.network_view.is_empty()).then(|| client.network_view.clone()),
            network: is_multi_network.then(|| NetworkProxyView {
                network: client.network.clone(),
                ip_mode: client.ip_mode,
                crossing: client.crossing,
            }),
            cluster: (cluster_local || ctx.mesh.installation.features.enable_mcs_service_discovery)
                .then(|| client.cluster.clone()),
            cluster_only: cluster_local,
            no_tunnels: client.no_tunnels,
            forwards: client.socket.is_east_west,
            through_waypoint,
            ..Self::default()
        };
        if let Some((location, needs)) = location {
            view.node = needs.node.then(|| location.node.clone());
            // The locality of a waypoint says nothing about the locality of the endpoints.
            let balances = needs.locality && !uses_waypoint;
            view.locality = balances.then(|| location.locality.clone());
            view.labels = location.labels.as_ref().and_then(|labels| needs.compared(labels));
        }
        view
    }
}

/// Returns true if proxies use only the endpoints of a service in their own cluster.
///
/// Parity (pilot/pkg/xds/endpoints/endpoint_builder.go, `snapshotShards`): of a service that is reached through its
/// waypoint, the service of the waypoint decides, too.
fn is_local(ctx: &BuildContext, service: &Service) -> bool {
    service.node_local || ctx.mesh.is_cluster_local(ctx.cx, &service.key.hostname)
}

/// Returns true if the ambient mode of several networks confines a service to its clusters.
///
/// Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): it applies to all proxies.
fn is_confined(ctx: &BuildContext, service: &Service) -> bool {
    let is_global = || {
        let row = ctx.mesh.ambient_services.get(ctx.cx, &service.key);
        row.is_none_or(|row| row.is_global)
    };
    ctx.mesh.installation.features.ambient_enable_multi_network && !is_global()
}

/// Returns [`EndpointProxyView::through_waypoint`]; `None` without a waypoint or if the proxy does not use it.
fn address_through_waypoint(ctx: &BuildContext, service: &Service, client: &UpstreamProxyView) -> Option<SmolStr> {
    let is_on = ctx.mesh.installation.features.enable_ingress_waypoint_routing;
    if !is_on || !client.socket.is_router || client.no_tunnels {
        return None;
    }
    ctx.mesh.service_waypoints.get(ctx.cx, &service.key)?;
    let (cluster, labels) = waypoint::declaration(ctx.cx, ctx.mesh, service)?;
    let label = waypoint::ingress_label(ctx.cx, ctx.mesh, cluster, labels, &service.key.namespace);
    label.filter(|is_on| *is_on)?;
    let auto = match client.ip_mode {
        IpMode::V6 => &service.auto_ipv6,
        IpMode::V4 | IpMode::Dual => &service.auto_ipv4,
    };
    let mut assigned = [&service.default_address, auto].into_iter();
    let assigned = assigned.find(|address| !address.is_empty() && **address != UNSPECIFIED_IP);
    // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): the waypoint of a headless Service is asked for 0.0.0.0, an
    // address that its listener matches.
    let headless = || address_in(service, &client.cluster).map(|_| SmolStr::new_static(UNSPECIFIED_IP));
    assigned.cloned().or_else(headless)
}

/// Returns the service of the waypoint that a service uses.
fn waypoint_service<'a>(ctx: &BuildContext<'a>, service: &Service) -> Option<&'a Shared<Service>> {
    let through = ctx.mesh.service_waypoints.get(ctx.cx, &service.key)?;
    let waypoint = ctx.mesh.waypoints.get(ctx.cx, &through.gateway)?;
    ctx.service(waypoint.service.as_ref()?)
}

/// Returns the address that a Kubernetes Service has in a cluster.
fn address_in<'a>(service: &'a Service, cluster: &ClusterId) -> Option<&'a SmolStr> {
    let mut addresses = service.cluster_vips.get(cluster).into_iter().flatten();
    addresses.find(|address| !address.is_empty())
}

impl EndpointKey {
    /// Returns the name of the cluster of the endpoints.
    pub fn name(&self) -> String {
        self.mode.cluster_name(self.port, &self.subset, &self.service.hostname)
    }

    /// Builds the resource. It exists, without endpoints, even if the service is gone.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let name = self.name();
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let found = ctx.service_port(&self.service, self.merged, self.port);
        let target = found.map(|(service, port)| Target {
            service,
            port,
            subset: &self.subset,
            mode: self.mode,
            rule: rule.as_ref(),
            through_waypoint: None,
        });
        let groups = target.map(|target| target.discovered(ctx, &self.client));
        Built::new(EncodedResource::write(name.as_str().into(), |out| {
            write_assignment(out, &name, &groups.unwrap_or_default());
        }))
    }
}

fn write_assignment(out: &mut Writer<ClusterLoadAssignment>, cluster: &str, groups: &[LocalityEndpoints]) {
    out.text(cluster_load_assignment::CLUSTER_NAME, cluster);
    for group in groups {
        out.nested(cluster_load_assignment::ENDPOINTS, |out| group.write(out));
    }
}

/// Returns the endpoints of a DNS cluster; `None` without endpoints.
pub fn inline_assignment(
    ctx: &BuildContext,
    cluster: &str,
    target: &Target,
    client: &EndpointProxyView,
) -> Option<ClusterLoadAssignment> {
    let groups = target.inline(ctx, client);
    (!groups.is_empty()).then(|| Encoded::write(0, |out| write_assignment(out, cluster, &groups)).decode())
}
