//! Parents of routes: the listeners, Services and ServiceEntries that `parentRefs` name.

use smol_str::SmolStr;

use super::listener::{Listener, ListenerOwner};
use crate::{
    api::{
        Kind, Meta,
        gateway_api::common::{GROUP, ParentReference},
    },
    base::{Namespace, ObjectKey, Shared, host},
    model::{MeshSnapshot, virtual_service::MESH_GATEWAY},
    table::Cx,
};

/// Reasons why a route does not attach to a parent.
pub(super) mod reason {
    /// The parent, or its section or port, does not exist.
    pub(in crate::model::gateway_api) const NO_PARENT: &str = "NoMatchingParent";
    /// The namespace or the kind of the route is not allowed.
    pub(in crate::model::gateway_api) const NOT_ALLOWED: &str = "NotAllowedByListeners";
    /// No host of the route is one of the listener.
    pub(in crate::model::gateway_api) const NO_HOST: &str = "NoMatchingListenerHostname";
    /// A field of the route has errors.
    pub(in crate::model::gateway_api) const UNSUPPORTED: &str = "UnsupportedValue";
}

/// A parent of a route. A reference to a Gateway without a section has one for each listener, and so has one to a
/// section or port that does not exist.
#[derive(Clone, Debug, PartialEq)]
pub struct Parent {
    /// The reference as written.
    pub reference: ParentReference,
    /// The target.
    pub target: Target,
    /// Reason why the route does not attach.
    pub denied: Option<super::Mistake>,
}

/// A target that routes attach to.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// A listener.
    Listener {
        /// The Gateway or ListenerSet.
        owner: ListenerOwner,
        /// Its name.
        section: SmolStr,
        /// Its host as written; empty for all.
        hostname: SmolStr,
        /// The Gateway that it is converted to, as `namespace/name`.
        gateway: SmolStr,
        /// Hosts of the listeners with its port and protocol; its own is one of them.
        hosts_of_port: Shared<[SmolStr]>,
    },
    /// A service of the mesh, with its hosts.
    Service {
        /// The hosts; none if the object does not exist, or if the route contributes nothing.
        hosts: Vec<String>,
        /// The number of hosts that the object declares.
        count: usize,
    },
}

impl Target {
    /// Returns the Gateway of VirtualServices for the parent.
    pub fn gateway(&self) -> &str {
        match self {
            Self::Listener { gateway, .. } => gateway,
            Self::Service { .. } => MESH_GATEWAY,
        }
    }

    /// Returns false if another listener of the Gateway is the more specific one for a host of the route.
    pub fn is_most_specific_for(&self, route_host: &str) -> bool {
        let Self::Listener {
            hostname,
            hosts_of_port,
            ..
        } = self
        else {
            return true;
        };
        if !hostname.is_empty() && !host::is_wildcard(hostname) {
            return true;
        }
        if !hostname.is_empty() && !host::overlaps(route_host, hostname) {
            return false;
        }
        let mut others = hosts_of_port.iter().filter(|other| *other != hostname);
        !others.any(|other| hostname.len() <= other.len() && is_covered(route_host, other))
    }
}

/// Returns true if a listener's host covers another host; no host covers none.
fn is_covered(host: &str, listener: &str) -> bool {
    !listener.is_empty() && host::subset_of(host, listener)
}

/// A route that looks for its parents.
pub struct Child<'a> {
    /// Its kind.
    pub kind: Kind,
    /// Its metadata.
    pub meta: &'a Meta,
    /// Its hosts.
    pub hostnames: &'a [SmolStr],
    /// False if it contributes nothing to VirtualServices: then the hosts of services are only counted. A ServiceEntry
    /// has room for tens of thousands.
    pub contributes: bool,
}

/// Returns the parents of a route, sorted by reference. References to kinds of others are left out.
pub fn resolve(cx: &Cx, mesh: &MeshSnapshot, child: &Child, references: &[ParentReference]) -> Vec<Parent> {
    let mut parents = Vec::new();
    for reference in references {
        let group = reference.group.as_deref().unwrap_or(GROUP);
        let kind = reference.kind.as_deref().unwrap_or("Gateway");
        let kind = [Kind::KubeGateway, Kind::ListenerSet, Kind::Service, Kind::ServiceEntry]
            .into_iter()
            .find(|known| known.name() == kind && known.group() == group);
        let namespace = reference.namespace.as_ref();
        let namespace = namespace.map_or_else(|| child.meta.namespace().clone(), Namespace::new);
        let object = ObjectKey::new(child.meta.cluster(), namespace, reference.name.clone());
        match kind {
            Some(kind @ (Kind::Service | Kind::ServiceEntry)) => {
                parents.push(service(cx, mesh, child, (kind, &object), reference));
            }
            Some(kind) => parents.extend(listeners(cx, mesh, child, &ListenerOwner { kind, object }, reference)),
            None => {}
        }
    }
    parents.sort_by_cached_key(|parent| sort_text(&parent.reference, child.meta.namespace()));
    parents
}

