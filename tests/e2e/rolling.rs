//! A rolling restart of two replicas with real Envoys under load.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::time::Duration;

use libtest_mimic::Failed;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{Fixture, TIMEOUT, WEB};
use crate::support::daemon::Daemon;
use crate::support::envoy::{Envoy, Protocol};
use crate::support::http::{self, RUNTIME};
use crate::support::wait;

/// The Service of the control plane: new connections reach the replica that is ready.
struct Service {
    port: u16,
    target: Arc<AtomicU16>,
}

impl Service {
    fn start(target: u16) -> Result<Service, Failed> {
        let listener = RUNTIME.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let port = listener.local_addr()?.port();
        let target = Arc::new(AtomicU16::new(target));
        let current = Arc::clone(&target);
        RUNTIME.spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let server = current.load(Ordering::Relaxed);
                RUNTIME.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(("127.0.0.1", server)).await {
                        // Either side may close at any time.
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Ok(Service { port, target })
    }
}

/// Requests without a pause until it is stopped.
struct Load {
    stopped: Arc<AtomicBool>,
    sent: Arc<AtomicU32>,
    thread: std::thread::JoinHandle<Vec<String>>,
}

impl Load {
    fn start(addresses: Vec<SocketAddr>) -> Load {
        let (stopped, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (until, count) = (Arc::clone(&stopped), Arc::clone(&sent));
        let thread = std::thread::spawn(move || {
            let mut failures = Vec::new();
            while !until.load(Ordering::Relaxed) {
                for address in &addresses {
                    match http::get(*address, WEB, "/") {
                        Ok(answer) if answer.status.is_success() => {}
                        Ok(answer) => failures.push(format!("{address}: {} {}", answer.status, answer.body)),
                        Err(error) => failures.push(format!("{address}: {error}")),
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            failures
        });
        Load { stopped, sent, thread }
    }

    /// Waits for this number of further requests.
    fn until_more(&self, number: u32) -> Result<(), String> {
        let before = self.sent.load(Ordering::Relaxed);
        wait::until("requests", TIMEOUT, || {
            (self.sent.load(Ordering::Relaxed) >= before + number).then_some(())
        })
    }

    fn stop(self) -> Result<u32, Failed> {
        self.stopped.store(true, Ordering::Relaxed);
        let failures = self.thread.join().map_err(|_| "the load panicked")?;
        let sent = self.sent.load(Ordering::Relaxed);
        if failures.is_empty() {
            return Ok(sent);
        }
        Err(format!(
            "{} of {sent} requests failed, the first: {}",
            failures.len(),
            failures[0]
        )
        .into())
    }
}

/// Returns how often an Envoy has added, changed or removed a resource.
fn changes(envoy: &Envoy) -> Vec<(String, u64)> {
    const COUNTERS: [&str; 8] = [
        "cluster_manager.cluster_added",
        "cluster_manager.cluster_modified",
        "cluster_manager.cluster_removed",
        "listener_manager.listener_added",
        "listener_manager.listener_modified",
        "listener_manager.listener_removed",
        ".config_reload",
        ".membership_change",
    ];
    let is_counter = |name: &str| COUNTERS.iter().any(|counter| name.ends_with(counter));
    let mut found: Vec<(String, u64)> = [
        "cluster_manager",
        "listener_manager",
        "config_reload",
        "membership_change",
    ]
    .iter()
    .flat_map(|filter| envoy.stats(filter))
    .filter(|(name, _)| is_counter(name))
    .collect();
    found.sort();
    found
}

/// Returns the sum of a metric over its labels; none without a sample.
fn metric(daemon: &Daemon, name: &str) -> Option<f64> {
    let page = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
    let samples = page.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
    });
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.reduce(|sum, value| sum + value)
}

/// No request fails, every Envoy moves to the other replica before the first one has ended, and receives nothing that
/// it holds.
pub(super) fn restart_of_replicas_is_not_noticed(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let service = Service::start(fixture.daemon.xds)?;
    let envoys = [
        fixture.sidecar_of(service.port, Protocol::Delta)?,
        fixture.gateway_of(service.port, Protocol::Delta)?,
    ];
    for address in [fixture.outbound(), fixture.edge()] {
        wait::until("an answer", TIMEOUT, || {
            http::get(address, WEB, "/")
                .ok()
                .filter(|answer| answer.status.is_success())
        })?;
    }
    let before: Vec<_> = envoys.iter().map(changes).collect();
    assert!(before.iter().all(|changes| !changes.is_empty()));
    let load = Load::start(vec![fixture.outbound(), fixture.edge()]);
    let mut serving: Option<Daemon> = None;
    for round in 1..=2 {
        let next = fixture.replica(&format!("istiod-{round}.log"))?;
        service.target.store(next.xds, Ordering::Relaxed);
        let old = serving.as_ref().unwrap_or(&fixture.daemon);
        old.process.terminate();
        let ended = old.process.end_of(Duration::from_secs(20))?;
        assert!(ended.success(), "{ended}");
        wait::until("the proxies of the other replica", TIMEOUT, || {
            (metric(&next, "pilot_xds")? >= 2.0).then_some(())
        })?;
        wait::until("responses of the other replica", TIMEOUT, || {
            (metric(&next, "pilot_xds_config_size_bytes_count")? >= 2.0).then_some(())
        })?;
        load.until_more(200)?;
        let bytes = metric(&next, "pilot_xds_config_size_bytes_sum").ok_or("no size of responses")?;
        assert!(bytes < 1024.0, "the new replica sent {bytes} bytes of configuration");
        serving = Some(next);
    }
    let sent = load.stop()?;
    assert!(sent >= 400, "{sent} requests");
    let after: Vec<_> = envoys.iter().map(changes).collect();
    assert_eq!(after, before, "no resource may change");
    for envoy in &envoys {
        envoy.rejected_nothing()?;
    }
    Ok(())
}
