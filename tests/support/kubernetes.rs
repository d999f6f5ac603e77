//! Real Kubernetes API servers, each with its own etcd, on loopback and in RBAC mode.
//!
//! Two clusters are started once and shared; tests use namespaces of their own there. A test that kills its server,
//! compacts the history or reads the audit log starts its own cluster. No controllers run: a test that needs
//! EndpointSlices writes them.

pub(crate) mod api;
pub(crate) mod crds;
mod server;
mod template;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::{missing, project, scratch, wait};
use api::{Api, Reference};
use server::Server;

/// Returns the binary `name` installed by `make tools`, if it exists.
fn binary(name: &str) -> Option<PathBuf> {
    let path = project().join(".tools/bin").join(name);
    path.is_file().then_some(path)
}

/// Reports whether an API server is installed.
pub(crate) fn is_installed() -> bool {
    binary("kube-apiserver").is_some() && binary("etcd").is_some()
}

/// A test that is skipped where the API server is missing. It receives its name, for its folder.
pub(crate) fn trial(name: &str, trial: impl FnOnce(&str) -> Result<(), Failed> + Send + 'static) -> Trial {
    optional_trial(name, |folder| trial(folder).map(|()| Completion::Completed))
}

/// Like [`trial`], for a test that may also skip itself.
pub(crate) fn optional_trial(
    name: &str,
    trial: impl FnOnce(&str) -> Result<Completion, Failed> + Send + 'static,
) -> Trial {
    let folder = name.replace("::", "/");
    Trial::ignorable_test(name, move || {
        if !is_installed() {
            return missing("the Kubernetes API server is missing; `make tools` installs it");
        }
        trial(&folder)
    })
}

/// Number of shared clusters.
pub(crate) const SHARED: usize = 2;

/// Returns a cluster shared with other tests. The first call starts it.
pub(crate) fn shared(index: usize) -> Result<&'static Cluster, String> {
    static CLUSTERS: [OnceLock<Result<Cluster, String>>; SHARED] = [const { OnceLock::new() }; SHARED];
    CLUSTERS[index]
        .get_or_init(|| Cluster::start(&format!("kube/cluster-{index}")))
        .as_ref()
        .map_err(Clone::clone)
}

/// An API server with its etcd. Dropping it ends both.
pub(crate) struct Cluster {
    server: Server,
    /// Access as an administrator.
    pub(crate) api: Api,
    folder: PathBuf,
}

impl Cluster {
    /// Starts a cluster of one test, with the CRDs of the charts, in a folder of this name.
    pub(crate) fn start(name: &str) -> Result<Cluster, String> {
        let state = template::state()?;
        let folder = scratch(name);
        template::copy(state, &folder.join(server::STATE))?;
        Cluster::start_in(folder)
    }

    /// Starts a cluster with the state in `folder`; without one, it is empty.
    fn start_in(folder: PathBuf) -> Result<Cluster, String> {
        let server = Server::start(&folder)?;
        let api = Api::new(&server.url(), &server.authority()?, server::ADMIN_TOKEN)?;
        Ok(Cluster { server, api, folder })
    }

    /// `https://127.0.0.1:port`.
    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// The port of the API server.
    pub(crate) fn port(&self) -> u16 {
        self.server.port
    }

    /// The CA certificates of the server's own certificate, as PEM.
    pub(crate) fn authority(&self) -> String {
        self.server.authority().expect("the server writes it on start")
    }

    /// Kills the API server; etcd keeps the state.
    pub(crate) fn stop_server(&self) {
        self.server.stop();
    }

    /// Starts the API server again at the same address, and waits until it is ready.
    pub(crate) fn start_server(&self) -> Result<(), String> {
        self.server.start_api_server()
    }

    /// Compacts etcd's history, so that a watch from an older version gets 410 Gone.
    pub(crate) fn compact(&self) -> Result<(), String> {
        self.server.compact()
    }

    /// Returns the requests of a user from the audit log; the administrator's are not logged.
    pub(crate) fn audit(&self, user: &str) -> Vec<Request> {
        let log = std::fs::read_to_string(self.server.audit_log()).unwrap_or_default();
        let events = log.lines().filter_map(|line| serde_json::from_str(line).ok());
        events
            .filter(|event: &Value| event["user"]["username"] == user)
            .map(|event| Request::of(&event))
            .collect()
    }

