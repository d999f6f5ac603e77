//! The two processes of a cluster: etcd and the API server.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::binary;
use crate::support::process::Process;
use crate::support::{http, ports, wait};

/// The administrator's token. The server listens on loopback only, and ends with the tests.
pub(super) const ADMIN_TOKEN: &str = "administrator";

/// The folder of etcd's state in that of a cluster.
pub(super) const STATE: &str = "etcd";

/// Time limit of a start on a busy machine.
const START: Duration = Duration::from_mins(3);

pub(super) struct Server {
    folder: PathBuf,
    etcd_port: u16,
    pub(super) port: u16,
    api_server: Mutex<Option<Process>>,
    _etcd: Process,
}

impl Server {
    pub(super) fn start(folder: &Path) -> Result<Server, String> {
        let [etcd_port, peer_port, port] = [ports::free(), ports::free(), ports::free()];
        std::fs::write(
            folder.join("tokens.csv"),
            format!("{ADMIN_TOKEN},admin,admin,system:masters\n"),
        )
        .map_err(|error| error.to_string())?;
        std::fs::write(folder.join("audit.json"), audit_policy().to_string()).map_err(|error| error.to_string())?;
        let (client, peer) = (
            format!("http://127.0.0.1:{etcd_port}"),
            format!("http://127.0.0.1:{peer_port}"),
        );
        let mut etcd = bound(&binary("etcd").ok_or("etcd is missing; `make tools` installs it")?);
        etcd.arg("--data-dir")
            .arg(folder.join(STATE))
            .args(["--logger", "zap", "--log-level", "warn"]);
        // No test outlives a crash of the machine. While builds write gigabytes, one fsync can take longer than the
        // time limit of a request, and the API server then answers neither reads nor watches.
        etcd.arg("--unsafe-no-fsync");
        etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        etcd.args(["--initial-cluster", &format!("default={peer}")]);
        let server = Server {
            folder: folder.to_owned(),
            etcd_port,
            port,
            api_server: Mutex::default(),
            _etcd: Process::start_bound(etcd, &folder.join("etcd.log")),
        };
        server.start_api_server()?;
        Ok(server)
    }

    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The CA of the server's self-signed certificate, which is in the same file.
    pub(super) fn authority(&self) -> Result<String, String> {
        std::fs::read_to_string(self.folder.join("certificates/apiserver.crt")).map_err(|error| error.to_string())
    }

    pub(super) fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    pub(super) fn stop(&self) {
        self.lock().take();
    }

    /// Starts the API server and waits until it is ready. The certificate and its key, which also signs tokens, are
    /// kept from the first start.
    pub(super) fn start_api_server(&self) -> Result<(), String> {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let key = file("certificates/apiserver.key");
        let mut command =
            bound(&binary("kube-apiserver").ok_or("kube-apiserver is missing; `make tools` installs it")?);
        command.args([
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", self.port),
            // The address for in-cluster clients, of which there are none; it is a documentation address.
            "--advertise-address=192.0.2.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--cert-dir={}", file("certificates")),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            format!("--service-account-key-file={key}"),
            format!("--service-account-signing-key-file={key}"),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--enable-priority-and-fairness=false".to_owned(),
            "--feature-gates=ClusterTrustBundle=true".to_owned(),
            "--runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true".to_owned(),
            format!("--audit-policy-file={}", file("audit.json")),
            format!("--audit-log-path={}", file("audit.log")),
        ]);
        let count = std::fs::read_dir(&self.folder).map_or(0, Iterator::count);
        let process = Process::start_bound(command, &self.folder.join(format!("kube-apiserver-{count}.log")));
        // One client for all questions: each new one makes both sides shake hands. The server writes its certificate
        // some time after it has started.
        let mut client: Option<(String, super::Api)> = None;
        let ready = wait::until("a ready API server", START, || {
            if let Some(status) = process.ended() {
                return Some(Err(format!("the API server exited: {status}")));
            }
            let authority = self.authority().ok()?;
            if client.as_ref().is_none_or(|(known, _)| *known != authority) {
                let api = super::Api::new(&self.url(), &authority, ADMIN_TOKEN).ok()?;
                client = Some((authority, api));
            }
            let (_, api) = client.as_ref()?;
            api.text("/readyz").ok().map(|_| Ok(()))
        });
        ready
            .flatten()
            .map_err(|error| format!("{error}\n{}", process.log_tail()))?;
        *self.lock() = Some(process);
        Ok(())
    }

    pub(super) fn compact(&self) -> Result<(), String> {
        let etcd = |path: &str, body: Value| http::post(self.etcd_port, path, &body);
        let state = etcd("/v3/kv/range", json!({ "key": "AA==" }))?;
        let revision = &state["header"]["revision"];
        etcd("/v3/kv/compaction", json!({ "revision": revision, "physical": true })).map(|_| ())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Process>> {
        self.api_server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command that the kernel kills when this process ends, even if this process is killed.
fn bound(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    // Less frequent garbage collection saves a sixth of the CPU time of the API server's start.
    command.env_clear().env("GOGC", "400");
    command
}

/// An audit policy that logs all requests but those of the administrator and the server itself.
fn audit_policy() -> Value {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "None", "userGroups": ["system:masters"] },
            { "level": "Metadata" },
        ],
    })
}
