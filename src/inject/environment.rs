//! Everything besides the pod and the injector's configuration that injection depends on.

use std::{collections::BTreeMap, sync::Arc};

use percent_encoding::percent_decode_str;
use prost::{Message, Name};
use prost_reflect::DynamicMessage;

use super::{InjectError, data};
use crate::{
    api::mesh_config,
    base::{ClusterId, Labels, select},
    proto::{
        istio::{
            mesh::v1alpha1::{MeshConfig, ProxyConfig},
            networking::v1beta1::ProxyConfig as ProxyConfigResource,
        },
        message_descriptor,
    },
    template::{Host, NoHost, Value},
};

/// The mesh config, prepared for templates. It is created once for each mesh config.
pub struct Mesh {
    pub(super) config: MeshConfig,
    pub(super) default_config: ProxyConfig,
    /// The mesh config as templates see it.
    pub(super) template: Value,
    /// The default proxy config as templates see it.
    pub(super) proxy_template: Value,
}

impl Mesh {
    /// Prepares a mesh config.
    pub fn new(config: MeshConfig) -> Self {
        let default_config = config.default_config.clone().unwrap_or_default();
        Self {
            template: data::message(&reflected(&config)),
            proxy_template: data::message(&reflected(&default_config)),
            config,
            default_config,
        }
    }

    /// Returns the mesh config.
    pub fn config(&self) -> &MeshConfig {
        &self.config
    }

    /// Returns the port where the proxy's agent answers probes and serves metrics.
    pub(super) fn status_port(&self) -> i32 {
        self.default_config.status_port
    }
}

impl Default for Mesh {
    fn default() -> Self {
        Self::new(mesh_config::defaults())
    }
}

/// Returns a message with reflection.
pub(super) fn reflected<M: Message + Name>(message: &M) -> DynamicMessage {
    let descriptor = message_descriptor(&M::full_name());
    let descriptor = descriptor.expect("because all generated types are in the pool");
    DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice())
        .expect("because the bytes were just encoded from the same type")
}

/// The namespace of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// Name. It is the namespace of pods that name none.
    pub name: String,
    /// Annotations, which on OpenShift hold the ranges of user ids.
    pub annotations: BTreeMap<String, String>,
}

/// Use of native sidecars (`ENABLE_NATIVE_SIDECARS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeSidecars {
    /// Always.
    Enabled,
    /// Never.
    Disabled,
    /// If the kubelet of the pod's node, or of all nodes, supports them.
    #[default]
    ByNodeVersion,
}

impl NativeSidecars {
    /// Reads the variable `ENABLE_NATIVE_SIDECARS`; `None` for other values than Istio's.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "true" => Some(Self::Enabled),
            "false" => Some(Self::Disabled),
            "" | "auto" => Some(Self::ByNodeVersion),
            _ => None,
        }
    }
}

/// The platform of the cluster (`PLATFORM`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Platform {
    /// OpenShift: user ids come from annotations of the namespace.
    OpenShift,
    /// Any other.
    #[default]
    Other,
}

/// The minor versions of kubelets ([`kubelet_minor`]) by the name of their node.
pub type Kubelets = BTreeMap<String, u32>;

/// Everything besides the pod and the injector's configuration that injection depends on. Clones are cheap.
#[derive(Clone)]
pub struct Environment {
    /// The mesh config.
    pub mesh: Arc<Mesh>,
    /// The revision of this control plane; empty or `default` for the default one.
    pub revision: String,
    /// The namespace of the pod.
    pub namespace: Arc<Namespace>,
    /// The kubelets of the pod's cluster.
    pub kubelets: Arc<Kubelets>,
    /// The kubelets of all known clusters, from which the caller takes those of the pod's cluster.
    pub clusters: Arc<BTreeMap<ClusterId, Arc<Kubelets>>>,
    /// Use of native sidecars.
    pub native_sidecars: NativeSidecars,
    /// The platform.
    pub platform: Platform,
    /// `COMPLIANCE_POLICY`, for the proxy.
    pub compliance_policy: String,
    /// ProxyConfig resources with their namespaces, oldest first.
    pub proxy_configs: Arc<[(String, ProxyConfigResource)]>,
    /// Variables for the proxy from the path of the request ([`proxy_variables`]).
    pub proxy_variables: BTreeMap<String, String>,
    /// Access of templates to the clock, randomness and the environment, and the deadline of the injection.
    pub host: Arc<dyn Host + Send + Sync>,
}

