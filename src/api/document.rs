//! One document to rows and diagnostics, by its `apiVersion` and `kind`.

use serde_json::Value;

use super::{
    Diagnostic, FieldError, Kind, Meta, Row, Severity, field::scalar_text, gateway_api, istio, kube, mcs, typed,
};
use crate::base::{ClusterId, Namespace, ObjectKey, Shared};

/// What a document gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The objects that count.
    pub rows: Vec<Row>,
    /// The objects that are there but do not count.
    pub rejected: Vec<(Kind, ObjectKey)>,
    /// What is wrong.
    pub diagnostics: Vec<Diagnostic>,
}

impl Parsed {
    fn error(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            diagnostics: vec![Diagnostic::of_document("", code, message)],
            ..Self::default()
        }
    }

    /// Adds what another document gives.
    pub fn extend(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.rejected.extend(other.rejected);
        self.diagnostics.extend(other.diagnostics);
    }
}

/// Parses a document. Lists are taken apart; kinds that are no input are passed over.
pub fn parse(cluster: &ClusterId, value: &Value) -> Parsed {
    if value.is_null() {
        return Parsed::default();
    }
    if !value.is_object() {
        return Parsed::error("NotAnObject", "the document is no object with apiVersion and kind");
    }
    let (Some(api_version), Some(kind)) = (text(value, "apiVersion"), text(value, "kind")) else {
        return Parsed::error("MissingKind", "the document has no apiVersion and kind");
    };
    if let (Some(item_kind), Value::Array(items)) = (kind.strip_suffix("List"), &value["items"]) {
        return items_of_list(cluster, api_version, item_kind, items);
    }
    object(cluster, api_version, kind, value)
}

fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get(name)?.as_str().filter(|text| !text.is_empty())
}

/// Items of a `List` are whole objects, those of a `PodList` may leave out what the list says.
fn items_of_list(cluster: &ClusterId, api_version: &str, item_kind: &str, items: &[Value]) -> Parsed {
    let mut parsed = Parsed::default();
    for (position, item) in items.iter().enumerate() {
        let version = text(item, "apiVersion").or((!item_kind.is_empty()).then_some(api_version));
        let kind = text(item, "kind").or((!item_kind.is_empty()).then_some(item_kind));
        parsed.extend(match (version, kind) {
            (Some(version), Some(kind)) => object(cluster, version, kind, item),
            _ => Parsed::error("MissingKind", format!("items[{position}] has no apiVersion and kind")),
        });
    }
    parsed
}

fn object(cluster: &ClusterId, api_version: &str, kind_name: &str, value: &Value) -> Parsed {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let known = Kind::ALL
        .iter()
        .copied()
        .find(|kind| kind.is_object() && kind.name() == kind_name && kind.group() == group);
    let Some(kind) = known else {
        return unknown_kind(group, kind_name, value);
    };
    if !kind.versions().contains(&version) {
        let message = format!(
            "{api_version} is not served, want one of: {}",
            kind.versions().join(", ")
        );
        return rejected(
            cluster,
            kind,
            value,
            "UnknownVersion",
            vec![error("apiVersion", message)],
        );
    }
    parse_object(cluster, kind, value)
}

/// Parses an object whose kind is known, whatever `apiVersion` and `kind` it states (items of lists state none).
pub fn parse_object(cluster: &ClusterId, kind: Kind, value: &Value) -> Parsed {
    match Meta::parse(kind, cluster, value) {
        Ok(meta) => row(Shared::new(meta), value),
        Err(errors) => rejected(cluster, kind, value, "InvalidField", errors),
    }
}

/// Groups of which every kind is an input; a kind that they do not have is a mistake, not somebody else's.
const ISTIO_GROUPS: [&str; 4] = [
    "networking.istio.io",
    "security.istio.io",
    "telemetry.istio.io",
    "extensions.istio.io",
];

fn unknown_kind(group: &str, kind_name: &str, value: &Value) -> Parsed {
    if !ISTIO_GROUPS.contains(&group) {
        return Parsed::default();
    }
    let name = value["metadata"]["name"].as_str().unwrap_or_default();
    let mut parsed = Parsed::error(
        "UnknownKind",
        format!("{group} has no kind {kind_name} (object {name:?})"),
    );
    parsed.diagnostics[0].severity = Severity::Warning;
    parsed
}

