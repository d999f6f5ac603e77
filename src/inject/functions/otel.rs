//! The function `otelResourceAttributes`: OpenTelemetry's attributes of a workload, by its semantic conventions.

use super::{entry, text};
use crate::{
    inject::data::call,
    template::{Context, Failure, Function, Type, Value},
};

pub(super) fn function() -> Function {
    use Type::{Any, String as Text};
    let labels = Text.map();
    Function::new(
        "otelResourceAttributes",
        &[Any, labels.clone(), labels, Text, Any],
        Text,
        |context, arguments| {
            let [mesh, annotations, labels, namespace, containers] = arguments else {
                return Ok("".into());
            };
            if !is_enabled(context, mesh)? {
                return Ok("".into());
            }
            let images = containers_of(containers);
            let attributes = Attributes {
                context,
                annotations,
                labels,
                namespace: text(namespace),
                containers: &images,
            };
            Ok(attributes.text().into())
        },
    )
}

/// Returns true if a provider of OpenTelemetry follows the semantic conventions.
fn is_enabled(context: &mut Context<'_>, mesh: &Value) -> Result<bool, Failure> {
    let Value::List(providers) = call(context, mesh, "GetExtensionProviders")? else {
        return Ok(false);
    };
    for provider in providers.items() {
        let settings = call(context, provider, "GetOpentelemetry")?;
        let enrichment = call(context, &settings, "GetServiceAttributeEnrichment")?;
        if matches!(&enrichment, Value::Object(it) if it.to_text().as_deref() == Some("OTEL_SEMANTIC_CONVENTIONS")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the names and images of containers.
fn containers_of(containers: &Value) -> Vec<(String, String)> {
    let Value::List(list) = containers else {
        return Vec::new();
    };
    let field = |container: &Value, name: &str| match container {
        Value::Object(object) => object.field(name).as_ref().map(text).unwrap_or_default(),
        _ => String::new(),
    };
    let items = list.items().iter();
    items
        .map(|container| (field(container, "Name"), field(container, "Image")))
        .collect()
}

struct Attributes<'a, 'b> {
    context: &'a Context<'b>,
    annotations: &'a Value,
    labels: &'a Value,
    namespace: String,
    containers: &'a [(String, String)],
}

impl Attributes<'_, '_> {
    fn annotation(&self, name: &str) -> Option<String> {
        let key = format!("resource.opentelemetry.io/{name}");
        let value = entry(self.context, self.annotations, &key.as_str().into());
        value.as_ref().map(text).filter(|value| !value.is_empty())
    }

    fn text(&self) -> String {
        let label = entry(self.context, self.labels, &"app.kubernetes.io/version".into());
        let namespace = self
            .annotation("service.namespace")
            .or_else(|| Some(self.namespace.clone()).filter(|namespace| !namespace.is_empty()));
        let version = self
            .annotation("service.version")
            .or_else(|| label.as_ref().map(text).filter(|version| !version.is_empty()))
            .or_else(|| match self.containers {
                [(_, image)] => version(image),
                _ => None,
            });
        let instance = self.annotation("service.instance.id").or_else(|| {
            let (container, _) = self.containers.first()?;
            (!self.namespace.is_empty()).then(|| format!("{}.$(POD_NAME).{container}", self.namespace))
        });
        let named = [
            ("service.namespace", namespace),
            ("service.version", version),
            ("service.instance.id", instance),
        ];
        let set = named
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name}={}", value?)));
        set.collect::<Vec<_>>().join(",")
    }
}

/// Returns the version in an image: `TAG`, `TAG@DIGEST` or the digest.
fn version(image: &str) -> Option<String> {
    let (name, digest) = match image.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (image, None),
    };
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = last.split_once(':').map(|(_, tag)| tag).filter(|tag| !tag.is_empty());
    match (tag, digest) {
        (Some(tag), Some(digest)) => Some(format!("{tag}@{digest}")),
        (Some(tag), None) => Some(tag.to_owned()),
        (None, digest) => digest.map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn images_have_versions() {
        for (image, expected) in [
            ("a/b:1", Some("1")),
            ("host:5000/b", None),
            ("host:5000/b:1@sha256:0f", Some("1@sha256:0f")),
            ("b@sha256:0f", Some("sha256:0f")),
            ("b", None),
        ] {
            assert_eq!(version(image).as_deref(), expected, "{image}");
        }
    }
}
