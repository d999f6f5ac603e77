//! The injector's configuration: the keys `config` and `values` of its ConfigMap, parsed and compiled.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::{functions::functions, overlays::Overlays};
use crate::{
    api::{
        FieldError,
        field::{self, FieldErrors},
        yaml,
    },
    base::{
        Labels,
        select::{LabelSelector, Requirement},
    },
    template::{Limits, Templates, Value},
};

/// An invalid injector configuration. The caller keeps the last valid one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {}{message}{}", prefix(.field.as_ref()), place(.line, .column))]
pub struct ConfigError {
    /// Key of the ConfigMap: `config` or `values`.
    pub key: &'static str,
    /// The field, such as `templates.sidecar`.
    pub field: Option<String>,
    /// The line, in the template if the field is one, else in the text of the key; 0 if unknown.
    pub line: u64,
    /// The column; 0 if unknown.
    pub column: u64,
    /// The reason.
    pub message: String,
}

fn prefix(field: Option<&String>) -> String {
    field.map(|field| format!("{field}: ")).unwrap_or_default()
}

fn place(line: &u64, column: &u64) -> String {
    match (line, column) {
        (0, _) => String::new(),
        (line, 0) => format!(" (line {line})"),
        (line, column) => format!(" (line {line}, column {column})"),
    }
}

/// The maximum number of templates of a pod. The annotation of a pod may repeat one, whose overlay is merged each time.
pub(super) const MAX_TEMPLATES: usize = 32;

/// The treatment of pods that do not say whether they want a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// They are injected.
    Enabled,
    /// They are not injected.
    Disabled,
    /// Nothing is injected: the configuration has another word.
    Unknown(String),
}

/// The parsed key `config`.
pub(super) struct Config {
    pub(super) policy: Policy,
    pub(super) default_templates: Vec<String>,
    pub(super) aliases: BTreeMap<String, Vec<String>>,
    /// Compiled templates by name.
    pub(super) templates: BTreeMap<String, Templates>,
    /// Their texts, as written.
    pub(super) texts: BTreeMap<String, String>,
    pub(super) never: Vec<LabelSelector>,
    pub(super) always: Vec<LabelSelector>,
    pub(super) injected_annotations: BTreeMap<String, String>,
    /// The parsed key `values`.
    pub(super) values: Values,
    /// The outputs of the templates that were parsed last.
    pub(super) overlays: Overlays,
}

impl Config {
    pub(super) fn parse(config: &str, values: &str, limits: &Limits) -> Result<Self, ConfigError> {
        let fields = Fields(Json::Object(document("config", config)?));
        let mut default_templates = fields.strings("defaultTemplates")?;
        if default_templates.is_empty() {
            default_templates.push("sidecar".to_owned());
        }
        let policy = fields.0.get("policy").and_then(Json::as_str).unwrap_or_default();
        let texts = fields.map("templates")?;
        Ok(Self {
            policy: match policy {
                "enabled" => Policy::Enabled,
                "disabled" => Policy::Disabled,
                other => Policy::Unknown(other.to_owned()),
            },
            default_templates,
            aliases: fields.aliases()?,
            templates: compiled(&texts, limits)?,
            texts,
            never: fields.selectors("neverInjectSelector")?,
            always: fields.selectors("alwaysInjectSelector")?,
            injected_annotations: fields.map("injectedAnnotations")?,
            values: Values::parse(values)?,
            overlays: Overlays::default(),
        })
    }

    /// Returns the templates that names stand for, at most one more than [`MAX_TEMPLATES`]. Aliases are expanded once.
    pub(super) fn resolve<'a>(&'a self, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        let expand = |name: &'a str| match self.aliases.get(name) {
            Some(names) => names.iter().map(String::as_str).collect(),
            None => vec![name],
        };
        names.flat_map(expand).take(MAX_TEMPLATES + 1).collect()
    }
}

fn document(key: &'static str, text: &str) -> Result<serde_json::Map<String, Json>, ConfigError> {
    let error = |line, column, message: String| ConfigError {
        key,
        field: None,
        line,
        column,
        message,
    };
    let text = yaml::text(text.as_bytes()).map_err(|problem| error(problem.line, problem.column, problem.message))?;
    let documents = yaml::documents(text);
    let Some(document) = documents.first() else {
        return Ok(serde_json::Map::new());
    };
    match document.parse() {
        Ok(Json::Object(fields)) => Ok(fields),
        Ok(Json::Null) => Ok(serde_json::Map::new()),
        Ok(_) => Err(error(document.line, 0, "must be a mapping".to_owned())),
        Err(problem) => Err(error(problem.line, problem.column, problem.message)),
    }
}

/// The fields of the key `config`.
struct Fields(Json);

