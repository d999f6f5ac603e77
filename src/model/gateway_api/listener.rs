//! Listeners of Gateways and ListenerSets, each converted to a Gateway with one server.

pub mod authority;
pub mod conflict;
pub mod key_pair;
#[cfg(test)]
mod tests;
pub(super) mod tls;

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{CONVERTED, Mistake, PARENTS_ANNOTATION, class::Controller, converted_meta, is_converted, service_host};
use crate::{
    api::{
        Config, Kind, Meta,
        gateway_api::{
            self,
            common::GROUP,
            gateway::{AllowedRoutes, FromNamespaces},
        },
    },
    base::{Labels, Namespace, ObjectKey, Shared, select::LabelSelector},
    model::{
        MeshSnapshot,
        gateway::{
            ACCEPTS_UNTRUSTED_ANNOTATION, NO_NAMESPACE, PARENT_NAMESPACE_ANNOTATION, SEMANTICS_ANNOTATION,
            SERVICE_ANNOTATION, selects_namespace,
        },
        inputs::InputWriters,
    },
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

/// Annotation with the resource name of the certificate with which proxies connect to backends.
pub const BACKEND_CERTIFICATE_ANNOTATION: &str = "internal.istio.io/backend-certificate";
/// Annotation with the service account of the proxies; empty if any may have the credentials.
pub const SERVICE_ACCOUNT_ANNOTATION: &str = "internal.istio.io/service-account-name";
/// Annotation with the name of the deployed resources.
const NAME_OVERRIDE_ANNOTATION: &str = "gateway.istio.io/name-override";
/// Annotation with the type of the deployed Service.
const SERVICE_TYPE_ANNOTATION: &str = "networking.istio.io/service-type";
/// Annotation with the service account of the deployment.
const DEPLOYED_ACCOUNT_ANNOTATION: &str = "gateway.istio.io/service-account";
/// Protocol of tunnels.
const HBONE: &str = "HBONE";
/// Port of tunnels.
const HBONE_PORT: u16 = 15008;

/// Key of [`Listeners`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerOwner {
    /// [`Kind::KubeGateway`] or [`Kind::ListenerSet`].
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

impl ListenerOwner {
    /// Returns the kind as written.
    pub fn kind_name(&self) -> &'static str {
        if self.kind == Kind::ListenerSet {
            "ListenerSet"
        } else {
            "Gateway"
        }
    }
}

/// A Gateway or ListenerSet with its listeners.
#[derive(Clone, Debug, PartialEq)]
pub struct Listeners {
    /// The listeners that routes may refer to.
    pub listeners: Vec<Listener>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq)]
pub struct Listener {
    /// Name, which routes refer to as `sectionName`.
    pub name: SmolStr,
    /// Host as written; empty for all.
    pub hostname: SmolStr,
    /// Port, or the default of the protocol; 0 if there is neither.
    pub port: u16,
    /// Protocol as written.
    pub protocol: SmolStr,
    /// Hosts of the owner's listeners with this port and protocol, as written; its own is one of them.
    pub hosts_of_port: Shared<[SmolStr]>,
    /// Host of the server; `*` for all.
    pub host: SmolStr,
    /// Namespaces whose routes may attach.
    pub namespaces: RouteNamespaces,
    /// Kinds of routes that may attach.
    pub kinds: Vec<Kind>,
    /// Key of the Gateway that it is converted to.
    pub gateway: ObjectKey,
    /// That Gateway; `None` if the listener has a mistake, or is for TLS but has no TLS settings.
    pub converted: Option<Shared<Config<networking::Gateway>>>,
}

impl Listener {
    /// Returns true if routes of a namespace may attach.
    pub fn allows(&self, cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> bool {
        match &self.namespaces {
            RouteNamespaces::All => true,
            RouteNamespaces::Same => self.gateway.namespace == *namespace,
            RouteNamespaces::Selected(selector) => selects_namespace(cx, mesh, selector, namespace),
        }
    }
}

/// The namespaces whose routes may attach to a listener.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteNamespaces {
    /// All namespaces.
    All,
    /// The listener's own.
    Same,
    /// Those that a selector selects. They are not listed: the lists of many listeners in a cluster with many
    /// namespaces would take far more memory than the objects.
    Selected(Shared<LabelSelector>),
}

