//! Analysis of configuration: from the objects of a mesh to messages about mistakes that no single object shows. No IO.
//!
//! An [`Object`] is a manifest with its origin; a [`Mesh`] indexes all of them. Each [`Analyzer`] of the [`table`]
//! reads the mesh and reports messages with the codes of Istio. The analyzers read manifests as JSON, because most of
//! them concern fields that no other part of istiod reads.
//!
//! Parity (pkg/config/analysis).

mod annotations;
mod authentication;
mod authorization;
mod conditions;
mod deployment;
mod deprecation;
mod destination_rule;
mod envoy_filter;
mod gateway;
mod hosts;
mod injection;
mod json;
mod kubernetes_gateway;
mod membership;
mod mesh;
pub mod message;
mod multicluster;
pub mod object;
mod reduced;
mod schema;
mod service;
mod service_entry;
mod sidecar;
mod suppression;
pub mod table;
mod telemetry;
mod virtual_service;
mod webhook;

pub use self::{
    mesh::{Mesh, Settings, default_objects},
    message::{Code, Level, Message},
    object::{Object, Type, is_of_revision, read},
    reduced::reduce,
    suppression::{Suppression, SuppressionError},
    table::Analyzer,
};

/// The scope of an analysis.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// The only namespace with messages; `None` for all. Objects of all namespaces are read.
    pub namespace: Option<String>,
    /// Messages to omit.
    pub suppressions: Vec<Suppression>,
    /// Names of the analyzers that run. If none of them exists, those that run by default do.
    pub analyzers: Vec<String>,
}

/// Runs the analyzers. Returns messages in the order of cluster, level, code and object, each once. The number of those
/// about one object with one code is limited.
pub fn analyze(mesh: &Mesh, scope: &Scope) -> Vec<Message> {
    let mut report = message::Report::default();
    for analyzer in table::selected(&scope.analyzers) {
        analyzer.run(mesh, &mut report);
    }
    let mut messages = report.into_messages();
    messages.retain(|message| is_in_scope(message, scope));
    messages
}

fn is_in_scope(message: &Message, scope: &Scope) -> bool {
    let namespace = message.resource.scope();
    let is_elsewhere = scope
        .namespace
        .as_deref()
        .is_some_and(|wanted| !namespace.is_empty() && namespace != wanted);
    !is_elsewhere
        && !suppression::annotation_covers(&message.suppressed, message.code)
        && !scope.suppressions.iter().any(|suppression| suppression.covers(message))
}

#[cfg(test)]
mod tests;
