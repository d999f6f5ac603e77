//! `Proxy`: a connected client, parsed once from its node. The node itself is not kept.

mod machine_metadata;
mod metadata_form;
mod metadata_key;
mod node_metadata;
mod node_metadata_pool;
mod raw_metadata;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
};

use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::mesh_config,
    base::{
        ClusterId, Hashed, Labels, MessageKey, Namespace, NetworkId, Shared, SpiffeId,
        cidr::{self, IpMode},
    },
    proto::{envoy::config::core::v3 as core, istio::mesh::v1alpha1::ProxyConfig},
};
pub use machine_metadata::MachineMetadata;
pub use metadata_key::MetadataKey;
use metadata_key::MetadataValues;
pub use node_metadata::NodeMetadata;
pub use node_metadata_pool::NodeMetadataPool;
pub use raw_metadata::RawMetadata;

/// The maximum length of a node id, in bytes. It occurs in logs, statuses and metrics.
const MAX_ID: usize = 1024;
/// The maximum number of labels of a node.
const MAX_LABELS: usize = 1000;
/// The maximum number of addresses of a proxy that count. The registry is asked for each of them.
const MAX_ADDRESSES: usize = 1024;
/// The maximum length of a node's cluster and of each part of its locality, in bytes.
const MAX_TEXT: usize = 1024;
/// The maximum length of the names of a node's extensions and of their types, in bytes: several times that of an Envoy.
const MAX_EXTENSION_BYTES: usize = 256 << 10;
/// The maximum number of values in `PROXY_CONFIG`, at all levels. An empty text is 3 bytes of metadata, by whose size
/// the memory of a node counts, and 24 bytes of a proxy config.
const MAX_PROXY_CONFIG_VALUES: usize = 4096;
/// The maximum number of networks in `REQUESTED_NETWORK_VIEW`, which are short in the same way.
const MAX_NETWORKS: usize = 1024;

/// The maximum length of the reason why a proxy config is invalid, which quotes the node.
const MAX_REASON: usize = 256;

/// The annotation with the service name in traces.
const OTEL_SERVICE_NAME: &str = "resource.opentelemetry.io/service.name";

/// The annotation of waypoints that tell the services behind them who the client is.
const XFCC_CLIENT_IDENTITY: &str = "ambient.istio.io/xfcc-include-client-identity";

/// The type of a proxy.
#[doc(alias = "NodeType")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProxyType {
    /// A sidecar.
    Sidecar,
    /// A gateway.
    Router,
    /// A waypoint.
    Waypoint,
    /// A ztunnel.
    Ztunnel,
    /// An agentgateway.
    Agentgateway,
}

impl ProxyType {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "sidecar" => Some(Self::Sidecar),
            "router" => Some(Self::Router),
            "waypoint" => Some(Self::Waypoint),
            "ztunnel" => Some(Self::Ztunnel),
            "agentgateway" => Some(Self::Agentgateway),
            _ => None,
        }
    }
}

/// The way in which a sidecar receives traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum InterceptionMode {
    /// iptables REDIRECT.
    #[default]
    Redirect,
    /// iptables TPROXY.
    Tproxy,
    /// No interception: listeners bind their ports.
    None,
}

impl InterceptionMode {
    /// Parses `INTERCEPTION_MODE`; unknown modes are the default.
    fn parse(text: &str) -> Self {
        match text {
            "TPROXY" => Self::Tproxy,
            "NONE" => Self::None,
            _ => Self::Redirect,
        }
    }
}

/// The extensions of a proxy. An Envoy that lists its extensions may be an upstream build without Istio's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Extensions {
    /// The names in the node, and the types of their configurations. `None` if the node lists none: the proxy then
    /// counts as istio-proxy, which has all extensions.
    pub listed: Option<Hashed<BTreeSet<SmolStr>>>,
}

impl Extensions {
    /// Returns true if the proxy has the extension of this name (`istio.stats`, `envoy.filters.http.wasm`).
    pub fn has(&self, name: &str) -> bool {
        self.listed.as_ref().is_none_or(|listed| listed.contains(name))
    }
}

/// The release of istio-proxy. Unparsable or absent versions count as the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IstioVersion {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

impl IstioVersion {
    /// A version newer than every release.
    pub const MAX: Self = Self {
        major: 65535,
        minor: 65535,
        patch: 65535,
    };

