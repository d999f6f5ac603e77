//! Stored states of remote clusters (`--remoteStateDir`), with real API servers.

use std::path::PathBuf;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::remote::{Endpoints, TwoClusters};
use super::tenant::TIMEOUT;
use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::fault_proxy::FaultProxy;
use crate::support::kubernetes;
use crate::support::kubernetes::api::Reference;
use crate::support::{http, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::stored_state::restarted_replica_keeps_an_unreachable_cluster",
            restarted_replica_keeps_an_unreachable_cluster,
        ),
        kubernetes::trial(
            "kube::stored_state::corrupt_state_is_ignored_and_replaced",
            corrupt_state_is_ignored_and_replaced,
        ),
    ]
}

/// Two clusters whose remote API server is behind a proxy, and replicas that store its state.
struct Fixture {
    two: TwoClusters,
    remote: FaultProxy,
}

impl Fixture {
    fn new(name: &str) -> Result<Fixture, String> {
        let two = TwoClusters::new(name)?;
        let remote = FaultProxy::to(two.remote.port());
        two.set_secret(&two.kubeconfig("reader", remote.port)?)?;
        Ok(Fixture { two, remote })
    }

    fn folder(&self, replica: &str) -> PathBuf {
        self.two.tenant.folder.join(format!("{replica}-states"))
    }

    /// The file in which a replica stores the remote cluster.
    fn file(&self, replica: &str) -> PathBuf {
        self.folder(replica)
            .join(format!("{}.remote-state", self.two.cluster_name()))
    }

    /// Starts a replica and waits until it is ready. `timeout` is `PILOT_REMOTE_CLUSTER_TIMEOUT`.
    fn replica(&self, replica: &str, run: &str, timeout: &str) -> Result<Daemon, String> {
        self.two.tenant.daemon_with(&format!("{replica}-{run}"), |command| {
            command.arg("--remoteStateDir").arg(self.folder(replica));
            command.env("PILOT_REMOTE_CLUSTER_TIMEOUT", timeout);
        })
    }

    fn proxy(&self, daemon: &Daemon) -> AdsClient {
        AdsClient::connect(daemon.xds, &self.two.tenant.sidecar(&json!({})))
    }

    /// The remote cluster on a replica's debug page.
    fn shown(&self, daemon: &Daemon) -> Result<Value, String> {
        let page = http::get(daemon.monitoring, "istiod", "/debug/clusterz")?;
        let rows: Vec<Value> = serde_json::from_str(&page.body).map_err(|error| error.to_string())?;
        let row = rows.into_iter().find(|row| row["id"] == self.two.cluster_name());
        row.ok_or_else(|| "the cluster is missing on the page".to_owned())
    }
}

fn metrics(daemon: &Daemon) -> Result<String, String> {
    Ok(http::get(daemon.monitoring, "istiod", "/metrics")?.body)
}

