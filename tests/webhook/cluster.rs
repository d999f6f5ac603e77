//! Real API servers that call the webhooks.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{scratch, wait};

pub(super) const SYSTEM: &str = "istio-system";
const VERSION: &str = "admissionregistration.k8s.io/v1";
pub(super) const TIMEOUT: Duration = Duration::from_mins(1);

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial("webhook::cluster::wrong_objects_are_refused", wrong_objects_are_refused),
        kubernetes::trial(
            "webhook::cluster::equal_configurations_are_not_written",
            equal_configurations_are_not_written,
        ),
    ]
}

pub(super) fn start(cluster: &Cluster, folder: &str, name: &str) -> Result<Daemon, String> {
    let folder = scratch(&format!("{folder}-{name}"));
    let kubeconfig = folder.join("kubeconfig");
    cluster.write_admin_kubeconfig(&kubeconfig, &cluster.url());
    Daemon::secured(&folder.join("istiod.log"), |command| {
        command.arg("--kubeconfig").arg(&kubeconfig).args(["-n", SYSTEM]);
        command.env("POD_NAME", name).env("ISTIOD_CUSTOM_HOST", "localhost");
        command.env("ROOT_CA_DIR", folder.join("none"));
    })
}

/// Returns a configuration of the default revision with one webhook on this port.
pub(super) fn configuration(kind: &str, name: &str, port: u16) -> Value {
    let (webhook, path, rule) = match kind {
        "MutatingWebhookConfiguration" => (
            "object.sidecar-injector.istio.io",
            "inject",
            json!({ "operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"] }),
        ),
        _ => (
            "rev.validation.istio.io",
            "validate",
            json!({ "operations": ["CREATE", "UPDATE"], "apiGroups": ["networking.istio.io", "security.istio.io"],
                "apiVersions": ["*"], "resources": ["*"] }),
        ),
    };
    json!({ "apiVersion": VERSION, "kind": kind,
        "metadata": { "name": name, "labels": { "istio.io/rev": "default" } },
        "webhooks": [{ "name": webhook, "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "failurePolicy": "Ignore", "rules": [rule],
            "clientConfig": { "url": format!("https://localhost:{port}/{path}") } }] })
}

/// Waits until the configuration has a CA bundle, and returns it.
pub(super) fn patched(cluster: &Cluster, kind: &str, name: &str) -> Result<Value, String> {
    let reference = Reference::new(VERSION, kind, "", name);
    wait::until(&format!("the CA bundle of {name}"), TIMEOUT, || {
        let found = cluster.get(&reference).ok()??;
        found["webhooks"][0]["clientConfig"]["caBundle"]
            .is_string()
            .then_some(found)
    })
}

fn virtual_service(hosts: &[&str], gateways: &[&str]) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": "default", "name": "web" },
        "spec": { "hosts": hosts, "gateways": gateways,
            "http": [{ "route": [{ "destination": { "host": "web" } }] }] } })
}

fn wrong_objects_are_refused(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    cluster.namespace(SYSTEM, &json!({}))?;
    let daemon = start(&cluster, name, "istiod")?;
    let kind = "ValidatingWebhookConfiguration";
    cluster.api.apply(&configuration(kind, "validator", daemon.webhooks))?;
    let reference = Reference::new(VERSION, kind, "", "validator");
    wait::until("a validator that fails closed", TIMEOUT, || {
        let found = cluster.get(&reference).ok()??;
        (found["webhooks"][0]["failurePolicy"] == "Fail").then_some(())
    })?;

    let refused = |operation: &str| {
        let error = cluster
            .api
            .apply(&virtual_service(&["*"], &[]))
            .err()
            .unwrap_or_default();
        let want = "admission webhook \"rev.validation.istio.io\" denied the request: configuration is invalid: \
            spec.hosts[0]: `*` needs a gateway other than mesh";
        assert!(error.contains(want), "{operation}: {error}");
    };
    refused("create");
    cluster
        .api
        .apply(&virtual_service(&["web.example.com"], &["gateway"]))?;
    refused("update");
    let reference = Reference::new("networking.istio.io/v1", "VirtualService", "default", "web");
    cluster.api.delete(&reference)?;
    Ok(())
}

fn equal_configurations_are_not_written(name: &str) -> Result<(), Failed> {
    const KINDS: [&str; 2] = ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"];
    let cluster = Cluster::start(name)?;
    cluster.namespace(SYSTEM, &json!({}))?;
    let daemon = start(&cluster, name, "first")?;
    let mut first = Vec::new();
    for kind in KINDS {
        cluster.api.apply(&configuration(kind, "first", daemon.webhooks))?;
        first.push(patched(&cluster, kind, "first")?);
    }
    let managers = first[0]["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let owner = managers.iter().find(|entry| entry["manager"] == "istiod");
    let fields = owner.map(|entry| entry["fieldsV1"].to_string()).unwrap_or_default();
    assert!(
        fields.contains("caBundle") && !fields.contains("rules"),
        "istiod owns the CA bundle only: {managers:?}"
    );
    let closed = Reference::new(VERSION, KINDS[1], "", "first");
    let closed = wait::until("a validator that fails closed", TIMEOUT, || {
        let found = cluster.get(&closed).ok()??;
        (found["webhooks"][0]["failurePolicy"] == "Fail").then_some(found)
    })?;
    first[1] = closed;
    drop(daemon);

    let daemon = start(&cluster, name, "second")?;
    for (kind, first) in KINDS.iter().zip(first) {
        // The second process has seen the first configuration when it writes another one.
        cluster.api.apply(&configuration(kind, "second", daemon.webhooks))?;
        let second = patched(&cluster, kind, "second")?;
        let found = patched(&cluster, kind, "first")?;
        assert_eq!(
            found["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"],
            "{kind} was written again"
        );
        let bundle = |found: &Value| found["webhooks"][0]["clientConfig"]["caBundle"].clone();
        assert_eq!(bundle(&found), bundle(&second));
    }
    Ok(())
}
