//! Real Kubernetes API servers, each with an etcd of its own, on loopback and in RBAC mode.
//!
//! Two of them are started once and shared by the trials, which keep to namespaces of their own; a trial that kills its
//! server, compacts its history or looks at what was asked of it starts its own. No controllers run: a trial that needs
//! EndpointSlices writes them.

pub(crate) mod api;
pub(crate) mod crds;
mod server;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::{missing, project, scratch};
use api::{Api, Reference};
use server::Server;

/// The binary `name` that `make tools` installs, if it did.
fn binary(name: &str) -> Option<PathBuf> {
    let path = project().join(".tools/bin").join(name);
    path.is_file().then_some(path)
}

/// Whether there is an API server.
pub(crate) fn is_installed() -> bool {
    binary("kube-apiserver").is_some() && binary("etcd").is_some()
}

/// A trial that is skipped where there is no API server; it is told its name, for its folder.
pub(crate) fn trial(name: &str, trial: impl FnOnce(&str) -> Result<(), Failed> + Send + 'static) -> Trial {
    optional_trial(name, |folder| trial(folder).map(|()| Completion::Completed))
}

/// [`trial`] that may find something else missing.
pub(crate) fn optional_trial(
    name: &str,
    trial: impl FnOnce(&str) -> Result<Completion, Failed> + Send + 'static,
) -> Trial {
    let folder = name.replace("::", "/");
    Trial::ignorable_test(name, move || {
        if !is_installed() {
            return missing("there is no Kubernetes API server; `make tools` installs it");
        }
        trial(&folder)
    })
}

/// How many clusters are shared.
pub(crate) const SHARED: usize = 2;

/// A cluster that other trials use at the same time. The first to ask starts it.
pub(crate) fn shared(index: usize) -> Result<&'static Cluster, String> {
    static CLUSTERS: [OnceLock<Result<Cluster, String>>; SHARED] = [const { OnceLock::new() }; SHARED];
    CLUSTERS[index]
        .get_or_init(|| Cluster::start(&format!("kube/cluster-{index}")))
        .as_ref()
        .map_err(Clone::clone)
}

/// One API server with its etcd. Dropping it ends both.
pub(crate) struct Cluster {
    server: Server,
    /// Access as an administrator.
    pub(crate) api: Api,
    folder: PathBuf,
}

impl Cluster {
    /// Starts a cluster of the trial's own, with the CRDs of the charts, in a folder of that name.
    pub(crate) fn start(name: &str) -> Result<Cluster, String> {
        let folder = scratch(name);
        let server = Server::start(&folder)?;
        let api = Api::new(&server.url(), &server.authority()?, server::ADMIN_TOKEN)?;
        let cluster = Cluster { server, api, folder };
        crds::apply(&cluster.api)?;
        Ok(cluster)
    }

    /// `https://127.0.0.1:port`.
    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// The port of the API server.
    pub(crate) fn port(&self) -> u16 {
        self.server.port
    }

    /// Certificates, in PEM, that the server's own is signed by.
    pub(crate) fn authority(&self) -> String {
        self.server.authority().expect("the server wrote it when it started")
    }

    /// Kills the API server; etcd keeps the state.
    pub(crate) fn stop_server(&self) {
        self.server.stop();
    }

    /// Starts the API server again, where it was, and waits until it is ready.
    pub(crate) fn start_server(&self) -> Result<(), String> {
        self.server.start_api_server()
    }

    /// Makes etcd forget all history up to now, so that a watch from before is answered with 410 Gone.
    pub(crate) fn compact(&self) -> Result<(), String> {
        self.server.compact()
    }

    /// What the API server was asked by that user so far, the administrator aside.
    pub(crate) fn audit(&self, user: &str) -> Vec<Request> {
        let log = std::fs::read_to_string(self.server.audit_log()).unwrap_or_default();
        let events = log.lines().filter_map(|line| serde_json::from_str(line).ok());
        events
            .filter(|event: &Value| event["user"]["username"] == user)
            .map(|event| Request::of(&event))
            .collect()
    }

    /// Writes a kubeconfig of the administrator into the cluster's folder.
    pub(crate) fn admin_kubeconfig(&self) -> PathBuf {
        let path = self.folder.join("admin.kubeconfig");
        self.write_admin_kubeconfig(&path, &self.url());
        path
    }

    /// Writes a kubeconfig of the administrator that leads to `url`, which may be a detour to this cluster.
    pub(crate) fn write_admin_kubeconfig(&self, path: &Path, url: &str) {
        self.write_kubeconfig(path, url, server::ADMIN_TOKEN);
    }

    /// A token of a service account, which has to be there, for an hour; without audiences, for the API server itself.
    pub(crate) fn token(&self, namespace: &str, account: &str, audiences: &[&str]) -> Result<String, String> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let wanted = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": { "audiences": audiences, "expirationSeconds": 3600 } });
        let given = self.api.post(&path, &wanted)?;
        Ok(given["status"]["token"]
            .as_str()
            .ok_or("no token in the answer")?
            .to_owned())
    }

    /// Creates a service account, if need be, and writes its kubeconfig to `path`.
    pub(crate) fn account_kubeconfig(&self, namespace: &str, account: &str, path: &Path) -> Result<(), String> {
        self.namespace(namespace, &json!({}))?;
        self.api.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "namespace": namespace, "name": account } }))?;
        let token = self.token(namespace, account, &[])?;
        self.write_kubeconfig(path, &self.url(), &token);
        Ok(())
    }

    /// Writes a kubeconfig that leads to `url` and shows `token`.
    pub(crate) fn write_kubeconfig(&self, path: &Path, url: &str, token: &str) {
        std::fs::write(path, self.kubeconfig(url, token).to_string()).expect("the folder is ours");
    }

    /// A kubeconfig; JSON is YAML as well.
    pub(crate) fn kubeconfig(&self, url: &str, token: &str) -> Value {
        let authority = BASE64_STANDARD.encode(self.authority());
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": { "server": url, "certificate-authority-data": authority } }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
            "current-context": "test",
        })
    }

    /// Creates a namespace with these labels, or sets them.
    pub(crate) fn namespace(&self, name: &str, labels: &Value) -> Result<(), String> {
        self.api.apply(
            &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } }),
        )?;
        Ok(())
    }

    /// The object, if it is there.
    pub(crate) fn get(&self, reference: &Reference) -> Result<Option<Value>, String> {
        self.api.get(reference)
    }
}

/// One request in the audit log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: String,
    /// API group; empty for the core group.
    pub(crate) group: String,
    /// `resource` or `resource/subresource`; the path where it is none.
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// HTTP status of the answer.
    pub(crate) status: u64,
}

impl Request {
    fn of(event: &Value) -> Request {
        let object = &event["objectRef"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let resource = match (object["resource"].as_str(), object["subresource"].as_str()) {
            (Some(resource), Some(subresource)) => format!("{resource}/{subresource}"),
            (Some(resource), None) => resource.to_owned(),
            (None, _) => text(&event["requestURI"]),
        };
        Request {
            verb: text(&event["verb"]),
            group: text(&object["apiGroup"]),
            resource,
            namespace: text(&object["namespace"]),
            name: text(&object["name"]),
            status: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
        }
    }
}
