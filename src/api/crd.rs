//! The CustomResourceDefinitions of Istio's kinds, generated from the protobuf messages.
//!
//! `crd/constraints.yaml` adds what messages cannot express: required fields, limits, rules. All served versions of a
//! kind have the same schema, so no conversion is ever needed.

mod kinds;
mod schema;

use serde_json::{Value, json};

use self::kinds::{Column, KindDefinition};
use super::yaml;

/// Returns the definitions, by API group and then by name.
pub fn definitions() -> Vec<Value> {
    kinds::definitions().iter().map(custom_resource_definition).collect()
}

/// Returns the definitions as YAML documents, separated by marker lines.
pub fn text() -> String {
    let documents: Vec<String> = definitions().iter().map(yaml::to_text).collect();
    format!(
        "# Made by `istiod crds`; changes belong into src/api/crd.\n{}",
        documents.join("---\n")
    )
}

fn custom_resource_definition(kind_definition: &KindDefinition) -> Value {
    let KindDefinition { kind, definition, .. } = kind_definition;
    let (name, group, plural) = (kind.name(), kind.group(), kind.plural());
    let singular = name.to_ascii_lowercase();
    let mut names = json!({
        "categories": ["istio-io", group.replace('.', "-")],
        "kind": name,
        "listKind": format!("{name}List"),
        "plural": plural,
        "singular": singular,
    });
    if !definition.short_name.is_empty() {
        names["shortNames"] = json!([definition.short_name]);
    }
    // The labels of Istio's file; a chart that templates the definitions sets its own.
    let mut labels = json!({ "app": "istio-pilot", "chart": "istio", "heritage": "Tiller", "release": "istio" });
    if !definition.component.is_empty() {
        labels["istio"] = json!(definition.component);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            // Users' objects must outlive a Helm release.
            "annotations": { "helm.sh/resource-policy": "keep" },
            "labels": labels,
            "name": format!("{plural}.{group}"),
        },
        "spec": {
            "group": group,
            "names": names,
            "scope": "Namespaced",
            "versions": versions(kind_definition),
        },
    })
}

fn versions(kind_definition: &KindDefinition) -> Vec<Value> {
    let KindDefinition { kind, definition, .. } = kind_definition;
    let schema = schema::of_object(kind_definition);
    let columns: Vec<Value> = definition.columns.iter().map(column).collect();
    let mut names = kind.versions().to_vec();
    names.sort_unstable();
    let version = |name: &str| {
        let mut version = json!({
            "name": name,
            "served": true,
            "storage": name == definition.storage,
            "subresources": { "status": {} },
            "schema": { "openAPIV3Schema": schema },
        });
        if !columns.is_empty() {
            version["additionalPrinterColumns"] = json!(columns);
        }
        version
    };
    names.into_iter().map(version).collect()
}

fn column(column: &Column) -> Value {
    json!({
        "name": column.name,
        "type": if column.path == kinds::CREATION { "date" } else { "string" },
        "jsonPath": column.path,
        "description": column.description,
    })
}

#[cfg(test)]
mod tests;