impl RouteNamespaces {
    fn of(allowed: Option<&AllowedRoutes>) -> Self {
        let namespaces = allowed.and_then(|allowed| allowed.namespaces.as_ref());
        let (from, selector) = namespaces.map_or((None, None), |it| (it.from.as_deref(), it.selector.as_ref()));
        match (from, selector) {
            (None | Some("Same"), _) => Self::Same,
            (Some("All"), _) | (_, None) => Self::All,
            (_, Some(selector)) => Self::Selected(selector.clone().into()),
        }
    }
}

/// Returns the changed Gateways and ListenerSets.
pub fn candidates(inputs: &InputWriters) -> Vec<ListenerOwner> {
    let owner = |kind, object: &ObjectKey| ListenerOwner {
        kind,
        object: object.clone(),
    };
    let gateways = inputs.kube_gateways.changes().iter();
    let sets = inputs.listener_sets.changes().iter();
    let gateways = gateways.map(|(key, ..)| owner(Kind::KubeGateway, key));
    gateways
        .chain(sets.map(|(key, ..)| owner(Kind::ListenerSet, key)))
        .collect()
}

/// Emits the keys of the Gateways that listeners are converted to.
pub fn converted_keys(_: &ListenerOwner, row: &Listeners, emit: &mut dyn FnMut(ObjectKey)) {
    row.listeners.iter().for_each(|listener| emit(listener.gateway.clone()));
}

/// Derives the Gateway made from a listener.
pub fn converted(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Config<networking::Gateway>> {
    listener_of(cx, mesh, key)?.converted.as_deref().cloned()
}

/// Derives the selector of the namespaces whose routes may attach to the listener that a Gateway is made from.
pub fn selector(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<LabelSelector> {
    match &listener_of(cx, mesh, key)?.namespaces {
        RouteNamespaces::Selected(selector) => Some(LabelSelector::clone(selector)),
        RouteNamespaces::All | RouteNamespaces::Same => None,
    }
}

/// Returns the listener that a Gateway is made from. A written Gateway of its name precedes it.
fn listener_of<'a>(cx: &Cx, mesh: &'a MeshSnapshot, key: &ObjectKey) -> Option<&'a Listener> {
    if mesh.written_gateways.get(cx, key).is_some() {
        return None;
    }
    let owners = mesh.listeners_by_gateway.get(cx, key);
    let mut listeners = owners.flat_map(|(_, row)| &row.listeners);
    listeners.find(|listener| listener.gateway == *key && listener.converted.is_some())
}

/// Derives the listeners of a Gateway or ListenerSet.
pub fn listeners(cx: &Cx, mesh: &MeshSnapshot, key: &ListenerOwner) -> Option<Listeners> {
    if !is_converted(mesh, &key.object) {
        return None;
    }
    let declaration = Declaration::of(cx, mesh, key)?;
    let listeners = declaration.with_conflicts();
    let listeners = listeners.filter(|(listener, _)| declaration.has_routes(listener));
    let listeners = listeners.map(|(listener, conflict)| {
        let mut converted = declaration.convert(cx, mesh, listener);
        if conflict.is_some() {
            converted.converted = None;
        }
        converted
    });
    let mut listeners: Vec<Listener> = listeners.collect();
    share_hosts(&mut listeners);
    Some(Listeners { listeners })
}

/// Sets the hosts of the listeners with one port and protocol in each of them. Every route has them for each of its
/// parents, so they exist once.
fn share_hosts(listeners: &mut [Listener]) {
    let mut hosts: BTreeMap<(u16, SmolStr), Vec<SmolStr>> = BTreeMap::new();
    let group = |listener: &Listener| (listener.port, listener.protocol.clone());
    for listener in &*listeners {
        let hosts = hosts.entry(group(listener)).or_default();
        hosts.push(listener.hostname.clone());
    }
    let hosts = hosts.into_iter().map(|(group, hosts)| (group, hosts.into()));
    let hosts: BTreeMap<(u16, SmolStr), Shared<[SmolStr]>> = hosts.collect();
    for listener in listeners {
        listener.hosts_of_port = hosts.get(&group(listener)).cloned().unwrap_or_default();
    }
}

/// Emits the Gateway of a ListenerSet.
pub fn gateway_of_set(key: &ObjectKey, row: &Config<gateway_api::ListenerSet>, emit: &mut dyn FnMut(ObjectKey)) {
    parent_of(key, &row.spec).into_iter().for_each(emit);
}

/// Mistakes of a listener, by the condition that reports them.
#[derive(Debug, Default)]
pub(super) struct ListenerMistakes {
    /// The protocol or the port.
    pub(super) accepted: Option<Mistake>,
    /// References to certificates.
    pub(super) references: Option<Mistake>,
    /// A listener that precedes this one and excludes it.
    pub(super) conflict: Option<Mistake>,
}

