//! What a namespace or a selected workload can see.

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared},
    model::service::ServiceKey,
    table::Cx,
};

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
}

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
    /// The services it reaches: one for each host, in a fixed order (creation time, then host and namespace).
    pub services: Shared<[ServiceKey]>,
    /// The VirtualServices that apply (gateway `mesh`), oldest first.
    pub virtual_services: Shared<[ObjectKey]>,
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
    /// All VirtualServices of the listeners (gateway scope: all that are visible), oldest first, unique.
    pub virtual_services: Shared<[ObjectKey]>,
    /// Host → service, for destinations of routes.
    pub by_host: Shared<std::collections::BTreeMap<Hostname, ServiceKey>>,
    /// `outboundTrafficPolicy.mode` is `REGISTRY_ONLY` (Sidecar's, else the mesh's).
    pub registry_only: bool,
    /// `outboundTrafficPolicy.egressProxy` as a cluster name, empty when none.
    pub egress_proxy: SmolStr,
}

/// Computes a scope; `None` if its Sidecar does not exist.
pub fn scope(_cx: &Cx, _mesh: &MeshSnapshot, _key: &ScopeKey) -> Option<SidecarScope> {
    None
}

impl SidecarScope {
    /// A scope in which nothing is visible.
    pub fn empty(key: ScopeKey) -> Self {
        Self {
            key,
            egress: Vec::new(),
            services: Shared::from(Vec::new()),
            virtual_services: Shared::from(Vec::new()),
            by_host: Shared::default(),
            registry_only: false,
            egress_proxy: SmolStr::default(),
        }
    }
}
