//! Configuration objects: as manifests, in the form of `config.Config`, and their kinds.

use prost::{Message, Name};
use serde_json::{Map, Value, json};

use super::{put, time};
use crate::{
    api::{Config, Kind, Meta, kind::KindClass, kinds::with_kinds},
    base::{Labels, ObjectKey},
    model::MeshSnapshot,
    proto::json,
    table::{Cx, Table},
};

macro_rules! istio_objects {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { table: $table:ident, class: $class:ident, $($column:tt)* })*) => {
        /// Returns every Istio object, in the form of a manifest.
        pub(in crate::admin::debug) fn configs(mesh: &MeshSnapshot) -> Value {
            let mut rows = Vec::new();
            $(istio_objects!($class, mesh.$table, Kind::$kind, rows);)*
            Value::Array(rows)
        }
    };
    (Istio, $table:expr, $kind:expr, $rows:ident) => { objects(&$table, $kind, &mut $rows) };
    ($class:ident, $table:expr, $kind:expr, $rows:ident) => {};
}

with_kinds!(istio_objects);

fn objects<M: Message + Name>(table: &Table<ObjectKey, Config<M>>, kind: Kind, rows: &mut Vec<Value>) {
    rows.extend(table.iter(&Cx::untracked()).map(|(_, config)| {
        let mut object = json!({
            "kind": kind.name(),
            "apiVersion": format!("{}/{}", kind.group(), kind.version()),
            "metadata": metadata(&config.meta),
            "spec": json::to_json(&config.spec),
        });
        if let Some(status) = &config.status {
            object["status"] = Value::clone(status);
        }
        object
    }));
}

fn metadata(meta: &Meta) -> Value {
    let mut fields = Map::new();
    put(&mut fields, "name", meta.name());
    put(&mut fields, "namespace", meta.namespace());
    put(&mut fields, "resourceVersion", &meta.resource_version);
    fields.insert("creationTimestamp".to_owned(), time(meta.creation));
    put_labels(&mut fields, meta);
    Value::Object(fields)
}

fn put_labels(fields: &mut Map<String, Value>, meta: &Meta) {
    let mut put = |key: &str, labels: &Labels| {
        if !labels.is_empty() {
            fields.insert(key.to_owned(), json!(labels));
        }
    };
    put("labels", &meta.labels);
    put("annotations", &meta.annotations);
}

/// Returns an object in the form of `config.Config`.
///
/// Parity (pkg/config/model.go).
pub(super) fn config<M: Message + Name>(meta: &Meta, spec: &M, domain: &str) -> Value {
    let mut fields = Map::new();
    fields.insert("type".to_owned(), group_version_kind(meta.kind));
    put(&mut fields, "name", meta.name());
    put(&mut fields, "namespace", meta.namespace());
    put(&mut fields, "domain", domain);
    put_labels(&mut fields, meta);
    put(&mut fields, "resourceVersion", &meta.resource_version);
    fields.insert("creationTimestamp".to_owned(), time(meta.creation));
    fields.insert("Spec".to_owned(), json::to_json(spec));
    fields.insert("Status".to_owned(), json!({}));
    fields.insert("Extra".to_owned(), Value::Null);
    Value::Object(fields)
}

/// Returns name, namespace, annotations and specification of a policy.
pub(super) fn policy<M: Message + Name>(config: &Config<M>) -> Value {
    let mut fields = Map::new();
    put(&mut fields, "name", config.meta.name());
    put(&mut fields, "namespace", config.meta.namespace());
    if !config.meta.annotations.is_empty() {
        fields.insert("annotations".to_owned(), json!(config.meta.annotations));
    }
    fields.insert("spec".to_owned(), json::to_json(&config.spec));
    Value::Object(fields)
}

/// Returns the kinds of configuration that are read.
pub(in crate::admin::debug) fn kinds() -> Value {
    let classes = [KindClass::Istio, KindClass::GatewayApi, KindClass::Ingress];
    let kinds = Kind::ALL.iter().filter(|kind| classes.contains(&kind.class()));
    kinds.map(|kind| group_version_kind(*kind)).collect()
}

fn group_version_kind(kind: Kind) -> Value {
    json!({ "group": kind.group(), "version": kind.version(), "kind": kind.name() })
}
