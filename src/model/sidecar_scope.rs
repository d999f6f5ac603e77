//! Services and VirtualServices visible to a namespace or to the workloads of a Sidecar.
//!
//! Note: a scope may show only a part of a service. An egress listener with a port shows that port. A service that is
//! visible only because a VirtualService refers to it shows the ports of these references ([`PortFilters`]). The names
//! of ExternalName services that are aliases of a service need imports of their own ([`AliasFilters`]).

mod collect;
mod common;
mod imports;
mod pool;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    service::{MergedPort, MergedService, Protocol, ScopedService, ServiceKey, ServiceRef},
    virtual_service,
};
use crate::{
    base::{
        Hostname, Namespace, ObjectKey, Shared,
        keyed::{KeyedMap, KeyedSet},
    },
    proto::istio::{
        mesh::v1alpha1::mesh_config::outbound_traffic_policy::Mode as MeshMode,
        networking::v1alpha3::{self as networking, CaptureMode, outbound_traffic_policy::Mode},
    },
    table::Cx,
};
use collect::{Collector, DestinationService};
pub use common::CommonScope;
use imports::{Imports, VisibleService};
pub use pool::ScopePool;

/// Key of a scope.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScopeKey {
    /// Everything exported to the namespace, for proxies without a Sidecar.
    Default(Namespace),
    /// Scope of this Sidecar for proxies of this namespace (a Sidecar of the root namespace serves other namespaces
    /// too).
    Sidecar(Namespace, ObjectKey),
    /// Gateways: everything exported to the namespace, no egress listeners.
    Gateway(Namespace),
}

impl ScopeKey {
    /// Returns the namespace of the proxies that use the scope.
    pub fn namespace(&self) -> &Namespace {
        match self {
            Self::Default(namespace) | Self::Sidecar(namespace, _) | Self::Gateway(namespace) => namespace,
        }
    }

    /// Returns the Sidecar of the scope, if there is one.
    pub fn sidecar(&self) -> Option<&ObjectKey> {
        match self {
            Self::Sidecar(_, key) => Some(key),
            Self::Default(_) | Self::Gateway(_) => None,
        }
    }
}

/// The visible ports, sorted, of services of a scope or listener that do not show all of theirs.
pub type PortFilters = Shared<BTreeMap<ServiceKey, Vec<u32>>>;

/// The visible aliases of services of a listener that do not show all of theirs.
pub type AliasFilters = Shared<BTreeMap<ServiceKey, Shared<[ServiceKey]>>>;

/// One egress listener of a scope. Holds keys, not rows: a scope changes only with its members.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct EgressListener {
    /// Position in `spec.egress` of the Sidecar; 0 for the default one.
    pub index: usize,
    /// `port.number`; `None` for every service port (the catch-all listener).
    pub port: Option<EgressPort>,
    /// `bind`, empty if unset.
    pub bind: SmolStr,
    /// True for `captureMode: NONE`.
    pub capture_none: bool,
    /// Services: of one namespace per host, in a fixed order (exported to this namespace alone before public, then
    /// creation time, name and namespace). A host with several services occurs once for each.
    pub services: Shared<[ServiceRef]>,
    /// Services with hidden ports.
    pub port_filters: PortFilters,
    /// Services with hidden aliases.
    pub alias_filters: AliasFilters,
    /// The VirtualServices that apply (gateway `mesh`), in order of precedence.
    pub virtual_services: Shared<[ObjectKey]>,
}

impl EgressListener {
    /// Returns true if the listener shows this port of one of its services.
    pub fn shows_port(&self, service: &ServiceKey, port: u32) -> bool {
        shows_port(&self.port_filters, service, port)
    }
}

/// `port` of an egress listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressPort {
    /// `number`.
    pub number: u32,
    /// `protocol`, as written.
    pub protocol: SmolStr,
    /// `name`.
    pub name: SmolStr,
}