impl ListenerMistakes {
    /// Returns true if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.accepted.is_none() && self.references.is_none() && self.conflict.is_none()
    }
}

impl From<Mistake> for ListenerMistakes {
    /// Returns a mistake in references.
    fn from(mistake: Mistake) -> Self {
        Self {
            references: Some(mistake),
            ..Self::default()
        }
    }
}

/// A Gateway or ListenerSet together with the Gateway.
pub(super) struct Declaration<'a> {
    /// The object.
    pub(super) owner: &'a ListenerOwner,
    /// Its metadata.
    pub(super) meta: &'a Shared<Meta>,
    /// Its listeners.
    pub(super) listeners: &'a [gateway_api::gateway::Listener],
    /// The Gateway.
    pub(super) gateway: &'a Config<gateway_api::Gateway>,
    /// The controller of its class.
    pub(super) controller: Controller,
    /// Hosts of the services that expose the Gateway.
    pub(super) services: Vec<String>,
    /// Conflicts of the listeners with preceding ones, in their order; empty without any.
    conflicts: &'a [Option<Mistake>],
}

/// Returns the Gateway that a ListenerSet adds listeners to.
pub fn parent_of(key: &ObjectKey, set: &gateway_api::ListenerSet) -> Option<ObjectKey> {
    let parent = &set.parent_ref;
    let is_gateway = parent.kind.as_ref().is_none_or(|kind| kind == "Gateway")
        && parent.group.as_ref().is_none_or(|group| group == GROUP);
    let namespace = parent.namespace.as_ref();
    let namespace = namespace.map_or_else(|| key.namespace.clone(), Namespace::new);
    is_gateway.then(|| ObjectKey::new(&key.cluster, namespace, parent.name.clone()))
}

impl<'a> Declaration<'a> {
    /// Returns the declaration; `None` if this control plane makes nothing of it.
    pub(super) fn of(cx: &Cx, mesh: &'a MeshSnapshot, owner: &'a ListenerOwner) -> Option<Self> {
        let (meta, listeners, gateway) = if owner.kind == Kind::ListenerSet {
            let set = mesh.listener_sets.get(cx, &owner.object)?;
            let gateway = mesh.kube_gateways.get(cx, &parent_of(&owner.object, &set.spec)?)?;
            (&set.meta, &set.spec.listeners, gateway)
        } else {
            let gateway = mesh.kube_gateways.get(cx, &owner.object)?;
            (&gateway.meta, &gateway.spec.listeners, gateway)
        };
        let controller = Controller::of_class(cx, mesh, &gateway.spec.gateway_class_name)?;
        if owner.kind == Kind::ListenerSet
            && (!controller.supports_listener_sets() || !admits(cx, mesh, gateway, &owner.object.namespace))
        {
            return None;
        }
        let services = Services::of(mesh, gateway, controller);
        if services.hosts.is_empty() {
            return None;
        }
        Some(Self {
            owner,
            meta,
            listeners,
            gateway,
            controller,
            services: services.hosts,
            conflicts: match owner.kind {
                Kind::ListenerSet => {
                    let conflicts = mesh.listener_conflicts.get(cx, &gateway.meta.key);
                    conflicts.map_or(&[], |conflicts| conflicts.of_set(&owner.object))
                }
                _ => &[],
            },
        })
    }

    /// Returns the listeners with their conflicts.
    fn with_conflicts(&self) -> impl Iterator<Item = (&gateway_api::gateway::Listener, Option<&Mistake>)> {
        let conflict = |position: usize| self.conflicts.get(position).and_then(Option::as_ref);
        let listeners = self.listeners.iter().enumerate();
        listeners.map(move |(position, listener)| (listener, conflict(position)))
    }

