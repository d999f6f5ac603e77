//! Statuses of the Gateway API's objects and of Ingresses, written by real daemons. Each test has its own cluster,
//! because writes affect all namespaces.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::status::{SYSTEM, grant, no_request_was_forbidden, start, trial};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::{Reference, plural};
use crate::support::kubernetes::{Cluster, Request, crds};
use crate::support::wait;

pub(super) const TIMEOUT: Duration = Duration::from_mins(1);
pub(super) const GROUP: &str = "gateway.networking.k8s.io";
pub(super) const CONTROLLER: &str = "istio.io/gateway-controller";
/// Routes of [`many_routes_are_counted_in_few_writes`].
const ROUTES: usize = 1000;
/// Most writes of the Gateway's status while these routes appear.
const MAX_WRITES: usize = 311;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "kube::gateway_status::each_change_is_written_once",
            each_change_is_written_once,
        ),
        trial(
            "kube::gateway_status::many_routes_are_counted_in_few_writes",
            many_routes_are_counted_in_few_writes,
        ),
    ]
}

/// A definition of a kind whose status has lists like those of the real one.
fn definition(kind: &str, scope: &str, lists: &Value) -> Value {
    let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let status = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": lists });
    let schema = json!({ "type": "object", "properties": { "spec": anything, "status": status } });
    json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{GROUP}", plural(kind)),
            "annotations": { "api-approved.kubernetes.io": "unapproved, for a test" } },
        "spec": { "group": GROUP, "scope": scope,
            "names": { "kind": kind, "plural": plural(kind), "singular": kind.to_lowercase() },
            "versions": [{ "name": "v1", "served": true, "storage": true, "subresources": { "status": {} },
                "schema": { "openAPIV3Schema": schema } }] } })
}

fn define(cluster: &Cluster) -> Result<(), String> {
    let any = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let map = |key: &str, properties: Value| {
        let mut item = json!({ "type": "object", "required": [key], "x-kubernetes-preserve-unknown-fields": true,
            "properties": { key: { "type": "string" } } });
        for (name, schema) in properties.as_object().into_iter().flatten() {
            item["properties"][name] = schema.clone();
        }
        json!({ "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key], "items": item })
    };
    let conditions = map("type", json!({}));
    let atomic = json!({ "type": "array", "x-kubernetes-list-type": "atomic", "items": any });
    let listeners = map("name", json!({ "conditions": conditions }));
    let gateway = json!({ "conditions": conditions, "listeners": listeners, "addresses": atomic });
    for (kind, scope, lists) in [
        ("GatewayClass", "Cluster", json!({ "conditions": conditions })),
        ("Gateway", "Namespaced", gateway),
        ("HTTPRoute", "Namespaced", json!({ "parents": atomic })),
        ("ReferenceGrant", "Namespaced", json!({})),
        ("BackendTLSPolicy", "Namespaced", json!({ "ancestors": atomic })),
    ] {
        let definition = definition(kind, scope, &lists);
        cluster.api.apply(&definition)?;
        crds::established(&cluster.api, &definition)?;
    }
    Ok(())
}

pub(super) fn object(kind: &str, namespace: &str, name: &str, spec: Value) -> Value {
    let mut metadata = json!({ "name": name });
    if !namespace.is_empty() {
        metadata["namespace"] = json!(namespace);
    }
    json!({ "apiVersion": format!("{GROUP}/v1"), "kind": kind, "metadata": metadata, "spec": spec })
}

pub(super) fn gateway(name: &str) -> Value {
    let listener = json!({ "name": "http", "port": 80, "protocol": "HTTP",
        "allowedRoutes": { "namespaces": { "from": "All" } } });
    let spec = json!({ "gatewayClassName": "istio", "addresses": [{ "type": "Hostname", "value": "gw" }],
        "listeners": [listener] });
    object("Gateway", SYSTEM, name, spec)
}

pub(super) fn route(namespace: &str, name: &str, gateway: &str, backend: &Value) -> Value {
    let parent = json!({ "group": GROUP, "kind": "Gateway", "name": gateway, "namespace": SYSTEM });
    let spec = json!({ "parentRefs": [parent], "hostnames": [format!("{name}.example.com")],
        "rules": [{ "backendRefs": [backend] }] });
    object("HTTPRoute", namespace, name, spec)
}

pub(super) fn service(namespace: &str, name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": namespace, "name": name },
        "spec": { "externalIPs": ["192.0.2.1"], "ports": [{ "name": "http", "port": 80 }] } })
}