/// Services and VirtualServices visible to the proxies of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecarScope {
    /// Its key.
    pub key: ScopeKey,
    /// The egress listeners in order. A gateway scope has none.
    pub egress: Vec<EgressListener>,
    /// All services with clusters: the union over listeners and the destinations of VirtualServices.
    pub services: Shared<[ServiceKey]>,
    /// Services with hidden ports.
    pub port_filters: PortFilters,
    /// The services that clusters serve for hosts with several.
    pub merged: Shared<BTreeMap<ServiceKey, Shared<MergedService>>>,
    /// All VirtualServices of the listeners, without duplicates (gateway scope: those of gateway `mesh`, for waypoints;
    /// routers use [`virtual_service::for_gateway`]).
    pub virtual_services: Shared<[ObjectKey]>,
    /// Host → service, for destinations of routes.
    pub by_host: Shared<BTreeMap<Hostname, ServiceKey>>,
    /// Treatment of traffic to unknown destinations.
    pub outbound_policy: OutboundPolicy,
}

/// Treatment of traffic to unknown destinations: `outboundTrafficPolicy` of a Sidecar, else that of the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboundPolicy {
    /// True if `mode` is `REGISTRY_ONLY`.
    pub registry_only: bool,
    /// `egressProxy`, if set.
    pub egress_proxy: Option<EgressProxy>,
}

/// The proxy of traffic to unknown destinations, as written: neither sole ports nor external names are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressProxy {
    /// Host, which may be empty.
    pub host: SmolStr,
    /// Subset; empty for all endpoints.
    pub subset: SmolStr,
    /// Port; 0 if unset.
    pub port: u32,
}

impl OutboundPolicy {
    /// Returns the policy of a scope.
    pub fn of(cx: &Cx, mesh: &MeshSnapshot, key: &ScopeKey) -> Self {
        match key {
            ScopeKey::Gateway(_) => Self::default(),
            ScopeKey::Default(_) => Self::of_sidecar(cx, mesh, &networking::Sidecar::default()),
            ScopeKey::Sidecar(_, sidecar) => {
                let sidecar = mesh.sidecars.get(cx, sidecar);
                sidecar.map_or_else(Self::default, |sidecar| Self::of_sidecar(cx, mesh, &sidecar.spec))
            }
        }
    }

    fn of_sidecar(cx: &Cx, mesh: &MeshSnapshot, sidecar: &networking::Sidecar) -> Self {
        Self {
            registry_only: is_registry_only(cx, mesh, sidecar),
            egress_proxy: egress_proxy(sidecar),
        }
    }
}

impl SidecarScope {
    /// Returns true if another scope shows the same.
    pub fn shows_same(&self, other: &Self) -> bool {
        let Self {
            key: _,
            egress,
            services,
            port_filters,
            merged,
            virtual_services,
            by_host,
            outbound_policy,
        } = self;
        *egress == other.egress
            && *services == other.services
            && *port_filters == other.port_filters
            && *merged == other.merged
            && *virtual_services == other.virtual_services
            && *by_host == other.by_host
            && *outbound_policy == other.outbound_policy
    }

    /// Returns an empty scope.
    pub fn empty(key: ScopeKey) -> Self {
        Self {
            key,
            egress: Vec::new(),
            services: Shared::from(Vec::new()),
            port_filters: Shared::default(),
            merged: Shared::default(),
            virtual_services: Shared::from(Vec::new()),
            by_host: Shared::default(),
            outbound_policy: OutboundPolicy::default(),
        }
    }

    /// Returns the scope with only those of its VirtualServices that have TCP or TLS routes.
    #[must_use]
    pub fn without_http_routes(&self, cx: &Cx, mesh: &MeshSnapshot) -> Self {
        let rows = mesh.tcp_virtual_services.get(cx, &());
        let kept: BTreeSet<&ObjectKey> = rows.map(|(key, _)| key).collect();
        let only = |keys: &[ObjectKey]| -> Shared<[ObjectKey]> {
            let keys = keys.iter().filter(|key| kept.contains(key));
            keys.cloned().collect::<Vec<_>>().into()
        };
        let listeners = self.egress.iter().map(|listener| EgressListener {
            virtual_services: only(&listener.virtual_services),
            ..listener.clone()
        });
        Self {
            egress: listeners.collect(),
            virtual_services: only(&self.virtual_services),
            ..self.clone()
        }
    }