    /// Returns the listeners with their mistakes.
    pub(super) fn with_mistakes<'d>(
        &'d self,
        cx: &'d Cx,
        mesh: &'d MeshSnapshot,
    ) -> impl Iterator<Item = (&'d gateway_api::gateway::Listener, ListenerMistakes)> {
        self.with_conflicts().map(|(listener, conflict)| {
            let mut mistakes = self.server(cx, mesh, listener, Vec::new()).err().unwrap_or_default();
            mistakes.accepted = self.unexpected(listener).or(mistakes.accepted);
            mistakes.conflict = conflict.cloned();
            (listener, mistakes)
        })
    }

    /// Returns true if there are listeners and all have mistakes.
    pub(super) fn is_invalid(&self, cx: &Cx, mesh: &MeshSnapshot) -> bool {
        !self.listeners.is_empty() && self.with_mistakes(cx, mesh).all(|(_, mistakes)| !mistakes.is_empty())
    }

    /// Returns the mistake of a listener that tunnels do not have.
    fn unexpected(&self, listener: &gateway_api::gateway::Listener) -> Option<Mistake> {
        let mode = listener.tls.as_ref().and_then(|tls| tls.mode.as_deref());
        let is_tunnel = listener.port == HBONE_PORT && listener.protocol == HBONE;
        let is_passthrough = listener.port != HBONE_PORT && listener.protocol == "TLS" && mode == Some("Passthrough");
        let message = match self.controller {
            Controller::Waypoint if !is_tunnel => {
                format!("Expected a single listener on port {HBONE_PORT} with protocol {HBONE:?}")
            }
            Controller::EastWest if !(is_tunnel && mode == Some("Terminate") || is_passthrough) => format!(
                "East-west gateway listeners must be either port {HBONE_PORT} with protocol {HBONE:?} and \
                 TLS.Mode == Terminate, or TLS with TLS.Mode == Passthrough"
            ),
            _ => return None,
        };
        Some(Mistake::new("UnsupportedProtocol", message))
    }

    /// Returns true if routes attach to the listener. Waypoints take routes from the services that they serve.
    fn has_routes(&self, listener: &gateway_api::gateway::Listener) -> bool {
        match self.controller {
            Controller::Gateway => true,
            Controller::EastWest => listener.port != HBONE_PORT,
            Controller::Waypoint | Controller::Remote => false,
        }
    }

    fn convert(&self, cx: &Cx, mesh: &MeshSnapshot, listener: &gateway_api::gateway::Listener) -> Listener {
        let key = &self.owner.object;
        let needs_tls = matches!(listener.protocol.as_str(), "HTTPS" | "TLS");
        let port = port(listener);
        let name = [&key.name, "~", CONVERTED, "~", &listener.name].concat();
        let gateway = ObjectKey::new(&key.cluster, key.namespace.clone(), name);
        let host = listener.hostname.clone().unwrap_or(SmolStr::new_static("*"));
        let namespaces = RouteNamespaces::of(listener.allowed_routes.as_ref());
        let user = match &namespaces {
            RouteNamespaces::All => "*",
            RouteNamespaces::Same => key.namespace.as_str(),
            // The server has the selector beside the host (model::gateway).
            RouteNamespaces::Selected(_) => NO_NAMESPACE,
        };
        let server = self.server(cx, mesh, listener, vec![[user, "/", &host].concat()]);
        // Routes attach to a listener for TLS without TLS settings, as in Istio, but it serves nothing: its server
        // would only take the port from those with settings.
        let server = server.ok().filter(|server| server.tls.is_some() || !needs_tls);
        let converted = server.map(|server| {
            Shared::new(Config {
                meta: converted_meta(
                    Kind::Gateway,
                    gateway.clone(),
                    self.annotations(cx, mesh, listener),
                    self.meta.creation,
                ),
                spec: networking::Gateway {
                    servers: vec![server],
                    ..Default::default()
                },
                status: None,
            })
        });
        Listener {
            name: listener.name.clone(),
            hostname: listener.hostname.clone().unwrap_or_default(),
            port: port.unwrap_or_default(),
            protocol: listener.protocol.clone(),
            hosts_of_port: Shared::default(),
            host,
            namespaces,
            kinds: kinds(listener),
            gateway,
            converted,
        }
    }

    fn server(
        &self,
        cx: &Cx,
        mesh: &MeshSnapshot,
        listener: &gateway_api::gateway::Listener,
        hosts: Vec<String>,
    ) -> Result<networking::Server, ListenerMistakes> {
        let tls = tls::settings(cx, mesh, self.owner, self.gateway, self.meta, listener);
        let protocol = self.protocol(mesh, &listener.protocol);
        match (tls, port(listener), protocol) {
            (Ok(tls), Ok(number), Ok(protocol)) => Ok(networking::Server {
                port: Some(networking::Port {
                    name: "default".to_owned(),
                    number: number.into(),
                    protocol,
                    ..Default::default()
                }),
                hosts,
                tls,
                ..Default::default()
            }),
            (tls, port, protocol) => {
                let tls = tls.err().unwrap_or_default();
                Err(ListenerMistakes {
                    accepted: protocol.err().or(port.err()).or(tls.accepted),
                    ..tls
                })
            }
        }
    }

    fn protocol(&self, mesh: &MeshSnapshot, written: &str) -> Result<String, Mistake> {
        let is_tunnel_end = matches!(self.controller, Controller::Waypoint | Controller::EastWest);
        let message = match written {
            "HTTP" | "HTTPS" | "TLS" => return Ok(written.to_owned()),
            "TCP" if mesh.installation.features.pilot_enable_alpha_gateway_api => return Ok(written.to_owned()),
            HBONE if is_tunnel_end => return Ok(written.to_owned()),
            "TCP" => format!(
                "protocol {written:?} is supported, but only when PILOT_ENABLE_ALPHA_GATEWAY_API=true is configured"
            ),
            HBONE => format!("protocol {written:?} is only supported for waypoint proxies"),
            _ => {
                let upper = written.to_uppercase();
                if matches!(upper.as_str(), "HTTP" | "HTTPS" | "TLS" | "TCP" | HBONE) {
                    format!("protocol {written:?} is unsupported. hint: {upper:?} (uppercase) may be supported")
                } else {
                    format!("protocol {written:?} is unsupported")
                }
            }
        };
        Err(Mistake::new("UnsupportedProtocol", message))
    }

    fn annotations(&self, cx: &Cx, mesh: &MeshSnapshot, listener: &gateway_api::gateway::Listener) -> Labels {
        let key = &self.owner.object;
        let parent = [
            self.owner.kind_name(),
            "/",
            &key.name,
            "/",
            &listener.name,
            ".",
            &key.namespace,
        ]
        .concat();
        let mut annotations = vec![
            (PARENTS_ANNOTATION, SmolStr::from(parent)),
            (SEMANTICS_ANNOTATION, SmolStr::new_static("gateway")),
            (SERVICE_ANNOTATION, self.services.join(",").into()),
            (SERVICE_ACCOUNT_ANNOTATION, self.account(mesh)),
        ];
        if self.owner.kind == Kind::ListenerSet {
            let namespace = SmolStr::new(self.gateway.meta.namespace().as_str());
            annotations.push((PARENT_NAMESPACE_ANNOTATION, namespace));
        }
        if listener.tls.is_some() && tls::accepts_untrusted(tls::client_validation(&self.gateway.spec, listener.port)) {
            annotations.push((ACCEPTS_UNTRUSTED_ANNOTATION, SmolStr::new_static("true")));
        }
        if let Some(Ok(name)) = tls::backend_certificate(cx, mesh, self.gateway) {
            annotations.push((BACKEND_CERTIFICATE_ANNOTATION, name.into()));
        }
        annotations
            .into_iter()
            .map(|(name, value)| (SmolStr::new_static(name), value))
            .collect()
    }

    /// Returns the service account of the deployment; empty if it is the user's own.
    fn account(&self, mesh: &MeshSnapshot) -> SmolStr {
        if !is_managed(mesh, &self.gateway.spec) {
            return SmolStr::default();
        }
        let written = annotation(self.gateway, DEPLOYED_ACCOUNT_ANNOTATION);
        written
            .cloned()
            .unwrap_or_else(|| deployed_name(self.gateway, self.controller))
    }
}

