//! The mesh folder: file names and contents to everything that they declare. Pure: whoever calls has read the files.
//!
//! A file's name decides what it is: `mesh.yaml`, `meshnetworks.yaml`, `env.yaml`, `proxies.yaml` and `scenario.yaml`
//! are not read as objects, `kube-<id>.yaml` belongs to the cluster `<id>`, everything else to the config cluster.
//! Reading goes in two steps, so that one changed file is parsed alone: [`FileContent::read`], then what the files declare
//! together, [`Settings::of`] and [`declared`].

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Config, Diagnostic, FieldError, Kind, Meta, Row, Severity, document, mesh_config, mesh_networks,
    meta::DEFAULT_CREATION,
    yaml::{self, YamlError},
};
use crate::{
    base::{ClusterId, Labels, ObjectKey, Shared, SmolStr, Version},
    proto::istio::mesh::v1alpha1::{MeshConfig, MeshNetworks},
};

/// What a file is, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Objects of a cluster; `None`: the config cluster.
    Objects(Option<ClusterId>),
    /// MeshConfig.
    Mesh,
    /// MeshNetworks.
    Networks,
    /// Feature variables.
    Environment,
    /// The proxies that `render` writes for.
    Proxies,
    /// Of no concern.
    Ignored,
}

impl Role {
    /// The role of a file of the folder itself; only `*.yaml` and `*.yml` that do not begin with a dot count.
    pub fn of(file_name: &str) -> Self {
        let stem = file_name
            .strip_suffix(".yaml")
            .or_else(|| file_name.strip_suffix(".yml"));
        match stem {
            None | Some("scenario") => Self::Ignored,
            Some(_) if file_name.starts_with('.') => Self::Ignored,
            Some("mesh") => Self::Mesh,
            Some("meshnetworks") => Self::Networks,
            Some("env") => Self::Environment,
            Some("proxies") => Self::Proxies,
            Some(stem) => match stem.strip_prefix("kube-") {
                Some(id) if !id.is_empty() => Self::Objects(Some(ClusterId::new(id))),
                _ => Self::Objects(None),
            },
        }
    }
}

