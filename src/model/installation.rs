//! What is fixed while the process lives: who we are and which features are on. An input of every pure function.

use smol_str::SmolStr;

use super::features::Features;
use crate::base::{ClusterId, Namespace, ObjectKey};

/// The identity of this control plane and its feature variables.
#[derive(Clone, Debug, PartialEq)]
pub struct Installation {
    /// `--clusterID`: the config cluster.
    pub cluster: ClusterId,
    /// `--domain`: DNS suffix of Kubernetes services.
    pub domain: SmolStr,
    /// `POD_NAMESPACE`: where the control plane runs.
    pub namespace: Namespace,
    /// `REVISION`.
    pub revision: SmolStr,
    /// API servers are asked who may read Secrets. False where a folder is the only source: there is nobody to ask, and
    /// who has an identity may read those of its namespace.
    pub reviews_access: bool,
    /// `PILOT_*` and the like.
    pub features: Features,
}

impl Default for Installation {
    fn default() -> Self {
        Self {
            cluster: ClusterId::new_static("Kubernetes"),
            domain: SmolStr::new_static("cluster.local"),
            namespace: Namespace::new_static("istio-system"),
            revision: SmolStr::new_static("default"),
            reviews_access: false,
            features: Features::default(),
        }
    }
}

impl Installation {
    /// The key under which the one mesh config and the one set of networks stand.
    pub fn mesh_config_key(&self) -> ObjectKey {
        ObjectKey::new(&self.cluster, self.namespace.clone(), "istio")
    }
}
