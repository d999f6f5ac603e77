//! Gateways whose deployments the control plane keeps, with the templates and the rights of the chart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use libtest_mimic::Failed;
use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::status::{SYSTEM, grant, no_request_was_forbidden, trial};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{Cluster, Request, crds};
use crate::support::{helm, http, scratch, wait};

const TIMEOUT: Duration = Duration::from_secs(30);
const GATEWAY_API: &str = "gateway.networking.k8s.io/v1";
const MANAGED: &str = "gateway.istio.io/managed";
const NAMESPACE: &str = "web";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "kube::gateways::deployments_follow_gateways",
            deployments_follow_gateways,
        ),
        trial(
            "kube::gateways::r12_hostile_inputs_are_refused",
            hostile_inputs_are_refused,
        ),
        trial(
            "kube::gateways::replicas_and_revisions_write_once",
            replicas_and_revisions_write_once,
        ),
    ]
}

/// A cluster with the Gateway API and the chart's objects for this revision.
struct Mesh {
    cluster: Cluster,
    folder: PathBuf,
    kubeconfig: PathBuf,
}

impl Mesh {
    fn start(name: &str, values: &[&str]) -> Result<Self, String> {
        let cluster = Cluster::start(name)?;
        for kind in ["Gateway", "GatewayClass", "ListenerSet"] {
            let mut definition = crds::loose_crd("gateway.networking.k8s.io", kind);
            definition["metadata"]["annotations"] = json!({ "api-approved.kubernetes.io": "unapproved, for a test" });
            if kind == "GatewayClass" {
                definition["spec"]["scope"] = json!("Cluster");
            }
            cluster.api.apply(&definition)?;
            crds::established(&cluster.api, &definition)?;
        }
        for namespace in [SYSTEM, NAMESPACE] {
            cluster.namespace(namespace, &json!({}))?;
        }
        let folder = scratch(&format!("{name}-logs"));
        let kubeconfig = grant(&cluster, &folder, values)?;
        let mesh = Self {
            cluster,
            folder,
            kubeconfig,
        };
        mesh.install(values)?;
        Ok(mesh)
    }

    /// Creates the injector's configuration.
    fn install(&self, values: &[&str]) -> Result<(), String> {
        for object in helm::objects("istiod", values)? {
            if object["kind"] == "ConfigMap" {
                self.cluster.api.apply(&object)?;
            }
        }
        Ok(())
    }

    fn daemon(&self, name: &str, variables: &[(&str, &str)]) -> Result<Daemon, String> {
        daemon(
            &self.kubeconfig,
            &self.folder.join(format!("{name}.log")),
            name,
            variables,
        )
    }

    fn get(&self, version: &str, kind: &str, name: &str) -> Option<Value> {
        self.cluster.get(&Reference::new(version, kind, NAMESPACE, name)).ok()?
    }

    /// Waits for an object for which a condition holds.
    fn until(
        &self,
        (version, kind, name): (&str, &str, &str),
        is_met: impl Fn(&Value) -> bool,
    ) -> Result<Value, String> {
        wait::until(&format!("the {kind} {name}"), TIMEOUT, || {
            self.get(version, kind, name).filter(&is_met)
        })
    }

    /// Returns the writes of the daemons to objects of deployments.
    fn writes(&self) -> Vec<Request> {
        let asked = self.cluster.audit(&format!("system:serviceaccount:{SYSTEM}:istiod"));
        let is_write = |request: &Request| {
            request.namespace == NAMESPACE
                && matches!(request.verb.as_str(), "create" | "update" | "patch" | "delete")
                && request.resource != "configmaps"
                && !request.resource.ends_with("/status")
        };
        asked.into_iter().filter(is_write).collect()
    }
}

fn daemon(kubeconfig: &Path, log: &Path, name: &str, variables: &[(&str, &str)]) -> Result<Daemon, String> {
    Daemon::in_kubernetes(kubeconfig, SYSTEM, log, |command| {
        command.env("POD_NAME", name);
        command.envs(variables.iter().copied());
    })
}