/// Returns true if the proxies of a Gateway are deployed for it: it has no address, or one IP address.
fn is_managed(mesh: &MeshSnapshot, gateway: &gateway_api::Gateway) -> bool {
    if !mesh.installation.features.enable_gateway_api_manual_deployment {
        return true;
    }
    match gateway.addresses.as_slice() {
        [] => true,
        [address] => address.address_type.as_ref().is_none_or(|kind| kind == "IPAddress"),
        _ => false,
    }
}

/// Returns the value of an annotation. An empty one counts as absent, as a chart with an unset value writes it.
fn annotation<'a>(gateway: &'a Config<gateway_api::Gateway>, name: &str) -> Option<&'a SmolStr> {
    gateway.meta.annotations.get(name).filter(|value| !value.is_empty())
}

/// Returns the name of resources that are deployed for a Gateway.
fn deployed_name(gateway: &Config<gateway_api::Gateway>, controller: Controller) -> SmolStr {
    if controller.has_plain_names() {
        return gateway.meta.name().clone();
    }
    [gateway.meta.name(), "-", &gateway.spec.gateway_class_name]
        .concat()
        .into()
}

/// The services that expose a Gateway.
pub(super) struct Services {
    /// Their hosts.
    pub(super) hosts: Vec<String>,
    /// Mistake in the addresses. It is severe only if no service is left.
    pub(super) mistake: Option<Mistake>,
}

