//! A trial's part of a cluster: namespaces that carry its name, which its daemons see and nothing else.

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

/// Long enough for a slow machine that does much else, and never waited for in full when all is well.
pub(crate) const SOON: Duration = Duration::from_mins(1);

/// A place in a cluster. Texts that are written there may say `{app}` and `{system}` for its two namespaces, `{n}` for a
/// number that no other place has, to be part of addresses, and `{trial}` for its name.
pub(crate) struct Place<'a> {
    pub(crate) cluster: &'a Cluster,
    /// The trial's folder.
    pub(crate) folder: PathBuf,
    /// A name for labels.
    pub(crate) trial: String,
    /// The control plane's namespace.
    pub(crate) system: String,
    /// The applications' namespace.
    pub(crate) app: String,
    number: u8,
}

impl Place<'static> {
    /// A place in a cluster that others use too.
    pub(crate) fn shared(index: usize, trial: &str) -> Result<Place<'static>, String> {
        Place::within(shared(index)?, trial)
    }
}

impl<'a> Place<'a> {
    /// A place in a cluster, with its namespaces and a mesh config that selects them.
    pub(crate) fn within(cluster: &'a Cluster, trial: &str) -> Result<Place<'a>, String> {
        static NUMBERS: AtomicU8 = AtomicU8::new(1);
        let name = trial.trim_start_matches("kube/").replace(['_', '/'], "-");
        let place = Place {
            cluster,
            folder: scratch(&format!("{trial}/work")),
            system: format!("{name}-system"),
            app: format!("{name}-app"),
            trial: name,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        };
        place.namespaces(cluster)?;
        place.set_mesh("")?;
        Ok(place)
    }

    /// The trial's namespaces, in this cluster or in another.
    pub(crate) fn namespaces(&self, cluster: &Cluster) -> Result<(), String> {
        let labels = json!({ "trial": self.trial });
        cluster.namespace(&self.system, &labels)?;
        cluster.namespace(&self.app, &labels)
    }

    /// A text with its placeholders filled in.
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

    /// Deletes what the documents of a text are about.
    pub(crate) fn delete(&self, text: &str) -> Result<(), String> {
        documents(&self.fill(text))
            .iter()
            .try_for_each(|document| self.cluster.api.delete(&Reference::of(document)))
    }

    /// The mesh config that selects the trial's namespaces, and says `more`.
    pub(crate) fn mesh(&self, more: &str) -> String {
        let selectors = "discoverySelectors: [{matchLabels: {trial: '{trial}'}}]";
        self.fill(&format!("rootNamespace: '{{system}}'\n{selectors}\n{more}\n"))
    }

    /// Edits the key `mesh` of the ConfigMap `istio`.
    pub(crate) fn set_mesh(&self, more: &str) -> Result<(), String> {
        self.set_config("mesh", &self.mesh(more))
    }

    /// Edits a key of the ConfigMap `istio`, which is made if need be.
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

    /// [`Self::daemon`] with more flags or variables.
    pub(crate) fn daemon_with(&self, name: &str, configure: impl FnOnce(&mut Command)) -> Result<Daemon, String> {
        let kubeconfig = self.cluster.admin_kubeconfig();
        self.daemon_by(&kubeconfig, name, configure)
    }

    /// Starts a daemon with a kubeconfig and waits until it is ready.
    pub(crate) fn daemon_by(
        &self,
        kubeconfig: &Path,
        name: &str,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Daemon, String> {
        let log = self.folder.join(format!("{name}.log"));
        Daemon::in_kubernetes(kubeconfig, &self.system, &log, configure)
    }

    /// A kubeconfig of the administrator that leads to another port of 127.0.0.1.
    pub(crate) fn kubeconfig_by_way_of(&self, port: u16) -> PathBuf {
        let path = self.folder.join(format!("by-{port}.kubeconfig"));
        self.cluster
            .write_admin_kubeconfig(&path, &format!("https://127.0.0.1:{port}"));
        path
    }

    /// A sidecar in the applications' namespace, at an address that no pod of the place has.
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

    /// The cluster of a service in the applications' namespace.
    pub(crate) fn outbound(&self, port: u16, service: &str) -> String {
        format!("outbound|{port}||{service}.{}.svc.cluster.local", self.app)
    }
}