impl Fields {
    /// Reads fields. Numbers and booleans become text where text is wanted, and null is an absent value, or an empty
    /// text in a list.
    ///
    /// Parity (pkg/kube/inject/inject.go, UnmarshalConfig): `sigs.k8s.io/yaml` converts to the types of Go. Charts
    /// write labels such as `no-sidecar: true` without quotes.
    fn read<T>(&self, read: impl FnOnce(&field::Fields<'_>) -> T) -> Result<T, ConfigError> {
        let errors = FieldErrors::default();
        let value = read(&field::Fields::root(&self.0, &errors));
        errors.finish(value).map_err(|mut errors| {
            let FieldError { field, message } = errors.swap_remove(0);
            invalid(field, message)
        })
    }

    fn strings(&self, name: &str) -> Result<Vec<String>, ConfigError> {
        self.read(|fields| strings(fields, name))
    }

    fn map(&self, name: &str) -> Result<BTreeMap<String, String>, ConfigError> {
        self.read(|fields| {
            let entries = fields.labels(name);
            entries
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect()
        })
    }

    fn aliases(&self) -> Result<BTreeMap<String, Vec<String>>, ConfigError> {
        let names = self.0.get("aliases").and_then(Json::as_object);
        let names = names.into_iter().flat_map(serde_json::Map::keys);
        self.read(|fields| {
            let aliases = fields.object("aliases");
            names.map(|name| (name.clone(), strings(&aliases, name))).collect()
        })
    }

    fn selectors(&self, name: &str) -> Result<Vec<LabelSelector>, ConfigError> {
        self.read(|fields| fields.objects(name).iter().map(selector).collect())
    }
}

fn strings(fields: &field::Fields<'_>, name: &str) -> Vec<String> {
    fields.nullable_texts(name).into_iter().map(String::from).collect()
}

fn selector(fields: &field::Fields<'_>) -> LabelSelector {
    let requirement = |fields: &field::Fields<'_>| {
        let values = fields.nullable_texts("values");
        Requirement::new(fields.text("key"), fields.text("operator"), values)
    };
    LabelSelector {
        match_labels: fields.labels("matchLabels"),
        match_expressions: fields.objects("matchExpressions").iter().map(requirement).collect(),
    }
}

fn invalid(field: String, message: String) -> ConfigError {
    ConfigError {
        key: "config",
        field: Some(field),
        line: 0,
        column: 0,
        message,
    }
}

/// Compiles templates by their names.
fn compiled(texts: &BTreeMap<String, String>, limits: &Limits) -> Result<BTreeMap<String, Templates>, ConfigError> {
    let compile = |(name, text): (&String, &String)| {
        let mut templates = Templates::new(functions(), limits.clone());
        match templates.parse(name, text) {
            Ok(()) => Ok((name.clone(), templates)),
            Err(error) => Err(ConfigError {
                line: error.line as u64,
                column: error.column as u64,
                ..invalid(format!("templates.{name}"), error.message)
            }),
        }
    };
    texts.iter().map(compile).collect()
}

/// The parsed key `values`: the values of the chart that templates read.
pub(super) struct Values {
    json: Json,
    template: Value,
}

impl Values {
    fn parse(text: &str) -> Result<Self, ConfigError> {
        let json = Json::Object(document("values", text)?);
        let values = Self {
            template: Value::from_json(&json),
            json,
        };
        for path in [HUB, IMAGE, VARIANT, CLUSTER, NETWORK] {
            values.check(path, "must be a string", Json::is_string)?;
        }
        for path in [HOLD, REWRITE_PROBES] {
            values.check(path, "must be a boolean", Json::is_boolean)?;
        }
        Ok(values)
    }

