//! The kinds of input objects.

use serde_json::{Value, json};

use super::kinds::with_kinds;
use crate::base::Shared;

/// The API that a kind belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KindClass {
    /// Mesh-wide files, and answers that istiod asks for itself. Not written as manifests.
    Internal,
    /// Kinds built into Kubernetes that describe workloads and services.
    Kubernetes,
    /// Kubernetes Ingress.
    Ingress,
    /// Istio's own API groups.
    Istio,
    /// The Gateway API and its extension for inference.
    GatewayApi,
    /// The Multi-Cluster Services API.
    MultiCluster,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Cluster,
    Namespaced,
}

macro_rules! kind_enum {
    ($($(#[$doc:meta])* $variant:ident: $row:ty {
        table: $table:ident, class: $class:ident, parser: $parser:ident $arguments:tt,
        resource: $group:literal [$($version:literal),+] $plural:literal $scope:ident,
        names: $name:literal $kebab:literal
    })*) => {
        /// The kinds of input objects. The order is that of dumps.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $variant,)*
        }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The kind as in `kind:` of a manifest. Two groups have a `Gateway`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The API group, empty for core.
            pub fn group(self) -> &'static str {
                match self { $(Self::$variant => $group,)* }
            }

            /// The versions that are read, if an API server serves them; the preferred one first.
            pub fn versions(self) -> &'static [&'static str] {
                match self { $(Self::$variant => &[$($version),+],)* }
            }

            /// The kind in kebab case, as in config metadata paths.
            pub fn kebab(self) -> &'static str {
                match self { $(Self::$variant => $kebab,)* }
            }

            /// The name of the resource in paths of the Kubernetes API.
            pub fn plural(self) -> &'static str {
                match self { $(Self::$variant => $plural,)* }
            }

            /// The API that the kind belongs to.
            pub fn class(self) -> KindClass {
                match self { $(Self::$variant => KindClass::$class,)* }
            }

            fn scope(self) -> Scope {
                match self { $(Self::$variant => Scope::$scope,)* }
            }
        }
    };
}

with_kinds!(kind_enum);

/// Short names of kinds, as the definitions of Istio, the Gateway API and Kubernetes have them.
const SHORT_NAMES: &[(&str, &str)] = &[
    ("vs", "virtualservice"),
    ("dr", "destinationrule"),
    ("gw", "gateway"),
    ("gtw", "gateway"),
    ("se", "serviceentry"),
    ("we", "workloadentry"),
    ("wg", "workloadgroup"),
    ("ef", "envoyfilter"),
    ("ap", "authorizationpolicy"),
    ("pa", "peerauthentication"),
    ("ra", "requestauthentication"),
    ("telemetry", "telemetry"),
    ("gc", "gatewayclass"),
    ("refgrant", "referencegrant"),
    ("btlspolicy", "backendtlspolicy"),
    ("ing", "ingress"),
    ("svc", "service"),
    ("ns", "namespace"),
    ("po", "pod"),
    ("no", "node"),
    ("cm", "configmap"),
];

impl Kind {
    /// The version used in config metadata and dumps.
    pub fn version(self) -> &'static str {
        self.versions()[0]
    }

    /// Returns the kinds of objects that this text names, as in `kubectl get`: the kind, the plural or the short name,
    /// in any case, with or without `.group`. Two groups have a `Gateway`, so there may be two.
    pub fn named(text: &str) -> Vec<Self> {
        let text = text.to_ascii_lowercase();
        let (name, group) = text
            .split_once('.')
            .map_or((text.as_str(), None), |(name, group)| (name, Some(group)));
        let name = SHORT_NAMES
            .iter()
            .find(|(short, _)| *short == name)
            .map_or(name, |(_, name)| name);
        let is_named = |kind: &Self| {
            (kind.name().eq_ignore_ascii_case(name) || kind.plural() == name)
                && group.is_none_or(|group| kind.group() == group)
        };
        Self::ALL
            .iter()
            .copied()
            .filter(|kind| kind.is_object() && is_named(kind))
            .collect()
    }

    /// Returns the part of an object's `status` that the model reads: the addresses of ServiceEntries and Gateways and
    /// the health of WorkloadEntries. `None` for other kinds.
    pub(super) fn status_of(self, object: &Value) -> Option<Shared<Value>> {
        let status = &object["status"];
        let read = match self {
            Self::ServiceEntry | Self::WorkloadEntry => status.clone(),
            // Only addresses: conditions change with every attached route.
            Self::KubeGateway if !status["addresses"].is_null() => json!({ "addresses": status["addresses"] }),
            _ => Value::Null,
        };
        (!read.is_null()).then(|| Shared::new(read))
    }

    /// Returns true for kinds that are written as manifests; false for mesh-wide files and for answers that istiod asks
    /// for itself.
    pub fn is_object(self) -> bool {
        self.class() != KindClass::Internal
    }

    /// Returns true if objects of the kind belong to no namespace.
    pub fn is_cluster_scoped(self) -> bool {
        self.scope() == Scope::Cluster
    }

    /// Returns true if a CustomResourceDefinition, which may be missing, defines the kind.
    pub fn is_custom(self) -> bool {
        matches!(
            self.class(),
            KindClass::Istio | KindClass::GatewayApi | KindClass::MultiCluster
        )
    }

    /// Returns true for the kinds of Istio's own API groups.
    pub fn is_istio(self) -> bool {
        self.class() == KindClass::Istio
    }

    /// Returns true for the kinds of the Gateway API.
    pub fn is_gateway_api(self) -> bool {
        self.class() == KindClass::GatewayApi
    }

    /// Returns true if the kind configures traffic; false if it describes workloads and services. Objects of these
    /// kinds count only in the config cluster, except Gateways of the Gateway API, which declare network gateways in
    /// every cluster.
    pub fn is_config(self) -> bool {
        matches!(
            self.class(),
            KindClass::Istio | KindClass::GatewayApi | KindClass::Ingress
        )
    }

    /// Returns true if objects of the kind count in clusters other than the config cluster.
    pub fn counts_in_remote_clusters(self) -> bool {
        self.is_object() && (!self.is_config() || self == Self::KubeGateway)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_named_as_in_kubectl() {
        let named = |text: &str| Kind::named(text);
        assert_eq!(named("vs"), [Kind::VirtualService]);
        assert_eq!(named("VirtualService"), [Kind::VirtualService]);
        assert_eq!(named("destinationrules.networking.istio.io"), [Kind::DestinationRule]);
        assert_eq!(named("gw"), [Kind::Gateway, Kind::KubeGateway]);
        assert_eq!(named("gateway.gateway.networking.k8s.io"), [Kind::KubeGateway]);
        assert_eq!(named("httproute"), [Kind::HttpRoute]);
        assert!(named("meshconfig").is_empty() && named("nothing").is_empty());
    }

    #[test]
    fn class_follows_from_api_group() {
        for kind in Kind::ALL {
            let class = match kind.group() {
                "mesh.istio.io" => KindClass::Internal,
                "networking.k8s.io" => KindClass::Ingress,
                "multicluster.x-k8s.io" => KindClass::MultiCluster,
                group if group.ends_with(".istio.io") => KindClass::Istio,
                "inference.networking.k8s.io" => KindClass::GatewayApi,
                group if group.starts_with("gateway.networking.") => KindClass::GatewayApi,
                _ => KindClass::Kubernetes,
            };
            assert_eq!(kind.class(), class, "{}", kind.name());
        }
    }
}
