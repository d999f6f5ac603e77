//! Mesh config and networks from Kubernetes: ConfigMap `istio`, or files that replace it.
//!
//! Note: a missing ConfigMap means the defaults, but only once the API server has confirmed that it is missing. Until
//! then the mesh config is unknown, and nothing is sent. An invalid text keeps the last valid one, as with files.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ::kube::{Api, Client};
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;
use tokio::{
    sync::mpsc,
    time::{self, Instant},
};

use super::{
    backoff::Backoff,
    context::IngestContext,
    diagnostics::ActiveDiagnostics,
    file::{MESH_QUIET, POLL, Report, disk, watch::Watch},
    kinds::resource,
    source::Source,
};
use crate::{
    api::{
        Diagnostic, FieldError, Kind, Row, Severity,
        diagnostics::{INVALID, SUSPICIOUS},
        folder::mesh_row,
        mesh_config, mesh_networks,
        yaml::{self, MAX_FILE_BYTES},
    },
    base::{ClusterId, Namespace, ObjectKey, SmolStr},
    kube::{
        health::WatchHealth,
        watch::{WatchEvent, WatchTarget, watch},
    },
    model::change::{Batch, Change, SourceId},
    proto::istio::mesh::v1alpha1::MeshConfig,
};

/// Time limit of the API server for one ConfigMap.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Locations of mesh config and networks.
#[derive(Clone, Debug)]
pub struct MeshSettings {
    /// Config cluster.
    pub cluster: ClusterId,
    /// Key of both in the model.
    pub mesh_key: ObjectKey,
    /// Namespace of the ConfigMaps.
    pub namespace: Namespace,
    /// Revision, which is part of the ConfigMap's name.
    pub revision: SmolStr,
    /// `SHARED_MESH_CONFIG`: ConfigMap whose mesh config is the base, and whose networks, if any, replace the others.
    pub shared_map: Option<SmolStr>,
    /// `--meshConfig`, which replaces the ConfigMap's key `mesh` if it exists at the start.
    pub mesh_file: PathBuf,
    /// `--networksConfig`, which replaces the key `meshNetworks`.
    pub networks_file: PathBuf,
}

/// A text of mesh config or networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// Base of the mesh config.
    Shared,
    /// Mesh config.
    Mesh,
    /// Networks that replace the own ones.
    SharedNetworks,
    /// Networks.
    Networks,
}

impl Part {
    /// Returns its key in a ConfigMap.
    fn key(self) -> &'static str {
        match self {
            Self::Shared | Self::Mesh => "mesh",
            Self::SharedNetworks | Self::Networks => "meshNetworks",
        }
    }
}

/// State of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Text {
    /// It does not exist.
    Absent,
    /// Its content.
    Is(String),
    /// It exists, but cannot be read.
    Unreadable(String),
}

/// The source of mesh config and networks. Nothing waits for it but the config cluster, whose filters depend on it.
pub struct MeshSource {
    /// Locations.
    pub settings: MeshSettings,
    /// Client of the config cluster.
    pub client: Client,
    /// Shared dependencies.
    pub shared: Arc<IngestContext>,
}

impl Source for MeshSource {
    fn name(&self) -> &'static str {
        "mesh config"
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        follow(self.settings, self.client, self.shared, changes).await;
    }
}

/// Watches mesh config and networks and sends changes, first when both are known.
async fn follow(
    settings: MeshSettings,
    client: Client,
    shared: Arc<IngestContext>,
    changes: mpsc::Sender<Vec<Change>>,
) {
    let (out, mut news) = mpsc::channel(16);
    let mut reader = Reader::new(&settings, shared.report.clone());
    let mut texts = BTreeMap::new();
    let expected_texts = begin(&settings, &client, &shared, &mut reader, &out);
    drop(out);
    let mut is_known = false;
    while let Some((part, text)) = news.recv().await {
        texts.insert(part, text);
        if is_known {
            // Continuous writes must not delay the reading forever.
            let latest = Instant::now() + 10 * MESH_QUIET;
            while let Ok(Some((part, text))) =
                time::timeout_at(latest.min(Instant::now() + MESH_QUIET), news.recv()).await
            {
                texts.insert(part, text);
            }
        }
        is_known = texts.len() == expected_texts;
        if !is_known {
            continue;
        }
        let found = reader.read(&texts);
        if !found.is_empty() && changes.send(found).await.is_err() {
            return;
        }
    }
}

