//! Who may ask for certificates of others: proxies of a node (ztunnel), for what runs on their own node.
//!
//! The rule is that of Kubernetes for kubelets. A node that is taken over can take the identities of its own pods,
//! which it has in its hands anyway, and no others.

use std::{collections::BTreeSet, sync::Arc};

use smol_str::SmolStr;
use tokio::sync::watch;

use crate::{
    auth::{Caller, KubernetesInfo, TrustDomains},
    base::{Namespace, ObjectKey, SpiffeId, spiffe},
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Decides who may ask for whom.
#[derive(Clone)]
pub struct NodeAuthorizer {
    trusted: Arc<BTreeSet<(Namespace, SmolStr)>>,
    domains: watch::Receiver<Arc<TrustDomains>>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

/// Why a caller may not ask for another. The caller is told nothing of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImpersonationError {
    /// No account may.
    #[error("nobody may ask for other identities; hint: CA_TRUSTED_NODE_ACCOUNTS names who may")]
    Disabled,
    /// The caller showed no token of Kubernetes.
    #[error("only callers with a token of Kubernetes may ask for other identities")]
    NoToken,
    /// This account may not.
    #[error("{0}/{1} may not ask for other identities")]
    Account(Namespace, SmolStr),
    /// What is asked for is no identity.
    #[error(transparent)]
    Identity(#[from] spiffe::SpiffeError),
    /// The identity is of another mesh.
    #[error("trust domain {0} is not ours")]
    TrustDomain(SmolStr),
    /// The token is bound to no pod.
    #[error("the token of {0}/{1} is bound to no pod")]
    Unbound(Namespace, SmolStr),
    /// The caller's pod is not known; it may be so new, or so long gone.
    #[error("pod {0} of cluster {1} is not known")]
    Pod(ObjectKey, crate::base::ClusterId),
    /// There is a pod of this name, but it is another one.
    #[error("pod {pod} is not the caller's: it has {field} {ours:?}, the token {theirs:?}")]
    PodMismatch {
        /// The pod.
        pod: Box<ObjectKey>,
        /// What differs.
        field: &'static str,
        /// What is known of the pod.
        ours: SmolStr,
        /// What the token says.
        theirs: SmolStr,
    },
    /// Nothing of the identity runs there.
    #[error("no pod of {0}/{1} is on node {2:?}")]
    NotOnNode(Namespace, SmolStr, SmolStr),
}

impl NodeAuthorizer {
    /// Lets the accounts (`CA_TRUSTED_NODE_ACCOUNTS`, `namespace/name`) ask. Gives what is no account, too.
    pub fn new(
        accounts: &[SmolStr],
        domains: watch::Receiver<Arc<TrustDomains>>,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ) -> (Self, Vec<SmolStr>) {
        let (mut trusted, mut wrong) = (BTreeSet::new(), Vec::new());
        for account in accounts {
            match account.trim().split_once('/') {
                Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                    trusted.insert((namespace.into(), name.into()));
                }
                _ => wrong.push(account.clone()),
            }
        }
        let authorizer = Self {
            trusted: Arc::new(trusted),
            domains,
            mesh,
        };
        (authorizer, wrong)
    }

    /// Whether the caller may have a certificate of `identity`.
    pub fn authorize(&self, caller: &Caller, identity: &str) -> Result<(), ImpersonationError> {
        if self.trusted.is_empty() {
            return Err(ImpersonationError::Disabled);
        }
        let info = caller.kubernetes.as_ref().ok_or(ImpersonationError::NoToken)?;
        let account = (info.namespace.clone(), info.service_account.clone());
        if !self.trusted.contains(&account) {
            return Err(ImpersonationError::Account(account.0, account.1));
        }
        let id: SpiffeId = identity.parse()?;
        if !self.domains.borrow().contains(&id.trust_domain) {
            return Err(ImpersonationError::TrustDomain(id.trust_domain));
        }
        let mesh = self.mesh.borrow().clone();
        shares_node(&mesh, info, &id)
    }
}

/// Whether something of the identity runs where the caller does.
fn shares_node(mesh: &MeshSnapshot, caller: &KubernetesInfo, id: &SpiffeId) -> Result<(), ImpersonationError> {
    let cx = Cx::untracked();
    let (namespace, account) = (caller.namespace.clone(), caller.service_account.clone());
    if caller.pod_name.is_empty() || caller.pod_uid.is_empty() {
        return Err(ImpersonationError::Unbound(namespace, account));
    }
    let key = ObjectKey::new(&caller.cluster, namespace, caller.pod_name.clone());
    let Some(pod) = mesh.pods.get(&cx, &key) else {
        return Err(ImpersonationError::Pod(key, caller.cluster.clone()));
    };
    let pairs = [
        ("uid", &pod.uid, &caller.pod_uid),
        ("service account", &pod.service_account, &account),
    ];
    if let Some((field, ours, theirs)) = pairs.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        return Err(ImpersonationError::PodMismatch {
            pod: key.into(),
            field,
            ours: ours.clone(),
            theirs: theirs.clone(),
        });
    }
    let place = (
        caller.cluster.clone(),
        pod.node_name.clone(),
        id.namespace.clone(),
        id.service_account.clone(),
    );
    if !pod.node_name.is_empty() && mesh.pods_by_place.contains(&cx, &place) {
        Ok(())
    } else {
        Err(ImpersonationError::NotOnNode(place.2, place.3, place.1))
    }
}

#[cfg(test)]
mod tests;
