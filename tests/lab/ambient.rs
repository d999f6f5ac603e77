//! Ambient pods and pods with sidecars in one mesh: model ztunnels carry the traffic of the ambient pods, and the
//! control plane deploys the waypoints, which are real Envoys.

mod mesh;
mod networks;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::app::{Call, Failure, Load};
use super::pods::{Role, Spec};
use super::report::Report;
use super::ztunnel::Subscription;
use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::support::kubernetes::api::Reference;
use crate::support::wait::now;
use crate::support::{kubernetes, missing, wait};
use mesh::{ALONE, Mesh};

const OBJECTS: &str = include_str!("ambient.yaml");

/// The tunnels that an Envoy has accepted.
const TUNNELS: &str = r"^http\.connect_terminate\.downstream_rq_total$";
/// Interval between requests of a load.
const INTERVAL: Duration = Duration::from_millis(20);
/// Number of answers after each step of a load.
const MORE: usize = 50;

/// A waypoint of services.
const WAYPOINT: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: waypoint, namespace: '{app}'}
spec:
  gatewayClassName: istio-waypoint
  listeners: [{name: mesh, port: 15008, protocol: HBONE}]
";

/// A policy of layer 4, which ztunnels and sidecars enforce: the pods of an app admit all clients but one.
const NOT_OTHER: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: not-other, namespace: '{app}'}
spec:
  action: DENY
  rules:
  - from: [{source: {principals: ['cluster.local/ns/{app}/sa/other']}}]
";

/// A policy of layer 7, which a waypoint enforces, and one of layer 4 that admits only the waypoint.
const ONLY_OPEN: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-open, namespace: '{app}'}
spec:
  targetRefs: [{group: '', kind: Service, name: server}]
  rules:
  - from: [{source: {principals: ['cluster.local/ns/{app}/sa/client']}}]
    to: [{operation: {methods: [GET], paths: [/open]}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-waypoint, namespace: '{app}'}
spec:
  selector: {matchLabels: {app: server}}
  rules:
  - from: [{source: {principals: ['cluster.local/ns/{app}/sa/waypoint']}}]
";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::optional_trial("lab::ambient::policies_are_enforced", policies_are_enforced),
        kubernetes::optional_trial("lab::ambient::no_request_is_lost", no_request_is_lost),
        kubernetes::optional_trial("lab::ambient::networks_are_joined", networks::networks_are_joined),
    ]
}

/// A request to the service with the address that ends in `last`.
fn call(mesh: &Mesh, service: &str, last: u8, path: &str) -> Call {
    let address = mesh.base.tenant.fill(&format!("10.96.{{n}}.{last}"));
    Call {
        address: address.parse().expect("the address is valid"),
        ..mesh.base.call(service, path)
    }
}

/// A request to a port of a pod.
fn direct(mesh: &Mesh, pod: &str) -> Call {
    Call {
        address: mesh.pod(pod).address,
        port: 8080,
        ..mesh.base.call(pod, "/open")
    }
}

fn spec<'s>(name: &'s str, app: &'s str, node: &'s str, last: u8, role: Option<Role>) -> Spec<'s> {
    Spec {
        name,
        app,
        node,
        last,
        role,
    }
}

fn policies_are_enforced(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = mesh::missing_component() {
        return missing(reason);
    }
    let mut mesh = Mesh::start(Tenant::within(mesh::cluster(0)?, name)?, ALONE, OBJECTS)?;
    mesh.add_node("first", 201, Subscription::Wildcard)?;
    mesh.add_node("second", 202, Subscription::OnDemand)?;
    mesh.run(&spec("server", "server", "first", 1, Some(Role::Ambient)))?;
    mesh.run(&spec("client", "client", "second", 2, Some(Role::Ambient)))?;
    mesh.run(&spec("other", "other", "second", 3, Some(Role::Ambient)))?;
    mesh.run(&spec("car", "car", "first", 4, Some(Role::HboneSidecar)))?;
    mesh.run(&spec("bare", "bare", "first", 5, None))?;

    traffic_is_tunnelled(&mesh)?;
    plaintext_is_refused(&mesh)?;
    policies_of_layer_4(&mesh)?;
    policies_of_layer_7(&mut mesh)?;
    for pod in ["car", "waypoint-1"] {
        let rejected = mesh.pod(pod).sum("update_rejected")?;
        assert_eq!(rejected, 0, "{pod} must accept every update");
    }
    Ok(Completion::Completed)
}