/// Returns the text by which parents are sorted. Equal references have equal texts.
pub(super) fn sort_text(reference: &ParentReference, own: &Namespace) -> String {
    format!(
        "{}/{}/{}/{}/{}.{}",
        reference.group.as_deref().unwrap_or(GROUP),
        reference.kind.as_deref().unwrap_or("Gateway"),
        reference.name,
        reference.section_name.as_deref().unwrap_or_default(),
        reference.port.unwrap_or_default(),
        reference.namespace.as_deref().unwrap_or(own)
    )
}

/// Returns the listeners of a Gateway or ListenerSet to which a reference attaches a route.
fn listeners(
    cx: &Cx,
    mesh: &MeshSnapshot,
    child: &Child,
    owner: &ListenerOwner,
    reference: &ParentReference,
) -> Vec<Parent> {
    let Some(row) = mesh.listeners.get(cx, owner) else {
        return Vec::new();
    };
    // A listener with the section and port decides alone. Otherwise, a route with many references to a Gateway with
    // many listeners would keep the product of both.
    let is_meant = |listener: &&Listener| mismatch(listener, reference).is_none();
    let has_meant = row.listeners.iter().any(|listener| is_meant(&listener));
    let chosen = row.listeners.iter().filter(|listener| !has_meant || is_meant(listener));
    let parent = |listener: &Listener| {
        let gateway = [&*listener.gateway.namespace, "/", &listener.gateway.name].concat();
        Parent {
            reference: reference.clone(),
            denied: denial(cx, mesh, child, listener, reference),
            target: Target::Listener {
                owner: owner.clone(),
                section: listener.name.clone(),
                hostname: listener.hostname.clone(),
                gateway: gateway.into(),
                hosts_of_port: listener.hosts_of_port.clone(),
            },
        }
    };
    chosen.map(parent).collect()
}

/// Returns the reason why a reference does not mean a listener: it names another port or section.
fn mismatch(listener: &Listener, reference: &ParentReference) -> Option<super::Mistake> {
    let port = reference.port.filter(|port| *port != 0 && *port != listener.port);
    let section = reference.section_name.as_deref().filter(|section| !section.is_empty());
    let section = section.filter(|section| *section != listener.name);
    let message = match (port, section) {
        (Some(port), _) => format!("port {port} not found"),
        (None, Some(section)) => format!("sectionName {section:?} not found"),
        (None, None) => return None,
    };
    Some(super::Mistake::new(reason::NO_PARENT, message))
}

/// Returns the reason why a route does not attach to a listener.
fn denial(
    cx: &Cx,
    mesh: &MeshSnapshot,
    child: &Child,
    listener: &Listener,
    reference: &ParentReference,
) -> Option<super::Mistake> {
    let denied = |reason, message: String| Some(super::Mistake::new(reason, message));
    if let Some(mistake) = mismatch(listener, reference) {
        return Some(mistake);
    }
    let own = child.meta.namespace();
    let any = [SmolStr::new_static("*")];
    let hostnames = if child.hostnames.is_empty() {
        &any[..]
    } else {
        child.hostnames
    };
    let offers = |hostname: &SmolStr| host::overlaps(&listener.host, hostname);
    let has_host = hostnames.iter().any(offers);
    let is_matched = has_host && listener.allows(cx, mesh, own);
    let written = listener.hostname.as_str();
    match (is_matched, has_host) {
        (true, _) if listener.kinds.contains(&child.kind) => None,
        (true, _) => {
            let (group, version) = (child.kind.group(), child.kind.version());
            let message = format!("kind {group}/{version}/{} is not allowed", child.kind.name());
            denied(reason::NOT_ALLOWED, message)
        }
        (false, true) => {
            let rest = format!("but namespace {own:?} is not allowed by the parent");
            let message = format!("hostnames matched parent hostname {written:?}, {rest}");
            denied(reason::NOT_ALLOWED, message)
        }
        (false, false) => denied(
            reason::NO_HOST,
            format!("no hostnames matched parent hostname {written:?}"),
        ),
    }
}

/// Returns a service as a parent.
fn service(
    cx: &Cx,
    mesh: &MeshSnapshot,
    child: &Child,
    (kind, object): (Kind, &ObjectKey),
    reference: &ParentReference,
) -> Parent {
    let (exists, hosts, count, noun) = if kind == Kind::Service {
        let exists = mesh.kube_services.get(cx, object).is_some();
        let host = super::service_host(mesh, &object.namespace, &object.name);
        (exists, vec![host], 1, "service")
    } else {
        let row = mesh.service_entries.get(cx, object);
        let declared = row.map_or(&[][..], |row| &row.spec.hosts);
        let hosts = if child.contributes { declared } else { &[] };
        (row.is_some(), hosts.to_vec(), declared.len(), "service entry")
    };
    let denied = (!exists).then(|| {
        let message = format!("parent {noun}: {name:?} not found", name = object.name.as_str());
        super::Mistake::new(reason::NO_PARENT, message)
    });
    Parent {
        reference: reference.clone(),
        target: Target::Service { hosts, count },
        denied,
    }
}
