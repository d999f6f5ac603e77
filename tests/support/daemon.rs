//! The daemon's binary, as the tests run it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use super::authority::Authority;
use super::process::{self, Process};
use super::{http, ports, wait};

/// The daemon with an empty environment, so that no variable of the caller reaches its settings.
pub(crate) fn istiod() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_istiod"));
    command.env_clear().current_dir(super::project().join("target"));
    command
}

/// Runs `istiod render FOLDER --out OUT`. The error holds its exit status and its last output.
pub(crate) fn render(folder: &Path, out: &Path) -> Result<(), String> {
    std::fs::create_dir_all(out).expect("the output folder can be created");
    let log = out.join("render.log");
    let process = Process::start(istiod().arg("render").arg(folder).arg("--out").arg(out), &log);
    let status = process.end_of(Duration::from_mins(2))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{status}\n{}", process.log_tail()))
    }
}

/// Returns the folder of a CA for daemons that serve nothing with TLS. Without it, each of them would generate two RSA
/// keys, for a root and for its own certificate, which takes as much CPU time as the rest of its start.
fn plugged_in() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let folder = super::scratch("cacerts");
        for (name, text) in Authority::new("tests").files() {
            std::fs::write(folder.join(name), text).expect("target/ is writable");
        }
        folder
    });
    &FOLDER
}

/// A daemon that serves a mesh folder on free ports of 127.0.0.1. Dropping it kills it.
pub(crate) struct Daemon {
    pub(crate) process: Process,
    /// The plaintext xDS port.
    pub(crate) xds: u16,
    /// The port for xDS and certificates over TLS; 0 unless it is [`Daemon::secured`].
    pub(crate) secure: u16,
    /// Readiness and debug pages.
    pub(crate) http: SocketAddr,
    /// Metrics, version and debug pages.
    pub(crate) monitoring: SocketAddr,
    /// The webhooks over TLS; 0 unless the daemon is [`Daemon::secured`], otherwise they are at [`Self::http`].
    pub(crate) webhooks: u16,
}

impl Daemon {
    /// Starts `istiod discovery --configDir folder` and waits until it is ready.
    pub(crate) fn start(folder: &Path, log: &Path) -> Result<Daemon, String> {
        Daemon::configured(log, |command| {
            command.arg("--configDir").arg(folder);
        })
    }

    /// Starts `istiod discovery` without its secure port and waits until it is ready. `configure` adds its sources. The
    /// CA is plugged in, unless `configure` names another folder.
    pub(crate) fn configured(log: &Path, configure: impl FnOnce(&mut Command)) -> Result<Daemon, String> {
        let daemon = Daemon::unready(log, configure);
        daemon.until_ready()?;
        Ok(daemon)
    }

    /// Like [`Self::configured`], without waiting.
    pub(crate) fn unready(log: &Path, configure: impl FnOnce(&mut Command)) -> Daemon {
        Daemon::spawn_serving(log, |command| {
            command.env("ROOT_CA_DIR", plugged_in());
            configure(command);
        })
    }

    /// Starts `istiod discovery --configDir folder -n namespace` and waits until it is ready.
    pub(crate) fn of_folder(folder: &Path, namespace: &str, log: &Path) -> Result<Daemon, String> {
        Daemon::configured(log, |command| {
            command.arg("--configDir").arg(folder).args(["-n", namespace]);
        })
    }

