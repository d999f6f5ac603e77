//! Impersonation by node proxies (ztunnel): they may request certificates of workloads on their own node.
//!
//! Same rule as Kubernetes' node authorizer for kubelets: a compromised node can obtain the identities of its own pods,
//! but no others.
//!
//! Parity (security/pkg/server/ca/node_auth.go); unlike Istio, the trust domain of the identity is checked too.

use std::{collections::BTreeSet, sync::Arc};

use smol_str::SmolStr;
use tokio::sync::watch;

use crate::{
    api::kube::pod::NodeAccount,
    auth::{Caller, KubernetesInfo, TrustDomains},
    base::{ClusterId, Namespace, ObjectKey, SpiffeId, spiffe},
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Authorizes node proxies to request certificates of other workloads.
#[doc(alias = "MulticlusterNodeAuthorizor")]
#[derive(Clone)]
pub struct NodeAuthorizer {
    trusted: Arc<BTreeSet<(Namespace, SmolStr)>>,
    domains: watch::Receiver<Arc<TrustDomains>>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

/// The reason why impersonation is denied. Logged, but never sent to the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImpersonationError {
    /// No trusted account is configured.
    #[error("impersonation is disabled; hint: set CA_TRUSTED_NODE_ACCOUNTS")]
    Disabled,
    /// The caller did not authenticate with a Kubernetes token.
    #[error("impersonation requires a Kubernetes token")]
    NoToken,
    /// The service account is not trusted.
    #[error("service account {0}/{1} is not in CA_TRUSTED_NODE_ACCOUNTS")]
    Account(Namespace, SmolStr),
    /// The requested identity is not a SPIFFE id.
    #[error(transparent)]
    Identity(#[from] spiffe::SpiffeError),
    /// The identity belongs to another trust domain.
    #[error("trust domain {0} is not one of this mesh")]
    TrustDomain(SmolStr),
    /// The token is not bound to a pod.
    #[error("the token of {0}/{1} is not bound to a pod")]
    Unbound(Namespace, SmolStr),
    /// The caller's pod is unknown; it may be too new, or deleted.
    #[error("unknown pod {0} in cluster {1}")]
    Pod(ObjectKey, ClusterId),
    /// A pod of this name exists, but it is not the caller's.
    #[error("pod {pod} is not the caller's: it has {field} {ours:?}, the token {theirs:?}")]
    PodMismatch {
        /// The pod.
        pod: Box<ObjectKey>,
        /// The field that differs.
        field: &'static str,
        /// The value of the known pod.
        ours: SmolStr,
        /// The value in the token.
        theirs: SmolStr,
    },
    /// No workload with the identity runs on the caller's node.
    #[error("no pod of {0}/{1} is on node {2:?}")]
    NotOnNode(Namespace, SmolStr, SmolStr),
}

impl NodeAuthorizer {
    /// Trusts these accounts (`CA_TRUSTED_NODE_ACCOUNTS`, `namespace/name`). Also returns the malformed entries.
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

    /// Checks that the caller may obtain a certificate of `identity`.
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

/// Checks that the caller is the pod its token is bound to, and that a workload with the identity runs on its node.
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
    let wanted = NodeAccount {
        cluster: caller.cluster.clone(),
        node: pod.node_name.clone(),
        namespace: id.namespace.clone(),
        service_account: id.service_account.clone(),
    };
    if !pod.node_name.is_empty() && mesh.pods_by_node_account.contains(&cx, &wanted) {
        Ok(())
    } else {
        let NodeAccount {
            namespace,
            service_account,
            node,
            ..
        } = wanted;
        Err(ImpersonationError::NotOnNode(namespace, service_account, node))
    }
}

#[cfg(test)]
mod tests;
