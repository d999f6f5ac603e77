//! Clusters behind waypoints: for each port of a service that uses the waypoint, with the subsets of its
//! DestinationRule, and once per kind of traffic.

use super::{
    ClusterResource,
    discovery::DiscoveryTypes,
    dynamic,
    outbound_key::{InlineProxyView, OutboundClusterKey},
};
use crate::{
    base::{Hashed, Shared},
    generate::{
        BuildContext,
        name::{ClusterMode, VipTraffic},
        patch::PatchRef,
        proxy_view::{ProxyLocation, UpstreamProxyView},
        selected::Selected,
        traffic_policy::{self, PortPolicies},
        waypoint::WaypointView,
    },
    model::{
        Service,
        destination_rule::{self, DestinationRule, RuleRef},
        service::{Resolution, ServicePort},
        waypoint,
    },
    proto::envoy::config::cluster::v3::cluster::DiscoveryType,
};

/// Clusters of the services behind a waypoint, with their endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointClusterPart {
    /// Waypoint.
    pub waypoint: WaypointView,
    /// Attributes that clusters depend on.
    pub client: Hashed<UpstreamProxyView>,
    /// `None` for the resources that do not depend on the proxy's location; otherwise only those that do.
    pub location: Option<ProxyLocation>,
}

impl WaypointClusterPart {
    /// Selects the parts of a waypoint.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<Self> {
        let general = Self {
            waypoint: selected.waypoint_view(),
            client: UpstreamProxyView::of(ctx, selected),
            location: None,
        };
        let located = ProxyLocation::of(ctx, selected).map(|location| Self {
            location: Some(location),
            ..general.clone()
        });
        std::iter::once(general).chain(located).collect()
    }

    /// Lists clusters, and endpoints of EDS clusters.
    ///
    /// Parity (pilot/pkg/networking/core/cluster.go): EnvoyFilters do not change these clusters.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterResource> {
        let patches: Shared<[PatchRef]> = Vec::new().into();
        let mut listed = Vec::new();
        for service in waypoint::served(ctx.cx, ctx.mesh, &self.waypoint.role) {
            if service.resolution == Resolution::Alias {
                continue;
            }
            let row = ctx.mesh.visibility.get(ctx.cx, &service.key);
            let is_visible = row.is_some_and(|row| row.export_to.visible_to(&self.waypoint.namespace));
            // A waypoint acts for the service: rules that select clients do not apply.
            let find = || destination_rule::find(ctx.cx, ctx.mesh, &self.waypoint.namespace, None, &service.key);
            // Parity (pilot/pkg/model/sidecar.go): rules count for services that the waypoint's namespace sees.
            let rule = is_visible.then(find).flatten();
            let features = &ctx.mesh.installation.features;
            let served = |port: &&ServicePort| {
                service.resolution != Resolution::DynamicDns || dynamic::serves_behind_waypoint(port.protocol, features)
            };
            let mut listing = Listing {
                part: self,
                service,
                rule: rule.as_ref(),
                patches: &patches,
                listed: Vec::new(),
            };
            for port in service.ports.iter().filter(served) {
                for traffic in self.waypoint.traffic(port.protocol) {
                    listing.list_port(ctx, port, *traffic);
                }
            }
            // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): a service that the waypoint's namespace does not
            // see has clusters, but no endpoints.
            let own = listing.listed.into_iter();
            listed.extend(own.filter(|resource| is_visible || matches!(resource, ClusterResource::Cluster(_))));
        }
        listed
    }
}

/// Resources of one service while they are listed.
struct Listing<'a> {
    part: &'a WaypointClusterPart,
    service: &'a Service,
    rule: Option<&'a (RuleRef, Shared<DestinationRule>)>,
    patches: &'a Shared<[PatchRef]>,
    listed: Vec<ClusterResource>,
}

impl Listing<'_> {
    fn list_port(&mut self, ctx: &BuildContext, port: &ServicePort, traffic: VipTraffic) {
        let WaypointClusterPart {
            waypoint,
            client,
            location,
        } = self.part;
        let (service, found) = (self.service, self.rule);
        let mode = ClusterMode::Vip(traffic);
        // Parity (pilot/pkg/networking/core/cluster_waypoint.go, pilot/pkg/xds/endpoints/endpoint_builder.go): of
        // gateways between networks, the rule affects the endpoints of EDS and not the clusters.
        let of_clusters = found.filter(|_| !waypoint.is_east_west());
        let rule = of_clusters.map(|(_, rule)| rule);
        let policies = PortPolicies::of(rule.map(|rule| &**rule), port.number);
        let types = DiscoveryTypes::new(ctx, service, port, mode, &client.socket, &policies);
        let of_endpoints = if types.is_inline() { of_clusters } else { found };
        let endpoint_policies = PortPolicies::of(of_endpoints.map(|(_, rule)| &**rule), port.number);
        let subsets = rule.into_iter().flat_map(|rule| traffic_policy::subset_names(rule));
        for subset in std::iter::once("").chain(subsets) {
            let key = OutboundClusterKey {
                service: service.key.clone(),
                port: port.number,
                merged: None,
                subset: subset.into(),
                mode,
                rule: of_clusters.map(|(found, _)| found.clone()),
                client: client.socket.clone(),
                inline: None,
                patches: self.patches.clone(),
            };
            let policy = endpoint_policies.of_subset(subset);
            let endpoints = client.endpoints(ctx, location.as_ref(), service, policy);
            if types.is_inline() {
                if let Some(endpoints) = endpoints {
                    let ip_mode = client.ip_mode;
                    let inline = Some(InlineProxyView { ip_mode, endpoints });
                    self.listed.push(OutboundClusterKey { inline, ..key }.listed());
                }
                continue;
            }
            if types.of(rule, subset, policies.of_subset(subset)).resolved == DiscoveryType::Eds {
                let rule = of_endpoints.map(|(found, _)| found.clone());
                self.listed.extend(endpoints.map(|client| key.endpoints(rule, client)));
            }
            if location.is_none() {
                self.listed.push(key.listed());
            }
        }
    }
}