/// What one file declares.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileContent {
    /// Objects, each with the place that declares it, in the order of the file.
    pub objects: Vec<(Row, SmolStr)>,
    /// Objects that are there but do not count.
    pub rejected: Vec<(Kind, ObjectKey)>,
    /// True if a part of the file could not be read at all, so that nobody knows which objects it declares.
    pub unreadable: bool,
    /// MeshConfig.
    pub mesh_config: Option<Shared<MeshConfig>>,
    /// MeshNetworks.
    pub networks: Option<Shared<MeshNetworks>>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies`.
    pub proxies: Vec<Value>,
    /// What is wrong.
    pub diagnostics: Vec<Diagnostic>,
    /// What its documents gave, by the hash of their texts: an edit of one among thousands parses one.
    parsed: BTreeMap<Version, Shared<document::Parsed>>,
}

impl FileContent {
    /// Reads a file of the folder. `cluster` is the config cluster.
    pub fn read(file_name: &str, bytes: &[u8], cluster: &ClusterId) -> Self {
        Self::read_as(&Role::of(file_name), file_name, bytes, cluster, &Self::default())
    }

    /// Reads a file whose role is known; its name is only told. What it has in common with the previous content is not
    /// parsed again.
    pub fn read_as(role: &Role, file_name: &str, bytes: &[u8], cluster: &ClusterId, previous: &Self) -> Self {
        let mut content = Self::default();
        let owner = match role {
            Role::Ignored => return content,
            Role::Objects(Some(id)) => Some(id),
            Role::Objects(None) => Some(cluster),
            Role::Mesh | Role::Networks | Role::Environment | Role::Proxies => None,
        };
        let text = match yaml::text(bytes) {
            Ok(text) => text,
            Err(error) => {
                content.unreadable(file_name, &error);
                return content;
            }
        };
        for document in yaml::documents(text) {
            let place = place(file_name, document.line);
            let hash = Version::of(document.text.as_bytes());
            if let (Some(owner), Some(parsed)) = (owner, previous.parsed.get(&hash)) {
                content.objects(owner == cluster, parsed, &place);
                content.parsed.insert(hash, parsed.clone());
                continue;
            }
            let value = match document.parse() {
                Ok(value) => value,
                Err(error) => {
                    content.unreadable(file_name, &error);
                    continue;
                }
            };
            if let Some(owner) = owner {
                let parsed = Shared::new(document::parse(owner, &value));
                content.objects(owner == cluster, &parsed, &place);
                content.parsed.insert(hash, parsed);
            } else {
                content.settings(role, &value, &place);
            }
        }
        content
    }

    /// A file whose bytes cannot be had.
    pub fn absent(file_name: &str, message: &str) -> Self {
        Self {
            unreadable: true,
            diagnostics: vec![Diagnostic::of_document(file_name, "UnreadableFile", message)],
            ..Self::default()
        }
    }

    fn unreadable(&mut self, file_name: &str, error: &YamlError) {
        self.unreadable = true;
        let place = SmolStr::new(format!("{file_name}:{}:{}", error.line, error.column));
        self.diagnostics
            .push(Diagnostic::of_document(place, "InvalidYaml", error.message.clone()));
    }

    fn settings(&mut self, role: &Role, value: &Value, place: &SmolStr) {
        match role {
            Role::Mesh => match mesh_config::parse(value) {
                Ok(parsed) => {
                    self.findings(place, Kind::MeshConfig, Severity::Warning, parsed.warnings);
                    self.mesh_config = Some(Shared::new(parsed.config));
                }
                Err(errors) => self.broken(place, Kind::MeshConfig, errors),
            },
            Role::Networks => match mesh_networks::parse(value) {
                Ok(parsed) => {
                    self.findings(place, Kind::MeshNetworks, Severity::Warning, parsed.warnings);
                    self.networks = Some(Shared::new(parsed.networks));
                }
                Err(errors) => self.broken(place, Kind::MeshNetworks, errors),
            },
            Role::Environment => self.variables(value, place),
            Role::Proxies => match &value["proxies"] {
                Value::Array(proxies) => self.proxies.extend(proxies.iter().cloned()),
                _ => self.wrong(place, "InvalidProxies", "has no list `proxies`"),
            },
            Role::Objects(_) | Role::Ignored => {}
        }
    }

    /// Takes the objects of a document. Further clusters give services and endpoints, but no config.
    fn objects(&mut self, is_config_cluster: bool, parsed: &document::Parsed, place: &SmolStr) {
        for row in &parsed.rows {
            if is_config_cluster || row.kind().counts_in_remote_clusters() {
                self.objects.push((row.clone(), place.clone()));
            } else {
                let finding = FieldError {
                    field: String::new(),
                    message: "config counts only in the config cluster".to_owned(),
                };
                let key = row.key().clone();
                let diagnostic = Diagnostic::of_object(row.kind(), key, Severity::Warning, "RemoteConfig", finding);
                self.diagnostics.push(diagnostic.at(place));
            }
        }
        self.rejected.extend(parsed.rejected.iter().cloned());
        let diagnostics = parsed.diagnostics.iter().cloned();
        self.diagnostics
            .extend(diagnostics.map(|diagnostic| diagnostic.at(place)));
    }

    fn variables(&mut self, value: &Value, place: &SmolStr) {
        let Value::Object(variables) = value else {
            return self.wrong(place, "InvalidVariables", "is no object of names and values");
        };
        for (name, value) in variables {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Bool(flag) => flag.to_string(),
                Value::Number(number) => number.to_string(),
                Value::Null => String::new(),
                Value::Array(_) | Value::Object(_) => {
                    self.wrong(place, "InvalidVariables", &format!("the value of {name} is no text"));
                    continue;
                }
            };
            self.env.insert(name.clone(), text);
        }
    }

    fn wrong(&mut self, place: &SmolStr, code: &'static str, message: &str) {
        self.unreadable = true;
        self.diagnostics
            .push(Diagnostic::of_document(place.clone(), code, message));
    }

    fn broken(&mut self, place: &SmolStr, kind: Kind, errors: Vec<FieldError>) {
        self.unreadable = true;
        self.findings(place, kind, Severity::Error, errors);
    }

    fn findings(&mut self, place: &SmolStr, kind: Kind, severity: Severity, findings: Vec<FieldError>) {
        let code = if severity == Severity::Error {
            "InvalidField"
        } else {
            "Suspicious"
        };
        let key = ObjectKey {
            name: SmolStr::new_static("istio"),
            ..ObjectKey::default()
        };
        let diagnostic = |finding| Diagnostic::of_object(kind, key.clone(), severity, code, finding).at(place);
        self.diagnostics.extend(findings.into_iter().map(diagnostic));
    }

    /// This content with what must not be lost by a mistake in an edit: a file that cannot be read keeps all that it
    /// declared before, an object that became invalid keeps its last good form.
    pub fn after(mut self, previous: &Self) -> Self {
        if self.unreadable {
            return Self {
                diagnostics: self.diagnostics,
                unreadable: true,
                ..previous.clone()
            };
        }
        for (kind, key) in &self.rejected {
            let kept = previous
                .objects
                .iter()
                .find(|(row, _)| row.kind() == *kind && row.key() == key);
            self.objects.extend(kept.cloned());
        }
        self
    }
}

fn place(file_name: &str, line: u64) -> SmolStr {
    SmolStr::new(format!("{file_name}:{line}"))
}

/// Everything that a folder declares.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Folder {
    /// All rows by the cluster that they come from, in the order of their kinds and keys. Mesh config and networks are
    /// among those of the config cluster; the mesh config always is.
    pub rows: BTreeMap<ClusterId, Vec<Row>>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies.yaml`, as written.
    pub proxies: Vec<Value>,
    /// What is wrong: by file, then what is declared twice.
    pub diagnostics: Vec<Diagnostic>,
}

