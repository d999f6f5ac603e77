//! The rules, and the outcome of their check.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;
use std::path::Path;
use std::sync::Arc;

use istiod::api::{Kind, document, folder};
use istiod::base::ObjectKey;
use istiod::cli::render;
use istiod::generate::{Proxy, store::ConnectionId};
use istiod::model::{
    Change, Installation,
    features::Features,
    gateway_api::status::{Revisions, Statuses},
    inputs::Row,
};
use serde_json::Value;

use super::references::{self, Named};
use super::steps::{Action, Mesh, Step};
use super::{duplicates, odd};
use crate::properties::control_plane::{ControlPlane, first_difference, upserts};
use crate::properties::oracles::requested_names;
use crate::support::random::Random;

/// The rule of [`incremental`].
const INCREMENTAL: &str = "incremental-differs";
/// The rule of [`incremental`] for statuses of the Gateway API.
const STATUSES: &str = "statuses-differ";
/// The rule of [`any_order`].
const ORDER: &str = "order-matters";

/// The first rule that a mesh breaks.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) rule: &'static str,
    text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.text)
    }
}

/// The rules that a proxy breaks.
#[derive(Default)]
pub(super) struct Violations {
    proxy: String,
    all: Vec<Failure>,
    /// The number of checked references by rule.
    references: BTreeMap<&'static str, u64>,
}

impl Violations {
    /// Counts a reference, and adds a violation if it has no answer.
    pub(super) fn refer(&mut self, rule: &'static str, is_answered: bool, text: impl FnOnce() -> String) {
        *self.references.entry(rule).or_default() += 1;
        if !is_answered {
            self.add(rule, text());
        }
    }

    pub(super) fn add(&mut self, rule: &'static str, text: String) {
        let text = format!("{}: {text}", self.proxy);
        self.all.push(Failure { rule, text });
    }
}

/// The sizes of checked meshes.
#[derive(Default, Debug)]
pub(super) struct Tally {
    meshes: u64,
    resources: u64,
    rejected: u64,
    objects: u64,
    /// The number of checked references by rule.
    references: BTreeMap<&'static str, u64>,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.meshes += other.meshes;
        self.resources += other.resources;
        self.rejected += other.rejected;
        self.objects += other.objects;
        for (rule, count) in other.references {
            *self.references.entry(rule).or_default() += count;
        }
    }
}

impl Tally {
    /// Fails if the meshes are so small that they test nothing, if most of their objects are invalid, or if no resource
    /// refers to others.
    pub(super) fn is_enough(&self) -> Result<(), String> {
        let has_references = |rule: &str| self.references.get(rule).is_some_and(|count| *count >= self.meshes);
        let is_checked = ["no-assignment", "no-cluster", "no-route-configuration"]
            .into_iter()
            .all(has_references);
        if self.resources < 60 * self.meshes || self.rejected * 10 > self.objects || !is_checked {
            return Err(format!("the meshes test nothing: {self:?}"));
        }
        Ok(())
    }
}

/// The resources of one proxy: kind as in the file names of `render` → name and resource.
pub(super) struct Received {
    resources: BTreeMap<String, Vec<(String, Value)>>,
    pub(super) is_proxyless: bool,
}

impl Received {
    fn read(folder: &Path, is_proxyless: bool) -> Result<Received, String> {
        let mut resources = BTreeMap::new();
        if !folder.exists() {
            // The proxy has no resources.
            return Ok(Received {
                resources,
                is_proxyless,
            });
        }
        let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
            let file: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            let entries = file["resources"].as_array().into_iter().flatten();
            let entries = entries.map(|entry| {
                let name = entry["name"].as_str().unwrap_or_default().to_owned();
                (name, entry["resource"].clone())
            });
            let kind = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            resources.insert(kind, entries.collect());
        }
        Ok(Received {
            resources,
            is_proxyless,
        })
    }

    /// Returns the resources of a kind.
    pub(super) fn all(&self, kind: &str) -> impl Iterator<Item = (&str, &Value)> {
        let entries = self.resources.get(kind).into_iter().flatten();
        entries.map(|(name, resource)| (name.as_str(), resource))
    }

    pub(super) fn has(&self, kind: &str, name: &str) -> bool {
        self.all(kind).any(|(other, _)| other == name)
    }
}

