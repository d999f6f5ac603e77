//! A mesh as a series of steps, and as a folder.

use std::collections::BTreeMap;
use std::path::Path;

use istiod::api::yaml;
use istiod::base::ClusterId;
use serde_json::{Value, json};

use super::odd;
use crate::properties::corpus;
use crate::support::random::Random;

/// The clusters that objects may be in. The first one is the config cluster.
const CLUSTERS: [&str; 2] = ["Kubernetes", "c2"];

/// The folder with the series of steps in a mesh folder. It is hidden, so that it is not part of the mesh.
const STEPS: &str = ".steps";

/// An edit of the mesh.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// The cluster with the object.
    pub(super) cluster: &'static str,
    /// The object; only its identity counts if it is removed.
    pub(super) object: Value,
    pub(super) action: Action,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Put,
    Remove,
}

/// Cluster, API group, kind, namespace and name of an object.
pub(super) type Identity = (&'static str, String, String, String, String);

/// Settings, proxies, and the edits that lead to the objects.
#[derive(Clone)]
pub(crate) struct Mesh {
    /// MeshConfig.
    pub(super) config: Value,
    /// Feature variables.
    pub(super) variables: Value,
    pub(super) steps: Vec<Step>,
}

impl Step {
    pub(super) fn identity(&self) -> Identity {
        let text = |pointer: &str| {
            let value = self.object.pointer(pointer).and_then(Value::as_str);
            value.unwrap_or_default().to_owned()
        };
        let version = text("/apiVersion");
        let group = version.split_once('/').map_or("", |(group, _)| group).to_owned();
        let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
        (self.cluster, group, text("/kind"), namespace, name)
    }

    pub(super) fn cluster(&self) -> ClusterId {
        ClusterId::new(self.cluster)
    }
}

impl Mesh {
    /// Returns the mesh of a seed.
    pub(crate) fn random(seed: u64) -> Mesh {
        // Neighbouring seeds differ from the first number on.
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9));
        let mut mesh = Mesh {
            config: odd::mesh_config(&mut random),
            variables: odd::variables(&mut random),
            steps: Vec::new(),
        };
        for object in odd::fixed() {
            mesh.put(CLUSTERS[0], object);
        }
        for _ in 0..30 + random.below(90) {
            if random.one_in(6) {
                let step = mesh.steps[random.below(mesh.steps.len())].clone();
                mesh.steps.push(Step {
                    action: Action::Remove,
                    ..step
                });
                continue;
            }
            let object = match random.below(5) {
                0 | 1 => corpus::object(&mut random),
                _ => odd::object(&mut random),
            };
            let is_remote = counts_in_remote_clusters(&object) && random.one_in(4);
            mesh.put(CLUSTERS[usize::from(is_remote)], object);
        }
        mesh
    }

    /// Returns the mesh of a seed without what an Envoy of a test cannot load: random patches, files of the workload,
    /// and random bytes instead of certificates. Credentials of gateways have a certificate.
    pub(crate) fn loadable(seed: u64, certificate: &str, key: &str) -> Mesh {
        let mut mesh = Mesh::random(seed);
        mesh.steps.retain(|step| {
            let (_, _, kind, ..) = step.identity();
            let spec = step.object["spec"].to_string();
            let is_excluded = ["EnvoyFilter", "Secret", "ConfigMap"].contains(&kind.as_str())
                || spec.contains("file:///")
                || kind == "DestinationRule" && spec.contains("credentialName");
            !is_excluded
        });
        for name in corpus::APPS {
            let data = json!({ "tls.crt": certificate, "tls.key": key, "ca.crt": certificate });
            let secret = json!({ "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
                "metadata": { "name": name, "namespace": "istio-system" }, "stringData": data });
            mesh.put(CLUSTERS[0], secret);
        }
        mesh
    }

    fn put(&mut self, cluster: &'static str, object: Value) {
        self.steps.push(Step {
            cluster,
            object,
            action: Action::Put,
        });
    }

    /// Returns the objects at the end.
    pub(super) fn objects(&self) -> BTreeMap<Identity, Step> {
        let mut objects = BTreeMap::new();
        for step in &self.steps {
            match step.action {
                Action::Put => objects.insert(step.identity(), step.clone()),
                Action::Remove => objects.remove(&step.identity()),
            };
        }
        objects
    }

    /// Writes the mesh folder, with the series of steps in [`STEPS`].
    pub(crate) fn write(&self, folder: &Path) -> std::io::Result<()> {
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
        std::fs::create_dir_all(folder.join(STEPS))?;
        for cluster in CLUSTERS {
            let objects = self.objects();
            let own = objects.values().filter(|step| step.cluster == cluster);
            let texts: Vec<String> = own.map(|step| format!("{:#}\n", step.object)).collect();
            if !texts.is_empty() {
                std::fs::write(folder.join(file_of(cluster)), texts.join("---\n"))?;
            }
        }
        for (index, step) in self.steps.iter().enumerate() {
            let action = match step.action {
                Action::Put => "put",
                Action::Remove => "remove",
            };
            let name = format!("{index:03}-{action}-{}.yaml", step.cluster);
            std::fs::write(folder.join(STEPS).join(name), format!("{:#}\n", step.object))?;
        }
        std::fs::write(folder.join("mesh.yaml"), format!("{:#}\n", self.config))?;
        std::fs::write(folder.join("env.yaml"), format!("{:#}\n", self.variables))?;
        std::fs::write(folder.join("proxies.yaml"), format!("{:#}\n", odd::proxies()))
    }

    /// Reads a folder that [`Self::write`] has written.
    pub(super) fn read(folder: &Path) -> Result<Mesh, String> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
        let parse = |path: &Path| -> Result<Value, String> {
            let text = read(path)?;
            let first = yaml::documents(&text).first().map(yaml::Document::parse);
            let value = first.unwrap_or(Ok(json!({})));
            value.map_err(|error| format!("{}: {error}", path.display()))
        };
        let entries =
            std::fs::read_dir(folder.join(STEPS)).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        let step = |path: &Path| -> Result<Step, String> {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let in_cluster = |cluster: &&&str| name.ends_with(&format!("-{cluster}"));
            Ok(Step {
                cluster: CLUSTERS.iter().find(in_cluster).copied().unwrap_or(CLUSTERS[0]),
                object: parse(path)?,
                action: if name.contains("-remove-") {
                    Action::Remove
                } else {
                    Action::Put
                },
            })
        };
        Ok(Mesh {
            config: parse(&folder.join("mesh.yaml"))?,
            variables: parse(&folder.join("env.yaml"))?,
            steps: files.iter().map(|path| step(path)).collect::<Result<_, _>>()?,
        })
    }
}

fn file_of(cluster: &str) -> String {
    if cluster == CLUSTERS[0] {
        "objects.yaml".to_owned()
    } else {
        format!("kube-{cluster}.yaml")
    }
}

/// Reports whether istiod reads objects of this kind in remote clusters.
fn counts_in_remote_clusters(object: &Value) -> bool {
    let rows = istiod::api::document::parse(&ClusterId::new(CLUSTERS[1]), object).rows;
    !rows.is_empty() && rows.iter().all(|row| row.kind().counts_in_remote_clusters())
}