fn row(meta: Shared<Meta>, value: &Value) -> Parsed {
    let (kind, key) = (meta.kind, meta.key.clone());
    macro_rules! kube_row {
        ($type:ident) => {
            kube::$type::parse(meta, value).map(Row::from)
        };
    }
    macro_rules! typed_row {
        ($type:ty) => {
            typed::parse::<$type>(meta, value).map(Row::from)
        };
    }
    macro_rules! checked_row {
        ($type:ty, $check:path) => {
            typed::parse::<$type>(meta, value).and_then(|config| {
                let errors = $check(&config.spec);
                if errors.is_empty() {
                    Ok(Row::from(config))
                } else {
                    Err(errors)
                }
            })
        };
    }
    let parsed: Result<Row, Vec<FieldError>> = match kind {
        Kind::Namespace => kube_row!(Namespace),
        Kind::Node => kube_row!(Node),
        Kind::Pod => kube_row!(Pod),
        Kind::Service => kube_row!(Service),
        Kind::EndpointSlice => kube_row!(EndpointSlice),
        Kind::Secret => kube_row!(Secret),
        Kind::ConfigMap => kube_row!(ConfigMap),
        Kind::GatewayClass => typed_row!(gateway_api::GatewayClass),
        Kind::KubeGateway => typed_row!(gateway_api::Gateway),
        Kind::HttpRoute => checked_row!(gateway_api::HttpRoute, gateway_api::expression::of_http),
        Kind::GrpcRoute => checked_row!(gateway_api::GrpcRoute, gateway_api::expression::of_grpc),
        Kind::TlsRoute => typed_row!(gateway_api::TlsRoute),
        Kind::TcpRoute => typed_row!(gateway_api::TcpRoute),
        Kind::UdpRoute => typed_row!(gateway_api::UdpRoute),
        Kind::BackendTlsPolicy => typed_row!(gateway_api::BackendTlsPolicy),
        Kind::ListenerSet => typed_row!(gateway_api::ListenerSet),
        Kind::ReferenceGrant => typed_row!(gateway_api::ReferenceGrant),
        Kind::BackendTrafficPolicy => typed_row!(gateway_api::BackendTrafficPolicy),
        Kind::Ingress => typed_row!(kube::Ingress),
        Kind::IngressClass => typed_row!(kube::IngressClass),
        Kind::ServiceExport => typed_row!(mcs::ServiceExport),
        Kind::ServiceImport => typed_row!(mcs::ServiceImport),
        _ => {
            let (row, diagnostics) = istio::parse(meta, value);
            return Parsed {
                rejected: if row.is_none() { vec![(kind, key)] } else { Vec::new() },
                rows: row.into_iter().collect(),
                diagnostics,
            };
        }
    };
    match parsed {
        Ok(row) => Parsed {
            rows: vec![row],
            ..Parsed::default()
        },
        Err(errors) => rejected(&key.cluster, kind, value, "InvalidField", errors),
    }
}

fn error(field: &str, message: String) -> FieldError {
    FieldError {
        field: field.to_owned(),
        message,
    }
}

/// An object that does not count, named as well as it names itself.
fn rejected(cluster: &ClusterId, kind: Kind, value: &Value, code: &'static str, errors: Vec<FieldError>) -> Parsed {
    let metadata = |name: &str| scalar_text(&value["metadata"][name]).unwrap_or_default();
    let namespace = match metadata("namespace") {
        _ if kind.is_cluster_scoped() => Namespace::default(),
        namespace if namespace.is_empty() => Namespace::new_static("default"),
        namespace => Namespace::from(namespace),
    };
    let key = ObjectKey::new(cluster, namespace, metadata("name"));
    let diagnostic = |error| Diagnostic::of_object(kind, key.clone(), Severity::Error, code, error);
    Parsed {
        rows: Vec::new(),
        diagnostics: errors.into_iter().map(diagnostic).collect(),
        rejected: vec![(kind, key)],
    }
}
