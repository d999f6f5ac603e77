//! The metadata of nodes that generation reads by name.
//!
//! There is no other way for a generator to a node's metadata, so what is read here is known to be in the key.

use std::collections::BTreeMap;

use serde_json::Value;
use smol_str::SmolStr;

use super::scalar_text;

macro_rules! settings {
    ($($(#[$doc:meta])* $setting:ident = $name:literal;)*) => {
        /// A metadata value that generation knows, by its name in the node.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum MetadataKey {
            $($(#[$doc])* $setting,)*
        }

        impl MetadataKey {
            const ALL: &[Self] = &[$(Self::$setting,)*];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$setting => $name,)*
                }
            }
        }
    };
}

settings! {
    /// The names of the workload's containers.
    AppContainers = "APP_CONTAINERS";
    /// An SDS provider listens beside the proxy.
    Credential = "credential";
    /// It never sends by HBONE.
    DisableHboneSend = "DISABLE_HBONE_SEND";
    /// It answers DNS itself, with addresses of its own for services that have none.
    DnsAutoAllocate = "DNS_AUTO_ALLOCATE";
    /// It answers DNS itself.
    DnsCapture = "DNS_CAPTURE";
    /// It takes HBONE.
    EnableHbone = "ENABLE_HBONE";
    /// The port of Envoy's own metrics.
    EnvoyPrometheusPort = "ENVOY_PROMETHEUS_PORT";
    /// The port of Envoy's own status.
    EnvoyStatusPort = "ENVOY_STATUS_PORT";
    /// Somebody else than its agent serves it secrets from files.
    FileCredential = "file-credential";
    /// HTTP/1.0 is taken.
    Http10 = "HTTP10";
    /// The port of the HTTP proxy.
    HttpProxyPort = "HTTP_PROXY_PORT";
    /// After how long idle connections are closed.
    IdleTimeout = "IDLE_TIMEOUT";
    /// Inbound connections are spread evenly over worker threads.
    InboundExactBalance = "INBOUND_LISTENER_EXACT_BALANCE";
    /// The namespace as the node says it, which need not be that of its id.
    Namespace = "NAMESPACE";
    /// Outbound connections are spread evenly over worker threads.
    OutboundExactBalance = "OUTBOUND_LISTENER_EXACT_BALANCE";
    /// Its certificate as a client: the chain.
    TlsClientCertChain = "TLS_CLIENT_CERT_CHAIN";
    /// Its certificate as a client: the key.
    TlsClientKey = "TLS_CLIENT_KEY";
    /// Its certificate as a client: the authorities.
    TlsClientRootCert = "TLS_CLIENT_ROOT_CERT";
    /// Its certificate as a server: the chain.
    TlsServerCertChain = "TLS_SERVER_CERT_CHAIN";
    /// Its certificate as a server: the key.
    TlsServerKey = "TLS_SERVER_KEY";
    /// Its certificate as a server: the authorities.
    TlsServerRootCert = "TLS_SERVER_ROOT_CERT";
    /// It cannot bind ports below 1024.
    UnprivilegedPod = "UNPRIVILEGED_POD";
}

/// The settings that a node has, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Settings(Box<[(MetadataKey, SmolStr)]>);

impl Settings {
    pub(super) fn of(metadata: &BTreeMap<String, Value>) -> Self {
        let set = |setting: &MetadataKey| Some((*setting, scalar_text(metadata.get(setting.name())?)));
        Self(MetadataKey::ALL.iter().filter_map(set).collect())
    }

    pub(super) fn get(&self, setting: MetadataKey) -> SmolStr {
        let found = self.0.iter().find(|(own, _)| *own == setting);
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    }
}