/// Checks every rule. `work` is a folder for files.
pub(super) fn all(mesh: &Mesh, work: &Path) -> Result<Tally, Failure> {
    let tally = rendered(mesh, work, |failure| Some(failure.clone()))?;
    incremental(mesh)?;
    any_order(mesh)?;
    Ok(tally)
}

/// Checks one rule.
pub(super) fn one(mesh: &Mesh, rule: &str, work: &Path) -> Result<(), Failure> {
    match rule {
        INCREMENTAL | STATUSES => incremental(mesh),
        ORDER => any_order(mesh),
        _ => rendered(mesh, work, |failure| (failure.rule == rule).then(|| failure.clone())).map(|_| ()),
    }
}

fn broken(error: impl fmt::Display) -> Failure {
    Failure {
        rule: "cannot-render",
        text: error.to_string(),
    }
}

/// Renders the mesh folder and checks the resources of each proxy. Fails with the first violation that counts.
fn rendered(mesh: &Mesh, work: &Path, counts: impl Fn(&Failure) -> Option<Failure>) -> Result<Tally, Failure> {
    let (input, out) = (work.join("mesh"), work.join("out"));
    mesh.write(&input).map_err(broken)?;
    if out.exists() {
        std::fs::remove_dir_all(&out).map_err(broken)?;
    }
    let report = render::render(&input, &out).map_err(broken)?;
    let mut violations = Violations::default();
    for panic in &report.panics {
        violations.add("panic", panic.clone());
    }
    let objects: Vec<Value> = mesh.objects().into_values().map(|step| step.object).collect();
    let named = Named::of(objects.iter().chain([&mesh.config]));
    for proxy in odd::proxies()["proxies"].as_array().into_iter().flatten() {
        let name = proxy["name"].as_str().unwrap_or_default();
        let is_proxyless = proxy["metadata"]["GENERATOR"] == "grpc";
        violations.proxy = name.to_owned();
        if !report.written.contains_key(name) {
            violations.add("cannot-render", "it is not part of the report".to_owned());
            continue;
        }
        let received = Received::read(&out.join(name), is_proxyless).map_err(broken)?;
        references::check(&received, &named, &mut violations);
        duplicates::check(&received, &mut violations);
    }
    match violations.all.iter().find_map(counts) {
        Some(failure) => Err(failure),
        None => Ok(Tally {
            meshes: 1,
            resources: report.written.values().flat_map(BTreeMap::values).sum::<usize>() as u64,
            rejected: objects.len().saturating_sub(parsed(&mesh.objects()).len()) as u64,
            objects: objects.len() as u64,
            references: violations.references,
        }),
    }
}

/// The rows of objects that are valid.
fn parsed(objects: &BTreeMap<super::steps::Identity, Step>) -> Vec<Vec<Row>> {
    let rows = objects.values().map(rows_of);
    rows.filter(|rows| !rows.is_empty()).collect()
}

fn rows_of(step: &Step) -> Vec<Row> {
    document::parse(&step.cluster(), &step.object).rows
}

/// The settings of a mesh: its installation, their rows and the proxies.
struct Start {
    installation: Installation,
    rows: Vec<Row>,
    proxies: Vec<Arc<Proxy>>,
}

impl Start {
    fn of(mesh: &Mesh) -> Result<Start, Failure> {
        let mut installation = Installation::default();
        let files = [
            ("mesh.yaml", &mesh.config),
            ("env.yaml", &mesh.variables),
            ("proxies.yaml", &odd::proxies()),
        ];
        let files: Vec<(String, Vec<u8>)> = files
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()))
            .collect();
        let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
        installation.features = Features::parse(&folder.env).0;
        let proxies = render::proxies(&folder).map_err(broken)?;
        Ok(Start {
            installation,
            proxies: proxies.into_iter().map(|(_, proxy)| proxy).collect(),
            rows: folder.rows.into_values().flatten().collect(),
        })
    }

    /// Starts a control plane without objects.
    fn control_plane(&self) -> Result<ControlPlane, Failure> {
        let is_proxyless = |proxy: &Value| proxy["metadata"]["GENERATOR"] == "grpc";
        let proxies = odd::proxies();
        let listed = proxies["proxies"].as_array().into_iter().flatten();
        let grpc = (0..)
            .map(ConnectionId)
            .zip(listed)
            .filter(|(_, proxy)| is_proxyless(proxy));
        let requested = grpc.map(|(id, _)| (id, requested_names()));
        let mut control_plane = ControlPlane::new(self.installation.clone(), self.proxies.iter().cloned(), requested);
        commit(&mut control_plane, upserts(self.rows.iter().cloned()))?;
        Ok(control_plane)
    }
}

