//! Clusters behind waypoints: for each port of a service that goes through one, with the subsets of its DestinationRule,
//! once for what it carries.

use super::{
    ClusterResource,
    discovery::Kinds,
    outbound_key::{InlineProxyView, OutboundKey},
};
use crate::{
    base::{Hashed, Shared},
    generate::{
        BuildContext,
        name::{ClusterMode, VipTraffic},
        patch::{PatchContext, cluster::ClusterPatches},
        proxy_view::{OutboundProxyView, Place},
        selected::Selected,
        traffic_policy,
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

/// The clusters of what goes through a waypoint with their endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointPart {
    /// The waypoint.
    pub waypoint: WaypointView,
    /// What clusters depend on of it.
    pub client: Hashed<OutboundProxyView>,
    /// `None`: everything that is the same wherever it is. Else only what depends on that.
    pub place: Option<Place>,
}

impl WaypointPart {
    /// The parts of a waypoint.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<Self> {
        let general = Self {
            waypoint: selected.waypoint_view(),
            client: OutboundProxyView::of(ctx, selected),
            place: None,
        };
        let placed = Place::of(ctx, selected).map(|place| Self {
            place: Some(place),
            ..general.clone()
        });
        std::iter::once(general).chain(placed).collect()
    }

    /// Clusters, and for those that use EDS the endpoints.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterResource> {
        let patches = ClusterPatches::of(ctx, &self.client.patches, PatchContext::SidecarInbound);
        let mut listed = Vec::new();
        for service in waypoint::served(ctx.cx, ctx.mesh, &self.waypoint.gateways) {
            if service.resolution == Resolution::Alias {
                continue;
            }
            // It is the service's side: what selects clients does not count.
            let rule = destination_rule::find(ctx.cx, ctx.mesh, &self.waypoint.namespace, None, &service.key);
            for port in &service.ports {
                for traffic in VipTraffic::of(port.protocol) {
                    self.list_port(ctx, (service, port, *traffic), rule.as_ref(), &patches, &mut listed);
                }
            }
        }
        listed
    }

    fn list_port(
        &self,
        ctx: &BuildContext,
        (service, port, traffic): (&Service, &ServicePort, VipTraffic),
        found: Option<&(RuleRef, Shared<DestinationRule>)>,
        patches: &ClusterPatches,
        listed: &mut Vec<ClusterResource>,
    ) {
        let mode = ClusterMode::Vip(traffic);
        let rule = found.map(|(_, rule)| rule);
        let kinds = Kinds::new(ctx, service, port, mode, &self.client.socket);
        let subsets = rule.into_iter().flat_map(|rule| traffic_policy::subset_names(rule));
        for subset in std::iter::once("").chain(subsets) {
            let mut key = OutboundKey {
                service: service.key.clone(),
                port: port.number,
                subset: subset.into(),
                mode,
                rule: found.map(|(found, _)| found.clone()),
                client: self.client.socket.clone(),
                inline: None,
                patches: patches.none(),
            };
            if !patches.is_empty() {
                key.patches = patches.concerning(&key.name(), &[]);
            }
            let endpoints = self.client.endpoints(ctx, self.place.as_ref(), service, rule, &key);
            if kinds.inline() {
                if let Some(endpoints) = endpoints {
                    let ip_mode = self.client.ip_mode;
                    let inline = Some(InlineProxyView { ip_mode, endpoints });
                    listed.push(OutboundKey { inline, ..key }.listed());
                }
                continue;
            }
            if kinds.of(rule, subset).ended == DiscoveryType::Eds {
                listed.extend(endpoints.map(|client| key.endpoints(client)));
            }
            if self.place.is_none() {
                listed.push(key.listed());
            }
        }
    }
}