impl Default for Environment {
    fn default() -> Self {
        Self {
            mesh: Arc::default(),
            revision: String::new(),
            namespace: Arc::default(),
            kubelets: Arc::default(),
            clusters: Arc::default(),
            native_sidecars: NativeSidecars::default(),
            platform: Platform::default(),
            compliance_policy: String::new(),
            proxy_configs: Arc::new([]),
            proxy_variables: BTreeMap::new(),
            host: Arc::new(NoHost),
        }
    }
}

/// The first minor version of Kubernetes with stable native sidecars.
const NATIVE_SIDECARS_SINCE: u32 = 33;

impl Environment {
    /// Fails once the deadline has passed. Templates check it themselves; merging of their overlays does not.
    pub(super) fn check_deadline(&self) -> Result<(), InjectError> {
        if self.host.is_expired() {
            return Err(InjectError::Deadline);
        }
        Ok(())
    }

    /// Returns true if proxies are native sidecars, on a node if the pod names one.
    pub(super) fn uses_native_sidecars(&self, node: Option<&str>) -> bool {
        match self.native_sidecars {
            NativeSidecars::Enabled => true,
            NativeSidecars::Disabled => false,
            NativeSidecars::ByNodeVersion => match node.and_then(|node| self.kubelets.get(node)) {
                Some(minor) => *minor >= NATIVE_SIDECARS_SINCE,
                None => self.kubelets.values().all(|minor| *minor >= NATIVE_SIDECARS_SINCE),
            },
        }
    }

    /// Returns the proxy config of a workload by the resources that apply: of the mesh, its namespace, and by labels.
    pub(super) fn resource_proxy_config(&self, namespace: &str, labels: &Labels) -> Option<ProxyConfig> {
        let mut found = self.general_proxy_configs(namespace);
        found.extend(self.selecting_proxy_config(namespace, labels));
        let is_changed = !found.is_empty();
        is_changed.then(|| mesh_config::effective_proxy_config(&self.mesh.default_config, &found))
    }

    /// Returns the resources for all workloads of a namespace: of the mesh, then of the namespace.
    ///
    /// Parity (pilot/pkg/model/proxy_config.go): one with an empty selector applies to no workload.
    pub(super) fn general_proxy_configs(&self, namespace: &str) -> Vec<&ProxyConfigResource> {
        let root = self.mesh.config.root_namespace.as_str();
        let own = (namespace != root).then_some(namespace);
        let is_general = |resource: &ProxyConfigResource| resource.selector.is_none();
        let namespaces = std::iter::once(root).chain(own);
        let found = namespaces.filter_map(|namespace| self.oldest_proxy_config(namespace, is_general));
        found.collect()
    }

    /// Returns the resource of a namespace, which may be the root namespace, that selects a workload.
    pub(super) fn selecting_proxy_config(&self, namespace: &str, labels: &Labels) -> Option<&ProxyConfigResource> {
        self.oldest_proxy_config(namespace, |resource| {
            resource.selector.as_ref().is_some_and(|selector| {
                let pairs = selector.match_labels.iter();
                !selector.match_labels.is_empty()
                    && select::matches(pairs.map(|(key, value)| (key.as_str(), value.as_str())), labels)
            })
        })
    }

    /// Returns the oldest resource of a namespace that fulfils a condition.
    fn oldest_proxy_config(
        &self,
        namespace: &str,
        applies: impl Fn(&ProxyConfigResource) -> bool,
    ) -> Option<&ProxyConfigResource> {
        let mut resources = self.proxy_configs.iter();
        let found = resources.find(|(own, resource)| own == namespace && applies(resource));
        found.map(|(_, resource)| resource)
    }
}

/// Returns the minor version in the version of a kubelet, such as `v1.33.2-gke.100`; 0 if there is none.
///
/// Parity (pkg/kube/inject/webhook.go, DetectNativeSidecar): a node whose version cannot be read, such as a virtual
/// one, counts as too old.
pub fn kubelet_minor(version: &str) -> u32 {
    written_minor(version).unwrap_or_default()
}

