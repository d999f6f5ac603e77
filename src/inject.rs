//! Sidecar injection: from a pod, the injector's configuration and its environment to a JSON patch. No IO.
//!
//! An [`Injector`] is compiled once from the keys `config` and `values` of a ConfigMap `istio-sidecar-injector`; its
//! templates are parsed then, not for each pod. A [`Mesh`] is prepared once for each mesh config. For each admission,
//! an [`Environment`] refers to them and adds what belongs to the request:
//!
//! ```
//! use std::sync::Arc;
//! use istiod::inject::{Environment, Injector, Mesh, Namespace, Outcome, proxy_variables};
//!
//! let config = "
//! policy: enabled
//! templates:
//!   sidecar: |
//!     spec:
//!       containers:
//!       - name: istio-proxy
//!         image: {{ .ProxyImage }}
//! ";
//! let injector = Injector::parse(config, "global: {hub: example.com, tag: v1}").unwrap();
//! let mesh = Arc::new(Mesh::default());
//!
//! let pod = serde_json::json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "web"}]}});
//! let environment = Environment {
//!     mesh,
//!     namespace: Arc::new(Namespace { name: "default".to_owned(), ..Namespace::default() }),
//!     proxy_variables: proxy_variables("/inject/cluster/east"),
//!     ..Environment::default()
//! };
//! let Outcome::Patch(patch) = injector.inject(&pod, &environment).unwrap() else { panic!("skipped") };
//! assert!(patch.operations().iter().any(|operation| operation["path"] == "/spec/containers/1"));
//! ```
//!
//! The steps of an injection, one module each: `decision`; `annotations` (validation); `render` with `data` and
//! `functions`; `merge` (strategic merge patches); `overrides` (settings of users for injected containers); `finish`,
//! `prometheus` and `probes`; `patch` (the difference of both pods). `schema` has the types of Kubernetes that all of
//! them share, and [`workload`] injects files. [`gateway`] renders the objects of Gateways' deployments.

mod annotations;
mod config;
mod data;
mod decision;
mod environment;
mod finish;
mod functions;
pub mod gateway;
mod merge;
mod overlays;
mod overrides;
mod owner;
mod patch;
mod pod;
mod probes;
mod prometheus;
mod render;
mod request;
mod schema;
pub mod workload;

pub use self::annotations::annotation_error;

use std::collections::BTreeMap;

use serde_json::Value as Json;

use self::{
    config::{Config, MAX_TEMPLATES, Policy},
    owner::Owner,
    request::{Rendered, Request},
    schema::{Form, canonical},
};
use crate::template::{self, Limits};

pub use self::{
    config::ConfigError,
    decision::{IGNORED_NAMESPACES, Skipped, has_unknown_choice},
    environment::{
        CLUSTER_VARIABLE, Environment, Kubelets, Mesh, Namespace, NativeSidecars, Platform, kubelet_minor,
        proxy_variables,
    },
    schema::TypeError,
};

/// A compiled injector configuration. It does not change; threads share it.
pub struct Injector {
    config: Config,
}

/// The result for a pod.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The pod is not injected.
    Skipped(Skipped),
    /// The pod is injected.
    Patch(Patch),
}

/// A JSON Patch (RFC 6902) for a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch(Vec<Json>);

impl Patch {
    /// Returns the operations; none if the pod already is as injection makes it.
    pub fn operations(&self) -> &[Json] {
        &self.0
    }

    /// Returns the patch as JSON text.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.0).expect("because JSON values can be written")
    }
}

