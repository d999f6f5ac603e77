//! `istiod create-remote-secret` with a real API server.

use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::daemon::istiod;
use crate::support::kubernetes::api::{Api, Reference, documents};
use crate::support::kubernetes::{self, Cluster};
use crate::support::process::Process;
use crate::support::{scratch, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![kubernetes::trial(
        "kube::remote_secret::is_made_and_opens_the_cluster",
        is_made_and_opens_the_cluster,
    )]
}

const SOON: Duration = Duration::from_mins(1);

fn command(cluster: &Cluster, namespace: &str, more: &[&str], log: &Path) -> Process {
    let mut command = istiod();
    command
        .arg("create-remote-secret")
        .arg("--kubeconfig")
        .arg(cluster.admin_kubeconfig());
    command.args(["--namespace", namespace]).args(more);
    Process::start(&mut command, log)
}

/// Does what kube-controller-manager would: fills the token Secret of the reading account.
fn fill_token_secret(cluster: &Cluster, namespace: &str) -> Result<(), String> {
    let account = "istio-reader-service-account";
    let secret = Reference::new(
        "v1",
        "Secret",
        namespace,
        &format!("{account}-istio-remote-secret-token"),
    );
    wait::until("the token Secret", SOON, || cluster.get(&secret).ok().flatten())?;
    let token = cluster.token(namespace, account, &[])?;
    let data = json!({ "token": BASE64_STANDARD.encode(token), "ca.crt": BASE64_STANDARD.encode(cluster.authority()) });
    cluster.api.patch(&secret, &json!({ "data": data }))?;
    Ok(())
}

fn is_made_and_opens_the_cluster(name: &str) -> Result<(), Failed> {
    let cluster = kubernetes::shared(1)?;
    let namespace = "remote-secret";
    let folder = scratch(&format!("{name}/work"));

    let none = command(
        cluster,
        namespace,
        &["--create-service-account=false"],
        &folder.join("none.log"),
    );
    assert!(!none.end_of(SOON)?.success());
    assert!(none.log().contains("--create-service-account=true"), "{}", none.log());

    let first = command(cluster, namespace, &["--name", "c1"], &folder.join("first.log"));
    fill_token_secret(cluster, namespace)?;
    assert!(first.end_of(SOON)?.success(), "{}", first.log());
    assert!(
        first
            .log()
            .contains("warn: the server in the kubeconfig is https://127.0.0.1:"),
        "{}",
        first.log()
    );

    // Everything is there now; only the Secret is printed.
    let server = cluster.url();
    let second = command(
        cluster,
        namespace,
        &["--name", "c1", "--server", &server],
        &folder.join("second.log"),
    );
    assert!(second.end_of(SOON)?.success(), "{}", second.log());
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
        reader.list("v1", "Secret", namespace).is_err(),
        "it may read what it needs and no more"
    );
    // The Secret is one that an API server takes.
    cluster.api.apply(secret)?;

    let unnamed = command(
        cluster,
        namespace,
        &["--server", &server, "-o", "json"],
        &folder.join("unnamed.log"),
    );
    assert!(unnamed.end_of(SOON)?.success(), "{}", unnamed.log());
    let system = cluster
        .get(&Reference::new("v1", "Namespace", "", "kube-system"))?
        .ok_or("no kube-system")?;
    let uid = system["metadata"]["uid"].as_str().ok_or("no UID")?;
    let secret: Value = serde_json::from_str(&unnamed.log()).map_err(|error| error.to_string())?;
    assert_eq!(secret["metadata"]["name"], format!("istio-remote-secret-{uid}"));
    Ok(())
}
