//! What several kinds of the Gateway API have.

use std::collections::BTreeMap;

use serde::Deserialize;
use smol_str::SmolStr;

/// The group of the Gateway API's main kinds.
pub const GROUP: &str = "gateway.networking.k8s.io";

/// A reference to an object, in the same namespace unless it names one.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ObjectReference {
    /// The group; absent: that of the referring field.
    pub group: Option<SmolStr>,
    /// The kind; absent: that of the referring field.
    pub kind: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The namespace.
    pub namespace: Option<SmolStr>,
}

/// A reference from a policy to what it applies to.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetReference {
    /// The group.
    pub group: SmolStr,
    /// The kind.
    pub kind: SmolStr,
    /// The name.
    pub name: SmolStr,
    /// A part of the target: a listener, or the port of a Service by name.
    pub section_name: Option<SmolStr>,
}

/// A reference from a route to a Gateway, a ListenerSet or a Service.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentReference {
    /// The group, [`GROUP`] when absent.
    pub group: Option<SmolStr>,
    /// The kind, `Gateway` when absent.
    pub kind: Option<SmolStr>,
    /// The namespace, the route's when absent.
    pub namespace: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// One listener.
    pub section_name: Option<SmolStr>,
    /// The listeners at one port, or the port of a Service.
    pub port: Option<u16>,
}

/// How long a client keeps to one backend.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionPersistence {
    /// The name of the cookie or header.
    pub session_name: Option<SmolStr>,
    /// `Cookie` or `Header`; `Cookie` when absent.
    #[serde(rename = "type")]
    pub session_type: Option<SmolStr>,
    /// How long a session lives at most, as a duration.
    pub absolute_timeout: Option<SmolStr>,
    /// How long it may idle, as a duration.
    pub idle_timeout: Option<SmolStr>,
    /// How long the cookie lives.
    pub cookie_config: Option<CookieConfig>,
}

/// The cookie of a session.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CookieConfig {
    /// `Permanent` or `Session`; `Session` when absent.
    pub lifetime_type: Option<SmolStr>,
}

/// Options that an implementation defines.
pub type Options = BTreeMap<SmolStr, SmolStr>;
