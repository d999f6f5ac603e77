//! Kinds to read from a cluster, with their resources.

use std::collections::BTreeSet;

use ::kube::core::ApiResource;

use crate::{
    api::{Kind, hidden_gateway::HiddenGateway, manifest, mesh_config},
    base::{Namespace, SmolStr},
    kube::watch::WatchTarget,
};

/// Excludes Secrets that are many, large and never certificates: Helm releases and service account tokens.
const SECRET_FIELDS: &str = "type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token";

/// Role of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The cluster with the configuration, usually the one that istiod runs in.
    Config,
    /// A cluster with services and workloads only.
    Remote,
}

/// Rules for reading clusters, the same for all clusters and fixed while the process runs.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Namespace of the control plane.
    pub system_namespace: Namespace,
    /// Revision of this control plane.
    pub revision: SmolStr,
    /// `PILOT_IGNORE_RESOURCES`: custom kinds that are not read, as `plural.group` or `*.` and the end of such names.
    pub ignored: Vec<SmolStr>,
    /// `PILOT_INCLUDE_RESOURCES`: exceptions from the ignored kinds.
    pub included: Vec<SmolStr>,
    /// `--appNamespace`, `ISTIO_WATCH_NAMESPACE`: the only namespaces of namespaced objects; empty for all.
    pub watch_namespaces: BTreeSet<SmolStr>,
    /// True if configuration comes from the config cluster, not from a folder.
    pub config_kinds: bool,
    /// `PILOT_ENABLE_GATEWAY_API`.
    pub gateway_api: bool,
    /// `ENABLE_GATEWAY_API_INFERENCE_EXTENSION`.
    pub inference: bool,
    /// `PILOT_MULTI_NETWORK_DISCOVER_GATEWAY_API`.
    pub network_gateways: bool,
    /// `PILOT_ENABLE_AMBIENT`.
    pub ambient: bool,
    /// `MCS_API_GROUP` and `MCS_API_VERSION`, if a feature of MCS is enabled.
    pub mcs: Option<(SmolStr, SmolStr)>,
    /// True if WorkloadEntries of remote clusters are read (`PILOT_ENABLE_K8S_SELECT_WORKLOAD_ENTRIES` and
    /// `PILOT_ENABLE_CROSS_CLUSTER_WORKLOAD_ENTRY`).
    pub remote_workload_entries: bool,
}

impl Rules {
    /// Returns the kinds to read from a cluster.
    pub fn kinds(&self, role: Role) -> BTreeSet<Kind> {
        let all = Kind::ALL.iter().copied();
        all.filter(|kind| self.reads(role, *kind)).collect()
    }

    fn reads(&self, role: Role, kind: Kind) -> bool {
        if kind == Kind::MeshConfig {
            // That of the config cluster has a source of its own.
            return role == Role::Remote;
        }
        let in_role = match role {
            Role::Config => self.config_kinds || !kind.is_config(),
            // CA certificates in ConfigMaps count in the config cluster only.
            Role::Remote if kind == Kind::ConfigMap => false,
            Role::Remote => {
                kind.counts_in_remote_clusters() || kind == Kind::WorkloadEntry && self.remote_workload_entries
            }
        };
        let is_on = match kind {
            Kind::ServiceExport | Kind::ServiceImport => self.mcs.is_some(),
            Kind::InferencePool => self.gateway_api && self.inference,
            // Parity (pilot/pkg/serviceregistry: kube/controller/network.go, ambient/ambientindex.go): gateways of
            // networks, and waypoints, do not depend on the conversion of Gateways.
            Kind::KubeGateway => self.gateway_api || self.network_gateways || self.ambient,
            Kind::GatewayClass => self.gateway_api || self.ambient,
            kind if kind.is_gateway_api() => self.gateway_api,
            _ => true,
        };
        kind.is_object() && in_role && is_on && !self.ignores(kind)
    }

