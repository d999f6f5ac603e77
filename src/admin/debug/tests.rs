use serde_json::{Value, json};

use super::forms;
use crate::model::{Installation, fixture};

const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceExport
metadata: {name: a}
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {name: a}
spec: {ips: [240.0.0.1]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: east, namespace: istio-system, labels: {topology.istio.io/network: n2}}
spec:
  gatewayClassName: istio
  addresses: [{type: IPAddress, value: 1.2.3.4}]
  listeners: [{name: tls, port: 15443, protocol: TLS, tls: {mode: Passthrough}}]
";

#[test]
fn multi_cluster_services_are_listed() {
    let mut installation = Installation::default();
    installation.features.enable_mcs_service_discovery = true;
    installation.features.enable_mcs_host = true;
    let import = OBJECTS.split("---").nth(2).unwrap_or_default();
    let files = [("kube-c2.yaml", OBJECTS), ("kube.yaml", import)];
    let shown = forms::scope::mcs(&fixture::folder_world(installation, &files).snapshot());
    let want = json!([
        { "Cluster": "Kubernetes", "Name": "a", "Namespace": "default", "Exported": false, "Imported": true,
          "ClusterSetVIP": "240.0.0.1", "Discoverability": null },
        { "Cluster": "c2", "Name": "a", "Namespace": "default", "Exported": true, "Imported": true,
          "ClusterSetVIP": "240.0.0.1", "Discoverability": {
              "a.default.svc.cluster.local": "AlwaysDiscoverable",
              "a.default.svc.clusterset.local": "AlwaysDiscoverable" } },
    ]);
    assert_eq!(shown, want);
    let off = fixture::folder_world(Installation::default(), &files);
    assert_eq!(forms::scope::mcs(&off.snapshot()), Value::Null);
}

#[test]
fn network_gateways_are_listed() {
    let world = fixture::folder_world(Installation::default(), &[("kube-c2.yaml", OBJECTS)]);
    let want = json!([{ "Network": "n2", "Cluster": "c2", "Addr": "1.2.3.4", "Port": 15443, "HBONEPort": 0,
        "ServiceAccount": { "Namespace": "istio-system", "Name": "east" } }]);
    assert_eq!(forms::endpoint::networks(&world.snapshot()), want);
}