const AMBIENT: [(&str, &str); 2] = [
    ("PILOT_ENABLE_AMBIENT", "true"),
    ("AMBIENT_ENABLE_MULTI_NETWORK", "true"),
];

const DEPLOYMENT: (&str, &str, &str) = ("apps/v1", "Deployment", "edge-istio");
const SERVICE: (&str, &str, &str) = ("v1", "Service", "edge-istio");

fn gateway(name: &str, spec: &Value) -> Value {
    let mut gateway = json!({ "apiVersion": GATEWAY_API, "kind": "Gateway",
        "metadata": { "namespace": NAMESPACE, "name": name },
        "spec": { "gatewayClassName": "istio", "listeners": [{ "name": "http", "port": 80, "protocol": "HTTP" }] } });
    for (key, value) in spec.as_object().into_iter().flatten() {
        gateway["spec"][key] = value.clone();
    }
    gateway
}

fn parameters(data: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "namespace": NAMESPACE, "name": "parameters" },
        "data": data })
}

fn ports(service: &Value) -> Vec<u64> {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| port["port"].as_u64()).collect()
}

fn image(deployment: &Value) -> &Value {
    &deployment["spec"]["template"]["spec"]["containers"][0]["image"]
}

fn deployments_follow_gateways(name: &str) -> Result<(), Failed> {
    let mesh = Mesh::start(
        name,
        &["global.hub=example.com", "global.tag=v1", "global.proxy.image=proxyv2"],
    )?;
    let daemon = mesh.daemon("istiod-0", &AMBIENT)?;
    classes_are_created(&mesh)?;
    mesh.cluster.api.apply(&gateway("edge", &json!({})))?;
    let deployment = mesh.until(DEPLOYMENT, |_| true)?;
    assert_eq!(deployment["metadata"]["labels"][MANAGED], "istio.io-gateway-controller");
    assert_eq!(
        deployment["spec"]["template"]["spec"]["serviceAccountName"],
        "edge-istio"
    );
    assert_eq!(image(&deployment), "example.com/proxyv2:v1");
    let service = mesh.until(SERVICE, |_| true)?;
    assert_eq!(
        (service["spec"]["type"].clone(), ports(&service)),
        (json!("LoadBalancer"), vec![15021, 80])
    );
    let stored = mesh.until((GATEWAY_API, "Gateway", "edge"), |_| true)?;
    assert_eq!(
        service["metadata"]["ownerReferences"][0]["uid"],
        stored["metadata"]["uid"]
    );
    edits_are_repaired(&mesh)?;
    changes_of_the_gateway_are_applied(&mesh)?;
    parameters_are_applied(&mesh)?;
    others_keep_their_objects(&mesh)?;
    waypoints_are_deployed(&mesh)?;
    mesh.install(&["global.hub=example.com", "global.tag=v2", "global.proxy.image=proxyv2"])?;
    // Until all are written, a next leader has writes to make.
    for name in ["edge-istio", "own-istio", "waypoint"] {
        mesh.until(("apps/v1", "Deployment", name), |deployment| {
            image(deployment) == "example.com/proxyv2:v2"
        })?;
    }
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    assert!(
        metrics.contains("istiod_gateway_deployments_total{result=\"written\"}"),
        "{metrics}"
    );
    nothing_is_written_twice(&mesh, daemon)?;
    no_request_was_forbidden(&mesh.cluster)?;
    Ok(())
}

fn classes_are_created(mesh: &Mesh) -> Result<(), String> {
    let class = |name: &str| Reference::new(GATEWAY_API, "GatewayClass", "", name);
    let until_class = |name: &str| {
        wait::until(&format!("the class {name}"), TIMEOUT, || {
            mesh.cluster.get(&class(name)).ok()?
        })
    };
    for (name, controller) in [
        ("istio", "istio.io/gateway-controller"),
        ("istio-remote", "istio.io/unmanaged-gateway"),
        ("istio-waypoint", "istio.io/mesh-controller"),
        ("istio-east-west", "istio.io/eastwest-controller"),
    ] {
        assert_eq!(until_class(name)?["spec"]["controllerName"], controller);
    }
    mesh.cluster.api.delete(&class("istio"))?;
    until_class("istio")?;
    Ok(())
}

