//! Key pairs in the Secrets that Gateways and ListenerSets refer to. Each is checked once for all listeners, because
//! reading a private key costs much more than the rest of a listener.

use super::tls;
use crate::{
    api::{
        Config,
        gateway_api::{self, common::ObjectReference},
    },
    base::{Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        credential::{
            Secrets,
            pem::{self, KeyPairError},
        },
        gateway_api::is_converted,
    },
    table::Cx,
};

/// Emits the Secrets that a Gateway refers to.
pub fn of_gateway(key: &ObjectKey, row: &Config<gateway_api::Gateway>, emit: &mut dyn FnMut(ObjectKey)) {
    of_listeners(key, &row.spec.listeners, emit);
    let backend = row.spec.tls.as_ref().and_then(|tls| tls.backend.as_ref());
    let certificate = backend.and_then(|backend| backend.client_certificate_ref.as_ref());
    certificate
        .and_then(|reference| secret(key, reference))
        .into_iter()
        .for_each(emit);
}

/// Emits the Secrets that a ListenerSet refers to.
pub fn of_set(key: &ObjectKey, row: &Config<gateway_api::ListenerSet>, emit: &mut dyn FnMut(ObjectKey)) {
    of_listeners(key, &row.spec.listeners, emit);
}

fn of_listeners(key: &ObjectKey, listeners: &[gateway_api::gateway::Listener], emit: &mut dyn FnMut(ObjectKey)) {
    let settings = listeners.iter().filter_map(|listener| listener.tls.as_ref());
    // Listeners with more references are refused, whatever these are.
    let valid = settings.filter(|tls| tls.certificate_refs.len() <= tls::MAX_CERTIFICATES);
    let references = valid.flat_map(|tls| &tls.certificate_refs);
    references.filter_map(|reference| secret(key, reference)).for_each(emit);
}

fn secret(owner: &ObjectKey, reference: &ObjectReference) -> Option<ObjectKey> {
    let written = reference.namespace.as_ref();
    let namespace = written.map_or_else(|| owner.namespace.clone(), Namespace::new);
    tls::is_secret(reference).then(|| ObjectKey::new(&owner.cluster, namespace, reference.name.clone()))
}

/// Derives whether a Secret is referred to and may be used.
pub fn is_used(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<()> {
    let is_used = mesh.gateways_by_certificate.contains(cx, key) || mesh.listener_sets_by_certificate.contains(cx, key);
    (is_used && is_converted(mesh, key)).then_some(())
}

/// Derives the error in the key pair of a Secret; `None` for a valid one, and without a reference or a key pair.
pub fn error(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<KeyPairError> {
    mesh.certificates_in_use.get(cx, key)?;
    let secrets = Secrets::of_config_cluster(cx, mesh);
    let certificate = secrets.certificate(&key.namespace, &key.name).ok()?;
    pem::check_key_pair(&certificate.chain, certificate.key.reveal()).err()
}
