//! Messages and their codes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde_json::{Map, Value, json};

use super::object::{Object, Type};
use crate::base::SmolStr;

/// The base of the pages that explain the codes.
///
/// Parity (pkg/url/url.go).
const DOCUMENTATION: &str = "https://istio.io/v1.30/docs/reference/config/analysis";

/// The severity of a message, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The configuration does not work.
    Error,
    /// The configuration likely does not work as meant.
    Warning,
    /// Information.
    Info,
}

impl Level {
    /// All levels.
    pub const ALL: [Self; 3] = [Self::Info, Self::Warning, Self::Error];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "Error",
            Self::Warning => "Warning",
            Self::Info => "Info",
        }
    }

    /// Returns the level with this name, in any case.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|level| level.name().eq_ignore_ascii_case(name))
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// The stable name, such as `IST0101`.
    pub id: &'static str,
    /// The severity.
    pub level: Level,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $id:literal $level:ident;)*) => {
        $($(#[$doc])* pub const $name: Code = Code { id: $id, level: Level::$level };)*

        /// The codes of all analyzers.
        pub const ALL: &[Code] = &[$($name),*];
    };
}

codes! {
    /// A deprecated type, field or provider.
    DEPRECATED = "IST0002" Warning;
    /// A reference to an object or a selector without a match.
    REFERENCE_NOT_FOUND = "IST0101" Error;
    /// A namespace without a label about injection.
    NAMESPACE_NOT_INJECTED = "IST0102" Info;
    /// A pod without a sidecar in a namespace with injection.
    POD_MISSING_PROXY = "IST0103" Warning;
    /// A field that breaks a rule of its kind.
    SCHEMA_ERROR = "IST0106" Error;
    /// An annotation on an object of a kind to which it does not apply.
    MISPLACED_ANNOTATION = "IST0107" Warning;
    /// An unknown annotation of Istio.
    UNKNOWN_ANNOTATION = "IST0108" Warning;
    /// Several VirtualServices of sidecars with one host.
    CONFLICTING_MESH_HOSTS = "IST0109" Error;
    /// Several Sidecars that select one pod.
    CONFLICTING_SIDECARS = "IST0110" Error;
    /// Several Sidecars of a namespace without a selector.
    SEVERAL_DEFAULT_SIDECARS = "IST0111" Error;
    /// A destination without a port whose service has several.
    PORT_REQUIRED = "IST0112" Error;
    /// A Deployment behind one port with different protocols.
    DEPLOYMENT_PROTOCOLS = "IST0116" Warning;
    /// A port of a Service whose protocol is not declared.
    PORT_NAME = "IST0118" Info;
    /// A namespace with contradicting labels about injection.
    SEVERAL_INJECTION_LABELS = "IST0123" Warning;
    /// An invalid value of an annotation.
    INVALID_ANNOTATION = "IST0125" Warning;
    /// A registry in the mesh networks that no remote cluster has.
    UNKNOWN_REGISTRY = "IST0126" Error;
    /// A policy that selects no pod of the mesh.
    NO_MATCHING_WORKLOADS = "IST0127" Warning;
    /// TLS to servers that are not verified.
    NO_SERVER_VERIFICATION = "IST0128" Warning;
    /// TLS to servers that are not verified, on one port.
    NO_SERVER_VERIFICATION_ON_PORT = "IST0129" Warning;
    /// A route of a VirtualService that no request reaches.
    UNREACHABLE_RULE = "IST0130" Warning;
    /// A match of a VirtualService that an earlier one covers.
    INEFFECTIVE_MATCH = "IST0131" Info;
    /// A VirtualService without a host in common with its Gateway.
    HOST_NOT_IN_GATEWAY = "IST0132" Warning;
    /// A field that is likely a mistake.
    SCHEMA_WARNING = "IST0133" Warning;
    /// A TCP port of a ServiceEntry without addresses.
    ADDRESSES_REQUIRED = "IST0134" Warning;
    /// A deprecated annotation.
    DEPRECATED_ANNOTATION = "IST0135" Info;
    /// An annotation of an alpha feature.
    ALPHA_ANNOTATION = "IST0136" Info;
    /// A Deployment behind several ports with one target port.
    DEPLOYMENT_PORTS = "IST0137" Warning;
    /// A certificate that several Gateways use.
    DUPLICATE_CERTIFICATE = "IST0138" Warning;
    /// A webhook that overlaps with another one, or whose service does not exist.
    INVALID_WEBHOOK = "IST0139" Error;
    /// A subset that has no effect on requests through a gateway.
    SUBSET_WITHOUT_EFFECT = "IST0140" Warning;
    /// A container that runs as the user of the sidecar.
    RESERVED_USER = "IST0144" Warning;
    /// Several Gateways with one host on one port of the same pods.
    CONFLICTING_GATEWAYS = "IST0145" Error;
    /// A Deployment with the image `auto` that is not injected.
    AUTO_IMAGE_OF_DEPLOYMENT = "IST0146" Warning;
    /// A pod with the image `auto`, which should have been injected.
    AUTO_IMAGE_OF_POD = "IST0147" Error;
    /// A namespace without a label, which is injected by default.
    INJECTED_BY_DEFAULT = "IST0148" Info;
    /// Routes by JWT claims for pods without a RequestAuthentication.
    CLAIMS_WITHOUT_AUTHENTICATION = "IST0149" Error;
    /// A port of an ExternalName service that is declared as TCP, or not at all.
    EXTERNAL_NAME_PORT = "IST0150" Warning;
    /// A relative patch without a priority.
    RELATIVE_PATCH = "IST0151" Warning;
    /// The operation REPLACE on objects that do not support it.
    WRONG_REPLACE = "IST0152" Error;
    /// The operation ADD on objects that do not support it.
    WRONG_ADD = "IST0153" Error;
    /// The operation REMOVE on objects that do not support it.
    WRONG_REMOVE = "IST0154" Error;
    /// A relative patch without a priority, for a version of the proxy.
    RELATIVE_PATCH_OF_VERSION = "IST0155" Warning;
    /// Access logging of a Telemetry without a provider.
    NO_TELEMETRY_PROVIDER = "IST0157" Warning;
    /// Pods with other proxy images than injection would use.
    PROXY_IMAGE_MISMATCH = "IST0158" Warning;
    /// Several Telemetries that select one pod.
    CONFLICTING_TELEMETRIES = "IST0159" Error;
    /// Several Telemetries of a namespace without a selector.
    SEVERAL_DEFAULT_TELEMETRIES = "IST0160" Error;
    /// A credential of a Gateway that is not a valid certificate.
    INVALID_CREDENTIAL = "IST0161" Error;
    /// A port of a Gateway that the Service of its pods lacks.
    PORT_NOT_ON_SERVICE = "IST0162" Warning;
    /// A webhook without a usable address of an external control plane.
    INVALID_EXTERNAL_ADDRESS = "IST0163" Warning;
    /// A webhook with the IP address of an external control plane.
    EXTERNAL_ADDRESS_IS_IP = "IST0164" Info;
    /// A reference to a Gateway that istiod made from one of the Gateway API.
    INTERNAL_GATEWAY = "IST0165" Warning;
    /// A policy that selects a Gateway of the Gateway API by labels.
    INEFFECTIVE_SELECTOR = "IST0166" Warning;
    /// A Sidecar for workloads in ambient mode.
    INEFFECTIVE_POLICY = "IST0167" Warning;
    /// A service that differs between clusters.
    INCONSISTENT_SERVICE = "IST0170" Warning;
    /// A condition in a status that reports a failure.
    NEGATIVE_CONDITION = "IST0171" Warning;
    /// A subset without pods.
    SUBSET_WITHOUT_PODS = "IST0173" Error;
    /// A DestinationRule for a host without a service.
    UNKNOWN_RULE_HOST = "IST0174" Warning;
    /// Key sets may be fetched from any address.
    UNRESTRICTED_JWKS = "IST0175" Warning;
    /// A definition of a Gateway API kind that is too old.
    OLD_DEFINITION = "IST0176" Warning;
}

/// Codes of Istio that no analyzer reports: internal errors, and checks of installation and upgrade.
const OTHERS: [&str; 8] = [
    "IST0001", "IST0141", "IST0142", "IST0143", "IST0156", "IST0168", "IST0169", "IST0172",
];

/// Returns true for codes of Istio.
pub fn is_known(id: &str) -> bool {
    ALL.iter().any(|code| code.id == id) || OTHERS.contains(&id)
}

/// The object that a message is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// The kind.
    pub kind: &'static str,
    /// The name.
    pub name: SmolStr,
    /// The namespace; empty for cluster-scoped objects and for files that name none.
    pub namespace: SmolStr,
    /// The API group of the kind.
    pub group: &'static str,
}

