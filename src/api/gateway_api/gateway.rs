//! Gateway and ListenerSet.

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

use super::common::{ObjectReference, Options, ParentReference};
use crate::base::{Labels, select::LabelSelector};

/// An entry point for traffic: listeners and addresses.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gateway {
    /// The class, which decides the controller.
    pub gateway_class_name: SmolStr,
    /// The listeners.
    #[serde(default)]
    pub listeners: Vec<Listener>,
    /// The addresses, or the Service of the Gateway.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// Metadata for its deployment.
    pub infrastructure: Option<Infrastructure>,
    /// The ListenerSets that may add listeners; none if absent.
    pub allowed_listeners: Option<AllowedListeners>,
    /// TLS settings for all listeners, towards clients and backends.
    pub tls: Option<GatewayTls>,
}

/// Additional listeners of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerSet {
    /// The Gateway.
    pub parent_ref: ParentReference,
    /// The listeners.
    #[serde(default)]
    pub listeners: Vec<Listener>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listener {
    /// The name.
    pub name: SmolStr,
    /// The host; all hosts if absent.
    pub hostname: Option<SmolStr>,
    /// The port.
    pub port: u16,
    /// `HTTP`, `HTTPS`, `TLS`, `TCP`, `UDP`, or an implementation-specific protocol.
    pub protocol: SmolStr,
    /// TLS settings.
    pub tls: Option<ListenerTls>,
    /// The routes that may attach; those of the same namespace if absent.
    pub allowed_routes: Option<AllowedRoutes>,
}

/// TLS settings of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListenerTls {
    /// `Terminate` or `Passthrough`; `Terminate` if absent.
    pub mode: Option<SmolStr>,
    /// The server certificates; references default to Secrets.
    pub certificate_refs: Vec<ObjectReference>,
    /// Implementation-specific options.
    pub options: Options,
}

/// The routes that may attach to a listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedRoutes {
    /// The namespaces of the routes.
    pub namespaces: Option<FromNamespaces>,
    /// The kinds of the routes; those that the protocol allows if empty.
    pub kinds: Vec<RouteKind>,
}

/// A set of namespaces.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FromNamespaces {
    /// `All`, `Same`, `Selector` or `None`; the default depends on the field.
    pub from: Option<SmolStr>,
    /// The selector for `Selector`.
    pub selector: Option<LabelSelector>,
}

/// A kind of routes.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct RouteKind {
    /// The group; that of the Gateway API if absent.
    pub group: Option<SmolStr>,
    /// The kind.
    pub kind: SmolStr,
}

/// An address of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct Address {
    /// `IPAddress`, `Hostname` or `NamedAddress`; API servers default to `IPAddress`.
    #[serde(rename = "type")]
    pub address_type: Option<SmolStr>,
    /// The address.
    #[serde(default)]
    pub value: SmolStr,
}

/// Metadata for the deployment of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Infrastructure {
    /// Labels.
    pub labels: Labels,
    /// Annotations.
    pub annotations: Labels,
    /// Implementation-specific parameters.
    pub parameters_ref: Option<ObjectReference>,
}

/// The ListenerSets that may add listeners.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct AllowedListeners {
    /// The namespaces of the ListenerSets; none if absent.
    pub namespaces: Option<FromNamespaces>,
}

/// TLS settings of a Gateway as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct GatewayTls {
    /// TLS towards backends.
    pub backend: Option<BackendTls>,
    /// TLS towards clients.
    pub frontend: Option<FrontendTls>,
}

/// TLS towards backends.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackendTls {
    /// The client certificate for backends.
    pub client_certificate_ref: Option<ObjectReference>,
}

/// TLS towards clients: the default, and settings of ports.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FrontendTls {
    /// The default.
    pub default: ClientTls,
    /// The settings of ports.
    pub per_port: Vec<PortTls>,
}

/// TLS towards clients on one port.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct PortTls {
    /// The port.
    pub port: u16,
    /// The TLS settings.
    #[serde(default)]
    pub tls: ClientTls,
}

/// TLS towards clients.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ClientTls {
    /// The validation of client certificates; none if absent.
    pub validation: Option<ClientValidation>,
}

/// The validation of client certificates.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientValidation {
    /// The CA certificates.
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// `AllowValidOnly` or `AllowInsecureFallback`; `AllowValidOnly` if absent.
    pub mode: Option<SmolStr>,
}
