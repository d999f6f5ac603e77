//! networking.k8s.io/v1 Ingress and IngressClass.

use serde::Deserialize;
use smol_str::SmolStr;

/// An Ingress.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Ingress {
    /// The class.
    pub ingress_class_name: Option<SmolStr>,
    /// The backend of requests that match no rule.
    pub default_backend: Option<IngressBackend>,
    /// The certificates.
    pub tls: Vec<IngressTls>,
    /// The rules.
    pub rules: Vec<IngressRule>,
}

/// The certificate of hosts.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressTls {
    /// The hosts; all if empty.
    pub hosts: Vec<SmolStr>,
    /// The Secret.
    pub secret_name: SmolStr,
}

/// The paths of a host.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressRule {
    /// The host; all hosts if empty.
    pub host: SmolStr,
    /// The paths.
    pub http: Option<IngressHttp>,
}

/// The paths of a host.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressHttp {
    /// The paths.
    pub paths: Vec<IngressPath>,
}

/// A path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IngressPath {
    /// The path; any if empty.
    #[serde(default)]
    pub path: SmolStr,
    /// `Exact`, `Prefix` or `ImplementationSpecific`; `ImplementationSpecific` if absent.
    pub path_type: Option<SmolStr>,
    /// The backend.
    pub backend: IngressBackend,
}

/// A backend. Without a Service it is a resource of another kind.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressBackend {
    /// A Service of the same namespace.
    pub service: Option<IngressService>,
}

/// A Service and a port.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct IngressService {
    /// The name of the Service.
    pub name: SmolStr,
    /// The port.
    #[serde(default)]
    pub port: IngressPort,
}

/// The port of a Service by name or number.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressPort {
    /// The name, or empty.
    pub name: SmolStr,
    /// The number, or 0.
    pub number: u16,
}

/// An IngressClass.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressClass {
    /// The controller of the class's Ingresses.
    pub controller: SmolStr,
}