fn edits_are_repaired(mesh: &Mesh) -> Result<(), String> {
    let api = &mesh.cluster.api;
    let [deployment, service] =
        [DEPLOYMENT, SERVICE].map(|(version, kind, name)| Reference::new(version, kind, NAMESPACE, name));
    api.patch(
        &service,
        &json!({ "spec": { "selector": { "gateway.networking.k8s.io/gateway-name": "other" } } }),
    )?;
    mesh.until(SERVICE, |service| {
        service["spec"]["selector"]["gateway.networking.k8s.io/gateway-name"] == "edge"
    })?;
    // A field that istiod does not apply keeps its value.
    api.patch(
        &deployment,
        &json!({ "spec": { "replicas": 3 }, "metadata": { "labels": { MANAGED: "spoilt" } } }),
    )?;
    let repaired = mesh.until(DEPLOYMENT, |deployment| {
        deployment["metadata"]["labels"][MANAGED] == "istio.io-gateway-controller"
    })?;
    assert_eq!(repaired["spec"]["replicas"], 3);
    api.delete(&service)?;
    mesh.until(SERVICE, |service| ports(service) == [15021, 80])?;
    Ok(())
}

fn changes_of_the_gateway_are_applied(mesh: &Mesh) -> Result<(), String> {
    let mut changed = gateway(
        "edge",
        &json!({ "listeners": [{ "name": "https", "port": 443, "protocol": "HTTPS" }],
        "addresses": [{ "type": "IPAddress", "value": "10.1.2.3" }],
        "infrastructure": { "labels": { "team": "a" }, "annotations": { "note": "b" } } }),
    );
    mesh.cluster.api.apply(&changed)?;
    let service = mesh.until(SERVICE, |service| ports(service) == [15021, 443])?;
    assert_eq!(service["spec"]["loadBalancerIP"], "10.1.2.3");
    assert_eq!(service["metadata"]["labels"]["team"], "a");
    assert_eq!(service["metadata"]["annotations"]["note"], "b");
    changed["spec"]["infrastructure"] = json!({});
    changed["metadata"]["annotations"] = json!({ "networking.istio.io/service-type": "ClusterIP" });
    mesh.cluster.api.apply(&changed)?;
    let service = mesh.until(SERVICE, |service| service["spec"]["type"] == "ClusterIP")?;
    assert!(
        service["metadata"]["labels"]["team"].is_null(),
        "a label that is gone must be removed"
    );
    Ok(())
}

fn parameters_are_applied(mesh: &Mesh) -> Result<(), String> {
    let reference = json!({ "group": "", "kind": "ConfigMap", "name": "parameters" });
    mesh.cluster.api.apply(&gateway(
        "edge",
        &json!({ "infrastructure": { "parametersRef": reference } }),
    ))?;
    let budget = ("policy/v1", "PodDisruptionBudget", "edge-istio");
    mesh.cluster.api.apply(&parameters(
        &json!({ "podDisruptionBudget": "spec: {minAvailable: 1}" }),
    ))?;
    mesh.until(budget, |budget| budget["spec"]["minAvailable"] == 1)?;
    mesh.cluster
        .api
        .apply(&parameters(&json!({ "podDisruptionBudget": "spec: {minAvailable: 2}",
        "deployment": "spec: {template: {spec: {priorityClassName: high}}}" })))?;
    mesh.until(budget, |budget| budget["spec"]["minAvailable"] == 2)?;
    mesh.until(DEPLOYMENT, |deployment| {
        deployment["spec"]["template"]["spec"]["priorityClassName"] == "high"
    })?;
    mesh.cluster
        .api
        .apply(&json!({ "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "namespace": SYSTEM, "name": "of-class",
            "labels": { "gateway.istio.io/defaults-for-class": "istio" } },
        "data": { "deployment": "spec: {template: {spec: {priorityClassName: low, schedulerName: own}}}" } }))?;
    let deployment = mesh.until(DEPLOYMENT, |deployment| {
        deployment["spec"]["template"]["spec"]["schedulerName"] == "own"
    })?;
    assert_eq!(
        deployment["spec"]["template"]["spec"]["priorityClassName"], "high",
        "the Gateway's own win"
    );
    Ok(())
}