fn written_minor(version: &str) -> Option<u32> {
    let (major, rest) = version.trim_start_matches('v').split_once('.')?;
    let end = rest
        .find(|character: char| !character.is_ascii_digit())
        .unwrap_or(rest.len());
    major.parse::<u32>().ok()?;
    rest[..end].parse().ok()
}

/// Returns the variables that the path of a request sets: `/inject/cluster/C/net/N/KEY/VALUE`, or
/// `/inject/:ENV:KEY=VALUE:ENV:…`, whose values may contain slashes.
///
/// Parity (pkg/kube/inject/webhook.go, parseInjectEnvs): a last key without a value and empty keys are ignored. Go's
/// server decodes percent-encoded characters before the path is split.
pub fn proxy_variables(path: &str) -> BTreeMap<String, String> {
    let path = percent_decode_str(path).decode_utf8_lossy();
    let path = path.strip_suffix('/').unwrap_or(&path);
    let mut parts = path.splitn(3, '/');
    let Some(text) = parts.nth(2) else {
        return BTreeMap::new();
    };
    let pairs: Vec<(String, String)> = if let Some(text) = text.strip_prefix(":ENV:") {
        let pairs = text.split(":ENV:").filter_map(|pair| pair.split_once('='));
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    } else {
        let parts: Vec<&str> = text.split('/').collect();
        let pairs = parts.chunks_exact(2);
        pairs
            .map(|pair| (pair[0].to_owned(), pair[1].replace("--slash--", "/")))
            .collect()
    };
    let named = pairs.into_iter().filter(|(key, _)| !key.is_empty());
    named
        .map(|(key, value)| match key.as_str() {
            "cluster" => (CLUSTER_VARIABLE.to_owned(), value),
            "net" => (NETWORK_VARIABLE.to_owned(), value),
            _ => (key.to_uppercase(), value),
        })
        .collect()
}

/// The variable of the proxy that holds its cluster.
pub const CLUSTER_VARIABLE: &str = "ISTIO_META_CLUSTER_ID";

/// The variable of the proxy that holds its network.
pub(super) const NETWORK_VARIABLE: &str = "ISTIO_META_NETWORK";

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(path: &str) -> Vec<(String, String)> {
        proxy_variables(path).into_iter().collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect()
    }

    #[test]
    fn paths_set_variables() {
        assert_eq!(variables("/inject"), []);
        assert_eq!(variables("/inject/"), []);
        assert_eq!(
            variables("/inject/cluster/c1/net/n1/foo/a--slash--b/"),
            pairs(&[
                ("FOO", "a/b"),
                ("ISTIO_META_CLUSTER_ID", "c1"),
                ("ISTIO_META_NETWORK", "n1")
            ])
        );
        assert_eq!(
            variables("/inject/net/n1/cluster"),
            pairs(&[("ISTIO_META_NETWORK", "n1")])
        );
        assert_eq!(
            variables("/inject/:ENV:net=n/1:ENV:A=b=c:ENV:=x:ENV:y"),
            pairs(&[("A", "b=c"), ("ISTIO_META_NETWORK", "n/1")])
        );
        assert_eq!(
            variables("/inject/:ENV:net=n%201:ENV:A=%7B%22b%22%7D"),
            pairs(&[("A", "{\"b\"}"), ("ISTIO_META_NETWORK", "n 1")])
        );
    }

    #[test]
    fn kubelets_decide_about_native_sidecars() {
        assert_eq!(kubelet_minor("v1.33.2-gke.100"), 33);
        assert_eq!(kubelet_minor("1.32+"), 32);
        for version in ["", "latest", "kwok-v0.5.1"] {
            assert_eq!(kubelet_minor(version), 0, "{version}");
        }
        let environment = |kubelets: &[(&str, u32)]| Environment {
            kubelets: Arc::new(
                kubelets
                    .iter()
                    .map(|(name, minor)| ((*name).to_owned(), *minor))
                    .collect(),
            ),
            ..Environment::default()
        };
        assert!(environment(&[]).uses_native_sidecars(None));
        let mixed = environment(&[("old", 32), ("new", 33)]);
        assert!(!mixed.uses_native_sidecars(None));
        assert!(!mixed.uses_native_sidecars(Some("unknown")));
        assert!(mixed.uses_native_sidecars(Some("new")));
        let unreadable = environment(&[("virtual", kubelet_minor("")), ("new", 33)]);
        assert!(!unreadable.uses_native_sidecars(None));
    }
}
