//! Routes of waypoints. Each serves one service port and accepts every host, because the address has already determined
//! the service.

use std::{collections::BTreeSet, sync::LazyLock};

use super::{
    RouteProxyView,
    destination::{self, PortInference, TargetMap, TargetRows},
    http::{self, DefaultRoutes},
    routes::Routes,
    surplus,
    translation::Translation,
};
use crate::{
    base::{Hostname, Labels, Namespace, Shared},
    generate::{
        BuildContext,
        name::{ClusterMode, VipTraffic},
        waypoint::Served,
        wire::Encoded,
    },
    model::{
        ScopeKey, Service,
        destination_rule::{self, DestinationRule},
        service::Resolution,
        virtual_service::{MESH_GATEWAY, VirtualService},
    },
    proto::{
        envoy::config::route::v3::RouteConfiguration,
        field::{route_configuration, virtual_host},
        istio::networking::v1alpha3::{Destination, http_body::Specifier},
    },
};

/// Largest direct response of a route, in bytes.
const MAX_DIRECT_RESPONSE: u32 = 1 << 20;
/// The largest direct response that Envoy accepts by default, in bytes.
const USUAL_DIRECT_RESPONSE: usize = 4096;

/// The only virtual host of a waypoint's route configuration.
pub(crate) struct WaypointHost<'a> {
    /// Name of the route configuration: that of the cluster.
    pub(crate) cluster: &'a str,
    /// Service port.
    pub(crate) port: u32,
    /// Domain: `*`, except for a host that is resolved per request.
    pub(crate) domain: &'a str,
}

/// Routes of a waypoint.
pub(crate) struct WaypointRoutes {
    /// The route configuration.
    pub(crate) configuration: Encoded<RouteConfiguration>,
    /// True if they are those of VirtualServices.
    pub(crate) declared: bool,
}

/// A service port behind a waypoint.
#[derive(Clone, Copy)]
pub(crate) struct ServedPort<'a> {
    /// Services of the waypoint.
    pub(crate) served: &'a Served<'a>,
    /// Labels of the waypoint.
    pub(crate) labels: &'a Labels,
    /// VirtualServices of the service, in order of precedence.
    pub(crate) declared: &'a [&'a Shared<VirtualService>],
    /// Service.
    pub(crate) service: &'a Service,
    /// Number of the port.
    pub(crate) port: u32,
    /// Name of its cluster.
    pub(crate) cluster: &'a str,
    /// True if the service has too many ports for the routes of its VirtualServices, which refuse requests to this one.
    pub(crate) is_surplus: bool,
}

/// Encodes the routes of a service port: those of its VirtualServices, or else one route to its cluster.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): the routes of all VirtualServices follow each other.
pub(crate) fn of_port(ctx: &BuildContext, port: &ServedPort, append_forwarded_host: bool) -> WaypointRoutes {
    let hostname = &port.service.key.hostname;
    // Clients of a dynamic host must not choose another host.
    let domain = match port.service.resolution {
        Resolution::DynamicDns => hostname.as_str(),
        _ => "*",
    };
    let host = WaypointHost {
        cluster: port.cluster,
        port: port.port,
        domain,
    };
    if port.is_surplus {
        return WaypointRoutes {
            configuration: configuration(&host, &[surplus::refusal()], false),
            declared: true,
        };
    }
    let client = RouteProxyView {
        namespace: port.served.namespace().clone(),
        // The caller's labels are unknown to a waypoint.
        labels: Shared::new(Labels::new()),
        append_forwarded_host,
        proxyless: false,
    };
    let of_declared = |declared: &&Shared<VirtualService>| {
        let targets = targets(ctx, port, declared);
        let translation = Translation {
            ctx,
            client: &client,
            clients_are_unknown: true,
            gateway: MESH_GATEWAY,
            port: port.port,
            tls: false,
            advertise_http3: false,
            inference: PortInference::SolePort,
            targets: &targets,
        };
        http::routes(&translation, declared)
    };
    let routes: Vec<Routes> = port.declared.iter().map(of_declared).collect();
    if routes.iter().all(Routes::is_empty) {
        let operation = format!("{hostname}:{}/*", port.port);
        return to_cluster(ctx, &host, &operation);
    }
    let raises_limit = port.declared.iter().any(|declared| has_large_response(declared));
    WaypointRoutes {
        configuration: configuration(&host, &routes, raises_limit),
        declared: true,
    }
}

/// Returns the last port of a service, by number, on which all VirtualServices of the service apply.
pub(crate) fn last_port(ctx: &BuildContext, service: &Service, declared: &[&Shared<VirtualService>]) -> u32 {
    let summaries = declared
        .iter()
        .filter_map(|declared| ctx.mesh.virtual_service_summaries.get(ctx.cx, &declared.meta.key));
    let most = summaries.map(|summary| summary.most_ports).min();
    most.map_or(u32::MAX, |most| {
        let ports = service.ports.iter();
        let routed = ports.filter(|port| port.protocol.is_http() || port.protocol.is_unsupported());
        surplus::last_port(routed.map(|port| port.number), most)
    })
}