fn slice(namespace: &str, name: &str) -> Value {
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "namespace": namespace, "name": name, "labels": { "kubernetes.io/service-name": name } },
        "addressType": "IPv4", "ports": [{ "name": "http", "port": 80, "protocol": "TCP" }],
        "endpoints": [{ "addresses": ["10.9.0.1"], "conditions": { "ready": true } }] })
}

/// A cluster with the class, a Service for Gateways and two namespaces of applications, and a kubeconfig with the
/// rights that the chart grants with these values.
pub(super) fn cluster(name: &str, values: &[&str]) -> Result<(Cluster, PathBuf, PathBuf), String> {
    let cluster = Cluster::start(name)?;
    let folder = crate::support::scratch(&format!("{name}-logs"));
    for namespace in [SYSTEM, "app", "other"] {
        cluster.namespace(namespace, &json!({}))?;
    }
    define(&cluster)?;
    let class = object("GatewayClass", "", "istio", json!({ "controllerName": CONTROLLER }));
    for object in [
        class,
        service(SYSTEM, "gw"),
        slice(SYSTEM, "gw"),
        service("app", "web"),
        service("other", "far"),
    ] {
        cluster.api.apply(&object)?;
    }
    let kubeconfig = grant(&cluster, &folder, values)?;
    Ok((cluster, folder, kubeconfig))
}

/// Waits until a condition at a place of an object's status has a status and a reason.
pub(super) fn until(cluster: &Cluster, object: &Value, place: &str, want: [&str; 3]) -> Result<Value, String> {
    let [kind, status, reason] = want;
    let title = format!("{} {kind}={status} {reason}", Reference::of(object).name);
    wait::until(&title, TIMEOUT, || {
        let found = cluster.get(&Reference::of(object)).ok()??;
        let conditions = found.pointer(place)?.as_array()?;
        let condition = conditions.iter().find(|condition| condition["type"] == kind)?;
        let generation = &found["metadata"]["generation"];
        let is_right = condition["status"] == status && condition["reason"] == reason;
        (is_right && condition["observedGeneration"] == *generation).then(|| found.clone())
    })
}

/// Successful status writes of each object, by resource and name.
type Writes = BTreeMap<(String, String), usize>;

/// Returns the status writes once the log has at least so many.
fn writes(cluster: &Cluster, least: usize) -> Result<Writes, String> {
    let user = format!("system:serviceaccount:{SYSTEM}:istiod");
    let is_write =
        |request: &Request| request.verb == "patch" && request.resource.ends_with("/status") && request.status == 200;
    let mut writes = Writes::new();
    for request in cluster.audited(&user, least, is_write)? {
        *writes.entry((request.resource, request.name)).or_default() += 1;
    }
    Ok(writes)
}

