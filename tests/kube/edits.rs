//! `kubectl edit configmap istio` reaches connected Envoys quickly and without a restart.

use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::json;

use super::mesh::service;
use super::tenant::{TIMEOUT, Tenant};
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

/// Time limit of the fastest edit on a quiet machine, from the API server to the Envoy.
const LIMIT: Duration = Duration::from_secs(1);

/// Other networks are reached only with mutual TLS, so the pod has the label for it.
const POD: &str = "apiVersion: v1
kind: Pod
metadata: {name: web, namespace: '{app}', labels: {security.istio.io/tlsMode: istio}}
spec: {containers: [{name: web, image: web}]}
status: {phase: Running, podIP: 10.{n}.3.1, podIPs: [{ip: 10.{n}.3.1}]}
";

fn mesh_and_networks_arrive(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(&service("web", "{app}", 1))?;
    tenant.apply(POD)?;
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &tenant.app, "web-a");
    let target = json!({ "kind": "Pod", "namespace": tenant.app, "name": "web" });
    let endpoint =
        json!({ "addresses": [tenant.fill("10.{n}.3.1")], "conditions": { "ready": true }, "targetRef": target });
    tenant.cluster.api.patch(&slice, &json!({ "endpoints": [endpoint] }))?;
    // No certificates: with automatic mutual TLS, every cluster would wait for one.
    let mesh = |more: &str| format!("enableAutoMtls: false\n{more}");
    tenant.set_mesh(&mesh(""))?;
    let daemon = tenant.daemon("istiod")?;
    let mut node = tenant.sidecar(&json!({ "istio": "gateway" }));
    // A gateway without listeners needs no free ports.
    node.id = node.id.replace("sidecar~", "router~");
    node.metadata["NETWORK"] = json!("home");
    let envoy = Envoy::start(&tenant.folder, "gateway", &node, daemon.xds, protocol)?;
    let web = tenant.outbound(80, "web");

    let mut times = Vec::new();
    for edit in 0..EDITS {
        let timeout = format!("{}s", 20 + edit);
        let started_at = wait::now();
        tenant.set_mesh(&mesh(&format!("connectTimeout: {timeout}")))?;
        wait::until("the new timeout in the Envoy", TIMEOUT, || {
            (envoy.cluster(&web)?["connect_timeout"] == timeout.as_str()).then_some(())
        })?;
        times.push(started_at.elapsed());
    }
    let best = times.iter().min().ok_or("no edits")?;
    eprintln!("mesh: {times:?}");
    assert!(
        *best < wait::extended(LIMIT),
        "an edit of the mesh config took {times:?}"
    );

    let mut times = Vec::new();
    for edit in 0..EDITS {
        let gateway = format!("192.0.2.{}", edit + 1);
        let networks = format!(
            "networks:\n  away:\n    endpoints: [{{fromCidr: 10.{{n}}.3.0/24}}]\n    gateways: [{{address: {gateway}, port: 15443}}]\n"
        );
        let started_at = wait::now();
        tenant.set_config("meshNetworks", &tenant.fill(&networks))?;
        wait::until("the network's gateway in the Envoy", TIMEOUT, || {
            (envoy.endpoints(&web) == [format!("{gateway}:15443")]).then_some(())
        })?;
        times.push(started_at.elapsed());
    }
    let best = times.iter().min().ok_or("no edits")?;
    eprintln!("meshNetworks: {times:?}");
    assert!(*best < wait::extended(LIMIT), "an edit of the networks took {times:?}");
    tenant.set_config("meshNetworks", "networks: {}")?;
    wait::until("the direct endpoint", TIMEOUT, || {
        (envoy.endpoints(&web) == [tenant.fill("10.{n}.3.1:8080")]).then_some(())
    })?;
    envoy.rejected_nothing()?;
    Ok(())
}
