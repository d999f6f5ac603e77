//! A route of the Gateway API that has errors: an input that is not a manifest.

use serde_json::Value;
use smol_str::SmolStr;

use super::{
    Config, Diagnostic, Kind, Meta,
    diagnostics::INVALID,
    gateway_api::{GrpcRoute, HttpRoute, common::ParentReference},
    meta::Keyed,
    typed,
};
use crate::base::{ClusterId, ObjectKey, Shared};

/// Errors that a message has.
const MAX_ERRORS: usize = 8;

/// An HTTPRoute or GRPCRoute that does not apply, because fields have errors. The row of its last valid version stays,
/// and only its status depends on this one.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidRoute {
    /// The key, which contains the kind.
    pub key: ObjectKey,
    /// The metadata of the object.
    pub meta: Shared<Meta>,
    /// Its hosts.
    pub hostnames: Vec<SmolStr>,
    /// Its references to parents.
    pub parent_refs: Vec<ParentReference>,
    /// The first errors.
    pub message: String,
}

impl InvalidRoute {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::InvalidRoute;

    /// Returns true if objects of a kind have such rows.
    pub fn may_be(kind: Kind) -> bool {
        matches!(kind, Kind::HttpRoute | Kind::GrpcRoute)
    }

    /// Returns the key of a route's row.
    pub fn key(kind: Kind, route: &ObjectKey) -> ObjectKey {
        let name = [kind.kebab(), "~", &route.name].concat();
        ObjectKey::new(&route.cluster, route.namespace.clone(), name)
    }

    /// Returns the row of an object with these errors; `None` for other kinds, and if its parents cannot be read.
    pub fn of(kind: Kind, cluster: &ClusterId, object: &Value, errors: &[Diagnostic]) -> Option<Self> {
        // A defect of the parser has another code.
        let is_read = !errors.is_empty() && errors.iter().all(|error| error.code == INVALID);
        if !is_read || !Self::may_be(kind) {
            return None;
        }
        let meta = Shared::new(Meta::parse(kind, cluster, object).ok()?);
        let (hostnames, parent_refs) = if kind == Kind::HttpRoute {
            let route: Config<HttpRoute> = typed::parse(meta.clone(), object).ok()?;
            (route.spec.hostnames, route.spec.parent_refs)
        } else {
            let route: Config<GrpcRoute> = typed::parse(meta.clone(), object).ok()?;
            (route.spec.hostnames, route.spec.parent_refs)
        };
        let named = errors.iter().take(MAX_ERRORS);
        let mut texts: Vec<String> = named
            .map(|error| format!("{}: {}", error.field, error.message))
            .collect();
        let others = errors.len() - texts.len();
        if others > 0 {
            texts.push(format!("and {others} more"));
        }
        Some(Self {
            key: Self::key(kind, &meta.key),
            meta,
            hostnames,
            parent_refs,
            message: texts.join("; "),
        })
    }
}

impl Keyed for InvalidRoute {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