fn commit(control_plane: &mut ControlPlane, batch: Vec<Change>) -> Result<(), Failure> {
    let outcome = control_plane.commit(batch);
    outcome.map(|_| ()).map_err(|text| Failure { rule: "panic", text })
}

/// The steps, in batches of random size, lead to what the objects at that time lead to at once.
fn incremental(mesh: &Mesh) -> Result<(), Failure> {
    let start = Start::of(mesh)?;
    let mut random = Random::new(mesh.steps.len() as u64);
    let mut control_plane = start.control_plane()?;
    let mut statuses = Statuses::new(Revisions::default());
    let mut objects: BTreeMap<(Kind, ObjectKey), Row> = BTreeMap::new();
    let mut rest = mesh.steps.as_slice();
    while !rest.is_empty() {
        let (batch, later) = rest.split_at((1 + random.below(8)).min(rest.len()));
        rest = later;
        let mut changes = Vec::new();
        for step in batch {
            for row in rows_of(step) {
                let key = (row.kind(), row.key().clone());
                match step.action {
                    Action::Put => {
                        objects.insert(key, row.clone());
                        changes.push(Change::Upsert(row));
                    }
                    Action::Remove if objects.remove(&key).is_some() => changes.push(Change::Remove(key.0, key.1)),
                    Action::Remove => {}
                }
            }
        }
        commit(&mut control_plane, changes)?;
        statuses.update(&control_plane.mesh(), Vec::new());
        // The start, where most objects are missing, and the end.
        if rest.is_empty() || random.one_in(8) {
            let mut scratch = start.control_plane()?;
            commit(&mut scratch, upserts(objects.values().cloned()))?;
            let (gradual, at_once) = (control_plane.bytes(), scratch.bytes());
            if gradual != at_once {
                let step = mesh.steps.len() - rest.len();
                let difference = first_difference(&gradual, &at_once);
                let text = format!("after {step} steps: {difference}");
                return Err(Failure {
                    rule: INCREMENTAL,
                    text,
                });
            }
            let mut all = Statuses::new(Revisions::default());
            all.update(&scratch.mesh(), Vec::new());
            let panics = [statuses.take_panics(), all.take_panics()].concat();
            if let Some(text) = panics.into_iter().next() {
                return Err(Failure { rule: "panic", text });
            }
            if let Some(text) = different_status(&statuses, &all) {
                return Err(Failure { rule: STATUSES, text });
            }
        }
    }
    Ok(())
}

/// Returns a description of the first difference between statuses.
fn different_status(gradual: &Statuses, at_once: &Statuses) -> Option<String> {
    let gradual: BTreeMap<_, _> = gradual.iter().collect();
    let at_once: BTreeMap<_, _> = at_once.iter().collect();
    let mut keys = gradual.keys().chain(at_once.keys());
    let key = keys.find(|key| gradual.get(*key) != at_once.get(*key))?;
    let (one, other) = (gradual.get(key), at_once.get(key));
    Some(format!("{key:?}: gradually {one:?}, at once {other:?}"))
}

/// The objects in any order and in any batches lead to the same bytes.
fn any_order(mesh: &Mesh) -> Result<(), Failure> {
    let start = Start::of(mesh)?;
    let mut rows: Vec<Row> = parsed(&mesh.objects()).into_iter().flatten().collect();
    let mut random = Random::new(rows.len() as u64);
    let mut expected = None;
    for _ in 0..2 {
        for index in (1..rows.len()).rev() {
            rows.swap(index, random.below(index + 1));
        }
        let mut control_plane = start.control_plane()?;
        let mut rest = rows.as_slice();
        while !rest.is_empty() {
            let (batch, later) = rest.split_at((1 + random.below(30)).min(rest.len()));
            commit(&mut control_plane, upserts(batch.iter().cloned()))?;
            rest = later;
        }
        let bytes = control_plane.bytes();
        if let Some(expected) = expected.replace(bytes.clone())
            && expected != bytes
        {
            let text = first_difference(&expected, &bytes);
            return Err(Failure { rule: ORDER, text });
        }
    }
    Ok(())
}
