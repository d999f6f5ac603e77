//! Conditions of ambient objects in the statuses that a real API server stores.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::status::{SYSTEM, grant, no_request_was_forbidden, trial};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{Cluster, Request, crds};
use crate::support::{scratch, wait};

/// Longer than a released lock stays free: attempts are 7.5 s apart.
const TIMEOUT: Duration = Duration::from_mins(1);
const ACCOUNT: &str = "system:serviceaccount:istio-system:istiod";

pub(super) fn trials() -> Vec<Trial> {
    vec![trial("kube::conditions::are_written_once", are_written_once)]
}

/// Returns the statuses of conditions by type, with their reasons.
fn conditions(cluster: &Cluster, object: &Value) -> Option<Vec<String>> {
    let found = cluster.get(&Reference::of(object)).ok()??;
    let all = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = all.iter().map(|one| {
        let fields = ["type", "status", "reason"].map(|name| text(&one[name]));
        fields.join(" ")
    });
    Some(all.collect())
}

fn until_conditions(cluster: &Cluster, object: &Value, want: &[&str]) -> Result<(), String> {
    let what = format!("{} with conditions {want:?}", object["kind"]);
    wait::until(&what, TIMEOUT, || (conditions(cluster, object)? == want).then_some(()))
        .map_err(|error| format!("{error}: {:?}", conditions(cluster, object)))
}

/// Returns the resource and name of each status write of the daemon, once the log has at least so many.
fn writes(cluster: &Cluster, least: usize) -> Result<Vec<String>, String> {
    // Addresses of ServiceEntries are allocated by JSON patch, which these hosts do not need.
    let is_write = |request: &Request| request.verb == "patch" && request.resource.ends_with("/status");
    let requests = cluster.audited(ACCOUNT, least, is_write)?.into_iter();
    Ok(requests
        .map(|request| format!("{} {}", request.resource, request.name))
        .collect())
}

fn gateway(addresses: &Value) -> Value {
    json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
        "metadata": { "namespace": "shop", "name": "waypoint", "labels": { "istio.io/waypoint-for": "all" } },
        "spec": { "gatewayClassName": "istio-waypoint",
            "listeners": [{ "name": "mesh", "port": 15008, "protocol": "HBONE" }] },
        "status": { "addresses": addresses } })
}

fn objects() -> [Value; 4] {
    let labels = json!({ "istio.io/use-waypoint": "waypoint" });
    let service = json!({ "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": "shop", "name": "cart", "labels": labels },
        "spec": { "ports": [{ "port": 80, "name": "http" }] } });
    let entry = json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "namespace": "shop", "name": "wildcard", "labels": labels },
        "spec": { "hosts": ["*.example.com"], "resolution": "NONE", "location": "MESH_EXTERNAL",
            "ports": [{ "number": 443, "name": "tls", "protocol": "TLS" }] } });
    let workload = json!({ "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry",
        "metadata": { "namespace": "shop", "name": "vm", "labels": labels },
        "spec": { "address": "10.9.9.9" } });
    let policy = json!({ "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
        "metadata": { "namespace": "shop", "name": "cart" },
        "spec": { "targetRefs": [{ "group": "", "kind": "Service", "name": "cart" }], "rules": [{}] } });
    [service, entry, workload, policy]
}

fn are_written_once(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = scratch(&format!("{name}-logs"));
    for namespace in [SYSTEM, "shop"] {
        cluster.namespace(namespace, &json!({}))?;
    }
    for kind in ["Gateway", "GatewayClass"] {
        let mut definition = crds::loose_crd("gateway.networking.k8s.io", kind);
        definition["metadata"]["annotations"] = json!({ "api-approved.kubernetes.io": "unapproved, for a test" });
        if kind == "GatewayClass" {
            definition["spec"]["scope"] = json!("Cluster");
        }
        cluster.api.apply(&definition)?;
        crds::established(&cluster.api, &definition)?;
    }
    let kubeconfig = grant(&cluster, &folder, &["env.PILOT_ENABLE_AMBIENT=true"])?;
    let start = |name: &str| {
        Daemon::in_kubernetes(&kubeconfig, SYSTEM, &folder.join(format!("{name}.log")), |command| {
            command.env("POD_NAME", name).env("PILOT_ENABLE_AMBIENT", "true");
            // The Gateway keeps the address that this test gives it.
            command.env("PILOT_ENABLE_GATEWAY_API_STATUS", "false");
        })
    };
    let first = start("istiod-a")?;
    let [service, entry, workload, policy] = &objects();
    cluster.api.apply(service)?;
    let not_ready = "istio.io/WaypointBound False WaypointIsNotReady";
    until_conditions(&cluster, service, &[not_ready])?;
    for object in [entry, workload, policy] {
        cluster.api.apply(object)?;
    }
    let missing = "istio.io/WaypointMissing True NoWaypointForWildcardService";
    until_conditions(&cluster, entry, &[not_ready, missing])?;
    until_conditions(&cluster, workload, &[not_ready])?;
    until_conditions(&cluster, policy, &["WaypointAccepted False AncestorNotBound"])?;
    let mut want = vec![
        "authorizationpolicies/status cart",
        "serviceentries/status wildcard",
        "services/status cart",
        "workloadentries/status vm",
    ];
    let mut found = writes(&cluster, want.len())?;
    found.sort();
    assert_eq!(found, want, "one write for each object");

    cluster
        .api
        .apply(&gateway(&json!([{ "type": "IPAddress", "value": "10.0.0.9" }])))?;
    let bound = "istio.io/WaypointBound True WaypointAccepted";
    until_conditions(&cluster, service, &[bound])?;
    until_conditions(&cluster, entry, &[bound])?;
    until_conditions(&cluster, workload, &[bound])?;
    until_conditions(&cluster, policy, &["WaypointAccepted True Accepted"])?;
    let message = &cluster.get(&Reference::of(service))?.ok_or("no Service")?["status"]["conditions"][0]["message"];
    assert_eq!(message, "Successfully attached to waypoint shop/waypoint");
    let stored = cluster.get(&Reference::of(policy))?.ok_or("no policy")?;
    assert_eq!(
        stored["status"]["conditions"][0]["observedGeneration"],
        stored["metadata"]["generation"]
    );
    let managers = stored["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let is_ours = |entry: &Value| entry["manager"] == "istio-ambient-waypoint-policy" && entry["operation"] == "Apply";
    assert!(managers.iter().any(is_ours), "{managers:?}");
    want = want.repeat(2);
    want.sort_unstable();
    let mut found = writes(&cluster, want.len())?;
    found.sort();
    assert_eq!(found, want, "one write for each object and change");

    // A new leader finds everything as it must be, except for what has changed meanwhile.
    first.process.terminate();
    first.process.end_of(TIMEOUT)?;
    let reference = Reference::of(workload);
    cluster.api.patch(
        &reference,
        &json!({ "metadata": { "labels": { "istio.io/use-waypoint": "none" } } }),
    )?;
    let second = start("istiod-b")?;
    wait::until("a WorkloadEntry without conditions", TIMEOUT, || {
        conditions(&cluster, workload)?.is_empty().then_some(())
    })?;
    let found = writes(&cluster, want.len() + 1)?;
    assert_eq!(found.last().map(String::as_str), Some("workloadentries/status vm"));
    assert_eq!(found.len(), want.len() + 1, "{found:?}");
    no_request_was_forbidden(&cluster)?;
    drop(second);
    Ok(())
}
