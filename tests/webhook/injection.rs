//! Pods that a real API server lets the webhook inject, with the objects of a chart and the rights that it grants.

use std::path::PathBuf;
use std::process::Command;

use istiod::api::yaml;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::cluster::{SYSTEM, TIMEOUT, patched};
use super::server::until_counted;
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{helm, missing, project, scratch, wait};

const INJECTOR: &str = "istio-sidecar-injector";
/// A namespace whose pods are injected by the default revision.
const INJECTED: &str = "injected";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::optional_trial("webhook::injection::chart_of_the_project_works", |name| {
            if !helm::is_installed() {
                return missing("Helm is missing; `make tools` installs it");
            }
            chart_works(name, &helm::objects("istiod", &[])?)?;
            Ok(Completion::Completed)
        }),
        kubernetes::optional_trial("webhook::injection::chart_of_istio_works", |name| {
            let chart = project().join("../shared/conformance/upstream/chart/istio-discovery-1.30.3.yaml");
            let Ok(text) = std::fs::read_to_string(chart) else {
                return Ok(Completion::ignored_with(
                    "skipped: Istio's rendered chart is not next to the project (../shared/conformance/upstream/chart)",
                ));
            };
            let documents = yaml::documents(&text);
            let objects: Vec<Value> = documents.iter().map(yaml::Document::parse).collect::<Result<_, _>>()?;
            chart_works(name, &objects)?;
            Ok(Completion::Completed)
        }),
        kubernetes::optional_trial("webhook::injection::each_revision_injects_its_own_pods", |name| {
            if !helm::is_installed() {
                return missing("Helm is missing; `make tools` installs it");
            }
            each_revision_injects_its_own_pods(name)?;
            Ok(Completion::Completed)
        }),
    ]
}

/// A control plane that runs with a chart's objects, environment and rights.
struct Installed<'a> {
    objects: &'a [Value],
    kubeconfig: PathBuf,
    folder: PathBuf,
    daemon: Daemon,
}

impl<'a> Installed<'a> {
    /// Creates the objects of a chart and starts the daemon as its Deployment would. Webhooks call the daemon's port
    /// instead of a Service.
    fn start(cluster: &Cluster, folder: &str, objects: &'a [Value]) -> Result<Self, String> {
        let folder = scratch(folder);
        let account = name_of(objects, "ServiceAccount")?;
        let is_webhook = |object: &&Value| object["webhooks"].is_array();
        for object in objects.iter().filter(|object| !object.is_null() && !is_webhook(object)) {
            let created = cluster.api.apply(object);
            created.map_err(|error| format!("{} {}: {error}", object["kind"], object["metadata"]["name"]))?;
        }
        let kubeconfig = folder.join("kubeconfig");
        let token = cluster.token(SYSTEM, &account, &[])?;
        cluster.write_kubeconfig(&kubeconfig, &cluster.url(), &token);
        let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
            configure(command, objects, &kubeconfig, &account);
        })?;
        for object in objects.iter().filter(is_webhook) {
            cluster
                .api
                .apply(&helm::with_local_webhooks(object, daemon.webhooks, ""))?;
        }
        for object in objects.iter().filter(is_webhook) {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            patched(cluster, &text(&object["kind"]), &text(&object["metadata"]["name"]))?;
        }
        Ok(Self {
            objects,
            kubeconfig,
            folder,
            daemon,
        })
    }

    /// Kills the daemon and starts it again.
    fn restart(&mut self) -> Result<(), String> {
        let account = name_of(self.objects, "ServiceAccount")?;
        self.daemon
            .restart_unready(&self.folder.join("restarted.log"), |command| {
                configure(command, self.objects, &self.kubeconfig, &account);
            });
        self.daemon.until_ready()
    }
}

fn configure(command: &mut Command, objects: &[Value], kubeconfig: &std::path::Path, name: &str) {
    command.envs(helm::environment(objects));
    command.arg("--kubeconfig").arg(kubeconfig).args(["-n", SYSTEM]);
    command.env("POD_NAME", name).env("POD_NAMESPACE", SYSTEM);
    command
        .env("ISTIOD_CUSTOM_HOST", "localhost")
        .env("ROOT_CA_DIR", kubeconfig.with_extension("none"));
}

