//! Scopes that most namespaces have in common. A namespace sees what all others see, unless objects say otherwise:
//! those that are exported to some namespaces only, and those whose meaning depends on the namespace of the client.

use std::collections::BTreeSet;

use super::{ScopeKey, ScopePool, SidecarScope, scope};
use crate::{
    base::Namespace,
    model::{MeshSnapshot, export::ExportTo, service::ServiceKey, virtual_service::Semantics},
    table::Cx,
};

/// The scope of a namespace without objects, to which nothing is exported by name.
#[derive(Debug, PartialEq)]
pub struct CommonScope {
    all: SidecarScope,
    /// Without the VirtualServices that only route HTTP.
    tcp: SidecarScope,
    /// The namespaces that may see something else.
    exceptions: BTreeSet<Namespace>,
}

impl ScopeKey {
    /// Returns the key of the scope that most namespaces have in common with this one; `None` for that of a Sidecar.
    pub fn common(&self) -> Option<Self> {
        match self {
            Self::Default(_) => Some(Self::Default(Namespace::default())),
            Self::Gateway(_) => Some(Self::Gateway(Namespace::default())),
            Self::Sidecar(..) => None,
        }
    }
}

impl CommonScope {
    /// Computes a common scope by its key (see [`ScopeKey::common`]).
    pub fn of(cx: &Cx, mesh: &MeshSnapshot, key: &ScopeKey, pool: &ScopePool) -> Option<Self> {
        let all = pool.share(scope(cx, mesh, key)?);
        Some(Self {
            tcp: pool.share(all.without_http_routes(cx, mesh)),
            all,
            exceptions: exceptions(cx, mesh),
        })
    }

    /// Returns the scope of a namespace; `None` if it may differ from the common one.
    pub fn all(&self, key: &ScopeKey) -> Option<SidecarScope> {
        self.of_namespace(&self.all, key)
    }

    /// Returns the scope of a namespace without the VirtualServices that only route HTTP; `None` if it may differ from
    /// the common one.
    pub fn tcp(&self, key: &ScopeKey) -> Option<SidecarScope> {
        self.of_namespace(&self.tcp, key)
    }

    fn of_namespace(&self, common: &SidecarScope, key: &ScopeKey) -> Option<SidecarScope> {
        (!self.exceptions.contains(key.namespace())).then(|| SidecarScope {
            key: key.clone(),
            ..common.clone()
        })
    }
}

/// Returns the namespaces whose scope may differ from the common one:
///
/// - those that objects are exported to by name, and those whose services are not public, because routes reach them all
///   the same;
/// - those that share a host with another namespace, because each prefers its own service;
/// - those with routes of the Gateway API, which come first in their own namespace;
/// - those that routes accept requests from by name.
fn exceptions(cx: &Cx, mesh: &MeshSnapshot) -> BTreeSet<Namespace> {
    let mut found = BTreeSet::new();
    let mut before: Option<&ServiceKey> = None;
    for (key, row) in mesh.visibility.iter(cx) {
        let members = row.positions().map(|member| row.member(member));
        members.for_each(|member| add_audience(&mut found, &member.export_to, &key.namespace));
        // Rows are in the order of their hosts.
        if let Some(before) = before.replace(key).filter(|before| before.hostname == key.hostname) {
            found.extend([before.namespace.clone(), key.namespace.clone()]);
        }
    }
    for (_, summary) in mesh.virtual_service_summaries.iter(cx) {
        let own = summary.meta.namespace();
        add_audience(&mut found, &summary.export_to, own);
        if summary.semantics == Semantics::Gateway || summary.only_own_clients {
            found.insert(own.clone());
        }
        let sources = summary.destinations.iter().flat_map(|destination| &destination.sources);
        found.extend(sources.cloned());
    }
    found
}

/// Adds the namespaces that see an object in another way than all others.
fn add_audience(found: &mut BTreeSet<Namespace>, export_to: &ExportTo, own: &Namespace) {
    match export_to {
        ExportTo::Public => {}
        ExportTo::None => found.extend([own.clone()]),
        ExportTo::Namespaces(namespaces) => found.extend(namespaces.iter().chain([own]).cloned()),
    }
}
