//! Parsing of one document to rows and diagnostics, by its `apiVersion` and `kind`.

use serde_json::Value;

use super::{
    Diagnostic, FieldError, Kind, Meta, Row, Severity,
    diagnostics::INVALID,
    field::scalar_text,
    gateway_api,
    istio::{
        self, ErrorPolicy, destination_rule, envoy_filter, extension, gateway, proxy_config, security, service_entry,
        sidecar, telemetry, virtual_service, workload,
    },
    kinds::with_kinds,
    old_kinds::is_old_kind,
    row::types,
    typed,
};
use crate::base::{ClusterId, Namespace, ObjectKey, Shared};

/// The content of a document.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedDocument {
    /// The objects that apply.
    pub rows: Vec<Row>,
    /// The objects that exist but do not apply.
    pub rejected: Vec<(Kind, ObjectKey)>,
    /// The problems found.
    pub diagnostics: Vec<Diagnostic>,
}

impl ParsedDocument {
    fn error(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            diagnostics: vec![Diagnostic::of_document("", code, message)],
            ..Self::default()
        }
    }

    /// Adds the content of another document.
    pub fn extend(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.rejected.extend(other.rejected);
        self.diagnostics.extend(other.diagnostics);
    }
}

/// Code of the diagnostic about a kind that is not an input.
pub const UNKNOWN_KIND: &str = "UnknownKind";

/// Parses a document. A list yields its items; kinds that are not inputs are skipped with a warning.
pub fn parse(cluster: &ClusterId, value: &Value) -> ParsedDocument {
    if value.is_null() {
        return ParsedDocument::default();
    }
    if !value.is_object() {
        return ParsedDocument::error("NotAnObject", "the document is not an object with apiVersion and kind");
    }
    let (Some(api_version), Some(kind)) = (text(value, "apiVersion"), text(value, "kind")) else {
        return ParsedDocument::error("MissingKind", "the document has no apiVersion and kind");
    };
    if let (Some(item_kind), Value::Array(items)) = (kind.strip_suffix("List"), &value["items"]) {
        return items_of_list(cluster, api_version, item_kind, items);
    }
    object(cluster, api_version, kind, value)
}

fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get(name)?.as_str().filter(|text| !text.is_empty())
}

/// Parses the items of a list. Items of a `PodList` may omit `apiVersion` and `kind`, items of a `List` may not.
fn items_of_list(cluster: &ClusterId, api_version: &str, item_kind: &str, items: &[Value]) -> ParsedDocument {
    let mut parsed = ParsedDocument::default();
    for (position, item) in items.iter().enumerate() {
        let version = text(item, "apiVersion").or((!item_kind.is_empty()).then_some(api_version));
        let kind = text(item, "kind").or((!item_kind.is_empty()).then_some(item_kind));
        parsed.extend(match (version, kind) {
            (Some(version), Some(kind)) => object(cluster, version, kind, item),
            _ => ParsedDocument::error("MissingKind", format!("items[{position}] has no apiVersion and kind")),
        });
    }
    parsed
}

