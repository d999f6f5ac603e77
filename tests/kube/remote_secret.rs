//! `istiod create-remote-secret` with a real API server.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::remote::{Endpoints, TwoClusters};
use crate::support::ads::AdsClient;
use crate::support::authority::Authority;
use crate::support::daemon::Daemon;
use crate::support::http;
use crate::support::kubernetes;
use crate::support::kubernetes::api::{Api, Reference, documents};
use crate::support::remote_secret::{command, created_secret, fill_token_secret};
use crate::support::{scratch, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::remote_secret::secret_grants_read_access",
            secret_grants_read_access,
        ),
        kubernetes::trial("kube::remote_secret::secret_joins_a_cluster", secret_joins_a_cluster),
        kubernetes::trial(
            "kube::remote_secret::kubeconfig_folder_joins_a_cluster",
            kubeconfig_folder_joins_a_cluster,
        ),
        kubernetes::trial(
            "kube::remote_secret::external_control_plane_publishes_roots",
            external_control_plane_publishes_roots,
        ),
    ]
}

const TIMEOUT: Duration = Duration::from_mins(1);

fn secret_grants_read_access(name: &str) -> Result<(), Failed> {
    let cluster = kubernetes::shared(1)?;
    let namespace = "remote-secret";
    let folder = scratch(&format!("{name}/work"));

    let none = command(
        cluster,
        namespace,
        &["--create-service-account=false"],
        &folder.join("none.log"),
    );
    assert!(!none.end_of(TIMEOUT)?.success());
    assert!(none.log().contains("--create-service-account=true"), "{}", none.log());

    let first = command(cluster, namespace, &["--name", "c1"], &folder.join("first.log"));
    fill_token_secret(cluster, namespace, &first)?;
    assert!(first.end_of(TIMEOUT)?.success(), "{}", first.log());
    assert!(
        first
            .log()
            .contains("warn: the server in the kubeconfig is https://127.0.0.1:"),
        "{}",
        first.log()
    );

    // Everything exists now; the command only prints the Secret.
    let server = cluster.url();
    let second = command(
        cluster,
        namespace,
        &["--name", "c1", "--server", &server],
        &folder.join("second.log"),
    );
    assert!(second.end_of(TIMEOUT)?.success(), "{}", second.log());
    let secret = &documents(&second.log())[0];
    assert_eq!(secret["metadata"]["labels"]["istio/multiCluster"], "true");
    let kubeconfig = &documents(secret["stringData"]["c1"].as_str().ok_or("no kubeconfig")?)[0];
    let text = |path: &str| {
        kubeconfig
            .pointer(path)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let authority = BASE64_STANDARD.decode(text("/clusters/0/cluster/certificate-authority-data"));
    let authority = authority.map_err(|error| error.to_string())?;
    let reader = Api::new(
        &text("/clusters/0/cluster/server"),
        &String::from_utf8_lossy(&authority),
        &text("/users/0/user/token"),
    )?;
    reader.list("v1", "Service", namespace)?;
    assert!(
        reader.list("v1", "ConfigMap", namespace).is_err(),
        "the account must have exactly the required read access"
    );
    // The API server accepts the Secret.
    cluster.api.apply(secret)?;

    let unnamed = command(
        cluster,
        namespace,
        &["--server", &server, "-o", "json"],
        &folder.join("unnamed.log"),
    );
    assert!(unnamed.end_of(TIMEOUT)?.success(), "{}", unnamed.log());
    let system = cluster
        .get(&Reference::new("v1", "Namespace", "", "kube-system"))?
        .ok_or("no kube-system")?;
    let uid = system["metadata"]["uid"].as_str().ok_or("no UID")?;
    let secret: Value = serde_json::from_str(&unnamed.log()).map_err(|error| error.to_string())?;
    assert_eq!(secret["metadata"]["name"], format!("istio-remote-secret-{uid}"));
    Ok(())
}

/// Returns a cluster's entry on the debug page, and the gauge of its state.
fn debug_entry(daemon: &Daemon, cluster: &str) -> Option<(Value, String)> {
    let page = http::get(daemon.monitoring, "istiod", "/debug/clusterz").ok()?;
    let rows: Vec<Value> = serde_json::from_str(&page.body).ok()?;
    let row = rows.into_iter().find(|row| row["id"] == cluster)?;
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
    let series = format!("istiod_remote_cluster_sync_status{{cluster=\"{cluster}\"");
    let state = metrics
        .lines()
        .find(|line| line.starts_with(&series) && line.ends_with(" 1"))?;
    Some((row, state.to_owned()))
}

/// Joins with the rights of the reader's service account alone, then makes an error in the Secret.
fn secret_joins_a_cluster(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let (tenant, cluster) = (&two.tenant, two.cluster_name());
    let flags = ["--name", &cluster, "--server", &two.remote.url()];
    let secret = created_secret(two.remote, &tenant.system, &flags, &tenant.folder.join("made.log"))?;
    tenant.cluster.api.apply(&secret)?;
    let daemon = tenant.daemon("istiod")?;
    let proxy = AdsClient::connect(daemon.xds, &tenant.sidecar(&json!({})));
    proxy.first()?;
    let all = two.until(&proxy, Endpoints::Both)?;
    let secret_name = format!("{}/istio-remote-secret-{cluster}", tenant.system);
    let (row, state) = debug_entry(&daemon, &cluster).ok_or("the cluster is missing on the page")?;
    assert_eq!(
        row,
        json!({ "id": cluster, "secretName": secret_name, "syncStatus": "synced" })
    );
    assert!(state.contains("status=\"synced\""), "{state}");

    let reference = Reference::of(&secret);
    let slip = json!({ "stringData": { &cluster: "current-context: nowhere\n" } });
    tenant.cluster.api.patch(&reference, &slip)?;
    let row = wait::until("the error on the page", TIMEOUT, || {
        debug_entry(&daemon, &cluster)
            .map(|(row, _)| row)
            .filter(|row| !row["error"].is_null())
    })?;
    assert_eq!(row["syncStatus"], "synced", "the known state must stay");
    daemon
        .process
        .until_logged(&[&format!("Secret {secret_name}: data.{cluster}: ")])?;
    let rejected = format!("pilot_total_rejected_configs{{name=\"{secret_name}\",type=\"Secret\"}} 1");
    // The page shows the error a moment before it is counted.
    wait::until(&rejected, TIMEOUT, || {
        let metrics = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
        metrics.contains(&rejected).then_some(())
    })?;
    proxy.until_same(&all, TIMEOUT)?;

    tenant.cluster.api.delete(&reference)?;
    two.until(&proxy, Endpoints::Local)?;
    assert!(
        debug_entry(&daemon, &cluster).is_none(),
        "the cluster must be absent from the page"
    );
    Ok(())
}

/// A folder of kubeconfigs, one of which is added and removed.
fn kubeconfig_folder_joins_a_cluster(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let folder = two.tenant.folder.join("clusters");
    std::fs::create_dir(&folder).map_err(|error| error.to_string())?;
    let daemon = two.tenant.daemon_with("istiod", |command| {
        command.env("PILOT_MULTICLUSTER_KUBECONFIG_PATH", &folder);
    })?;
    let proxy = AdsClient::connect(daemon.xds, &two.tenant.sidecar(&json!({})));
    proxy.first()?;
    two.until(&proxy, Endpoints::Local)?;
    let kubeconfig = two.kubeconfig("reader", two.remote.port())?;
    let file = folder.join("remote.yaml");
    std::fs::write(folder.join("draft"), kubeconfig.to_string()).map_err(|error| error.to_string())?;
    std::fs::rename(folder.join("draft"), &file).map_err(|error| error.to_string())?;
    two.until(&proxy, Endpoints::Both)?;
    let (row, _) = debug_entry(&daemon, "test").ok_or("the cluster is missing on the page")?;
    assert_eq!(row["secretName"], "remote.yaml");
    std::fs::remove_file(file).map_err(|error| error.to_string())?;
    two.until(&proxy, Endpoints::Local)?;
    Ok(())
}

/// An external control plane publishes its roots in the clusters whose namespace names it, and in no others.
fn external_control_plane_publishes_roots(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let tenant = &two.tenant;
    let authority = Authority::new("plugged in");
    tenant.cluster.api.apply(&authority.secret(&tenant.system, None))?;
    let kubeconfig = std::fs::read_to_string(two.remote.admin_kubeconfig()).map_err(|error| error.to_string())?;
    tenant.cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Secret",
        "metadata": { "namespace": tenant.system, "name": "remote", "labels": { "istio/multiCluster": "true" } },
        "stringData": { two.cluster_name(): kubeconfig } }))?;
    let external = |name: &str| {
        tenant.daemon_with(name, |command| {
            command.env("EXTERNAL_ISTIOD", "true").env("POD_NAME", name);
        })
    };
    let map = Reference::new("v1", "ConfigMap", &tenant.app, "istio-ca-root-cert");
    let daemon = external("first")?;
    wait::until("root certificates in the config cluster", TIMEOUT, || {
        tenant.cluster.get(&map).ok().flatten()
    })?;
    assert!(
        two.remote.get(&map)?.is_none(),
        "the remote cluster does not name this control plane"
    );
    drop(daemon);

    let namespace = Reference::new("v1", "Namespace", "", &tenant.system);
    let leaders =
        json!({ "metadata": { "annotations": { "topology.istio.io/controlPlaneClusters": "other,Kubernetes" } } });
    two.remote.api.patch(&namespace, &leaders)?;
    let _daemon = external("second")?;
    let found = wait::until("root certificates in the remote cluster", TIMEOUT, || {
        two.remote.get(&map).ok().flatten()
    })?;
    assert_eq!(found["data"]["root-cert.pem"], authority.root());
    let lock = Reference::new("v1", "ConfigMap", &tenant.system, "istio-namespace-controller-election");
    let lock = two.remote.get(&lock)?.ok_or("no lock")?;
    let record = lock["metadata"]["annotations"]["control-plane.alpha.kubernetes.io/leader"].as_str();
    assert!(
        record.is_some_and(|record| record.contains("\"holderKey\":\"^")),
        "{record:?}"
    );
    Ok(())
}
