//! `istiod render FOLDER --out DIR`: writes the configuration of each proxy of a mesh folder, without serving.
//!
//! It uses the same commit, selection and encoding as serving. Only the subscriptions are simulated: every cluster and
//! listener, the endpoints of EDS clusters, and the routes and extensions that listeners refer to. Proxyless gRPC
//! clients subscribe to the listeners in `grpcTargets` and follow their references.

mod proxyless;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use serde_json::{Value, json};
use smol_str::SmolStr;

use super::{FAILURE, print};
use crate::{
    api::{
        Diagnostic, Kind,
        folder::{self, Folder},
    },
    base::Shared,
    generate::{
        self, EncodedResource, Proxy, ProxyType, RequestedResources, ResourceSnapshot, ResourceType,
        patch::set,
        proxy::{Extensions, Identity, NodeError, locality_text},
        requested::{ON_DEMAND, WILDCARD},
        resource::Note,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    ingest::file,
    model::{
        Change, Installation, World,
        features::{FeatureError, Features},
        output_limit, reference,
    },
    proto::json,
    table::Cx,
};

/// Reason why a folder cannot be rendered. Invalid objects are not errors: they are in the report.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// An entry of `proxies.yaml` is not a proxy.
    #[error("proxies.yaml: proxy {name:?}: {reason}")]
    Proxy {
        /// Its `name`.
        name: String,
        /// Reason.
        reason: String,
    },
}

/// Result of a rendering.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of resources written, by proxy and type.
    pub written: BTreeMap<String, BTreeMap<ResourceType, usize>>,
    /// Variables of `env.yaml` with invalid values, which have their defaults.
    pub variables: Vec<FeatureError>,
    /// Diagnostics of the folder.
    pub diagnostics: Vec<Diagnostic>,
    /// Descriptions of generators that panicked.
    pub panics: Vec<String>,
    /// Number of objects that are read but not applied, by kind.
    pub without_effect: Vec<(Kind, usize)>,
    /// Patches of EnvoyFilters that change nothing or could not be applied.
    pub patches: Vec<Note>,
}

/// Reads the files of a mesh folder, the same as serving does.
pub fn read_files(path: &Path) -> Result<Vec<(String, Vec<u8>)>, RenderError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| RenderError::Io { path, source }
    };
    let files = file::files(path).map_err(io(path))?;
    let read = |(name, file): (String, PathBuf)| {
        let bytes = fs::read(&file).map_err(io(&file));
        bytes.map(|bytes| (name, bytes))
    };
    files.into_iter().map(read).collect()
}

/// Renders a mesh folder into another folder.
pub fn render(input: &Path, out: &Path) -> Result<Report, RenderError> {
    let files = read_files(input)?;
    let mut installation = Installation::default();
    let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
    let (features, variables) = Features::parse(&folder.env);
    installation.features = features;
    installation.variables = folder.env.clone().into();
    let mut report = Report {
        variables,
        diagnostics: folder.diagnostics.clone(),
        ..Report::default()
    };
    let mut world = World::new(installation);
    let proxies = proxies(&folder)?;
    let mesh = world
        .commit(folder.rows.into_values().flatten().map(Change::Upsert).collect())
        .snapshot;
    let mut store = ConfigStore::default();
    let connected = proxies
        .iter()
        .enumerate()
        .map(|(index, (_, proxy))| (ConnectionId(index as u64), proxy.clone()))
        .collect();
    let ztunnels = proxies.iter().enumerate();
    let ztunnels = ztunnels.filter(|(_, (_, proxy))| proxy.node.proxy_type == ProxyType::Ztunnel);
    let everything = Shared::new(RequestedResources::new([(
        ResourceType::Address,
        [WILDCARD.into()].into(),
    )]));
    let membership = ProxyEvents {
        connected,
        requested: ztunnels
            .map(|(index, _)| (ConnectionId(index as u64), everything.clone()))
            .collect(),
        ..ProxyEvents::default()
    };
    let update = store.update(&mesh, &crate::table::ChangeSet::default(), membership, &Serial);
    report.diagnostics.extend(reference::missing(&Cx::untracked(), &mesh));
    report
        .diagnostics
        .extend(output_limit::exceeded(&Cx::untracked(), &mesh));
    report.panics = update.panics;
    let targets = folder.proxies.iter().map(proxyless::targets).enumerate();
    let targets = targets.map(|(index, targets)| (ConnectionId(index as u64), targets));
    report.panics.extend(proxyless::ask(&mut store, &mesh, targets));
    report.without_effect = generate::without_effect(&mesh)
        .filter(|(_, count)| *count > 0)
        .collect();
    report.patches = set::without_effect(&mesh, &store.notes());
    for (index, (name, _)) in proxies.iter().enumerate() {
        let key = store.group_of(ConnectionId(index as u64)).cloned();
        let Some(snapshot) = key.and_then(|key| store.snapshot(&key).cloned()) else {
            continue;
        };
        report
            .written
            .insert(name.clone(), write_proxy(&snapshot, &out.join(name))?);
    }
    Ok(report)
}

