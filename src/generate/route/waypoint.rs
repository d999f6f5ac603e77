//! Routes of waypoints. Each serves one service port and accepts every host, because the address has already determined
//! the service.

use std::sync::LazyLock;

use super::{
    RouteProxyView,
    destination::{PortInference, TargetMap, TargetRows},
    http::{self, DefaultRoutes, MESH_GATEWAY},
    routes::Routes,
    translation::Translation,
};
use crate::{
    base::{Labels, Shared},
    generate::{
        BuildContext,
        name::{ClusterMode, VipTraffic},
        waypoint::Served,
        wire::Encoded,
    },
    model::{ScopeKey, Service, service::Resolution, virtual_service::VirtualService},
    proto::{
        envoy::config::route::v3::RouteConfiguration,
        field::{route_configuration, virtual_host},
    },
};

/// Largest direct response of a route, in bytes.
const MAX_DIRECT_RESPONSE: u32 = 1 << 20;

/// The only virtual host of a waypoint's route configuration.
pub(crate) struct WaypointHost<'a> {
    /// Name of the route configuration: that of the cluster.
    pub(crate) cluster: &'a str,
    /// Service port.
    pub(crate) port: u32,
    /// Domain: `*`, except for a host that is resolved per request.
    pub(crate) domain: &'a str,
}

/// Encodes the routes of a service port: those of its VirtualService, or else one route to its cluster. `name` is that
/// of the cluster.
pub(crate) fn of_port(
    ctx: &BuildContext,
    served: &Served,
    (service, port): (&Service, u32),
    name: &str,
    append_forwarded_host: bool,
) -> Encoded<RouteConfiguration> {
    // Clients of a dynamic host must not choose another host.
    let domain = match service.resolution {
        Resolution::DynamicDns => service.key.hostname.as_str(),
        _ => "*",
    };
    let host = WaypointHost {
        cluster: name,
        port,
        domain,
    };
    let routed = served.routes(&service.key);
    let declared = routed.and_then(|(key, _)| ctx.mesh.virtual_services.get(ctx.cx, key));
    let Some(declared) = declared else {
        let operation = format!("{}:{port}/*", service.key.hostname);
        return to_cluster(ctx, &host, &operation);
    };
    let client = RouteProxyView {
        namespace: served.namespace().clone(),
        // The caller's labels are unknown to a waypoint.
        labels: Shared::new(Labels::new()),
        append_forwarded_host,
        proxyless: false,
    };
    let targets = targets(ctx, served, declared);
    let translation = Translation {
        ctx,
        client: &client,
        gateway: MESH_GATEWAY,
        port,
        tls: false,
        advertise_http3: false,
        inference: PortInference::SolePort,
        targets: &targets,
    };
    configuration(&host, &http::routes(&translation, declared), false)
}

/// Encodes routes that send every request for the host to its cluster. `operation` names them in traces.
pub(crate) fn to_cluster(ctx: &BuildContext, host: &WaypointHost, operation: &str) -> Encoded<RouteConfiguration> {
    let routes = DefaultRoutes::shared(ctx).route(host.cluster, operation, None);
    configuration(host, &routes, true)
}

/// Resolves the destinations of a VirtualService: through the waypoint itself if it serves the host.
fn targets(ctx: &BuildContext, served: &Served, declared: &VirtualService) -> TargetMap {
    let namespace = declared.meta.namespace();
    let rows = declared.destinations.iter().map(|host| {
        let elsewhere = || {
            let scope = ctx.scope(&ScopeKey::Gateway(served.namespace().clone()));
            ctx.service(&scope.service_for(ctx.cx, ctx.mesh, host, namespace)?)
        };
        let (service, mode) = match served.service(host) {
            Some(service) => (Some(service), ClusterMode::Vip(VipTraffic::Http)),
            None => (elsewhere(), ClusterMode::Default),
        };
        let rows = TargetRows {
            service: service.cloned(),
            rule: None,
            mode,
        };
        (host.clone(), rows)
    });
    rows.collect()
}

fn configuration(host: &WaypointHost, routes: &Routes, limits_responses: bool) -> Encoded<RouteConfiguration> {
    static REST: LazyLock<[Encoded<RouteConfiguration>; 2]> = LazyLock::new(|| {
        [None, Some(MAX_DIRECT_RESPONSE)].map(|limit| {
            Encoded::of(&RouteConfiguration {
                validate_clusters: Some(false),
                max_direct_response_body_size_bytes: limit,
                ..Default::default()
            })
        })
    });
    Encoded::write(routes.field().len() + host.cluster.len() + 64, |out| {
        out.text(route_configuration::NAME, host.cluster);
        out.nested(route_configuration::VIRTUAL_HOSTS, |out| {
            let mut port = itoa::Buffer::new();
            out.joined(virtual_host::NAME, &["inbound|http|", port.format(host.port)]);
            out.text(virtual_host::DOMAINS, host.domain);
            out.raw(routes.field());
        });
        out.fields(&REST[usize::from(limits_responses)]);
    })
}
