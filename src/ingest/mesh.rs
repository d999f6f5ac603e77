//! Mesh config and networks of a mesh whose config is in Kubernetes: ConfigMap `istio`, or files that stand in its place.
//!
//! What a reader would get wrong: a ConfigMap that is not there means the defaults, but only once the API server has said
//! that it is not there. Until then the mesh config is unknown, and nothing is told. A text that cannot be read leaves the
//! last good one standing, as with files.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ::kube::Client;
use serde_json::Value;
use tokio::{
    sync::mpsc,
    time::{self, Instant},
};

use super::{
    context::IngestContext,
    diagnostics::ActiveDiagnostics,
    file::{MESH_QUIET, POLL, Report, disk, watch::Watch},
    kinds::resource,
};
use crate::{
    api::{
        Diagnostic, FieldError, Kind, Row, Severity,
        folder::mesh_row,
        mesh_config, mesh_networks,
        yaml::{self, MAX_FILE_BYTES},
    },
    base::{ClusterId, Namespace, ObjectKey, SmolStr},
    kube::{
        health::WatchHealth,
        watch::{WatchEvent, WatchTarget, watch},
    },
    model::change::{Change, SourceId},
};

/// Where mesh config and networks are.
#[derive(Clone, Debug)]
pub struct MeshSettings {
    /// The config cluster.
    pub cluster: ClusterId,
    /// The key under which both stand in the model.
    pub mesh_key: ObjectKey,
    /// The namespace of the ConfigMaps.
    pub namespace: Namespace,
    /// The own revision, which is part of the ConfigMap's name.
    pub revision: SmolStr,
    /// `SHARED_MESH_CONFIG`: a ConfigMap below the mesh config.
    pub shared_map: Option<SmolStr>,
    /// `--meshConfig`, which stands in place of the ConfigMap's key `mesh` if it is there at the start.
    pub mesh_file: PathBuf,
    /// `--networksConfig`, the same for the key `meshNetworks`.
    pub networks_file: PathBuf,
}

/// A text of which mesh config or networks are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// What lies below the mesh config.
    Shared,
    /// The mesh config.
    Mesh,
    /// The networks.
    Networks,
}

impl Part {
    /// The key of a ConfigMap that holds it.
    fn key(self) -> &'static str {
        match self {
            Self::Shared | Self::Mesh => "mesh",
            Self::Networks => "meshNetworks",
        }
    }
}

/// What is known of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Text {
    /// It is not there.
    Absent,
    /// It is there.
    Is(String),
    /// It is there, but cannot be had.
    Unreadable(String),
}

/// Follows mesh config and networks and tells them; the first time when both are known.
pub async fn follow(
    settings: MeshSettings,
    client: Client,
    shared: Arc<IngestContext>,
    changes: mpsc::Sender<Vec<Change>>,
) {
    let (out, mut news) = mpsc::channel(16);
    let mut reader = Reader::new(&settings, shared.report.clone());
    let mut texts = BTreeMap::new();
    let wanted = begin(&settings, &client, &shared, &mut reader, &out);
    drop(out);
    let mut is_known = false;
    while let Some((part, text)) = news.recv().await {
        texts.insert(part, text);
        if is_known {
            // Whoever writes without end is read in between.
            let latest = Instant::now() + 10 * MESH_QUIET;
            while let Ok(Some((part, text))) =
                time::timeout_at(latest.min(Instant::now() + MESH_QUIET), news.recv()).await
            {
                texts.insert(part, text);
            }
        }
        is_known = texts.len() == wanted;
        if !is_known {
            continue;
        }
        let found = reader.read(&texts);
        if !found.is_empty() && changes.send(found).await.is_err() {
            return;
        }
    }
}

/// Starts to follow every text. Gives their number.
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
    maps.extend(settings.shared_map.clone().map(|name| (name, vec![Part::Shared])));
    if !own.is_empty() {
        maps.push((map_name(&settings.revision), own));
    }
    let wanted = files.len() + maps.iter().map(|(_, parts)| parts.len()).sum::<usize>();
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
    wanted
}