impl Resource {
    /// The namespace to which messages about it belong: for a namespace, itself.
    pub(super) fn scope(&self) -> &str {
        if self.kind == "Namespace" {
            &self.name
        } else {
            &self.namespace
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{} {}", self.kind, self.name),
            namespace => write!(f, "{} {namespace}/{}", self.kind, self.name),
        }
    }
}

/// A message about an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Message {
    /// The cluster of the object; empty for files.
    pub cluster: SmolStr,
    /// The severity.
    pub level: Level,
    /// The code, such as `IST0101`.
    pub code: &'static str,
    /// The object.
    pub resource: Resource,
    /// Its position `file.yaml:12`; empty for objects of a cluster.
    pub place: SmolStr,
    /// The reason, for people.
    pub text: String,
    /// The codes that an annotation of the object suppresses.
    pub(super) suppressed: SmolStr,
}

impl Message {
    /// Returns the page that explains the code.
    pub fn documentation(&self) -> String {
        format!("{}?ref=istioctl-analyze", self.page())
    }

    fn page(&self) -> String {
        format!("{DOCUMENTATION}/{}/", self.code.to_ascii_lowercase())
    }

    /// Returns the message as an element of `status.validationMessages`, which has no text.
    ///
    /// Parity (pkg/config/analysis/diag/message.go).
    pub fn status_json(&self) -> Value {
        json!({
            "documentationUrl": self.page(),
            "level": self.level.name().to_ascii_uppercase(),
            "type": {"code": self.code},
        })
    }