    /// Parses `1.30.3`, `release-1.30-…`, `1.30-alpha.xyz`.
    ///
    /// Parity (pilot/pkg/model/context.go, `ParseIstioVersion`): what follows the numbers does not matter, and a major
    /// number with a zero is unparsable.
    pub fn parse(text: &str) -> Self {
        let text = text.strip_prefix("release-").unwrap_or(text);
        Self::leading(text).unwrap_or(Self::MAX)
    }

    /// Parses the version at the beginning of a text.
    fn leading(text: &str) -> Option<Self> {
        let (major, rest) = leading_number(text, '1'..='9')?;
        let (minor, rest) = leading_number(rest.strip_prefix('.')?, '0'..='9')?;
        let patch = rest.strip_prefix('.').and_then(|rest| leading_number(rest, '0'..='9'));
        Some(Self {
            major,
            minor,
            patch: patch.map_or(Self::MAX.patch, |(patch, _)| patch),
        })
    }

    /// Returns true for this minor release and later ones.
    pub fn at_least(self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }
}

/// Splits the number of these digits off the beginning of a text.
fn leading_number(text: &str, digits: RangeInclusive<char>) -> Option<(u32, &str)> {
    let end = text
        .find(|character: char| !digits.contains(&character))
        .unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    // A number that cannot be parsed is too large.
    (!number.is_empty()).then(|| (number.parse().unwrap_or(u32::MAX), rest))
}

/// The verified identity of a client, from its certificate or token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The namespace.
    pub namespace: Namespace,
    /// The service account.
    pub service_account: SmolStr,
}

impl Identity {
    /// Parses `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub fn from_spiffe(id: &str) -> Option<Self> {
        id.parse::<SpiffeId>().ok().map(Self::from)
    }
}

impl From<SpiffeId> for Identity {
    fn from(id: SpiffeId) -> Self {
        Self {
            namespace: id.namespace,
            service_account: id.service_account,
        }
    }
}

/// A client of the control plane.
#[derive(Clone, Debug, PartialEq)]
pub struct Proxy {
    /// The node metadata that generation reads and that replicas have in common.
    pub node: Hashed<NodeMetadata>,
    /// The third part of the node id, usually `pod.namespace`.
    pub id: SmolStr,
    /// The whole node id.
    pub node_id: SmolStr,
    /// Its addresses, the main one first; never empty.
    pub addresses: Vec<SmolStr>,
    /// `LABELS`. Selection prefers the pod labels of the registry.
    pub node_labels: Hashed<Labels>,
    /// `STATIC_LABELS`.
    pub static_labels: Hashed<Labels>,
    /// `node.locality` as `region/zone/subzone`.
    pub node_locality: SmolStr,
    /// `SERVICE_ACCOUNT`.
    pub service_account: SmolStr,
    /// `NODE_NAME`.
    pub node_name: SmolStr,
    /// The verified identity; `None` on plaintext streams. Secrets require an identity.
    pub identity: Option<Identity>,
    /// The metadata of a virtual machine.
    pub machine: Option<Box<MachineMetadata>>,
    /// All node metadata.
    pub metadata: RawMetadata,
}

