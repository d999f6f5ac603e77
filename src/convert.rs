//! Conversion of kinds of old releases to today's, for `istiod convert`. Pure.
//!
//! The conversion is exact where today's kinds can express the meaning. Everything else is a note that names the object
//! and the field. Services among the objects supply selectors and ports.

mod authentication;
mod egress;
mod rbac;
mod routing;
mod spec;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use self::spec::Spec;
use crate::{
    api::{Severity, document, old_kinds::is_old_kind},
    base::ClusterId,
};

/// Settings of the mesh.
#[derive(Clone, Debug)]
pub struct Options {
    /// DNS suffix of Kubernetes services.
    pub domain: String,
    /// The root namespace, for objects of the whole mesh.
    pub root_namespace: String,
}

/// The result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversion {
    /// The objects, in the order of kinds, namespaces and names.
    pub objects: Vec<Value>,
    /// One line for everything that cannot be mapped.
    pub notes: Vec<String>,
}

/// An old object.
struct Old<'a> {
    kind: &'a str,
    namespace: String,
    name: String,
    spec: Spec<'a>,
}

/// A Service that supplies selectors and ports.
struct KubeService<'a> {
    namespace: String,
    name: String,
    value: &'a Value,
}

/// The state of a conversion.
struct Converter<'a> {
    options: &'a Options,
    old: Vec<Old<'a>>,
    services: Vec<KubeService<'a>>,
    objects: BTreeMap<(String, String, String), Value>,
    notes: Vec<String>,
}

/// Converts the old kinds among the objects. Objects of other kinds are context.
pub fn convert(objects: &[Value], options: &Options) -> Conversion {
    let mut converter = Converter {
        options,
        old: Vec::new(),
        services: Vec::new(),
        objects: BTreeMap::new(),
        notes: Vec::new(),
    };
    for object in objects {
        converter.add(object);
    }
    routing::convert(&mut converter);
    egress::convert(&mut converter);
    authentication::convert(&mut converter);
    rbac::convert(&mut converter);
    converter.of_mixer();
    converter.finish()
}

impl<'a> Converter<'a> {
    fn add(&mut self, object: &'a Value) {
        let text = |value: &'a Value| value.as_str().unwrap_or_default();
        let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
        if let (true, Value::Array(items)) = (kind.ends_with("List"), &object["items"]) {
            for item in items {
                self.add(item);
            }
            return;
        }
        let metadata = &object["metadata"];
        let namespace = match text(&metadata["namespace"]) {
            "" => "default",
            namespace => namespace,
        };
        let (namespace, name) = (namespace.to_owned(), text(&metadata["name"]).to_owned());
        if is_old_kind(version, kind) {
            self.old.push(Old {
                kind,
                namespace,
                name,
                spec: Spec(&object["spec"]),
            });
        } else if (version, kind) == ("v1", "Service") {
            self.services.push(KubeService {
                namespace,
                name,
                value: object,
            });
        }
    }