/// Reads a whole folder. `cluster` is the config cluster, `mesh_key` the key of mesh config and networks.
pub fn read(files: &[(String, impl AsRef<[u8]>)], cluster: &ClusterId, mesh_key: &ObjectKey) -> Folder {
    let contents = files
        .iter()
        .map(|(name, bytes)| (name.clone(), FileContent::read(name, bytes.as_ref(), cluster)))
        .collect();
    Folder::of(&contents, cluster, mesh_key)
}

impl Folder {
    /// Puts files together. Of objects that are declared twice the last one counts, in the order of file names.
    fn of(files: &BTreeMap<String, FileContent>, cluster: &ClusterId, mesh_key: &ObjectKey) -> Self {
        let mut rows: BTreeMap<ClusterId, Vec<Row>> = BTreeMap::new();
        let mut diagnostics: Vec<_> = files
            .values()
            .flat_map(|content| content.diagnostics.iter().cloned())
            .collect();
        for ((owner, ..), object) in declared(files.values(), |_| true) {
            rows.entry(owner.clone()).or_default().push(object.row.clone());
            diagnostics.extend(object.twice);
        }
        let settings = Settings::of(files.values(), mesh_key);
        rows.entry(cluster.clone()).or_default().extend(settings.rows);
        Self {
            rows,
            env: settings.env,
            proxies: settings.proxies,
            diagnostics,
        }
    }
}

/// What a folder declares beside objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Mesh config, which is there always, and networks.
    pub rows: Vec<Row>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies.yaml`, as written.
    pub proxies: Vec<Value>,
}

impl Settings {
    /// What files declare together. Of several that declare the same the last one counts, in their order.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a FileContent>, mesh_key: &ObjectKey) -> Self {
        let mut settings = Self::default();
        let (mut mesh_config, mut networks) = (None, None);
        for content in files {
            mesh_config = content.mesh_config.as_ref().or(mesh_config);
            networks = content.networks.as_ref().or(networks);
            let variables = content.env.iter().map(|(name, value)| (name.clone(), value.clone()));
            settings.env.extend(variables);
            settings.proxies.extend(content.proxies.iter().cloned());
        }
        let mesh_config = mesh_config.map_or_else(mesh_config::defaults, |config| (**config).clone());
        let mesh_config = mesh_row(Kind::MeshConfig, mesh_key, mesh_config);
        let networks = networks.map(|networks| mesh_row(Kind::MeshNetworks, mesh_key, (**networks).clone()));
        settings.rows.push(mesh_config.into());
        settings.rows.extend(networks.map(Row::from));
        settings
    }
}

/// An object that files declare.
#[derive(Clone, Debug)]
pub struct Declared<'a> {
    /// The declaration that counts.
    pub row: &'a Row,
    place: &'a SmolStr,
    /// One for each declaration that does not.
    pub twice: Vec<Diagnostic>,
}

/// The objects that files declare, in the order of their clusters, kinds and keys: those that are `wanted`. Of several
/// declarations the last one counts.
pub fn declared<'a>(
    files: impl IntoIterator<Item = &'a FileContent>,
    wanted: impl Fn(&Row) -> bool,
) -> BTreeMap<(&'a ClusterId, Kind, &'a ObjectKey), Declared<'a>> {
    let mut objects: BTreeMap<_, Declared> = BTreeMap::new();
    let declarations = files.into_iter().flat_map(|content| &content.objects);
    for (row, place) in declarations.filter(|(row, _)| wanted(row)) {
        let key = (&row.key().cluster, row.kind(), row.key());
        let again = |object: &mut Declared<'a>| {
            object.twice.push(declared_twice(row, object.place, place));
            (object.row, object.place) = (row, place);
        };
        objects.entry(key).and_modify(again).or_insert(Declared {
            row,
            place,
            twice: Vec::new(),
        });
    }
    objects
}

fn declared_twice(row: &Row, earlier: &SmolStr, place: &SmolStr) -> Diagnostic {
    let finding = FieldError {
        field: String::new(),
        message: format!("is declared twice; {place} counts, {earlier} does not"),
    };
    Diagnostic::of_object(row.kind(), row.key().clone(), Severity::Error, "DeclaredTwice", finding).at(place)
}

/// A row of mesh config or networks.
pub fn mesh_row<T>(kind: Kind, key: &ObjectKey, spec: T) -> Config<T> {
    let meta = Meta {
        kind,
        key: key.clone(),
        labels: Labels::new(),
        annotations: Labels::new(),
        creation: DEFAULT_CREATION,
        resource_version: SmolStr::default(),
    };
    Config {
        meta: Shared::new(meta),
        spec,
        status: None,
    }
}

#[cfg(test)]
mod tests;
