//! Proxies of the lab: an Envoy on its own host, with the services of its agent.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::agent::CertificateWatch;
use super::host::Host;
use super::rules::{self, SIDECAR};
use super::sds::Secrets;
use super::tunnel::Tunnel;
use crate::support::process::Process;
use crate::support::{self, agent, bootstrap, envoy, http, wait};

/// The role of a proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// It receives all traffic of an application.
    Sidecar,
    /// It is a sidecar that accepts HBONE, too.
    HboneSidecar,
    /// It is the workload itself.
    Gateway,
    /// It is the workload itself, and enforces policies of an ambient mesh.
    Waypoint,
}

impl Role {
    /// Returns true if the traffic of the host is redirected to it.
    fn is_sidecar(self) -> bool {
        matches!(self, Role::Sidecar | Role::HboneSidecar)
    }
}

/// The identity of a pod in the mesh.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) role: Role,
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) account: String,
    pub(crate) address: IpAddr,
    pub(crate) labels: Value,
    pub(crate) cluster: String,
    pub(crate) network: String,
    /// True if it sees only endpoints of its own network (`REQUESTED_NETWORK_VIEW`), like an east-west gateway:
    /// cross-network traffic that arrives there is not forwarded to another network.
    pub(crate) is_edge: bool,
}

/// A running proxy with its agent. Dropping it ends both.
pub(crate) struct Proxy {
    process: Process,
    admin: PathBuf,
    _tunnel: Tunnel,
    _secrets: Secrets,
}

impl Proxy {
    /// Starts an Envoy on a host and waits until it is ready. For a sidecar, it also redirects the host's traffic.
    pub(crate) fn start(
        host: &Arc<Host>,
        workload: &Workload,
        control_plane: &agent::Agent,
        known: CertificateWatch,
        folder: &Path,
    ) -> Result<Proxy, String> {
        let sockets = support::sockets();
        set_mode(&sockets, 0o777)?;
        let (sds, xds, admin) = (sockets.join("sds"), sockets.join("xds"), sockets.join("admin"));
        let secrets = Secrets::serve(&sds, known.clone())?;
        let tunnel = Tunnel::open(&xds, control_plane.clone(), known)?;
        for socket in [&sds, &xds] {
            set_mode(socket, 0o666)?;
        }
        let config = folder.join(format!("{}.json", workload.name));
        std::fs::write(
            &config,
            bootstrap::sidecar(&workload.node(), &admin, &sds, &xds).to_string(),
        )
        .map_err(|error| error.to_string())?;
        if workload.role.is_sidecar() {
            rules::redirect(host)?;
        }
        let mut command = host.command("setpriv");
        command.args([
            &format!("--reuid={SIDECAR}"),
            &format!("--regid={SIDECAR}"),
            "--clear-groups",
        ]);
        command.arg(envoy::binary().ok_or("Envoy is missing; `make tools` installs it")?);
        command.args([
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--drain-strategy",
            "immediate",
            "--log-level",
            "warning",
            "-c",
        ]);
        command.arg(&config).current_dir(&sockets);
        let process = Process::start(&mut command, &folder.join(format!("{}-envoy.log", workload.name)));
        let proxy = Proxy {
            process,
            admin,
            _tunnel: tunnel,
            _secrets: secrets,
        };
        proxy.until_ready()?;
        Ok(proxy)
    }

    fn until_ready(&self) -> Result<(), String> {
        let ready = wait::until("a ready proxy", Duration::from_mins(1), || {
            if let Some(status) = self.process.ended() {
                return Some(Err(format!("Envoy exited: {status}")));
            }
            let answer = http::get_at(&self.admin, "/ready").ok()?;
            answer.status.is_success().then_some(Ok(()))
        });
        ready
            .flatten()
            .map_err(|error| format!("{error}\n{}", self.process.log_tail()))
    }

    /// Returns the response of its admin interface.
    pub(crate) fn ask(&self, path: &str) -> Result<String, String> {
        http::get_at(&self.admin, path).map(|answer| answer.body)
    }

    /// Makes clients of the workload use other endpoints, as an agent does before its pod ends.
    pub(crate) fn drain(&self) -> Result<(), String> {
        let drained = http::post_at(&self.admin, "/drain_listeners?inboundonly&graceful&skip_exit")?;
        if drained.status.is_success() {
            return Ok(());
        }
        Err(format!("drain_listeners: {} {}", drained.status, drained.body))
    }

    /// Returns the sum of the counters whose name matches `filter`, a regular expression.
    pub(crate) fn sum(&self, filter: &str) -> Result<u64, String> {
        let stats: Value = serde_json::from_str(&self.ask(&format!("/stats?format=json&filter={filter}"))?)
            .map_err(|error| error.to_string())?;
        let rows = stats["stats"].as_array().into_iter().flatten();
        Ok(rows.filter_map(|row| row["value"].as_u64()).sum())
    }
}

impl Workload {
    /// The node of its proxy.
    pub(crate) fn node(&self) -> Value {
        let Workload {
            name,
            namespace,
            account,
            address,
            ..
        } = self;
        let role = match self.role {
            Role::Sidecar | Role::HboneSidecar => "sidecar",
            Role::Gateway => "router",
            Role::Waypoint => "waypoint",
        };
        let mut node = json!({
            "id": format!("{role}~{address}~{name}.{namespace}~{namespace}.svc.cluster.local"),
            "cluster": format!("{account}.{namespace}"),
            "metadata": {
                "NAMESPACE": namespace,
                "SERVICE_ACCOUNT": account,
                "CLUSTER_ID": self.cluster,
                "NETWORK": self.network,
                "INSTANCE_IPS": address.to_string(),
                "LABELS": self.labels,
                "ISTIO_VERSION": "1.30.3",
            },
        });
        if matches!(self.role, Role::HboneSidecar | Role::Waypoint) {
            node["metadata"]["ENABLE_HBONE"] = json!("true");
        }
        if self.is_edge {
            node["metadata"]["REQUESTED_NETWORK_VIEW"] = json!(self.network);
        }
        node
    }
}

fn set_mode(path: &Path, mode: u32) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(|error| format!("{}: {error}", path.display()))
}
