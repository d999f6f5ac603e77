//! R13: services reachable through a gateway with TLS passthrough by SNI.

use std::collections::BTreeSet;

use istiod::{
    generate::{Proxy, ResourceType, proxy::Extensions},
    model::Installation,
    proto::json,
};
use libtest_mimic::Failed;
use serde_json::json;

use super::fixture::Fixture;

/// A gateway for all local hosts, services that are and are not exported to it, and a service with one workload with
/// and one without mTLS.
const OBJECTS: &str = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: cross-network, namespace: istio-system}
spec:
  selector: {istio: eastwest}
  servers:
  - {port: {number: 15443, name: tls, protocol: TLS}, tls: {mode: AUTO_PASSTHROUGH}, hosts: ['*.local']}
---
apiVersion: v1
kind: Service
metadata: {name: eastwest, namespace: istio-system, annotations: {networking.istio.io/exportTo: '~'}}
spec: {clusterIP: 10.0.0.9, selector: {istio: eastwest}, ports: [{name: tls, port: 15443, targetPort: 15443}]}
---
apiVersion: v1
kind: Pod
metadata: {name: gw-0, namespace: istio-system, labels: {istio: eastwest}}
spec: {serviceAccountName: gw}
status: {phase: Running, podIP: 10.2.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Service
metadata: {name: private, namespace: foo, annotations: {networking.istio.io/exportTo: .}}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: outside, namespace: foo}
spec:
  hosts: [outside.local]
  location: MESH_EXTERNAL
  resolution: DNS
  ports: [{name: http, number: 80, protocol: HTTP}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: uncovered, namespace: foo}
spec:
  hosts: [uncovered.example.com]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{name: http, number: 80, protocol: HTTP}]
---
apiVersion: v1
kind: Pod
metadata: {name: plain-0, namespace: foo, labels: {app: httpbin}}
spec: {serviceAccountName: httpbin}
status: {phase: Running, podIP: 10.1.0.2, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: meshed-0, namespace: foo, labels: {app: httpbin, security.istio.io/tlsMode: istio}}
spec: {serviceAccountName: httpbin}
status: {phase: Running, podIP: 10.1.0.3, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: httpbin-1, namespace: foo, labels: {kubernetes.io/service-name: httpbin}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: tcp, port: 9090}]
endpoints:
- {addresses: [10.1.0.2], conditions: {ready: true}, targetRef: {kind: Pod, name: plain-0, namespace: foo}}
- {addresses: [10.1.0.3], conditions: {ready: true}, targetRef: {kind: Pod, name: meshed-0, namespace: foo}}
---
";

fn gateway() -> Proxy {
    let metadata = json!({
        "NAMESPACE": "istio-system", "CLUSTER_ID": "Kubernetes", "SERVICE_ACCOUNT": "gw", "ISTIO_VERSION": "1.30.3",
        "LABELS": {"istio": "eastwest"}, "INSTANCE_IPS": "10.2.0.1",
    });
    let metadata = serde_json::from_value(metadata).expect("the metadata is an object");
    let node = "router~10.2.0.1~gw-0.istio-system~istio-system.svc.cluster.local";
    Proxy::new(node, "", metadata, "".into(), Extensions::default()).expect("the node is valid")
}

/// The test of R13.
pub(super) fn r13_passthrough_reaches_only_exported_mtls_endpoints() -> Result<(), Failed> {
    let fixture = Fixture::of(Installation::default(), "{}", OBJECTS, gateway())?;
    let reached: BTreeSet<String> = [
        "outbound_.80_._.httpbin.foo.svc.cluster.local",
        "outbound_.90_._.httpbin.foo.svc.cluster.local",
        "outbound_.9000_._.my-custom-ext-authz.foo.svc.cluster.local",
    ]
    .map(str::to_owned)
    .into();
    let listener = fixture.listener("0.0.0.0_15443")?;
    let matches = listener
        .filter_chains
        .iter()
        .filter_map(|chain| chain.filter_chain_match.as_ref());
    let names: BTreeSet<String> = matches.clone().flat_map(|it| it.server_names.clone()).collect();
    if names != reached {
        return Err(format!("chains for {names:?}, expected {reached:?}").into());
    }
    // A client without the mesh's mTLS must match no chain.
    let is_mesh = |protocol: &String| protocol.starts_with("istio");
    if let Some(open) = matches.clone().find(|it| !it.application_protocols.iter().all(is_mesh)) {
        return Err(format!("chains without an ALPN match: {open:?}").into());
    }
    let mut clusters = fixture.names(ResourceType::Cluster);
    clusters.retain(|name| name.starts_with("outbound_."));
    if let Some(wrong) = clusters
        .iter()
        .find(|name| name.contains("private") || name.contains("outside"))
    {
        return Err(format!("unexpected cluster {wrong}").into());
    }
    let name = "outbound_.80_._.httpbin.foo.svc.cluster.local";
    let endpoints = fixture
        .resource(ResourceType::Endpoint, name)
        .ok_or("the cluster has no endpoints")?;
    let endpoints = json::any_to_json(&endpoints).to_string();
    if endpoints.contains("10.1.0.3") && !endpoints.contains("10.1.0.2") {
        Ok(())
    } else {
        Err(format!("expected only the endpoint with mTLS: {endpoints}").into())
    }
}