/// Returns the mesh config that is valid now, for what must be known before the sources start. Waits until the API
/// server answers. Of an invalid one the base applies; the source reports its errors.
pub async fn read_once(settings: &MeshSettings, client: &Client) -> MeshConfig {
    let maps = Api::<ConfigMap>::namespaced(client.clone(), &settings.namespace);
    let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
    let mut texts = BTreeMap::new();
    if settings.mesh_file.exists() {
        texts.insert(Part::Mesh, text_of_file(&settings.mesh_file));
    }
    let own = (!texts.contains_key(&Part::Mesh)).then(|| (Part::Mesh, mesh_config::map_name(&settings.revision)));
    let shared = settings.shared_map.clone().map(|name| (Part::Shared, name));
    for (part, name) in own.into_iter().chain(shared) {
        let map = loop {
            let error = match time::timeout(READ_TIMEOUT, maps.get_opt(&name)).await {
                Ok(Ok(map)) => break map,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the API server does not answer".to_owned(),
            };
            let retry_in = backoff.next();
            tracing::warn!(error, ?retry_in, "failed to read the mesh config, retrying");
            time::sleep(retry_in).await;
        };
        let text = map.and_then(|map| map.data?.remove(part.key()));
        texts.insert(part, text.map_or(Text::Absent, Text::Is));
    }
    let shared = shared_layer(texts.get(&Part::Shared)).unwrap_or(Value::Null);
    own_layer(&shared, texts.get(&Part::Mesh)).map_or_else(|_| base(&shared, None), |parsed| parsed.config)
}

/// Starts watching every text. Returns their number.
fn begin(
    settings: &MeshSettings,
    client: &Client,
    shared: &Arc<IngestContext>,
    reader: &mut Reader,
    out: &mpsc::Sender<(Part, Text)>,
) -> usize {
    let (mut files, mut own) = (Vec::new(), Vec::new());
    for (part, path) in [
        (Part::Mesh, &settings.mesh_file),
        (Part::Networks, &settings.networks_file),
    ] {
        if path.exists() {
            tracing::info!(file = %path.display(), key = part.key(), "file replaces ConfigMap key");
            reader.places.insert(part, SmolStr::from(path.display().to_string()));
            files.push((part, path.clone()));
        } else {
            own.push(part);
        }
    }
    let mut maps = Vec::new();
    let shared_map = settings.shared_map.clone();
    maps.extend(shared_map.map(|name| (name, vec![Part::Shared, Part::SharedNetworks])));
    if !own.is_empty() {
        maps.push((mesh_config::map_name(&settings.revision), own));
    }
    let expected_texts = files.len() + maps.iter().map(|(_, parts)| parts.len()).sum::<usize>();
    let tasks = &shared.environment.tasks;
    if !files.is_empty() {
        tasks.spawn_until_shutdown("mesh config files", follow_files(files, out.clone()));
    }
    for (name, parts) in maps {
        for part in &parts {
            let place = format!("ConfigMap {}/{name}, key {}", settings.namespace, part.key());
            reader.places.insert(*part, SmolStr::from(place));
        }
        let target = WatchTarget {
            namespace: Some(settings.namespace.to_string()),
            fields: Some(format!("metadata.name={name}")),
            ..WatchTarget::all(resource("ConfigMap", "configmaps", "", "v1"))
        };
        let health = WatchHealth::new(&settings.cluster, &target.name(), &shared.watch_metrics);
        let (sender, events) = mpsc::channel(8);
        tasks.spawn_until_shutdown("watch", watch(client.clone(), target, health, sender));
        tasks.spawn_until_shutdown("mesh config", follow_map(events, parts, out.clone()));
    }
    expected_texts
}