    /// Starts `istiod discovery` against a real API server and waits until it is ready. `configure` adds flags and
    /// variables.
    pub(crate) fn in_kubernetes(
        kubeconfig: &Path,
        namespace: &str,
        log: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Daemon, String> {
        let daemon = Daemon::start_unready(kubeconfig, namespace, log, configure);
        daemon.until_ready()?;
        Ok(daemon)
    }

    /// Like [`Self::in_kubernetes`], without waiting.
    pub(crate) fn start_unready(
        kubeconfig: &Path,
        namespace: &str,
        log: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Daemon {
        Daemon::spawn_serving(log, |command| {
            command.arg("--kubeconfig").arg(kubeconfig).args(["-n", namespace]);
            configure(command);
        })
    }

    /// Starts `istiod discovery` with its TLS ports and waits until it is ready. `configure` adds its sources.
    pub(crate) fn secured(log: &Path, configure: impl FnOnce(&mut Command)) -> Result<Daemon, String> {
        Daemon::secured_at(IpAddr::V4(Ipv4Addr::LOCALHOST), log, configure)
    }

    /// Like [`Self::secured`], with readiness and debug pages at another address of this machine.
    pub(crate) fn secured_at(
        pages: IpAddr,
        log: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Daemon, String> {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let http = SocketAddr::new(pages, ports::free());
        let (xds, monitoring) = (ports::free(), local(ports::free()));
        let (secure, webhooks) = (ports::free(), ports::free());
        let daemon = Daemon::spawned_secured((xds, http, monitoring), (secure, webhooks), log, configure);
        daemon.until_ready()?;
        Ok(daemon)
    }

    /// Returns the CPU time so far.
    pub(crate) fn cpu(&self) -> Duration {
        process::cpu(self.process.id)
    }

    /// Kills the daemon and starts it again on the same ports, like [`Self::secured`] and with the same `configure`.
    /// Does not wait until it is ready.
    pub(crate) fn restart_unready(&mut self, log: &Path, configure: impl FnOnce(&mut Command)) {
        self.process.kill();
        let plaintext = (self.xds, self.http, self.monitoring);
        *self = Daemon::spawned_secured(plaintext, (self.secure, self.webhooks), log, configure);
    }

    fn spawned_secured(
        (xds, http, monitoring): (u16, SocketAddr, SocketAddr),
        (secure, webhooks): (u16, u16),
        log: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Daemon {
        let mut daemon = Daemon::spawned(xds, http, monitoring, log, |command| {
            command.arg(format!("--secureGRPCAddr=127.0.0.1:{secure}"));
            command.arg(format!("--httpsAddr=127.0.0.1:{webhooks}"));
            configure(command);
        });
        (daemon.secure, daemon.webhooks) = (secure, webhooks);
        daemon
    }

    fn spawn_serving(log: &Path, configure: impl FnOnce(&mut Command)) -> Daemon {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let (xds, http, monitoring) = (ports::free(), local(ports::free()), local(ports::free()));
        Daemon::spawned(xds, http, monitoring, log, |command| {
            command.arg("--secureGRPCAddr=");
            configure(command);
        })
    }

    /// Kills the daemon and starts another in its place.
    pub(crate) fn replace(&mut self, folder: &Path, log: &Path) -> Result<(), String> {
        self.process.kill();
        *self = Daemon::listening(self.xds, self.http, self.monitoring, folder, log)?;
        Ok(())
    }

    fn listening(
        xds: u16,
        http: SocketAddr,
        monitoring: SocketAddr,
        folder: &Path,
        log: &Path,
    ) -> Result<Daemon, String> {
        let daemon = Daemon::spawned(xds, http, monitoring, log, |command| {
            command.env("ROOT_CA_DIR", plugged_in());
            command.arg("--secureGRPCAddr=").arg("--configDir").arg(folder);
        });
        daemon.until_ready()?;
        Ok(daemon)
    }

    fn spawned(
        xds: u16,
        http: SocketAddr,
        monitoring: SocketAddr,
        log: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Daemon {
        let mut command = istiod();
        command.arg("discovery");
        command.arg(format!("--grpcAddr=127.0.0.1:{xds}"));
        command.arg(format!("--httpAddr={http}"));
        command.arg(format!("--monitoringAddr={monitoring}"));
        command.args(["--httpsAddr=", "--ctrlz_port=0"]);
        configure(&mut command);
        let process = Process::start(&mut command, log);
        Daemon {
            process,
            xds,
            secure: 0,
            http,
            monitoring,
            webhooks: 0,
        }
    }

    /// Waits until the daemon reports that it is ready.
    pub(crate) fn until_ready(&self) -> Result<(), String> {
        self.ready()
            .map_err(|error| format!("{error}\n{}", self.process.log_tail()))
    }

    /// Reports whether the daemon is ready now.
    pub(crate) fn is_ready(&self) -> bool {
        http::get(self.http, "istiod", "/ready").is_ok_and(|answer| answer.status.is_success())
    }

    fn ready(&self) -> Result<(), String> {
        wait::until("a ready daemon", Duration::from_mins(1), || {
            if let Some(status) = self.process.ended() {
                return Some(Err(format!("the daemon exited: {status}")));
            }
            let answer = http::get(self.http, "istiod", "/ready").ok()?;
            answer.status.is_success().then_some(Ok(()))
        })
        .flatten()
    }
}