/// The reason why a pod cannot be injected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    /// The object is not a pod.
    #[error("cannot read the pod: {0}")]
    Pod(#[from] TypeError),
    /// Annotations of the pod are invalid.
    #[error("invalid annotations: {}", .0.join("; "))]
    Annotations(Vec<String>),
    /// The pod or the configuration asks for a template that does not exist.
    #[error("requested template {name:?} not found; have {known}")]
    UnknownTemplate {
        /// Name.
        name: String,
        /// Names of all templates.
        known: String,
    },
    /// The pod or the configuration asks for too many templates.
    #[error("more than {MAX_TEMPLATES} templates requested, with aliases expanded")]
    TooManyTemplates,
    /// The deadline of the [`template::Host`] has passed.
    #[error("injection takes too long")]
    Deadline,
    /// A template failed.
    #[error("failed to run injection template: {0}")]
    Template(#[from] template::Error),
    /// The output of a template does not fit the pod.
    #[error("template {template:?}: failed applying injection overlay: {message}")]
    Overlay {
        /// Name of the template.
        template: String,
        /// Reason.
        message: String,
    },
    /// Settings of the user for an injected container do not fit it.
    #[error("failed to re apply container {container:?}: {message}")]
    Overrides {
        /// Name of the container.
        container: String,
        /// Reason.
        message: String,
    },
    /// A workload in a file cannot be read.
    #[error("{object}: {message}")]
    Workload {
        /// Kind and name.
        object: String,
        /// Reason.
        message: String,
    },
}

impl InjectError {
    fn overlay(template: &str, message: impl Into<String>) -> Self {
        Self::Overlay {
            template: template.to_owned(),
            message: message.into(),
        }
    }
}

impl Injector {
    /// Compiles the keys `config` and `values` of the injector's ConfigMap.
    pub fn parse(config: &str, values: &str) -> Result<Self, ConfigError> {
        Self::parse_with(config, values, &LIMITS)
    }

    /// Does the same with other limits of templates.
    pub fn parse_with(config: &str, values: &str, limits: &Limits) -> Result<Self, ConfigError> {
        Ok(Self {
            config: Config::parse(config, values, limits)?,
        })
    }

    /// Returns the names of the templates.
    pub fn templates(&self) -> impl Iterator<Item = &str> {
        self.config.templates.keys().map(String::as_str)
    }

    /// Returns the texts of the templates by name, as written.
    pub fn template_texts(&self) -> &BTreeMap<String, String> {
        &self.config.texts
    }

    /// Returns the cluster in the values (`global.multiCluster.clusterName`); empty if unset.
    pub fn cluster(&self) -> &str {
        self.config.values.cluster()
    }

    /// Returns the policy if it is unknown, so that no pod is injected.
    pub fn unknown_policy(&self) -> Option<&str> {
        match &self.config.policy {
            Policy::Unknown(policy) => Some(policy.as_str()),
            Policy::Enabled | Policy::Disabled => None,
        }
    }

    /// Decides about a pod and returns the patch that injects it.
    pub fn inject(&self, pod: &Json, environment: &Environment) -> Result<Outcome, InjectError> {
        let mut sent = canonical("Pod", pod.clone(), Form::Sparse)?;
        if let Some(Json::Object(metadata)) = sent.get_mut("metadata") {
            // They are large, and injection does not depend on them.
            metadata.remove("managedFields");
        }
        // Controllers leave the namespace to the API server, which sets it after admission.
        let lacks_namespace = pod::metadata(&sent, "namespace").is_empty() && !environment.namespace.name.is_empty();
        let has_metadata = sent.get("metadata").is_some();
        if lacks_namespace {
            pod::set_namespace(&mut sent, &environment.namespace.name);
        }
        if let Some(reason) = decision::skipped(&self.config, &sent) {
            return Ok(Outcome::Skipped(reason));
        }
        let owner = Owner::of_pod(&sent);
        let mut injected = self.injected(&sent, &owner, environment)?;
        if lacks_namespace {
            pod::set_namespace(&mut sent, "");
            pod::set_namespace(&mut injected, "");
        }
        if let (Json::Object(members), false) = (&mut sent, has_metadata) {
            members.remove("metadata");
        }
        Ok(Outcome::Patch(Patch(patch::difference(&sent, &injected))))
    }

    /// Returns a pod after injection, without a decision.
    fn injected(&self, original: &Json, owner: &Owner, environment: &Environment) -> Result<Json, InjectError> {
        let errors = annotations::errors(original);
        if !errors.is_empty() {
            return Err(InjectError::Annotations(errors));
        }
        let cleared;
        let mut pod = original;
        if environment.platform == Platform::OpenShift && pod::sidecar(original).is_some() {
            let mut changed = original.clone();
            overrides::clear_assigned_user(&mut changed);
            cleared = changed;
            pod = &cleared;
        }
        let request = Request::new(&self.config, environment, pod, owner)?;
        let rendered = render::render(&request)?;
        let mut rendered = overrides::apply(&request, rendered)?;
        environment.check_deadline()?;
        finish::set_variables(&request, &mut rendered.pod);
        prometheus::merge(&request, &mut rendered.pod);
        probes::rewrite(&request, &mut rendered.pod)?;
        finish::keep_variable_order(&request, &mut rendered.pod);
        finish::set_metadata(&request, &mut rendered);
        finish::order(&request, &mut rendered.pod);
        let Rendered { pod, .. } = rendered;
        Ok(canonical("Pod", pod, Form::Sparse)?)
    }
}

/// Limits of a template: more than a hundred times what Istio's templates take.
const LIMITS: Limits = Limits {
    source_bytes: 1 << 20,
    parse_depth: 100,
    steps: 2_000_000,
    output_bytes: 4 << 20,
    value_bytes: 32 << 20,
    call_depth: 100,
    nesting: 300,
    value_depth: 100,
    steps_per_check: 1024,
};

#[cfg(test)]
mod tests;