/// All four directions between ambient pods and sidecars, to services and to a pod.
fn traffic_is_tunnelled(mesh: &Mesh) -> Result<(), String> {
    let (server, car) = (call(mesh, "server", 50, "/open"), call(mesh, "car", 51, "/open"));
    mesh.pod("client").until_status(&server, 200)?;
    assert!(
        mesh.ztunnel("first").has_accepted("server", &mesh.identity("client")),
        "the server's ztunnel must know the client"
    );
    let opened = |node: &str| mesh.ztunnel(node).counts().opened.load(Ordering::Relaxed);
    let before = opened("second");
    mesh.pod("client").until_status(&direct(mesh, "server"), 200)?;
    assert!(opened("second") > before, "traffic to a pod must be in a tunnel");

    mesh.pod("car").until_status(&server, 200)?;
    assert!(
        mesh.ztunnel("first").has_accepted("server", &mesh.identity("car")),
        "the server's ztunnel must know the sidecar"
    );
    mesh.pod("client").until_status(&car, 200)?;
    assert!(
        mesh.pod("car").sum(TUNNELS)? > 0,
        "the sidecar must be reached in a tunnel"
    );
    Ok(())
}

/// Pods outside the mesh reach neither kind of pod, and are reached.
fn plaintext_is_refused(mesh: &Mesh) -> Result<(), String> {
    let bare = mesh.pod("bare");
    for target in ["server", "car"] {
        let refused = direct(mesh, target).from(&bare.host);
        assert!(refused.is_err(), "{target} must refuse plaintext: {refused:?}");
    }
    let denied = mesh.ztunnel("first").counts().denied.load(Ordering::Relaxed);
    assert!(denied > 0, "the ztunnel must have refused plaintext");
    mesh.pod("client").until_status(&direct(mesh, "bare"), 200)?;
    Ok(())
}

/// A policy by principal denies a client at both kinds of pods, and connections end when it is applied.
fn policies_of_layer_4(mesh: &Mesh) -> Result<(), String> {
    let (server, car) = (call(mesh, "server", 50, "/open"), call(mesh, "car", 51, "/open"));
    let [client, other] = ["client", "other"].map(|name| mesh.pod(name));
    other.until_status(&server, 200)?;
    other.until_status(&car, 200)?;
    mesh.base.tenant.apply(NOT_OTHER)?;
    other.until_refused(&server)?;
    other.until_status(&car, 403)?;
    client.until_status(&server, 200)?;
    client.until_status(&car, 200)?;
    mesh.base.tenant.delete(NOT_OTHER)?;
    other.until_status(&server, 200)?;
    other.until_status(&car, 200)?;
    Ok(())
}

/// A waypoint enforces policies of layer 7, and the pods behind it admit no one else.
fn policies_of_layer_7(mesh: &mut Mesh) -> Result<(), String> {
    let open = call(mesh, "server", 50, "/open");
    add_waypoint(mesh)?;
    let [client, other, car] = ["client", "other", "car"].map(|name| mesh.pod(name));
    mesh.base.tenant.apply(ONLY_OPEN)?;
    client.until_status(&call(mesh, "server", 50, "/closed"), 403)?;
    client.until_status(&open, 200)?;
    other.until_status(&open, 403)?;
    // The waypoint is the only peer of the pods: connections to them that pass it by are refused.
    client.until_refused(&direct(mesh, "server"))?;
    car.until_status(&open, 503)?;
    assert!(
        mesh.ztunnel("first").has_accepted("server", &mesh.identity("waypoint")),
        "the server's ztunnel must know the waypoint"
    );
    let seen: Value = serde_json::from_str(&open.from(&client.host)?.body).map_err(|error| error.to_string())?;
    assert_eq!(seen["application"], "server", "{seen}");
    Ok(())
}

/// Runs a pod of the waypoint.
fn run_waypoint(mesh: &mut Mesh, name: &str, node: &str, last: u8) -> Result<(), String> {
    let namespace = mesh.base.tenant.app.clone();
    mesh.run_gateway((&namespace, "waypoint"), name, node, last, None)
}

/// Makes the service `server` use the waypoint.
fn use_waypoint(mesh: &Mesh) -> Result<(), String> {
    let service = Reference::new("v1", "Service", &mesh.base.tenant.app, "server");
    let label = json!({ "metadata": { "labels": { "istio.io/use-waypoint": "waypoint" } } });
    mesh.base.tenant.cluster.api.patch(&service, &label).map(|_| ())
}

/// Makes the service `server` use a new waypoint with one pod, and waits until a request passes it.
fn add_waypoint(mesh: &mut Mesh) -> Result<(), String> {
    mesh.deploy(WAYPOINT)?;
    run_waypoint(mesh, "waypoint-1", "first", 11)?;
    use_waypoint(mesh)?;
    let open = call(mesh, "server", 50, "/open");
    let (client, waypoint) = (mesh.pod("client"), mesh.pod("waypoint-1"));
    wait::until("a request through the waypoint", TIMEOUT, || {
        let answer = client.status(&open).ok()?;
        (answer == 200 && waypoint.sum(TUNNELS).ok()? > 0).then_some(())
    })
}

