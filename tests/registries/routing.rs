//! A real Envoy that sends requests to two applications, which a source registers.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{TIMEOUT, sidecar, until_disconnected};
use crate::support::ads::AdsClient;
use crate::support::daemon::Daemon;
use crate::support::envoy::{Envoy, Protocol};
use crate::support::http::{self, Application};
use crate::support::wait;

/// The time in which an unhealthy instance must have left on a quiet machine.
const LEFT: Duration = Duration::from_secs(2);
/// Number of requests of one look. Envoy chooses among idle instances at random, so a look at two healthy instances
/// sees only the first with a probability of 2⁻⁴⁰. With ten requests that happened: a registry is asked twice a second,
/// so there are dozens of looks before it says that an instance left.
const REQUESTS: usize = 40;

/// The addresses of the applications v1 and v2.
pub(super) const ADDRESSES: [&str; 2] = ["127.0.0.2", "127.0.0.3"];

/// The applications v1 and v2, at one port of [`ADDRESSES`].
pub(super) struct Applications {
    pub(super) port: u16,
    _running: [Application; 2],
}

impl Applications {
    pub(super) fn start() -> Applications {
        let first = Application::start("v1", ADDRESSES[0]);
        let port = first.address.port();
        let second = Application::at("v2", SocketAddr::from(([127, 0, 0, 3], port)));
        Applications {
            port,
            _running: [first, second],
        }
    }

    /// Writes a mesh folder whose sidecars accept requests at 127.0.0.1 and the port.
    pub(super) fn mesh(&self, folder: &Path) -> Result<PathBuf, String> {
        let mesh = folder.join("mesh");
        let listener = format!(
            "apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: client, namespace: default}}
spec:
  egress:
  - port: {{number: {}, protocol: HTTP, name: http}}
    bind: 127.0.0.1
    captureMode: NONE
    hosts: ['*/*']
",
            self.port
        );
        let written = std::fs::create_dir(&mesh)
            .and_then(|()| std::fs::write(mesh.join("mesh.yaml"), "enableAutoMtls: false\n"))
            .and_then(|()| std::fs::write(mesh.join("sidecar.yaml"), listener));
        written.map(|()| mesh).map_err(|error| error.to_string())
    }
}

/// A step of a test.
type Step<'a> = &'a dyn Fn() -> Result<(), String>;

/// The life of a source with both applications as instances of one host.
pub(super) struct Life<'a> {
    /// The name or address of the source in metrics.
    pub(super) source: &'a str,
    pub(super) host: &'a str,
    /// Makes v2 unhealthy.
    pub(super) sicken: Step<'a>,
    pub(super) kill: Step<'a>,
    /// Starts the source again.
    pub(super) restart: Step<'a>,
    /// Makes v2 healthy.
    pub(super) heal: Step<'a>,
}

impl Life<'_> {
    /// Checks that a real Envoy routes to healthy instances, also while the source is gone, and follows it again.
    pub(super) fn is_followed(&self, daemon: &Daemon, folder: &Path, port: u16) -> Result<(), String> {
        let envoy = Envoy::start(folder, "sidecar", &sidecar(), daemon.xds, Protocol::Delta)?;
        let outbound = SocketAddr::from(([127, 0, 0, 1], port));
        let answers = || -> Result<Vec<String>, String> {
            let answers = (0..REQUESTS).map(|_| {
                let answer = http::get(outbound, self.host, "/")?;
                let application = answer.application();
                application.ok_or_else(|| format!("status {}: {}", answer.status, answer.body))
            });
            answers.collect()
        };
        let both = || {
            let answers = answers().ok()?;
            ["v1", "v2"]
                .iter()
                .all(|name| answers.iter().any(|answer| answer == name))
                .then_some(())
        };
        wait::until("responses of both instances", TIMEOUT, both)?;
        let began = wait::now();
        (self.sicken)()?;
        wait::until("responses of the healthy instance", TIMEOUT, || {
            answers().ok()?.iter().all(|answer| answer == "v1").then_some(())
        })?;
        let left = began.elapsed();
        eprintln!("{}: an unhealthy instance left after {left:?}", self.source);
        if left > wait::extended(LEFT) {
            return Err(format!("{}: the unhealthy instance left after {left:?}", self.source));
        }
        // Connected only now, as an earlier one might still lack what Envoy has.
        let proxy = AdsClient::connect(daemon.xds, &sidecar());
        proxy.first()?;
        proxy.mark();
        (self.kill)()?;
        until_disconnected(daemon, self.source)?;
        let only_first = Ok(vec!["v1".to_owned(); REQUESTS]);
        let seen = answers();
        if seen != only_first {
            return Err(format!("{}: a lost server affects traffic: {seen:?}", self.source));
        }
        (self.restart)()?;
        super::until_metric(daemon, "istiod_registry_connected", self.source, 1.0)?;
        let seen = answers();
        if seen != only_first {
            return Err(format!("{}: a restarted server affects traffic: {seen:?}", self.source));
        }
        (self.heal)()?;
        wait::until("responses of both instances after the restart", TIMEOUT, both)?;
        let lost = proxy.lost();
        if !lost.is_empty() {
            return Err(format!("{}: the restart removed {lost:?}", self.source));
        }
        envoy.rejected_nothing()
    }
}