fn each_change_is_written_once(name: &str) -> Result<(), Failed> {
    let (cluster, folder, kubeconfig) = cluster(name, &[])?;
    let daemon = |name: &str, revision: &str| start(&kubeconfig, &folder, name, &[("REVISION", revision)]);
    let replicas = vec![
        ("istiod-a", daemon("istiod-a", "default")?),
        ("istiod-b", daemon("istiod-b", "default")?),
    ];
    let _canary = daemon("istiod-canary", "canary")?;
    let class = object("GatewayClass", "", "istio", json!({}));
    until(&cluster, &class, "/status/conditions", ["Accepted", "True", "Accepted"])?;
    // Each revision is responsible for its own Gateways.
    let mut canary = gateway("canary");
    canary["metadata"]["labels"] = json!({ "istio.io/rev": "canary" });
    for gateway in [&gateway("web"), &canary] {
        cluster.api.apply(gateway)?;
        let found = until(
            &cluster,
            gateway,
            "/status/conditions",
            ["Programmed", "True", "Programmed"],
        )?;
        assert_eq!(
            found["status"]["addresses"],
            json!([{ "type": "IPAddress", "value": "192.0.2.1" }])
        );
    }
    let routes = route_follows_its_grant(&cluster)?;
    // The default revision writes the status of a route without a label, whichever revision has its Gateway.
    let backend = json!({ "name": "web", "port": 80 });
    let of_canary = route("app", "canary", "canary", &backend);
    cluster.api.apply(&of_canary)?;
    let accepted = ["Accepted", "True", "Accepted"];
    until(&cluster, &of_canary, "/status/parents/0/conditions", accepted)?;
    let policy = object(
        "BackendTLSPolicy",
        "app",
        "tls",
        json!({ "targetRefs": [{ "group": "", "kind": "Service", "name": "web" }],
            "validation": { "hostname": "web", "caCertificateRefs": [{ "group": "", "kind": "ConfigMap", "name": "no" }] } }),
    );
    cluster.api.apply(&policy)?;
    let conditions = "/status/ancestors/0/conditions";
    until(
        &cluster,
        &policy,
        conditions,
        ["Accepted", "False", "NoValidCACertificate"],
    )?;
    ingress_has_an_address(&cluster)?;
    // The count of routes is the last write of a Gateway; then nothing is left to do.
    for name in ["web", "canary"] {
        wait::until("the attached route", TIMEOUT, || {
            let found = cluster.get(&Reference::of(&gateway(name))).ok()??;
            (found["status"]["listeners"][0]["attachedRoutes"] == 1).then_some(())
        })?;
    }
    let written = writes(&cluster, 8 + routes)?;
    let count = |resource: &str, name: &str| {
        let key = (format!("{resource}/status"), name.to_owned());
        written.get(&key).copied().unwrap_or_default()
    };
    assert_eq!(count("gatewayclasses", "istio"), 1, "{written:?}");
    assert_eq!(count("gateways", "canary"), 2, "{written:?}");
    assert_eq!(count("gateways", "web"), 2, "{written:?}");
    assert_eq!(count("httproutes", "web"), routes, "{written:?}");
    assert_eq!(count("httproutes", "canary"), 1, "{written:?}");
    assert_eq!(count("backendtlspolicies", "tls"), 1, "{written:?}");
    assert_eq!(count("ingresses", "web"), 1, "{written:?}");
    next_leader_repeats_nothing(&cluster, replicas, &written)?;
    no_request_was_forbidden(&cluster)?;
    Ok(())
}

/// Ends the leader. The other replica writes the status of a new route, and of its Gateway.
fn next_leader_repeats_nothing(
    cluster: &Cluster,
    mut replicas: Vec<(&str, Daemon)>,
    before: &Writes,
) -> Result<(), String> {
    let lease = Reference::new(
        "coordination.k8s.io/v1",
        "Lease",
        SYSTEM,
        "istio-gateway-status-leader-default",
    );
    let lease = cluster.get(&lease)?.ok_or("the revision has no leader")?;
    let leader = &lease["spec"]["holderIdentity"];
    let index = replicas.iter().position(|(name, _)| leader == name);
    let (_, daemon) = replicas.swap_remove(index.ok_or_else(|| format!("no replica is {leader}"))?);
    daemon.process.terminate();
    daemon.process.end_of(TIMEOUT)?;
    // Not a target of the policy, whose status would change as well.
    let backend = json!({ "name": "far", "namespace": "other", "port": 80 });
    let later = route("app", "later", "web", &backend);
    cluster.api.apply(&later)?;
    let accepted = ["Accepted", "True", "Accepted"];
    until(cluster, &later, "/status/parents/0/conditions", accepted)?;
    wait::until("the second attached route", TIMEOUT, || {
        let found = cluster.get(&Reference::of(&gateway("web"))).ok()??;
        (found["status"]["listeners"][0]["attachedRoutes"] == 2).then_some(())
    })?;
    let key = |resource: &str, name: &str| (format!("{resource}/status"), name.to_owned());
    let mut expected = before.clone();
    expected.insert(key("httproutes", "later"), 1);
    *expected.entry(key("gateways", "web")).or_default() += 1;
    assert_eq!(writes(cluster, expected.values().sum())?, expected);
    Ok(())
}