/// Requests between ambient pods, through a waypoint, and between ambient pods and a sidecar, in both directions.
struct Loads([(&'static str, Load); 3]);

impl Loads {
    fn start(mesh: &Mesh) -> Loads {
        let load = |from: &str, call| Load::start(Arc::clone(&mesh.pod(from).host), call, INTERVAL);
        let server = call(mesh, "server", 50, "/open");
        Loads([
            ("client to server through the waypoint", load("client", server.clone())),
            ("sidecar to server", load("car", server)),
            ("client to sidecar", load("client", call(mesh, "car", 51, "/open"))),
        ])
    }

    /// Waits until each has had more answers.
    fn until_more(&self) -> Result<(), String> {
        let before = self.0.each_ref().map(|(_, load)| load.answered());
        wait::until("answers of all loads", TIMEOUT, || {
            let mut all = self.0.iter().zip(before);
            all.all(|((_, load), before)| load.answered() > before + MORE)
                .then_some(())
        })
    }

    /// Ends all and returns the failures with the names of their loads, and the number of all answers.
    fn end(self) -> (Vec<(&'static str, Failure)>, usize) {
        let mut answered = 0;
        let mut failures = Vec::new();
        for (name, load) in self.0 {
            let outcome = load.end();
            answered += outcome.answered;
            failures.extend(outcome.failures.into_iter().map(|failure| (name, failure)));
        }
        (failures, answered)
    }
}

/// A waypoint is scaled under load, and a node with one of its pods and one of its endpoints is lost.
fn no_request_is_lost(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = mesh::missing_component() {
        return missing(reason);
    }
    let mut mesh = Mesh::start(Tenant::within(mesh::cluster(0)?, name)?, ALONE, OBJECTS)?;
    let mut report = Report::start("ambient pods and sidecars under load", &mesh.base.tenant.folder)?;
    mesh.add_node("first", 201, Subscription::OnDemand)?;
    mesh.add_node("second", 202, Subscription::Wildcard)?;
    mesh.run(&spec("server-1", "server", "first", 1, Some(Role::Ambient)))?;
    mesh.run(&spec("server-2", "server", "second", 2, Some(Role::Ambient)))?;
    mesh.run(&spec("client", "client", "first", 3, Some(Role::Ambient)))?;
    mesh.run(&spec("car", "car", "first", 4, Some(Role::HboneSidecar)))?;
    add_waypoint(&mut mesh)?;
    mesh.pod("car").until_status(&call(&mesh, "server", 50, "/open"), 200)?;
    mesh.pod("client").until_status(&call(&mesh, "car", 51, "/open"), 200)?;
    waypoint_is_scaled(&mut mesh, &mut report)?;
    node_is_lost(&mut mesh, &mut report)?;
    Ok(Completion::Completed)
}

/// Adds a pod of the waypoint, and waits until it has carried requests.
fn scale_up(mesh: &mut Mesh, name: &str, node: &str, last: u8) -> Result<(), String> {
    run_waypoint(mesh, name, node, last)?;
    let waypoint = mesh.pod(name);
    wait::until("requests through another pod of the waypoint", TIMEOUT, || {
        (waypoint.sum(TUNNELS).ok()? > 0).then_some(())
    })
}

/// From one to three pods and back: no request is lost.
fn waypoint_is_scaled(mesh: &mut Mesh, report: &mut Report) -> Result<(), String> {
    let loads = Loads::start(mesh);
    loads.until_more()?;
    scale_up(mesh, "waypoint-2", "second", 12)?;
    scale_up(mesh, "waypoint-3", "first", 13)?;
    loads.until_more()?;
    mesh.terminate(&["waypoint-2", "waypoint-3"])?;
    loads.until_more()?;
    let (failures, answered) = loads.end();
    let seen = format!("{answered} answered, lost: {failures:#?}");
    report.fact(
        "the waypoint is scaled from 1 to 3 and to 1",
        &"none is lost",
        (failures.is_empty(), seen),
    )
}

/// Kubernetes itself loses requests to a lost node until its endpoints are gone. None is lost after that, and none
/// whose way does not pass the node.
fn node_is_lost(mesh: &mut Mesh, report: &mut Report) -> Result<(), String> {
    let loads = Loads::start(mesh);
    scale_up(mesh, "waypoint-4", "second", 14)?;
    loads.until_more()?;
    let lost_at = now();
    mesh.lose("second")?;
    let declared_at = now();
    mesh.declare_lost("second")?;
    let known_at = now();
    loads.until_more()?;
    let (failures, answered) = loads.end();
    let is_expected = |(load, failure): &(&str, Failure)| {
        *load != "client to sidecar" && failure.ended >= lost_at && failure.started_at <= known_at
    };
    let is_good = failures.iter().all(is_expected);
    let seen = format!(
        "{answered} answered, {} lost; the loss was known {:.2} s after it was declared{}",
        failures.len(),
        known_at.duration_since(declared_at).as_secs_f64(),
        if is_good {
            String::new()
        } else {
            format!(": {failures:#?}")
        },
    );
    report.fact(
        "a node is lost",
        &"requests to it are lost until its endpoints are gone",
        (is_good, seen),
    )
}