    /// Returns true if a custom kind is ignored.
    ///
    /// Parity (pkg/kube/kclient/crdwatcher.go, `resourceMatchFilters`): patterns match the names of
    /// CustomResourceDefinitions, and `*.` matches any beginning. So `*.istio.io` has all groups of Istio.
    fn ignores(&self, kind: Kind) -> bool {
        if !kind.is_custom() {
            return false;
        }
        let name = format!("{}.{}", kind.plural(), self.group_and_versions(kind).0);
        let names = |patterns: &[SmolStr]| {
            let matches = |pattern: &SmolStr| match pattern.strip_prefix("*.") {
                Some(end) => name.ends_with(end),
                None => *pattern == name,
            };
            patterns.iter().any(matches)
        };
        names(&self.ignored) && !names(&self.included)
    }

    /// Returns the group of a kind and its supported versions, the preferred one first.
    pub fn group_and_versions(&self, kind: Kind) -> (SmolStr, Vec<SmolStr>) {
        match (kind, &self.mcs) {
            (Kind::ServiceExport | Kind::ServiceImport, Some((group, version))) => {
                (group.clone(), vec![version.clone()])
            }
            _ => {
                let versions = kind.versions().iter().map(|version| SmolStr::new_static(version));
                (SmolStr::new_static(kind.group()), versions.collect())
            }
        }
    }

    /// Returns the kind in its preferred version. A mesh config is a ConfigMap.
    pub fn resource(&self, kind: Kind) -> ApiResource {
        if kind == Kind::MeshConfig {
            return resource("ConfigMap", "configmaps", "", "v1");
        }
        let (group, versions) = self.group_and_versions(kind);
        resource(
            kind.name(),
            kind.plural(),
            &group,
            versions.first().map_or("v1", SmolStr::as_str),
        )
    }

    /// Returns the namespaces with a watch each; `None` is one watch for all.
    pub fn namespaces(&self, kind: Kind) -> Vec<Option<SmolStr>> {
        if kind == Kind::MeshConfig {
            return vec![Some(SmolStr::new(self.system_namespace.as_str()))];
        }
        if kind.is_cluster_scoped() || self.watch_namespaces.is_empty() {
            return vec![None];
        }
        self.watch_namespaces.iter().cloned().map(Some).collect()
    }

    /// Returns the watch target of a kind in one of its [`Self::namespaces`]: metadata only for Namespaces, the whole
    /// object for all others, including Nodes, whose addresses are needed.
    pub fn target(&self, kind: Kind, resource: ApiResource, namespace: Option<&SmolStr>) -> WatchTarget {
        let fields = match kind {
            Kind::Secret => Some(SECRET_FIELDS.to_owned()),
            Kind::MeshConfig => Some(format!("metadata.name={}", mesh_config::map_name(&self.revision))),
            _ => None,
        };
        WatchTarget {
            fields,
            namespace: namespace.map(SmolStr::to_string),
            metadata_only: kind == Kind::Namespace,
            // Roles for control planes of other clusters lacked this right once, and may get it at any time.
            may_be_forbidden: kind == Kind::MeshConfig,
            ..WatchTarget::all(resource)
        }
    }
}

/// Returns true if rows of the kind are part of the stored state of a remote cluster.
pub fn is_stored(kind: Kind) -> bool {
    // Gateways in namespaces that are not selected are rows of a kind of their own.
    manifest::KINDS.contains(&kind) || kind == HiddenGateway::KIND
}