async fn follow_map(mut events: mpsc::Receiver<WatchEvent>, parts: Vec<Part>, out: mpsc::Sender<(Part, Text)>) {
    while let Some(event) = events.recv().await {
        let object = match &event {
            WatchEvent::Restarted(all) => all.first(),
            WatchEvent::Applied(object) => Some(object),
            WatchEvent::Deleted(_) => None,
        };
        for part in &parts {
            let text = object.and_then(|object| object.value["data"][part.key()].as_str());
            let text = text.map_or(Text::Absent, |text| Text::Is(text.to_owned()));
            if out.send((*part, text)).await.is_err() {
                return;
            }
        }
    }
}

async fn follow_files(files: Vec<(Part, PathBuf)>, out: mpsc::Sender<(Part, Text)>) {
    let mut watch = Watch::new();
    let folders: Vec<PathBuf> = files
        .iter()
        .filter_map(|(_, path)| Some(path.parent()?.join(".")))
        .collect();
    let mut known = BTreeMap::new();
    loop {
        // The watch starts before the first reading, so that no edit is missed.
        watch.follow(folders.clone());
        for (part, path) in &files {
            let text = text_of_file(path);
            if known.get(part) != Some(&text) {
                known.insert(*part, text.clone());
                if out.send((*part, text)).await.is_err() {
                    return;
                }
            }
        }
        watch.quiet(Duration::ZERO, Duration::ZERO, POLL).await;
    }
}

fn text_of_file(path: &Path) -> Text {
    let bytes = match disk::read(path, MAX_FILE_BYTES) {
        Ok(bytes) => bytes,
        Err(error) => return Text::Unreadable(error.to_string()),
    };
    match yaml::text(&bytes) {
        Ok(text) => Text::Is(text.to_owned()),
        Err(error) => Text::Unreadable(error.to_string()),
    }
}

/// Parses texts to rows and keeps the last valid ones.
struct Reader {
    cluster: ClusterId,
    key: ObjectKey,
    places: BTreeMap<Part, SmolStr>,
    standing: ActiveDiagnostics<Kind>,
    /// The last valid base of the mesh config; null if there is none. An invalid base must not keep edits of the mesh
    /// config itself from taking effect.
    shared: Value,
    /// True once the mesh config was valid.
    was_valid: bool,
    /// Last rows sent, by kind.
    sent: BTreeMap<Kind, Vec<Row>>,
}

/// Rows of a kind and diagnostics; `None` keeps the last rows.
type Read = (Option<Vec<Row>>, BTreeSet<Diagnostic>);

impl Reader {
    fn new(settings: &MeshSettings, report: Report) -> Self {
        Self {
            cluster: settings.cluster.clone(),
            key: settings.mesh_key.clone(),
            places: BTreeMap::new(),
            standing: ActiveDiagnostics::new(report),
            shared: Value::Null,
            was_valid: false,
            sent: BTreeMap::new(),
        }
    }

    /// Parses the texts and returns the changes.
    fn read(&mut self, texts: &BTreeMap<Part, Text>) -> Vec<Change> {
        let mut changes = Vec::new();
        for (kind, (rows, findings)) in [
            (Kind::MeshConfig, self.mesh_config(texts)),
            (Kind::MeshNetworks, self.networks(texts)),
        ] {
            self.standing.set(kind, findings);
            let rows = match rows {
                Some(rows) => rows,
                // Without a last valid one, the base applies, also after edits of it.
                None if kind == Kind::MeshConfig && !self.was_valid => {
                    let base = base(&self.shared, self.last_mesh_config());
                    vec![mesh_row(kind, &self.key, base).into()]
                }
                None if self.sent.contains_key(&kind) => continue,
                None => Vec::new(),
            };
            if self.sent.get(&kind) != Some(&rows) {
                self.sent.insert(kind, rows.clone());
                let cluster = self.cluster.clone();
                changes.push(Change::Replace(SourceId { cluster, kind }, rows));
            }
        }
        changes
    }

