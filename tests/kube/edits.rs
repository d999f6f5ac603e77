//! `kubectl edit configmap istio` reaches connected Envoys quickly and without a restart.

use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::json;

use super::mesh::service;
use super::place::{Place, SOON};
use crate::support::envoy::{self, Envoy, Protocol};
use crate::support::kubernetes::api::Reference;
use crate::support::{kubernetes, missing, wait};

pub(super) fn trials() -> Vec<Trial> {
    ["sotw", "delta"]
        .into_iter()
        .zip([Protocol::StateOfTheWorld, Protocol::Delta])
        .map(|(form, protocol)| {
            let name = format!("kube::edits::mesh_and_networks_arrive::{form}");
            kubernetes::optional_trial(&name, move |name| {
                if envoy::binary().is_none() {
                    return missing("Envoy is missing; `make tools` installs it");
                }
                mesh_and_networks_arrive(name, protocol).map(|()| Completion::Completed)
            })
        })
        .collect()
}

/// Number of repetitions of each edit, to tell the daemon's time from that of a busy machine.
const EDITS: u32 = 5;

/// Time limit of the fastest edit, from the API server to the Envoy.
const SHORT: Duration = Duration::from_secs(1);

/// Other networks are reached only with mutual TLS, so the pod has the label for it.
const POD: &str = "apiVersion: v1
kind: Pod
metadata: {name: web, namespace: '{app}', labels: {security.istio.io/tlsMode: istio}}
spec: {containers: [{name: web, image: web}]}
status: {phase: Running, podIP: 10.{n}.3.1, podIPs: [{ip: 10.{n}.3.1}]}
";

fn mesh_and_networks_arrive(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let place = Place::shared(0, name)?;
    place.apply(&service("web", "{app}", 1))?;
    place.apply(POD)?;
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &place.app, "web-a");
    let target = json!({ "kind": "Pod", "namespace": place.app, "name": "web" });
    let endpoint =
        json!({ "addresses": [place.fill("10.{n}.3.1")], "conditions": { "ready": true }, "targetRef": target });
    place.cluster.api.patch(&slice, &json!({ "endpoints": [endpoint] }))?;
    // No certificates: with automatic mutual TLS, every cluster would wait for one.
    let mesh = |more: &str| format!("enableAutoMtls: false\n{more}");
    place.set_mesh(&mesh(""))?;
    let daemon = place.daemon("istiod")?;
    let mut node = place.sidecar(&json!({ "istio": "gateway" }));
    // A gateway without listeners needs no free ports.
    node.id = node.id.replace("sidecar~", "router~");
    node.metadata["NETWORK"] = json!("home");
    let envoy = Envoy::start(&place.folder, "gateway", &node, daemon.xds, protocol)?;
    let web = place.outbound(80, "web");

    let mut times = Vec::new();
    for edit in 0..EDITS {
        let timeout = format!("{}s", 20 + edit);
        let begun = wait::now();
        place.set_mesh(&mesh(&format!("connectTimeout: {timeout}")))?;
        wait::until("the new timeout in the Envoy", SOON, || {
            (envoy.cluster(&web)?["connect_timeout"] == timeout.as_str()).then_some(())
        })?;
        times.push(begun.elapsed());
    }
    let best = times.iter().min().ok_or("no edits")?;
    eprintln!("mesh: {times:?}");
    assert!(*best < SHORT, "an edit of the mesh config took {times:?}");

    let mut times = Vec::new();
    for edit in 0..EDITS {
        let gateway = format!("192.0.2.{}", edit + 1);
        let networks = format!(
            "networks:\n  away:\n    endpoints: [{{fromCidr: 10.{{n}}.3.0/24}}]\n    gateways: [{{address: {gateway}, port: 15443}}]\n"
        );
        let begun = wait::now();
        place.set_config("meshNetworks", &place.fill(&networks))?;
        wait::until("the network's gateway in the Envoy", SOON, || {
            (envoy.endpoints(&web) == [format!("{gateway}:15443")]).then_some(())
        })?;
        times.push(begun.elapsed());
    }
    let best = times.iter().min().ok_or("no edits")?;
    eprintln!("meshNetworks: {times:?}");
    assert!(*best < SHORT, "an edit of the networks took {times:?}");
    place.set_config("meshNetworks", "networks: {}")?;
    wait::until("the direct endpoint", SOON, || {
        (envoy.endpoints(&web) == [place.fill("10.{n}.3.1:8080")]).then_some(())
    })?;
    envoy.refused_nothing()?;
    Ok(())
}