    /// Returns the requests of a user that count, once the log has at least `least` of them: the server logs a write
    /// after others can read it.
    ///
    /// # Errors
    /// If there are fewer after a minute.
    pub(crate) fn audited(
        &self,
        user: &str,
        least: usize,
        counts: impl Fn(&Request) -> bool,
    ) -> Result<Vec<Request>, String> {
        let logged = || {
            let requests = self.audit(user).into_iter();
            requests.filter(&counts).collect::<Vec<_>>()
        };
        let until = wait::until(&format!("{least} logged requests"), Duration::from_mins(1), || {
            Some(logged()).filter(|requests| requests.len() >= least)
        });
        until.map_err(|error| format!("{error}: {:?}", logged()))
    }

    /// Writes the administrator's kubeconfig into the cluster's folder.
    pub(crate) fn admin_kubeconfig(&self) -> PathBuf {
        let path = self.folder.join("admin.kubeconfig");
        self.write_admin_kubeconfig(&path, &self.url());
        path
    }

    /// Writes the administrator's kubeconfig for `url`, which may be a fault proxy in front of this cluster.
    pub(crate) fn write_admin_kubeconfig(&self, path: &Path, url: &str) {
        self.write_kubeconfig(path, url, server::ADMIN_TOKEN);
    }

    /// Creates a token of an existing service account, valid for an hour. Without audiences, it is for the API server.
    pub(crate) fn token(&self, namespace: &str, account: &str, audiences: &[&str]) -> Result<String, String> {
        self.request_token(
            namespace,
            account,
            &json!({ "audiences": audiences, "expirationSeconds": 3600 }),
        )
    }

    /// Like [`Self::token`], bound to a pod, which is given as an object with its uid.
    pub(crate) fn bound_token(
        &self,
        namespace: &str,
        account: &str,
        audience: &str,
        pod: &Value,
    ) -> Result<String, String> {
        let metadata = &pod["metadata"];
        let bound = json!({ "kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"] });
        let spec = json!({ "audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound });
        self.request_token(namespace, account, &spec)
    }

    fn request_token(&self, namespace: &str, account: &str, spec: &Value) -> Result<String, String> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec });
        let response = self.api.post(&path, &request)?;
        Ok(response["status"]["token"]
            .as_str()
            .ok_or("no token in the response")?
            .to_owned())
    }

    /// Creates a service account, if needed.
    pub(crate) fn service_account(&self, namespace: &str, account: &str) -> Result<(), String> {
        self.api.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "namespace": namespace, "name": account } }))?;
        Ok(())
    }

    /// Creates a service account, if needed, and writes its kubeconfig to `path`.
    pub(crate) fn account_kubeconfig(&self, namespace: &str, account: &str, path: &Path) -> Result<(), String> {
        self.namespace(namespace, &json!({}))?;
        self.api.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "namespace": namespace, "name": account } }))?;
        let token = self.token(namespace, account, &[])?;
        self.write_kubeconfig(path, &self.url(), &token);
        Ok(())
    }

    /// Writes a kubeconfig for `url` with `token`. Replaces an existing file as a whole, because a daemon of another
    /// test may be reading it.
    pub(crate) fn write_kubeconfig(&self, path: &Path, url: &str, token: &str) {
        static DRAFTS: AtomicUsize = AtomicUsize::new(0);
        let draft = path.with_extension(format!("draft-{}", DRAFTS.fetch_add(1, Ordering::Relaxed)));
        std::fs::write(&draft, self.kubeconfig(url, token).to_string()).expect("the folder is writable");
        std::fs::rename(&draft, path).expect("the folder is writable");
    }

    /// Returns a kubeconfig as JSON, which is valid YAML.
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

    /// Creates a namespace with these labels, or sets its labels.
    pub(crate) fn namespace(&self, name: &str, labels: &Value) -> Result<(), String> {
        self.api.apply(
            &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } }),
        )?;
        Ok(())
    }

    /// Returns the object, if it exists.
    pub(crate) fn get(&self, reference: &Reference) -> Result<Option<Value>, String> {
        self.api.get(reference)
    }
}

/// A request in the audit log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: String,
    /// API group; empty for the core group.
    pub(crate) group: String,
    /// `resource` or `resource/subresource`; the path of a request without a resource.
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// HTTP status of the response.
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
