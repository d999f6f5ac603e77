//! Types that several kinds of the Gateway API share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

/// The API group of the main kinds.
pub const GROUP: &str = "gateway.networking.k8s.io";

/// A reference to an object. The namespace defaults to that of the referring object.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct ObjectReference {
    /// The group; the default depends on the field.
    pub group: Option<SmolStr>,
    /// The kind; the default depends on the field.
    pub kind: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The namespace.
    pub namespace: Option<SmolStr>,
}

/// A reference from a policy to its target.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetReference {
    /// The group.
    pub group: SmolStr,
    /// The kind.
    pub kind: SmolStr,
    /// The name.
    pub name: SmolStr,
    /// A section of the target: a listener, or the name of a Service port.
    pub section_name: Option<SmolStr>,
}

/// A reference from a route to a Gateway, a ListenerSet or a Service.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentReference {
    /// The group; [`GROUP`] if absent.
    pub group: Option<SmolStr>,
    /// The kind; `Gateway` if absent.
    pub kind: Option<SmolStr>,
    /// The namespace; that of the route if absent.
    pub namespace: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The name of a listener.
    pub section_name: Option<SmolStr>,
    /// The port of listeners or of a Service.
    pub port: Option<u16>,
}

/// Session persistence: a client stays with one backend.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionPersistence {
    /// The name of the cookie or header.
    pub session_name: Option<SmolStr>,
    /// `Cookie` or `Header`; `Cookie` if absent.
    #[serde(rename = "type")]
    pub session_type: Option<SmolStr>,
    /// The maximum duration of a session.
    pub absolute_timeout: Option<SmolStr>,
    /// The idle timeout of a session, as a duration.
    pub idle_timeout: Option<SmolStr>,
    /// The lifetime of the cookie.
    pub cookie_config: Option<CookieConfig>,
}

/// The session cookie.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CookieConfig {
    /// `Permanent` or `Session`; `Session` if absent.
    pub lifetime_type: Option<SmolStr>,
}

/// Implementation-specific options.
pub type Options = BTreeMap<SmolStr, SmolStr>;
