//! Destinations of routes: their rows and the names of their clusters.

use std::collections::BTreeMap;

use crate::{
    base::{Hostname, Labels, Namespace, Shared},
    generate::{
        BuildContext,
        name::{ClusterMode, UNKNOWN_SERVICE, VipTraffic},
    },
    model::{
        Service, ServiceKey,
        destination_rule::{self, DestinationRule},
        service::ScopedService,
    },
    proto::istio::networking::v1alpha3::Destination,
};

/// A destination host of a VirtualService with the services that it resolves to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Target {
    /// Host as written in the VirtualService.
    pub(crate) host: Hostname,
    /// Service that the route configuration has under that host.
    pub(crate) service: Option<ScopedService>,
    /// Service that the scope has under that host. Its DestinationRule applies even if the service lacks the port.
    pub(crate) ruled: Option<ServiceKey>,
}

/// Rows of a [`Target`].
#[derive(Clone, Debug, Default)]
pub(crate) struct TargetRows {
    /// Service.
    pub(crate) service: Option<Shared<Service>>,
    /// DestinationRule.
    pub(crate) rule: Option<Shared<DestinationRule>>,
    /// Mode of the service's clusters.
    pub(crate) mode: ClusterMode,
}

/// Rows of each destination host.
pub(crate) type TargetMap = BTreeMap<Hostname, TargetRows>;

/// Reads the rows of targets, for a proxy in a namespace with these labels.
pub(crate) fn rows(ctx: &BuildContext, targets: &[Target], client: &Namespace, labels: &Labels) -> TargetMap {
    let rows_of = |target: &Target| {
        let service = target.service.as_ref().and_then(|service| ctx.scoped(service));
        let ruled = target.ruled.as_ref().and_then(|key| ctx.service(key));
        let rule = ruled.and_then(|ruled| destination_rule::lookup(ctx.cx, ctx.mesh, client, labels, ruled));
        let mode = ClusterMode::Default;
        (target.host.clone(), TargetRows { service, rule, mode })
    };
    targets.iter().map(rows_of).collect()
}

/// Port of a destination that has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortInference {
    /// The listener's port, for sidecar routes of one port: services are seen with that port only.
    Listener,
    /// The only port of the service, or else the listener's port.
    SolePort,
}

/// Returns the cluster of a destination, for a route on a listener port.
pub(crate) fn cluster(
    destination: &Destination,
    service: Option<&Service>,
    listener_port: u32,
    inference: PortInference,
    mode: ClusterMode,
) -> String {
    if destination.host.is_empty() {
        return UNKNOWN_SERVICE.to_owned();
    }
    let host = match service {
        Some(service) if !service.external_name.is_empty() => service.external_name.as_str(),
        _ => destination.host.as_str(),
    };
    let sole_port = match (inference, service) {
        (PortInference::SolePort, Some(service)) if service.ports.len() == 1 => Some(service.ports[0].number),
        _ => None,
    };
    let declared = destination.port.map(|port| port.number);
    let port = declared.or(sole_port).unwrap_or(listener_port);
    let mode = match mode {
        // Behind a waypoint, the port decides the kind of traffic; that of an unknown port is HTTP.
        ClusterMode::Vip(_) => {
            let port = service.and_then(|service| service.port(port));
            let traffic = port.and_then(|port| VipTraffic::of(port.protocol).last());
            ClusterMode::Vip(traffic.copied().unwrap_or(VipTraffic::Http))
        }
        mode => mode,
    };
    mode.cluster_name(port, &destination.subset, host)
}
