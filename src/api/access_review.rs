//! What an API server says of who may read Secrets: no object that anybody writes, but an input like others.

use smol_str::{SmolStr, format_smolstr};

use super::{Kind, meta::Keyed};
use crate::base::{ClusterId, Namespace, ObjectKey};

/// Who reads Secrets: a service account where it runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    /// The cluster whose API server decides.
    pub cluster: ClusterId,
    /// The namespace of the account, and that of the Secrets.
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

/// Whether a service account may read the Secrets of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may.
    Allowed,
    /// It may not, for this reason.
    Denied(SmolStr),
    /// Nobody has said so far, for this reason.
    Unknown(SmolStr),
}

/// The answer for one service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessReview {
    /// Of [`Self::key`].
    pub key: ObjectKey,
    /// The answer.
    pub access: Access,
}

impl AccessReview {
    /// The kind of such rows.
    pub const KIND: Kind = Kind::AccessReview;

    /// The key of a subject. It belongs to the config cluster, so that a cluster that comes back is asked anew and not
    /// forgotten.
    pub fn key(config_cluster: &ClusterId, subject: &Subject) -> ObjectKey {
        // Accounts hold no slash, so no two subjects have one name.
        let name = format_smolstr!("{}/{}", subject.cluster, subject.service_account);
        ObjectKey::new(config_cluster, subject.namespace.clone(), name)
    }
}

impl Keyed for AccessReview {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