    /// Returns the old objects of a kind, by namespace and name, and removes them from those that are left.
    fn take(&mut self, kind: &str) -> Vec<Old<'a>> {
        let (mut taken, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.old)
            .into_iter()
            .partition(|old| old.kind == kind);
        self.old = left;
        taken.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        taken
    }

    /// Adds a note about an object.
    fn note(&mut self, old: &Old<'_>, field: &str, message: &str) {
        let separator = if field.is_empty() { "" } else { ": " };
        let (kind, namespace, name) = (old.kind, &old.namespace, &old.name);
        self.notes
            .push(format!("{kind} {namespace}/{name}{separator}{field}: {message}"));
    }

    /// Adds a note for each of the fields that is set.
    fn lost(&mut self, old: &Old<'_>, spec: Spec<'_>, path: &str, fields: &[(&str, &str)]) {
        for (field, message) in fields {
            if !spec.get(field).is_empty() {
                self.note(old, &format!("{path}{field}"), message);
            }
        }
    }

    /// Returns the host of an old reference to a service.
    fn host(&self, service: Spec<'_>, namespace: &str) -> Option<String> {
        if let Some(host) = service.text("service") {
            return Some(host.to_owned());
        }
        let name = service.text("name")?;
        let namespace = service.text("namespace").unwrap_or(namespace);
        Some(match service.text("domain") {
            Some(domain) => format!("{name}.{namespace}.{domain}"),
            None => self.fqdn(name, namespace),
        })
    }

    /// Returns the host of a Kubernetes Service.
    fn fqdn(&self, name: &str, namespace: &str) -> String {
        format!("{name}.{namespace}.svc.{}", self.options.domain)
    }

    /// Returns a Service among the objects.
    fn service(&self, namespace: &str, name: &str) -> Option<&KubeService<'a>> {
        let mut services = self.services.iter();
        services.find(|service| service.namespace == namespace && service.name == name)
    }

    /// Adds an object, or returns the one that exists already.
    fn object(&mut self, kind: &'static str, namespace: &str, name: &str) -> &mut Value {
        let key = (kind.to_owned(), namespace.to_owned(), name.to_owned());
        self.objects.entry(key).or_insert_with(|| {
            let group = match kind {
                "PeerAuthentication" | "RequestAuthentication" | "AuthorizationPolicy" => "security.istio.io",
                _ => "networking.istio.io",
            };
            json!({
                "apiVersion": format!("{group}/v1"),
                "kind": kind,
                "metadata": { "name": name, "namespace": namespace },
                "spec": {},
            })
        })
    }

    /// Notes the kinds that only Mixer read, and those without a successor.
    fn of_mixer(&mut self) {
        let left = std::mem::take(&mut self.old);
        for old in left {
            let message = match old.kind {
                "IngressRule" => "has no converter; hint: write a Gateway and a VirtualService",
                _ => "only Mixer read it, and nothing replaces it; hint: rate limits and API keys are filters of Envoy",
            };
            self.note(&old, "", message);
        }
    }

    /// Returns the objects, each of which validation accepts.
    fn finish(mut self) -> Conversion {
        let cluster = ClusterId::new_static("Kubernetes");
        let mut objects = Vec::new();
        for object in std::mem::take(&mut self.objects).into_values() {
            let parsed = document::parse(&cluster, &object);
            let errors = parsed
                .diagnostics
                .iter()
                .filter(|found| found.severity == Severity::Error);
            let errors: Vec<String> = errors.map(ToString::to_string).collect();
            if errors.is_empty() {
                objects.push(object);
            } else {
                self.notes.extend(
                    errors
                        .into_iter()
                        .map(|error| format!("not written, because it is invalid: {error}")),
                );
            }
        }
        Conversion {
            objects,
            notes: self.notes,
        }
    }
}

impl KubeService<'_> {
    /// Returns the selector; `None` without one.
    fn selector(&self) -> Option<Map<String, Value>> {
        let selector = self.value["spec"]["selector"].as_object()?;
        (!selector.is_empty()).then(|| selector.clone())
    }

    /// Returns the port of the workload for a port of the service, by number or name; `None` if it is named or unknown.
    fn target_port(&self, port: &Value) -> Option<u64> {
        let ports = self.value["spec"]["ports"].as_array()?;
        let wanted = |given: &&Value| match port {
            Value::Number(number) => given["port"] == Value::Number(number.clone()),
            Value::String(name) => given["name"] == *name.as_str(),
            _ => false,
        };
        let found = ports.iter().find(wanted)?;
        match &found["targetPort"] {
            Value::Null => found["port"].as_u64(),
            target => target.as_u64(),
        }
    }
}

/// Sets a field of an object below `spec`, unless the value is empty.
fn set(object: &mut Value, field: &str, value: Value) {
    let is_empty = match &value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    if !is_empty {
        object[field] = value;
    }
}
