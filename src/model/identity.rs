//! SPIFFE identities of service accounts.

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::{
    api::mesh_config,
    base::{ClusterId, Namespace, ObjectKey, SpiffeId},
    table::Cx,
};

/// Returns the SPIFFE identity of a service account. Parity (pkg/spiffe/spiffe.go): returned even for an empty account.
pub fn spiffe_id(trust_domain: &str, namespace: &Namespace, account: &str) -> SmolStr {
    let id = SpiffeId::new(trust_domain, namespace.clone(), SmolStr::new(account));
    SmolStr::from(id.to_string())
}

/// Returns the trust domain of the pods of a cluster: that of its own mesh config, by default that of the config
/// cluster.
///
/// Parity (pkg/config/mesh/watchers.go, `restrictedConfigAdapter`): the default applies if the mesh config of a remote
/// cluster is not known. It also applies if there is none, because then the config cluster's control plane injects the
/// pods; Istio uses `cluster.local`.
pub fn trust_domain<'a>(cx: &Cx, mesh: &'a MeshSnapshot, cluster: &ClusterId) -> &'a str {
    let installation = &mesh.installation;
    if *cluster != installation.cluster {
        let name = mesh_config::map_name(&installation.revision);
        let key = ObjectKey::new(cluster, installation.namespace.clone(), name);
        if let Some(remote) = mesh.mesh_config.get(cx, &key) {
            return &remote.spec.trust_domain;
        }
    }
    &mesh.mesh_config(cx).trust_domain
}