/// Returns true if a direct response is larger than Envoy accepts by default. Envoy would refuse the whole listener.
fn has_large_response(declared: &VirtualService) -> bool {
    let routes = declared.http.as_written();
    let mut bodies = routes.filter_map(|http| http.direct_response.as_ref()?.body.as_ref()?.specifier.as_ref());
    bodies.any(|body| match body {
        Specifier::String(text) => text.len() > USUAL_DIRECT_RESPONSE,
        Specifier::Bytes(bytes) => bytes.len() > USUAL_DIRECT_RESPONSE,
    })
}

/// Encodes routes that send every request for the host to its cluster. `operation` names them in traces.
pub(crate) fn to_cluster(ctx: &BuildContext, host: &WaypointHost, operation: &str) -> WaypointRoutes {
    let routes = DefaultRoutes::shared(ctx).route(host.cluster, operation, None);
    WaypointRoutes {
        configuration: configuration(host, &[routes], true),
        declared: false,
    }
}

/// Resolves the destinations of a VirtualService.
fn targets(ctx: &BuildContext, port: &ServedPort, declared: &VirtualService) -> TargetMap {
    let namespace = declared.meta.namespace();
    let rows = declared.destinations.iter();
    let hosts: BTreeSet<&Hostname> = rows.map(|destination| &destination.host).collect();
    let hosts = hosts.into_iter();
    hosts
        .map(|host| (host.clone(), target(ctx, port, host, namespace)))
        .collect()
}

/// Resolves a destination of a VirtualService: through the waypoint itself if it serves the host, or if the host is
/// unknown.
fn target(ctx: &BuildContext, port: &ServedPort, host: &Hostname, namespace: &Namespace) -> TargetRows {
    let served = port.served;
    let elsewhere = || {
        let scope = ctx.tcp_scope(&ScopeKey::Gateway(served.namespace().clone()));
        ctx.service(&scope.service_for(ctx.cx, ctx.mesh, host, namespace)?)
    };
    let through_waypoint = ClusterMode::Vip(VipTraffic::Http);
    let (service, mode) = match served.service(host) {
        Some(service) => (Some(service), through_waypoint),
        None => match elsewhere() {
            Some(service) => (Some(service), ClusterMode::Default),
            None => (None, through_waypoint),
        },
    };
    TargetRows {
        service: service.cloned(),
        rule: service.and_then(|service| rule(ctx, port, service)),
        mode,
    }
}

/// Returns the rule for a service, with the waypoint as its client.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): unlike for the clusters of its services, a rule may select
/// the waypoint.
pub(crate) fn rule(ctx: &BuildContext, port: &ServedPort, service: &Service) -> Option<Shared<DestinationRule>> {
    let (namespace, labels) = (port.served.namespace(), Some(port.labels));
    destination_rule::find(ctx.cx, ctx.mesh, namespace, labels, &service.key).map(|(_, rule)| rule)
}

/// Returns the cluster and the rule of a TCP destination of a VirtualService in a namespace.
pub(crate) fn tcp_target(
    ctx: &BuildContext,
    port: &ServedPort,
    destination: &Destination,
    namespace: &Namespace,
) -> (String, Option<Shared<DestinationRule>>) {
    let target = target(ctx, port, &Hostname::new(&destination.host), namespace);
    let service = target.service.as_deref();
    let inference = PortInference::SolePort;
    let cluster = destination::cluster(destination, service, port.port, inference, target.mode);
    (cluster, target.rule)
}

fn configuration(host: &WaypointHost, routes: &[Routes], raises_limit: bool) -> Encoded<RouteConfiguration> {
    static REST: LazyLock<[Encoded<RouteConfiguration>; 2]> = LazyLock::new(|| {
        [None, Some(MAX_DIRECT_RESPONSE)].map(|limit| {
            Encoded::of(&RouteConfiguration {
                validate_clusters: Some(false),
                max_direct_response_body_size_bytes: limit,
                ..Default::default()
            })
        })
    });
    let length: usize = routes.iter().map(|routes| routes.field().len()).sum();
    Encoded::write(length + host.cluster.len() + 64, |out| {
        out.text(route_configuration::NAME, host.cluster);
        out.nested(route_configuration::VIRTUAL_HOSTS, |out| {
            let mut port = itoa::Buffer::new();
            out.joined(virtual_host::NAME, &["inbound|http|", port.format(host.port)]);
            out.text(virtual_host::DOMAINS, host.domain);
            for routes in routes {
                out.raw(routes.field());
            }
        });
        out.fields(&REST[usize::from(raises_limit)]);
    })
}