    /// Returns the service of a host.
    pub fn service(&self, host: &str) -> Option<&ServiceKey> {
        self.by_host.get(host)
    }

    /// Returns the service of a host in a VirtualService of a namespace: that namespace's own service if the proxies
    /// see it, or else that of the scope. Routers look up destinations this way.
    pub fn service_for(
        &self,
        cx: &Cx,
        mesh: &MeshSnapshot,
        host: &Hostname,
        namespace: &Namespace,
    ) -> Option<ServiceKey> {
        let own = ServiceKey {
            hostname: host.clone(),
            namespace: namespace.clone(),
        };
        let row = mesh.visibility.get(cx, &own);
        match row.filter(|row| row.export_to.visible_to(self.key.namespace())) {
            Some(_) => Some(own),
            None => self.service(host).cloned(),
        }
    }

    /// Returns true if the scope shows this port of one of its services.
    pub fn shows_port(&self, service: &ServiceKey, port: u32) -> bool {
        match self.merged.get(service) {
            Some(merged) => merged.ports.contains_key(&port),
            None => shows_port(&self.port_filters, service, port),
        }
    }

    /// Returns the service of a key as the scope sees it.
    pub fn scoped(&self, key: &ServiceKey) -> ScopedService {
        ScopedService {
            key: key.clone(),
            merged: self.merged.get(key).cloned(),
        }
    }

    /// Returns the members that a port of a service comes from; `None` if the row has no members.
    pub fn merged_port(&self, service: &ServiceKey, port: u32) -> Option<MergedPort> {
        self.merged.get(service)?.port(port)
    }
}

fn shows_port(port_filters: &PortFilters, service: &ServiceKey, port: u32) -> bool {
    let ports = port_filters.get(service);
    ports.is_none_or(|ports| ports.binary_search(&port).is_ok())
}

/// Computes a scope; `None` if its Sidecar does not exist.
pub fn scope(cx: &Cx, mesh: &MeshSnapshot, key: &ScopeKey) -> Option<SidecarScope> {
    match key {
        ScopeKey::Gateway(namespace) => Some(gateway_scope(cx, mesh, key, namespace)),
        ScopeKey::Default(namespace) => Some(sidecar_scope(cx, mesh, key, namespace, &networking::Sidecar::default())),
        ScopeKey::Sidecar(namespace, sidecar) => {
            let sidecar = mesh.sidecars.get(cx, sidecar)?;
            Some(sidecar_scope(cx, mesh, key, namespace, &sidecar.spec))
        }
    }
}

fn gateway_scope(cx: &Cx, mesh: &MeshSnapshot, key: &ScopeKey, namespace: &Namespace) -> SidecarScope {
    let mut collector = Collector::default();
    for service in imports::visible_services(cx, mesh, namespace, None) {
        collector.add(service, None);
    }
    let virtual_services = virtual_service::for_gateway(cx, mesh, namespace, virtual_service::MESH_GATEWAY);
    let virtual_services: Vec<ObjectKey> = virtual_services.into_iter().map(|(key, _)| key.clone()).collect();
    collector.finish(SidecarScope {
        virtual_services: virtual_services.into(),
        ..SidecarScope::empty(key.clone())
    })
}