/// Returns the proxies of a folder, with their names.
pub fn proxies(folder: &Folder) -> Result<Vec<(String, Arc<Proxy>)>, RenderError> {
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    folder
        .proxies
        .iter()
        .map(|entry| {
            let name = text(entry, "name");
            let error = |reason: String| RenderError::Proxy {
                name: name.clone(),
                reason,
            };
            if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
                return Err(error("needs a name that is valid as a folder name".into()));
            }
            let metadata = entry.get("metadata").and_then(Value::as_object);
            let metadata = metadata.map(|map| map.iter().map(|(k, v)| (k.clone(), v.clone())).collect());
            let locality = entry.get("locality").map(|locality| {
                locality_text(
                    &text(locality, "region"),
                    &text(locality, "zone"),
                    &text(locality, "subZone"),
                )
            });
            let listed = entry.get("extensions").and_then(Value::as_array).map(|names| {
                crate::base::Hashed::new(names.iter().filter_map(Value::as_str).map(SmolStr::new).collect())
            });
            let proxy = Proxy::new(
                &text(entry, "node"),
                &text(entry, "cluster"),
                metadata.unwrap_or_default(),
                locality.unwrap_or_default(),
                Extensions { listed },
            );
            let mut proxy = proxy.map_err(|reason: NodeError| error(reason.to_string()))?;
            proxy.identity = identity(entry, &proxy).map_err(error)?;
            Ok((name, Arc::new(proxy)))
        })
        .collect()
}

/// Returns the proxy's identity: the SPIFFE id `identity` of the entry, or else the namespace and service account of
/// its node.
fn identity(entry: &Value, proxy: &Proxy) -> Result<Option<Identity>, String> {
    let Some(id) = entry.get("identity") else {
        return Ok(Some(Identity {
            namespace: proxy.node.namespace.clone(),
            service_account: proxy.service_account.clone(),
        }));
    };
    let text = id.as_str().unwrap_or_default();
    let identity = Identity::from_spiffe(text);
    let identity = identity.ok_or_else(|| format!("identity {text:?} is not the SPIFFE id of a service account"));
    identity.map(Some)
}

/// Writes the types that are requested as a whole, and those requested by names in other types.
fn write_proxy(snapshot: &ResourceSnapshot, folder: &Path) -> Result<BTreeMap<ResourceType, usize>, RenderError> {
    let mut counts = BTreeMap::new();
    let mut named: BTreeMap<ResourceType, BTreeSet<String>> = BTreeMap::new();
    // All other types refer to secrets, and some are pushed after them.
    let types = ResourceType::ALL
        .iter()
        .filter(|resource_type| **resource_type != ResourceType::Secret);
    for resource_type in types.chain([&ResourceType::Secret]) {
        let requested = snapshot
            .requested
            .as_ref()
            .filter(|_| ON_DEMAND.contains(resource_type));
        let documents: Vec<(SmolStr, Value)> = if let Some(requested) = requested {
            requested
                .names(*resource_type)
                .filter_map(|name| answer(snapshot, *resource_type, name))
                .collect()
        } else if resource_type.is_wildcard() {
            let resources = snapshot.resources(*resource_type).iter();
            resources.map(|resource| document(resource)).collect()
        } else {
            let names = named.get(resource_type).cloned().unwrap_or_default();
            names
                .iter()
                .filter_map(|name| answer(snapshot, *resource_type, name))
                .collect()
        };
        for (_, body) in &documents {
            references(body, &mut named);
        }
        if !documents.is_empty() {
            counts.insert(*resource_type, documents.len());
            write(folder, *resource_type, documents)?;
        }
    }
    Ok(counts)
}

