//! Manifests with their origin.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::Value;

use super::json::{items, labels, text};
use crate::{
    api::{Kind, label::REVISION, yaml},
    base::{Labels, SmolStr},
};

/// The namespaces whose objects the command does not analyze. Analysis in a cluster reads them, because others refer to
/// their services.
///
/// Parity (pkg/kube/inject/inject.go).
const IGNORED_NAMESPACES: [&str; 4] = ["kube-system", "kube-public", "kube-node-lease", "local-path-storage"];

/// A kind of objects that analyzers read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Type {
    /// A kind that istiod reads.
    Known(Kind),
    /// apps Deployment.
    Deployment,
    /// admissionregistration.k8s.io MutatingWebhookConfiguration.
    MutatingWebhook,
    /// admissionregistration.k8s.io ValidatingWebhookConfiguration.
    ValidatingWebhook,
    /// apiextensions.k8s.io CustomResourceDefinition.
    Definition,
}

impl From<Kind> for Type {
    fn from(kind: Kind) -> Self {
        Self::Known(kind)
    }
}

impl Type {
    const OTHERS: [Self; 4] = [
        Self::Deployment,
        Self::MutatingWebhook,
        Self::ValidatingWebhook,
        Self::Definition,
    ];

    /// Kinds outside Istio's groups that analyzers read.
    const KUBERNETES: [Kind; 9] = [
        Kind::Namespace,
        Kind::Node,
        Kind::Pod,
        Kind::Service,
        Kind::Secret,
        Kind::ConfigMap,
        Kind::KubeGateway,
        Kind::HttpRoute,
        Kind::GrpcRoute,
    ];

    /// Kinds that the command reads whatever their revision.
    ///
    /// Parity (pkg/config/analysis/legacy/util/kuberesource/resources.go).
    const OF_ALL_REVISIONS: [Kind; 5] = [Kind::Namespace, Kind::Node, Kind::Pod, Kind::Service, Kind::Secret];

    /// Returns true for kinds of which the command reads the objects of one revision only.
    pub fn has_revisions(self) -> bool {
        !matches!(self, Self::Known(kind) if Self::OF_ALL_REVISIONS.contains(&kind))
    }

    /// Returns all types that analyzers read.
    pub fn all() -> impl Iterator<Item = Self> {
        let istio = Kind::ALL
            .iter()
            .copied()
            .filter(|kind| kind.is_istio() && kind.is_object());
        let known = istio.chain(Self::KUBERNETES).map(Self::Known);
        known.chain(Self::OTHERS)
    }

    /// Returns the type of a manifest; `None` for kinds and versions that no analyzer reads.
    pub fn of(api_version: &str, kind: &str) -> Option<Self> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        Self::all().find(|found| {
            found.name() == kind && found.group() == group && found.versions().is_none_or(|all| all.contains(&version))
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Known(kind) => kind.name(),
            Self::Deployment => "Deployment",
            Self::MutatingWebhook => "MutatingWebhookConfiguration",
            Self::ValidatingWebhook => "ValidatingWebhookConfiguration",
            Self::Definition => "CustomResourceDefinition",
        }
    }

    /// Its API group.
    pub fn group(self) -> &'static str {
        match self {
            Self::Known(kind) => kind.group(),
            Self::Deployment => "apps",
            Self::MutatingWebhook | Self::ValidatingWebhook => "admissionregistration.k8s.io",
            Self::Definition => "apiextensions.k8s.io",
        }
    }

    fn versions(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Known(kind) => Some(kind.versions()),
            _ => None,
        }
    }

    /// The versions under which API servers may serve it.
    pub fn served_versions(self) -> &'static [&'static str] {
        self.versions().unwrap_or(&["v1"])
    }

    /// Its name in addresses of the API server.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Known(kind) => kind.plural(),
            Self::Deployment => "deployments",
            Self::MutatingWebhook => "mutatingwebhookconfigurations",
            Self::ValidatingWebhook => "validatingwebhookconfigurations",
            Self::Definition => "customresourcedefinitions",
        }
    }

    /// Returns the field selector of the objects that analyzers read: no Gateway uses Secrets of other types.
    pub fn field_selector(self) -> Option<&'static str> {
        let is_secret = self == Kind::Secret.into();
        is_secret.then_some("type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token")
    }

    /// Returns true if objects of the kind belong to no namespace.
    pub fn is_cluster_scoped(self) -> bool {
        match self {
            Self::Known(kind) => kind.is_cluster_scoped(),
            Self::Deployment => false,
            Self::MutatingWebhook | Self::ValidatingWebhook | Self::Definition => true,
        }
    }
}

/// A manifest with its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// The kind.
    pub kind: Type,
    /// The namespace; empty for cluster-scoped objects.
    pub namespace: SmolStr,
    /// The name.
    pub name: SmolStr,
    /// The cluster; empty for files and for a single cluster.
    pub cluster: SmolStr,
    /// The position `file.yaml:12`; empty for objects of a cluster.
    pub place: SmolStr,
    /// The labels.
    pub labels: Labels,
    /// The whole manifest, shared by copies of the object.
    pub manifest: Arc<Value>,
}