/// The reason for which a node is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// No node, or no id.
    #[error("missing node information")]
    Missing,
    /// The id lacks one of four parts or has an unknown type.
    #[error(
        "invalid node id {0:?}, want <type>~<ip>~<id>~<domain> with type sidecar, router, waypoint, ztunnel or agentgateway"
    )]
    Id(String),
    /// A value of the metadata has the wrong type.
    #[error("invalid node metadata: {key} has the wrong type, want {want}")]
    Metadata {
        /// Its key.
        key: &'static str,
        /// The type that it must have.
        want: &'static str,
    },
    /// `PROXY_CONFIG` is not a proxy config.
    #[error("invalid node metadata: PROXY_CONFIG: {0}")]
    ProxyConfig(String),
    /// `PROXY_CONFIG` has too many values.
    #[error("invalid node metadata: PROXY_CONFIG has more than {MAX_PROXY_CONFIG_VALUES} values")]
    ProxyConfigValues,
    /// Too many networks are requested.
    #[error("invalid node metadata: REQUESTED_NETWORK_VIEW has more than {MAX_NETWORKS} networks")]
    Networks,
    /// No valid address.
    #[error("no valid IP address in node id {0:?} or INSTANCE_IPS")]
    Address(String),
    /// The id is too long.
    #[error("the node id has {0} bytes; at most {MAX_ID} are accepted")]
    LongId(usize),
    /// Too many labels.
    #[error("invalid node metadata: {0} has more than {MAX_LABELS} labels")]
    Labels(&'static str),
    /// The cluster or the locality is too long.
    #[error("the {0} of the node has more than {MAX_TEXT} bytes")]
    LongText(&'static str),
    /// The extensions are too long.
    #[error("the extensions of the node have names of more than {MAX_EXTENSION_BYTES} bytes")]
    Extensions,
}

impl Proxy {
    /// Parses a node.
    pub fn from_node(node: &core::Node) -> Result<Self, NodeError> {
        let metadata = node.metadata.as_ref().map(|metadata| {
            metadata
                .fields
                .iter()
                .map(|(key, value)| (key.clone(), json_of(value)))
                .collect()
        });
        let metadata: BTreeMap<String, Value> = metadata.unwrap_or_default();
        if let Some((key, want)) = metadata_form::mismatch(&metadata) {
            return Err(NodeError::Metadata { key, want });
        }
        check_texts(node)?;
        let extensions = (!node.extensions.is_empty()).then(|| {
            Hashed::new(
                node.extensions
                    .iter()
                    .filter(|extension| !extension.disabled)
                    .flat_map(|extension| std::iter::once(&extension.name).chain(&extension.type_urls))
                    .map(SmolStr::new)
                    .collect(),
            )
        });
        let locality = node
            .locality
            .as_ref()
            .map(|locality| locality_text(&locality.region, &locality.zone, &locality.sub_zone))
            .unwrap_or_default();
        Self::new(
            &node.id,
            &node.cluster,
            metadata,
            locality,
            Extensions { listed: extensions },
        )
    }

    /// Creates a proxy from the parts of a node; `metadata` is the node metadata as JSON.
    pub fn new(
        node_id: &str,
        node_cluster: &str,
        metadata: BTreeMap<String, Value>,
        node_locality: SmolStr,
        extensions: Extensions,
    ) -> Result<Self, NodeError> {
        if node_id.is_empty() {
            return Err(NodeError::Missing);
        }
        if node_id.len() > MAX_ID {
            return Err(NodeError::LongId(node_id.len()));
        }
        let parts: Vec<&str> = node_id.split('~').collect();
        let &[kind, ip, id, domain] = parts.as_slice() else {
            return Err(NodeError::Id(node_id.into()));
        };
        let proxy_type = ProxyType::parse(kind).ok_or_else(|| NodeError::Id(node_id.into()))?;
        let text = |key: &str| metadata.get(key).map(scalar_text).unwrap_or_default();
        let instance_ips = text("INSTANCE_IPS");
        let addresses = addresses(&instance_ips, ip).ok_or_else(|| NodeError::Address(node_id.into()))?;
        let namespace = match text("NAMESPACE") {
            namespace if !namespace.is_empty() => Namespace::from(namespace),
            _ => domain
                .split_once('.')
                .map(|(first, _)| Namespace::new(first))
                .unwrap_or_default(),
        };
        let version_text = text("ISTIO_VERSION");
        let annotations = label_map(metadata.get("ANNOTATIONS"));
        let node = NodeMetadata {
            proxy_type,
            node_cluster: node_cluster.into(),
            dns_domain: domain.into(),
            namespace,
            cluster: ClusterId::from(text("CLUSTER_ID")),
            network: NetworkId::from(text("NETWORK")),
            ip_mode: IpMode::of(addresses.iter().map(SmolStr::as_str)),
            mesh_id: text("MESH_ID"),
            workload_name: text("WORKLOAD_NAME"),
            forwards_client_identity: annotations
                .get(XFCC_CLIENT_IDENTITY)
                .is_some_and(|value| value.eq_ignore_ascii_case("true")),
            otel_service_name: annotations.get(OTEL_SERVICE_NAME).cloned().unwrap_or_default(),
            generator: text("GENERATOR"),
            version: IstioVersion::parse(&version_text),
            version_text,
            interception_mode: InterceptionMode::parse(&text("INTERCEPTION_MODE")),
            network_view: Shared::new(network_view(&text("REQUESTED_NETWORK_VIEW"))?),
            proxy_config: proxy_config(&metadata)?,
            extensions,
            values: MetadataValues::of(&metadata),
        };
        Ok(Self {
            node: Hashed::new(node),
            id: id.into(),
            node_id: node_id.into(),
            addresses,
            node_labels: labels(&metadata, "LABELS")?,
            static_labels: labels(&metadata, "STATIC_LABELS")?,
            node_locality,
            service_account: text("SERVICE_ACCOUNT"),
            node_name: text("NODE_NAME"),
            identity: None,
            machine: MachineMetadata::of(&metadata).map(Box::new),
            metadata: RawMetadata::new(&metadata),
        })
    }

    /// Changes the cluster of the proxy, which has reported an alias.
    pub fn set_cluster(&mut self, cluster: ClusterId) {
        self.node = Hashed::new(NodeMetadata {
            cluster,
            ..(*self.node).clone()
        });
    }

    /// Returns the labels of the node: `LABELS` over `STATIC_LABELS`.
    pub fn labels(&self) -> Labels {
        let mut labels = Labels::clone(&self.static_labels);
        labels.extend(Labels::clone(&self.node_labels));
        labels
    }
}

/// Checks the texts that are kept beside the metadata, whose size counts as memory of subscriptions.
fn check_texts(node: &core::Node) -> Result<(), NodeError> {
    if node.cluster.len() > MAX_TEXT {
        return Err(NodeError::LongText("cluster"));
    }
    let parts = node
        .locality
        .iter()
        .flat_map(|locality| [&locality.region, &locality.zone, &locality.sub_zone]);
    if parts.map(String::len).any(|length| length > MAX_TEXT) {
        return Err(NodeError::LongText("locality"));
    }
    let extensions = node.extensions.iter();
    let names = extensions.flat_map(|extension| std::iter::once(&extension.name).chain(&extension.type_urls));
    if names.map(String::len).sum::<usize>() > MAX_EXTENSION_BYTES {
        return Err(NodeError::Extensions);
    }
    Ok(())
}

fn is_on(text: &str) -> bool {
    matches!(text.to_ascii_lowercase().as_str(), "true" | "1" | "t")
}

/// Joins `region/zone/subzone` without trailing empty parts.
pub fn locality_text(region: &str, zone: &str, subzone: &str) -> SmolStr {
    let text = format!("{region}/{zone}/{subzone}");
    SmolStr::new(text.trim_end_matches('/'))
}

/// Returns the networks of a list separated by commas; empty for all.
fn network_view(list: &str) -> Result<BTreeSet<NetworkId>, NodeError> {
    if list.is_empty() {
        return Ok(BTreeSet::new());
    }
    if list.split(',').count() > MAX_NETWORKS {
        return Err(NodeError::Networks);
    }
    Ok(list.split(',').map(|network| NetworkId::new(network.trim())).collect())
}

/// Returns the addresses of a proxy: those of `INSTANCE_IPS` if all are valid, each once, or else that of its id;
/// `None` if neither is.
fn addresses(instance_ips: &str, ip: &str) -> Option<Vec<SmolStr>> {
    let valid = |text: &str| cidr::parse_ip(text).is_some_and(|ip: IpAddr| !ip.is_multicast());
    let listed = instance_ips.split(',').map(str::trim);
    let mut listed: Vec<&str> = listed.filter(|text| !text.is_empty()).take(MAX_ADDRESSES).collect();
    if !listed.is_empty() && listed.iter().all(|text| valid(text)) {
        // Whatever is found at an address would be found again.
        let mut known = BTreeSet::new();
        listed.retain(|text| known.insert(*text));
        return Some(listed.into_iter().map(SmolStr::new).collect());
    }
    valid(ip).then(|| vec![SmolStr::new(ip)])
}

/// Returns `PROXY_CONFIG`. A text, which only a caller of [`Proxy::new`] can pass, counts as absent if it is invalid.
///
/// Parity (pkg/model/proxy.go, `NodeMetaProxyConfig`): an invalid object refuses the node, and null counts as absent.
fn proxy_config(metadata: &BTreeMap<String, Value>) -> Result<Option<MessageKey<ProxyConfig>>, NodeError> {
    let Some(value) = metadata.get("PROXY_CONFIG").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let parsed = parsed_json(value);
    if values_within(&parsed) > MAX_PROXY_CONFIG_VALUES {
        return Err(NodeError::ProxyConfigValues);
    }
    match mesh_config::node_proxy_config(&parsed) {
        Ok(config) => Ok(Some(MessageKey::new(config))),
        // Of a field in two spellings, Istio takes one.
        Err(error) if value.is_object() && !error.is_ambiguous => {
            let reason = error.to_string();
            Err(NodeError::ProxyConfig(reason.chars().take(MAX_REASON).collect()))
        }
        Err(_) => Ok(None),
    }
}

/// Returns the number of values in a value, at all levels.
fn values_within(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(|value| 1 + values_within(value)).sum(),
        Value::Object(fields) => fields.values().map(|value| 1 + values_within(value)).sum(),
        _ => 0,
    }
}

