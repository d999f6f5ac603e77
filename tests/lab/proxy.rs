//! Proxies of the lab: an Envoy on its own host, with the services of its agent.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::agent::CertificateWatch;
use super::host::Host;
use super::injected::Injected;
use super::rules;
use super::sds::Secrets;
use super::tunnel::Tunnel;
use crate::support::process::Process;
use crate::support::{self, agent, bootstrap, envoy, http, wait};

/// A running proxy with its agent. Dropping it ends both.
pub(crate) struct Proxy {
    process: Process,
    admin: PathBuf,
    is_sidecar: bool,
    _tunnel: Tunnel,
    _secrets: Secrets,
}

impl Proxy {
    /// Starts the init container and the proxy of a pod on its host, and waits until the proxy is ready.
    pub(crate) fn start(
        host: &Arc<Host>,
        injected: &Injected<'_>,
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
        let name = injected.name();
        let config = folder.join(format!("{name}.json"));
        let bootstrap = bootstrap::sidecar(&injected.node()?, &admin, &sds, &xds);
        std::fs::write(&config, bootstrap.to_string()).map_err(|error| error.to_string())?;
        if let Some(redirection) = injected.redirection()? {
            rules::redirect(host, &redirection)?;
        }
        let mut command = host.command("setpriv");
        let user = injected.user()?;
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
        command.arg(envoy::binary().ok_or("Envoy is missing; `make tools` installs it")?);
        command.args(injected.envoy_arguments()?);
        command.arg("-c").arg(&config).current_dir(&sockets);
        let process = Process::start(&mut command, &folder.join(format!("{name}-envoy.log")));
        let proxy = Proxy {
            process,
            admin,
            is_sidecar: injected.is_sidecar(),
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
        let scope = if self.is_sidecar { "inboundonly&" } else { "" };
        let drained = http::post_at(&self.admin, &format!("/drain_listeners?{scope}graceful&skip_exit"))?;
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

fn set_mode(path: &Path, mode: u32) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(|error| format!("{}: {error}", path.display()))
}