impl Services {
    /// Returns the services of a Gateway: that of its deployment, or those that its addresses name.
    pub(super) fn of(mesh: &MeshSnapshot, gateway: &Config<gateway_api::Gateway>, controller: Controller) -> Self {
        let namespace = gateway.meta.namespace();
        if is_managed(mesh, &gateway.spec) {
            let written = annotation(gateway, NAME_OVERRIDE_ANNOTATION);
            let name = written.cloned().unwrap_or_else(|| deployed_name(gateway, controller));
            return Self {
                hosts: vec![service_host(mesh, namespace, &name)],
                mistake: None,
            };
        }
        let (hosts, others): (Vec<_>, Vec<_>) = gateway.spec.addresses.iter().partition(|address| {
            let kind = address.address_type.as_ref();
            kind.is_none_or(|kind| kind == "Hostname")
        });
        let full = |value: &SmolStr| {
            if value.contains('.') {
                value.to_string()
            } else {
                service_host(mesh, namespace, value)
            }
        };
        let mistake = if !others.is_empty() {
            let others: Vec<&str> = others.iter().map(|address| address.value.as_str()).collect();
            let message = format!("only Hostname is supported, ignoring [{}]", others.join(" "));
            Some(Mistake::new("UnsupportedAddress", message))
        } else if gateway.meta.annotations.contains_key(SERVICE_TYPE_ANNOTATION) {
            let message =
                format!("annotation {SERVICE_TYPE_ANNOTATION} is deprecated, use Spec.Infrastructure.Routeability");
            Some(Mistake::new("DeprecatedField", message))
        } else {
            None
        };
        Self {
            hosts: hosts.iter().map(|address| full(&address.value)).collect(),
            mistake,
        }
    }
}

/// Returns the port of a listener; those of ListenerSets may omit it.
pub fn port(listener: &gateway_api::gateway::Listener) -> Result<u16, Mistake> {
    match (listener.port, listener.protocol.as_str()) {
        (0, "HTTP") => Ok(80),
        (0, "HTTPS") => Ok(443),
        (0, protocol) => Err(Mistake::new(
            "UnsupportedProtocol",
            format!("protocol {protocol} requires a port to be set"),
        )),
        (port, _) => Ok(port),
    }
}

/// Returns the kinds of routes that may attach to a listener.
pub(super) fn kinds(listener: &gateway_api::gateway::Listener) -> Vec<Kind> {
    let terminates = || {
        let tls = listener.tls.as_ref();
        tls.is_some_and(|tls| tls.mode.as_ref().is_some_and(|mode| mode == "Terminate"))
    };
    let supported: &[Kind] = match listener.protocol.as_str() {
        "HTTP" | "HTTPS" => &[Kind::HttpRoute, Kind::GrpcRoute],
        "TCP" => &[Kind::TcpRoute],
        "TLS" if terminates() => &[Kind::TlsRoute, Kind::TcpRoute],
        "TLS" => &[Kind::TlsRoute],
        _ => &[],
    };
    let written = listener.allowed_routes.as_ref().map(|allowed| &allowed.kinds);
    let is_allowed = |kind: &&Kind| {
        written.is_none_or(|written| {
            let is_named = |it: &gateway_api::gateway::RouteKind| {
                it.kind == kind.name() && it.group.as_ref().is_none_or(|group| group == kind.group())
            };
            written.is_empty() || written.iter().any(is_named)
        })
    };
    supported.iter().filter(is_allowed).copied().collect()
}

/// Returns true if a Gateway admits ListenerSets of a namespace.
pub fn admits(cx: &Cx, mesh: &MeshSnapshot, gateway: &Config<gateway_api::Gateway>, namespace: &Namespace) -> bool {
    let allowed = gateway.spec.allowed_listeners.as_ref();
    let Some(FromNamespaces { from, selector }) = allowed.and_then(|allowed| allowed.namespaces.as_ref()) else {
        return false;
    };
    match from.as_deref() {
        Some("All") => true,
        Some("Same") => gateway.meta.namespace() == namespace,
        None | Some("Selector") => {
            let selects = |selector| selects_namespace(cx, mesh, selector, namespace);
            selector.as_ref().is_some_and(selects)
        }
        Some(_) => false,
    }
}