    /// Returns the message as the JSON of `istioctl analyze`.
    pub fn json(&self) -> Value {
        let mut fields = Map::new();
        let mut set = |name: &str, value: &str| fields.insert(name.to_owned(), value.into());
        set("code", self.code);
        set("documentationUrl", &self.documentation());
        set("level", self.level.name());
        set("message", &self.text);
        set("origin", &self.resource.to_string());
        if !self.place.is_empty() {
            set("reference", &self.place);
        }
        if !self.cluster.is_empty() {
            set("cluster", &self.cluster);
        }
        Value::Object(fields)
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " [{}]", self.code)?;
        if !self.cluster.is_empty() {
            write!(f, " [cluster-{}]", self.cluster)?;
        }
        match self.place.as_str() {
            "" => write!(f, " ({}) {}", self.resource, self.text),
            place => write!(f, " ({} {place}) {}", self.resource, self.text),
        }
    }
}

/// The maximum number of messages with one code about one object. An object may be wrong in tens of thousands of
/// places, and its status has to hold all of them.
const MAX_MESSAGES: usize = 100;
/// The maximum bytes of a text.
const MAX_TEXT: usize = 4096;
/// The maximum number of names in a text.
const MAX_NAMES: usize = 10;

/// The messages of an analysis, each once.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// By cluster, object and code.
    messages: BTreeMap<(SmolStr, Resource, &'static str), BTreeSet<Message>>,
}

impl Report {
    /// Adds a message about an object.
    pub(super) fn add(&mut self, code: Code, object: &Object, text: impl Into<String>) {
        self.push(Message {
            cluster: object.cluster.clone(),
            level: code.level,
            code: code.id,
            resource: Resource {
                kind: object.kind.name(),
                name: object.name.clone(),
                namespace: object.namespace.clone(),
                group: object.kind.group(),
            },
            place: object.place.clone(),
            text: text.into(),
            suppressed: object.annotation("galley.istio.io/analyze-suppress").into(),
        });
    }

    /// Adds a message about the mesh networks, which are no object.
    pub(super) fn add_about(&mut self, code: Code, kind: Type, namespace: &str, name: &str, text: String) {
        self.push(Message {
            cluster: SmolStr::default(),
            level: code.level,
            code: code.id,
            resource: Resource {
                kind: kind.name(),
                name: name.into(),
                namespace: namespace.into(),
                group: kind.group(),
            },
            place: SmolStr::default(),
            text,
            suppressed: SmolStr::default(),
        });
    }

    fn push(&mut self, mut message: Message) {
        if message.text.len() > MAX_TEXT {
            message.text.truncate(message.text.floor_char_boundary(MAX_TEXT));
            message.text.push('…');
        }
        let key = (message.cluster.clone(), message.resource.clone(), message.code);
        let messages = self.messages.entry(key).or_default();
        if messages.len() == MAX_MESSAGES && !messages.contains(&message) {
            message.text = "more messages with this code are omitted".to_owned();
        }
        if messages.len() <= MAX_MESSAGES {
            messages.insert(message);
        }
    }

    /// Returns the messages in the order of cluster, level, code and object.
    pub(super) fn into_messages(self) -> Vec<Message> {
        let mut messages: Vec<Message> = self.messages.into_values().flatten().collect();
        messages.sort();
        messages
    }
}

/// Joins names for a text: the first ones, and the number of the others. All names may belong to one tenant, and each
/// of its mistakes names them.
pub(super) fn listed<T: fmt::Display>(names: impl ExactSizeIterator<Item = T>) -> String {
    let others = names.len().saturating_sub(MAX_NAMES);
    let mut listed: Vec<String> = names.take(MAX_NAMES).map(|name| name.to_string()).collect();
    if others > 0 {
        listed.push(format!("and {others} more"));
    }
    listed.join(", ")
}