/// Returns the name of the first object of a kind.
fn name_of(objects: &[Value], kind: &str) -> Result<String, String> {
    let found = objects.iter().find(|object| object["kind"] == kind);
    let name = found.and_then(|found| found["metadata"]["name"].as_str());
    name.map(str::to_owned).ok_or(format!("the chart has no {kind}"))
}

/// Returns a pod as a ReplicaSet creates it. The API server of the tests has no controllers, which would set the
/// service account as well.
fn pod(namespace: &str, name: &str, annotations: &Value, container: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": namespace, "generateName": format!("{name}-5d4f8c7b9-"), "annotations": annotations,
            "labels": { "app": name, "pod-template-hash": "5d4f8c7b9" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{name}-5d4f8c7b9"),
                "uid": "0b5c2f8e-58a1-4e5c-8f4b-9c1b9d9d2a11", "controller": true }] },
        "spec": { "serviceAccountName": "default", "containers": [container] } })
}

fn application() -> Value {
    json!({ "name": "web", "image": "web", "ports": [{ "containerPort": 80 }] })
}

/// Creates an object, also if the webhook does not work yet.
fn created(cluster: &Cluster, object: &Value) -> Result<Value, String> {
    let mut refused = String::new();
    let created = wait::until("a created object", TIMEOUT, || {
        cluster.api.create(object).map_err(|error| refused = error).ok()
    });
    created.map_err(|error| format!("{error}: {refused}"))
}

fn names(containers: &Value) -> Vec<&str> {
    let containers = containers.as_array().into_iter().flatten();
    containers
        .map(|container| container["name"].as_str().unwrap_or_default())
        .collect()
}

/// Checks that a pod has the sidecar.
fn assert_injected(pod: &Value) {
    let spec = &pod["spec"];
    assert_eq!(names(&spec["containers"]), ["web"], "{pod}");
    assert_eq!(names(&spec["initContainers"]), ["istio-init", "istio-proxy"], "{pod}");
}

/// Returns the value of an environment variable of the sidecar.
fn variable(pod: &Value, name: &str) -> Value {
    let variables = pod["spec"]["initContainers"][1]["env"].as_array();
    let found = variables
        .into_iter()
        .flatten()
        .find(|variable| variable["name"] == name);
    found.map(|variable| variable["value"].clone()).unwrap_or_default()
}

fn chart_works(name: &str, objects: &[Value]) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    cluster.namespace(SYSTEM, &json!({}))?;
    cluster.namespace(INJECTED, &json!({ "istio-injection": "enabled" }))?;
    let mut installed = Installed::start(&cluster, &format!("{name}-istiod"), objects)?;

    pods_are_injected(&cluster)?;
    wrong_objects_are_refused(&cluster)?;
    wrong_configurations_are_not_used(&cluster, &installed)?;
    let refused = json!({ "sidecar.istio.io/interceptionMode": "SIDEWAYS" });
    let error = cluster
        .api
        .create(&pod(INJECTED, "refused", &refused, &application()))
        .err();
    let error = error.unwrap_or_default();
    assert!(
        error.contains("denied the request") && error.contains("interceptionMode"),
        "{error}"
    );
    until_counted(&installed.daemon, "sidecar_injection_failure_total 1")?;

    // The wrong configuration of the last step is gone after a restart, so the valid one comes back first.
    let is_injector = |object: &&Value| object["kind"] == "ConfigMap" && object["metadata"]["name"] == INJECTOR;
    let injector = objects
        .iter()
        .find(is_injector)
        .ok_or("the chart has no injector ConfigMap")?;
    cluster.api.apply(injector)?;
    installed.restart()?;
    // Ready means that the very first pod is injected.
    assert_injected(
        &cluster
            .api
            .create(&pod(INJECTED, "restarted", &json!({}), &application()))?,
    );

    let account = format!("system:serviceaccount:{SYSTEM}:{}", name_of(objects, "ServiceAccount")?);
    let asked = cluster.audit(&account);
    let refused: Vec<_> = asked.iter().filter(|request| request.status == 403).collect();
    assert!(refused.is_empty(), "forbidden requests: {refused:#?}");
    Ok(())
}

