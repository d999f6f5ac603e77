//! InferencePools: their shadow Services and their statuses, written by real daemons. Two replicas run, of which one
//! writes.

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::gateway_status::{self, GROUP, TIMEOUT, gateway, service, until};
use super::status::{SYSTEM, no_request_was_forbidden, start, trial};
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{Cluster, Request, crds};
use crate::support::wait;

const API_GROUP: &str = "inference.networking.k8s.io";
/// The Service of the pool `models`.
const SHADOW: &str = "models-ip-8edcc26c";
const VARIABLE: (&str, &str) = ("ENABLE_GATEWAY_API_INFERENCE_EXTENSION", "true");

pub(super) fn trials() -> Vec<Trial> {
    vec![trial(
        "kube::inference::pools_have_a_service_and_a_status",
        pools_have_a_service_and_a_status,
    )]
}

fn pool(ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({ "number": port })).collect();
    json!({ "apiVersion": format!("{API_GROUP}/v1"), "kind": "InferencePool",
        "metadata": { "namespace": "app", "name": "models" },
        "spec": { "selector": { "matchLabels": { "app": "models" } }, "targetPorts": ports,
            "appProtocol": "http", "endpointPickerRef": { "name": "picker", "port": { "number": 9002 } } } })
}

fn shadow() -> Reference {
    Reference::new("v1", "Service", "app", SHADOW)
}

/// Waits for the Service with some property.
fn until_shadow(cluster: &Cluster, title: &str, is_met: impl Fn(&Value) -> bool) -> Result<Value, String> {
    wait::until(&format!("the shadow Service {title}"), TIMEOUT, || {
        cluster.get(&shadow()).ok()?.filter(&is_met)
    })
}

fn target_ports(service: &Value) -> Vec<u64> {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| port["targetPort"].as_u64()).collect()
}

/// Returns the number of writes of the Service, once the log has at least so many.
fn writes(cluster: &Cluster, least: usize) -> Result<usize, String> {
    let user = format!("system:serviceaccount:{SYSTEM}:istiod");
    let is_write =
        |request: &Request| request.resource == "services" && request.name == SHADOW && request.verb != "get";
    Ok(cluster.audited(&user, least, is_write)?.len())
}

fn pools_have_a_service_and_a_status(name: &str) -> Result<(), Failed> {
    let value = format!("env.{}={}", VARIABLE.0, VARIABLE.1);
    let (cluster, folder, kubeconfig) = gateway_status::cluster(name, &[&value])?;
    let mut definition = crds::loose_crd(API_GROUP, "InferencePool");
    definition["metadata"]["annotations"] = json!({ "api-approved.kubernetes.io": "unapproved, for a test" });
    cluster.api.apply(&definition)?;
    crds::established(&cluster.api, &definition)?;
    let _replicas = [
        start(&kubeconfig, &folder, "istiod-a", &[VARIABLE])?,
        start(&kubeconfig, &folder, "istiod-b", &[VARIABLE])?,
    ];
    cluster.api.apply(&gateway("web"))?;
    cluster.api.apply(&service("app", "picker"))?;
    let stored = cluster.api.apply(&pool(&[8000, 8001]))?;
    let backend = json!({ "group": API_GROUP, "kind": "InferencePool", "name": "models" });
    let route = gateway_status::route("app", "models", "web", &backend);
    cluster.api.apply(&route)?;
    let created = until_shadow(&cluster, "of a pool", |_| true)?;
    let expected = json!({
        "internal.istio.io/service-semantics": "inferencepool",
        "istio.io/inferencepool-name": "models",
        "istio.io/inferencepool-extension-service": "picker",
        "istio.io/inferencepool-extension-port": "9002",
        "istio.io/inferencepool-extension-failure-mode": "FailClose",
    });
    assert_eq!(created["metadata"]["labels"], expected);
    assert_eq!(created["spec"]["clusterIP"], "None");
    assert_eq!(created["spec"]["selector"], json!({ "app": "models" }));
    assert_eq!(target_ports(&created), [8000, 8001]);
    let second = &created["spec"]["ports"][1];
    assert_eq!((&second["port"], &second["name"]), (&json!(54322), &json!("http-1")));
    assert_eq!(second["appProtocol"], "http");
    let owner = &created["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("InferencePool"), &stored["metadata"]["uid"])
    );
    // The route's backend resolves through the Service.
    let resolved = ["ResolvedRefs", "True", "ResolvedRefs"];
    until(&cluster, &route, "/status/parents/0/conditions", resolved)?;

    service_is_kept(&cluster)?;
    status_follows_routes(&cluster, &route)?;
    no_request_was_forbidden(&cluster)?;
    Ok(())
}

/// Edits are repaired, and each change is written once.
fn service_is_kept(cluster: &Cluster) -> Result<(), String> {
    let note = json!({ "metadata": { "annotations": { "note": "kept" } } });
    cluster.api.patch(&shadow(), &note)?;
    cluster
        .api
        .patch(&shadow(), &json!({ "spec": { "selector": { "app": "others" } } }))?;
    let repaired = until_shadow(cluster, "with its selector", |service| {
        service["spec"]["selector"] == json!({ "app": "models" })
    })?;
    assert_eq!(repaired["metadata"]["annotations"]["note"], "kept");
    cluster.api.apply(&pool(&[8000]))?;
    until_shadow(cluster, "with one port", |service| target_ports(service) == [8000])?;
    cluster.api.delete(&shadow())?;
    until_shadow(cluster, "after its deletion", |service| target_ports(service) == [8000])?;
    assert_eq!(
        writes(cluster, 4)?,
        4,
        "of the creation, an edit, a change and a deletion"
    );
    Ok(())
}

/// The status has an entry for each Gateway whose routes use the pool, beside those of others.
fn status_follows_routes(cluster: &Cluster, route: &Value) -> Result<(), String> {
    let models = pool(&[8000]);
    let of = |index: usize| format!("/status/parents/{index}/conditions");
    until(cluster, &models, &of(0), ["Accepted", "True", "Accepted"])?;
    let found = until(cluster, &models, &of(0), ["ResolvedRefs", "True", "ResolvedRefs"])?;
    let reference = json!({ "group": GROUP, "kind": "Gateway", "namespace": SYSTEM, "name": "web" });
    assert_eq!(found["status"]["parents"][0]["parentRef"], reference);
    cluster.api.delete(&Reference::new("v1", "Service", "app", "picker"))?;
    until(
        cluster,
        &models,
        &of(0),
        ["ResolvedRefs", "False", "InvalidExtensionRef"],
    )?;
    // Of a Gateway of another controller, and the one that the API's schema has by default.
    let foreign = json!({ "parentRef": { "kind": "Gateway", "name": "theirs" }, "conditions": [] });
    let placeholder = json!({ "parentRef": { "kind": "Status", "name": "default" }, "conditions": [] });
    let mut with_others = models.clone();
    with_others["status"] = json!({ "parents": [foreign, placeholder] });
    cluster.api.apply(&with_others)?;
    let found = until(cluster, &models, &of(1), ["Accepted", "True", "Accepted"])?;
    assert_eq!(found["status"]["parents"][0], foreign, "{}", found["status"]);
    cluster.api.delete(&Reference::of(route))?;
    wait::until("a status without the entry of the route", TIMEOUT, || {
        let found = cluster.get(&Reference::of(&models)).ok()??;
        (found["status"]["parents"] == json!([foreign])).then_some(())
    })
}
