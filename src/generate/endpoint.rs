//! Endpoints: the load assignment of an EDS cluster, and the one that stands inside a DNS cluster.
//!
//! Three steps: which endpoints a client may use, by locality ([`assignment`]); those in other networks replaced by the
//! gateways that lead there ([`network`]); and what locality load balancing makes of the groups ([`locality`]).

mod assignment;
mod locality;
mod network;

use std::collections::BTreeSet;

use prost::Message;
use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource, ResourceType,
    name::ClusterMode,
    proxy_view::{OutboundProxyView, Place},
    resource::Built,
    wire,
};
use crate::{
    base::{ClusterId, Labels, NetworkId, Shared, cidr::IpMode},
    model::{
        Service, ServiceKey,
        destination_rule::{self, RuleRef},
        service::UNSPECIFIED_IP,
    },
    proto::envoy::config::endpoint::v3::ClusterLoadAssignment,
};
use assignment::Group;
pub use assignment::Target;
pub use locality::{LocalityLb, Needs, locality_setting, needs};

/// What one resource is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointKey {
    /// The service.
    pub service: ServiceKey,
    /// The service port.
    pub port: u32,
    /// The subset, empty for the default cluster.
    pub subset: SmolStr,
    /// What the cluster is for.
    pub mode: ClusterMode,
    /// The rule, if there is one.
    pub rule: Option<RuleRef>,
    /// The client.
    pub client: EndpointProxyView,
}

/// What endpoints depend on of a client; each field is filled only where it makes a difference.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct EndpointProxyView {
    /// The networks that it asked to see; empty: all.
    pub network_view: Option<Shared<BTreeSet<NetworkId>>>,
    /// Its network, where gateways lead into networks.
    pub network: Option<NetworkProxyView>,
    /// Its cluster, for services with endpoints that are for clients of the same cluster.
    pub cluster: Option<ClusterId>,
    /// All endpoints of the service are for clients of the same cluster, not only those that say so.
    pub cluster_only: bool,
    /// Its node, for node-local services.
    pub node: Option<SmolStr>,
    /// Its `region/zone/subzone`, for services with locality load balancing.
    pub locality: Option<SmolStr>,
    /// Its labels that failover priorities compare; `None`: it has no labels, or none is compared.
    pub labels: Option<Labels>,
    /// The service's own address, where the client leads through the service's waypoint, which has to be told it.
    pub through_waypoint: Option<SmolStr>,
    /// It never sends by HBONE, even to endpoints that ask for it.
    pub no_tunnels: bool,
}

/// What the choice of network gateways depends on of a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NetworkProxyView {
    /// The network, empty when unknown.
    pub network: NetworkId,
    /// The address families.
    pub ip_mode: IpMode,
}

impl EndpointProxyView {
    /// The projection of a client for one service. `place`: where it is, for services that need to know.
    pub fn of(
        ctx: &BuildContext,
        service: &Service,
        client: &OutboundProxyView,
        place: Option<(&Place, &Needs)>,
    ) -> Self {
        let is_multi_network = network::gateways_for(ctx, service).is_some();
        let cluster_local = service.node_local || ctx.mesh.is_cluster_local(ctx.cx, &service.key.hostname);
        let mut projection = Self {
            network_view: (!client.network_view.is_empty()).then(|| client.network_view.clone()),
            network: is_multi_network.then(|| NetworkProxyView {
                network: client.network.clone(),
                ip_mode: client.ip_mode,
            }),
            cluster: (cluster_local || ctx.mesh.installation.features.enable_mcs_service_discovery)
                .then(|| client.cluster.clone()),
            cluster_only: cluster_local,
            no_tunnels: client.no_tunnels,
            through_waypoint: address_through_waypoint(ctx, service, client),
            ..Self::default()
        };
        if let Some((place, needs)) = place {
            let compared = |labels: &Labels| {
                let compared = labels.iter().filter(|(key, _)| needs.labels.contains(*key));
                compared.map(|(key, value)| (key.clone(), value.clone())).collect()
            };
            projection.node = needs.node.then(|| place.node.clone());
            // Which waypoint is near does not say which endpoint is.
            let balances = needs.locality && projection.through_waypoint.is_none();
            projection.locality = balances.then(|| place.locality.clone());
            projection.labels = place.labels.as_ref().filter(|_| !needs.labels.is_empty()).map(compared);
        }
        projection
    }
}

/// The label by which a service wants gateways to lead through its waypoint.
const INGRESS_USE_WAYPOINT: &str = "istio.io/ingress-use-waypoint";

/// See [`EndpointProxyView::through_waypoint`]; `None`: there is no waypoint, or nobody wants the client to go there.
fn address_through_waypoint(ctx: &BuildContext, service: &Service, client: &OutboundProxyView) -> Option<SmolStr> {
    let is_on = ctx.mesh.installation.features.enable_ingress_waypoint_routing;
    if !is_on || !client.socket.is_router || client.no_tunnels {
        return None;
    }
    service
        .label(INGRESS_USE_WAYPOINT)
        .filter(|value| value.eq_ignore_ascii_case("true"))?;
    ctx.mesh.service_waypoints.get(ctx.cx, &service.key)?;
    let own = service.cluster_vips.get(&client.cluster).into_iter().flatten();
    let auto = match client.ip_mode {
        IpMode::V6 => &service.auto_ipv6,
        IpMode::V4 | IpMode::Dual => &service.auto_ipv4,
    };
    let mut addresses = own.chain([&service.default_address, auto]);
    addresses
        .find(|address| !address.is_empty() && **address != UNSPECIFIED_IP)
        .cloned()
}

impl EndpointKey {
    /// The name of the cluster that the endpoints are for.
    pub fn name(&self) -> String {
        self.mode.cluster_name(self.port, &self.subset, &self.service.hostname)
    }

    /// Builds the resource; it is there, without endpoints, even if the service is gone.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let name = self.name();
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let target = ctx.service(&self.service).and_then(|service| {
            let port = service.port(self.port)?;
            Some(Target {
                service,
                port,
                subset: &self.subset,
                mode: self.mode,
                rule: rule.as_ref(),
                leads_to: None,
            })
        });
        let groups = target.map(|target| target.discovered(ctx, &self.client));
        let type_url = ResourceType::Endpoint.url();
        Built::new(EncodedResource::written(name.as_str().into(), type_url, |out| {
            write_assignment(out, &name, &groups.unwrap_or_default());
        }))
    }
}

fn write_assignment(out: &mut Vec<u8>, cluster: &str, groups: &[Group]) {
    wire::text(out, 1, cluster);
    for group in groups {
        wire::nested(out, 2, |out| group.write(out));
    }
}

/// The endpoints inside a DNS cluster; `None` if there are none.
pub fn inline_assignment(
    ctx: &BuildContext,
    cluster: &str,
    target: &Target,
    client: &EndpointProxyView,
) -> Option<ClusterLoadAssignment> {
    let groups = target.inline(ctx, client);
    let mut written = Vec::new();
    write_assignment(&mut written, cluster, &groups);
    let assignment = ClusterLoadAssignment::decode(written.as_slice());
    (!groups.is_empty()).then(|| assignment.expect("because it was written according to the message"))
}
