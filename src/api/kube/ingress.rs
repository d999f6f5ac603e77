//! networking.k8s.io/v1 Ingress and IngressClass.

use serde::Deserialize;
use smol_str::SmolStr;

/// An Ingress.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Ingress {
    /// The class.
    pub ingress_class_name: Option<SmolStr>,
    /// Where requests go that no rule matches.
    pub default_backend: Option<IngressBackend>,
    /// The certificates.
    pub tls: Vec<IngressTls>,
    /// The rules.
    pub rules: Vec<IngressRule>,
}

/// The certificate of some hosts.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressTls {
    /// The hosts; all when empty.
    pub hosts: Vec<SmolStr>,
    /// The Secret.
    pub secret_name: SmolStr,
}

/// The paths of one host.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressRule {
    /// The host; every host when empty.
    pub host: SmolStr,
    /// The paths.
    pub http: Option<IngressHttp>,
}

/// The paths of one host.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressHttp {
    /// The paths.
    pub paths: Vec<IngressPath>,
}

/// One path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IngressPath {
    /// The path; any when empty.
    #[serde(default)]
    pub path: SmolStr,
    /// `Exact`, `Prefix` or `ImplementationSpecific`; the last when absent.
    pub path_type: Option<SmolStr>,
    /// Where requests go.
    pub backend: IngressBackend,
}

/// Where requests go. Without a Service it is a resource of some other kind.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressBackend {
    /// A Service of the namespace.
    pub service: Option<IngressService>,
}

/// A Service and its port.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct IngressService {
    /// The Service.
    pub name: SmolStr,
    /// The port.
    #[serde(default)]
    pub port: IngressPort,
}

/// The port of a Service by name or number.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressPort {
    /// The name, else empty.
    pub name: SmolStr,
    /// The number, else 0.
    pub number: u16,
}

/// An IngressClass.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IngressClass {
    /// The controller that serves the Ingresses of the class.
    pub controller: SmolStr,
}
