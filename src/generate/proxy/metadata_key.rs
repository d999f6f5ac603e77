//! Node metadata that generation reads by key.
//!
//! Generators have no other access to metadata, so every value that they read is part of a resource's key.

use std::collections::BTreeMap;

use serde_json::Value;
use smol_str::SmolStr;

use super::scalar_text;

macro_rules! metadata_keys {
    ($($(#[$doc:meta])* $key:ident = $name:literal;)*) => {
        /// A key of node metadata that generation reads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum MetadataKey {
            $($(#[$doc])* $key,)*
        }

        impl MetadataKey {
            const ALL: &[Self] = &[$(Self::$key,)*];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$key => $name,)*
                }
            }
        }
    };
}

metadata_keys! {
    /// The names of the workload's containers.
    AppContainers = "APP_CONTAINERS";
    /// An SDS provider listens next to the proxy.
    Credential = "credential";
    /// The proxy never sends HBONE.
    DisableHboneSend = "DISABLE_HBONE_SEND";
    /// The proxy captures DNS and answers with auto-allocated addresses for services without an address.
    DnsAutoAllocate = "DNS_AUTO_ALLOCATE";
    /// The proxy captures DNS.
    DnsCapture = "DNS_CAPTURE";
    /// The proxy accepts HBONE.
    EnableHbone = "ENABLE_HBONE";
    /// The port of Envoy's own metrics.
    EnvoyPrometheusPort = "ENVOY_PROMETHEUS_PORT";
    /// The port of Envoy's own status.
    EnvoyStatusPort = "ENVOY_STATUS_PORT";
    /// Another server than the agent serves secrets from files.
    FileCredential = "file-credential";
    /// HTTP/1.0 is accepted.
    Http10 = "HTTP10";
    /// The port of the HTTP proxy.
    HttpProxyPort = "HTTP_PROXY_PORT";
    /// The idle timeout of connections.
    IdleTimeout = "IDLE_TIMEOUT";
    /// Inbound connections are balanced exactly over worker threads.
    InboundExactBalance = "INBOUND_LISTENER_EXACT_BALANCE";
    /// The namespace in the metadata, which may differ from that of the node id.
    Namespace = "NAMESPACE";
    /// Outbound connections are balanced exactly over worker threads.
    OutboundExactBalance = "OUTBOUND_LISTENER_EXACT_BALANCE";
    /// The file of the client certificate chain.
    TlsClientCertChain = "TLS_CLIENT_CERT_CHAIN";
    /// The file of the client certificate's key.
    TlsClientKey = "TLS_CLIENT_KEY";
    /// The file of the CA certificates for servers.
    TlsClientRootCert = "TLS_CLIENT_ROOT_CERT";
    /// The file of the server certificate chain.
    TlsServerCertChain = "TLS_SERVER_CERT_CHAIN";
    /// The file of the server certificate's key.
    TlsServerKey = "TLS_SERVER_KEY";
    /// The file of the CA certificates for clients.
    TlsServerRootCert = "TLS_SERVER_ROOT_CERT";
    /// The proxy cannot bind ports below 1024.
    UnprivilegedPod = "UNPRIVILEGED_POD";
}

/// The values of a node, ordered by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct MetadataValues(Box<[(MetadataKey, SmolStr)]>);

impl MetadataValues {
    pub(super) fn of(metadata: &BTreeMap<String, Value>) -> Self {
        let set = |key: &MetadataKey| Some((*key, scalar_text(metadata.get(key.name())?)));
        Self(MetadataKey::ALL.iter().filter_map(set).collect())
    }

    pub(super) fn get(&self, key: MetadataKey) -> SmolStr {
        let found = self.0.iter().find(|(own, _)| *own == key);
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    }
}