/// Returns the labels of a key.
fn labels(metadata: &BTreeMap<String, Value>, key: &'static str) -> Result<Hashed<Labels>, NodeError> {
    let labels = label_map(metadata.get(key));
    if labels.len() > MAX_LABELS {
        return Err(NodeError::Labels(key));
    }
    Ok(Hashed::new(labels))
}

/// Parses labels or annotations, which are a struct or JSON in a string.
fn label_map(value: Option<&Value>) -> Labels {
    let labels = |value: &Value| {
        let map = value.as_object().into_iter().flatten();
        map.map(|(key, value)| (SmolStr::new(key), scalar_text(value)))
            .collect()
    };
    match value {
        Some(Value::String(_)) => value.map(parsed_json).as_ref().map(labels).unwrap_or_default(),
        value => value.map(labels).unwrap_or_default(),
    }
}

fn parsed_json(value: &Value) -> Value {
    match value {
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| value.clone()),
        other => other.clone(),
    }
}

fn scalar_text(value: &Value) -> SmolStr {
    match value {
        Value::String(text) => SmolStr::new(text),
        Value::Null => SmolStr::default(),
        other => SmolStr::from(other.to_string()),
    }
}

fn json_of(value: &prost_types::Value) -> Value {
    use prost_types::value::Kind;
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(flag)) => Value::Bool(*flag),
        Some(Kind::StringValue(text)) => Value::String(text.clone()),
        Some(Kind::ListValue(list)) => Value::Array(list.values.iter().map(json_of).collect()),
        Some(Kind::StructValue(map)) => Value::Object(
            map.fields
                .iter()
                .map(|(key, value)| (key.clone(), json_of(value)))
                .collect(),
        ),
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 9e15 => Value::from(*number as i64),
        Some(Kind::NumberValue(number)) => Value::from(*number),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn proxy(id: &str, metadata: &Value) -> Result<Proxy, NodeError> {
        let id = format!("sidecar~10.0.0.1~{id}~shop.svc.cluster.local");
        let metadata = serde_json::from_value(metadata.clone()).expect("an object");
        Proxy::new(&id, "", metadata, SmolStr::default(), Extensions::default())
    }

    #[test]
    fn versions_are_the_numbers_at_the_beginning() {
        let version = |major, minor, patch| IstioVersion { major, minor, patch };
        for (text, want) in [
            ("1.30.3", version(1, 30, 3)),
            ("1.28.3-dev.4", version(1, 28, 3)),
            ("release-1.29-2026", version(1, 29, 65535)),
            ("1.28alpha", version(1, 28, 65535)),
            ("1.28-2", version(1, 28, 65535)),
            ("1.28.", version(1, 28, 65535)),
            ("1.99999999999", version(1, u32::MAX, 65535)),
            ("10.1", IstioVersion::MAX),
            ("1-28", IstioVersion::MAX),
            ("1", IstioVersion::MAX),
            ("", IstioVersion::MAX),
            ("latest", IstioVersion::MAX),
        ] {
            assert_eq!(IstioVersion::parse(text), want, "{text:?}");
        }
    }

    #[test]
    fn an_invalid_proxy_config_refuses_the_node() {
        let of = |config: &Value| proxy("a.shop", &json!({"PROXY_CONFIG": config}));
        let known = of(&json!({"concurrency": 2, "unknown": [1]})).expect("a node");
        assert!(known.node.proxy_config.is_some());
        let absent = of(&Value::Null).expect("a node");
        assert!(absent.node.proxy_config.is_none());
        let long = "x".repeat(10_000);
        for (config, field) in [
            (json!({"concurrency": "many"}), "concurrency"),
            (json!({"drainDuration": long}), "drainDuration"),
            (json!({"tracing": {"sampling": {}}}), "tracing.sampling"),
        ] {
            let refused = of(&config).expect_err("an invalid proxy config").to_string();
            let start = format!("invalid node metadata: PROXY_CONFIG: {field}: ");
            assert!(refused.starts_with(&start) && refused.len() < 400, "{refused}");
        }
    }

    #[test]
    fn r20_what_a_node_declares_is_bounded() {
        let long = proxy(&"a".repeat(MAX_ID), &json!({}));
        assert!(matches!(long, Err(NodeError::LongId(_))), "{long:?}");
        for key in ["LABELS", "STATIC_LABELS"] {
            let labels = |count: usize| -> Value { (0..count).map(|label| (label.to_string(), json!(""))).collect() };
            assert!(proxy("a.shop", &json!({key: labels(MAX_LABELS)})).is_ok());
            let many = proxy("a.shop", &json!({key: labels(MAX_LABELS + 1)}));
            assert_eq!(many, Err(NodeError::Labels(key)));
        }
        let addresses: Vec<String> = (0..2 * MAX_ADDRESSES)
            .map(|number| format!("10.0.{}.{}", number / 256, number % 256))
            .collect();
        let many = proxy("a.shop", &json!({"INSTANCE_IPS": addresses.join(",")})).expect("a node");
        assert_eq!(many.addresses.len(), MAX_ADDRESSES);
        let repeated = proxy(
            "a.shop",
            &json!({"INSTANCE_IPS": "10.0.0.2,10.0.0.1,10.0.0.2, 10.0.0.1"}),
        );
        assert_eq!(repeated.expect("a node").addresses, ["10.0.0.2", "10.0.0.1"]);
        let viewed = |count: usize| {
            let networks: Vec<String> = (0..count).map(|network| network.to_string()).collect();
            proxy("a.shop", &json!({"REQUESTED_NETWORK_VIEW": networks.join(",")}))
        };
        let most = viewed(MAX_NETWORKS).expect("a node");
        assert_eq!(most.node.network_view.len(), MAX_NETWORKS);
        assert_eq!(viewed(MAX_NETWORKS + 1), Err(NodeError::Networks));
        let configured = |count: usize| {
            let regexes = vec![""; count];
            let config = json!({"proxyStatsMatcher": {"inclusionRegexps": regexes}});
            proxy("a.shop", &json!({"PROXY_CONFIG": config}))
        };
        // The matcher and the list are values, too.
        assert!(configured(MAX_PROXY_CONFIG_VALUES - 2).is_ok());
        let many = configured(MAX_PROXY_CONFIG_VALUES - 1);
        assert_eq!(many, Err(NodeError::ProxyConfigValues));
    }

    #[test]
    fn r20_texts_beside_the_metadata_are_bounded() {
        let checked = |change: fn(&mut core::Node, String), length: usize| {
            let mut node = core::Node {
                id: "sidecar~10.0.0.1~a.shop~shop.svc.cluster.local".to_owned(),
                ..core::Node::default()
            };
            change(&mut node, "x".repeat(length));
            Proxy::from_node(&node).map(drop)
        };
        let cluster = |node: &mut core::Node, text: String| node.cluster = text;
        let locality = |node: &mut core::Node, sub_zone: String| {
            node.locality = Some(core::Locality {
                sub_zone,
                ..core::Locality::default()
            });
        };
        let extensions = |node: &mut core::Node, text: String| {
            let extension = core::Extension {
                type_urls: vec![text],
                ..core::Extension::default()
            };
            node.extensions = vec![extension];
        };
        assert_eq!(checked(cluster, MAX_TEXT), Ok(()));
        assert_eq!(checked(cluster, MAX_TEXT + 1), Err(NodeError::LongText("cluster")));
        assert_eq!(checked(locality, MAX_TEXT), Ok(()));
        assert_eq!(checked(locality, MAX_TEXT + 1), Err(NodeError::LongText("locality")));
        assert_eq!(checked(extensions, MAX_EXTENSION_BYTES), Ok(()));
        assert_eq!(checked(extensions, MAX_EXTENSION_BYTES + 1), Err(NodeError::Extensions));
    }
}
