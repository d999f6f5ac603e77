//! Clusters behind waypoints: for each port of a service that uses the waypoint, with the subsets of its
//! DestinationRule, and once per kind of traffic.

use super::{
    ClusterResource,
    discovery::DiscoveryTypes,
    dynamic,
    outbound_key::{InlineProxyView, OutboundKey},
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
pub struct WaypointPart {
    /// Waypoint.
    pub waypoint: WaypointView,
    /// Attributes that clusters depend on.
    pub client: Hashed<UpstreamProxyView>,
    /// `None` for the resources that do not depend on the proxy's location; otherwise only those that do.
    pub location: Option<ProxyLocation>,
}

impl WaypointPart {
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
            let mut own = Vec::new();
            for port in service.ports.iter().filter(served) {
                for traffic in self.waypoint.traffic(port.protocol) {
                    self.list_port(ctx, (service, port, *traffic), rule.as_ref(), &patches, &mut own);
                }
            }
            // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): a service that the waypoint's namespace does not
            // see has clusters, but no endpoints.
            listed.extend(
                own.into_iter()
                    .filter(|one| is_visible || matches!(one, ClusterResource::Cluster(_))),
            );
        }
        listed
    }

    fn list_port(
        &self,
        ctx: &BuildContext,
        (service, port, traffic): (&Service, &ServicePort, VipTraffic),
        found: Option<&(RuleRef, Shared<DestinationRule>)>,
        patches: &Shared<[PatchRef]>,
        listed: &mut Vec<ClusterResource>,
    ) {
        let mode = ClusterMode::Vip(traffic);
        // Parity (pilot/pkg/networking/core/cluster_waypoint.go, pilot/pkg/xds/endpoints/endpoint_builder.go): of
        // gateways between networks, the rule affects the endpoints of EDS and not the clusters.
        let of_clusters = found.filter(|_| !self.waypoint.is_east_west());
        let rule = of_clusters.map(|(_, rule)| rule);
        let policies = PortPolicies::of(rule.map(|rule| &**rule), port.number);
        let types = DiscoveryTypes::new(ctx, service, port, mode, &self.client.socket, &policies);
        let of_endpoints = if types.is_inline() { of_clusters } else { found };
        let endpoint_policies = PortPolicies::of(of_endpoints.map(|(_, rule)| &**rule), port.number);
        let subsets = rule.into_iter().flat_map(|rule| traffic_policy::subset_names(rule));
        for subset in std::iter::once("").chain(subsets) {
            let key = OutboundKey {
                service: service.key.clone(),
                port: port.number,
                merged: None,
                subset: subset.into(),
                mode,
                rule: of_clusters.map(|(found, _)| found.clone()),
                client: self.client.socket.clone(),
                inline: None,
                patches: patches.clone(),
            };
            let policy = endpoint_policies.of_subset(subset);
            let endpoints = self.client.endpoints(ctx, self.location.as_ref(), service, policy);
            if types.is_inline() {
                if let Some(endpoints) = endpoints {
                    let ip_mode = self.client.ip_mode;
                    let inline = Some(InlineProxyView { ip_mode, endpoints });
                    listed.push(OutboundKey { inline, ..key }.listed());
                }
                continue;
            }
            if types.of(rule, subset, policies.of_subset(subset)).resolved == DiscoveryType::Eds {
                let rule = of_endpoints.map(|(found, _)| found.clone());
                listed.extend(endpoints.map(|client| key.endpoints(rule, client)));
            }
            if self.location.is_none() {
                listed.push(key.listed());
            }
        }
    }
}
