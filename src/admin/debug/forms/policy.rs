//! AuthorizationPolicies and Telemetries, by namespace and of a proxy.

use std::collections::BTreeMap;

use prost::{Message, Name};
use serde_json::{Value, json};

use super::{endpoint, object};
use crate::{
    api::{Config, Meta},
    base::{Namespace, ObjectKey, Shared},
    generate::{ProxyType, proxy_class::ProxyClass},
    model::{
        MeshSnapshot,
        policy::{self, Subject},
    },
    proto::{istio::telemetry::v1alpha1::Telemetry, json},
    table::{Cx, Table},
};

/// Returns the AuthorizationPolicies by namespace, oldest first.
pub(in crate::admin::debug) fn authorization(mesh: &MeshSnapshot) -> Value {
    json!({ "authorization_policies": authorization_policies(mesh) })
}

fn authorization_policies(mesh: &MeshSnapshot) -> Value {
    json!({
        "namespace_to_policies": by_namespace(&mesh.authorization_policies),
        "root_namespace": root(mesh).as_str(),
    })
}

/// Returns the Telemetries by namespace, oldest first.
pub(in crate::admin::debug) fn telemetry(mesh: &MeshSnapshot) -> Value {
    let telemetries = json!({
        "namespace_to_telemetries": by_namespace(&mesh.telemetries),
        "root_namespace": root(mesh).as_str(),
    });
    json!({ "telemetries": telemetries })
}

/// Returns what Istio shows of its push context: AuthorizationPolicies and network gateways.
pub(in crate::admin::debug) fn push_context(mesh: &MeshSnapshot) -> Value {
    json!({
        "AuthorizationPolicies": authorization_policies(mesh),
        "NetworkGateways": endpoint::networks(mesh),
        "UnresolvedGateways": endpoint::unresolved_networks(mesh),
    })
}

fn root(mesh: &MeshSnapshot) -> Namespace {
    policy::root_namespace(&Cx::untracked(), mesh)
}

fn by_namespace<M: Message + Name>(table: &Table<ObjectKey, Config<M>>) -> BTreeMap<&str, Vec<Value>> {
    let mut rows: Vec<&Shared<Config<M>>> = table.iter(&Cx::untracked()).map(|(_, row)| row).collect();
    rows.sort_by_key(|row| row.meta.age_order());
    let mut policies: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for row in rows {
        let of_namespace = policies.entry(row.meta.namespace().as_str()).or_default();
        of_namespace.push(object::policy(row));
    }
    policies
}

/// The level at which a Telemetry applies to a proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Namespace,
    Workload,
}

impl Level {
    /// Returns the field of the page that names the Telemetry. Parity (pilot/pkg/model/telemetry.go): `Namespace` is
    /// that of a service of a waypoint.
    fn field(self) -> &'static str {
        match self {
            Self::Root => "Root",
            Self::Namespace => "Proxy",
            Self::Workload => "Workload",
        }
    }
}

/// Returns the Telemetries that apply to a proxy, with their contents in the order of application.
pub(in crate::admin::debug) fn telemetry_of(mesh: &MeshSnapshot, class: &ProxyClass) -> Value {
    let cx = Cx::untracked();
    let subject = Subject {
        is_waypoint: class.node.proxy_type == ProxyType::Waypoint,
        ..Subject::workload(class.node.namespace.clone(), (*class.labels).clone())
    };
    let keys = policy::attached::<Telemetry>(&cx, mesh, &subject);
    let mut page = names([]);
    let (mut metrics, mut logging, mut tracing) = (Vec::new(), Vec::new(), Vec::new());
    let mut levels: Vec<Level> = Vec::new();
    for row in keys.iter().filter_map(|key| mesh.telemetries.get(&cx, key)) {
        let level = level(row, &root(mesh));
        // Of several for a whole namespace, the oldest counts.
        if level != Level::Workload && levels.contains(&level) {
            continue;
        }
        levels.push(level);
        page[level.field()] = name(&row.meta);
        let spec = json::to_json(&row.spec);
        let entries = |field: &str| spec[field].as_array().cloned().unwrap_or_default();
        metrics.extend(entries("metrics"));
        tracing.extend(entries("tracing"));
        let logs = entries("accessLogging");
        if !logs.is_empty() {
            let mut entry = names([(level.field(), &*row.meta)]);
            entry["Logging"] = Value::Array(logs);
            logging.push(entry);
        }
    }
    page["Metrics"] = Value::Array(metrics);
    page["Logging"] = Value::Array(logging);
    page["Tracing"] = Value::Array(tracing);
    page
}

fn level(row: &Config<Telemetry>, root: &Namespace) -> Level {
    let has_target = row.spec.selector.is_some() || row.spec.target_ref.is_some() || !row.spec.target_refs.is_empty();
    match row.meta.namespace() {
        _ if has_target => Level::Workload,
        namespace if namespace == root => Level::Root,
        _ => Level::Namespace,
    }
}

/// Returns the names of Telemetries by level; empty ones of the others.
fn names<const N: usize>(known: [(&str, &Meta); N]) -> Value {
    let none = json!({ "Namespace": "", "Name": "" });
    let mut names = json!({ "Root": none, "Proxy": none, "Namespace": none, "Workload": none });
    for (field, meta) in known {
        names[field] = name(meta);
    }
    names
}

fn name(meta: &Meta) -> Value {
    json!({ "Namespace": meta.namespace().as_str(), "Name": meta.name() })
}
