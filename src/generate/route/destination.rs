//! Where routes lead: destinations resolved to rows, and the names of their clusters.

use std::collections::BTreeMap;

use crate::{
    base::{Hostname, Labels, Namespace, Shared},
    generate::{BuildContext, cluster::ClusterMode},
    model::{
        Service, ServiceKey,
        destination_rule::{self, DestinationRule},
    },
    proto::istio::networking::v1alpha3::Destination,
};

/// The cluster of destinations that must not be reached.
pub(crate) const UNKNOWN_SERVICE: &str = "UnknownService";

/// A destination host of a VirtualService with the keys that it was resolved to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Target {
    /// The host as it stands in the VirtualService.
    pub(crate) host: Hostname,
    /// The service that the route configuration knows by that host.
    pub(crate) service: Option<ServiceKey>,
    /// The service of the scope by that host: its DestinationRule counts even where the service has not the port.
    pub(crate) ruled: Option<ServiceKey>,
}

/// The rows of a [`Target`].
#[derive(Clone, Debug, Default)]
pub(crate) struct TargetRows {
    /// The service.
    pub(crate) service: Option<Shared<Service>>,
    /// The DestinationRule.
    pub(crate) rule: Option<Shared<DestinationRule>>,
    /// Which of its clusters are meant.
    pub(crate) mode: ClusterMode,
}

/// The rows of every destination host.
pub(crate) type TargetMap = BTreeMap<Hostname, TargetRows>;

/// Reads the rows of targets, for a client in a namespace with these labels.
pub(crate) fn rows(ctx: &BuildContext, targets: &[Target], client: &Namespace, labels: &Labels) -> TargetMap {
    let rows_of = |target: &Target| {
        let service = target.service.as_ref().and_then(|key| ctx.service(key)).cloned();
        let ruled = target.ruled.as_ref().and_then(|key| ctx.service(key));
        let rule = ruled.and_then(|ruled| destination_rule::lookup(ctx.cx, ctx.mesh, client, labels, ruled));
        let mode = ClusterMode::Default;
        (target.host.clone(), TargetRows { service, rule, mode })
    };
    targets.iter().map(rows_of).collect()
}

/// How the port of a destination without one is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortInference {
    /// The port of the listener: sidecar routes of one port, where services are seen with that port only.
    Listener,
    /// The only port of the service, else that of the listener.
    SolePort,
}

/// The cluster that a destination means, for a route on a listener port.
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
    mode.cluster_name(port, &destination.subset, host)
}

/// Host and port that the name of a cluster tells; `None` if it is not of that form.
pub(crate) fn host_and_port(cluster: &str) -> Option<(&str, u32)> {
    let mut parts = cluster.split('|');
    let (_, port, _, host) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    parts.next().is_none().then(|| (host, port.parse().unwrap_or(0)))
}
