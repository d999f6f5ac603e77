//! The mesh folder: its files' names and contents to rows and settings. Pure: the caller reads the files.
//!
//! The name of a file decides its role: `mesh.yaml`, `meshnetworks.yaml`, `env.yaml`, `proxies.yaml` and
//! `scenario.yaml` do not contain objects, `kube-<id>.yaml` belongs to the cluster `<id>`, all other files belong to
//! the config cluster. Parsing has two steps, so that only a changed file is parsed again: [`FileContent::read`], then
//! [`Settings::of`] and [`declared`] combine the files.

mod namespaces;

use std::collections::BTreeMap;

pub use namespaces::SelectedNamespaces;
use serde_json::Value;

use super::{
    Config, Diagnostic, FieldError, Kind, Meta, Row, Severity,
    diagnostics::{INVALID, SUSPICIOUS},
    document::{self, ParsedDocument, UNKNOWN_KIND},
    mesh_config, mesh_networks,
    meta::DEFAULT_CREATION,
    yaml::{self, YamlError},
};
use crate::{
    base::{ClusterId, Labels, ObjectKey, Shared, SmolStr, Version},
    proto::istio::mesh::v1alpha1::{MeshConfig, MeshNetworks},
};

/// The role of a file, from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Objects of a cluster; `None` is the config cluster.
    Objects(Option<ClusterId>),
    /// MeshConfig.
    Mesh,
    /// MeshNetworks.
    Networks,
    /// Feature variables.
    Environment,
    /// Proxies that `render` generates for.
    Proxies,
    /// Not read.
    Ignored,
}

impl Role {
    /// Returns the role of a file by its path in the folder. Only `*.yaml` and `*.yml` without a leading dot have one.
    /// Files in subfolders contain objects only.
    pub fn of(path: &str) -> Self {
        let (subfolder, file_name) = path.rsplit_once('/').unwrap_or(("", path));
        let is_top = subfolder.is_empty();
        let stem = file_name
            .strip_suffix(".yaml")
            .or_else(|| file_name.strip_suffix(".yml"));
        match stem {
            None | Some("scenario") => Self::Ignored,
            Some(_) if file_name.starts_with('.') => Self::Ignored,
            Some("mesh") if is_top => Self::Mesh,
            Some("meshnetworks") if is_top => Self::Networks,
            Some("env") if is_top => Self::Environment,
            Some("proxies") if is_top => Self::Proxies,
            Some(stem) => match stem.strip_prefix("kube-") {
                Some(id) if !id.is_empty() => Self::Objects(Some(ClusterId::new(id))),
                _ => Self::Objects(None),
            },
        }
    }
}

/// The content of one file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileContent {
    /// Objects with their positions in the file, in order.
    pub objects: Vec<(Row, SmolStr)>,
    /// Objects that exist but do not apply.
    pub rejected: Vec<(Kind, ObjectKey)>,
    /// True if a part of the file cannot be parsed, so that the set of its objects is unknown.
    pub unreadable: bool,
    /// MeshConfig.
    pub mesh_config: Option<Shared<MeshConfig>>,
    /// MeshNetworks.
    pub networks: Option<Shared<MeshNetworks>>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies`.
    pub proxies: Vec<Value>,
    /// The problems found.
    pub diagnostics: Vec<Diagnostic>,
    /// The parsed documents by the hash of their text, so that an edit of one document parses only that one.
    parsed: BTreeMap<Version, Shared<ParsedDocument>>,
}

impl FileContent {
    /// Parses a file of the folder. `cluster` is the config cluster.
    pub fn read(file_name: &str, bytes: &[u8], cluster: &ClusterId) -> Self {
        Self::read_as(&Role::of(file_name), file_name, bytes, cluster, &Self::default())
    }

    /// Parses a file with a known role; its name only appears in diagnostics. Documents that are equal to previous ones
    /// are not parsed again.
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
                content.settings(role, &value, &place, previous);
            }
        }
        content
    }

    /// Returns the content of a file that cannot be read.
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

    fn settings(&mut self, role: &Role, value: &Value, place: &SmolStr, previous: &Self) {
        match role {
            Role::Mesh => match mesh_config::parse(value) {
                Ok(parsed) => {
                    let parsed = parsed.after(previous.mesh_config.as_deref());
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

    /// Adds the objects of a document. Clusters other than the config cluster contribute services and endpoints, but no
    /// config.
    fn objects(&mut self, is_config_cluster: bool, parsed: &ParsedDocument, place: &SmolStr) {
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
        for diagnostic in &parsed.diagnostics {
            // One warning for a file is enough.
            let is_same = |other: &Diagnostic| other.code == UNKNOWN_KIND && other.message == diagnostic.message;
            if !self.diagnostics.iter().any(is_same) {
                self.diagnostics.push(diagnostic.clone().at(place));
            }
        }
    }

    fn variables(&mut self, value: &Value, place: &SmolStr) {
        let Value::Object(variables) = value else {
            return self.wrong(place, "InvalidVariables", "is not an object of names and values");
        };
        for (name, value) in variables {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Bool(flag) => flag.to_string(),
                Value::Number(number) => number.to_string(),
                Value::Null => String::new(),
                Value::Array(_) | Value::Object(_) => {
                    self.wrong(place, "InvalidVariables", &format!("the value of {name} is not a text"));
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
            INVALID
        } else {
            SUSPICIOUS
        };
        let key = ObjectKey {
            name: SmolStr::new_static("istio"),
            ..ObjectKey::default()
        };
        let diagnostic = |finding| Diagnostic::of_object(kind, key.clone(), severity, code, finding).at(place);
        self.diagnostics.extend(findings.into_iter().map(diagnostic));
    }

    /// Returns this content, with previous content where an edit made a mistake: an unreadable file keeps all that it
    /// declared before, an invalid object keeps its last valid form.
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

/// The content of a folder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Folder {
    /// All rows by cluster, in the order of kinds and keys. Mesh config (always present) and networks are among those
    /// of the config cluster.
    pub rows: BTreeMap<ClusterId, Vec<Row>>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies.yaml`, as written.
    pub proxies: Vec<Value>,
    /// The problems found: by file, then duplicate objects.
    pub diagnostics: Vec<Diagnostic>,
}