/// Returns the number of changes. Entries of another controller stay.
fn route_follows_its_grant(cluster: &Cluster) -> Result<usize, String> {
    let backend = json!({ "name": "far", "namespace": "other", "port": 80 });
    let far = route("app", "web", "web", &backend);
    let foreign = json!({ "controllerName": "example.com/other", "parentRef": { "name": "theirs" },
        "conditions": [{ "type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
            "lastTransitionTime": "2024-01-01T00:00:00Z" }] });
    // The status is written after the object, so the route has no Gateway yet: no status of ours can be lost.
    let mut begun = far.clone();
    begun["spec"]["parentRefs"] = json!([]);
    begun["status"] = json!({ "parents": [foreign] });
    cluster.api.apply(&begun)?;
    cluster.api.apply(&far)?;
    let conditions = "/status/parents/1/conditions";
    let found = until(cluster, &far, conditions, ["ResolvedRefs", "False", "RefNotPermitted"])?;
    assert_eq!(found["status"]["parents"][0], foreign);
    let since = found
        .pointer(conditions)
        .map(|all| all[0]["lastTransitionTime"].clone());
    let grant = object(
        "ReferenceGrant",
        "other",
        "routes",
        json!({ "from": [{ "group": GROUP, "kind": "HTTPRoute", "namespace": "app" }],
            "to": [{ "group": "", "kind": "Service" }] }),
    );
    cluster.api.apply(&grant)?;
    let found = until(cluster, &far, conditions, ["ResolvedRefs", "True", "ResolvedRefs"])?;
    assert_eq!(found["status"]["parents"][0], foreign);
    let accepted = found
        .pointer(conditions)
        .map(|all| all[0]["lastTransitionTime"].clone());
    assert_eq!(accepted, since, "the condition Accepted has not changed");
    Ok(2)
}

fn ingress_has_an_address(cluster: &Cluster) -> Result<(), String> {
    let ingress = json!({ "apiVersion": "networking.k8s.io/v1", "kind": "Ingress",
        "metadata": { "namespace": "app", "name": "web", "annotations": { "kubernetes.io/ingress.class": "istio" } },
        "spec": { "defaultBackend": { "service": { "name": "web", "port": { "number": 80 } } } } });
    cluster.api.apply(&service(SYSTEM, "istio-ingressgateway"))?;
    cluster.api.apply(&ingress)?;
    wait::until("the address of an Ingress", TIMEOUT, || {
        let found = cluster.get(&Reference::of(&ingress)).ok()??;
        (found["status"]["loadBalancer"]["ingress"] == json!([{ "ip": "192.0.2.1" }])).then_some(())
    })
}

fn many_routes_are_counted_in_few_writes(name: &str) -> Result<(), Failed> {
    let (cluster, folder, kubeconfig) = cluster(name, &[])?;
    let _daemon = start(&kubeconfig, &folder, "istiod-a", &[])?;
    let gateway = gateway("web");
    cluster.api.apply(&gateway)?;
    until(
        &cluster,
        &gateway,
        "/status/conditions",
        ["Programmed", "True", "Programmed"],
    )?;
    let before = writes(&cluster, 0)?;
    let backend = json!({ "name": "web", "port": 80 });
    let started = wait::now();
    for index in 0..ROUTES {
        cluster
            .api
            .apply(&route("app", &format!("r{index}"), "web", &backend))?;
    }
    let applied = wait::now();
    wait::until("all attached routes", TIMEOUT, || {
        let found = cluster.get(&Reference::of(&gateway)).ok()??;
        (found["status"]["listeners"][0]["attachedRoutes"] == ROUTES).then_some(())
    })?;
    let counted = applied.elapsed();
    let written = |resource: &str| {
        let all = writes(&cluster, 0)?;
        let new = all.iter().filter(|((of, _), _)| of == resource);
        let new = new.map(|(key, count)| count - before.get(key).copied().unwrap_or_default());
        Ok::<usize, String>(new.sum())
    };
    let gateways = written("gateways/status")?;
    wait::until("the statuses of all routes", TIMEOUT, || {
        (written("httproutes/status") == Ok(ROUTES)).then_some(())
    })?;
    println!(
        "gateway_status: {ROUTES} routes applied in {:.1} s; {:.2} s later all are attached, after {gateways} writes of \
         the Gateway; {:.2} s later all have a status",
        (applied - started).as_secs_f32(),
        counted.as_secs_f32(),
        applied.elapsed().as_secs_f32()
    );
    assert!(gateways <= MAX_WRITES, "{gateways} writes");
    no_request_was_forbidden(&cluster)?;
    Ok(())
}
