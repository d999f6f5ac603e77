//! The part of a cluster that belongs to one test: namespaces with its name, which are all that its daemons see.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::kubernetes::api::{Reference, documents};
use crate::support::kubernetes::{Cluster, shared};
use crate::support::scratch;

/// A time limit that is long enough for a busy machine; successful tests do not reach it.
pub(crate) const TIMEOUT: Duration = Duration::from_mins(1);

/// The part of a cluster that belongs to one test. Texts written there may contain the placeholders `{app}` and
/// `{system}` for its two namespaces, `{n}` for its number in the run, which makes addresses unique, and `{trial}` for
/// its name.
pub(crate) struct Tenant<'a> {
    pub(crate) cluster: &'a Cluster,
    /// The test's folder.
    pub(crate) folder: PathBuf,
    /// The test's name, as a label value.
    pub(crate) trial: String,
    /// The control plane's namespace.
    pub(crate) system: String,
    /// The applications' namespace.
    pub(crate) app: String,
    number: u8,
}

/// Returns a test's name as a label value, from which the names of namespaces and nodes are made. Kubernetes limits
/// these to 63 characters, so a long name is cut and made unique by the test's number.
fn label_value(trial: &str, number: u8) -> String {
    const MAX_LENGTH: usize = 48;
    let name = trial.trim_start_matches("kube/").replace(['_', '/'], "-");
    if name.len() <= MAX_LENGTH {
        return name;
    }
    let suffix = format!("-{number}");
    let kept = name[..MAX_LENGTH - suffix.len()].trim_end_matches('-');
    format!("{kept}{suffix}")
}

fn next_number() -> u8 {
    static NUMBERS: AtomicU8 = AtomicU8::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

impl Tenant<'static> {
    /// A part of a shared cluster.
    pub(crate) fn shared(index: usize, trial: &str) -> Result<Tenant<'static>, String> {
        Tenant::within(shared(index)?, trial)
    }
}

impl<'a> Tenant<'a> {
    /// Creates the namespaces in a cluster, with a mesh config that selects them.
    pub(crate) fn within(cluster: &'a Cluster, trial: &str) -> Result<Tenant<'a>, String> {
        let number = next_number();
        let name = label_value(trial, number);
        let tenant = Tenant {
            cluster,
            folder: scratch(&format!("{trial}/work")),
            system: format!("{name}-system"),
            app: format!("{name}-app"),
            trial: name,
            number,
        };
        tenant.namespaces(cluster)?;
        tenant.set_mesh("")?;
        Ok(tenant)
    }

    /// Creates namespaces of the same names in another cluster, with the same mesh config. Addresses and files are its
    /// own.
    pub(crate) fn twin(&self, cluster: &'a Cluster) -> Result<Tenant<'a>, String> {
        let folder = self.folder.join("twin");
        std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let twin = Tenant {
            cluster,
            folder,
            trial: self.trial.clone(),
            system: self.system.clone(),
            app: self.app.clone(),
            number: next_number(),
        };
        twin.namespaces(cluster)?;
        twin.set_mesh("")?;
        Ok(twin)
    }

    /// Creates the test's namespaces in this or another cluster.
    pub(crate) fn namespaces(&self, cluster: &Cluster) -> Result<(), String> {
        let labels = json!({ "trial": self.trial });
        cluster.namespace(&self.system, &labels)?;
        cluster.namespace(&self.app, &labels)
    }

    /// Fills in the placeholders of a text.
    pub(crate) fn fill(&self, text: &str) -> String {
        text.replace("{app}", &self.app)
            .replace("{system}", &self.system)
            .replace("{trial}", &self.trial)
            .replace("{n}", &self.number.to_string())
    }

    /// Applies the documents of a text.
    pub(crate) fn apply(&self, text: &str) -> Result<(), String> {
        self.cluster.api.apply_all(&self.fill(text))
    }

    /// Deletes the objects in the documents of a text.
    pub(crate) fn delete(&self, text: &str) -> Result<(), String> {
        documents(&self.fill(text))
            .iter()
            .try_for_each(|document| self.cluster.api.delete(&Reference::of(document)))
    }

    /// A mesh config that selects the test's namespaces, followed by `more`.
    pub(crate) fn mesh(&self, more: &str) -> String {
        let selectors = "discoverySelectors: [{matchLabels: {trial: '{trial}'}}]";
        self.fill(&format!("rootNamespace: '{{system}}'\n{selectors}\n{more}\n"))
    }

    /// Edits the key `mesh` of the ConfigMap `istio`.
    pub(crate) fn set_mesh(&self, more: &str) -> Result<(), String> {
        self.set_config("mesh", &self.mesh(more))
    }

    /// Edits a key of the ConfigMap `istio`, and creates it if needed.
    pub(crate) fn set_config(&self, key: &str, text: &str) -> Result<(), String> {
        let reference = Reference::new("v1", "ConfigMap", &self.system, "istio");
        let edit = json!({ "data": { key: text } });
        if self.cluster.api.patch(&reference, &edit).is_ok() {
            return Ok(());
        }
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "namespace": self.system, "name": "istio" }, "data": { key: text } });
        self.cluster.api.create(&map).map(|_| ())
    }

    /// Starts a daemon as administrator and waits until it is ready.
    pub(crate) fn daemon(&self, name: &str) -> Result<Daemon, String> {
        self.daemon_with(name, |_| {})
    }

    /// Like [`Self::daemon`], with more flags or variables.
    pub(crate) fn daemon_with(&self, name: &str, configure: impl FnOnce(&mut Command)) -> Result<Daemon, String> {
        let kubeconfig = self.cluster.admin_kubeconfig();
        self.daemon_with_kubeconfig(&kubeconfig, name, configure)
    }

    /// Starts a daemon with a kubeconfig and waits until it is ready.
    pub(crate) fn daemon_with_kubeconfig(
        &self,
        kubeconfig: &Path,
        name: &str,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Daemon, String> {
        let log = self.folder.join(format!("{name}.log"));
        Daemon::in_kubernetes(kubeconfig, &self.system, &log, configure)
    }

    /// The administrator's kubeconfig with another port of 127.0.0.1.
    pub(crate) fn kubeconfig_through(&self, port: u16) -> PathBuf {
        let path = self.folder.join(format!("by-{port}.kubeconfig"));
        self.cluster
            .write_admin_kubeconfig(&path, &format!("https://127.0.0.1:{port}"));
        path
    }

    /// A sidecar in the applications' namespace, at an address without a pod.
    pub(crate) fn sidecar(&self, labels: &Value) -> Node {
        let address = format!("10.{}.99.1", self.number);
        Node {
            id: format!("sidecar~{address}~client.{app}~{app}.svc.cluster.local", app = self.app),
            metadata: json!({
                "NAMESPACE": self.app,
                "SERVICE_ACCOUNT": "client",
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": "1.30.3",
                "INSTANCE_IPS": address,
                "LABELS": labels,
            }),
        }
    }

    /// The cluster name of a service in the applications' namespace.
    pub(crate) fn outbound(&self, port: u16, service: &str) -> String {
        format!("outbound|{port}||{service}.{}.svc.cluster.local", self.app)
    }
}