/// Returns the resource of a kind.
pub fn resource(kind: &str, plural: &str, group: &str, version: &str) -> ApiResource {
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: if group.is_empty() {
            version.to_owned()
        } else {
            format!("{group}/{version}")
        },
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules {
            config_kinds: true,
            ..Rules::default()
        }
    }

    #[test]
    fn roles_and_features_select_the_kinds() {
        let config = rules().kinds(Role::Config);
        assert!(config.contains(&Kind::VirtualService) && config.contains(&Kind::Ingress));
        assert!(config.contains(&Kind::ConfigMap) && !config.contains(&Kind::HttpRoute));
        assert!(!config.contains(&Kind::ServiceExport) && !config.contains(&Kind::MeshConfig));
        let remote = Rules {
            gateway_api: true,
            mcs: Some(("g.io".into(), "v1".into())),
            remote_workload_entries: true,
            ..rules()
        };
        use Kind::*;
        let want = [
            MeshConfig,
            Namespace,
            Node,
            Pod,
            Service,
            EndpointSlice,
            Secret,
            WorkloadEntry,
            KubeGateway,
            ServiceExport,
            ServiceImport,
        ];
        assert_eq!(remote.kinds(Role::Remote), want.into());
        assert_eq!(remote.resource(ServiceExport).api_version, "g.io/v1");
        let beside_a_folder = Rules::default().kinds(Role::Config);
        let want = [Namespace, Node, Pod, Service, EndpointSlice, Secret, ConfigMap];
        assert_eq!(beside_a_folder, want.into());
        let secrets = remote.target(Secret, remote.resource(Secret), None);
        assert!(secrets.fields.is_some() && !secrets.metadata_only);
    }

    #[test]
    fn one_config_map_of_a_remote_cluster_is_its_mesh_config() {
        let rules = Rules {
            system_namespace: "istio-system".into(),
            revision: "v2".into(),
            watch_namespaces: ["a".into()].into(),
            ..rules()
        };
        assert_eq!(rules.namespaces(Kind::MeshConfig), [Some("istio-system".into())]);
        let resource = rules.resource(Kind::MeshConfig);
        let target = rules.target(Kind::MeshConfig, resource, Some(&"istio-system".into()));
        assert_eq!(target.name(), "configmaps/istio-system?metadata.name=istio-v2");
        assert!(target.may_be_forbidden && !target.metadata_only);
        assert!(!rules.kinds(Role::Config).contains(&Kind::MeshConfig));
    }

    #[test]
    fn each_namespace_has_a_watch_of_its_own() {
        let rules = Rules {
            watch_namespaces: ["b".into(), "a".into()].into(),
            ..rules()
        };
        assert_eq!(rules.namespaces(Kind::Service), [Some("a".into()), Some("b".into())]);
        assert_eq!(rules.namespaces(Kind::Node), [None]);
        assert_eq!(self::rules().namespaces(Kind::Service), [None]);
        let target = rules.target(Kind::Service, rules.resource(Kind::Service), Some(&"a".into()));
        assert_eq!(target.namespace.as_deref(), Some("a"));
    }

    #[test]
    fn included_resources_override_ignored_ones() {
        let rules = Rules {
            ignored: vec![
                "*.networking.istio.io".into(),
                "telemetries.telemetry.istio.io".into(),
                "*.v1".into(),
            ],
            included: vec!["sidecars.networking.istio.io".into()],
            ..rules()
        };
        let kinds = rules.kinds(Role::Config);
        assert!(kinds.contains(&Kind::Sidecar) && kinds.contains(&Kind::Service));
        assert!(!kinds.contains(&Kind::VirtualService) && !kinds.contains(&Kind::Telemetry));
    }

    #[test]
    fn an_ignored_end_of_names_covers_all_groups_below_it() {
        let kinds_without = |ignored: &'static str| {
            let rules = Rules {
                ignored: vec![ignored.into()],
                included: vec!["wasmplugins.extensions.istio.io".into()],
                gateway_api: true,
                mcs: Some(("multicluster.x-k8s.io".into(), "v1alpha1".into())),
                ..rules()
            };
            rules.kinds(Role::Config)
        };
        let kinds = kinds_without("*.istio.io");
        let of_istio: Vec<&Kind> = kinds.iter().filter(|kind| kind.is_istio()).collect();
        assert_eq!(of_istio, [&Kind::WasmPlugin]);
        assert!(kinds.contains(&Kind::HttpRoute) && kinds.contains(&Kind::ServiceExport));
        let kinds = kinds_without("*.networking.k8s.io");
        assert!(!kinds.contains(&Kind::HttpRoute) && kinds.contains(&Kind::VirtualService));
        assert!(kinds.contains(&Kind::Ingress), "it has no CustomResourceDefinition");
        assert!(!kinds_without("*.x-k8s.io").contains(&Kind::ServiceExport));
    }
}