    fn check(&self, path: &str, message: &str, is_valid: impl Fn(&Json) -> bool) -> Result<(), ConfigError> {
        match self.json.pointer(path) {
            Some(value) if !value.is_null() && !is_valid(value) => Err(ConfigError {
                key: "values",
                field: Some(path.trim_start_matches('/').replace('/', ".")),
                line: 0,
                column: 0,
                message: message.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the values as templates see them.
    pub(super) fn for_template(&self) -> Value {
        self.template.clone()
    }

    fn text(&self, path: &str) -> &str {
        self.json.pointer(path).and_then(Json::as_str).unwrap_or_default()
    }

    fn is_true(&self, path: &str) -> bool {
        self.json.pointer(path).and_then(Json::as_bool).unwrap_or_default()
    }

    /// Returns `global.multiCluster.clusterName`.
    pub(super) fn cluster(&self) -> &str {
        self.text(CLUSTER)
    }

    /// Returns `global.network`.
    pub(super) fn network(&self) -> &str {
        self.text(NETWORK)
    }

    /// Returns true if containers of applications start after the proxy.
    pub(super) fn holds_application(&self) -> bool {
        self.is_true(HOLD)
    }

    /// Returns true if the proxy answers probes for the application.
    pub(super) fn rewrites_probes(&self) -> bool {
        self.is_true(REWRITE_PROBES)
    }

    /// Returns the image of the proxy.
    pub(super) fn proxy_image(&self, image_type: Option<&str>) -> String {
        let name = Some(self.text(IMAGE)).filter(|name| !name.is_empty());
        self.image(name.unwrap_or("proxyv2"), image_type)
    }

    /// Returns an image of the release by its name.
    ///
    /// Parity (pkg/kube/inject/inject.go, ProxyImage): a type replaces a known type at the end of the tag.
    pub(super) fn image(&self, name: &str, image_type: Option<&str>) -> String {
        let tag = match self.json.pointer("/global/tag") {
            Some(Json::String(tag)) => tag.clone(),
            None | Some(Json::Null) => String::new(),
            Some(other) => other.to_string(),
        };
        let image_type = image_type.unwrap_or_else(|| self.text(VARIANT));
        let base = ["-distroless", "-debug"]
            .iter()
            .find_map(|suffix| tag.strip_suffix(suffix));
        let tag = match image_type {
            "" => tag.clone(),
            "default" => base.unwrap_or(&tag).to_owned(),
            other => format!("{}-{other}", base.unwrap_or(&tag)),
        };
        format!("{}/{name}:{tag}", self.text(HUB))
    }
}

const HUB: &str = "/global/hub";
const IMAGE: &str = "/global/proxy/image";
const VARIANT: &str = "/global/variant";
const CLUSTER: &str = "/global/multiCluster/clusterName";
const NETWORK: &str = "/global/network";
const HOLD: &str = "/global/proxy/holdApplicationUntilProxyStarts";
const REWRITE_PROBES: &str = "/sidecarInjectorWebhook/rewriteAppHTTPProbe";

/// Returns true if a selector selects pods by their labels. An empty selector selects none.
pub(super) fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let is_empty = selector.match_labels.is_empty() && selector.match_expressions.is_empty();
    !is_empty && selector.matches(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(config: &str, values: &str) -> String {
        match Config::parse(config, values, &Limits::default()) {
            Ok(_) => "valid".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn errors_name_template_and_line() {
        let config = "templates:\n  sidecar: |\n    spec:\n    {{ nothing . }}\n";
        assert_eq!(
            error(config, ""),
            "config: templates.sidecar: template: sidecar:2: function \"nothing\" not defined (line 2)"
        );
        assert!(
            error("policy: [", "").starts_with("config: "),
            "{}",
            error("policy: [", "")
        );
        assert_eq!(
            error("templates: [a]", ""),
            "config: templates: expected an object, got a list"
        );
        assert_eq!(
            error("injectedAnnotations: {a: [1]}", ""),
            "config: injectedAnnotations.a: expected a string, got a list"
        );
        assert_eq!(error("", "global: {hub: [a]}"), "values: global.hub: must be a string");
        assert_eq!(error("", ""), "valid");
    }

    #[test]
    fn scalars_become_text() {
        let text =
            "{injectedAnnotations: {a: 1, b: null}, defaultTemplates: [1, null], aliases: {both: [true, null], none: null},
                     alwaysInjectSelector: null, neverInjectSelector: [{matchLabels: {a: true, b: 1, c: 1.5, d: null}},
                     {matchLabels: null, matchExpressions: [{key: e, operator: In, values: [false, 2, null]},
                      {key: 1, operator: Exists, values: null}]}, null]}";
        let config = Config::parse(text, "", &Limits::default()).expect("the configuration is valid");
        let map = |entries: &[(&str, &str)]| -> BTreeMap<String, String> {
            let entries = entries.iter();
            entries
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        assert_eq!(config.injected_annotations, map(&[("a", "1"), ("b", "")]));
        assert_eq!(config.default_templates, ["1", ""]);
        let both = vec!["true".to_owned(), String::new()];
        assert_eq!(
            config.aliases,
            BTreeMap::from([("both".to_owned(), both), ("none".to_owned(), Vec::new())])
        );
        assert!(config.always.is_empty());
        let expected: Vec<LabelSelector> = serde_json::from_value(serde_json::json!([
            {"matchLabels": {"a": "true", "b": "1", "c": "1.5", "d": ""}},
            {"matchExpressions": [{"key": "e", "operator": "In", "values": ["false", "2", ""]},
                                  {"key": "1", "operator": "Exists"}]},
            {},
        ]))
        .expect("the selectors are valid");
        assert_eq!(config.never, expected);
    }

    #[test]
    fn images_have_types() {
        let image = |tag: &str, image_type| {
            let values = Values::parse(&format!("global: {{hub: h, tag: {tag}, variant: debug}}")).expect("valid");
            values.proxy_image(image_type)
        };
        assert_eq!(image("v1", None), "h/proxyv2:v1-debug");
        assert_eq!(image("v1-debug", Some("distroless")), "h/proxyv2:v1-distroless");
        assert_eq!(image("v1-distroless", Some("default")), "h/proxyv2:v1");
        assert_eq!(image("1.5", Some("")), "h/proxyv2:1.5");
    }
}