/// Objects without the label, Gateways with the address of a Service and those of newer controllers are left alone.
fn others_keep_their_objects(mesh: &Mesh) -> Result<(), String> {
    let service = json!({ "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": NAMESPACE, "name": "own-istio" }, "spec": { "ports": [{ "port": 1 }] } });
    mesh.cluster.api.apply(&service)?;
    let by_hand = json!({ "addresses": [{ "type": "Hostname", "value": "own-istio" }] });
    let mut newer = gateway("newer", &json!({}));
    newer["metadata"]["annotations"] = json!({ "gateway.istio.io/controller-version": "6" });
    for gateway in [gateway("manual", &by_hand), newer, gateway("own", &json!({}))] {
        mesh.cluster.api.apply(&gateway)?;
    }
    // The Service comes last.
    mesh.until(("apps/v1", "Deployment", "own-istio"), |_| true)?;
    mesh.cluster.api.apply(&gateway("after", &json!({})))?;
    mesh.until(("v1", "Service", "after-istio"), |_| true)?;
    assert_eq!(ports(&mesh.until(("v1", "Service", "own-istio"), |_| true)?), [1]);
    for name in ["manual-istio", "newer-istio"] {
        assert_eq!(mesh.get("apps/v1", "Deployment", name), None, "{name}");
    }
    // A Gateway that becomes manual keeps its objects, and they are no longer repaired.
    mesh.cluster.api.apply(&gateway("after", &by_hand))?;
    Ok(())
}

fn waypoints_are_deployed(mesh: &Mesh) -> Result<(), String> {
    mesh.cluster
        .namespace(NAMESPACE, &json!({ "istio.io/dataplane-mode": "ambient" }))?;
    let listeners = json!([{ "name": "mesh", "port": 15008, "protocol": "HBONE" }]);
    mesh.cluster.api.apply(&gateway(
        "waypoint",
        &json!({ "gatewayClassName": "istio-waypoint", "listeners": listeners }),
    ))?;
    let deployment = mesh.until(("apps/v1", "Deployment", "waypoint"), |_| true)?;
    let pod = &deployment["spec"]["template"];
    assert_eq!(pod["metadata"]["labels"]["istio.io/dataplane-mode"], "none");
    assert_eq!(pod["spec"]["containers"][0]["args"][1], "waypoint");
    let service = mesh.until(("v1", "Service", "waypoint"), |_| true)?;
    assert_eq!(
        (service["spec"]["type"].clone(), ports(&service)),
        (json!("ClusterIP"), vec![15021, 15008])
    );
    Ok(())
}

/// A new leader writes nothing that is as it should be.
fn nothing_is_written_twice(mesh: &Mesh, daemon: Daemon) -> Result<(), String> {
    daemon.process.terminate();
    daemon.process.end_of(TIMEOUT)?;
    let before = mesh.writes();
    let next = mesh.daemon("istiod-1", &AMBIENT)?;
    // A Gateway whose name is the last one comes last.
    mesh.cluster.api.apply(&gateway("zz", &json!({})))?;
    mesh.until(("v1", "Service", "zz-istio"), |_| true)?;
    let is_of_others = |request: &Request| !request.name.starts_with("zz");
    let after: Vec<Request> = mesh.writes().into_iter().filter(is_of_others).collect();
    assert_eq!(after, before, "writes of the next leader");
    drop(next);
    Ok(())
}

