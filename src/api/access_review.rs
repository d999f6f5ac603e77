//! The answer of an API server to a SubjectAccessReview for Secrets: an input that is not a manifest.

use smol_str::{SmolStr, format_smolstr};

use super::{Kind, meta::Keyed};
use crate::base::{ClusterId, Namespace, ObjectKey};

/// A service account that asks for Secrets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    /// The cluster of the API server.
    pub cluster: ClusterId,
    /// The namespace of the account and of the Secrets.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            cluster,
            namespace,
            service_account,
        } = self;
        write!(f, "{service_account}.{namespace} of cluster {cluster}")
    }
}

/// The permission of a service account to read the Secrets of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Access is allowed.
    Allowed,
    /// Access is denied, for this reason.
    Denied(SmolStr),
    /// No answer yet, for this reason.
    Unknown(SmolStr),
}

/// The answer for one service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessReview {
    /// The key, see [`Self::key`].
    pub key: ObjectKey,
    /// The answer.
    pub access: Access,
}

impl AccessReview {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::AccessReview;

    /// Returns the key of a subject. Its cluster is the config cluster, so that the answer is kept and asked again when
    /// the subject's cluster returns.
    pub fn key(config_cluster: &ClusterId, subject: &Subject) -> ObjectKey {
        // Service account names contain no slash, so names of subjects are unique.
        let name = format_smolstr!("{}/{}", subject.cluster, subject.service_account);
        ObjectKey::new(config_cluster, subject.namespace.clone(), name)
    }
}

impl Keyed for AccessReview {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