fn object(cluster: &ClusterId, api_version: &str, kind_name: &str, value: &Value) -> ParsedDocument {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let known = Kind::ALL
        .iter()
        .copied()
        .find(|kind| kind.is_object() && kind.name() == kind_name && kind.group() == group);
    let Some(kind) = known else {
        return unknown_kind(api_version, kind_name, value);
    };
    if !kind.versions().contains(&version) {
        let message = format!(
            "{api_version} is not served; want one of: {}",
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

/// Parses an object of a known kind. Its own `apiVersion` and `kind` are ignored: items of lists have none.
pub fn parse_object(cluster: &ClusterId, kind: Kind, value: &Value) -> ParsedDocument {
    match Meta::parse(kind, cluster, value) {
        Ok(meta) => parse_row(Shared::new(meta), value),
        Err(errors) => rejected(cluster, kind, value, INVALID, errors),
    }
}

/// Groups of which every kind is an input. An unknown kind in them is a mistake; in other groups it is not an input.
const ISTIO_GROUPS: [&str; 4] = [
    "networking.istio.io",
    "security.istio.io",
    "telemetry.istio.io",
    "extensions.istio.io",
];

fn unknown_kind(api_version: &str, kind_name: &str, value: &Value) -> ParsedDocument {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let name = value["metadata"]["name"].as_str().unwrap_or_default();
    let message = if is_old_kind(api_version, kind_name) {
        format!(
            "{kind_name} {name:?} ({api_version}) is of an old release and has no effect; hint: istiod convert FILE"
        )
    } else if ISTIO_GROUPS.contains(&group) {
        format!("{group} has no kind {kind_name} (object {name:?})")
    } else {
        format!("objects of kind {kind_name} ({api_version}) are not read")
    };
    let mut parsed = ParsedDocument::error(UNKNOWN_KIND, message);
    parsed.diagnostics[0].severity = Severity::Warning;
    parsed
}

macro_rules! parse_by_kind {
    ($($(#[$doc:meta])* $kind:ident: $row:ty {
        table: $table:ident, class: $class:ident, parser: $parser:ident $arguments:tt, $($column:tt)*
    })*) => {
        fn parse_row(meta: Shared<Meta>, manifest: &Value) -> ParsedDocument {
            match meta.kind {
                $(Kind::$kind => parse_by_kind!($parser $arguments, types::$kind, meta, manifest),)*
            }
        }
    };
    (kube(), $row:ty, $meta:ident, $manifest:ident) => {
        single_row(&$meta, $manifest, <$row>::parse($meta.clone(), $manifest))
    };
    (typed(), $row:ty, $meta:ident, $manifest:ident) => {{
        let parsed: Result<$row, _> = typed::parse($meta.clone(), $manifest);
        single_row(&$meta, $manifest, parsed)
    }};
    (typed($check:path), $row:ty, $meta:ident, $manifest:ident) => {{
        let parsed: Result<$row, _> = typed::parse($meta.clone(), $manifest);
        let checked = parsed.and_then(|config| match $check(&config.spec) {
            errors if errors.is_empty() => Ok(config),
            errors => Err(errors),
        });
        single_row(&$meta, $manifest, checked)
    }};
    (istio($check:path, $policy:ident), $row:ty, $meta:ident, $manifest:ident) => {{
        let (row, diagnostics) = istio::parse($meta.clone(), $manifest, $check, ErrorPolicy::$policy);
        let row: Option<$row> = row;
        ParsedDocument {
            rejected: if row.is_none() { vec![($meta.kind, $meta.key.clone())] } else { Vec::new() },
            rows: row.into_iter().map(Row::from).collect(),
            diagnostics,
        }
    }};
    (internal(), $row:ty, $meta:ident, $manifest:ident) => {
        ParsedDocument::error("UnknownKind", format!("{} is not a kind of manifests", $meta.kind.name()))
    };
}

with_kinds!(parse_by_kind);

fn single_row(meta: &Meta, manifest: &Value, parsed: Result<impl Into<Row>, Vec<FieldError>>) -> ParsedDocument {
    match parsed {
        Ok(row) => ParsedDocument {
            rows: vec![row.into()],
            ..ParsedDocument::default()
        },
        Err(errors) => rejected(&meta.key.cluster, meta.kind, manifest, INVALID, errors),
    }
}

fn error(field: &str, message: String) -> FieldError {
    FieldError {
        field: field.to_owned(),
        message,
    }
}

/// Returns a rejected object. Its key is read leniently, as its metadata may be invalid.
fn rejected(
    cluster: &ClusterId,
    kind: Kind,
    value: &Value,
    code: &'static str,
    errors: Vec<FieldError>,
) -> ParsedDocument {
    let metadata = |name: &str| scalar_text(&value["metadata"][name]).unwrap_or_default();
    let namespace = match metadata("namespace") {
        _ if kind.is_cluster_scoped() => Namespace::default(),
        namespace if namespace.is_empty() => Namespace::new_static("default"),
        namespace => Namespace::from(namespace),
    };
    let key = ObjectKey::new(cluster, namespace, metadata("name"));
    let diagnostic = |error| Diagnostic::of_object(kind, key.clone(), Severity::Error, code, error);
    ParsedDocument {
        rows: Vec::new(),
        diagnostics: errors.into_iter().map(diagnostic).collect(),
        rejected: vec![(kind, key)],
    }
}