    fn mesh_config(&mut self, texts: &BTreeMap<Part, Text>) -> Read {
        let shared_errors = match shared_layer(texts.get(&Part::Shared)) {
            Ok(layer) => {
                self.shared = layer;
                Vec::new()
            }
            Err(errors) => errors,
        };
        let mut findings = self.findings(Kind::MeshConfig, Part::Shared, Severity::Error, shared_errors);
        let mut find = |severity, found| findings.extend(self.findings(Kind::MeshConfig, Part::Mesh, severity, found));
        let rows = match own_layer(&self.shared, texts.get(&Part::Mesh)) {
            Ok(parsed) => {
                let parsed = parsed.after(self.last_mesh_config());
                find(Severity::Warning, parsed.warnings);
                Some(vec![mesh_row(Kind::MeshConfig, &self.key, parsed.config).into()])
            }
            Err(errors) => {
                find(Severity::Error, errors);
                None
            }
        };
        self.was_valid |= rows.is_some();
        (rows, findings)
    }

    fn last_mesh_config(&self) -> Option<&MeshConfig> {
        let mut rows = self.sent.get(&Kind::MeshConfig).into_iter().flatten();
        rows.find_map(|row| match row {
            Row::MeshConfig(row) => Some(&row.spec),
            _ => None,
        })
    }

    fn networks(&self, texts: &BTreeMap<Part, Text>) -> Read {
        // Parity (pkg/config/mesh/meshwatcher/collection.go): networks are not merged.
        let mut parts = [Part::SharedNetworks, Part::Networks].into_iter();
        let Some(part) = parts.find(|part| !matches!(texts.get(part), None | Some(Text::Absent))) else {
            return (Some(Vec::new()), BTreeSet::new());
        };
        let find = |severity, found| self.findings(Kind::MeshNetworks, part, severity, found);
        let value = match value(texts.get(&part)) {
            Ok(value) => value,
            Err(error) => return (None, find(Severity::Error, vec![error])),
        };
        match mesh_networks::parse(&value) {
            Ok(parsed) => {
                let row = mesh_row(Kind::MeshNetworks, &self.key, parsed.networks).into();
                (Some(vec![row]), find(Severity::Warning, parsed.warnings))
            }
            Err(errors) => (None, find(Severity::Error, errors)),
        }
    }

    fn findings(&self, kind: Kind, part: Part, severity: Severity, found: Vec<FieldError>) -> BTreeSet<Diagnostic> {
        let code = match severity {
            Severity::Error => INVALID,
            Severity::Warning => SUSPICIOUS,
        };
        let place = self.places.get(&part).cloned().unwrap_or_default();
        let diagnostic = |finding| Diagnostic::of_object(kind, self.key.clone(), severity, code, finding).at(&place);
        found.into_iter().map(diagnostic).collect()
    }
}

/// Returns the base of the mesh config, if it is valid on its own.
fn shared_layer(text: Option<&Text>) -> Result<Value, Vec<FieldError>> {
    let layer = value(text).map_err(|error| vec![error])?;
    mesh_config::parse_layers(&[&layer])?;
    Ok(layer)
}

/// Returns the base as a mesh config, which follows the last one; the defaults if there is none.
fn base(shared: &Value, last: Option<&MeshConfig>) -> MeshConfig {
    own_layer(shared, None).map_or_else(|_| mesh_config::defaults(), |parsed| parsed.after(last).config)
}

/// Parses the mesh config over its base.
fn own_layer(shared: &Value, text: Option<&Text>) -> Result<mesh_config::ParsedMeshConfig, Vec<FieldError>> {
    let layer = value(text).map_err(|error| vec![error])?;
    mesh_config::parse_layers(&[shared, &layer])
}

/// Returns the content of a text; empty if it does not exist.
fn value(text: Option<&Text>) -> Result<Value, FieldError> {
    let error = |message: String| FieldError {
        field: String::new(),
        message,
    };
    match text {
        None | Some(Text::Absent) => Ok(Value::Null),
        Some(Text::Unreadable(message)) => Err(error(format!("it cannot be read: {message}"))),
        Some(Text::Is(text)) => match yaml::documents(text).first() {
            None => Ok(Value::Null),
            Some(document) => document.parse().map_err(|invalid| error(invalid.to_string())),
        },
    }
}

#[cfg(test)]
mod tests;
