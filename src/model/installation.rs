//! Settings that are fixed while the process runs: identity, features and environment. An input of every pure function.

use std::{collections::BTreeMap, fmt};

use smol_str::SmolStr;

use super::features::Features;
use crate::base::{ClusterId, Namespace, ObjectKey};

/// The identity of this control plane, its feature variables and its environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Installation {
    /// `--clusterID`: the config cluster.
    pub cluster: ClusterId,
    /// `--domain`: DNS suffix of Kubernetes services.
    pub domain: SmolStr,
    /// `POD_NAMESPACE`: where the control plane runs.
    pub namespace: Namespace,
    /// `REVISION`; empty for a control plane of all revisions.
    pub revision: SmolStr,
    /// True if API servers review access to Secrets. False if a folder is the only source: then a proxy with an
    /// identity may read the Secrets of its namespace.
    pub reviews_access: bool,
    /// True if a source resolves host names of network gateways. Then a host without an answer has one soon.
    pub resolves_hosts: bool,
    /// The clusters of registries besides Kubernetes, in the order of `--registries`. Their ServiceEntries count too.
    pub registries: Vec<ClusterId>,
    /// Feature variables.
    pub features: Features,
    /// The environment of the process, for settings that refer to variables.
    pub variables: ProcessVariables,
}

/// Environment variables of the process. Values may be secrets, so debug output omits them.
#[derive(Clone, Default, PartialEq)]
pub struct ProcessVariables(BTreeMap<String, String>);

impl ProcessVariables {
    /// Returns the value of a variable; empty if it is not set.
    pub fn value(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

impl From<BTreeMap<String, String>> for ProcessVariables {
    fn from(variables: BTreeMap<String, String>) -> Self {
        Self(variables)
    }
}

impl fmt::Debug for ProcessVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessVariables").finish_non_exhaustive()
    }
}

impl Default for Installation {
    fn default() -> Self {
        Self {
            cluster: ClusterId::new_static("Kubernetes"),
            domain: SmolStr::new_static("cluster.local"),
            namespace: Namespace::new_static("istio-system"),
            revision: SmolStr::new_static("default"),
            reviews_access: false,
            resolves_hosts: false,
            registries: Vec::new(),
            features: Features::default(),
            variables: ProcessVariables::default(),
        }
    }
}

impl Installation {
    /// Returns the rank of the cluster of ServiceEntries: that of the config cluster precedes those of registries.
    /// `None` if ServiceEntries of the cluster do not count.
    ///
    /// Parity (pilot/pkg/serviceregistry/aggregate/controller.go): ServiceEntries first, then the order of the flag.
    pub fn entry_rank(&self, cluster: &ClusterId) -> Option<usize> {
        if *cluster == self.cluster {
            return Some(0);
        }
        let position = self.registries.iter().position(|registry| registry == cluster)?;
        Some(position + 1)
    }

    /// Returns true if objects of the cluster belong to the ambient mesh: those of the config cluster, and with several
    /// networks those of all clusters.
    pub fn is_ambient(&self, cluster: &ClusterId) -> bool {
        let features = &self.features;
        features.pilot_enable_ambient && (features.ambient_enable_multi_network || *cluster == self.cluster)
    }

    /// Returns the key of the only mesh config and the only networks.
    pub fn mesh_config_key(&self) -> ObjectKey {
        ObjectKey::new(&self.cluster, self.namespace.clone(), "istio")
    }
}
