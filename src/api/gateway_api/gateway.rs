//! Gateway and ListenerSet.

use serde::Deserialize;
use smol_str::SmolStr;

use super::common::{ObjectReference, Options, ParentReference};
use crate::base::{Labels, select::LabelSelector};

/// A point where traffic enters: listeners and where they are to be reached.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gateway {
    /// The class, which decides who serves it.
    pub gateway_class_name: SmolStr,
    /// The listeners.
    #[serde(default)]
    pub listeners: Vec<Listener>,
    /// Where it is to be reached, or which Service leads to it.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// What its deployment should carry.
    pub infrastructure: Option<Infrastructure>,
    /// Which ListenerSets may add listeners; none when absent.
    pub allowed_listeners: Option<AllowedListeners>,
    /// TLS towards clients and backends, for all listeners.
    pub tls: Option<GatewayTls>,
}

/// Listeners that are added to a Gateway.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerSet {
    /// The Gateway.
    pub parent_ref: ParentReference,
    /// The listeners.
    #[serde(default)]
    pub listeners: Vec<Listener>,
}

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listener {
    /// Its name.
    pub name: SmolStr,
    /// The host that it serves; every host when absent.
    pub hostname: Option<SmolStr>,
    /// The port.
    pub port: u16,
    /// `HTTP`, `HTTPS`, `TLS`, `TCP`, `UDP`, or one of the implementation's.
    pub protocol: SmolStr,
    /// TLS.
    pub tls: Option<ListenerTls>,
    /// Which routes may attach; those of the own namespace when absent.
    pub allowed_routes: Option<AllowedRoutes>,
}

/// TLS of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListenerTls {
    /// `Terminate` or `Passthrough`; `Terminate` when absent.
    pub mode: Option<SmolStr>,
    /// The server's certificates: Secrets when kind and group are absent.
    pub certificate_refs: Vec<ObjectReference>,
    /// Options of the implementation.
    pub options: Options,
}

/// Which routes may attach to a listener.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedRoutes {
    /// From which namespaces.
    pub namespaces: Option<FromNamespaces>,
    /// Of which kinds; those that the protocol allows when empty.
    pub kinds: Vec<RouteKind>,
}

/// A choice of namespaces.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FromNamespaces {
    /// `All`, `Same`, `Selector` or `None`; the default depends on the field.
    pub from: Option<SmolStr>,
    /// For `Selector`.
    pub selector: Option<LabelSelector>,
}

/// A kind of routes.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct RouteKind {
    /// The group, that of the Gateway API when absent.
    pub group: Option<SmolStr>,
    /// The kind.
    pub kind: SmolStr,
}

/// Where a Gateway is to be reached.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct Address {
    /// `IPAddress`, `Hostname` or `NamedAddress`; API servers fill in `IPAddress`.
    #[serde(rename = "type")]
    pub address_type: Option<SmolStr>,
    /// The address.
    #[serde(default)]
    pub value: SmolStr,
}

/// What the deployment of a Gateway should carry.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Infrastructure {
    /// Labels.
    pub labels: Labels,
    /// Annotations.
    pub annotations: Labels,
    /// Parameters.
    pub parameters_ref: Option<ObjectReference>,
}

/// Which ListenerSets may add listeners.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct AllowedListeners {
    /// From which namespaces; none when absent.
    pub namespaces: Option<FromNamespaces>,
}

/// TLS of a Gateway as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GatewayTls {
    /// Towards backends.
    pub backend: Option<BackendTls>,
    /// Towards clients.
    pub frontend: Option<FrontendTls>,
}

/// TLS towards backends.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackendTls {
    /// The certificate that the Gateway shows to backends.
    pub client_certificate_ref: Option<ObjectReference>,
}

/// TLS towards clients: by default, and at single ports.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FrontendTls {
    /// At ports that are not named.
    pub default: ClientTls,
    /// At single ports.
    pub per_port: Vec<PortTls>,
}

/// TLS towards the clients of one port.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct PortTls {
    /// The port.
    pub port: u16,
    /// TLS there.
    #[serde(default)]
    pub tls: ClientTls,
}

/// TLS towards clients.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ClientTls {
    /// How clients' certificates are checked; not at all when absent.
    pub validation: Option<ClientValidation>,
}

/// How clients' certificates are checked.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientValidation {
    /// The authorities.
    pub ca_certificate_refs: Vec<ObjectReference>,
    /// `AllowValidOnly` or `AllowInsecureFallback`; the first when absent.
    pub mode: Option<SmolStr>,
}