fn pods_are_injected(cluster: &Cluster) -> Result<(), Failed> {
    let sidecar = created(cluster, &pod(INJECTED, "web", &json!({}), &application()))?;
    assert_injected(&sidecar);
    assert_eq!(variable(&sidecar, "ISTIO_META_WORKLOAD_NAME"), "web");

    // By the label of a pod, in a namespace without one.
    let mut labelled = pod("default", "labelled", &json!({}), &application());
    labelled["metadata"]["labels"]["sidecar.istio.io/inject"] = json!("true");
    assert_injected(&created(cluster, &labelled)?);
    labelled["metadata"]["namespace"] = json!(INJECTED);
    labelled["metadata"]["labels"]["sidecar.istio.io/inject"] = json!("false");
    assert_eq!(
        cluster.api.create(&labelled)?["spec"]["initContainers"],
        Value::Null,
        "the label opts out"
    );

    let gateway = json!({ "inject.istio.io/templates": "gateway" });
    let container = json!({ "name": "istio-proxy", "image": "auto" });
    let gateway = created(cluster, &pod(INJECTED, "gateway", &gateway, &container))?;
    let image = gateway["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
    assert!(image.contains("proxyv2"), "{image}");
    Ok(())
}

fn wrong_objects_are_refused(cluster: &Cluster) -> Result<(), Failed> {
    let wrong = json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": INJECTED, "name": "wrong", "labels": { "istio.io/rev": "default" } },
        "spec": { "hosts": ["*"], "http": [{ "route": [{ "destination": { "host": "web" } }] }] } });
    let reference = Reference::of(&wrong);
    let error = wait::until("a refusal", TIMEOUT, || match cluster.api.create(&wrong) {
        // The validator still fails open.
        Ok(_) => {
            let _ = cluster.api.delete(&reference);
            None
        }
        Err(error) => error.contains("denied the request").then_some(error),
    })?;
    assert!(error.contains("configuration is invalid: spec.hosts[0]"), "{error}");
    Ok(())
}

/// Writes wrong configurations of the injector, of which each is counted; the last valid one stays in use.
fn wrong_configurations_are_not_used(cluster: &Cluster, installed: &Installed) -> Result<(), Failed> {
    let wrong = [
        json!({ "config": "templates:\n  sidecar: |\n    {{ if }}\n", "values": "{}" }),
        json!({ "config": "templates: 3\n", "values": "{}" }),
        json!({ "config": "templates: {}\n", "values": "[" }),
        json!({ "config": "{".repeat(100_000), "values": "{}" }),
        json!({ "values": "{}" }),
        json!({ "config": "templates: {}\n" }),
    ];
    for (number, data) in wrong.iter().enumerate() {
        let config_map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": { "namespace": SYSTEM, "name": INJECTOR } });
        cluster.api.apply(&config_map)?;
        let counted = format!("istiod_injector_configuration_errors_total {}", number + 1);
        until_counted(&installed.daemon, &counted)?;
    }
    assert_injected(
        &cluster
            .api
            .create(&pod(INJECTED, "after", &json!({}), &application()))?,
    );
    let log = std::fs::read_to_string(installed.folder.join("istiod.log"))?;
    assert!(
        log.contains("sidecar:1:"),
        "the log names template, line and column: {log}"
    );
    Ok(())
}

fn each_revision_injects_its_own_pods(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    cluster.namespace(SYSTEM, &json!({}))?;
    let default = helm::objects("istiod", &[])?;
    let canary = helm::objects("istiod", &["revision=canary", "revisionTags={prod}"])?;
    let _default = Installed::start(&cluster, &format!("{name}-default"), &default)?;
    let _canary = Installed::start(&cluster, &format!("{name}-canary"), &canary)?;
    for (namespace, labels, revision) in [
        ("by-default", json!({ "istio-injection": "enabled" }), "default"),
        ("by-revision", json!({ "istio.io/rev": "canary" }), "canary"),
        ("by-tag", json!({ "istio.io/rev": "prod" }), "canary"),
    ] {
        cluster.namespace(namespace, &labels)?;
        let sidecar = created(&cluster, &pod(namespace, "web", &json!({}), &application()))?;
        assert_injected(&sidecar);
        assert_eq!(sidecar["metadata"]["labels"]["service.istio.io/canonical-name"], "web");
        assert_eq!(sidecar["metadata"]["annotations"]["istio.io/rev"], revision);
    }
    let mut other = pod("by-default", "web", &json!({}), &application());
    other["metadata"]["labels"]["istio.io/rev"] = json!("canary");
    assert_injected(&created(&cluster, &other)?);
    Ok(())
}
