//! What a namespace or a selected workload can see.
//!
//! What one would get wrong: a scope may show a part of a service only. An egress listener with a port shows that port,
//! and a service that is seen only because a VirtualService leads to it shows the ports that are led to ([`Trim`]).

mod collect;
mod imports;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    service::{Protocol, Service, ServiceKey},
    virtual_service,
};
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared},
    proto::istio::{
        mesh::v1alpha1::mesh_config::outbound_traffic_policy::Mode as MeshMode,
        networking::v1alpha3::{self as networking, CaptureMode, outbound_traffic_policy::Mode},
    },
    table::Cx,
};
use collect::Collector;
use imports::Imports;

/// Names a scope.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScopeKey {
    /// Everything that is exported to the namespace: proxies without a Sidecar.
    Default(Namespace),
    /// What this Sidecar lets a proxy of this namespace see (a root-namespace Sidecar serves other namespaces too).
    Sidecar(Namespace, ObjectKey),
    /// Gateways: everything exported to the namespace, no egress listeners.
    Gateway(Namespace),
}

impl ScopeKey {
    /// The namespace of the proxies that use the scope.
    pub fn namespace(&self) -> &Namespace {
        match self {
            Self::Default(namespace) | Self::Sidecar(namespace, _) | Self::Gateway(namespace) => namespace,
        }
    }

    /// The Sidecar that makes the scope, if one does.
    pub fn sidecar(&self) -> Option<&ObjectKey> {
        match self {
            Self::Sidecar(_, key) => Some(key),
            Self::Default(_) | Self::Gateway(_) => None,
        }
    }
}

/// What a scope shows of a service that it does not show whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Trim {
    /// Only these ports, sorted; `None`: all.
    pub ports: Option<Vec<u32>>,
    /// Only these aliases; `None`: all.
    pub aliases: Option<Vec<ServiceKey>>,
}

/// The services of a scope or listener that are not shown whole.
pub type Trims = Shared<BTreeMap<ServiceKey, Trim>>;

/// One egress listener of a scope. Holds keys, not rows: a scope changes when membership does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressListener {
    /// Position in `spec.egress` of the Sidecar; 0 for the default one.
    pub index: usize,
    /// `port.number`; `None`: every service port (the catch-all listener).
    pub port: Option<EgressPort>,
    /// `bind`, empty when not given.
    pub bind: SmolStr,
    /// `captureMode: NONE`.
    pub capture_none: bool,
    /// The services it reaches: one for each host, in a fixed order (those shown to this namespace alone before public
    /// ones, then creation time, name and namespace).
    pub services: Shared<[ServiceKey]>,
    /// What it shows of them, where that is not all.
    pub trims: Trims,
    /// The VirtualServices that apply (gateway `mesh`), in order of precedence.
    pub virtual_services: Shared<[ObjectKey]>,
}

impl EgressListener {
    /// True if the listener shows this port of a service that it reaches.
    pub fn shows_port(&self, service: &ServiceKey, port: u32) -> bool {
        shows_port(&self.trims, service, port)
    }

    /// The aliases of a service that the listener shows.
    pub fn aliases<'a>(&'a self, service: &'a Service) -> &'a [ServiceKey] {
        let trim = self.trims.get(&service.key);
        trim.and_then(|trim| trim.aliases.as_deref())
            .unwrap_or(&service.aliases)
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

/// What the proxies of a scope can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecarScope {
    /// Its key.
    pub key: ScopeKey,
    /// The egress listeners in order. A gateway scope has none.
    pub egress: Vec<EgressListener>,
    /// All services that clusters are made for: the union over listeners and what VirtualServices pull in.
    pub services: Shared<[ServiceKey]>,
    /// What is shown of them, where that is not all.
    pub trims: Trims,
    /// All VirtualServices of the listeners, unique (gateway scope: those of gateway `mesh`, for waypoints; routers ask
    /// [`virtual_service::for_gateway`]).
    pub virtual_services: Shared<[ObjectKey]>,
    /// Host → service, for destinations of routes.
    pub by_host: Shared<BTreeMap<Hostname, ServiceKey>>,
    /// `outboundTrafficPolicy.mode` is `REGISTRY_ONLY` (Sidecar's, else the mesh's).
    pub registry_only: bool,
    /// `outboundTrafficPolicy.egressProxy` as a cluster name, empty when none.
    pub egress_proxy: SmolStr,
}

impl SidecarScope {
    /// A scope in which nothing is visible.
    pub fn empty(key: ScopeKey) -> Self {
        Self {
            key,
            egress: Vec::new(),
            services: Shared::from(Vec::new()),
            trims: Shared::default(),
            virtual_services: Shared::from(Vec::new()),
            by_host: Shared::default(),
            registry_only: false,
            egress_proxy: SmolStr::default(),
        }
    }

