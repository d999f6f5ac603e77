//! The source of the daemon's mesh: a folder of YAML, or a real API server.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::mesh::Mesh;
use crate::support;
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};

/// Number of parallel requests while a mesh is written to an API server.
const WRITERS: usize = 8;

/// A mesh in its source.
pub(crate) enum Source {
    Folder(PathBuf),
    Cluster(Box<Cluster>),
}

impl Source {
    /// Writes a mesh into a new folder of this name. Only the first service may change later.
    pub(crate) fn folder(name: &str, mesh: Mesh) -> Result<Source, String> {
        let is_first = |object: &Value| {
            let is = |kind: &str, name: &str| object["kind"] == kind && object["metadata"]["name"] == name;
            is("EndpointSlice", "svc-0-0") || is("VirtualService", "svc-0")
        };
        Source::parted(name, mesh, is_first)
    }

    /// Writes a mesh into a new folder of this name. Endpoints and routing of every service may change later.
    pub(crate) fn spread(name: &str, mesh: Mesh) -> Result<Source, String> {
        let is_own = |object: &Value| object["kind"] == "EndpointSlice" || object["kind"] == "VirtualService";
        Source::parted(name, mesh, is_own)
    }

    /// A folder with a separate file for each object that `changes`, and one file for the others.
    fn parted(name: &str, mesh: Mesh, changes: impl Fn(&Value) -> bool) -> Result<Source, String> {
        let source = Source::Folder(support::scratch(&format!("bench/scale/{name}/mesh")));
        let (changing, others): (Vec<Value>, Vec<Value>) = [mesh.namespaces(), mesh.objects()]
            .concat()
            .into_iter()
            .partition(changes);
        let others: Vec<String> = others.iter().map(Value::to_string).collect();
        source.write("objects.yaml", &others.join("\n---\n"))?;
        source.put_all(&changing)?;
        Ok(source)
    }

    /// Writes a mesh into its own API server.
    pub(crate) fn cluster(name: &str, mesh: Mesh) -> Result<Source, String> {
        if !kubernetes::is_installed() {
            return Err("the Kubernetes API server is missing; `make tools` installs it".into());
        }
        let cluster = Cluster::start(&format!("bench/scale/{name}/cluster"))?;
        write_all(&cluster, &mesh.namespaces())?;
        write_all(&cluster, &mesh.objects())?;
        Ok(Source::Cluster(Box::new(cluster)))
    }

    /// Writes these objects, each separately.
    pub(crate) fn put_all(&self, objects: &[Value]) -> Result<(), String> {
        objects.iter().try_for_each(|object| self.put(object))
    }

    /// Removes objects that were written separately. Missing ones are not an error.
    pub(crate) fn remove(&self, objects: &[Value]) -> Result<(), String> {
        for object in objects {
            match self {
                Source::Folder(folder) => match std::fs::remove_file(folder.join(file_name(object))) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.to_string()),
                    _ => {}
                },
                Source::Cluster(cluster) => cluster.api.delete(&Reference::of(object))?,
            }
        }
        Ok(())
    }

    /// Creates or replaces one object.
    pub(crate) fn put(&self, object: &Value) -> Result<(), String> {
        match self {
            Source::Folder(_) => self.write(&file_name(object), &object.to_string()),
            Source::Cluster(cluster) => cluster.api.apply(object).map(|_| ()),
        }
    }

    /// Creates or replaces one object in an API server, and returns it as it is stored.
    pub(crate) fn store(&self, object: &Value) -> Result<Value, String> {
        match self {
            Source::Folder(_) => Err("a folder has no versions".to_owned()),
            Source::Cluster(cluster) => cluster.api.apply(object),
        }
    }

    /// Replaces a file of the folder atomically.
    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let Source::Folder(folder) = self else { return Ok(()) };
        let aside = folder.with_extension(name);
        std::fs::write(&aside, text).map_err(|error| error.to_string())?;
        std::fs::rename(&aside, folder.join(name)).map_err(|error| error.to_string())
    }

    /// Starts a daemon that serves the mesh.
    pub(crate) fn daemon(&self, log: &Path) -> Result<Daemon, String> {
        match self {
            Source::Folder(folder) => Daemon::start(folder, log),
            Source::Cluster(cluster) => {
                let daemon = Daemon::start_unready(&cluster.admin_kubeconfig(), "istio-system", log, |_| {});
                daemon.until_ready()?;
                Ok(daemon)
            }
        }
    }
}

/// The file name of an object with a separate file.
fn file_name(object: &Value) -> String {
    let kind = object["kind"].as_str().unwrap_or_default();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    format!("{kind}-{name}.yaml")
}

fn write_all(cluster: &Cluster, objects: &[Value]) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let write = || {
        while let Some(object) = objects.get(next.fetch_add(1, Ordering::Relaxed)) {
            cluster.api.create(object)?;
        }
        Ok::<_, String>(())
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
        let join = |writer: std::thread::ScopedJoinHandle<'_, _>| writer.join();
        writers
            .into_iter()
            .try_for_each(|writer| join(writer).unwrap_or_else(|_| Err("a writer panicked".into())))
    })
}