/// Parses a folder. `cluster` is the config cluster, `mesh_key` the key of mesh config and networks.
pub fn read(files: &[(String, impl AsRef<[u8]>)], cluster: &ClusterId, mesh_key: &ObjectKey) -> Folder {
    let contents = files
        .iter()
        .map(|(name, bytes)| (name.clone(), FileContent::read(name, bytes.as_ref(), cluster)))
        .collect();
    Folder::of(&contents, cluster, mesh_key)
}

impl Folder {
    /// Combines files. Of duplicate objects the last one wins, in the order of file names.
    fn of(files: &BTreeMap<String, FileContent>, cluster: &ClusterId, mesh_key: &ObjectKey) -> Self {
        let mut rows: BTreeMap<ClusterId, Vec<Row>> = BTreeMap::new();
        let mut diagnostics: Vec<_> = files
            .values()
            .flat_map(|content| content.diagnostics.iter().cloned())
            .collect();
        let settings = Settings::of(files.values(), mesh_key);
        let objects = declared(files.values(), |_| true);
        let selected = SelectedNamespaces::of(&settings.rows, objects.values().map(|object| object.row));
        for ((owner, ..), object) in objects {
            let row = Some(object.row).filter(|row| selected.contain(row)).cloned();
            let row = row.or_else(|| selected.hidden_gateway(object.row));
            if let Some(row) = row {
                rows.entry(owner.clone()).or_default().push(row);
            }
            diagnostics.extend(object.duplicates);
        }
        rows.entry(cluster.clone()).or_default().extend(settings.rows);
        Self {
            rows,
            env: settings.env,
            proxies: settings.proxies,
            diagnostics,
        }
    }
}

/// The content of a folder that is not objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Mesh config (always present) and networks.
    pub rows: Vec<Row>,
    /// Feature variables.
    pub env: BTreeMap<String, String>,
    /// Entries of `proxies.yaml`, as written.
    pub proxies: Vec<Value>,
}

impl Settings {
    /// Combines the settings of files. The last declaration wins.
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
pub struct DeclaredObject<'a> {
    /// The declaration that wins.
    pub row: &'a Row,
    place: &'a SmolStr,
    /// One diagnostic for each other declaration.
    pub duplicates: Vec<Diagnostic>,
}

/// Returns the declared objects that `is_selected` accepts, in the order of clusters, kinds and keys. The last
/// declaration of an object wins.
pub fn declared<'a>(
    files: impl IntoIterator<Item = &'a FileContent>,
    is_selected: impl Fn(&Row) -> bool,
) -> BTreeMap<(&'a ClusterId, Kind, &'a ObjectKey), DeclaredObject<'a>> {
    let mut objects: BTreeMap<_, DeclaredObject> = BTreeMap::new();
    let declarations = files.into_iter().flat_map(|content| &content.objects);
    for (row, place) in declarations.filter(|(row, _)| is_selected(row)) {
        let key = (&row.key().cluster, row.kind(), row.key());
        let again = |object: &mut DeclaredObject<'a>| {
            object.duplicates.push(declared_twice(row, object.place, place));
            (object.row, object.place) = (row, place);
        };
        objects.entry(key).and_modify(again).or_insert(DeclaredObject {
            row,
            place,
            duplicates: Vec::new(),
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

/// Returns a row of mesh config or networks.
pub fn mesh_row<T>(kind: Kind, key: &ObjectKey, spec: T) -> Config<T> {
    let meta = Meta {
        kind,
        key: key.clone(),
        labels: Shared::default(),
        annotations: Labels::new(),
        creation: DEFAULT_CREATION,
        generation: 0,
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