    /// The service that a host means here.
    pub fn service(&self, host: &str) -> Option<&ServiceKey> {
        self.by_host.get(host)
    }

    /// The service that a host means in a VirtualService of a namespace: that namespace's own where the proxies may see
    /// it, else what it means here. Routers look destinations up this way.
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

    /// True if the scope shows this port of a service that it holds.
    pub fn shows_port(&self, service: &ServiceKey, port: u32) -> bool {
        shows_port(&self.trims, service, port)
    }
}

fn shows_port(trims: &Trims, service: &ServiceKey, port: u32) -> bool {
    let ports = trims.get(service).and_then(|trim| trim.ports.as_ref());
    ports.is_none_or(|ports| ports.contains(&port))
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
    for (service, visibility) in imports::visible_services(cx, mesh, namespace, None) {
        collector.add(service, visibility, None);
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
    let mut egress = Vec::new();
    let mut virtual_services: Vec<ObjectKey> = Vec::new();
    for (index, listener) in written.iter().enumerate() {
        let imports = Imports::of(&listener.hosts, namespace);
        let port_wanted = wanted_port(listener);
        let selected = imports.services(cx, mesh, namespace, port_wanted);
        let reaches = imports.virtual_services(cx, mesh, namespace);
        for import in &selected {
            collector.add(import.key, import.visibility, import.trim.ports.as_deref());
        }
        for (_, reach) in &reaches {
            collector.add_destinations(cx, mesh, namespace, reach, port_wanted);
        }
        for (vs, _) in &reaches {
            if !virtual_services.contains(vs) {
                virtual_services.push((*vs).clone());
            }
        }
        egress.push(EgressListener {
            index,
            port: listener.port.as_ref().map(|port| EgressPort {
                number: port.number,
                protocol: SmolStr::new(&port.protocol),
                name: SmolStr::new(&port.name),
            }),
            bind: SmolStr::new(&listener.bind),
            capture_none: listener.capture_mode() == CaptureMode::None,
            services: selected
                .iter()
                .map(|import| import.key.clone())
                .collect::<Vec<_>>()
                .into(),
            trims: imports::trims(&selected),
            virtual_services: reaches.into_iter().map(|(vs, _)| vs.clone()).collect::<Vec<_>>().into(),
        });
    }
    collector.finish(SidecarScope {
        egress,
        virtual_services: virtual_services.into(),
        registry_only: is_registry_only(cx, mesh, sidecar),
        egress_proxy: egress_proxy(sidecar),
        ..SidecarScope::empty(key.clone())
    })
}

/// The one port that a listener is for. A listener for an HTTP proxy takes requests for any port.
fn wanted_port(listener: &networking::IstioEgressListener) -> Option<u32> {
    let port = listener.port.as_ref()?;
    (port.number != 0 && Protocol::parse(&port.protocol) != Protocol::HttpProxy).then_some(port.number)
}

/// Every mode but `ALLOW_ANY` closes the mesh; so does the absence of any policy.
fn is_registry_only(cx: &Cx, mesh: &MeshSnapshot, sidecar: &networking::Sidecar) -> bool {
    if let Some(policy) = &sidecar.outbound_traffic_policy {
        return policy.mode() != Mode::AllowAny;
    }
    let policy = mesh.mesh_config(cx).outbound_traffic_policy.as_ref();
    policy.is_none_or(|policy| policy.mode() != MeshMode::AllowAny)
}

/// The cluster of the egress proxy, as written: neither a sole port nor an external name is looked up.
fn egress_proxy(sidecar: &networking::Sidecar) -> SmolStr {
    let policy = sidecar.outbound_traffic_policy.as_ref();
    let Some(proxy) = policy.and_then(|policy| policy.egress_proxy.as_ref()) else {
        return SmolStr::default();
    };
    if proxy.host.is_empty() {
        return SmolStr::new_static("UnknownService");
    }
    let port = proxy.port.map_or(0, |port| port.number);
    SmolStr::from(format!("outbound|{port}|{}|{}", proxy.subset, proxy.host))
}