fn answer(snapshot: &ResourceSnapshot, resource_type: ResourceType, name: &str) -> Option<(SmolStr, Value)> {
    match snapshot.resources(resource_type).get(name) {
        Some(resource) => Some(document(resource)),
        None => snapshot.absent(resource_type, name).map(|resource| document(&resource)),
    }
}

fn document(resource: &EncodedResource) -> (SmolStr, Value) {
    (resource.name.clone(), json::any_to_json(&resource.any()))
}

/// Collects the names that a resource refers to.
fn references(value: &Value, named: &mut BTreeMap<ResourceType, BTreeSet<String>>) {
    let mut note = |resource_type, name: &str| {
        named.entry(resource_type).or_default().insert(name.to_owned());
    };
    match value {
        Value::Object(map) => {
            let text = |key: &str| map.get(key).and_then(Value::as_str);
            if let Some(eds) = map.get("edsClusterConfig") {
                let service = eds.get("serviceName").and_then(Value::as_str);
                if let Some(name) = service.or_else(|| text("name")) {
                    note(ResourceType::Endpoint, name);
                }
            }
            if let Some(name) = text("routeConfigName") {
                note(ResourceType::Route, name);
            }
            if map.contains_key("configDiscovery")
                && let Some(name) = text("name")
            {
                note(ResourceType::Extension, name);
            }
            if map.contains_key("sdsConfig")
                && let Some(name) = text("name")
                && (name.starts_with("kubernetes") || name.starts_with("configmap"))
            {
                note(ResourceType::Secret, name);
            }
            map.values().for_each(|value| references(value, named));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, named)),
        _ => {}
    }
}

fn write(folder: &Path, resource_type: ResourceType, mut documents: Vec<(SmolStr, Value)>) -> Result<(), RenderError> {
    documents.sort_by(|(a, _), (b, _)| a.cmp(b));
    let resources: Vec<Value> = documents
        .into_iter()
        .map(|(name, resource)| json!({ "name": name.as_str(), "resource": resource }))
        .collect();
    let path = folder.join(format!("{}.json", resource_type.short_name()));
    let io = |source| RenderError::Io {
        path: path.clone(),
        source,
    };
    fs::create_dir_all(folder).map_err(io)?;
    let text =
        serde_json::to_string_pretty(&json!({ "resources": resources })).expect("because JSON values can be written");
    fs::write(&path, text + "\n").map_err(io)
}

/// Runs the subcommand: renders, prints a table and diagnostics.
pub fn run(folder: &Path, out: &Path) -> ExitCode {
    let report = match render(folder, out) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(FAILURE);
        }
    };
    for error in &report.variables {
        eprintln!("Error: env.yaml: {error}");
    }
    for diagnostic in &report.diagnostics {
        eprintln!("{:?}: {diagnostic}", diagnostic.severity);
    }
    for (kind, count) in &report.without_effect {
        eprintln!(
            "Warning: {count} objects of kind {} are read but not applied by this build",
            kind.name()
        );
    }
    for note in &report.patches {
        let text = if note.code == set::UNUSED {
            ": changes nothing"
        } else {
            ""
        };
        eprintln!("Warning: EnvoyFilter {}{text}", note.detail);
    }
    for panic in &report.panics {
        eprintln!("a generator panicked; this is a bug in istiod: {panic}");
    }
    let mut table = format!("{:<40} RESOURCES\n", "PROXY");
    for (proxy, types) in &report.written {
        let counts: Vec<String> = types
            .iter()
            .map(|(t, count)| format!("{}={count}", t.short_name()))
            .collect();
        // Writing into a string does not fail.
        let _ = writeln!(table, "{proxy:<40} {}", counts.join(" "));
    }
    let code = if report.panics.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILURE)
    };
    print(&table, code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subfolders_are_read_as_by_serving() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["apps/web/kube-c2.yaml", ".steps/a.yaml", "mesh.yaml", "apps/notes.txt"] {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            fs::write(file, "").expect("a file");
        }
        let files = read_files(folder.path()).expect("files");
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["apps/web/kube-c2.yaml", "mesh.yaml"]);
    }

    #[test]
    fn invalid_variables_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("env.yaml"), "PILOT_HTTP10: maybe\n").expect("a file");
        let report = render(folder.path(), &folder.path().join("out")).expect("a report");
        let variables: Vec<_> = report.variables.iter().map(|error| error.variable).collect();
        assert_eq!(variables, ["PILOT_HTTP10"]);
    }
}