fn hostile_inputs_are_refused(name: &str) -> Result<(), Failed> {
    let mesh = Mesh::start(name, &[])?;
    let daemon = mesh.daemon("istiod-0", &[])?;
    let log = mesh.folder.join("istiod-0.log");
    let reference = json!({ "group": "", "kind": "ConfigMap", "name": "parameters" });
    let patched = gateway("edge", &json!({ "infrastructure": { "parametersRef": reference } }));
    mesh.cluster.api.apply(&patched)?;
    until_logged(
        &log,
        "Gateway web/edge: spec.infrastructure.parametersRef: parametersRef targeting configmap",
    )?;
    for (key, patch, reason) in [
        (
            "deployment",
            "metadata: {namespace: kube-system}",
            "metadata.namespace may not be set",
        ),
        (
            "service",
            "metadata: {ownerReferences: [{uid: x}]}",
            "metadata.ownerReferences may not be set",
        ),
        ("service", "kind: Secret", "unexpected object kind \\\"Secret\\\""),
        ("deployment", "[", "the patch is not YAML"),
        ("deployment", "metadata: {$patch: delete}", "illegal metadata change"),
        ("secret", "{}", "unsupported overlay"),
    ] {
        mesh.cluster.api.delete(&Reference::of(&parameters(&json!({})))).ok();
        mesh.cluster.api.apply(&parameters(&json!({ key: patch })))?;
        until_logged(&log, reason)?;
    }
    assert_eq!(mesh.get("apps/v1", "Deployment", "edge-istio"), None);
    let mut broken = gateway("broken", &json!({}));
    broken["metadata"]["annotations"] = json!({ "sidecar.istio.io/proxyImage": "a/b\"\n        command: [sh]" });
    mesh.cluster.api.apply(&broken)?;
    until_logged(&log, "the value contains the control character")?;
    let metrics = http::get(daemon.monitoring, "istiod", "/metrics")?.body;
    let refused = metrics
        .lines()
        .find_map(|line| line.strip_prefix("istiod_gateway_deployments_total{result=\"refused\"} "));
    assert!(
        refused.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count >= 8)),
        "{refused:?}"
    );
    // A template that renders something else, beside the last valid parameters.
    mesh.cluster.api.apply(&gateway("edge", &json!({})))?;
    mesh.until(DEPLOYMENT, |_| true)?;
    let template = "apiVersion: v1\nkind: Secret\nmetadata: {name: edge-istio, namespace: web}\n";
    let injector = Reference::new("v1", "ConfigMap", SYSTEM, "istio-sidecar-injector");
    let config = json!({ "templates": { "kube-gateway": template } }).to_string();
    mesh.cluster
        .api
        .patch(&injector, &json!({ "data": { "config": config } }))?;
    until_logged(
        &log,
        "injector configuration: templates.kube-gateway: unexpected object kind",
    )?;
    Ok(())
}

fn until_logged(log: &Path, text: &str) -> Result<(), String> {
    wait::until(&format!("the log line {text:?}"), TIMEOUT, || {
        let log = std::fs::read_to_string(log).ok()?;
        (log.contains(text) || log.replace('\\', "").contains(&text.replace('\\', ""))).then_some(())
    })
}

fn replicas_and_revisions_write_once(name: &str) -> Result<(), Failed> {
    let mesh = Mesh::start(name, &[])?;
    mesh.install(&["revision=canary", "global.tag=canary"])?;
    for object in helm::objects("istiod", &["revision=canary"])? {
        if object["kind"] == "ServiceAccount" {
            mesh.cluster.api.apply(&object)?;
        }
    }
    let canary = [("REVISION", "canary")];
    let _daemons = [
        mesh.daemon("istiod-a", &[])?,
        mesh.daemon("istiod-b", &[])?,
        mesh.daemon("canary", &canary)?,
    ];
    let mut of_canary = gateway("new", &json!({}));
    of_canary["metadata"]["labels"] = json!({ "istio.io/rev": "canary" });
    for gateway in [gateway("edge", &json!({})), of_canary] {
        mesh.cluster.api.apply(&gateway)?;
    }
    let revision =
        |deployment: &Value| deployment["spec"]["template"]["metadata"]["annotations"]["istio.io/rev"].clone();
    for (name, want) in [("edge-istio", "default"), ("new-istio", "canary")] {
        let deployment = mesh.until(("apps/v1", "Deployment", name), |_| true)?;
        assert_eq!(revision(&deployment), want);
        mesh.until(("v1", "Service", name), |_| true)?;
    }
    let mut writes = mesh.writes();
    let count = writes.len();
    writes.sort();
    writes.dedup();
    assert_eq!(writes.len(), count, "each object is written once: {writes:#?}");
    assert_eq!(count, 6, "{writes:#?}");
    Ok(())
}
