//! The CustomResourceDefinitions of Istio's kinds, made from the message definitions.
//!
//! What a message does not tell (what is required, limits, rules) stands in `crd/constraints.yaml`; the rest follows from
//! names and types. All served versions of a kind have one schema, so that no conversion is ever needed.

mod kinds;
mod schema;

use serde_json::{Value, json};

use self::kinds::{Column, Definition};
use super::yaml;

/// The definitions, by API group and then by name.
pub fn definitions() -> Vec<Value> {
    kinds::DEFINITIONS.iter().map(definition).collect()
}

/// The definitions as YAML documents, each but the first after a marker line.
pub fn text() -> String {
    let documents: Vec<String> = definitions().iter().map(yaml::to_text).collect();
    format!(
        "# Made by `istiod crds`; changes belong into src/api/crd.\n{}",
        documents.join("---\n")
    )
}

fn definition(definition: &Definition) -> Value {
    let kind = definition.kind.name();
    let group = definition.kind.group();
    let singular = kind.to_ascii_lowercase();
    let mut names = json!({
        "categories": ["istio-io", group.replace('.', "-")],
        "kind": kind,
        "listKind": format!("{kind}List"),
        "plural": definition.kind.plural(),
        "singular": singular,
    });
    if !definition.short_name.is_empty() {
        names["shortNames"] = json!([definition.short_name]);
    }
    // The labels are those of Istio's file; a chart that templates the definitions sets its own.
    let mut labels = json!({ "app": "istio-pilot", "chart": "istio", "heritage": "Tiller", "release": "istio" });
    if !definition.component.is_empty() {
        labels["istio"] = json!(definition.component);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            // What people wrote must not go when a release does.
            "annotations": { "helm.sh/resource-policy": "keep" },
            "labels": labels,
            "name": format!("{}.{group}", definition.kind.plural()),
        },
        "spec": {
            "group": group,
            "names": names,
            "scope": "Namespaced",
            "versions": versions(definition),
        },
    })
}

fn versions(definition: &Definition) -> Vec<Value> {
    let schema = schema::of_object(definition);
    let columns: Vec<Value> = definition.columns.iter().map(column).collect();
    let mut names = definition.kind.versions().to_vec();
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
        "description": column.about,
    })
}

#[cfg(test)]
mod tests;
