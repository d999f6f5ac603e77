//! Services behind a waypoint, for its listeners, clusters and routes.

use super::{BuildContext, name::VipTraffic};
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared},
    model::{
        Service, ServiceKey,
        service::Protocol,
        virtual_service::{self, VirtualService, VirtualServiceSummary},
        waypoint::{self, ServingRole},
    },
};

/// The attributes of a waypoint that its services depend on. Part of keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointView {
    /// The namespace.
    pub namespace: Namespace,
    /// Selects the services.
    pub role: ServingRole,
}

impl WaypointView {
    /// Returns true for a gateway between networks, which passes tunnels on instead of ending them.
    pub fn is_east_west(&self) -> bool {
        self.role == ServingRole::EastWest
    }

    /// Returns the kinds of traffic of a port. For a gateway between networks all is TCP, because it does not see what
    /// is inside the inner tunnels.
    pub fn traffic(&self, protocol: Protocol) -> &'static [VipTraffic] {
        match protocol {
            Protocol::Udp => &[],
            _ if self.is_east_west() => &[VipTraffic::Tcp],
            protocol => VipTraffic::of(protocol),
        }
    }
}

/// The services that go through a waypoint. Each is looked up by itself, so that readers depend on few of them.
#[derive(Clone, Copy)]
pub struct Served<'a> {
    ctx: BuildContext<'a>,
    waypoint: &'a WaypointView,
}

impl<'a> Served<'a> {
    /// Returns the services of a waypoint.
    pub fn of(ctx: &BuildContext<'a>, waypoint: &'a WaypointView) -> Self {
        Self { ctx: *ctx, waypoint }
    }

    /// Returns the keys of all services, oldest first.
    pub fn keys(&self) -> impl Iterator<Item = &'a ServiceKey> + use<'a> {
        let all = waypoint::served_keys(self.ctx.cx, self.ctx.mesh, &self.waypoint.role);
        all.into_iter().map(|(key, _)| key)
    }

    /// Returns the waypoint's namespace.
    pub fn namespace(&self) -> &'a Namespace {
        &self.waypoint.namespace
    }

    /// Returns the service of a host, if it uses the waypoint.
    pub fn service(&self, host: &Hostname) -> Option<&'a Shared<Service>> {
        waypoint::served_host(self.ctx.cx, self.ctx.mesh, &self.waypoint.role, host)
    }

    /// Returns the VirtualServices for one of the services, in order of precedence: those for its host in the namespace
    /// of the waypoint or the service.
    pub fn routes(&self, service: &ServiceKey) -> Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)> {
        let own = &self.waypoint.namespace;
        let admits = |namespace: &Namespace| namespace == own || *namespace == service.namespace;
        virtual_service::for_host(self.ctx.cx, self.ctx.mesh, own, &service.hostname, admits)
    }

    /// Returns the rows of the VirtualServices for one of the services, in order of precedence.
    pub fn virtual_services(&self, service: &ServiceKey) -> Vec<&'a Shared<VirtualService>> {
        let rows = self.routes(service).into_iter();
        rows.filter_map(|(key, _)| self.ctx.mesh.virtual_services.get(self.ctx.cx, key))
            .collect()
    }
}
