//! `istiod create-remote-secret` against a real API server, with the part of Kubernetes' token controller.

use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::daemon::istiod;
use super::kubernetes::Cluster;
use super::kubernetes::api::{Reference, documents};
use super::process::Process;
use super::wait;

const TIMEOUT: Duration = Duration::from_mins(1);

/// Starts the command for a cluster, with its output in `log`.
pub(crate) fn command(cluster: &Cluster, namespace: &str, more: &[&str], log: &Path) -> Process {
    let mut command = istiod();
    command
        .arg("create-remote-secret")
        .arg("--kubeconfig")
        .arg(cluster.admin_kubeconfig());
    command.args(["--namespace", namespace]).args(more);
    Process::start(&mut command, log)
}

/// Fills the token Secret of the reader's service account, as kube-controller-manager does. The command creates the
/// Secret; if it ends before, it has failed.
pub(crate) fn fill_token_secret(cluster: &Cluster, namespace: &str, command: &Process) -> Result<(), String> {
    let account = "istio-reader-service-account";
    let secret = Reference::new(
        "v1",
        "Secret",
        namespace,
        &format!("{account}-istio-remote-secret-token"),
    );
    let created = wait::until("the token Secret", TIMEOUT, || {
        let status = command.ended();
        match cluster.get(&secret) {
            Ok(Some(_)) => Some(Ok(())),
            _ => status.map(|status| Err(format!("the command ended without a token Secret: {status}"))),
        }
    });
    created
        .flatten()
        .map_err(|error| format!("{error}\n{}", command.log_tail()))?;
    let token = cluster.token(namespace, account, &[])?;
    let data = json!({ "token": BASE64_STANDARD.encode(token), "ca.crt": BASE64_STANDARD.encode(cluster.authority()) });
    cluster.api.patch(&secret, &json!({ "data": data }))?;
    Ok(())
}

/// Returns the Secret printed for a cluster where the reader's token does not exist yet.
pub(crate) fn created_secret(cluster: &Cluster, namespace: &str, more: &[&str], log: &Path) -> Result<Value, String> {
    let running = command(cluster, namespace, more, log);
    fill_token_secret(cluster, namespace, &running)?;
    if !running.end_of(TIMEOUT)?.success() {
        return Err(running.log_tail());
    }
    let mut printed = documents(&running.log());
    if printed.is_empty() {
        return Err(format!("no Secret was printed\n{}", running.log_tail()));
    }
    Ok(printed.remove(0))
}