/// Two replicas serve a remote cluster, whose API server becomes unreachable. One of them restarts: proxies that
/// reconnect and new ones receive byte-identical resources. An endpoint that is removed meanwhile leaves once the API
/// server is back.
fn restarted_replica_keeps_an_unreachable_cluster(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::new(name)?;
    let (two, node) = (&fixture.two, fixture.two.tenant.sidecar(&json!({})));
    let (first, second) = (fixture.replica("a", "1", "30s")?, fixture.replica("b", "1", "30s")?);
    let (leaving, staying) = (fixture.proxy(&first), fixture.proxy(&second));
    let all = two.until(&leaving, Endpoints::Both)?;
    staying.until_same(&all, TIMEOUT)?;
    staying.mark();
    fixture.remote.cut();
    first.process.terminate();
    assert!(first.process.end_of(TIMEOUT)?.success());

    // Without a stored state, the start would wait for ever.
    let again = fixture.replica("a", "2", "0s")?;
    let reconnected = AdsClient::reconnect(again.xds, &node, &all);
    let new = fixture.proxy(&again);
    new.until_same(&all, TIMEOUT)?;
    reconnected.until_same(&all, TIMEOUT)?;
    for proxy in [&reconnected, &new, &staying] {
        assert_eq!(proxy.lost(), [""; 0], "nothing may be removed");
    }
    let row = fixture.shown(&again)?;
    assert_eq!(row["syncStatus"], "syncing");
    assert!(row["staleSince"].is_string(), "{row}");
    let series = format!(
        "istiod_remote_cluster_stale_since_seconds{{cluster=\"{}\"}}",
        two.cluster_name()
    );
    assert!(metrics(&again)?.contains(&series), "{series}");

    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &two.tenant.app, "web-a");
    two.remote.api.patch(&slice, &json!({ "endpoints": [] }))?;
    fixture.remote.open();
    let there = (Type::Cluster, two.tenant.outbound(80, "there"));
    for proxy in [&reconnected, &new, &staying] {
        proxy.until("the end of the removed endpoint", TIMEOUT, |resources| {
            let is_local = two.endpoints(resources) == Some(Endpoints::Local);
            (is_local && resources.contains_key(&there)).then_some(())
        })?;
        let lost = proxy.lost();
        assert_eq!(
            lost,
            [format!("{}: 2 endpoints, then 1", two.tenant.outbound(80, "web"))]
        );
    }
    wait::until("a synchronised cluster on the page", TIMEOUT, || {
        let row = fixture.shown(&again).ok()?;
        (row["syncStatus"] == "synced" && row["staleSince"].is_null()).then_some(())
    })?;
    assert!(!metrics(&again)?.contains(&series), "{series}");

    // The cluster leaves with its Secret, and so does the file.
    assert!(fixture.file("a").exists());
    two.tenant.cluster.api.delete(&two.secret())?;
    wait::until("the removal of the stored state", TIMEOUT, || {
        (!fixture.file("a").exists()).then_some(())
    })?;
    Ok(())
}

/// A file that is damaged is named in the log and counted. The cluster joins when it is reachable, and its state
/// replaces the file.
fn corrupt_state_is_ignored_and_replaced(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::new(name)?;
    let two = &fixture.two;
    let daemon = fixture.replica("a", "1", "30s")?;
    two.until(&fixture.proxy(&daemon), Endpoints::Both)?;
    let file = fixture.file("a");
    // The first state is stored at once, though by a task of its own.
    wait::until("a stored state", TIMEOUT, || file.exists().then_some(()))?;
    daemon.process.kill();
    let text = std::fs::read_to_string(&file)?;
    assert!(text.contains("EndpointSlice") && !text.contains("\"Secret\""), "{text}");
    let damaged = text.replacen("\"addressType\"", "\"addressTypo\"", 1);
    assert_ne!(damaged, text);
    std::fs::write(&file, &damaged)?;
    let foreign = fixture.folder("a").join("unknown.remote-state");
    std::fs::write(&foreign, "nothing")?;

    fixture.remote.cut();
    let daemon = fixture.replica("a", "2", "2s")?;
    let proxy = fixture.proxy(&daemon);
    two.until(&proxy, Endpoints::Local)?;
    daemon
        .process
        .until_logged(&[&file.display().to_string(), "checksum"])?;
    let invalid = "istiod_remote_state_reads_total{result=\"invalid\"} 1";
    assert!(metrics(&daemon)?.contains(invalid), "{invalid}");
    wait::until("the removal of a file of no cluster", TIMEOUT, || {
        (!foreign.exists()).then_some(())
    })?;

    fixture.remote.open();
    two.until(&proxy, Endpoints::Both)?;
    wait::until("another stored state", TIMEOUT, || {
        let now = std::fs::read_to_string(&file).ok()?;
        (now != damaged && now.contains("\"addressType\"")).then_some(())
    })?;
    Ok(())
}