fn sidecar_scope(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &ScopeKey,
    namespace: &Namespace,
    sidecar: &networking::Sidecar,
) -> SidecarScope {
    let everything = networking::IstioEgressListener {
        hosts: vec!["*/*".to_owned()],
        ..Default::default()
    };
    let written = match sidecar.egress.as_slice() {
        [] => std::slice::from_ref(&everything),
        egress => egress,
    };
    let mut collector = Collector::default();
    let mut egress: Vec<EgressListener> = Vec::new();
    let mut virtual_services: Vec<ObjectKey> = Vec::new();
    let mut known: KeyedSet<&ObjectKey> = KeyedSet::default();
    // Gathered once for all listeners, as a Sidecar may have thousands of these.
    let mut visible: BTreeMap<Option<Vec<Namespace>>, Vec<VisibleService>> = BTreeMap::new();
    let visible_routes = virtual_service::for_sidecars(cx, mesh, namespace);
    let mut destinations: KeyedMap<&ObjectKey, Vec<DestinationService>> = KeyedMap::default();
    // Adding destinations again changes nothing, and they may have tens of thousands of ports.
    let mut added: KeyedSet<(&ObjectKey, Option<u32>)> = KeyedSet::default();
    // The first listener with each selection. Those with an equal one share its lists, and add nothing to the scope.
    let mut firsts: BTreeMap<(&[String], Option<u32>), usize> = BTreeMap::new();
    for (index, listener) in written.iter().enumerate() {
        let port_wanted = wanted_port(listener);
        let selection = (listener.hosts.as_slice(), port_wanted);
        if let Some(first) = firsts.get(&selection) {
            let same = selected(listener, index, egress[*first].clone());
            egress.push(same);
            continue;
        }
        firsts.insert(selection, index);
        let imports = Imports::of(&listener.hosts, namespace);
        let from = imports.namespaces();
        let visible = visible
            .entry(from.clone())
            .or_insert_with(|| imports::visible_services(cx, mesh, namespace, from));
        let imported = imports.services(mesh, namespace, visible, port_wanted);
        let reaches = imports.virtual_services(&visible_routes);
        for import in &imported {
            collector.add(import.service, import.ports.as_deref());
        }
        for (vs, summary) in &reaches {
            let destinations = destinations
                .entry(vs)
                .or_insert_with(|| collect::destinations(cx, mesh, namespace, summary));
            if added.insert((*vs, port_wanted)) {
                collector.add_destinations(destinations, port_wanted);
            }
        }
        for (vs, _) in &reaches {
            if known.insert(vs) {
                virtual_services.push((*vs).clone());
            }
        }
        let services: Vec<ServiceRef> = imported.iter().map(|import| import.service.reference()).collect();
        let reached: Vec<ObjectKey> = reaches.into_iter().map(|(vs, _)| vs.clone()).collect();
        let lists = EgressListener {
            services: services.into(),
            port_filters: imports::port_filters(&imported),
            alias_filters: imports::alias_filters(&imported),
            virtual_services: reached.into(),
            ..EgressListener::default()
        };
        egress.push(selected(listener, index, lists));
    }
    collector.finish(SidecarScope {
        egress,
        virtual_services: virtual_services.into(),
        outbound_policy: OutboundPolicy::of_sidecar(cx, mesh, sidecar),
        ..SidecarScope::empty(key.clone())
    })
}

/// Returns an egress listener, given one with the services and VirtualServices that it selects.
fn selected(listener: &networking::IstioEgressListener, index: usize, lists: EgressListener) -> EgressListener {
    let port = listener.port.as_ref().map(|port| EgressPort {
        number: port.number,
        protocol: SmolStr::new(&port.protocol),
        name: SmolStr::new(&port.name),
    });
    EgressListener {
        index,
        port,
        bind: SmolStr::new(&listener.bind),
        capture_none: listener.capture_mode() == CaptureMode::None,
        ..lists
    }
}

/// Returns the port of a listener. A listener for an HTTP proxy accepts requests for any port.
fn wanted_port(listener: &networking::IstioEgressListener) -> Option<u32> {
    let port = listener.port.as_ref()?;
    (port.number != 0 && Protocol::parse(&port.protocol) != Protocol::HttpProxy).then_some(port.number)
}

/// Returns true for every mode except `ALLOW_ANY`, and without any policy.
fn is_registry_only(cx: &Cx, mesh: &MeshSnapshot, sidecar: &networking::Sidecar) -> bool {
    if let Some(policy) = &sidecar.outbound_traffic_policy {
        return policy.mode() != Mode::AllowAny;
    }
    let policy = mesh.mesh_config(cx).outbound_traffic_policy.as_ref();
    policy.is_none_or(|policy| policy.mode() != MeshMode::AllowAny)
}

fn egress_proxy(sidecar: &networking::Sidecar) -> Option<EgressProxy> {
    let policy = sidecar.outbound_traffic_policy.as_ref()?;
    let proxy = policy.egress_proxy.as_ref()?;
    Some(EgressProxy {
        host: SmolStr::new(&proxy.host),
        subset: SmolStr::new(&proxy.subset),
        port: proxy.port.map_or(0, |port| port.number),
    })
}
