//! CA certificates for clients in the ConfigMaps and Secrets that Gateways refer to. Each is checked once for all
//! listeners: an object has room for a megabyte, and a Gateway with ListenerSets for thousands of listeners.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{
    api::{Kind, gateway_api::common::ObjectReference},
    base::{Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        credential::{Authority, Secrets, config_map_authority, pem},
        gateway_api::is_converted,
    },
    table::Cx,
};

/// An object with CA certificates for clients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientAuthority {
    /// [`Kind::ConfigMap`] or [`Kind::Secret`].
    pub(super) kind: Kind,
    /// The object.
    pub(super) object: ObjectKey,
}

impl ClientAuthority {
    /// Returns the object that a reference names for listeners of a Gateway or ListenerSet; `None` for other kinds.
    pub(super) fn of(owner: &ObjectKey, reference: &ObjectReference) -> Option<Self> {
        let is_core = reference.group.as_ref().is_none_or(SmolStr::is_empty);
        let kind = match reference.kind.as_deref().filter(|_| is_core)? {
            "ConfigMap" => Kind::ConfigMap,
            "Secret" => Kind::Secret,
            _ => return None,
        };
        let written = reference.namespace.as_ref();
        let namespace = written.map_or_else(|| owner.namespace.clone(), Namespace::new);
        let object = ObjectKey::new(&owner.cluster, namespace, reference.name.clone());
        Some(Self { kind, object })
    }
}

/// The objects with CA certificates for clients that the listeners of a Gateway may refer to.
pub type ClientAuthorities = BTreeSet<ClientAuthority>;

/// Derives the objects for a Gateway; no row without any. A reference without a namespace is to the namespace of each
/// listener's owner.
pub fn of_gateway(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<ClientAuthorities> {
    let gateway = mesh.kube_gateways.get(cx, key).filter(|_| is_converted(mesh, key))?;
    let frontend = gateway.spec.tls.as_ref()?.frontend.as_ref()?;
    let of_ports = frontend.per_port.iter().map(|port| &port.tls);
    let settings = of_ports.chain([&frontend.default]);
    let validations = settings.filter_map(|tls| tls.validation.as_ref());
    // Listeners with several references are refused, whatever these are.
    let references = validations.filter_map(|validation| match validation.ca_certificate_refs.as_slice() {
        [reference] => Some(reference),
        _ => None,
    });
    let sets = mesh.listener_sets_by_gateway.get(cx, key).map(|(set, _)| set);
    let owners: BTreeSet<&ObjectKey> = sets.chain([key]).collect();
    let objects = references.flat_map(|reference| {
        let owners = owners.iter();
        owners.filter_map(move |owner| ClientAuthority::of(owner, reference))
    });
    let objects: ClientAuthorities = objects.collect();
    (!objects.is_empty()).then_some(objects)
}

/// Emits the objects for a Gateway.
pub fn authorities(_: &ObjectKey, row: &ClientAuthorities, emit: &mut dyn FnMut(ClientAuthority)) {
    row.iter().cloned().for_each(emit);
}

/// Returns the CA certificates in an object, or why there are none, in the words of Istio's statuses.
pub(super) fn content(cx: &Cx, mesh: &MeshSnapshot, authority: &ClientAuthority) -> Result<Authority, String> {
    let ObjectKey { namespace, name, .. } = &authority.object;
    if authority.kind == Kind::ConfigMap {
        return config_map_authority(cx, mesh, namespace, name);
    }
    Secrets::of_config_cluster(cx, mesh).authority(namespace, name)
}

/// Derives whether an object in use has CA certificates of which none can be parsed.
pub fn malformed(cx: &Cx, mesh: &MeshSnapshot, authority: &ClientAuthority) -> Option<()> {
    mesh.client_authorities_in_use.get(cx, authority)?;
    let found = content(cx, mesh, authority).ok()?;
    (!pem::has_certificate(&found.roots)).then_some(())
}