impl Object {
    /// Returns the object of a manifest; `None` for a namespace that the command does not analyze.
    pub fn of(kind: Type, manifest: Value, default_namespace: &str) -> Option<Self> {
        let object = Self::of_any_namespace(kind, manifest, default_namespace);
        let belongs_to = if kind == Kind::Namespace.into() {
            &object.name
        } else {
            &object.namespace
        };
        let is_ignored = IGNORED_NAMESPACES.contains(&belongs_to.as_str());
        (!is_ignored).then_some(object)
    }

    /// Returns the object of a manifest in any namespace.
    pub fn of_any_namespace(kind: Type, manifest: Value, default_namespace: &str) -> Self {
        let metadata = &manifest["metadata"];
        let namespace = match text(&metadata["namespace"]) {
            _ if kind.is_cluster_scoped() => "",
            "" => default_namespace,
            namespace => namespace,
        };
        Self {
            kind,
            namespace: namespace.into(),
            name: text(&metadata["name"]).into(),
            cluster: SmolStr::default(),
            place: SmolStr::default(),
            labels: labels(&metadata["labels"]),
            manifest: Arc::new(manifest),
        }
    }

    /// Returns `namespace/name`, or the name alone.
    pub(super) fn full_name(&self) -> String {
        full_name(&self.namespace, &self.name)
    }

    /// Returns a field of `spec`.
    pub(super) fn spec(&self, field: &str) -> &Value {
        &self.manifest["spec"][field]
    }

    /// Returns an annotation, or an empty text.
    pub(super) fn annotation(&self, name: &str) -> &str {
        text(&self.manifest["metadata"]["annotations"][name])
    }

    /// Returns a label, or an empty text.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", SmolStr::as_str)
    }
}

/// Returns true for objects of every revision, and of this one or one of its tags.
///
/// Parity (pilot/pkg/config/kube/crdclient/client.go): Gateways of the Gateway API count whatever their revision.
pub fn is_of_revision(object: &Object, revision: &str, tags: Option<&BTreeSet<SmolStr>>) -> bool {
    let is_own = |label: &SmolStr| label == revision || tags.is_some_and(|tags| tags.contains(label));
    let label = object.labels.get(REVISION);
    object.kind == Kind::KubeGateway.into() || revision.is_empty() || label.is_none_or(is_own)
}

/// Returns `namespace/name`, or the name alone.
pub(super) fn full_name(namespace: &str, name: &str) -> String {
    if namespace.is_empty() {
        name.to_owned()
    } else {
        format!("{namespace}/{name}")
    }
}

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content {
    /// Objects of kinds that analyzers read.
    pub objects: Vec<Object>,
    /// Documents that cannot be read, each with its position and the reason.
    pub problems: Vec<String>,
}

/// Reads a file with manifests. Objects of other kinds are skipped.
pub fn read(file: &str, bytes: &[u8], default_namespace: &str) -> Content {
    let mut content = Content::default();
    let text = match yaml::text(bytes) {
        Ok(text) => text,
        Err(error) => {
            content.problems.push(format!("{file}: {error}"));
            return content;
        }
    };
    for document in yaml::documents(text) {
        let line = first_line(&document);
        match document.parse() {
            Ok(value) => add(&mut content, value, file, line, default_namespace),
            Err(error) => content.problems.push(format!("{file}: {error}")),
        }
    }
    content
}

/// Returns the first line of a document that is neither blank nor its marker.
fn first_line(document: &yaml::Document<'_>) -> u64 {
    let blank = document
        .text
        .lines()
        .take_while(|line| matches!(line.trim_end(), "" | "---"));
    document.line + blank.count() as u64
}

fn add(content: &mut Content, mut value: Value, file: &str, line: u64, default_namespace: &str) {
    if value.is_null() {
        return;
    }
    if text(&value["kind"]) == "List" {
        for item in items(&value["items"]) {
            add_object(content, item.clone(), file, line, default_namespace);
        }
        return;
    }
    add_object(content, value.take(), file, line, default_namespace);
}

fn add_object(content: &mut Content, value: Value, file: &str, line: u64, default_namespace: &str) {
    let (api_version, kind) = (text(&value["apiVersion"]), text(&value["kind"]));
    if api_version.is_empty() || kind.is_empty() {
        let problem = format!("{file}:{line}: the document is not an object with apiVersion and kind");
        return content.problems.push(problem);
    }
    let Some(kind) = Type::of(api_version, kind) else {
        return;
    };
    if text(&value["metadata"]["name"]).is_empty() {
        let problem = format!("{file}:{line}: {} without metadata.name", kind.name());
        return content.problems.push(problem);
    }
    if let Some(object) = Object::of(kind, value, default_namespace) {
        content.objects.push(Object {
            place: SmolStr::new(format!("{file}:{line}")),
            ..object
        });
    }
}