/// The name of the ConfigMap.
fn map_name(revision: &str) -> SmolStr {
    match revision {
        "" | "default" => SmolStr::new_static("istio"),
        revision => SmolStr::from(format!("istio-{revision}")),
    }
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
        // Watched before it is read, so that no edit falls in between.
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

/// Makes rows of texts, and keeps the last good ones.
struct Reader {
    cluster: ClusterId,
    key: ObjectKey,
    places: BTreeMap<Part, SmolStr>,
    standing: ActiveDiagnostics<Kind>,
    /// What was told last, by kind.
    told: BTreeMap<Kind, Vec<Row>>,
}

/// The rows that a kind has, and what is wrong; no rows: the last ones stay.
type Read = (Option<Vec<Row>>, BTreeSet<Diagnostic>);

impl Reader {
    fn new(settings: &MeshSettings, report: Report) -> Self {
        Self {
            cluster: settings.cluster.clone(),
            key: settings.mesh_key.clone(),
            places: BTreeMap::new(),
            standing: ActiveDiagnostics::new(report),
            told: BTreeMap::new(),
        }
    }

    /// Reads the texts and tells what became different.
    fn read(&mut self, texts: &BTreeMap<Part, Text>) -> Vec<Change> {
        let mut changes = Vec::new();
        for (kind, (rows, findings)) in [
            (Kind::MeshConfig, self.mesh_config(texts)),
            (Kind::MeshNetworks, self.networks(texts)),
        ] {
            self.standing.set(kind, findings);
            let rows = match (rows, self.told.contains_key(&kind)) {
                (Some(rows), _) => rows,
                (None, true) => continue,
                // There is no last good one: what counts is what counts where nothing is written.
                (None, false) if kind == Kind::MeshConfig => {
                    vec![mesh_row(kind, &self.key, mesh_config::defaults()).into()]
                }
                (None, false) => Vec::new(),
            };
            if self.told.get(&kind) != Some(&rows) {
                self.told.insert(kind, rows.clone());
                let cluster = self.cluster.clone();
                changes.push(Change::Replace(SourceId { cluster, kind }, rows));
            }
        }
        changes
    }

    fn mesh_config(&self, texts: &BTreeMap<Part, Text>) -> Read {
        let mut layers = Vec::new();
        for part in [Part::Shared, Part::Mesh] {
            match value(texts.get(&part)) {
                Ok(value) => layers.push(value),
                Err(error) => {
                    return (
                        None,
                        self.findings(Kind::MeshConfig, part, Severity::Error, vec![error]),
                    );
                }
            }
        }
        let find = |severity, found| self.findings(Kind::MeshConfig, Part::Mesh, severity, found);
        match mesh_config::parse_layers(&layers.iter().collect::<Vec<_>>()) {
            Ok(parsed) => {
                let row = mesh_row(Kind::MeshConfig, &self.key, parsed.config).into();
                (Some(vec![row]), find(Severity::Warning, parsed.warnings))
            }
            Err(errors) => (None, find(Severity::Error, errors)),
        }
    }

    fn networks(&self, texts: &BTreeMap<Part, Text>) -> Read {
        let find = |severity, found| self.findings(Kind::MeshNetworks, Part::Networks, severity, found);
        if matches!(texts.get(&Part::Networks), None | Some(Text::Absent)) {
            return (Some(Vec::new()), BTreeSet::new());
        }
        let value = match value(texts.get(&Part::Networks)) {
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
            Severity::Error => "InvalidField",
            Severity::Warning => "Suspicious",
        };
        let place = self.places.get(&part).cloned().unwrap_or_default();
        let diagnostic = |finding| Diagnostic::of_object(kind, self.key.clone(), severity, code, finding).at(&place);
        found.into_iter().map(diagnostic).collect()
    }
}

/// The content of a text; nothing for one that is not there.
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
